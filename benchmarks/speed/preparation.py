"""The row data: rows per second that are prepared on one core and on all, beside TRL's, and the cost of many turns.

No GPU. `python -m benchmarks.speed.preparation` is the worker: it prepares one file with each library in turn, several
times, and prints one JSON line.
"""

import argparse
import importlib.util
import json
import os
import resource
import tempfile
import time
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from random import Random
from types import SimpleNamespace
from typing import Any

from benchmarks.speed.figures import Figures, quotient
from benchmarks.speed.jobs import Jobs, flags

PAIR = {"prompt_words": 40, "responses": (20, 160)}
TURNS = (4, 32)  # of the conversations whose cost for each turn is compared
MAX_SEQ_LEN = 4096


def data(jobs: Jobs, figures: Figures) -> None:
    """Prepare `--rows` rows for each core, so that all runs take about as long; and conversations on one core."""
    from benchmarks.speed.random_models import make_pairs
    from demo.make import make_data, make_tokenizer

    folder, options = jobs.folder / "preparation", jobs.options
    make_data(folder, seed=0)
    make_tokenizer(folder).save_pretrained(folder)
    if "trl" not in libraries():
        jobs.runs["trl"] = {"flags": "left out: trl is not installed (pip install --no-deps --target, PYTHONPATH)"}
    first: float | None = None
    for cores in options.cores or sorted({1, len(os.sched_getaffinity(0))}):
        pairs = Path(options.data) if options.data else folder / f"pairs-{options.rows * cores}.jsonl"
        if not pairs.exists():
            make_pairs(pairs, options.rows * cores, **PAIR)
        for stage, what in (("reward", "pairs"), ("sft", "chosen responses")):
            make_messages(file := folder / f"{stage}-messages-{pairs.stem}.jsonl", pairs, stage)
            each = quotient(compare(jobs, figures, f"{what}, {cores} cores", stage, file, cores), cores)
            if stage == "reward":
                first = first or each
                figures.add(f"efficiency, {what}, {cores} cores", quotient(each, first))
    per_turn = []
    for turns in TURNS:
        make_conversations(file := folder / f"conversations-{turns}.jsonl", options.rows // turns, turns)
        found = prepare(jobs, f"conversations of {turns} turns", "sft", file, 1)
        rate = found.get("project", {}).get("rows_per_s")
        per_turn.append(rate and rate * turns)
        figures.add(f"turns/s, conversations of {turns}", per_turn[-1], "1/s")
    ratio = quotient(per_turn[1], per_turn[0])
    figures.add(f"turns/s, conversations of {TURNS[1]} over those of {TURNS[0]}", ratio, "x")


def libraries() -> list[str]:
    """Return this project, and TRL where it is installed."""
    return ["project", *(["trl"] if importlib.util.find_spec("trl") else [])]


def compare(jobs: Jobs, figures: Figures, name: str, stage: str, file: Path, cores: int) -> float | None:
    """Prepare a file with each library; return this project's median of the rows/s."""
    runs = prepare(jobs, name, stage, file, cores, libraries())
    rates = {library: run["rows_per_s"] for library, run in runs.items()}
    figures.add(f"rows/s, {name}", rates.get("project"), "1/s")
    if "trl" in runs:
        figures.add(f"rows/s, {name}, TRL", rates["trl"], "1/s")
        figures.add(f"rows/s over TRL's, {name}", quotient(rates["project"], rates["trl"]), "x", ">= 1")
        figures.add(f"tokens over TRL's, {name}", quotient(*(run["tokens"] for run in runs.values())), "x")
    return rates.get("project")


def prepare(
    jobs: Jobs, name: str, stage: str, file: Path, cores: int, chosen: Sequence[str] = ("project",)
) -> dict[str, dict[str, Any]]:
    """Run the worker, and return what it found of each library; its configuration is kept."""
    tokenizer = Path(jobs.options.tokenizer or jobs.folder / "preparation")
    words = {"stage": stage, "data": file, "cores": cores, "tokenizer": tokenizer}
    words |= {"libraries": ",".join(chosen), "repeats": jobs.options.repeats}
    found = jobs.worker(name, "benchmarks.speed.preparation", flags(words))
    if not found:
        return {}
    jobs.config = jobs.config or found["config"]
    of_all = jobs.runs.pop(name)["flags"]
    for library in chosen:
        jobs.runs[f"{name}, {library}"] = found[library] | {"flags": of_all}
    return {library: found[library] for library in chosen}


def make_messages(file: Path, pairs: Path, stage: str) -> None:
    """Write pairs of texts as lists of messages, which both libraries render by the chat template."""
    from pipeline.data.readers import read_file

    with file.open("w", encoding="utf-8") as out:
        for _, row in read_file(pairs):
            turns = {name: [{"role": "assistant", "content": row[name]}] for name in ("chosen", "rejected")}
            prompt = [{"role": "user", "content": row["prompt"]}]
            made = {"prompt": prompt, **turns} if stage == "reward" else {"messages": prompt + turns["chosen"]}
            out.write(json.dumps(made) + "\n")


def make_conversations(file: Path, count: int, turns: int) -> None:
    """A file of conversations of `turns` turns."""
    from benchmarks.speed.random_models import text_of

    random = Random(2)
    with file.open("w", encoding="utf-8") as out:
        for _ in range(count):
            roles = ("user", "assistant") * (turns // 2)
            out.write(json.dumps({"messages": [{"role": r, "content": text_of(random, 30)} for r in roles]}) + "\n")


def prepared_here(stage: str, file: str, tokenizer: Any, folder: str) -> dict[str, Any]:
    """Prepare a file as this project's stages do."""
    from pipeline.data.cache import load_or_build
    from pipeline.data.selection import DataOptions
    from pipeline.data.shards import num_processes

    rows = {"sft": "sequences", "reward": "pairs", "ppo": "prompts"}[stage]
    options = DataOptions(
        rows=rows, data_path=(file,), data_split="none", eval_fraction=0.0, cache_dir=folder, max_seq_len=MAX_SEQ_LEN
    )
    built = load_or_build(options, tokenizer)
    config = asdict(options) | {"stage": stage, "data_path": Path(file).name, "cache_dir": "(deleted)"}
    return {"rows": built.train, "processes": num_processes(len(built.train)), "config": config}


def prepared_by_trl(stage: str, file: str, tokenizer: Any, folder: str, cores: int) -> dict[str, Any]:
    """Prepare a file as TRL's trainers do before they train; in stage sft they train all tokens, without masks."""
    import datasets
    import trl

    datasets.disable_progress_bars()
    kinds = {"sft": (trl.SFTTrainer, trl.SFTConfig), "reward": (trl.RewardTrainer, trl.RewardConfig)}
    trainer, config = kinds[stage]
    options = {"max_length": MAX_SEQ_LEN, "dataset_num_proc": cores if cores > 1 else None}
    arguments = config(output_dir=folder, use_cpu=True, bf16=False, report_to=[], **options)
    rows = datasets.load_dataset("json", data_files=file, split="train", cache_dir=folder)
    known = SimpleNamespace(_tokenizer=tokenizer, chat_template=None, completion_only_loss=False)
    more = {"packing": False, "formatting_func": None} if stage == "sft" else {}
    rows = trainer._prepare_dataset(known, rows, tokenizer, arguments, dataset_name="train", **more)
    return {"rows": rows, "processes": cores}


def timed(library: str, given: argparse.Namespace, tokenizer: Any) -> dict[str, Any]:
    """Prepare the file once, into a folder that is deleted."""
    from pyarrow import compute

    with tempfile.TemporaryDirectory() as folder:
        words = given.stage, given.data, tokenizer, folder
        load, started, used = os.getloadavg()[0], time.perf_counter(), cpu_seconds()
        found = prepared_by_trl(*words, given.cores) if library == "trl" else prepared_here(*words)
        seconds, cpu = time.perf_counter() - started, cpu_seconds() - used
        rows = found.pop("rows")
        names = [name for name in ("input_ids", "ids", "chosen_ids", "rejected_ids") if name in rows.column_names]
        lengths = map(compute.list_value_length, rows.select_columns(names).with_format("arrow")[:].columns)
        tokens = sum(compute.sum(column).as_py() for column in lengths)
    found |= {"rows_per_s": len(rows) / seconds, "tokens_per_s": tokens / seconds, "rows": len(rows)}
    return found | {"tokens": tokens, "seconds": seconds, "cpu_s": cpu, "load": load}


def cpu_seconds() -> float:
    """Return the processor time that this process and those that it started have used."""
    used = (resource.getrusage(who) for who in (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN))
    return sum(each.ru_utime + each.ru_stime for each in used)


def main() -> None:
    """Prepare a file on the first cores of this machine, with one library after the other, again and again."""
    import datasets  # noqa: F401  it is imported where rows are read, which is timed

    from pipeline.data.templates import set_template
    from pipeline.models.tokenizers import load_tokenizer

    parser = argparse.ArgumentParser(description=__doc__)
    for name in ("stage", "data", "tokenizer", "libraries"):
        parser.add_argument(f"--{name}", required=True)
    for name in ("cores", "repeats"):
        parser.add_argument(f"--{name}", type=int, required=True)
    given = parser.parse_args()
    os.sched_setaffinity(0, sorted(os.sched_getaffinity(0))[: given.cores])
    tokenizer = load_tokenizer(given.tokenizer)
    set_template(tokenizer, "auto")
    runs: dict[str, list[dict[str, Any]]] = {library: [] for library in given.libraries.split(",")}
    if "trl" in runs:
        import trl

        trl.SFTTrainer, trl.RewardTrainer  # noqa: B018  they are imported by name, which is not timed
    for _ in range(given.repeats):
        for library, found in runs.items():
            found.append(timed(library, given, tokenizer))
    config = [run.pop("config", {}) for run in runs["project"]][0]
    result: dict[str, Any] = {"config": config}
    for library, found in runs.items():
        found.sort(key=lambda run: run["rows_per_s"])
        ends = {"slowest": found[0]["rows_per_s"], "fastest": found[-1]["rows_per_s"]}
        ends["cpu_s"] = sorted(run["cpu_s"] for run in found)[len(found) // 2]
        result[library] = found[len(found) // 2] | ends
    print(json.dumps(result), flush=True)


if __name__ == "__main__":
    main()
