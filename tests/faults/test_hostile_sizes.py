"""Sizes that nobody means are refused at once, in one line: of models, adapters, tokenizers, flags and their files."""

import errno
import json
import os
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from broken_models import adapter
from input_calls import call, stage_words, stopped_at_the_models
from safetensors.torch import load_file, save_file
from support.messages import naming

from pipeline import files
from pipeline.errors import dashed
from pipeline.processes import time_limit
from rlhf import init

FOLDER_SIZES = {"num_train": 12, "num_test": 2}
DIGITS = "9" * 20
LEVELS = [f"a{n}: &a{n} [{', '.join([f'*a{n - 1}'] * 9)}]" for n in range(1, 10)]
BOMB = "\n".join(["a0: &a0 [x, x, x, x, x, x, x, x, x]", *LEVELS])


def with_config(**fields: Any) -> Callable[[Path], object]:
    def change(model: Path) -> None:
        file = model / "config.json"
        file.write_text(json.dumps(json.loads(file.read_text()) | fields))

    return change


def expanding(model: Path) -> None:
    """A tokenizer that makes 10^9 characters of each e."""
    file = model / "tokenizer.json"
    steps = [{"type": "Replace", "pattern": {"String": "e"}, "content": "e" * 1000}] * 3
    content = json.loads(file.read_text()) | {"normalizer": {"type": "Sequence", "normalizers": steps}}
    file.write_text(json.dumps(content))


MODELS: dict[str, tuple[Callable[[Path], object], str]] = {
    "num_labels": (with_config(num_labels=300_000), "config.json ... 300,000 labels ... at most 10,000"),
    "id2label": (with_config(id2label={str(n): "x" for n in range(20_000)}), "got 20,000 labels"),
    "rank": (adapter(base_model_name_or_path="x", r=10**7), "r: got 10000000 ... at most 16,384"),
    "rank pattern": (adapter(base_model_name_or_path="x", rank_pattern={"q": 10**9}), "r: got 1000000000, expected"),
    "rank in words": (adapter(base_model_name_or_path="x", r="all"), "r: got all ... a number"),
    "tokenizer": (expanding, "normalizer ... 1,000,000,000 characters"),
}


@pytest.mark.parametrize("command", ["sft", "chat"])
@pytest.mark.parametrize("name", MODELS)
def test_a_model_of_a_size_that_nobody_means(folder, tmp_path, monkeypatch, name, command):
    spoil, says = MODELS[name]
    model = shutil.copytree(folder / "base", tmp_path / "model")
    spoil(model)
    flag = "model" if command == "chat" else "model_name_or_path"
    with stopped_at_the_models(monkeypatch), time_limit(20):
        ending = call(command, stage_words(command, folder, tmp_path / "out", **{flag: model}))
    assert ending.code == 2 and len(ending.errors) == 1 and ending.errors[0] == naming(says), ending.stderr


FLAGS = {
    "per_device_train_batch_size": DIGITS, "train_batch_size": DIGITS, "gradient_accumulation_steps": DIGITS,
    "per_device_eval_batch_size": DIGITS, "max_steps": f"-{DIGITS}", "seed": DIGITS, "show_data": 999_999_999,
}  # fmt: skip


@pytest.mark.parametrize("flag", FLAGS)
def test_a_flag_of_a_size_that_nobody_means(folder, tmp_path, monkeypatch, flag):
    with stopped_at_the_models(monkeypatch), time_limit(20):
        ending = call("sft", stage_words("sft", folder, tmp_path / "out", **{flag: FLAGS[flag]}))
    ended, line = ending.code, ending.errors[0]
    assert ended == 2 and f"{dashed(flag)}: got " in line and "expected" in line, ending.stderr


@pytest.mark.parametrize("command", ["reward_eval", "sample", "prompt_eval"])
def test_a_batch_of_20_digits_of_a_command(folder, tmp_path, command):
    ending = call(command, stage_words(command, folder, tmp_path / "out", batch_size=DIGITS))
    (line,) = ending.errors
    assert ending.code == 2 and line == naming("at most 15 digits"), ending.stderr


@pytest.mark.parametrize("last", ["sft: {data_path: *a9}", "data_path: *a9", "seed: 1"])
def test_aliases_that_expand(folder, tmp_path, monkeypatch, last):
    (tmp_path / "c.yaml").write_text(f"{BOMB}\n{last}\n")
    with stopped_at_the_models(monkeypatch), time_limit(20):
        ending = call("sft", stage_words("sft", folder, tmp_path / "out", config=tmp_path / "c.yaml"))
    (line,) = ending.errors
    assert ending.code == 2 and line == naming("c.yaml: not YAML ... aliases (*name) ... more than 1,000,000")


def test_a_list_that_is_named_twice_is_read(folder, tmp_path, monkeypatch):
    text = f"data_path: &rows [{folder / 'train.jsonl'}]\neval_data_path: *rows\n"
    (tmp_path / "c.yaml").write_text(text)
    words = stage_words("sft", folder, tmp_path / "o", config=tmp_path / "c.yaml", data_path=None, eval_data_path=None)
    with stopped_at_the_models(monkeypatch):
        assert "--eval-data-path holds the same prompts" in call("sft", words).stderr


def test_the_field_by_which_transformers_shards_what_it_saves_is_ignored(folder, tmp_path, capsys):
    from pipeline.models.source import ModelSource

    model = shutil.copytree(folder / "base", tmp_path / "model")
    with_config(distributed_config={"x": 1})(model)
    assert getattr(ModelSource(str(model)).config, "distributed_config", None) is None


