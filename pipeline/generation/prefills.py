"""Requests whose prompts are prefilled together."""

from collections.abc import Iterable, Iterator
from dataclasses import dataclass

from torch import Tensor

from pipeline.generation.options import MAX_PREFILL_TOKENS
from pipeline.generation.session import Request


@dataclass(frozen=True, slots=True)
class PrefilledBatch:
    """N requests whose prompts have been prefilled, before the first token is drawn.

    requests: the requests.
    slots: slot of each, on the host.
    slot_index: (N,) int64, the same on the device.
    lengths: (N,) int32, tokens of each prompt.
    settings: (5, N) int64, see `slot_settings`.
    numbers: (2, N) fp32, see `slot_settings`.
    logits: (P, V), logits of the P prompts' last tokens.
    source: (N,) int64, row of `logits` of each request.
    """

    requests: list[Request]
    slots: list[int]
    slot_index: Tensor
    lengths: Tensor
    settings: Tensor
    numbers: Tensor
    logits: Tensor
    source: Tensor


def batches_of(requests: Iterable[Request]) -> Iterator[list[Request]]:
    """Yield the requests of each prefill, whose rows have at most MAX_PREFILL_TOKENS tokens of whole prompts."""
    batch, rows, width = list[Request](), set[int](), 0
    for request in requests:
        rows, width = rows | {request.row}, max(width, len(request.prompt.ids))
        if batch and width * len(rows) > MAX_PREFILL_TOKENS:
            yield batch
            batch, rows, width = [], {request.row}, len(request.prompt.ids)
        batch.append(request)
    if batch:
        yield batch
