"""The models that the policies start from and are judged by: SFT, proxies of several depths, golds, a fresh critic."""

import json
from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import Any

from benchmarks.learning.jobs import Jobs, flags

LENGTHS = {"sft": 512, "reward": 768}
GOLD_SEED = 77
SHARED: dict[str, Any] = {"data_split": "none", "enable_tensorboard": "false", "keep_checkpoints": 0}
SFT: dict[str, Any] = {
    "max_seq_len": LENGTHS["sft"], "per_device_train_batch_size": 16, "learning_rate": 2e-5, "num_warmup_steps": 10,
    "num_train_epochs": 1, "eval_fraction": 0.02,
}  # fmt: skip
REWARD: dict[str, Any] = {
    "max_seq_len": LENGTHS["reward"], "per_device_train_batch_size": 16, "gradient_accumulation_steps": 2,
    "learning_rate": 2e-5, "num_warmup_steps": 10, "num_train_epochs": 2, "eval_fraction": 0.0,
    "long_pairs": "truncate_left",
}  # fmt: skip


def balanced_depths(depths: list[int]) -> list[int]:
    """Return the depths of the proxies that are trained on balanced pairs as well: the middle one and the least."""
    return [sorted(depths)[len(depths) // 2], min(depths)]


def make(jobs: Jobs, base: str, depths: list[int], *, only: Sequence[str], more: dict[str, Any]) -> int:
    """Train SFT, then all reward models at once, those that are not there; return how many failed.

    only: names of reward models; none: all. more: flags of every run.
    """
    data, models = jobs.folder / "data", jobs.folder / "models"
    shared = SHARED | {"data_output_path": jobs.folder / "cache"}

    def trained(name: str, stage: str, start: object, given: dict[str, Any], gpu: int | None) -> None:
        paths = {"model": start, "output_dir": models / name, "run_dir": jobs.folder / "runs" / name}
        jobs.run(name, f"{stage}.main", ["--overwrite", *flags(shared | given | more | paths)], gpu=gpu)

    def reward_model(name: str, depth: int, rows: str, given: dict[str, Any], gpu: int | None) -> None:
        if (only and name not in only) or (models / name / "accuracy.json").exists():
            return
        start = models / f"start-{depth}"
        trained(name, "step2_reward", start, REWARD | {"data_path": data / f"{rows}.jsonl"} | given, gpu)
        words = {
            "model": models / name,
            "data_path": data / "pairs_test.jsonl",
            "eval_data_path": data / "pairs_test.jsonl",
        }
        words |= {"max_seq_len": LENGTHS["reward"], "json_output": "true"}
        found = jobs.run(f"{name}-eval", "step2_reward.eval", flags(words), gpu=gpu)
        (models / name / "accuracy.json").write_text(found.strip().splitlines()[-1], encoding="utf-8")

    works = [partial(trained, "sft", "step1_sft", base, SFT | {"data_path": data / "sft.jsonl"})]
    if not (models / "sft" / "config.json").exists() and (failed := jobs.each(works)):
        return failed

    def start(depth: int, gpu: int | None) -> None:
        words = flags({"model": models / "sft", "depth": depth, "output": models / f"start-{depth}"})
        jobs.run(f"start-{depth}", "benchmarks.learning.workers", ["shorten", *words], gpu=gpu)

    if failed := jobs.each([partial(start, depth) for depth in depths]):
        return failed
    # One step at a rate of nearly 0: SFT's body with a new head.
    untrained = {"max_steps": 1, "learning_rate": 1e-12}
    return jobs.each(
        [
            partial(reward_model, "gold", max(depths), "gold", {"seed": GOLD_SEED}),
            partial(reward_model, "gold-2", max(depths), "gold", {"seed": GOLD_SEED + 1}),
            *(
                partial(reward_model, f"balanced-{depth}", depth, "proxy", {"balance_lengths": "true"})
                for depth in set(balanced_depths(depths))
            ),
            partial(reward_model, "fresh", max(depths), "proxy", untrained),
            *(partial(reward_model, f"proxy-{depth}", depth, "proxy", {}) for depth in depths),
        ]
    )


def accuracies(folder: Path) -> dict[str, dict[str, Any]]:
    """Return what step2_reward.eval said of each reward model."""
    files = sorted(folder.glob("models/*/accuracy.json"))
    return {file.parent.name: json.loads(file.read_text(encoding="utf-8")) for file in files}
