"""Tokenise records in shards, on all cores where there are many, and join the shards to one Arrow file.

A shard is a fixed number of records, so that order, counts and bytes of the rows do not depend on the number of
processes, and a preparation that is killed goes on with the shards that are finished. `Dataset.map(num_proc=...)` makes
one shard per process, all of which are finished at the end only, and forks a process that has torch's threads.
"""

import json
import logging
import os
import signal
import subprocess
import sys
import threading
import traceback
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass, fields
from multiprocessing import Pipe
from multiprocessing.connection import Connection
from pathlib import Path
from queue import Empty, SimpleQueue
from typing import TYPE_CHECKING, Any, Self

import psutil

from pipeline.data.counts import Counts
from pipeline.data.spool import Spool, records_at
from pipeline.data.tokenization import TokenizationOptions, documents, pair_rows, prompt_rows, sft_rows
from pipeline.errors import EnvironmentFault, RunError
from pipeline.heartbeat import INTERVAL_S, RowProgress, beat_again
from pipeline.processes import GIB, end_with_parent, python_environment

if TYPE_CHECKING:
    import numpy as np
    from transformers import PreTrainedTokenizerBase

log = logging.getLogger(__name__)

SHARDS = ".shards"
SHARD_RECORDS = 1000
PARALLEL_RECORDS = 2_000  # for fewer the start of processes takes longer than it saves
WORKER_BYTES = GIB // 4  # of a process that tokenises, with a large vocabulary
TOKENISERS: dict[str, Callable[..., Iterator[Any]]] = {
    "sft": sft_rows,
    "reward": pair_rows,
    "ppo": prompt_rows,
    "documents": documents,
}


@dataclass(frozen=True, slots=True)
class Shard:
    """Records of one kind (a key of TOKENISERS), and the Arrow stream file for their rows and counts.

    starts: where the records' lines start in the file `records` of a spool.
    """

    kind: str
    records: Path
    starts: "np.ndarray"
    file: Path


def kind_of(stage: str, *, is_text: bool) -> str:
    """Return the key of TOKENISERS that makes the rows of a record in a stage; is_text: of a plain document."""
    return "documents" if stage == "text" or (stage == "sft" and is_text) else stage


def write_rows(
    file: Path,
    stage: str,
    records: Spool,
    positions: "np.ndarray",
    *,
    writers: "ShardWriters",
    block_size: int,
    counts: Counts,
) -> int:
    """Write the rows of the records at these positions to an Arrow stream file, and return the number of rows.

    `counts` gets what was dropped. Documents are joined to blocks of `block_size` tokens behind all other rows. Shards
    are kept in a folder beside `file`, of suffix SHARDS.

    Raises:
        InputError: the earliest shard's error. EnvironmentFault: a process was killed.
    """
    folder = file.with_suffix(SHARDS)
    folder.mkdir(exist_ok=True)
    shards = []
    starts, is_text = records.starts(positions), records.is_text(positions)
    is_document = is_text & (kind_of(stage, is_text=True) == "documents") | (stage == "text")
    for kind, chosen in ((stage, starts[~is_document]), ("documents", starts[is_document])):
        for first in range(0, len(chosen), SHARD_RECORDS):
            name = f"{kind}-{first // SHARD_RECORDS:06d}.arrow"
            shards.append(Shard(kind, records.file, chosen[first : first + SHARD_RECORDS], folder / name))
    missing = [shard for shard in shards if not shard.file.is_file()]
    if len(missing) < len(shards):
        log.info("%s: %d of %d shards are finished already", file.stem, len(shards) - len(missing), len(shards))
    writers.write(missing, what=f"tokenising {file.stem} rows")
    return join(file, stage, shards, block_size, counts)


