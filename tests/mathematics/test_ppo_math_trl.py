"""The mathematics of stage 3 against TRL's own trainers: their methods on a stand-in that has what they read.

Both get the same tensors and constants. Losses and gradients are those of one micro-batch that is a whole step.
"""

import importlib.util
import math
from collections import defaultdict
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from support.ragged import gradient

from pipeline.tensor_ops import lengths_to_mask
from step3_ppo.mathematics.estimators import (
    DEVIATION_EPSILON,
    group_advantages,
    kl_estimate,
    leave_one_out_advantages,
    spread_deviation,
    updated_spread,
)
from step3_ppo.mathematics.losses import cispo_loss, kl_loss, policy_loss, row_factors
from step3_ppo.mathematics.off_policy import difference_metrics, importance_weights

if importlib.util.find_spec("trl") is None:
    pytest.skip("TRL is not installed, whose trainers these numbers are compared with", allow_module_level=True)
from trl import GRPOTrainer, RLOOTrainer

N, T, K, LONGEST = 8, 7, 4, 20
LENGTHS = torch.tensor([7, 1, 4, 6, 2, 5, 7, 3])
MASK = lengths_to_mask(LENGTHS, T)
CLOSE = {"rtol": 1e-6, "atol": 1e-6}


def tokens(seed: int, count: int, *, size: float = 1.0) -> list[torch.Tensor]:
    generator = torch.Generator().manual_seed(seed)
    return [size * torch.randn(N, T, generator=generator) for _ in range(count)]


NONE = (
    "environment_factories", "tools", "environments", "pad_to_multiple_of", "off_policy_mask_threshold",
    "reward_clip_range", "ref_model",
)  # fmt: skip
OFF = (
    "aux_loss_enabled", "use_vllm", "mask_truncated_completions", "_entropy_bonus_enabled", "log_completions",
    "log_multimodal", "normalize_advantages",
)  # fmt: skip


def stand_in(
    *answers: torch.Tensor,
    rewards: torch.Tensor | None = None,
    sampled: torch.Tensor | None = None,
    delta: float | None = None,
    **changes: Any,
) -> SimpleNamespace:
    """What the methods read. A model's log-probabilities are `answers`, one after the other call of it."""
    replies, args = iter(answers), {"delta": delta, "use_bias_correction_kl": False, "per_device_train_batch_size": N}
    args |= {"steps_per_generation": 1, "gradient_accumulation_steps": 1, "gradient_checkpointing_kwargs": None}
    accelerator = SimpleNamespace(
        device=torch.device("cpu"), num_processes=1, process_index=0, gather=lambda x: x,
        gather_for_metrics=lambda x: x, reduce=lambda x, reduction: x, sync_gradients=True,
    )  # fmt: skip
    logps = None if sampled is None else [row[:n].tolist() for row, n in zip(sampled, LENGTHS, strict=True)]
    generated = ([[1]] * N, [[1] * n for n in LENGTHS.tolist()], None, [""] * N, logps, {}, None, None)
    trainer = {
        "accelerator": accelerator, "model": SimpleNamespace(training=True, is_gradient_checkpointing=False),
        "args": SimpleNamespace(**args), "beta": 0.0, "num_generations": K, "num_iterations": 1,
        "_tokenizer": SimpleNamespace(pad_token_id=0), "reward_weights": torch.ones(1), "reward_funcs": [None],
        "reward_func_names": ["reward"], "multi_objective_aggregation": "sum_then_normalize",
        "scale_rewards": "group", "top_entropy_quantile": 1.0, "importance_sampling_level": "token",
        "loss_type": "dapo", "epsilon_low": 0.2, "epsilon_high": 0.2, "max_completion_length": LONGEST,
        "current_gradient_accumulation_steps": 1, "vllm_importance_sampling_correction": True,
        "_metrics": {"train": defaultdict(list)}, "_pending_extra_logs": {}, "_pending_metrics": {},
        "_logs": {name: [] for name in ("prompt", "completion", "advantages")} | {"rewards": defaultdict(list)},
        "_generate": lambda prompts: generated,
        "_calculate_rewards": lambda *given: None if rewards is None else rewards.clone().unsqueeze(1),
        "_get_per_token_logps_and_entropies": lambda *given, **more: (next(replies), torch.zeros(N, T), None),
    }  # fmt: skip
    return SimpleNamespace(**(dict.fromkeys(NONE) | dict.fromkeys(OFF, False) | trainer | changes))


# --- advantages ---


def rollout(trainer: type, stand_in: SimpleNamespace) -> dict[str, Any]:
    if trainer is RLOOTrainer:
        prompts, completions, _, texts, *_ = stand_in._generate(None)
        stand_in._generate = lambda prompts_: (prompts, completions, texts)
    return trainer._generate_and_score_completions(stand_in, [{"prompt": "p"}] * N)


