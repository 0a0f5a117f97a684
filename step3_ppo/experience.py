"""The data of a PPO rollout, from the sampler's output to the tensors of a minibatch.

    Rollout       a rank's responses as a generation backend returns them, ragged
    Responses     the same as padded rows, gathered: every rank has all rows
    Scores        the models' outputs for them: log-probabilities, values
    RewardScores  their raw scores by all rewards
    Experience    what an optimizer step reads besides the Responses
    Collected     Responses and Experience with their micro-batches

All but Collected are frozen, with one row per sequence. N sequences, S longest sequence, T longest response.
Rows are padded on the right. Response token t of a row is its trained token number t, and is predicted at the position
before. Between trained tokens may stand what tools answered; it takes no part in response space.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, fields, replace
from typing import Any, Self

import torch
from torch import Tensor
from torch.nn import functional

from pipeline import dist
from pipeline.generation.rollouts import Rollout
from pipeline.rewards.pool import Value
from pipeline.rewards.rows import Reward
from pipeline.tensor_ops import lengths_to_mask, pad_rows, round_up
from pipeline.training.micro_batches import Lengths, MicroBatch, length_unit, row_indices


class Rows:
    """Base of frozen dataclasses of tensors with a row for each sequence. A field may be None or another `Rows`."""

    def map(self, change: Callable[[Tensor], Tensor]) -> Self:
        """Return the same rows with `change` applied to each tensor."""
        parts: dict[str, Any] = {f.name: getattr(self, f.name) for f in fields(self)}  # type: ignore[arg-type]
        for name, part in parts.items():
            if part is not None:
                parts[name] = part.map(change) if isinstance(part, Rows) else change(part)
        return type(self)(**parts)

    def select(self, index: Tensor) -> Self:
        """Return the rows of `index` (n,) int64, in its order."""
        return self.map(lambda tensor: tensor[index])

    def tensors(self, prefix: str) -> dict[str, Tensor]:
        """Return the tensors by name, including those of inner dataclasses."""
        named: dict[str, Tensor] = {}
        for f in fields(self):  # type: ignore[arg-type]
            part = getattr(self, f.name)
            named |= part.tensors(prefix) if isinstance(part, Rows) else {} if part is None else {prefix + f.name: part}
        return named


@dataclass(frozen=True, slots=True)
class Responses(Rows):
    """Prompts and sampled responses.

    sequences: (N, S) int64, prompt, response and what answered its turns in one row, whose last token is trained.
    trained: (N, S) bool, True = a token of the response, which the policy sampled; an EOS is one.
    sampler_log_probs: (N, T) fp32, as the sampler saw them.
    finished: (N,) bool, True = ended with an EOS or a stop string.
    valid: (N,) bool, True = counts; False is padding of an epoch's last rollout.
    row_index: (N,) int64, the prompt's row in the data set.
    order: (N,) int64, the row's index in the rollout, the same for any number of ranks.
    tool_counts: (N, 5) fp32: turns, calls, failed calls, seconds of calls, and 1 for a row that a call has lost, so
        that it is left out of the training; None without tools.
    """

    sequences: Tensor
    trained: Tensor
    sampler_log_probs: Tensor
    finished: Tensor
    valid: Tensor
    row_index: Tensor
    order: Tensor
    tool_counts: Tensor | None = None

    @property
    def groups(self) -> Tensor:
        """(N,) int64, the row of each prompt; -1 for rows that do not count, whose prompt may be another."""
        return torch.where(self.valid, self.row_index, -1)

    @property
    def lost(self) -> Tensor:
        """(N,) bool, True = a call of a tool took too long, or its process died."""
        return torch.zeros_like(self.valid) if self.tool_counts is None else self.tool_counts[:, 4] > 0

    @property
    def prompt_lengths(self) -> Tensor:
        """(N,) int64, tokens before the first trained one."""
        return self.trained.int().argmax(1)

    @property
    def response_lengths(self) -> Tensor:
        """(N,) int64, trained tokens."""
        return self.trained.sum(1)

    @property
    def sequence_lengths(self) -> Tensor:
        """(N,) int64, tokens up to the last trained one."""
        return self.trained.shape[1] - self.trained.flip(1).int().argmax(1)

    @property
    def response_mask(self) -> Tensor:
        """(N, T) bool, True = a token of a response that counts, its EOS included."""
        width = self.sampler_log_probs.shape[1]
        return lengths_to_mask(self.response_lengths, width) & self.valid.unsqueeze(1)

    @property
    def attention_mask(self) -> Tensor:
        """(N, S) bool, True = real token."""
        return lengths_to_mask(self.sequence_lengths, self.sequences.shape[1])

    def in_response_space(self, per_position: Tensor) -> Tensor:
        """Return (N, T) values of response tokens, 0 after the end, from values at the positions that predict them.

        per_position: (N, >= S - 1).
        """
        width = self.sampler_log_probs.shape[1]
        index = self.trained[:, 1:].int().argsort(stable=True, dim=1, descending=True)[:, :width]
        return torch.where(lengths_to_mask(self.response_lengths, width), per_position.gather(1, index), 0.0)

    def lengths(self, *, packs: bool = False) -> Lengths:
        """Return the rows' lengths on the host, for micro-batches. It waits for the device once."""
        prompts = self.prompt_lengths
        behind = self.sequence_lengths - prompts
        return Lengths.of(prompts, behind, packs=packs, groups=self.groups, trained=self.response_lengths)

    def narrowed(self, length: int, width: int) -> "Responses":
        """Return the first `length` positions of the sequences and the first `width` response tokens."""
        sequences, trained = self.sequences[:, :length], self.trained[:, :length]
        return replace(self, sequences=sequences, trained=trained, sampler_log_probs=self.sampler_log_probs[:, :width])

    def above(self, others: "Responses", pad_id: int) -> "Responses":
        """Return these rows followed by those of `others`."""
        width = max(self.sampler_log_probs.shape[1], others.sampler_log_probs.shape[1])
        length = max(self.sequences.shape[1], others.sequences.shape[1])
        mine, more = (
            replace(
                one,
                sequences=functional.pad(one.sequences, (0, length - one.sequences.shape[1]), value=pad_id),
                trained=functional.pad(one.trained, (0, length - one.trained.shape[1])),
                sampler_log_probs=functional.pad(one.sampler_log_probs, (0, width - one.sampler_log_probs.shape[1])),
            )
            for one in (self, others)
        )
        added = iter(more.tensors("").values())
        return mine.map(lambda tensor: torch.cat([tensor, next(added)]))

    def trimmed(self) -> "Responses":
        """Drop the columns that are padding in every row, to a whole unit of lengths. It waits for the device."""
        length, width = torch.stack([self.sequence_lengths, self.response_lengths]).amax(1).tolist()
        return self.narrowed(round_up(length, length_unit(self.sequences.device)), width)


