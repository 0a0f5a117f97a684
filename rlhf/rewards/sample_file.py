"""The output of `rlhf sample`: standard output, or a file of JSON lines that a later call can complete.

With several ranks, each writes a part beside the file; the rank that ends last joins the parts.
"""

import heapq
import json
import sys
from collections.abc import Iterable, Mapping
from contextlib import AbstractContextManager, ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from pipeline.errors import InputError
from pipeline.files import append_json_lines, flush, read_object, refused_by_disk, write_json
from pipeline.redact import masked
from pipeline.run.lock import lock_held
from pipeline.run.output_checks import clashes

NUMBER = "number"  # column of a row: number of its prompt, from 1
IS_WHOLE = "is_whole"  # a setting of files that several ranks wrote: all parts are joined
JOINING_S = 600.0  # chosen by hand: joining copies the parts once
ANEW = "name another --output, or give --overwrite to start again"


@dataclass(slots=True)
class SampleFile:
    """The file that rows are written to, in the order of their prompts.

    path: the file; None = standard output.
    num_rows: rows that it has.
    last: number of the prompt of the last row; 0 = there is none.
    """

    path: Path | None
    num_rows: int = 0
    last: int = 0

    def write(self, number: int, row: Mapping[str, Any]) -> None:
        """Write the row of prompt `number`. Raises EnvironmentFault if the disk refuses."""
        row = {NUMBER: number, **row}
        if self.path is None:
            # On a terminal control characters are escaped, since some control it.
            print(json.dumps(row, ensure_ascii=sys.stdout.isatty()), flush=True)
        else:
            with refused_by_disk(self.path):
                append_json_lines(self.path, [row])
        self.num_rows, self.last = self.num_rows + 1, number


def check_output(file: Path, inputs: Mapping[str, Iterable[str]]) -> None:
    """Raise InputError for an output file that the command also reads: one of its inputs, or in the folder of one.

    inputs: flag -> files, folders and hub ids.
    """
    tops = [(flag, Path(text).expanduser()) for flag, texts in inputs.items() for text in texts]
    read = [(flag, path) for flag, top in tops for path in (top, *top.rglob("*"))]
    for line in clashes((("--output", one) for one in (file, settings_of(file))), read):
        raise InputError(line)


def open_samples(file: Path | None, settings: Mapping[str, Any], *, overwrite: bool) -> SampleFile:
    """Return a file that continues after its last whole row, or a new one; None: standard output.

    `<file>.settings.json` has the settings with which it was started.

    Raises:
        InputError: the file was started with other settings, or another program wrote it.
        EnvironmentFault: it cannot be written.
    """
    if file is None:
        return SampleFile(None)
    with refused_by_disk(file):
        if overwrite:
            file.unlink(missing_ok=True)
        settings_file = settings_of(file)
        if not file.exists() or not file.stat().st_size:
            write_json(settings_file, settings)
            file.touch()
            return SampleFile(file)
        check_settings(file, settings_file, settings)
        return without_torn_row(file)


def settings_of(file: Path) -> Path:
    """Return the file with the settings of a file of samples."""
    return file.with_name(f"{file.name}.settings.json")


def output_held(file: Path, *, wait_s: float = 0.0) -> AbstractContextManager[None]:
    """Lock a file for this process. Raises EnvironmentFault if another process still has it after `wait_s`."""
    return lock_held(file, file.with_name(f".{file.name}.lock"), "--output", wait_s=wait_s)


def part_of(file: Path, rank: int, size: int) -> Path:
    """Return the file that one of `size` ranks writes."""
    return file.with_name(f"{file.name}.part-{rank + 1}-of-{size}")


def is_joined(file: Path, settings: Mapping[str, Any]) -> bool:
    """Return True if ranks have completed the file already. Raises InputError if it was started with other settings."""
    if not file.exists():
        return False
    check_settings(file, settings_of(file), settings)
    return bool(read_object(settings_of(file)).get(IS_WHOLE))


def join_parts(file: Path, settings: Mapping[str, Any], *, rank: int, size: int) -> int:
    """Mark a rank's part as complete; if it is the last one, join all. Return the number of rows, or 0 without a join.

    Raises EnvironmentFault if the disk refuses, or if another process locks the file for JOINING_S.
    """
    parts, whole = [part_of(file, one, size) for one in range(size)], {**settings, IS_WHOLE: True}
    with refused_by_disk(file), ExitStack() as stack:
        flush(parts[rank])
        write_json(settings_of(parts[rank]), whole)
        # Another rank that ends now may have checked before this part was complete, so this rank checks afterwards.
        stack.enter_context(output_held(file, wait_s=JOINING_S))
        mine = read_object(settings_of(parts[rank]))
        # Another rank has joined them; or a part is incomplete, or from an earlier command.
        if not mine or any(read_object(settings_of(part)) != mine for part in parts):
            return 0
        lines = [stack.enter_context(part.open("rb")) for part in parts]
        joined, count = file.with_name(f".{file.name}.writing"), 0
        with joined.open("wb") as stream:
            for line in heapq.merge(*lines, key=number_of):
                count += stream.write(line) > 0
        flush(joined)  # before the parts are deleted
        write_json(settings_of(file), whole)
        joined.replace(file)
        for part in parts:
            settings_of(part).unlink()
            part.unlink()
        return count


def check_settings(file: Path, settings_file: Path, settings: Mapping[str, Any]) -> None:
    """Raise InputError unless a file was started with these settings."""
    before, now = masked(read_object(settings_file)), json.loads(json.dumps(settings))
    if not before:
        raise InputError(f"--output: {file} exists, and {settings_file.name} with its settings does not; {ANEW}")
    if other := [name for name in now if before.get(name) != now[name]]:
        values = " and ".join(f"{name} {before.get(name)}, now {now[name]}" for name in other)
        raise InputError(f"--output: {file} was started with {values}; give the same, {ANEW}")


def without_torn_row(file: Path) -> SampleFile:
    """Truncate a torn last row, and return the file with its state. Raises InputError for lines that are no rows."""
    samples, end = SampleFile(file), 0
    with file.open("r+b") as stream:
        for line in stream:
            if not line.endswith(b"\n"):
                break
            if (number := number_of(line)) <= samples.last:
                where = f"{file}:{samples.num_rows + 1}"
                raise InputError(f"--output: {where}: expected the next row of `rlhf sample`; {ANEW}")
            samples.num_rows, samples.last, end = samples.num_rows + 1, number, end + len(line)
        stream.truncate(end)
    return samples


def number_of(line: bytes) -> int:
    """Return the number of a row's prompt; 0 for a line that is no row."""
    try:
        number = json.loads(line)[NUMBER]
    except (ValueError, TypeError, KeyError):
        return 0
    return number if isinstance(number, int) else 0
