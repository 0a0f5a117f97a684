"""Write the help text of a stage and the tables of docs/configuration.md.

Both are made from the configuration models; `make reference` runs docs/make_configuration.py, which writes the page.
"""

import itertools
import textwrap
from collections.abc import Iterator

from pydantic import BaseModel

from pipeline.configuration.flag_table import Flag, flag_table

WIDTH = 100


def help_text(config_class: type[BaseModel], prog: str) -> str:
    """Return the help text: all flags of a stage by group, with type, meaning and default."""
    lines = [f"usage: {prog} [--preset FILE] [--config FILE] [--FLAG VALUE ...]", ""]
    lines += [(config_class.__doc__ or "").strip(), ""]
    lines += ["--preset FILE and --config FILE are YAML files of flags. Authority rises from the built-in default over"]
    lines += ["the preset and the file to the command line. Both - and _ work in names.", ""]
    for group, flags in itertools.groupby(flag_table(config_class).values(), key=lambda flag: flag.group):
        lines += [f"{group}:", *itertools.chain.from_iterable(map(help_lines, flags)), ""]
    return "\n".join(lines)


def help_lines(flag: Flag) -> Iterator[str]:
    """Yield `--name TYPE` and, indented below it, meaning and default."""
    yield f"  --{flag.name} {flag.type_name}"
    text = f"{flag.meaning} [{flag.shown_default}]"
    yield from textwrap.wrap(text, WIDTH, initial_indent=" " * 6, subsequent_indent=" " * 6)


def reference(config_class: type[BaseModel]) -> str:
    """Return a Markdown table for each group of flags: flag, type, default, meaning."""
    blocks = []
    for group, flags in itertools.groupby(flag_table(config_class).values(), key=lambda flag: flag.group):
        rows = ["| flag | type | default | meaning |", "|---|---|---|---|", *map(reference_row, flags)]
        blocks.append(f"### {group}\n\n" + "\n".join(rows) + "\n")
    return "\n".join(blocks)


def reference_row(flag: Flag) -> str:
    cells = (f"`--{flag.name}`", f"`{flag.type_name}`", f"`{flag.shown_default}`", flag.meaning)
    return "| " + " | ".join(cell.replace("|", "\\|") for cell in cells) + " |"
