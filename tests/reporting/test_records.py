"""What is read from a run's folder: whole, cut off, resumed, failed, killed, stopped or still running."""

import json
import shutil
import time
from pathlib import Path

import pytest
from support.messages import naming
from support.recorded_runs import die, record, record_road, values_at

from pipeline.reporting.records import RunRecord, labels_of, runs_of
from pipeline.reporting.tables import between_steps, compared, given_flags, memory, times, why_no_plan
from pipeline.run.outcome import write_outcome


def run_of(folder: Path) -> RunRecord:
    return RunRecord(folder, folder.name)


def test_an_output_folder_has_its_stages_in_order_and_a_run_its_own(tmp_path):
    for stage in ("ppo", "reward", "sft"):
        record(tmp_path / "out", stage)
    assert [run.label for run in runs_of(tmp_path / "out")] == ["sft", "reward", "ppo"]
    assert [run.stage for run in runs_of(tmp_path / "out" / "runs" / "reward")] == ["reward"]
    assert runs_of(tmp_path) == []


def test_a_run_whose_model_a_later_one_has_replaced_is_left_out_once_that_has_finished(tmp_path):
    old = record(tmp_path, "ppo")
    new = old.with_name("dpo")
    shutil.copytree(old, new)
    meaning = json.loads((new / "meaning.json").read_text())
    (new / "meaning.json").write_text(json.dumps(meaning | {"stage": "dpo", "began": meaning["began"] + 9}))
    assert [run.stage for run in runs_of(tmp_path)] == ["dpo"] and [run.stage for run in runs_of(old)] == ["ppo"]
    (new / "done.json").unlink()
    assert [run.stage for run in runs_of(tmp_path)] == ["ppo", "dpo"]
    (new / "done.json").write_text("{}")
    (new / "meaning.json").write_text(json.dumps(meaning | {"outputs": ["elsewhere"], "began": meaning["began"] + 9}))
    assert len(runs_of(tmp_path)) == 2, "another folder of a model"


def test_before_and_after_are_the_numbers_of_the_first_and_the_last_evaluation(tmp_path):
    folder = record(tmp_path, "ppo", steps=6, interval=2)
    lines = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines() if "eval_" in line]
    found = {change.name: (change.first, change.last, change.num_rows) for change in compared(run_of(folder))}
    names = ["eval_objective/scores", "eval_objective/kl", "eval_completions/mean_length"]
    assert list(found) == [*names, "eval_completions/truncated_fraction"] and len(lines) == 4
    assert found == {name: (lines[0][name], lines[-1][name], 600) for name in found}


@pytest.mark.parametrize(("stage", "name"), [("sft", "eval_perplexity"), ("reward", "eval_accuracy")])
def test_steps_1_and_2_are_compared_by_perplexity_and_accuracy(tmp_path, stage, name):
    changes = compared(run_of(record(tmp_path, stage)))
    assert [(change.name, change.verdict) for change in changes] == [(name, "better")]


def test_a_single_evaluation_has_no_after(tmp_path):
    (change,) = compared(run_of(record(tmp_path, "sft", steps=2, interval=5)))
    assert change.first == pytest.approx(12.3456789) and change.last is None and change.verdict == ""


@pytest.mark.parametrize("keep", [0.0, 0.3, 0.97])
def test_files_that_are_missing_or_cut_off_leave_what_is_whole(tmp_path, keep):
    folder = record(tmp_path, "ppo")
    for file in [path for path in folder.rglob("*") if path.is_file()]:
        content = file.read_bytes()
        file.write_bytes(content[: int(keep * len(content))] + b"\xff{")
    run = run_of(folder)
    whole = [json.loads(line) for line in (folder / "metrics.jsonl").read_bytes().split(b"\n")[:-1]]
    assert run.lines == whole and len(whole) < 10 and len(run.samples) < 9
    assert run.ending[0] == "unknown" and run.settings == {} and compared(run) == [] and times(run) is not None
    shutil.rmtree(folder)
    assert (run_of(folder).lines, run_of(folder).warnings, run_of(folder).ending[0]) == ([], {}, "unknown")


def test_numbers_that_are_none_are_no_points(tmp_path):
    lines = [
        '{"step": 1, "loss": null}',
        '{"step": 2, "loss": 0.0}',
        '{"step": 3, "loss": NaN}',
        '{"step": 4, "loss": "x"}',
    ]
    (tmp_path / "metrics.jsonl").write_text("\n".join([*lines, "[1]", '{"loss": 5}', '{"step": 5, "lo']))
    assert run_of(tmp_path).points("loss") == [(2, 0.0)]


def test_a_run_ends_in_six_ways(tmp_path):
    ended = record(tmp_path / "a", "sft", steps=4)
    assert run_of(ended).ending == ("finished", "finished after 4 steps")
    running = record(tmp_path / "b", "sft", steps=4, total=9, code=None)
    assert run_of(running).ending == ("running", naming("step 4 of 9"))
    die(running)
    assert run_of(running).ending[0] == "died" and "step 4 of 9" in run_of(running).ending[1]
    stopped = record(tmp_path / "c", "sft", code=75)
    assert run_of(stopped).ending[0] == "stopped" and "resumes" in run_of(stopped).ending[1]
    failed = record(tmp_path / "d", "sft", code=4)
    assert run_of(failed).ending == ("failed", naming("step 6 of 6 ... exit code 4: the cause"))
    (tmp_path / "e").mkdir()
    assert run_of(tmp_path / "e").ending[0] == "unknown"


