"""Tokenise records in shards, on all cores where there are many, and join the shards to one Arrow file.

A shard is a fixed number of records, so that order, counts and bytes of the rows do not depend on the number of
processes, and a preparation that is killed goes on with the shards that are finished. `Dataset.map(num_proc=...)` makes
one shard per process, all of which are finished at the end only, and forks a process that has torch's threads.
"""

import json
import logging
import multiprocessing
import os
import signal
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor, ThreadPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from dataclasses import dataclass, fields
from pathlib import Path
from typing import TYPE_CHECKING, Any

import psutil

from pipeline.data.counts import Counts
from pipeline.data.spool import Spool, records_at
from pipeline.data.tokenization import TokenizationOptions, documents, pair_rows, prompt_rows, sft_rows
from pipeline.errors import EnvironmentFault
from pipeline.heartbeat import RowProgress, result_of
from pipeline.processes import GIB, end_with_parent

if TYPE_CHECKING:
    import numpy as np
    from transformers import PreTrainedTokenizerBase

log = logging.getLogger(__name__)

SHARDS = ".shards"
SHARD_RECORDS = 1000
PARALLEL_RECORDS = 5_000  # for fewer the start of processes takes longer than it saves
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
    tokenizer: "PreTrainedTokenizerBase",
    options: TokenizationOptions,
    counts: Counts,
) -> int:
    """Write the rows of the records at these positions to an Arrow stream file, and return the number of rows.

    `counts` gets what was dropped. Documents are joined to blocks behind all other rows. Shards are kept in a folder
    beside `file`, of suffix SHARDS.

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
    tokenise(missing, tokenizer, options, what=f"tokenising {file.stem} rows")
    return join(file, stage, shards, options.max_seq_len, counts)


def tokenise(
    shards: Sequence[Shard], tokenizer: "PreTrainedTokenizerBase", options: TokenizationOptions, *, what: str
) -> None:
    """Write the files of all shards, by several processes where there are many records."""
    num_records = sum(len(shard.starts) for shard in shards)
    progress = RowProgress(what, num_records)
    processes = num_processes(num_records)
    if processes == 1:
        for shard in shards:
            write_shard(shard, tokenizer, options)
            progress.add(len(shard.starts))
        return
    log.info("%s: %d processes", what, processes)
    todo, finished, errors = iter(enumerate(shards)), list[int](), dict[int, Exception]()

    def work(write: Callable[[Shard], None]) -> None:
        """Write the first shard that nobody has begun, again and again, until none is left or one fails."""
        for number, shard in todo:
            try:
                write(shard)
                finished.append(len(shard.starts))
            except Exception as error:
                errors[number] = error
                list(todo)  # nobody begins another

    def write_here(shard: Shard) -> None:
        write_shard(shard, tokenizer, options)
        while finished:
            progress.add(finished.pop())

    def write_there(shard: Shard) -> None:
        pool.submit(write_shard_in_worker, shard).result()

    # Not forked: a child of a process with other threads (torch's, NCCL's) may wait for ever for one of their locks.
    context = multiprocessing.get_context("spawn")
    arguments = processes - 1, context, start_worker, (os.getpid(), tokenizer, options)
    # The threads outlive the processes that they start: Linux ends those with their thread. This process, which has
    # imported all already, tokenises while they start.
    with ThreadPoolExecutor(processes - 1) as threads, ProcessPoolExecutor(*arguments) as pool:
        try:
            workers = [threads.submit(work, write_there) for _ in range(processes - 1)]
            work(write_here)
            for worker in workers:
                result_of(worker)
        finally:
            list(todo)
    if errors:
        error = errors[min(errors)]
        if isinstance(error, BrokenProcessPool):
            raise EnvironmentFault(
                f"{what}: a process was killed (out of memory?); finished shards are kept, the same command goes on"
            ) from error
        raise error


def num_processes(num_records: int) -> int:
    """Return how many processes tokenise: all cores that this one may use, where memory and records suffice."""
    if num_records < PARALLEL_RECORDS:
        return 1
    in_memory = psutil.virtual_memory().available // WORKER_BYTES
    return max(1, min(len(os.sched_getaffinity(0)), num_records // SHARD_RECORDS, in_memory))


_worker: tuple[Any, TokenizationOptions]  # tokenizer and options of a worker process


def start_worker(parent: int, tokenizer: "PreTrainedTokenizerBase", options: TokenizationOptions) -> None:
    """Prepare a worker process, which ends with its parent and leaves Ctrl-C to it."""
    global _worker
    end_with_parent(parent, signal.SIGKILL)
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    os.environ["TOKENIZERS_PARALLELISM"] = "false"
    _worker = tokenizer, options


def write_shard_in_worker(shard: Shard) -> None:
    write_shard(shard, *_worker)


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
