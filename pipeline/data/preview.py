"""Look at one row of a source before a run: read, rendered and tokenised as the whole source will be."""

import itertools
from typing import TYPE_CHECKING

from pipeline.data.cache import TOKENISERS
from pipeline.data.counts import Counts
from pipeline.data.formats import read_records
from pipeline.data.selection import DataOptions, Stage
from pipeline.data.sources import read_rows
from pipeline.errors import InputError

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

RECORDS_AT_ONCE = 32


def first_row(stage: Stage, path: str, options: DataOptions, tokenizer: "PreTrainedTokenizerBase | None") -> None:
    """Tokenise records of a source until one gives a row of `stage`; without a tokenizer only read one.

    Raises:
        InputError: the source cannot be read, or has no row that the stage can use.
    """
    counts = Counts()
    records = read_records(read_rows(path), counts, column_map=options.column_map)
    while some := list(itertools.islice(records, RECORDS_AT_ONCE)):
        if tokenizer is None or next(TOKENISERS[stage](some, tokenizer, options, counts), None) is not None:
            return
    raise InputError(f"{path}: no row that stage {stage} can use: {'; '.join(counts.lines())}")
