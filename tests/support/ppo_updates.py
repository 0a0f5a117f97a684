"""PPO's update on six hand-made rows, and the same update written out as a plain loop over rows and tokens."""

import math
from dataclasses import dataclass, replace
from types import SimpleNamespace
from typing import Any

import torch
from support.ds_arguments import PARTITIONED, built
from support.tiny_models import EOS, PAD, random_rows
from torch import nn
from transformers import AutoModelForCausalLM, AutoModelForSequenceClassification

from pipeline.configuration.groups import ModelConfig
from pipeline.data.batching import packed_sft_batch
from pipeline.data.loader import Step
from pipeline.engine.engine import TrainingEngine
from pipeline.engine.parameter_groups import parameter_groups
from pipeline.models.forward.causal_lm import CausalLM
from pipeline.models.loading import load_causal_lm
from pipeline.models.reward_model import TokenValueModel, load_reward_model
from pipeline.models.source import ModelSource
from pipeline.training.micro_batches import MicroBatch
from pipeline.training.steps import Stopping
from step3_ppo.experience import Experience, Responses, ValueTargets, span_mask
from step3_ppo.flags.groups import PPOCoefficients
from step3_ppo.objectives import Objective, PolicyObjective, StepSize, ValueObjective
from step3_ppo.updater import Updater

MEAN, STD, TEMPERATURE = 0.4, 2.5, 0.8
SIZES = [(3, 4), (5, 1), (2, 6), (1, 2), (6, 3), (4, 4)]
NUM_RESPONSE_TOKENS = sum(length for _, length in SIZES[:-1])  # the last row only fills the batch
SPLITS = [[[0, 1, 2, 3, 4, 5]], [[0, 1], [2, 3], [4, 5]], [[0], [1], [2], [3], [4], [5]], [[4, 5, 2], [0], [3, 1]]]


def engine_of(module: nn.Module, *, zero_stage: int = 0, rate: float = 1e-2, clip: float = 0.0) -> TrainingEngine:
    """An Adam whose eps is so large that a step shows the size of the gradient, not its sign alone."""
    settings = built(
        user_json=PARTITIONED, zero_stage=zero_stage, dtype="fp32", micro_batch_size=2, gradient_accumulation_steps=3,
        world_size=1, max_grad_norm=clip, device="cpu",
    )  # fmt: skip
    groups = parameter_groups(module, ModelConfig(learning_rate=rate, weight_decay=0.0, lora_learning_rate=rate))
    return TrainingEngine(module.train(), groups, settings, betas=(0.9, 0.95), eps=0.1)


def never_stopping(world) -> Stopping:
    return Stopping(SimpleNamespace(world=world, stop=SimpleNamespace(is_set_on_any_rank=lambda world: False)))


@dataclass
class TwoModels:
    """An updater with actor and critic and the settings of their objectives."""

    updater: Updater
    actor: TrainingEngine
    critic: TrainingEngine
    ppo: PPOCoefficients
    unsup_coef: float

    def objectives(
        self, *, kl_coef: float, train_actor: bool, text: Any, size: StepSize | None = None
    ) -> list[Objective]:
        """The policy's, where it is trained, and the value model's."""
        policy = PolicyObjective(
            engine=self.actor, ppo=self.ppo, kl_coef=kl_coef,
            size=size or StepSize(6, 0, 0, 0, 0), longest=6, temperature=TEMPERATURE, text=text,
            unsup_coef=self.unsup_coef, world=self.updater.world,
        )  # fmt: skip
        value = ValueObjective(self.critic, self.ppo.value_clip)
        return [policy, value] if train_actor else [value]


def make_updater(world, folders, *, unsup_coef=2.0, clip=0.0, zero_stage=0, rate=1e-2, **ppo):
    actor = CausalLM(load_causal_lm(folders.actor, dtype=torch.float32))
    critic = TokenValueModel(
        load_reward_model(ModelSource(folders.reward), dtype=torch.float32).model, score_mean=MEAN, score_std=STD
    )
    coefficients = PPOCoefficients(**ppo)
    return TwoModels(
        updater=Updater(world, coefficients.ppo_epochs, rows_per_step=6, seed=11, rate=lambda step: 1.0),
        actor=engine_of(actor, zero_stage=zero_stage, clip=clip, rate=rate),
        critic=engine_of(critic, zero_stage=zero_stage, clip=clip, rate=rate),
        ppo=coefficients, unsup_coef=unsup_coef,
    )  # fmt: skip


