"""PPO's update under DeepSpeed in a world of one, against a plain torch loop over rows and tokens."""

import math
import traceback
from dataclasses import replace
from types import SimpleNamespace

import pytest
import torch
from support.ds_arguments import built
from support.packed_rows import give_bounds, plain_kernel
from support.ppo_updates import (
    NUM_RESPONSE_TOKENS,
    SIZES,
    SPLITS,
    TEMPERATURE,
    assert_same_gradients,
    equal_weights,
    make_experience,
    make_responses,
    make_updater,
    plain_entropies,
    plain_models,
    plain_values,
    slow_update,
    text_step,
    update,
    weights,
)
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode

from pipeline.configuration.groups import DeepSpeedConfig, ModelConfig
from pipeline.engine.engine import TrainingEngine
from pipeline.engine.parameter_groups import parameter_groups
from pipeline.models.forward.causal_lm import CausalLM
from pipeline.models.loading import load_causal_lm
from pipeline.models.lora import add_lora
from pipeline.tensor_ops import lengths_to_mask
from pipeline.training.micro_batches import Lengths, MicroBatch
from step3_ppo.experience import Responses
from step3_ppo.updater import Updater


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
    actor, _, numbers = slow_update(opt, responses, experience, kl_coef=0.3, kl_in_loss=True)
    assert_same_gradients(seen_gradients[0], actor)
    assert metrics["loss/policy"] == pytest.approx(numbers["loss/policy"], rel=1e-3)
    assert metrics["loss/kl"] == pytest.approx(numbers["loss/kl"], rel=1e-3) and numbers["loss/kl"] > 0
    assert "loss/kl" not in update(make_updater(world, opt), responses, experience)[0]


@pytest.mark.few(1)
@pytest.mark.parametrize("batches", SPLITS[:2], ids=["whole", "pairs"])
def test_the_entropy_adds_its_gradient(world, folders, seen_gradients, batches):
    """Of the distributions whole, in nats a token."""
    responses, terms = make_responses(), {"entropy_coef": 0.7}
    experience = make_experience(folders, responses)
    metrics, stepped = update(make_updater(world, folders, **terms), responses, experience, batches)
    actor, critic, numbers = slow_update(folders, responses, experience, **terms)
    assert stepped
    for name in ("loss/policy", "loss/entropy_bonus"):
        assert metrics[name] == pytest.approx(numbers[name], rel=1e-3), name
    assert_same_gradients(seen_gradients[0], actor)
    assert_same_gradients(seen_gradients[1], critic)
    plain, _, _ = slow_update(folders, responses, experience)
    assert all(not actor[name].allclose(plain[name], rtol=0.01) for name in actor if actor[name].abs().max() > 1e-3)
    update(make_updater(world, folders, **terms, old_log_probs="sampler"), responses, experience, batches)
    exact = replace(experience, log_probs=make_experience(folders, responses, spread=0.0).log_probs)
    assert_same_gradients(seen_gradients[2], slow_update(folders, responses, exact, **terms)[0])


def test_the_entropy_has_the_mean_of_the_loss(world, opt):
    """Over responses of the mean of each; and for sums over the longest response."""
    responses = make_responses()
    experience = make_experience(opt, responses)
    actor, _ = plain_models(opt)
    entropy = [plain_entropies(actor, responses, n).sum().item() for n in range(5)]
    for aggregation, lengths in (("sequence_mean", [length for _, length in SIZES]), ("constant", [6] * 6)):
        models = make_updater(world, opt, entropy_coef=0.7, loss_aggregation=aggregation)
        metrics, _ = update(models, responses, experience)
        bonus = 0.7 * sum(entropy[n] / lengths[n] for n in range(5)) / 5
        assert metrics["loss/entropy_bonus"] == pytest.approx(bonus, rel=1e-4), aggregation


def test_ptx_adds_its_gradient(world, folders, seen_gradients):
    responses = make_responses()
    experience = make_experience(folders, responses)
    metrics, _ = update(make_updater(world, folders), responses, experience, text=text_step())
    actor, critic, numbers = slow_update(folders, responses, experience, text=text_step())
    assert_same_gradients(seen_gradients[0], actor)
    assert_same_gradients(seen_gradients[1], critic)
    assert metrics["loss/ptx"] == pytest.approx(numbers["loss/ptx"], rel=1e-4)


