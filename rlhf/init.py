"""Write a commented YAML file of flags for a model and data: `rlhf init --actor-model 1.3b --data-path my.jsonl`.

It holds what its user gives and, as comments, the flags that are usually changed; it asks nothing.
"""

import json
import shlex
import sys
import textwrap
from collections.abc import Collection, Iterator, Mapping
from pathlib import Path
from typing import Any

from pipeline.configuration.flag_table import AUTO, Flag, flag_table, flat_items
from pipeline.configuration.flags import scan, stage_arguments
from pipeline.configuration.names import Names
from pipeline.console import HELP, HELP_ALL
from pipeline.errors import InputError
from pipeline.files import write_text
from pipeline.run.entry import run_command
from rlhf.stages import SECTIONS
from rlhf.train_config import USUAL, TrainConfig, split_common, split_overrides
from rlhf.train_plan import Plan, PlannedStage, make_plan

DEFAULT_FILE = "rlhf.yaml"
SUFFIXES = (".yaml", ".yml")
WIDTH = 100  # columns of the file
# Usual flags that are no settings of a file, and those that `rlhf train` derives from its own.
NOT_IN_FILE = {"dry_run", "resume", "output_dir"}
USAGE = """\
usage: {prog} [FILE] [--FLAG VALUE ...]
Write a commented YAML file (rlhf.yaml) for a model and data; it asks nothing.

  {prog}
  {prog} --actor-model qwen2.5-1.5b --data-path my.jsonl
  {prog} mine.yaml --actor-model 1.3b --data-path my.jsonl --sft.learning_rate 2e-5

Flags are those of {train}, whose --help lists them."""


def main(argv: list[str] | None = None, *, prog: str = "rlhf init") -> int:
    """Run the command line; returns the exit code. `prog` is how a user calls this program, for its messages."""
    return run_command(lambda: run(stage_arguments(argv), prog))


def run(argv: list[str], prog: str) -> None:
    """Check the flags as `rlhf train` does, and write the file. Raises InputError; a file that exists stays."""
    train = prog.replace("init", "train")
    if not {*HELP, *HELP_ALL}.isdisjoint(argv):
        print(USAGE.format(prog=prog, train=train))
        return
    name, words = file_and_flags(argv)
    if not name.endswith(SUFFIXES):
        raise InputError(f"{name}: wanted a name that ends in {' or '.join(SUFFIXES)}")
    if Path(name).exists():
        raise InputError(f"{name} exists and stays as it is; name another file: {prog} other.yaml ...")
    if any(flag == "config" for flag, _ in scan(words)):
        raise InputError("--config: a file of flags is what this writes; give the flags themselves")
    plan = make_plan(words, prog=train)
    command = f"{train} --config {shlex.quote(name)}"
    write_text(Path(name), "\n".join([*document(plan, words, command), ""]))
    print(f"written: {name}")
    print(f"next: {command} --dry-run")


def file_and_flags(argv: list[str]) -> tuple[str, list[str]]:
    """Return the name of the file, the first word or a .yaml behind the values of a flag, and the other words."""
    if argv and not argv[0].startswith("--"):
        return argv[0], argv[1:]
    if len(argv) > 2 and argv[-1].endswith(SUFFIXES) and not argv[-2].startswith("--"):
        return argv[-1], argv[:-1]
    return DEFAULT_FILE, argv


def document(plan: Plan, words: list[str], command: str) -> Iterator[str]:
    """Yield the lines of the file: the section of `rlhf train`, then one of each stage."""
    yield f"# Checked by `{command} --dry-run`, run by `{command}`."
    yield "# A line without # holds; a flag behind # has the value that it shows: take the # away to change it."
    yield f"# All other flags have their defaults: {command.partition(' --config')[0]} --help-all"
    own, overrides = split_overrides(words, SECTIONS[1:])
    _, common = split_common(own)
    values, table = dict(flat_items(plan.config)), flag_table(TrainConfig)
    names = [name for name in USUAL if name in table and name not in NOT_IN_FILE - {"output_dir"}]
    yield from section_lines("train", table, usual=names, values=values, given=plan.given | {"actor_model"}, origins={})
    for planned in plan.stages.values():
        section = planned.stage.section
        known = Names(planned.stage.config).known
        typed = [name for flag in common for name, _ in scan(flag)] + [name for name, _ in scan(overrides[section])]
        yield from stage_lines(planned, {known[name] for name in typed if name in known})


def stage_lines(planned: PlannedStage, given: Collection[str]) -> Iterator[str]:
    """Yield the section of a stage; `given`: its flags that the user gives."""
    table, values = flag_table(planned.stage.config), dict(flat_items(planned.resolved.config))
    chained = {planned.stage.path_flag(prefix) for prefix in planned.stage.starts_given(values)} | NOT_IN_FILE
    usual = [name for name in planned.stage.config.usual if name not in chained]
    yield f"\n# {planned.stage.config.__doc__}"
    origins = {name: origin for name, origin in planned.resolved.origins.items() if origin.endswith(SUFFIXES)}
    yield from section_lines(planned.stage.section, table, usual=usual, values=values, given=given, origins=origins)


def section_lines(
    section: str,
    table: Mapping[str, Flag],
    *,
    usual: Collection[str],
    values: Mapping[str, Any],
    given: Collection[str],
    origins: Mapping[str, str],
) -> Iterator[str]:
    """Yield a section: usual and given flags with their meaning; those that are not given as comments.

    origins: flag -> the preset that its value comes from.
    """
    yield f"{section}:"
    for name in [*usual, *(name for name in table if name in given and name not in usual)]:
        origin = f" (preset {Path(origins[name]).name})" if name in origins else ""
        yield from comment(f"{table[name].meaning}{origin}")
        value = json.dumps(AUTO if table[name].auto and name not in given else values[name], ensure_ascii=False)
        yield f"  {'' if name in given else '# '}{name}: {value}"


def comment(text: str) -> list[str]:
    return textwrap.wrap(text, WIDTH, initial_indent="  # ", subsequent_indent="  # ", break_on_hyphens=False)


if __name__ == "__main__":
    sys.exit(main(prog="python -m rlhf.init"))
