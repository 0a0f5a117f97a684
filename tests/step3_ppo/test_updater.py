"""PPO's update under DeepSpeed in a world of one, against a plain torch loop over rows and tokens.

All tests of the core that need DeepSpeed are here, so that the process group is made once.
"""

import copy
import json
import math
import time
from collections.abc import Iterator
from dataclasses import replace
from types import SimpleNamespace

import pytest
import torch
from datasets import Dataset
from support.ds_arguments import built
from support.in_process import group_of_one
from support.packed_rows import give_bounds, plain_kernel
from support.tiny_models import EOS, NUM_TOKENS, PAD, random_rows, save_tiny
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode
from transformers import AutoModelForCausalLM, AutoModelForSequenceClassification, PreTrainedTokenizerFast

from pipeline import dist
from pipeline.configuration.flags import Resolved
from pipeline.configuration.groups import DeepSpeedConfig, ModelConfig
from pipeline.data.batching import sft_batch
from pipeline.data.cache import StageData
from pipeline.data.counts import Counts
from pipeline.data.loader import Step
from pipeline.data.templates import set_template
from pipeline.engine.build import parameter_groups
from pipeline.engine.engine import TrainingEngine
from pipeline.errors import DivergedError, InputError
from pipeline.generation.hybrid_engine import HybridEngine
from pipeline.generation.rollouts import GenerationStopped, Prompt, RandomKey, Sampling
from pipeline.models import hidden_states
from pipeline.models.causal_lm import CausalLM
from pipeline.models.loading import load_causal_lm
from pipeline.models.reward_model import TokenValueModel, load_reward_model
from pipeline.tensor_ops import lengths_to_mask
from pipeline.training.metrics import check_name
from pipeline.training.steps import Stopping, step_together
from step3_ppo import models
from step3_ppo import updater as trainer
from step3_ppo.config import PPOCoefficients, PPOConfig, PPOOptimizerConfig, PromptDataConfig, SamplingConfig
from step3_ppo.experience import Experience, Responses
from step3_ppo.micro_batches import Lengths, MicroBatch
from step3_ppo.models import make_models, make_tokenizers
from step3_ppo.phases import Phases
from step3_ppo.prompts import make_plan
from step3_ppo.state import Collected, State
from step3_ppo.updater import Updater, should_stop_early

MEAN, STD, TEMPERATURE = 0.4, 2.5, 0.8
SIZES = [(3, 4), (5, 1), (2, 6), (1, 2), (6, 3), (4, 4)]
NUM_RESPONSE_TOKENS = sum(length for _, length in SIZES[:-1])  # the last row only fills the batch
SPLITS = [[[0, 1, 2, 3, 4, 5]], [[0, 1], [2, 3], [4, 5]], [[0], [1], [2], [3], [4], [5]], [[4, 5, 2], [0], [3, 1]]]


@pytest.fixture(scope="module", autouse=True)
def world() -> Iterator[dist.World]:
    with group_of_one() as made:
        yield made


# --- engines, experience, and the plain loop ---


def engine_of(module: nn.Module, *, zero_stage: int = 0, rate: float = 1e-2, clip: float = 0.0) -> TrainingEngine:
    """An Adam whose eps is so large that a step shows the size of the gradient, not its sign alone."""
    partitioned = DeepSpeedConfig(dtype="fp32", overlap_comm=False, stage3_param_persistence_threshold=0)
    settings = built(
        partitioned, zero_stage=zero_stage, dtype="fp32", micro_batch_size=2, gradient_accumulation_steps=3,
        world_size=1, max_grad_norm=clip, device="cpu",
    )  # fmt: skip
    groups = parameter_groups(module, learning_rate=rate, weight_decay=0.0, lora_learning_rate=rate)
    return TrainingEngine(module.train(), groups, settings, betas=(0.9, 0.95), eps=0.1)


def never_stopping(world) -> Stopping:
    return Stopping(SimpleNamespace(world=world, stop=SimpleNamespace(anywhere=lambda world: False)))


def make_updater(world, folders, *, micro_batch_size=2, unsup_coef=2.0, clip=0.0, zero_stage=0, rate=1e-2, **ppo):
    actor = CausalLM(load_causal_lm(folders.actor, dtype=torch.float32))
    critic = TokenValueModel(
        load_reward_model(folders.reward, dtype=torch.float32).model, score_mean=MEAN, score_std=STD
    )
    return Updater(
        actor=engine_of(actor, zero_stage=zero_stage, clip=clip, rate=rate),
        critic=engine_of(critic, zero_stage=zero_stage, clip=clip, rate=rate),
        world=world, ppo=PPOCoefficients(**ppo), temperature=TEMPERATURE, rows_per_step=6,
        micro_batch_size=micro_batch_size, unsup_coef=unsup_coef, seed=11, stopping=never_stopping(world),
    )  # fmt: skip


@pytest.fixture(scope="module", params=["opt", "llama"])
def folders(request, tiny_folders):
    return SimpleNamespace(actor=tiny_folders[request.param], reward=tiny_folders[f"{request.param}-reward"])


