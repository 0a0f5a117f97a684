"""Health of a run: rules that look for signs of known problems in its metrics, each with a remedy.

A rule is a row of RULES: the numbers that it reads of a `History`, its test of them, and its text. A run that is too
short has NaN or no numbers, which no test finds. Findings are hints, not verdicts on the run.
"""

import logging
import math
import statistics
from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from operator import gt, lt
from typing import Any

from pipeline.errors import dashed
from pipeline.run.evaluations import is_number

log = logging.getLogger(__name__)

# Numbers of first and last values of a metric that are stored: enough for a mean of noisy numbers.
FIRST, LAST = 10, 20
LEAST = 5  # values that a mean needs
# Standard errors below which a difference of two means is noise.
ERRORS = 2.0
QUARTER = 0.25  # the share of the run after which it should have learnt something
# Nats of the token of a rollout that differs most, in fp32 and in 16 bits. Chosen by hand: benchmarks in bf16 report up
# to 0.18.
SAMPLER_ERROR, SAMPLER_ERROR_16_BITS = 0.05, 1.0
TEACHER_KL = "eval_objective/teacher_kl"  # a metric of distillation alone


@dataclass(slots=True)
class History:
    """Input of the rules: the first and the last values of each metric of a run, and samples of its evaluations.

    total_steps: optimizer steps of the run.
    rate_flag: name of the flag of the learning rate.
    frozen_steps: number of first steps in which the policy is not trained.
    sampler_bound: nats by which a token's log-probability may differ between sampler and trainer.
    step: the last step.
    evaluated: the step of the last evaluation.
    values: name -> its values; of more than FIRST + LAST the first FIRST and the last LAST.
    samples: samples of the first and of the last evaluation, as lines of samples.jsonl.
    """

    total_steps: int
    rate_flag: str = "learning_rate"
    frozen_steps: int = 0
    sampler_bound: float = SAMPLER_ERROR
    step: int = 0
    evaluated: int = 0
    values: dict[str, list[float]] = field(default_factory=lambda: defaultdict(list))
    samples: list[Sequence[Mapping[str, Any]]] = field(default_factory=list)

    def add(self, step: int, values: Mapping[str, Any]) -> None:
        """Add the metrics of a step, a line of metrics.jsonl; null and numbers that are not finite count as absent."""
        self.step = step
        self.evaluated = step if "eval_rows" in values else self.evaluated
        for name, value in values.items():
            if is_number(value):
                self.values[name].append(value)
                del self.values[name][FIRST:-LAST]

    def add_samples(self, rows: Sequence[Mapping[str, Any]]) -> None:
        """Add the samples of an evaluation."""
        self.samples = [*self.samples[:1], [row for row in rows if row["score"] is not None]]

    def latest(self, name: str) -> float:
        """Return the last value of a metric; NaN if there is none. NaN is neither above nor below any bound."""
        return self.values[name][-1] if self.values[name] else math.nan

    def earliest(self, name: str) -> float:
        """Return the first value of a metric; NaN if there is none."""
        return self.values[name][0] if self.values[name] else math.nan

    def first_mean(self, name: str) -> float:
        """Return the mean of the first values of a metric; NaN if there is none."""
        return statistics.fmean(self.values[name][:FIRST] or [math.nan])

    def mean(self, name: str, least: int = LEAST) -> float:
        """Return the mean of the last values of a metric; NaN if there are fewer than `least`."""
        return statistics.fmean(self.values[name][-LAST:]) if len(self.values[name]) >= least else math.nan


def gain_and_length(history: History) -> tuple[float, ...]:
    """Return the gain in score, both lengths, the gain at equal length, and the gain that noise may make.

    The gain at equal length comes from an analysis of covariance: it is the gain minus the growth in length times the
    slope of scores over lengths within both evaluations.
    """
    if len(history.samples) < 2 or min(map(len, history.samples)) < LEAST:
        return ()
    scores, lengths = ([[float(row[key]) for row in rows] for rows in history.samples] for key in ("score", "tokens"))
    (before, after), (short, long) = map(statistics.fmean, scores), map(statistics.fmean, lengths)
    pairs = [(x - short, y - before) for x, y in zip(lengths[0], scores[0], strict=True)]
    pairs += [(x - long, y - after) for x, y in zip(lengths[1], scores[1], strict=True)]
    spread = sum(x * x for x, _ in pairs)
    slope = sum(x * y for x, y in pairs) / spread if spread else 0.0
    matched = after - before - slope * (long - short)
    return after - before, short, long, matched, ERRORS * error_of(scores[0], scores[1])


