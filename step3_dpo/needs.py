"""The needs of stage 3 by DPO for the planner: its model and the passes of its phases.

The reference is gone before the model is loaded: its pass needs less than an evaluation's.
"""

from collections.abc import Mapping
from dataclasses import replace

from pipeline.planning.needs import StageNeeds, supervised_needs
from step3_dpo.config import DPOConfig


def needs(config: DPOConfig, base_of_output: Mapping[str, str], dtype: str, ranks: int) -> StageNeeds:
    """Return the needs of a rank; `base_of_output`: folder of an earlier stage's output -> the model it starts from."""
    length, is_kto = config.data.max_seq_len, config.method == "kto"
    what = f"{'responses' if is_kto else 'pairs'} of up to {length} tokens each"
    sequences = 1 if is_kto else 2
    found = supervised_needs(config, base_of_output, ranks, length=length, what=what, sequences=sequences)
    if not is_kto:
        return found
    (training,) = found.phases["train"]
    mismatched = replace(training, trains=False, accumulates=False)
    return replace(found, phases={**found.phases, "train": [training, mismatched]})
