"""Over-sampling: a rollout samples more prompts than it trains on, and ends when enough of them have all responses.

The next rollout continues the responses to the others, by its policy. Which prompts are trained on follows from numbers
of tokens and the order of the prompts alone, not from clocks, ranks or the number of slots.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace

import torch
from torch import Tensor

from pipeline import dist
from pipeline.generation.episodes import Episode
from pipeline.generation.rollouts import GenerationStopped
from step3_ppo.experience import Responses


@dataclass(slots=True)
class OverSampling:
    """The M prompts of a rollout, of which those are trained on whose responses end first. A `Supply` of episodes.

    rows: row of each prompt; None: padding, which is not sampled.
    carried: responses to the first prompts, which earlier rollouts began; None without any.
    num_trained: prompts to train on.
    num_samples: responses to a prompt.
    max_new_tokens: limit of a response.
    device: device of the responses.
    ends: of each prompt 1 + the tokens of this rollout after which its last response has ended; 0: it has not.
    indices: index of each prompt of this rank; None: padding.
    counted: those of this rank's prompts that no other rank counts.
    ended: called with each response to these, once it will certainly be trained on.
    episodes: the responses of this rank.
    """

    rows: Sequence[int | None]
    carried: Responses | None
    num_trained: int
    num_samples: int
    max_new_tokens: int
    device: torch.device
    ends: list[int] = field(default_factory=list)
    indices: Sequence[int | None] = ()
    counted: range = range(0)
    ended: Callable[[Episode], None] = lambda episode: None
    episodes: Sequence[Episode] = ()

    def begin(self, episodes: Sequence[Episode]) -> None:
        """Add what earlier rollouts sampled; see `Supply`."""
        self.episodes = episodes
        first = self.carried
        columns = [] if first is None else [first.prompt_lengths, first.response_lengths, first.finished.long()]
        table = list(zip(*(column.tolist() for column in columns), strict=True))
        for episode in episodes:
            index = self.indices[episode.number // self.num_samples]
            if index is None or self.rows[index] is None:
                episode.add(torch.zeros(1, dtype=torch.int64, device=self.device), torch.zeros(1, device=self.device))
                episode.reason = "end"
            elif first is not None and (row := index * self.num_samples + episode.sample) < len(table):
                start, length, finished = table[row]
                episode.add(first.sequences[row, start : start + length], first.sampler_log_probs[row, :length])
                episode.earlier = length
                episode.reason = "end" if finished else "limit" if length == self.max_new_tokens else None

    def is_enough(self, length: int, *, stop: bool) -> bool:
        """Return True if so many prompts have ended as are trained on; see `Supply`. A collective."""
        ends = torch.zeros(len(self.rows) + 1, dtype=torch.int64)
        groups = dict[int, Sequence[Episode]]()
        for n in self.counted:
            index, group = self.indices[n], self.episodes[n * self.num_samples : (n + 1) * self.num_samples]
            lengths = [one.length - one.earlier for one in group]
            is_row = index is not None and self.rows[index] is not None
            if index is not None and is_row and max(lengths) <= length and all(one.reason for one in group):
                ends[index], groups[index] = 1 + max(lengths), group
        ends[-1] = stop
        before = set(self.chosen)
        *self.ends, stops = dist.sum_over_ranks(ends.to(self.device)).tolist()
        if stops:
            raise GenerationStopped
        for index in groups.keys() & set(self.chosen) - before:
            for episode in groups[index]:
                self.ended(episode)
        return len(self.chosen) == min(self.num_trained, sum(row is not None for row in self.rows))

    @property
    def chosen(self) -> list[int]:
        """The prompts that are trained on, as far as they have ended, in the order of prompts."""
        ended = sorted((end, index) for index, end in enumerate(self.ends) if end)
        return sorted(index for _, index in ended[: self.num_trained])

    def earlier(self) -> Tensor:
        """Return `Responses.earlier` of the rows of this rank, (N,) int64."""
        return torch.tensor([one.earlier for one in self.episodes], device=self.device)

    def split(self, sampled: Responses) -> tuple[Responses, Responses | None]:
        """Return the responses that are trained on, and those that the next rollout carries on; None without any.

        Padding follows where too few prompts are left.
        """
        chosen = self.chosen
        padding = [index for index, row in enumerate(self.rows) if row is None]
        trained = chosen + padding[: self.num_trained - len(chosen)]
        others = [index for index in range(len(self.rows)) if index not in trained]
        return self._responses(sampled, trained), self._responses(sampled, others) if others else None

    def _responses(self, sampled: Responses, prompts: Sequence[int]) -> Responses:
        index = torch.tensor(prompts, device=self.device).unsqueeze(1) * self.num_samples
        rows = (index + torch.arange(self.num_samples, device=self.device)).flatten()
        selected = sampled.select(rows)
        return replace(selected, order=torch.arange(len(rows), device=self.device)).trimmed()
