"""Compute the metrics of a rollout, warn of one without a learning signal, and write the samples of an evaluation."""

import logging
import math
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from transformers import PreTrainedTokenizerBase

from pipeline.files import append_json_lines, tolerated
from pipeline.run.evaluations import WEIGHT
from pipeline.tensor_ops import masked_mean, masked_sum, moments
from pipeline.training.metrics import finite
from step3_ppo.experience import Experience, Responses, Scores
from step3_ppo.flags.groups import PPOCoefficients
from step3_ppo.flags.methods import METHODS
from step3_ppo.mathematics.estimators import explained_variance
from step3_ppo.mathematics.off_policy import difference_metrics, weight_shares
from step3_ppo.rewarding import Rewarded, off_policy_weights

log = logging.getLogger(__name__)


def rollout_metrics(responses: Responses, scores: Scores, rewarded: Rewarded, ppo: PPOCoefficients) -> dict[str, float]:
    """Compute the objective, completion, value and advantage metrics of a whole rollout; all ranks have all rows.

    A metric is NaN, logged as null, if no row counts.
    """
    valid, mask = rewarded.valid, rewarded.experience.response_mask
    finished = responses.finished.float()
    metrics = policy_metrics(responses, scores, mask, ppo) | value_metrics(rewarded.experience)
    metrics |= reward_metrics(responses, rewarded) | tool_metrics(responses)
    kls = {"objective/kl": rewarded.kl, "objective/kl_k3": rewarded.kl_k3}
    for name, kl in kls.items():
        if kl is not None and not METHODS[ppo.method].has_teacher:
            metrics[name] = mean_of(torch.where(mask, kl, 0.0).sum(1), valid)
    if rewarded.kl is not None and METHODS[ppo.method].has_teacher:  # per token: lengths may change much
        metrics["objective/teacher_kl"] = mean_of(masked_mean(rewarded.kl, mask, dim=1), valid)
    if rewarded.by_reward or rewarded.kl is not None:  # a teacher that the updates alone run gives no score
        metrics["objective/scores"] = mean_of(rewarded.scores, valid)
    if rewarded.by_reward:
        metrics["objective/score_clipfrac"] = mean_of(rewarded.clipped.float(), valid)
        metrics["objective/rlhf_reward"] = mean_of(rewarded.total_rewards, valid)
    return metrics | {
        "advantages/mean": rewarded.advantage_mean if mask.any() else math.nan,
        "advantages/std": rewarded.advantage_std if mask.any() else math.nan,
        "completions/mean_length": mean_of(responses.response_lengths.float(), valid),
        "completions/truncated_fraction": mean_of(1.0 - finished, valid),
        "completions/eos_fraction": mean_of(finished, valid),
        "completions/empty_fraction": mean_of((responses.response_lengths == 1) * finished, valid),
        "rows_masked": float((responses.valid & ~valid).sum()),
    }


def tool_metrics(responses: Responses) -> dict[str, float]:
    """Return mean turns, calls and seconds of a response, and the shares that failed; {} without tools."""
    if responses.tool_counts is None:
        return {}
    turns, calls, failed, seconds, lost = responses.tool_counts[responses.valid].unbind(1)
    return {
        "tools/turns": turns.mean().item(),
        "tools/calls": calls.mean().item(),
        "tools/failed_calls": (failed.sum() / calls.sum()).item(),
        "tools/seconds": seconds.mean().item(),
        "tools/lost": lost.mean().item(),
    }


def reward_metrics(responses: Responses, rewarded: Rewarded) -> dict[str, float]:
    """Return the mean of each reward and the share of failed calls of each function; {} if a reward model is alone."""
    if not rewarded.failures and len(rewarded.by_reward) == 1:
        return {}
    metrics = {
        f"reward/{name}": mean_of(raw.nan_to_num(0.0), responses.valid & raw.isfinite())
        for name, raw in rewarded.by_reward.items()
    }
    failures = rewarded.failures.items()
    return metrics | {f"reward_failures/{name}": mean_of(one.float(), responses.valid) for name, one in failures}


def group_metrics(rewarded: Rewarded, sampled: Mapping[str, float] | None, *, group_size: int) -> dict[str, float]:
    """Return the share of prompts whose rewards are all equal, and metrics of their replacements; {} without groups.

    sampled: tally of a rollout that replaced such prompts; None without --replace-equal-groups.
    """
    metrics = {"groups/equal": rewarded.equal_share} if group_size > 1 and rewarded.by_reward else {}
    if sampled is None:
        return metrics
    return metrics | {"groups/further_prompts": sampled["further"], "objective/sampled_scores": sampled["score"]}


