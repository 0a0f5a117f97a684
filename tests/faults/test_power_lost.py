"""What gets its name outside checkpoints is on the disk by then: a loss of power leaves the old content or the new one.

Lines that are appended are on the disk before a checkpoint says that the run has come so far. Heartbeats and outcomes
are not: no run reads those of a machine that was off.
"""

import json
import os
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from support.in_process import undone_afterwards
from support.power import names_watched
from support.preference_runs import words
from support.recorded_runs import record
from support.row_options import load_rows
from support.tiny_run import make_folder, make_tokenizer

from pipeline.data.selection import DataOptions
from pipeline.data.shards import SHARDS
from pipeline.files import OURS, with_new_folder
from pipeline.reporting import page
from pipeline.run import host_storage
from pipeline.training.metrics import MetricsWriter
from rlhf.rewards.sample_file import join_parts, open_samples, part_of
from step1_sft.metrics import METRICS
from step3_dpo.main import main as dpo
from step3_dpo.reference import write_tables
from step3_ppo.main import main as ppo

NOT_KEPT = {"heartbeat", "outcome"}
APPENDED = ("metrics.jsonl", "metrics.csv", "samples.jsonl", "row_values.jsonl")


def reference(folder: Path) -> set[str]:
    write_tables(folder / "reference.safetensors", "key", {"train": np.zeros((3, 2))})
    return {"reference.safetensors"}


def report(folder: Path) -> set[str]:
    page.write_report([record(folder, "sft")], folder / "report")
    return {"report.html", "report.md"}


def copy_of_another_host(folder: Path) -> set[str]:
    """Two hosts with this disk alone: the file replaces itself."""
    (folder / "model.bin").write_bytes(bytes(100))
    assert host_storage.copy_file(folder / "model.bin", 100, source=0, missing=True) == ""
    return {"model.bin"}


def joined_samples(folder: Path) -> set[str]:
    file, settings = folder / "answers.jsonl", {"seed": 1}
    for rank in (0, 1):
        samples = open_samples(part_of(file, rank, 2), settings, overwrite=False)
        samples.write(rank + 1, {"answers": []})
        joined = join_parts(file, settings, rank=rank, size=2)
    assert joined == 2 and [json.loads(line)["number"] for line in file.open()] == [1, 2]
    return {"answers.jsonl", "answers.jsonl.part-1-of-2.settings.json", "answers.jsonl.part-2-of-2.settings.json"}


