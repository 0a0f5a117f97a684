"""Counts of dropped and repaired rows by kind, each with the place of its first example."""

from collections.abc import Iterator
from dataclasses import dataclass, field


@dataclass(frozen=True, slots=True, order=True)
class Origin:
    """The place of a row: its file or hub id, and its number (from 1; the line number in line-based files)."""

    file: str
    row: int

    def __str__(self) -> str:
        return f"{self.file}:{self.row}"


@dataclass(slots=True)
class Counts:
    """Counts of drops, truncations and repairs by kind. Each kind keeps its count and its first example's place."""

    _kinds: dict[str, tuple[int, str]] = field(default_factory=dict)

    def add(self, kind: str, origin: object) -> None:
        """Count one more of `kind`; the first `origin` of each kind is kept."""
        count, first = self._kinds.get(kind, (0, str(origin)))
        self._kinds[kind] = (count + 1, first)

    def __getitem__(self, kind: str) -> int:
        return self._kinds.get(kind, (0, ""))[0]

    def __iter__(self) -> Iterator[str]:
        return iter(self._kinds)

    def lines(self) -> list[str]:
        """Return one line per kind, most frequent first: '12 empty response (first: a.jsonl:3)'."""
        ordered = sorted(self._kinds.items(), key=lambda item: (-item[1][0], item[0]))
        return [f"{count} {kind} (first: {first})" for kind, (count, first) in ordered]

    def to_json(self) -> dict[str, dict[str, int | str]]:
        """Return a JSON object: {kind: {"count": int, "first": str}}."""
        return {kind: {"count": count, "first": first} for kind, (count, first) in self._kinds.items()}

    @classmethod
    def from_json(cls, data: dict[str, dict[str, int | str]]) -> "Counts":
        """Return the counts whose `to_json` is `data`."""
        return cls({kind: (int(entry["count"]), str(entry["first"])) for kind, entry in data.items()})
