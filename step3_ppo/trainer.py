"""The update phase: experience -> optimizer steps of actor and critic, which step together or not at all."""

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import torch

from pipeline import dist
from pipeline.data.batching import SFTBatch
from pipeline.data.loader import Step, to_device
from pipeline.engine import TrainingEngine, step_together
from pipeline.random_numbers import permutation
from pipeline.stopping import Stopping
from step3_ppo.config import PPOCoefficients
from step3_ppo.experience import Experience, Responses
from step3_ppo.ppo_math import kl_loss, policy_loss, value_loss
from step3_ppo.rollout import micro_batches

# Sums over this rank's tokens in an update, in the order of `UpdateSums.values`.
SUMS = ("policy", "ratio", "clipped", "approx_kl", "value", "value_clipped", "ptx")


class UpdateSums:
    """Sums and maxima over the micro-batches of one update, reduced over ranks once."""

    def __init__(self, device: torch.device) -> None:
        self.values = dict.fromkeys(SUMS, torch.zeros((), dtype=torch.float64, device=device))
        self.ratio_max = self.log_ratio_max = 0.0

    def add(self, **sums: torch.Tensor) -> None:
        for name, value in sums.items():
            self.values[name] = self.values[name] + value.detach().double()

    def over_ranks(self) -> dict[str, float]:
        """A collective."""
        totals = dist.sum_over_ranks(torch.stack(list(self.values.values()))).tolist()
        device = self.values["policy"].device
        maxima = {
            "ratio_max": dist.max_over_ranks(self.ratio_max, device),
            "log_ratio_max": dist.max_over_ranks(self.log_ratio_max, device),
        }
        return dict(zip(SUMS, totals, strict=True)) | maxima


