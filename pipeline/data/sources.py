"""Open a data path, local or on the hub, and yield its raw rows with their origin and split.

`readers.py` reads files, `formats.py` gives columns their meaning, `selection.py` calls both.
"""

import errno
import functools
import hashlib
import logging
import os
import re
from collections.abc import Iterable, Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any

from pipeline.data.counts import Origin
from pipeline.data.known_sets import KNOWN_SETS, KnownSet
from pipeline.data.readers import READERS, Row, Split, data_suffix, read_file
from pipeline.errors import EnvironmentFault, InputError, nearest
from pipeline.files import CACHE_TAG, OURS, RUN_LOCK, digest, warn_of_links
from pipeline.hub import commits_read, go_offline_without_network, offline, split_revision

log = logging.getLogger(__name__)

EVAL_NAMES = ("test", "validation", "valid", "val", "eval", "evaluation", "dev")


def parse_path(text: str) -> tuple[str, float]:
    """Parse 'a.jsonl:0.7' to a path and the share of its rows to use, 1 without a weight.

    Raises InputError for a weight outside (0, 1].
    """
    path, colon, tail = text.rpartition(":")
    if not colon or Path(text).expanduser().exists():
        return text, 1.0
    try:
        weight = float(tail)
    except ValueError:
        weight = float("nan")
    if not path or not 0 < weight <= 1:
        raise InputError(
            f"data path {text!r}: got the weight {tail!r}, expected a share above 0 up to 1, like {path}:0.5"
        )
    return path, weight


def split_of(name: object) -> Split | None:
    """Return 'train' or 'test' for a split's or file's name ('train-00000-of-00002', 'validation'), else None."""
    head = re.split(r"[^a-z]", str(name).lower(), maxsplit=1)[0]
    if head in ("train", "training"):
        return "train"
    return "test" if head in EVAL_NAMES else None


def read_rows(path: str) -> Iterator[Row]:
    """Yield the rows of a local file, a folder of data files, a `save_to_disk` folder, or a hub data set.

    Raises InputError for missing or broken data (a path that looks local is never read from the hub), EnvironmentFault
    if the hub cannot be reached.
    """
    local = _local_path(path)
    if local is None:
        yield from _hub_rows(path)
    elif _is_saved_dataset(local):
        yield from _dataset_rows(_load_saved(local), path)
    else:
        for file in _data_files(local):
            split = split_of(file.name) if local.is_dir() else None
            for number, values in read_file(file):
                yield Row(values, Origin(str(file), number, path), split)


def is_conversational(path: str) -> bool:
    """Return True if the first row of a source has a list of messages. Raises InputError if it cannot be read."""
    values = next(iter(read_rows(path))).values.values()
    return any(isinstance(value, list) and value and isinstance(value[0], dict) for value in values)


def fingerprint(path: str) -> str:
    """Return a hash of a data path's content: of the files' bytes, or the hub data set's own fingerprint."""
    local = _local_path(path)
    if local is None:
        splits = _load_hub(path)
        return _digest(f"{name}={splits[name]._fingerprint}" for name in sorted(splits))
    files = _files_below(local) if _is_saved_dataset(local) else _data_files(local)
    return _digest(f"{file.relative_to(local)}={digest(file)}" for file in files)


def _digest(parts: Iterable[str]) -> str:
    return hashlib.sha256("\n".join(parts).encode()).hexdigest()


def _local_path(path: str) -> Path | None:
    """Return the local file or folder, None for a hub id. Raises InputError if it looks local but is missing."""
    local = Path(path).expanduser()
    if local.exists():
        if local.is_dir() and not os.access(local, os.R_OK | os.X_OK):
            raise InputError(f"{local}: cannot be read ({os.strerror(errno.EACCES)})")
        if not (local.is_dir() or local.is_file()):
            raise InputError(f"{local}: not a file or folder")
        warn_of_links(local)
        return local
    if looks_local(path):
        raise InputError(f"data path {path!r}: no such file or folder{_nearest(local)}")
    return None


def is_local(path: str) -> bool:
    """Return True for a path on this machine, whether it exists or not; False for a hub id."""
    return Path(path).expanduser().exists() or looks_local(path)


def is_cached(path: str) -> bool:
    """Return True for a hub data set in the local cache of `datasets`."""
    with suppress(InputError, EnvironmentFault), offline():
        return bool(_load_hub(path))
    return False


def looks_local(path: str) -> bool:
    """Return True for a file path, False for a hub id, by first character, suffix, depth or an existing parent."""
    if path.startswith((".", "/", "~")) or data_suffix(Path(path)):
        return True
    name, _ = split_revision(path)
    return name.count("/") > 1 or ("/" in name and Path(name).parent.is_dir())


def hub_id(path: str) -> str:
    """Return the id of the hub repository that a data path names, without its revision."""
    known_set = _known_set(path)
    return (known_set and known_set.repository) or split_revision(path)[0]


def _known_set(path: str) -> KnownSet | None:
    return KNOWN_SETS.get(split_revision(path)[0])


def _nearest(missing: Path) -> str:
    """Return a hint with the most similar name in the deepest existing folder of the path."""
    child, parent = missing, missing.parent
    while not parent.is_dir() and parent != parent.parent:
        child, parent = parent, parent.parent
    names = sorted(entry.name for entry in parent.iterdir()) if os.access(parent, os.R_OK) else []
    return nearest(child.name, names) or f"; {parent.resolve()} has no name like {child.name}"


