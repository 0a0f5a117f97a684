"""Write the help of a command from the configuration models: on one screen, in full, on a flag, on a topic."""

import itertools
import re
import textwrap
from collections.abc import Iterator, Mapping, Sequence
from difflib import get_close_matches
from pathlib import Path

from pydantic import BaseModel

from pipeline.configuration.flag_table import Flag, flag_table
from pipeline.configuration.groups import Group
from pipeline.configuration.names import normalise
from pipeline.configuration.origins import COMMAND_LINE
from pipeline.console import HELP, HELP_ALL, WIDTH, wrapped
from pipeline.errors import InputError, dashed

FILES_OF_FLAGS = """--preset FILE and --config FILE are YAML files of flags. The command line
overrides --config, which overrides --preset, which overrides the defaults.
Flags may be written with - or _."""
DOCS = Path(__file__).resolve().parents[2] / "docs"  # of a checkout
ALL_FLAGS = "docs/reference/flags.md, which `make site` makes"  # the page of a flag that no other page names
SHOWN_PAGES = ("guides", "learn", "trouble", "start", "why")  # folders with pages that explain flags, best first


def help_text(config_class: type[Group], prog: str, argv: Sequence[str] = ()) -> str:
    """Return the help of a stage or a command that a command line asks for.

    It is on a flag or a topic, in full, or on one screen where the command names its usual flags.

    Raises:
        InputError: see `topic_help`.
    """
    usual = getattr(config_class, "usual", ())
    if topic := topic_of(argv):
        return topic_help(topic, {prog: config_class})
    if not usual or not set(HELP_ALL).isdisjoint(argv):
        return full_help(config_class, prog)
    return first_screen(config_class, prog, [flag_table(config_class)[name] for name in usual])


def topic_of(argv: Sequence[str]) -> str:
    """Return the word behind the one that asks for help: a flag or a topic; "" for none."""
    return next((word for before, word in itertools.pairwise(argv) if before in HELP), "")


def first_screen(config_class: type[BaseModel], prog: str, flags: Sequence[Flag], more: Sequence[str] = ()) -> str:
    """Return help on one screen, at most 25 lines of 80 columns: purpose, three examples, the ten usual flags.

    Args:
        flags: the usual flags, in their order.
        more: lines on what else may be given.
    """
    lines = [f"usage: {prog} [--FLAG VALUE ...]", *textwrap.wrap(purpose(config_class), WIDTH), ""]
    lines += [f"  {prog} {words}" for words in getattr(config_class, "examples", ())]
    width = max(len(flag.shown) for flag in flags) + 4
    for flag in flags:
        text = f"{flag.shown:<{width - 2}}{short_meaning(flag)} [{flag.shown_default}]"
        lines += textwrap.wrap(text, WIDTH, initial_indent="  ", subsequent_indent=" " * width)
    lines += [*more, f"All flags: {prog} --help-all; a flag or topic: --help lora"]
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
    yield f"  {flag.shown} {flag.type_name}"
    text = f"{flag.meaning} [{flag.shown_default}]"
    yield from textwrap.wrap(text, WIDTH, initial_indent=" " * 6, subsequent_indent=" " * 6)


# --- help on a flag or a topic ---


def topic_help(topic: str, readers: Mapping[str, type[Group]]) -> str:
    """Return the help on a flag by any of its names, and on all flags that have the word in name, group or meaning.

    Args:
        readers: what reads flags, a command or the section of a stage -> its configuration.

    Raises:
        InputError: it is neither; with the nearest names.
    """
    section, _, name = normalise(topic.lstrip("-")).rpartition(".")
    tables = {reader: flag_table(config) for reader, config in readers.items() if section in ("", reader)}
    exact: dict[tuple[str, str], dict[str, Flag]] = {}  # name and default -> reader -> the flag as that has it
    about: dict[str, Flag] = {}  # a flag's name without the role of its model -> the first such flag
    for reader, flag in ((reader, flag) for reader, table in tables.items() for flag in table.values()):
        if name in (flag.name, flag.path[-1], *flag.aliases, *flag.switches, *flag.renamed, *flag.other_tools):
            exact.setdefault((flag.name, flag.shown_default), {})[reader] = flag
        elif is_about(flag, name):
            about.setdefault(flag.path[-1], flag)
    if not exact and not about:
        near = ", ".join(map(dashed, get_close_matches(name, set().union(*tables.values()))))
        raise InputError(f"{topic}: neither a flag nor a topic; {f'nearest: {near}' if near else '--help-all has all'}")
    lines = [line for flags in exact.values() for line in (*sheet(flags, readers), "")]
    lines += [f"Flags about {name.replace('_', '-')}:"] * bool(about)
    lines += [line for flag in about.values() for line in help_lines(flag)]
    lines += [] if exact else ["", f"page: {page_of([name, *about])}"]
    return "\n".join(lines).rstrip()


