"""PPO runs against the proxies, and the ablations; each is judged by the gold model after it ended."""

import json
import shutil
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

from benchmarks.learning.jobs import Jobs, Work, flags

PPO: dict[str, Any] = {
    "data_split": "none", "enable_tensorboard": "false", "keep_checkpoints": 0,
    "max_prompt_seq_len": 192, "max_answer_seq_len": 128, "long_prompts": "drop",
    "per_device_generation_batch_size": 64, "per_device_train_batch_size": 64,
    "per_device_eval_batch_size": 128, "eval_iters": 2, "actor_learning_rate": 1e-5, "critic_learning_rate": 3e-5,
    "num_warmup_steps": 10, "lr_scheduler_type": "constant_with_warmup", "normalise_scores": "true",
    "num_train_epochs": 1000,
}  # fmt: skip
MAX_ANSWER = PPO["max_answer_seq_len"]
EVALUATIONS = {"frontier": 12, "ablations": 5}  # of a run: its curve, or what it reached
KL_COEF = 0.05  # of the ablations
AS_IT_IS = "as it is"  # the ablation that the others are compared with


@dataclass(frozen=True, slots=True)
class Policy:
    """A PPO run: its name, the proxy it is trained against, and the flags in which it differs."""

    name: str
    proxy: str
    seed: int
    changes: dict[str, Any] = field(default_factory=dict)

    @property
    def key(self) -> str:
        return f"{self.name}-seed{self.seed}"


def frontier(depths: list[int], kl_coefs: list[float], seeds: int) -> Iterator[Policy]:
    """Yield the runs of the main figure: the deepest proxy first, then the others, at each coefficient and seed."""
    for depth in sorted(depths, reverse=True):
        for kl_coef in kl_coefs:
            for seed in range(1, seeds + 1):
                yield Policy(f"proxy-{depth}-kl{kl_coef:g}", f"proxy-{depth}", seed, {"kl_coef": kl_coef})


def ablation_rows(text: Path, fresh: Path) -> dict[str, dict[str, Any]]:
    """Return the rows of the table of ablations in their order: the flags in which each differs from the defaults."""
    return {
        AS_IT_IS: {},
        "no whitening": {"whiten_advantages": "false"},
        "no value clip": {"value_clip": 0},
        "no missing-EOS penalty": {"missing_eos_penalty": 0.0},
        "missing-EOS penalty 4": {"missing_eos_penalty": 4.0},
        "fresh critic": {"critic_model": fresh},
        "ptx, coefficient 1": {"unsupervised_data_path": text, "unsup_coef": 1.0},
        "k2 in the loss": {"kl_estimator": "k2", "kl_in_loss": "true"},
        "k3 in the loss": {"kl_estimator": "k3", "kl_in_loss": "true"},
        "LoRA of rank 64": {"actor_lora_dim": 64, "actor_lora_learning_rate": 1e-4, "only_optimize_lora": "true"},
        "sampler's log-probabilities": {"old_log_probs": "sampler"},
    }


def ablations(depth: int, seeds: int, text: Path, fresh: Path, *, only: Sequence[str]) -> Iterator[Policy]:
    """Yield the runs of the table of ablations, in the order of its rows; `only`: of these rows, where any is named."""
    rows = ablation_rows(text, fresh)
    for name, changes in rows.items() if not only else ((name, rows[name]) for name in only):
        for seed in range(1, seeds + 1):
            yield Policy(name, f"proxy-{depth}", seed, {"kl_coef": KL_COEF} | changes)


def works(jobs: Jobs, policies: Iterator[Policy], *, group: str, steps: int, more: dict[str, Any]) -> Iterator[Work]:
    """Yield PPO and the judge for each policy that has not been."""
    for policy in policies:
        if not (folder_of(jobs, group, policy) / "policy.json").exists():
            yield partial(one, jobs, policy, group, steps, more)


def folder_of(jobs: Jobs, group: str, policy: Policy) -> Path:
    return jobs.folder / group / file_name(policy.key)


def file_name(name: str) -> str:
    """Return the name of a run without what a file's name had better not have."""
    return name.replace(" ", "_").replace(",", "").replace("'", "")


def one(jobs: Jobs, policy: Policy, group: str, steps: int, more: dict[str, Any], gpu: int | None) -> None:
    """Train and judge one policy. Raises BenchError."""
    models, data, run_dir = jobs.folder / "models", jobs.folder / "data", folder_of(jobs, group, policy)
    output = run_dir.with_name(f"{run_dir.name}-models")
    given = PPO | {
        "actor_model": models / "sft", "critic_model": models / policy.proxy, "reward_model": models / policy.proxy,
        "data_path": data / "prompts.jsonl", "eval_data_path": data / "prompts_test.jsonl",
        "data_output_path": jobs.folder / "cache", "max_steps": steps, "seed": policy.seed,
        "eval_interval": max(steps // EVALUATIONS[group], 1), "output_dir": output, "run_dir": run_dir,
    }  # fmt: skip
    words = ["--overwrite", *flags(given | policy.changes | more)]
    jobs.run(f"{group}-{run_dir.name}", "step3_ppo.main", words, gpu=gpu)
    judge = {"policy": models / "sft", "prompts": data / "prompts_test.jsonl", "run_dir": run_dir}
    words = [*flags(judge), "--judges", f"gold={models / 'gold'}", f"proxy={models / policy.proxy}"]
    jobs.run(f"{group}-{run_dir.name}-judge", "benchmarks.learning.judge", words, gpu=gpu)
    shutil.rmtree(output)  # a run's models are read by nobody, and there are many runs
    (run_dir / "policy.json").write_text(
        json.dumps({"name": policy.name, "proxy": policy.proxy, "seed": policy.seed, "steps": steps}), encoding="utf-8"
    )


def best_of_n(jobs: Jobs, depths: list[int], *, num_samples: int) -> Iterator[Work]:
    """Yield the sampling of many answers of SFT, scored by all reward models, where it has not been."""
    models, output = jobs.folder / "models", jobs.folder / "best_of_n.jsonl"
    judges = [f"{name}={models / name}" for name in ("gold", *(f"proxy-{depth}" for depth in depths))]
    given = {"policy": models / "sft", "prompts": jobs.folder / "data" / "prompts_test.jsonl"}
    given |= {"output": output, "num_samples": num_samples, "max_answer": MAX_ANSWER}
    words = [*flags(given), "--judges", *judges]

    def work(gpu: int | None) -> None:
        jobs.run("best-of-n", "benchmarks.learning.judge", words, gpu=gpu)

    if not output.exists():
        yield work