def make_responses() -> Responses:
    rows = random_rows(31, tuple(start + length for start, length in SIZES))
    sequences = torch.full((6, 12), EOS)
    for n, row in enumerate(rows):
        sequences[n, : len(row)] = row
    starts, lengths = (torch.tensor(column) for column in zip(*SIZES, strict=True))
    return Responses(
        sequences=sequences, trained=span_mask(starts, lengths, 12), sampler_log_probs=torch.zeros(6, 6),
        finished=torch.ones(6, dtype=torch.bool), valid=torch.tensor([True] * 5 + [False]), row_index=torch.arange(6),
        order=torch.arange(6),
    )  # fmt: skip


def plain_log_probs(model: nn.Module, responses: Responses, n: int) -> torch.Tensor:
    """(T_n,) log-probabilities of row n's response tokens, the row alone, by transformers' own forward."""
    start, length = SIZES[n]
    row = responses.sequences[n : n + 1, : start + length]
    logs = (model(input_ids=row).logits[0] / TEMPERATURE).log_softmax(-1)
    return torch.stack([logs[start + t - 1, row[0, start + t]] for t in range(length)])


def plain_entropies(model: nn.Module, responses: Responses, n: int) -> torch.Tensor:
    """(T_n,) entropies of the distributions that row n's response tokens were drawn from."""
    start, length = SIZES[n]
    logits = model(input_ids=responses.sequences[n : n + 1, : start + length]).logits[0] / TEMPERATURE
    return torch.distributions.Categorical(logits=logits[start - 1 : start + length - 1]).entropy()


def plain_values(model: nn.Module, responses: Responses, n: int) -> torch.Tensor:
    """(T_n,) normalised values of row n before each response token."""
    start, length = SIZES[n]
    hidden = model.model(input_ids=responses.sequences[n : n + 1, : start + length]).last_hidden_state[0]
    return ((model.score(hidden).squeeze(-1) - MEAN) / STD)[start - 1 : start + length - 1]


def plain_models(folders) -> tuple[nn.Module, nn.Module]:
    return (
        AutoModelForCausalLM.from_pretrained(folders.actor).eval(),
        AutoModelForSequenceClassification.from_pretrained(folders.reward).eval(),
    )


@torch.no_grad()
def make_experience(folders, responses: Responses, *, spread: float = 0.3) -> Experience:
    """Old log-probabilities and values near the models' own (at `spread`), so that both clips act on some tokens."""
    generator = torch.Generator().manual_seed(2)
    actor, critic = plain_models(folders)
    mask = responses.response_mask
    log_probs, values = torch.zeros(6, 6), torch.zeros(6, 6)
    for n, (_, length) in enumerate(SIZES):
        log_probs[n, :length] = plain_log_probs(actor, responses, n)
        values[n, :length] = plain_values(critic, responses, n)
    noise = [torch.randn(6, 6, generator=generator) for _ in range(5)]
    parts = (
        log_probs + spread * noise[0], log_probs + 0.5 * noise[1], noise[3], values + spread * noise[2],
        values + noise[4],
    )  # fmt: skip
    *of_policy, old, returns = (torch.where(mask, part, 0) for part in parts)
    return Experience(mask, *of_policy, ValueTargets(old, returns))