def pass_metrics(responses: Responses, rewarded: Rewarded, *, group_size: int) -> dict[str, float]:
    """Return for each reward function pass@1 and pass@k.

    A response passes if its value is at least 1, a prompt if any of its responses does.
    """
    metrics = dict[str, float]()
    for name in rewarded.failures:
        counts = (responses.valid & rewarded.by_reward[name].isfinite()).view(-1, group_size)
        passes = counts & (rewarded.by_reward[name] >= 1).view(-1, group_size)
        metrics[f"pass_at_1/{name}"] = mean_of(passes.float(), counts)
        if group_size > 1:
            metrics[f"pass_at_k/{name}"] = mean_of(passes.any(1).float(), counts.any(1))
    return metrics


def warn_of_equal_rewards(step: int) -> None:
    """Log that a step with --replace-equal-groups had no rewards that differ."""
    log.warning(
        "step %d skipped: every prompt, also of the replacements, has responses with equal rewards; give prompts "
        "that are neither too hard nor too easy, or a reward with more values (--replace-equal-groups)",
        step,
    )


def mean_of(values: torch.Tensor, mask: torch.Tensor) -> float:
    """Return the mean of the values that count; NaN if none does."""
    return (masked_sum(values, mask) / mask.sum()).item()


def policy_metrics(responses: Responses, scores: Scores, mask: torch.Tensor, ppo: PPOCoefficients) -> dict[str, float]:
    """Return the metrics of the trainer's pass over the rollout; {} if there was none (--old-log-probs sampler)."""
    if scores.entropy is None:
        return {}
    differs = difference_metrics(scores.log_probs, responses.sampler_log_probs, mask)
    metrics = {"policy/sampler_error": differs.max_abs, "policy/sampler_mean_error": differs.mean_abs}
    metrics |= {"policy/sampler_kl": differs.kl, "policy/effective_share": differs.effective_share}
    if ppo.weighs_off_policy:
        weights = off_policy_weights(ppo, scores.log_probs, responses.sampler_log_probs, mask)
        shares = weight_shares(weights, mask, cap=ppo.off_policy_cap)
        metrics |= {"policy/weights_cut": shares.clipped, "policy/weights_rejected": shares.rejected}
    has_tokens = bool(mask.any())
    numbers = {name: value.item() if has_tokens else math.nan for name, value in metrics.items()}
    return {"objective/entropy": mean_of(scores.entropy, mask)} | numbers


def value_metrics(experience: Experience) -> dict[str, float]:
    """Return the metrics of the critic before the updates; {} without one."""
    if (targets := experience.targets) is None:
        return {}
    mask = experience.response_mask
    errors = moments(targets.returns - targets.values, mask)
    return {"value/explained_variance": explained_variance(moments(targets.returns, mask), errors).item()}


def row_values(responses: Responses, rewarded: Rewarded, *, num_prompts: int) -> dict[str, list[float]]:
    """Return the mean values of each held-out prompt's responses that count, for `row_values_line`."""
    prompts = responses.row_index[rewarded.valid]
    values = {"objective/scores": rewarded.scores, "completions/truncated_fraction": ~responses.finished}
    weights = torch.bincount(prompts, minlength=num_prompts)
    sums = {f"eval_{name}": column[rewarded.valid].double() for name, column in values.items()}
    means = {name: torch.bincount(prompts, column, num_prompts) / weights for name, column in sums.items()}
    return {name: column.tolist() for name, column in {WEIGHT: weights, **means}.items()}


def evaluation_metrics(values: dict[str, float], *, num_rows: int) -> dict[str, float]:
    """Select the metrics that describe a policy on `num_rows` held-out responses; names get the prefix `eval_`."""
    names = (
        "objective/",
        "completions/",
        "reward/",
        "reward_failures/",
        "pass_at_1/",
        "pass_at_k/",
        "tools/",
        "rows_masked",
    )
    return {f"eval_{name}": value for name, value in values.items() if name.startswith(names)} | {"eval_rows": num_rows}


def append_samples(
    path: Path, *, step: int, responses: Responses, rewarded: Rewarded, tokenizer: PreTrainedTokenizerBase
) -> list[dict[str, Any]]:
    """Append the responses of an evaluation on this rank to samples.jsonl, and return the new lines."""
    rows, kl = [], rewarded.kl
    starts, ends = responses.prompt_lengths.tolist(), responses.sequence_lengths.tolist()
    for n in range(len(responses.sequences)):
        if not responses.valid[n]:
            continue
        start, end = starts[n], ends[n]
        row = {
            "step": step,
            "prompt": tokenizer.decode(responses.sequences[n, :start], skip_special_tokens=True),
            # With tools the special tokens show where turns begin and end.
            "response": tokenizer.decode(
                responses.sequences[n, start:end], skip_special_tokens=responses.tool_counts is None
            ),
            "score": finite(round(rewarded.scores[n].item(), 4)),
            "tokens": int(responses.response_lengths[n]),
            "finished": bool(responses.finished[n]),
        }
        if kl is not None:
            row["kl"] = round(kl[n].sum().item(), 4) if rewarded.valid[n] else None
        rows.append(row)
    with tolerated("samples"):
        append_json_lines(path, rows)
    return rows
