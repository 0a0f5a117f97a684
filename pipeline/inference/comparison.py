"""Compare answers of several models to the same prompts: scores, win rates and their intervals, as tables and Markdown.

The first model is the baseline. Answers to one prompt depend on each other, so they are averaged first: the unit of
every interval is the prompt. Texts of models and files are never interpreted as markup. The module imports no torch.
"""

import statistics
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from itertools import compress, product
from pathlib import Path
from typing import Any

from rich import box
from rich.console import Console, RenderableType
from rich.table import Column, Table
from rich.text import Text

from pipeline.console import code_span, fenced
from pipeline.errors import counted, printable
from pipeline.inference.answer_rows import Answer
from pipeline.inference.intervals import MIN_PROMPTS, Interval

LABELS = "ABCDEFGHIJKLMNOPQRSTUVWXYZ"  # of models, in their order
MIN_COLUMN = 36  # width of an answer's column in characters below which answers are stacked
HEADINGS = ("", "tokens", "ended", "scored by", "score", "win rate", "LC win rate", "score difference", "orders differ")
JUDGED = "judge, both orders"  # name of the scorer that sees two answers at once
LOOKS: Any = {"box": box.SIMPLE_HEAD, "padding": (0, 1), "pad_edge": False}  # style of every table


# An LLM judge's preference with the baseline's answer shown first, and with the model's shown first: 1 = the model's is
# better, 0 = both are equal, -1 = the baseline's is better. None: an order has no rating.
Preference = tuple[int, int] | None


@dataclass(frozen=True, slots=True)
class Contestant:
    """A model in a comparison; answers[i] are those to prompt i, equally many for each prompt and model.

    Their rewards are the scores that decide the wins, and their `scores` have those of every scorer by its name, the
    deciding one first. Without a scorer they have none.

    label: name of the model in the table.
    path: folder or hub id of the model.
    answers: [prompt][answer].
    preferences: [prompt][pair of a baseline's answer and one of this model]; () for the baseline or without a judge.
    """

    label: str
    path: str
    answers: tuple[tuple[Answer, ...], ...]
    preferences: tuple[tuple[Preference, ...], ...] = ()


@dataclass(frozen=True, slots=True)
class HeadToHead:
    """A model against the baseline.

    num_prompts: prompts that both answered.
    wins: pairs of answers in which the model's has the higher score, or is preferred in both orders.
    ties: pairs of answers with equal scores, or without a preference that both orders share.
    losses: pairs of answers in which the baseline's has the higher score, or is preferred in both orders.
    win_rate: share of pairs won, a tie as half a win, averaged over prompts; None if no pair was rated.
    length_controlled: win rate at equal length; None where it cannot be estimated (`bootstrap.length_controlled`).
    difference: mean difference of the scores; None where there are too few prompts for an interval, or no scores.
    disagreement: share of the judge's pairs whose preferences differ between the orders; None for scores.
    num_unjudged: pairs without a rating in an order, which are left out.
    """

    num_prompts: int
    wins: int
    ties: int
    losses: int
    win_rate: Interval | None
    length_controlled: Interval | None
    difference: Interval | None = None
    disagreement: float | None = None
    num_unjudged: int = 0


@dataclass(frozen=True, slots=True)
class Summary:
    """A model's figures.

    label: name of the model in the table.
    path: folder or hub id of the model.
    mean_tokens: mean length of its answers in tokens.
    finished_share: share of answers that ended by themselves.
    mean_score: mean score of its answers; None without a reward model.
    against: comparison with the baseline; None without a reward model, and for the baseline.
    """

    label: str
    path: str
    mean_tokens: float
    finished_share: float
    mean_score: float | None
    against: HeadToHead | None


def scores(contestant: Contestant) -> list[list[float]]:
    """Return a model's scores as [prompt][answer]; [] for a prompt with an answer that has no score."""
    rows = [[row.reward for row in answers if row.reward is not None] for answers in contestant.answers]
    return [row if len(row) == len(answers) else [] for row, answers in zip(rows, contestant.answers, strict=True)]