@dataclass(frozen=True, slots=True)
class Scores:
    """The outputs of the models for `Responses`, raw: no penalty, no normalisation; tokens after the end are 0.

    log_probs: (N, T) fp32, of the policy before the update ("old"), by the trainer or the sampler.
    ref_log_probs: (N, T) fp32; None without a reference.
    entropy: (N, T) fp32; None with the sampler's log_probs.
    values: (N, T) fp32, on the normalised reward scale; None without a critic.
    """

    log_probs: Tensor
    ref_log_probs: Tensor | None
    entropy: Tensor | None
    values: Tensor | None


@dataclass(frozen=True, slots=True)
class RewardScores:
    """The raw scores of responses by the R rewards of a run.

    rewards: the rewards: reward models, then F functions.
    values: (N, R) fp32, of a function that returns values of tokens their sum; NaN where a reward gives no score.
    applies: (N, R) bool, False = a function returned None, so the response needs no score of it.
    per_token: (N, F, T) fp32, the values of tokens; 0 for functions that return one value a response; None if all do.
    spreads: of each reward (count, mean, sum of squared differences), by whose deviation it is divided before the sum;
        () = none is.
    """

    rewards: Sequence[Reward]
    values: Tensor
    applies: Tensor
    per_token: Tensor | None
    spreads: Sequence[Sequence[float]] = ()

    @classmethod
    def of(cls, rewards: Sequence[Reward], models: Tensor, functions: Sequence[Sequence[Value]], *, width: int) -> Self:
        """Return the scores (N, R - F) of reward models with the values of F functions for each response; width: T."""
        given, per_token = torch.full((len(functions), len(functions[0])), torch.nan), None
        applies = torch.tensor([[value is not None for value in row] for row in functions], dtype=torch.bool)
        for n, row in enumerate(functions):
            for f, value in enumerate(row):
                if isinstance(value, list):
                    per_token = torch.zeros(*given.shape, width) if per_token is None else per_token
                    per_token[n, f, : len(value)] = torch.tensor(value)
                    given[n, f] = torch.tensor(value).sum()
                elif isinstance(value, float):
                    given[n, f] = value
        return cls(
            rewards,
            torch.cat([models, given.to(models.device)], 1),
            torch.cat([torch.ones_like(models, dtype=torch.bool), applies.to(models.device)], 1),
            None if per_token is None else per_token.to(models.device),
        )


@dataclass(frozen=True, slots=True)
class ValueTargets(Rows):
    """The training targets of a critic.

    values: (N, T) fp32, those of the critic before the update.
    returns: (N, T) fp32.
    """

    values: Tensor
    returns: Tensor


