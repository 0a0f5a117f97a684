"""Small runs of step 3 on a tiny folder, in the test's own process."""

from pathlib import Path
from typing import Any

from support.run_words import run_stage, run_words


def ppo_words(folder: Path, out: Path, **changes: Any) -> list[str]:
    """Return the flags of a small run of `folder` into `out`; a change to None leaves a flag out."""
    flags = {
        "actor_model_name_or_path": folder / "base", "output_dir": out, "max_prompt_seq_len": 48,
        "max_answer_seq_len": 8, "per_device_train_batch_size": 4, "actor_learning_rate": 1e-3,
        "lr_scheduler_type": "constant", "enable_tensorboard": "false",
    }  # fmt: skip
    return run_words(folder, **flags | changes)


def run_ppo(words: list[str]) -> int:
    """Return the exit code of step 3 with these flags."""
    return run_stage("ppo", words)
