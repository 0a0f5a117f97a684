"""Health of a run: signs of known illnesses in its metrics, each with its cure. Audits of numbers, not verdicts.

A sign is a pure function of a `History`. It returns the numbers that its rule's text shows, and () of a healthy run and
of one that is too short to tell.
"""

import logging
import math
import statistics
from collections import defaultdict, deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from pipeline.errors import dashed

log = logging.getLogger(__name__)

# Values of a metric that are kept of the begin and of the end: enough for a mean of noisy numbers.
FIRST, LAST = 10, 20
LEAST = 5  # values below which a mean says nothing
# A difference of two means below so many of its standard errors is noise.
ERRORS = 2.0
QUARTER = 0.25  # the share of the run after which it should have learnt something
# Nats per sequence, and per token where that is more: people like summaries less from about 10 nats on (Stiennon et al.
# 2020, figure 5), and a longer response has more by as many tokens.
MOST_KL, MOST_KL_OF_TOKEN = 10.0, 0.1
# No KL is negative, and an estimate of its mean this far below 0 is more than a sampling error.
LEAST_KL = -1.0
MOST_CUT = 0.5  # most responses
MOST_EMPTY = 0.5
# Share of the first entropy. By hand: a policy that has a tenth of it left samples nearly the same token every time.
LEAST_ENTROPY = 0.1
# By hand: answers that are half as long again, and whose score rises at equal length by a fifth of its gain at most.
LONGER, MATCHED = 1.5, 0.2
LEAST_PAIRS = 30  # with fewer an accuracy of 0.68 would be within the error of 0.5
# By hand: from one pair in twenty on the truncation or the data set is to be looked at.
MOST_EQUAL = 0.05
MOST_ALIKE = 0.9  # by hand: of ten prompts one is left whose responses can be compared
# Nats, of the one token of a rollout that differs most; chosen by hand: benchmarks in bf16 report up to 0.18.
SAMPLER_ERROR, SAMPLER_ERROR_16_BITS = 0.05, 1.0
# The mean difference of a token has grown where it is above this times the first rollout's, and these nats; by hand.
DRIFT_FACTOR, DRIFT_BOUND = 4.0, 0.05


@dataclass(slots=True)
class History:
    """Input of the rules: the first and the last values of each metric of a run, and samples of its evaluations.

    total_steps: optimizer steps of the run.
    rate_flag: the learning rate, as a flag.
    frozen_steps: first steps in which the policy does not learn.
    sampler_bound: nats by which a token's log-probability may differ between sampler and trainer.
    step: the last step.
    evaluated: the step of the last evaluation.
    first: name -> its first values.
    last: name -> its last values.
    counts: name -> number of its values.
    samples: those of the first and of the last evaluation, as lines of samples.jsonl.
    """

    total_steps: int
    rate_flag: str = "learning_rate"
    frozen_steps: int = 0
    sampler_bound: float = SAMPLER_ERROR
    step: int = 0
    evaluated: int = 0
    first: dict[str, list[float]] = field(default_factory=lambda: defaultdict(list))
    last: dict[str, deque[float]] = field(default_factory=lambda: defaultdict(lambda: deque(maxlen=LAST)))
    counts: dict[str, int] = field(default_factory=lambda: defaultdict(int))
    samples: list[Sequence[Mapping[str, Any]]] = field(default_factory=list)

    def add(self, step: int, values: Mapping[str, Any]) -> None:
        """Add the metrics of a step, a line of metrics.jsonl; null and numbers that are not finite count as absent."""
        self.step = step
        self.evaluated = step if "eval_rows" in values else self.evaluated
        for name, value in values.items():
            if isinstance(value, int | float) and math.isfinite(value):
                if self.counts[name] < FIRST:
                    self.first[name].append(value)
                self.last[name].append(value)
                self.counts[name] += 1

    def add_samples(self, rows: Sequence[Mapping[str, Any]]) -> None:
        """Add the samples of an evaluation."""
        self.samples = [*self.samples[:1], [row for row in rows if row["score"] is not None]]

    def latest(self, name: str) -> float:
        """Return the last value of a metric; NaN without one, which is neither above nor below anything."""
        return self.last[name][-1] if self.counts[name] else math.nan

    def earliest(self, name: str) -> float:
        """Return the first value of a metric; NaN without one."""
        return self.first[name][0] if self.counts[name] else math.nan

    def mean(self, name: str, least: int = LEAST) -> float:
        """Return the mean of the last values of a metric; NaN where they are fewer than `least`."""
        return statistics.fmean(self.last[name]) if self.counts[name] >= least else math.nan


