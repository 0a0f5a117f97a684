"""What answers to a sample of prompts show about a task: figures by hand, verdicts by their rules."""

import math

import pytest

from pipeline.inference.answer_rows import Answer
from pipeline.inference.task_trial import LENGTH_STEP, TaskTrial, flags_of, remedies, rows_of, task_trial

Group = list[Answer]


def answer(reward: float | None, *, tokens: int = 10, ends: bool = True, **scores: float | None) -> Answer:
    reason = "end" if ends else "limit"
    return Answer("text", (5,) * tokens, reason, -1.0, scores or {"right": reward}, reward)


def group(*rewards: float | None) -> Group:
    return [answer(reward) for reward in rewards]


def trial_of(*groups: Group, weights: dict[str, float] | None = None, limit: int = 100) -> TaskTrial:
    trial = task_trial(groups, weights or {"right": 1.0}, limit=limit, num_samples=len(groups[0]))
    assert trial is not None
    return trial


def test_figures_by_hand():
    """Four prompts of two answers: one right, both right, none right, and one right beside one without a reward."""
    trial = trial_of(group(1.0, 0.0), group(1.0, 1.0), group(0.0, 0.0), group(1.0, None))
    assert (trial.num_answers, trial.num_missing) == (7, 1)
    assert trial.mean.value == (0.5 + 1 + 0 + 1) / 4 and trial.best.value == 3 / 4
    assert [share.value for share in trial.passes["right"]] == [trial.mean.value, 3 / 4] and trial.num_signal == 2
    assert trial.differ.value == 1 / 4, "an answer without a reward is compared with none"
    # The normal interval of the mean of 0.5, 1, 0 and 1 over four prompts.
    half = 1.959963984540054 * math.sqrt(sum((x - 0.625) ** 2 for x in (0.5, 1, 0, 1)) / 3) / 2
    assert trial.mean.low == pytest.approx(0.625 - half) and trial.mean.high == pytest.approx(0.625 + half)
    # Wilson's interval of 1 in 4: scipy.stats.binomtest(1, 4).proportion_ci(method="wilson").
    assert (trial.differ.low, trial.differ.high) == pytest.approx((0.045587062, 0.699358157), abs=1e-6)


def test_a_pass_is_counted_for_each_function_with_values_from_0_to_1():
    """As in training. A penalty and a function of no weight do not count, nor an answer to which one does not apply."""
    weights = {"right": 0.9, "form": 0.1, "repetition": 0.1, "logged": 0.0, "length": 1.0}
    values = {"repetition": -0.5, "logged": 1.0, "length": 57.0}
    both = [answer(1.0, right=1.0, form=None, **values), answer(0.9, right=0.5, form=1.0, **values)]
    trial = trial_of(both, weights=weights)
    assert {name: [one.value for one in shares] for name, shares in trial.passes.items()} == {
        "right": [0.5, 1.0], "form": [1.0, 1.0],
    }  # fmt: skip
    assert [name for name, _ in rows_of(trial)][:4] == ["pass@1 right", "pass@2 right", "pass@1 form", "pass@2 form"]


def test_a_function_that_is_always_0_may_be_a_penalty_and_makes_no_task_hopeless():
    right = [answer(0.9, right=1.0, repetition=0.0), answer(0.9, right=1.0, repetition=0.0)]
    trial = trial_of(*[right] * 64, weights={"right": 0.9, "repetition": 0.1})
    assert not trial.is_hopeless and not trial.is_solved and "medium difficulty" in remedies(trial)[0]


def test_rewards_that_are_no_shares_have_no_pass():
    trial = trial_of(group(0.2, 7.0), group(-1.0, 0.5))
    assert trial.passes == {} and trial.best.value == (7.0 + 0.5) / 2
    assert not [name for name, _ in rows_of(trial) if "pass@" in name]


def test_rewards_that_differ_by_rounding_alone_are_equal():
    assert trial_of(group(0.1 + 0.2, 0.3)).differ.value == 0 and trial_of(group(0.3001, 0.3)).differ.value == 1


def test_shares_of_answers_have_the_interval_of_their_mean_unless_all_prompts_agree():
    """pass@1 of one function whose values are 0 and 1 is the mean reward; Wilson's interval of prompts is wider."""
    trial = trial_of(group(1.0, 0.0), group(1.0, 1.0), group(0.0, 0.0), group(1.0, 0.0))
    assert trial.passes["right"][0] == trial.mean
    (share, _) = trial_of(*[group(1.0, 0.0)] * 4).passes["right"]
    assert share.low < 0.5 < share.high
    assert dict(rows_of(trial_of(group(7.0, 0.0))))["mean reward"] == "3.5", "one prompt has no interval"


def test_no_reward_at_all():
    assert task_trial([group(None, None)], {"right": 1.0}, limit=9, num_samples=2) is None


@pytest.mark.parametrize(
    ("differ", "prompts", "verdict"),
    [(0, 8, "few"), (1, 6, "unclear"), (0, 64, "nothing"), (6, 64, "nothing"), (9, 64, "few"), (22, 64, "few"),
     (32, 64, "unclear"), (42, 64, "enough"), (64, 64, "enough"), (4, 6, "unclear")],
)  # fmt: skip
def test_the_verdict_follows_the_interval(differ, prompts, verdict):
    """22 of 64 are the share of sums, which gained nothing; 42 of 64 that of instructions, which gained."""
    trial = trial_of(*[group(1.0, 0.0)] * differ, *[group(0.0, 0.0)] * (prompts - differ))
    assert trial.verdict == verdict