def _data_files(local: Path) -> list[Path]:
    """Return the data files of a path in sorted order: itself, or all below the folder."""
    files = [file for file in ([local] if local.is_file() else _files_below(local)) if data_suffix(file)]
    if not files:
        raise InputError(f"{local}: no data file; {', '.join(READERS)} are read, each also with .gz")
    return files


def _files_below(top: Path) -> list[Path]:
    """Return the files below a folder in sorted order, without hidden files and without outputs of this project.

    An output folder may be inside the data folder; a run's output must not change the data.
    """

    def refuse(error: OSError) -> None:
        raise InputError(f"{error.filename or top}: cannot be read ({error.strerror})") from error

    files = []
    for name, folders, names in os.walk(top, onerror=refuse):
        folder = Path(name)
        if folder != top and not {OURS, RUN_LOCK, CACHE_TAG}.isdisjoint(names):
            _warn_of_output(folder)
            folders.clear()
            continue
        folders[:] = [name for name in folders if not name.startswith(".")]
        files += [folder / name for name in names if not name.startswith(".") and (folder / name).is_file()]
    return sorted(files)


@functools.cache
def _warn_of_output(folder: Path) -> None:
    log.warning("%s: not read as data, because a run wrote it", folder)


def _is_saved_dataset(local: Path) -> bool:
    return (local / "dataset_dict.json").is_file() or (local / "dataset_info.json").is_file()


def _load_saved(local: Path) -> dict[str, Any]:
    """Load a `save_to_disk` folder: split name -> Dataset; the name is '' for a single data set."""
    import datasets

    try:
        loaded = datasets.load_from_disk(str(local))
    except Exception as error:
        raise InputError(f"{local}: not readable as a datasets.save_to_disk folder ({_one_line(error)})") from error
    return dict(loaded) if isinstance(loaded, datasets.DatasetDict) else {"": loaded}


def _hub_rows(path: str) -> Iterator[Row]:
    splits, known_set = _load_hub(path), _known_set(path)
    if known_set is None:
        yield from _dataset_rows(splits, path)
        return
    names = [name for name in (known_set.train_split, known_set.eval_split) if name]
    if missing := [name for name in names if name not in splits]:
        raise InputError(f"data path {path!r}: no split {missing[0]!r}, only {', '.join(splits)}; see known_sets.py")
    last = Row({}, Origin(path, 0), None)

    def shipped() -> Iterator[Row]:
        nonlocal last
        for row in _dataset_rows({name: splits[name] for name in names}, path):
            last = row
            yield row

    try:
        yield from known_set.convert(shipped())
    except (KeyError, TypeError, AttributeError) as error:
        columns = ", ".join(last.values)
        message = f"{last.origin}: not the columns known for this set ({columns}); see known_sets.py"
        raise InputError(message) from error


def _load_hub(path: str) -> dict[str, Any]:
    import datasets

    name, (_, revision) = hub_id(path), split_revision(path)
    options: dict[str, Any] = {"revision": revision} if revision else {}
    if known_set := _known_set(path):
        options = {"revision": known_set.revision, "data_dir": known_set.folder} | options
    go_offline_without_network()
    try:
        splits = dict(datasets.load_dataset(name, **options))
    except datasets.exceptions.DatasetNotFoundError as error:
        raise InputError(f"data path {path!r}: neither a local path nor a data set on the hub (private?)") from error
    except (OSError, ConnectionError) as error:
        hint = f"run datasets.load_dataset({name!r}) once where there is a network (HF_HOME keeps it), or give a file"
        raise EnvironmentFault(f"data path {path!r}: the hub cannot be reached ({_one_line(error)}); {hint}") from error
    except Exception as error:
        raise InputError(f"data path {path!r}: datasets cannot load it ({_one_line(error)})") from error
    if commit := _commit_of(splits):
        commits_read[path] = commit
        if revision and datasets.config.HF_HUB_OFFLINE and not commit.startswith(revision):
            raise EnvironmentFault(
                f"data path {path!r}: without a network only commit {commit} can be read, which was fetched last; "
                "give that commit, or fetch the other one where there is a network"
            )
    return splits


def _commit_of(splits: dict[str, Any]) -> str | None:
    """Return the commit of a hub data set; the library names the folder of its cached rows after it."""
    folders = [Path(file["filename"]).parent.name for split in splits.values() for file in split.cache_files]
    return next((name for name in folders if re.fullmatch("[0-9a-f]{40}", name)), None)


def _one_line(error: Exception) -> str:
    return " ".join(str(error).split())[:200]


def _dataset_rows(splits: dict[str, Any], file: str) -> Iterator[Row]:
    """Yield the rows of the training and evaluation splits; only one of several evaluation splits is read."""
    by_preference = (name for start in EVAL_NAMES for name in splits if split_of(name) and name.startswith(start))
    eval_split = next(by_preference, None)
    for name, dataset in splits.items():
        split = split_of(name)
        if split == "test" and name != eval_split:
            continue
        origin = f"{file}[{name}]" if name else file
        for index, values in enumerate(dataset):
            yield Row(values, Origin(origin, index + 1, file), split)
