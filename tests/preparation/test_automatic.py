"""Flags that are chosen before a run: by the plan, and by steps with other micro-batches."""

import json
import math
import re
import shlex
import socket
import subprocess
import sys
import threading
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import yaml
from support.launch_stub import ROOT, started, stub_environment, write_program
from support.messages import naming
from support.tiny_run import make_folder, read_metrics

from benchmarks.speed.random_models import config_of
from pipeline.configuration.flags import flag_words, parse, scan
from pipeline.configuration.global_batch import with_ranks
from pipeline.errors import EnvironmentFault, RunError
from pipeline.launching.request import parse_request
from pipeline.launching.target import GIB, Target
from pipeline.planning.page import fits
from pipeline.preparation.automatic import flags_that_fit, largest_micro_batch, search
from pipeline.preparation.plans import choose, stage_planner
from pipeline.preparation.stage_job import run_job
from pipeline.preparation.tries import try_batch
from pipeline.run.earlier_runs import automatic_words, write_choice
from step1_sft.config import SFTConfig
from step1_sft.main import main as sft_main
from step1_sft.stage import STAGE as SFT
from step3_ppo.config import PPOConfig


def settings(folder: Path, *more: object, micro: int = 8, steps: int = 1) -> Any:
    """SFT of OPT-125M's shape."""
    if not (folder / "125m").is_dir():
        config_of("125m").save_pretrained(folder / "125m")
    words = ["--model-name-or-path", folder / "125m", "--per-device-train-batch-size", micro, "--dtype", "bf16",
             "--gradient-accumulation-steps", steps, "--data-output-path", folder / "cache",
             "--output-dir", folder / "out/sft", *more]  # fmt: skip
    return parse(SFTConfig, [str(word) for word in words], section="sft")


@pytest.mark.parametrize("limit", range(13))
@pytest.mark.parametrize("start", [1, 4, 12])
def test_the_search_finds_the_largest_size_in_few_tries(limit, start):
    sizes, tried = [1, 2, 3, 4, 6, 12], []

    def has_memory(size: int) -> bool:
        tried.append(size)
        return size <= limit

    expected = max((size for size in sizes if size <= limit), default=None)
    assert search(has_memory, sizes, start=start) == expected
    assert tried[0] == start and len(tried) == len(set(tried)) <= 2 + 2 * math.log2(len(sizes))


def test_the_largest_micro_batch_keeps_the_rows_of_a_step_and_is_remembered_by_shape(tmp_path, capsys):
    tried = []

    def tries(resolved: object, flags: dict[str, int]) -> bool:
        tried.append(flags)
        return flags["per_device_train_batch_size"] <= 6

    def found(resolved: object, gpus: int = 1, name: str = "H100") -> dict[str, int]:
        return largest_micro_batch(SFT, resolved, Target(name, 80 * GIB, (gpus,)), tries, tmp_path / "known.json")

    six = {"per_device_train_batch_size": 6, "gradient_accumulation_steps": 4}
    assert found(settings(tmp_path, micro=2, steps=12)) == six
    sizes = [flags["per_device_train_batch_size"] for flags in tried]
    assert sizes[:3] == [2, 4, 8] and all(
        f["gradient_accumulation_steps"] == 24 // s for f, s in zip(tried, sizes, strict=True)
    )
    count = len(tried)
    assert found(settings(tmp_path, "--learning-rate", 1, "--seed", 2, micro=24)) == six and len(tried) == count
    assert "--per-device-train-batch-size 6 --gradient-accumulation-steps 4, as found before" in capsys.readouterr().err
    for other in (("--max-seq-len", 64), ("--gradient-checkpointing", "true"), ("--zero-stage", 1)):
        found(settings(tmp_path, *other, micro=24))
    found(settings(tmp_path, micro=24), gpus=2)
    found(settings(tmp_path, micro=24), name="A100")
    assert [flags["per_device_train_batch_size"] for flags in tried].count(24) == 5
    count = len(tried)
    assert found(settings(tmp_path, micro=24)) == six and len(tried) == count, "others were found meanwhile"
    assert found(settings(tmp_path, micro=30)) == six | {"gradient_accumulation_steps": 5}, "of another step's rows"
    assert len(tried) > count
    follows = with_ranks(settings(tmp_path, "--train-batch-size", 48, micro=24), 2)
    assert found(follows, gpus=2) == {"per_device_train_batch_size": 6}, "accumulation follows"


