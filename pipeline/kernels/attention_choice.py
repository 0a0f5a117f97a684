"""The choice between cuDNN's attention kernel, which is the fastest, and flash attention, for training and scoring.

cuDNN spends 0.1 s on an execution plan for each new shape, and micro-batches of real lengths have dozens of shapes. A
shape that recurs is worth the plan; until then flash attention is used, which needs none.

The first plan of all on a machine also compiles cuDNN's kernels: 1.2 s in the forward pass and 1.7 s in the backward
pass, measured on an H100 with GRPO of Qwen2.5-1.5B, 128 rows of 512 + 512 tokens, whose third step took 7.9 s for 5.0.
CUDA keeps what was compiled, so in the next run on that machine the same step took 5.2 s.
"""

from collections import Counter

import torch

# A plan costs about as much as this many forward and backward passes gain by it: 0.11 s once against 4 % of a step, on
# an H200 (benchmarks/reports/experiments.md, "Stage 3 on one GPU").
PASSES_BEFORE_CUDNN = 16

_passes: Counter[tuple[int, int, int, bool]] = Counter()


def disable_cudnn_attention() -> None:
    """Switch cuDNN's attention off for a pass whose shape may not recur, as prefills have: the plan would not pay."""
    if torch.cuda.is_available():
        torch.backends.cuda.enable_cudnn_sdp(False)


def choose_attention_kernel(model: object, rows: int, width: int) -> None:
    """Choose the attention kernel for a forward pass of `model` over `rows` x `width` tokens, until the next call.

    A backward pass that recomputes the forward pass therefore uses the same kernel.
    """
    if not torch.cuda.is_available():
        return
    if torch.are_deterministic_algorithms_enabled():
        # A resumed run has counted other shapes, and must give the same bits.
        disable_cudnn_attention()
        return
    shape = (id(model), rows, width, torch.is_grad_enabled())
    _passes[shape] += 1
    torch.backends.cuda.enable_cudnn_sdp(_passes[shape] > PASSES_BEFORE_CUDNN)
