"""Write the help of a command, on one screen and in full, from the configuration models."""

import itertools
import re
import textwrap
from collections.abc import Iterator, Mapping, Sequence

from pydantic import BaseModel

from pipeline.configuration.flag_table import Flag, flag_table
from pipeline.console import WIDTH, wrapped

FILES_OF_FLAGS = """--preset FILE and --config FILE are YAML files of flags. Authority rises from
the built-in default over the preset and the file to the command line. Both -
and _ work in names."""


def help_text(config_class: type[BaseModel], prog: str, *, is_full: bool = False) -> str:
    """Return the help of a stage or a command: on one screen, or in full if asked or if it names no usual flags."""
    usual = getattr(config_class, "usual", ())
    if is_full or not usual:
        return full_help(config_class, prog)
    table = flag_table(config_class)
    return first_screen(config_class, prog, {f"--{name}": table[name] for name in usual})


def first_screen(config_class: type[BaseModel], prog: str, flags: Mapping[str, Flag], more: Sequence[str] = ()) -> str:
    """Return help on one screen, at most 25 lines of 80 columns: purpose, three examples, the ten usual flags.

    Args:
        flags: flags as they are typed, `--name`, in their order.
        more: lines on what else may be given.
    """
    lines = [f"usage: {prog} [--FLAG VALUE ...]", *textwrap.wrap(purpose(config_class), WIDTH), ""]
    lines += [f"  {prog} {words}" for words in getattr(config_class, "examples", ())]
    width = max(map(len, flags)) + 4
    for typed, flag in flags.items():
        text = f"{typed:<{width - 2}}{short_meaning(flag)} [{flag.shown_default}]"
        lines += textwrap.wrap(text, WIDTH, initial_indent="  ", subsequent_indent=" " * width)
    lines += [*more, f"All flags, in groups: {prog} --help-all"]
    return "\n".join(lines)


def purpose(config_class: type[BaseModel]) -> str:
    return (config_class.__doc__ or "").strip()


def short_meaning(flag: Flag) -> str:
    """Return what a flag means up to the first semicolon, without remarks in brackets, and what 0 and empty mean."""
    first, *more = re.sub(r" \([^()]*\)", "", flag.info.description or "").split("; ")
    return "; ".join([first, *(text.partition(". ")[0] for text in more if re.match("(0|-1|empty|none):", text))])


def full_help(config_class: type[BaseModel], prog: str) -> str:
    """Return all flags of a stage or a command by group, with type, meaning and default."""
    lines = [wrapped(f"usage: {prog} [--preset FILE] [--config FILE] [--FLAG VALUE ...]"), ""]
    lines += [*textwrap.wrap(purpose(config_class), WIDTH), "", FILES_OF_FLAGS, ""]
    return "\n".join([*lines, *flag_lines(config_class)])


def flag_lines(config_class: type[BaseModel]) -> Iterator[str]:
    """Yield the lines of all flags, group by group."""
    for group, flags in itertools.groupby(flag_table(config_class).values(), key=lambda flag: flag.group):
        yield from (f"{group}:", *itertools.chain.from_iterable(map(help_lines, flags)), "")


def help_lines(flag: Flag) -> Iterator[str]:
    """Yield `--name TYPE` and, indented below it, meaning and default."""
    yield f"  --{flag.name} {flag.type_name}"
    text = f"{flag.meaning} [{flag.shown_default}]"
    yield from textwrap.wrap(text, WIDTH, initial_indent=" " * 6, subsequent_indent=" " * 6)
