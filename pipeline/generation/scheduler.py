"""Continuous batching: waiting requests are assigned to free slots, prefilled, and decoded until all have ended.

The generator creates one for each session. The host decides here what is enqueued and when it waits for the device.
Buffers, draws and the CUDA graph are in slots.py. A slot has the keys and values of the request that ended in it until
another starts there, so that the next turn of a conversation prefills only the tokens that the slot lacks.
"""

import logging
import sys
from collections import deque
from collections.abc import Sequence
from dataclasses import astuple, dataclass
from itertools import islice

import torch
from torch import Tensor

from pipeline.generation import device_work
from pipeline.generation.device_work import FinishedSlotsPoll, HostCopy, Lockstep, SideStream, to_device
from pipeline.generation.forwards.kv_cache import Rest
from pipeline.generation.prefills import PrefilledBatch, batches_of
from pipeline.generation.rollouts import GenerationStopped, Truncation
from pipeline.generation.session import Capacity, Finished, Request, Session, Tokens, new_events
from pipeline.generation.slots import GenerationBuffers, slot_settings
from pipeline.tensor_ops import pad_rows

# Decode steps between two polls of finished slots when no response waits for a slot. A poll makes the host wait for
# the device; without it, steps are decoded after the last response has ended. Chosen by hand.
POLL_INTERVAL = 16
# Decode steps between two polls while responses wait for a slot; a longer interval would leave slots empty. Measured on
# an H200: a token takes 52.4 us with 4 and 51.9 us with 2 (benchmarks/reports/decode.md, "Continuous batching").
POLL_INTERVAL_WHILE_WAITING = 4
# The same, if prefills overlap decode steps and a scheduler iteration costs less. Measured on an H200: a token takes
# 51.0 us with 2 (ibid.).
POLL_INTERVAL_OVERLAPPED = 2
# Minimum prefill batch, as a share of the slots. Prefills of few prompts are slow; waiting for more leaves slots empty.
# Measured on an H200 as 8 of 64 slots (ibid.).
MIN_PREFILL_SHARE = 1 / 8
# Minimum prefill batch where prefills overlap decode steps, measured as 4 of 64 slots (ibid.).
MIN_PREFILL_SHARE_OVERLAPPED = 1 / 16
# Largest number of decode steps between two polls while the host reads tokens (of a response that streams or has stop
# texts). A stream gets this many tokens at a time. Chosen by hand.
POLL_INTERVAL_WATCHED = 4
# Most tokens of prompts that start together while a response streams, unless one prompt has more: its next tokens wait
# for them.
MAX_PREFILL_TOKENS_WHILE_STREAMING = 8192

log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class EndedResponses:
    """Responses that have ended, copied from their N slots, which are free for others.

    requests: the requests.
    written: (N, T) int64, tokens.
    log_probs: (N, T) fp32.
    counts: on their way to the host, (2, N): tokens of each response, and whether the last one is an end.
    """

    requests: list[Request]
    written: Tensor
    log_probs: Tensor
    counts: HostCopy


