"""The choice between cuDNN's attention kernel, which is the fastest, and flash attention, for training and scoring.

cuDNN spends 0.1 s on an execution plan for each new shape, and micro-batches of real lengths have dozens of shapes. A
shape gets a plan only after it has recurred; until then the pass uses flash attention, which needs no plan.

The first plan on a machine also compiles cuDNN's kernels: 1.2 s in the forward pass and 1.7 s in the backward pass.
These were measured on an H100 with GRPO of Qwen2.5-1.5B, 128 rows of 512 + 512 tokens: the third step took 7.9 s
instead of 5.0 s. CUDA caches the compiled kernels on disk, so the same step of the next run took 5.2 s.
"""

from collections import Counter

import torch

# Passes of one shape before cuDNN is used: a plan costs 0.11 s once and saves 4 % of a step, measured on an H200
# (benchmarks/reports/experiments.md, "Stage 3 on one GPU").
PASSES_BEFORE_CUDNN = 16

_passes: Counter[tuple[int, int, int, bool]] = Counter()


def disable_cudnn_attention() -> None:
    """Switch cuDNN's attention off for a pass whose shape may not recur, such as a prefill: a plan would cost more."""
    if torch.cuda.is_available():
        torch.backends.cuda.enable_cudnn_sdp(False)


def choose_attention_kernel(model: object, rows: int, width: int) -> None:
    """Choose the attention kernel for a forward pass of `model` over `rows` x `width` tokens.

    The choice holds until the next call, so a backward pass that recomputes the forward pass uses the same kernel.
    """
    if not torch.cuda.is_available():
        return
    if torch.are_deterministic_algorithms_enabled():
        # A resumed run has other counts of passes, but must compute the same bits.
        disable_cudnn_attention()
        return
    shape = (id(model), rows, width, torch.is_grad_enabled())
    _passes[shape] += 1
    torch.backends.cuda.enable_cudnn_sdp(_passes[shape] > PASSES_BEFORE_CUDNN)
