"""GPUs on which no other process holds memory, as nvidia-smi (a stand-in) tells, and runs that take them by default."""

import json
import os
from pathlib import Path

import pytest
from support.launch_stub import ROOT, TINY, notes, stub_environment, train, write_program
from support.messages import naming

from pipeline.errors import EnvironmentFault
from pipeline.files import digest
from pipeline.launching.hosts import chosen_devices
from pipeline.launching.machine import choose_gpus
from pipeline.launching.request import parse_request
from rlhf.starts import on_free_gpus
from rlhf.train_plan import make_plan, request_of

NO_CARD = pytest.mark.skipif(Path("/dev/nvidiactl").exists(), reason="this machine has a GPU")
ALL = {"deployment_type": "single_node", "num_gpus": 0}
ONE = {"deployment_type": "single_gpu", "num_gpus": 0}
USED, UNSEEN = "9000 MiB in use by process 77", "9000 MiB in use"


@pytest.fixture
def machine(tmp_path, monkeypatch):
    """A function that makes a machine of so many GPUs, some of them held by a process (or one that is not listed)."""
    monkeypatch.delenv("DS_ACCELERATOR", raising=False)

    def make(gpus: int, held: dict[int, str], visible: str | None = None) -> None:
        monkeypatch.setenv("PATH", stub_environment(tmp_path, gpus=gpus, held=held)["PATH"])
        monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
        if visible is not None:
            monkeypatch.setenv("CUDA_VISIBLE_DEVICES", visible)

    return make


@pytest.mark.parametrize(
    ("held", "visible", "count", "had", "flags", "line"),
    [
        ({}, None, 0, 0, ALL, "0, 1, 2, 3"),
        ({1: "77", 3: ""}, None, 0, 0, ALL | {"include": "localhost:0,2"}, f"0, 2; not used: 1 ({USED}), 3 ({UNSEEN})"),
        ({3: "77"}, None, 0, 0, ALL | {"include": "localhost:0,1,2"}, f"0, 1, 2; not used: 3 ({USED})"),
        ({0: "77", 1: "77", 2: "77"}, None, 0, 0, ONE | {"include": "localhost:3"}, "3; not used: "),
        ({}, "3,1", 0, 0, ALL, "3, 1"),
        ({0: "77"}, "3,1", 0, 0, ALL, "3, 1"),
        ({3: "77"}, "3,1", 0, 0, ONE | {"include": "localhost:1"}, f"1; not used: 3 ({USED})"),
        ({2: "77"}, "GPU-2,GPU-1", 0, 0, ONE | {"include": "localhost:1"}, f"GPU-1; not used: GPU-2 ({USED})"),
        ({}, None, 2, 0, ALL | {"num_gpus": 2}, "0, 1; ... 2 (--num-gpus 2), 3 (--num-gpus 2)"),
        ({0: "77"}, None, 2, 4, ALL | {"include": "localhost:1,2"}, f"1, 2; not used: 0 ({USED}), 3 (--num-gpus 2)"),
        ({}, None, 0, 2, ALL | {"num_gpus": 2}, "0, 1; ... 2 (the run had 2 ranks), 3 (the run had 2 ranks)"),
        ({}, None, 0, 1, ONE | {"num_gpus": 1}, "0; ... 1 (the run had 1 rank)"),
    ],
)
def test_free_gpus_are_taken_and_a_line_says_which(machine, held, visible, count, had, flags, line):
    machine(4, held, visible)
    chosen, said = choose_gpus(count, had, starts=True)
    assert chosen == flags and said == naming(f"GPUs of this run: {line}")
    words = [word for name in ("num_gpus", "include") if chosen.get(name) for word in (f"--{name}", str(chosen[name]))]
    devices = chosen_devices(parse_request(str(chosen["deployment_type"]), [*words, "1"]))
    assert [name.removeprefix("GPU-") for name in said.split(": ")[1].split(";")[0].split(", ")] == devices


@pytest.mark.parametrize(
    ("held", "count", "had", "error"),
    [
        (
            {0: "77", 1: ""},
            0,
            0,
            f"0 of 2 GPUs ... GPU 0: {USED}, GPU 1: {UNSEEN} ... --deployment-type",
        ),
        ({0: "77"}, 2, 0, f"--num-gpus 2 ... 1 of 2 GPUs ... GPU 0: {USED} ... --num-gpus 1"),
        ({}, 0, 4, "4 ranks ... 2 of 2 GPUs ... --num-gpus 2 ... --deployment-type"),
        ({}, 3, 0, "--num-gpus ... 3 ... 2 GPUs ... visible here ... at most 2"),
    ],
)
def test_too_few_free_gpus_are_one_line(machine, held, count, had, error):
    machine(2, held)
    with pytest.raises(EnvironmentFault) as refused:
        choose_gpus(count, had, starts=True)
    assert str(refused.value) == naming(error)
    if "visible here" not in error:
        flags, said = choose_gpus(count, had, starts=False)
        assert flags["deployment_type"] == "single_node" and said == str(refused.value), "a dry run plans all the same"


