"""Step 1 as a user runs it: commands in processes of their own, their outputs, and their complaints."""

import json
from dataclasses import dataclass
from importlib import metadata
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from support.command_run import Ended, files_of, run_command, run_fresh
from support.in_process import refusal_of
from support.messages import naming
from support.model_card import files_that_name, read_card, rows_of, run_example, sections
from support.run_words import run_stage, run_words, start_flags
from support.tiny_run import assert_rows_give_means, make_folder, numbers_and_metrics, read_metrics
from transformers import AutoModelForCausalLM, AutoTokenizer

from pipeline.data.sources import fingerprint
from pipeline.files import model_fingerprint
from step1_sft.main import main
from step1_sft.metrics import METRICS

NUM_STEPS = 6
TOLERANCE = 1e-5
MODEL_FILES = {
    "README.md", "chat_template.jinja", "config.json", "generation_config.json", "model.safetensors",
    "tokenizer.json", "tokenizer_config.json", "training_config.json",
}  # fmt: skip
RUN_FILES = {
    "config.json", "env.json", "log.txt", "metrics.jsonl", "done.json", "tensorboard", "log", "checkpoints",
    "rows.json",
}  # fmt: skip
# Metrics of GPUs, and of flags that are not given.
ONLY_ELSEWHERE = {"mfu", "gpu_memory_gib", "gpu_reserved_gib", "memory/train_gib", "eval_bleu", "eval_rougeL"}


def words(folder: Path, out: str, batch: int, **changes: object) -> list[str]:
    flags = start_flags("sft", folder) | {
        "learning_rate": 5e-3, "per_device_train_batch_size": batch, "lr_scheduler_type": "constant",
        "max_steps": NUM_STEPS, "output_dir": out,
    }  # fmt: skip
    return run_words(folder, **flags | changes)


@dataclass(frozen=True)
class Trained:
    folder: Path
    ended: dict[int, Ended]

    def model(self, ranks: int = 1) -> Path:
        return self.folder / f"out{ranks}" / "sft"

    def run(self, ranks: int = 1) -> Path:
        return self.folder / f"out{ranks}" / "runs" / "sft"


@pytest.fixture(scope="module")
def trained(folder: Path) -> Trained:
    """The same run by `python -m`, and with the two ranks of a launcher."""
    alone = run_fresh("step1_sft", words(folder, "out1/sft", 8), folder=folder)
    return Trained(
        folder, {1: alone, 2: run_command("step1_sft", words(folder, "out2/sft", 4), folder=folder, ranks=2)}
    )


@pytest.mark.slow
def test_torchrun_starts_two_ranks(trained: Trained) -> None:
    ended = run_fresh("step1_sft", words(trained.folder, "out3/sft", 4), folder=trained.folder, ranks=2)
    assert ended.code == 0, ended.stderr
    assert "\r" not in ended.stdout + ended.stderr and "Traceback" not in ended.stderr
    mine, theirs = ([line["loss"] for line in read_metrics(trained.run(n)) if "loss" in line] for n in (3, 2))
    assert mine == theirs


@pytest.mark.parametrize("ranks", [1, 2])
def test_ends_well_with_all_files(trained: Trained, ranks: int) -> None:
    assert trained.ended[ranks].code == 0, trained.ended[ranks].stderr
    where = f"  output    out{ranks}/sft; metrics, logs and checkpoints: out{ranks}/runs/sft\n"
    assert where in trained.ended[ranks].stderr.partition("[sft] step 0")[0], "at its start"
    assert {path.name for path in trained.model(ranks).iterdir()} == MODEL_FILES
    assert {path.name for path in trained.run(ranks).iterdir()} >= RUN_FILES
    logs = {path.name for path in (trained.run(ranks) / "log").iterdir()}
    assert logs == {f"rank-{rank}.txt" for rank in range(ranks)}
    assert not list(trained.folder.rglob("*.writing"))


