"""The operations of a step that its `mfu` counts, in the stages that train one model."""

import json
from typing import Any

import pytest
from support.run_words import run_stage, run_words, start_flags
from support.tiny_run import read_metrics

from pipeline.training.supervised import Supervised

FOLDER_SIZES = {"num_train": 8, "num_test": 2}


@pytest.mark.slow
@pytest.mark.parametrize("stage", ["sft", "reward", "dpo"])
def test_a_step_counts_all_tokens_and_the_head_where_tokens_are_trained(stage, folder, tmp_path, monkeypatch):
    """Six operations for a weight and token, the head's for trained tokens alone; a scalar head counts as none."""
    steps: list[Any] = []
    end_step = Supervised.end_step

    def noted(self: Any, step: Any, *more: Any, **named: Any) -> None:
        steps.append(step)
        end_step(self, step, *more, **named)

    monkeypatch.setattr(Supervised, "end_step", noted)
    monkeypatch.setattr("pipeline.training.supervised.training_mfu", lambda flops, **_: {"mfu": flops})
    flags = start_flags(stage, folder) | {
        "data_output_path": tmp_path / "cache", "per_device_train_batch_size": 4, "max_steps": 2,
        "output_dir": tmp_path / stage,
    }  # fmt: skip
    assert run_stage(stage, run_words(folder, **flags)) == 0
    config = json.loads((folder / "base/config.json").read_text())
    width, layers = config["hidden_size"], config["num_hidden_layers"]
    weights = layers * (4 * width**2 + 2 * width * config["ffn_dim"])
    head = 0 if stage == "reward" else 6 * width * config["vocab_size"]
    expected = [
        6 * weights * step.num_tokens + head * step.num_trained + 6 * layers * width * step.num_squares
        for step in steps
    ]
    found = [line["mfu"] for line in read_metrics(tmp_path / "runs" / stage) if "mfu" in line]
    assert found == pytest.approx(expected) and len(found) == 2
    assert all(0 < step.num_trained < step.num_tokens for step in steps) or stage == "reward"
