"""Counts of rows by outcome: for each kind, with a first example, and for each source. All data modules add to them."""

from collections import Counter
from collections.abc import Collection, Iterator
from dataclasses import dataclass, field
from typing import Any, Literal

# Each row ends in one of the first five. "cut" (truncated) and "kept" (repaired or repeated) are remarks on used rows.
RowOutcome = Literal["to train on", "held out", "of other stages", "left out", "dropped", "cut", "kept"]


@dataclass(frozen=True, slots=True, order=True)
class Origin:
    """The origin of a row: its file or hub id, and its number (from 1; the line number in line-based files).

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
    """Counts of rows by kind and by source.

    _kinds: kind of row -> outcome, number of rows, origin of the first one.
    sources: data path -> number of rows by outcome.
    unread: data path -> columns that nothing reads.
    passed: data path -> columns that no row's layout reads, but that rewards get.
    lengths: number of tokens -> number of rows that were dropped because of that number.
    factors: data path -> how often each of its rows is trained on in an epoch, if sources are mixed by ratios.
    """

    _kinds: dict[str, tuple[RowOutcome, int, str]] = field(default_factory=dict)
    sources: dict[str, Counter[str]] = field(default_factory=dict)
    unread: dict[str, set[str]] = field(default_factory=dict)
    passed: dict[str, set[str]] = field(default_factory=dict)
    lengths: Counter[int] = field(default_factory=Counter)
    factors: dict[str, float] = field(default_factory=dict)

    def add(
        self, outcome: RowOutcome, kind: str, origin: Origin, *, number: int = 1, num_tokens: int = 0, detail: str = ""
    ) -> None:
        """Count `number` more rows of `kind` in the source of `origin`, the origin of the first of them.

        `origin` and `detail` (what only that row shows) are stored for the first row of a kind. num_tokens: of a row
        that is too long.
        """
        _, count, first = self._kinds.get(kind, (outcome, 0, f"{origin}, got {detail}" if detail else str(origin)))
        self._kinds[kind] = (outcome, count + number, first)
        self.settle(outcome, origin.path, number)
        if num_tokens:
            self.lengths[num_tokens] += 1

    def settle(self, outcome: RowOutcome, path: str, number: int) -> None:
        """Count `number` rows of a data path as `outcome`, without kind and example."""
        self.sources.setdefault(path, Counter())[outcome] += number

    def note_columns(self, path: str, *, passed: Collection[str] = (), unread: Collection[str] = ()) -> None:
        """Note columns of a data path that no layout reads."""
        for columns, names in ((self.passed, passed), (self.unread, unread)):
            if names:
                columns.setdefault(path, set()).update(names)

    def merge(self, other: "Counts") -> None:
        """Add the counts of rows that come after these."""
        for kind, (outcome, count, first) in other._kinds.items():
            _, before, earliest = self._kinds.get(kind, (outcome, 0, first))
            self._kinds[kind] = (outcome, before + count, earliest)
        for source, outcomes in other.sources.items():
            self.sources.setdefault(source, Counter()).update(outcomes)
        for source in (*other.unread, *other.passed):
            self.note_columns(source, passed=other.passed.get(source, ()), unread=other.unread.get(source, ()))
        self.lengths.update(other.lengths)

    @property
    def outcomes(self) -> Counter[str]:
        """The number of rows of all sources by outcome."""
        return sum(self.sources.values(), Counter())

    def __getitem__(self, kind: str) -> int:
        return self._kinds[kind][1] if kind in self._kinds else 0

    def __iter__(self) -> Iterator[str]:
        return iter(self._kinds)

    def lines(self) -> list[str]:
        """Return one line per kind, most frequent first: '12 dropped: response is empty (first: a.jsonl:3)'."""
        ordered = sorted(self._kinds.items(), key=lambda item: (-item[1][1], item[0]))
        return [f"{count} {outcome}: {kind} (first: {first})" for kind, (outcome, count, first) in ordered]

    def to_json(self) -> dict[str, Any]:
        """Return the counts as a JSON object."""
        both = {"unread": self.unread, "passed": self.passed}
        columns = {name: {path: sorted(names) for path, names in by_path.items()} for name, by_path in both.items()}
        counted = {"kinds": self._kinds, "sources": self.sources, **columns, "lengths": self.lengths}
        return {**counted, "factors": self.factors}

    @classmethod
    def from_json(cls, data: dict[str, Any]) -> "Counts":
        """Return the counts whose `to_json` was written as `data`."""
        unread, passed = ({path: set(columns) for path, columns in data[name].items()} for name in ("unread", "passed"))
        return cls(
            {kind: (outcome, count, first) for kind, (outcome, count, first) in data["kinds"].items()},
            {source: Counter(outcomes) for source, outcomes in data["sources"].items()},
            unread,
            passed,
            Counter({int(length): count for length, count in data["lengths"].items()}),
            data["factors"],
        )


def outcomes_line(outcomes: Counter[str], data_split: str, trained: str = "") -> str:
    """Return the counts of rows as '64 to train on, 8 held out, 3 dropped, of 75 given; 12 cut'."""
    parts = [f"{outcomes['to train on']} to train on{trained}", f"{outcomes['held out']} held out"]
    if outcomes["of other stages"]:
        parts.append(f"{outcomes['of other stages']} of other stages (--data-split {data_split})")
    parts += [f"{outcomes[outcome]} {outcome}" for outcome in ("left out", "dropped") if outcomes[outcome]]
    num_given = outcomes.total() - outcomes["cut"] - outcomes["kept"]
    return f"{', '.join(parts)}, of {num_given} given" + (f"; {outcomes['cut']} cut" if outcomes["cut"] else "")
