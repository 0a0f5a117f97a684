"""Generation in slots: prompts fill them, one replayed CUDA graph moves all of them on, free ones are filled again.

R responses in all (prompts x samples), M slots, T new tokens at most. A response takes a slot until its EOS; the next
one waiting then takes over, so that work follows real lengths. Which slot a response sits in changes none of its random
numbers.
"""

from collections.abc import Callable, Sequence

import torch

from pipeline.dist import RankGroup
from pipeline.generation.backends import affordable_slots, checked_slots
from pipeline.generation.rollouts import Prompt, RandomKey, Rollout, Sampling, rollout_uniforms
from pipeline.generation.scheduler import Pace, Round, side_stream
from pipeline.generation.slots import Arena, DecodeFunction, Job, padded_eos
from pipeline.tensor_ops import round_up

# Rows of the cache are a multiple of this long, so that a slightly longer prompt finds room.
ROOM_UNIT = 64


class Generator:
    """Samples with a decode function; owns the arena. The ranks of `group` run the same rows side by side.

    positions, slots: room of a row of the cache, and rows of it, from the start; longer sequences and larger calls make
    more. So smaller calls find what larger ones left, and the same bits whichever came first. pace: with which ranks it
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
        slots: int = 0,
        pace: Pace | None = None,
    ) -> None:
        self.model, self.pad_id, self.group = model, pad_id, group
        self.positions, self.slots = positions, slots
        self.pace = pace or Pace()
        # Collectives in prompts and in steps would have to come in one order on all ranks.
        alone = pace is None and group.size == 1 and model.leaves_free_rows
        self.side = side_stream(model.device) if alone else None
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
        num_rows = len(prompt_ids)
        job = Job(max(self.slots, min(num_slots, num_rows)), num_rows, sampling)
        arena = self._arena_for(job, max(self.positions, max(map(len, rows)) + sampling.max_new_tokens))
        arena.clear()
        arena.uniforms[:num_rows].copy_(rollout_uniforms(key, prompt_ids, sample_index, sampling.max_new_tokens))
        generation = Round(arena, rows, num_samples, model=self.model, group=self.group, pace=self.pace, side=self.side)
        generation.run(lambda: self.group.any(should_stop(), device))
        self.group.check_same(arena.written.tokens)
        # One copy of what the next call writes over, in place of one a row.
        written = arena.written
        tokens, log_probs = written.tokens[:num_rows].clone(), written.log_probs[:num_rows].clone()
        lengths = written.lengths[:num_rows].tolist()
        on_device = torch.cat(rows).to(device).split([len(row) for row in rows])
        return Rollout(
            prompts=[row for row in on_device for _ in range(num_samples)],
            responses=[row[:length] for row, length in zip(tokens, lengths, strict=True)],
            log_probs=[row[:length] for row, length in zip(log_probs, lengths, strict=True)],
            finished=written.finished[:num_rows].bool(),
            prompt_ids=prompt_ids,
            sample_index=sample_index,
        )

    def _arena_for(self, job: Job, positions: int) -> Arena:
        stale = self._arena is None or not self._arena.fits(job, positions)
        # Making one is passes over the layers: ranks in step make theirs together.
        if any(self.pace.most(stale)) or self._arena is None:
            if self._arena is not None:
                job, positions = self._arena.job.joined(job), max(positions, self._arena.room)
            self._arena = None  # first, so that the old cache makes room for the new
            room = round_up(positions, ROOM_UNIT)
            found = self.group.least(affordable_slots(self.model, job.num_slots, room), self.model.device)
            slots = checked_slots(0 if any(self.pace.most(found == 0)) else found, self.model, room)
            self._arena = Arena(self.model, job, (slots, room), eos=self._eos, pad_id=self.pad_id)
        return self._arena
