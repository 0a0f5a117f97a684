"""The figures of a row: numbers that a user can compare, with their targets; None where a run is missing."""

from dataclasses import asdict, dataclass
from typing import Any


@dataclass(frozen=True, slots=True)
class Figure:
    """A number of a row. target: such as ">= 3.0", of the full sizes and the reference device; met: None elsewhere."""

    name: str
    value: float
    unit: str = ""
    target: str = ""
    met: bool | None = None


class Figures:
    """Collects figures; `checked` says whether the sizes and the device are those that the targets are for."""

    def __init__(self, *, checked: bool) -> None:
        self.checked = checked
        self.found: list[Figure] = []

    def add(self, name: str, value: float | None, unit: str = "", target: str = "") -> None:
        """Note a figure, unless a run that it needs is missing."""
        if value is not None:
            met = holds(value, target) if target and self.checked else None
            self.found.append(Figure(name, value, unit, target, met))

    def as_json(self) -> list[dict[str, Any]]:
        return [asdict(figure) for figure in self.found]


def holds(value: float, target: str) -> bool:
    """Return True if `value` satisfies ">= 3.0" or "<= 1.3"."""
    relation, bound = target.split()
    return value >= float(bound) if relation == ">=" else value <= float(bound)


def quotient(above: float | None, below: float | None) -> float | None:
    """above / below, or None where one is missing or the latter is 0."""
    return above / below if above is not None and below else None
