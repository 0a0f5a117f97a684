"""Pairs that are left out until length says nothing: against a slow loop, for any order of rows, in mixtures."""

from collections import Counter
from dataclasses import replace
from pathlib import Path
from random import Random
from typing import Any

import pytest
from support.messages import naming
from support.row_options import load_rows, of_stage
from support.tiny_run import write_lines

from pipeline.data.cache import cache_key, load_or_build
from pipeline.data.selection import DataOptions
from pipeline.errors import InputError
from pipeline.preparation.inputs import row_lines
from step3_dpo.rows import RESPONSES

Row = dict[str, Any]
REASON = "more frequent than its inverse (--balance-lengths)"


def pairs(name: str, number: int, *, seed: int = 0) -> list[Row]:
    """Pairs whose chosen answers are mostly the longer ones; some prompts have several pairs."""
    random = Random(seed)
    lengths = [sorted((random.randint(1, 60), random.randint(1, 60))) for _ in range(number)]
    for two in lengths:
        if random.random() < 0.7:
            two.reverse()
    return [
        {"prompt": f"{name} {n // 3 if n % 2 else n}?", "chosen": "a" * x, "rejected": "b" * y}
        for n, (x, y) in enumerate(lengths)
    ]


def options_of(folder: Path, *sources: list[Row], **changes: Any) -> DataOptions:
    for n, rows in enumerate(sources):
        write_lines(folder / f"{n}.jsonl", rows)
    files = tuple(str(folder / f"{n}.jsonl") for n in range(len(sources)))
    plain = {"data_split": "none", "eval_fraction": 0.1, "cache_dir": str(folder / "cache")}
    return DataOptions(**({"data_path": files, "balance_lengths": True} | plain | changes))


def read_back(rows: Any, tokenizer: Any) -> Counter[tuple[str, int, int]]:
    """Prompt and lengths of each pair, from its tokens."""

    def one(row: Row) -> tuple[str, int, int]:
        texts = (tokenizer.decode(row[name]) for name in ("chosen_ids", "rejected_ids"))
        (prompt, chosen), (_, rejected) = (text.split("Human: ")[1].split("Assistant:") for text in texts)
        return prompt.split("?")[0], chosen.count("a"), rejected.count("b")

    return Counter(map(one, rows))


def ratio(chosen: int, rejected: int) -> int:
    """Which quarters of a doubling the lengths are apart by: 2 ** ((k - 1/2) / 4) <= longer / shorter counts as k."""
    longer, shorter = max(chosen, rejected), min(chosen, rejected)
    k = 0
    while longer / shorter > 2 ** ((k + 0.5) / 4):
        k += 1
    return k if chosen > rejected else -k


def by_ratio(found: Counter[tuple[str, int, int]]) -> Counter[int]:
    return sum((Counter({ratio(x, y): count}) for (_, x, y), count in found.items()), Counter())


def test_as_many_of_a_ratio_stay_as_there_are_of_the_inverse_one(bpe_tokenizer, tmp_path):
    options = options_of(tmp_path, pairs("a", 400))
    whole = load_rows("reward", replace(options, balance_lengths=False), bpe_tokenizer)
    kept = load_rows("reward", options, bpe_tokenizer)
    before, after = (read_back(rows.train, bpe_tokenizer) for rows in (whole, kept))
    assert after <= before and len(kept.eval) == len(whole.eval) > 20
    assert read_back(kept.eval, bpe_tokenizer) == read_back(whole.eval, bpe_tokenizer), "held-out pairs are all there"
    given, left = by_ratio(before), by_ratio(after)
    assert given[0] == left[0] > 10 and len(given) > 20
    assert all(left[k] == min(given[k], given[-k]) for k in given)
    assert sum(k * count for k, count in left.items()) == 0 < sum(k * count for k, count in given.items())
    number = before.total() - after.total()
    total, *kinds = row_lines("reward", kept.counts, "none", num_sequences=len(kept.train))
    rows = f"{after.total()} to train on", f"{len(kept.eval)} held out", f"{number} left out", "of 400"
    assert total == naming("reward rows", *rows)
    assert naming(f"{number} left out ... {REASON} (first:") in kinds


def test_the_order_of_rows_changes_nothing_and_a_seed_does(bpe_tokenizer, tmp_path):
    rows = pairs("a", 200)
    options = options_of(tmp_path, rows)
    first = read_back(load_rows("reward", options, bpe_tokenizer).train, bpe_tokenizer)
    (tmp_path / "again").mkdir()
    mixed = options_of(tmp_path / "again", Random(1).sample(rows, len(rows)))
    assert read_back(load_rows("reward", mixed, bpe_tokenizer).train, bpe_tokenizer) == first
    other = replace(options_of(tmp_path / "again", rows, eval_fraction=0.0), seed=5)
    plain = replace(other, seed=options.seed)
    found = [read_back(load_rows("reward", one, bpe_tokenizer).train, bpe_tokenizer) for one in (other, plain)]
    assert found[0] != found[1] and by_ratio(found[0]) == by_ratio(found[1])


def test_sources_that_are_mixed_by_ratios_are_balanced_one_by_one(bpe_tokenizer, tmp_path):
    """In the one the chosen answer is mostly the longer, in the other mostly the shorter one: together nearly even."""
    longer, other = pairs("a", 150), pairs("b", 150, seed=1)
    turned = [{**row, "chosen": "a" * len(row["rejected"]), "rejected": "b" * len(row["chosen"])} for row in other]
    options = options_of(tmp_path, longer, turned, eval_fraction=0.0)
    alone = options_of(tmp_path, longer, turned, eval_fraction=0.0, mixture="ratio")
    found = [read_back(load_rows("reward", one, bpe_tokenizer).train, bpe_tokenizer) for one in (options, alone)]
    for name in "ab":
        parts = [Counter({one for one in both if one[0].startswith(name)}) for both in found]  # some are repeated
        apart = [sum(k * count for k, count in by_ratio(part).items()) for part in parts]
        assert apart[0] != 0 == apart[1]
    assert found[0].total() > found[1].total() * 0.9 > 50


def test_pairs_for_kto_are_balanced_and_single_responses_stay(bpe_tokenizer, tmp_path):
    rows = [*pairs("a", 60), *({"prompt": f"b {n}?", "completion": "c" * 50, "label": True} for n in range(20))]
    options = options_of(tmp_path, rows, eval_fraction=0.0)
    kept = load_or_build(replace(options, rows=RESPONSES.name), bpe_tokenizer)
    balanced = load_or_build(replace(options_of(tmp_path, rows[:60], eval_fraction=0.0), rows="pairs"), bpe_tokenizer)
    assert len(kept.train) == 2 * len(balanced.train) + 20 < 2 * 60


def test_nothing_to_train_on_is_said(bpe_tokenizer, tmp_path):
    rows = [{"prompt": f"{n}?", "chosen": "a" * 9, "rejected": "b"} for n in range(9)]
    with pytest.raises(InputError, match=naming(f"9 left out ... {REASON}")):
        load_rows("reward", options_of(tmp_path, rows, eval_fraction=0.0), bpe_tokenizer)


def test_rows_with_and_without_the_flag_are_told_apart(bpe_tokenizer, tmp_path):
    options = of_stage("reward", options_of(tmp_path, pairs("a", 3)))
    assert cache_key(options, bpe_tokenizer) != cache_key(replace(options, balance_lengths=False), bpe_tokenizer)