def test_a_folder_of_data_that_may_not_be_read(folder, tmp_path, monkeypatch):
    """Root may read all: what the system would say to others is said here."""
    rows, real = tmp_path / "rows", os.access
    rows.mkdir()
    shutil.copy(folder / "train.jsonl", rows)
    monkeypatch.setattr(os, "access", lambda path, mode: Path(path) != rows and real(path, mode))
    with stopped_at_the_models(monkeypatch):
        ending = call("sft", stage_words("sft", folder, tmp_path / "out", data_path=rows))
    assert ending.code == 2 and ending.errors == [naming(f"error: {rows} ... cannot be read ... Permission denied")], (
        ending.stderr
    )


@pytest.fixture
def full_disk(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Every flush of a file says that the disk is full."""

    def refuse(path: Path) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(files, "flush", refuse)
    yield


@pytest.mark.usefixtures("full_disk")
def test_init_on_a_full_disk_ends_with_3(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    assert init.main(["a.yaml", "--actor-model", "x/y", "--data-path", "r.jsonl", "--step", "1"]) == 3
    assert capsys.readouterr().err == naming("error: a.yaml ... cannot be written ... No space left")
    assert not Path("a.yaml").exists()


@pytest.mark.usefixtures("full_disk")
def test_compare_on_a_full_disk_ends_with_3(folder, tmp_path):
    ending = call("prompt_eval", stage_words("prompt_eval", folder, tmp_path, output=tmp_path / "out"))
    (line,) = ending.errors
    assert ending.code == 3 and line == naming(f"{tmp_path / 'out'} ... cannot be written ... No space left")


def spoilt(source: Path, target: Path, value: float) -> Path:
    """A model whose head, or whose embedding, has this value."""
    model = shutil.copytree(source, target)
    weights = load_file(model / "model.safetensors")
    ending = ("score.weight", "embed_tokens.weight")
    name = min((name for name in weights if name.endswith(ending)), key=lambda name: "score" not in name)
    weights[name] = torch.full_like(weights[name], value)
    save_file(weights, model / "model.safetensors", metadata={"format": "pt"})
    return model


@pytest.mark.parametrize("value", [float("nan"), 3e38])
@pytest.mark.parametrize(
    ("command", "flag", "source"),
    [
        ("reward_eval", "model", "judge"),
        ("chat", "model", "base"),
        ("sample", "reward_model", "judge"),
    ],
)
def test_scores_and_logits_that_are_no_numbers_are_one_line(folder, tmp_path, command, flag, source, value):
    model = spoilt(folder / source, tmp_path / "model", value)
    changes = {flag: model} | ({"dtype": "fp32"} if command != "reward_eval" else {})
    ending = call(command, stage_words(command, folder, tmp_path / "out", **changes))
    (line,) = ending.errors
    assert ending.code == 2 and str(model) in line, ending.stderr


@pytest.mark.parametrize("stage", ["reward", "dpo"])
def test_a_margin_of_400_digits_is_a_row_that_is_dropped(folder, tmp_path, monkeypatch, stage):
    row = json.dumps({"prompt": "a?", "chosen": "b", "rejected": "c", "margin": 10**400})
    (tmp_path / "rows.jsonl").write_text((folder / "train.jsonl").read_text() + row + "\n")
    with stopped_at_the_models(monkeypatch):
        ending = call(stage, stage_words(stage, folder, tmp_path / "out", data_path=tmp_path / "rows.jsonl"))
    assert ending.loaded and naming("1 dropped: margin") in ending.counts, ending.stderr


def health(folder: Path, out: Path, stage: str, rows: list[dict[str, Any]], **more: object) -> list[str]:
    """The warnings about these rows, each beside rows that are right."""
    file = out / "rows.jsonl"
    file.write_text("".join(json.dumps(row) + "\n" for row in rows))
    ending = call(stage, stage_words(stage, folder, out / "out", data_path=file, eval_data_path=None, **more))
    assert ending.loaded, ending.stderr
    return [line for line in ending.stderr.splitlines() if " rows: all " in line or "in both orders" in line]


@pytest.mark.parametrize(("labels", "says"), [([True] * 4, "4 labels are true"), ([False] * 4, "4 labels are false")])
def test_kto_with_one_label_alone_is_warned_of(folder, tmp_path, monkeypatch, labels, says):
    more = {"method": "kto", "eval_fraction": 0}
    rows = [{"prompt": f"a {n}?", "completion": f"b {n}", "label": label} for n, label in enumerate(labels)]
    with stopped_at_the_models(monkeypatch):
        (line,) = health(folder, tmp_path, "dpo", rows, **more)
        assert line == naming(f"dpo rows: all {says} ... KTO ... good and bad")
        assert health(folder, tmp_path, "dpo", [*rows, rows[0] | {"label": not labels[0]}], **more) == []


@pytest.mark.parametrize("stage", ["reward", "dpo"])
def test_pairs_in_both_orders_are_warned_of(folder, tmp_path, monkeypatch, stage):
    rows = [{"prompt": f"a {n % 4}?", "chosen": f"b {n}", "rejected": f"c {n}"} for n in range(6)]
    turned = [row | {"chosen": row["rejected"], "rejected": row["chosen"]} for row in rows[:2]]
    other = rows[2] | {"prompt": "another?", "chosen": rows[2]["rejected"], "rejected": rows[2]["chosen"]}
    with stopped_at_the_models(monkeypatch):
        (line,) = health(folder, tmp_path, stage, [*rows, *turned, turned[0], other], eval_fraction=0)
        assert line == naming(f"{stage} rows: 2 pairs ... both orders ... keep one")
        assert health(folder, tmp_path, stage, [*rows, other], eval_fraction=0) == []
