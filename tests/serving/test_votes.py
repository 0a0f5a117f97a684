"""Votes are preference pairs that the stages read, and win rates by hand."""

import io
import json
import math
import os
from pathlib import Path

import pytest
from support.messages import naming

from pipeline.data.counts import Counts
from pipeline.data.formats import read_records
from pipeline.data.sources import read_rows
from pipeline.data.turns import Message
from pipeline.errors import InputError
from pipeline.inference.intervals import wilson
from pipeline.inference.serving.bodies import ApiError, Candidate
from pipeline.inference.serving.votes import Votes

PROMPT = (Message("user", "hello"),)
ANSWERS = (Candidate(model="sft", text="first"), Candidate(model="actor", text="second"))


def test_a_vote_is_a_pair_with_the_better_answer_first(tmp_path):
    votes = Votes(tmp_path / "votes.jsonl")
    votes.add(PROMPT, ANSWERS, 1, blind=True)
    (row,) = map(json.loads, votes.file.read_text().splitlines())
    assert row == {
        "prompt": [{"role": "user", "content": "hello"}], "chosen": "second", "rejected": "first",
        "models": ["actor", "sft"], "blind": True,
    }  # fmt: skip


def test_wins_count_for_the_later_model_in_either_order(tmp_path):
    votes = Votes(tmp_path / "votes.jsonl")
    for answers, choice in ((ANSWERS, 1), (ANSWERS[::-1], 0), (ANSWERS, 0), (ANSWERS, None), (ANSWERS[::-1], None)):
        votes.add(PROMPT, answers, choice, blind=False)
    (found,) = votes.summary(["sft", "actor"])
    assert (found["models"], found["wins"], found["ties"], found["losses"]) == (("sft", "actor"), 2, 2, 1)
    assert found["win_rate"] == pytest.approx(0.6)
    (swapped,) = votes.summary(["actor", "sft"])
    assert (swapped["models"], swapped["wins"], swapped["losses"]) == (("actor", "sft"), 1, 2)
    assert Votes(votes.file).summary(["sft", "actor"]) == [found]


@pytest.mark.parametrize(("wins", "losses"), [(6, 4), (3, 2), (9, 1), (30, 20), (2, 3)])
def test_further_votes_settle_it_and_one_less_does_not(tmp_path, wins, losses):
    """By a search over counts with Wilson's interval."""
    votes = Votes(tmp_path / "votes.jsonl")
    for choice in [1] * wins + [0] * losses:
        votes.add(PROMPT, ANSWERS, choice, blind=False)
    (found,) = votes.summary(["sft", "actor"])
    rate, count = wins / (wins + losses), wins + losses
    excludes = (n for n in range(count, 10_000) if not wilson(rate, n).low <= 0.5 <= wilson(rate, n).high)
    assert found["more"] == next(excludes) - count


def test_an_even_vote_is_never_settled_at_its_rate(tmp_path):
    votes = Votes(tmp_path / "votes.jsonl")
    votes.add(PROMPT, ANSWERS, None, blind=False)
    assert votes.summary([])[0]["more"] is None
    assert not math.isnan(votes.summary([])[0]["low"])


@pytest.mark.parametrize(
    ("texts", "choice", "said"), [(("a", " "), 0, "one is empty"), (("a", "a "), 1, "both are equal")], ids=str
)
def test_a_vote_that_trains_nothing_is_refused(tmp_path, texts, choice, said):
    answers = tuple(Candidate(model="m", text=text) for text in texts)
    with pytest.raises(ApiError, match=said):
        Votes(tmp_path / "v.jsonl").add(PROMPT, answers, choice, blind=False)
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("line", ["{}", "[1]", "x", '{"models": ["a"]}'])
def test_a_file_of_somebody_else_is_refused(tmp_path, line):
    file = tmp_path / "votes.jsonl"
    file.write_text('{"models": ["a", "b"], "chosen": "x"}\n' + line + "\n")
    with pytest.raises(InputError) as error:
        Votes(file)
    assert str(error.value) == naming(f"--votes: {file}:2 is no vote; give another file")