@pytest.fixture(scope="module")
def opt(tiny_folders):
    return SimpleNamespace(actor=tiny_folders["opt"], reward=tiny_folders["opt-reward"])


def make_responses() -> Responses:
    rows = random_rows(31, tuple(start + length for start, length in SIZES))
    sequences = torch.full((6, 12), EOS)
    for n, row in enumerate(rows):
        sequences[n, : len(row)] = row
    starts, lengths = (torch.tensor(column) for column in zip(*SIZES, strict=True))
    return Responses(
        sequences=sequences, prompt_lengths=starts, response_lengths=lengths, sampler_log_probs=torch.zeros(6, 6),
        finished=torch.ones(6, dtype=torch.bool), valid=torch.tensor([True] * 5 + [False]), row_index=torch.arange(6),
        order=torch.arange(6),
    )  # fmt: skip


def plain_log_probs(model: nn.Module, responses: Responses, n: int) -> torch.Tensor:
    """(T_n,) log-probabilities of row n's response tokens, the row alone, by transformers' own forward."""
    start, length = SIZES[n]
    row = responses.sequences[n : n + 1, : start + length]
    logs = (model(input_ids=row).logits[0] / TEMPERATURE).log_softmax(-1)
    return torch.stack([logs[start + t - 1, row[0, start + t]] for t in range(length)])


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
        log_probs + spread * noise[0], log_probs + 0.5 * noise[1], values + spread * noise[2], noise[3],
        values + noise[4],
    )  # fmt: skip
    return Experience(mask, *(torch.where(mask, part, 0) for part in parts))


def slow_update(folders, responses, experience, *, kl_coef=0.0, kl_in_loss=False, text=None, unsup_coef=2.0):
    """(gradients of the actor, of the critic, numbers) by a loop over tokens; PPO's equations written out again."""
    actor, critic = plain_models(folders)
    policy = value = torch.zeros(())
    ratios, clipped, value_clipped, approx_kl = [], 0, 0, 0.0
    for n in range(5):
        new, now = plain_log_probs(actor, responses, n), plain_values(critic, responses, n)
        for t in range(SIZES[n][1]):
            old, advantage = experience.log_probs[n, t], experience.advantages[n, t]
            ratio = (new[t] - old).exp()
            kept = torch.min(ratio * advantage, ratio.clamp(0.8, 1.2) * advantage)
            clipped += bool(ratio.clamp(0.8, 1.2) * advantage < ratio * advantage)
            policy = policy - kept
            if kl_in_loss:
                policy = policy + kl_coef * 0.5 * (new[t] - experience.ref_log_probs[n, t]) ** 2
            ratios.append(ratio.item())
            approx_kl += (ratio - 1 - ratio.log()).item()
            before, target = experience.values[n, t], experience.returns[n, t]
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
    loss = policy / NUM_RESPONSE_TOKENS
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


@pytest.fixture
def seen_gradients(monkeypatch):
    """The gradients of each engine as they are when the step is to be taken."""
    seen = []

    def watched(engines, rate_factor, *, loss):
        seen.extend(gradients(engine.module.model) for engine in engines)
        return step_together(engines, rate_factor, loss=loss)

    monkeypatch.setattr(trainer, "step_together", watched)
    return seen


def update(
    updater, responses, experience, batches=SPLITS[1], *, kl_coef=0.3, rate_factor=1.0, train_actor=True, text=None,
    packs=False,
):  # fmt: skip
    cut = [MicroBatch.of(rows, Lengths.of(responses, packs=packs)) for rows in batches]
    return updater.update(
        responses,
        experience,
        cut,
        num_tokens=updater.num_tokens(responses, experience, cut)[0],
        kl_coef=kl_coef,
        rate_factor=rate_factor,
        train_actor=train_actor,
        text=text,
    )


def assert_same_gradients(found: dict[str, torch.Tensor], expected: dict[str, torch.Tensor]) -> None:
    assert set(found) == set(expected)
    for name, gradient in expected.items():
        scale = gradient.abs().max().item()
        torch.testing.assert_close(found[name], gradient, rtol=1e-3, atol=1e-4 * scale + 1e-7, msg=name)


# --- the update ---


@pytest.mark.parametrize("batches", SPLITS, ids=["whole", "pairs", "single", "uneven"])
def test_losses_and_gradients_equal_a_plain_loop_for_any_micro_batches(world, folders, seen_gradients, batches):
    responses = make_responses()
    experience = make_experience(folders, responses)
    metrics, stepped = update(make_updater(world, folders), responses, experience, batches)
    actor, critic, numbers = slow_update(folders, responses, experience)
    assert stepped and 0 < numbers["policy/clipfrac"] < 1 and 0 < numbers["value/clipfrac"] < 1
    for name, value in numbers.items():
        assert metrics[name] == pytest.approx(value, rel=1e-3, abs=1e-5), name
    assert_same_gradients(seen_gradients[0], actor)
    assert_same_gradients(seen_gradients[1], critic)
    norm = math.sqrt(sum(g.square().sum().item() for g in actor.values()))
    assert metrics["actor/grad_norm"] == pytest.approx(norm, rel=1e-3)
    assert "loss/ptx" not in metrics


