"""The file of `rlhf sample`: JSON lines that a later call goes on with, or standard output."""

import json
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from pipeline.errors import InputError
from pipeline.files import read_object, refused_by_disk, write_json
from pipeline.run.lock import lock_held

NUMBER = "number"  # column of a row: which of the prompts it is of, from 1


@dataclass(slots=True)
class SampleFile:
    """Where rows are written, in the order of their prompts.

    path: the file; None = standard output.
    num_rows: rows that it has.
    last: number of the prompt of the last row; 0 = it has none.
    """

    path: Path | None
    num_rows: int = 0
    last: int = 0

    def write(self, number: int, row: Mapping[str, Any]) -> None:
        """Write the row of prompt `number`. Raises EnvironmentFault where the disk refuses."""
        line = json.dumps({NUMBER: number, **row}, ensure_ascii=False)
        if self.path is None:
            print(line, flush=True)
        else:
            with refused_by_disk(self.path), self.path.open("a", encoding="utf-8") as stream:
                stream.write(line + "\n")
        self.num_rows, self.last = self.num_rows + 1, number


@contextmanager
def sample_file(path: str, settings: Mapping[str, Any], *, overwrite: bool) -> Iterator[SampleFile]:
    """Hold a file for rows behind its last whole one, or a new file; standard output where `path` is empty.

    `<path>.settings.json` has the settings that it was begun with.

    Raises:
        InputError: the file was begun with other settings, or is none of this command.
        EnvironmentFault: another process holds it, or it cannot be written.
    """
    if not path:
        yield SampleFile(None)
        return
    file = Path(path).expanduser()
    with lock_held(file, file.with_name(f".{file.name}.lock"), "--output"):
        with refused_by_disk(file):
            if overwrite:
                file.unlink(missing_ok=True)
            opened = opened_file(file, settings)
        yield opened


def opened_file(file: Path, settings: Mapping[str, Any]) -> SampleFile:
    """Return a file without its torn last row, or a new one with its settings beside it.

    Raises:
        InputError: see `sample_file`.
    """
    beside = file.with_name(f"{file.name}.settings.json")
    if not file.exists() or not file.stat().st_size:
        write_json(beside, settings)
        file.touch()
        return SampleFile(file)
    begun, now = read_object(beside), json.loads(json.dumps(settings))
    anew = "name another --output, or give --overwrite to begin anew"
    if not begun:
        raise InputError(f"--output: {file} exists, and {beside.name} with its settings does not; {anew}")
    if other := [name for name in now if begun.get(name) != now[name]]:
        values = " and ".join(f"{name} {begun.get(name)}, now {now[name]}" for name in other)
        raise InputError(f"--output: {file} was begun with {values}; give the same, {anew}")
    opened, end = SampleFile(file), 0
    with file.open("r+b") as stream:
        for line in stream:
            if not line.endswith(b"\n"):
                break
            number = number_of(line)
            if number <= opened.last:
                place = f"{file}:{opened.num_rows + 1}"
                raise InputError(f"--output: {place}: no row of `rlhf sample` behind that before; {anew}")
            opened.num_rows, opened.last, end = opened.num_rows + 1, number, end + len(line)
        stream.truncate(end)
    return opened


def number_of(line: bytes) -> int:
    """Return the number of a row's prompt; 0 for a line that is no row."""
    try:
        number = json.loads(line)[NUMBER]
    except (ValueError, TypeError, KeyError):
        return 0
    return number if isinstance(number, int) else 0
