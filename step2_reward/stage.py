"""The `Stage` of the reward model, stage 2."""

from collections.abc import Callable, Mapping
from functools import partial
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
    """Return the start model with its checks.

    Args:
        base_of_output: folder of an earlier stage's output -> the model which that stage starts from.
    """
    from pipeline.engine.start_models import decoder_start
    from pipeline.models.paths import check_model_path
    from pipeline.models.reward_model import check_head

    head = partial(check_head, new_head=True, quantization=config.model.quantization)
    length = config.data.max_seq_len
    return [decoder_start(config, base_of_output, check_model_path, length=length, more=[head])]


def needs(config: RewardConfig, base_of_output: Mapping[str, str], dtype: str, ranks: int) -> "StageNeeds":
    """Return what a rank needs, for the planner."""
    from pipeline.planning.needs import supervised_needs

    length = config.data.max_seq_len
    what = f"pairs (at most {length} tokens a sequence)"
    return supervised_needs(config, base_of_output, ranks, length=length, what=what, sequences=2, has_values=True)


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
    starts=lambda _: {"": Start("reward")},
    reached={"eval_accuracy": 1},
    loop=loop,
    start_models=start_models,
    needs=needs,
    export=export,
)
