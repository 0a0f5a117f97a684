"""Which attention kernel a batch shape gets: cuDNN's is the fastest, but plans for 0.1 s at each shape it has not seen.

Micro-batches of real lengths have dozens of shapes. One that comes again and again is worth the plan; until then flash
attention serves, which needs none.
"""

from collections import Counter

import torch

# A plan costs as much as about this many passes gain by it.
PASSES_BEFORE_A_PLAN = 16

_passes: Counter[tuple[int, int, int, bool]] = Counter()


def avoid_plans() -> None:
    """Before a forward pass that is short of attention and has a shape of its own, as passes over prompts are."""
    if torch.cuda.is_available():
        torch.backends.cuda.enable_cudnn_sdp(False)


def choose_attention_kernel(model: object, rows: int, width: int) -> None:
    """Before a forward pass of `model` over `rows` x `width` tokens; holds until the next call.

    So a backward pass that recomputes the forward one finds the same kernel.
    """
    if not torch.cuda.is_available():
        return
    if torch.are_deterministic_algorithms_enabled():
        # A run that is resumed has seen other shapes, and must come to the same bits.
        avoid_plans()
        return
    shape = (id(model), rows, width, torch.is_grad_enabled())
    _passes[shape] += 1
    torch.backends.cuda.enable_cudnn_sdp(_passes[shape] > PASSES_BEFORE_A_PLAN)
