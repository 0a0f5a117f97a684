"""The origin of the value of a flag, which says which of two values wins."""

from collections.abc import Mapping
from dataclasses import dataclass
from enum import IntEnum
from typing import Any, Self


class Kind(IntEnum):
    """Kinds of origins in the order of authority: of two values the one with the greater kind wins.

    DEFAULT: the flag's definition. METHOD: the default of a method of stage 3. FOLLOWS: computed from other flags.
    PLAN: chosen by the plan for a GPU. EARLIER_RUN: the run that resumes has it. DEEPSPEED_JSON, PRESET, FILE (the one
    of --config) and COMMAND_LINE: somebody gave it.
    """

    DEFAULT = 0
    METHOD = 1
    FOLLOWS = 2
    PLAN = 3
    EARLIER_RUN = 4
    DEEPSPEED_JSON = 5
    PRESET = 6
    FILE = 7
    COMMAND_LINE = 8


PREFIXES = {Kind.METHOD: "method ", Kind.PLAN: "chosen for "}


@dataclass(frozen=True, slots=True)
class Origin:
    """The origin of a value.

    source: the method, the file, the hardware of a plan, or what the value follows and why; "" for a kind without one.
    replaced: the value that was given, where the plan had to choose another one (--auto fit); else None.
    """

    kind: Kind
    source: str = ""
    replaced: Any = None

    @property
    def is_default(self) -> bool:
        return self.kind is Kind.DEFAULT

    @property
    def is_given(self) -> bool:
        """Tell whether the user or a file set the value."""
        return self.kind > Kind.EARLIER_RUN

    @property
    def is_by_hand(self) -> bool:
        """Tell whether the command line or a file other than a preset set the value."""
        return self.is_given and self.kind is not Kind.PRESET

    def __str__(self) -> str:
        return PREFIXES.get(self.kind, "") + self.source or self.kind.name.lower().replace("_", " ")

    @property
    def entry(self) -> dict[str, Any]:
        """The origin as config.json has it: as a text for people, and as its kind and source."""
        replaced = {} if self.replaced is None else {"replaced": self.replaced}
        return {"from": str(self), "origin": {"kind": self.kind.name, "source": self.source, **replaced}}

    @classmethod
    def of_entry(cls, entry: Mapping[str, Any]) -> Self:
        """Read a flag's entry of a config.json; one without a kind, which no run writes, is as of a file."""
        recorded = entry.get("origin")
        if isinstance(recorded, dict) and str(recorded.get("kind")) in Kind.__members__:
            return cls(Kind[recorded["kind"]], str(recorded.get("source", "")), recorded.get("replaced"))
        return cls(Kind.FILE, str(entry.get("from")))


Origins = Mapping[str, Origin]
DEFAULT, COMMAND_LINE = Origin(Kind.DEFAULT), Origin(Kind.COMMAND_LINE)
