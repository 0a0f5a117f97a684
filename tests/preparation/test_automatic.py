"""Flags that are chosen when a run starts, as --auto says: by the plan, by a few steps, so that memory suffices."""

import json
import re
import socket
import subprocess
import sys
import threading
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from support.launch_stub import ROOT, started, stub_environment, write_program
from support.messages import naming
from support.saved_state import write_state
from support.tiny_run import make_folder, read_metrics

from benchmarks.speed.random_models import config_of
from pipeline.configuration.flags import flag_words, parse, scan
from pipeline.configuration.origins import COMMAND_LINE, Kind, Origin
from pipeline.configuration.rank_rules import Choice
from pipeline.configuration.resume_rules import record_of
from pipeline.configuration.stage import Stage
from pipeline.errors import EnvironmentFault, InputError, RunError
from pipeline.launching.request import LaunchRequest, parse_request
from pipeline.launching.target import GIB, Target
from pipeline.launching.verdict import Verdict
from pipeline.planning.fastest import ranked
from pipeline.planning.page import fits
from pipeline.preparation.measure import measured, seconds_of_steps, to_measure
from pipeline.preparation.plans import MEASURED, choose_at_start, stage_planner
from pipeline.preparation.stage_entry import read_flags
from pipeline.preparation.stage_job import run_job
from step1_sft.config import SFTConfig
from step1_sft.main import main as sft_main
from step1_sft.stage import STAGE as SFT
from step3_ppo.config import PPOConfig
from step3_ppo.stage import STAGE as PPO

MICRO, STEPS = "per_device_train_batch_size", "gradient_accumulation_steps"


def settings(folder: Path, *more: object, micro: int = 8, steps: int = 1) -> Any:
    """SFT of OPT-125M's shape."""
    if not (folder / "125m").is_dir():
        config_of("125m").save_pretrained(folder / "125m")
    words = ["--model-name-or-path", folder / "125m", "--per-device-train-batch-size", micro, "--dtype", "bf16",
             "--gradient-accumulation-steps", steps, "--data-output-path", folder / "cache",
             "--output-dir", folder / "out/sft", *more]  # fmt: skip
    return parse(SFTConfig, [str(word) for word in words], section="sft")


def chosen(given: Any, target: Target) -> Choice:
    """The choice of rank 0."""
    return choose_at_start(SFT, *stage_planner(SFT, given, target, {}))


