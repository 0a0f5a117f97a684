"""The data of a PPO rollout, from the sampler's output to the tensors of a minibatch.

    Rollout     a rank's responses as a generation backend returns them, ragged
    Responses   the same as padded rows, gathered: every rank has all rows
    Scores      the models' outputs for them: log-probabilities, values
    Experience  what an optimizer step reads besides the Responses
    Collected   Responses and Experience with their micro-batches

All but Collected are frozen, with one row per sequence. N sequences, S longest sequence, T longest response.
Rows are padded on the right; response token t of row n is at position prompt_lengths[n] + t of its sequence and is
predicted at the position before.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, fields, replace
from typing import Any, Self

import torch
from torch import Tensor
from torch.nn import functional

from pipeline import dist
from pipeline.generation.rollouts import Rollout
from pipeline.rewards.calls import KINDS
from pipeline.rewards.pool import Failure, Value
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
class FunctionScores(Rows):
    """The values that reward functions gave responses; F functions.

    values: (N, F) fp32, for a function that returns values of tokens their sum; 0 without a value.
    applies: (N, F) bool, False = the function returned None: it does not apply.
    failures: (N, F) int64, 0 = the call succeeded, else 1 + the index in KINDS of the kind of failure.
    per_token: (N, F, T) fp32, the values of tokens; 0 for functions that return one value a response; None if all do.
    """

    values: Tensor
    applies: Tensor
    failures: Tensor
    per_token: Tensor | None

    @classmethod
    def of(cls, values: Sequence[Sequence[Value]], *, width: int, device: torch.device) -> Self:
        """Return rows from N lists with the value of each function. A collective.

        `per_token` is set on all ranks if any function of any rank returned values of tokens.
        width: T.
        """
        given = torch.zeros(len(values), len(values[0]))
        failures, applies = given.long(), torch.zeros_like(given, dtype=torch.bool)
        cells = [(n, f) for n, row in enumerate(values) for f in range(len(row))]
        tokens = {cell: values[cell[0]][cell[1]] for cell in cells}
        lists = {cell: torch.tensor(value) for cell, value in tokens.items() if isinstance(value, list)}
        for cell, value in tokens.items():
            applies[cell] = value is not None
            if isinstance(value, Failure):
                failures[cell] = 1 + KINDS.index(value.kind)
            elif isinstance(value, float):
                given[cell] = value
            elif cell in lists:
                given[cell] = lists[cell].sum()
        per_token = None
        if dist.max_over_ranks(float(bool(lists)), device):
            per_token = torch.zeros(*given.shape, width, device=device)
            for cell, row in lists.items():
                per_token[cell][: len(row)] = row.to(device)
        return cls(given.to(device), applies.to(device), failures.to(device), per_token)


@dataclass(frozen=True, slots=True)
class Responses(Rows):
    """Prompts and sampled responses.

    sequences: (N, S) int64, prompt and response in one row.
    prompt_lengths: (N,) int64.
    response_lengths: (N,) int64; a response includes its EOS.
    sampler_log_probs: (N, T) fp32, as the sampler saw them.
    finished: (N,) bool, True = ended with an EOS or a stop string.
    valid: (N,) bool, True = counts; False is padding of an epoch's last rollout.
    row_index: (N,) int64, the prompt's row in the data set.
    order: (N,) int64, the row's index in the rollout, the same for any number of ranks.
    scored: values of reward functions; None without functions, and once they are summed.
    """

    sequences: Tensor
    prompt_lengths: Tensor
    response_lengths: Tensor
    sampler_log_probs: Tensor
    finished: Tensor
    valid: Tensor
    row_index: Tensor
    order: Tensor
    scored: FunctionScores | None = None

    @property
    def response_mask(self) -> Tensor:
        """(N, T) bool, True = a token of a response that counts, its EOS included."""
        width = self.sampler_log_probs.shape[1]
        return lengths_to_mask(self.response_lengths, width) & self.valid.unsqueeze(1)

    @property
    def attention_mask(self) -> Tensor:
        """(N, S) bool, True = real token."""
        return lengths_to_mask(self.prompt_lengths + self.response_lengths, self.sequences.shape[1])

    @property
    def predicts_response(self) -> Tensor:
        """(N, S - 1) bool, True = the next token belongs to the response."""
        positions = torch.arange(self.sequences.shape[1] - 1, device=self.sequences.device)
        first = self.prompt_lengths.unsqueeze(1) - 1
        return (positions >= first) & (positions < first + self.response_lengths.unsqueeze(1))

    def in_response_space(self, per_position: Tensor) -> Tensor:
        """Return (N, T) values of response tokens, 0 after the end, from values at the positions that predict them.

        per_position: (N, >= S - 1).
        """
        width = self.sampler_log_probs.shape[1]
        index = (self.prompt_lengths - 1).unsqueeze(1) + torch.arange(width, device=per_position.device)
        taken = per_position.gather(1, index.clamp(max=per_position.shape[1] - 1))
        return torch.where(lengths_to_mask(self.response_lengths, width), taken, 0.0)

    def lengths(self, *, packs: bool = False) -> Lengths:
        """Return the rows' lengths on the host, for micro-batches. It waits for the device once."""
        return Lengths.of(self.prompt_lengths, self.response_lengths, packs=packs, groups=self.row_index)

    def narrowed(self, length: int, width: int) -> "Responses":
        """Return the first `length` positions of the sequences and the first `width` response tokens."""
        return replace(self, sequences=self.sequences[:, :length], sampler_log_probs=self.sampler_log_probs[:, :width])

    def above(self, others: "Responses", pad_id: int) -> "Responses":
        """Return these rows followed by those of `others`. Both or neither have values of reward functions."""
        width = max(self.sampler_log_probs.shape[1], others.sampler_log_probs.shape[1])
        length = max(self.sequences.shape[1], others.sequences.shape[1])
        mine, more = (
            replace(
                one,
                sequences=functional.pad(one.sequences, (0, length - one.sequences.shape[1]), value=pad_id),
                sampler_log_probs=functional.pad(one.sampler_log_probs, (0, width - one.sampler_log_probs.shape[1])),
            )
            for one in (self, others)
        )
        added = iter(more.tensors("").values())
        return mine.map(lambda tensor: torch.cat([tensor, next(added)]))

    def trimmed(self) -> "Responses":
        """Drop the columns that are padding in every row, to a whole unit of lengths. It waits for the device."""
        both = torch.stack([self.prompt_lengths + self.response_lengths, self.response_lengths])
        length, width = both.amax(1).tolist()
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


