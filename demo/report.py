"""Measure what the demo's models learned against the rule, on prompts that no stage has seen."""

import json
import math
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch

from demo.rule import is_good
from pipeline.data.templates import encode_prompt
from pipeline.data.turns import Message, prompt_hash
from pipeline.generation.episodes import generate
from pipeline.generation.rollouts import Prompt, RandomKey, Sampling, Vocabulary
from pipeline.generation.sources import session_source
from pipeline.models.loading import load_causal_lm
from pipeline.models.tokenizers import load_tokenizer
from rlhf.stages import stages_of_method

MAX_NEW_TOKENS = 32
NUM_SHOWN = 3
CAPTION = (
    "An answer is good if it has more kind words than unkind ones (demo/rule.py). The line",
    "that matters is that of the true rule, on prompts that no stage has seen.",
)


def answers(folder: Path, prompts: Sequence[str], *, template: Any, seed: int) -> list[str]:
    """Return an answer to each prompt, sampled at temperature 1; `template` is the tokenizer of a trained model."""
    model = load_causal_lm(str(folder), dtype=torch.float32).eval()
    turns = [[Message("user", prompt)] for prompt in prompts]
    rollout = generate(
        session_source(model, Vocabulary.of(template)),
        [Prompt(encode_prompt(template, turn), prompt_hash(turn)) for turn in turns],
        num_samples=1,
        num_slots=len(turns),
        sampling=Sampling(MAX_NEW_TOKENS),
        key=RandomKey(seed, "demo"),
    )
    return [text.strip() for text in template.batch_decode(rollout.responses, skip_special_tokens=True)]


def metrics(output: Path, stage: str, name: str) -> list[float]:
    """Return all values of a metric in a stage's metrics.jsonl, in order."""
    lines = (output / "runs" / stage / "metrics.jsonl").read_text(encoding="utf-8").splitlines()
    return [row[name] for row in map(json.loads, lines) if name in row]


def measure(output: Path, *, seed: int, method: str = "ppo") -> dict[str, Any]:
    """Return every number of the table, and the answers that it shows."""
    lines = (output / "demo" / "data" / "test.jsonl").read_text(encoding="utf-8").splitlines()
    prompts = [json.loads(line)["prompt"] for line in lines]
    template = load_tokenizer(str(output / "sft"))
    stage = stages_of_method(method)[3]
    samples = stage.section == "ppo"  # DPO, IPO and KTO sample none
    results: dict[str, Any] = {"prompts": len(prompts), "method": stage.methods[method] if samples else method.upper()}
    shown = [{"prompt": prompt} for prompt in prompts[:NUM_SHOWN]]
    for name, folder in (("base", "demo/base"), ("sft", "sft"), ("ppo", "actor")):
        texts = answers(output / folder, prompts, template=template, seed=seed)
        rate = sum(map(is_good, texts)) / len(prompts)
        results[f"{name}_rate"] = rate
        results[f"{name}_error"] = math.sqrt(rate * (1 - rate) / len(prompts))
        results[f"{name}_distinct"] = len(set(texts)) / len(texts)
        for row, text in zip(shown, texts, strict=False):
            row[name] = text
    perplexity = metrics(output, "sft", "eval_perplexity")
    reward = metrics(output, "ppo", "eval_objective/scores") if samples else metrics(output, "dpo", "eval_margin")
    results |= {"perplexity_before": perplexity[0], "perplexity_after": perplexity[-1]}
    if method == "ppo":
        accuracy = metrics(output, "reward", "eval_accuracy")
        results |= {"reward_accuracy_before": accuracy[0], "reward_accuracy": accuracy[-1]}
    if samples and (kl := metrics(output, "ppo", "eval_objective/kl")):  # of a run with a reference
        results |= {"kl_start": kl[0], "kl_end": kl[-1]}
    results |= {"reward_start": reward[0], "reward_end": reward[-1]}
    return results | {"answers": shown}


def failed_claims(results: dict[str, Any]) -> list[str]:
    """Return the claims of the demo that do not hold; [] if all hold."""
    claims = {
        "SFT rate in 0.3 .. 0.6": 0.3 <= results["sft_rate"] <= 0.6,
        f"{results['method']} at least 20 points higher": results["ppo_rate"] >= results["sft_rate"] + 0.2,
        **({"KL under 10 nats": results["kl_end"] < 10.0} if "kl_end" in results else {}),
        "distinct answers at least 0.8 of SFT's": results["ppo_distinct"] >= 0.8 * results["sft_distinct"],
    }
    return [claim for claim, holds in claims.items() if not holds]


def verdict(results: dict[str, Any]) -> str:
    """Return one line: all claims hold, or those that do not."""
    failed = ", ".join(failed_claims(results))
    return f"FAILED: {failed}" if failed else "all claims hold"


def table(results: dict[str, Any]) -> str:
    """Return the report for people, 80 columns wide."""
    rate, method = "{{{0}_rate:.3f}} +- {{{0}_error:.3f}}", results["method"]
    has_model = "reward_accuracy" in results
    kl = [(f"{method}: KL from the SFT model (nats a sequence)", "{kl_start:z.2f}", "{kl_end:.2f}")]
    accuracy = [("reward model: accuracy on unseen pairs", "{reward_accuracy_before:.3f}", "{reward_accuracy:.3f}")]
    without_model = "mean reward" if method in stages_of_method("ppo")[3].methods.values() else "margin on unseen pairs"
    score = "mean score of the reward model" if has_model else without_model
    rows = [
        ("", "before", "after"),
        ("SFT: perplexity on unseen answers", "{perplexity_before:.2f}", "{perplexity_after:.2f}"),
        *(accuracy if has_model else []),
        (f"{method}: {score}", "{reward_start:z.2f}", "{reward_end:.2f}"),
        *(kl if "kl_end" in results else []),
        (f"{method}: answers that are good by the true rule", rate.format("sft"), rate.format("ppo")),
        (f"{method}: share of distinct answers", "{sft_distinct:.3f}", "{ppo_distinct:.3f}"),
    ]
    lines = [f"{name:<46}{before.format(**results):>16}{after.format(**results):>16}" for name, before, after in rows]
    lines += ["", *CAPTION]
    for shown in results["answers"]:
        lines += ["", f"prompt  {shown['prompt']}"]
        names = {"base": "base", "sft": "sft", "ppo": results["method"].lower()}
        lines += [f"  {name:<6}{json.dumps(shown[key])[1:-1][:110]}" for key, name in names.items()]
    lines += [
        "",
        f"Measured on {results['prompts']} prompts, answers sampled at temperature 1,",
        f"after {results['minutes']:.1f} minutes. Talk to it:  python chat.py output/actor",
    ]
    return "\n".join(lines)