def no_gain(history: History) -> tuple[object, ...]:
    """Return a metric without a gain above noise in a quarter of the run, in words, and its first and last mean.

    Steps that train only the critic do not count.
    """
    signs = [("loss", "training loss", -1), ("objective/scores", "score", 1)]
    if history.values[TEACHER_KL]:
        signs.append(("loss/kl", "divergence from the teacher", -1))
    steps, total = (number - history.frozen_steps for number in (history.step, history.total_steps))
    for name, words, better in signs:
        values = history.values[name]
        if steps >= QUARTER * total and len(values) == FIRST + LAST:
            before, now = history.first_mean(name), history.mean(name)
            if better * (now - before) <= ERRORS * error_of(values[:FIRST], values[-LAST:]):
                return words, before, FIRST, now, LAST
    return ()


@dataclass(frozen=True, slots=True)
class Rule:
    """A rule for a problem.

    name: name of the problem.
    numbers: what it reads of a history: numbers for its test and text; () if there is nothing to test.
    test: True for numbers of an ill run.
    text: the finding with its remedy, and fields for the numbers.
    unless: a metric of runs that the rule does not suit.
    """

    name: str
    numbers: Callable[[History], tuple[Any, ...]]
    test: Callable[..., bool]
    text: str
    unless: str = ""

    def __call__(self, history: History) -> str:
        """Return the finding of this rule on a run; "" if there is none."""
        numbers = () if history.values.get(self.unless) else self.numbers(history)
        is_ill = bool(numbers) and self.test(*numbers)
        return self.text.format(*numbers, rate=dashed(history.rate_flag)) if is_ill else ""


