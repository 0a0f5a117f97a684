"""Votes on pairs of answers: a file of preference pairs that stages 2 and 3 read, and win rates with intervals."""

import json
import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from pipeline.data.turns import Turns
from pipeline.errors import InputError
from pipeline.files import append_row
from pipeline.inference.intervals import Z_95, wilson
from pipeline.inference.serving.bodies import ApiError, Candidate


@dataclass(frozen=True, slots=True)
class Pair:
    """The models of a vote, and the winner; None: a tie."""

    models: tuple[str, str]
    winner: str | None


class Votes:
    """The votes in a file, whose rows are preference pairs; ties are in a file beside it, since they are none.

    file: JSON lines of `prompt`, `chosen`, `rejected`, and the models of both answers.
    """

    def __init__(self, file: Path) -> None:
        """Read earlier votes. Raises InputError for a file with other rows."""
        self.file, self.ties = file, file.with_name(f"{file.stem}.ties{file.suffix}")
        if not file.parent.is_dir():
            raise InputError(f"--votes: {file}: there is no folder {file.parent}")
        self._pairs = [pair for each in (self.file, self.ties) for pair in read_pairs(each)]

    def add(self, prompt: Turns, answers: Sequence[Candidate], choice: int | None, *, blind: bool) -> None:
        """Write a vote to its file. Raises ApiError."""
        names, texts = tuple(one.model for one in answers), [one.text.strip() for one in answers]
        if choice is not None and (not all(texts) or texts[0] == texts[1]):
            what = "both are equal" if texts[0] == texts[1] else "one is empty"
            raise ApiError(400, f"answers: {what}; such a pair trains nothing, vote for neither")
        row: dict[str, Any] = {"prompt": [{"role": turn.role, "content": turn.content} for turn in prompt]}
        if choice is None:
            row |= {"answers": texts, "models": names}
        else:
            row |= {"chosen": texts[choice], "rejected": texts[1 - choice]}
            row |= {"models": (names[choice], names[1 - choice])}
        try:
            append_row(self.ties if choice is None else self.file, row | {"blind": blind})
        except OSError as error:
            raise ApiError(500, f"{self.file}: the vote is not saved: {error.strerror}", "server_error") from None
        self._pairs.append(Pair((names[0], names[1]), None if choice is None else names[choice]))

    def summary(self, order: Sequence[str]) -> list[dict[str, Any]]:
        """Return for each pair of models how often the one that is later in `order` won, with the 95 % interval."""
        ranks = {name: rank for rank, name in enumerate(order)}
        counts = dict[tuple[str, str], list[int]]()
        for pair in self._pairs:
            first, second = sorted(pair.models, key=lambda name: (ranks.get(name, -1), name))
            won = counts.setdefault((first, second), [0, 0, 0])
            won[1 if pair.winner is None else 0 if pair.winner == second else 2] += 1
        return [shown(models, *won) for models, won in counts.items()]


def read_pairs(file: Path) -> Iterator[Pair]:
    """Yield the votes of a file; none if there is no such file. Raises InputError."""
    try:
        lines = file.read_text(encoding="utf-8-sig").split("\n") if file.exists() else []
    except (OSError, UnicodeDecodeError) as error:
        raise InputError(f"--votes: {file}: cannot be read as UTF-8 text: {error}") from None
    for number, line in enumerate(filter(None, lines), start=1):
        try:
            row = json.loads(line)
            first, second = row["models"]
            yield Pair((str(first), str(second)), str(first) if "chosen" in row else None)
        except (ValueError, TypeError, KeyError):
            raise InputError(f"--votes: {file}:{number} is no vote; give another file") from None


def shown(models: tuple[str, str], wins: int, ties: int, losses: int) -> dict[str, Any]:
    """Return the counts of a pair of models with the win rate of the second one.

    `more`: further votes after which Wilson's interval would exclude one half, if the rate stayed; None: none would.
    """
    count = wins + ties + losses
    interval = wilson((wins + ties / 2) / count, count)
    distance = abs(interval.value - 0.5)
    # The interval excludes one half where the distance is more than Z_95 standard errors at one half.
    more = max(0, math.floor((Z_95 / (2 * distance)) ** 2) + 1 - count) if distance else None
    return {
        "models": models, "wins": wins, "ties": ties, "losses": losses, "more": more,
        "win_rate": interval.value, "low": interval.low, "high": interval.high,
    }  # fmt: skip