def test_the_first_cause_of_several_ranks_is_told(tmp_path):
    folder = record(tmp_path, "sft", code=0)
    write_outcome(folder, 0, 1, "a peer is gone", secondary=True)
    write_outcome(folder, 1, 3, "no space left")
    assert run_of(folder).ending[1].endswith("exit code 3: no space left")


def test_a_rank_of_another_machine_is_alive_by_its_last_sign(tmp_path):
    folder = record(tmp_path, "sft", code=None)
    file = folder / "outcome" / "rank-0.json"
    file.write_text(json.dumps(json.loads(file.read_text()) | {"host": "elsewhere", "pid": 2**22 + 1}))
    assert run_of(folder).ending[0] == "running"
    old = time.time() - 3600
    import os

    os.utime(file, (old, old))
    assert run_of(folder).ending[0] == "died"


def test_a_run_of_which_one_rank_is_gone_has_died(tmp_path):
    for gone in (0, 1):
        folder = record(tmp_path / str(gone), "sft", code=None)
        alive = json.loads((folder / "outcome" / "rank-0.json").read_text())
        (folder / "outcome" / "rank-1.json").write_text(json.dumps(alive | {"rank": 1}))
        assert run_of(folder).ending[0] == "running"
        (folder / "outcome" / f"rank-{gone}.json").write_text(json.dumps(alive | {"rank": gone, "pid": 2**22 + 1}))
        assert run_of(folder).ending[0] == "died"


def test_warnings_are_those_of_this_run_and_counted(tmp_path):
    folder = record(tmp_path, "sft")
    log = (folder / "log.txt").read_text()
    again = log.splitlines()[-1]
    (folder / "log.txt").write_text(
        f"2001-01-01 00:00:00,000 WARNING pipeline.y of an earlier run\n{log}{again}\nmore\n"
    )
    assert run_of(folder).warnings == {"health: KL is high": 2}


def test_the_steps_of_a_resumed_run_are_told_and_the_pause_is_no_time_of_it(tmp_path):
    folder = record(tmp_path, "sft", steps=4, interval=9)
    lines = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    for line in lines:
        line["time"] = 1000.0 + line["step"] * 0.5 + (5000.0 if line["step"] > 2 else 0.0) + (line["step"] == 4)
    (folder / "metrics.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    assert between_steps(run_of(folder)) == pytest.approx(5001.0)
    day = time.strftime("%Y-%m-%d %H:%M:%S")
    with (folder / "log.txt").open("a") as file:
        file.write(f"{day},1 INFO pipeline.z resuming from {folder}/checkpoints/step-2 (--overwrite starts over)\n")
    assert run_of(folder).resumed == [2] and between_steps(run_of(folder)) == pytest.approx(1.0)


def test_time_is_split_by_the_phases_of_step_3(tmp_path):
    found = dict(times(run_of(record(tmp_path, "ppo", steps=6))))
    assert found["sampling"] == pytest.approx(1.2) and found["updates"] == pytest.approx(0.9)
    assert found["the rest of the steps"] == pytest.approx(6 * (0.5 - 0.45))
    assert dict(times(run_of(record(tmp_path, "sft", steps=6))))["steps"] == pytest.approx(3.0)


def test_memory_stands_beside_the_plan(tmp_path):
    folder = record(tmp_path, "ppo")
    assert memory(run_of(folder)) == [("peak host memory", "", "1.31")] and "on GPUs alone" in why_no_plan(
        run_of(folder)
    )
    parts = {"allocated": 3.5, "reserved": [4.0, 5.25]}
    (folder / "plan.json").write_text(json.dumps({"target": "1 x H100", "memory_gib": {"train": parts}}))
    with (folder / "metrics.jsonl").open("a") as file:
        file.write(json.dumps({"step": 7, "memory/train_gib": 3.21, "gpu_reserved_gib": 4.75}) + "\n")
    rows = memory(run_of(folder))
    assert rows[:2] == [("tensors, train", "3.5", "3.21"), ("a whole GPU", "4 to 5.25", "4.75")]
    assert why_no_plan(run_of(folder)) == ""


def test_flags_at_their_default_are_left_out(tmp_path):
    found = given_flags(run_of(record(tmp_path, "sft", max_steps=6)))
    assert {name: (value, str(origin)) for name, (value, origin) in found.items()} == {"max_steps": (6, "command line")}


def test_folders_are_told_apart_by_what_differs():
    assert labels_of([Path("/a/b/one/x"), Path("/a/b/two")]) == ["one/x", "two"]
    assert labels_of([Path("output")]) == ["output"] and labels_of([Path("a"), Path("/b")]) == ["a", "/b"]


def test_every_number_of_a_recorded_run_is_declared(tmp_path):
    run = run_of(record_road(tmp_path) / "runs" / "ppo")
    assert {name: run.metric(name)["title"] for name in values_at("ppo", 1)}["objective/scores"] == "score"
    assert run.metric("eval_objective/kl")["unit"] == "nats" and run.metric("other")["title"] == "other"