@pytest.mark.slow
def test_the_changes_of_the_ladder_are_taken_and_each_is_said(tmp_path, caplog, monkeypatch):
    monkeypatch.setattr("pipeline.planning.changes.find_spec", lambda name: None)  # bitsandbytes, which is optional
    caplog.set_level("INFO")
    given, little = settings(tmp_path, "--auto", "fit"), Target("GPU", int(2.6 * GIB))
    assert chosen(given, Target("GPU", 80 * GIB)) == chosen(settings(tmp_path), Target("GPU", 80 * GIB))
    choice = chosen(given, little)
    said = [line for line in caplog.messages if "frees" in line]
    assert len(said) == 1 and all(re.search(r"^auto fit: --.*frees .* GiB .*; cost: ", line) for line in said)
    by_plan = chosen(settings(tmp_path, "--offload", "true", "--zero-stage", 2), little)
    assert choice.flags == {"offload": True, "zero_stage": 2} | by_plan.flags, "as with these flags by hand"
    planner, resolved = stage_planner(SFT, given, little, {})
    assert fits(planner.memory(choice.of(resolved, 1)), little) and choice.plan["target"] == str(little)
    with pytest.raises(EnvironmentFault, match="--auto fit: does not fit: .*use more GPUs"):
        chosen(given, Target("GPU", GIB // 2))


FEWER_ROWS = {MICRO: 1, STEPS: 8, "per_device_eval_batch_size": 2}
LACKS = [(2.6, 3, "the host lacks 1.1", {}), (1.0, 64, "of 1.00 GiB", FEWER_ROWS)]


@pytest.mark.slow
@pytest.mark.parametrize(("gib", "host_gib", "lacks", "also"), LACKS)
def test_another_training_is_named_and_never_taken(tmp_path, gib, host_gib, lacks, also):
    """Of a GPU with so little memory, or a host without room for an optimizer."""
    target, flags = Target("GPU", int(gib * GIB), host_memory=host_gib * GIB), {"lora_dim": 16} | also
    with pytest.raises(EnvironmentFault, match=f"--auto fit: .*{lacks}") as fault:
        chosen(settings(tmp_path, "--auto", "fit"), target)
    assert str(fault.value) == naming(f"other flags would train something else ... {' '.join(flag_words(flags))}")


def test_the_words_of_before_are_read_and_those_of_now_are_said(tmp_path):
    (tmp_path / "flags.yaml").write_text("auto_batch: true\n")
    for words, value in (
        (["--auto-fit"], "fit"), (["--auto_fit", "true"], "fit"), (["--auto-fit", "any"], "fit"),
        (["--auto-batch"], "measure"), (["--auto-fit", "--auto-batch", "false"], "fit"),
        (["--config", str(tmp_path / "flags.yaml")], "measure"),
    ):  # fmt: skip
        resolved = parse(SFTConfig, ["--data-path", "a.jsonl", *words], section="sft")
        assert resolved.config.run.auto == value and resolved.is_given("auto")
        assert resolved.notes[0] == naming(f"--auto- ... --auto {value} now")
    (tmp_path / "flags.yaml").write_text("auto_fit: true\nauto_batch: false\n")
    config = parse(
        SFTConfig, ["--data-path", "a.jsonl", "--config", str(tmp_path / "flags.yaml")], section="sft"
    ).config
    assert config.run.auto == "fit"
    with pytest.raises(InputError, match=naming("--auto: got 'big'")):
        parse(SFTConfig, ["--data-path", "a.jsonl", "--auto-fit", "big"], section="sft")


def test_the_measured_settings_are_the_plans_best_and_other_micro_batches_of_the_same_rows(tmp_path):
    given = settings(tmp_path, "--train-batch-size", 48)
    assert to_measure(*stage_planner(SFT, given, Target("CPU", 64 * GIB), {})) == [], "its micro-batch is given"
    words = flag_words({"model": tmp_path / "125m", "train_batch_size": 96, "dtype": "bf16"})
    given = parse(SFTConfig, words, section="sft")
    on_cpu = to_measure(*stage_planner(SFT, given, Target("CPU", 64 * GIB), {}))
    assert on_cpu == [{MICRO: 16, STEPS: 6}, {MICRO: 8, STEPS: 12}, {MICRO: 32, STEPS: 3}]
    planner, resolved = stage_planner(SFT, given, Target("GPU", 80 * GIB, tb_per_s=2.0, tflops=300.0), {})
    on_gpu = to_measure(planner, resolved)
    assert on_gpu[0] == choose_at_start(SFT, planner, resolved).flags and len(on_gpu) == 3
    assert all(flags[MICRO] * flags[STEPS] == 96 for flags in on_gpu) and len({flags[MICRO] for flags in on_gpu}) > 1


def run_that_goes_on(folder: Path, target: Target) -> Any:
    """The settings of a run with a checkpoint, which began with micro-batches of 2 rows chosen for a target."""
    settings(folder)  # makes the model
    words = flag_words({"model": folder / "125m", "train_batch_size": 96, "output_dir": folder / "out/sft"})
    given = parse(SFTConfig, words, section="sft")
    checkpoint = SFT.run_folder(given.config.run) / "checkpoints/step-3"
    write_state(checkpoint, record_of(given.config, None, "same"))
    entries = {
        name: {"value": value, **Origin(Kind.PLAN, str(target)).entry} for name, value in ((MICRO, 2), (STEPS, 48))
    }
    (checkpoint.parents[1] / "config.json").write_text(json.dumps(entries))
    return given


def test_a_plan_for_described_gpus_goes_on_with_no_run(tmp_path):
    here = Target("GPU", 80 * GIB, tb_per_s=2.0, tflops=300.0, described=False)
    given = run_that_goes_on(tmp_path, here)
    assert (chosen(given, here).flags[MICRO], chosen(given, here).line) == (2, naming("as the run began"))
    assert chosen(given, replace(here, described=True)).flags[MICRO] != 2


def test_a_run_that_goes_on_chooses_anew_where_its_choice_does_not_fit_beside_what_is_given(tmp_path):
    here = Target("GPU", 80 * GIB, tb_per_s=2.0, tflops=300.0, described=False)
    given = run_that_goes_on(tmp_path, here)
    crowded = given.changed({"per_device_eval_batch_size": 100_000}, {"per_device_eval_batch_size": COMMAND_LINE})
    assert chosen(crowded, here).line == naming("began with other flags")


def test_a_run_that_goes_on_measures_nothing(tmp_path, monkeypatch):
    monkeypatch.setattr("pipeline.preparation.measure.to_measure", lambda *_: pytest.fail("it has its choice"))
    given = run_that_goes_on(tmp_path, Target("CPU", 64 * GIB))
    signals: Any = SimpleNamespace(first=None, second=None)
    assert measured(SFT, given, parse_request("single_gpu", ["1"]), signals) == {}


def test_other_micro_batches_are_measured_with_all_other_flags_of_the_best(tmp_path, monkeypatch):
    settings(tmp_path)  # makes the model
    given = parse(SFTConfig, flag_words({"model": tmp_path / "125m", "train_batch_size": 96}), section="sft")
    planner, resolved = stage_planner(SFT, given, Target("GPU", 80 * GIB, tb_per_s=2.0, tflops=300.0), {})
    monkeypatch.setattr("pipeline.preparation.measure.ranked", lambda *of: ranked(*of)[:1])
    best, *others = ({**flags, MICRO: 0, STEPS: 0} for flags in to_measure(planner, resolved))
    assert len(best) > 2 and others == [best] * 2


@pytest.mark.parametrize("ends_with", [2, 3])
def test_a_trial_pushes_and_logs_nothing_and_its_error_has_its_own_code(tmp_path, monkeypatch, ends_with):
    class NoJob:
        got_stop_signal = False

        def __init__(self, run_dir: Path, stage: Stage, request: LaunchRequest, *given: Any, **named: Any) -> None:
            config = read_flags(stage, list(request.argv)).config
            assert config.run.push_to_hub == "" and config.run.monitors == [] and not config.run.report
            assert named["variables"]["WANDB_MODE"] == "disabled"

        def supervise(self) -> Verdict:
            return Verdict(ends_with, ["error: no rows"])

        def kill(self) -> None:
            pass

    monkeypatch.setattr("pipeline.preparation.measure.Trial", NoJob)
    (tmp_path / "a.jsonl").write_text('{"prompt": "x", "response": "y"}\n')
    settings(tmp_path)  # makes the model
    words = ["--model", str(tmp_path / "125m"), "--data-path", str(tmp_path / "a.jsonl"), "--train-batch-size", "96",
             "--auto", "measure", "--push-to-hub", "me/model", "--output-dir", str(tmp_path / "out")]  # fmt: skip
    request, signals = parse_request("single_gpu", ["1", *words]), SimpleNamespace(first=None, second=None)
    with pytest.raises(RunError, match="--auto measure: .*no rows") as fault:
        measured(SFT, read_flags(SFT, words), request, signals)
    assert fault.value.code == ends_with


@pytest.mark.parametrize("method", ["ppo", "grpo", "rloo"])
def test_the_steps_that_are_tried_update_every_model_that_the_method_has(tmp_path, monkeypatch, method):
    """Ranks that end before they start write no outcome: their error is the last line of their output."""

    class Refused:
        got_stop_signal = False

        def __init__(self, run_dir: Path, stage: Stage, request: LaunchRequest, *_: Any, **named: Any) -> None:
            assert read_flags(stage, list(request.argv)).values["critic_warmup_steps"] == 0
            named["output"].write(b"a library says something\nerror: no rows\n")
            named["output"].flush()

        def supervise(self) -> Verdict:
            return Verdict(2, [])

        def kill(self) -> None:
            pass

    monkeypatch.setattr("pipeline.preparation.measure.Trial", Refused)
    words = ["--method", method, "--actor-model-name-or-path", str(tmp_path / "125m"), "--data-path", "a.jsonl"]
    words += ["--critic-model-name-or-path", str(tmp_path / "125m"), "--critic-warmup-steps", "3"]
    words = words if method == "ppo" else [*words[:6], "--reward-function", "length"]
    signals: Any = SimpleNamespace(first=None, second=None)
    request = parse_request("single_gpu", ["3", *words])
    with pytest.raises(RunError, match="--auto measure: micro-batches of .*: no rows; its output: ") as fault:
        seconds_of_steps(PPO, request, read_flags(PPO, words), {}, signals=signals, folder=tmp_path / "try")
    assert fault.value.code == 2


def test_a_port_that_the_ranks_of_a_test_still_hold_is_waited_for(tmp_path, monkeypatch):
    """They were killed a moment ago; the rank, which says nothing here, comes after them."""
    settings(tmp_path)  # makes the model
    for name in ("PYTHONPATH", "STUB_LOG"):
        monkeypatch.setenv(name, stub_environment(tmp_path)[name])
    monkeypatch.setattr("pipeline.preparation.measure.measured", lambda *_: {MEASURED: json.dumps({MICRO: 4})})
    words = ["--model-name-or-path", str(tmp_path / "125m"), "--auto", "measure",
             "--output-dir", str(tmp_path / "out/sft")]  # fmt: skip
    signals: Any = SimpleNamespace(first=None, second=None)
    with socket.socket() as held:
        held.bind(("127.0.0.1", 0))
        held.listen()
        port = str(held.getsockname()[1])
        threading.Timer(0.3, held.close).start()
        request = parse_request("single_gpu", ["--master-port", port, "1", *words])
        assert run_job(SFT, request, signals) == 1, "and no EnvironmentFault for the port"
    assert started(tmp_path)[-1][-len(words) :] == words, "what was measured is no word of the command"


def test_a_stage_without_a_supervisor_says_who_measures(capsys):
    assert sft_main(["--model-name-or-path", "base", "--data-path", "a.jsonl", "--auto", "measure"]) == 2
    assert capsys.readouterr().err == naming("error: --auto measure ... `rlhf")


# Plays a rank: it lacks memory in the phase of $LACKING; else it has taken three steps, and runs until it is ended.
LACKING = """
import json, os, socket, sys, time
from pathlib import Path

folder, phase = Path(sys.argv[sys.argv.index("--run-dir") + 1]), os.environ["LACKING"]
message, code = ("a fault", 1) if phase == "fault" else (f"phase {phase}: out of memory", 3) if phase else ("", None)
outcome = {"rank": 0, "code": code, "message": message, "secondary": False,
           "halved": {phase: [16, 8]} if code == 3 else {}, "pid": os.getpid(), "host": socket.gethostname(),
           "supervisor": os.environ["PYTHON_RUN_SUPERVISOR"], "time": time.time()}
(folder / "outcome").mkdir()
Path(__file__).with_name("words.json").write_text(json.dumps([os.environ["GIVEN"], *sys.argv[1:]]))
lines = "" if phase else "".join(f'{{"step_s": {s}, "micro_batch_size": 4}}\\n' for s in (9.0, 1.0, 3.0))
(folder / "metrics.jsonl").write_text(lines)
(folder / "outcome/rank-0.json").write_text(json.dumps(outcome))
time.sleep(0 if phase else 60)
"""


class LikePPO(SFTConfig):
    """Flags with those that a probe of PPO has."""

    probe_overrides = PPOConfig.probe_overrides


def seconds_of(folder: Path, lacking: str, monkeypatch: pytest.MonkeyPatch, *, micro: int = 4) -> float:
    """The seconds of a step of this micro-batch, by the stand-in for a stage in this folder."""
    write_program(folder / "lacking/main.py", LACKING)
    monkeypatch.setenv("PYTHONPATH", str(folder))
    monkeypatch.setenv("LACKING", lacking)
    signals: Any = SimpleNamespace(first=None, second=None)
    stage: Any = SimpleNamespace(package="lacking")
    request = parse_request("single_gpu", ["1", "--critic-warmup-steps", "5"])
    resolved = settings(folder, micro=micro)
    resolved = replace(resolved, config=LikePPO.model_validate(resolved.config.model_dump()))
    where = {"signals": signals, "folder": folder / "try"}
    return seconds_of_steps(stage, request, resolved, {"GIVEN": "flags"}, **where)


@pytest.mark.parametrize(
    ("lacking", "micro", "seconds"), [("", 4, 2.0), ("", 8, 0.0), ("generate", 4, 0.0), ("train", 4, 0.0)]
)
def test_three_steps_have_a_time_or_no_memory(tmp_path, monkeypatch, lacking, micro, seconds):
    """A rank that cut its micro-batches of 8 to 4 had no memory for them; the first step does not count."""
    assert seconds_of(tmp_path, lacking, monkeypatch, micro=micro) == seconds
    given, *words = json.loads((tmp_path / "lacking/words.json").read_text())
    last = dict(scan(words))
    assert last["critic_warmup_steps"] == ["0"], "each of the three steps updates the actor, too"
    assert given == "flags" and last["resume"] == ["never"] and not (tmp_path / "try").exists()


def test_steps_that_fail_otherwise_say_why_and_keep_their_output(tmp_path, monkeypatch):
    with pytest.raises(RunError) as failed:
        seconds_of(tmp_path, "fault", monkeypatch)
    first, *others = str(failed.value).splitlines()
    assert first == naming("--auto measure ... micro-batches of 4 ... rank 0 on ... a fault")
    assert not any(line.startswith("error: ") for line in others)
    assert str(failed.value).endswith(f"; its output: {tmp_path / 'try/output.txt'}") and (tmp_path / "try").is_dir()


@pytest.mark.slow
def test_settings_are_measured_once_by_real_runs(tmp_path, monkeypatch):
    """The first rank lacks memory for batches of more than four rows. The run that goes on measures nothing."""
    folder = make_folder(tmp_path)
    monkeypatch.setenv("PYTHON", sys.executable)
    monkeypatch.setenv("OUT_OF_MEMORY", "0:4:1")
    monkeypatch.setenv("PYTHONPATH", str(ROOT / "tests/faults/site"))
    words = ["--model-name-or-path", "base", "--data-path", "train.jsonl", "--data-split", "none", "--max-seq-len",
             "96", "--train-batch-size", "8", "--dtype", "fp32", "--data-output-path", "cache",
             "--output-dir", "out/sft", "--auto", "measure", "--max-steps"]  # fmt: skip
    command, run_dir = ["bash", str(ROOT / "launch/single_gpu.sh"), "1", *words], folder / "out/runs/sft"
    micro = 0
    for steps, sizes in ((2, [8, 4, 2]), (3, [])):
        done = subprocess.run(
            [*command, str(steps)], cwd=folder, capture_output=True, text=True, timeout=500, check=False
        )
        assert done.returncode == 0, done.stderr
        said = re.findall(r"auto measure: --per-device-train-batch-size (\d).*: ([\d.]+|out of)", done.stderr)
        assert [int(size) for size, _ in said] == sizes, done.stderr
        times = {int(size): float(seconds) for size, seconds in said if seconds != "out of"}
        chosen = json.loads((run_dir / "config.json").read_text())
        micro = micro or chosen[MICRO]["value"]
        assert (chosen[MICRO]["value"], chosen[STEPS]["value"]) == (micro, 8 // micro)
        assert not times or (times.keys() == {4, 2} and times[micro] == min(times.values()))
        assert chosen[MICRO]["origin"]["kind"] == "PLAN" and not (run_dir / "auto_measure").exists()
        lines = [line for line in read_metrics(run_dir) if "step_s" in line]
        assert [line["micro_batch_size"] for line in lines] == [micro] * steps
    assert "as the run began" in (run_dir / "log.txt").read_text()
