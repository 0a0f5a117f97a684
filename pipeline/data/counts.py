"""What happened to rows on their way into training: how often each kind of drop or repair, and where first."""

from collections.abc import Iterator
from dataclasses import dataclass, field


@dataclass(frozen=True, slots=True, order=True)
class Origin:
    """Where a row came from: the file or hub id, and its row (1 is the first; the line number in line-based files)."""

    file: str
    row: int

    def __str__(self) -> str:
        return f"{self.file}:{self.row}"


@dataclass(slots=True)
class Counts:
    """Drops, truncations and repairs by kind. Each kind keeps its count and the place of its first example."""

    _kinds: dict[str, tuple[int, str]] = field(default_factory=dict)

    def add(self, kind: str, origin: object = "", number: int = 1) -> None:
        """Count `number` more of `kind`; `origin` is kept if it is the first of its kind."""
        count, first = self._kinds.get(kind, (0, str(origin)))
        self._kinds[kind] = (count + number, first)

    def merge(self, other: "Counts") -> None:
        """Add all of `other`'s counts to this one."""
        for kind, (count, first) in other._kinds.items():
            self.add(kind, first, count)

    def __getitem__(self, kind: str) -> int:
        return self._kinds.get(kind, (0, ""))[0]

    def __iter__(self) -> Iterator[str]:
        return iter(self._kinds)

    def __len__(self) -> int:
        return len(self._kinds)

    def first(self, kind: str) -> str:
        """The place of the first example of `kind`, empty if there was none."""
        return self._kinds.get(kind, (0, ""))[1]

    def lines(self) -> list[str]:
        """One line a kind, most frequent first: '12 empty response (first: a.jsonl:3)'."""
        ordered = sorted(self._kinds.items(), key=lambda item: (-item[1][0], item[0]))
        return [f"{count} {kind}" + (f" (first: {first})" if first else "") for kind, (count, first) in ordered]

    def to_json(self) -> dict[str, dict[str, int | str]]:
        """A JSON object: {kind: {"count": int, "first": str}}."""
        return {kind: {"count": count, "first": first} for kind, (count, first) in self._kinds.items()}

    @classmethod
    def from_json(cls, data: dict[str, dict[str, int | str]]) -> "Counts":
        """The inverse of `to_json`."""
        return cls({kind: (int(entry["count"]), str(entry["first"])) for kind, entry in data.items()})