class ShardWriters:
    """This process and those that write the shards of a preparation with it; they end with the context.

    They are started while the sources are read, one more for every SHARD_RECORDS records, and import meanwhile. Each is
    a program of its own: a forked child of a process with other threads (torch's, NCCL's) may wait for ever for one of
    their locks.
    """

    def __init__(self, tokenizer: "PreTrainedTokenizerBase", options: TokenizationOptions) -> None:
        self._work = tokenizer, options
        self._todo: SimpleQueue[tuple[int, Shard] | None] = SimpleQueue()
        self._done: SimpleQueue[tuple[int, Shard, Exception | None]] = SimpleQueue()
        self._others: list[tuple[subprocess.Popen[bytes], threading.Thread]] = []

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *error: object) -> None:
        self._drop_rest()
        for process, _ in self._others:
            process.kill()
            self._todo.put(None)
        for process, thread in self._others:
            thread.join()
            process.wait()

    def start(self, num_records: int) -> None:
        """Start the processes that this number of records is worth, as far as they do not run yet."""
        while num_records % SHARD_RECORDS == 0 and len(self._others) + 1 < num_processes(num_records):
            process, connection = start_process()
            thread = threading.Thread(target=self._hand_over, args=(connection,))
            self._others.append((process, thread))
            thread.start()

    def write(self, shards: Sequence[Shard], *, what: str) -> None:
        """Write the files of all shards. Raises the earliest shard's error, behind which no other shard is begun."""
        progress = RowProgress(what, sum(len(shard.starts) for shard in shards))
        if shards and self._others:
            log.info("%s: %d processes", what, len(self._others) + 1)
        num_left, errors = len(shards), dict[int, Exception]()
        for item in enumerate(shards):
            self._todo.put(item)
        while num_left:
            with suppress(Empty):
                self._write_one()
            beat_again()
            with suppress(Empty):
                while num_left:
                    number, shard, error = self._done.get(timeout=INTERVAL_S * self._todo.empty())
                    num_left -= 1
                    if error:
                        errors[number] = error
                        num_left -= self._drop_rest()
                    else:
                        progress.add(len(shard.starts))
        if errors:
            raise errors[min(errors)]

    def _write_one(self) -> None:
        """Write the first shard that nobody has begun, in this process."""
        item = self._todo.get_nowait()
        assert item
        error = None
        try:
            write_shard(item[1], *self._work)
        except Exception as raised:
            error = raised
        self._done.put((*item, error))

    def _drop_rest(self) -> int:
        """Drop the shards that nobody has begun, and return their number."""
        number = 0
        with suppress(Empty):
            while self._todo.get_nowait():
                number += 1
        return number

    def _hand_over(self, connection: Connection) -> None:
        """Hand shards to a process that is ready, until None is there instead of one; the whole work of a thread."""
        with connection:
            with suppress(OSError, EOFError):  # as for a shard, which tells it
                connection.send(self._work)
                connection.recv()  # until it has imported all it needs, others take the shards
            for item in iter(self._todo.get, None):
                error: Exception | None
                try:
                    connection.send(item[1])
                    error = connection.recv()
                except (OSError, EOFError):
                    error = EnvironmentFault(
                        "a process that tokenises was killed (out of memory?); finished shards are kept, the same "
                        "command goes on"
                    )
                self._done.put((*item, error))


def start_process() -> tuple[subprocess.Popen[bytes], Connection]:
    """Start a process that runs `serve`, and return it with the connection to it; Ctrl-C does not reach it.

    Python's own "spawn" would first import the main program, with all that this imports.

    Raises:
        EnvironmentFault: the system refuses a process.
    """
    environment = {**python_environment(), "TOKENIZERS_PARALLELISM": "false"}
    code = "from pipeline.data.shards import serve; serve()"
    try:
        here, there = Pipe()
        command = [sys.executable, "-P", "-c", code, str(os.getpid()), str(there.fileno())]
        with there:  # the other process has its own: where it ends, `here` ends
            process = subprocess.Popen(command, env=environment, pass_fds=[there.fileno()], process_group=0)
    except OSError as error:
        raise EnvironmentFault(
            f"a process that tokenises cannot be started: {error.strerror or error}; raise the limits on processes and "
            "open files (ulimit -u, -n), or give this process one core (taskset -c 0)"
        ) from error
    return process, here


