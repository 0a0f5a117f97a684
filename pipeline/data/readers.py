"""Read one data file (.jsonl, .json, .csv, .parquet, .txt, each also .gz) into numbered raw rows.

Every error names the file, the line or row, the column, and what is expected. `formats.py` gives columns their meaning;
other columns are passed on as JSON.
"""

import csv
import gzip
import io
import json
import zlib
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import date, time, timedelta
from decimal import Decimal
from pathlib import Path
from typing import IO, Any, Literal, cast

from pipeline.data.counts import Origin
from pipeline.errors import InputError

Values = dict[str, Any]
NumberedRows = Iterator[tuple[int, Values]]
Split = Literal["train", "test"]
NO_COLUMNS = "{}"  # the result of `to_json` without columns
MAX_ROW_CHARS = 5_000_000  # a long book; tokenising takes 180 bytes for each character
MAX_LINE_BYTES = 2**30  # limit of an unpacked line or CSV cell: a small .gz may unpack to an endless line
PARQUET_ROWS = 1000  # rows of a batch, which is in memory as Python objects


@dataclass(frozen=True, slots=True)
class Row:
    """A raw row: column -> value, its origin, and its split if the source names one."""

    values: Values
    origin: Origin
    split: Split | None


def read_file(path: Path) -> NumberedRows:
    """Yield (row number, columns) of one data file, chosen by its suffix; numbers start at 1.

    .jsonl and .csv give line numbers, .json and .parquet row numbers. A .txt file gives one `text` row for each block
    of lines between blank lines, numbered by the block's first line. Each also as .gz. Raises InputError for a broken
    file and for one without rows.
    """
    read = READERS[data_suffix(path)]
    empty = True
    with _opened(path) as stream:
        for row in read(stream, path):
            empty = False
            yield row
    if empty:
        raise InputError(f"{path}: no rows; a data file needs at least one")


def data_suffix(path: Path) -> str:
    """Return the suffix that names the format, without .gz: '.jsonl' for 'a.jsonl.gz', '' if it is no data file."""
    name = path.name.lower().removesuffix(".gz")
    return next((suffix for suffix in READERS if name.endswith(suffix)), "")


def header_origin(origin: Origin) -> str:
    """Return the origin of a row's column names: the first line of a CSV file, else the row itself."""
    return f"{origin.file}:1" if data_suffix(Path(origin.file)) == ".csv" else str(origin)


@contextmanager
def _opened(path: Path) -> Iterator[IO[bytes]]:
    """Open a file's bytes, unpacked; damage and missing permissions raise InputError."""
    try:
        is_packed = path.name.lower().endswith(".gz")
        with cast(IO[bytes], gzip.open(path, "rb") if is_packed else path.open("rb")) as stream:
            yield stream
    except (gzip.BadGzipFile, EOFError, zlib.error) as error:
        raise InputError(f"{path}: damaged gzip file ({error}); pack or fetch it again") from error
    except OSError as error:
        raise InputError(f"{path}: cannot be read ({error.strerror or error})") from error


def _read_jsonl(stream: IO[bytes], path: Path) -> NumberedRows:
    for number, line in _lines(stream, path):
        if line.strip():
            text, where = line.rstrip("\r\n"), f"{path}:{number}"
            yield number, _checked_object(_parsed_json(text, where, "one object on each line"), where)


def _lines(stream: IO[bytes], path: Path) -> Iterator[tuple[int, str]]:
    """Yield (line number, line with its line end), without a BOM at the head; reads at most the limit."""
    for number, raw in enumerate(iter(lambda: stream.readline(MAX_LINE_BYTES + 1), b""), start=1):
        if len(raw) > MAX_LINE_BYTES:
            fault = f"got a line of more than {MAX_LINE_BYTES:,} bytes"
            raise InputError(f"{path}:{number}: {fault}; expected a .jsonl file with one row on each line")
        try:
            line = raw.decode("utf-8-sig" if number == 1 else "utf-8")
        except UnicodeDecodeError as error:
            where = f"{path}:{number}"
            raise InputError(f"{where}: byte {error.start + 1} is not UTF-8; save the file as UTF-8") from error
        yield number, line


