"""Counts of rows: what happened to them by kind, each with its first example, and where those of a source went.

A stage logs them once, as the lines and warnings that are made here.
"""

import math
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any, Literal

# Each row ends as one of the first five. "cut" and "kept" (repaired, or repeated) are remarks on rows that go on.
Fate = Literal["to train on", "held out", "of other stages", "left out", "dropped", "cut", "kept"]
MOST_DROPPED = 0.1  # share of a stage's rows above which dropping them is warned of
KEPT_SHARE = 0.95  # of a stage's rows that are not too long, for the length that a warning proposes


@dataclass(frozen=True, slots=True, order=True)
class Origin:
    """The place of a row: its file or hub id, and its number (from 1; the line number in line-based files).

    source: the data path that the file belongs to.
    """

    file: str
    row: int
    source: str = field(default="", compare=False)

    def __str__(self) -> str:
        return f"{self.file}:{self.row}"

    @property
    def path(self) -> str:
        """The data path by which the row is counted."""
        return self.source or self.file


@dataclass(slots=True)
class Counts:
    """Counts of rows by kind, each with its fate and its first example's place, and by source.

    sources: data path -> number of rows by fate. unread: data path -> columns that no row's layout reads.
    lengths: tokens -> number of rows that were dropped because they have so many. factors: data path -> how often each
    of its rows is trained on in an epoch, where sources are mixed by ratios.
    """

    _kinds: dict[str, tuple[Fate, int, str]] = field(default_factory=dict)
    sources: dict[str, Counter[str]] = field(default_factory=dict)
    unread: dict[str, set[str]] = field(default_factory=dict)
    lengths: Counter[int] = field(default_factory=Counter)
    factors: dict[str, float] = field(default_factory=dict)

    def add(
        self, fate: Fate, kind: str, origin: Origin, *, number: int = 1, num_tokens: int = 0, found: str = ""
    ) -> None:
        """Count `number` more rows of `kind` in the source of `origin`, the place of the first of them.

        Of the first row of a kind, `origin` and `found` are kept. num_tokens: of a row that is too long.
        """
        _, count, first = self._kinds.get(kind, (fate, 0, f"{origin}, found {found}" if found else str(origin)))
        self._kinds[kind] = (fate, count + number, first)
        self.settle(fate, origin.path, number)
        if num_tokens:
            self.lengths[num_tokens] += 1

    def settle(self, fate: Fate, path: str, number: int) -> None:
        """Count `number` rows of a data path among those of `fate`, which needs no kind and no example."""
        self.sources.setdefault(path, Counter())[fate] += number

    def merge(self, other: "Counts") -> None:
        """Add the counts of rows that come after these."""
        for kind, (fate, count, first) in other._kinds.items():
            _, before, earliest = self._kinds.get(kind, (fate, 0, first))
            self._kinds[kind] = (fate, before + count, earliest)
        for source, fates in other.sources.items():
            self.sources.setdefault(source, Counter()).update(fates)
        for source, columns in other.unread.items():
            self.unread.setdefault(source, set()).update(columns)
        self.lengths.update(other.lengths)

    @property
    def fates(self) -> Counter[str]:
        """The number of rows of all sources by fate."""
        return sum(self.sources.values(), Counter())

    def __getitem__(self, kind: str) -> int:
        return self._kinds[kind][1] if kind in self._kinds else 0

    def __iter__(self) -> Iterator[str]:
        return iter(self._kinds)

    def lines(self) -> list[str]:
        """Return one line per kind, most frequent first: '12 dropped: response is empty (first: a.jsonl:3)'."""
        ordered = sorted(self._kinds.items(), key=lambda item: (-item[1][1], item[0]))
        return [f"{count} {fate}: {kind} (first: {first})" for kind, (fate, count, first) in ordered]

    def to_json(self) -> dict[str, Any]:
        """Return the counts as a JSON object."""
        unread = {source: sorted(columns) for source, columns in self.unread.items()}
        counted = {"kinds": self._kinds, "sources": self.sources, "unread": unread, "lengths": self.lengths}
        return {**counted, "factors": self.factors}

    @classmethod
    def from_json(cls, data: dict[str, Any]) -> "Counts":
        """Return the counts whose `to_json` was written as `data`."""
        return cls(
            {kind: (fate, count, first) for kind, (fate, count, first) in data["kinds"].items()},
            {source: Counter(fates) for source, fates in data["sources"].items()},
            {source: set(columns) for source, columns in data["unread"].items()},
            Counter({int(length): count for length, count in data["lengths"].items()}),
            data["factors"],
        )


def row_lines(stage: str, counts: Counts, data_split: str, *, num_sequences: int) -> list[str]:
    """Return the lines about a stage's rows: all of them, then each kind, then each source of a mixture.

    num_sequences: number of sequences to train on, which is another than that of rows where texts fill blocks.
    """
    total = counts.fates
    packed = "" if total["to train on"] == num_sequences else f" (sequences: {num_sequences})"
    lines = [f"{stage} rows: {_fates_line(total, data_split, packed)}"]
    lines += [f"  rows: {line}" for line in counts.lines()]
    if len(counts.sources) > 1:
        for path, fates in counts.sources.items():
            repeated = f" ({counts.factors[path]:.2f} times each)" if path in counts.factors else ""
            lines.append(f"  rows: of {path}: {_fates_line(fates, data_split, repeated)}")
    return lines


def row_warnings(stage: str, counts: Counts) -> list[str]:
    """Return the warnings about a stage's rows: none held out, many dropped, columns that are not read."""
    fates = counts.fates
    warnings = []
    if not fates["held out"] and stage != "text":
        warnings.append(f"{stage} rows: 0 held out: no evaluation; give --eval_fraction or --eval_data_path")
    num_kept = fates["to train on"] + fates["held out"]
    share = fates["dropped"] / max(1, num_kept + fates["dropped"])
    if share > MOST_DROPPED:
        warnings.append(f"{stage} rows: {share:.0%} dropped{_length_hint(stage, num_kept, counts.lengths)}")
    for path, columns in counts.unread.items():
        warnings.append(f"  rows: of {path}: columns that are not read: {', '.join(sorted(columns))}")
    return warnings


def _fates_line(fates: Counter[str], data_split: str, trained: str = "") -> str:
    """Return '64 to train on, 8 held out, 3 dropped, of 75 given; 12 cut'."""
    parts = [f"{fates['to train on']} to train on{trained}", f"{fates['held out']} held out"]
    if fates["of other stages"]:
        parts.append(f"{fates['of other stages']} of other stages (--data_split {data_split})")
    parts += [f"{fates[fate]} {fate}" for fate in ("left out", "dropped") if fates[fate]]
    num_given = fates.total() - fates["cut"] - fates["kept"]
    return f"{', '.join(parts)}, of {num_given} given" + (f"; {fates['cut']} cut" if fates["cut"] else "")


def _length_hint(stage: str, num_kept: int, lengths: Counter[int]) -> str:
    """Name the limit that KEPT_SHARE of the rows would fit; nothing where they fit already."""
    num_more = math.ceil(KEPT_SHARE * (num_kept + lengths.total())) - num_kept
    if num_more <= 0:
        return ""
    flag, least = ("max_prompt_seq_len", 1) if stage == "ppo" else ("max_seq_len", 8)  # values that the flag takes
    return f"; --{flag} {max(least, sorted(lengths.elements())[num_more - 1])} would keep {KEPT_SHARE:.0%}"
