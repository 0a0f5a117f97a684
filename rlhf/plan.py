"""Print the fewest GPUs of each card on which stages fit: `rlhf plan --actor-model qwen3-8b --step 1`."""

import os
import sys
from typing import Any

from pipeline.configuration.flags import scan
from pipeline.configuration.names import without_flag
from pipeline.console import HELP, HELP_ALL
from pipeline.errors import InputError, show
from pipeline.launching.machine import count_gpus
from pipeline.launching.target import DEVICES, parse_target
from pipeline.run.entry import command
from rlhf.train_plan import make_plan

USAGE = """\
usage: {prog} [--cards CARD ...] [--FLAG VALUE ...]
List for each card the fewest GPUs (1, 2, 4 or 8) on which a stage fits.

  --cards  names or GB of memory (RTX4090 L40S 24GB) [all known cards]
Other flags are those of rlhf train: --actor-model qwen3-8b --step 3"""
ROW = "{:<15}{:<8}{:>4}{:>7}{:>10}  {}"


def run(argv: list[str], prog: str) -> None:
    """Print a line for each card and stage. Raises InputError, EnvironmentFault: wrong flags, unreadable models."""
    if not {*HELP, *HELP_ALL}.isdisjoint(argv):
        show(USAGE.format(prog=prog))
        return
    given = dict(scan(argv))
    if "target" in given:
        raise InputError("--target: got it with a plan of many cards; give --cards")
    cards = [parse_target(card).name for card in given.get("cards") or DEVICES]
    plan = make_plan([*without_flag(argv, "cards"), "--target", cards[0]], prog=prog)
    bases = dict[str, str]()  # model folder of a stage -> its start, for later stages
    for planned in plan.stages.values():
        bases[str(planned.model_dir)] = bases.get(start := planned.base, start)
    if not count_gpus():
        os.environ.setdefault("DS_ACCELERATOR", "cpu")  # else DeepSpeed logs that there is none
    from pipeline.preparation.cards import cheapest

    cached = dict[Any, Any]()
    show(ROW.format("card", "stage", "GPUs", "GiB", "a step", "changes"))
    for card in dict.fromkeys(cards):
        for planned in plan.chosen:
            cells = cheapest(planned.stage, planned.resolved, card, bases, cached)
            show(ROW.format(card, planned.stage.section, *cells))


main = command(run, "rlhf plan")

if __name__ == "__main__":
    sys.exit(main(prog="python -m rlhf.plan"))