class ContinuousBatching(Session):
    """A session on slots: requests that wait get the slots of responses that have ended.

    buffers: KV cache, state of the slots and CUDA graph.
    forward: the forward passes of the model.
    group: the ranks that compute each pass together.
    lockstep: agreement with ranks whose passes are collectives.
    stream: side stream of prefills that overlap decode steps; None: none does.
    running: slot -> its request, of responses that the host does not know to have ended.
    contents: slot -> the last request that started in it, whose tokens a later prompt may begin with.
    free: slots without a response, as far as the host knows.
    num_steps: decode steps enqueued so far.
    final_step: the value of `num_steps` at which every response that has a slot now has ended.
    polls: copies of the active flags on their way to the host, oldest first.
    watched: copies of the tokens that the host reads on their way there, oldest first: their requests, tokens (N, T),
        log-probabilities (N, T) and numbers of tokens (N,).
    prefilled: prefills that overlapped the last decode steps; their responses start before the next steps.
    offsets: busy slot -> its tokens in the KV cache less `num_steps`, which is constant while it decodes.
    ended: responses that have ended and are on their way to the host.
    """

    def __init__(
        self, buffers: GenerationBuffers, capacity: Capacity, *, lockstep: Lockstep, stream: SideStream | None
    ) -> None:
        super().__init__(capacity, buffers.vocabulary, buffers.forward.device)
        buffers.slots.active.zero_()  # an abandoned session may have left slots active
        self.buffers, self.forward, self.group = buffers, buffers.forward, buffers.forward.group
        self.lockstep, self.stream = lockstep, stream
        self.running: dict[int, Request] = {}
        self.contents: dict[int, Request] = {}
        self.free = list(range(buffers.num_slots))
        self.num_steps = self.final_step = 0
        self.polls: deque[FinishedSlotsPoll] = deque()
        self.watched: deque[tuple[list[Request], list[HostCopy]]] = deque()
        self.prefilled: list[PrefilledBatch] = []
        self.offsets: dict[int, int] = {}
        self.ended: list[EndedResponses] = []

    @property
    def is_deferred(self) -> bool:
        """True if the device runs asynchronously to the host."""
        return self.device.type in device_work.DEFERRED_POLL_DEVICES

    def any_rank(self, flag: bool) -> bool:
        """Return True if `flag` is on any rank in lockstep; see `Session`."""
        return bool(self.lockstep.largest(flag)[0])

    @torch.no_grad()
    def advance(self, *, stop: bool = False) -> list[Tokens | Finished]:
        """Fill free slots, decode one or more steps, and return new events; see `Session`."""
        try:
            return self._iterate(self.group.any(stop, self.device))
        finally:
            if self.stream is not None:
                self.stream.synchronize()

    def _iterate(self, stop_requested: bool) -> list[Tokens | Finished]:
        self._start_prefilled()
        self._free_withdrawn()
        # A prompt may be longer than the cache: one behind earlier turns, or of a session without a longest prompt.
        self._grow_cache(max((len(one.prompt.ids) + 1 for one in islice(self.waiting, len(self.free))), default=0))
        num_slots, free = self.buffers.num_slots, self.free
        stream = self.stream if self.final_step > self.num_steps and len(free) < num_slots else None
        min_share = MIN_PREFILL_SHARE if stream is None else MIN_PREFILL_SHARE_OVERLAPPED
        enough = len(free) >= min(min_share * num_slots, len(self.waiting))
        batches = self._assign_slots(free) if enough else []
        starting = [request for requests, _ in batches for request in requests]
        if stream is None:
            self._set_final_step(starting)
        steps_left = 0 if len(free) == num_slots else self.final_step - self.num_steps
        truncation = Truncation.of(request.sampling for request in starting)
        is_watched = any(request.is_watched for request in (*self.running.values(), *starting))
        stop, num_prefills, steps_left, waiting, watched, largest_k, has_nucleus = self.lockstep.largest(
            stop_requested, len(batches), steps_left, bool(self.waiting), is_watched, *astuple(truncation)
        )
        if stop:
            raise GenerationStopped
        self.buffers.truncate(Truncation(largest_k, bool(has_nucleus)))
        for requests, slots in batches:
            self._prefill(requests, slots, stream)
        for _ in range(num_prefills - len(batches)):
            self.lockstep.join_prefill()
        self.is_idle = not steps_left and not waiting
        if self.is_idle:
            self._copy_ended(list(self.running))
            self.free = list(range(num_slots))
            return self._results()
        more = bool(waiting or self.prefilled)
        steps = min(steps_left, self._poll_interval(more=more, watched=bool(watched)))
        self._grow_cache(self.num_steps + steps + max(self.offsets.values(), default=0))
        self.buffers.decode(steps)
        self.num_steps += steps
        events = self._results() + self._watch()
        self.free = self._poll_free_slots(deferred=self.is_deferred and (more or bool(watched)))
        for slot in self.free:
            self.offsets.pop(slot, None)
        self._copy_ended([slot for slot in self.free if slot in self.running])
        return events

    def _poll_interval(self, *, more: bool, watched: bool) -> int:
        while_waiting = POLL_INTERVAL_WHILE_WAITING if self.stream is None else POLL_INTERVAL_OVERLAPPED
        interval = while_waiting if more else POLL_INTERVAL
        return min(interval, POLL_INTERVAL_WATCHED) if watched else interval

    # --- what has ended ---

    def _copy_ended(self, slots: list[int]) -> None:
        """Enqueue copies of the responses in these slots, which have ended; other responses may start in them."""
        if not slots:
            return
        index, state = to_device(torch.tensor(slots), self.device), self.buffers.slots
        counts = HostCopy(torch.stack([state.position[index], state.ended[index]]))
        requests = [self.running.pop(slot) for slot in slots]
        self.ended.append(EndedResponses(requests, state.written[index], state.log_probs[index], counts))

    def _results(self) -> list[Tokens | Finished]:
        """Wait for the copies of responses that have ended, and report them."""
        events: list[Tokens | Finished] = []
        for batch in self.ended:
            lengths, ends = batch.counts.tolist()
            for n, request in enumerate(batch.requests):
                ids, log_probs = batch.written[n, : lengths[n]], batch.log_probs[n, : lengths[n]]
                events += new_events(request, ids, log_probs, "end" if ends[n] else "limit", self.vocabulary)
        self.ended.clear()
        return events

    def _watch(self) -> list[Tokens | Finished]:
        """Report new tokens of running responses that stream, and end those that contain a stop text. Waits.

        If deferred, they are those that there were before the last decode steps.
        """
        slots = {request: slot for slot, request in self.running.items() if request.is_watched}
        if slots:
            index, state = to_device(torch.tensor([*slots.values()]), self.device), self.buffers.slots
            copies = [HostCopy(values[index]) for values in (state.written, state.log_probs, state.position)]
            self.watched.append(([*slots], copies))
        events: list[Tokens | Finished] = []
        while len(self.watched) > (1 if slots and self.is_deferred else 0):
            requests, copies = self.watched.popleft()
            written, log_probs, counts = (copy.wait() for copy in copies)
            for n, (request, count) in enumerate(zip(requests, counts.tolist(), strict=True)):
                if request not in slots:
                    continue  # it has ended since
                new = new_events(request, written[n, :count], log_probs[n, :count], None, self.vocabulary)
                events += new
                if new and isinstance(new[-1], Finished):
                    slot = slots.pop(request)
                    del self.running[slot]
                    self.buffers.slots.active[slot] = 0  # a poll finds the slot free
        return events

    def _free_withdrawn(self) -> None:
        """Make the slots of withdrawn requests inactive; a poll finds them free."""
        for slot, request in list(self.running.items()):
            if request.is_withdrawn:
                del self.running[slot]
                self.buffers.slots.active[slot] = 0

    def _grow_cache(self, length: int) -> None:
        """Make the KV cache long enough for `length` tokens of each slot."""
        if length <= self.buffers.cache_length or self.buffers.cache_length == self.buffers.capacity.max_length:
            return
        if self.stream is not None:
            self.stream.synchronize()
        cache_length, num_slots = self.buffers.length_to_grow_to(length), self.buffers.num_slots
        fitting = self.buffers.slots_that_fit(cache_length)
        self.buffers.grow(cache_length, range(num_slots) if fitting >= num_slots else self._evict(fitting))

    def _evict(self, num_slots: int) -> list[int]:
        """Return the slots to keep: those with the most tokens. Responses of other slots go to the front of the queue.

        They restart from their prompts and get the same tokens, since their random numbers are the same.
        """
        active = self.group.largest(self.buffers.slots.active).tolist()
        tokens = [self.offsets[slot] if is_active else -sys.maxsize for slot, is_active in enumerate(active)]
        order = sorted(range(len(active)), key=tokens.__getitem__, reverse=True)
        slots_kept, lost = order[:num_slots], order[num_slots:]
        evicted = [self.running[slot] for slot in lost if active[slot] and slot in self.running]
        evicted += [request for batch in self.prefilled for request in batch.requests]
        log.info(
            "generation: memory for %d slots, not %d, as responses grew; %d responses start again",
            num_slots,
            len(active),
            len(evicted),
        )
        self._copy_ended([slot for slot in self.running if not active[slot]])
        self.waiting.extendleft(sorted(evicted, key=lambda request: request.number, reverse=True))
        self.prefilled.clear()
        self.polls.clear()
        self.offsets = {slot: self.offsets[old] for slot, old in enumerate(slots_kept) if active[old]}
        self.running = {slot: self.running[old] for slot, old in enumerate(slots_kept) if old in self.running}
        self.free = [slot for slot, old in enumerate(slots_kept) if not active[old]]
        self.contents = dict(self.running)
        return slots_kept

    def _poll_free_slots(self, *, deferred: bool) -> list[int]:
        """Return the slots that are known to be free: by the previous poll if `deferred`."""
        assigned = [slot for batch in self.prefilled for slot in batch.slots]
        if self.num_steps >= self.final_step:
            self.polls.clear()
            return [slot for slot in range(self.buffers.num_slots) if slot not in assigned]
        # The maximum over the group: its ranks must decode the same steps even if their logits differ in the last bits.
        active = HostCopy(self.group.largest(self.buffers.slots.active))
        self.polls.append(FinishedSlotsPoll(active, set(assigned)))
        num_polls = 2 if deferred else 1
        while len(self.polls) > num_polls:
            self.polls.popleft()
        return self.polls[0].free_slots() if len(self.polls) == num_polls else []

    # --- what starts ---

    def _assign_slots(self, free: list[int]) -> list[tuple[list[Request], list[int]]]:
        """Assign free slots to waiting requests; return (requests, their slots) for each prefill.

        A request that can continue a free slot gets it. Others get slots whose tokens the host has not read, so that
        none can continue them, then those of the oldest requests.
        """
        starting, slots = self._next_waiting(len(free)), dict[Request, int]()
        for request in starting:
            request.start, slot = self._find_tokens(request, free)
            if request.start:
                slots[request] = slot
                free.remove(slot)
        ages = {slot: last.number for slot, last in self.contents.items() if last.seen}
        free.sort(key=lambda slot: ages.get(slot, -1))
        whole = [request for request in starting if not request.start]
        batches = [*batches_of(whole), *batches_of(slots)]
        return [(batch, [slots[request] if request.start else free.pop(0) for request in batch]) for batch in batches]

    def _next_waiting(self, num_free: int) -> list[Request]:
        """Remove and return the requests that start now: those that have slots and keep no stream waiting for long."""
        streams = any(request.streams for request in self.running.values())
        room = MAX_PREFILL_TOKENS_WHILE_STREAMING if streams else sys.maxsize
        starting = list[Request]()
        while self.waiting and len(starting) < num_free:
            prompt = self.waiting[0].prompt
            if not starting or prompt is not starting[-1].prompt:  # samples share the prefill of their prompt
                room -= len(prompt.ids)
                if starting and room < 0:
                    break
            starting.append(self.waiting.popleft())
        return starting

    def _find_tokens(self, request: Request, free: Sequence[int]) -> tuple[int, int]:
        """Return how many first tokens of a prompt a free slot has, and the slot; (0, -1) without one."""
        shared = [
            (last.num_shared(request.prompt.ids), slot)
            for slot in free
            if (last := self.contents.get(slot)) and (request.streams or last is request.after)
        ]
        return max(shared, default=(0, -1))

    def _set_final_step(self, requests: Sequence[Request]) -> None:
        """Raise `final_step` for requests that start now; the prefill draws the first token of each."""
        limits = [request.sampling.max_new_tokens for request in requests]
        self.final_step = max(self.final_step, self.num_steps + max(limits, default=1) - 1)

    def _prefill(self, requests: list[Request], slots: list[int], stream: SideStream | None) -> None:
        """Prefill prompts and start responses; or on `stream`, overlapped, to start after the next decode steps."""
        for poll in self.polls:
            poll.assigned.update(slots)
        if stream is None:
            self._start(self._run_prefill(requests, slots))
            return
        with stream.enqueuing():
            self.prefilled.append(self._run_prefill(requests, slots))

    def _run_prefill(self, requests: list[Request], slots: list[int]) -> PrefilledBatch:
        first = {request.row: request for request in requests}
        row_of = {key: row for row, key in enumerate(first)}
        rows = [torch.as_tensor(one.prompt.ids[one.start :], dtype=torch.int64) for one in first.values()]
        settings, numbers = slot_settings(requests)
        on_host = (
            pad_rows(rows, self.vocabulary.pad_id),
            torch.tensor([len(row) for row in rows]),
            torch.tensor([one.start for one in first.values()]),
            torch.tensor([row_of[request.row] for request in requests]),
            torch.tensor(slots),
            settings,
            numbers,
        )
        ids, lengths, starts, source, index, settings, numbers = (to_device(one, self.device) for one in on_host)
        rows_of: Tensor | Rest = source
        if requests[0].start:
            length = max(len(request.prompt.ids) for request in requests) + 1
            positions = starts[:, None] + torch.arange(ids.shape[1], device=self.device)
            rows_of = Rest(positions.clamp(max=length - 1), length)
        logits = self.forward.prefill(ids, lengths, self.buffers.cache, slots=index, source=rows_of)
        lengths = (starts + lengths)[source].int()
        return PrefilledBatch(requests, slots, index, lengths, settings, numbers, logits, source)

    def _start_prefilled(self) -> None:
        """Start the responses whose prefill overlapped the last decode steps."""
        if self.prefilled and self.stream is not None:
            self.stream.synchronize()
            self._set_final_step([request for batch in self.prefilled for request in batch.requests])
            for batch in self.prefilled:
                self._start(batch)
            self.prefilled.clear()

    def _start(self, batch: PrefilledBatch) -> None:
        """Draw the first tokens of responses and activate their slots for the next decode step."""
        self.buffers.slots.start(batch.slot_index, batch.lengths, batch.settings, batch.numbers)
        offsets = (len(request.prompt.ids) - self.num_steps for request in batch.requests)
        self.offsets.update(zip(batch.slots, offsets, strict=True))
        self.running.update(zip(batch.slots, batch.requests, strict=True))
        self.contents.update(zip(batch.slots, batch.requests, strict=True))
        self.buffers.draw(batch.logits, batch.source, batch.slot_index)
