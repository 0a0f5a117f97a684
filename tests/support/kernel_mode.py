"""Triton's interpreter is switched on where there is no CUDA device; to be imported before transformers.

Triton reads the variable when its own library is imported, which transformers' models do by way of torch._dynamo.
"""

import os

import torch

if not torch.cuda.is_available():
    os.environ.setdefault("TRITON_INTERPRET", "1")
