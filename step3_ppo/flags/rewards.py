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
        "Functions that score responses: FILE.py:NAME or a built-in NAME, each with an optional :WEIGHT; in YAML each "
        "may have name, weight and args",
        other_tools="reward_funcs",
    )
    reward_weight: float = flag(1.0, "Weight of the reward model's score in the sum", needs="a reward model")
    more_reward_models: list[str] = flag(
        [],
        "Further reward models, FOLDER[:WEIGHT]; --reward-model-* apply to them too",
        needs="a reward model",
    )
    reward_scaling: Literal["none", "batch", "running"] = flag(
        "none",
        "Divide each reward by its own standard deviation, over the rollout (batch) or all rollouts so far (running), "
        "before the weighted sum; it replaces a reward model's stored std, before --reward-clip",
    )
    eval_samples_per_prompt: int = flag(
        1,
        "Responses to each held-out prompt, for pass_at_1 and pass_at_k of reward functions; a value of at least 1 "
        "passes",
        ge=1,
        le=MAX_SAMPLES,
        on_resume="free",
    )
    max_reward_failures: float = flag(
        0.05,
        "Share of failed reward calls among the last 1,000 responses above which the run saves and ends, after at "
        "least 20 failures",
        ge=0,
        le=1,
        on_resume="free",
    )

    @model_validator(mode="after")
    def _weights_are_numbers(self) -> Self:
        for entry in self.more_reward_models:
            folder_and_weight(entry, "--more-reward-models")
        return self
