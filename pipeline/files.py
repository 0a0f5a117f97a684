"""Atomic writing of files and folders, hashes of files, and errors of the disk.

Each file or folder is written under a temporary name, flushed to disk and renamed: it is complete or missing.
"""

import errno
import functools
import hashlib
import json
import logging
import os
import shutil
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

from pipeline.errors import EnvironmentFault, InputError

log = logging.getLogger(__name__)

GIB = 2**30
# Files that identify folders: of a model, of a run, and of cached rows (https://bford.info/cachedir).
OURS, RUN_LOCK, CACHE_TAG = "training_config.json", "run.lock", "CACHEDIR.TAG"
PROJECT = "rlhf-pipeline"
_warned: set[str] = set()  # by `tolerated`


def flush(path: Path) -> None:
    """Flush a file or a folder to disk by fsync."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def write_bytes(path: Path, content: bytes) -> None:
    """Write `content` to `path` atomically."""
    temporary = path.with_name(f".{path.name}.writing")
    temporary.unlink(missing_ok=True)  # writing to a link or a FIFO would write elsewhere
    temporary.write_bytes(content)
    flush(temporary)
    temporary.replace(path)


def write_text(path: Path, text: str) -> None:
    """Write `text` to `path` atomically."""
    write_bytes(path, text.encode())


def append_json_lines(path: Path, rows: Iterable[Mapping[str, Any]]) -> None:
    """Append rows to a file, each as a line of JSON."""
    with path.open("a", encoding="utf-8") as stream:
        stream.writelines(json.dumps(row, ensure_ascii=False) + "\n" for row in rows)


def append_row(path: Path, row: Mapping[str, Any]) -> None:
    """Append a row to JSON lines in one call, behind a whole line; on an error the file is as before."""
    line = json.dumps(row, ensure_ascii=False).encode() + b"\n"
    with path.open("ab+", buffering=0) as file:
        size = file.seek(0, os.SEEK_END)
        if size:
            file.seek(size - 1)
            line = line if file.read(1) == b"\n" else b"\n" + line
        try:
            if file.write(line) < len(line):
                raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        except OSError:
            file.truncate(size)
            raise


def write_json(path: Path, value: Any) -> None:
    """Write `value` as JSON to `path` atomically."""
    write_text(path, json.dumps(value, indent=2, ensure_ascii=False) + "\n")


def read_object(path: Path) -> dict[str, Any]:
    """Return the object in a JSON file; {} if it is missing or unreadable."""
    content = read_json(path)
    return content if isinstance(content, dict) else {}


def read_json(path: Path) -> Any:
    """Return the content of a JSON file; None if it is unreadable or no regular file: opening a FIFO could block."""
    with suppress(OSError, ValueError):
        return parse_json(path.read_text(encoding="utf-8")) if path.is_file() else None
    return None


def parse_json(text: str | bytes) -> Any:
    """Return the content of a JSON text. Raises ValueError, also if it is nested too deeply for Python."""
    try:
        return json.loads(text)
    except RecursionError:
        raise ValueError("nested too deep") from None


def with_new_folder(folder: Path, fill: Callable[[Path], None]) -> None:
    """Write a model folder atomically: `fill` writes a temporary one, which is flushed to disk and renamed.

    Raises:
        InputError: `folder` holds other files. EnvironmentFault: it cannot be written; an earlier folder stays.
    """
    folder = folder.resolve()  # a link to another disk stays a link
    check_replaceable(folder)
    fresh = folder.parent / f".{folder.name}.writing"
    with replacing(folder, fresh):
        folder.parent.mkdir(parents=True, exist_ok=True)
        shutil.rmtree(fresh, ignore_errors=True)
        fresh.mkdir()
        fill(fresh)


@contextmanager
def replacing(folder: Path, fresh: Path) -> Iterator[None]:
    """Flush `fresh`, which the context fills, and rename it to `folder`; an earlier `folder` is deleted last.

    Its files get the permissions of `fresh`, by the umask: safetensors makes files readable by their owner only.

    Raises:
        EnvironmentFault: the disk refused; `fresh` is deleted, an earlier `folder` stays.
    """
    old = folder.parent / f".{folder.name}.old"
    try:
        yield
        with tolerated(f"{folder}: permissions of its files"):
            for path in filter(Path.is_file, fresh.rglob("*")):
                path.chmod(fresh.stat().st_mode & 0o666)
        for path in [*fresh.rglob("*"), fresh]:
            flush(path)
        if folder.exists():
            shutil.rmtree(old, ignore_errors=True)
            folder.rename(old)
        fresh.rename(folder)
        flush(folder.parent)
    except BaseException as error:
        shutil.rmtree(fresh, ignore_errors=True)
        if is_disk_trouble(error):
            raise EnvironmentFault(cannot_write(folder, error)) from error
        raise
    shutil.rmtree(old, ignore_errors=True)


@contextmanager
def tolerated(what: str) -> Iterator[None]:
    """Log an OSError of the context once, and continue: a failed write here must not end the run."""
    try:
        yield
    except OSError as error:
        if what not in _warned:
            log.warning("%s cannot be written, training continues: %s", what, error.strerror or error)
        _warned.add(what)


@contextmanager
def refused_by_disk(path: Path) -> Iterator[None]:
    """Raise an EnvironmentFault that names `path` for an OSError of the context."""
    try:
        yield
    except OSError as error:
        raise EnvironmentFault(cannot_write(path, error)) from error


def is_disk_trouble(error: BaseException) -> bool:
    """Return whether the file system caused an error: an OSError, or safetensors' error around one."""
    return isinstance(error, OSError) or (type(error).__name__ == "SafetensorError" and "os error" in str(error))