@pytest.mark.parametrize("batches", SPLITS[:2], ids=["whole", "pairs"])
def test_the_norm_of_a_gradient_with_ptx_is_that_of_both_parts_together(world, opt, batches):
    responses = make_responses()
    experience = make_experience(opt, responses)
    metrics, _ = update(make_updater(world, opt), responses, experience, batches, text=text_step())
    gradients, _, _ = slow_update(opt, responses, experience, text=text_step())
    norm = math.sqrt(sum(gradient.square().sum().item() for gradient in gradients.values()))
    assert metrics["actor/grad_norm"] == pytest.approx(norm, rel=1e-3)


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


@pytest.mark.parametrize("zero_stage", [0, 2])
@pytest.mark.parametrize("text", [None, text_step()], ids=["alone", "with text"])
def test_two_losses_of_one_model_take_one_step(world, opt, text, zero_stage):
    """The policy's twice: their gradients add up, and text closes the accumulation although its objective is first."""
    responses = make_responses()
    experience = make_experience(opt, responses)
    models, kinds = make_updater(world, opt, zero_stage=zero_stage), {"kl_coef": 0.3, "train_actor": True}
    first, value = models.objectives(**kinds, text=text)
    second, _ = models.objectives(**kinds, text=None)
    models.objectives = lambda **_: [first, second, value]
    metrics, stepped = update(models, responses, experience)
    actor, _ = plain_models(opt)
    optimizer = torch.optim.AdamW(actor.parameters(), lr=1e-2, betas=(0.9, 0.95), eps=0.1, weight_decay=0.0)
    with_text, without = (slow_update(opt, responses, experience, text=each)[0] for each in (text, None))
    for name in without:
        actor.get_parameter(name).grad = with_text[name] + without[name]
    optimizer.step()
    norm = math.sqrt(sum(p.grad.square().sum().item() for p in actor.parameters() if p.grad is not None))
    assert stepped and metrics["actor/grad_norm"] == pytest.approx(norm, rel=1e-3)
    for name, parameter in models.actor.module.model.named_parameters():
        torch.testing.assert_close(parameter, actor.get_parameter(name), rtol=1e-4, atol=1e-6)


def test_critic_warm_up_leaves_the_actor_as_it_is(world, opt):
    responses = make_responses()
    experience = make_experience(opt, responses)
    updater = make_updater(world, opt)
    actor, critic = weights(updater.actor), weights(updater.critic)
    metrics, stepped = update(updater, responses, experience, train_actor=False)
    assert stepped and equal_weights(weights(updater.actor), actor)
    assert not equal_weights(weights(updater.critic), critic)
    assert set(metrics) == {"loss/value", "value/clipfrac", "critic/grad_norm", "critic/learning_rate"}
    assert metrics["loss/value"] > 0
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
    bad = experience.advantages if broken == "advantages" else experience.targets.returns
    before = bad[2, 1].item()
    bad[2, 1] = math.nan
    metrics, stepped = update(updater, responses, experience)
    bad[2, 1] = before
    assert not stepped
    assert equal_weights(weights(updater.actor), actor) and equal_weights(weights(updater.critic), critic)
    culprit = "actor" if broken == "advantages" else "critic"
    assert not math.isfinite(metrics[f"{culprit}/grad_norm"])
    # The next step is as if the bad one had never been.
    fresh = make_updater(world, opt, zero_stage=zero_stage)
    for one in (updater, fresh):
        assert update(one, responses, experience)[1]
    assert equal_weights(weights(updater.actor), weights(fresh.actor))
    assert equal_weights(weights(updater.critic), weights(fresh.critic))


def test_a_value_clip_of_0_is_none(world, opt):
    """The loss is half the squared error to the return, however far the new value is from the old one."""
    responses = make_responses()
    experience = make_experience(opt, responses)
    metrics, _ = update(make_updater(world, opt, value_clip=0.0), responses, experience)
    errors = []
    for n, (_, length) in enumerate(SIZES[:-1]):
        values = plain_values(plain_models(opt)[1], responses, n)
        errors += [0.5 * (values - experience.targets.returns[n, :length]).square()]
    assert metrics["loss/value"] == pytest.approx(torch.cat(errors).mean().item(), rel=1e-4)
    assert metrics["value/clipfrac"] == 0.0


