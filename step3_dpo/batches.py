"""Batches of labelled responses: the two sides of pairs, single responses, and responses behind other rows' prompts.

Shapes: N sequences of at most S tokens, padded on the right. A batch of B pairs has 2B sequences, all chosen first.
"""

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Self

import numpy as np
import torch
from datasets import Dataset
from torch import Tensor

from pipeline.data.batching import SharedTokens, epoch_order, right_padded
from pipeline.models.forward.shared_prompts import settings_of_pairs
from pipeline.tensor_ops import masked_sum

Row = Mapping[str, Any]
SIDES = {"chosen": True, "rejected": False}  # side of a pair -> its label


@dataclass(frozen=True, slots=True)
class ResponseBatch:
    """A batch of N labelled responses with their prompts.

    input_ids: (N,S) int64.
    attention_mask: (N,S) bool, True = real token.
    position_ids: (N,S) int64.
    lengths: (N,) int64, real tokens of each sequence.
    prompt_lengths: (N,) int64.
    labels: (N,) bool, True = a good response.
    reference: (N,) fp32: log-probabilities under the reference, in nats, each summed over the tokens of a response.
    weights: (N,) fp32: 0 for sequences that only fill the batch.
    shared: what the rows of a pair have in common; None for single responses.
    """

    input_ids: Tensor
    attention_mask: Tensor
    position_ids: Tensor
    lengths: Tensor
    prompt_lengths: Tensor
    labels: Tensor
    reference: Tensor
    weights: Tensor
    shared: SharedTokens | None

    @property
    def num_response_tokens(self) -> Tensor:
        """The tokens of each response, (N,) int64; 1 for an empty response."""
        return (self.lengths - self.prompt_lengths).clamp(min=1)


Collate = Callable[[list[Any]], ResponseBatch]


def pair_responses(units: Sequence[Sequence[Row] | None], *, pad_id: int) -> ResponseBatch:
    """Collate units of one pair each; None stands for a pair that only fills the batch."""
    rows = [None if unit is None else side_of(unit[0], side) for side in SIDES for unit in units]
    return batch_of(rows, pad_id, are_pairs=True)


def single_responses(units: Sequence[Sequence[Row] | None], *, pad_id: int) -> ResponseBatch:
    """Collate units of one labelled response each; None stands for one that only fills the batch."""
    return batch_of([None if unit is None else unit[0] for unit in units], pad_id)


def side_of(pair: Row, side: str) -> Row:
    """Return one side of a pair as a labelled response."""
    reference = pair.get(f"{side}_reference", 0.0)
    ids, length = pair[f"{side}_ids"], pair["prompt_length"]
    return {"ids": ids, "prompt_length": length, "label": SIDES[side], "reference": reference}


def batch_of(rows: Sequence[Row | None], pad_id: int, *, are_pairs: bool = False) -> ResponseBatch:
    """Collate rows with `ids`, `prompt_length`, `label` and, once it is computed, `reference`."""
    filler: Row = {"ids": [pad_id], "prompt_length": 0, "label": False}
    filled = [filler if row is None else row for row in rows]
    sequences = [row["ids"] for row in filled]
    return ResponseBatch(
        **right_padded(sequences, pad_id),
        prompt_lengths=torch.tensor([row["prompt_length"] for row in filled]),
        labels=torch.tensor([row["label"] for row in filled]),
        reference=torch.tensor([row.get("reference", 0.0) for row in filled], dtype=torch.float32),
        weights=torch.tensor([float(row is not None) for row in rows]),
        shared=SharedTokens.of_pairs(sequences) if are_pairs else None,
    )


def response_mask(batch: ResponseBatch) -> Tensor:
    """Return (N, S - 1) bool, True = token t + 1 belongs to a response."""
    positions = torch.arange(1, batch.input_ids.shape[1], device=batch.lengths.device)
    starts = batch.prompt_lengths.unsqueeze(1)
    return (positions >= starts) & (positions < batch.lengths.unsqueeze(1)) & (starts > 0)


