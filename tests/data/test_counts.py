"""Counts keep a number and the first place for each kind."""

import json

from pipeline.data.counts import Counts, Origin


def counted() -> Counts:
    counts = Counts()
    counts.add("dropped", "empty prompt", Origin("a.jsonl", 3))
    counts.add("cut", "truncated", Origin("b.csv", 2), num_tokens=70)
    counts.add("cut", "truncated", Origin("b.csv", 9), num_tokens=90)
    counts.settle("held out", "folder", 2)
    counts.note_columns("a.jsonl", passed={"answer"}, unread={"id", "label"})
    return counts


def test_first_place_and_number_of_each_kind_are_kept():
    counts = counted()
    assert counts["truncated"] == 2
    assert counts["never seen"] == 0
    assert counts.lines() == ["2 cut: truncated (first: b.csv:2)", "1 dropped: empty prompt (first: a.jsonl:3)"]
    assert counts.sources == {"a.jsonl": {"dropped": 1}, "b.csv": {"cut": 2}, "folder": {"held out": 2}}
    assert counts.outcomes == {"dropped": 1, "cut": 2, "held out": 2}


def test_json_round_trip():
    assert Counts.from_json(json.loads(json.dumps(counted().to_json()))) == counted()


def test_merged_counts_are_those_of_all_rows_in_order():
    whole, rest = counted(), Counts()
    rest.add("cut", "truncated", Origin("c.csv", 1, "folder"), num_tokens=70)
    rest.add("dropped", "no pair", Origin("c.csv", 2))
    rest.note_columns("a.jsonl", unread={"score"})
    rest.note_columns("b.csv", passed={"tests"})
    whole.merge(rest)
    assert whole["truncated"] == 3 and whole["no pair"] == 1 and "first: b.csv:2" in whole.lines()[0]
    assert whole.sources["folder"] == {"held out": 2, "cut": 1}
    assert whole.lengths == {70: 2, 90: 1} and whole.unread == {"a.jsonl": {"id", "label", "score"}}
    assert whole.passed == {"a.jsonl": {"answer"}, "b.csv": {"tests"}}
