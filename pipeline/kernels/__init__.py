"""Triton kernels of training, scoring and generation, and the torch functions that replace them without a GPU.

The package imports no other package of the project. Its modules with kernels are imported on first use, because triton
is installed only with torch for GPUs.
"""