def serve() -> None:
    """Write the shards that come, in a process that ends with its parent; answer each with None or an error.

    The tokenizer and its options come first, and are answered with None.
    """
    parent, file = map(int, sys.argv[1:])
    end_with_parent(parent, signal.SIGKILL)
    connection, answer = Connection(file), None
    tokenizer, options = connection.recv()  # imports transformers
    while True:
        connection.send(answer)
        shard, answer = connection.recv(), None
        try:
            write_shard(shard, tokenizer, options)
        except Exception as error:
            trace = traceback.format_exc()
            error.add_note(trace)
            # Of other classes some can be written to a pipe and not be read again.
            answer = error if isinstance(error, (RunError, OSError)) else RuntimeError(trace)


def num_processes(num_records: int) -> int:
    """Return how many processes tokenise: all cores that this one may use, where memory and records suffice."""
    if num_records < PARALLEL_RECORDS:
        return 1
    in_memory = psutil.virtual_memory().available // WORKER_BYTES
    return max(1, min(len(os.sched_getaffinity(0)), num_records // SHARD_RECORDS, in_memory))


def write_shard(shard: Shard, tokenizer: "PreTrainedTokenizerBase", options: TokenizationOptions) -> None:
    """Tokenise a shard; its file exists once it is whole, with the counts in the metadata of its schema."""
    import pyarrow as pa

    counts = Counts()
    records = records_at(shard.records, shard.starts)
    rows = [columns(row) for row in TOKENISERS[shard.kind](records, tokenizer, options, counts)]
    schema = schema_of(shard.kind).with_metadata({"counts": json.dumps(counts.to_json())})
    writing = shard.file.with_suffix(".writing")
    with writing.open("wb") as file, pa.ipc.new_stream(file, schema) as writer:
        writer.write_batch(pa.RecordBatch.from_pylist(rows, schema=schema))
        writer.close()
        file.flush()
        os.fsync(file.fileno())
    writing.rename(shard.file)


def columns(row: Any) -> dict[str, Any]:
    """Return the columns of a row: its fields, and their numbers of tokens."""
    values = {field.name: getattr(row, field.name) for field in fields(row)}
    num_tokens = sum(len(ids) for name, ids in values.items() if name.endswith("ids"))
    return {**values, "num_tokens": num_tokens, "num_trained": sum(values.get("trained", ()))}


def schema_of(kind: str) -> Any:
    """Return the Arrow schema of a kind of rows; 32-bit ids hold every vocabulary."""
    import pyarrow as pa

    ids, number = pa.list_(pa.int32()), pa.int32()
    if kind == "documents":
        return pa.schema([("ids", ids)])
    if kind == "reward":
        own = {"chosen_ids": ids, "rejected_ids": ids, "prompt_length": number, "margin": pa.float32()}
    elif kind == "ppo":
        own = {"prompt_ids": ids, "prompt_id": pa.int64(), "messages": pa.large_string()}
    else:
        own = {"ids": ids, "trained": pa.list_(pa.bool_()), "num_trained": number}
    return pa.schema([*own.items(), ("num_tokens", number)])


def join(file: Path, stage: str, shards: Sequence[Shard], block_size: int, counts: Counts) -> int:
    """Write the shards' rows to one Arrow stream file, documents as blocks; return the number of rows."""
    import numpy as np
    import pyarrow as pa

    schema = schema_of(stage)
    num_rows, rest = 0, np.zeros(0, np.int32)
    with pa.OSFile(str(file), "wb") as sink, pa.ipc.new_stream(sink, schema) as writer:
        for shard in shards:
            with pa.memory_map(str(shard.file)) as source, pa.ipc.open_stream(source) as reader:
                counts.merge(Counts.from_json(json.loads(reader.schema.metadata[b"counts"])))
                (batch,) = reader
                if shard.kind == "documents":
                    ids = np.concatenate([rest, batch.column("ids").flatten().to_numpy()])
                    size = len(ids) if shard is shards[-1] else len(ids) // block_size * block_size
                    batch, rest = blocks(ids[:size], block_size), ids[size:]
                if batch.num_rows:
                    writer.write_batch(pa.RecordBatch.from_arrays(batch.columns, schema=schema))
                num_rows += batch.num_rows
    return num_rows


def blocks(ids: Any, size: int) -> Any:
    """Cut the ids of joined documents into rows of `size`, all trained but the first token of each; Arrow columns.

    The last row may be shorter, but not a single token.
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
