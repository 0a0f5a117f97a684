"""Stage 2 as an object: a reward model from pairs of responses."""

from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING

from pipeline.configuration.stage import Stage, Start
from step2_reward.config import RewardConfig

if TYPE_CHECKING:
    from pipeline.checkpoints.offline import OfflineCheckpoint
    from pipeline.engine.start_models import StartModel
    from pipeline.planning.needs import StageNeeds
    from pipeline.run.run import Run


def loop() -> "Callable[[Run, RewardConfig], None]":
    """Import and return the loop of the stage."""
    from step2_reward.training import train

    return train


def start_models(config: RewardConfig, base_of_output: Mapping[str, str]) -> "list[StartModel]":
    """Return the start model with its checks."""
    from step2_reward.checks import start_models

    return start_models(config, base_of_output)


def needs(config: RewardConfig, base_of_output: Mapping[str, str], dtype: str, ranks: int) -> "StageNeeds":
    """Return what a rank needs, for the planner."""
    from step2_reward.needs import needs

    return needs(config, base_of_output, dtype, ranks)


def export(checkpoint: "OfflineCheckpoint") -> None:
    """Write the model folder of a checkpoint."""
    from step2_reward.training import State, save_module

    config: RewardConfig = checkpoint.run.resolved.config
    module = checkpoint.value_model("model", config.model, new_head=True)
    save_module(checkpoint.run, module, checkpoint.tokenizer(config.model), State(**checkpoint.state))


STAGE = Stage(
    number=2,
    section="reward",
    title="reward model",
    package="step2_reward",
    config=RewardConfig,
    rows="pairs",
    shares=(1,),
    starts={"": Start("reward")},
    reached={"eval_accuracy": 1},
    makes_chat_model=False,
    loop=loop,
    start_models=start_models,
    needs=needs,
    export=export,
)
