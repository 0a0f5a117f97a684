"""Counts keep a number and the first place for each kind."""

from pipeline.data.counts import Counts, Origin


def counted() -> Counts:
    counts = Counts()
    counts.add("empty prompt", Origin("a.jsonl", 3))
    counts.add("truncated", Origin("b.csv", 2))
    counts.add("truncated", Origin("b.csv", 9))
    return counts


def test_first_place_and_number_of_each_kind_are_kept():
    counts = counted()
    assert counts["truncated"] == 2
    assert counts["never seen"] == 0
    assert counts.lines() == ["2 truncated (first: b.csv:2)", "1 empty prompt (first: a.jsonl:3)"]


def test_json_round_trip():
    assert Counts.from_json(counted().to_json()) == counted()
