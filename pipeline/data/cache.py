"""Tokenise a data set once, and load it memory-mapped from the cache in later runs.

The cache key covers the contents of sources, the tokenizer and all options. selection.py chooses records, shards.py
tokenises them.
"""

import contextlib
import hashlib
import json
import logging
import shutil
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from filelock import BaseFileLock, FileLock, Timeout

from pipeline.data import known_sets
from pipeline.data.counts import Counts, RowOutcome
from pipeline.data.readers import NO_COLUMNS
from pipeline.data.row_kinds import EXTRA
from pipeline.data.selection import DataOptions, mixed_sizes, ratios_of, select_records, uniform
from pipeline.data.shards import SHARDS, ShardWriters, write_rows
from pipeline.data.sources import fingerprint, parse_path
from pipeline.data.spool import Spool
from pipeline.data.templates import set_template
from pipeline.errors import EnvironmentFault, InputError
from pipeline.files import CACHE_TAG, cache_folder, digest, flush
from pipeline.heartbeat import INTERVAL_S, beat_again

if TYPE_CHECKING:
    import numpy as np
    from datasets import Dataset
    from transformers import PreTrainedTokenizerBase

log = logging.getLogger(__name__)

# Part of every key: increase it when the same input gives other rows.
FORMAT_VERSION = 9
COLUMNS_SUFFIX = ".columns.arrow"  # suffix of files that hold only the column EXTRA (see `move_out`)


@dataclass(frozen=True, slots=True)
class StageData:
    """Memory-mapped training and evaluation rows, and counts of what was dropped or repaired.

    Prompts also have a column EXTRA if the data set has columns that are not tokenised: these, as JSON, for rewards.
    """

    train: "Dataset"
    eval: "Dataset"
    counts: Counts


def load_or_build(options: DataOptions, tokenizer: "PreTrainedTokenizerBase") -> StageData:
    """Return the tokenised rows of these options, in source order.

    Columns are those of `RowKind.schema`. The call sets the tokenizer's template to options.template. One process
    builds the rows while the others wait for its file lock. Raises InputError if no training row is left.
    """
    set_template(tokenizer, options.template)
    cache = cache_folder(options.cache_dir)
    folder = cache / f"{cache_prefix(options)}-{cache_key(options, tokenizer)[:32]}"
    if not folder.is_dir():
        with locked(FileLock(f"{folder}.lock")):
            if not folder.is_dir():
                _build_folder(folder, options, tokenizer)
    counts = Counts.from_json(json.loads((folder / "counts.json").read_text(encoding="utf-8")))
    train, evaluation = (load(folder / f"{split}.arrow") for split in ("train", "eval"))
    return StageData(train, evaluation, counts)


def load(file: Path) -> "Dataset":
    """Return the memory-mapped rows of a file, with the column EXTRA if `move_out` wrote a file of it."""
    from datasets import Dataset, concatenate_datasets

    rows, others = Dataset.from_file(str(file)), file.with_suffix(COLUMNS_SUFFIX)
    return concatenate_datasets([rows, Dataset.from_file(str(others))], axis=1) if others.is_file() else rows


def data_fingerprint(rows: "Dataset", *, columns: bool = False) -> str:
    """Return the SHA-256 of the memory-mapped files of a dataset: its rows in their order, or their other columns."""
    files = [file["filename"] for file in rows.cache_files if file["filename"].endswith(COLUMNS_SUFFIX) == columns]
    return hashlib.sha256("".join(digest(Path(file)) for file in files).encode()).hexdigest()


@contextmanager
def locked(lock: BaseFileLock) -> Iterator[None]:
    """Hold `lock` while the context is open, then delete its file.

    While another process holds it, this one waits and writes heartbeats, by which the supervisor sees that it runs.
    """
    is_told = False
    while not lock.is_locked:
        try:
            lock.acquire(timeout=INTERVAL_S)
        except Timeout:
            if not is_told:
                log.info("waiting for another process that prepares the same data")
            is_told = True
            beat_again()
    try:
        yield
    finally:
        # Deleted while it is locked: a waiting process then sees that its lock file has no name, and opens the path
        # again.
        Path(lock.lock_file).unlink(missing_ok=True)
        lock.release()


