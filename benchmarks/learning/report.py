"""The report from what the runs left: two plots, tables, and ten answers before and after."""

import json
import math
import sys
from collections import defaultdict
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path
from random import Random
from typing import Any

from benchmarks.learning import estimates
from benchmarks.learning.models import accuracies
from benchmarks.learning.policies import AS_IT_IS, ablation_rows
from benchmarks.learning.quality import write_kept
from benchmarks.learning.rows import read_lines
from pipeline.inference.comparison import compare

NUM_SHOWN = 10
NUM_GRAMS = 2

Line = dict[str, Any]


@dataclass(frozen=True, slots=True)
class Run:
    """A judged run: its name, proxy and seed; its evaluations by step, each a list of judged answers."""

    name: str
    proxy: str
    seed: int
    evaluations: dict[int, list[Line]]

    @property
    def before(self) -> list[Line]:
        return self.evaluations[min(self.evaluations)]

    @property
    def after(self) -> list[Line]:
        return self.evaluations[max(self.evaluations)]


def read_runs(folder: Path) -> list[Run]:
    """Return the judged runs of a group, by name and seed."""
    runs = []
    for file in sorted(folder.glob("*/policy.json")):
        said, by_step = json.loads(file.read_text(encoding="utf-8")), defaultdict[int, list[Line]](list)
        for line in read_lines(file.with_name("judged.jsonl")):
            by_step[line["step"]].append(line)
        runs.append(Run(said["name"], said["proxy"], said["seed"], dict(by_step)))
    return runs


def mean(lines: Sequence[Line], name: str) -> float:
    values = [line[name] for line in lines if line[name] is not None]
    return sum(values) / len(values) if values else math.nan


Scales = dict[str, tuple[float, float]]


def scales_of(runs: Sequence[Run]) -> Scales:
    """Return the mean and standard deviation of each reward model's scores of SFT's answers: of all first
    evaluations."""
    found = {"gold": [line["gold"] for run in runs for line in run.before]}
    for run in runs:
        found.setdefault(run.proxy, []).extend(line["proxy"] for line in run.before)
    return {name: estimates.mean_and_spread(scores) for name, scores in found.items()}


def curve(run: Run, scales: Scales) -> list[tuple[float, float, float]]:
    """Return (root of the KL, proxy, gold) of each evaluation; scores in standard deviations above SFT's mean."""
    points = []
    for _, lines in sorted(run.evaluations.items()):
        proxy, gold = (
            (mean(lines, column) - scales[name][0]) / scales[name][1]
            for column, name in (("proxy", run.proxy), ("gold", "gold"))
        )
        points.append((math.sqrt(max(mean(lines, "kl"), 0.0)), proxy, gold))
    return points


def best_of_n_curve(many: Sequence[Line], proxy: str, scales: Scales) -> Iterator[tuple[float, float, float]]:
    """Yield the points of best-of-n for n = 1, 2, 4, ... as `curve` does."""
    by_prompt = defaultdict[int, list[Line]](list)
    for line in many:
        by_prompt[line["prompt"]].append(line)
    groups = list(by_prompt.values())
    k = 1
    while k <= len(groups[0]):
        found = [estimates.best_of(k, [x[proxy] for x in lines], [x["gold"] for x in lines]) for lines in groups]
        means = [sum(values) / len(values) for values in zip(*found, strict=True)]
        heights = [
            (value - scales[name][0]) / scales[name][1] for value, name in zip(means, (proxy, "gold"), strict=True)
        ]
        yield math.sqrt(estimates.best_of_kl(k)), heights[0], heights[1]
        k *= 2


def plot(file: Path, title: str, curves: dict[str, list[list[tuple[float, float, float]]]]) -> None:
    """Draw proxy (dashed) and gold (solid) against the root of the KL; a colour for each name, a line for each seed."""
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    figure, axes = plt.subplots(figsize=(7, 4.5), dpi=110)
    for number, (name, seeds) in enumerate(curves.items()):
        for n, points in enumerate(seeds):
            roots, proxy, gold = zip(*points, strict=True)
            axes.plot(roots, gold, "-", color=f"C{number}", label=None if n else name)
            axes.plot(roots, proxy, "--", color=f"C{number}", alpha=0.5)
    axes.set_xlabel("square root of KL(policy, SFT), nats")
    axes.set_ylabel("score, standard deviations of SFT's answers")
    axes.set_title(f"{title}: gold (solid), proxy (dashed)")
    axes.legend(fontsize="small")
    axes.grid(alpha=0.3)
    figure.tight_layout()
    figure.savefig(file)
    plt.close(figure)


