"""The flags of rewards in stage 3: functions, further reward models, scaling and workers."""

from typing import Literal, Self

from pydantic import model_validator

from pipeline.configuration.flag_table import flag
from pipeline.generation.options import MAX_SAMPLES
from pipeline.rewards.functions import folder_and_weight
from pipeline.rewards.worker_flags import WorkerFlags


class RewardConfig(WorkerFlags):
    """Rewards"""

    reward_function: list[str] = flag(
        [],
        "Functions that score responses: FILE.py:NAME or a built-in NAME, each with an optional :WEIGHT; in YAML also "
        "name, weight and args of each",
    )
    reward_weight: float = flag(1.0, "Weight of the reward model's score in the sum", needs="a reward model")
    more_reward_models: list[str] = flag(
        [],
        "Further reward models, FOLDER[:WEIGHT], with the flags of --reward-model-*",
        needs="a reward model",
    )
    reward_scaling: Literal["none", "batch", "running"] = flag(
        "none",
        "Divide each reward by its standard deviation in this rollout (batch) or in all so far (running) before the "
        "weighted sum; for a reward model this replaces the stored std, and reward_clip clips the quotient",
    )
    eval_samples_per_prompt: int = flag(
        1,
        "Responses to each held-out prompt; pass_at_1 and pass_at_k are logged for each function, and a value of at "
        "least 1 passes",
        ge=1,
        le=MAX_SAMPLES,
        on_resume="free",
    )
    max_reward_failures: float = flag(
        0.05,
        "Largest share of failed calls among the last 1,000 responses; above it and 20 failures, the run saves a "
        "checkpoint and ends",
        ge=0,
        le=1,
        on_resume="free",
    )

    @model_validator(mode="after")
    def _weights_are_numbers(self) -> Self:
        for entry in self.more_reward_models:
            folder_and_weight(entry, "more_reward_models")
        return self