def slow_update(
    folders, responses, experience, *, kl_coef=0.0, kl_in_loss=False, text=None, unsup_coef=2.0, entropy_coef=0.0
):  # fmt: skip
    """(gradients of the actor, of the critic, numbers) by a loop over tokens; PPO's equations written out again."""
    actor, critic = plain_models(folders)
    policy = value = kl = entropy = torch.zeros(())
    ratios, clipped, value_clipped, approx_kl = [], 0, 0, 0.0
    for n in range(5):
        new, now = plain_log_probs(actor, responses, n), plain_values(critic, responses, n)
        if entropy_coef:
            entropy = entropy + entropy_coef * plain_entropies(actor, responses, n).sum() / NUM_RESPONSE_TOKENS
        for t in range(SIZES[n][1]):
            old, advantage = experience.log_probs[n, t], experience.advantages[n, t]
            ratio = (new[t] - old).exp()
            kept = torch.min(ratio * advantage, ratio.clamp(0.8, 1.2) * advantage)
            clipped += bool(ratio.clamp(0.8, 1.2) * advantage < ratio * advantage)
            policy = policy - kept
            if kl_in_loss:
                kl = kl + kl_coef * 0.5 * (new[t] - experience.ref_log_probs[n, t]) ** 2
            ratios.append(ratio.item())
            approx_kl += (ratio - 1 - ratio.log()).item()
            before, target = experience.targets.values[n, t], experience.targets.returns[n, t]
            near = before + (now[t] - before).clamp(-0.2, 0.2)
            value = value + 0.5 * torch.max((now[t] - target) ** 2, (near - target) ** 2)
            value_clipped += bool((near - target) ** 2 > (now[t] - target) ** 2)
    numbers = {
        "loss/policy": policy.item() / NUM_RESPONSE_TOKENS, "loss/value": value.item() / NUM_RESPONSE_TOKENS,
        "policy/ratio_mean": sum(ratios) / len(ratios), "policy/ratio_max": max(ratios),
        "policy/clipfrac": clipped / len(ratios), "value/clipfrac": value_clipped / len(ratios),
        "policy/approx_kl": approx_kl / len(ratios),
        "policy/first_ratio_error": max(abs(math.log(ratio)) for ratio in ratios),
    }  # fmt: skip
    numbers |= {"loss/kl": kl.item() / NUM_RESPONSE_TOKENS} if kl_in_loss else {}
    numbers |= {"loss/entropy_bonus": entropy.item()} if entropy_coef else {}
    loss = (policy + kl) / NUM_RESPONSE_TOKENS - entropy
    if text is not None:
        batches = text.micro_batches
        labels = [torch.where(b.trained_mask, b.input_ids, -100) for b in batches]
        ptx = sum(
            nn.functional.cross_entropy(
                actor(input_ids=b.input_ids, attention_mask=b.attention_mask.long()).logits[:, :-1].flatten(0, 1),
                label[:, 1:].flatten(), reduction="sum",
            )
            for b, label in zip(batches, labels, strict=True)
        ) / text.num_trained  # fmt: skip
        numbers["loss/ptx"] = ptx.item()
        loss = loss + unsup_coef * ptx
    loss.backward()
    (value / NUM_RESPONSE_TOKENS).backward()
    return gradients(actor), gradients(critic), numbers


def gradients(model: nn.Module) -> dict[str, torch.Tensor]:
    return {name: p.grad.clone() for name, p in model.named_parameters() if p.grad is not None}


def weights(engine: TrainingEngine) -> dict[str, torch.Tensor]:
    return {name: p.detach().clone() for name, p in engine.module.named_parameters()}


def equal_weights(first: dict[str, torch.Tensor], second: dict[str, torch.Tensor]) -> bool:
    return all(first[name].equal(second[name]) for name in first)


def update(
    models, responses, experience, batches=SPLITS[1], *, kl_coef=0.3, rate_factor=1.0, train_actor=True, text=None,
    packs=False,
):  # fmt: skip
    updater = replace(models.updater, rate=lambda step: rate_factor)
    cut = [MicroBatch.of(rows, responses.lengths(packs=packs)) for rows in batches]
    size = updater.step_size(responses, experience, cut)
    return updater.update(
        models.objectives(kl_coef=kl_coef, train_actor=train_actor, text=text, size=size),
        responses,
        experience,
        cut,
        num_tokens=size.num_trained,
        step=0,
        stopping=never_stopping(updater.world),
    )


def assert_same_gradients(found: dict[str, torch.Tensor], expected: dict[str, torch.Tensor]) -> None:
    assert set(found) == set(expected)
    for name, gradient in expected.items():
        scale = gradient.abs().max().item()
        torch.testing.assert_close(found[name], gradient, rtol=1e-3, atol=1e-4 * scale + 1e-7, msg=name)


def text_step() -> Step:
    """Rows of 6, 3 and 5 tokens, of which the first two are no targets."""
    rows = [{"ids": row.tolist(), "trained": [n > 1 for n in range(len(row))]} for row in random_rows(8, (6, 3, 5))]
    batches = [packed_sft_batch(packs, pad_id=PAD) for packs in ([[rows[0]], [rows[1]]], [[rows[2]], None])]
    counts = {"num_rows": 3, "num_tokens": 14, "num_trained": 8, "num_squares": 70}
    return Step(number=0, micro_batch_size=2, micro_batches=batches, rows=[0, 1, 2], **counts)
