"""The needs of stage 1 for the planner: its model and the passes of its phases."""

from collections.abc import Mapping

from pipeline.planning.needs import ModelUse, Pass, StageNeeds, step_arithmetic
from step1_sft.config import SFTConfig


def needs(config: SFTConfig, made: Mapping[str, str], dtype: str, ranks: int) -> StageNeeds:
    """Return the needs of a rank; `made`: folder of an earlier stage's output -> the model which that starts from."""
    optimizer, length, path = config.optimizer, config.data.max_seq_len, config.model.model_name_or_path
    micro, evaluated = optimizer.per_device_train_batch_size, optimizer.per_device_eval_batch_size
    steps = optimizer.gradient_accumulation_steps
    return StageNeeds(
        models=[ModelUse("model", made.get(path, path), config.model, only_lora=config.deepspeed.only_optimize_lora)],
        phases={
            "train": [
                Pass("model", micro, length, micro * (length - 1), trains=True, accumulates=steps > 1, times=steps)
            ],
            "evaluate": [Pass("model", evaluated, length, evaluated * (length - 1))],
        },
        batch=[step_arithmetic(optimizer, ranks, f"rows of {length} tokens")],
    )
