"""The cheapest way to run stages on each of many cards, as a table: `rlhf plan --actor-model qwen3-8b --step 1`.

The cheapest way is on the fewest GPUs of one machine, of 1, 2, 4 and 8, on which a stage fits: as it is, or with
changes of flags that train the same. Where it fits on none of them, it is with changes that train something else.
"""

import shlex
import sys
from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from pipeline.configuration.flags import Resolved, flag_words, scan, stage_arguments
from pipeline.configuration.names import without_flag
from pipeline.configuration.stage import Stage
from pipeline.console import HELP, HELP_ALL
from pipeline.errors import InputError, show
from pipeline.files import GIB
from pipeline.launching.target import DEVICES, parse_target
from pipeline.run.entry import run_command
from rlhf.train_plan import make_plan

USAGE = """\
usage: {prog} [--cards CARD ...] [--FLAG VALUE ...]
For each card the fewest of 1, 2, 4 and 8 GPUs on which a stage fits.

  --cards  names or GB of memory (RTX4090 L40S 24GB); all with a data sheet
Other flags are those of rlhf train: --actor-model qwen3-8b --step 3"""
ROW = "{:<15}{:<8}{:>4}{:>7}{:>10}  {}"


def main(argv: list[str] | None = None, *, prog: str = "rlhf plan") -> int:
    """Print the table; returns the exit code. `prog` is how a user calls this program, for its messages."""
    return run_command(lambda: run(stage_arguments(argv), prog))


def run(words: list[str], prog: str) -> None:
    """Print a line for each card and stage. Raises InputError, EnvironmentFault: wrong flags, unreadable models."""
    if not {*HELP, *HELP_ALL}.isdisjoint(words):
        show(USAGE.format(prog=prog))
        return
    given = dict(scan(words))
    if "target" in given:
        raise InputError("--target: found with the plan of many cards; give --cards")
    cards = [parse_target(card).name for card in given.get("cards") or DEVICES]
    plan = make_plan([*without_flag(words, "cards"), "--target", cards[0]], prog=prog)
    bases = dict[str, str]()  # as if the stages before had run
    for planned in plan.stages.values():
        bases[str(planned.model_dir)] = bases.get(start := planned.base, start)
    answered = dict[Any, Any]()
    show(ROW.format("card", "stage", "GPUs", "GiB", "a step", "changes"))
    for card in dict.fromkeys(cards):
        for planned in plan.chosen:
            cells = cheapest(planned.stage, planned.resolved, card, bases, answered)
            show(ROW.format(card, planned.stage.section, *cells))


def cheapest(
    stage: Stage, given: Resolved, card: str, bases: Mapping[str, str], answered: dict[Any, Any]
) -> tuple[str, ...]:
    """Return GPUs, GiB of one, seconds of a step and changes of the cheapest way to run a stage on a card.

    answered: what makes a stage fit, by all that it depends on: cards with as much memory share it.
    """
    from pipeline.planning.ladder import NOT_ENOUGH, Answers
    from pipeline.planning.page import StagePlan, fits, seconds_text
    from pipeline.preparation.plans import choose, stage_planner

    def cells(settings: Resolved, changes: str) -> tuple[str, ...]:
        found = StagePlan.of(planner, settings, 0)
        seconds = sum(found.seconds.values()) / found.needs.steps_each
        return str(gpus), f"{found.memory.reserved()[0] / GIB:.1f}", seconds_text(seconds) if seconds else "", changes

    refused, another = NOT_ENOUGH.partition(":")[0], None
    for gpus in (1, 2, 4, 8):
        target = parse_target(f"{gpus}x{card}")
        run = given.config.run.model_copy(update={"target": f"{gpus}x{card}"})
        config = given.config.model_copy(update={"run": run})
        try:
            planner, resolved = stage_planner(stage, replace(given, config=config), target, bases)
            resolved = choose(stage, planner, resolved).of(resolved, gpus)
        except InputError as error:  # what so many ranks cannot share
            refused = str(error).partition("\n")[0]
            continue
        if fits(planner.memory(resolved), target):
            return cells(resolved, "as it is")
        key = stage, gpus, target.memory, target.dtype
        answers = answered[key] = answered.get(key) or Answers.of(planner, resolved)
        if answers.same.is_enough:
            return cells(answers.same.resolved, shlex.join(flag_words(answers.same.flags)))
        if another is None and answers.another and answers.another.is_enough:
            flags = shlex.join(flag_words(answers.another.flags))
            another = cells(answers.another.resolved, f"another training: {flags}")
    return another or ("-", "", "", refused)


if __name__ == "__main__":
    sys.exit(main(prog="python -m rlhf.plan"))
