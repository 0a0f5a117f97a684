"""Gradients that DeepSpeed has reduced over the ranks: waiting for them, their norm, and the step of several models."""

import math
from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from pipeline import dist

if TYPE_CHECKING:
    from pipeline.engine.engine import TrainingEngine


def wait_on_device(optimizer: Any) -> None:
    """Where DeepSpeed's host waits for reduced gradients after a backward pass, let the device's queue wait instead.

    The host then hands out the next model's kernels meanwhile; small ones take longer to hand out than to run.
    """
    stream = getattr(optimizer, "reduce_and_partition_stream", None)  # of stage 3
    if stream is not None and torch.cuda.is_available():
        stream.synchronize = lambda: torch.cuda.current_stream().wait_stream(stream)
    stages_1_2 = hasattr(optimizer, "reduction_stream") and optimizer.contiguous_gradients
    if not stages_1_2 or not optimizer.overlap_comm or optimizer.cpu_offload:
        return
    epilogue = optimizer.independent_gradient_partition_epilogue

    def without_waiting() -> None:
        optimizer.reduce_ipg_grads()
        torch.cuda.current_stream().wait_stream(optimizer.reduction_stream)
        optimizer.overlap_comm = False  # what is left to reduce is nothing, and what is left to wait for
        try:
            epilogue()
        finally:
            optimizer.overlap_comm = True

    optimizer.independent_gradient_partition_epilogue = without_waiting


def global_norm(partition: Iterable[Tensor]) -> Tensor:
    """(1,) fp32 L2 norm over all ranks' gradients, of which each rank holds a part; -1 where any is not finite.

    DeepSpeed's own takes a kernel and a copy for every parameter.
    """
    norms = torch.stack(torch._foreach_norm(list(partition), dtype=torch.float32))
    total = dist.sum_over_ranks(norms.double().square().sum()).sqrt().float()
    return torch.where(total.isfinite(), total, -1.0).reshape(1)


def step_together(engines: "Sequence[TrainingEngine]", rate_factor: float, *, loss: Tensor | float) -> bool:
    """Step all engines, or none: where a loss or any gradient of any rank is not finite, all gradients are dropped.

    Every rank decides alike: gradient norms are global, and the ranks' losses are looked at together. Each engine keeps
    its norm as `last_gradient_norm`. A collective.

    Args:
        loss: this rank's, of any shape; or a number that is the sum over all ranks already.
    """
    for engine in engines:
        engine.set_rate(rate_factor)  # also where the step is dropped: it is what is logged
        engine.last_gradient_norm = engine.gradient_norm()
    if isinstance(loss, Tensor):
        loss = dist.sum_over_ranks((loss * 0.0).sum()).item()  # NaN where any of them is not finite
    if not math.isfinite(loss) or not all(math.isfinite(engine.last_gradient_norm) for engine in engines):
        for engine in engines:
            engine.discard()
        return False
    for engine in engines:
        engine.step(rate_factor)
    return True
