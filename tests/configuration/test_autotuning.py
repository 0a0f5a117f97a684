"""DeepSpeed's autotuning reaches stage 1: its arguments as flags, and a real search on the CPU."""

import json
import os
import subprocess
import sys
from argparse import Namespace
from pathlib import Path

import pytest
from deepspeed.autotuning import scheduler
from support.launch_stub import ROOT, started, stub_environment, write_program
from support.marks import slow_but
from support.tiny_run import read_metrics

from pipeline.configuration.ds_config import Placement, training_json
from pipeline.configuration.flags import flag_words, load_yaml, parse, stage_arguments
from pipeline.errors import InputError, dashed
from pipeline.preparation.autotuning import check_left_to_search
from step1_sft.config import SFTConfig

MAPPINGS = {
    "train_micro_batch_size_per_gpu": "--per-device-train-batch-size",
    "gradient_accumulation_steps": "--gradient-accumulation-steps",
}
TUNED = {
    "train_micro_batch_size_per_gpu": 3,
    "gradient_accumulation_steps": 2,
    "train_batch_size": 12,
    "zero_optimization": {"stage": 2, "reduce_bucket_size": 1000},
    "autotuning": {"enabled": True, "arg_mappings": MAPPINGS},
}


@pytest.fixture
def words_of(tmp_path, monkeypatch):
    """The words with which the autotuner starts stage 1 for an experiment."""
    commands: list[list[str]] = []

    def popen(command, **_):
        commands.append(command)
        return Namespace(wait=lambda: 0, returncode=0)

    monkeypatch.setattr(scheduler.subprocess, "Popen", popen)

    def start(config: dict, *words: str) -> list[str]:
        args = Namespace(master_port=29500, user_script="step1_sft/main.py", user_args=["--deepspeed_config", "d.json"])
        args.user_args += words
        manager = scheduler.ResourceManager(args, ["localhost"], 2, str(tmp_path), "exps", MAPPINGS)
        (tmp_path / "z2.json").write_text(json.dumps({"name": "z2", "ds_config": config, "hostfile": "none",
                                                      "num_gpus": 2, "num_nodes": 1}))  # fmt: skip
        manager.schedule_experiments([str(tmp_path / "z2.json")])
        manager.run_job(manager.experiment_queue[0], [scheduler.Reservation(manager.nodes[0], [0, 1])])
        manager.running_experiments[0][0].join()
        command = commands[0]
        return command[command.index("step1_sft/main.py") + 1 :]

    return start


def test_what_the_autotuner_tries_is_what_stage_1_runs(words_of, tmp_path):
    words = words_of(TUNED, "--per-device-train-batch-size", "16", "--seed", "7")
    resolved = parse(SFTConfig, stage_arguments(words), section="sft")
    optimizer = resolved.config.optimizer
    assert (optimizer.per_device_train_batch_size, optimizer.gradient_accumulation_steps) == (3, 2)
    place = Placement(device="cuda", dtype="bf16", ranks=2, run_dir=tmp_path)
    made = training_json(resolved, resolved.config.model, place)
    assert made["zero_optimization"]["stage"] == 2 and made["zero_optimization"]["reduce_bucket_size"] == 1000
    assert made["autotuning"]["metric_path"] == str(tmp_path / "z2" / "metrics.json")
    assert resolved.config.run.seed == 7


def test_the_run_after_tuning_measures_nothing_and_trains_to_the_end(words_of, tmp_path):
    words = words_of(TUNED)
    (tmp_path / "z2" / "metrics.json").write_text("{}")
    optimal = tmp_path / "ds_config_optimal.json"
    optimal.write_text("{}")
    assert stage_arguments(words)[:2] == ["--deepspeed_config", str(optimal)]  # with underscores
    assert stage_arguments(["eyJ", "eyJhIjogMX0=", "ds.json"]) == ["eyJ", "eyJhIjogMX0=", "ds.json"]


def launched(folder: Path, *words: str, **more: str) -> subprocess.CompletedProcess[str]:
    """A launch script with a stand-in for DeepSpeed's launcher, which finds the content of STUB_TUNED."""
    environment = stub_environment(folder, gpus=1, **more)
    write_program(folder / "bin/pdsh", "#!/bin/sh\n")
    (folder / "ds.json").write_text(json.dumps({"zero_optimization": {"stage": ["all"]}, "autotuning": {}}))
    words = (*words, "--deepspeed-config=ds.json", "--model-name-or-path", "base", "--output-dir", "out/sft")
    command = ["bash", str(ROOT / "launch/single_gpu.sh"), "--autotuning", *words]
    return subprocess.run(command, cwd=folder, env=environment, capture_output=True, text=True, timeout=120)


