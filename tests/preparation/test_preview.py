"""The preview of rows against the batches that the loops make of them, and as lines of a terminal."""

import re
from collections import Counter
from types import SimpleNamespace

import pytest
import torch
from rich.cells import cell_len
from support.row_options import load_rows, of_stage
from support.tiny_run import write_lines

from pipeline.data.batching import IGNORED, packed_sft_batch, pair_batch, seq2seq_batch
from pipeline.data.selection import DataOptions
from pipeline.preparation.preview import preview_lines, rows_document, samples_of

CODES = re.compile(r"\x1b\[[0-9;]*m")
WIDE = 100_000
NASTY = "a [b] ⟦c⟧ \x1b[31m\t<x>\r \u202e d↵ naïve 猫が 🐈 e"
TALK = [
    {"role": "user", "content": "Who?"},
    {"role": "assistant", "content": f"First.\nSecond {NASTY}"},
    {"role": "user", "content": "And?"},
    {"role": "assistant", "content": " Third 猫"},
]


def options(folder, rows, **changes) -> DataOptions:
    write_lines(folder / "rows.jsonl", rows)
    common = {"data_path": (str(folder / "rows.jsonl"),), "data_split": "none", "eval_fraction": 0.0}
    return DataOptions(**common, cache_dir=str(folder / "cache"), **changes)


def samples(stage, given, tokenizer, number=3, packing=False, **changes):
    data = load_rows(stage, given, tokenizer)
    config = SimpleNamespace(data=SimpleNamespace(packing=packing))
    return data, samples_of(config, [(of_stage(stage, given), data)], tokenizer, number=number, **changes)


def shown(text: str) -> str:
    """What stands on a terminal for a text, written down by hand for the characters of NASTY."""
    table = {"\n": "↵", "\x1b": "\\x1b", "\t": "\\x09", "\r": "\\x0d", "\u202e": "\\u202e"}
    table |= {"⟦": "\\u27e6", "⟧": "\\u27e7", "↵": "\\u21b5"}
    return "".join(table.get(char, char) for char in text)


def bracketed(lines: list[str]) -> str:
    return "".join("".join(re.findall("⟦([^⟧]*)⟧", line)) for line in lines)


def part_text(part) -> str:
    return "".join(span.text for span in part.spans)


def trained_text(parts) -> str:
    return "".join(span.text for part in parts for span in part.spans if span.is_trained)


@pytest.mark.parametrize("row", [{"messages": TALK}, {"text": f"plain {NASTY}"}, {"prompt": "p", "response": NASTY}])
def test_what_is_bracketed_is_what_the_loss_reads(bpe_tokenizer, tmp_path, row):
    """Check 9 of the terminal: spans joined are the decoded labels that are not -100, with and without colour."""
    data, (sample,) = samples("sft", options(tmp_path, [row]), bpe_tokenizer)
    batch = packed_sft_batch([[data.train[0]]], pad_id=0)
    labels = torch.where(batch.trained_mask, batch.input_ids, IGNORED)
    expected = bpe_tokenizer.decode(labels[labels != IGNORED])
    assert trained_text(sample.parts) == expected and "naïve 猫が 🐈" in expected
    assert part_text(sample.parts[0]) == bpe_tokenizer.decode(batch.input_ids[0])
    plain, coloured = (preview_lines([sample], WIDE, is_coloured)[1:] for is_coloured in (False, True))
    assert bracketed(plain) == shown(expected)
    assert "\x1b" not in "".join(plain) and CODES.search(coloured[-1])
    assert [CODES.sub("", line) for line in coloured] == plain
    green = "".join(re.findall("\x1b\\[32m([^\x1b]*)", "".join(coloured)))
    assert bracketed([green]) == green.replace("⟦", "").replace("⟧", "") == shown(expected)


