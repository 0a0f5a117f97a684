"""Columns that no layout reads, on their way to the rewards of stage 3: as JSON, in a file beside that of the rows.

Nothing else reads them, so the file of the rows, whose hash is in checkpoints, is the same with and without them.
"""

import json
from collections.abc import Mapping
from datetime import date, time, timedelta
from decimal import Decimal
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from datasets import Dataset

EXTRA = "extra"  # the field of a row that holds them; a kind of rows without it passes none
NONE = "{}"
SUFFIX = ".columns.arrow"


def to_json(columns: Mapping[str, Any]) -> tuple[str, set[str]]:
    """Return the columns of a row as a JSON object in the order of their names, and the names of those left out.

    Dates and times become ISO 8601 text, decimals numbers, and durations numbers of seconds; a value that has no such
    form (bytes, an image) leaves its column out.
    """
    texts, left_out = [], set()
    for name in sorted(columns):
        try:
            texts.append(f"{json.dumps(name)}: {json.dumps(columns[name], default=_plain)}")
        except (TypeError, ValueError, RecursionError):
            left_out.add(name)
    return f"{{{', '.join(texts)}}}", left_out


def _plain(value: object) -> str | float:
    if isinstance(value, date | time):
        return value.isoformat()
    if isinstance(value, timedelta):
        return value.total_seconds()
    if isinstance(value, Decimal):
        return float(value)
    raise TypeError(type(value).__name__)


def move_out(file: Path) -> None:
    """Move the column EXTRA of a file of rows, if it has one, to a file beside it; to none where it is empty in all."""
    import pyarrow as pa
    from pyarrow import compute

    with pa.memory_map(str(file)) as source:
        rows = pa.ipc.open_stream(source).read_all()
        if EXTRA not in rows.column_names:
            return
        tables = {file.with_suffix(".writing"): rows.drop_columns([EXTRA])}
        if compute.any(compute.not_equal(rows[EXTRA], NONE)).as_py():
            tables[file.with_suffix(SUFFIX)] = rows.select([EXTRA])
        for path, table in tables.items():
            with pa.OSFile(str(path), "wb") as sink, pa.ipc.new_stream(sink, table.schema) as writer:
                for batch in table.to_batches():
                    writer.write_batch(batch)
    file.with_suffix(".writing").rename(file)


def load(file: Path) -> "Dataset":
    """Return the memory-mapped rows of a file, with the column EXTRA where there is a file of it."""
    from datasets import Dataset, concatenate_datasets

    rows, others = Dataset.from_file(str(file)), file.with_suffix(SUFFIX)
    return concatenate_datasets([rows, Dataset.from_file(str(others))], axis=1) if others.is_file() else rows