@dataclass(frozen=True, slots=True)
class Updater:
    """How a rollout is turned into optimizer steps.

    rows_per_step: sequences of one optimizer step over all ranks. micro_batch_size: sequences of one forward pass.
    """

    actor: TrainingEngine
    critic: TrainingEngine
    world: dist.World
    ppo: PPOCoefficients
    temperature: float
    rows_per_step: int
    micro_batch_size: int
    unsup_coef: float
    seed: int
    stopping: Stopping

    def plan(self, num_rows: int, *, rollout: int, epoch: int) -> list[list[list[int]]]:
        """This rank's micro-batches of each step; the first epoch keeps the rollout's order, later ones shuffle it."""
        rows = list(range(num_rows))
        if epoch:
            rows = permutation(num_rows, seed=self.seed, purpose=f"minibatch/{rollout}", epoch=epoch).tolist()
        return micro_batches(rows, rows_per_step=self.rows_per_step, world=self.world, size=self.micro_batch_size)

    def updates(self, num_rows: int, *, rollout: int) -> Iterator[list[list[int]]]:
        """The micro-batches of every optimizer step of a rollout, all its epochs."""
        for epoch in range(self.ppo.ppo_epochs):
            yield from self.plan(num_rows, rollout=rollout, epoch=epoch)

    def num_tokens(
        self, responses: Responses, experience: Experience, batches: Sequence[Sequence[int]]
    ) -> tuple[float, float]:
        """Response tokens of an optimizer step over all ranks: (those that count, those sampled). A collective.

        The second is 0 for a step of fillers; the first alone where no row of the step has a finite reward.
        """
        rows = torch.tensor([row for batch in batches for row in batch], device=experience.response_mask.device)
        sums = [mask[rows].sum().double() for mask in (experience.response_mask, responses.response_mask)]
        counted, sampled = dist.sum_over_ranks(torch.stack(sums)).tolist()
        return counted, sampled

    def update(
        self,
        responses: Responses,
        experience: Experience,
        batches: Sequence[Sequence[int]],
        *,
        num_tokens: float,
        kl_coef: float,
        rate_factor: float,
        train_actor: bool,
        text: Step[SFTBatch] | None,
    ) -> tuple[dict[str, float], bool]:
        """One optimizer step of both models on rows of which some count; (metrics, whether it was taken). A collective.

        Raises Interrupted where the run is to stop; the gradients are dropped then.

        Losses are sums over response tokens divided by `num_tokens`, their number in the whole step on all ranks.
        """
        device = responses.sequences.device
        text = text if train_actor else None
        scale = self.world.size / num_tokens
        sums = UpdateSums(device)
        engines = [self.actor, self.critic] if train_actor else [self.critic]
        for number, batch in enumerate(batches):
            self.stopping.check(engines)
            index = torch.tensor(batch, device=device)
            part = responses.select(index).trimmed()
            wanted = experience.select(index).narrowed(part.sampler_log_probs.shape[1])
            last = number + 1 == len(batches)
            if train_actor:
                loss = self._policy_loss(part, wanted, kl_coef, sums)
                self.actor.backward(loss * scale, last=last and text is None)
            self.critic.backward(self._value_loss(part, wanted, sums) * scale, last=last)
        if text is not None:
            self._ptx_backward(text, sums)
        stepped = step_together(engines, rate_factor, loss=torch.stack(list(sums.values.values())))
        return self._metrics(sums.over_ranks(), num_tokens, text), stepped

    def _policy_loss(self, part: Responses, wanted: Experience, kl_coef: float, sums: UpdateSums) -> torch.Tensor:
        statistics = self.actor(
            part.sequences,
            attention_mask=part.attention_mask,
            selected=part.predicts_response,
            temperature=self.temperature,
            with_entropy=True,
        )
        log_probs = part.in_response_space(statistics.log_probs)
        mask = wanted.response_mask
        loss, stats = policy_loss(
            log_probs, wanted.log_probs, wanted.advantages, mask, policy_clip=self.ppo.policy_clip
        )
        sums.add(policy=loss, ratio=stats.ratio_sum, clipped=stats.clipped_count, approx_kl=stats.approx_kl_sum)
        sums.ratio_max = max(sums.ratio_max, stats.ratio_max.item())
        sums.log_ratio_max = max(sums.log_ratio_max, stats.abs_log_ratio_max.item())
        if self.ppo.kl_in_loss:
            loss = loss + kl_coef * kl_loss(log_probs, wanted.ref_log_probs, mask, estimator=self.ppo.kl_estimator)
        return loss

    def _value_loss(self, part: Responses, wanted: Experience, sums: UpdateSums) -> torch.Tensor:
        values = part.in_response_space(self.critic(part.sequences, part.attention_mask))
        loss, clipped = value_loss(
            values, wanted.values, wanted.returns, wanted.response_mask, value_clip=self.ppo.value_clip or None
        )
        sums.add(value=loss, value_clipped=clipped)
        return loss

    def _ptx_backward(self, text: Step[SFTBatch], sums: UpdateSums) -> None:
        """The language-model loss on plain text, mixed into the actor's gradient (InstructGPT, section 3.4)."""
        scale = self.unsup_coef * self.world.size / max(text.num_trained, 1)
        for number, cpu_batch in enumerate(text.micro_batches):
            batch = to_device(cpu_batch, self.world.device)
            trained = batch.trained_mask[:, 1:]
            found = self.actor(
                batch.input_ids,
                attention_mask=batch.attention_mask,
                selected=trained,
                position_ids=batch.position_ids,
                with_entropy=True,
            )
            loss = -found.log_probs.sum()
            sums.add(ptx=loss)
            self.actor.backward(loss * scale, last=number + 1 == len(text.micro_batches))

    def _metrics(self, totals: dict[str, float], num_tokens: float, text: Step[SFTBatch] | None) -> dict[str, float]:
        count = num_tokens
        metrics = {
            "loss/policy": totals["policy"] / count,
            "loss/value": totals["value"] / count,
            "policy/ratio_mean": totals["ratio"] / count,
            "policy/ratio_max": totals["ratio_max"],
            "policy/clipfrac": totals["clipped"] / count,
            "policy/approx_kl": totals["approx_kl"] / count,
            "value/clipfrac": totals["value_clipped"] / count,
            "actor/grad_norm": self.actor.last_gradient_norm,
            "critic/grad_norm": self.critic.last_gradient_norm,
            "actor/learning_rate": self.actor.learning_rate,
            "critic/learning_rate": self.critic.learning_rate,
        }
        if text is not None:
            metrics["loss/ptx"] = totals["ptx"] / max(text.num_trained, 1)
        return metrics | {"policy/first_ratio_error": totals["log_ratio_max"]}


def should_stop_early(metrics: dict[str, float], limit: float) -> bool:
    """Whether the policy has moved further than `--approx_kl_stop` allows within one update phase."""
    return limit > 0 and math.isfinite(metrics["policy/approx_kl"]) and metrics["policy/approx_kl"] > limit
