"""From prompts to experience: sample, exchange, score, and turn scores into advantages."""

import json
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from pipeline import dist
from pipeline.data.batching import rank_slices
from pipeline.data.templates import encode_conversation, end_token_ids
from pipeline.data.turns import Message
from pipeline.generation.hybrid_engine import HybridEngine
from pipeline.generation.rollouts import GenerationStopped, Prompt, RandomKey, Sampling
from pipeline.models.reward_model import last_token_scores
from pipeline.tensor_ops import finish_moments, lengths_to_mask, moments, pad_rows, whiten
from pipeline.training.steps import Interrupted
from step3_ppo.config import PPOCoefficients
from step3_ppo.experience import (
    Experience,
    Responses,
    Scores,
    gather_responses,
    gather_scores,
    pack_responses,
)
from step3_ppo.micro_batches import MicroBatch, cut
from step3_ppo.models import Models, log_probs_of
from step3_ppo.ppo_math import gae, kl_estimate, shape_scores, token_rewards


@dataclass(frozen=True, slots=True)
class Sampler:
    """Samples responses to rows of a prompt data set on all ranks.

    batch_size: prompts generated at once on one rank. max_prompt: tokens of the longest prompt.
    """

    hybrid: HybridEngine
    rows: Any
    world: dist.World
    sampling: Sampling
    num_samples: int
    batch_size: int
    max_prompt: int
    should_stop: Callable[[], bool]

    def sample(self, planned: Sequence[int | None], key: RandomKey) -> Responses:
        """Responses to the planned rows (None fills up), `num_samples` each, the same on every rank. A collective.

        Raises:
            Interrupted: on all ranks, where `should_stop` answered True on any between two tokens.
        """
        group = self.hybrid.group
        places = self._places(len(planned))
        stopped = False
        with self.hybrid.generation():
            try:
                mine = self._sample_places(planned, places, key)
            except GenerationStopped:
                stopped = True
        if dist.max_over_ranks(float(stopped), self.world.device):
            raise Interrupted
        if group.size > 1:
            # All ranks of the group hold the same rows; each hands in its part of them.
            rows = torch.arange(len(mine.order), device=mine.order.device)
            mine = mine.select(rows.chunk(group.size)[group.rank])
        return gather_responses([mine])

    def _places(self, num_planned: int) -> list[int | None]:
        """The places in the plan that this rank's group samples, batch after batch; None fills up."""
        size = self.hybrid.group.size
        batches = rank_slices(
            list(range(num_planned)), self.world.size // size, self.world.rank // size, self.batch_size * size
        )
        return [place for batch in batches for place in batch]

    def _sample_places(self, planned: Sequence[int | None], places: Sequence[int | None], key: RandomKey) -> Responses:
        rows = [None if place is None else planned[place] for place in places]
        rollout = self.hybrid.generate(
            [self._prompt(row or 0) for row in rows],
            num_samples=self.num_samples,
            sampling=self.sampling,
            key=key,
            batch_size=self.batch_size * self.hybrid.group.size,
            should_stop=self.should_stop,
        )
        device = rollout.finished.device
        # Places beyond the plan come from rounding up to whole batches; they sort to the end.
        last = len(planned)
        order = torch.tensor([last if place is None else place for place in places], device=device)
        samples = torch.arange(self.num_samples, device=device)
        return pack_responses(
            rollout,
            pad_id=self.hybrid.pad_id,
            max_sequence=self.max_prompt + self.sampling.max_new_tokens,
            max_response=self.sampling.max_new_tokens,
            valid=torch.tensor([row is not None for row in rows], device=device).repeat_interleave(self.num_samples),
            row_index=torch.tensor([row or 0 for row in rows], device=device).repeat_interleave(self.num_samples),
            order=(order.unsqueeze(1) * self.num_samples + samples).flatten(),
        )

    def _prompt(self, row: int) -> Prompt:
        found = self.rows[row]
        return Prompt(found["prompt_ids"], found["prompt_id"])


@torch.no_grad()
def score(
    models: Models,
    responses: Responses,
    batches: Sequence[MicroBatch],
    policy_batches: Sequence[MicroBatch] | None,
    *,
    rows: Any,
    temperature: float,
    between: Callable[[], None] = lambda: None,
) -> Scores:
    """All four models on all responses, each rank its own micro-batches; the same on every rank. A collective.

    Args:
        batches: this rank's micro-batches of reference, critic and reward model.
        policy_batches: those of the policy, in the very shapes of the first epoch's updates: in 16 bits a forward pass
            depends on its batch shape, and the first ratio must be 1. None: the sampler's log-probabilities serve.
        between: called before each of them; may raise.
    """
    width = responses.sampler_log_probs.shape[1]

    def each(batches: Sequence[MicroBatch], compute: Callable[[Responses, MicroBatch], Any]) -> list[torch.Tensor]:
        parts, places = [], []
        for batch, index, part in cut(responses, batches):
            between()
            parts.append(compute(part, batch))
            places.append(index)
        return gather_scores(parts, places, width=width)

    log_probs, entropy = responses.sampler_log_probs, None
    if policy_batches is not None:
        log_probs, entropy = each(
            policy_batches, lambda *part: log_probs_of(models.actor, *part, temperature=temperature, with_entropy=True)
        )
    ref_log_probs, values, scores = each(
        batches, lambda *part: score_batch(models, *part, rows=rows, temperature=temperature)
    )
    models.release_gathered("reference", "reward")  # the others may be updated next
    return Scores(log_probs, ref_log_probs, entropy, values, scores)


