"""Tokenise records in shards, on all cores if there are many, and join the shards to one Arrow file.

A shard is a fixed number of records. So order, counts and bytes of the rows do not depend on the number of processes,
and a killed preparation resumes after its finished shards. `Dataset.map(num_proc=...)` is not used: it creates one
shard per process, all of which finish only at the end, and forks a process that has torch's threads.
"""

import importlib
import json
import logging
import os
import signal
import subprocess
import sys
import traceback
from collections.abc import Sequence
from concurrent.futures import ProcessPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from contextlib import AbstractContextManager, suppress
from dataclasses import dataclass
from multiprocessing import Pipe, get_context
from multiprocessing.connection import Connection
from pathlib import Path
from typing import TYPE_CHECKING

import psutil

from pipeline.data.counts import Counts
from pipeline.data.row_kinds import DOCUMENTS, RowKind, TokenizationOptions, columns
from pipeline.data.selection import DataOptions
from pipeline.data.spool import Spool, records_at
from pipeline.errors import EnvironmentFault, RunError
from pipeline.files import GIB, flush
from pipeline.heartbeat import INTERVAL_S, RowProgress, beat_again
from pipeline.processes import end_with_parent

if TYPE_CHECKING:
    import numpy as np
    import pyarrow as pa
    from transformers import PreTrainedTokenizerBase

log = logging.getLogger(__name__)

SHARDS = ".shards"
SHARD_RECORDS = 1000
PARALLEL_RECORDS = 2_000  # number of records below which starting processes takes longer than it saves
WORKER_BYTES = GIB // 4  # memory of a tokenising process with a large vocabulary
_work: "tuple[PreTrainedTokenizerBase, TokenizationOptions]"  # set in the job, read by its forks


@dataclass(frozen=True, slots=True)
class Shard:
    """Records to tokenise to one kind of rows, and the Arrow stream file for these rows and their counts.

    starts: where the records' lines start in the file `records` of a spool.
    """

    kind: RowKind
    records: Path
    starts: "np.ndarray"
    file: Path


def write_rows(
    file: Path,
    options: DataOptions,
    records: Spool,
    positions: "np.ndarray",
    *,
    writers: "ShardWriters",
    counts: Counts,
) -> int:
    """Write the rows of the records at these positions to an Arrow stream file, and return the number of rows.

    Drops are added to `counts`. Documents are joined to blocks of max_seq_len tokens after all other rows. Shards are
    stored in a folder beside `file`, with the suffix SHARDS.

    Raises:
        InputError: the earliest shard's error. EnvironmentFault: a process was killed.
    """
    folder = file.with_suffix(SHARDS)
    folder.mkdir(exist_ok=True)
    shards, row_kind = [], options.kind
    starts, is_text = records.starts(positions), records.is_text(positions)
    is_document = is_text & (row_kind.documents == "plain texts") | (row_kind.documents == "all")
    for kind, chosen in ((row_kind, starts[~is_document]), (DOCUMENTS, starts[is_document])):
        for first in range(0, len(chosen), SHARD_RECORDS):
            name = f"{kind.name}-{first // SHARD_RECORDS:06d}.arrow"
            shards.append(Shard(kind, records.file, chosen[first : first + SHARD_RECORDS], folder / name))
    missing = [shard for shard in shards if not shard.file.is_file()]
    if len(missing) < len(shards):
        log.info("%s: %d of %d shards are finished already", file.stem, len(shards) - len(missing), len(shards))
    writers.write(missing, what=f"tokenising {file.stem} rows")
    return join(file, row_kind.schema(), shards, options.max_seq_len, counts)


class ShardWriters(AbstractContextManager["ShardWriters"]):
    """Writers of the shards of a preparation: this process, then a job of several processes, which ends with the
    context.

    With many records the job starts while the sources are read; until its imports are done, this process writes shards.
    The job is a separate program without threads, and forks a process for each core: a fork of a process with threads
    (torch's, NCCL's) may wait forever for one of their locks.
    """

    def __init__(self, tokenizer: "PreTrainedTokenizerBase", options: TokenizationOptions) -> None:
        self._work = tokenizer, options
        self._job: tuple[subprocess.Popen[bytes], Connection] | None = None

    def __exit__(self, *error: object) -> None:
        if self._job:
            process, connection = self._job
            process.kill()
            process.wait()
            connection.close()

    def start(self, num_records: int) -> None:
        """Start the job, once, if so many records are worth several processes; called after each record is read."""
        if self._job is None and num_records % SHARD_RECORDS == 0 and num_processes(num_records) > 1:
            self._job = start_job()

    def write(self, shards: Sequence[Shard], *, what: str) -> None:
        """Write the files of all shards. Raises the earliest shard's error; no later shard is started after it."""
        progress, rest = RowProgress(what, sum(len(shard.starts) for shard in shards)), list(shards)
        while rest and not (self._job and self._job[1].poll()):
            write_shard(rest[0], *self._work)
            progress.add(len(rest.pop(0).starts))
        if not (rest and self._job):
            return
        number, connection = num_processes(sum(len(shard.starts) for shard in rest)), self._job[1]
        log.info("%s: %d processes", what, number)
        try:
            connection.recv()
            connection.send((self._work, number, rest))
            for shard in rest:
                while not connection.poll(INTERVAL_S):
                    beat_again()
                if error := connection.recv():
                    break
                progress.add(len(shard.starts))
        except (OSError, EOFError) as ended:
            raise EnvironmentFault(
                "a process that tokenises was killed (out of memory?); the same command resumes after "
                "the finished shards"
            ) from ended
        if error:
            raise error


