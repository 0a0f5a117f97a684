"""The turns of a generation: fill free slots, make some steps, look who has finished."""

from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Self

import torch
from torch import Tensor

from pipeline.decode.arena import Arena
from pipeline.generate import GenerationStopped
from pipeline.tensor_ops import pad_rows

if TYPE_CHECKING:
    from pipeline.decode.generator import Generator

# Decode steps between two looks at which rows have finished: a look waits for the device.
CHECK_EVERY = 16
# The same while responses wait for a slot: an empty slot costs then.
CHECK_EVERY_WHILE_WAITING = 4
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
    def begin(cls, active: Tensor) -> Self:
        """Of (M,) flags as they are behind the work that has been handed out."""
        if not active.is_cuda:
            return cls(active.clone(), None)
        copy = torch.empty(active.shape, dtype=active.dtype, pin_memory=True).copy_(active, non_blocking=True)
        arrived = torch.cuda.Event()
        arrived.record()
        return cls(copy, arrived)

    def free(self) -> list[int]:
        """Slots without a response, then and now. Waits for the copy."""
        if self.arrived is not None:
            self.arrived.synchronize()
        return [slot for slot, busy in enumerate(self.active.tolist()) if not busy and slot not in self.filled]


class Round:
    """One call of generate: who waits, who sits where."""

    def __init__(self, generator: "Generator", arena: Arena, prompts: list[Tensor], num_samples: int) -> None:
        self.model, self.group, self.pace = generator.model, generator.group, generator.pace
        self.arena, self.prompts, self.num_samples = arena, prompts, num_samples
        self.waiting = deque(range(len(prompts) * num_samples))
        self.step = 0  # decode steps made
        self.last_step = 0  # when these are made, whatever sits in a slot has ended
        self.looks: deque[Look] = deque()

    def run(self, should_stop: Callable[[], bool]) -> None:
        """Until every response has its EOS or its last token."""
        free = list(range(self.arena.num_slots))
        while True:
            asked_to_stop = should_stop()
            # Few rows make a slow forward pass: wait until an eighth of the slots is free, or nothing else is left.
            worth_it = 8 * len(free) >= self.arena.num_slots or len(free) >= len(self.waiting)
            fills = self._fills(free) if worth_it else []
            if fills:
                self.last_step = self.step + self.arena.job.sampling.max_new_tokens - 1
            left = 0 if len(free) == self.arena.num_slots else self.last_step - self.step
            stop, passes, left, waiting = self.pace.most(asked_to_stop, len(fills), left, bool(self.waiting))
            if stop:
                raise GenerationStopped
            for taken, places in fills:
                self._prefill(taken, places)
            for _ in range(passes - len(fills)):
                self.pace.take_part()
            if not left and not waiting:
                return
            steps = min(left, CHECK_EVERY_WHILE_WAITING if waiting else CHECK_EVERY)
            self.arena.advance(steps)
            self.step += steps
            free = self._free(behind=bool(waiting))

    def _free(self, *, behind: bool) -> list[int]:
        """The free slots, as far as the host can know without letting the device run dry.

        behind: as they were a turn ago, so that the next prompts are prepared while the device still has steps to make.
        """
        if self.step >= self.last_step:
            self.looks.clear()
            return list(range(self.arena.num_slots))
        # Of all ranks of the group: they must make the same steps, whatever the last bits of their logits.
        self.looks.append(Look.begin(self.group.largest(self.arena.slots.active)))
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

    def _prefill(self, taken: list[int], places: list[int]) -> None:
        """Run the prompts of responses and draw their first tokens."""
        device, slots = self.model.device, self.arena.slots
        for look in self.looks:
            look.filled.update(places)
        unique = self._unique(taken)
        number = {prompt: index for index, prompt in enumerate(unique)}
        found = [self.prompts[prompt] for prompt in unique]
        source = torch.tensor([number[row // self.num_samples] for row in taken])
        lengths = torch.tensor([len(prompt) for prompt in found])
        on_host = (pad_rows(found, self.arena.pad_id), lengths, source, torch.tensor(places), torch.tensor(taken))
        ids, lengths, source, index, rows = (sent(values, device) for values in on_host)
        slots.lengths[index] = lengths[source].to(torch.int32)
        slots.row[index] = rows.to(torch.int32)
        slots.place[index] = 0
        slots.active[index] = 1
        logits = self.model.prompt(ids, lengths, self.arena.cache, slots=index, source=source)
        self.arena.draw(logits[source], index)