def score_batch(
    models: Models, responses: Responses, batch: MicroBatch, *, rows: Any, temperature: float
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """(n, T') reference log-probabilities, (n, T') values and (n,) scores of one micro-batch, on this rank."""
    with models.reference_policy() as reference:
        ref_log_probs, _ = log_probs_of(reference, responses, batch, temperature=temperature, with_entropy=False)
    values = models.critic(responses.sequences, responses.attention_mask, num_tokens=batch.num_packed_tokens)
    return ref_log_probs, responses.in_response_space(values), sequence_scores(models, responses, batch, rows)


def sequence_scores(models: Models, responses: Responses, batch: MicroBatch, rows: Any) -> torch.Tensor:
    """(n,) raw scores of the reward model at the last real token; re-encoded where it has a tokenizer of its own."""
    sequences, mask, num_packed = responses.sequences, responses.attention_mask, batch.num_packed_tokens
    if models.reward_tokenizer is not None:
        encoded = [torch.tensor(ids, device=sequences.device) for ids in reward_ids(models, responses, rows)]
        lengths = torch.tensor([len(ids) for ids in encoded], device=sequences.device)
        sequences = pad_rows(encoded, models.reward_tokenizer.pad_token_id or 0)
        mask, num_packed = lengths_to_mask(lengths, sequences.shape[1]), sum(map(len, encoded))
    return last_token_scores(models.reward(sequences, mask, num_tokens=num_packed), mask.sum(1))


def reward_ids(models: Models, responses: Responses, rows: Any) -> list[list[int]]:
    """Conversations in the reward model's own tokens and template, from text; without an end where there was none."""
    found, ends = [], end_token_ids(models.reward_tokenizer)
    for n in range(len(responses.sequences)):
        start, length = int(responses.prompt_lengths[n]), int(responses.response_lengths[n])
        text = models.tokenizer.decode(responses.sequences[n, start : start + length], skip_special_tokens=True)
        turns = [Message(**turn) for turn in json.loads(rows[int(responses.row_index[n])]["messages"])]
        encoded = encode_conversation(models.reward_tokenizer, [*turns, Message("assistant", text.strip())], "last")
        ids = list(encoded.ids)
        while not responses.finished[n] and ids and ids[-1] in ends:
            ids.pop()
        found.append(ids)
    return found


@dataclass(frozen=True, slots=True)
class Rewarded:
    """Experience, and what is logged about it (sequence_rewards (N,) before the KL penalty, kl (N, T) by k1)."""

    experience: Experience
    valid: torch.Tensor
    sequence_rewards: torch.Tensor
    kl: torch.Tensor
    kl_k3: torch.Tensor
    advantage_mean: float
    advantage_std: float


def reward(
    responses: Responses, scores: Scores, ppo: PPOCoefficients, *, kl_coef: float, score_mean: float, score_std: float
) -> Rewarded:
    """Rewards, advantages and returns of a whole rollout; whitening sees all ranks because every rank has all rows.

    Rows with a number that is not finite are masked before anything is averaged.
    """
    finite = torch.stack([row.isfinite().reshape(len(row), -1).all(1) for row in (scores.scores, scores.log_probs,
                          scores.ref_log_probs, scores.values)]).all(0)  # fmt: skip
    valid = responses.valid & finite
    mask = responses.response_mask & valid.unsqueeze(1)
    log_probs, ref_log_probs, values = (
        torch.where(mask, tensor, 0.0) for tensor in (scores.log_probs, scores.ref_log_probs, scores.values)
    )
    shaped = shape_scores(
        torch.where(valid, scores.scores, 0.0),
        responses.finished,
        score_mean=score_mean,
        score_std=score_std,
        reward_clip=ppo.reward_clip,
        missing_eos_penalty=ppo.missing_eos_penalty,
    )
    penalty = kl_estimate(log_probs, ref_log_probs, estimator=ppo.kl_estimator)
    rewards = token_rewards(shaped, penalty, mask, kl_coef=0.0 if ppo.kl_in_loss else kl_coef)
    advantages, returns = gae(rewards, values, mask, gamma=ppo.gamma, gae_lambda=ppo.gae_lambda)
    mean, variance = finish_moments(moments(advantages, mask))
    used = whiten(advantages, mask, mean=mean, var=variance) if ppo.whiten_advantages else advantages
    return Rewarded(
        experience=Experience(mask, log_probs, ref_log_probs, values, used, returns),
        valid=valid,
        sequence_rewards=shaped,
        kl=kl_estimate(log_probs, ref_log_probs, estimator="k1"),
        kl_k3=kl_estimate(log_probs, ref_log_probs, estimator="k3"),
        advantage_mean=mean.item(),
        advantage_std=variance.sqrt().item(),
    )