def test_a_single_row_without_memory_is_an_error(tmp_path):
    with pytest.raises(EnvironmentFault, match=naming("a micro-batch of 1 ... memory")):
        largest_micro_batch(SFT, settings(tmp_path), Target("H100", GIB), lambda *_: False, tmp_path / "known.json")
    assert not (tmp_path / "known.json").exists()


@pytest.mark.slow
def test_the_changes_of_the_ladder_are_taken_and_each_is_said(tmp_path, capsys, monkeypatch):
    monkeypatch.setattr("pipeline.planning.changes.find_spec", lambda name: None)  # bitsandbytes, which is optional
    given = settings(tmp_path, "--auto-fit")
    assert flags_that_fit(SFT, given, Target("GPU", 80 * GIB)) == {}
    flags = flags_that_fit(SFT, given, Target("GPU", int(2.6 * GIB)))
    said = [line for line in capsys.readouterr().err.splitlines() if "frees" in line]
    assert flags == {"offload": True, "zero_stage": 2}, (
        "checkpointing and evaluation are auto: the plan has them already"
    )
    assert len(said) == 1 and all(re.search(r"^auto_fit: --.*frees .* GiB .*; cost: ", line) for line in said)
    planner, changed = stage_planner(SFT, settings(tmp_path, *flag_words(flags)), Target("GPU", int(2.6 * GIB)), {})
    assert fits(planner.memory(choose(SFT, planner, changed).of(changed, 1)), planner.target)
    with pytest.raises(EnvironmentFault, match="--auto-fit: does not fit: .*use more GPUs"):
        flags_that_fit(SFT, given, Target("GPU", GIB // 2))


FEWER_ROWS = {"per_device_eval_batch_size": 2, "per_device_train_batch_size": 1, "gradient_accumulation_steps": 8}
LACKING = [(2.6, 3, "the host lacks 1.1", {}), (1.0, 64, "of 1.00 GiB", FEWER_ROWS)]


@pytest.mark.slow
@pytest.mark.parametrize(("gib", "host_gib", "lacks", "also"), LACKING)
def test_another_training_is_named_and_taken_only_where_any_is_asked_for(tmp_path, capsys, gib, host_gib, lacks, also):
    """Of a GPU with so little memory, or a host without room for an optimizer."""
    target, flags = Target("GPU", int(gib * GIB), host_memory=host_gib * GIB), {"lora_dim": 16} | also
    with pytest.raises(EnvironmentFault, match=f"--auto-fit: .*{lacks}") as fault:
        flags_that_fit(SFT, settings(tmp_path, "--auto-fit", "true"), target)
    assert str(fault.value) == naming(f"--auto-fit any ... {' '.join(flag_words(flags))}")
    assert flags_that_fit(SFT, settings(tmp_path, "--auto-fit", "any"), target) == flags
    assert "--lora-dim 16: frees " in capsys.readouterr().err
    enough = Target("GPU", int(2.6 * GIB), host_memory=64 * GIB)
    assert "lora_dim" not in flags_that_fit(SFT, settings(tmp_path, "--auto-fit", "any"), enough), "the first suffices"


def launched(folder: Path, *words: object, memory_mib: int) -> subprocess.CompletedProcess[str]:
    """Stage 1 by its launch script, on a GPU of so much memory and with stand-ins for the launcher and nvidia-smi."""
    environment = stub_environment(folder, gpus=1, STUB_OUTCOMES="0")
    answer = f'[ "$1" = -L ] && echo "GPU 0: NVIDIA (UUID: GPU-0)" || echo "NVIDIA Q7, {memory_mib}"'
    write_program(folder / "bin/nvidia-smi", f"#!/bin/sh\n{answer}\n")
    command = ["bash", str(ROOT / "launch/single_gpu.sh"), "1", *map(str, words)]
    return subprocess.run(
        command, cwd=folder, env=environment, capture_output=True, text=True, timeout=120, check=False
    )


@pytest.mark.slow
def test_a_job_starts_with_the_flags_that_fit_and_goes_on_with_them_when_resumed(tmp_path):
    settings(tmp_path)  # makes the model
    words = ["--model-name-or-path", tmp_path / "125m", "--per-device-train-batch-size", 8, "--dtype", "bf16",
             "--auto-fit", "--output-dir", tmp_path / "out/sft", "--gradient-checkpointing", "false",
             "--per-device-eval-batch-size", 16]  # fmt: skip
    done = launched(tmp_path, *words, memory_mib=2450)
    assert done.returncode == 0, done.stderr
    preset = tmp_path / "out/runs/sft/automatic.yaml"
    chosen = yaml.safe_load(preset.read_text())
    assert started(tmp_path)[-1][-len(flag_words(chosen)) :] == flag_words(chosen) and done.stderr.count("frees") == 2
    read = parse(SFTConfig, ["--preset", str(preset)], section="sft").config
    micro, steps = read.optimizer.per_device_train_batch_size, read.optimizer.gradient_accumulation_steps
    assert micro < 8 == micro * steps and read.deepspeed.offload
    finished = parse(SFTConfig, [*map(str, words)], section="sft")
    assert automatic_words(finished, preset.parent) == flag_words(chosen), "the run is finished here"
    assert automatic_words(parse(SFTConfig, [*map(str, words), "--overwrite"], section="sft"), preset.parent) is None
    again = launched(tmp_path, *words, memory_mib=80000)
    assert f"as chosen before ({preset}): {shlex.join(flag_words(chosen))}\n" in again.stderr
    assert "frees" not in again.stderr and started(tmp_path)[-1] == started(tmp_path)[0]
    lacking = launched(tmp_path, *words, "--overwrite", memory_mib=700)
    assert lacking.returncode == 3 and lacking.stderr.splitlines()[-1].startswith("error: --auto-fit: does not fit: ")
    assert len(started(tmp_path)) == 2
    assert launched(tmp_path, *words, "--overwrite", memory_mib=80000).returncode == 0 and not preset.exists()


def write_earlier(folder: Path) -> None:
    """A finished run of 8 rows a step, for which another batch and ZeRO stage were chosen."""
    chosen = {"per_device_train_batch_size": 2, "gradient_accumulation_steps": 4, "zero_stage": 1}
    write_choice(folder / "automatic.yaml", settings(folder), chosen)
    (folder / "done.json").write_text("{}")
    (folder / "env.json").write_text(json.dumps({"stage": "sft", "versions": {}}))


def test_what_was_chosen_hides_no_other_batch(tmp_path):
    """A finished run of 8 rows a step is not the one that 16 are asked of: the caller is to see the difference."""
    write_earlier(tmp_path)
    chosen = ["--per-device-train-batch-size", "2", "--gradient-accumulation-steps", "4", "--zero-stage", "1"]
    for steps, words in ((1, chosen), (2, None)):
        assert automatic_words(settings(tmp_path, "--auto-batch", steps=steps), tmp_path) == words


def write_earlier_run(folder: Path) -> None:
    """The files of `write_earlier` as those of the run in `out/runs/sft`."""
    run_dir = folder / "out/runs/sft"
    run_dir.mkdir(parents=True)
    write_earlier(folder)
    for name in ("automatic.yaml", "done.json"):
        (folder / name).rename(run_dir / name)
    (run_dir / "env.json").write_text(json.dumps({"stage": "sft", "versions": {}}))


@pytest.mark.slow
def test_a_flag_that_is_given_on_resume_wins_over_the_chosen_one(tmp_path):
    write_earlier_run(tmp_path)
    words = ["--model-name-or-path", tmp_path / "125m", "--dtype", "bf16", "--auto-fit",
             "--output-dir", tmp_path / "out/sft"]  # fmt: skip

    def resumed(*more: object) -> str:
        done = launched(tmp_path, *words, *more, memory_mib=80000)
        return done.stderr + " ".join(started(tmp_path)[-1] if done.returncode == 0 else ())

    assert "sft/automatic.yaml): --per-device-train-batch-size 2 --gradient-accumulation-steps 4\n" in (
        text := resumed("--per-device-train-batch-size", 8, "--zero-stage", 0)
    ), text
    assert "--zero-stage 1" not in text
    text = resumed("--per-device-train-batch-size", 4, "--gradient-accumulation-steps", 2)
    assert text.endswith("--per-device-train-batch-size 4 --gradient-accumulation-steps 2 --zero-stage 1"), text


def test_a_port_that_the_ranks_of_a_search_still_hold_is_waited_for(tmp_path, monkeypatch):
    """They were killed a moment ago; the rank, which says nothing here, comes after them."""
    write_earlier_run(tmp_path)
    for name in ("PYTHONPATH", "STUB_LOG"):
        monkeypatch.setenv(name, stub_environment(tmp_path)[name])
    words = ["--model-name-or-path", str(tmp_path / "125m"), "--per-device-train-batch-size", "8", "--auto-batch",
             "--output-dir", str(tmp_path / "out/sft")]  # fmt: skip
    signals: Any = SimpleNamespace(first=None, second=None)
    with socket.socket() as held:
        held.bind(("127.0.0.1", 0))
        held.listen()
        port = str(held.getsockname()[1])
        threading.Timer(0.3, held.close).start()
        request = parse_request("single_gpu", ["--master-port", port, "1", *words])
        assert run_job(SFT, request, signals) == 1, "and no EnvironmentFault for the port"


def test_a_stage_without_a_supervisor_says_who_chooses(capsys):
    assert sft_main(["--model-name-or-path", "base", "--data-path", "a.jsonl", "--auto-batch"]) == 2
    assert capsys.readouterr().err == naming("error: --auto-batch ... `rlhf")


# Plays a rank: it lacks memory in the phases of $LACKING, one after the other, until the job is
# started again with fewer rows there; then it has taken three steps, and runs until it is ended.
LACKING = """
import json, os, socket, sys, time
from pathlib import Path

folder = Path(sys.argv[sys.argv.index("--run-dir") + 1])
lacking = {phase: [16, 8] for phase in os.environ["LACKING"].split()}
halved = {part.split(":")[0] for part in os.environ["PYTHON_RUN_HALVED"].split(",") if part}
missing = [phase for phase in lacking if phase not in halved][:1]
now = {phase: lacking[phase] for phase in [*halved, *missing]} if missing else {}
message, code = ("a fault", 1) if missing == ["fault"] else ("phase generate: out of memory", 3 if missing else None)
now = {} if missing == ["fault"] else now
outcome = {"rank": 0, "code": code, "message": message, "secondary": False,
           "halved": now, "pid": os.getpid(), "host": socket.gethostname(),
           "supervisor": os.environ["PYTHON_RUN_SUPERVISOR"], "time": time.time()}
(folder / "outcome").mkdir()
Path(__file__).with_name("words.json").write_text(json.dumps(sys.argv))
(folder / "metrics.jsonl").write_text("" if missing else 3 * '{"step_s": 1.0, "micro_batch_size": 4}\\n')
(folder / "outcome/rank-0.json").write_text(json.dumps(outcome))
time.sleep(0 if missing else 60)
"""


@pytest.mark.parametrize(
    ("lacking", "fits"), [("", True), ("generate", True), ("cache score", True), ("generate train", False)]
)
def test_a_micro_batch_is_not_to_blame_where_another_phase_of_several_ranks_lacks_memory(
    tmp_path, monkeypatch, capsys, lacking, fits
):
    """The job ends, as several ranks do, and is started again with what it asks for; the run itself would, too."""
    write_program(tmp_path / "lacking/main.py", LACKING)
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    monkeypatch.setenv("LACKING", lacking)
    assert tried_four(tmp_path, "--critic-warmup-steps", "5") == fits
    last = dict(scan(json.loads((tmp_path / "lacking/words.json").read_text())[1:]))
    assert last["critic_warmup_steps"] == ["0"], "each of the three steps updates the actor, too"
    said = "fits, 1 s a step" if fits else "out of memory"
    assert capsys.readouterr().err == f"auto_batch: micro-batch 4: {said}\n" and not (tmp_path / "try").exists()


class LikePPO(SFTConfig):
    """Flags with those that a probe of PPO has."""

    probe_overrides = PPOConfig.probe_overrides


def tried_four(folder: Path, *words: str) -> bool:
    """Whether a micro-batch of four had memory, by the stand-in for a stage in this folder."""
    flags = {"per_device_train_batch_size": 4}
    signals: Any = SimpleNamespace(first=None, second=None)
    stage: Any = SimpleNamespace(package="lacking")
    request, resolved = parse_request("single_gpu", ["1"]), settings(folder)
    resolved = replace(resolved, config=LikePPO.model_validate(resolved.config.model_dump()))
    return try_batch(stage, request, list(words), resolved, flags, signals=signals, folder=folder / "try")


def test_a_try_that_fails_otherwise_says_why_and_keeps_its_output(tmp_path, monkeypatch):
    write_program(tmp_path / "lacking/main.py", LACKING)
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    monkeypatch.setenv("LACKING", "fault")
    with pytest.raises(RunError) as failed:
        tried_four(tmp_path)
    first, *others = str(failed.value).splitlines()
    assert first == naming("--auto-batch ... a micro-batch of 4 ... rank 0 on ... a fault")
    assert not any(line.startswith("error: ") for line in others)
    assert str(failed.value).endswith(f"; its output: {tmp_path / 'try/output.txt'}") and (tmp_path / "try").is_dir()


@pytest.mark.slow
def test_micro_batches_are_tried_by_real_runs(tmp_path, monkeypatch):
    """The first rank lacks memory for batches of more than two rows."""
    folder = make_folder(tmp_path)
    monkeypatch.setenv("PYTHON", sys.executable)
    monkeypatch.setenv("OUT_OF_MEMORY", "0:2:1")
    monkeypatch.setenv("PYTHONPATH", str(ROOT / "tests/faults/site"))
    words = ["--model-name-or-path", "base", "--data-path", "train.jsonl", "--data-split", "none", "--max-seq-len",
             "96", "--per-device-train-batch-size", "1", "--gradient-accumulation-steps", "8", "--max-steps", "2",
             "--dtype", "fp32", "--data-output-path", "cache", "--output-dir", "out/sft", "--auto-batch"]  # fmt: skip
    command = ["bash", str(ROOT / "launch/single_gpu.sh"), "1", *words]
    done = subprocess.run(command, cwd=folder, capture_output=True, text=True, timeout=500, check=False)
    assert done.returncode == 0, done.stderr
    said = re.findall(r"auto_batch: micro-batch (\d): (fits|out of memory)", done.stderr)
    assert said == [("1", "fits"), ("2", "fits"), ("4", "out of memory")]
    lines = [line for line in read_metrics(folder / "out/runs/sft") if "step_s" in line]
    assert [line["micro_batch_size"] for line in lines] == [2, 2] and not (folder / "out/runs/sft/auto_batch").exists()
    settings = json.loads((folder / "out/runs/sft/config.json").read_text())
    assert settings["gradient_accumulation_steps"]["value"] == 4
