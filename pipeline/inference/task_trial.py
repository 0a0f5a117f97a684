"""Judge from sampled answers whether a policy can learn a task: `rlhf reward --model`. The module imports no torch.

Methods that compare the answers to a prompt (GRPO, RLOO) learn from prompts whose answers differ in reward. Answers to
one prompt depend on each other, so the unit of every interval is the prompt.
"""

import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from pipeline.errors import counted
from pipeline.inference.comparison import Interval, mean_interval, wilson
from pipeline.inference.sample_rows import SampledAnswer

# Share of groups whose rewards differ. GRPO of SmolLM2-135M gained nothing at 0.35 (sums, six runs) and gained at 0.65
# (instructions, four runs): benchmarks/reports/. The verdict follows the interval, not the share itself.
NOTHING, HALF = 0.2, 0.5
MANY_TRUNCATED = 0.1
NO_PASS, ALL_PASS = 0.05, 0.95  # pass@1 from which equal groups are hopeless or solved
LENGTH_STEP = 64  # proposed answer lengths are multiples of it
MORE_SAMPLES = 2  # factor of the proposed number of samples where few groups differ

VERDICTS = {
    "nothing": "nothing to reinforce: nearly all groups are equal",
    "few": "a weak signal: fewer than half of the groups differ",
    "enough": "enough to learn from: more than half of the groups differ",
    "unclear": "not clear from so few prompts",
}


@dataclass(frozen=True, slots=True)
class TaskTrial:
    """Figures of answers to a sample of prompts.

    num_samples: answers to each prompt, k.
    num_answers: answers with a reward.
    num_missing: answers without one.
    limit: most tokens of an answer.
    mean_tokens: mean length of an answer in tokens.
    longest: tokens of the longest answer that ended by itself; 0 without any.
    mean: mean reward.
    best: mean of the best reward of each prompt's k answers.
    passed: share of answers with the full reward; None if a reward is outside 0 to 1.
    passed_any: share of prompts with such an answer; None likewise.
    differ: share of prompts whose answers differ in reward.
    truncated: share of answers that reached the limit.
    """

    num_samples: int
    num_answers: int
    num_missing: int
    limit: int
    mean_tokens: float
    longest: int
    mean: Interval
    best: Interval
    passed: Interval | None
    passed_any: Interval | None
    differ: Interval
    truncated: Interval

    @property
    def is_solved(self) -> bool:
        """Return True if nearly all answers have the full reward."""
        return self.passed is not None and self.passed.value >= ALL_PASS

    @property
    def verdict(self) -> str:
        """The key of VERDICTS that the interval of `differ` allows."""
        if self.differ.high < NOTHING:
            return "nothing"
        if self.differ.high < HALF:
            return "few"
        return "enough" if self.differ.low > HALF else "unclear"


def task_trial(
    groups: Sequence[Sequence[SampledAnswer]], weights: Mapping[str, float], *, limit: int, num_samples: int
) -> TaskTrial | None:
    """Summarise the answers to each prompt; None if no answer has a reward.

    Args:
        groups: the answers to each prompt.
        weights: name of a reward -> its weight; an answer passes with a reward of the sum of the positive ones.
        limit: most tokens of an answer.
        num_samples: answers to each prompt.
    """
    answers = [one for group in groups for one in group]
    rewards = [known for group in groups if (known := [one.reward for one in group if one.reward is not None])]
    if not rewards:
        return None
    scores = [score for one in answers for score in one.scores.values() if score is not None]
    full = sum(weight for weight in weights.values() if weight > 0) - 1e-9
    are_shares = all(0 <= score <= 1 for score in scores)
    passes = [[reward >= full for reward in known] for known in rewards] if are_shares else []
    ended = [one.num_tokens for one in answers if one.finish_reason != "limit"]
    return TaskTrial(
        num_samples=num_samples,
        num_answers=sum(map(len, rewards)),
        num_missing=len(answers) - sum(map(len, rewards)),
        limit=limit,
        mean_tokens=statistics.fmean(one.num_tokens for one in answers),
        longest=max(ended, default=0),
        mean=by_prompt(rewards),
        best=by_prompt([[max(known)] for known in rewards]),
        passed=share_by_prompt(passes) if passes else None,
        passed_any=share_by_prompt([[any(known)] for known in passes]) if passes else None,
        differ=share_by_prompt([[len(set(known)) > 1] for known in rewards]),
        truncated=share_by_prompt([[one.finish_reason == "limit" for one in group] for group in groups]),
    )