def test_later_epochs_shuffle_and_each_visits_every_row_once(world, opt):
    updater = make_updater(world, opt, ppo_epochs=3)
    lengths = Lengths([4] * 12, [7, 1, 5, 2, 9, 3, 8, 2, 2, 6, 4, 1])
    found = list(updater.updater.minibatches(lengths, 2, rollout=4))
    assert len(found) == 6
    steps = [{row for batch in step for row in batch.rows} for step in found]
    assert steps[:2] == [set(range(6)), set(range(6, 12))], "the first epoch takes the rows in the rollout's order"
    assert all(steps[n] | steps[n + 1] == set(range(12)) for n in (0, 2, 4))
    assert len({frozenset(step) for step in steps}) == 6
    assert found == list(updater.updater.minibatches(lengths, 2, rollout=4)) and found != list(
        updater.updater.minibatches(lengths, 2, rollout=5)
    )
    for step in found:
        room = 2 * max(batch.length for batch in step)
        assert len(step[0].rows) == 2 and all(len(batch.rows) * batch.length <= room for batch in step)


class Waits(TorchDispatchMode):
    """Counts what a GPU would have to be waited for: numbers read by Python, and shapes that depend on numbers.

    What transformers reads is left out: its older versions draw a number on the CPU in each layer of OPT.
    """

    def __init__(self) -> None:
        super().__init__()
        self.count = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        name = func.overloadpacket.__name__
        masks = name in ("index", "index_put", "index_put_") and any(
            index is not None and index.dtype == torch.bool for index in args[1]
        )
        waits = masks or name in ("_local_scalar_dense", "nonzero", "masked_select", "equal", "unique")
        self.count += waits and not any("transformers" in frame.filename for frame in traceback.extract_stack())
        return func(*args, **(kwargs or {}))


@pytest.mark.parametrize("old_log_probs", ["trainer", "sampler"])
def test_micro_batches_do_not_wait_for_the_device(world, opt, old_log_probs):
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


def test_masks_of_the_test_data_cover_what_they_should():
    responses = make_responses()
    assert int(responses.response_mask.sum()) == NUM_RESPONSE_TOKENS
    assert responses.attention_mask.equal(lengths_to_mask(torch.tensor([a + b for a, b in SIZES]), 12))


def test_a_warm_up_scales_the_rate_of_each_group_from_its_own_peak(world, opt):
    model = load_causal_lm(opt.actor, dtype=torch.float32)
    model = add_lora(
        model, dim=2, alpha=4, dropout=0.0, module_name="q_proj", only_lora=False, task="CAUSAL_LM", seed=0
    )
    settings = built(
        DeepSpeedConfig(dtype="fp32"), zero_stage=0, dtype="fp32", micro_batch_size=1, gradient_accumulation_steps=1,
        world_size=1, max_grad_norm=0.0, device="cpu",
    )  # fmt: skip
    module = CausalLM(model)
    groups = parameter_groups(module, ModelConfig(learning_rate=1e-4, lora_learning_rate=1e-2))
    engine = TrainingEngine(module.train(), groups, settings, betas=(0.9, 0.95), eps=1e-8)
    for factor in (0.5, 0.25, 1.0):
        engine.set_rate(factor)
        rates = {group["name"]: group["lr"] for group in engine.optimizer.param_groups}
        assert rates == pytest.approx({"decay": 1e-4 * factor, "no_decay": 1e-4 * factor, "lora": 1e-2 * factor})


def test_rows_that_pad_a_rollout_share_nothing_in_the_counts(world):
    """Two rows of a prompt of 9 tokens count, four of one of 20 tokens only fill up: 9 tokens pass as another row's."""
    spans = [(9, 3), (9, 5), *[(20, 2)] * 4]
    trained = torch.tensor([[start <= n < start + more for n in range(22)] for start, more in spans])
    valid, mask = torch.tensor([True] * 2 + [False] * 4), torch.ones(6, 5, dtype=torch.bool)
    responses = Responses(
        sequences=torch.zeros(6, 22, dtype=torch.int64), trained=trained, sampler_log_probs=torch.zeros(6, 5),
        finished=valid, valid=valid, row_index=torch.tensor([7, 7, 0, 0, 0, 0]), order=torch.arange(6),
    )  # fmt: skip
    batches = [MicroBatch.of(part, responses.lengths(packs=True)) for part in ((1, 0, 2, 3), (4, 5))]
    updater = Updater(world, num_epochs=1, rows_per_step=6, seed=0, rate=lambda step: 1.0)
    counted = SimpleNamespace(response_mask=mask & valid.unsqueeze(1))
    size = updater.step_size(responses, counted, batches)
    assert [batch.shared for batch in batches] == [(9, 20), (20,)]
    assert (size.num_tokens, size.num_shared, size.num_shared_squares) == (12 + 14, 9, 81)
