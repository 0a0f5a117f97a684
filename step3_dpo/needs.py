"""The needs of stage 3 by DPO for the planner: its model and the passes of its phases.

The reference is gone before the model is loaded: its pass needs less than an evaluation's.
"""

from collections.abc import Mapping

from pipeline.planning.needs import StageNeeds, supervised_needs
from step3_dpo.config import DPOConfig


def needs(config: DPOConfig, base_of_output: Mapping[str, str], dtype: str, ranks: int) -> StageNeeds:
    """Return the needs of a rank; `base_of_output`: folder of an earlier stage's output -> the model it starts from."""
    length = config.data.max_seq_len
    what = f"pairs of up to {length} tokens each"
    return supervised_needs(config, base_of_output, ranks, length=length, what=what, sequences=2)
