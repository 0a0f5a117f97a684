"""Health of a run: rules that look for signs of known problems in its metrics, each with a remedy.

A sign is a pure function of a `History`. It returns the numbers for its rule's text, or () if the run is healthy or too
short to tell. Findings are hints, not verdicts on the run.
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

# Numbers of first and last values of a metric that are stored: enough for a mean of noisy numbers.
FIRST, LAST = 10, 20
LEAST = 5  # values that a mean needs
# Standard errors below which a difference of two means is noise.
ERRORS = 2.0
QUARTER = 0.25  # the share of the run after which it should have learnt something
# Nats per sequence, or per token if that is more: from about 10 nats on people like summaries less (Stiennon et al.
# 2020, figure 5), and the KL of a response grows with its length.
MOST_KL, MOST_KL_OF_TOKEN = 10.0, 0.1
# Nats. No KL is negative; a mean estimate this far below 0 is more than sampling error.
LEAST_KL = -1.0
MOST_CUT = 0.5  # most responses
MOST_EMPTY = 0.5
# Share of the first entropy, chosen by hand: with a tenth of it, a policy samples nearly the same token every time.
LEAST_ENTROPY = 0.1
# Growth in length, and share of the gain in score that remains at equal length. Chosen by hand.
LONGER, MATCHED = 1.5, 0.2
LEAST_PAIRS = 30  # with fewer pairs, an accuracy of 0.68 would be within the error of 0.5
# Share of pairs with equal sides above which truncation or data need a check. Chosen by hand.
MOST_EQUAL = 0.05
MOST_ALIKE = 0.9  # share of prompts whose responses all have the same reward; chosen by hand
# Nats of the token of a rollout that differs most, in fp32 and in 16 bits. Chosen by hand: benchmarks in bf16 report up
# to 0.18.
SAMPLER_ERROR, SAMPLER_ERROR_16_BITS = 0.05, 1.0
# The mean difference per token has grown if it is above this factor times the first rollout's and above these nats.
# Chosen by hand.
DRIFT_FACTOR, DRIFT_BOUND = 4.0, 0.05


@dataclass(slots=True)
class History:
    """Input of the rules: the first and the last values of each metric of a run, and samples of its evaluations.

    total_steps: optimizer steps of the run.
    rate_flag: name of the flag of the learning rate.
    frozen_steps: number of first steps in which the policy is not trained.
    sampler_bound: nats by which a token's log-probability may differ between sampler and trainer.
    step: the last step.
    evaluated: the step of the last evaluation.
    first: name -> its first values.
    last: name -> its last values.
    counts: name -> number of its values.
    samples: samples of the first and of the last evaluation, as lines of samples.jsonl.
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
        """Return the last value of a metric; NaN if there is none. NaN is neither above nor below any bound."""
        return self.last[name][-1] if self.counts[name] else math.nan

    def earliest(self, name: str) -> float:
        """Return the first value of a metric; NaN if there is none."""
        return self.first[name][0] if self.counts[name] else math.nan

    def mean(self, name: str, least: int = LEAST) -> float:
        """Return the mean of the last values of a metric; NaN if there are fewer than `least`."""
        return statistics.fmean(self.last[name]) if self.counts[name] >= least else math.nan


def above(value: float, bound: float) -> tuple[float, ...]:
    """Return a value and its bound if the value is above it, else (); NaN is not above it."""
    return (value, bound) if value > bound else ()


def below(value: float, bound: float) -> tuple[float, ...]:
    """Return a value and its bound if the value is below it, else (); NaN is not below it."""
    return (value, bound) if value < bound else ()


def falling_entropy(history: History) -> tuple[float, ...]:
    """Compare the mean of the last entropies with that of the first; return (first, last) if it has fallen."""
    entropy, first = history.mean("objective/entropy"), history.first["objective/entropy"]
    is_found = first and entropy < LEAST_ENTROPY * statistics.fmean(first)
    return (statistics.fmean(first), entropy) if is_found else ()


def paid_for_length(history: History) -> tuple[float, ...]:
    """Check for a score that rises because answers get longer, not because they get better.

    The gain at equal length comes from an analysis of covariance: it is the gain minus the growth in length times the
    slope of scores over lengths within both evaluations.
    """
    if len(history.samples) < 2 or min(map(len, history.samples)) < LEAST or has_teacher(history):
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
    """Check for a model that prefers chosen to rejected responses no more often than chance.

    Early evaluations are ignored: an untrained head, or a policy of DPO before its first step, is at chance. KTO is
    ignored too (its evaluations have a z0), since its chance level depends on the shares of labels.
    """
    accuracy, rows = history.latest("eval_accuracy"), history.latest("eval_rows")
    if history.evaluated < QUARTER * history.total_steps or not rows >= LEAST_PAIRS or history.counts["eval_z0"]:
        return ()
    return (rows, accuracy) if accuracy <= 0.5 + ERRORS * 0.5 / math.sqrt(rows) else ()