def test_votes_for_models_that_are_not_served_are_one_row(tmp_path):
    """Of two names without a rank, in either order of winning."""
    votes = Votes(tmp_path / "votes.jsonl")
    for choice in (0, 1, 0):
        votes.add(PROMPT, ANSWERS, choice, blind=False)
    (found,) = votes.summary(["others"])
    assert (found["models"], found["wins"], found["ties"], found["losses"]) == (("actor", "sft"), 2, 0, 1)


def test_a_vote_goes_behind_a_line_without_an_end_and_a_failed_one_leaves_nothing(tmp_path, monkeypatch):
    file = tmp_path / "votes.jsonl"
    votes = Votes(file)
    votes.add(PROMPT, ANSWERS, 0, blind=False)
    before = file.read_bytes().rstrip()
    file.write_bytes(before)
    write = io.FileIO.write
    monkeypatch.setattr(os, "strerror", lambda number: "full")
    opened = Path.open

    class Full(io.FileIO):
        def write(self, line):
            return write(self, line[:20])

    with monkeypatch.context() as full:
        full.setattr(Path, "open", lambda path, mode, buffering=-1: Full(path, "ab+"))
        with pytest.raises(ApiError, match="not saved: full"):
            votes.add(PROMPT, ANSWERS, 1, blind=False)
    assert Path.open is opened and file.read_bytes() == before
    votes.add(PROMPT, ANSWERS, 1, blind=False)
    rows = [json.loads(line) for line in file.read_text().splitlines()]
    assert [row["chosen"] for row in rows] == ["first", "second"]
    assert Votes(file).summary(["sft", "actor"])[0]["wins"] == 1


@pytest.mark.parametrize(
    ("content", "said"), [(b"\xff\xfe\xff", "cannot be read as UTF-8 text"), (None, "there is no folder")], ids=str
)
def test_a_file_that_cannot_be_used_is_told_at_the_start(tmp_path, content, said):
    file = tmp_path / "votes.jsonl" if content else tmp_path / "missing" / "votes.jsonl"
    if content:
        file.write_bytes(content)
    with pytest.raises(InputError, match=said):
        Votes(file)


@pytest.mark.parametrize(
    ("change", "said"),
    [
        ({"answers": [{"model": "random", "text": "a"}, {"model": "random", "text": "b"}]}, "of one model"),
        ({"answers": [{"model": "random", "text": "a"}, {"model": "none", "text": "b"}]}, "no language model"),
        ({"answers": [{"model": "random", "text": "a\0"}, {"model": "speaking", "text": "b"}]}, "NUL"),
    ],
    ids=str,
)
def test_a_vote_that_no_stage_could_use_is_refused(served, change, said):
    body = {"prompt": [{"role": "user", "content": "hello"}], "choice": 0} | change
    reply = served.post("/v1/votes", **body)
    assert reply.status_code in (400, 404) and said in reply.json()["error"]["message"], reply.text
    assert not list(served.folder.glob("votes*"))


def test_votes_by_the_page_are_read_by_the_stages(served):
    """A vote over HTTP; stage 2's and DPO's reader gets the pair of the file as it is."""
    body = {
        "prompt": [{"role": "system", "content": "be short"}, {"role": "user", "content": "hello\u2028there"}],
        "answers": [{"model": "speaking", "text": "one"}, {"model": "random", "text": "two"}],
        "choice": 0, "blind": True,
    }  # fmt: skip
    reply = served.post("/v1/votes", **body).json()
    assert reply["file"] == "votes.jsonl" and reply["data"][0]["losses"] == 1
    assert served.post("/v1/votes", **body | {"choice": None}).json()["data"][0]["ties"] == 1
    with served.client() as client:
        assert client.get("/v1/votes").json()["data"][0]["ties"] == 1
    file = served.folder / "votes.jsonl"
    (record,) = read_records(read_rows(str(file)), counts := Counts())
    assert [turn.content for turn in record.messages] == ["be short", "hello\u2028there"]
    assert (record.chosen, record.rejected) == ("one", "two")
    assert "dropped" not in str(counts)
    for each in served.folder.glob("votes*"):
        each.unlink()
