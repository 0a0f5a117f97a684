"""The needs of stage 1 for the planner: its model and the passes of its phases."""

from collections.abc import Mapping

from pipeline.planning.needs import StageNeeds, supervised_needs
from step1_sft.config import SFTConfig


def needs(config: SFTConfig, base_of_output: Mapping[str, str], dtype: str, ranks: int) -> StageNeeds:
    """Return the needs of a rank; `base_of_output`: folder of an earlier stage's output -> the model it starts from."""
    length = config.data.max_seq_len
    return supervised_needs(config, base_of_output, ranks, length=length, what=f"rows of {length} tokens")
