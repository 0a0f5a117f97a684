"""Step 2 as a user runs it: commands in processes of their own, their outputs, and their complaints."""

import json
from dataclasses import dataclass
from pathlib import Path

import pytest
import torch
from support.command_run import Ended, run_command
from support.in_process import refusal_of
from support.model_card import files_that_name, read_card, run_example
from support.run_words import run_stage, run_words, start_flags
from support.tiny_run import assert_rows_give_means, make_folder, numbers_and_metrics, read_metrics
from transformers import AutoModelForSequenceClassification, AutoTokenizer

from pipeline.models.reward_model import last_token_scores, load_reward_model
from pipeline.models.source import ModelSource
from step2_reward.main import main
from step2_reward.metrics import METRICS

NUM_STEPS = 6
TOLERANCE = 1e-5
MODEL_FILES = {
    "README.md", "chat_template.jinja", "config.json", "model.safetensors", "tokenizer.json", "tokenizer_config.json",
    "training_config.json",
}  # fmt: skip
# Metrics of GPUs.
ONLY_ELSEWHERE = {"mfu", "gpu_memory_gib", "gpu_reserved_gib", "memory/train_gib"}


def words(folder: Path, out: str, batch: int, **changes: object) -> list[str]:
    flags = start_flags("reward", folder) | {
        "learning_rate": 2e-3, "per_device_train_batch_size": batch, "lr_scheduler_type": "constant",
        "num_train_epochs": 6, "max_steps": NUM_STEPS, "output_dir": out,
    }  # fmt: skip
    return run_words(folder, **flags | changes)


