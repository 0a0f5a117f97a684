"""Run the models over sampled responses: log-probabilities, values, and scores of reward models.

Shapes: n rows of a micro-batch, N rows of the rollout, T response tokens, R reward models. The updater uses the same
pass of the policy, so the first ratio of a rollout is exactly 1.
"""

import logging
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional

from pipeline import dist
from pipeline.models.forward.causal_lm import Comparison, TokenStatistics
from pipeline.models.forward.shared_prompts import RowSettings, SharedPrompts
from pipeline.rewards.rows import BatchReward, ScoredRows
from pipeline.training.micro_batches import MicroBatch
from step3_ppo.experience import Responses, RewardScores, Scores, batch_rows
from step3_ppo.flags.groups import Divergence
from step3_ppo.models.engines import Models
from step3_ppo.models.roles import COMPARED
from step3_ppo.rewarding import fitted_scales

log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class Passes:
    """The forward passes of this rank over its share of all responses.

    responses: all responses.
    batches: this rank's micro-batches.
    between: called before each of them; may raise.
    """

    responses: Responses
    batches: Sequence[MicroBatch]
    between: Callable[[], None] = lambda: None

    def run(self, compute: Callable[[Responses, MicroBatch], tuple[Tensor, ...]]) -> list[Tensor]:
        """Compute columns (n, T') or (n,) of each micro-batch; return those of all ranks' rows. A collective."""
        parts, indices = [], []
        for batch, index, part in batch_rows(self.responses, self.batches):
            self.between()
            parts.append(compute(part, batch))
            indices.append(index)
        return gather_scores(parts, indices, width=self.responses.sampler_log_probs.shape[1])


def statistics_of(
    policy: Any,
    responses: Responses,
    batch: MicroBatch,
    *,
    temperature: float,
    with_entropy: bool = False,
    comparison: Comparison | None = None,
) -> TokenStatistics:
    """Return statistics (n, T) of a micro-batch's response tokens; entropies and divergences only if asked for."""
    settings: dict[str, Any] = {"temperature": temperature, "with_entropy": with_entropy, "comparison": comparison}
    output: TokenStatistics = policy(responses.sequences, **inputs_of(responses, batch), **settings)
    wide = [None if column is None else responses.in_response_space(column) for column in output]
    return TokenStatistics(*wide)  # type: ignore[arg-type]  # there are always log-probabilities


def inputs_of(responses: Responses, batch: MicroBatch) -> dict[str, Any]:
    """Return the inputs of a policy beside the ids of a micro-batch, which select its response tokens."""
    return {
        "attention_mask": responses.attention_mask,
        "selected": responses.trained[:, 1:],
        "num_selected": batch.num_response_tokens,
        **settings_of(responses, batch),
    }


def settings_of(responses: Responses, batch: MicroBatch) -> RowSettings:
    """Return how the rows of a micro-batch pass through any model: with or without padding, and what they share."""
    shared = None
    if batch.shared:
        groups, lengths = responses.groups, responses.prompt_lengths
        shared = SharedPrompts.of_groups(groups, lengths, num_tokens=sum(batch.shared))
    return {"num_tokens": batch.num_packed_tokens, "right_padded": True, "shared": shared}


def comparison_of(
    models: Models, responses: Responses, batch: MicroBatch, *, kind: Divergence, longest: int
) -> Comparison:
    """Return the distributions of the reference policy, or of the teacher, at a micro-batch's response tokens."""
    with models.reference_policy() as reference:
        hidden = reference(responses.sequences, **inputs_of(responses, batch), hidden_only=True)
        return Comparison(kind, hidden, reference.module, longest)


def values_of(critic: Any, responses: Responses, batch: MicroBatch) -> Tensor:
    """Return (n, T) values at the response tokens of a micro-batch."""
    values = critic(responses.sequences, responses.attention_mask, **settings_of(responses, batch))
    return responses.in_response_space(values)


@torch.no_grad()
def policy_log_probs(models: Models, passes: Passes, *, temperature: float) -> tuple[Tensor, Tensor]:
    """Return (N, T) log-probabilities and entropies of the policy. A collective.

    The passes must have exactly the shapes of the first epoch's updates. In 16 bits a forward pass depends on its batch
    shape, and the first ratio must be 1.
    """

    def compute(part: Responses, batch: MicroBatch) -> tuple[Tensor, ...]:
        log_probs, entropy, _ = statistics_of(models.actor, part, batch, temperature=temperature, with_entropy=True)
        assert entropy is not None
        return log_probs, entropy

    log_probs, entropy = passes.run(compute)
    return log_probs, entropy