def scores_of(kind: str) -> torch.Tensor:
    """Scores of two groups of 4, NaN where TRL has none."""
    scores = torch.tensor([0.5, -1.0, 2.0, 0.25, 3.0, 3.5, -2.0, 1.0])
    scores[{"all": [], "some": [1, 6], "one left": [1, 4, 5, 6], "equal": []}[kind]] = math.nan
    if kind == "equal":
        scores[:4] = 0.1
    return scores


KINDS = ["all", "some", "one left", "equal"]


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("scale", ["group", "none", "batch"])
def test_advantages_of_grpo(kind, scale):
    scores = scores_of(kind)
    valid = ~scores.isnan()
    found = group_advantages(scores, valid, group_size=K, scale=scale == "group")
    if scale == "batch":
        seen = updated_spread(torch.zeros(3, dtype=torch.float64), scores, valid)
        found = found / (spread_deviation(seen) + DEVIATION_EPSILON)
    trainer = stand_in(rewards=scores, scale_rewards=scale)
    torch.testing.assert_close(found.float(), rollout(GRPOTrainer, trainer)["advantages"], **CLOSE)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("beta", [0.0, 0.3])
def test_advantages_of_rloo(kind, beta):
    """The KL is in the score that is compared: k1, summed over the row."""
    scores = scores_of(kind)
    old, ref = tokens(1, 2)
    trainer = stand_in(old, ref, rewards=scores, beta=beta, ref_model=SimpleNamespace())
    kl = torch.where(MASK, kl_estimate(old, ref, estimator="k1"), 0).sum(1)
    found = leave_one_out_advantages(scores - beta * kl, ~scores.isnan(), group_size=K)
    torch.testing.assert_close(found, rollout(RLOOTrainer, trainer)["advantages"], **CLOSE)


# --- sampler and trainer differ ---


@pytest.mark.parametrize("kind", ["token_truncate", "token_mask", "sequence_truncate", "sequence_mask"])
def test_weights_of_tokens_that_another_policy_drew(kind):
    old, mu = tokens(2, 2, size=0.4)
    low = 0.5 if kind.endswith("mask") else None
    trainer = stand_in(
        old, sampled=mu, rewards=scores_of("all"), use_vllm=True, vllm_importance_sampling_mode=kind,
        vllm_importance_sampling_clip_max=1.5, vllm_importance_sampling_clip_min=low,
    )  # fmt: skip
    theirs = rollout(GRPOTrainer, trainer)["importance_sampling_ratio"].expand(N, T)
    ours = importance_weights(old, mu, MASK, kind=kind, cap=1.5, low=low or 0.0)
    torch.testing.assert_close(ours[MASK], theirs[MASK], **CLOSE)
    assert (ours[MASK] != 1).all() and 0 < ((ours[MASK] == 0) | (ours[MASK] == 1.5)).sum() < MASK.sum()
    metrics, known = trainer._metrics["train"], difference_metrics(old, mu, MASK)
    assert metrics["sampling/sampling_logp_difference/mean"] == [pytest.approx(known.mean_abs.item(), rel=1e-5)]
    assert metrics["sampling/sampling_logp_difference/max"] == [pytest.approx(known.max_abs.item(), rel=1e-6)]


# --- losses ---


def their_loss(
    log_probs: torch.Tensor, old: torch.Tensor, advantages: torch.Tensor, **changes: Any
) -> tuple[torch.Tensor, torch.Tensor, dict[str, list[float]]]:
    """Loss, gradient and metrics of TRL on a step of one micro-batch."""
    inputs = {
        "prompt_ids": torch.ones(N, 1), "prompt_mask": torch.ones(N, 1), "completion_ids": torch.ones(N, T),
        "completion_mask": MASK.long(), "advantages": advantages, "old_per_token_logps": old,
        "num_items_in_batch": MASK.sum(), "importance_sampling_ratio": changes.pop("ratio", None),
        "ref_per_token_logps": changes.pop("ref", None),
    }  # fmt: skip
    leaf = log_probs.clone().requires_grad_()
    trainer = stand_in(leaf, use_vllm=inputs["importance_sampling_ratio"] is not None, **changes)
    loss = GRPOTrainer._compute_loss(trainer, None, inputs)
    return loss.detach(), gradient(loss, leaf), trainer._metrics["train"]


LOSS_TYPES = {"grpo": "sequence_mean", "dapo": "token_mean", "bnpo": "token_mean", "dr_grpo": "constant"}
CLIPS = {
    "one clip": ({}, {}),
    "clip above": ({"epsilon_high": 0.6}, {"policy_clip_high": 0.6}),
    "dual clip": ({"delta": 1.5}, {"dual_clip": 1.5}),
    "dual clip, clip above": ({"delta": 1.9, "epsilon_high": 0.5}, {"dual_clip": 1.9, "policy_clip_high": 0.5}),
}


