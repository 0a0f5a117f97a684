"""The kind of rows of stage 4: answers with a label."""

from dataclasses import dataclass

from pipeline.data.formats import Record
from pipeline.data.row_kinds import ROW_KINDS, RowKind, RowMaker
from pipeline.data.turns import BadRowError, Message


@dataclass(frozen=True, slots=True)
class LabelledRow:
    """A tokenised conversation: S ids, S flags of which True is a token of the answer, and whether that is good."""

    ids: list[int]
    trained: list[bool]
    label: bool


def labelled(maker: RowMaker, record: Record) -> LabelledRow:
    """Return the row of a record with one answer; the label False makes it a rejected one."""
    answer = record.chosen or record.rejected
    if answer is None:
        raise BadRowError("no answer")
    encoded = maker.conversation(record, (*record.messages, Message("assistant", answer)), "last")
    limit = maker.options.max_seq_len
    return LabelledRow(encoded.ids[:limit], [False, *encoded.trained[1:limit]], label=record.chosen is not None)


ROW_KINDS["labelled"] = RowKind(name="labelled", make=labelled, row=LabelledRow)