def sampler_drifts(history: History) -> tuple[float, ...]:
    """Compare the difference of sampler and trainer with the first rollout's; return (last, first) if it has grown."""
    error, first = (of("policy/sampler_mean_error") for of in (history.latest, history.earliest))
    return (error, first) if error > max(DRIFT_FACTOR * first, DRIFT_BOUND) else ()


def has_teacher(history: History) -> bool:
    """Return True for distillation, whose evaluations have a KL to the teacher."""
    return bool(history.counts["eval_objective/teacher_kl"])


def nothing_learnt(history: History) -> tuple[object, ...]:
    """Check for a quarter of a run without a gain above noise. Steps that train only the critic do not count."""
    signs = [("loss", "training loss", -1), ("objective/scores", "score", 1)]
    if has_teacher(history):
        signs.append(("loss/kl", "divergence from the teacher", -1))
    for name, words, better in signs:
        first, last = history.first[name], history.last[name]
        steps, total = (number - history.frozen_steps for number in (history.step, history.total_steps))
        if steps >= QUARTER * total and history.counts[name] >= FIRST + LAST:
            before, now = statistics.fmean(first), statistics.fmean(last)
            if better * (now - before) <= ERRORS * error_of(first, last):
                return words, before, FIRST, now, LAST
    return ()


@dataclass(frozen=True, slots=True)
class Rule:
    """A rule for a problem: its name, its sign, and a text with the remedy and fields for the numbers of the sign."""

    name: str
    sign: Callable[[History], Sequence[object]]
    text: str

    def __call__(self, history: History) -> str:
        """Return the finding of this rule on a run; "" if there is none."""
        numbers = self.sign(history)
        return self.text.format(*numbers, rate=dashed(history.rate_flag)) if numbers else ""


RULES = (
    # A longer response may have a higher KL. Without a logged length, the bound is MOST_KL.
    Rule("high_kl", lambda run: above(run.mean("objective/kl"),
                                      max(MOST_KL, MOST_KL_OF_TOKEN * run.mean("completions/mean_length"))),
         "the KL to the reference is {0:.3g} nats a response, above {1:.3g}: the policy may be exploiting the reward; "
         "raise --kl-coef, set --kl-target, or lower {rate}"),
    Rule("negative_kl", lambda run: below(run.mean("objective/kl", 1), LEAST_KL),
         "the mean KL is negative, {0:.2f} nats per sequence: responses are not sampled from the policy that scores "
         "them; look at --top-p and --top-k (1 and 0 change nothing) and at policy/sampler_error"),
    # A teacher judges each token by itself, so a cut response teaches as much as a whole one.
    Rule("cut_responses", lambda run: above(run.mean("completions/truncated_fraction"), MOST_CUT)
                          if not has_teacher(run) else (),
         "{0:.0%} of the responses are cut at --max-answer-seq-len: the reward judges fragments; raise "
         "--missing-eos-penalty, or the limit where the model has more positions"),
    Rule("empty_responses", lambda run: above(run.latest("completions/empty_fraction"), MOST_EMPTY),
         "most responses are an EOS alone: the policy answers nothing; lower --missing-eos-penalty, or look at whether "
         "the start model answers in this chat template"),
    # With a critic, responses are compared across prompts, so equal rewards within a prompt are no problem.
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
    """Return a warning if many pairs of stage 2's data have the same tokens on both sides; else ""."""
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
    """Logs each finding of the rules once. It is logged again if its rule has found nothing LAST times in between.

    history: the metrics and samples of the run so far.
    silent: rule whose finding was logged -> how often it has found nothing since.
    """

    history: History
    silent: dict[str, int] = field(default_factory=dict)
    has_explained: bool = False

    def look(self) -> None:
        """Apply the rules to the history, and log new findings."""
        findings = {rule.name: text for rule in RULES if (text := rule(self.history))}
        for name in [name for name in findings if name not in self.silent]:
            log.warning("health: step %d: %s", self.history.step, findings[name])
        if findings and not self.has_explained:
            self.has_explained = True
            log.info("lines of health are an audit of the metrics, not a verdict on the run")
        since = {name: 0 if name in findings else count + 1 for name, count in self.silent.items()}
        self.silent = {name: count for name, count in since.items() if count < LAST} | dict.fromkeys(findings, 0)
