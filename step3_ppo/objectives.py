"""The objectives of PPO: a trained model with its loss on a micro-batch. One optimizer step is a list of them."""

from abc import ABC, abstractmethod
from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from pipeline import dist
from pipeline.data.batching import SFTBatch
from pipeline.data.loader import Step, to_device
from pipeline.engine.engine import TrainingEngine
from pipeline.models.forward.causal_lm import Comparison
from pipeline.tensor_ops import masked_sum
from pipeline.training.micro_batches import MicroBatch
from step3_ppo.experience import Experience, Responses
from step3_ppo.flags.groups import PPOCoefficients
from step3_ppo.mathematics.losses import (
    cispo_loss,
    kl_loss,
    policy_loss,
    row_factors,
    value_loss,
    weighted_sum,
)
from step3_ppo.models.engines import Models
from step3_ppo.rewarding import off_policy_weights
from step3_ppo.scoring import comparison_of, statistics_of, values_of


@dataclass(frozen=True, slots=True)
class StepSize:
    """Counts of an optimizer step over all ranks; rows that pad an epoch's last rollout are in none of them.

    num_rows: number of rows.
    num_tokens: sum of the rows' lengths, prompts included.
    num_squares: sum of the squares of these lengths.
    num_response_tokens: response tokens of all rows.
    num_trained: response tokens of rows with a finite reward, which losses are divided by.
    num_trained_rows: number of these rows.
    num_shared: tokens of prompts that pass as another row's.
    num_shared_squares: sum of the squares of the lengths of these prompts.
    """

    num_rows: int
    num_tokens: int
    num_squares: int
    num_response_tokens: int
    num_trained: int
    num_trained_rows: int = 0
    num_shared: int = 0
    num_shared_squares: int = 0


class Sums:
    """Sums and maxima over the micro-batches of one update: on the device until they are reduced over ranks, once."""

    def __init__(self) -> None:
        self.sums: dict[str, Tensor] = {}
        self.maxima: dict[str, Tensor] = {}

    def add(self, **terms: Tensor) -> None:
        """Add scalars to the sums of their names. A step with a sum that is not finite is skipped later."""
        for name, term in terms.items():
            self.sums[name] = self.sums.get(name, 0.0) + term.detach().double()

    def raise_to(self, **values: Tensor) -> None:
        """Raise the maxima of these names to scalars that are larger."""
        for name, value in values.items():
            value = value.detach().double()
            self.maxima[name] = torch.maximum(self.maxima.get(name, value), value)

    def over_ranks(self) -> dict[str, float]:
        """The sums under their names, and maxima as `<name>_max`. A collective."""
        everywhere = dist.gather_rows(torch.stack([*self.sums.values(), *self.maxima.values()]).unsqueeze(0))
        sums, maxima = everywhere.split([len(self.sums), len(self.maxima)], dim=1)
        totals = torch.cat([sums.sum(0), maxima.amax(0)]).tolist()
        return dict(zip([*self.sums, *(f"{name}_max" for name in self.maxima)], totals, strict=True))


class Objective(ABC):
    """A trained model with a loss, for one optimizer step.

    role: the model's role: actor or critic.
    engine: the model with its optimizer.
    text: plain text whose gradients are added after those of the rollout; None: there is none. At most one objective
        of a model has text.
    """

    role: str
    engine: TrainingEngine
    text: Step[SFTBatch] | None = None

    @abstractmethod
    def loss(self, batch: MicroBatch, part: Responses, experience: Experience, sums: Sums) -> Tensor:
        """Return the loss, summed over the response tokens of a micro-batch; `sums` get what `metrics` reads.

        batch: the model's inputs. part: the responses in it. experience: stored tensors of their rollout, such as old
        log-probabilities, advantages and mask.
        """

    def text_backward(self, sums: Sums) -> None:
        """Add the gradients of `text`, in the last backward passes of the step."""
        assert self.text is None, "an objective with text adds its gradients itself"

    @abstractmethod
    def metrics(self, totals: dict[str, float], num_tokens: int) -> dict[str, float]:
        """Return the metrics of the step from its totals over all ranks; num_tokens: `StepSize.num_trained`."""

    def flops(self, size: StepSize) -> float:
        """Return the matrix operations of the step on all ranks, for prompts with responses; `text` is not counted."""
        return self.engine.work.flops(
            num_tokens=size.num_tokens - size.num_shared,
            num_squares=size.num_squares - size.num_shared_squares,
            num_head_tokens=size.num_response_tokens,
        )


