"""DeepSpeed's autotuning of stage 1, started by hand: its arguments as flags, and a real search on the CPU."""

import json
import os
import subprocess
import sys
from argparse import Namespace
from pathlib import Path

import pytest
from deepspeed.autotuning import scheduler
from support.launch_stub import ROOT, write_program
from support.tiny_run import read_metrics

from pipeline.configuration.ds_config import Placement, training_json
from pipeline.configuration.flags import parse, stage_arguments
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


@pytest.mark.faults
def test_a_real_search_by_hand_on_the_cpu(tmp_path, tiny_folders):
    """The command that `--autotuning` of a launch script names, with the project in PYTHONPATH."""
    pytest.importorskip("tabulate")
    write_program(tmp_path / "bin" / "pdsh", "#!/bin/sh\n")  # with which it looks for processes that are left over
    rows = [{"prompt": f"Question {number}?", "response": f"Answer {number}."} for number in range(40)]
    (tmp_path / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    tuning = {"enabled": True, "max_train_micro_batch_size_per_gpu": 1, "arg_mappings": MAPPINGS}
    asked = dict.fromkeys(MAPPINGS, "auto") | {"zero_optimization": {"stage": 0}, "autotuning": tuning}
    (tmp_path / "ds.json").write_text(json.dumps(asked))
    words = f"--autotuning run --num_gpus 1 {ROOT}/step1_sft/main.py --deepspeed_config ds.json --data-path rows.jsonl"
    words += " --data-split none --eval-fraction 0 --output-dir out --run-dir made --max-steps 12 --max-seq-len 64"
    words += f" --model {tiny_folders['llama']}"
    # Where MLflow is installed, DeepSpeed's search wants the id of one of its runs.
    write_program(tmp_path / "hidden" / "mlflow.py", "raise ImportError\n")
    modules = os.pathsep.join([str(tmp_path / "hidden"), str(ROOT)])
    path = os.pathsep.join([str(tmp_path / "bin"), str(Path(sys.executable).parent), os.environ["PATH"]])
    environment = {**os.environ, "PATH": path, "DS_ACCELERATOR": "cpu", "HF_HUB_OFFLINE": "1", "PYTHONPATH": modules}
    command = [sys.executable, "-m", "deepspeed.launcher.runner", *words.split()]
    done = subprocess.run(command, cwd=tmp_path, env=environment, capture_output=True, text=True, timeout=300)
    results = tmp_path / "autotuning_results"
    assert json.loads((results / "z0_gas1_tmbspg1" / "metrics.json").read_text())["throughput"] > 0, done.stderr
    optimal = json.loads((results / "ds_config_optimal.json").read_text())
    assert optimal["train_micro_batch_size_per_gpu"] == 1
    assert (done.returncode, len(read_metrics(tmp_path / "made")) >= 12, (tmp_path / "made/done.json").exists()) == (
        0, True, True,
    )  # fmt: skip