@pytest.mark.parametrize("batches", SPLITS[:2], ids=["whole", "pairs"])
def test_packed_rows_give_the_gradients_of_a_plain_loop(world, folders, seen_gradients, batches):
    responses = make_responses()
    experience = make_experience(folders, responses)
    updater = make_updater(world, folders)
    for engine in (updater.actor, updater.critic):
        give_bounds(engine.module.model)
    with plain_kernel() as kernel:
        metrics, stepped = update(updater, responses, experience, batches, packs=True)
    assert kernel.call_count == 2 * 2 * len(batches), "each of two layers of both models, each micro-batch"
    actor, critic, numbers = slow_update(folders, responses, experience)
    assert stepped
    for name, value in numbers.items():
        assert metrics[name] == pytest.approx(value, rel=1e-3, abs=1e-5), name
    assert_same_gradients(seen_gradients[0], actor)
    assert_same_gradients(seen_gradients[1], critic)


def test_a_kl_in_the_loss_adds_its_gradient(world, opt, seen_gradients):
    responses = make_responses()
    experience = make_experience(opt, responses)
    updater = make_updater(world, opt, kl_in_loss=True, kl_estimator="k2")
    metrics, _ = update(updater, responses, experience)
    actor, _, _ = slow_update(opt, responses, experience, kl_coef=0.3, kl_in_loss=True)
    assert_same_gradients(seen_gradients[0], actor)
    without = slow_update(opt, responses, experience)[2]
    assert metrics["loss/policy"] == pytest.approx(without["loss/policy"], rel=1e-3)  # the KL is logged apart


def text_step() -> Step:
    """Rows of 6, 3 and 5 tokens, of which the first two are no targets."""
    rows = [{"ids": row.tolist(), "trained": [n > 1 for n in range(len(row))]} for row in random_rows(8, (6, 3, 5))]
    batches = [sft_batch(rows[:2], pad_id=PAD), sft_batch([rows[2], None], pad_id=PAD)]
    return Step(micro_batches=batches, rows=[0, 1, 2], num_rows=3, num_tokens=14, num_trained=8)


def test_ptx_adds_its_gradient(world, folders, seen_gradients):
    responses = make_responses()
    experience = make_experience(folders, responses)
    metrics, _ = update(make_updater(world, folders), responses, experience, text=text_step())
    actor, critic, numbers = slow_update(folders, responses, experience, text=text_step())
    assert_same_gradients(seen_gradients[0], actor)
    assert_same_gradients(seen_gradients[1], critic)
    assert metrics["loss/ptx"] == pytest.approx(numbers["loss/ptx"], rel=1e-4)


@pytest.mark.parametrize("zero_stage", [1, 2])
def test_zero_stages_take_the_same_step(world, opt, zero_stage):
    responses = make_responses()
    experience = make_experience(opt, responses)
    results = []
    for stage, batches in ((0, SPLITS[0]), (zero_stage, SPLITS[1])):
        updater = make_updater(world, opt, zero_stage=stage, clip=0.5)
        metrics, _ = update(updater, responses, experience, batches, text=text_step())
        results.append((metrics["actor/grad_norm"], weights(updater.actor), weights(updater.critic)))
    (norm, *plain), (other_norm, *partitioned) = results
    assert other_norm == pytest.approx(norm, rel=1e-4) and norm > 0.5
    for first, second in zip(plain, partitioned, strict=True):
        for name in first:
            torch.testing.assert_close(second[name], first[name], rtol=1e-4, atol=1e-6)


def test_a_clipped_step_equals_torch_adamw(world, opt):
    responses = make_responses()
    experience = make_experience(opt, responses)
    updater = make_updater(world, opt, clip=0.5)
    actor, _ = plain_models(opt)
    optimizer = torch.optim.AdamW(actor.parameters(), lr=1e-2, betas=(0.9, 0.95), eps=0.1, weight_decay=0.0)
    for name, gradient in slow_update(opt, responses, experience)[0].items():
        actor.get_parameter(name).grad = gradient
    nn.utils.clip_grad_norm_(actor.parameters(), 0.5)
    for group in optimizer.param_groups:
        group["lr"] *= 0.25
    optimizer.step()
    metrics, _ = update(updater, responses, experience, rate_factor=0.25)
    for name, parameter in updater.actor.module.model.named_parameters():
        torch.testing.assert_close(parameter, actor.get_parameter(name), rtol=1e-4, atol=1e-6)
    assert metrics["actor/learning_rate"] == pytest.approx(0.25e-2)


def test_critic_warm_up_leaves_the_actor_as_it_is(world, opt):
    responses = make_responses()
    experience = make_experience(opt, responses)
    updater = make_updater(world, opt)
    actor, critic = weights(updater.actor), weights(updater.critic)
    metrics, stepped = update(updater, responses, experience, train_actor=False, text=text_step())
    assert stepped and equal_weights(weights(updater.actor), actor)
    assert not equal_weights(weights(updater.critic), critic)
    assert metrics["loss/value"] > 0 and "loss/ptx" not in metrics
    # The next step is the actor's first: nothing was left over.
    fresh = make_updater(world, opt)
    update(fresh, responses, experience)
    update(updater, responses, experience)
    assert equal_weights(weights(updater.actor), weights(fresh.actor))


