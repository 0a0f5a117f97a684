"""The tables of the recipes against length, from the kept numbers alone.

Held-out prompts are halved: a recipe is chosen on the one half by the first gold model, and shown on the other half and
by both. Policies are compared with SFT answer by answer; the seeds of a recipe are pooled.
"""

from collections import defaultdict
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks.learning import estimates
from benchmarks.learning.quality import GOLDS, MAX_ANSWER, slope_of
from benchmarks.learning.report import table

MAX_CUT, MAX_LONGER = 0.2, 0.15  # what a recipe may leave cut, and how far its mean length may lie from SFT's
RESAMPLES, BEST_OF = 400, 8
HALVES = ("choosing", "showing")

Answer = dict[str, Any]
Pair = tuple[Answer, Answer]  # a policy's and SFT's answer to a prompt


@dataclass(frozen=True, slots=True)
class Found:
    """What a recipe reached on one half by one gold: shares, tokens over SFT's, and the win rate at equal length."""

    cut: float
    longer: float
    win_rate: float
    at_equal_length: float
    low: float
    high: float

    @property
    def keeps_length(self) -> bool:
        """Whether few answers are cut and the mean length is about SFT's."""
        return self.cut <= MAX_CUT and abs(self.longer - 1) <= MAX_LONGER

    @property
    def gains(self) -> bool:
        """Whether the recipe gains quality at SFT's length."""
        return self.keeps_length and self.low > 0.5

    @property
    def cells(self) -> list[str]:
        rate = f"{self.at_equal_length:.3f} ({self.low:.3f} to {self.high:.3f})"
        return [f"{self.cut:.1%}", f"{self.longer - 1:+.1%}", f"{self.win_rate:.3f}", rate]


HEAD = ["cut", "tokens over SFT's", "win rate", "at equal length"]


def answers_of(line: dict[str, Any]) -> list[Answer]:
    return [dict(zip(line["columns"], row, strict=True)) for row in line["rows"]]


def by_prompt(answers: Sequence[Answer], half: int | None = None) -> dict[int, list[Answer]]:
    """Return the answers to each prompt of a half, or of both; prompts were shuffled when they were written."""
    groups = defaultdict[int, list[Answer]](list)
    for answer in answers:
        if half is None or answer["prompt"] % 2 == half:
            groups[answer["prompt"]].append(answer)
    return groups


