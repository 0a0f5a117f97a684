"""Triton kernels of training, scoring and generation, and the torch functions that replace them without a GPU.

Imports no other package of the project. Modules with kernels are imported on first use: triton is installed only where
torch is built for GPUs.
"""
