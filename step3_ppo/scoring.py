"""Run the models over sampled responses: log-probabilities, values, and scores of reward models.

Shapes: n rows of a micro-batch, N rows of the rollout, T response tokens, R reward models. The updater uses the same
pass of the policy, so the first ratio of a rollout is exactly 1.
"""

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional

from pipeline import dist
from pipeline.models.forward.causal_lm import Comparison, TokenStatistics
from pipeline.models.forward.shared_prompts import SharedPrompts
from pipeline.rewards.rows import ScoredRows
from pipeline.training.micro_batches import MicroBatch
from step3_ppo.experience import Responses, Scores, batch_rows
from step3_ppo.flags.groups import Divergence
from step3_ppo.models.engines import Models
from step3_ppo.models.roles import COMPARED


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
        "selected": responses.predicts_response,
        "num_selected": batch.num_response_tokens,
        **settings_of(responses, batch),
    }


def settings_of(responses: Responses, batch: MicroBatch) -> dict[str, Any]:
    """Return how the rows of a micro-batch pass through any model: with or without padding, and what they share."""
    shared = None
    if batch.shared:
        groups, lengths = responses.row_index, responses.prompt_lengths
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
def policy_log_probs(
    models: Models,
    responses: Responses,
    batches: Sequence[MicroBatch],
    *,
    temperature: float,
    between: Callable[[], None] = lambda: None,
) -> tuple[Tensor, Tensor]:
    """Return (N, T) log-probabilities and entropies of the policy; see `score_responses`. A collective.

    The batches must have exactly the shapes of the first epoch's updates. In 16 bits a forward pass depends on its
    batch shape, and the first ratio must be 1.
    """

    def compute(part: Responses, batch: MicroBatch) -> tuple[Tensor, ...]:
        log_probs, entropy, _ = statistics_of(models.actor, part, batch, temperature=temperature, with_entropy=True)
        assert entropy is not None
        return log_probs, entropy

    log_probs, entropy = over_all(responses, batches, compute, between)
    return log_probs, entropy


@torch.no_grad()
def score_responses(
    models: Models,
    responses: Responses,
    batches: Sequence[MicroBatch],
    policy: tuple[Tensor, Tensor | None],
    *,
    temperature: float,
    with_reference: bool = True,
    between: Callable[[], None] = lambda: None,
) -> Scores:
    """Run reference and critic, if the run has them, over all responses; each rank its micro-batches. A collective.

    Args:
        batches: this rank's micro-batches.
        policy: the log-probabilities and entropies of the policy, or those of the sampler and None.
        with_reference: False: without the reference's log-probabilities, also if the run has one.
        between: called before each of them; may raise.
    """
    with_reference = with_reference and models.has_reference
    compute = partial(score_batch, models, temperature=temperature, with_reference=with_reference)
    columns = over_all(responses, batches, compute, between)
    models.release_reference()  # the other models may be updated next
    ref_log_probs = columns.pop(0) if with_reference else None
    log_probs, entropy = policy
    return Scores(log_probs, ref_log_probs, entropy, columns[0] if columns else None)


@torch.no_grad()
def reward_model_scores(
    models: Models,
    responses: Responses,
    batches: Sequence[MicroBatch],
    *,
    rows: Any,
    between: Callable[[], None] = lambda: None,
) -> Tensor:
    """Return (N, R) raw scores of the R reward models; each rank scores its micro-batches. A collective.

    Args:
        batches: this rank's micro-batches.
        rows: the data set of the prompts.
        between: called before each of them; may raise.
    """

    def compute(part: Responses, batch: MicroBatch) -> tuple[Tensor, ...]:
        seen = scored_rows(models, part, batch, rows)
        return tuple(one.score(seen) for one in models.rewards)

    if not models.rewards:
        return torch.zeros(len(responses.sequences), 0, device=responses.sequences.device)
    scores = over_all(responses, batches, compute, between)
    for name in models.frozen.keys() - COMPARED:
        models.release_gathered(name)
    return torch.stack(scores, 1)


def over_all(
    responses: Responses,
    batches: Sequence[MicroBatch],
    compute: Callable[[Responses, MicroBatch], tuple[Tensor, ...]],
    between: Callable[[], None],
) -> list[Tensor]:
    """Compute columns (n, T') or (n,) of this rank's micro-batches; return those of all ranks' rows. A collective."""
    parts, indices = [], []
    for batch, index, part in batch_rows(responses, batches):
        between()
        parts.append(compute(part, batch))
        indices.append(index)
    return gather_scores(parts, indices, width=responses.sampler_log_probs.shape[1])


def score_batch(
    models: Models, responses: Responses, batch: MicroBatch, *, temperature: float, with_reference: bool
) -> tuple[Tensor, ...]:
    """Return (n, T') reference log-probabilities, if asked for, and (n, T') values of a micro-batch, with a critic."""
    columns = list[Tensor]()
    if with_reference:
        with models.reference_policy() as reference:
            columns.append(statistics_of(reference, responses, batch, temperature=temperature).log_probs)
    if models.critic is not None:
        columns.append(values_of(models.critic, responses, batch))
    return tuple(columns)


def scored_rows(models: Models, responses: Responses, batch: MicroBatch, rows: Any) -> ScoredRows:
    """Return the rows of a micro-batch as rewards read them; `rows`: data set of the prompts."""
    lengths, rows_of_prompts = (responses.prompt_lengths, responses.response_lengths), responses.row_index
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