def table(head: Sequence[str], rows: Sequence[Sequence[object]]) -> str:
    lines = [head, ["---"] * len(head), *rows]
    return "\n".join("| " + " | ".join(map(str, line)) + " |" for line in lines) + "\n"


def paired(run: Run) -> list[tuple[Line, Line]]:
    """Return the answers of the first and the last evaluation to each prompt that has both."""
    before = {line["prompt"]: line for line in run.before}
    return [(before[line["prompt"]], line) for line in run.after if line["prompt"] in before]


def figures_of(run: Run, scales: Scales) -> Line:
    """Return what a run reached at its last evaluation, beside its own first one."""
    before, after = zip(*paired(run), strict=True)
    scores = [[line["gold"] for line in lines] for lines in (after, before)]
    lengths = [[line["tokens"] for line in lines] for lines in (after, before)]
    rate = compare([[score] for score in scores[1]], [[score] for score in scores[0]]).win_rate
    root, proxy, gold = curve(run, scales)[-1]
    best = max(curve(run, scales), key=lambda point: point[2])
    return {
        "KL": root**2,
        "proxy": proxy,
        "gold": gold,
        "gold at its best": best[2],
        "KL there": best[0] ** 2,
        "win rate": rate.value,
        "from": rate.low,
        "to": rate.high,
        "win rate at equal length": estimates.length_controlled(*scores, *lengths),
        "tokens": mean(run.after, "tokens"),
        "cut": 1 - mean(run.after, "finished"),
        "distinct 2-grams": estimates.distinct([line["response"] for line in run.after], NUM_GRAMS),
    }


def rows_of(runs: Sequence[Run], scales: Scales) -> tuple[list[str], list[list[str]]]:
    """Return the head and the rows of a table: mean and standard deviation over the seeds of each name."""
    groups = defaultdict[str, list[Line]](list)
    for run in runs:
        groups[run.name].append(figures_of(run, scales))
    names = list(next(iter(groups.values()))[0])
    rows = []
    for name, found in groups.items():
        cells = [estimates.mean_and_spread([one[column] for one in found]) for column in names]
        rows.append([name, str(len(found)), *(f"{a:.2f}" + (f" +- {b:.2f}" if b == b else "") for a, b in cells)])
    return ["run", "seeds", *names], rows


def differences(runs: Sequence[Run]) -> str:
    """Return the table of how far each ablation's gold is from that of the runs as they are, and whether it is noise.

    In standard deviations of SFT's answers. The error of answers: a run's mean over its n answers has their variance
    over n, a row's mean that of its runs over their number. The error of seeds: a row's mean has the variance of its
    runs' means over their number.
    """
    spread = scales_of(runs)["gold"][1]
    groups = defaultdict[str, list[tuple[float, float]]](list)
    for run in runs:
        center, deviation = estimates.mean_and_spread([line["gold"] / spread for line in run.after])
        groups[run.name].append((center, deviation**2 / len(run.after)))
    found = {}
    for name, seeds in groups.items():
        value, deviation = estimates.mean_and_spread([mean for mean, _ in seeds])
        found[name] = value, sum(own for _, own in seeds) / len(seeds) ** 2, deviation**2 / len(seeds)
    center, *variances = found.pop(AS_IT_IS)
    rows = []
    for name, (value, *own) in found.items():
        apart = value - center
        of_answers, of_seeds = (math.sqrt(a + b) for a, b in zip(own, variances, strict=True))
        # A single seed has no error of seeds (NaN): nothing is beyond it.
        verdict = "beyond noise" if abs(apart) >= 2 * of_answers and abs(apart) >= 2 * of_seeds else "within noise"
        spread_of_seeds = "one seed" if math.isnan(of_seeds) else f"+- {of_seeds:.2f}"
        rows.append([name, len(groups[name]), f"{apart:+.2f} +- {of_answers:.2f}", spread_of_seeds, verdict])
    names = [f"gold above '{AS_IT_IS}', error of answers", "error of seeds", "by two errors, of either kind"]
    return table(["run", "seeds", *names], rows)


def answers(run: Run) -> str:
    """Return ten held-out prompts with the answers of SFT and of the run, chosen by a fixed seed."""
    pairs = paired(run)
    parts = []
    for n in sorted(Random(0).sample(range(len(pairs)), min(NUM_SHOWN, len(pairs)))):
        before, after = pairs[n]
        parts.append(
            f"**{flat(after['prompt'])}**\n\n- SFT (gold {before['gold']:.2f}): {flat(before['response'])}\n"
            f"- PPO (gold {after['gold']:.2f}): {flat(after['response'])}\n"
        )
    return "\n".join(parts)