def cache_prefix(options: DataOptions) -> str:
    """Return the name of rows by their kind and shares, for the cache key and the folder's name.

    `pairs-1-2` are pairs from the shares of --data-split with the indices 1 and 2, counted from 0.
    """
    return "-".join([options.rows, *map(str, options.shares)])


def cache_key(options: DataOptions, tokenizer: "PreTrainedTokenizerBase") -> str:
    """Return a SHA-256 over what the rows depend on: contents of the sources, tokenizer, template, options, version."""
    content = asdict(options)
    for name in ("rows", "shares", "title", "cache_dir"):
        del content[name]
    paths = [*options.data_path, *options.eval_data_path, *options.sft_only_data_path]
    content |= {
        "stage": cache_prefix(options),
        "version": FORMAT_VERSION,
        # Users may edit the converters, which changes rows.
        "converters": hashlib.sha256(Path(known_sets.__file__).read_bytes()).hexdigest(),
        "sources": [fingerprint(parse_path(path)[0]) for path in paths],
        "tokenizer": tokenizer_content(tokenizer),
    }
    return hashlib.sha256(json.dumps(content, sort_keys=True).encode()).hexdigest()


def tokenizer_content(tokenizer: "PreTrainedTokenizerBase") -> str:
    """Return a SHA-256 over vocabulary, merges, special tokens and chat template of a tokenizer."""
    backend = getattr(tokenizer, "backend_tokenizer", None)
    vocabulary = json.dumps(tokenizer.get_vocab(), sort_keys=True) if backend is None else backend.to_str()
    special = {name: str(token) for name, token in tokenizer.special_tokens_map.items()}
    content = json.dumps([type(tokenizer).__name__, vocabulary, special, tokenizer.chat_template], sort_keys=True)
    return hashlib.sha256(content.encode()).hexdigest()


def _build_folder(folder: Path, options: DataOptions, tokenizer: "PreTrainedTokenizerBase") -> None:
    """Write the rows beside `folder`, then rename: an existing folder is complete.

    The work of a killed preparation is continued; the lock keeps other processes from writing it.
    """
    counts, ratios = Counts(), ratios_of(options)
    partial = folder.with_suffix(".partial")

    def write(name: str, outcome: RowOutcome, chosen: "np.ndarray") -> int:
        counts_here, file = Counts(), partial / f"{name}.arrow"
        num_rows = write_rows(file, options, records, chosen, writers=writers, counts=counts_here)
        for path, part in records.by_source(chosen):
            counts_here.settle(outcome, path, len(part))
        for outcomes in counts_here.sources.values():
            outcomes[outcome] -= outcomes["dropped"]
        counts.merge(counts_here)
        return num_rows

    def write_train(chosen: "np.ndarray") -> int:
        import numpy as np

        if options.mixture == "share" or options.held_out_only:
            return write("train", "to train on", chosen)
        sizes = {}
        for number, path in enumerate(ratios):
            parts = [part for source, part in records.by_source(chosen) if source == path]
            sizes[path] = write(f"source-{number}", "to train on", np.concatenate([chosen[:0], *parts]))
        mixed = mixed_sizes(sizes, ratios)
        counts.factors = {path: mixed[path] / sizes[path] for path in sizes}
        write_mixture([partial / f"source-{number}.arrow" for number in range(len(sizes))], [*mixed.values()], options)
        return sum(mixed.values())

    try:
        partial.mkdir(mode=0o700, exist_ok=True)
        (partial / CACHE_TAG).write_text("Signature: 8a477f597d28d172789f06886806bc55\n", encoding="utf-8")
        with (
            ShardWriters(tokenizer, options) as writers,
            Spool(partial / "records.jsonl", writers.start) as records,
        ):
            selected = select_records(options, records, counts)
            num_train = write_train(selected.train)
            write("eval", "held out", selected.eval)
        for split in ("train", "eval"):
            move_out(partial / f"{split}.arrow")
        if not num_train and not options.held_out_only:
            kinds = "; ".join(counts.lines()) or "no row"
            raise InputError(f"stage {options.title}: no training row is left: {kinds}")
        (partial / "counts.json").write_text(json.dumps(counts.to_json(), indent=1), encoding="utf-8")
        for shards in partial.glob(f"*{SHARDS}"):
            shutil.rmtree(shards)
        for file in partial.iterdir():
            flush(file)
        partial.rename(folder)
    except OSError as error:
        raise EnvironmentFault(f"{partial}: cannot be written ({error.strerror or error})") from error
    except InputError:
        shutil.rmtree(partial, ignore_errors=True)
        raise


