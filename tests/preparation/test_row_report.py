"""Where rows went, as a run says it, against files whose rows were written for each outcome."""

import json
import logging
import re
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from support.messages import naming
from support.row_options import ROWS
from support.tiny_run import write_lines
from transformers import LlamaConfig

from pipeline.configuration.flags import parse
from pipeline.configuration.groups import DataConfig
from pipeline.data.counts import Counts, Origin
from pipeline.data.row_kinds import BLOCKS, PAIRS, PROMPTS, SAME_TOKENS, SEQUENCES
from pipeline.data.selection import options_of
from pipeline.preparation.inputs import most_tokens, prepare_data, row_lines, row_warnings
from rlhf.stages import stage_of


def pair(name: str, words: int = 1, **extra: object) -> dict:
    return {"prompt": f"{name}?", "chosen": "good " * words + "end", "rejected": "bad", **extra}


def write_mixture(folder: Path) -> list[str]:
    """First: 40 good rows, 3 of them twice, 2 empty, 4 too long for 60 tokens, 6 of test. Second: 20 rows at 0.5."""
    good = [pair(f"first {n}") for n in range(40)]
    bad = [pair("") | {"prompt": " "}] * 2 + [pair(f"long {n}", 100 + n) for n in range(4)]
    held_out = [pair(f"test {n}", split="test") for n in range(6)]
    write_lines(folder / "first.jsonl", [*good, *good[:3], *bad, *held_out])
    write_lines(folder / "second.jsonl", [pair(f"second {n}", split="train", topic="t") for n in range(20)])
    return [str(folder / "first.jsonl"), f"{folder / 'second.jsonl'}:0.5"]


@pytest.mark.parametrize("split", ["none", "1,1,0"])
def test_every_row_that_was_given_is_told_of(bpe_tokenizer, tmp_path, caplog, split):
    """The numbers of a line add up to the lines of the files, and those of the sources to that of all."""
    paths = write_mixture(tmp_path)
    data = DataConfig(data_path=paths, data_split=split, eval_fraction=0.2, data_output_path=str(tmp_path / "cache"))
    with caplog.at_level(logging.INFO):
        built = prepare_data(options_of(data, **ROWS["reward"], max_seq_len=60), bpe_tokenizer)
    said = [record.getMessage() for record in caplog.records]
    pattern = re.compile(r"(\d+) (to train on|held out|of other stages|left out|dropped|given)")
    whole, first, second = (
        {name: int(number) for number, name in pattern.findall(line)} for line in said if " given" in line
    )
    for told, path in ((first, "first.jsonl"), (second, "second.jsonl")):
        assert sum(told.values()) - told["given"] == told["given"] == len((tmp_path / path).open().readlines())
    assert whole == {name: first.get(name, 0) + second.get(name, 0) for name in whole}
    assert (whole["to train on"], whole["held out"]) == (len(built.train), len(built.eval))
    assert (first["held out"], first["given"]) == (6, 55)
    mapped = said[0].partition("of other stages (--data-split 1,1,0)")[1]
    if split == "none":
        assert (first["to train on"], first["dropped"]) == (43, 6) and not mapped
        assert 0 < second["left out"] < 20
        assert naming(f"4 dropped: pair ... max_seq_len (first: {tmp_path}/first.jsonl:46)") in said
        assert naming("3 kept: row repeated (first:") in said
    else:
        assert mapped and first["of other stages"] > 0 and first["dropped"] >= 2
    assert naming(f"{tmp_path}/second.jsonl ... not read ... topic") in said


def counts_of(
    *, kept: int, dropped: int = 0, lengths: tuple[int, ...] = (), held_out: int = 5, why: str = "why"
) -> Counts:
    counts = Counts()
    counts.settle("to train on", "f", kept - held_out)
    counts.settle("held out", "f", held_out)
    for length in (*[0] * dropped, *lengths):
        counts.add("dropped", why, Origin("f", 1), num_tokens=length)
    return counts


def test_dropping_many_rows_is_warned_of_with_the_length_that_keeps_nearly_all():
    assert row_warnings("reward", PAIRS, counts_of(kept=90, dropped=10)) == []
    assert row_warnings("reward", PAIRS, counts_of(kept=89, dropped=11)) == ["reward rows: 11% dropped"]
    lengths = tuple(range(601, 621))
    for title, kind, flag in (("reward", PAIRS, "--max-seq-len"), ("ppo", PROMPTS, "--max-prompt-seq-len")):
        (line,) = row_warnings(title, kind, counts_of(kept=80, lengths=lengths))
        assert line == naming(f"{title} rows ... 20% dropped ... {flag} 615 ... 15 of the 20")
    # By brute force: of 80 rows that fit and 20 longer ones, 615 is the least limit that 95 rows fit.
    assert [limit for limit in range(600, 620) if 80 + sum(size <= limit for size in lengths) >= 95][0] == 615


