"""The turns of a generation: fill free slots, make some steps, look who has finished."""

from collections import deque
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import cache
from typing import Self

import torch
from torch import Tensor

from pipeline.dist import RankGroup
from pipeline.generation.rollouts import GenerationStopped
from pipeline.generation.slots import Arena, DecodeFunction
from pipeline.tensor_ops import pad_rows

# Decode steps between two looks at which rows have finished: a look waits for the device.
CHECK_EVERY = 16
# The same while responses wait for a slot: an empty slot costs then. Where prompts run beside steps a turn costs less.
CHECK_EVERY_WHILE_WAITING = 4
CHECK_EVERY_BESIDE = 2
# Few rows make a slow forward pass: it waits until this part of the slots is free, or nothing else is left. Beside
# decode steps it costs less.
SLOTS_WORTH_A_PASS = 1 / 8
SLOTS_WORTH_A_PASS_BESIDE = 1 / 16
# Prompt tokens of one forward pass: bounds the activations of a prefill.
PREFILL_TOKENS = 32_768
# Where the host works ahead of the device, looks while responses wait are of the turn before.
LOOKS_BEHIND = frozenset({"cuda"})


class Pace:
    """How ranks go through a rollout that wait for each other nowhere; `streaming.CommonPace` is the other way."""

    def most(self, *wanted: int) -> Sequence[int]:
        """The largest of each number over the ranks in step with this one."""
        return wanted

    def take_part(self) -> None:
        """Help with a pass over prompts that only other ranks have."""


def sent(values: Tensor, device: torch.device) -> Tensor:
    """`values` on the device. From memory that may be swapped out a copy waits for the steps that are handed out."""
    return values.pin_memory().to(device, non_blocking=True) if device.type == "cuda" else values.to(device)


@dataclass(slots=True)
class Look:
    """Which slots were active (M,) at one moment, on its way to the host; `filled`: those that were filled since."""

    active: Tensor
    arrived: torch.cuda.Event | None
    filled: set[int] = field(default_factory=set)

    @classmethod
    def begin(cls, active: Tensor, promised: Sequence[int]) -> Self:
        """Of (M,) flags as they are behind the work that has been handed out; `promised` slots are taken already."""
        if not active.is_cuda:
            return cls(active.clone(), None, set(promised))
        copy = torch.empty(active.shape, dtype=active.dtype, pin_memory=True).copy_(active, non_blocking=True)
        arrived = torch.cuda.Event()
        arrived.record()
        return cls(copy, arrived, set(promised))

    def free(self) -> list[int]:
        """Slots without a response, then and now. Waits for the copy."""
        if self.arrived is not None:
            self.arrived.synchronize()
        return [slot for slot, busy in enumerate(self.active.tolist()) if not busy and slot not in self.filled]


@cache
def second_stream(device: torch.device) -> torch.cuda.Stream:
    """One for the process: torch keeps memory, and cuBLAS a workspace, for each stream that was ever used."""
    return torch.cuda.Stream(device)


class SideStream:
    """Where prompts run beside decode steps: these wait for memory, those for arithmetic. On a CPU, one by one."""

    def __init__(self, device: torch.device) -> None:
        self._stream = second_stream(device) if device.type == "cuda" else None

    @contextmanager
    def opened(self) -> Iterator[None]:
        """What is handed out inside runs behind all work so far, and beside what comes next."""
        if self._stream is None:
            yield
            return
        self._stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(self._stream):
            yield

    def join(self) -> None:
        """Work from here on waits for what the stream was given."""
        if self._stream is not None:
            torch.cuda.current_stream().wait_stream(self._stream)


def side_stream(device: torch.device) -> SideStream | None:
    """Where the host works ahead of the device, so that prompts and steps can be there at once."""
    return SideStream(device) if device.type in LOOKS_BEHIND else None


@dataclass(frozen=True, slots=True)
class Passed:
    """R responses whose prompts have been run, before they sit.

    places, index (R,) int64: their slots, on the host and on the device. lengths (R,) int32: tokens of their prompts.
    rows (R,) int32: their numbers. logits (R, V).
    """

    places: list[int]
    index: Tensor
    lengths: Tensor
    rows: Tensor
    logits: Tensor