def compared(groups: Sequence[Sequence[Pair]], gold: str) -> Found:
    """Compare the pairs of each prompt; the interval is of 95 %, by drawing prompts with replacement."""

    pairs = [pair for group in groups for pair in group]
    wins, apart = wins_and_lengths(pairs, gold)
    ends = np.cumsum([len(group) for group in groups])
    places = [np.arange(end - len(group), end) for group, end in zip(groups, ends, strict=True)]
    random = np.random.default_rng(0)
    draws = (
        np.concatenate([places[n] for n in random.integers(len(groups), size=len(groups))]) for _ in range(RESAMPLES)
    )
    drawn = sorted(estimates.rate_at_equal_length(wins[draw], apart[draw]) for draw in draws)
    rate = estimates.rate_at_equal_length(wins, apart)
    answers, others = zip(*pairs, strict=True)
    longer = tokens_of(answers) / tokens_of(others)
    low, high = drawn[RESAMPLES // 40], drawn[-1 - RESAMPLES // 40]
    return Found(share_cut(answers), longer, float(wins.mean()), rate, low, high)


def wins_and_lengths(pairs: Sequence[Pair], gold: str) -> tuple[np.ndarray, np.ndarray]:
    """Return (N,) wins of the first of each of N pairs, 0, 1/2 or 1, and how many tokens longer it is."""
    wins = [(a[gold] > b[gold]) + (a[gold] == b[gold]) / 2 for a, b in pairs]
    return np.array(wins), np.array([a["tokens"] - b["tokens"] for a, b in pairs], dtype=float)


def pairs_of(runs: Sequence[Sequence[Answer]], sft: Sequence[Answer], half: int | None) -> list[list[Pair]]:
    """Return for each prompt of a half, or of both, the pairs of all runs: a run's answer n with SFT's answer n."""
    before, after = by_prompt(sft, half), [by_prompt(answers, half) for answers in runs]
    return [[pair for run in after for pair in zip(run[prompt], before[prompt], strict=False)] for prompt in before]


def best_of_n(sft: Sequence[Answer], score: Callable[[Answer], float]) -> Found:
    """Compare the best of eight answers of SFT by a score with another one, by the first gold; twice for a prompt."""
    groups = []
    for answers in by_prompt(sft).values():
        first, second = answers[:BEST_OF], answers[BEST_OF : 2 * BEST_OF]
        groups.append([(max(first, key=score), second[0]), (max(second, key=score), first[0])])
    return compared(groups, GOLDS[0])


def best_of_rows(sft: list[Answer]) -> list[list[str]]:
    """Return a row for each score: the reward models' own, and with its slope on the tokens of an answer taken off."""
    rows = []
    for name in sft[0]:
        if not name.startswith(("proxy", "balanced")):
            continue
        slope = slope_of(sft, (name,))
        rows.append([name, "", *best_of_n(sft, lambda answer, name=name: answer[name]).cells])
        apart = best_of_n(sft, lambda answer, name=name, slope=slope: answer[name] - slope * answer["tokens"])
        rows.append([f"{name}, length out", f"{slope:.4f}", *apart.cells])
    return rows


def beside_rows(kept: list[dict[str, Any]], base: str) -> list[list[str]]:
    """Return a row for each recipe that adds to `base`: how it differs from the base's run of the same seed.

    Means over seeds with their standard errors. The last two columns compare answers to the same prompt of the two
    runs, by each gold, at equal length: above 0.5 the recipe is better.
    """
    of_recipe = defaultdict[str, dict[int, dict[str, Any]]](dict)
    for line in kept:
        of_recipe[line["recipe"]][line["seed"]] = line
    rows = []
    for name in (name for name in of_recipe if name.startswith(f"{base}, ")):
        columns = defaultdict[str, list[float]](list)
        for seed in of_recipe[name].keys() & of_recipe[base].keys():
            line, other = of_recipe[name][seed], of_recipe[base][seed]
            answers, others = answers_of(line), answers_of(other)
            pairs = [pair for group in pairs_of([answers], others, None) for pair in group]
            for gold in GOLDS:
                columns[gold].append(estimates.rate_at_equal_length(*wins_and_lengths(pairs, gold)))
            columns["KL"].append(line["kl"] - other["kl"])
            columns["cut"].append(100 * (share_cut(answers) - share_cut(others)))
            columns["tokens"].append(100 * (tokens_of(answers) / tokens_of(others) - 1))
        cells = [with_error(columns[key], form) for key, form in BESIDE.items()]
        rows.append([name.removeprefix(f"{base}, "), str(len(columns["KL"])), *cells])
    return rows


# What a recipe is beside another one: points of a percent for `cut` and `tokens`.
BESIDE = {"KL": "+.2f", "cut": "+.1f", "tokens": "+.1f", **dict.fromkeys(GOLDS, ".3f")}


def share_cut(answers: Sequence[Answer]) -> float:
    return 1 - sum(answer["finished"] for answer in answers) / len(answers)


def tokens_of(answers: Sequence[Answer]) -> float:
    return sum(answer["tokens"] for answer in answers) / len(answers)


def with_error(values: Sequence[float], form: str) -> str:
    """Return the mean and the standard error of the mean over seeds."""
    mean, spread = estimates.mean_and_spread(values)
    return f"{mean:{form}} +- {spread / len(values) ** 0.5:{form.removeprefix('+')}}"


def draw(file: Path, names: Sequence[str], found: dict[tuple[str, str, int], Found]) -> None:
    """Draw each recipe's win rate at equal length on the half for showing, with its interval; a colour for each gold.

    A point is filled where the recipe is at SFT's length.
    """
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    figure, axes = plt.subplots(figsize=(8, 1.4 + 0.34 * len(names)), dpi=80)
    names = sorted(names, key=lambda name: found[name, GOLDS[0], 1].at_equal_length)
    for number, gold in enumerate(GOLDS):
        for place, name in enumerate(names):
            one, height = found[name, gold, 1], place - 0.2 * number
            axes.plot([one.low, one.high], [height, height], color=f"C{number}")
            axes.plot(one.at_equal_length, height, "o", color=f"C{number}",
                      fillstyle="full" if one.keeps_length else "none", label=None if place else gold)  # fmt: skip
    axes.axvline(0.5, color="grey", linewidth=1)
    axes.set_yticks(range(len(names)), names, fontsize="small")
    axes.set_xlabel("win rate over SFT at equal length", fontsize="small")
    figure.suptitle("On the half for showing; filled: at SFT's length", fontsize="small")
    axes.legend(fontsize="small", loc="lower right")
    axes.grid(alpha=0.3, axis="x")
    figure.tight_layout()
    figure.savefig(file)
    plt.close(figure)


def written(kept: list[dict[str, Any]], *, base: str = "", plot: Path | None = None) -> str:
    """Return the Markdown of all tables: best-of-n, the recipes on the first half, the chosen one on the second.

    base: a recipe beside which those that add to it are shown, seed by seed, without its name. plot: file for the
    picture of the rates.
    """
    sft = next(answers_of(line) for line in kept if line["recipe"] == "sft")
    runs, kls = defaultdict[str, list[list[Answer]]](list), defaultdict[str, list[float]](list)
    for line in kept:
        if line["recipe"] != "sft":
            runs[line["recipe"]].append(answers_of(line))
            kls[line["recipe"]].append(line["kl"])
    found = {
        (name, gold, half): compared(pairs_of(runs[name], sft, half), gold)
        for name in runs
        for gold in GOLDS
        for half in range(2)
    }
    if plot:
        draw(plot, list(runs), found)
    parts = [
        f"SFT: {tokens_of(sft):.1f} tokens an answer, {share_cut(sft):.1%} cut at {MAX_ANSWER}.\n",
        "## Best of eight answers of SFT\n",
        table(["score", "slope a token", *HEAD], best_of_rows(sft)),
    ]
    head = ["recipe", "seeds", "KL", *HEAD[:2], *(f"{name} by {gold}" for gold in GOLDS for name in HEAD[2:])]
    for half, title in enumerate(HALVES):
        rows = []
        for name in runs:
            kl, _ = estimates.mean_and_spread(kls[name])
            by_gold = [found[name, gold, half].cells for gold in GOLDS]
            cells = [*by_gold[0][:2], *(cell for of_gold in by_gold for cell in of_gold[2:])]
            rows.append([name.removeprefix(f"{base}, "), len(runs[name]), f"{kl:.1f}", *cells])
        parts += [f"## The half for {title}\n", table(head, rows)]
    if base:
        head = ["beside the same seed of it", "seeds", *(f"wins by {key}" if key in GOLDS else key for key in BESIDE)]
        parts += [f"## Beside {base}\n", table(head, beside_rows(kept, base))]
    seeds = {name: len(of_seeds) for name, of_seeds in runs.items()}
    return "\n".join([*parts, verdict([name for name in runs if seeds[name] == max(seeds.values())], found)])


def verdict(names: Sequence[str], found: dict[tuple[str, str, int], Found]) -> str:
    """Return the sentence of which recipe is chosen on the first half, and whether it gains on the second by both.

    names: recipes of as many seeds as any has.
    """
    keeping = [name for name in names if found[name, GOLDS[0], 0].keeps_length]
    if not keeping:
        return "No recipe keeps SFT's length on the half for choosing.\n"
    chosen = max(keeping, key=lambda name: found[name, GOLDS[0], 0].low)
    shown = [gold for gold in GOLDS if found[chosen, gold, 1].gains]
    says, reached = "gains nothing by either gold", found[chosen, GOLDS[0], 1]
    if shown:
        says = f"gains quality by {' and '.join(shown)}"
    elif not reached.keeps_length:
        cut, longer, *_ = reached.cells
        says = f"is not at SFT's length: {cut} cut, {longer} tokens"
    return f"Chosen: {chosen}. On the half for showing it {says}.\n"
