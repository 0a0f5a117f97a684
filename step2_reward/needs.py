"""The needs of stage 2 for the planner: its model and the passes of its phases."""

from collections.abc import Mapping

from pipeline.planning.needs import StageNeeds, supervised_needs
from step2_reward.config import RewardConfig


def needs(config: RewardConfig, base_of_output: Mapping[str, str], dtype: str, ranks: int) -> StageNeeds:
    """Return the needs of a rank; `base_of_output`: folder of an earlier stage's output -> the model it starts from."""
    length = config.data.max_seq_len
    what = f"pairs of up to {length} tokens each"
    return supervised_needs(config, base_of_output, ranks, length=length, what=what, sequences=2, has_values=True)