def by_prompt(values: Sequence[Sequence[float]]) -> Interval:
    """Return the mean of the prompts' means with its interval; without any width for one prompt."""
    means = [statistics.fmean(known) for known in values]
    return mean_interval(means) or Interval(means[0], means[0], means[0])


def share_by_prompt(values: Sequence[Sequence[bool]]) -> Interval:
    """Return the mean of the prompts' shares with Wilson's interval over prompts, which has a width at 0 and 1 too."""
    return wilson(statistics.fmean(statistics.fmean(known) for known in values), len(values))


def rows_of(trial: TaskTrial) -> list[tuple[str, str]]:
    """Return the rows of a trial, each a name and its text; the last two are the verdict and the flags that follow."""
    k, rows = trial.num_samples, round(trial.differ.value * trial.num_answers)
    figures = {
        "pass@1": trial.passed,
        f"pass@{k}": trial.passed_any,
        "mean reward": trial.mean,
        f"best of {k}": trial.best,
        "groups that differ": trial.differ,
        "truncated answers": trial.truncated,
    }
    table = [(name, shown(value)) for name, value in figures.items() if value is not None]
    table += [
        ("answer length", f"{trial.mean_tokens:.0f} tokens on average, at most {trial.limit}"),
        ("signal", f"{rows} of {trial.num_answers} rows would have a gradient"),
    ]
    if trial.num_missing:
        table.append(("without a reward", counted(trial.num_missing, "answer")))
    verdict = "; ".join((VERDICTS[trial.verdict], *remedies(trial)))
    return [*table, ("verdict", verdict), ("flags", " ".join(flags_of(trial)))]


def shown(interval: Interval) -> str:
    """Return a value and its 95 % interval as text."""
    return f"{interval.value:.3g} ({interval.low:.2g} to {interval.high:.2g})"


def remedies(trial: TaskTrial) -> list[str]:
    """Return what raises the share of groups that differ, and what truncated answers need."""
    changes = list[str]()
    if trial.verdict == "unclear":
        changes.append("give a larger -n")
    elif trial.verdict != "enough":
        if trial.is_solved:
            changes.append("the model has solved these rows: take harder ones")
        elif trial.passed and trial.passed.value <= NO_PASS:
            changes.append("take easier rows, a prompt that shows the form, SFT first, or a reward for a part of it")
        else:
            changes.append("take rows of medium difficulty, more samples a prompt, or a reward with more values")
    if trial.truncated.low > MANY_TRUNCATED:
        changes.append("many answers are truncated before they can be right")
    return changes


def flags_of(trial: TaskTrial) -> list[str]:
    """Return the flags of a run that follow: the length of answers, samples a prompt, and equal groups replaced."""
    if trial.truncated.low > MANY_TRUNCATED or not trial.longest:
        length = 2 * trial.limit
    else:
        length = min(-(-trial.longest // LENGTH_STEP) * LENGTH_STEP, trial.limit)
    is_few = trial.verdict == "few" and not trial.is_solved
    samples = trial.num_samples * (MORE_SAMPLES if is_few else 1)
    return [
        f"--ppo.max-answer-seq-len {length}",
        f"--ppo.num-samples-per-prompt {samples}",
        *(["--ppo.replace-equal-groups"] if is_few else []),
    ]
