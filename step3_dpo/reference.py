"""Compute once the log-probabilities of all responses under the reference, the model that training starts from.

The run stores them in its folder before the first step. So the reference is in memory only until the policy is loaded.
Results are written once a minute, and a run that was interrupted continues from there.
Shapes: M rows of K responses each; K is 2 for pairs, else 1.
"""

import gc
import hashlib
import json
import logging
import time
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np
import torch
from datasets import Dataset
from safetensors import SafetensorError, safe_open
from safetensors.numpy import load_file, save

from pipeline import dist
from pipeline.data.batching import balanced_slices
from pipeline.data.cache import data_fingerprint
from pipeline.data.loader import sequence_lengths, to_device
from pipeline.engine.build import compute_dtype, frozen_engine, load_policy
from pipeline.engine.engine import FrozenEngine
from pipeline.files import model_fingerprint, write_bytes
from pipeline.heartbeat import beat
from pipeline.models.forward.packed_attention import enable_packed_attention
from pipeline.models.source import ModelSource
from pipeline.run.host_storage import on_each_storage
from pipeline.run.run import Run
from step3_dpo.batches import Collate, Mismatched, response_log_probs
from step3_dpo.config import DPOConfig

log = logging.getLogger(__name__)

FILE = "reference.safetensors"
PART = 64  # micro-batches of a rank between two checks of the time; chosen by hand
WRITE_EVERY_S = 60.0
COLUMNS = {"chosen_ids": ("chosen_reference", "rejected_reference"), "ids": ("reference",)}


@dataclass(frozen=True, slots=True)
class RowSet:
    """Rows whose responses the reference scores.

    rows: M rows.
    lengths: (M, K) int64, tokens of the K sequences of each row.
    numbers: indices of the rows that the run reads.
    """

    rows: Dataset | Mismatched
    lengths: np.ndarray
    numbers: list[int]


def reference_log_probs(
    run: Run, config: DPOConfig, source: ModelSource, collate: Collate, row_sets: Mapping[str, RowSet], *, key: str
) -> dict[str, np.ndarray]:
    """Return name -> log-probabilities (M, K) fp64 of each row's responses; NaN for rows that the run does not read.

    Values that the run's folder already holds are read; the start model computes the others. A collective.

    Args:
        key: see `key_of`.
    """
    path = run.folder / FILE
    stored = dist.on_main(lambda: read_tables(path, key))
    tables = {name: stored.get(name, np.full(one.lengths.shape, np.nan)) for name, one in row_sets.items()}
    missing = {
        name: replace(one, numbers=[row for row in sorted(set(one.numbers)) if np.isnan(tables[name][row]).any()])
        for name, one in row_sets.items()
    }
    if count := sum(len(one.numbers) for one in missing.values()):
        began = written = dist.on_main(time.monotonic)
        for name, numbers, values in score_rows(run, config, source, collate, missing):
            tables[name][numbers] = values
            if (now := dist.on_main(time.monotonic)) - written >= WRITE_EVERY_S:
                on_each_storage(lambda: write_tables(path, key, tables))
                written = now
        on_each_storage(lambda: write_tables(path, key, tables))
        seconds = time.monotonic() - began
        if run.world.is_main:
            log.info("reference: log-probabilities of %d rows under %s in %.0f s", count, source.path, seconds)
    return tables


def with_columns(rows: Dataset, table: np.ndarray) -> Dataset:
    """Add columns: the reference's log-probabilities (M, K), and the number of response tokens of each row."""
    sizes = sequence_lengths(rows)
    trained = sizes.sum(1) - sizes.shape[1] * np.asarray(rows["prompt_length"][:], dtype=np.int64)
    names = next(names for name, names in COLUMNS.items() if name in rows.column_names)
    for name, column in [*zip(names, table.T, strict=True), ("num_trained", trained)]:
        rows = rows.add_column(name, column)
    return rows


def score_rows(
    run: Run, config: DPOConfig, source: ModelSource, collate: Collate, row_sets: Mapping[str, RowSet]
) -> Iterator[tuple[str, list[int], np.ndarray]]:
    """Yield (name, n row indices, (n, K) fp64 log-probabilities) in parts, by the start model. A collective.

    The model is freed at the end.
    """
    engine = frozen_engine(run, load_policy, source, config.model, name="reference")
    enable_packed_attention(engine.module.get_submodule("model"), device=run.world.device)
    size = config.optimizer.per_device_eval_batch_size
    for name, one in row_sets.items():
        step = PART * run.world.size * size
        for start in range(0, len(one.numbers), step):
            numbers = one.numbers[start : start + step]
            yield name, numbers, score_part(run, engine, collate, one, numbers, micro_batch_size=size)
    engine.discard()
    del engine
    gc.collect()
    if run.world.device.type == "cuda":
        torch.cuda.empty_cache()


def score_part(
    run: Run, engine: FrozenEngine, collate: Collate, row_set: RowSet, numbers: list[int], *, micro_batch_size: int
) -> np.ndarray:
    """Return the (n, K) fp64 log-probabilities of n rows. A collective."""
    world, lengths = run.world, row_set.lengths[numbers]
    log_probs = torch.zeros(lengths.shape, dtype=torch.float64, device=world.device)
    sizes = {"world_size": world.size, "rank": world.rank, "micro_batch_size": micro_batch_size}
    for part in balanced_slices(range(len(numbers)), lengths.max(1).tolist(), **sizes):
        beat("start", 0)
        rows = [None if index is None else [row_set.rows[numbers[index]]] for index in part]
        values = response_log_probs(engine, to_device(collate(rows), world.device)).double()
        for index, value in zip(part, values.view(log_probs.shape[1], -1).T, strict=True):
            if index is not None:
                log_probs[index] = value
    return dist.sum_over_ranks(log_probs).cpu().numpy()


def key_of(run: Run, config: DPOConfig, data: Mapping[str, Dataset], **more: int) -> str:
    """Return a hash of what the log-probabilities depend on: start model, rows, compute dtype, and `more`."""
    facts: dict[str, str | int] = {name: data_fingerprint(rows) for name, rows in data.items()}
    facts |= {"model": model_fingerprint(config.model.model_name_or_path), "dtype": compute_dtype(run)}
    facts |= {"quantization": config.model.quantization, **more}
    return hashlib.sha256(json.dumps(facts, sort_keys=True).encode()).hexdigest()


def read_tables(path: Path, key: str) -> dict[str, np.ndarray]:
    """Return the tables of a file with this key, name -> (M, K) fp64; {} if there is none or it is broken."""
    if not path.is_file():
        return {}
    try:
        with safe_open(path, framework="numpy") as file:
            is_same = file.metadata() == {"key": key}
        return load_file(path) if is_same else {}
    except SafetensorError as error:
        log.warning("%s: cannot be read (%s): the reference is computed again", path, error)
        return {}


def write_tables(path: Path, key: str, tables: dict[str, np.ndarray]) -> None:
    """Write the tables atomically; a start that is killed meanwhile leaves a hidden file (`START_NAMES`)."""
    write_bytes(path, save(tables, metadata={"key": key}))