def cannot_write(path: Path, error: BaseException | str, *, needed: int = 0) -> str:
    """Return a line that names the path and the reason of a failed write, the bytes needed and the bytes free."""
    reason = error.strerror if isinstance(error, OSError) and error.strerror else str(error)
    sizes = f"needs {needed / GIB:.3g} GiB, " if needed else ""
    return f"{path}: cannot be written: {reason} ({sizes}{free_bytes(path) / GIB:.3g} GiB free)"


def free_bytes(path: Path) -> int:
    """Return the free bytes of the disk of `path`, which need not exist yet."""
    return shutil.disk_usage(existing(path)).free


def existing(path: Path) -> Path:
    """Return `path`, or its nearest parent that exists."""
    return next(folder for folder in (path.absolute(), *path.absolute().parents) if folder.exists())


def check_replaceable(folder: Path) -> None:
    """Raise InputError for a non-empty folder that this project did not write: saving replaces whole folders."""
    if not folder.is_dir() or not any(folder.iterdir()) or is_origin(read_json(folder / OURS)):
        return
    others = f"other files ({min(path.name for path in folder.iterdir())}) and no {OURS}"
    content = f"a {OURS} that no run wrote" if (folder / OURS).exists() else others
    why = "a model folder is replaced as a whole: name one that is new or empty"
    raise InputError(f"--output-dir: {folder} holds {content}; {why}")


def is_origin(content: Any) -> bool:
    """Return whether the content of a file named OURS was written by a run, by a conversion, or ({}) by a merge."""
    if not isinstance(content, dict):
        return False
    is_of_run = isinstance(content.get("stage"), str) and isinstance(content.get("data"), dict)
    return not content or is_of_run or not {"converted_from", "quantised_from"}.isdisjoint(content)


def readable(path: str | Path) -> Path:
    """Return the path of a file to read. Raises OSError for what is no file: a pipe would wait for its writer."""
    if (file := Path(path)).exists() and not file.is_file():
        raise OSError(errno.EINVAL, "not a regular file", str(file))
    return file


def digest(path: Path) -> str:
    """Return the SHA-256 of a file's content, as hex. Raises OSError."""
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


CONFIG_FILES = ("config.json", "adapter_config.json")
EDGE_BYTES = 1 << 20


def model_fingerprint(name_or_path: str) -> str:
    """Hash a model folder's configuration and the size, head and tail of each weights file; a hub id is returned as it
    is.

    Whole weights are not read: 7B parameters would take minutes on every start.
    """
    folder = Path(name_or_path)
    if not name_or_path or not folder.is_dir():
        return name_or_path
    total = hashlib.sha256()
    for name in CONFIG_FILES:
        if (folder / name).is_file():
            total.update((folder / name).read_bytes())
    for path in sorted([*folder.glob("*.safetensors"), *folder.glob("*.bin")]):
        total.update(f"{path.name} {path.stat().st_size}".encode())
        with path.open("rb") as file:
            total.update(file.read(EDGE_BYTES))
            file.seek(max(0, path.stat().st_size - EDGE_BYTES))
            total.update(file.read(EDGE_BYTES))
    return total.hexdigest()


@functools.cache
def warn_of_links(folder: Path) -> None:
    """Warn once of links in a folder that lead out of it: their targets are read, and may be copied into outputs.

    Links of a hub's cache are fine: they lead from a snapshot to its blobs, beside the snapshots.
    """
    top = Path(os.path.realpath(folder))
    allowed = (top, top.parent.parent / "blobs")
    for link in sorted(path for path in folder.rglob("*") if path.is_symlink()):
        target = Path(os.path.realpath(link))
        if not any(target.is_relative_to(parent) for parent in allowed):
            log.warning("%s: a link that leads out of its folder, to %s", link, target)


def has_config(folder: Path) -> bool:
    """Return True for a model's folder; False also for a folder without read permission."""
    try:
        return any((folder / name).is_file() for name in CONFIG_FILES)
    except OSError:
        return False


def own_version() -> str:
    """Return the version of this project: that of the checkout that runs, else the installed one."""
    import tomllib  # here, since every command imports this file
    from importlib import metadata

    settings = Path(__file__).resolve().parents[1] / "pyproject.toml"
    if settings.is_file():
        return str(tomllib.loads(settings.read_text(encoding="utf-8"))["project"]["version"])
    with suppress(metadata.PackageNotFoundError):
        return metadata.version(PROJECT)
    return "unknown"  # only the packages were copied


def cache_path(cache_dir: str | None) -> Path:
    """Return the path of the cache: `cache_dir`, else rlhf-pipeline in $XDG_CACHE_HOME or ~/.cache."""
    base = os.environ.get("XDG_CACHE_HOME") or "~/.cache"
    return Path(cache_dir or f"{base}/{PROJECT}").expanduser()


def cache_folder(cache_dir: str | None) -> Path:
    """Create the cache directory (see `cache_path`) with mode 0700. Raises EnvironmentFault."""
    folder = cache_path(cache_dir)
    try:
        folder.mkdir(mode=0o700, parents=True, exist_ok=True)
    except OSError as error:
        raise EnvironmentFault(
            f"cache directory {folder}: {error.strerror}; --data-output-path names another"
        ) from error
    return folder
