"""A stage's command on one or more CUDA devices, and what its training lines say."""

import json
import math
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

from support.command_run import TIMEOUT_S, Ended, run_command
from support.tiny_run import read_metrics

from pipeline.configuration.flag_table import flat_items
from pipeline.run import run as running

MODULES = {"sft": "step1_sft", "reward": "step2_reward", "ppo": "step3_ppo"}
SUPERVISED: dict[str, Any] = {"model_name_or_path": "base", "max_seq_len": 64, "learning_rate": 1e-3}
PPO: dict[str, Any] = {
    "actor_model_name_or_path": "base",
    "critic_model_name_or_path": "scorer",
    "max_prompt_seq_len": 48,
    "max_answer_seq_len": 16,
    "actor_learning_rate": 1e-3,
    "critic_learning_rate": 1e-3,
}


def scale_file(folder: Path, **fp16: int) -> Path:
    """Write a DeepSpeed JSON with settings of fp16's loss scale."""
    file = folder / f"{'-'.join(f'{name}-{value}' for name, value in fp16.items())}.json"
    file.write_text(json.dumps({"fp16": fp16}), encoding="utf-8")
    return file


def run_stage(
    stage: str,
    folder: Path,
    output: str,
    *,
    ranks: int = 1,
    batch: int = 8,
    first: Callable[[], None] | None = None,
    **given: Any,
) -> list[dict]:
    """Run a stage for two optimizer steps of `batch` rows on all ranks; its training lines, all numbers finite.

    given: further flags; None leaves a flag out. first: see `run_command`.

    PPO takes both steps on one rollout, whose responses are then the same wherever the weights are.
    """
    common = {"data_path": "train.jsonl", "eval_data_path": "test.jsonl", "data_split": "none", "max_steps": 2,
              "keep_checkpoints": 0, "dtype": "fp32", "per_device_train_batch_size": batch // ranks}  # fmt: skip
    if stage == "ppo":
        common |= PPO | {"per_device_generation_batch_size": batch // ranks, "ppo_epochs": 2}
    else:
        common |= SUPERVISED
    flags = common | given | {"output_dir": output}
    words = [word for name, value in flags.items() if value is not None for word in (f"--{name}", str(value))]
    ended = run_command(MODULES[stage], words, folder=folder, ranks=ranks, first=first)
    assert ended.code == 0, reason(ended, run_folder(stage, folder, output))
    lines = [line for line in read_metrics(run_folder(stage, folder, output)) if "step_s" in line]
    assert [line["step"] for line in lines] == list(range(1, flags["max_steps"] + 1))
    assert all(math.isfinite(value) for line in lines for value in line.values() if isinstance(value, float))
    return lines


def reason(ended: Ended, run: Path) -> str:
    """Why a command failed: its end, and that of each rank's own log, which other ranks do not write over."""
    # Without frames of C++: other ranks print theirs behind the error of the one that failed.
    printed = "\n".join(line for line in ended.stderr.splitlines() if "frame #" not in line)
    logs = [f"{file.name}:\n{file.read_text()[-3000:]}" for file in sorted(run.glob("log/rank-*.txt"))]
    return "\n".join([f"exit code {ended.code} (-9: above {TIMEOUT_S:.0f} s)", printed[-4000:], *logs])


def note_settings(folder: Path) -> None:
    """Let the rank that this process will be write the settings that it begins with: `settings-<rank>.json`."""
    begin_with = running.with_choice

    def noted(*given: Any) -> Any:
        resolved, choice = begin_with(*given)
        settings = {
            name: {"value": value} | resolved.origins[name].entry for name, value in flat_items(resolved.config)
        }
        (folder / f"settings-{os.environ['RANK']}.json").write_text(json.dumps(settings, default=str), encoding="utf-8")
        return resolved, choice

    running.with_choice = noted


def run_folder(stage: str, folder: Path, output: str) -> Path:
    """The run folder of `run_stage`."""
    return folder / output / "runs" / "ppo" if stage == "ppo" else folder / "runs" / output


def log_of(stage: str, folder: Path, output: str) -> str:
    """The log of a run's first rank."""
    return (run_folder(stage, folder, output) / "log.txt").read_text()


def furthest(mine: list[dict], theirs: list[dict], *names: str) -> float:
    """The largest difference between the same metrics of the same steps, where both have them."""
    pairs = [(a[name], b[name]) for a, b in zip(mine, theirs, strict=True) for name in names if name in a]
    assert pairs, names
    return max(abs(a - b) / max(1.0, abs(b)) for a, b in pairs)
