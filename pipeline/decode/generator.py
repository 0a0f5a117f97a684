"""Generation in slots: prompts fill them, one replayed CUDA graph moves all of them on, free ones are filled again.

R responses in all (prompts x samples), M slots, T new tokens at most. A response takes a slot until its EOS; the next
one waiting then takes over, so that work follows real lengths. Which slot a response sits in changes none of its random
numbers.
"""

from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import torch
from torch import Tensor

from pipeline.decode.room import affordable_slots, checked_slots
from pipeline.decode.sampling import Slots, Written, draw_tokens, padded_eos
from pipeline.dist import RankGroup
from pipeline.generate import GenerationStopped, Prompt, RandomKey, Rollout, Sampling, rollout_uniforms
from pipeline.tensor_ops import pad_rows

# Decode steps between two looks at which rows have finished: a look waits for the device.
CHECK_EVERY = 16
# The same while responses wait for a slot: an empty slot costs then.
CHECK_EVERY_WHILE_WAITING = 4
# Prompt tokens of one forward pass: bounds the activations of a prefill.
PREFILL_TOKENS = 32_768
# Rows of the cache are a multiple of this long, so that a slightly longer prompt finds room.
ROOM_UNIT = 64


class DecodeFunction(Protocol):
    """The model as generation sees it; `step.DecodeModel` and `own_forward.OwnForward` are such."""

    @property
    def device(self) -> torch.device: ...
    @property
    def bytes_per_token(self) -> int: ...
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


class Arena:
    """Buffers of a job and the graph over them; kept while jobs of the same shape follow each other."""

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
        return self.job == job and self.room >= room and self.addresses == self._model.addresses()

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


class Pace:
    """How ranks go through a rollout that wait for each other nowhere; `streaming.CommonPace` is the other way."""

    def most(self, *wanted: int) -> Sequence[int]:
        """The largest of each number over the ranks in step with this one."""
        return wanted

    def take_part(self) -> None:
        """Help with a pass over prompts that only other ranks have."""