@dataclass(frozen=True)
class Trained:
    folder: Path
    ended: dict[int, Ended]

    def model(self, ranks: int = 1) -> Path:
        return self.folder / f"out{ranks}" / "reward"

    def run(self, ranks: int = 1) -> Path:
        return self.folder / f"out{ranks}" / "runs" / "reward"


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory) -> Trained:
    """The same run by `python -m` and by torchrun with two ranks under ZeRO-3."""
    folder = make_folder(tmp_path_factory.mktemp("step-2"), num_train=32)
    ended = {
        ranks: run_command(
            "step2_reward",
            words(folder, f"out{ranks}/reward", 32 // ranks, zero_stage=0 if ranks == 1 else 3),
            folder=folder,
            ranks=ranks,
        )
        for ranks in (1, 2)
    }
    return Trained(folder, ended)


@pytest.mark.parametrize("ranks", [1, 2])
def test_ends_well_with_all_files(trained: Trained, ranks: int) -> None:
    assert trained.ended[ranks].code == 0, trained.ended[ranks].stderr
    assert {path.name for path in trained.model(ranks).iterdir()} >= MODEL_FILES
    assert {"config.json", "env.json", "metrics.jsonl", "done.json", "log.txt"} <= {
        path.name for path in trained.run(ranks).iterdir()
    }


@pytest.mark.parametrize("ranks", [1, 2])
def test_piped_output_is_plain(trained: Trained, ranks: int) -> None:
    printed = trained.ended[ranks].stdout + trained.ended[ranks].stderr
    assert "\r" not in printed and "\x1b" not in printed
    assert "Warning" not in printed and "Traceback" not in printed


def test_it_writes_the_metrics_that_its_stage_declares(trained: Trained) -> None:
    unknown, unwritten = numbers_and_metrics(trained.run(), METRICS)
    assert unknown == set()
    assert unwritten == ONLY_ELSEWHERE


def test_metrics_are_json_lines_with_rising_steps(trained: Trained) -> None:
    lines = read_metrics(trained.run())
    assert [line["step"] for line in lines if "loss" in line] == list(range(1, NUM_STEPS + 1))
    held_out = [line for line in lines if "eval_loss" in line]
    assert_rows_give_means(trained.run(), "eval_accuracy", "eval_margin")
    assert [line["step"] for line in held_out] == [0, NUM_STEPS]
    assert {"eval_accuracy", "eval_margin", "eval_mean_chosen_score", "eval_mean_rejected_score"} <= held_out[0].keys()


def test_loss_falls(trained: Trained) -> None:
    """All 32 pairs make one step, so that the losses are of the same rows."""
    losses = [line["loss"] for line in read_metrics(trained.run()) if "loss" in line]
    assert losses[-1] < losses[0] - 0.02


def test_two_ranks_follow_one(trained: Trained) -> None:
    mine, theirs = ([line["loss"] for line in read_metrics(trained.run(n)) if "loss" in line] for n in (1, 2))
    assert max(abs(a - b) for a, b in zip(mine[:3], theirs[:3], strict=True)) < TOLERANCE


def test_settings_tell_their_origins(trained: Trained) -> None:
    settings = json.loads((trained.run(2) / "config.json").read_text())
    assert (settings["zero_stage"]["value"], settings["zero_stage"]["from"]) == (3, "command line")
    assert (settings["reward_loss"]["value"], settings["reward_loss"]["from"]) == ("last_token", "default")


@pytest.mark.parametrize("ranks", [1, 2])
def test_scores_in_transformers_equal_ours(trained: Trained, ranks: int) -> None:
    """The saved pad id is no end of text, so that transformers finds the last token of a padded batch."""
    folder = trained.model(ranks)
    tokenizer = AutoTokenizer.from_pretrained(folder)
    model, info = AutoModelForSequenceClassification.from_pretrained(folder, output_loading_info=True)
    assert not info["missing_keys"] and not info["unexpected_keys"]
    assert model.config.num_labels == 1 and model.config.score_std > 0
    batch = tokenizer(
        ["Describe the owl.", "Tell me about the red fox by the mill."], padding=True, return_tensors="pt"
    )
    mask = batch["attention_mask"].bool()
    with torch.no_grad():
        theirs = model.eval()(**batch).logits[:, 0]
        ours = last_token_scores(
            load_reward_model(ModelSource(str(folder)), dtype=torch.float32).eval()(batch["input_ids"], mask),
            mask.sum(1),
        )
    assert (theirs - ours).abs().max() < TOLERANCE


def test_without_held_out_pairs_the_last_step_scores_training_pairs(trained: Trained, tmp_path, monkeypatch) -> None:
    """No checkpoint is due there: the constants of the saved model come from these pairs all the same."""
    monkeypatch.setattr("step2_reward.training.SCORED_PAIRS", 3)
    argv = words(trained.folder, str(tmp_path / "reward"), 8, max_steps=1, eval_fraction=0)
    at = argv.index("--eval_data_path")
    assert run_stage("reward", [*argv[:at], *argv[at + 2 :]]) == 0
    saved = json.loads((tmp_path / "reward/config.json").read_text())
    assert saved["score_pairs"] == "3 training pairs" and saved["score_std"] != 1.0


def test_the_model_can_be_shared(trained: Trained, monkeypatch: pytest.MonkeyPatch, capsys) -> None:
    metadata, metrics = read_card(trained.model())
    assert metadata["pipeline_tag"] == "text-classification" and "eval_accuracy" in metrics
    assert files_that_name(trained.folder, trained.model()) == []
    assert json.loads((trained.model() / "config.json").read_text())["id2label"] == {"0": "reward"}
    run_example(trained.model(), monkeypatch)
    assert "tensor([[" in capsys.readouterr().out


@pytest.fixture(scope="module")
def bad_files(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = make_folder(tmp_path_factory.mktemp("bad"), num_train=12, num_test=2)
    (folder / "answers.jsonl").write_text('{"prompt": "Who?", "response": "Me."}\n')
    return folder


COMPLAINTS = {
    "no pairs": ({"data_path": "answers.jsonl"}, "answers.jsonl"),
    "no such model": ({"model_name_or_path": "./absent"}, "absent"),
    "too many tokens": ({"max_seq_len": 4096}, "--max-seq-len 4096"),
    "an unknown flag": ({"learning_rat": 1e-3}, "did you mean --learning-rate?"),
}


@pytest.mark.parametrize("name", COMPLAINTS)
def test_bad_input_is_one_line_and_exit_2(
    name: str, bad_files: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    changes, named = COMPLAINTS[name]
    monkeypatch.chdir(bad_files)
    line = refusal_of(main, words(bad_files, "bad-out/reward", 4, **changes), capfd)
    assert line.startswith("error: ") and named in line