def above(value: float, bound: float) -> tuple[float, ...]:
    """Return the numbers of a value that is too high; a NaN is not."""
    return (value, bound) if value > bound else ()


def below(value: float, bound: float) -> tuple[float, ...]:
    """Return the numbers of a value that is too low; a NaN is not."""
    return (value, bound) if value < bound else ()


def falling_entropy(history: History) -> tuple[float, ...]:
    """Compare the last entropies with the first ones, which are returned with them."""
    entropy, first = history.mean("objective/entropy"), history.first["objective/entropy"]
    is_found = first and entropy < LEAST_ENTROPY * statistics.fmean(first)
    return (statistics.fmean(first), entropy) if is_found else ()


def paid_for_length(history: History) -> tuple[float, ...]:
    """Look for a score that rises because answers get longer, not because they get better.

    The gain at equal length is that of an analysis of covariance: the slope of scores over lengths within both
    evaluations, times the growth in length, is taken off the gain.
    """
    if len(history.samples) < 2 or min(map(len, history.samples)) < LEAST:
        return ()
    scores, lengths = ([[float(row[key]) for row in rows] for rows in history.samples] for key in ("score", "tokens"))
    (before, after), (short, long) = map(statistics.fmean, scores), map(statistics.fmean, lengths)
    pairs = [(x - short, y - before) for x, y in zip(lengths[0], scores[0], strict=True)]
    pairs += [(x - long, y - after) for x, y in zip(lengths[1], scores[1], strict=True)]
    spread = sum(x * x for x, _ in pairs)
    slope = sum(x * y for x, y in pairs) / spread if spread else 0.0
    gain, matched = after - before, after - before - slope * (long - short)
    is_real = gain > ERRORS * error_of(scores[0], scores[1])
    return (gain, short, long, matched) if is_real and long > LONGER * short and matched < MATCHED * gain else ()


def chance_accuracy(history: History) -> tuple[float, ...]:
    """Look for a model that tells chosen from rejected no better than a coin.

    An untrained head does not, and of DPO, IPO and KTO no policy does before its first step: that says nothing. Of KTO,
    whose evaluations have a z0, chance depends on the shares of labels.
    """
    accuracy, rows = history.latest("eval_accuracy"), history.latest("eval_rows")
    if history.evaluated < QUARTER * history.total_steps or not rows >= LEAST_PAIRS or history.counts["eval_z0"]:
        return ()
    return (rows, accuracy) if accuracy <= 0.5 + ERRORS * 0.5 / math.sqrt(rows) else ()


def sampler_drifts(history: History) -> tuple[float, ...]:
    """Compare sampler and trainer with the first rollout, whose difference is returned with the last one."""
    error, first = (of("policy/sampler_mean_error") for of in (history.latest, history.earliest))
    return (error, first) if error > max(DRIFT_FACTOR * first, DRIFT_BOUND) else ()


def nothing_learnt(history: History) -> tuple[object, ...]:
    """Look for a quarter of a run that changed nothing but noise, steps of the critic alone not counted."""
    for name, words, better in (("loss", "training loss", -1), ("objective/scores", "score", 1)):
        first, last = history.first[name], history.last[name]
        steps, total = (number - history.frozen_steps for number in (history.step, history.total_steps))
        if steps >= QUARTER * total and history.counts[name] >= FIRST + LAST:
            before, now = statistics.fmean(first), statistics.fmean(last)
            if better * (now - before) <= ERRORS * error_of(first, last):
                return words, before, FIRST, now, LAST
    return ()


@dataclass(frozen=True, slots=True)
class Rule:
    """An illness: its name, its sign, and the text with its cure, which the numbers of the sign and {rate} go into."""

    name: str
    sign: Callable[[History], Sequence[object]]
    text: str

    def __call__(self, history: History) -> str:
        """Return what is to be said of a run; "" where the sign is not there."""
        numbers = self.sign(history)
        return self.text.format(*numbers, rate=dashed(history.rate_flag)) if numbers else ""


