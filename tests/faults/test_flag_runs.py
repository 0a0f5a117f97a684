"""Flags whose effect is not in what a run leaves behind, or not in that alone; each is also made to be ignored."""

import json
import re
import statistics
import time
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
import torch
from input_calls import call, stage_words
from safetensors.torch import load_file
from support.messages import naming
from support.tiny_run import read_metrics
from transformers import AutoModelForSequenceClassification, AutoTokenizer

from pipeline.checkpoints import checkpoint
from pipeline.configuration.names import without_flag
from pipeline.engine.memory import model_memory
from step3_ppo.models.hybrid_engine import HybridEngine

FOLDER_SIZES = {"num_train": 12, "num_test": 2}
FEW = {"per_device_train_batch_size": 4, "max_steps": 1}
EVERY_STEP = {"eval_interval": 1, "lr_scheduler_type": "constant", "keep_checkpoints": 0}
BEST = {"sft": ("eval_loss", min), "reward": ("eval_accuracy", max)}


def test_debug_shows_the_traceback(folder: Path, tmp_path: Path) -> None:
    words = stage_words("sft", folder, tmp_path, data_path=folder / "none.jsonl")
    assert "Traceback" in call("sft", [*words, "--debug"]).stderr and "Traceback" not in call("sft", words).stderr


def test_progress_lines_are_as_far_apart_as_the_flag_says(folder: Path, tmp_path: Path) -> None:
    def lines(**apart: int) -> list[str]:
        words = stage_words("sft", folder, tmp_path / str(apart), **{**FEW, "max_steps": 4, **apart})
        return re.findall(r"\[sft\] (\d)/4 ", call("sft", words).stderr)

    assert lines(print_steps=1) == ["1", "2", "3", "4"] and lines(print_steps=2) == ["2", "4"]
    assert lines() == ["1", "4"], "without a terminal only the first and the last step of a short run"


def run(stage: str, folder: Path, out: Path, **flags: Any) -> tuple[dict[str, torch.Tensor], list[dict[str, Any]]]:
    """Run a stage; return the weights that it saved, and its metrics."""
    ending = call(stage, stage_words(stage, folder, out, data_output_path=folder / "cache", **{**FEW, **flags}))
    assert ending.code == 0, ending.stderr
    return load_file(out / "model" / "model.safetensors"), read_metrics(out / "runs" / "model")


def are_equal(one: dict[str, torch.Tensor], other: dict[str, torch.Tensor]) -> bool:
    return one.keys() == other.keys() and all(one[name].equal(other[name]) for name in one)


@pytest.mark.parametrize("stage", ["sft", "reward"])
def test_the_best_model_is_kept_and_not_the_last(stage: str, folder: Path, tmp_path: Path) -> None:
    """Against a run that ends at the best step; the start model is the end of a step that is too small to see."""
    metric, choose = BEST[stage]
    flags = {**EVERY_STEP, "learning_rate": 3e-2, "max_steps": 4}
    kept, lines = run(stage, folder, tmp_path / "kept", **flags, keep_best="true")
    measured = {line["step"]: line[metric] for line in lines if metric in line}
    best = next(step for step in measured if measured[step] == choose(measured.values()))
    assert len(measured) == 5 and best < 4, "the last model is the best: nothing is shown"
    last, _ = run(stage, folder, tmp_path / "last", **flags)
    end = {"max_steps": best} if best else {"max_steps": 1, "learning_rate": 1e-60}
    expected, _ = run(stage, folder, tmp_path / "best", **{**flags, **end})
    assert are_equal(kept, expected) and not are_equal(kept, last)