@pytest.mark.parametrize("mode", slow_but(["run"], ["run", "tune"]))
def test_what_the_search_has_found_is_a_preset_and_what_is_run(tmp_path, mode):
    pytest.importorskip("tabulate")
    found = {name: value for name, value in TUNED.items() if name != "autotuning"} | {"train_batch_size": 6}
    words = (mode, "1", "--per-device-train-batch-size", "16")
    done = launched(tmp_path, *words, STUB_TUNED=json.dumps(found), STUB_OUTCOMES="0")
    assert done.returncode == 0, done.stderr
    search, *runs = started(tmp_path)
    assert search[search.index("--deepspeed_config") + 1] == "ds.json", "DeepSpeed looks for two words"
    script = search.index(str(ROOT / "step1_sft/main.py"))
    assert search[script - 3 : script] == ["--no_local_rank", "--autotuning", "tune"]
    assert search[-4:] == ["--run-dir", "out/runs/sft/autotuning/run", "--output-dir", "out/runs/sft/autotuning/model"]
    preset = tmp_path / "out/runs/sft/automatic.yaml"
    assert "written to out/runs/sft/automatic.yaml, a file for --preset or --config\n" in done.stderr
    config = parse(SFTConfig, ["--preset", str(preset)], section="sft").config
    optimizer = config.optimizer
    assert (optimizer.per_device_train_batch_size, optimizer.gradient_accumulation_steps) == (3, 2)
    assert (config.model.partitioned, config.deepspeed.reduce_bucket_size) == ("states", 1000)
    assert '"per_device_train_batch_size": 16' in preset.read_text(), "which was given"
    chosen = flag_words(load_yaml(str(preset)))
    assert [(run[-len(chosen) :], "--autotuning" in run) for run in runs] == [(chosen, False)] * (mode == "run")
    if mode == "run":  # the same command goes on with what was found
        again = launched(tmp_path, *words, STUB_OUTCOMES="0")
        assert f"as chosen before (out/runs/sft/automatic.yaml): {' '.join(chosen)}\n" in again.stderr
        assert started(tmp_path) == [search, *runs, *runs]


@pytest.mark.parametrize(
    "words, given, key",
    [
        (("--zero-stage", "2"), "zero_stage 2", "zero_optimization.stage"),
        (("--dtype", "bf16"), "dtype bf16", "fp16.enabled"),
        (("--per-device-train-batch-size", "16"), "", ""),
    ],
)
def test_flags_that_a_search_contradicts_are_refused_before_it(tmp_path, words, given, key):
    """A flag whose key is mapped is the search's own, as is one that says what the file says."""
    file = tmp_path / "ds.json"
    content = {"fp16": {"enabled": True}, "zero_optimization": {"stage": [1, 2]}, "train_micro_batch_size_per_gpu": 1}
    file.write_text(json.dumps({**content, "autotuning": {"enabled": True, "arg_mappings": MAPPINGS}}))
    resolved = parse(SFTConfig, ["--model-name-or-path", "base", "--output-dir", "out", *words], section="sft")
    if not given:
        return check_left_to_search(resolved, str(file))
    with pytest.raises(InputError) as refused:
        check_left_to_search(resolved, str(file))
    line = f"{dashed(given)} (command line): --autotuning tries others; leave it out, or write it into {file} as {key}"
    assert str(refused.value) == line


@pytest.mark.slow
def test_a_search_that_cannot_be_is_one_line(tmp_path):
    pytest.importorskip("tabulate")
    alone = "--autotuning: for stage 1 on one machine, and without --auto-fit and --auto-batch"
    nothing = "--autotuning: DeepSpeed has found nothing that runs; see autotuning_results/*/stderr.log"
    stage = "--zero-stage 2 (command line): --autotuning tries others; leave it out, or write it into ds.json as "
    stage += "zero_optimization.stage"
    cases = (
        (("1",), 3, nothing),
        (("1", "--zero-stage", "2"), 2, stage),
        (("2",), 2, alone),
        (("1", "--auto-fit"), 2, alone),
    )
    for number, (words, code, line) in enumerate(cases):
        done = launched(tmp_path / str(number), "tune", *words)
        assert (done.returncode, done.stderr) == (code, f"error: {line}\n")
        assert not (tmp_path / str(number) / "out/runs/sft/automatic.yaml").exists()


@pytest.mark.faults
def test_a_real_search_on_the_cpu(tmp_path, tiny_folders):
    write_program(tmp_path / "bin" / "pdsh", "#!/bin/sh\n")  # with which it looks for processes that are left over
    rows = [{"prompt": f"Question {number}?", "response": f"Answer {number}."} for number in range(40)]
    (tmp_path / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    tuning = {"enabled": True, "max_train_micro_batch_size_per_gpu": 1, "arg_mappings": MAPPINGS}
    asked = dict.fromkeys(MAPPINGS, "auto") | {"zero_optimization": {"stage": 0}, "autotuning": tuning}
    (tmp_path / "ds.json").write_text(json.dumps(asked))
    words = "--autotuning run 1 --deepspeed-config ds.json --data-path rows.jsonl"
    words += " --data-split none --eval-fraction 0 --output-dir out --run-dir made --max-steps 12 --max-seq-len 64"
    words += f" --model {tiny_folders['llama']}"
    path = os.pathsep.join([str(tmp_path / "bin"), os.environ["PATH"]])
    environment = {**os.environ, "PATH": path, "PYTHON": sys.executable, "DS_ACCELERATOR": "cpu", "HF_HUB_OFFLINE": "1"}
    command = ["bash", str(ROOT / "launch/single_gpu.sh"), *words.split()]
    done = subprocess.run(command, cwd=tmp_path, env=environment, capture_output=True, text=True, timeout=300)
    results = tmp_path / "autotuning_results"
    assert json.loads((results / "z0_gas1_tmbspg1" / "metrics.json").read_text())["throughput"] > 0, done.stderr
    optimal = json.loads((tmp_path / "made/automatic.json").read_text())
    assert optimal["train_micro_batch_size_per_gpu"] == 1 and "autotuning" not in optimal
    assert (done.returncode, len(read_metrics(tmp_path / "made")) >= 12, (tmp_path / "made/done.json").exists()) == (
        0, True, True,
    )  # fmt: skip
