"""Learning rates as a function of the step alone, so that a resumed run needs no scheduler state."""

from collections.abc import Callable

import torch
from transformers import get_scheduler


def rate_factor(name: str, *, num_warmup_steps: int, num_training_steps: int, floor: float) -> Callable[[int], float]:
    """Step (0 is the first) -> share of the peak learning rate, never below `floor` after the warm-up.

    The shapes are transformers' own schedulers; they are asked for their factor, not stepped.
    """
    optimizer = torch.optim.SGD([torch.zeros(1)], lr=1.0)
    warmup = min(num_warmup_steps, num_training_steps)
    scheduler = get_scheduler(name, optimizer, num_warmup_steps=warmup, num_training_steps=num_training_steps)
    shape = scheduler.lr_lambdas[0]

    def factor(step: int) -> float:
        # Warm-up counts from 1: a first step at rate 0 would be a step lost.
        if step < warmup:
            return (step + 1) / (warmup + 1)
        return floor + (1.0 - floor) * float(shape(step))

    return factor