@pytest.mark.parametrize("stage", ["sft", "reward"])
def test_the_best_model_of_no_held_out_row_is_refused_before_weights_are_read(
    stage: str, folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("pipeline.engine.build.training_engine", None)  # would be a TypeError
    words = map(str, stage_words(stage, folder, tmp_path, **FEW, keep_best="true", eval_fraction=0))
    ending = call(stage, without_flag(words, "eval_data_path"))
    assert ending.code == 2 and "Traceback" not in ending.stderr
    assert ending.stderr == naming("error: --keep-best ... held out ... --eval-fraction")


def test_without_held_out_pairs_the_scores_of_training_pairs_are_measured_and_marked(
    folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Reference: transformers' scores of the last pairs' texts, row by row, on the saved model."""
    monkeypatch.setattr("step2_reward.training.SCORED_PAIRS", 3)
    few = {**FEW, "max_steps": 2, "eval_fraction": 0, "per_device_eval_batch_size": 2}
    words = map(str, stage_words("reward", folder, tmp_path, **few))
    ending = call("reward", without_flag(words, "eval_data_path"))
    assert ending.code == 0 and ending.stderr.count("last 3 training pairs\n") == 1
    model = AutoModelForSequenceClassification.from_pretrained(tmp_path / "model")
    tokenizer = AutoTokenizer.from_pretrained(tmp_path / "model")
    scores = []
    for row in [json.loads(line) for line in (folder / "train.jsonl").read_text().splitlines()][-3:]:
        for answer in (row["chosen"], row["rejected"]):
            turns = [{"role": "user", "content": row["prompt"]}, {"role": "assistant", "content": answer}]
            ids = tokenizer.apply_chat_template(turns, return_tensors="pt", return_dict=True)["input_ids"]
            scores.append(model(ids).logits.item())
    assert model.config.score_pairs == "3 training pairs"
    assert model.config.score_mean == pytest.approx(statistics.fmean(scores), rel=1e-3, abs=1e-4)
    assert model.config.score_std == pytest.approx(statistics.pstdev(scores), rel=1e-3, abs=1e-4)
    assert not any("eval_loss" in line for line in read_metrics(tmp_path / "runs" / "model"))


def test_training_goes_on_while_a_checkpoint_is_written(
    folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The files of step 1 are held back until step 2 is in the metrics."""
    write, metrics, waited = checkpoint.write_rank_files, tmp_path / "runs" / "model" / "metrics.jsonl", []

    def held_back(*given: Any) -> Any:
        end = time.monotonic() + 5
        while not waited and time.monotonic() < end and '"step": 2,' not in metrics.read_text():
            time.sleep(0.02)
        waited.append('"step": 2,' in metrics.read_text())
        return write(*given)

    monkeypatch.setattr(checkpoint, "write_rank_files", held_back)
    run("sft", folder, tmp_path, max_steps=2, save_steps=1, keep_checkpoints=2, save_in_background="true")
    assert waited[0], "training waited for the files"
    assert json.loads((tmp_path / "runs" / "model" / "checkpoints" / "step-1" / "manifest.json").read_text())


def test_the_process_group_gets_its_timeout(folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    given, join = [], torch.distributed.init_process_group
    monkeypatch.setattr(
        torch.distributed, "init_process_group", lambda *words, **named: given.append(named) or join(*words, **named)
    )
    run("sft", folder, tmp_path, process_group_timeout_s=77)
    assert [named["timeout"] for named in given] == [timedelta(seconds=77)]


@pytest.mark.parametrize("flag", ["false", "true"])
def test_optimizer_states_leave_during_a_rollout(
    flag: str, folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    sample, held = HybridEngine.generate, []

    def looking(self: HybridEngine, *given: Any, **more: Any) -> Any:
        held.append(model_memory(self.engine, torch.device("cpu")).optimizer)
        return sample(self, *given, **more)

    monkeypatch.setattr(HybridEngine, "generate", looking)
    sizes = {"per_device_train_batch_size": 4, "per_device_generation_batch_size": 4, "max_answer_seq_len": 4}
    flags = {**sizes, "max_steps": 2, "actor_zero_stage": 1, "offload_optimizer_during_rollout": flag}
    assert call("ppo", stage_words("ppo", folder, tmp_path, **flags)).code == 0
    assert (max(held) == 0) is (flag == "true"), held