def pack_responses(
    rollout: Rollout,
    *,
    pad_id: int,
    max_sequence: int,
    max_response: int,
    valid: Tensor,
    row_index: Tensor,
    order: Tensor,
) -> Responses:
    """Pad one rank's rollout to rows of fixed width, so that ranks can exchange them."""
    pairs = zip(rollout.prompts, rollout.responses, strict=True)
    device = rollout.finished.device
    return Responses(
        sequences=pad_rows([torch.cat(pair) for pair in pairs], pad_id, length=max_sequence),
        prompt_lengths=torch.tensor([len(prompt) for prompt in rollout.prompts], device=device),
        response_lengths=torch.tensor([len(response) for response in rollout.responses], device=device),
        sampler_log_probs=pad_rows(rollout.log_probs, 0.0, length=max_response),
        finished=rollout.finished,
        valid=valid,
        row_index=row_index,
        order=order,
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


@dataclass(frozen=True, slots=True)
class Minibatches:
    """The micro-batches of a rollout.

    size: largest number of rows of a micro-batch, reached with rows of the full length.
    steps: this rank's micro-batches of each optimizer step, all epochs.
    """

    size: int
    steps: Sequence[Sequence[MicroBatch]]


@dataclass(slots=True)
class Collected:
    """A rollout that is ready for updates. Only its times and micro-batches differ between ranks.

    responses: prompts and sampled responses.
    experience: tensors that an optimizer step reads.
    metrics: metrics of the rollout.
    minibatches: micro-batches of each step; on an out-of-memory error they are formed again with half the size.
    """

    responses: Responses
    experience: Experience
    metrics: dict[str, float]
    minibatches: Minibatches

    def tensors(self) -> dict[str, Tensor]:
        """Return the tensors that a checkpoint stores."""
        return self.responses.tensors("responses/") | self.experience.tensors("experience/")

    @classmethod
    def restored(
        cls,
        tensors: Mapping[str, Tensor],
        metrics: dict[str, float],
        device: torch.device,
        *,
        minibatches: Callable[[Responses], Minibatches],
    ) -> Self:
        """Return the rollout of a checkpoint from its `tensors` and metrics."""
        parts: dict[str, dict[str, Any]] = {"responses": {}, "experience": {}}
        for name, tensor in tensors.items():
            part, _, column = name.partition("/")
            parts[part][column] = tensor.to(device)
        columns = {"ref_log_probs": None, **parts["experience"]}
        has_values = {f.name for f in fields(ValueTargets)} <= columns.keys()
        columns["targets"] = ValueTargets(columns.pop("values"), columns.pop("returns")) if has_values else None
        responses = Responses(**parts["responses"])
        return cls(responses, Experience(**columns), metrics, minibatches(responses))
