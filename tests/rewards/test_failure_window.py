"""When failures of a reward function end a run: shares and rollouts by hand."""

import json
import random
from concurrent.futures import Future
from types import SimpleNamespace

import pytest
from support.messages import naming

from pipeline.errors import EnvironmentFault, InputError
from pipeline.rewards.failures import FailureWindow, counts_of
from pipeline.rewards.functions import RewardFunction
from pipeline.rewards.pool import Failure, Responses
from pipeline.rewards.rollout import EndedResponse, FunctionCalls

RAISED = Failure("raised", "ValueError: no (f.py:3)")
WINDOW = FailureWindow()
TOKENIZER = SimpleNamespace(batch_decode=lambda rows, **_: ["text"] * len(rows))


def rollout(responses: int, **kinds: int) -> dict[str, int]:
    return {"responses": responses, **{kind.replace("_", " "): number for kind, number in kinds.items()}}


def ends(rollouts: list, first: Failure | None = RAISED, window: FailureWindow = WINDOW) -> bool:
    try:
        window.check("f", rollouts, first)
    except InputError:
        return True
    return False


def test_values_are_counted_by_kind():
    values = [1.0, None, [0.5], RAISED, Failure("timed out", ""), Failure("raised", ""), Failure("worker died", "")]
    assert counts_of(values) == {"responses": 7, "raised": 2, "timed out": 1, "worker died": 1}


def test_the_window_is_of_the_last_rollouts_that_have_a_thousand():
    """Against a list of all responses: no more are kept than are needed, and it comes back from JSON."""
    random.seed(0)
    sizes, state, seen = [64, 256, 1000, 1500, 1, 999], [], []
    for _ in range(200):
        new = rollout(size := random.choice(sizes), raised=random.randrange(size + 1))
        seen.append(new)
        state = json.loads(json.dumps(WINDOW.after(state, new)))
        expected, total = [], 0
        while total < 1000 and len(expected) < len(seen):
            expected.insert(0, seen[-1 - len(expected)])
            total += expected[0]["responses"]
        assert state == expected


@pytest.mark.parametrize(
    ("rollouts", "is_end"),
    [
        ([rollout(400, raised=20)], False),  # 5 % are allowed
        ([rollout(400, raised=21)], True),
        ([rollout(100, raised=19)], False),  # fewer than 20 are
        ([rollout(100, raised=20)], True),
        ([rollout(500, raised=10, timed_out=10), rollout(500, worker_died=30)], False),
        ([rollout(500, raised=10, timed_out=10), rollout(500, worker_died=31)], True),
        ([rollout(2000), rollout(8, raised=8)], True),  # a whole rollout
        ([rollout(2000), rollout(8, raised=7)], False),
        ([rollout(2000), rollout(8, raised=3, timed_out=5)], True),
        ([rollout(8, raised=8), rollout(8, raised=1)], False),
        ([rollout(0)], False),
    ],
)
def test_too_many_failures_end_the_run(rollouts, is_end):
    assert ends(rollouts) is is_end


@pytest.mark.parametrize("window", [WINDOW, FailureWindow(max_share=0.25, num_responses=8, min_failures=3)])
@pytest.mark.parametrize("expected", [4, 16, 64, 2000])
def test_a_rollout_ends_early_only_where_it_would_end_the_run_whatever_follows(window, expected):
    """At worst all responses before it, as many as the window has, and all that are still to come get values."""
    before = rollout(window.num_responses)
    for failed in range(expected + 1):
        at_worst = window.after([before], rollout(expected, raised=failed))
        must = failed >= window.min_failures and ends(at_worst, window=window)
        passed = window.is_surely_passed(failed, expected)
        # A rollout as large as the window is alone in it: that may be seen later, and is never seen too early.
        assert must or not passed
        assert passed or not must or expected >= window.num_responses or failed == expected


def test_the_share_is_a_setting():
    assert not ends([rollout(100, raised=50)], window=FailureWindow(max_share=0.5))
    assert ends([rollout(100, raised=51)], window=FailureWindow(max_share=0.5))
    assert ends([rollout(100, raised=1)], window=FailureWindow(max_share=0.0, min_failures=1))


def test_the_line_names_the_function_the_kinds_and_the_first_cause():
    rollouts = [rollout(100, raised=3, timed_out=2), rollout(100, raised=30)]
    with pytest.raises(InputError) as caught:
        WINDOW.check("f", rollouts, RAISED)
    words = naming("--reward-function: f ... 35 of the last 200", "(33 raised, 2 timed out): ValueError: no (f.py:3)")
    assert str(caught.value) == words and caught.value.code == 2


def test_an_endpoint_that_does_not_answer_is_a_fault_of_the_environment():
    with pytest.raises(EnvironmentFault, match=naming("f ... 8 of the last 8 ... (8 no connection): x")):
        WINDOW.check("f", [rollout(8, no_connection=8)], Failure("no connection", "x"))


def test_a_rollout_without_failures_ends_nothing():
    assert not ends([rollout(100, raised=60), rollout(100)], first=None)


class PlayedPool:
    """Answers one after the other with the values that are played, or with failures."""

    functions = (RewardFunction("f", "f"),)

    def __init__(self) -> None:
        self.values = dict[Future, list]()
        self.played = iter([RAISED] * 1000)

    def submit(self, responses: Responses) -> Future:
        self.values[future := Future()] = [next(self.played) for _ in responses.texts]
        return future

    def gather(self, handles: list[Future], between) -> list:
        for handle in handles:
            handle.set_result({"f": self.values[handle]})
            between()
        return [handle.result() for handle in handles]


@pytest.mark.parametrize(
    ("batches", "ended", "failed"),
    [
        ([[RAISED] * 8] * 5, 2, 20),
        ([[RAISED] * 8, [RAISED] * 8, [1.0] + [RAISED] * 7, [RAISED] * 8, [RAISED] * 8], None, 0),
        ([[RAISED] * 19, [1.0], [RAISED] * 19, [RAISED]], 3, 20),
        ([[RAISED] * 60], 0, 54),  # as in a rollout: above 5 % of 1,060, whatever the rest gets
        ([[RAISED] * 30 + [1.0] * 30], None, 0),
    ],
)
def test_batches_of_an_evaluation_that_fail_one_after_the_other_end_the_run(batches, ended, failed):
    pool, end, line = PlayedPool(), None, ""
    calls = FunctionCalls(pool, max_failures=0.05, takes_tokens=True)
    for number, values in enumerate(batches):
        calls.begin([{"messages": "[]"}] * len(values), TOKENIZER, num_samples=1, step=number)
        pool.played = iter(values)
        for row in range(len(values)):
            calls.ended(row, 0, EndedResponse([row]))
        try:
            calls.wait(lambda: False)
        except InputError as error:
            end, line = number, str(error)
            break
    assert end == ended
    assert (line == naming(f"f ... {failed} of the last {failed}")) == bool(failed)


def test_rollouts_that_fail_wholly_on_one_rank_alone_end_no_run():
    """Of 64 ranks one has lost its workers: 1.6 % of all responses."""
    calls, before = FunctionCalls(PlayedPool(), max_failures=0.05, takes_tokens=True), {}
    for step in range(5):
        calls.begin([{"messages": "[]"}] * 8, TOKENIZER, num_samples=1, step=step)
        for row in range(8):
            calls.ended(row, 0, EndedResponse([1]))
        calls.by_row = calls.wait(lambda: False) | {row: {"f": [0.0]} for row in range(8, 8 * 64)}
        before = calls.counted(before)
