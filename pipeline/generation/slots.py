"""The model as generation sees it, and the buffers of a generation with the CUDA graph over them."""

from dataclasses import dataclass
from typing import Any, Protocol

import torch
from torch import Tensor

from pipeline.generation.eager import Sampling
from pipeline.generation.slot_sampling import Slots, Written, draw_tokens


class DecodeFunction(Protocol):
    """The model as generation sees it; `step.DecodeModel` and `own_forward.OwnForward` are such."""

    @property
    def device(self) -> torch.device: ...
    @property
    def bytes_per_token(self) -> int: ...
    @property
    def leaves_free_rows(self) -> bool: ...
    def prepare(self, positions: int) -> None: ...
    def new_cache(self, rows: int, positions: int) -> Any: ...
    def prompt(self, ids: Tensor, lengths: Tensor, cache: Any, *, slots: Tensor, source: Tensor) -> Tensor: ...
    def step(self, tokens: Tensor, lengths: Tensor, active: Tensor, cache: Any) -> Tensor: ...
    def addresses(self) -> tuple[int, ...]: ...


@dataclass(frozen=True, slots=True)
class Job:
    """What buffers and graph are made for; `num_slots` as wanted, memory may allow fewer."""

    num_slots: int
    num_rows: int
    sampling: Sampling

    def holds(self, other: "Job") -> bool:
        """Whether what was made for this one serves the other too."""
        enough = self.num_slots >= other.num_slots and self.num_rows >= other.num_rows
        return enough and self.sampling == other.sampling

    def joined(self, other: "Job") -> "Job":
        """A job that holds both, where they sample alike; else the other one."""
        if self.sampling != other.sampling:
            return other
        rows = max(self.num_rows, other.num_rows)
        return Job(max(self.num_slots, other.num_slots), rows, self.sampling)


class Arena:
    """Buffers of a job and the graph over them; kept for all jobs that they hold."""

    def __init__(self, model: DecodeFunction, job: Job, size: tuple[int, int], *, eos: Tensor, pad_id: int) -> None:
        device = model.device
        self.job, self.eos, self.pad_id, self._model = job, eos, pad_id, model
        self.num_slots, self.room = size
        model.prepare(self.room)
        self.cache = model.new_cache(self.num_slots, self.room)
        self.slots = Slots.empty(self.num_slots, device)
        shape = (job.num_rows, job.sampling.max_new_tokens)
        self.written = Written.empty(shape, pad_id=pad_id, device=device)
        self.uniforms = torch.zeros(shape, dtype=torch.float64, device=device)
        self._everywhere = torch.arange(self.num_slots, device=device)
        self.addresses = model.addresses()
        self._graph = self._captured() if device.type == "cuda" else None

    def fits(self, job: Job, room: int) -> bool:
        return self.job.holds(job) and self.room >= room and self.addresses == self._model.addresses()

    def clear(self) -> None:
        """Nothing drawn, all slots free."""
        self.slots.active.zero_()
        self.written.tokens.fill_(self.pad_id)
        for counts in (self.written.log_probs, self.written.lengths, self.written.finished):
            counts.zero_()

    def draw(self, logits: Tensor, index: Tensor) -> None:
        draw_tokens(
            logits, index, self.slots, self.written, uniforms=self.uniforms, eos=self.eos, sampling=self.job.sampling
        )

    def advance(self, steps: int) -> None:
        """`steps` decode steps of all active rows."""
        for _ in range(steps):
            if self._graph is None:
                self._step()
            else:
                self._graph.replay()

    def _step(self) -> None:
        slots = self.slots
        logits = self._model.step(slots.tokens, slots.lengths, slots.active, self.cache)
        slots.lengths.add_(slots.active)
        self.draw(logits, self._everywhere)

    def _captured(self) -> torch.cuda.CUDAGraph:
        """One step as a graph. It is tried first on a side stream, with no row active: nothing is written."""
        self._step()  # here, so that a cache that is made at its first use belongs to this stream
        side = torch.cuda.Stream()
        side.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(side):
            self._step()
        torch.cuda.current_stream().wait_stream(side)
        graph = torch.cuda.CUDAGraph()
        # Other threads may prepare data meanwhile: what they ask of the device does not belong to the capture.
        with torch.cuda.graph(graph, capture_error_mode="thread_local"):
            self._step()
        return graph