class Round:
    """One call of generate: who waits, who sits where."""

    def __init__(
        self,
        arena: Arena,
        prompts: list[Tensor],
        num_samples: int,
        *,
        model: DecodeFunction,
        group: RankGroup,
        pace: Pace,
        side: SideStream | None,
    ) -> None:
        self.arena, self.prompts, self.num_samples = arena, prompts, num_samples
        self.model, self.group, self.pace, self.side = model, group, pace, side
        self.waiting = deque(range(len(prompts) * num_samples))
        self.step = 0  # decode steps made
        self.last_step = 0  # when these are made, whatever sits in a slot has ended
        self.looks: deque[Look] = deque()
        self.passed: list[Passed] = []  # run beside the last steps; they sit before the next

    def run(self, should_stop: Callable[[], bool]) -> None:
        """Until every response has its EOS or its last token."""
        try:
            self._turns(should_stop)
        finally:
            if self.side is not None:
                self.side.join()

    def _turns(self, should_stop: Callable[[], bool]) -> None:
        free = list(range(self.arena.num_slots))
        while True:
            asked_to_stop = should_stop()
            self._seat_passed()
            side = self.side if self.last_step > self.step and len(free) < self.arena.num_slots else None
            part = SLOTS_WORTH_A_PASS if side is None else SLOTS_WORTH_A_PASS_BESIDE
            worth_it = len(free) >= min(part * self.arena.num_slots, len(self.waiting))
            fills = self._fills(free) if worth_it else []
            if fills and side is None:
                self._begin_responses()
            left = 0 if len(free) == self.arena.num_slots else self.last_step - self.step
            stop, passes, left, waiting = self.pace.most(asked_to_stop, len(fills), left, bool(self.waiting))
            if stop:
                raise GenerationStopped
            for taken, places in fills:
                self._fill(taken, places, side)
            for _ in range(passes - len(fills)):
                self.pace.take_part()
            if not left and not waiting:
                return
            more = bool(waiting or self.passed)
            waiting_turn = CHECK_EVERY_WHILE_WAITING if self.side is None else CHECK_EVERY_BESIDE
            steps = min(left, waiting_turn if more else CHECK_EVERY)
            self.arena.advance(steps)
            self.step += steps
            free = self._free(behind=more)

    def _free(self, *, behind: bool) -> list[int]:
        """The free slots, as far as the host can know without letting the device run dry.

        behind: as they were a turn ago, so that the next prompts are prepared while the device still has steps to make.
        """
        promised = [place for passed in self.passed for place in passed.places]
        if self.step >= self.last_step:
            self.looks.clear()
            return [slot for slot in range(self.arena.num_slots) if slot not in promised]
        # Of all ranks of the group: they must make the same steps, whatever the last bits of their logits.
        self.looks.append(Look.begin(self.group.largest(self.arena.slots.active), promised))
        kept = 2 if behind and self.model.device.type in LOOKS_BEHIND else 1
        while len(self.looks) > kept:
            self.looks.popleft()
        return self.looks[0].free() if len(self.looks) == kept else []

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

    def _begin_responses(self) -> None:
        """Some responses begin here: when has the last of them ended?"""
        self.last_step = self.step + self.arena.job.sampling.max_new_tokens - 1

    def _fill(self, taken: list[int], places: list[int], side: SideStream | None) -> None:
        """Run the prompts of responses: at once, and let them sit; or on `side`, beside the next steps."""
        for look in self.looks:
            look.filled.update(places)
        if side is None:
            self._seat(self._run_prompts(taken, places))
            return
        with side.opened():
            self.passed.append(self._run_prompts(taken, places))

    def _run_prompts(self, taken: list[int], places: list[int]) -> Passed:
        device = self.model.device
        unique = self._unique(taken)
        number = {prompt: index for index, prompt in enumerate(unique)}
        found = [self.prompts[prompt] for prompt in unique]
        source = torch.tensor([number[row // self.num_samples] for row in taken])
        lengths = torch.tensor([len(prompt) for prompt in found])
        on_host = (pad_rows(found, self.arena.pad_id), lengths, source, torch.tensor(places), torch.tensor(taken))
        ids, lengths, source, index, rows = (sent(values, device) for values in on_host)
        logits = self.model.prompt(ids, lengths, self.arena.cache, slots=index, source=source)
        return Passed(places, index, lengths[source].to(torch.int32), rows.to(torch.int32), logits[source])

    def _seat_passed(self) -> None:
        """Let those sit whose prompts ran beside the last steps."""
        if self.passed and self.side is not None:
            self.side.join()
            self._begin_responses()
            for passed in self.passed:
                self._seat(passed)
            self.passed.clear()

    def _seat(self, passed: Passed) -> None:
        """Draw the first tokens of responses, which go on with the next step."""
        slots, index = self.arena.slots, passed.index
        slots.lengths[index] = passed.lengths
        slots.row[index] = passed.rows
        slots.place[index] = 0
        slots.active[index] = 1
        self.arena.draw(passed.logits, index)
