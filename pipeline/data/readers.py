"""Read one data file (.jsonl, .json, .csv, .parquet, .txt, each also .gz) into numbered raw rows.

Every error names the file, the line or row and the column, and says what would be right. The meaning of columns is in
`formats.py`.
"""

import csv
import gzip
import io
import json
import sys
import zlib
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import IO, Any, cast

from pipeline.errors import InputError

Values = dict[str, Any]
NumberedRows = Iterator[tuple[int, Values]]


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


@contextmanager
def _opened(path: Path) -> Iterator[IO[bytes]]:
    """Open a file's bytes, unpacked; damage and missing rights become InputError."""
    try:
        is_packed = path.name.lower().endswith(".gz")
        with cast(IO[bytes], gzip.open(path, "rb") if is_packed else path.open("rb")) as stream:
            yield stream
    except (gzip.BadGzipFile, EOFError, zlib.error) as error:
        raise InputError(f"{path}: damaged gzip file ({error}); pack or fetch it again") from error
    except OSError as error:
        raise InputError(f"{path}: cannot be read ({error.strerror or error})") from error


def _read_jsonl(stream: IO[bytes], path: Path) -> NumberedRows:
    for number, line in _text_lines(stream, path):
        if line.strip():
            yield number, _json_object(line, f"{path}:{number}")


def _text_lines(stream: IO[bytes], path: Path) -> Iterator[tuple[int, str]]:
    """Yield (line number, line without its line end); a BOM at the head and CRLF are tolerated."""
    for number, line in _decoded_lines(stream, path):
        yield number, line.rstrip("\r\n")


def _decoded_lines(stream: IO[bytes], path: Path) -> Iterator[tuple[int, str]]:
    """Yield (line number, line with its line end), without a BOM at the head."""
    for number, raw in enumerate(stream, start=1):
        try:
            line = raw.decode("utf-8-sig" if number == 1 else "utf-8")
        except UnicodeDecodeError as error:
            where = f"{path}:{number}"
            raise InputError(f"{where}: byte {error.start + 1} is not UTF-8; save the file as UTF-8") from error
        yield number, line


def _json_object(text: str, where: str) -> Values:
    try:
        value = json.loads(text, object_pairs_hook=_unique_keys)
    except (ValueError, RecursionError) as error:
        raise InputError(f"{where}: broken JSON ({error}); one object on each line is right") from error
    return _checked_object(value, where)


def _unique_keys(pairs: list[tuple[str, Any]]) -> Values:
    """Build a JSON object; raises ValueError for a repeated key, of which json would silently keep the last."""
    values = dict(pairs)
    if len(values) != len(pairs):
        twice = next(name for number, (name, _) in enumerate(pairs) if name in dict(pairs[:number]))
        raise ValueError(f"the field {twice!r} is repeated")
    return values


def _checked_object(value: Any, where: str) -> Values:
    if not isinstance(value, dict):
        raise InputError(f'{where}: a JSON {type(value).__name__}; an object like {{"prompt": ...}} is right')
    return value


def _read_json(stream: IO[bytes], path: Path) -> NumberedRows:
    """Read an array of objects; a file with one object per line is read as JSON lines."""
    content = "\n".join(line for _, line in _text_lines(stream, path))
    if not content.lstrip().startswith("["):
        yield from _read_jsonl(io.BytesIO(content.encode()), path)
        return
    try:
        items = json.loads(content, object_pairs_hook=_unique_keys)
    except (ValueError, RecursionError) as error:
        raise InputError(f"{path}: broken JSON ({error}); an array of objects is right") from error
    for number, item in enumerate(items, start=1):
        yield number, _checked_object(item, f"{path}: row {number}")


def _read_csv(stream: IO[bytes], path: Path) -> NumberedRows:
    # csv refuses cells above 128 KiB by default; long documents are legitimate here.
    csv.field_size_limit(sys.maxsize)
    reader = csv.DictReader((line for _, line in _decoded_lines(stream, path)), strict=True)
    try:
        _check_header(reader.fieldnames or (), path)
        for row in reader:
            if None in row or None in row.values():
                columns = len(reader.fieldnames or ())
                raise InputError(f"{path}:{reader.line_num}: the header names {columns} columns, this row has others")
            yield reader.line_num, dict(row)
    except csv.Error as error:
        raise InputError(f"{path}:{reader.line_num + 1}: not a CSV row ({error})") from error


def _check_header(names: Sequence[str], path: Path) -> None:
    """Raise InputError for a repeated column, of which csv would silently keep the last."""
    if twice := [name for number, name in enumerate(names) if name in names[:number]]:
        raise InputError(f"{path}:1: the column {twice[0]!r} is repeated in the header")


def _read_parquet(stream: IO[bytes], path: Path) -> NumberedRows:
    import pyarrow
    import pyarrow.parquet

    # Parquet is read from its end, and a gzip stream cannot seek cheaply.
    source: Any = io.BytesIO(stream.read()) if path.name.lower().endswith(".gz") else stream
    number = 0
    try:
        for batch in pyarrow.parquet.ParquetFile(source).iter_batches():
            for row in batch.to_pylist():
                number += 1
                yield number, row
    except pyarrow.ArrowException as error:
        raise InputError(f"{path}: broken parquet file ({error})") from error


def _read_text(stream: IO[bytes], path: Path) -> NumberedRows:
    block: list[str] = []
    first = 1
    for number, line in _text_lines(stream, path):
        if line.strip():
            first = first if block else number
            block.append(line)
        elif block:
            yield first, {"text": "\n".join(block)}
            block = []
    if block:
        yield first, {"text": "\n".join(block)}


READERS: dict[str, Callable[[IO[bytes], Path], NumberedRows]] = {
    ".jsonl": _read_jsonl,
    ".json": _read_json,
    ".csv": _read_csv,
    ".parquet": _read_parquet,
    ".txt": _read_text,
}