@pytest.mark.parametrize("broken", ["advantages", "returns"])
@pytest.mark.parametrize("zero_stage", [0, 2])
def test_a_gradient_that_is_not_finite_skips_both_models(world, opt, broken, zero_stage):
    responses = make_responses()
    experience = make_experience(opt, responses)
    updater = make_updater(world, opt, zero_stage=zero_stage)
    actor, critic = weights(updater.actor), weights(updater.critic)
    bad = getattr(experience, broken).clone()
    bad[2, 1] = math.nan
    metrics, stepped = update(updater, responses, replace(experience, **{broken: bad}))
    assert not stepped
    assert equal_weights(weights(updater.actor), actor) and equal_weights(weights(updater.critic), critic)
    spoiled = "actor" if broken == "advantages" else "critic"
    assert not math.isfinite(metrics[f"{spoiled}/grad_norm"])
    # The next step is as if the bad one had never been.
    fresh = make_updater(world, opt, zero_stage=zero_stage)
    for one in (updater, fresh):
        assert update(one, responses, experience)[1]
    assert equal_weights(weights(updater.actor), weights(fresh.actor))
    assert equal_weights(weights(updater.critic), weights(fresh.critic))


def test_later_epochs_shuffle_and_each_visits_every_row_once(world, opt):
    updater = make_updater(world, opt, ppo_epochs=3)
    lengths = Lengths([4] * 12, [7, 1, 5, 2, 9, 3, 8, 2, 2, 6, 4, 1])
    found = list(updater.updates(lengths, rollout=4))
    assert len(found) == 6
    steps = [{row for batch in step for row in batch.rows} for step in found]
    assert steps[:2] == [set(range(6)), set(range(6, 12))], "the first epoch takes the rows in the rollout's order"
    assert all(steps[n] | steps[n + 1] == set(range(12)) for n in (0, 2, 4))
    assert len({frozenset(step) for step in steps}) == 6
    assert found == list(updater.updates(lengths, rollout=4)) and found != list(updater.updates(lengths, rollout=5))
    for step in found:
        room = 2 * max(batch.length for batch in step)
        assert len(step[0].rows) == 2 and all(len(batch.rows) * batch.length <= room for batch in step)


class Waits(TorchDispatchMode):
    """Counts what a GPU would have to be waited for: numbers read by Python, and shapes that depend on numbers."""

    def __init__(self) -> None:
        super().__init__()
        self.count = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        name = func.overloadpacket.__name__
        masks = name in ("index", "index_put", "index_put_") and any(
            index is not None and index.dtype == torch.bool for index in args[1]
        )
        self.count += masks or name in ("_local_scalar_dense", "nonzero", "masked_select", "equal", "unique")
        return func(*args, **(kwargs or {}))


@pytest.mark.parametrize("old_log_probs", ["trainer", "sampler"])
def test_micro_batches_do_not_wait_for_the_device(world, opt, monkeypatch, old_log_probs):
    monkeypatch.setattr(hidden_states, "check_padding", lambda mask: None)  # looks at a CPU's masks only
    responses = make_responses()
    experience = make_experience(opt, responses)
    counts = []
    for batches in ([[0, 1, 2, 3, 4, 5]], [[0, 1], [2, 3], [4, 5]]):
        updater = make_updater(world, opt, old_log_probs=old_log_probs)
        update(updater, responses, experience, batches)
        with Waits() as waits:
            update(updater, responses, experience, batches)
        counts.append(waits.count)
    assert counts[0] == counts[1] > 0


def test_with_the_samplers_log_probs_the_single_update_is_the_same(world, folders, seen_gradients):
    """The policy before the update is that of the update's own pass: ratio 1, and the gradient of a ratio of 1."""
    responses = make_responses()
    noisy, exact = make_experience(folders, responses), make_experience(folders, responses, spread=0.0)
    experience = replace(noisy, log_probs=exact.log_probs)
    plain, _ = update(make_updater(world, folders), responses, experience)
    drifted = experience.log_probs.clone()
    drifted[4, 1] -= 0.25
    drifted[5] += 9.0  # the last row only fills the batch
    metrics, stepped = update(
        make_updater(world, folders, old_log_probs="sampler"), responses, replace(experience, log_probs=drifted)
    )
    assert stepped
    assert_same_gradients(seen_gradients[2], seen_gradients[0])
    assert_same_gradients(seen_gradients[3], seen_gradients[1])
    assert metrics["policy/ratio_mean"] == metrics["policy/ratio_max"] == 1.0
    assert metrics["policy/approx_kl"] == metrics["policy/clipfrac"] == 0.0
    assert metrics["loss/policy"] == pytest.approx(plain["loss/policy"], abs=1e-5)
    assert metrics["policy/first_ratio_error"] == pytest.approx(0.25, abs=1e-4)
    assert metrics["policy/sampler_error"] == metrics["policy/first_ratio_error"]
    actor, _ = plain_models(folders)
    tokens = [(n, SIZES[n][0] + t) for n in range(5) for t in range(SIZES[n][1])]
    with torch.no_grad():
        logits = [
            actor(input_ids=responses.sequences[n : n + 1, :end]).logits[0, -1] / TEMPERATURE for n, end in tokens
        ]
    entropy = torch.distributions.Categorical(logits=torch.stack(logits)).entropy().mean().item()
    assert metrics["objective/entropy"] == pytest.approx(entropy, rel=1e-4)
    assert not {"objective/entropy", "policy/sampler_error"} & set(plain)