def is_about(flag: Flag, word: str) -> bool:
    """Return True if a flag's name, group, condition or meaning has a word in any form: log, logs, logged, logging."""
    stem = re.escape(re.sub("(g?ing|ged|ed|s)$", "", word) if len(word) > 3 else word).replace("_", "[_-]")
    text = f"{flag.name} {flag.group} {normalise(flag.read_if + flag.needs)} {flag.info.description}".lower()
    return re.search(rf"(?<![a-z])(?<![a-z]-){stem}(g?ing|ged|ed|s)?(?![a-z-])", text) is not None


def sheet(flags: Mapping[str, Flag], readers: Mapping[str, type[Group]]) -> Iterator[str]:
    """Yield name and type of a flag, and a line each on meaning, default, what sets it, what reads it, and its page.

    Args:
        flags: the flag as each of its readers has it.
    """
    flag = next(iter(flags.values()))
    yield f"{flag.shown} {flag.type_name}"
    for title, text in (
        ("meaning", flag.meaning),
        ("default", flag.shown_default),
        ("set by", "; ".join(filter(None, setters(flag, [readers[reader] for reader in flags])))),
        ("read by", ", ".join(flags)),
        ("page", page_of([flag.name, *flag.aliases, flag.path[-1]])),
    ):
        yield textwrap.fill(text, WIDTH, initial_indent=f"  {title:<9}", subsequent_indent=" " * 11)


def setters(flag: Flag, configs: Sequence[type[Group]]) -> Iterator[str]:
    """Yield what sets a flag, from the weakest on; "" for what does not."""
    tables = {config: flag_table(config) for config in configs}
    methods = [(of, name) for of, table in tables.items() if "method" in table for name in table["method"].choices]
    layers = [(method, config.with_method([(COMMAND_LINE, {"method": method})])[0][1]) for config, method in methods]
    values = [f"{method} {layer[flag.name]}" for method, layer in layers if flag.name in layer.keys() - {"method"}]
    yield f"the method ({', '.join(values)})" if values else ""
    yield "the plan, on GPUs" if flag.auto else ""
    yield f"other flags ({flag.auto_is})" if flag.auto_is else ""
    yield f"{dashed(flag.instead_of)}, where that is given" if flag.instead_of else ""
    yield f"--deepspeed-config ({', '.join(flag.deepspeed)})" if flag.deepspeed else ""
    yield "--preset, --config, the command line"


def page_of(names: Sequence[str]) -> str:
    """Return the page of docs/ that explains a topic or a flag, whose names these are.

    It is a page that has the first name in its own, else the one that names them most often. Among equal ones, a page
    with a list item that begins with such a flag wins, as under "The settings that people change".
    """
    pages = [page for folder in SHOWN_PAGES for page in sorted((DOCS / folder).glob("*.md"))]
    spelled = rf"(?:{'|'.join(re.sub('[_-]', '[_-]', name.lstrip('-')) for name in names)})\b(?![_-])"
    ranks: list[tuple[bool, int, bool]] = []
    for page in pages:
        text = page.read_text(encoding="utf-8")
        is_item = re.search(rf"^- `--(?:\w+\.)?{spelled}", text, re.MULTILINE) is not None
        ranks.append((names[0] in page.stem.split("_"), len(re.findall(f"[-.`]{spelled}", text)), is_item))
    best = max(ranks, default=(False, 0, False))
    return f"docs/{pages[ranks.index(best)].relative_to(DOCS)}" if any(best) else ALL_FLAGS