def move_out(file: Path) -> None:
    """Move the column EXTRA out of a file of rows into a file of its own beside it, with COLUMNS_SUFFIX.

    If EXTRA is empty in all rows, it is dropped; a file without EXTRA does not change. Only rewards read it. So the
    rows' file, whose hash is in checkpoints, does not depend on columns that are not tokenised.
    """
    import pyarrow as pa
    from pyarrow import compute

    with pa.memory_map(str(file)) as source:
        rows = pa.ipc.open_stream(source).read_all()
        if EXTRA not in rows.column_names:
            return
        tables = {file.with_suffix(".writing"): rows.drop_columns([EXTRA])}
        if compute.any(compute.not_equal(rows[EXTRA], NO_COLUMNS)).as_py():
            tables[file.with_suffix(COLUMNS_SUFFIX)] = rows.select([EXTRA])
        for path, table in tables.items():
            with pa.OSFile(str(path), "wb") as sink, pa.ipc.new_stream(sink, table.schema) as writer:
                for batch in table.to_batches():
                    writer.write_batch(batch)
    file.with_suffix(".writing").rename(file)


def write_mixture(files: Sequence[Path], sizes: Sequence[int], options: DataOptions) -> None:
    """Write the rows of all sources to a new file train.arrow in their folder, and delete the sources' files.

    `sizes` are the rows that each source contributes. One with fewer rows repeats them; `options.seed` chooses the rows
    of the last, partial repetition. Copies of a prompt have different ids, which key the random numbers of rollouts.
    """
    import numpy as np
    import pyarrow as pa

    with contextlib.ExitStack() as stack:
        sources = [pa.ipc.open_stream(stack.enter_context(pa.memory_map(str(file)))).read_all() for file in files]
        sink = stack.enter_context(pa.OSFile(str(files[0].with_name("train.arrow")), "wb"))
        writer = stack.enter_context(pa.ipc.new_stream(sink, sources[0].schema))
        for rows, size in zip(sources, sizes, strict=True):
            for copy, start in enumerate(range(0, size, len(rows))):
                is_taken = np.ones(len(rows), bool)
                if start + len(rows) > size:
                    draws = np.fromiter((uniform("mixture", options.seed, row) for row in range(len(rows))), float)
                    is_taken[np.argsort(draws, kind="stable")[size - start :]] = False
                first = 0
                for batch in rows.to_batches():
                    part = batch.filter(pa.array(is_taken[first : first + len(batch)]))
                    first += len(batch)
                    if copy and "prompt_id" in part.column_names:
                        numbers = (
                            uniform(f"copy {copy}", options.seed, name) for name in part["prompt_id"].to_pylist()
                        )
                        column = part.column_names.index("prompt_id")
                        part = part.set_column(column, "prompt_id", pa.array(int(draw * 2**53) for draw in numbers))
                    if part.num_rows:
                        writer.write_batch(part)
    for file in files:
        file.unlink()
