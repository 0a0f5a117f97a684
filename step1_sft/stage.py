"""The `Stage` of supervised fine-tuning, stage 1."""

from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING

from pipeline.configuration.stage import Stage, Start
from step1_sft.config import CARD, SFTConfig

if TYPE_CHECKING:
    from pipeline.checkpoints.offline import OfflineCheckpoint
    from pipeline.engine.start_models import StartModel
    from pipeline.planning.needs import StageNeeds
    from pipeline.run.run import Run


def loop() -> "Callable[[Run, SFTConfig], None]":
    """Import and return the loop of the stage."""
    from step1_sft.training import train

    return train


def start_models(config: SFTConfig, base_of_output: Mapping[str, str]) -> "list[StartModel]":
    """Return the start model with its checks."""
    from step1_sft.checks import start_models

    return start_models(config, base_of_output)


def needs(config: SFTConfig, base_of_output: Mapping[str, str], dtype: str, ranks: int) -> "StageNeeds":
    """Return what a rank needs, for the planner."""
    from pipeline.planning.needs import supervised_needs

    length = config.data.max_seq_len
    return supervised_needs(config, base_of_output, ranks, length=length, what=f"rows of {length} tokens")


def export(checkpoint: "OfflineCheckpoint") -> None:
    """Write the model folder of a checkpoint."""
    checkpoint.save_language_model(CARD)


STAGE = Stage(
    number=1,
    section="sft",
    title="supervised fine-tuning",
    package="step1_sft",
    config=SFTConfig,
    starts=lambda _: {"": Start("actor")},
    reached={"eval_perplexity": -1},
    loop=loop,
    start_models=start_models,
    needs=needs,
    export=export,
)