def response_log_probs(model: Callable[..., Any], batch: ResponseBatch) -> Tensor:
    """Return (N,) fp32: log-probabilities of the responses in nats, each summed over its tokens."""
    selected = response_mask(batch)
    output = model(
        batch.input_ids,
        attention_mask=batch.attention_mask,
        selected=selected,
        **settings_of_pairs(batch.shared),
    )
    return masked_sum(output.log_probs, selected, 1)


@dataclass(frozen=True, slots=True)
class Mismatched:
    """M rows: the prompt of row i with the response of row `partners[i]`.

    rows: the labelled responses.
    partners: (M,) int64.
    limit: tokens of a sequence; longer responses are truncated.
    reference: (M,) fp64: log-probabilities under the reference, NaN for rows that the run does not read.
    """

    rows: Dataset
    partners: np.ndarray
    limit: int
    reference: np.ndarray = field(default_factory=lambda: np.zeros(0))

    def __len__(self) -> int:
        return len(self.partners)

    def __getitem__(self, number: int) -> Row:
        row, other = self.rows[number], self.rows[int(self.partners[number])]
        ids = row["ids"][: row["prompt_length"]] + other["ids"][other["prompt_length"] :]
        reference = {"reference": self.reference[number]} if len(self.reference) else {}
        return {**row, "ids": ids[: self.limit], **reference}

    @property
    def lengths(self) -> np.ndarray:
        """The tokens of each sequence, (M, 1) int64."""
        prompts, both = (np.asarray(self.rows[name][:], dtype=np.int64) for name in ("prompt_length", "num_tokens"))
        return np.minimum(prompts + (both - prompts)[self.partners], self.limit)[:, None]


@dataclass(frozen=True, slots=True)
class Mismatches:
    """The mismatched rows of a run: those of the held-out rows, and those of the training rows in each epoch.

    Rows are ordered by their hashes within an optimizer step, or within all held-out rows. Each row takes the response
    of the row before it, and the first that of the last. So the result is the same for any number of ranks and any
    micro-batch size.

    eval: the held-out rows.
    epochs: the training rows of each epoch.
    """

    eval: Mismatched
    epochs: list[Mismatched]

    @classmethod
    def of(
        cls, train: Dataset, held_out: Dataset, *, seed: int, rows_per_step: int, num_epochs: int, limit: int
    ) -> Self:
        """Pair the prompt of each row with the response of another; `limit`: tokens of a sequence."""
        orders = (epoch_order(seed, epoch, len(train)) for epoch in range(num_epochs))
        starts = range(0, len(train), rows_per_step)
        steps = ([order[start : start + rows_per_step] for start in starts] for order in orders)
        epochs = [Mismatched(train, partners_of(train, groups), limit) for groups in steps]
        return cls(Mismatched(held_out, partners_of(held_out, [np.arange(len(held_out))]), limit), epochs)

    def parts(self) -> dict[str, Mismatched]:
        """Return the parts by their names in the reference's file."""
        return {"mismatched, eval": self.eval} | {f"mismatched, epoch {n}": part for n, part in enumerate(self.epochs)}

    def with_reference(self, tables: Mapping[str, np.ndarray]) -> Self:
        """Return these rows with the reference's log-probabilities, name -> (M, 1)."""
        first, *others = (replace(part, reference=tables[name][:, 0]) for name, part in self.parts().items())
        return replace(self, eval=first, epochs=others)


def partners_of(rows: Dataset, groups: Iterable[np.ndarray]) -> np.ndarray:
    """Return for each row the one before it, (M,) int64, in the order of hashes within its group.

    A row that is alone in its group gets itself. Copies of a row count once in that order: else a copy would give its
    row the row's own response.
    """
    hashes, partners = np.asarray(rows["row_hash"][:], dtype=np.int64), np.arange(len(rows))
    for group in groups:
        _, first, inverse = np.unique(hashes[group], return_index=True, return_inverse=True)
        partners[group] = group[first[inverse - 1]]
    return partners
