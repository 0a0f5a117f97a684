"""What a loss of power would spoil: files that get their name before they are on the disk."""

import hashlib
import json
import os
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest


@contextmanager
def names_watched(
    log: Path, promised: Callable[[Path], Iterable[Path]] = lambda named: ()
) -> Iterator[Callable[[], dict[str, list[str]]]]:
    """Watch flushes and renames of this process and its forks.

    Yields what returns {file or folder: its files that were not on the disk when it last got its name}, by their
    contents.

    Args:
        log: a file of the watch, which forks write to. promised: other files of which a name says that they are whole.
    """
    log = log.absolute()
    fsync, rename, replace = os.fsync, os.rename, os.replace

    def note(*line: object) -> None:
        with log.open("a") as file:
            file.write(json.dumps(line) + "\n")

    def fsync_seen(descriptor: int) -> None:
        fsync(descriptor)
        target = Path(os.readlink(f"/proc/self/fd/{descriptor}"))
        if target.is_file():
            note("flushed", content_of(target))

    def seen(call: Callable[..., None]) -> Callable[..., None]:
        def named(source: Any, target: Any, **further: Any) -> None:
            given, named = Path(source).absolute(), Path(target).absolute()
            files = [path for path in (given, *sorted(given.rglob("*")), *promised(named)) if path.is_file()]
            note("named", str(named), [(path.name, content_of(path)) for path in files])
            call(source, target, **further)

        return named

    def found() -> dict[str, list[str]]:
        names, flushed = dict[str, list[str]](), set[str]()
        for kind, what, *files in map(json.loads, log.read_text().splitlines()):
            if kind == "flushed":
                flushed.add(what)
            else:
                names[what] = [name for name, content in files[0] if content not in flushed]
        return names

    log.touch()
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(os, "fsync", fsync_seen)
        patch.setattr(os, "rename", seen(rename))
        patch.setattr(os, "replace", seen(replace))
        yield found


def content_of(file: Path) -> str:
    return hashlib.sha256(file.read_bytes()).hexdigest()