def compare(
    first: Sequence[Sequence[float]], other: Sequence[Sequence[float]], longer: Sequence[float] = ()
) -> HeadToHead:
    """Compare `other` with `first`, scores [prompt][answer]; within a prompt every answer meets every answer.

    Args:
        longer: for each prompt, by how many tokens the answers of `other` are longer; none: no length-controlled rate.
    """
    from pipeline.inference.bootstrap import mean_over_prompts  # with numpy

    meetings = [
        [(theirs > ours) - (theirs < ours) for ours, theirs in product(a, b)] for a, b in zip(first, other, strict=True)
    ]
    differences = [statistics.fmean(b) - statistics.fmean(a) for a, b in zip(first, other, strict=True)]
    return replace(head_to_head(meetings, longer), difference=mean_over_prompts(differences))


def head_to_head(meetings: Sequence[Sequence[int]], longer: Sequence[float]) -> HeadToHead:
    """Return the figures of meetings [prompt][pair], each 1 (won), 0 or -1, without a difference; see `compare`."""
    from pipeline.inference.bootstrap import length_controlled, rate_over_prompts  # with numpy

    shares = [0.5 + 0.5 * statistics.fmean(results) for results in meetings]
    every = [result for results in meetings for result in results]
    return HeadToHead(
        num_prompts=len(meetings),
        wins=every.count(1),
        ties=every.count(0),
        losses=every.count(-1),
        win_rate=rate_over_prompts(shares) if shares else None,
        length_controlled=length_controlled(shares, longer) if longer else None,
    )


def by_scores(first: Contestant, other: Contestant) -> HeadToHead | None:
    """Compare a model with the baseline by the prompts whose answers all have scores; None if there is no such one."""
    parts = [part for part in zip(scores(first), scores(other), longer_by(first, other), strict=True) if all(part[:2])]
    return compare(*zip(*parts, strict=True)) if parts else None


def by_judge(first: Contestant, other: Contestant) -> HeadToHead:
    """Compare a model with the baseline by preferences; orders that differ are a tie."""
    judged = [[pair for pair in pairs if pair] for pairs in other.preferences]
    parts = [part for part in zip(judged, longer_by(first, other), strict=True) if part[0]]
    meetings = [[there if there == back else 0 for there, back in pairs] for pairs, _ in parts]
    every = [pair for pairs in judged for pair in pairs]
    return replace(
        head_to_head(meetings, [tokens for _, tokens in parts]),
        disagreement=statistics.fmean(there != back for there, back in every) if every else None,
        num_unjudged=sum(map(len, other.preferences)) - len(every),
    )


def longer_by(first: Contestant, other: Contestant) -> list[float]:
    """Return for each prompt by how many tokens the answers of `other` are longer."""
    return [theirs - ours for ours, theirs in zip(mean_lengths(first), mean_lengths(other), strict=True)]


def mean_lengths(contestant: Contestant) -> list[float]:
    """Return the mean length of a model's answers to each prompt in tokens."""
    return [statistics.fmean(row.num_tokens for row in answers) for answers in contestant.answers]


def summarise(
    contestants: Sequence[Contestant], against: Callable[[Contestant, Contestant], HeadToHead | None] = by_scores
) -> list[Summary]:
    """Return each model's averages and its wins against the first one, in order."""
    summaries = list[Summary]()
    for index, contestant in enumerate(contestants):
        rows = [row for answers in contestant.answers for row in answers]
        own_scores = scores(contestant)
        summary = Summary(
            contestant.label,
            contestant.path,
            mean_tokens=statistics.fmean(row.num_tokens for row in rows),
            finished_share=statistics.fmean(row.finished for row in rows),
            mean_score=statistics.fmean(map(statistics.fmean, filter(None, own_scores))) if any(own_scores) else None,
            against=against(contestants[0], contestant) if index > 0 else None,
        )
        summaries.append(summary)
    return summaries


def by_scorer(contestants: Sequence[Contestant]) -> dict[str, list[Summary]]:
    """Return the summaries by each scorer, the deciding one first and an LLM judge last; those without scores by ""."""
    names = list(contestants[0].answers[0][0].scores)
    summaries = {name: summarise([scored_by(name, one) for one in contestants]) for name in names}
    if any(one.preferences for one in contestants):
        summaries[JUDGED] = summarise([scored_by(JUDGED, one) for one in contestants], by_judge)
    return summaries or {"": summarise(contestants)}


