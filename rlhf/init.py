"""Write a commented YAML file of flags for a model and data: `rlhf init --actor-model 1.3b --data-path my.jsonl`.

The file has the flags that the user gives and, as comments, those that are often changed.
"""

import json
import shlex
import textwrap
from collections.abc import Collection, Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from pipeline.configuration.flag_table import AUTO, flag_table, flat_items
from pipeline.configuration.flags import scan
from pipeline.configuration.groups import Group
from pipeline.configuration.names import Names
from pipeline.configuration.origins import DEFAULT, Kind, Origins
from pipeline.console import HELP, HELP_ALL
from pipeline.errors import InputError, show
from pipeline.files import refused_by_disk, write_text
from pipeline.run.entry import command
from rlhf.stages import SECTIONS
from rlhf.train_config import USUAL, split_common, split_overrides

if TYPE_CHECKING:
    from rlhf.train_plan import Plan

DEFAULT_FILE = "rlhf.yaml"
SUFFIXES = (".yaml", ".yml")
WIDTH = 100  # columns of the file
# Flags of the first help screen that belong to a command, not to a file.
NOT_IN_FILE = {"dry_run", "resume"}
NOTE = "  # "
USAGE = """\
usage: {prog} [FILE] [--FLAG VALUE ...]
Write a commented YAML file (rlhf.yaml) for a model and data, without questions.

  {prog}
  {prog} --actor-model qwen2.5-1.5b --data-path my.jsonl
  {prog} mine.yaml --actor-model 1.3b --sft.learning-rate 2e-5

It takes the flags of {train}: {train} --help-all."""


def run(argv: list[str], prog: str) -> None:
    """Check the flags as `rlhf train` does, and write the file. Raises InputError if the file exists."""
    train = prog.replace("init", "train")
    if not {*HELP, *HELP_ALL}.isdisjoint(argv):
        show(USAGE.format(prog=prog, train=train))
        return
    name, flags = file_and_flags(argv)
    if not name.endswith(SUFFIXES):
        raise InputError(f"{name}: expected a name that ends in {' or '.join(SUFFIXES)}")
    if Path(name).exists():
        raise InputError(f"{name} exists and is not overwritten; name another file: {prog} other.yaml ...")
    if any(flag == "config" for flag, _ in scan(flags)):
        raise InputError("--config: this command writes such a file; give the flags themselves")
    from rlhf.train_plan import make_plan

    plan = make_plan(flags, prog=train)
    train_command = f"{train} --config {shlex.quote(name)}"
    text = "\n".join([*document(plan, flags, train_command), ""])
    with refused_by_disk(Path(name)):
        write_text(Path(name), text)
    show(f"written: {name}")
    show(f"next: {train_command} --dry-run")


def file_and_flags(argv: list[str]) -> tuple[str, list[str]]:
    """Return the file's name (the first word, or a .yaml after the values of a flag) and the flags."""
    if argv and not argv[0].startswith("--"):
        return argv[0], argv[1:]
    if len(argv) > 2 and argv[-1].endswith(SUFFIXES) and not argv[-2].startswith("--"):
        return argv[-1], argv[:-1]
    return DEFAULT_FILE, argv


def document(plan: "Plan", flags: list[str], train_command: str) -> Iterator[str]:
    """Yield the lines of the file: the section of `rlhf train`, then one of each stage."""
    yield f"# Checked by `{train_command} --dry-run`, run by `{train_command}`."
    yield "# Lines without # are set. A flag after # has the value shown; remove the # to change it."
    yield f"# Other flags have their defaults: {train_command.partition(' --config')[0]} --help-all"
    yield from section_lines("train", plan.config, USUAL, plan.given | {"actor_model"}, {})
    unsectioned, overrides = split_overrides(flags, SECTIONS[1:])
    common = [word for flag in split_common(unsectioned)[1] for word in flag]
    for planned in plan.stages.values():
        stage, resolved = planned.stage, planned.resolved
        names = Names(stage.config).flag_of
        given_names = {names[name] for name, _ in scan([*common, *overrides[stage.section]]) if name in names}
        chained = {stage.path_flag(prefix) for prefix in stage.starts(resolved.values)}
        usual = [name for name in stage.config.usual if name not in chained | {"output_dir"}]
        yield f"\n# {stage.config.__doc__}"
        yield from section_lines(stage.section, resolved.config, usual, given_names, resolved.origins)


def section_lines(
    section: str, config: Group, usual: Sequence[str], given: Collection[str], origins: Origins
) -> Iterator[str]:
    """Yield a section: the usual and the given flags with meaning; usual flags that are not given are comments."""
    table, values = flag_table(type(config)), dict(flat_items(config))
    yield f"{section}:"
    for name in dict.fromkeys(name for name in (*usual, *given) if name in table and name not in NOT_IN_FILE):
        given_by = origins.get(name, DEFAULT)
        origin = f" (preset {Path(given_by.source).name})" if given_by.kind is Kind.PRESET else ""
        yield from textwrap.wrap(f"{table[name].meaning}{origin}", WIDTH, initial_indent=NOTE, subsequent_indent=NOTE)
        is_auto = table[name].takes_auto and not given_by.is_given and name not in given
        value = json.dumps(AUTO if is_auto else values[name], ensure_ascii=False)
        yield f"  {'' if name in given else '# '}{name}: {value}"


main = command(run, "rlhf init")
