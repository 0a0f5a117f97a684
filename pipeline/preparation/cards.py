"""The cheapest way to run a stage on a card.

It uses the fewest GPUs of one machine (1, 2, 4 or 8) on which the stage fits, if necessary with changes of flags that
train the same. If the stage fits on none of them, changes that affect training are tried too.
"""

import shlex
from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from pipeline.configuration.flags import flag_words
from pipeline.configuration.resolved import Resolved
from pipeline.configuration.stage import Stage
from pipeline.errors import InputError
from pipeline.files import GIB
from pipeline.launching.target import parse_target
from pipeline.planning.page import StagePlan, fits, seconds_text
from pipeline.planning.remedies import NOT_ENOUGH, Remedies
from pipeline.preparation.plans import choose, stage_planner


def cheapest(
    stage: Stage, given: Resolved, card: str, bases: Mapping[str, str], answered: dict[Any, Any]
) -> tuple[str, ...]:
    """Return GPUs, GiB of one, seconds of a step and changes of the cheapest way to run a stage on a card.

    answered: what makes a stage fit, by all that it depends on: cards with as much memory share it.
    """

    def cells(settings: Resolved, changes: str) -> tuple[str, ...]:
        plan = StagePlan.of(planner, settings, 0)
        seconds = sum(plan.seconds.values()) / plan.needs.steps_each
        return str(gpus), f"{plan.memory.reserved()[0] / GIB:.1f}", seconds_text(seconds) if seconds else "", changes

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
        answers = answered[key] = answered.get(key) or Remedies.of(planner, resolved)
        if answers.same.is_enough:
            return cells(answers.same.resolved, shlex.join(flag_words(answers.same.flags)))
        if another is None and answers.another and answers.another.is_enough:
            flags = shlex.join(flag_words(answers.another.flags))
            another = cells(answers.another.resolved, f"another training: {flags}")
    return another or ("-", "", "", refused)
