"""Judge from sampled answers whether a policy can learn a task: `rlhf reward --model`. The module imports no torch.

Methods that compare the answers to a prompt (GRPO, RLOO) learn from prompts whose answers differ in reward. Answers to
one prompt depend on each other, so the unit of every interval is the prompt.
"""

import math
import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

from pipeline.errors import counted
from pipeline.inference.answer_rows import Answer
from pipeline.inference.intervals import Interval, mean_interval, wilson

# Bounds of the verdict; a figure is below or above one if its whole 95 % interval is. A group is the answers to one
# prompt.
# - NOTHING, HALF: shares of groups whose rewards differ, below which there is no signal, and above which it is enough.
# - ROOM: `TaskTrial.room` above which the signal is enough too, and below which it is weak. Chosen by three tasks,
#   of 64 prompts each (benchmarks/reports/task_trials_202611.md). GRPO gained in GSM8K (0.44 of the groups differ, room
#   0.31) and in instructions (0.69, 0.31). In sums (0.39, 0.20) it gained nothing beyond noise in six runs of nine.
NOTHING, HALF, ROOM = 0.2, 0.5, 0.25
BEST_OF = 8  # number of answers whose best the room is computed from; the room grows with it
MIN_PROMPTS = 16  # number of prompts with a reward below which no room is computed: its interval would be unreliable
MANY_TRUNCATED = 0.1  # share of truncated answers above which a longer limit is proposed
NO_PASS, ALL_PASS = 0.05, 0.95  # pass@1 up to which a task is hopeless, and from which on it is solved
DIGITS = 6  # significant digits to which rewards are rounded before they are compared; training compares them in fp32
LENGTH_STEP = 64  # step in tokens: proposed answer lengths are multiples of it
MORE_SAMPLES = 2  # factor of the proposed number of samples where few groups differ

VERDICTS = {
    "nothing": "nothing to reinforce: nearly all groups are equal",
    "few": "a weak signal: few groups differ, or their best answers are little above the mean",
    "enough": "enough to learn from: most groups differ, or their best answers are far above the mean",
    "unclear": "not clear: the intervals allow a weak signal and one that is enough",
}


@dataclass(frozen=True, slots=True)
class TaskTrial:
    """Figures of answers to a sample of prompts.

    num_samples: answers to each prompt, k.
    num_answers: answers with a reward.
    num_missing: answers without one.
    limit: --max-answer-seq-len of the trial, at which an answer is truncated.
    most_tokens: tokens that the model's positions leave to an answer after the longest prompt; None: any number.
    mean_tokens: mean length of an answer in tokens.
    longest: tokens of the longest answer that ended by itself; 0 without any.
    num_signal: answers with a reward in groups that differ.
    mean: mean reward.
    best: mean of the best reward of each prompt's k answers.
    passes: reward function -> share of answers whose value is 1, and share of prompts with such an answer. It has the
        functions of a positive weight whose values are all from 0 to 1.
    differ: share of prompts whose answers differ in reward.
    room: what the mean reward would gain if each prompt got the best of BEST_OF answers, as a share of the range of all
        rewards; None with fewer answers to a prompt or fewer than MIN_PROMPTS prompts.
    truncated: share of answers that reached the limit.
    """

    num_samples: int
    num_answers: int
    num_missing: int
    limit: int
    most_tokens: int | None
    mean_tokens: float
    longest: int
    num_signal: int
    mean: Interval
    best: Interval
    passes: Mapping[str, tuple[Interval, Interval]]
    differ: Interval
    room: Interval | None
    truncated: Interval

    @property
    def is_solved(self) -> bool:
        """Return True if nearly all answers pass by every function."""
        return bool(self.passes) and all(share.value >= ALL_PASS for share, _ in self.passes.values())

    @property
    def is_hopeless(self) -> bool:
        """Return True if nearly no answer passes by any function."""
        return bool(self.passes) and all(share.value <= NO_PASS for share, _ in self.passes.values())

    @property
    def verdict(self) -> str:
        """The key of VERDICTS that the intervals of `differ` and `room` allow."""
        if self.differ.high < NOTHING:
            return "nothing"
        if self.differ.low > HALF or (self.room and self.room.low > ROOM):
            return "enough"
        is_few = self.room.high < ROOM if self.room else self.differ.high < HALF
        return "few" if is_few else "unclear"