def test_text_of_published_tokenizers_keeps_its_spaces(real_tokenizer, tmp_path):
    """SentencePiece drops the space in front of a text's first word, which is a part of a trained token."""
    talk = [turn | {"content": turn["content"].replace("\x1b", "").strip()} for turn in TALK]
    data, (sample,) = samples("sft", options(tmp_path, [{"messages": talk}]), real_tokenizer)
    ids, trained = data.train[0]["ids"], data.train[0]["trained"]
    whole = real_tokenizer.decode(ids, clean_up_tokenization_spaces=False)
    assert part_text(sample.parts[0]) == whole
    labels = [token for token, is_trained in zip(ids, trained, strict=True) if is_trained]
    first = real_tokenizer.decode(ids[:1], clean_up_tokenization_spaces=False)
    both = real_tokenizer.decode([*ids[:1], *labels], clean_up_tokenization_spaces=False)
    assert trained_text(sample.parts) == both.removeprefix(first)


def test_both_sides_of_a_pair_and_a_prompt(bpe_tokenizer, tmp_path):
    given = options(tmp_path, [{"prompt": "Which?", "chosen": f"good {NASTY}", "rejected": "bad"}])
    data, (pair,) = samples("reward", given, bpe_tokenizer)
    batch, length = pair_batch([data.train[0]], pad_id=0), data.train[0]["prompt_length"]
    sides = [ids[: batch.lengths[number]] for number, ids in enumerate(batch.input_ids)]
    texts = {part.name: part_text(part) for part in pair.parts}
    assert texts["prompt"] == bpe_tokenizer.decode(sides[0][:length])
    assert texts["chosen"] == bpe_tokenizer.decode(sides[0][length:])
    assert texts["rejected"] == bpe_tokenizer.decode(sides[1][length:])
    assert pair.tokens == batch.lengths.max() and not pair.parts[0].spans[0].is_trained
    data, (prompt,) = samples("ppo", given, bpe_tokenizer)
    ids = data.train[0]["prompt_ids"]
    assert [(part.name, part_text(part)) for part in prompt.parts] == [("prompt", bpe_tokenizer.decode(ids))]
    lines = preview_lines([prompt], WIDE, is_coloured=False)
    assert lines[1] == f"ppo row 1: {len(ids)} tokens" and "⟦" not in lines[2]


def test_an_encoder_reads_what_is_before_the_labels(bpe_tokenizer, tmp_path):
    data, (sample,) = samples("sft", options(tmp_path, [{"messages": TALK}]), bpe_tokenizer, seq2seq=True)
    batch = seq2seq_batch([[data.train[0]]], pad_id=0)
    labels = batch.labels[batch.labels != IGNORED]
    assert [part.name for part in sample.parts] == ["prompt", "response"]
    assert part_text(sample.parts[0]) == bpe_tokenizer.decode(batch.input_ids[0])
    assert trained_text(sample.parts) == bpe_tokenizer.decode(labels)


def test_packed_rows_are_one_sample(bpe_tokenizer, tmp_path):
    rows = [{"prompt": f"p {number}", "response": f"answer {number}"} for number in range(12)]
    data, found = samples("sft", options(tmp_path, rows, max_seq_len=160), bpe_tokenizer, packing=True, number=1)
    (sample,) = found
    members = [int(number) - 1 for number in sample.title.removeprefix("sft rows ").split(", ")]
    batch = packed_sft_batch([[data.train[row] for row in members]], pad_id=0)
    assert len(members) > 3 and sample.tokens == batch.attention_mask.sum() <= 160
    assert trained_text(sample.parts) == bpe_tokenizer.decode(batch.input_ids[batch.trained_mask])
    assert preview_lines(found, 60, is_coloured=False)[-1].strip() == f"… and {len(members) - 3} more"


def test_rows_that_are_cut_say_so(bpe_tokenizer, tmp_path):
    rows = [{"prompt": "p", "response": "word " * count} for count in (2, 200)]
    _, found = samples("sft", options(tmp_path, rows, max_seq_len=50), bpe_tokenizer)
    assert [sample.title for sample in found] == ["sft row 1", "sft row 2 (truncated)"]
    prompts = [{"prompt": "word " * count} for count in (2, 200)]
    given = options(tmp_path, prompts, max_prompt_seq_len=50, long_prompts="truncate_left")
    assert [sample.title for sample in samples("ppo", given, bpe_tokenizer)[1]] == [
        "ppo row 1",
        "ppo row 2 (truncated)",
    ]


