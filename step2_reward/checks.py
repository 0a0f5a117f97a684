"""Checks of stage 2 before any row or weight is read: its start model, and the flags that have to fit it."""

from collections.abc import Mapping
from functools import partial

from pipeline.engine.start_models import StartModel, decoder_start
from pipeline.models.paths import check_model_path
from pipeline.models.reward_model import check_head
from step2_reward.config import RewardConfig


def start_models(config: RewardConfig, base_of_output: Mapping[str, str]) -> list[StartModel]:
    """Return the start model with its checks.

    Args:
        base_of_output: folder of an earlier stage's output -> the model which that stage starts from.
    """
    head = partial(check_head, new_head=True, quantization=config.model.quantization)
    length = config.data.max_seq_len
    return [decoder_start(config, base_of_output, check_model_path, length=length, more=[head])]
