"""Settings of generation that come from flags, and the checks that need no loaded model.

The configuration of stage 3 and the hybrid engine use them. The module imports no torch, so that flags are checked in
milliseconds. backends.py decides which backend supports a given model.
"""

from dataclasses import dataclass
from typing import Annotated, Literal

from pydantic import Field

Backend = Literal["fused", "static", "eager"]  # the fastest first
BackendChoice = Literal["auto", Backend]
StopTexts = list[Annotated[str, Field(min_length=1)]]
MAX_SAMPLES = 2**12  # samples of one prompt; pipeline/random_numbers.py has keys for so many
PARTITION_ACTOR = "--actor-zero-stage 3"  # the flag under which ranks share the actor's weights
# The cache length is a multiple of this many tokens: slightly longer prompts need no new buffers. Chosen by hand.
CACHE_LENGTH_MULTIPLE = 64
# Prompt tokens of one prefill with padding, which bound its activations. Chosen by hand.
MAX_PREFILL_TOKENS = 32_768
# Bytes of the streamed layers that are gathered at a time: larger groups are gathered at a higher rate and take more
# memory. A larger layer is a group of its own. Chosen by hand.
GROUP_BYTES = 2**28


@dataclass(frozen=True, slots=True)
class GenerationOptions:
    """The flags that decide how the hybrid engine samples from the actor.

    backend: name of a backend, or auto for the fastest one that supports the model.
    merge_lora: sample from a merged copy of base weights and adapters.
    max_sequence_length: tokens of the longest prompt and response together.
    release_cache: free the KV cache after each rollout.
    tensor_parallel_size: ranks that share one copy of the weights during a rollout.
    weights: whole on each rank (or tensor-parallel group), or streamed: sharded over the ranks and gathered a few
        layers at a time in each forward pass.
    min_slots: the least number of slots of a rank.
    """

    backend: BackendChoice = "auto"
    merge_lora: bool = True
    max_sequence_length: int = 0
    release_cache: bool = False
    tensor_parallel_size: int = 1
    weights: Literal["auto", "whole", "streamed"] = "auto"
    min_slots: int = 0

    def decides_by_memory(self, why_not: str | None) -> bool:
        """Return True if `whole_weights_fit` decides on streaming. why_not: the result of `why_not_streamed`."""
        return self.weights == "auto" and why_not is None


def why_not_streamed(*, partitioned: bool, ranks: int | None, tensor_parallel_size: int, backend: str) -> str | None:
    """Return the reason that rules out `--rollout-weights streamed`, or None. ranks: None if not known."""
    if not partitioned:
        return f"needs {PARTITION_ACTOR}"
    if ranks == 1:
        return "got 1 rank, expected several, which share the weights"
    if tensor_parallel_size > 1:
        return f"got --inference-tp-size {tensor_parallel_size}, expected 1"
    if backend not in ("auto", "fused"):
        return f"got the {backend} backend, expected the fused one (--generation-engine)"
    return None