RULES = (
    # A longer response may have a higher KL; a run that logs no length has the bound without it.
    Rule("high_kl", lambda run: above(run.mean("objective/kl"),
                                      max(MOST_KL, MOST_KL_OF_TOKEN * run.mean("completions/mean_length"))),
         "the KL to the reference is {0:.3g} nats a response, above {1:.3g}: the policy may be exploiting the reward; "
         "raise --kl-coef, set --kl-target, or lower {rate}"),
    Rule("negative_kl", lambda run: below(run.mean("objective/kl", 1), LEAST_KL),
         "the mean KL is negative, {0:.2f} nats per sequence: responses are not sampled from the policy that scores "
         "them; look at --top-p and --top-k (1 and 0 change nothing) and at policy/sampler_error"),
    Rule("cut_responses", lambda run: above(run.mean("completions/truncated_fraction"), MOST_CUT),
         "{0:.0%} of the responses are cut at --max-answer-seq-len: the reward judges fragments; raise "
         "--missing-eos-penalty, or the limit where the model has more positions"),
    Rule("empty_responses", lambda run: above(run.latest("completions/empty_fraction"), MOST_EMPTY),
         "most responses are an EOS alone: the policy answers nothing; lower --missing-eos-penalty, or look at whether "
         "the start model answers in this chat template"),
    # A critic compares responses with those to other prompts.
    Rule("equal_rewards", lambda run: above(run.mean("groups/equal"), MOST_ALIKE)
                          if not run.counts["value/explained_variance"] else (),
         "of {0:.0%} of the prompts all responses have the same reward (groups/equal), which leaves nothing to "
         "compare: look at what the reward says of samples, take one with more values, or prompts that are neither too "
         "hard nor too easy"),
    Rule("falling_entropy", falling_entropy,
         "the entropy has fallen from {0:.3g} to {1:.3g} nats a token: responses are nearly always the same; raise "
         "--kl-coef or --entropy-coef, or lower {rate}"),
    Rule("paid_for_length", paid_for_length,
         "held-out scores rise by {0:.3g} while answers grow from {1:.0f} to {2:.0f} tokens; at equal length they rise "
         "by {3:.3g}: the reward pays for length; train it with stage 2's --balance-lengths, take a length penalty as "
         "a further --reward-function, or raise --kl-coef"),
    Rule("chance_accuracy", chance_accuracy,
         "the accuracy on {0:.0f} held-out pairs is {1:.3g}, which is chance: look at the pairs (are chosen and "
         "rejected what they should be?), train longer, or raise {rate}"),
    Rule("sampler_apart", lambda run: above(run.earliest("policy/sampler_error"), run.sampler_bound),
         "sampler and trainer differ by {0:.2f} nats in a token's log-probability (policy/sampler_error of the first "
         "rollout), more than rounding makes: they do not compute the same model; try another --generation-engine, and "
         "give --old-log-probs trainer"),
    Rule("sampler_drifts", sampler_drifts,
         "sampler and trainer differ by {0:.3f} nats a token, by {1:.3f} in the first rollout "
         "(policy/sampler_mean_error): responses are less and less those of the policy that learns; give "
         "--off-policy-weights token_truncate"),
    Rule("nothing_learnt", nothing_learnt,
         "no more than noise has been learnt in a quarter of the run: the {0} was {1:.4g} in its first {2} values and "
         "is {3:.4g} in its last {4}; raise {rate} (where the {0} jumps: lower it), or look at the rows"),
)  # fmt: skip


def equal_pairs(num_equal: int, num_pairs: int) -> str:
    """Warn if many pairs of stage 2's data have the same tokens on both sides, and teach nothing."""
    if not num_pairs or num_equal / num_pairs <= MOST_EQUAL:
        return ""
    return (
        f"{num_equal / num_pairs:.0%} of the pairs have the same tokens as chosen and as rejected, maybe after "
        "truncation: they are dropped; look at the data, and at --max-seq-len"
    )


def error_of(one: Sequence[float], other: Sequence[float]) -> float:
    """Return the standard error of the difference of two means."""
    return math.sqrt(sum(statistics.variance(values) / len(values) for values in map(list, (one, other))))


@dataclass(slots=True)
class Health:
    """Says each finding of the rules once, until it has gone away: until the rule has found nothing LAST times.

    history: what is known of the run. silent: rule whose finding was said -> how often it has found nothing since.
    """

    history: History
    silent: dict[str, int] = field(default_factory=dict)
    has_explained: bool = False

    def look(self) -> None:
        """Look at the history as it is now."""
        findings = {rule.name: text for rule in RULES if (text := rule(self.history))}
        for name in [name for name in findings if name not in self.silent]:
            log.warning("health: step %d: %s", self.history.step, findings[name])
        if findings and not self.has_explained:
            self.has_explained = True
            log.info("lines of health are an audit of the metrics, not a verdict on the run")
        since = {name: 0 if name in findings else count + 1 for name, count in self.silent.items()}
        self.silent = {name: count for name, count in since.items() if count < LAST} | dict.fromkeys(findings, 0)