def data(seed: int) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
    log_probs, old, ref, weights = tokens(seed, 4, size=0.5)
    advantages = torch.randn(N, generator=torch.Generator().manual_seed(seed))
    return log_probs, old, ref, weights.abs(), advantages


def factors_of(loss_type: str) -> torch.Tensor:
    return row_factors(MASK, aggregation=LOSS_TYPES[loss_type], num_tokens=int(MASK.sum()), num_rows=N, longest=LONGEST)


@pytest.mark.parametrize("loss_type", LOSS_TYPES)
@pytest.mark.parametrize("clips", CLIPS)
@pytest.mark.parametrize("level", ["token", "sequence"])
@pytest.mark.parametrize("weighted", [False, True])
def test_the_clipped_losses(loss_type, clips, level, weighted):
    """Their `delta` is the dual clip while it is not below 1 + epsilon_high."""
    log_probs, old, _, weights, advantages = data(3)
    theirs, ours = CLIPS[clips]
    loss, expected, metrics = their_loss(
        log_probs, old, advantages, loss_type=loss_type, importance_sampling_level=level,
        ratio=weights if weighted else None, **theirs,
    )  # fmt: skip
    leaf = log_probs.clone().requires_grad_()
    factors = factors_of(loss_type)
    total, stats = policy_loss(
        leaf, old, advantages.unsqueeze(1).expand(N, T).clone(), MASK, policy_clip=0.2,
        importance_sampling_level=level, weights=factors * weights if weighted else factors, **ours,
    )  # fmt: skip
    found = total / MASK.sum()
    torch.testing.assert_close(found.detach(), loss, **CLOSE)
    torch.testing.assert_close(gradient(found, leaf), expected, **CLOSE)
    assert (expected != 0).any()
    if level == "token" and "delta" not in theirs:  # TRL counts rows at the other level, and no token of its delta
        counts = torch.stack([stats.clipped_low, stats.clipped_high]) / MASK.sum()
        assert counts.tolist() == pytest.approx([metrics[f"clip_ratio/{part}_mean"][0] for part in ("low", "high")])


def test_a_delta_below_the_clip_above_is_no_dual_clip():
    """TRL's bounds the ratio of positive advantages too, and lets the clip of negative ones pass it."""
    log_probs, old, _, _, advantages = data(3)
    loss, _, _ = their_loss(log_probs, old, advantages, loss_type="dapo", delta=1.1)
    full = advantages.unsqueeze(1).expand(N, T).clone()
    total, _ = policy_loss(log_probs, old, full, MASK, policy_clip=0.2, dual_clip=1.1)
    assert abs((total / MASK.sum() - loss).item()) > 1e-3


@pytest.mark.parametrize("level", ["token", "sequence"])
@pytest.mark.parametrize("weighted", [False, True])
def test_cispo(level, weighted):
    log_probs, old, _, weights, advantages = data(4)
    loss, expected, _ = their_loss(
        log_probs, old, advantages, loss_type="cispo", epsilon_high=1.4, importance_sampling_level=level,
        ratio=weights if weighted else None,
    )  # fmt: skip
    leaf, full = log_probs.clone().requires_grad_(), advantages.unsqueeze(1).expand(N, T).clone()
    total, stats = cispo_loss(
        leaf, old, full, MASK, ratio_cap=1.4, importance_sampling_level=level, weights=weights if weighted else None
    )
    torch.testing.assert_close((total / MASK.sum()).detach(), loss, **CLOSE)
    torch.testing.assert_close(gradient(total / MASK.sum(), leaf), expected, **CLOSE)
    assert stats.clipped_high.item() > 0


@pytest.mark.parametrize("loss_type", LOSS_TYPES)
def test_the_kl_in_the_loss(loss_type):
    """Its value: k3's. Its gradient is that of KL(ref || policy) in TRL, without its `use_bias_correction_kl`."""
    log_probs, old, ref, _, advantages = data(5)
    full, factors = advantages.unsqueeze(1).expand(N, T).clone(), factors_of(loss_type)
    loss, _, _ = their_loss(log_probs, old, advantages, loss_type=loss_type, beta=0.3, ref=ref)
    total, _ = policy_loss(log_probs, old, full, MASK, policy_clip=0.2, weights=factors)
    total = total + 0.3 * kl_loss(log_probs, ref, MASK, estimator="k3", weights=factors)
    torch.testing.assert_close(total / MASK.sum(), loss, **CLOSE)
