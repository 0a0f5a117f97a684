"""One optimizer step of PPO: the gradients of actor and critic on a minibatch; both step, or none."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field

import torch

from pipeline import dist
from pipeline.data.batching import SFTBatch
from pipeline.data.loader import Step, to_device
from pipeline.engine.engine import TrainingEngine
from pipeline.random_numbers import permutation
from pipeline.tensor_ops import masked_sum
from pipeline.training.micro_batches import Lengths, MicroBatch, micro_batches, places
from pipeline.training.steps import Stopping, step_together
from step3_ppo.config import PPOCoefficients
from step3_ppo.experience import Experience, Responses, cut
from step3_ppo.losses import kl_loss, policy_loss, value_loss
from step3_ppo.scoring import log_probs_of, values_of

# Over this rank's tokens in an update, in the order of `UpdateSums.sums` and `UpdateSums.maxima`.
SUMS = ("policy", "ratio", "clipped", "approx_kl", "entropy", "value", "value_clipped", "ptx")
MAXIMA = ("ratio", "log_ratio")


class UpdateSums:
    """Sums and maxima over the micro-batches of one update: on the device until they are reduced over ranks, once."""

    def __init__(self, device: torch.device) -> None:
        zero = torch.zeros((), dtype=torch.float64, device=device)
        self.sums, self.maxima = dict.fromkeys(SUMS, zero), dict.fromkeys(MAXIMA, zero)

    def add(self, **sums: torch.Tensor) -> None:
        for name, value in sums.items():
            self.sums[name] = self.sums[name] + value.detach().double()

    def raise_to(self, **maxima: torch.Tensor) -> None:
        for name, value in maxima.items():
            self.maxima[name] = torch.maximum(self.maxima[name], value.detach().double())

    def over_ranks(self) -> dict[str, float]:
        """The sums under their names, the maxima as `<name>_max`. A collective, and the update's one wait for them."""
        everywhere = dist.gather_rows(torch.stack([*self.sums.values(), *self.maxima.values()]).unsqueeze(0))
        sums, maxima = everywhere.split([len(SUMS), len(MAXIMA)], dim=1)
        totals = torch.cat([sums.sum(0), maxima.amax(0)]).tolist()
        return dict(zip([*SUMS, *(f"{name}_max" for name in MAXIMA)], totals, strict=True))


@dataclass(frozen=True, slots=True)
class StepSize:
    """Counts of an optimizer step over all ranks; rows that pad an epoch's last rollout are in none of them.

    num_rows: number of rows.
    num_tokens: sum of the rows' lengths, prompts included.
    num_squares: sum of the squares of these lengths.
    num_response_tokens: response tokens of all rows.
    num_trained: response tokens of rows with a finite reward, which losses are divided by.
    """

    num_rows: int
    num_tokens: int
    num_squares: int
    num_response_tokens: int
    num_trained: int


@dataclass(frozen=True, slots=True)
class Update:
    """One optimizer step.

    batches: this rank's micro-batches.
    size: counts over all ranks.
    text: text of the ptx loss.
    trained_actor: False where only the critic learns.
    metrics: metrics of the step.
    stepped: False where a loss or gradient was not finite, and nothing was changed.
    """

    batches: Sequence[MicroBatch]
    size: StepSize
    text: Step[SFTBatch] | None = None
    trained_actor: bool = True
    metrics: dict[str, float] = field(default_factory=dict)
    stepped: bool = False


