"""`rlhf sample` on several ranks: parts that are gone on with, and joined."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from support.in_process import undone_afterwards
from support.messages import naming
from support.scripted_model import save, tiny_config
from transformers import LlamaForCausalLM

from pipeline.errors import EnvironmentFault
from rlhf.rewards import sample_file
from rlhf.rewards.sample import main

FLAGS = ("--data", "q.jsonl", "--max-new-tokens", "8", "--dtype", "fp32")
QUESTIONS = ["one", "two", "three", "one", "four"]  # one of them twice


@pytest.fixture(scope="module")
def model(bpe_folder, tmp_path_factory) -> str:
    torch.manual_seed(0)
    return save(LlamaForCausalLM(tiny_config()), bpe_folder, tmp_path_factory.mktemp("model"))


@pytest.fixture
def folder(tmp_path, monkeypatch):
    """The folder of the command, with questions and a reward function."""
    monkeypatch.chdir(tmp_path)
    Path("f.py").write_text("def length(completions):\n    return [len(text) for text in completions]\n")
    Path("q.jsonl").write_text("".join(json.dumps({"prompt": text}) + "\n" for text in QUESTIONS))
    with undone_afterwards():
        yield tmp_path


def rows_of(file: str) -> list[dict[str, Any]]:
    return [json.loads(line) for line in Path(file).read_text().splitlines()]


def close_to(answer: dict[str, Any]) -> dict[str, Any]:
    """The last bits of a log-probability depend on what is computed beside it."""
    return answer | {"log_prob": pytest.approx(answer["log_prob"], abs=1e-4)}


def test_ranks_write_parts_that_are_joined(folder, model, capsys, monkeypatch):
    """Two processes after each other, the first one stopped within its part; the file is that of one process."""
    reward = ("--reward", "f.py:length", "-n", 2)
    assert main([model, *FLAGS, *map(str, reward), "--output", "alone.jsonl"]) == 0, capsys.readouterr().err
    alone = rows_of("alone.jsonl")
    monkeypatch.setenv("WORLD_SIZE", "2")

    def of_rank(rank: int, *words: object, code: int = 0) -> str:
        monkeypatch.setenv("RANK", str(rank))
        flags = [*FLAGS, *map(str, (*reward, *words)), "--output", "two.jsonl"]
        assert main([model, *flags]) == code, capsys.readouterr().err
        return capsys.readouterr().err

    of_rank(1, "--seed", 5)  # the part of an earlier command
    assert "3 rows of 3 prompts" in of_rank(0, "--overwrite") and not Path("two.jsonl").exists()
    part = Path("two.jsonl.part-1-of-2")
    lines = part.read_bytes().splitlines(keepends=True)
    assert [json.loads(line)["number"] for line in lines] == [1, 3, 5]
    part.write_bytes(b"".join(lines[:2]) + lines[2][:9])  # as of a rank that was killed
    Path("two.jsonl.part-1-of-2.settings.json").write_text(
        Path("two.jsonl.part-1-of-2.settings.json").read_text().replace("is_whole", "was_whole")
    )
    of_rank(1, "--overwrite")
    assert not Path("two.jsonl").exists(), "the other part is torn"
    shown = of_rank(0)
    assert shown == naming("after prompt 3 of 5") and shown == naming("two.jsonl: 5 rows ... 2 ranks")
    both = rows_of("two.jsonl")
    assert both == [row | {"answers": [close_to(one) for one in row["answers"]]} for row in alone]
    assert sorted(path.name for path in Path().glob("*two.jsonl*part*")) == []
    monkeypatch.setattr("pipeline.inference.answers.load_chat_model", None)
    for rank in (0, 1):
        of_rank(rank)
    assert of_rank(0, "--seed", 5, code=2) == naming("seed 1234, now 5")
    monkeypatch.setenv("WORLD_SIZE", "3")
    assert of_rank(2, code=2) == naming("ranks 2, now 3")


def write_parts(file: Path, settings: dict[str, Any]) -> None:
    """Write the parts of two ranks, the first of them to its end."""
    for rank in (0, 1):
        part = sample_file.open_samples(sample_file.part_of(file, rank, 2), settings, overwrite=False)
        part.write(rank + 1, {"answers": []})
    assert sample_file.join_parts(file, settings, rank=0, size=2) == 0, "the other one is not whole"


def test_parts_are_joined_by_one_process_at_a_time(tmp_path, monkeypatch):
    """While another one holds the file nothing is joined, and no part is lost."""
    file, settings = tmp_path / "two.jsonl", {"seed": 1}
    monkeypatch.setattr(sample_file, "JOINING_S", 0.1)
    write_parts(file, settings)
    with sample_file.output_held(file), pytest.raises(EnvironmentFault, match=r"two\.jsonl"):
        sample_file.join_parts(file, settings, rank=1, size=2)
    assert not file.exists()
    assert sample_file.join_parts(file, settings, rank=1, size=2) == 2 and len(rows_of(str(file))) == 2


@pytest.mark.parametrize("name", ["write_json", "replace"])
def test_a_join_that_was_killed_is_made_by_the_next_command(tmp_path, monkeypatch, name):
    """Killed before its settings say that the joined file is whole, or before it gets its name."""
    file, settings = tmp_path / "two.jsonl", {"model": "m"}
    write_parts(file, settings)
    original, place = {"replace": (Path.replace, Path), "write_json": (sample_file.write_json, sample_file)}[name]

    def killed(one: Path, *args: object) -> None:
        if one in (sample_file.settings_of(file), file.with_name(f".{file.name}.writing")):
            raise KeyboardInterrupt
        original(one, *args)

    with monkeypatch.context() as patch, pytest.raises(KeyboardInterrupt):
        patch.setattr(place, name, killed)
        sample_file.join_parts(file, settings, rank=1, size=2)
    assert not sample_file.is_joined(file, settings)
    assert sample_file.join_parts(file, settings, rank=1, size=2) == 2 and sample_file.is_joined(file, settings)
