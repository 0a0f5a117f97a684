"""Continuous batching: waiting responses are assigned to free slots, prefilled, and decoded until all have ended.

For the generator. The host decides here what is enqueued and when it waits for the device; buffers, draws and the CUDA
graph are in slots.py.
"""

import logging
import sys
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Self

import torch
from torch import Tensor

from pipeline.dist import RankGroup
from pipeline.generation.options import MAX_PREFILL_TOKENS
from pipeline.generation.rollouts import GenerationStopped
from pipeline.generation.slots import GenerationBuffers, second_stream
from pipeline.tensor_ops import pad_rows

# Decode steps between two polls of finished slots, when no response waits for a slot. A poll makes the host wait for
# the device; without it, steps are decoded after the last response has ended. Chosen by hand.
POLL_INTERVAL = 16
# The same while responses wait for a slot: a longer interval leaves slots empty. On an H200 a token takes 52.4 us with
# 4 and 51.9 us with 2 (docs/experiments.md, "Continuous batching").
POLL_INTERVAL_WHILE_WAITING = 4
# The same where prefills overlap decode steps, and a scheduler iteration costs less: 51.0 us a token with 2 (ibid.).
POLL_INTERVAL_OVERLAPPED = 2
# Minimum prefill batch, as a share of the slots: a prefill of few prompts is slow, waiting for more leaves slots empty.
# Measured as 8 of 64 slots (ibid.).
MIN_PREFILL_SHARE = 1 / 8
# The same where prefills overlap decode steps, measured as 4 of 64 slots (ibid.).
MIN_PREFILL_SHARE_OVERLAPPED = 1 / 16
# Devices that run behind the host: while responses wait, a poll is read one scheduler iteration after it was made, so
# that the next prefill is prepared while decode steps still run.
DEFERRED_POLL_DEVICES = frozenset({"cuda"})

log = logging.getLogger(__name__)


class Lockstep:
    """Agreement of ranks on their forward passes; this one is for ranks whose passes need no other rank.

    `streaming.StreamingLockstep` is for ranks that gather weights in each forward pass.
    """

    def largest(self, *values: int) -> Sequence[int]:
        """Return the largest of each value over the ranks in lockstep. A collective of these ranks."""
        return values

    def join_prefill(self) -> None:
        """Take part in the collectives of a prefill that only other ranks have prompts for."""


def to_device(values: Tensor, device: torch.device) -> Tensor:
    """Return a copy on the device. Its memory is pinned on the way: a pageable copy waits for all enqueued work."""
    return values.pin_memory().to(device, non_blocking=True) if device.type == "cuda" else values.to(device)


@dataclass(slots=True)
class FinishedSlotsPoll:
    """An asynchronous copy of the active flags (M,) to the host; `assigned`: slots that got a response since."""

    active: Tensor
    copied: torch.cuda.Event | None
    assigned: set[int] = field(default_factory=set)

    @classmethod
    def start(cls, active: Tensor, assigned: Sequence[int]) -> Self:
        """Enqueue a copy of (M,) flags behind all work so far; `assigned` slots are taken already."""
        if not active.is_cuda:
            return cls(active.clone(), None, set(assigned))
        copy = torch.empty(active.shape, dtype=active.dtype, pin_memory=True).copy_(active, non_blocking=True)
        copied = torch.cuda.Event()
        copied.record()
        return cls(copy, copied, set(assigned))

    def free_slots(self) -> list[int]:
        """Wait for the copy, and return the slots that were free then and have not been assigned since."""
        if self.copied is not None:
            self.copied.synchronize()
        return [slot for slot, busy in enumerate(self.active.tolist()) if not busy and slot not in self.assigned]


class SideStream:
    """A second CUDA stream, for work that overlaps that of the current one; on a CPU everything runs in order."""

    def __init__(self, device: torch.device) -> None:
        self._stream = second_stream(device) if device.type == "cuda" else None

    @contextmanager
    def enqueuing(self) -> Iterator[None]:
        """Enqueue the work inside on the side stream, behind all work of the current stream so far."""
        if self._stream is None:
            yield
            return
        self._stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(self._stream):
            yield

    def synchronize(self) -> None:
        """Let later work of the current stream wait for the side stream."""
        if self._stream is not None:
            torch.cuda.current_stream().wait_stream(self._stream)


def overlapped_prefill_stream(device: torch.device) -> SideStream | None:
    """Return a stream on which prefills overlap decode steps, where the host runs ahead of the device; else None."""
    # Prefills are bound by arithmetic, decode steps by memory.
    return SideStream(device) if device.type in DEFERRED_POLL_DEVICES else None


