"""Names by which a command knows its flags: their own, aliases, and those of DeepSpeed-Chat and other programs.

All of them are read from the fields (flag_table.py), so that a name is recognised wherever its flag is.
"""

from collections.abc import Iterable, Mapping

from pydantic import BaseModel

from pipeline.configuration.flag_table import Flag, flag_table
from pipeline.errors import nearest

FILE_FLAGS = ("preset", "config")


def normalise(name: str) -> str:
    """Spell a flag's name with `_`."""
    return name.replace("-", "_")


class Names:
    """The names that the flags of a configuration go by.

    known: every accepted name -> the flag's own. ignored, refused: DeepSpeed-Chat's flags -> the reason. other_tools:
    a flag's name in another program, or without its prefix -> the flags that it may mean here. positional: the flag of
    words before any flag.
    """

    def __init__(self, config_class: type[BaseModel]) -> None:
        self.table = flag_table(config_class)
        self.known = {alias: flag.name for flag in self.table.values() for alias in (*flag.aliases, flag.name)}
        self.ignored: dict[str, str] = {}
        self.refused: dict[str, str] = {}
        self.other_tools: dict[str, list[str]] = {}
        self.positional = next((flag.name for flag in self.table.values() if flag.positional), "")
        for flag in self.table.values():
            self.ignored |= flag.ignored
            self.refused |= flag.refused
            for name in with_prefix(flag):
                self.other_tools.setdefault(name, []).append(flag.name)
            if flag.path[-1] not in self.known:
                self.other_tools.setdefault(flag.path[-1], []).append(flag.name)

    def unknown(self, name: str, more: Iterable[str] = (), dashes: str = "") -> str:
        """Return why `name` is no flag of this command, with the flag that was probably meant.

        Args:
            more: further names that are right.
            dashes: what is written before a flag's name.
        """
        if name in self.refused:
            return f"a flag of other programs without a counterpart here: {self.refused[name]}"
        if flags := self.other_tools.get(name):
            place = ", the words before any flag" if self.positional in flags else ""
            return f"unknown flag; here it is {' or '.join(dashes + flag for flag in flags)}{place}"
        return f"unknown flag{nearest(dashes + name, [dashes + right for right in (*self.known, *more)])}"

    def of_file(self, origin: str, values: Mapping[str, object]) -> tuple[dict[str, object], list[str], list[str]]:
        """Return (values by the flags' own names, error lines, notes) of a YAML file's section."""
        result: dict[str, object] = {}
        errors, notes = [], []
        for name, value in values.items():
            if name in self.ignored:
                notes.append(f"{origin}: {name}: {IGNORED}: {self.ignored[name]}")
            elif name not in self.known:
                errors.append(f"{origin}: {name}: {self.unknown(name)}")
            elif self.known[name] in result:
                errors.append(f"{origin}: {name}: --{self.known[name]} is given twice, under two names; give one")
            else:
                result[self.known[name]] = value
        return result, errors, notes


IGNORED = "a flag of DeepSpeed-Chat that changes nothing here"


def with_prefix(flag: Flag) -> list[str]:
    """Return the names of a flag in other programs, also with the prefix of its group where it has one."""
    prefix = flag.name.removesuffix(flag.path[-1])
    return [*flag.other_tools, *(prefix + name for name in flag.other_tools if prefix)]