@dataclass(frozen=True, slots=True)
class Experience(Rows):
    """The tensors that an optimizer step reads, in response space. fp32 tensors are 0 where response_mask is False.

    response_mask: (N, T) bool, True = a token of a row that counts.
    log_probs: (N, T) fp32, those of the policy before the update.
    ref_log_probs: (N, T) fp32; None without a reference.
    advantages: (N, T) fp32, whitened with `--whiten-advantages`.
    targets: those of a critic; None without one.
    """

    response_mask: Tensor
    log_probs: Tensor
    ref_log_probs: Tensor | None
    advantages: Tensor
    targets: ValueTargets | None

    def narrowed(self, width: int) -> "Experience":
        """Return the first `width` response tokens."""
        return self.map(lambda tensor: tensor[:, :width])


def span_mask(starts: Tensor, lengths: Tensor, width: int) -> Tensor:
    """Return (N, width) bool, True at `lengths[n]` positions from `starts[n]` on, each (N,) int64."""
    return lengths_to_mask(starts + lengths, width) & ~lengths_to_mask(starts, width)


def pack_responses(
    rollout: Rollout,
    *,
    pad_id: int,
    max_sequence: int,
    max_response: int,
    valid: Tensor,
    row_index: Tensor,
    order: Tensor,
    tool_counts: Tensor | None = None,
) -> Responses:
    """Pad one rank's rollout to rows of fixed width, so that ranks can exchange them."""
    pairs = list(zip(rollout.prompts, rollout.responses, strict=True))
    sampled = zip(rollout.prompts, rollout.sampled, strict=True)
    trained = [functional.pad(mask, (len(prompt), 0)) for prompt, mask in sampled]
    return Responses(
        sequences=pad_rows([torch.cat(pair) for pair in pairs], pad_id, length=max_sequence),
        trained=pad_rows(trained, False, length=max_sequence).to(rollout.finished.device),
        sampler_log_probs=pad_rows(rollout.log_probs, 0.0, length=max_response),
        finished=rollout.finished,
        valid=valid,
        row_index=row_index,
        order=order,
        tool_counts=tool_counts,
    )


def gather_responses(mine: Responses) -> Responses:
    """Gather the rows of all ranks in the rollout's order, on every rank. A collective."""
    everywhere = mine.map(dist.gather_rows)
    return everywhere.select(everywhere.order.argsort()).trimmed()


def batch_rows(responses: Responses, batches: Sequence[MicroBatch]) -> Iterator[tuple[MicroBatch, Tensor, Responses]]:
    """Yield each micro-batch, the indices (n,) int64 of its rows, and these rows in its shape; waits for the device."""
    index = row_indices(batches, responses.sequences.device)
    for batch, rows in zip(batches, index.split([len(batch.rows) for batch in batches]), strict=True):
        yield batch, rows, responses.select(rows).narrowed(batch.length, batch.width)


@dataclass(slots=True)
class Collected:
    """A rollout that is ready for updates. Only its times and micro-batches differ between ranks.

    responses: prompts and sampled responses.
    experience: tensors that an optimizer step reads.
    metrics: metrics of the rollout.
    steps: this rank's micro-batches of each optimizer step, all epochs, once the first step has formed them.
    micro_batch_size: rows of the full length in the largest of them; after an out-of-memory error, half of that.
    """

    responses: Responses
    experience: Experience
    metrics: dict[str, float]
    steps: Sequence[Sequence[MicroBatch]] = ()
    micro_batch_size: int = 0

    def tensors(self) -> dict[str, Tensor]:
        """Return the tensors that a checkpoint stores."""
        return self.responses.tensors("responses/") | self.experience.tensors("experience/")

    @classmethod
    def restored(cls, tensors: Mapping[str, Tensor], metrics: dict[str, float], device: torch.device) -> Self:
        """Return the rollout of a checkpoint from its `tensors` and metrics."""
        parts: dict[str, dict[str, Any]] = {"responses": {}, "experience": {}}
        for name, tensor in tensors.items():
            part, _, column = name.partition("/")
            parts[part][column] = tensor.to(device)
        columns = {"ref_log_probs": None, **parts["experience"]}
        has_values = {f.name for f in fields(ValueTargets)} <= columns.keys()
        columns["targets"] = ValueTargets(columns.pop("values"), columns.pop("returns")) if has_values else None
        rows = parts["responses"]
        if "trained" not in rows:  # up to 0c0ab5fc rows of one turn were stored by their lengths
            lengths = rows.pop("prompt_lengths"), rows.pop("response_lengths")
            rows["trained"] = span_mask(*lengths, rows["sequences"].shape[1])
        return cls(Responses(**rows), Experience(**columns), metrics)