@torch.no_grad()
def score_responses(
    models: Models,
    passes: Passes,
    policy: tuple[Tensor, Tensor | None],
    *,
    temperature: float,
    with_reference: bool = True,
) -> Scores:
    """Run reference and critic, if the run has them, over all responses. A collective.

    Args:
        policy: the log-probabilities and entropies of the policy, or those of the sampler and None.
        with_reference: False: without the reference's log-probabilities, also if the run has one.
    """
    with_reference = with_reference and models.has_reference

    def compute(part: Responses, batch: MicroBatch) -> tuple[Tensor, ...]:
        columns = list[Tensor]()
        if with_reference:
            with models.reference_policy() as reference:
                columns.append(statistics_of(reference, part, batch, temperature=temperature).log_probs)
        if models.critic is not None:
            columns.append(values_of(models.critic, part, batch))
        return tuple(columns)

    columns = passes.run(compute)
    models.release_reference()  # the other models may be updated next
    ref_log_probs = columns.pop(0) if with_reference else None
    log_probs, entropy = policy
    return Scores(log_probs, ref_log_probs, entropy, columns[0] if columns else None)


@torch.no_grad()
def reward_model_scores(models: Models, passes: Passes, *, rows: Any) -> Tensor:
    """Return (N, R) raw scores of the R reward models; `rows`: data set of the prompts. A collective."""

    def compute(part: Responses, batch: MicroBatch) -> tuple[Tensor, ...]:
        seen = scored_rows(models, part, batch, rows)
        return tuple(scores_by(one, seen) for one in models.rewards)

    if not models.rewards:
        return passes.responses.sampler_log_probs[:, :0]
    scores = passes.run(compute)
    for name in models.frozen.keys() - COMPARED:
        models.release_gathered(name)
    return torch.stack(scores, 1)


def normalise_by_first(
    models: Models, responses: Responses, scores: Scores, judged: RewardScores
) -> tuple[Scores, list[float]]:
    """Normalise by mean and std of this first rollout from now on.

    Returns `scores` with the critic's values so, and mean and std of each reward model.
    """
    text = "--normalise-scores: the %s has no stored mean and std: uses those of the first rollout, %.4g and %.4g"
    scales = [one for one in fitted_scales(responses, judged) if one is not None]
    for one, scale in zip(models.rewards, scales, strict=True):
        if one.scale.takes_first:
            log.info(text, one.name, scale.mean, scale.std)
    constants = [value for one in scales for value in (one.mean, one.std)]
    if models.normalise_by(constants) and scores.values is not None:
        scores = replace(scores, values=(scores.values - scales[0].mean) / scales[0].std)
    return scores, constants


def scores_by(reward: BatchReward, rows: ScoredRows) -> Tensor:
    """Return (n,) fp32 raw scores on the rows' device. Raises ValueError for another number of scores."""
    scores = reward.score(rows)
    if scores.shape != rows.finished.shape:
        raise ValueError(f"reward {reward.name}: scores of shape {[*scores.shape]} for {len(rows.finished)} rows")
    return scores.float().to(rows.finished.device)


def scored_rows(models: Models, responses: Responses, batch: MicroBatch, rows: Any) -> ScoredRows:
    """Return the rows of a micro-batch as rewards read them; `rows`: data set of the prompts."""
    starts, rows_of_prompts = responses.prompt_lengths, responses.row_index
    lengths = (starts, responses.sequence_lengths - starts)
    texts = {"row_of": lambda n: rows[int(rows_of_prompts[n])], "tokenizer": models.tokenizer}
    return ScoredRows(responses.sequences, *lengths, responses.finished, settings_of(responses, batch), **texts)


def gather_scores(parts: Sequence[Sequence[Tensor]], rows: Sequence[Tensor], *, width: int) -> list[Tensor]:
    """Gather all rows of all ranks in the rollout's order, on every rank, column by column. A collective.

    Args:
        parts: columns of each micro-batch of this rank, (n, at most width) per token or (n,) per sequence.
        rows: indices (n,) int64 in the rollout of the rows of each micro-batch.
    """
    order = dist.gather_rows(torch.cat(list(rows))).argsort()
    gathered = []
    for column in zip(*parts, strict=True):
        wide = [functional.pad(part, (0, width - part.shape[1])) if part.dim() == 2 else part for part in column]
        gathered.append(dist.gather_rows(torch.cat(wide))[order])
    return gathered