def scored_by(name: str, contestant: Contestant) -> Contestant:
    """Return a model whose wins a scorer decides; a judge of pairs gives no scores."""
    answers = (tuple(replace(row, reward=row.scores.get(name)) for row in rows) for rows in contestant.answers)
    return replace(contestant, answers=tuple(answers))


def to_json(prompts: Sequence[str], contestants: Sequence[Contestant], settings: dict[str, Any]) -> dict[str, Any]:
    """Return a whole comparison as one JSON object."""
    judged = [one for one in contestants if one.preferences]
    answers = [
        {"prompt": text, "answers": {one.label: list(map(json_row, one.answers[index])) for one in contestants}}
        | ({"preferences": {one.label: one.preferences[index] for one in judged}} if judged else {})
        for index, text in enumerate(prompts)
    ]
    summaries = {name: list(map(asdict, each)) for name, each in by_scorer(contestants).items()}
    further = {"by_scorer": summaries} if len(summaries) > 1 else {}
    return {"settings": settings, "models": next(iter(summaries.values())), **further, "prompts": answers}


def json_row(answer: Answer) -> dict[str, Any]:
    """Return an answer as the JSON file has it."""
    row = {name: getattr(answer, name) for name in ("text", "num_tokens", "finished")} | {"score": answer.reward}
    return row | ({"scores": answer.scores} if len(answer.scores) > 1 else {})


def print_comparison(console: Console, prompts: Sequence[str], contestants: Sequence[Contestant]) -> None:
    """Print every prompt with its answers, side by side if the width allows it, then the figures of each model."""
    is_wide = console.width >= MIN_COLUMN * len(contestants)
    for index, prompt in enumerate(prompts):
        console.print(Text(f"\n[{index + 1}/{len(prompts)}] {printable(prompt)}", style="bold"))
        console.print(*(columns if is_wide else stacked)(contestants, index), sep="\n")
    console.print()
    for contestant in contestants:
        console.print(Text(f"{contestant.label} = {printable(contestant.path)}"), soft_wrap=True)
    for name, summaries in (by_name := by_scorer(contestants)).items():
        rows = figure_rows({name: summaries})
        if sum(max(map(len, cells)) + 2 for cells in zip(*rows, strict=True)) > console.width:
            rows = [[cell.replace(" [", "\n[") for cell in row] for row in rows]
        headings, *rows = rows
        table = Table(*(Column(title, justify="right" if title else "left") for title in headings), **LOOKS)
        for row in rows:
            table.add_row(*row)
        console.print(*[Text(f"\nscored by {printable(name)}")] * (len(by_name) > 1), table, sep="\n")
    console.print(*map(Text, legend(by_name)), sep="\n")


def columns(contestants: Sequence[Contestant], index: int) -> list[RenderableType]:
    """Lay out the answers to one prompt as a table with one column per model."""
    headings = (Column(Text(heading(contestant)), ratio=1, overflow="fold") for contestant in contestants)
    table = Table(*headings, expand=True, **LOOKS)
    for rows in zip(*(contestant.answers[index] for contestant in contestants), strict=True):
        table.add_row(*(Text(printable(row.text)) for row in rows))
        table.add_row(*(Text(remark(row), style="dim") for row in rows))
    return [table]


def heading(contestant: Contestant) -> str:
    """Return a model's label and the end of its path: 'A  output/sft'."""
    return f"{contestant.label}  {printable('/'.join(Path(contestant.path).parts[-2:]))}"


def stacked(contestants: Sequence[Contestant], index: int) -> list[RenderableType]:
    """Lay out the answers to one prompt one below the other."""
    return [
        Text.assemble((f"{heading(contestant)}\n", "bold"), f"{printable(row.text)}\n", (remark(row), "dim"), "\n")
        for contestant in contestants
        for row in contestant.answers[index]
    ]


def remark(row: Answer) -> str:
    """Return the line below an answer: '(12 tokens, score 1.24)'."""
    score = "" if row.reward is None else f", score {row.reward:.4g}"
    return f"({row.num_tokens} tokens{'' if row.finished else ', cut off'}{score})"


