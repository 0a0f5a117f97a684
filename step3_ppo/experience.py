"""The data of a PPO rollout, from the sampler's output to the tensors of a minibatch.

    Rollout     a rank's responses as a generation backend returns them, ragged
    Responses   the same as padded rows, gathered: every rank has all rows
    Scores      what the models say of them: log-probabilities, values
    Rewarded    rewards and advantages, with what rewards say: the Experience, and what is logged of it
    Experience  what an optimizer step reads, besides the Responses
    Collected   Responses and Experience, cut into micro-batches

All but Collected are frozen, with one row per sequence. N sequences, S longest sequence, T longest response, R rewards.
Rows are padded on the right; response token t of row n is at position prompt_lengths[n] + t of its sequence and is
predicted at the position before.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, fields, replace
from typing import Any, Self

import torch
from torch import Tensor

from pipeline import dist
from pipeline.generation.rollouts import Rollout
from pipeline.rewards.rows import WeightedReward
from pipeline.tensor_ops import finish_moments, lengths_to_mask, moments, pad_rows, round_up, whiten
from pipeline.training.micro_batches import Lengths, MicroBatch, length_unit, places
from step3_ppo.config import PPOCoefficients
from step3_ppo.estimators import (
    estimate_advantages,
    kl_estimate,
    normalise_scores,
    shape_scores,
    token_rewards,
    weighted_sum,
)


class Rows:
    """The base of frozen dataclasses of tensors with a row for each sequence; a field may be None or other `Rows`."""

    def map(self, change: Callable[[Tensor], Tensor]) -> Self:
        """Return `change(tensor)` of each tensor."""
        parts: dict[str, Any] = {f.name: getattr(self, f.name) for f in fields(self)}  # type: ignore[arg-type]
        for name, part in parts.items():
            if part is not None:
                parts[name] = part.map(change) if isinstance(part, Rows) else change(part)
        return type(self)(**parts)

    def select(self, index: Tensor) -> Self:
        """Return the rows of `index` (n,) int64, in its order."""
        return self.map(lambda tensor: tensor[index])

    def tensors(self, prefix: str) -> dict[str, Tensor]:
        """Return the tensors by their names, those of inner dataclasses among them."""
        found: dict[str, Tensor] = {}
        for f in fields(self):  # type: ignore[arg-type]
            part = getattr(self, f.name)
            found |= part.tensors(prefix) if isinstance(part, Rows) else {} if part is None else {prefix + f.name: part}
        return found


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
    order: (N,) int64, the row's place in the rollout, whatever the number of ranks.
    """

    sequences: Tensor
    prompt_lengths: Tensor
    response_lengths: Tensor
    sampler_log_probs: Tensor
    finished: Tensor
    valid: Tensor
    row_index: Tensor
    order: Tensor

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
        """(N, >= S - 1) values at the positions that predict -> (N, T) values of response tokens, 0 after the end."""
        width = self.sampler_log_probs.shape[1]
        index = (self.prompt_lengths - 1).unsqueeze(1) + torch.arange(width, device=per_position.device)
        taken = per_position.gather(1, index.clamp(max=per_position.shape[1] - 1))
        return torch.where(lengths_to_mask(self.response_lengths, width), taken, 0.0)

    def lengths(self, *, packs: bool = False) -> Lengths:
        """The rows' lengths on the host, from which micro-batches are cut. Waits for the device once."""
        return Lengths.of(self.prompt_lengths, self.response_lengths, packs=packs)

    def narrowed(self, length: int, width: int) -> "Responses":
        """The first `length` positions of the sequences, the first `width` response tokens."""
        return replace(self, sequences=self.sequences[:, :length], sampler_log_probs=self.sampler_log_probs[:, :width])

    def trimmed(self) -> "Responses":
        """Drop the columns that are padding in every row, up to a whole unit of lengths. Waits for the device."""
        both = torch.stack([self.prompt_lengths + self.response_lengths, self.response_lengths])
        length, width = both.amax(1).tolist()
        return self.narrowed(round_up(length, length_unit(self.sequences.device)), width)