def test_early_stop_by_hand():
    assert should_stop_early({"policy/approx_kl": 0.3}, 0.2) and not should_stop_early({"policy/approx_kl": 0.1}, 0.2)
    assert not should_stop_early({"policy/approx_kl": 9.0}, 0.0)
    assert not should_stop_early({"policy/approx_kl": math.nan}, 0.2)


# --- the hybrid engine ---


def test_sampling_uses_the_trained_weights_and_leaves_the_mode(world, opt):
    engine = engine_of(CausalLM(load_causal_lm(opt.actor, dtype=torch.float32)))
    hybrid = HybridEngine(engine, eos_ids=frozenset({EOS}), pad_id=PAD)
    settings = {"num_samples": 2, "sampling": Sampling(6), "key": RandomKey(1, "rollout")}
    prompts = [Prompt(row.tolist(), n) for n, row in enumerate(random_rows(3))]
    with pytest.raises(RuntimeError, match="outside generation"):
        hybrid.generate(prompts, **settings)
    with hybrid.generation():
        assert not engine.module.training
        first = hybrid.generate(prompts, **settings)
    assert engine.module.training
    with torch.no_grad():
        for parameter in engine.module.parameters():
            parameter.mul_(1.5)
    with hybrid.generation():
        second = hybrid.generate(prompts, **settings)
    assert not all(a.equal(b) for a, b in zip(first.responses, second.responses, strict=True))
    with pytest.raises(ValueError, match="inside"), hybrid.generation():
        raise ValueError("inside")
    assert engine.module.training
    with pytest.raises(RuntimeError, match="outside generation"):
        hybrid.generate(prompts, **settings)


@pytest.mark.parametrize("zero_stage", [0, 3])
def test_training_goes_on_after_generation_was_broken_off(world, opt, zero_stage):
    """Under ZeRO-3 generation takes DeepSpeed's hooks off: they must be back."""
    responses = make_responses()
    experience = make_experience(opt, responses)
    updater, fresh = (make_updater(world, opt, zero_stage=zero_stage) for _ in range(2))
    hybrid = HybridEngine(updater.actor, eos_ids=frozenset({EOS}), pad_id=PAD)
    settings = {"num_samples": 2, "sampling": Sampling(6), "key": RandomKey(1, "rollout")}
    prompts = [Prompt(row.tolist(), n) for n, row in enumerate(random_rows(3))]
    with hybrid.generation():
        expected = hybrid.generate(prompts, **settings)
    with pytest.raises(GenerationStopped), hybrid.generation():
        hybrid.generate(prompts, **settings, should_stop=lambda: True)
    metrics, stepped = update(updater, responses, experience)
    plain, _ = update(fresh, responses, experience)
    assert stepped and metrics["actor/grad_norm"] == pytest.approx(plain["actor/grad_norm"], rel=1e-6)
    assert len(expected.responses) == 2 * len(prompts)
    hooks = [
        [len(m._forward_pre_hooks) + len(m._forward_hooks) for m in one.actor.module.modules()]
        for one in (updater, fresh)
    ]
    assert hooks[0] == hooks[1] and (sum(hooks[0]) > 2) == (zero_stage == 3)


# --- whole phases ---


class Recorded:
    """A recorder that keeps what it is given."""

    def __init__(self) -> None:
        self.steps: list[tuple[int, dict[str, float]]] = []
        self.evaluations: list[dict[str, float]] = []

    def begin(self, phase):
        return time.monotonic()

    def write(self, step, values):
        self.evaluations.append(values)

    def write_training(self, step, values, *, seconds, num_tokens, num_rows):
        for name in values:
            check_name(name)
        self.steps.append((step, values))


@pytest.fixture(scope="module")
def trained_folders(bpe_folder, tmp_path_factory):
    """An actor and a reward model with the constants of step 2."""
    parent = tmp_path_factory.mktemp("phases")
    actor = save_tiny("opt", bpe_folder, parent / "sft")
    reward = save_tiny("opt", bpe_folder, parent / "reward", reward=True, score_mean=MEAN, score_std=STD)
    for folder in (actor, reward):
        tokenizer = PreTrainedTokenizerFast.from_pretrained(folder)
        set_template(tokenizer, "auto")
        tokenizer.save_pretrained(folder)
    return SimpleNamespace(actor=actor, reward=reward)