def figure_rows(by_name: Mapping[str, Sequence[Summary]]) -> list[list[str]]:
    """Return the headings and a row per scorer and model, without columns that would be empty in each row."""
    rows = [[*HEADINGS]]
    for name, summaries in by_name.items():
        for one in summaries:
            score = "" if one.mean_score is None else f"{one.mean_score:.4g}"
            names = ("win_rate", "length_controlled", "difference", "disagreement")
            rate, equal_length, difference, disagreement = (getattr(one.against, name, None) for name in names)
            row = [one.label, f"{one.mean_tokens:.1f}", f"{one.finished_share:.0%}", printable(name), score]
            row += [shown(rate, ".2f"), shown(equal_length, ".2f"), shown(difference, "+.3g")]
            rows.append([*row, "-" if disagreement is None else f"{disagreement:.0%}"])
    has_scores = any(one.mean_score is not None for summaries in by_name.values() for one in summaries)
    is_judged = JUDGED in by_name
    has_rates = has_scores or is_judged
    in_use = [True] * 3 + [len(by_name) > 1 and has_rates, has_scores, has_rates, has_rates, has_scores, is_judged]
    return [list(compress(row, in_use)) for row in rows]


def figures(contestants: Sequence[Contestant]) -> tuple[list[list[str]], list[str]]:
    """Return the rows of the figures with their headings, and the lines that explain them."""
    summaries = by_scorer(contestants)
    return figure_rows(summaries), legend(summaries)


def shown(interval: Interval | None, form: str) -> str:
    return f"{interval.value:{form}} [{interval.low:{form}}, {interval.high:{form}}]" if interval else "-"


def legend(by_name: Mapping[str, Sequence[Summary]]) -> list[str]:
    """Return the lines that explain the figures."""
    lines = ["tokens: mean length of an answer. ended: share that the model ended itself."]
    pairs = [(name, one.label, one.against) for name, each in by_name.items() for one in each if one.against]
    if not pairs:
        return lines
    first = next(iter(by_name.values()))[0].label
    counts = "; ".join(
        f"{label}{f' by {printable(name)}' if len(by_name) > 1 else ''} {one.wins}/{one.ties}/{one.losses}"
        for name, label, one in pairs
    )
    if rates := [(one.win_rate, one.num_prompts) for *_, one in pairs if one.win_rate]:
        *fewer, most = sorted({count for _, count in rates})
        number = " or ".join([*map(str, fewer), counted(most, "prompt")])
        wins = [f"scored above {first}'s"] if any(name != JUDGED for name in by_name) else []
        wins += [f"preferred to {first}'s in both orders"] if JUDGED in by_name else []
        lines += [
            f"win rate: how often an answer is {' or '.join(wins)}; a tie counts half; in brackets "
            f"its 95 % interval by {' or '.join(sorted({rate.method for rate, _ in rates}))}, n = {number}.",
            "LC win rate: length-controlled, what a logistic model of the wins predicts for answers of equal length; - "
            f"with fewer than {MIN_PROMPTS} prompts, or if nearly all answers of one model are longer.",
        ]
    if any(name != JUDGED for name in by_name):
        lines.append(f"score difference: mean score minus {first}'s, with its 95 % interval over the prompts.")
    if JUDGED in by_name:
        unjudged = "; ".join(f"{label} {one.num_unjudged}" for name, label, one in pairs if name == JUDGED)
        lines += [
            "orders differ: share of pairs whose preference by the LLM judge changes with their order; these are ties.",
            f"pairs without a rating in one of the orders, left out: {unjudged}.",
        ]
    return [
        *lines,
        f"wins/ties/losses against {first}: {counts}.",
    ]


def markdown(prompts: Sequence[str], contestants: Sequence[Contestant], settings_line: str) -> str:
    """Render the whole comparison as a Markdown document."""
    table, explained = figures(contestants)
    head, *rows = (f"| {' | '.join(row)} |" for row in table)
    lines = ["# Comparison", "", *(f"- {one.label} = {code_span(printable(one.path))}" for one in contestants), ""]
    lines += [settings_line, "", head, "|" + "---|" * (head.count("|") - 1), *rows, "", *explained, ""]
    for index, prompt in enumerate(prompts):
        lines += [f"## Prompt {index + 1}", "", fenced(printable(prompt)), ""]
        for contestant in contestants:
            for row in contestant.answers[index]:
                lines += [f"**{contestant.label}** {remark(row)}", "", fenced(printable(row.text)), ""]
    return "\n".join(lines)
