"""The kind of rows that KTO reads: labelled responses. A pair becomes two of them."""

import hashlib
from array import array
from dataclasses import dataclass

from pipeline.data.formats import Record
from pipeline.data.row_kinds import ROW_KINDS, RowKind, RowMaker, WideInt
from pipeline.data.turns import BadRowError


@dataclass(frozen=True, slots=True)
class ResponseRow:
    """A tokenised conversation of at most max_seq_len ids, and whether its response is good.

    row_hash: 63-bit hash of ids and label. Rows are ordered by it, so their order in the files does not matter.
    """

    ids: list[int]
    prompt_length: int
    label: bool
    row_hash: WideInt


def responses(maker: RowMaker, record: Record) -> list[ResponseRow]:
    """Return a row for the response of a record with a label, or one for each side of a pair.

    Raises:
        BadRowError: a record with neither a pair nor a label, a label that is not a boolean, or an error of
            `RowMaker.sides`.
    """
    texts = {label: text for label, text in ((True, record.chosen), (False, record.rejected)) if text is not None}
    label = True if len(texts) > 1 else record.label
    if not texts or label is None:
        kind = "no labelled response: columns chosen and rejected are needed, or a response and label (true or false)"
        raise BadRowError(kind, ", ".join(map(repr, record.columns)))
    if isinstance(label, str):
        raise BadRowError("label is not a boolean: use true or false", label)
    sides, prompt_length = maker.sides(record, list(texts.values()), "pair" if len(texts) > 1 else "response")
    return [
        ResponseRow(ids, prompt_length, label, hash_of(ids, label=label))
        for label, ids in zip(texts, sides, strict=True)
    ]


def hash_of(ids: list[int], *, label: bool) -> int:
    """Return a 63-bit hash of a row, the same on every machine."""
    digest = hashlib.blake2b(array("q", [*ids, label]).tobytes(), digest_size=8).digest()
    return int.from_bytes(digest, "big") >> 1


RESPONSES = RowKind(name="responses", make=responses, row=ResponseRow)
ROW_KINDS[RESPONSES.name] = RESPONSES