@dataclass(frozen=True, slots=True)
class Scores:
    """The outputs of the models for `Responses`, raw: no penalty, no normalisation; tokens after the end are 0.

    log_probs: (N, T) fp32, those of the policy before the update ("old"), the trainer's or the sampler's.
    ref_log_probs: (N, T) fp32.
    entropy: (N, T) fp32; None with the sampler's log_probs.
    values: (N, T) fp32, on the normalised reward scale; None without a critic.
    """

    log_probs: Tensor
    ref_log_probs: Tensor
    entropy: Tensor | None
    values: Tensor | None


@dataclass(frozen=True, slots=True)
class ValueTargets(Rows):
    """What a critic learns from.

    values: (N, T) fp32, those of the critic before the update.
    returns: (N, T) fp32.
    """

    values: Tensor
    returns: Tensor


@dataclass(frozen=True, slots=True)
class Experience(Rows):
    """The tensors that an optimizer step reads: in response space, fp32 ones 0 where response_mask is False.

    response_mask: (N, T) bool, True = a token of a row that counts.
    log_probs: (N, T) fp32, those of the policy before the update.
    ref_log_probs: (N, T) fp32.
    advantages: (N, T) fp32, whitened with `--whiten_advantages`.
    targets: those of a critic; None without one.
    """

    response_mask: Tensor
    log_probs: Tensor
    ref_log_probs: Tensor
    advantages: Tensor
    targets: ValueTargets | None

    def narrowed(self, width: int) -> "Experience":
        """The first `width` response positions."""
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
    """Put one rank's rollout into rows of fixed width, so that ranks can exchange them."""
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


@dataclass(frozen=True, slots=True)
class Rewarded:
    """An Experience, and what is logged of it.

    experience: tensors for the updates.
    valid: (N,) bool, True = the row counts and all its numbers are finite.
    scores: (N,) fp32, raw scores, of several rewards their weighted sum; NaN where a reward gives no score.
    sequence_rewards: (N,) fp32, rewards before the KL penalty.
    total_rewards: (N,) fp32, sums of the rewards of a row's tokens: with the KL penalty unless it is in the loss.
    clipped: (N,) bool, True = `reward_clip` cut the score of a reward.
    kl: (N, T) fp32, KL estimate k1.
    kl_k3: (N, T) fp32, KL estimate k3.
    advantage_mean: mean of the advantages before whitening.
    advantage_std: standard deviation of the advantages before whitening.
    """

    experience: Experience
    valid: Tensor
    scores: Tensor
    sequence_rewards: Tensor
    total_rewards: Tensor
    clipped: Tensor
    kl: Tensor
    kl_k3: Tensor
    advantage_mean: float
    advantage_std: float


