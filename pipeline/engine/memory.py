"""Where the memory of a run is: the states of each model as they are held on this rank, and the peak of each phase.

Tensors share allocations (ZeRO keeps parameters as views of one buffer), so allocations are counted, each once.
"""

import time
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import torch

from pipeline.engine.state import MOMENTS, masters
from pipeline.files import GIB
from pipeline.partitions import is_partitioned, local_share

PHASES = ("generate", "score", "train")
# What a phase holds besides weights and optimizer.
BESIDES = {
    "generate": "cache, activations, logits",
    "score": "activations, logits",
    "train": "gradients, activations, logits",
}


@dataclass(frozen=True, slots=True)
class ModelMemory:
    """Bytes of a model on this rank: weights and buffers, gradients when a step begins, fp32 weights and moments.

    on_host: those of the weights and of the optimizer that are in host memory although the run has another device.
    away: those of the optimizer that wait in host memory while a rollout is sampled and scored.
    """

    weights: int
    gradients: int
    optimizer: int
    on_host: int
    away: int = 0


def storages(tensors: Iterable[torch.Tensor]) -> dict[int, torch.UntypedStorage]:
    """The allocations behind tensors, by address; empty ones are left out."""
    found = (tensor.untyped_storage() for tensor in tensors)
    return {storage.data_ptr(): storage for storage in found if storage.nbytes()}


def num_bytes(held: Mapping[int, torch.UntypedStorage]) -> int:
    """Bytes of allocations that `storages` gave."""
    return sum(storage.nbytes() for storage in held.values())


def weight_tensors(module: torch.nn.Module) -> Iterator[torch.Tensor]:
    """Parameters (with ZeRO-3 this rank's shards, and what is whole besides) and buffers."""
    for parameter in module.parameters():
        yield parameter.data
        if is_partitioned(parameter):
            yield local_share(parameter)
    yield from module.buffers()


def optimizer_tensors(engine: Any) -> Iterator[torch.Tensor]:
    """The fp32 weights that a TrainingEngine's AdamW updates on this rank, and their moments once a step was taken."""
    inner = getattr(engine.optimizer, "optimizer", engine.optimizer)
    for master in masters(engine):
        yield master.tensor.data
        state = inner.state.get(master.tensor, {})
        yield from (state[kind] for kind in MOMENTS if kind in state)


def gradient_tensors(engine: Any) -> Iterator[torch.Tensor]:
    """Gradients of a TrainingEngine between its last backward pass and its step, wherever DeepSpeed keeps them."""
    kept = [*engine.module.parameters(), *(master.tensor for master in masters(engine))]
    yield from (tensor.grad for tensor in kept if tensor.grad is not None)
    for group in getattr(engine.optimizer, "averaged_gradients", {}).values():
        yield from group or ()


def gradient_bytes(engine: Any) -> int:
    """Bytes of `gradient_tensors`: allocations, each once."""
    return num_bytes(storages(gradient_tensors(engine)))


def model_memory(engine: Any, device: torch.device) -> ModelMemory:
    """Of a TrainingEngine or a FrozenEngine; a trained one's gradients are those of its first step."""
    weights = storages(weight_tensors(engine.module))
    trained = hasattr(engine, "optimizer")
    # At stage 0 in fp32 the optimizer updates the weights themselves.
    states = storages(optimizer_tensors(engine)) if trained else {}
    states = {address: storage for address, storage in states.items() if address not in weights}
    on_host = {address: held for address, held in (weights | states).items() if held.device.type != device.type}
    return ModelMemory(
        weights=num_bytes(weights),
        gradients=engine.gradient_bytes if trained else 0,
        optimizer=num_bytes(states),
        on_host=num_bytes(on_host),
        away=sum(buffer.numel() for buffer in engine.host_buffers) if trained else 0,
    )


class Peaks:
    """Peak device memory by phase of a step: a phase lasts until the next one begins. On a CPU nothing is known."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._phase = ""
        self._peaks: dict[str, float] = {}

    def begin(self, phase: str) -> float:
        """`phase` (one of PHASES, or empty) begins; the time, in seconds of time.monotonic()."""
        if self._device.type == "cuda":
            peak = torch.cuda.max_memory_allocated(self._device) / GIB
            self._peaks[self._phase] = max(peak, self._peaks.get(self._phase, 0.0))
            torch.cuda.reset_peak_memory_stats(self._device)
        self._phase = phase
        return time.monotonic()

    def taken(self) -> dict[str, float]:
        """`memory/<phase>_gib` and `gpu_memory_gib` since the last call; the phase ends."""
        self.begin("")
        peaks, self._peaks = self._peaks, {}
        found = {f"memory/{phase}_gib": peaks[phase] for phase in PHASES if phase in peaks}
        return found | ({"gpu_memory_gib": max(peaks.values())} if peaks else {})


def memory_table(models: Mapping[str, ModelMemory], peaks: Mapping[str, float]) -> list[str]:
    """Lines for the log: the states of each model, and what each phase held besides them."""
    lines = [f"memory of this rank, GiB{'weights':>15}{'gradients':>12}{'optimizer':>12}{'on the host':>13}"]
    for name, held in models.items():
        numbers = (held.weights, held.gradients, held.optimizer)
        columns = "".join(f"{value / GIB:>12.3f}" for value in numbers)
        lines.append(f"  {name:<25}{columns}{held.on_host / GIB:>13.3f}")
    resident = sum(held.weights + held.optimizer - held.on_host for held in models.values())
    away = sum(held.away for held in models.values())
    for phase in PHASES:
        if (peak := peaks.get(f"memory/{phase}_gib")) is not None:
            there = (resident if phase == "train" else resident - away) / GIB
            rest = f"{peak - there:.3f} above weights and optimizer: {BESIDES[phase]}"
            lines.append(f"  peak of {phase:<17}{peak:>12.3f}  {rest}")
    if not peaks:
        lines.append("  peaks of the phases are known on a GPU only")
    return lines
