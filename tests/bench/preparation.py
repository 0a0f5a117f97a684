"""The row data: rows per second that are prepared on one core and on all, and the cost of many turns. No GPU.

`python -m bench.preparation` is the worker: it prepares one file and prints one JSON line.
"""

import argparse
import json
import os
import tempfile
import time
from dataclasses import asdict
from pathlib import Path
from random import Random
from typing import Any

from bench.figures import Figures, quotient
from bench.jobs import Jobs, flags

PAIR = {"prompt_words": 40, "responses": (20, 160)}
TURNS = (4, 32)  # of the conversations whose cost for each turn is compared
MAX_SEQ_LEN = 4096


def data(jobs: Jobs, figures: Figures) -> None:
    """Prepare `--rows` rows for each core, so that all runs take about as long; and conversations on one core."""
    from bench.random_models import make_pairs
    from demo.make import make_data, make_tokenizer

    folder, options = jobs.folder / "preparation", jobs.options
    make_data(folder, seed=0)
    make_tokenizer(folder).save_pretrained(folder)
    first: float | None = None
    for cores in options.cores or sorted({1, len(os.sched_getaffinity(0))}):
        file = Path(options.data) if options.data else folder / f"pairs-{options.rows * cores}.jsonl"
        if not file.exists():
            make_pairs(file, options.rows * cores, **PAIR)
        rate = prepare(jobs, f"pairs, {cores} cores", "reward", file, cores).get("rows_per_s")
        figures.add(f"rows/s, {cores} cores", rate, "1/s")
        first = first or quotient(rate, cores)
        figures.add(f"efficiency, {cores} cores", quotient(quotient(rate, cores), first))
    per_turn = []
    for turns in TURNS:
        make_conversations(file := folder / f"conversations-{turns}.jsonl", options.rows // turns, turns)
        rate = prepare(jobs, f"conversations of {turns} turns", "sft", file, 1).get("rows_per_s")
        per_turn.append(rate and rate * turns)
        figures.add(f"turns/s, conversations of {turns}", per_turn[-1], "1/s")
    ratio = quotient(per_turn[1], per_turn[0])
    figures.add(f"turns/s, conversations of {TURNS[1]} over those of {TURNS[0]}", ratio, "x")


def prepare(jobs: Jobs, name: str, stage: str, file: Path, cores: int) -> dict[str, Any]:
    """Run the worker; its configuration is kept."""
    tokenizer = Path(jobs.options.tokenizer or jobs.folder / "preparation")
    words = flags({"stage": stage, "data": file, "cores": cores, "tokenizer": tokenizer})
    found = jobs.worker(name, "bench.preparation", words)
    jobs.config = jobs.config or found.get("config", {})
    jobs.runs[name].pop("config", None)
    return found


def make_conversations(file: Path, count: int, turns: int) -> None:
    """A file of conversations of `turns` turns."""
    from bench.random_models import text_of

    random = Random(2)
    with file.open("w", encoding="utf-8") as out:
        for _ in range(count):
            roles = ("user", "assistant") * (turns // 2)
            out.write(json.dumps({"messages": [{"role": r, "content": text_of(random, 30)} for r in roles]}) + "\n")


def main() -> None:
    """Prepare a file on the first cores of this machine, into a folder that is deleted."""
    import datasets  # noqa: F401  it is imported where rows are read, which is timed

    from pipeline.data.cache import load_or_build
    from pipeline.data.selection import DataOptions
    from pipeline.data.shards import num_processes
    from pipeline.models.tokenizers import load_tokenizer

    parser = argparse.ArgumentParser(description=__doc__)
    for name in ("stage", "data", "tokenizer"):
        parser.add_argument(f"--{name}", required=True)
    parser.add_argument("--cores", type=int, required=True)
    given = parser.parse_args()
    os.sched_setaffinity(0, sorted(os.sched_getaffinity(0))[: given.cores])
    tokenizer = load_tokenizer(given.tokenizer)
    with tempfile.TemporaryDirectory() as folder:
        options = DataOptions(
            data_path=(given.data,), data_split="none", eval_fraction=0.0, cache_dir=folder, max_seq_len=MAX_SEQ_LEN
        )
        started = time.perf_counter()
        built = load_or_build(given.stage, options, tokenizer)
        seconds = time.perf_counter() - started
        num_rows, num_tokens = len(built.train), sum(built.train["num_tokens"])
    found = {"rows_per_s": num_rows / seconds, "tokens_per_s": num_tokens / seconds, "rows": num_rows}
    found |= {"seconds": seconds, "processes": num_processes(num_rows)}
    config = asdict(options) | {"stage": given.stage, "data_path": Path(given.data).name, "cache_dir": "(deleted)"}
    print(json.dumps(found | {"config": config}), flush=True)


if __name__ == "__main__":
    main()