def reward_responses(
    responses: Responses,
    scores: Scores,
    judged: Tensor,
    ppo: PPOCoefficients,
    *,
    kl_coef: float,
    rewards: Sequence[WeightedReward],
) -> Rewarded:
    """Compute rewards, advantages and returns of a whole rollout; every rank has all rows, so whitening sees all.

    Rows with a number that is not finite, be it of one reward, are masked before anything is averaged.

    Args:
        judged: (N, R) fp32 raw scores of `rewards`.
    """
    columns = [judged, scores.log_probs, scores.ref_log_probs]
    columns += [] if scores.values is None else [scores.values]
    finite = torch.stack([column.isfinite().reshape(len(column), -1).all(1) for column in columns]).all(0)
    valid = responses.valid & finite
    mask = responses.response_mask & valid.unsqueeze(1)
    log_probs, ref_log_probs, *rest = (torch.where(mask, tensor, 0.0) for tensor in columns[1:])
    values = rest[0] if rest else None
    weights, raw = [one.weight for one in rewards], torch.where(valid.unsqueeze(1), judged, 0.0).unbind(1)
    normalised = [normalise_scores(n, mean=one.mean, std=one.std) for n, one in zip(raw, rewards, strict=True)]
    limits = {"reward_clip": ppo.reward_clip, "missing_eos_penalty": ppo.missing_eos_penalty}
    shaped = shape_scores(normalised, weights, responses.finished, **limits)
    penalty = kl_estimate(log_probs, ref_log_probs, estimator=ppo.kl_estimator)
    per_token = token_rewards(shaped, penalty, mask, kl_coef=0.0 if ppo.kl_in_loss else kl_coef)
    advantages, returns = estimate_advantages(per_token, values, mask, gamma=ppo.gamma, gae_lambda=ppo.gae_lambda)
    mean, variance = finish_moments(moments(advantages, mask))
    trained = whiten(advantages, mask, mean=mean, var=variance) if ppo.whiten_advantages else advantages
    return Rewarded(
        experience=Experience(
            mask, log_probs, ref_log_probs, trained, None if values is None else ValueTargets(values, returns)
        ),
        valid=valid,
        scores=weighted_sum(judged.unbind(1), weights),
        sequence_rewards=shaped,
        total_rewards=per_token.sum(1),
        clipped=torch.stack(normalised).abs().amax(0) > ppo.reward_clip,
        kl=kl_estimate(log_probs, ref_log_probs, estimator="k1"),
        kl_k3=kl_estimate(log_probs, ref_log_probs, estimator="k3"),
        advantage_mean=mean.item(),
        advantage_std=variance.sqrt().item(),
    )


def cut(responses: Responses, batches: Sequence[MicroBatch]) -> Iterator[tuple[MicroBatch, Tensor, Responses]]:
    """Yield each micro-batch with its rows' places (n,) int64, and its rows cut to its shape. Waits for the device."""
    index = places(batches, responses.sequences.device)
    for batch, rows in zip(batches, index.split([len(batch.rows) for batch in batches]), strict=True):
        yield batch, rows, responses.select(rows).narrowed(batch.length, batch.width)


@dataclass(frozen=True, slots=True)
class Cut:
    """The micro-batches of a rollout.

    size: rows of a micro-batch at most, if they are of the longest.
    minibatches: this rank's micro-batches of each optimizer step, all epochs.
    """

    size: int
    minibatches: Sequence[Sequence[MicroBatch]]


@dataclass(slots=True)
class Collected:
    """A rollout that is ready for updates: the same on every rank but for its times and this rank's micro-batches.

    responses: prompts and sampled responses.
    experience: tensors that an optimizer step reads.
    metrics: metrics of the rollout.
    cut: micro-batches; their size changes where memory runs out.
    """

    responses: Responses
    experience: Experience
    metrics: dict[str, float]
    cut: Cut

    def tensors(self) -> dict[str, Tensor]:
        """Return what a checkpoint keeps of it, besides the metrics."""
        return self.responses.tensors("responses/") | self.experience.tensors("experience/")

    @classmethod
    def restored(
        cls,
        tensors: Mapping[str, Tensor],
        metrics: dict[str, float],
        device: torch.device,
        *,
        cut: Callable[[Responses], Cut],
    ) -> Self:
        """Make a rollout of the `tensors` and metrics of a checkpoint."""

        parts: dict[str, dict[str, Any]] = {"responses": {}, "experience": {}}
        for name, tensor in tensors.items():
            part, _, column = name.partition("/")
            parts[part][column] = tensor.to(device)
        known = parts["experience"]
        has_values = {f.name for f in fields(ValueTargets)} <= known.keys()
        known["targets"] = ValueTargets(known.pop("values"), known.pop("returns")) if has_values else None
        responses = Responses(**parts["responses"])
        return cls(responses, Experience(**known), metrics, cut(responses))