@dataclass(frozen=True, slots=True)
class Updater:
    """The models, coefficients and batch sizes with which a rollout is turned into optimizer steps.

    actor: policy.
    critic: value model.
    world: ranks and device.
    ppo: coefficients of PPO.
    temperature: sampling temperature, by which logits are divided.
    rows_per_step: sequences of one optimizer step over all ranks.
    unsup_coef: factor of the ptx loss.
    seed: seed of the order of rows in minibatches.
    """

    actor: TrainingEngine
    critic: TrainingEngine
    world: dist.World
    ppo: PPOCoefficients
    temperature: float
    rows_per_step: int
    unsup_coef: float
    seed: int

    @property
    def old_log_probs_from_sampler(self) -> bool:
        """True where the sampler's log-probabilities serve as the old ones, so that no pass is made for them."""
        return self.ppo.old_log_probs == "sampler"

    def minibatches(self, lengths: Lengths, size: int, *, rollout: int) -> Iterator[list[MicroBatch]]:
        """Yield this rank's micro-batches of every optimizer step of a rollout, all its epochs."""
        for epoch in range(self.ppo.ppo_epochs):
            yield from self.minibatches_of_epoch(lengths, size, rollout=rollout, epoch=epoch)

    def minibatches_of_epoch(self, lengths: Lengths, size: int, *, rollout: int, epoch: int) -> list[list[MicroBatch]]:
        """Cut one epoch over the rollout's rows into this rank's micro-batches of each step.

        A micro-batch has at most as many tokens as `size` of its step's longest rows. The first epoch deals the rows to
        steps in their order, later ones shuffle them before.
        """
        rows = list(range(len(lengths)))
        if epoch:
            rows = permutation(len(lengths), seed=self.seed, purpose=f"minibatch/{rollout}", epoch=epoch).tolist()
        return micro_batches(rows, lengths, rows_per_step=self.rows_per_step, world=self.world, size=size)

    def step_size(self, responses: Responses, experience: Experience, batches: Sequence[MicroBatch]) -> StepSize:
        """Measure a step over all ranks. A collective."""
        rows = places(batches, responses.valid.device)
        valid = responses.valid[rows]
        lengths = torch.where(valid, (responses.prompt_lengths + responses.response_lengths)[rows], 0)
        masks = (responses.response_mask[rows], experience.response_mask[rows])
        sums = [column.sum().double() for column in (valid, lengths, lengths.square(), *masks)]
        return StepSize(*map(int, dist.sum_over_ranks(torch.stack(sums)).tolist()))

    def update(
        self,
        responses: Responses,
        experience: Experience,
        batches: Sequence[MicroBatch],
        *,
        num_tokens: int,
        kl_coef: float,
        rate_factor: float,
        train_actor: bool,
        text: Step[SFTBatch] | None,
        stopping: Stopping,
    ) -> tuple[dict[str, float], bool]:
        """Take one optimizer step of both models on rows of which some count. A collective.

        Losses are sums over response tokens divided by `num_tokens`, their number in the whole step on all ranks.
        Without `train_actor` only the critic learns, and there are no metrics of the policy; `text` is for the actor.

        Returns:
            The metrics, and whether the step was taken: not where a loss or gradient is not finite.

        Raises:
            Interrupted: the run is to stop; the gradients are dropped.
        """
        scale = self.world.size / num_tokens
        sums = UpdateSums(responses.sequences.device)
        engines = [self.actor, self.critic] if train_actor else [self.critic]
        if not train_actor:
            self.actor.release_gathered()
        for number, (batch, rows, part) in enumerate(cut(responses, batches)):
            stopping.within_step(engines)
            known = experience.select(rows).narrowed(batch.width)
            last = number + 1 == len(batches)
            if train_actor:
                loss = self._policy_loss(batch, part, known, kl_coef, sums)
                self.actor.backward(loss * scale, last=last and text is None)
            self.critic.backward(self._value_loss(batch, part, known, sums) * scale, last=last)
        if text is not None:
            self._ptx_backward(text, sums)
        totals = sums.over_ranks()
        stepped = step_together(engines, rate_factor, loss=sum(totals[name] for name in SUMS))
        metrics = self._value_metrics(totals, num_tokens)
        return metrics | (self._policy_metrics(totals, num_tokens, text) if train_actor else {}), stepped

    def _policy_loss(
        self, batch: MicroBatch, part: Responses, known: Experience, kl_coef: float, sums: UpdateSums
    ) -> torch.Tensor:
        log_probs, entropy = log_probs_of(
            self.actor, part, batch, temperature=self.temperature, with_entropy=self.old_log_probs_from_sampler
        )
        mask = known.response_mask
        # With the sampler's log-probabilities the old ones are the new ones: ratio 1, gradient grad log pi.
        old = log_probs.detach() if self.old_log_probs_from_sampler else known.log_probs
        loss, stats = policy_loss(log_probs, old, known.advantages, mask, policy_clip=self.ppo.policy_clip)
        sums.add(policy=loss, ratio=stats.ratio_sum, clipped=stats.clipped_count, approx_kl=stats.approx_kl_sum)
        drift = stats.abs_log_ratio_max
        if entropy is not None:
            drift = torch.where(mask, log_probs.detach() - known.log_probs, 0).abs().max()
            sums.add(entropy=masked_sum(entropy, mask))
        sums.raise_to(ratio=stats.ratio_max, log_ratio=drift)
        if self.ppo.kl_in_loss:
            loss = loss + kl_coef * kl_loss(log_probs, known.ref_log_probs, mask, estimator=self.ppo.kl_estimator)
        return loss

    def _value_loss(self, batch: MicroBatch, part: Responses, known: Experience, sums: UpdateSums) -> torch.Tensor:
        values = values_of(self.critic, part, batch)
        loss, clipped = value_loss(
            values, known.values, known.returns, known.response_mask, value_clip=self.ppo.value_clip or None
        )
        sums.add(value=loss, value_clipped=clipped)
        return loss

    def _ptx_backward(self, text: Step[SFTBatch], sums: UpdateSums) -> None:
        """The language-model loss on plain text, mixed into the actor's gradient (InstructGPT, section 3.4)."""
        scale = self.unsup_coef * self.world.size / max(text.num_trained, 1)
        for number, cpu_batch in enumerate(text.micro_batches):
            batch = to_device(cpu_batch, self.world.device)
            trained = batch.trained_mask[:, 1:]
            outputs = self.actor(
                batch.input_ids,
                attention_mask=batch.attention_mask,
                selected=trained,
                num_selected=int(cpu_batch.trained_mask[:, 1:].sum()),
                position_ids=batch.position_ids,
                right_padded=True,
            )
            loss = -outputs.log_probs.sum()
            sums.add(ptx=loss)
            self.actor.backward(loss * scale, last=number + 1 == len(text.micro_batches))

    def _value_metrics(self, totals: dict[str, float], num_tokens: int) -> dict[str, float]:
        return {
            "loss/value": totals["value"] / num_tokens,
            "value/clipfrac": totals["value_clipped"] / num_tokens,
            "critic/grad_norm": self.critic.last_gradient_norm,
            "critic/learning_rate": self.critic.learning_rate,
        }

    def _policy_metrics(
        self, totals: dict[str, float], num_tokens: int, text: Step[SFTBatch] | None
    ) -> dict[str, float]:
        metrics = {
            "loss/policy": totals["policy"] / num_tokens,
            "policy/ratio_mean": totals["ratio"] / num_tokens,
            "policy/ratio_max": totals["ratio_max"],
            "policy/first_ratio_error": totals["log_ratio_max"],
            "policy/clipfrac": totals["clipped"] / num_tokens,
            "policy/approx_kl": totals["approx_kl"] / num_tokens,
            "actor/grad_norm": self.actor.last_gradient_norm,
            "actor/learning_rate": self.actor.learning_rate,
        }
        if text is not None:
            metrics["loss/ptx"] = totals["ptx"] / max(text.num_trained, 1)
        if self.old_log_probs_from_sampler:
            metrics |= {
                "objective/entropy": totals["entropy"] / num_tokens,
                "policy/sampler_error": totals["log_ratio_max"],
            }
        return metrics
