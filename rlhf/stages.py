"""List the stages that `rlhf train --step`, launch scripts, dry runs and exports can run."""

from pipeline.configuration.stage import Stage
from pipeline.errors import InputError
from step1_sft.stage import STAGE as SFT
from step2_reward.stage import STAGE as REWARD
from step3_dpo.stage import STAGE as DPO
from step3_ppo.stage import STAGE as PPO

STAGES: tuple[Stage, ...] = (
    SFT,
    REWARD,
    PPO,
    DPO,
)
# Sections of a YAML file: the one of `rlhf train`, then one for each stage.
SECTIONS = ("train", *(stage.section for stage in STAGES))
METHODS = tuple(method for stage in STAGES for method in stage.methods)
NUMBERS = tuple(sorted({stage.number for stage in STAGES}))


def stage_of(section: str) -> Stage:
    """Return the stage whose section has this name. Raises InputError."""
    for stage in STAGES:
        if stage.section == section:
            return stage
    raise InputError(f"{section}: not a stage; expected one of {', '.join(SECTIONS[1:])}")


def stage_of_step(word: str) -> Stage:
    """Return the stage that a launch script's STAGE names: a number, or the section of a stage. Raises InputError."""
    for stage in STAGES:
        if word in (str(stage.number), stage.section):
            return stage
    *numbers, last = map(str, NUMBERS)
    raise InputError(f"STAGE: got {repr(word) if word else 'none'}, expected {', '.join(numbers)} or {last}")


def stages_of_method(method: str) -> dict[int, Stage]:
    """Return number -> stage: of several stages with one number the one that has `method`, else the first.

    Raises:
        InputError: no stage has this method.
    """
    if method not in METHODS:
        raise InputError(f"--method: got {method!r}, expected one of {', '.join(METHODS)}")
    chosen: dict[int, Stage] = {}
    for stage in STAGES:
        if stage.number not in chosen or method in stage.methods:
            chosen[stage.number] = stage
    return chosen


def word_of(stage: Stage) -> str:
    """Return a stage's name in launch scripts: its number, or its section if its number names another stage."""
    return str(stage.number) if stage_of_step(str(stage.number)) is stage else stage.section