def ppo_config(folders, *, actor_rate=1e-3, critic_rate=1e-3, actor=None, accumulation=1, **ppo) -> PPOConfig:
    return PPOConfig(
        actor=ModelConfig(model_name_or_path=folders.actor, learning_rate=actor_rate, **(actor or {})),
        critic=ModelConfig(model_name_or_path=folders.reward, learning_rate=critic_rate),
        data=PromptDataConfig(max_prompt_seq_len=16),
        sampling=SamplingConfig(per_device_generation_batch_size=4, max_answer_seq_len=8, temperature=TEMPERATURE),
        ppo=PPOCoefficients(**ppo),
        optimizer=PPOOptimizerConfig(
            per_device_train_batch_size=2, gradient_accumulation_steps=accumulation, max_bad_steps=2,
            per_device_eval_batch_size=2,
        ),
        deepspeed=DeepSpeedConfig(dtype="fp32"),
    )  # fmt: skip


def make_run(world, folder, config: PPOConfig) -> SimpleNamespace:
    stop = SimpleNamespace(here=lambda: False, anywhere=lambda world: False)
    return SimpleNamespace(world=world, folder=folder, stage="ppo", resolved=Resolved(config, {}), stop=stop)


def make_phases(world, folder, config: PPOConfig, *, num_prompts: int = 4, num_eval: int = 3) -> Phases:
    def rows(seed: int, count: int) -> Dataset:
        ids = [row.tolist() for row in random_rows(seed, (5, 2, 8, 1, 3, 4, 6, 7)[:count])]
        turns = json.dumps([{"role": "user", "content": "tea"}])
        return Dataset.from_list([{"prompt_ids": row, "prompt_id": n, "messages": turns} for n, row in enumerate(ids)])

    run = make_run(world, folder, config)
    prompts = StageData(rows(1, num_prompts), rows(2, num_eval), Counts())
    plan = make_plan(config, num_prompts=num_prompts, world_size=1)
    plan = replace(plan, total_steps=100)
    state = State(kl_coef=config.ppo.kl_coef)
    return Phases(
        run,
        config,
        make_models(run, config, make_tokenizers(config)),
        prompts=prompts,
        text=None,
        plan=plan,
        rate=lambda step: 1.0,
        average=None,
        recorder=Recorded(),
        state=state,
        stopping=never_stopping(world),
    )


def run_updates(phases: Phases, collected: Collected) -> None:
    for _ in phases.updates(collected):
        pass


def iterate(phases: Phases) -> list[dict[str, float]]:
    """One rollout and its updates; the metrics of its steps."""
    before = len(phases.recorder.steps)
    run_updates(phases, phases.collect())
    return [values for _, values in phases.recorder.steps[before:]]


def test_the_first_ratio_is_one_in_every_rollout(world, trained_folders, tmp_path):
    phases = make_phases(world, tmp_path, ppo_config(trained_folders, ppo_epochs=2))
    for rollout in range(2):
        steps = iterate(phases)
        assert len(steps) == 4 and phases.state.rollout == rollout + 1
        assert [values["policy/first_ratio_error"] for values in steps] == [0.0] * 4  # the rollout's first, on each
        assert steps[0]["policy/ratio_mean"] == 1.0 and steps[-1]["policy/ratio_max"] > 1.0001
        assert steps[0]["policy/sampler_error"] < 1e-4
        assert "objective/kl" in steps[0] and "objective/kl" not in steps[1]
    assert phases.state.step == 8 and phases.recorder.steps[-1][0] == 8


def test_rollouts_of_packed_rows_score_and_train_as_padded_ones(world, trained_folders, tmp_path, monkeypatch):
    config = ppo_config(trained_folders, accumulation=2)
    padded = make_phases(world, tmp_path, config)
    monkeypatch.setattr(models, "enable_packed_attention", give_bounds)
    packed = make_phases(world, tmp_path, config)
    assert packed.models.pack_rows and not padded.models.pack_rows
    with plain_kernel() as kernel:
        found = iterate(packed)
    assert kernel.called
    wanted = iterate(padded)
    assert found[0]["policy/first_ratio_error"] == 0.0 and len(found) == len(wanted)
    for mine, theirs in zip(found, wanted, strict=True):
        for name, value in theirs.items():
            if not name.startswith(("time/", "generate_")) and "per_s" not in name and math.isfinite(value):
                assert mine[name] == pytest.approx(value, rel=2e-3, abs=1e-4), name


def watched_passes(phases: Phases) -> list[bool]:
    """Of each forward pass of the actor from now on, whether it keeps what a backward pass needs."""
    seen: list[bool] = []
    phases.models.actor.module.register_forward_hook(lambda *_: seen.append(torch.is_grad_enabled()))
    return seen


SAMPLER = {"old_log_probs": "sampler", "accumulation": 2}


def test_the_samplers_log_probs_spare_a_pass_over_each_rollout(world, trained_folders, tmp_path):
    numbers = []
    for settings in ({"accumulation": 2}, SAMPLER):
        phases = make_phases(world, tmp_path, ppo_config(trained_folders, **settings))
        seen = watched_passes(phases)
        steps = [values for _ in range(2) for values in iterate(phases)]
        assert len(steps) == 2 and phases.state.rollout == 2
        before = [] if settings is SAMPLER else [False, False]
        assert seen == 2 * [*before, True, True]
        numbers.append(steps)
    plain, spared = numbers
    assert all(0 < values["policy/first_ratio_error"] < 1e-4 for values in spared)
    for name, value in plain[0].items():
        if not name.startswith(("time/", "policy/first_ratio", "generate_")) and math.isfinite(value):
            assert spared[0][name] == pytest.approx(value, rel=1e-3, abs=1e-4), name


