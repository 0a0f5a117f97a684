"""A server under load: each request has its answer or a clear 429, and at the end all slots are free."""

import asyncio
import copy

import pytest

from benchmarks import load

BODY = {"prompt": ["a", "b"], "n": 2, "max_tokens": 5, "stop": ["end"]}
WHOLE = load.Whole(dict.fromkeys(range(4), "text"), dict.fromkeys(range(4), "length"), 20)


@pytest.mark.slow
def test_each_request_of_a_load_is_answered_or_refused(models):
    """Twenty seconds; `python -m benchmarks.load` is the same for ten minutes."""
    folders = [str(models / name) for name in ("random", "speaking", "judge")]
    words = ("--max-requests", "8", "--max-waiting", "32", "--max-length", "256")
    with load.serving(folders, *words) as server:
        found = asyncio.run(load.load(server, seconds=20, clients=32, seed=0, slots=8))
    assert found["faults"] == []
    assert found["answered"] > 100 and found["refused"] > 0 and found["cut off"] > 0
    assert found["repeated"] > 30 and found["differing"] <= found["repeated"] / 100, "rounding alone changes answers"
    (before, after), (_, files) = found["rss_mib"], found["files"]
    assert after - before < 20 and files < 100


@pytest.mark.parametrize(
    ("change", "fault"),
    [
        (lambda whole: whole.texts.pop(3), "3 answers, expected 4"),
        (lambda whole: whole.finish.pop(3), "finish reasons"),
        (lambda whole: whole.finish.update({0: "error"}), "finish reasons"),
        (lambda whole: whole.texts.update({0: "the end"}), "a stop text is in an answer"),
        (lambda whole: setattr(whole, "num_tokens", 21), "21 tokens"),
    ],
    ids=["a lost answer", "no end", "an unknown end", "a stop text", "too many tokens"],
)
def test_a_wrong_answer_is_a_fault(change, fault):
    assert load.faults_of(BODY, WHOLE) == []
    wrong = copy.deepcopy(WHOLE)
    change(wrong)
    (found,) = load.faults_of(BODY, wrong)
    assert fault in found


def test_the_lines_of_a_stream_are_one_answer():
    whole = load.Whole()
    for text, finish in (("a", None), ("b", "stop")):
        whole.add({"choices": [{"index": 0, "delta": {"content": text}, "finish_reason": finish}]})
    whole.add({"choices": [], "usage": {"completion_tokens": 2}})
    assert whole == load.Whole({0: "ab"}, {0: "stop"}, 2)