@pytest.mark.parametrize(
    ("right", "differing", "prompts", "verdict"),
    [(2, 28, 64, "unclear"), (2, 112, 256, "enough"), (4, 25, 64, "unclear"), (4, 100, 256, "few"),
     (7, 32, 64, "few"), (8, 64, 64, "nothing")],
)  # fmt: skip
def test_the_room_tells_tasks_of_the_same_share_of_groups_that_differ_apart(right, differing, prompts, verdict):
    """Groups that differ have about 2 right answers of 8 in GSM8K, which gained, and 4 in sums, which did not."""
    one = group(*[1.0] * right, *[0.0] * (8 - right))
    trial = trial_of(*[one] * differing, *[group(*[0.0] * 8)] * (prompts - differing))
    share, gain = differing / prompts, (8 - right) / 8
    half = 1.959963984540054 * gain * math.sqrt(share * (1 - share) / (prompts - 1))
    assert trial.room and trial.room.value == pytest.approx(share * gain)
    assert (trial.room.low, trial.room.high) == pytest.approx((share * gain - half, share * gain + half))
    assert trial.verdict == verdict


def test_the_room_is_a_share_of_the_range_of_rewards():
    """Answers of 10 beside 2, and of 6 beside 6: a gain of 7 and of 0 of 8."""
    trial = trial_of(*[group(10.0, *[2.0] * 7)] * 10, *[group(*[6.0] * 8)] * 10)
    assert trial.room and trial.room.value == pytest.approx((7 / 8 + 0) / 2)


def test_rewards_that_are_equal_but_for_rounding_have_no_room():
    near = group(7.0, 7.000001, 7.0000005, *[7.0] * 5)
    trial = trial_of(*[near] * 64)
    assert trial.room and (trial.room.value, trial.room.high, trial.verdict) == (0, 0, "nothing")


def test_few_prompts_and_few_answers_have_no_room():
    assert trial_of(*[group(1.0, *[0.0] * 7)] * 15).room is None and trial_of(*[group(1.0, 0.0)] * 64).room is None
    assert trial_of(*[group(1.0, *[0.0] * 7)] * 16).room is not None


def test_more_answers_than_eight_have_the_expected_best_of_eight():
    """One right answer of 16 is among 8 drawn ones in half of the draws; of 9 answers in 8 of 9."""
    for count, share in ((16, 1 / 2), (9, 8 / 9), (8, 1.0)):
        trial = trial_of(*[group(1.0, *[0.0] * (count - 1))] * 16)
        assert trial.room and trial.room.value == pytest.approx(share - 1 / count)
    groups = [[*group(1.0, *[0.0] * 5), answer(None), answer(None)]] * 16
    trial = trial_of(*groups)
    assert trial.room and trial.room.value == pytest.approx(5 / 6), "of six answers with a reward"


@pytest.mark.parametrize(("reward", "advice"), [(1.0, "take harder ones"), (0.0, "easier rows"), (7.0, "more samples")])
def test_equal_groups_are_advised_by_what_they_have(reward, advice):
    (remedy,) = remedies(trial_of(*[group(reward, reward)] * 64))
    assert advice in remedy


def test_truncated_answers_double_the_length():
    cut = [answer(0.0, tokens=100, ends=False), answer(1.0, tokens=30)]
    trial = trial_of(*[cut] * 64)
    assert trial.truncated.value == 0.5 and trial.mean_tokens == 65 and trial.longest == 30
    assert remedies(trial) == ["many answers are truncated before they can be right"]
    assert flags_of(trial)[0] == "--ppo.max-answer-seq-len 200"
    short = task_trial([cut] * 64, {"right": 1.0}, limit=100, num_samples=2, most_tokens=150)
    assert short and flags_of(short)[0] == "--ppo.max-answer-seq-len 150", "as far as the positions allow"


def test_a_length_that_truncates_few_answers_stays_and_one_that_truncates_none_is_lowered():
    ended, cut = [answer(0.0, tokens=30), answer(1.0, tokens=30)], [answer(0.0, tokens=100, ends=False), answer(1.0)]
    assert flags_of(trial_of(*[ended] * 64))[0] == f"--ppo.max-answer-seq-len {LENGTH_STEP}"
    assert flags_of(trial_of(*[ended] * 64, limit=40))[0] == "--ppo.max-answer-seq-len 40"
    assert flags_of(trial_of(*[ended] * 60, *[cut] * 4))[0] == "--ppo.max-answer-seq-len 100"


def test_few_groups_that_differ_get_more_samples():
    few = trial_of(*[group(1.0, 0.0)] * 22, *[group(0.0, 0.0)] * 42)
    assert flags_of(few)[1:] == ["--ppo.num-samples-per-prompt 4", "--ppo.replace-equal-groups"]
    assert flags_of(trial_of(*[group(1.0, 0.0)] * 64))[1:] == ["--ppo.num-samples-per-prompt 2"]
    solved = trial_of(*[group(1.0, 0.0)] * 6, *[group(1.0, 1.0)] * 70)
    assert solved.verdict == "nothing"
    assert flags_of(solved)[1:] == ["--ppo.num-samples-per-prompt 2"] and "harder" in remedies(solved)[0]


def test_the_rows():
    trial = trial_of(*[group(1.0, 0.0)] * 22, *[group(0.0, 0.0)] * 41, group(0.0, None))
    lines = dict(rows_of(trial))
    assert lines["pass@1"].startswith("0.172 (") and lines["pass@2"].startswith("0.344 (")
    assert lines["signal"] == "44 of 127 answers would have a gradient"
    assert lines["without a reward"] == "1 answer" and "room" not in lines
    room = dict(rows_of(trial_of(*[group(1.0, *[0.0] * 7)] * 16, *[group(*[0.0] * 8)] * 16)))["room"]
    assert room == "0.438 (0.28 to 0.59) of the range of rewards, to the best of 8 answers"
    assert lines["verdict"].startswith("a weak signal: few groups differ, or ")
