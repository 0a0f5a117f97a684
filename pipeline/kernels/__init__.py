"""Triton kernels, and the torch functions that stand in for them where there is no GPU."""
