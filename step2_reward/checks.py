"""Checks of stage 2 before any row or weight is read: its start model, and the flags that have to fit it."""

from collections.abc import Mapping
from functools import partial

from pipeline.engine.start_models import StartModel, check_settings, package_checks
from pipeline.models.paths import check_model_path
from pipeline.models.reward_model import check_head
from pipeline.models.source import ModelSource, check_decoder, check_positions
from step2_reward.config import RewardConfig


def start_models(config: RewardConfig, base_of_output: Mapping[str, str]) -> list[StartModel]:
    """Return the start model with its checks.

    Args:
        base_of_output: folder of an earlier stage's output -> the model which that stage starts from.
    """
    flag, path = "--model_name_or_path", config.model.model_name_or_path
    start = ModelSource(base_of_output.get(path, path))
    fits = [
        partial(check_decoder, start, flag),
        partial(check_positions, start, config.data.max_seq_len, "--max_seq_len"),
        partial(check_head, start, new_head=True, quantization=config.model.quantization),
        partial(check_settings, start, config.model, only_lora=config.deepspeed.only_optimize_lora),
    ]
    packages = package_checks(config.model, config.optimizer, config.deepspeed)
    return [StartModel(flag, path, start, check_model_path, packages, fits)]
