"""Copy each checkpoint and model to every host of a run, if the hosts share no storage.

Then every host can resume the run, and the next stage finds its models. On shared storage nothing is copied.
"""

import os
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import TypeVar

from pipeline import dist
from pipeline.errors import EnvironmentFault
from pipeline.files import cannot_write, check_replaceable, flush
from pipeline.heartbeat import beat_again

T = TypeVar("T")

PIECE_BYTES = 2**26

_is_shared = True


def detect_shared_storage(file: Path) -> bool:
    """Return True if all hosts see the same folder; `file` has different texts on different disks. A collective."""
    global _is_shared
    texts = dist.gather_objects(file.read_text(encoding="utf-8") if file.is_file() else "")
    _is_shared = len(set(texts)) == 1
    return _is_shared


def on_each_storage(work: Callable[[], T]) -> T:
    """Run `work` once for each disk of the run: on rank 0, or on the first rank of each host. A collective.

    Returns its result on rank 0. Its errors are raised on every rank.
    """
    return dist.on_main(work) if _is_shared else dist.on_each_machine(work)


def share(folder: Path) -> None:
    """Copy the `folder` that rank 0 has written to every host, in place of the host's own. A collective.

    Raises:
        InputError: a host has other files there.
        EnvironmentFault: a host could not write it.
    """

    def remove() -> None:
        if not dist.is_main():
            check_replaceable(folder)
            shutil.rmtree(folder, ignore_errors=True)

    if not _is_shared:
        dist.on_each_machine(remove)
        unite(folder)


def unite(folder: Path) -> None:
    """Copy to every host the files of `folder` that another host has, except hidden ones. A collective.

    Raises:
        EnvironmentFault: on every rank, if a host could not write.
    """
    if _is_shared:
        return
    files = [path for path in sorted(folder.rglob("*")) if path.is_file()] if is_first_of_host() else []
    sizes = {str(path.relative_to(folder)): path.stat().st_size for path in files}
    listings = dist.gather_objects({name: size for name, size in sizes.items() if not name.startswith(".")})
    firsts = dist.gather_objects(is_first_of_host())
    problem = ""
    for name in sorted({name for listing in listings for name in listing}):
        holders = [rank for rank, listing in enumerate(listings) if name in listing]
        if len(holders) < sum(firsts):
            missing = is_first_of_host() and name not in sizes
            size = listings[holders[0]][name]
            problem = copy_file(folder / name, size, source=holders[0], missing=missing and not problem) or problem
    if problems := [text for text in dist.gather_objects(problem) if text]:
        raise EnvironmentFault(problems[0])


def is_first_of_host() -> bool:
    return os.environ.get("LOCAL_RANK", "0") == "0"


def copy_file(path: Path, size: int, *, source: int, missing: bool) -> str:
    """Copy a file of `size` bytes from rank `source` to the ranks where it is `missing`; return what went wrong."""
    problem, partial = "", path.with_name(f".{path.name}.arriving")
    reader = path.open("rb") if dist.rank() == source else None
    try:
        if missing:
            path.parent.mkdir(parents=True, exist_ok=True)
            partial.write_bytes(b"")
    except OSError as error:
        problem = cannot_write(path, error)
    for start in range(0, size, PIECE_BYTES):
        count = min(PIECE_BYTES, size - start)
        # Every rank takes part to the end, even one that cannot write.
        piece = dist.broadcast_bytes(reader.read(count) if reader else b"", count, source=source)
        beat_again()
        try:
            if missing and not problem:
                with partial.open("ab") as file:
                    file.write(piece)
        except OSError as error:
            problem = cannot_write(path, error)
    if reader:
        reader.close()
    if missing and not problem:
        flush(partial)
        partial.replace(path)
    return problem