@pytest.mark.parametrize("ranks", [1, 2])
def test_rows_are_shown_once_and_kept(trained: Trained, ranks: int) -> None:
    """On stderr and in log.txt, by rank 0, the same lines; rows.json has their texts and the counts."""
    document = json.loads((trained.run(ranks) / "rows.json").read_text(encoding="utf-8"))
    assert (document["title"], document["rows"]) == ("sft", {"to train on": 64, "held out": 8})
    tokens = document["tokens"]
    assert 0 < tokens["median"] <= tokens["p95"] <= tokens["longest"] <= tokens["limit"] == 96
    printed, log = trained.ended[ranks].stderr, (trained.run(ranks) / "log.txt").read_text(encoding="utf-8")
    assert document["lines"][0] == naming("sft rows: 64 to train on ... 8 held out, of 72")
    assert all(printed.count(f"{line}\n") == 1 for line in document["lines"])
    assert "\x1b" not in log and "\r" not in log
    for number, sample in zip((1, 22, 43), document["samples"], strict=True):
        line = f"sft row {number}: {sample['tokens']} tokens"
        assert sample["title"] == f"sft row {number}" and printed.count(f"{line}\n") == log.count(f"{line}\n") == 1
        (part,) = sample["parts"]
        (response,) = (span["text"] for span in part["spans"] if span["is_trained"])
        shown = "".join(text[12:] for text in printed.split(f"{line}\n")[1].splitlines()[:4])
        assert f"⟦{response}⟧" in shown and response.endswith(".</s>")


@pytest.mark.slow
def test_outputs_inside_the_folder_of_the_data(tmp_path: Path) -> None:
    """A try that fails leaves a run folder there; the next one reads the same rows, and so does one that resumes."""
    data = tmp_path / "data"
    data.mkdir()
    for name in ("train.jsonl", "test.jsonl"):
        (make_folder(tmp_path) / name).rename(data / name)
    inside = {"data_path": data, "eval_data_path": data, "output_dir": data / "out/sft", "data_output_path": data / "c"}
    tries: list[dict[str, object]] = [{"max_seq_len": 4096}, {"max_steps": 1}, {"max_steps": 2}]
    first, *others = [
        run_command("step1_sft", words(tmp_path, "", 8, **inside, **changes), folder=tmp_path) for changes in tries
    ]
    assert first.code == 2 and "128 positions" in first.stderr
    for ended in others:
        assert ended.code == 0 and "sft rows: 64 to train on, 8 held out" in ended.stderr, ended.stderr
        assert naming(f"{data}/out/runs/sft ... a run wrote it") in ended.stderr.splitlines()
    assert [line["step"] for line in read_metrics(data / "out/runs/sft") if "loss" in line] == [1, 2]


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
    training = [line for line in lines if "loss" in line]
    held_out = [line for line in lines if "eval_loss" in line]
    assert_rows_give_means(trained.run(), "eval_loss")
    assert [line["step"] for line in training] == list(range(1, NUM_STEPS + 1))
    assert [line["step"] for line in held_out] == [0, NUM_STEPS]
    assert all(line["stage"] == "sft" for line in lines)
    assert {"grad_norm", "learning_rate", "epoch", "num_tokens", "tokens_per_s", "samples_per_s"} <= training[0].keys()


def test_loss_falls(trained: Trained) -> None:
    lines = read_metrics(trained.run())
    losses = [line["loss"] for line in lines if "loss" in line]
    held_out = [line["eval_loss"] for line in lines if "eval_loss" in line]
    assert losses[-1] < losses[0] - 0.5 and held_out[-1] < held_out[0] - 0.5


def test_two_ranks_follow_one(trained: Trained) -> None:
    """The first losses; later ones part as Adam gives a gradient that is zero in theory a step of full size."""
    mine, theirs = ([line["loss"] for line in read_metrics(trained.run(n)) if "loss" in line] for n in (1, 2))
    assert max(abs(a - b) for a, b in zip(mine[:3], theirs[:3], strict=True)) < TOLERANCE


