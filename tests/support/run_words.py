"""Small runs of a stage on a tiny folder, in the test's own process."""

import importlib
from pathlib import Path
from typing import Any

from support.forks import PACKAGES
from support.in_process import undone_afterwards


def run_words(folder: Path, **flags: Any) -> list[str]:
    """Return the flags of a run on the rows of `folder`, changed by `flags`; None leaves a flag out."""
    rows = {
        "data_path": folder / "train.jsonl", "eval_data_path": folder / "test.jsonl", "data_split": "none",
        "data_output_path": folder / "cache", "dtype": "fp32",
    }  # fmt: skip
    return [str(word) for name, value in (rows | flags).items() if value is not None for word in (f"--{name}", value)]


def start_flags(stage: str, folder: Path) -> dict[str, Any]:
    """Return the flags for the models of `folder` that a stage starts from, and for its lengths."""
    if stage != "ppo":
        return {"model_name_or_path": folder / "base", "max_seq_len": 96}
    return {
        "actor_model_name_or_path": folder / "base", "critic_model_name_or_path": folder / "scorer",
        "max_prompt_seq_len": 48, "max_answer_seq_len": 12,
    }  # fmt: skip


def run_stage(stage: str, words: list[str]) -> int:
    """Return the exit code of a stage with these flags."""
    with undone_afterwards():
        return importlib.import_module(f"{PACKAGES[stage]}.main").main(words)
