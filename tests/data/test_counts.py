"""Counts keep a number and the first place for each kind."""

from pipeline.data.counts import Counts, Origin


def test_first_place_and_number_of_each_kind_are_kept():
    counts = Counts()
    counts.add("empty prompt", Origin("a.jsonl", 3))
    counts.add("empty prompt", Origin("a.jsonl", 9))
    counts.add("truncated", Origin("b.csv", 2), number=5)
    assert counts["empty prompt"] == 2
    assert counts.first("empty prompt") == "a.jsonl:3"
    assert counts["never seen"] == 0
    assert counts.lines() == ["5 truncated (first: b.csv:2)", "2 empty prompt (first: a.jsonl:3)"]


def test_json_round_trip_and_merge():
    counts = Counts()
    counts.add("truncated", "a:1", number=2)
    copy = Counts.from_json(counts.to_json())
    copy.merge(counts)
    assert copy["truncated"] == 4
    assert copy.first("truncated") == "a:1"
    assert counts["truncated"] == 2
