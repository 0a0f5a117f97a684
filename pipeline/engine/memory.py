"""Memory of a run: bytes of each model's states on this rank, and the peak of each phase of a step.

Tensors share allocations (under ZeRO, parameters are views of one buffer), so each allocation is counted once.
"""

import time
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass

import torch

from pipeline.cache_memory import limit_memory
from pipeline.device import bytes_of_cuda, stored_constants
from pipeline.engine.engine import FrozenEngine, TrainingEngine
from pipeline.engine.state import masters
from pipeline.files import GIB
from pipeline.models.partitions import local_share
from pipeline.run.run import Run

# Phases of a step, and what each uses besides weights and optimizer.
PHASES = {
    "generate": "cache, activations, logits",
    "score": "activations, logits",
    "train": "gradients, activations, logits",
}
RESERVED = "gpu_reserved_gib"


@dataclass(frozen=True, slots=True)
class ModelMemory:
    """Bytes of a model on this rank.

    weights: bytes of weights and buffers.
    gradients: bytes of gradients when a step begins.
    optimizer: bytes of fp32 weights and moments.
    on_host: bytes of weights and optimizer in host memory, if the run's device is a GPU.
    offloaded: bytes of the optimizer moved to host memory while a rollout is sampled and scored.
    """

    weights: int
    gradients: int
    optimizer: int
    on_host: int
    offloaded: int = 0


def keep_to_limit(run: Run) -> None:
    """Limit this process to `--gpu-memory-gib` of its GPU, if given; do nothing on a CPU. Raises EnvironmentFault."""
    gib, world = run.resolved.config.run.gpu_memory_gib, run.world
    if gib and world.device.type == "cuda":
        limit_memory(gib, world.device, outside=bytes_of_cuda(stored_constants(), world.size)[0])


def storages(tensors: Iterable[torch.Tensor]) -> dict[int, torch.UntypedStorage]:
    """Return the allocations of tensors by their addresses, without empty ones."""
    allocations = (tensor.untyped_storage() for tensor in tensors)
    return {storage.data_ptr(): storage for storage in allocations if storage.nbytes()}


def num_bytes(allocations: Mapping[int, torch.UntypedStorage]) -> int:
    """Return the bytes of allocations that `storages` returned."""
    return sum(storage.nbytes() for storage in allocations.values())


def weight_tensors(module: torch.nn.Module) -> Iterator[torch.Tensor]:
    """Yield parameters (under ZeRO-3 this rank's shards, and gathered values) and buffers."""
    for parameter in module.parameters():
        yield parameter.data
        yield local_share(parameter)
        if hasattr(parameter, "quant_state"):  # nf4
            state = parameter.quant_state
            yield from (part.absmax for part in (state, state.state2) if part is not None)
    yield from module.buffers()


def optimizer_tensors(engine: TrainingEngine) -> Iterator[torch.Tensor]:
    """Yield the fp32 weights that an engine's AdamW updates on this rank, and their moments after the first step."""
    inner = getattr(engine.optimizer, "optimizer", engine.optimizer)
    for master, _ in masters(engine):
        yield master.data
        yield from (value for value in inner.state.get(master, {}).values() if torch.is_tensor(value) and value.dim())


def gradient_bytes(engine: TrainingEngine) -> int:
    """Return the bytes of an engine's gradients on this rank, between its last backward pass and its step."""
    owners = [*engine.module.parameters(), *(master for master, _ in masters(engine))]
    gradients = [tensor.grad for tensor in owners if tensor.grad is not None]
    for group in getattr(engine.optimizer, "averaged_gradients", {}).values():
        gradients += group or ()
    return num_bytes(storages(gradients))


def model_memory(engine: TrainingEngine | FrozenEngine, device: torch.device) -> ModelMemory:
    """Return the bytes of a TrainingEngine or a FrozenEngine; gradients are those of the first step."""
    weights = storages(weight_tensors(engine.module))
    # At stage 0 in fp32 the optimizer updates the model's weights themselves.
    states = storages(optimizer_tensors(engine)) if isinstance(engine, TrainingEngine) else {}
    states = {address: storage for address, storage in states.items() if address not in weights}
    on_host = {address: one for address, one in (weights | states).items() if one.device.type != device.type}
    return ModelMemory(
        weights=num_bytes(weights),
        gradients=engine.gradient_bytes if isinstance(engine, TrainingEngine) else 0,
        optimizer=num_bytes(states),
        on_host=num_bytes(on_host),
        offloaded=sum(buffer.numel() for buffer in engine.host_buffers) if isinstance(engine, TrainingEngine) else 0,
    )


class Peaks:
    """Peak device memory by phase of a step: a phase lasts until the next one begins. Empty on a CPU."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._phase = ""
        self._peaks: dict[str, float] = {}

    def begin(self, phase: str) -> float:
        """Begin `phase` (one of PHASES, or empty); return the time, in seconds of time.monotonic()."""
        if self._device.type == "cuda":
            allocated, reserved = torch.cuda.max_memory_allocated, torch.cuda.max_memory_reserved
            for name, peak in ((self._phase, allocated), (RESERVED, reserved)):
                self._peaks[name] = max(peak(self._device) / GIB, self._peaks.get(name, 0.0))
            torch.cuda.reset_peak_memory_stats(self._device)
        self._phase = phase
        return time.monotonic()

    def taken(self) -> dict[str, float]:
        """End the phase; return `memory/<phase>_gib`, `gpu_memory_gib` and `gpu_reserved_gib` since the last call."""
        self.begin("")
        peaks, self._peaks = self._peaks, {}
        by_phase = {f"memory/{phase}_gib": peaks[phase] for phase in PHASES if phase in peaks}
        if RESERVED in peaks:
            by_phase[RESERVED] = peaks.pop(RESERVED)
        return by_phase | ({"gpu_memory_gib": max(peaks.values())} if peaks else {})


def memory_table(models: Mapping[str, ModelMemory], peaks: Mapping[str, float]) -> list[str]:
    """Return lines for the log: the states of each model, and what each phase used besides them."""
    lines = [f"memory of this rank, GiB{'weights':>15}{'gradients':>12}{'optimizer':>12}{'on the host':>13}"]
    for name, memory in models.items():
        columns = "".join(f"{value / GIB:>12.3f}" for value in (memory.weights, memory.gradients, memory.optimizer))
        lines.append(f"  {name:<25}{columns}{memory.on_host / GIB:>13.3f}")
    resident = sum(memory.weights + memory.optimizer - memory.on_host for memory in models.values())
    offloaded = sum(memory.offloaded for memory in models.values())
    for phase in PHASES:
        if (peak := peaks.get(f"memory/{phase}_gib")) is not None:
            states = (resident if phase == "train" else resident - offloaded) / GIB
            rest = f"{peak - states:.3f} above weights and optimizer: {PHASES[phase]}"
            lines.append(f"  peak of {phase:<17}{peak:>12.3f}  {rest}")
    return lines