def start_job() -> tuple[subprocess.Popen[bytes], Connection]:
    """Start a process that runs `serve`, and return it with the connection to it; Ctrl-C does not reach it.

    Python's own "spawn" would first import the main program and all its imports.

    Raises:
        EnvironmentFault: the system refuses a process.
    """
    # It imports from the same folders as this process, and starts no thread, since it forks.
    paths = os.pathsep.join(filter(None, sys.path))
    environment = {**os.environ, "PYTHONPATH": paths, "TOKENIZERS_PARALLELISM": "false", "OMP_NUM_THREADS": "1"}
    code = "from pipeline.data.shards import serve; serve()"
    try:
        here, there = Pipe()
        command = [sys.executable, "-P", "-c", code, str(os.getpid()), str(there.fileno())]
        with there:  # the other process has a copy: `here` closes when that process ends
            process = subprocess.Popen(command, env=environment, pass_fds=[there.fileno()], process_group=0)
    except OSError as error:
        raise EnvironmentFault(
            f"a process that tokenises cannot be started: {error.strerror or error}; raise the limits on processes and "
            "open files (ulimit -u, -n), or give this process one core (taskset -c 0)"
        ) from error
    return process, here


def serve() -> None:
    """Write the shards that a connection delivers, in forks of this process, which ends with its parent.

    The process sends None when it is ready for shards, and receives them with what `write_shard` needs and the number
    of forks. It replies to each shard with None, or with an error and no further replies. A killed fork ends the
    connection.
    """
    global _work
    parent, file = map(int, sys.argv[1:])
    end_with_parent(parent, signal.SIGKILL)
    importlib.import_module("transformers.tokenization_utils_base")
    connection, ending = Connection(file), (end_with_parent, (os.getpid(), signal.SIGKILL))
    with suppress(EOFError, BrokenProcessPool):
        while True:
            connection.send(None)
            _work, number, shards = connection.recv()
            with ProcessPoolExecutor(number, get_context("fork"), *ending) as pool:
                for error in pool.map(error_of, shards):
                    connection.send(error)
                    if error:
                        break  # cancels the shards that are not started


def error_of(shard: Shard) -> Exception | None:
    """Write a shard in a fork of the job, and return the error that it raised, if any."""
    try:
        write_shard(shard, *_work)
    except Exception as error:
        trace = traceback.format_exc()
        error.add_note(trace)
        # Instances of other classes may be written to a pipe, but not read again.
        return error if isinstance(error, (RunError, OSError)) else RuntimeError(trace)
    return None


def num_processes(num_records: int) -> int:
    """Return the number of processes that tokenise: all available cores, if memory and records suffice."""
    if num_records < PARALLEL_RECORDS:
        return 1
    in_memory = psutil.virtual_memory().available // WORKER_BYTES
    return max(1, min(len(os.sched_getaffinity(0)), num_records // SHARD_RECORDS, in_memory))


def write_shard(shard: Shard, tokenizer: "PreTrainedTokenizerBase", options: TokenizationOptions) -> None:
    """Tokenise a shard; its file exists once it is complete, with the counts in the metadata of its schema."""
    import pyarrow as pa

    counts = Counts()
    records = records_at(shard.records, shard.starts)
    rows = [columns(row) for row in shard.kind.rows(records, tokenizer, options, counts)]
    schema = shard.kind.schema().with_metadata({"counts": json.dumps(counts.to_json())})
    writing = shard.file.with_suffix(".writing")
    with writing.open("wb") as file, pa.ipc.new_stream(file, schema) as writer:
        writer.write_batch(pa.RecordBatch.from_pylist(rows, schema=schema))
    flush(writing)
    writing.rename(shard.file)


def join(file: Path, schema: "pa.Schema", shards: Sequence[Shard], block_size: int, counts: Counts) -> int:
    """Write the shards' rows to one Arrow stream file, documents as blocks; return the number of rows."""
    import numpy as np
    import pyarrow as pa

    num_rows, rest = 0, np.zeros(0, np.int32)
    with pa.OSFile(str(file), "wb") as sink, pa.ipc.new_stream(sink, schema) as writer:
        for shard in shards:
            with pa.memory_map(str(shard.file)) as source, pa.ipc.open_stream(source) as reader:
                counts.merge(Counts.from_json(json.loads(reader.schema.metadata[b"counts"])))
                (batch,) = reader
                if shard.kind is DOCUMENTS:
                    ids = np.concatenate([rest, batch.column("ids").flatten().to_numpy()])
                    size = len(ids) if shard is shards[-1] else len(ids) // block_size * block_size
                    batch, rest = blocks(ids[:size], block_size), ids[size:]
                if batch.num_rows:
                    writer.write_batch(pa.RecordBatch.from_arrays(batch.columns, schema=schema))
                num_rows += batch.num_rows
    return num_rows


def blocks(ids: "np.ndarray", size: int) -> "pa.RecordBatch":
    """Split the ids of joined documents into rows of `size`; all tokens but the first of each row are trained.

    The last row may be shorter; one of a single token is dropped.
    """
    import numpy as np
    import pyarrow as pa

    if len(ids) % size == 1:
        ids = ids[:-1]
    ends = np.append(np.arange(0, len(ids), size, dtype=np.int32), np.int32(len(ids)))
    trained, lengths = np.ones(len(ids), bool), np.diff(ends)
    trained[ends[:-1]] = False
    rows = {"ids": ids, "trained": trained}
    lists = [pa.ListArray.from_arrays(ends, pa.array(values)) for values in rows.values()]
    names = [*rows, "num_trained", "num_tokens"]
    return pa.RecordBatch.from_arrays([*lists, pa.array(lengths - 1), pa.array(lengths)], names=names)