def flat(text: str) -> str:
    return " ".join(text.split())


def reward_models(folder: Path) -> str:
    """Return the table of reward models: accuracy on held-out pairs beside the trivial rules', and what gold is."""
    rows, verdict = [], ""
    for name, found in accuracies(folder).items():
        rules = {rule: said["mean"] for rule, said in found["trivial_rules"].items()}
        best = max(rules, key=lambda rule: rules[rule])
        accuracy = found["accuracy"]
        shown = f"{accuracy['mean']:.3f} +- {accuracy['standard_error']:.3f}"
        rows.append([name, found["pairs"], shown, f"{best}: {rules[best]:.3f}"])
        if name == "gold":
            apart = (accuracy["mean"] - rules[best]) / accuracy["standard_error"]
            kind = "above" if apart > 0 else "NOT above (it is no gold)"
            verdict = f"\nGold is {kind} the best trivial rule, by {apart:.1f} standard errors.\n"
    return table(["reward model", "held-out pairs", "accuracy", "best trivial rule"], rows) + verdict


def peaks(curves: dict[str, list[list[tuple[float, float, float]]]]) -> str:
    """Return a sentence for each name: where gold is highest on the mean curve of its seeds, and what it is at the
    end."""
    lines = []
    for name, seeds in curves.items():
        means = [[sum(part) / len(seeds) for part in zip(*points, strict=True)] for points in zip(*seeds, strict=True)]
        best = max(means, key=lambda point: point[2])
        lines.append(
            f"- {name}: gold is highest, {best[2]:.2f}, at a KL of {best[0] ** 2:.1f} nats (proxy {best[1]:.2f}); at "
            f"the end it is {means[-1][2]:.2f} at {means[-1][0] ** 2:.1f} nats (proxy {means[-1][1]:.2f})."
        )
    return "\n".join(lines) + "\n"


def write(folder: Path, output: Path, title: str) -> None:
    """Write `output` (Markdown), and beside it its plots and, as JSON, the points of the curves, named after it."""
    output.parent.mkdir(parents=True, exist_ok=True)
    order = list(ablation_rows(Path(), Path()))
    runs = read_runs(folder / "frontier")
    ablations = sorted(read_runs(folder / "ablations"), key=lambda run: order.index(run.name))
    scales, sampled = scales_of([*runs, *ablations]), folder / "best_of_n.jsonl"
    many = read_lines(sampled) if sampled.exists() else []
    parts = [f"# {title}\n", "## Reward models\n", reward_models(folder)]
    proxies = sorted({run.proxy for run in runs}, key=lambda name: -int(name.rpartition("-")[2]))
    for proxy in proxies:
        curves = defaultdict[str, list[list[tuple[float, float, float]]]](list)
        for run in runs:
            if run.proxy == proxy:
                curves[run.name].append(curve(run, scales))
        parts += [f"## {proxy}\n", peaks(curves)]
        if many:
            curves["best of n"].append(list(best_of_n_curve(many, proxy, scales)))
        if find_spec("matplotlib"):
            file = output.with_name(f"{output.stem}_{proxy}.png")
            plot(file, proxy, curves)
            parts.append(f"![{proxy}: both scores against the root of the KL]({file.name})\n")
    if not find_spec("matplotlib"):
        print("[learning] no plots: pip install matplotlib", file=sys.stderr)
    for heading, group in (("PPO", runs), ("Ablations", ablations)):
        if group:
            parts += [f"## {heading}\n", table(*rows_of(group, scales))]
    if any(run.name == AS_IT_IS for run in ablations):
        parts.append(differences(ablations))
    if runs:
        deepest = [run for run in runs if run.proxy == proxies[0]]
        highest = max(runs, key=lambda run: curve(run, scales)[-1][2])
        parts.append("## Ten answers before and after\n")
        for shown in (deepest[len(deepest) // 2], highest):
            parts += [f"Of {shown.name}, seed {shown.seed}.\n", answers(shown)]
    output.write_text("\n".join(parts), encoding="utf-8")
    points = ([[round(x, 4) for x in point] for point in curve(run, scales)] for run in runs)
    lines = ({"run": run.name, "seed": run.seed, "points": one} for run, one in zip(runs, points, strict=True))
    write_kept(output.with_suffix(".jsonl.bz2"), lines)