def test_memory_of_a_screen_is_no_other_process(machine, tmp_path):
    machine(1, {})
    answer = "case $1 in --query-gpu*) echo 0, GPU-0, 900, {} ;; --query-comp*) ;; *) echo 'GPU 0: A' ;; esac\n"
    for draws, free in (("Enabled", True), ("Disabled", False)):
        write_program(tmp_path / "bin/nvidia-smi", f"#!/bin/sh\n{answer.format(draws)}")
        assert choose_gpus(0, 0, starts=False)[1].startswith("GPUs of this run: 0") == free


def test_where_nvidia_smi_does_not_tell_all_are_taken_and_a_line_says_so(machine, tmp_path):
    machine(2, {})
    write_program(tmp_path / "bin/nvidia-smi", "#!/bin/sh\n[ $1 = -L ] && printf 'GPU 0: A\\nGPU 1: A\\n'\n")
    said = naming("GPUs of this run: 0, 1; nvidia-smi ... other processes")
    assert choose_gpus(0, 0, starts=True) == (ALL, said)
    machine(2, {0: "77"}, "MIG-1,MIG-2")
    assert choose_gpus(0, 0, starts=True)[1].endswith("processes use them"), "parts of a GPU"


@NO_CARD
def test_without_a_gpu_one_process_runs_or_as_many_as_the_run_had(machine):
    machine(0, {})
    assert choose_gpus(0, 0, starts=True) == (ONE, "")
    assert choose_gpus(0, 2, starts=True) == choose_gpus(2, 1, starts=True) == (ALL | {"num_gpus": 2}, "")


@pytest.mark.slow
def test_the_ranks_of_a_command_run_on_the_free_gpus(tmp_path):
    done = train(tmp_path, *TINY, "--step", "1", gpus=4, held={1: "77"}, STUB_OUTCOMES="0,0,0")
    assert done.returncode == 0, done.stderr
    assert naming(f"GPUs of this run: 0, 2, 3; ... 1 ({USED})") in done.stdout.splitlines()
    assert f"$ bash {ROOT}/launch/single_node.sh --include localhost:0,2,3 1 " in done.stdout.replace("\\\n    ", "")
    devices = [note["environment"]["CUDA_VISIBLE_DEVICES"] for note in notes(tmp_path)]
    assert devices == ["0,2,3"] * 3
    busy = train(tmp_path / "busy", *TINY, "--step", "1", gpus=1, held={0: "77"})
    assert busy.returncode == 3 and naming("error: 0 of 1 GPUs ... GPU 0: ") in busy.stderr.splitlines()
    one = ("--step", "1", "--deployment-type", "single_gpu")
    told = train(tmp_path / "told", *TINY, *one, gpus=1, held={0: "77"}, STUB_OUTCOMES="0")
    assert told.returncode == 0 and "GPUs of this run" not in told.stdout


def checkpoint(run: Path, ranks: int) -> None:
    """What is read of a run that left a checkpoint: its settings, and the ranks of its last start."""
    folder = run / "checkpoints/step-3"
    folder.mkdir(parents=True)
    (folder / "state.json").write_text(json.dumps({"settings": {"seed": 1}}))
    files = {"state.json": {"sha256": digest(folder / "state.json")}}
    (folder / "manifest.json").write_text(json.dumps({"files": files}))
    (run / "env.json").write_text(json.dumps({"stage": "sft", "num_ranks": ranks}))


def test_a_resumed_run_takes_as_many_gpus_as_it_had(machine, tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)

    def found(*words: str, starts: bool = True) -> int:
        plan = on_free_gpus(make_plan([*TINY, "--step", "1", *words], prog="train.py"), starts=starts)
        return len(chosen_devices(request_of(plan.config)))

    machine(4, {0: "77"})
    assert found() == 3
    checkpoint(Path("output/runs/sft"), ranks=2)
    assert found() == 2 and "3 (the run had 2 ranks)" in capsys.readouterr().out
    assert found("--overwrite") == 3 and found("--num-gpus", "1") == 1
    assert found("--deployment-type", "single_node") == 4 and found("--exclude", "localhost:1") == 3
    machine(4, {0: "77", 1: "77", 2: "77"})
    with pytest.raises(EnvironmentFault, match=naming("2 ranks ... 1 of 4 GPUs")):
        found()
    assert found(starts=False) == 2
    done = {"steps": 5, "settings": {"seed": 1}, "sizes": {}}
    Path("output/runs/sft/done.json").write_text(json.dumps(done))
    assert found() == 2, "a finished stage needs no free GPU"
    assert os.environ.get("CUDA_VISIBLE_DEVICES") is None