def test_run_files_tell_settings_and_environment(trained: Trained) -> None:
    settings = json.loads((trained.run() / "config.json").read_text())
    assert (settings["learning_rate"]["value"], settings["learning_rate"]["from"]) == (5e-3, "command line")
    assert settings["weight_decay"]["from"] == "default"
    found = json.loads((trained.run(2) / "env.json").read_text())
    assert found["num_ranks"] == 2 and found["versions"]["torch"] == metadata.version("torch")
    outcomes = [json.loads(path.read_text())["code"] for path in (trained.run(2) / "outcome").iterdir()]
    assert outcomes == [0, 0]
    assert json.loads((trained.run() / "done.json").read_text())["steps"] == NUM_STEPS


def test_model_loads_in_transformers(trained: Trained) -> None:
    model, info = AutoModelForCausalLM.from_pretrained(trained.model(), output_loading_info=True)
    assert not info["missing_keys"] and not info["unexpected_keys"]
    assert model.config.dropout == 0.1, "the saved configuration keeps the original dropout"
    tokenizer = AutoTokenizer.from_pretrained(trained.model())
    turn = [{"role": "user", "content": "Describe the otter."}]
    text = tokenizer.apply_chat_template(turn, tokenize=False, add_generation_prompt=True)
    assert text.endswith("Human: Describe the otter.\n\nAssistant:")


def test_the_model_can_be_shared(trained: Trained, monkeypatch: pytest.MonkeyPatch, capsys) -> None:
    """Its card has metadata, metrics and an example that runs; no file names a path of this machine."""
    metadata, metrics = read_card(trained.model())
    assert (metadata["library_name"], metadata["pipeline_tag"]) == ("transformers", "text-generation")
    assert "sft" in metadata["tags"] and "base_model" not in metadata, "the base is a folder of this machine"
    last = [line for line in read_metrics(trained.run()) if "eval_loss" in line][-1]
    assert metrics == {name: float(f"{last[name]:.4g}") for name in ("eval_loss", "eval_perplexity")}
    assert files_that_name(trained.folder, trained.model()) == []
    rows = rows_of(sections((trained.model() / "README.md").read_text())["What it is made of"][1])
    source = trained.folder / "train.jsonl"
    hashes = {"model": model_fingerprint(str(trained.folder / "base")), "`--data-path`": fingerprint(str(source))}
    assert {name: content for name, _, content in rows}.items() >= {
        name: f"SHA-256 `{content}`" for name, content in hashes.items()
    }.items()
    assert json.loads((trained.model() / "training_config.json").read_text())["data"]["data_path"] == [
        f"{trained.folder.name}/train.jsonl"
    ]
    run_example(trained.model(), monkeypatch)
    assert capsys.readouterr().out.strip()


def test_a_finished_run_is_left_alone_until_overwritten(trained: Trained) -> None:
    command = words(trained.folder, "out1/sft", 8)
    before = (trained.run() / "metrics.jsonl").read_text(), (trained.model() / "model.safetensors").read_bytes()
    again = run_command("step1_sft", command, folder=trained.folder)
    assert again.code == 0
    assert again.stderr == naming(f"{NUM_STEPS} steps ... nothing to do")
    assert (trained.run() / "metrics.jsonl").read_text() == before[0]
    over = run_command("step1_sft", [*command, "--overwrite"], folder=trained.folder)
    assert over.code == 0
    assert [line["step"] for line in read_metrics(trained.run())] == [0, *range(1, NUM_STEPS + 1), NUM_STEPS]
    assert (trained.run() / "metrics.jsonl").read_text() != before[0]
    assert (trained.run() / "rows.json").is_file(), "it is that of the new run"
    assert (trained.model() / "model.safetensors").read_bytes() == before[1], "the same seed gives the same weights"