class Generator:
    """Samples with a decode function; owns the arena. The ranks of `group` run the same rows side by side.

    positions: room of a row of the cache from the start; longer sequences make it longer. pace: with which ranks it
    makes its passes, though each has rows of its own; None: with none.
    """

    def __init__(
        self,
        model: DecodeFunction,
        *,
        eos_ids: frozenset[int],
        pad_id: int,
        group: RankGroup,
        positions: int = 0,
        pace: Pace | None = None,
    ) -> None:
        self.model, self.pad_id, self.group, self.positions = model, pad_id, group, positions
        self.pace = pace or Pace()
        self._eos = padded_eos(eos_ids, model.device)
        self._arena: Arena | None = None

    @torch.no_grad()
    def generate(
        self,
        prompts: Sequence[Prompt],
        *,
        num_samples: int,
        num_slots: int,
        sampling: Sampling,
        key: RandomKey,
        should_stop: Callable[[], bool] = lambda: False,
    ) -> Rollout:
        """Sample `num_samples` responses to each prompt, `num_slots` of them at a time.

        Raises:
            GenerationStopped: `should_stop` answered True, on any rank of the group or in step with this one.
        """
        device = self.model.device
        prompt_ids = torch.tensor([prompt.prompt_id for prompt in prompts], dtype=torch.int64, device=device)
        prompt_ids = prompt_ids.repeat_interleave(num_samples)
        sample_index = torch.arange(len(prompt_ids), device=device) % num_samples
        rows = [torch.as_tensor(prompt.ids, dtype=torch.int64) for prompt in prompts]
        job = Job(min(num_slots, len(prompt_ids)), len(prompt_ids), sampling)
        arena = self._arena_for(job, max(self.positions, max(map(len, rows)) + sampling.max_new_tokens))
        arena.clear()
        arena.uniforms.copy_(rollout_uniforms(key, prompt_ids, sample_index, sampling.max_new_tokens))
        Round(self, arena, rows, num_samples).run(lambda: self.group.any(should_stop(), device))
        self.group.check_same(arena.written.tokens)
        # One copy of what the next call writes over, in place of one a row.
        tokens, log_probs = arena.written.tokens.clone(), arena.written.log_probs.clone()
        lengths = arena.written.lengths.tolist()
        on_device = torch.cat(rows).to(device).split([len(row) for row in rows])
        return Rollout(
            prompts=[row for row in on_device for _ in range(num_samples)],
            responses=[row[:length] for row, length in zip(tokens, lengths, strict=True)],
            log_probs=[row[:length] for row, length in zip(log_probs, lengths, strict=True)],
            finished=arena.written.finished.bool(),
            prompt_ids=prompt_ids,
            sample_index=sample_index,
        )

    def _arena_for(self, job: Job, positions: int) -> Arena:
        stale = self._arena is None or not self._arena.fits(job, positions)
        # Making one is passes over the layers: ranks in step make theirs together.
        if any(self.pace.most(stale)) or self._arena is None:
            self._arena = None  # first, so that the old cache makes room for the new
            room = -(-positions // ROOM_UNIT) * ROOM_UNIT
            found = self.group.least(affordable_slots(self.model, job.num_slots, room), self.model.device)
            slots = checked_slots(0 if any(self.pace.most(found == 0)) else found, self.model, room)
            self._arena = Arena(self.model, job, (slots, room), eos=self._eos, pad_id=self.pad_id)
        return self._arena


class Round:
    """One call of generate: who waits, who sits where."""

    def __init__(self, generator: Generator, arena: Arena, prompts: list[Tensor], num_samples: int) -> None:
        self.model, self.group, self.pace = generator.model, generator.group, generator.pace
        self.arena, self.prompts, self.num_samples = arena, prompts, num_samples
        self.waiting = deque(range(arena.job.num_rows))

    def run(self, should_stop: Callable[[], bool]) -> None:
        """Until every response has its EOS or its last token."""
        free = list(range(self.arena.num_slots))
        while True:
            asked_to_stop = should_stop()
            # Few rows make a slow forward pass: wait until an eighth of the slots is free, or nothing else is left.
            worth_it = 8 * len(free) >= self.arena.num_slots or len(free) >= len(self.waiting)
            fills = self._fills(free) if worth_it else []
            stop, passes, busy, waiting = self.pace.most(
                asked_to_stop, len(fills), len(free) < self.arena.num_slots, bool(self.waiting)
            )
            if stop:
                raise GenerationStopped
            for taken, places in fills:
                self._prefill(taken, places)
            for _ in range(passes - len(fills)):
                self.pace.take_part()
            if not busy:
                return
            self.arena.advance(CHECK_EVERY_WHILE_WAITING if waiting else CHECK_EVERY)
            # Of all ranks of the group: they must make the same steps, whatever the last bits of their logits.
            active = self.group.largest(self.arena.slots.active)
            free = [slot for slot, busy in enumerate(active.tolist()) if not busy]

    def _fills(self, free: list[int]) -> list[tuple[list[int], list[int]]]:
        """Give free slots to waiting responses: (responses, their slots) of each pass over prompts."""
        fills = []
        while free and self.waiting:
            taken: list[int] = []
            prompts: set[int] = set()
            width = 0
            while self.waiting and len(taken) < len(free):
                prompt = self.waiting[0] // self.num_samples
                width = max(width, len(self.prompts[prompt]))
                if taken and width * len(prompts | {prompt}) > PREFILL_TOKENS:
                    break
                prompts.add(prompt)
                taken.append(self.waiting.popleft())
            fills.append((taken, [free.pop(0) for _ in taken]))
        return fills

    def _unique(self, taken: list[int]) -> list[int]:
        """The prompts of responses, each once, in order."""
        return list(dict.fromkeys(row // self.num_samples for row in taken))

    def _prefill(self, taken: list[int], places: list[int]) -> None:
        """Run the prompts of responses and draw their first tokens."""
        device, slots = self.model.device, self.arena.slots
        unique = self._unique(taken)
        number = {prompt: index for index, prompt in enumerate(unique)}
        found = [self.prompts[prompt] for prompt in unique]
        lengths = torch.tensor([len(prompt) for prompt in found])
        source = torch.tensor([number[row // self.num_samples] for row in taken])
        index = torch.tensor(places, device=device)
        slots.lengths[index] = lengths[source].to(device, torch.int32)
        slots.row[index] = torch.tensor(taken, dtype=torch.int32, device=device)
        slots.place[index] = 0
        slots.active[index] = 1
        ids = pad_rows(found, self.arena.pad_id).to(device)
        source = source.to(device)
        logits = self.model.prompt(ids, lengths.to(device), self.arena.cache, slots=index, source=source)
        self.arena.draw(logits[source], index)