@dataclass(frozen=True, slots=True)
class PrefilledBatch:
    """N responses whose prompts have been prefilled, before their first token is drawn.

    slots: slot of each response, on the host.
    slot_index: (N,) int64, the same on the device.
    prompt_lengths: tokens of each prompt, on the host.
    lengths: (N,) int32, the same on the device.
    responses: (N,) int32, number of each response.
    logits: (P, V), logits of the P prompts' last tokens.
    source: (N,) int64, row of `logits` of each response.
    """

    slots: list[int]
    slot_index: Tensor
    prompt_lengths: list[int]
    lengths: Tensor
    responses: Tensor
    logits: Tensor
    source: Tensor


class ContinuousBatching:
    """The scheduler of one call of `generate`: response r is sample r % num_samples of prompt r // num_samples."""

    def __init__(
        self,
        buffers: GenerationBuffers,
        prompts: list[Tensor],
        num_samples: int,
        *,
        group: RankGroup,
        lockstep: Lockstep,
        stream: SideStream | None,
    ) -> None:
        self.buffers, self.prompts, self.num_samples = buffers, prompts, num_samples
        self.forward, self.group, self.lockstep, self.stream = buffers.forward, group, lockstep, stream
        self.waiting = deque(range(len(prompts) * num_samples))
        self.num_steps = 0  # decode steps enqueued
        self.final_step = 0  # after so many steps all responses that have a slot now have ended
        self.polls: deque[FinishedSlotsPoll] = deque()
        self.prefilled: list[PrefilledBatch] = []  # overlapped with the last steps; they start before the next
        self.offsets: dict[int, int] = {}  # of each busy slot: its tokens now, less `num_steps`

    def run(self, should_stop: Callable[[], bool]) -> None:
        """Decode until every response has its EOS or its last token.

        Raises:
            GenerationStopped: `should_stop` answered True, here or on a rank in lockstep.
        """
        try:
            self._schedule(should_stop)
        finally:
            if self.stream is not None:
                self.stream.synchronize()

    def _schedule(self, should_stop: Callable[[], bool]) -> None:
        free = list(range(self.buffers.num_slots))
        while True:
            num_slots = self.buffers.num_slots
            stop_requested = should_stop()
            self._start_prefilled()
            stream = self.stream if self.final_step > self.num_steps and len(free) < num_slots else None
            min_share = MIN_PREFILL_SHARE if stream is None else MIN_PREFILL_SHARE_OVERLAPPED
            enough = len(free) >= min(min_share * num_slots, len(self.waiting))
            batches = self._assign_slots(free) if enough else []
            if batches and stream is None:
                self._set_final_step()
            steps_left = 0 if len(free) == num_slots else self.final_step - self.num_steps
            stop, num_prefills, steps_left, waiting = self.lockstep.largest(
                stop_requested, len(batches), steps_left, bool(self.waiting)
            )
            if stop:
                raise GenerationStopped
            for responses, slots in batches:
                self._prefill(responses, slots, stream)
            for _ in range(num_prefills - len(batches)):
                self.lockstep.join_prefill()
            if not steps_left and not waiting:
                return
            more = bool(waiting or self.prefilled)
            interval_while_waiting = POLL_INTERVAL_WHILE_WAITING if self.stream is None else POLL_INTERVAL_OVERLAPPED
            steps = min(steps_left, interval_while_waiting if more else POLL_INTERVAL)
            self._grow_cache(steps)
            self.buffers.decode(steps)
            self.num_steps += steps
            free = self._poll_free_slots(deferred=more)
            for slot in free:
                self.offsets.pop(slot, None)

    def _grow_cache(self, steps: int) -> None:
        """Make the KV cache long enough for `steps` more tokens of each slot that the host does not know to be free."""
        length = self.num_steps + steps + max(self.offsets.values(), default=0)
        if length <= self.buffers.cache_length or self.buffers.cache_length == self.buffers.max_length:
            return
        if self.stream is not None:
            self.stream.synchronize()
        cache_length, num_slots = self.buffers.length_to_grow_to(length), self.buffers.num_slots
        fitting = self.buffers.slots_that_fit(cache_length)
        self.buffers.grow(cache_length, range(num_slots) if fitting >= num_slots else self._evict(fitting))

    def _evict(self, num_slots: int) -> list[int]:
        """Return the slots to keep, those with most tokens; the responses of the others wait again, before all others.

        They start anew from their prompts, and get the same tokens from the same random numbers.
        """
        slots = self.buffers.slots
        active, response = self.group.largest(slots.active).tolist(), slots.response.tolist()
        tokens = [self.offsets[slot] if is_active else -sys.maxsize for slot, is_active in enumerate(active)]
        order = sorted(range(len(active)), key=tokens.__getitem__, reverse=True)
        kept, lost = order[:num_slots], order[num_slots:]
        evicted = [response[slot] for slot in lost if active[slot]]
        evicted += [number for batch in self.prefilled for number in batch.responses.tolist()]
        log.info(
            "generation: memory for %d slots, not %d, as responses grew; %d responses start again",
            num_slots,
            len(active),
            len(evicted),
        )
        self.waiting.extendleft(sorted(evicted, reverse=True))
        self.prefilled.clear()
        self.polls.clear()
        self.offsets = {slot: self.offsets[old] for slot, old in enumerate(kept) if active[old]}
        return kept

    def _poll_free_slots(self, *, deferred: bool) -> list[int]:
        """Return the slots known to be free, by the previous poll if `deferred` and on a GPU."""
        assigned = [slot for batch in self.prefilled for slot in batch.slots]
        if self.num_steps >= self.final_step:
            self.polls.clear()
            return [slot for slot in range(self.buffers.num_slots) if slot not in assigned]
        # Over all ranks of the group: they must decode the same steps, whatever the last bits of their logits.
        self.polls.append(FinishedSlotsPoll.start(self.group.largest(self.buffers.slots.active), assigned))
        kept = 2 if deferred and self.forward.device.type in DEFERRED_POLL_DEVICES else 1
        while len(self.polls) > kept:
            self.polls.popleft()
        return self.polls[0].free_slots() if len(self.polls) == kept else []

    def _assign_slots(self, free: list[int]) -> list[tuple[list[int], list[int]]]:
        """Give free slots to waiting responses; return (responses, their slots) of each prefill."""
        batches = []
        while free and self.waiting:
            responses: list[int] = []
            prompts: set[int] = set()
            width = 0
            while self.waiting and len(responses) < len(free):
                prompt = self.waiting[0] // self.num_samples
                width = max(width, len(self.prompts[prompt]))
                if responses and width * len(prompts | {prompt}) > MAX_PREFILL_TOKENS:
                    break
                prompts.add(prompt)
                responses.append(self.waiting.popleft())
            batches.append((responses, [free.pop(0) for _ in responses]))
        return batches

    def _set_final_step(self) -> None:
        """Set when the responses that start now will have ended; their first token needs no decode step."""
        self.final_step = self.num_steps + self.buffers.request.sampling.max_new_tokens - 1

    def _prefill(self, responses: list[int], slots: list[int], stream: SideStream | None) -> None:
        """Prefill responses and start them; or on `stream`, overlapped, to be started after the next decode steps."""
        for poll in self.polls:
            poll.assigned.update(slots)
        if stream is None:
            self._start(self._run_prefill(responses, slots))
            return
        with stream.enqueuing():
            self.prefilled.append(self._run_prefill(responses, slots))

    def _run_prefill(self, responses: list[int], slots: list[int]) -> PrefilledBatch:
        device = self.forward.device
        unique = list(dict.fromkeys(response // self.num_samples for response in responses))
        row_of = {prompt: row for row, prompt in enumerate(unique)}
        prompts = [self.prompts[prompt] for prompt in unique]
        on_host = (
            pad_rows(prompts, self.buffers.pad_id),
            torch.tensor([len(prompt) for prompt in prompts]),
            torch.tensor([row_of[response // self.num_samples] for response in responses]),
            torch.tensor(slots),
            torch.tensor(responses),
        )
        ids, lengths, source, slot_index, numbers = (to_device(values, device) for values in on_host)
        logits = self.forward.prefill(ids, lengths, self.buffers.cache, slots=slot_index, source=source)
        return PrefilledBatch(
            slots, slot_index, [len(self.prompts[response // self.num_samples]) for response in responses],
            lengths[source].to(torch.int32), numbers.to(torch.int32), logits, source,
        )  # fmt: skip

    def _start_prefilled(self) -> None:
        """Start the responses whose prefill overlapped the last decode steps."""
        if self.prefilled and self.stream is not None:
            self.stream.synchronize()
            self._set_final_step()
            for batch in self.prefilled:
                self._start(batch)
            self.prefilled.clear()

    def _start(self, batch: PrefilledBatch) -> None:
        """Draw the first tokens of responses and activate their slots for the next decode step."""
        slots, index = self.buffers.slots, batch.slot_index
        slots.lengths[index] = batch.lengths
        slots.response[index] = batch.responses
        slots.position[index] = 0
        slots.active[index] = 1
        self.offsets.update(zip(batch.slots, (length - self.num_steps for length in batch.prompt_lengths), strict=True))
        self.buffers.draw(batch.logits, batch.source, index)
