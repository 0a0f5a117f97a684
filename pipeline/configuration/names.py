"""Names by which a command knows its flags: their own, aliases, and those of DeepSpeed-Chat and other programs.

All of them are read from the fields (flag_table.py), so that a name is recognised wherever its flag is.
"""

from collections.abc import Callable, Iterable, Mapping
from typing import Any

from pydantic import BaseModel, TypeAdapter, ValidationError
from pydantic.fields import FieldInfo

from pipeline.configuration.flag_table import Flag, convert, flag_table
from pipeline.configuration.origins import Kind
from pipeline.errors import dashed, nearest

FILE_FLAGS = {"preset": Kind.PRESET, "config": Kind.FILE}


def normalise(name: str) -> str:
    """Spell a flag's name with `_`."""
    return name.replace("-", "_")


class Names:
    """The names that the flags of a configuration go by.

    table: the flags.
    flag_of: every accepted name -> the flag's own.
    switches: names that add a word to a list or take it out -> a flag that is true or false.
    ignored, refused: DeepSpeed-Chat's flags -> the reason.
    removed: flags of earlier versions -> the reason.
    renamed: flags of earlier versions -> their values -> the values now of the flag that took their place.
    other_tools: a flag's name in TRL or LLaMA-Factory, or without its prefix -> the flags that it may mean here.
    positional: the flag of words before any flag.
    """

    def __init__(self, config_class: type[BaseModel]) -> None:
        self.table = flag_table(config_class)
        self.flag_of = {alias: flag.name for flag in self.table.values() for alias in (*flag.aliases, flag.name)}
        self.switches = {name: switch(name, flag) for flag in self.table.values() for name in flag.switches}
        self.flag_of |= {name: flag.name for flag in self.table.values() for name in flag.switches}
        self.ignored: dict[str, str] = {}
        self.refused: dict[str, str] = {}
        self.removed: dict[str, str] = {}
        self.renamed: dict[str, Mapping[str, str]] = {}
        self.other_tools: dict[str, list[str]] = {}
        self.positional = next((flag.name for flag in self.table.values() if flag.positional), "")
        for flag in self.table.values():
            self.ignored |= flag.ignored
            self.refused |= flag.refused
            self.renamed |= flag.renamed
            self.flag_of |= dict.fromkeys(flag.renamed, flag.name)
            self.removed |= {name: gone.reason for name, gone in flag.removed.items()}
            for name in flag.other_tools:
                self.other_tools.setdefault(name, []).append(flag.name)
            if flag.path[-1] not in self.flag_of:
                self.other_tools.setdefault(flag.path[-1], []).append(flag.name)

    def unknown(self, name: str, more: Iterable[str] = (), spell: Callable[[str], str] = str) -> str:
        """Return why `name` is no flag of this command, with the flag that was probably meant.

        Args:
            more: further names that are right.
            spell: how a flag's name is written.
        """
        if flags := self.other_tools.get(name):
            where = ", the words before any flag" if self.positional in flags else ""
            return f"unknown flag; here it is {' or '.join(map(spell, flags))}{where}"
        if name in self.removed:
            return self.removed[name]
        if name in self.refused:
            return f"a flag of other programs without a counterpart here: {self.refused[name]}"
        return f"unknown flag{nearest(name, (*self.flag_of, *more), spell)}"

    def renewed(self, name: str, value: object = True) -> tuple[str, str]:
        """Return the value now of a flag of an earlier version, "" for its default; and a note that says so."""
        flag, now = self.flag_of[name], self.renamed[name].get(str(value).lower(), str(value))
        note = f"{dashed(name)} {str(value).lower()} is {dashed(flag)} {now} now"
        return "" if now == self.table[flag].default else now, note

    def of_file(self, origin: str, values: Mapping[str, object]) -> tuple[dict[str, object], list[str], list[str]]:
        """Return (values by the flags' own names, error lines, notes) of a YAML file's section."""
        result: dict[str, object] = {}
        errors, notes = [], []
        for name, value in values.items():
            if name in self.renamed:
                value, note = self.renewed(name, value)
                notes.append(f"{origin}: {note}")
                if not value:
                    continue
            if name in self.ignored:
                notes.append(f"{origin}: {name}: {IGNORED}: {self.ignored[name]}")
            elif name not in self.flag_of:
                errors.append(f"{origin}: {name}: {self.unknown(name)}")
            elif (flag_name := name if name in self.switches else self.flag_of[name]) in result:
                errors.append(f"{origin}: {name}: {dashed(flag_name)} is given twice, under two names; give one")
            else:
                result[flag_name] = value
        return result, errors, notes


IGNORED = "a flag of DeepSpeed-Chat that changes nothing here"


def switch(name: str, flag: Flag) -> Flag:
    """Return the flag that changes a list by one word."""
    info = FieldInfo(annotation=bool, description=flag.info.description)
    return Flag(name=name, path=flag.path, group=flag.group, info=info, default=False)


def with_switches(
    layer: Mapping[str, Any], table: Mapping[str, Flag], values: Mapping[str, Any], errors: list[str], origin: str
) -> dict[str, Any]:
    """Return a layer of values with whole lists in place of the switches that change those of the layers below.

    Args:
        values: of the layers below. errors: gets a line for each switch that is neither true nor false.
    """
    folded = dict(layer)
    for flag in table.values():
        for name, word in flag.switches.items():
            if name not in layer:
                continue
            before = convert(folded.get(flag.name, values[flag.name]), flag)
            words = before if isinstance(before, list) else [before]
            try:
                added = [word] * TypeAdapter(bool).validate_python(folded.pop(name))
            except ValidationError as error:
                message = error.errors()[0]["msg"].replace("Input should be", "expected")
                errors.append(f"{dashed(name)}: got {layer[name]!r} ({origin}): {message}")
            else:
                folded[flag.name] = words if word in words and added else [w for w in words if w != word] + added
    return folded


def without_flag(argv: Iterable[str], name: str) -> list[str]:
    """Return `argv` without the flag `name` and its values."""
    others, skipping = [], False
    for word in argv:
        if word.startswith("--"):
            skipping = word[2:].partition("=")[0].replace("-", "_") == name
        if not skipping:
            others.append(word)
    return others