def test_a_sampler_of_other_weights_is_found_out(world, trained_folders, tmp_path):
    phases = make_phases(world, tmp_path, ppo_config(trained_folders, **SAMPLER))
    collected = phases.collect()
    with torch.no_grad():
        for parameter in phases.models.actor.module.parameters():
            parameter.mul_(1.05)
    run_updates(phases, collected)
    assert phases.recorder.steps[0][1]["policy/first_ratio_error"] > 1e-2


def test_a_restored_rollout_trains_as_the_sampled_one(world, trained_folders, tmp_path):
    kept, restored = (make_phases(world, tmp_path, ppo_config(trained_folders, **SAMPLER)) for _ in range(2))
    collected = kept.collect()
    run_updates(kept, collected)
    run_updates(restored, Collected.restored(collected.tensors(), collected.metrics, world.device))
    assert equal_weights(weights(kept.models.actor), weights(restored.models.actor))
    assert kept.state == restored.state
    evaluations = []
    for phases in (kept, restored):
        phases.evaluate()
        evaluations += phases.recorder.evaluations
    assert evaluations[0] == evaluations[1] and "eval_objective/entropy" in evaluations[0]


@pytest.mark.parametrize("settings", [{"accumulation": 1}, {"accumulation": 2, "ppo_epochs": 2}])
def test_the_samplers_log_probs_are_refused_for_several_steps(trained_folders, settings):
    """A second step needs the log-probabilities of the policy before the first."""
    with pytest.raises(ValueError, match="old_log_probs: sampler needs one optimizer step per rollout, found 2"):
        ppo_config(trained_folders, old_log_probs="sampler", **settings)


def test_with_learning_rate_0_the_ratio_stays_one(world, trained_folders, tmp_path):
    phases = make_phases(world, tmp_path, ppo_config(trained_folders, ppo_epochs=2))
    phases.rate = lambda step: 0.0
    found = [values for _ in range(2) for values in iterate(phases)]
    assert max(abs(values["policy/ratio_max"] - 1) for values in found) < 1e-5  # other rows in a batch, other rounding
    assert [values["policy/approx_kl"] for values in found] == pytest.approx([0.0] * 8, abs=1e-9)


def test_at_the_start_there_is_no_kl_and_the_critic_is_on_the_rewards_scale(world, trained_folders, tmp_path):
    phases = make_phases(world, tmp_path, ppo_config(trained_folders))
    assert (phases.models.score_mean, phases.models.score_std) == (MEAN, STD)
    collected = phases.collect()
    assert abs(collected.metrics["objective/kl"]) < 1e-6
    responses = collected.responses
    values = phases.models.critic(responses.sequences, responses.attention_mask).detach()
    last = responses.attention_mask.sum(1) - 1
    raw = phases.assess(responses, Lengths.of(responses), None, phases.prompts.train)[0].scores
    torch.testing.assert_close(values[torch.arange(4), last], (raw - MEAN) / STD, rtol=1e-4, atol=1e-4)
    plain = make_phases(world, tmp_path, ppo_config(trained_folders, normalise_scores=False))
    assert (plain.models.critic.module.score_mean, plain.models.score_std) == (0.0, 1.0)


def test_an_update_phase_stops_where_the_policy_has_moved_too_far(world, trained_folders, tmp_path):
    far = {"actor_rate": 3e-2, "ppo_epochs": 4}
    assert len(iterate(make_phases(world, tmp_path, ppo_config(trained_folders, **far)))) == 8
    stopped = iterate(make_phases(world, tmp_path, ppo_config(trained_folders, **far, approx_kl_stop=1e-3)))
    assert 1 < len(stopped) < 8
    assert stopped[-1]["policy/approx_kl"] > 1e-3 >= max(values["policy/approx_kl"] for values in stopped[:-1])


def test_skipped_updates_are_counted_and_too_many_in_a_row_end_the_run(world, trained_folders, tmp_path):
    phases = make_phases(world, tmp_path, ppo_config(trained_folders))
    collected = phases.collect()
    bad = torch.where(collected.experience.response_mask, math.nan, 0.0)
    spoiled = replace(collected.experience, returns=bad)
    before = weights(phases.models.actor)
    with pytest.raises(DivergedError, match="2 steps in a row"):
        run_updates(phases, replace(collected, experience=spoiled))
    assert (phases.state.step, phases.state.skipped_updates) == (2, 2)
    assert phases.recorder.steps[0][1]["skipped_updates"] == 1
    assert equal_weights(weights(phases.models.actor), before)
    phases.state.update = 0
    iterate(phases)
    assert (phases.state.step, phases.state.skipped_updates, phases.state.bad_in_a_row) == (4, 2, 0)