def _parsed_json(text: str, where: str, right: str) -> Any:
    try:
        return parsed(text)
    except (ValueError, RecursionError) as error:
        # The parser's "line 1" would contradict the line number in the file.
        alone = isinstance(error, json.JSONDecodeError) and "\n" not in text
        reason = f"{error.msg}: column {error.colno}" if alone else error  # type: ignore[union-attr]
        raise InputError(f"{where}: broken JSON ({reason}); expected {right}") from error


def _unique_keys(pairs: list[tuple[str, Any]]) -> Values:
    """Build a JSON object; raises ValueError for a repeated key, of which json would keep only the last value."""
    values = dict(pairs)
    if len(values) != len(pairs):
        twice = next(name for number, (name, _) in enumerate(pairs) if name in dict(pairs[:number]))
        raise ValueError(f"the field {twice!r} is repeated")
    return values


parsed = json.JSONDecoder(object_pairs_hook=_unique_keys).decode  # json.loads would create a decoder for each row


def _checked_object(value: Any, where: str) -> Values:
    if not isinstance(value, dict):
        raise InputError(f'{where}: got a JSON {type(value).__name__}, expected an object like {{"prompt": ...}}')
    return value


def _read_json(stream: IO[bytes], path: Path) -> NumberedRows:
    """Read an array of objects; a file with one object per line is read as JSON lines."""
    content = "\n".join(line.rstrip("\r\n") for _, line in _lines(stream, path))
    if not content.lstrip().startswith("["):
        yield from _read_jsonl(io.BytesIO(content.encode()), path)
        return
    for number, item in enumerate(_parsed_json(content, str(path), "an array of objects"), start=1):
        yield number, _checked_object(item, f"{path}: row {number}")


def _read_csv(stream: IO[bytes], path: Path) -> NumberedRows:
    # csv limits cells to 128 KiB by default; documents may be longer.
    csv.field_size_limit(MAX_LINE_BYTES)
    reader = csv.DictReader((line for _, line in _lines(stream, path)), strict=True)
    try:
        names = list(reader.fieldnames or ())
        # csv would keep only the last of two columns with the same name.
        if twice := [name for number, name in enumerate(names) if name in names[:number]]:
            raise InputError(f"{path}:1: the column {twice[0]!r} is repeated in the header")
        if len(names) == 1 and any(separator in names[0] for separator in ";\t|"):
            raise InputError(f"{path}:1: one column, {names[0]!r}; columns are separated by commas")
        for row in reader:
            if None in row or None in row.values():
                where = f"{path}:{reader.line_num}"
                raise InputError(f"{where}: the header names {len(names)} columns, this row has others")
            yield reader.line_num, dict(row)
    except csv.Error as error:
        raise InputError(f"{path}:{reader.line_num + 1}: not a CSV row ({error})") from error


def _read_parquet(stream: IO[bytes], path: Path) -> NumberedRows:
    import pyarrow
    import pyarrow.parquet

    # Parquet is read from its end, and a gzip stream cannot seek cheaply.
    source: Any = io.BytesIO(stream.read()) if path.name.lower().endswith(".gz") else stream
    try:
        batches = pyarrow.parquet.ParquetFile(source).iter_batches(PARQUET_ROWS)
        yield from enumerate((row for batch in batches for row in batch.to_pylist()), start=1)
    except (pyarrow.ArrowException, ValueError, OverflowError) as error:  # texts and dates that Python cannot represent
        raise InputError(f"{path}: broken parquet file ({error})") from error


def _read_text(stream: IO[bytes], path: Path) -> NumberedRows:
    block: list[str] = []
    first, size = 1, 0
    for number, line in _lines(stream, path):
        if line.strip():
            first = first if block else number
            if size <= MAX_ROW_CHARS + 1:  # a longer row is dropped: its lines are not stored
                block.append(line.rstrip("\r\n"))
                size += len(block[-1]) + 1
        elif block:
            yield first, {"text": "\n".join(block)}
            block, size = [], 0
    if block:
        yield first, {"text": "\n".join(block)}


def to_json(columns: Mapping[str, Any]) -> tuple[str, set[str]]:
    """Return the columns of a row as a JSON object in the order of their names, and the names of omitted columns.

    Dates and times become ISO 8601 text, decimals numbers, and durations seconds; a column with another value (bytes,
    an image) is omitted.
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


READERS: dict[str, Callable[[IO[bytes], Path], NumberedRows]] = {
    ".jsonl": _read_jsonl,
    ".json": _read_json,
    ".csv": _read_csv,
    ".parquet": _read_parquet,
    ".txt": _read_text,
}
