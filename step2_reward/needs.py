"""The needs of stage 2 for the planner: its model and the passes of its phases."""

from collections.abc import Mapping

from pipeline.planning.needs import ModelUse, Pass, StageNeeds, step_arithmetic
from step2_reward.config import RewardConfig


def needs(config: RewardConfig, made: Mapping[str, str], dtype: str, ranks: int) -> StageNeeds:
    """Return the needs of a rank; `made`: folder of an earlier stage's output -> the model which that starts from."""
    optimizer, length, path = config.optimizer, config.data.max_seq_len, config.model.model_name_or_path
    model = ModelUse(
        "model",
        made.get(path, path),
        config.model,
        has_values=True,
        only_lora=config.deepspeed.only_optimize_lora,
    )
    pairs, evaluated = optimizer.per_device_train_batch_size, optimizer.per_device_eval_batch_size
    steps = optimizer.gradient_accumulation_steps
    return StageNeeds(
        models=[model],
        phases={  # chosen and rejected are two rows
            "train": [Pass("model", 2 * pairs, length, trains=True, accumulates=steps > 1, times=steps)],
            "evaluate": [Pass("model", 2 * evaluated, length)],
        },
        batch=[step_arithmetic(optimizer, ranks, f"pairs of up to {length} tokens each")],
    )