@pytest.mark.parametrize(
    ("changes", "named"),
    [({"max_seq_len": 100_000}, "--max-seq-len 100000"), ({"lora_dim": 8, "lora_module_name": "foo"}, "foo: matches")],
    ids=["positions", "layers"],
)
def test_an_overwrite_that_is_refused_leaves_the_finished_run(
    trained: Trained, changes: dict[str, object], named: str
) -> None:
    before = files_of(trained.run(), trained.model())
    command = [*words(trained.folder, "out1/sft", 8, **changes), "--overwrite"]
    over = run_command("step1_sft", command, folder=trained.folder)
    assert over.code == 2 and named in over.stderr
    assert len(before) > len(MODEL_FILES) and files_of(trained.run(), trained.model()) == before


def test_the_start_model_is_kept_where_no_step_is_better(
    trained: Trained, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(trained.folder)
    ruinous = {"learning_rate": 1.0, "max_steps": 2, "keep_best": "true", "eval_interval": 1}
    assert run_stage("sft", words(trained.folder, "kept/sft", 8, **ruinous)) == 0
    assert capfd.readouterr().err == naming("--keep-best ... step 0 ... eval_loss ... last one differs by more than")
    kept, start = (load_file(trained.folder / name / "model.safetensors") for name in ("kept/sft", "base"))
    assert all(torch.equal(kept[name], start[name]) for name in start)


@pytest.fixture(scope="module")
def bad_files(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = make_folder(tmp_path_factory.mktemp("bad"), num_train=12, num_test=2)
    (folder / "columns.jsonl").write_text('{"question": "Who?", "reply": "Me."}\n')
    (folder / "broken.jsonl").write_text('{"prompt": "Who?", "response": "Me."}\n{"prompt": \n')
    (folder / "empty.jsonl").write_text("")
    (folder / "notes").mkdir()
    return folder


COMPLAINTS = {
    "wrong column": ({"data_path": "columns.jsonl"}, "columns.jsonl"),
    "broken JSON": ({"data_path": "broken.jsonl"}, "broken.jsonl"),
    "empty file": ({"data_path": "empty.jsonl"}, "empty.jsonl"),
    "no such file": ({"data_path": "./absent.jsonl"}, "absent.jsonl"),
    "no such model": ({"model_name_or_path": "./absent/model"}, "absent/model"),
    "a folder without a model": ({"model_name_or_path": "./notes"}, "notes"),
    "too many tokens": ({"max_seq_len": 4096}, "--max-seq-len 4096"),
    "a map without a column": ({"column_map": "prompt"}, "--column-map prompt"),
    "offload at stage 0": ({"offload": "true", "zero_stage": 0}, "--offload"),
    "no such checkpoint": ({"resume": "./absent"}, "--resume"),
}


@pytest.mark.parametrize("name", COMPLAINTS)
def test_bad_input_is_one_line_and_exit_2(
    name: str, bad_files: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    changes, named = COMPLAINTS[name]
    monkeypatch.chdir(bad_files)
    line = refusal_of(main, words(bad_files, "bad-out/sft", 4, **changes), capfd)
    assert line.startswith("error: ") and named in line
    assert not (bad_files / "bad-out" / "sft").exists()


def test_a_run_that_goes_on_knows_its_best_model(tmp_path: Path, monkeypatch, capfd) -> None:
    """The start model is the best; the step after the stop is worse, and must not take its place."""
    folder = make_folder(tmp_path, num_train=16, num_test=4)
    monkeypatch.chdir(folder)
    ruinous = {"learning_rate": 1.0, "keep_best": "true", "eval_interval": 1}
    for steps in (1, 2):
        assert run_stage("sft", words(folder, "kept/sft", 8, **ruinous, max_steps=steps)) == 0
        assert capfd.readouterr().err == naming(
            "--keep-best ... step 0 ... eval_loss ... last one differs by no more than"
        )
    kept, start = (load_file(folder / name / "model.safetensors") for name in ("kept/sft", "base"))
    assert all(torch.equal(kept[name], start[name]) for name in start)
