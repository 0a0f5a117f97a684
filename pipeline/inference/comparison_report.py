"""Render a comparison as tables for the terminal and as a Markdown file.

Texts of models and files are never interpreted as markup. The figures are computed in `comparison.py`.
"""

import re
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from pipeline.inference.comparison import AnswerRow, Contestant, HeadToHead, Interval, Summary, summarise
from pipeline.inference.terminal_text import printable

if TYPE_CHECKING:
    from rich.console import Console, RenderableType

MIN_COLUMN = 36  # width of an answer's column in characters below which answers are stacked
HEADINGS = ("", "tokens", "ended", "score", "win rate", "score difference")


def print_comparison(console: "Console", prompts: Sequence[str], contestants: Sequence[Contestant]) -> None:
    """Print every prompt with its answers, side by side if the width allows it, then the figures of each model."""
    from rich.text import Text

    is_wide = console.width >= MIN_COLUMN * len(contestants)
    for index, prompt in enumerate(prompts):
        console.print(Text(f"\n[{index + 1}/{len(prompts)}] {printable(prompt)}", style="bold"))
        for block in (columns if is_wide else stacked)(contestants, index):
            console.print(block)
    console.print()
    for contestant in contestants:
        console.print(Text(f"{contestant.label} = {printable(contestant.path)}"), soft_wrap=True)
    for block in figures(summarise(contestants), [contestant.label for contestant in contestants]):
        console.print(block)


def columns(contestants: Sequence[Contestant], index: int) -> list["RenderableType"]:
    """Lay out the answers to one prompt as a table with one column per model."""
    from rich import box
    from rich.table import Table
    from rich.text import Text

    table = Table(box=box.SIMPLE_HEAD, expand=True, padding=(0, 1), pad_edge=False)
    for contestant in contestants:
        table.add_column(Text(heading(contestant)), ratio=1, overflow="fold")
    for rows in zip(*(contestant.answers[index] for contestant in contestants), strict=True):
        table.add_row(*(Text(printable(row.text)) for row in rows))
        table.add_row(*(Text(remark(row), style="dim") for row in rows))
    return [table]


def heading(contestant: Contestant) -> str:
    """Return a model's label and the end of its path: 'A  output/sft'."""
    return f"{contestant.label}  {printable('/'.join(Path(contestant.path).parts[-2:]))}"


def stacked(contestants: Sequence[Contestant], index: int) -> list["RenderableType"]:
    """Lay out the answers to one prompt one below the other."""
    from rich.text import Text

    return [
        Text.assemble((f"{heading(contestant)}\n", "bold"), f"{printable(row.text)}\n", (remark(row), "dim"), "\n")
        for contestant in contestants
        for row in contestant.answers[index]
    ]


def remark(row: AnswerRow) -> str:
    """Return the line below an answer: '(12 tokens, score 1.24)'."""
    score = "" if row.score is None else f", score {row.score:.4g}"
    return f"({row.num_tokens} tokens{'' if row.finished else ', cut off'}{score})"


def figures(summaries: Sequence[Summary], labels: Sequence[str]) -> list["RenderableType"]:
    """Lay out the table of figures and the lines that explain them."""
    from rich import box
    from rich.table import Table
    from rich.text import Text

    rows = figure_rows(summaries, labels)
    table = Table(box=box.SIMPLE_HEAD, padding=(0, 1), pad_edge=False)
    for heading in rows[0]:
        table.add_column(heading, justify="right" if heading else "left")
    for row in rows[1:]:
        table.add_row(*row)
    return [table, *map(Text, legend(summaries, labels))]


def figure_rows(summaries: Sequence[Summary], labels: Sequence[str]) -> list[list[str]]:
    """Return the headings and one row per model, without the columns of scores if there are none."""
    is_scored = summaries[0].mean_score is not None
    rows = [list(HEADINGS)]
    for label, one in zip(labels, summaries, strict=True):
        score = "" if one.mean_score is None else f"{one.mean_score:.4g}"
        rate, difference = ("-", "-") if one.against is None else compared(one.against)
        rows.append([label, f"{one.mean_tokens:.1f}", f"{one.finished_share:.0%}", score, rate, difference])
    return rows if is_scored else [row[:3] for row in rows]


def compared(against: HeadToHead) -> tuple[str, str]:
    difference = "-" if against.difference is None else shown(against.difference, "+.3g")
    return shown(against.win_rate, ".2f"), difference


def shown(interval: Interval, form: str) -> str:
    return f"{interval.value:{form}} [{interval.low:{form}}, {interval.high:{form}}]"


def legend(summaries: Sequence[Summary], labels: Sequence[str]) -> list[str]:
    """Return the lines that explain the figures."""
    lines = ["tokens: mean length of an answer. ended: share that the model ended itself."]
    pairs = [(label, one.against) for label, one in zip(labels, summaries, strict=True) if one.against]
    if not pairs:
        return lines
    counts = "; ".join(f"{label} {one.wins}/{one.ties}/{one.losses}" for label, one in pairs)
    return [
        *lines,
        f"win rate: how often an answer is scored above {labels[0]}'s; a tie counts half; in brackets Wilson's 95 % "
        f"interval, n = {pairs[0][1].num_prompts} prompts.",
        f"score difference: mean score minus {labels[0]}'s, with its 95 % interval over the prompts.",
        f"wins/ties/losses against {labels[0]}: {counts}.",
    ]


def markdown(prompts: Sequence[str], contestants: Sequence[Contestant], settings_line: str) -> str:
    """Render the whole comparison as a Markdown document."""
    labels = [contestant.label for contestant in contestants]
    summaries = summarise(contestants)
    head, *rows = (f"| {' | '.join(row)} |" for row in figure_rows(summaries, labels))
    lines = ["# Comparison", "", *(f"- {one.label} = `{printable(one.path)}`" for one in contestants), ""]
    lines += [settings_line, "", head, "|" + "---|" * (head.count("|") - 1), *rows, "", *legend(summaries, labels), ""]
    for index, prompt in enumerate(prompts):
        lines += [f"## Prompt {index + 1}", "", *fenced(prompt)]
        for contestant in contestants:
            for row in contestant.answers[index]:
                lines += [f"**{contestant.label}** {remark(row)}", "", *fenced(row.text)]
    return "\n".join(lines)


def fenced(text: str) -> list[str]:
    """Render `text` as a code block with a fence longer than any run of backticks in it, so that nothing is markup."""
    safe = printable(text)
    fence = "`" * max(3, 1 + max(map(len, re.findall("`+", safe)), default=0))
    return [f"{fence}text", safe, fence, ""]
