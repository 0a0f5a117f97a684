"""Store the records of all sources in a file, and in memory only the numbers by which records are chosen.

`selection.py` appends records and chooses positions; the processes of `shards.py` read the chosen records.
"""

import hashlib
import json
import math
from array import array
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Self

from pipeline.data.counts import Origin
from pipeline.data.formats import Record
from pipeline.data.turns import Message

if TYPE_CHECKING:
    import numpy as np

encoded = json.JSONEncoder(ensure_ascii=False).encode
SURROGATES = "surrogatepass"  # JSON can contain half a surrogate pair in the name of a column


class Spool:
    """Records in a file of JSON lines, which exists inside the context; memory has 27 bytes for each.

    A position counts the records from 0, over all sources in reading order. `appended` is called after each record with
    the number of records.
    """

    def __init__(self, file: Path, appended: Callable[[int], None] = lambda _: None) -> None:
        self.file, self._appended = file, appended
        self._starts, self._prompt_ids, self._responses = array("q"), array("q"), array("Q")
        self._is_test, self._is_text, self._length_ratios = array("b"), array("b"), array("b")
        self._runs: list[tuple[int, str]] = []  # (position of the first record, data path) of each run of one source
        self._size = 0

    def __enter__(self) -> Self:
        self._stream = self.file.open("wb")
        return self

    def __exit__(self, *error: object) -> None:
        try:
            self._stream.close()  # flushes its buffer, which fails on a full disk
        finally:
            self.file.unlink(missing_ok=True)

    def __len__(self) -> int:
        return len(self._starts)

    def append(self, record: Record) -> None:
        """Append a record. Raises OSError if the file cannot be written."""
        if not self._runs or self._runs[-1][1] != record.origin.path:
            self._runs.append((len(self), record.origin.path))
        responses = f"{record.chosen!r} {record.rejected!r}".encode()  # faster than JSON
        self._responses.append(int.from_bytes(hashlib.blake2b(responses, digest_size=8).digest(), "big"))
        self._prompt_ids.append(record.prompt_id)
        self._is_test.append(record.split == "test")
        self._is_text.append(record.text is not None)
        self._length_ratios.append(length_ratio(record))
        self._starts.append(self._size)
        self._size += self._stream.write(to_line(record))
        self._appended(len(self))

    def starts(self, positions: "np.ndarray") -> "np.ndarray":
        """Return the byte offsets of the records' lines in the file: (N,) positions -> (N,) int64."""
        self._stream.flush()
        return taken(self._starts, positions)

    def prompt_ids(self, positions: "np.ndarray") -> "np.ndarray":
        """Return the ids of the records' prompts: (N,) positions -> (N,) int64."""
        return taken(self._prompt_ids, positions)

    def responses(self, positions: "np.ndarray") -> "np.ndarray":
        """Return a hash of the responses of each record: (N,) positions -> (N,) uint64."""
        return taken(self._responses, positions)

    def is_test(self, positions: "np.ndarray") -> "np.ndarray":
        """Return True for the records that their source marks as held out: (N,) positions -> (N,) bool."""
        return taken(self._is_test, positions).astype(bool)

    def is_text(self, positions: "np.ndarray") -> "np.ndarray":
        """Return True for plain documents: (N,) positions -> (N,) bool."""
        return taken(self._is_text, positions).astype(bool)

    def length_ratios(self, positions: "np.ndarray") -> "np.ndarray":
        """Return `length_ratio` of the records: (N,) positions -> (N,) int8."""
        return taken(self._length_ratios, positions)

    def by_source(self, positions: "np.ndarray") -> Iterator[tuple[str, "np.ndarray"]]:
        """Yield (data path, positions) for each part of ascending positions that is of one source."""
        import numpy as np

        cuts = np.searchsorted(positions, [first for first, _ in self._runs[1:]])
        for (_, path), part in zip(self._runs, np.split(positions, cuts), strict=False):
            if len(part):
                yield path, part

    def origin(self, position: int) -> Origin:
        """Return the origin of the record at a position."""
        import numpy as np

        (record,) = records_at(self.file, self.starts(np.array([position])))
        return record.origin


def length_ratio(record: Record) -> int:
    """Return 4 * log2(length of a pair's chosen response / length of its rejected one), rounded.

    Lengths are in characters. Below 0: the chosen one is shorter. 0 for records that are no pairs.
    """
    if record.chosen is None or record.rejected is None:
        return 0
    return round(4 * math.log2(max(len(record.chosen), 1) / max(len(record.rejected), 1)))


def taken(column: array, positions: "np.ndarray") -> "np.ndarray":
    """Return a copy of the numbers at these positions: an array with live views cannot grow."""
    import numpy as np

    return np.asarray(column)[positions]


def to_line(record: Record) -> bytes:
    """Return a record as a line of JSON."""
    turns = [(turn.role, turn.content) for turn in record.messages]
    origin = (record.origin.file, record.origin.row, record.origin.source)
    texts = (record.chosen, record.rejected, record.text, record.margin, record.label)
    return (
        encoded((turns, *texts, record.prompt_id, origin, record.split, record.columns, record.extra)) + "\n"
    ).encode(errors=SURROGATES)


def records_at(file: Path, starts: Iterable[int]) -> Iterator[Record]:
    """Yield the records whose lines start at these bytes of a spool's file."""
    with file.open("rb") as stream:
        for start in starts:
            stream.seek(start)
            line = json.loads(stream.readline().decode(errors=SURROGATES))
            turns, *texts, prompt_id, origin, split, columns, extra = line
            yield Record(
                tuple(Message(*turn) for turn in turns),
                *texts,
                prompt_id=prompt_id,
                origin=Origin(*origin),
                split=split,
                columns=tuple(columns),
                extra=extra,
            )
