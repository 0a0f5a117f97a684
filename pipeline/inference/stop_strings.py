"""Stop strings for transformers' `generate`, with the meaning that the sessions of `pipeline.generation` give them."""

from typing import Any

import torch
from transformers import StoppingCriteria

from pipeline.generation.rollouts import Vocabulary
from pipeline.generation.session import stopped_length


class StopStrings(StoppingCriteria):
    """The end of rows whose new tokens contain a stop string; transformers' own criterion searches the prompt too.

    stop: the strings.
    vocabulary: how ids become text.
    num_known: tokens of a row before its first new one.
    """

    def __init__(self, stop: list[str], vocabulary: Vocabulary, num_known: int) -> None:
        self.stop, self.vocabulary, self.num_known = stop, vocabulary, num_known

    def __call__(self, input_ids: Any, scores: Any, **kwargs: Any) -> Any:
        """Return (B,) bool, True = the last token of the row's (B, S) ids completes a stop string."""
        new = input_ids[:, self.num_known :].tolist()
        lengths = [stopped_length(self.stop, ids, self.vocabulary, seen=len(ids) - 1) for ids in new]
        return torch.tensor([length is not None for length in lengths], device=input_ids.device)
