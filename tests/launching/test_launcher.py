"""How a step ends: exit codes from the ranks' outcomes, skipping, signals. And what the machine offers."""

import json
import os
import re
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
from support.launch_stub import ROOT, TINY, started, stub_environment, train, write_row_values
from support.marks import slow
from support.messages import naming
from support.saved_state import write_state

from pipeline.errors import EnvironmentFault, InputError
from pipeline.launching.machine import check_device_count, count_gpus, device_kind
from pipeline.run.layout import lock_file
from rlhf.train_plan import make_plan

# --- ends -----------------------------------------------------------------------------------------------------------


@pytest.mark.few(2)
@pytest.mark.parametrize(
    ("outcomes", "launcher_code", "code"),
    [
        ("0,0", "0", 0),
        ("0,0", "1", 0),  # torn down with an abort after all work was done
        ("4,1", "1", 4),
        slow(("1,2", "1", 2)),
        ("75,75", "1", 75),
        ("0,null", "1", 1),
        slow(("1,0", "0", 1)),
        ("", "3", 3),
        slow(("", "0", 1)),
        slow(("", "250", 1)),
    ],
)
def test_exit_code_is_derived_from_the_ranks(tmp_path, outcomes, launcher_code, code):
    done = train(tmp_path, *TINY, "--step", "1", STUB_OUTCOMES=outcomes, STUB_CODE=launcher_code)
    assert done.returncode == code
    if code:
        assert f"ended with {code} (" in done.stderr and "output/runs/sft/log.txt" in done.stderr