def test_the_first_steps_may_be_the_critics_alone(world, trained_folders, tmp_path):
    phases = make_phases(world, tmp_path, ppo_config(trained_folders, critic_warmup_steps=2))
    actor, critic = weights(phases.models.actor), weights(phases.models.critic)
    iterate(phases)
    assert equal_weights(weights(phases.models.actor), actor)
    assert not equal_weights(weights(phases.models.critic), critic)
    iterate(phases)
    assert not equal_weights(weights(phases.models.actor), actor)


def test_an_adaptive_coefficient_follows_the_kl(world, trained_folders, tmp_path):
    phases = make_phases(world, tmp_path, ppo_config(trained_folders, kl_target=5.0, kl_horizon=100))
    iterate(phases)  # KL 0 against a target of 5: the error is clipped at -20 %, of 4 sequences in 100
    assert phases.state.kl_coef == pytest.approx(0.1 * (1 - 0.2 * 4 / 100))


def test_evaluations_repeat_and_train_nothing(world, trained_folders, tmp_path):
    phases = make_phases(world, tmp_path, ppo_config(trained_folders))
    before = weights(phases.models.actor)
    phases.evaluate()
    phases.evaluate()  # the same step: nothing to do
    assert len(phases.recorder.evaluations) == 1
    phases.state.evaluated = -1
    phases.evaluate()
    first, second = phases.recorder.evaluations
    assert first == second and "eval_objective/scores" in first
    assert equal_weights(weights(phases.models.actor), before)
    samples = [json.loads(line) for line in (tmp_path / "samples.jsonl").read_text().splitlines()]
    assert len(samples) == 6 and samples[:3] == samples[3:] and set(samples[0]) >= {"prompt", "response", "score"}


def test_with_lora_the_reference_is_the_actor_without_adapters(world, trained_folders, tmp_path):
    actor = {"lora_dim": 4, "lora_learning_rate": 3e-2}
    phases = make_phases(world, tmp_path, ppo_config(trained_folders, actor=actor))
    assert phases.models.reference is None
    start = phases.collect()
    assert abs(start.metrics["objective/kl"]) < 1e-5  # the reference is scored in other batches: other rounding
    before = weights(phases.models.actor)
    run_updates(phases, start)
    after = weights(phases.models.actor)
    assert {name for name in after if not after[name].equal(before[name])} <= {n for n in after if "lora_" in n}
    assert abs(phases.collect().metrics["objective/kl"]) > 1e-4
    assert phases.recorder.steps[0][1]["policy/first_ratio_error"] == 0.0


# --- what is refused before training ---


def test_dropout_of_lora_layers_is_refused(trained_folders):
    """It would be drawn anew in each pass: the first ratio could not be 1."""
    with pytest.raises(ValueError, match="lora_dropout: .*0"):
        ppo_config(trained_folders, actor={"lora_dim": 4, "lora_dropout": 0.1})


def other_tokenizer(source: str, folder) -> None:
    tokenizer = PreTrainedTokenizerFast.from_pretrained(source)
    saved = json.loads(tokenizer.backend_tokenizer.to_str())
    vocabulary = saved["model"]["vocab"]
    saved["model"]["vocab"] = {t: i if i < 4 else NUM_TOKENS + 3 - i for t, i in vocabulary.items()}
    (folder / "tokenizer.json").write_text(json.dumps(saved))


def test_a_critic_with_another_tokenizer_is_refused_and_a_reward_model_is_not(
    world, trained_folders, tmp_path, bpe_folder
):
    folder = tmp_path / "other"
    save_tiny("llama", bpe_folder, folder, reward=True)
    tokenizer = PreTrainedTokenizerFast.from_pretrained(trained_folders.actor)
    tokenizer.save_pretrained(folder)
    other_tokenizer(trained_folders.actor, folder)
    config = ppo_config(SimpleNamespace(actor=trained_folders.actor, reward=str(folder)))
    with pytest.raises(InputError, match="--critic_model_name_or_path .* its tokenizer is not that of"):
        make_models(make_run(world, tmp_path, config), config, make_tokenizers(config))
    config = copy.deepcopy(ppo_config(trained_folders)).replace(reward_model_name_or_path=str(folder))
    models = make_models(make_run(world, tmp_path, config), config, make_tokenizers(config))
    assert models.reward_tokenizer is not None and (models.score_mean, models.score_std) == (0.0, 1.0)
    assert models.critic.module.score_mean == MEAN


def test_lengths_beyond_the_positions_are_refused(world, trained_folders, tmp_path):
    config = ppo_config(trained_folders)
    config = config.replace(data=config.data.replace(max_prompt_seq_len=60).model_dump())
    with pytest.raises(InputError, match="= 68: the actor .* has 64 positions"):
        make_models(make_run(world, tmp_path, config), config, make_tokenizers(config))


def test_masks_of_the_test_data_cover_what_they_should():
    responses = make_responses()
    assert int(responses.response_mask.sum()) == NUM_RESPONSE_TOKENS
    assert responses.attention_mask.equal(lengths_to_mask(torch.tensor([a + b for a, b in SIZES]), 12))