def test_a_row_of_exactly_the_limit_is_not_cut(bpe_tokenizer, tmp_path):
    rows = [{"prompt": "p", "response": "word " * count} for count in (5, 200)]
    size = load_rows("sft", options(tmp_path, rows[:1]), bpe_tokenizer).train[0]["num_tokens"]
    _, found = samples("sft", options(tmp_path, rows, max_seq_len=size), bpe_tokenizer)
    assert [sample.tokens for sample in found] == [size, size]
    assert [sample.title for sample in found] == ["sft row 1", "sft row 2 (truncated)"]


@pytest.mark.parametrize("width", [40, 80, 120])
def test_long_rows_are_shortened_in_the_middle(bpe_tokenizer, tmp_path, width):
    rows = [{"prompt": "猫 question " * 90, "chosen": "猫 good " * 90, "rejected": "bad " * 90}] * 2
    for stage in ("sft", "reward", "ppo"):
        given = options(tmp_path, rows, max_seq_len=4096, max_prompt_seq_len=4096)
        _, found = samples(stage, given, bpe_tokenizer, number=1)
        lines = preview_lines(found, width, is_coloured=False)
        assert len(lines) <= 11 and max(map(cell_len, lines)) <= width
        labels = {part.name: part for part in found[0].parts}
        texts, name = dict.fromkeys(labels, ""), ""
        for line in lines[2:]:
            name = line[2:12].strip() or name
            texts[name] += line[12:]
        for name, part in labels.items():
            kept, left_out = re.subn(r" … ([\d,]+) characters left out … ", "", texts[name])
            number = int(re.search(r"… ([\d,]+) ", texts[name])[1].replace(",", ""))
            assert left_out == 1 and kept.count("⟦") == kept.count("⟧")
            kept = kept.replace("⟦", "").replace("⟧", "")
            assert len(kept) + number == len(part_text(part)) and shown(part_text(part)).startswith(kept[:10])
            assert shown(part_text(part)).endswith(kept[-10:])


def test_samples_are_spread_over_the_rows(bpe_tokenizer, tmp_path):
    rows = [{"prompt": f"p {number}", "response": "x"} for number in range(10)]
    given = options(tmp_path, rows)
    titles = {
        number: [s.title for s in samples("sft", given, bpe_tokenizer, number=number)[1]] for number in (1, 3, 99)
    }
    assert titles[1] == ["sft row 1"] and titles[3] == ["sft row 1", "sft row 4", "sft row 7"]
    assert titles[99] == [f"sft row {number}" for number in range(1, 11)]


def test_the_document_counts_what_the_rows_are(bpe_tokenizer, tmp_path):
    rows = [{"prompt": "p", "chosen": "a " * count, "rejected": "b"} for count in (1, 2, 3, 30)]
    given = options(tmp_path, rows)
    data, found = samples("reward", given, bpe_tokenizer)
    source = next(iter(data.counts.sources))
    data.counts.sources[source] = Counter({"of other stages": 9, "dropped": 0, "held out": 2, "to train on": 4})
    document = rows_document([(of_stage("reward", given), data)], ["a line"], found)
    lengths = sorted(len(row["chosen_ids"]) for row in data.train)
    assert document["tokens"] == {"median": lengths[2], "p95": lengths[3], "longest": lengths[3], "limit": 512}
    assert list(document["rows"].items()) == [("to train on", 4), ("held out", 2), ("of other stages", 9)]
    assert document["lines"] == ["a line"]
    spans = document["samples"][0]["parts"][1]["spans"]
    assert spans == [{"text": part_text(found[0].parts[1]), "is_trained": True}]