def cached_rows(folder: Path, *, stage: str = "sft", **columns: str) -> set[str]:
    rows = [{"prompt": f"question {n}?", "chosen": "good", "rejected": "bad", **columns} for n in range(60)]
    (folder / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    options = DataOptions(data_path=(f"{folder}/rows.jsonl",), cache_dir=f"{folder}/cache")
    load_rows(stage, options, make_tokenizer(["\n\nHuman: question?\n\nAssistant: good"]))
    return {next(path.name for path in (folder / "cache").iterdir() if path.is_dir())}


def cached_columns(folder: Path) -> set[str]:
    return cached_rows(folder, stage="ppo", answer="42")


def part_of_settings(named: Path) -> Iterable[Path]:
    """Settings of a part of samples say that it is whole, if there is one by then."""
    name = named.name.removesuffix(".settings.json")
    return [named.with_name(name)] if name != named.name else []


def lost(found: dict[str, list[str]]) -> dict[str, list[str]]:
    """The files that a loss of power may have spoilt, by the name that they are part of."""
    return {path: files for path, files in found.items() if files and is_read_again(Path(path))}


def is_read_again(path: Path) -> bool:
    """Not what is hidden or partial, and has no name yet, but for the shards of a preparation that goes on."""
    is_shard = any(part.endswith(SHARDS) for part in path.parts)
    return not any(
        part in NOT_KEPT or part.startswith(".") or part.endswith(".partial") * (not is_shard) for part in path.parts
    )


@pytest.mark.parametrize(
    "write",
    [reference, report, copy_of_another_host, joined_samples, cached_rows, cached_columns],
    ids=lambda f: f.__name__,
)
def test_what_is_written_is_on_the_disk_when_it_gets_its_name(write, tmp_path, monkeypatch):
    monkeypatch.setattr(page, "write_png", lambda file, panels: None)
    monkeypatch.setattr(page, "svg", lambda panel, salt: "")
    monkeypatch.setattr(host_storage.dist, "broadcast_bytes", lambda piece, count, source: piece)
    (tmp_path / "work").mkdir()
    with names_watched(tmp_path / "log", part_of_settings) as found:
        names = write(tmp_path / "work")
    assert names <= {Path(path).name for path in found()}
    assert lost(found()) == {}


def test_a_folders_name_is_on_the_disk_before_its_earlier_files_are_deleted(tmp_path, monkeypatch):
    fsync, listings = os.fsync, list[list[str]]()

    def fsync_seen(descriptor: int) -> None:
        fsync(descriptor)
        if Path(os.readlink(f"/proc/self/fd/{descriptor}")) == tmp_path:
            listings.append(sorted(path.name for path in tmp_path.iterdir()))

    monkeypatch.setattr(os, "fsync", fsync_seen)
    for _ in range(2):
        with_new_folder(tmp_path / "model", lambda fresh: (fresh / OURS).write_text("{}"))
    assert listings == [["model"], [".model.old", "model"]]


def test_lines_are_on_the_disk_before_a_checkpoint_says_so(tmp_path):
    (tmp_path / "run").mkdir()
    writer = MetricsWriter(tmp_path / "run", stage="sft", metrics=METRICS, monitors=["csv"], start_step=-1)
    with names_watched(tmp_path / "log", lambda named: (named.with_name(name) for name in APPENDED)) as found:
        writer.write(1, {"loss": 0.5})
        writer.write_rows(1, {"eval_loss": [0.1, 0.9]}, "a" * 8)
        (tmp_path / "run" / "samples.jsonl").write_text('{"step": 1}\n')
        writer.sync()
        (tmp_path / "run" / "step").touch()
        (tmp_path / "run" / "step").rename(tmp_path / "run" / "step-1")
    assert sorted(path.name for path in (tmp_path / "run").iterdir()) == sorted([*APPENDED, "step-1"])
    assert [*found().values()] == [["step"]], "that one alone was not flushed"


# --- whole runs -------------------------------------------------------------------------------------------------------


def lines_of_run(named: Path) -> Iterable[Path]:
    """A checkpoint says that all lines up to its step are there."""
    return [named.parents[1] / name for name in APPENDED] if named.parent.name == "checkpoints" else []


COMMON = {"max_steps": 2, "save_steps": 1, "eval_interval": 1, "monitors": "csv", "data_output_path": "cache"}
SAMPLING = {
    "actor_model_name_or_path": "base", "critic_model_name_or_path": "scorer", "data_path": "train.jsonl",
    "eval_data_path": "test.jsonl", "max_prompt_seq_len": 48, "max_answer_seq_len": 12, "dtype": "fp32",
    "per_device_generation_batch_size": 8, "per_device_train_batch_size": 8, "output_dir": "run",
}  # fmt: skip
RUNS: dict[str, tuple[Callable[[list[str]], int], list[object], set[str]]] = {
    "dpo": (dpo, words(Path(), "run", per_device_train_batch_size=8, **COMMON), {"reference.safetensors", "actor"}),
    "ppo": (ppo, [word for name, value in (SAMPLING | COMMON).items() for word in (f"--{name}", value)], {"critic"}),
}


@pytest.mark.slow
@pytest.mark.parametrize("stage", RUNS)
def test_a_whole_run_loses_nothing_that_has_its_name(stage: str, tmp_path: Path, monkeypatch: Any) -> None:
    main, given, own = RUNS[stage]
    (tmp_path / "work").mkdir()
    monkeypatch.chdir(make_folder(tmp_path / "work", num_train=32))
    with names_watched(tmp_path / "log", lines_of_run) as found, undone_afterwards():
        assert main([str(word) for word in given]) == 0
    names = {Path(path).name for path in found()}
    assert names >= own | {"env.json", "config.json", "rows.json", "meaning.json", "step-1", "step-2", "done.json"}
    assert lost(found()) == {}