@dataclass(slots=True)
class PolicyObjective(Objective):
    """The policy loss, built-in or the user's, with KL, entropy and positive NLL by their flags; the ptx loss of text.

    engine: the policy with its optimizer.
    ppo: coefficients of the method.
    size: counts of the optimizer step.
    longest: tokens of the longest response that the run allows.
    kl_coef: KL coefficient of the rollout.
    temperature: sampling temperature, by which logits are divided.
    unsup_coef: factor of the ptx loss.
    world: ranks and device.
    role: the model's role.
    text: plain text of this step for the ptx loss; None without one.
    own_loss: the user's loss in place of the clipped one, see loss_file.py; None: a built-in one.
    models: those of the run, whose reference or teacher an exact KL in the loss reads; None: the KL is estimated.
    """

    engine: TrainingEngine
    ppo: PPOCoefficients
    size: StepSize
    longest: int
    kl_coef: float
    temperature: float
    unsup_coef: float
    world: dist.World
    role: str = "actor"
    text: Step[SFTBatch] | None = None
    own_loss: Callable[..., Tensor] | None = None
    models: Models | None = None

    def loss(self, batch: MicroBatch, part: Responses, experience: Experience, sums: Sums) -> Tensor:
        """Return the policy loss, summed over the response tokens of a micro-batch."""
        from_sampler = self.ppo.old_log_probs == "sampler"
        log_probs, entropy, divergence = statistics_of(
            self.engine,
            part,
            batch,
            temperature=self.temperature,
            with_entropy=from_sampler or self.ppo.entropy_coef > 0,
            comparison=self.comparison(part, batch),
        )
        mask = experience.response_mask
        # --old-log-probs sampler: a rollout has one step. The policy is still the old one, so the ratio is 1 and its
        # gradient grad log pi; `experience.log_probs` are the sampler's, to which the trainer's are compared.
        old = log_probs.detach() if from_sampler else experience.log_probs
        factors = self.row_factors(mask, num_tokens=self.size.num_trained, num_rows=self.size.num_trained_rows)
        tokens, level = (log_probs, old, experience.advantages, mask), self.ppo.policy_ratio
        weights = self.weights(old, part.sampler_log_probs, mask, factors)
        if self.ppo.policy_loss == "cispo":
            cap = self.ppo.ratio_cap
            loss, stats = cispo_loss(*tokens, ratio_cap=cap, importance_sampling_level=level, weights=weights)
        else:
            loss, stats = policy_loss(
                *tokens,
                policy_clip=self.ppo.policy_clip,
                policy_clip_high=self.ppo.policy_clip_high or None,
                dual_clip=self.ppo.dual_clip or None,
                importance_sampling_level=level,
                weights=weights,
            )
        if self.own_loss is not None:  # the statistics are those of the clipped loss
            loss = self.own_loss(*tokens, weights)
        sums.add(policy=loss, ratio=stats.ratio_sum, clipped=stats.clipped_count, approx_kl=stats.approx_kl_sum)
        drift = stats.abs_log_ratio_max
        if entropy is not None and from_sampler:
            difference = torch.where(mask, log_probs.detach() - experience.log_probs, 0)
            drift, ratio = difference.abs().max(), torch.where(mask, difference, -torch.inf).exp()
            sums.add(entropy=masked_sum(entropy, mask), sampler_error=difference.abs().sum())
            sums.add(sampler_kl=(torch.expm1(difference) - difference).sum())
            sums.add(sampler_ratio=ratio.sum(), sampler_squares=ratio.square().sum())
        sums.raise_to(ratio=stats.ratio_max, log_ratio=drift)
        if self.ppo.kl_in_loss and (divergence is not None or experience.ref_log_probs is not None):
            kl = self.kl_coef * self.kl(log_probs, divergence, experience, factors)
            sums.add(kl=kl)
            loss = loss + kl
        if entropy is not None and self.ppo.entropy_coef:
            bonus = self.ppo.entropy_coef * weighted_sum(entropy, mask, factors)
            sums.add(entropy_bonus=bonus)
            loss = loss - bonus
        return loss

    def comparison(self, part: Responses, batch: MicroBatch) -> Comparison | None:
        """Return the distributions that an exact KL compares with those of the policy; None for an estimate."""
        if self.models is None or self.ppo.divergence is None:
            return None
        return comparison_of(self.models, part, batch, kind=self.ppo.divergence, longest=self.longest)

    def kl(
        self, log_probs: Tensor, divergence: Tensor | None, experience: Experience, factors: Tensor | None
    ) -> Tensor:
        """Return the KL of the loss: the exact divergence (n, T) if there is one, else its estimate."""
        mask, reference = experience.response_mask, experience.ref_log_probs
        if divergence is not None:
            return weighted_sum(divergence, mask, factors)
        assert reference is not None
        return kl_loss(log_probs, reference, mask, estimator=self.ppo.sampled_estimator, weights=factors)

    def row_factors(self, mask: Tensor, *, num_tokens: int, num_rows: int) -> Tensor | None:
        """Return the (n, 1) factors of rows that `--loss-aggregation` asks for; None: all are 1."""
        if self.ppo.loss_aggregation == "token_mean":
            return None
        return row_factors(
            mask,
            aggregation=self.ppo.loss_aggregation,
            num_tokens=num_tokens,
            num_rows=num_rows,
            longest=self.longest,
        )

    def weights(self, old: Tensor, sampled: Tensor, mask: Tensor, factors: Tensor | None) -> Tensor | None:
        """Return the weights of tokens, (n, T) or (n, 1): `factors` times the off-policy weights; None: all are 1.

        An off-policy weight is the ratio of the trainer's probability, `old`, to the sampler's.
        """
        if not self.ppo.weighs_off_policy:
            return factors
        off_policy = off_policy_weights(self.ppo, old, sampled, mask)
        return off_policy if factors is None else off_policy * factors

    def text_backward(self, sums: Sums) -> None:
        """Mix the language-model loss on plain text into the gradient (InstructGPT, section 3.4)."""
        if self.text is None:
            return
        scale = self.unsup_coef * self.world.size / max(self.text.num_trained, 1)
        for number, cpu_batch in enumerate(self.text.micro_batches):
            batch = to_device(cpu_batch, self.world.device)
            trained = batch.trained_mask[:, 1:]
            outputs = self.engine(
                batch.input_ids,
                attention_mask=batch.attention_mask,
                selected=trained,
                num_selected=int(cpu_batch.trained_mask[:, 1:].sum()),
                position_ids=batch.position_ids,
                right_padded=True,
            )
            loss = -outputs.log_probs.sum()
            sums.add(ptx=loss)
            last = number + 1 == len(self.text.micro_batches)
            self.engine.backward(loss * scale, last=last)

    def metrics(self, totals: dict[str, float], num_tokens: int) -> dict[str, float]:
        """Return the metrics of the policy."""
        metrics = {
            "loss/policy": totals["policy"] / num_tokens,
            "policy/ratio_mean": totals["ratio"] / num_tokens,
            "policy/ratio_max": totals["ratio_max"],
            "policy/first_ratio_error": totals["log_ratio_max"],
            "policy/clipfrac": totals["clipped"] / num_tokens,
            "policy/approx_kl": totals["approx_kl"] / num_tokens,
        }
        for name in ("kl", "entropy_bonus"):
            if name in totals:
                metrics[f"loss/{name}"] = totals[name] / num_tokens
        if self.text is not None:
            metrics["loss/ptx"] = totals["ptx"] / max(self.text.num_trained, 1)
        if self.ppo.old_log_probs == "sampler":
            metrics |= {
                "objective/entropy": totals["entropy"] / num_tokens,
                "policy/sampler_error": totals["log_ratio_max"],
                "policy/sampler_mean_error": totals["sampler_error"] / num_tokens,
                "policy/sampler_kl": totals["sampler_kl"] / num_tokens,
                "policy/effective_share": totals["sampler_ratio"] ** 2 / (num_tokens * totals["sampler_squares"]),
            }
        return metrics

    def flops(self, size: StepSize) -> float:
        """Return the matrix operations on responses and text."""
        flops = Objective.flops(self, size)  # `super()` does not know the new class that slots need
        if self.text is None:
            return flops
        text = {"num_tokens": self.text.num_tokens, "num_squares": self.text.num_squares}
        return flops + self.engine.work.flops(**text, num_head_tokens=self.text.num_trained)


@dataclass(slots=True)
class ValueObjective(Objective):
    """The clipped value loss of PPO.

    engine: the value model with its optimizer.
    value_clip: clip range of the new value around the old one; 0: no clip.
    role: the model's role.
    """

    engine: TrainingEngine
    value_clip: float
    role: str = "critic"

    def loss(self, batch: MicroBatch, part: Responses, experience: Experience, sums: Sums) -> Tensor:
        """Return the value loss, summed over the response tokens of a micro-batch."""
        targets = experience.targets
        assert targets is not None, "a rollout without values"
        values = values_of(self.engine, part, batch)
        clip = self.value_clip or None
        loss, clipped = value_loss(values, targets.values, targets.returns, experience.response_mask, value_clip=clip)
        sums.add(value=loss, value_clipped=clipped)
        return loss

    def metrics(self, totals: dict[str, float], num_tokens: int) -> dict[str, float]:
        """Return the metrics of the value model."""
        return {
            "loss/value": totals["value"] / num_tokens,
            "value/clipfrac": totals["value_clipped"] / num_tokens,
        }