def test_pairs_that_are_equal_on_both_sides():
    """Above 5 % of the pairs, of which rows that were dropped for other reasons are none."""
    assert row_warnings("reward", PAIRS, counts_of(kept=95, dropped=5, why=SAME_TOKENS)) == []
    (line,) = row_warnings("reward", PAIRS, counts_of(kept=94, dropped=6, why=SAME_TOKENS))
    assert line == naming("health: 6% of the pairs ... --max-seq-len")


def test_the_length_that_is_advised_is_one_that_the_flag_takes():
    for title, kind, flag in (("reward", PAIRS, "--max-seq-len 8"), ("ppo", PROMPTS, "--max-prompt-seq-len 1")):
        (line,) = row_warnings(title, kind, counts_of(kept=8, lengths=(1, 1)))
        assert line == naming(f"{title} rows ... 20% dropped ... {flag} ... 2 of the 2")


def test_no_length_beyond_the_models_positions_is_advised():
    (line,) = row_warnings("reward", PAIRS, counts_of(kept=80, lengths=tuple(range(601, 621))), 610)
    assert line == naming("reward rows ... 20% dropped ... --max-seq-len 610 ... 10 of the 20")
    (line,) = row_warnings("reward", PAIRS, counts_of(kept=80, lengths=tuple(range(601, 621))), 600)
    assert line == naming("reward rows ... 20% dropped ... no positions for the 20")


@pytest.mark.parametrize(
    ("section", "words", "most"), [("reward", [], 512), ("ppo", ["--max-answer-seq-len=100"], 412)]
)
def test_in_stage_3_the_answer_needs_positions_too(section, words, most):
    stage: Any = stage_of(section)
    words = [*words, "--data-path", "a"] + (["--model-name-or-path", "b"] if section == "reward" else [])
    config = parse(stage.config, words, section=section).config
    source: Any = SimpleNamespace(config=LlamaConfig(max_position_embeddings=512))
    assert most_tokens(source, config) == most


def test_the_length_that_is_advised_speaks_of_the_rows_that_it_would_help():
    """Of 209 dropped prompts 191 are repeated: no length keeps these. 40 fit, and 56 of 58 is the least of 95 %."""
    lengths = tuple(range(41, 59))
    (line,) = row_warnings("ppo", PROMPTS, counts_of(kept=40, dropped=191, lengths=lengths))
    assert line == naming("ppo rows ... 84% dropped ... --max-prompt-seq-len 56 ... 16 of the 18")


def test_no_held_out_row_is_warned_of_where_there_is_an_evaluation():
    counts = counts_of(kept=9, held_out=0)
    (line,) = row_warnings("sft", SEQUENCES, counts)
    assert line.startswith("sft rows: 0 held out") and "--eval-fraction" in line and "--eval-data-path" in line
    assert row_warnings("text", BLOCKS, counts) == [] and row_warnings("sft", SEQUENCES, counts_of(kept=9)) == []


def test_texts_that_fill_blocks_are_told_apart_from_sequences():
    counts = counts_of(kept=9)
    assert row_lines("sft", counts, "none", num_sequences=4) == [
        naming("sft rows ... 4 to train on ... 5 held out ... 9 given")
    ]
    assert row_lines("sft", counts, "none", num_sequences=2)[0] == naming("4 to train on (sequences: 2) ... 5 held out")


def test_real_answers_labelled_false_train_no_policy_and_give_prompts(real_data, bpe_tokenizer, tmp_path):
    path = real_data / "raw" / "llamafactory_kto_en_demo.first50.json"
    shipped = json.loads(path.read_text(encoding="utf-8"))
    options = {"data_split": "none", "eval_fraction": 0.0, "data_output_path": str(tmp_path)}
    data = DataConfig(data_path=[str(path)], **options)
    sft = prepare_data(options_of(data, **ROWS["sft"], max_seq_len=8192), bpe_tokenizer)
    assert len(sft.train) == sum(row["label"] for row in shipped) < len(shipped)
    assert sft.counts["response is labelled false"] == len(shipped) - len(sft.train)
    prompts = prepare_data(options_of(data, **ROWS["ppo"], max_prompt_seq_len=8192), bpe_tokenizer)
    assert len(prompts.train) == len({json.dumps(row["messages"][:-1]) for row in shipped})
