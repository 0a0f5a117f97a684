"""A checked configuration with the origin of every value, and the changes of unset values."""

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, replace
from typing import Any, Generic, NamedTuple, Self, TypeVar

from pydantic import ValidationError

from pipeline.configuration.flag_checks import unread_flags
from pipeline.configuration.flag_table import Flag, flag_table, flat_items, nest
from pipeline.configuration.groups import Group
from pipeline.configuration.origins import DEFAULT, Origin, Origins
from pipeline.errors import ContradictionError, InputError, dashed, nearest, raise_lines

Facts = TypeVar("Facts")


@dataclass(frozen=True, slots=True)
class Resolved:
    """A checked configuration, where the value of every flag came from, and what its user should know of it.

    preset: the file of --preset, whose values give way to others; empty: none.
    """

    config: Any
    origins: dict[str, Origin]
    notes: tuple[str, ...] = ()
    preset: str = ""

    def is_given(self, name: str) -> bool:
        """Return True for a flag whose value is not left to its default."""
        return self.origins.get(name, DEFAULT).is_given

    @property
    def values(self) -> dict[str, Any]:
        """The value of each flag."""
        return dict(flat_items(self.config))

    def changed(
        self, values: Mapping[str, Any], origins: Mapping[str, Origin] | None = None, notes: Iterable[str] = ()
    ) -> Self:
        """Return the settings with other values of flags, with other origins, and with further notes.

        Raises InputError: see `validated`.
        """
        before, new_origins = self.values, {**self.origins, **(origins or {})}
        is_same = all(before[name] == value for name, value in values.items())
        config = self.config if is_same else validated(type(self.config), {**before, **values}, new_origins)
        return replace(self, config=config, origins=new_origins, notes=tuple(dict.fromkeys([*self.notes, *notes])))


class Rule(NamedTuple, Generic[Facts]):
    """A step in which flags that are unset, or that cannot be as they were given, get their values.

    apply: (settings, what is known at that moment) -> settings.
    text: what it does, for the page "Which value wins".
    """

    apply: Callable[[Resolved, Facts], Resolved]
    text: str


def applied(rules: Iterable[Rule[Facts]], resolved: Resolved, facts: Facts) -> Resolved:
    """Return the settings after these rules, one after the other. Raises InputError: see the rules."""
    for rule in rules:
        resolved = rule.apply(resolved, facts)
    return resolved


def validated(config_class: type[Group], values: Mapping[str, Any], origins: Origins) -> Group:
    """Validate flat values as the model. Raises InputError with a line for each value that does not fit."""
    table = flag_table(config_class)
    try:
        config = config_class.model_validate(nest(values, table))
    except ValidationError as error:
        kind = InputError if any(flag_of(problem, table) for problem in error.errors()) else ContradictionError
        lines = [describe(problem, table, origins) for problem in error.errors()]
        raise kind("\n".join(lines)) from None
    raise_lines(unread_flags(config, origins), ContradictionError)
    return config


def describe(problem: Any, table: Mapping[str, Flag], origins: Origins) -> str:
    """Return a line for one pydantic error: flag, value, origin, what would be right."""
    message = problem["msg"].removeprefix("Value error, ").replace("Input should be", "expected")
    if (flag := flag_of(problem, table)) is None:
        name, _, rest = str(message).partition(": ")
        return f"{dashed(name)}: {rest}" if name in table else str(message)
    given_value = problem["input"]
    if problem["type"] == "missing":
        return f"{dashed(flag.name)}: missing; expected {flag.type_name}: {flag.meaning}"
    hint = nearest(given_value, map(str, flag.choices)) if isinstance(given_value, str) else ""
    theirs = [f"; a file is {dashed(name)}" for name, other in table.items() if flag.name in other.other_tools]
    return f"{dashed(flag.name)}: got {given_value!r} ({origins[flag.name]}): {message}{''.join((hint, *theirs))}"


def flag_of(problem: Any, table: Mapping[str, Flag]) -> Flag | None:
    """Return the flag that a pydantic error is about; None for values that do not go together."""
    location = tuple(str(part) for part in problem["loc"])
    return next((flag for flag in table.values() if location[: len(flag.path)] == flag.path), None)