def task_trial(
    groups: Sequence[Sequence[Answer]],
    weights: Mapping[str, float],
    *,
    limit: int,
    num_samples: int,
    most_tokens: int | None = None,
) -> TaskTrial | None:
    """Summarise the answers to each prompt; None if no answer has a reward.

    Args:
        groups: the answers to each prompt.
        weights: name of a reward function -> its weight.
        limit: --max-answer-seq-len of the trial, at which an answer is truncated.
        num_samples: answers to each prompt.
        most_tokens: tokens that the model's positions leave to an answer after the longest prompt; None: any number.
    """
    answers = [one for group in groups for one in group]
    rewards = [
        group_rewards for group in groups if (group_rewards := [one.reward for one in group if one.reward is not None])
    ]
    if not rewards:
        return None
    rewards = [[float(f"{reward:.{DIGITS}g}") for reward in group_rewards] for group_rewards in rewards]
    differing = [len(set(group_rewards)) > 1 for group_rewards in rewards]
    passes = {name: both for name, weight in weights.items() if weight > 0 and (both := passes_of(groups, name))}
    ended = [one.num_tokens for one in answers if one.finished]
    return TaskTrial(
        num_samples=num_samples,
        num_answers=sum(map(len, rewards)),
        num_missing=len(answers) - sum(map(len, rewards)),
        limit=limit,
        most_tokens=most_tokens,
        mean_tokens=statistics.fmean(one.num_tokens for one in answers),
        longest=max(ended, default=0),
        num_signal=sum(
            len(group_rewards) for group_rewards, differs in zip(rewards, differing, strict=True) if differs
        ),
        mean=by_prompt(rewards),
        best=by_prompt([[max(group_rewards)] for group_rewards in rewards]),
        passes=passes,
        differ=share_by_prompt([[differs] for differs in differing]),
        room=room_of(rewards) if num_samples >= BEST_OF and len(rewards) >= MIN_PROMPTS else None,
        truncated=share_by_prompt([[not one.finished for one in group] for group in groups]),
    )


def passes_of(groups: Sequence[Sequence[Answer]], name: str) -> tuple[Interval, Interval] | None:
    """Return pass@1 and pass@k by a reward function; None if it has no value or one outside 0 to 1.

    As in training (`pass_at_1/NAME`), answers without a value do not count.
    """
    values = [[value for one in group if (value := one.scores.get(name)) is not None] for group in groups]
    if not any(values) or not all(0 <= value <= 1 for group_values in values for value in group_values):
        return None
    passed = [[value >= 1 for value in group_values] for group_values in values if group_values]
    return share_by_prompt(passed), share_by_prompt([[any(group_passed)] for group_passed in passed])


def room_of(rewards: Sequence[Sequence[float]]) -> Interval:
    """Return the gain of the best of BEST_OF answers over the mean, as a share of the range of all rewards."""
    spread = max(map(max, rewards)) - min(map(min, rewards))
    return by_prompt(
        [[(best_of(group_rewards) - statistics.fmean(group_rewards)) / (spread or 1.0)] for group_rewards in rewards]
    )


def best_of(values: Sequence[float]) -> float:
    """Return the expected best of BEST_OF values drawn without replacement; the best one of fewer values."""
    count = min(BEST_OF, len(values))
    # Of ascending values, the one at `index` is the best of the draws that take the others from the values below it.
    ways = [math.comb(index, count - 1) for index in range(len(values))]
    return sum(value * way for value, way in zip(sorted(values), ways, strict=True)) / sum(ways)


def by_prompt(values: Sequence[Sequence[float]]) -> Interval:
    """Return the mean of the prompts' means with its normal interval; without bounds for one prompt."""
    means = [statistics.fmean(prompt_values) for prompt_values in values]
    return mean_interval(means) or Interval(means[0], -math.inf, math.inf)