# Bounds without a source are chosen by hand.
RULES = (
    # Nats per sequence, or per token if that is more: from about 10 nats on people like summaries less (Stiennon et al.
    # 2020, figure 5), and the KL of a response grows with its length. Without a logged length, the bound is 10.
    Rule("high_kl", lambda run: (run.mean("objective/kl"), max(10.0, 0.1 * run.mean("completions/mean_length"))), gt,
         "the KL to the reference is {0:.3g} nats a response, above {1:.3g}: the policy may be exploiting the reward; "
         "raise --kl-coef, set --kl-target, or lower {rate}"),
    # No KL is negative; a mean estimate this far below 0 nats is more than sampling error.
    Rule("negative_kl", lambda run: (run.mean("objective/kl", 1), -1.0), lt,
         "the mean KL is negative, {0:.2f} nats per sequence: responses are not sampled from the policy that scores "
         "them; look at --top-p and --top-k (1 and 0 change nothing) and at policy/sampler_error"),
    # A teacher judges each token by itself, so a cut response teaches as much as a whole one.
    Rule("cut_responses", lambda run: (run.mean("completions/truncated_fraction"), 0.5), gt,
         "{0:.0%} of the responses are cut at --max-answer-seq-len: the reward judges fragments; raise "
         "--missing-eos-penalty, or the limit where the model has more positions", unless=TEACHER_KL),
    Rule("empty_responses", lambda run: (run.latest("completions/empty_fraction"), 0.5), gt,
         "most responses are an EOS alone: the policy answers nothing; lower --missing-eos-penalty, or look at whether "
         "the start model answers in this chat template"),
    # With a critic, responses are compared across prompts, so equal rewards within a prompt are no problem.
    Rule("equal_rewards", lambda run: (run.mean("groups/equal"), 0.9), gt,
         "of {0:.0%} of the prompts all responses have the same reward (groups/equal), which leaves nothing to "
         "compare: look at what the reward says of samples, take one with more values, or prompts that are neither too "
         "hard nor too easy", unless="value/explained_variance"),
    # With a tenth of its first entropy, a policy samples nearly the same token every time.
    Rule("falling_entropy", lambda run: (run.first_mean("objective/entropy"), run.mean("objective/entropy")),
         lambda first, last: last < 0.1 * first,
         "the entropy has fallen from {0:.3g} to {1:.3g} nats a token: responses are nearly always the same; raise "
         "--kl-coef or --entropy-coef, or lower {rate}"),
    # Answers half as long again, with a fifth of the gain in score at equal length. A teacher pays for no length.
    Rule("paid_for_length", gain_and_length,
         lambda gain, short, long, matched, noise: gain > noise and long > 1.5 * short and matched < 0.2 * gain,
         "held-out scores rise by {0:.3g} while answers grow from {1:.0f} to {2:.0f} tokens; at equal length they rise "
         "by {3:.3g}: the reward pays for length; train it with stage 2's --balance-lengths, take a length penalty as "
         "a further --reward-function, or raise --kl-coef", unless=TEACHER_KL),
    # Early evaluations are ignored: an untrained head, or a policy of DPO before its first step, is at chance. So are
    # fewer than 30 pairs (an accuracy of 0.68 would be within the error of 0.5), and KTO (its evaluations have a z0),
    # whose chance level depends on the shares of labels.
    Rule("chance_accuracy",
         lambda run: (run.latest("eval_rows"), run.latest("eval_accuracy"), run.evaluated >= QUARTER * run.total_steps),
         lambda rows, accuracy, is_late: is_late and rows >= 30 and accuracy <= 0.5 + ERRORS * 0.5 / math.sqrt(rows),
         "the accuracy on {0:.0f} held-out pairs is {1:.3g}, which is chance: look at the pairs (are chosen and "
         "rejected what they should be?), train longer, or raise {rate}", unless="eval_z0"),
    Rule("sampler_apart", lambda run: (run.earliest("policy/sampler_error"), run.sampler_bound), gt,
         "sampler and trainer differ by {0:.2f} nats in a token's log-probability (policy/sampler_error of the first "
         "rollout), more than rounding makes: they do not compute the same model; try another --generation-engine, and "
         "give --old-log-probs trainer"),
    # The mean difference per token has grown if it is above 4 times the first rollout's and above 0.05 nats.
    Rule("sampler_drifts",
         lambda run: (run.latest("policy/sampler_mean_error"), run.earliest("policy/sampler_mean_error")),
         lambda last, first: last > max(4.0 * first, 0.05),
         "sampler and trainer differ by {0:.3f} nats a token, by {1:.3f} in the first rollout "
         "(policy/sampler_mean_error): responses are less and less those of the policy that learns; give "
         "--off-policy-weights token_truncate"),
    Rule("nothing_learnt", no_gain, lambda *numbers: True,
         "no more than noise has been learnt in a quarter of the run: the {0} was {1:.4g} in its first {2} values and "
         "is {3:.4g} in its last {4}; raise {rate} (where the {0} jumps: lower it), or look at the rows"),
)  # fmt: skip


def error_of(one: Sequence[float], other: Sequence[float]) -> float:
    """Return the standard error of the difference of two means."""
    return math.sqrt(sum(statistics.variance(values) / len(values) for values in (one, other)))


@dataclass(slots=True)
class Health:
    """Logs each finding of the rules once. It is logged again if its rule has found nothing LAST times in between.

    history: the metrics and samples of the run so far.
    num_looks: how often the rules have been applied.
    last_looks: rule with a finding -> the number of the last look that had it.
    """

    history: History
    num_looks: int = 0
    last_looks: dict[str, int] = field(default_factory=dict)

    def look(self) -> None:
        """Apply the rules to the history, and log new findings."""
        self.num_looks, had_none = self.num_looks + 1, not self.last_looks
        for rule in RULES:
            if text := rule(self.history):
                if self.num_looks - self.last_looks.get(rule.name, -math.inf) > LAST:
                    log.warning("health: step %d: %s", self.history.step, text)
                self.last_looks[rule.name] = self.num_looks
        if had_none and self.last_looks:
            log.info("lines of health are an audit of the metrics, not a verdict on the run")
