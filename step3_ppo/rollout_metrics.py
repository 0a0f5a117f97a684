"""Evaluation on held-out prompts, and the numbers of a rollout."""

import json
from pathlib import Path
from typing import Any

import torch

from pipeline.files import tolerated
from pipeline.tensor_ops import masked_mean, moments
from step3_ppo.estimators import explained_variance
from step3_ppo.experience import Responses, Rewarded, Scores

SAMPLES_SHOWN = 8


def rollout_metrics(responses: Responses, scores: Scores, rewarded: Rewarded, *, kl_coef: float) -> dict[str, float]:
    """Compute the objective, completion, value and advantage metrics of a whole rollout (all ranks hold all rows)."""
    valid, mask = rewarded.valid, rewarded.experience.response_mask
    kl, kl_k3 = (torch.where(mask, kl, 0.0).sum(1) for kl in (rewarded.kl, rewarded.kl_k3))
    finished = responses.finished.float()
    experience = rewarded.experience
    errors = moments(experience.returns - experience.values, mask)
    found = policy_metrics(responses, scores, mask)
    return found | {
        "objective/kl": masked_mean(kl, valid).item(),
        "objective/kl_k3": masked_mean(kl_k3, valid).item(),
        "objective/scores": masked_mean(scores.scores, valid).item(),
        "objective/rlhf_reward": masked_mean(rewarded.sequence_rewards - kl_coef * kl, valid).item(),
        "value/explained_variance": explained_variance(moments(experience.returns, mask), errors).item(),
        "advantages/mean": rewarded.advantage_mean,
        "advantages/std": rewarded.advantage_std,
        "completions/mean_length": masked_mean(responses.response_lengths.float(), valid).item(),
        "completions/truncated_fraction": masked_mean(1.0 - finished, valid).item(),
        "completions/eos_fraction": masked_mean(finished, valid).item(),
        "completions/empty_fraction": masked_mean((responses.response_lengths == 1) * finished, valid).item(),
        "rows_masked": float((responses.valid & ~valid).sum()),
    }


def policy_metrics(responses: Responses, scores: Scores, mask: torch.Tensor) -> dict[str, float]:
    """Return the metrics of the trainer's pass over the rollout; {} where it is left to the update's own pass."""
    if scores.entropy is None:
        return {}
    sampler_error = torch.where(mask, (responses.sampler_log_probs - scores.log_probs).abs(), 0.0).max()
    return {
        "objective/entropy": masked_mean(scores.entropy, mask).item(),
        "policy/sampler_error": sampler_error.item(),
    }


def evaluation_metrics(found: dict[str, float]) -> dict[str, float]:
    """Keep the metrics that describe a policy on held-out prompts, with the prefix `eval_`."""
    kept = ("objective/kl", "objective/kl_k3", "objective/entropy", "objective/scores", "objective/rlhf_reward")
    return {f"eval_{name}": found[name] for name in found if name in kept or name.startswith("completions/")}


def append_samples(
    path: Path, *, step: int, responses: Responses, scores: Scores, rewarded: Rewarded, tokenizer: Any
) -> None:
    """Add the first responses of an evaluation to samples.jsonl."""
    lines = []
    for n in range(min(SAMPLES_SHOWN, len(responses.sequences))):
        if not responses.valid[n]:
            continue
        start, length = int(responses.prompt_lengths[n]), int(responses.response_lengths[n])
        row = {
            "step": step,
            "prompt": tokenizer.decode(responses.sequences[n, :start], skip_special_tokens=True),
            "response": tokenizer.decode(responses.sequences[n, start : start + length], skip_special_tokens=True),
            "score": round(scores.scores[n].item(), 4),
            "kl": round(rewarded.kl[n].sum().item(), 4),
            "tokens": length,
            "finished": bool(responses.finished[n]),
        }
        lines.append(json.dumps(row, ensure_ascii=False) + "\n")
    with tolerated("samples"), path.open("a", encoding="utf-8") as file:
        file.writelines(lines)