def share_by_prompt(values: Sequence[Sequence[bool]]) -> Interval:
    """Return the mean of the prompts' shares with an interval within 0 to 1.

    It is Wilson's if every prompt's share is 0 or 1, or if all shares are equal, as the normal one would have no width.
    Otherwise it is the normal one.
    """
    shares = [statistics.fmean(prompt_values) for prompt_values in values]
    if {0.0, 1.0}.issuperset(shares) or len(set(shares)) == 1:
        return wilson(statistics.fmean(shares), len(shares))
    interval = by_prompt([[share] for share in shares])
    return replace(interval, low=max(interval.low, 0.0), high=min(interval.high, 1.0))


def rows_of(trial: TaskTrial) -> list[tuple[str, str]]:
    """Return the rows of a trial, each a name and its text; the last two are the verdict and flags to train with."""
    k, passes = trial.num_samples, dict[str, Interval]()
    for name, (share, any_of_them) in trial.passes.items():
        of_function = f" {name}" if len(trial.passes) > 1 else ""
        passes |= {f"pass@1{of_function}": share, f"pass@{k}{of_function}": any_of_them}
    figures = passes | {
        "mean reward": trial.mean,
        f"best of {k}": trial.best,
        "groups that differ": trial.differ,
        "truncated answers": trial.truncated,
    }
    table = [(name, shown(value)) for name, value in figures.items()]
    if trial.room:
        table.append(("room", f"{shown(trial.room)} of the range of rewards, to the best of {BEST_OF} answers"))
    table += [
        ("answer length", f"{trial.mean_tokens:.0f} tokens on average, at most {trial.limit}"),
        ("signal", f"{trial.num_signal} of {trial.num_answers} answers would have a gradient"),
    ]
    if trial.num_missing:
        table.append(("without a reward", counted(trial.num_missing, "answer")))
    verdict = "; ".join((VERDICTS[trial.verdict], *remedies(trial)))
    return [*table, ("verdict", verdict), ("flags", " ".join(flags_of(trial)))]


def shown(interval: Interval) -> str:
    """Return a value and its 95 % interval, if it has one, as text."""
    low, high = (0.0 if abs(end) < 1e-9 else end for end in (interval.low, interval.high))
    return f"{interval.value:.3g} ({low:.2g} to {high:.2g})" if math.isfinite(low) else f"{interval.value:.3g}"


def remedies(trial: TaskTrial) -> list[str]:
    """Return what raises the share of groups that differ, and what truncated answers need."""
    changes = list[str]()
    if trial.verdict == "unclear":
        changes.append("give a larger -n, or more data")
    elif trial.verdict != "enough":
        if trial.is_solved:
            changes.append("the model has solved these rows: take harder ones")
        elif trial.is_hopeless:
            changes.append("take easier rows, a prompt that shows the form, SFT first, or a reward for a part of it")
        else:
            changes.append("take rows of medium difficulty, more samples per prompt, or a reward with more values")
    if trial.truncated.low > MANY_TRUNCATED:
        changes.append("many answers are truncated before they can be right")
    return changes


def flags_of(trial: TaskTrial) -> list[str]:
    """Return flags to train with: the maximum answer length, samples per prompt, and replacement of equal groups.

    If the trial truncated no answer, the length is lowered to that of the longest one, rounded up. If it truncated
    many, it is doubled, up to `most_tokens`. If the verdict is "few" and the model has not solved the task, samples are
    multiplied and equal groups are replaced.
    """
    length = trial.limit
    if trial.truncated.low > MANY_TRUNCATED:
        length = min(2 * trial.limit, trial.most_tokens or 2 * trial.limit)
    elif not trial.truncated.value:
        length = min(-(-trial.longest // LENGTH_STEP) * LENGTH_STEP, trial.limit)
    is_few = trial.verdict == "few" and not trial.is_solved
    samples = trial.num_samples * (MORE_SAMPLES if is_few else 1)
    return [
        f"--ppo.max-answer-seq-len {length}",
        f"--ppo.num-samples-per-prompt {samples}",
        *(["--ppo.replace-equal-groups"] if is_few else []),
    ]