@pytest.mark.slow
def test_the_last_line_of_a_stage_tells_what_was_reached(tmp_path):
    run_dir = tmp_path / "out/runs/sft"
    run_dir.mkdir(parents=True)
    values = [{"eval_accuracy": 0.25}, {"loss": 2.0}, {"eval_accuracy": None}, {"eval_accuracy": 0.75104}]
    lines = [{"step": step, "eval_rows": 64, "num_tokens": 2e6, **value} for step, value in enumerate(values)]
    meaning = {"titles": {"eval_accuracy": "held-out accuracy"}, "metrics": {"accuracy": {"better": 1}}}
    (run_dir / "env.json").write_text(json.dumps({"stage": "sft", "versions": {}}))
    (run_dir / "meaning.json").write_text(json.dumps({**meaning, "rows": "pairs"}))
    (run_dir / "metrics.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    write_row_values(run_dir, [line for line in lines if line.get("eval_accuracy")])
    done = train(tmp_path, *TINY, "--step", "1", "--output-dir", "out", STUB_OUTCOMES="0")
    figures = r"held-out accuracy 0.25 -> 0.751 \(64 pairs\), better than at the start, 2M tokens"
    assert re.search(rf"stage 1: done in [\d:]+, {figures}; model: out/sft", " ".join(done.stdout.split()))


def test_a_failed_step_ends_the_run(tmp_path):
    assert train(tmp_path, *TINY, STUB_OUTCOMES="4").returncode == 4
    assert len(started(tmp_path)) == 1


@pytest.mark.slow
def test_old_outcomes_are_not_read(tmp_path):
    folder = tmp_path / "output/runs/sft/outcome"
    folder.mkdir(parents=True)
    old = {
        "rank": 7,
        "code": 4,
        "message": "",
        "secondary": False,
        "halved": {},
        "pid": 1,
        "host": "x",
        "supervisor": "",
        "time": 0,
    }
    (folder / "rank-7.json").write_text(json.dumps(old))
    lock_file(folder.parent).touch()
    assert train(tmp_path, *TINY, "--step", "1", STUB_OUTCOMES="0").returncode == 0
    assert [file.name for file in folder.iterdir()] == ["rank-0.json"]


@pytest.fixture
def finished(tmp_path) -> Path:
    """A folder with the data of the tiny presets, in which stage 1 is finished after 10 steps."""
    data = tmp_path / "output/demo/data/train.jsonl"
    data.parent.mkdir(parents=True)
    data.write_text('{"prompt": "a", "chosen": "b", "rejected": "c"}\n')
    assert train(tmp_path, *TINY, "--step", "1", STUB_OUTCOMES="0").returncode == 0
    return tmp_path


@pytest.mark.slow
def test_finished_steps_are_skipped(finished):
    again = train(finished, *TINY, "--step", "1", STUB_OUTCOMES="0")
    assert again.returncode == 0 and "stage 1: finished already (output/sft)" in again.stdout
    assert len(started(finished)) == 1
    assert f"\n{again.stdout.splitlines()[0]}\n" in f"\n{train(finished, *TINY, '--step', '1', '--dry-run').stdout}"
    elsewhere = train(finished, *TINY, "--step", "1", "--sft.learning-rate", "1", "--target", "1xH100")
    assert elsewhere.returncode == 0 and "\n$ bash" in elsewhere.stdout, "a plan for another machine is not of this run"
    train(finished, *TINY, "--step", "1", "--sft.max-steps", "10", "--sft.print-steps", "3", STUB_OUTCOMES="0")
    assert len(started(finished)) == 1, "the stub's run had 10 steps"
    train(finished, *TINY, "--step", "1", "--sft.max-steps", "11", STUB_OUTCOMES="0")
    assert len(started(finished)) == 2, "more steps extend the run"
    train(finished, *TINY, "--step", "1", "--overwrite", STUB_OUTCOMES="0")
    assert len(started(finished)) == 3


@pytest.mark.slow
def test_a_finished_step_of_other_settings_or_data_is_refused_before_any_step_starts(finished):
    (finished / "output/demo/data/train.jsonl").write_text('{"prompt": "x", "chosen": "y", "rejected": "z"}\n')
    done = train(finished, *TINY, "--sft.learning-rate", "0.5", "--step", "2", "1", STUB_OUTCOMES="0")
    lines = done.stderr.splitlines()
    assert done.returncode == 2 and len(started(finished)) == 1
    assert lines[0] == naming("error: --sft.learning-rate ... 0.5 ... finished run")
    assert lines[1] == naming("error: --sft.data-path ... output/demo/data ... finished run")
    assert lines[2] == naming("error: sft ... output/runs/sft ... another run ... --output-dir")
    assert train(finished, *TINY, "--step", "1", "--dry-run").returncode == 2, "the dry run finds the same"


def test_what_a_later_step_contradicts_refuses_none_that_runs(tmp_path, monkeypatch):
    """Names and values of its flags are checked all the same."""
    monkeypatch.chdir(tmp_path)
    batches = ("--per-device-train-batch-size", "4", "--ppo.per-device-generation-batch-size", "3")
    (first,) = make_plan([*TINY, "--step", "1", *batches], prog="train.py").chosen
    assert first.resolved.config.optimizer.per_device_train_batch_size == 4
    for words, line in (
        (("--step", "1", "3"), "--ppo.per-device-generation-batch-size: a rollout has 3 rows"),
        (("--step", "1", "--ppo.kl-coef=-1"), "--ppo.kl-coef: got '-1'"),
        (("--step", "1", "--ppo.kl-coeff=1"), "--ppo.kl-coeff: unknown flag"),
    ):
        with pytest.raises(InputError) as refused:
            make_plan([*TINY, *words, *batches], prog="train.py")
        assert line in str(refused.value)


@pytest.mark.slow
def test_a_later_step_of_other_settings_is_refused_before_an_earlier_one_starts(finished):
    """Its finished run is to take more steps, or it has a checkpoint; the dry run finds the same."""
    assert train(finished, *TINY, "--step", "2", STUB_OUTCOMES="0").returncode == 0
    folder = finished / "output/runs/reward/checkpoints/step-10"
    done = json.loads((finished / "output/runs/reward/done.json").read_text())
    write_state(folder, {"settings": done["settings"], "sizes": done["sizes"]})
    words = ("--step", "1", "2", "--overwrite", "--reward.overwrite", "false", "--reward.learning-rate", "0.5")
    for more in (("--reward.max-steps", "20"), ("--reward.max-steps", "20", "--dry-run")):
        refused = train(finished, *TINY, *words, *more, STUB_OUTCOMES="0")
        assert refused.returncode == 2 and len(started(finished)) == 2, refused.stderr
        assert naming("error: --reward.learning-rate ... 0.5 ... checkpoint") in refused.stderr.splitlines()
        assert naming("reward: output/runs/reward/checkpoints/step-10 ... same flags") in refused.stderr.splitlines()


@pytest.mark.slow
def test_a_finished_step_whose_start_model_is_to_be_made_again_is_refused(finished):
    assert train(finished, *TINY, "--step", "2", "3", STUB_OUTCOMES="0").returncode == 0
    again = train(finished, *TINY, "--sft.max-steps", "11", STUB_OUTCOMES="0")
    assert again.returncode == 2 and len(started(finished)) == 3
    assert naming("error: --ppo.actor-model-name-or-path ... stage 1 retrains output/sft") in again.stderr.splitlines()
    again = train(finished, *TINY, "--sft.max-steps", "11", "--ppo.overwrite", STUB_OUTCOMES="0")
    assert again.returncode == 0 and len(started(finished)) == 5


def wait_until_running(folder: Path) -> int:
    """The stub rank's process id, once it is there."""
    file = folder / "output/runs/sft/outcome/rank-0.json"
    for _ in range(200):
        if file.exists() and file.read_text():
            return json.loads(file.read_text())["pid"]
        time.sleep(0.05)
    raise AssertionError("the stub rank did not start")


def start_and_signal(folder: Path, mode: str, *pauses_s: float) -> tuple[int, str, int]:
    """(exit code, stderr, rank's pid) of a run that gets SIGINT after each pause."""
    process = subprocess.Popen(
        [sys.executable, str(ROOT / "train.py"), *TINY, "--step", "1"],
        cwd=folder, env=stub_environment(folder, STUB_OUTCOMES=mode), stderr=subprocess.PIPE, text=True,
    )  # fmt: skip
    rank = wait_until_running(folder)
    for pause in pauses_s:
        time.sleep(pause)
        process.send_signal(signal.SIGINT)
    _, stderr = process.communicate(timeout=30)
    return process.returncode, stderr, rank


def test_a_signal_reaches_the_ranks_once(tmp_path):
    code, stderr, _ = start_and_signal(tmp_path, "wait", 0.0, 0.1)
    assert code == 75 and stderr == naming("second signal kills") and "killed" not in stderr


@pytest.mark.slow
def test_a_second_signal_kills(tmp_path):
    code, stderr, rank = start_and_signal(tmp_path, "wait-deaf", 0.0, 0.3, 2.0)
    assert code == 143 and stderr.count("second signal: killed") == 1
    with pytest.raises(ProcessLookupError):
        os.kill(rank, 0)


@pytest.mark.few(1)
@pytest.mark.parametrize(
    ("outcomes", "starts"), [("1", 3), slow(("null", 3)), ("2", 1), slow(("4", 1)), ("75", 1), slow(("5", 1))]
)
def test_restarts(tmp_path, outcomes, starts):
    """Only after a fault or a killed rank: what else may end a run would end the next one too."""
    done = train(tmp_path, *TINY, "--step", "1", "--max-restarts", "2", STUB_OUTCOMES=outcomes, STUB_CODE="1")
    assert done.returncode == (1 if outcomes == "null" else int(outcomes))
    assert len(started(tmp_path)) == starts
    said = [line for line in done.stdout.splitlines() if "restart" in line]
    assert said == [naming(f"stage 1: restart {n} of 2") for n in range(1, starts)]


@pytest.mark.slow
def test_no_restart_without_the_flag_or_after_success(tmp_path):
    assert train(tmp_path, *TINY, "--step", "1", STUB_OUTCOMES="1").returncode == 1
    assert train(tmp_path, *TINY, "--step", "1", "--max-restarts", "5", STUB_OUTCOMES="0").returncode == 0
    assert len(started(tmp_path)) == 2


@pytest.mark.few(1)
@pytest.mark.parametrize("saved", [True, False])
def test_a_restart_goes_on_from_what_was_saved_since_the_start(tmp_path, saved):
    if saved:
        manifest = tmp_path / "output/runs/sft/checkpoints/step-1/manifest.json"
        manifest.parent.mkdir(parents=True)
        manifest.touch()
        os.utime(manifest, (time.time() + 60,) * 2)
        (tmp_path / "output/runs/sft/env.json").write_text(json.dumps({"stage": "sft", "versions": {}}))
    words = (*TINY, "--step", "1", "--max-restarts", "1", "--overwrite", "--resume", "never")
    assert train(tmp_path, *words, STUB_OUTCOMES="1").returncode == 1
    first, second = started(tmp_path)
    assert second == [*first, *(["--overwrite", "false", "--resume", "auto"] if saved else [])]


# --- the machine --------------------------------------------------------------------------------------------


def test_device_counts(tmp_path, monkeypatch):
    monkeypatch.delenv("DS_ACCELERATOR", raising=False)
    for gpus, visible, allowed in ((4, None, 4), (4, "1,2", 2)):
        for name, value in stub_environment(tmp_path / str(visible), gpus=gpus).items():
            monkeypatch.setenv(name, value)
        monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
        if visible:
            monkeypatch.setenv("CUDA_VISIBLE_DEVICES", visible)
        check_device_count(allowed)
        with pytest.raises(EnvironmentFault, match=f"give at most {allowed}"):
            check_device_count(allowed + 1)
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "-1")
    with pytest.raises(EnvironmentFault, match="hides all 4 GPUs"):
        check_device_count(1)
    monkeypatch.setenv("DS_ACCELERATOR", "cpu")
    assert count_gpus() == 0 and device_kind() == "cpu"
    monkeypatch.delenv("DS_ACCELERATOR")
    monkeypatch.setenv("PATH", stub_environment(tmp_path / "none")["PATH"])
    with pytest.raises(EnvironmentFault, match="no GPU"):
        check_device_count(10_000)
