"""Log-probabilities of all responses under the reference, the model that training starts from: computed once, and kept.

They are in the run's folder before the first step, so that the reference is in memory only until the policy is loaded.
"""

import gc
import hashlib
import json
import logging
import time
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import numpy as np
import torch
from datasets import Dataset
from safetensors import safe_open
from safetensors.numpy import load_file, save_file
from torch import Tensor

from pipeline import dist
from pipeline.checkpoints.fingerprint import data_fingerprint
from pipeline.data.batching import PairBatch, balanced_slices
from pipeline.data.loader import pair_lengths, sequence_lengths, to_device
from pipeline.engine.build import compute_dtype, frozen_engine
from pipeline.files import flush, model_fingerprint
from pipeline.heartbeat import beat
from pipeline.models.forward.causal_lm import CausalLM
from pipeline.models.loading import load_language_model
from pipeline.models.source import ModelSource
from pipeline.run.host_storage import on_each_storage
from pipeline.run.run import Run
from pipeline.tensor_ops import masked_sum
from step3_dpo.config import DPOConfig

log = logging.getLogger(__name__)

FILE = "reference.safetensors"
COLUMNS = ("chosen_reference", "rejected_reference")
Collate = Callable[[list[Any]], PairBatch]


def response_mask(batch: PairBatch) -> Tensor:
    """Return (2B, S - 1) bool, True = token t + 1 is one of a response."""
    places = torch.arange(1, batch.input_ids.shape[1], device=batch.lengths.device)
    starts = batch.prompt_lengths.repeat(2).unsqueeze(1)
    return (places >= starts) & (places < batch.lengths.unsqueeze(1)) & (starts > 0)


def response_log_probs(model: Callable[..., Any], batch: PairBatch) -> Tensor:
    """Return (2B,) fp32: log-probabilities of the responses in nats, each summed over its tokens."""
    selected = response_mask(batch)
    found = model(
        batch.input_ids,
        attention_mask=batch.attention_mask,
        selected=selected,
        position_ids=batch.position_ids,
        right_padded=True,
    )
    return masked_sum(found.log_probs, selected, 1)


def with_reference(
    run: Run, config: DPOConfig, source: ModelSource, collate: Collate, data: dict[str, tuple[Dataset, Iterable[int]]]
) -> dict[str, Dataset]:
    """Return data sets of pairs with the columns `COLUMNS` and `num_trained`, the tokens of both responses.

    What the run's folder holds already is read; the rest is computed with the start model. A collective.

    Args:
        data: name -> a data set, and the rows of it that the run reads; the others get NaN.
    """
    path = run.folder / FILE
    key = key_of(run, config, {name: rows for name, (rows, _) in data.items()})
    known = dist.on_main(lambda: read_known(path, key))
    tables, missing = dict[str, np.ndarray](), dict[str, tuple[Dataset, list[int]]]()
    for name, (rows, wanted) in data.items():
        tables[name] = known.get(name, np.full((len(rows), 2), np.nan))
        missing[name] = rows, [row for row in sorted(set(wanted)) if np.isnan(tables[name][row]).any()]
    if count := sum(len(numbers) for _, numbers in missing.values()):
        began = time.monotonic()
        for name, found in computed(run, config, source, collate, missing).items():
            tables[name][missing[name][1]] = found
        on_each_storage(lambda: write_known(path, key, tables))
        seconds = time.monotonic() - began
        if run.world.is_main:
            log.info("reference: log-probabilities of %d pairs under %s in %.0f s", count, source.path, seconds)
    return {name: with_columns(rows, tables[name]) for name, (rows, _) in data.items()}


def with_columns(rows: Dataset, table: np.ndarray) -> Dataset:
    """Add the reference's log-probabilities (N, 2), and the tokens of both responses of each pair."""
    trained = sequence_lengths(rows).sum(1) - 2 * np.asarray(rows["prompt_length"][:])
    for name, column in [*zip(COLUMNS, table.T, strict=True), ("num_trained", trained)]:
        rows = rows.add_column(name, column)
    return rows


def computed(
    run: Run, config: DPOConfig, source: ModelSource, collate: Collate, wanted: dict[str, tuple[Dataset, list[int]]]
) -> dict[str, np.ndarray]:
    """Return (n, 2) fp64 for the wanted n rows of each data set, by the start model, which is released. A collective.

    Args:
        wanted: name -> a data set, and numbers of its rows.
    """

    def load(source: ModelSource, **settings: Any) -> CausalLM:
        return CausalLM(load_language_model(source, **settings))

    engine = frozen_engine(run, load, source, config.model, name="reference")
    world, size, tables = run.world, config.optimizer.per_device_eval_batch_size, dict[str, np.ndarray]()
    for name, (rows, numbers) in wanted.items():
        found = torch.zeros(len(rows), 2, dtype=torch.float64, device=world.device)
        ranks = {"world_size": world.size, "rank": world.rank}
        for part in balanced_slices(numbers, pair_lengths(rows), **ranks, micro_batch_size=size):
            beat("start", 0)
            batch = to_device(collate([None if row is None else [rows[row]] for row in part]), world.device)
            pairs = response_log_probs(engine, batch).double().view(2, -1).T
            for row, pair in zip(part, pairs, strict=True):
                if row is not None:
                    found[row] = pair
        tables[name] = dist.sum_over_ranks(found).cpu().numpy()[numbers]
    engine.release_gathered()
    del engine
    gc.collect()
    if world.device.type == "cuda":
        torch.cuda.empty_cache()
    return tables


def key_of(run: Run, config: DPOConfig, data: dict[str, Dataset]) -> str:
    """Return what the log-probabilities depend on, hashed: start model, rows, and the dtype that computes."""
    facts = {name: data_fingerprint(rows) for name, rows in data.items()}
    facts |= {"model": model_fingerprint(config.model.model_name_or_path), "dtype": compute_dtype(run)}
    facts |= {"quantization": config.model.quantization}
    return hashlib.sha256(json.dumps(facts, sort_keys=True).encode()).hexdigest()


def read_known(path: Path, key: str) -> dict[str, np.ndarray]:
    """Return the tables of a file that was written under this key, name -> (N, 2) fp64; {} of any other."""
    if not path.is_file():
        return {}
    with safe_open(path, framework="numpy") as file:
        is_same = file.metadata() == {"key": key}
    return load_file(path) if is_same else {}


def write_known(path: Path, key: str, tables: dict[str, np.ndarray]) -> None:
    """Write the tables, whole or not at all."""
    fresh = path.with_suffix(".new")
    save_file(tables, fresh, metadata={"key": key})
    flush(fresh)
    fresh.replace(path)
