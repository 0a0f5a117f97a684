"""Want of memory is one line, in every phase and command: how much was asked for and free, and what to lower."""

from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from input_calls import call, stage_words
from support.messages import naming

from pipeline.heartbeat import beat
from pipeline.inference import answers
from pipeline.out_of_memory import memory_line
from step1_sft import training as sft_training
from step3_ppo import training as ppo_training

FOLDER_SIZES = {"num_train": 12, "num_test": 2}

# As torch 2.11 says it, without the advice that follows.
CUDA = (
    "CUDA out of memory. Tried to allocate 2.00 GiB. GPU 0 has a total capacity of 79.11 GiB of which 44.69 MiB is "
    "free. Including non-PyTorch memory, this process has 79.05 GiB memory in use. Of the allocated memory 70.00 GiB "
    "is allocated by PyTorch, and 5.00 GiB is reserved by PyTorch but unallocated."
)


def lacks_device_memory(*_: object, **__: object) -> None:
    raise torch.OutOfMemoryError(CUDA)


def lacks_host_memory(*_: object, **__: object) -> None:
    torch.empty(2**48)  # 1 PiB


def raise_memory_error(*_: object, **__: object) -> None:
    raise MemoryError


def line_of(command: str, words: list[object]) -> str:
    ending = call(command, words)
    assert ending.code == 3 and len(ending.errors) == 1 and "Traceback" not in ending.stderr, ending.stderr
    return ending.errors[0]


@pytest.mark.parametrize(
    ("place", "fault", "line"),
    [
        (
            "accumulate_gradients", lacks_device_memory,
            "phase train: out of memory ... 2.00 GiB ... 44.69 MiB free of 79.11 GiB ... "
            "--max-seq-len or --per-device-train-batch-size ... --gradient-checkpointing ... --zero-stage",
        ),
        (
            "evaluate", lacks_host_memory,
            "phase evaluate: out of memory on the host ... 1048576.00 GiB ... GiB were free ... "
            "--per-device-eval-batch-size 1 ... --max-seq-len ... --zero-stage",
        ),
        (
            "language_model_engine", raise_memory_error,
            "phase start: out of memory on the host ... GiB were free ... --zero-stage",
        ),
    ],
    ids=["device", "host", "loading"],
)  # fmt: skip
def test_a_stage_that_lacks_memory(folder: Path, tmp_path: Path, monkeypatch, place, fault, line) -> None:
    def lacking(*given: object, **further: object) -> None:
        if place == "accumulate_gradients":
            beat("train", 0)
        fault()

    monkeypatch.setattr(sft_training, place, lacking)
    assert line_of("sft", stage_words("sft", folder, tmp_path)) == naming(f"error: {line}")
    log = next((tmp_path / "model").parent.rglob("rank-0.txt")).read_text()
    assert "Traceback" in log, "where it was is in the log"


def test_a_rollout_that_lacks_memory(folder: Path, tmp_path: Path, monkeypatch) -> None:
    def lacking(ppo: object, state: SimpleNamespace, control: object) -> None:
        beat("generate", 0)
        lacks_device_memory()

    monkeypatch.setattr(ppo_training, "evaluate", lambda *_: None)
    monkeypatch.setattr(ppo_training, "sample", lacking)
    line = line_of("ppo", stage_words("ppo", folder, tmp_path))
    assert line == naming("error: phase generate: out of memory ... 2.00 GiB ... 44.69 MiB free of 79.11 GiB")
    assert "lower --per-device-generation-batch-size or --max-answer-seq-len or --per-device-eval-batch-size" in line
    assert line == naming("--actor-zero-stage or --critic-zero-stage")


def test_a_model_that_does_not_fit_is_no_fault_of_its_folder(folder: Path, tmp_path: Path, monkeypatch) -> None:
    from transformers import AutoModelForCausalLM

    monkeypatch.setattr(AutoModelForCausalLM, "from_pretrained", lacks_host_memory)
    line = line_of("sft", stage_words("sft", folder, tmp_path))
    assert line == naming("phase start: out of memory on the host ... 1048576.00 GiB")


@pytest.mark.parametrize("command", ["chat", "prompt_eval"])
def test_a_command_that_lacks_memory(folder: Path, tmp_path: Path, monkeypatch, command) -> None:
    monkeypatch.setattr(answers, "answers_as_they_end", lacks_host_memory)
    line = line_of(command, stage_words(command, folder, tmp_path))
    assert line == naming("error: out of memory on the host ... 1048576.00 GiB ... GiB were free ... --batch-size")


@pytest.mark.parametrize(
    ("own", "others"),
    [
        ("900.00 MiB", "138.9 GiB ... other processes"),
        ("138.90 GiB", ""),
        ("0 bytes", "139.8 GiB ... other processes"),
    ],
)
def test_memory_that_other_processes_use_is_told(own: str, others: str) -> None:
    error = RuntimeError(
        "CUDA out of memory. Tried to allocate 28.00 MiB. GPU 0 has a total capacity of 139.80 GiB of which 26.38 MiB "
        "is free. Process 8 has 60.00 GiB memory in use. Including non-PyTorch memory, this process has "
        f"{own} memory in use."
    )
    line = naming("28.00 MiB asked for, 26.38 MiB free of 139.80 GiB", *filter(None, [others]))
    assert memory_line(error) == line and ("other processes" in memory_line(error)) == bool(others)


def test_what_libraries_say_of_memory_is_read() -> None:
    with pytest.raises(MemoryError) as numpys:
        np.empty(2**50)
    assert memory_line(numpys.value) == naming("the host ... 8.00 PiB")
    cublas = RuntimeError("CUDA error: CUBLAS_STATUS_ALLOC_FAILED when calling `cublasCreate(handle)`")
    assert memory_line(cublas) == naming("out of memory ... CUBLAS_STATUS_ALLOC_FAILED")
    limited = (
        "CUDA out of memory. Tried to allocate 2.00 GiB. GPU 0 has a total capacity of 79.11 GiB of which 44.69 GiB "
        "is free. Process 7 has 10.00 GiB memory in use. 23.40 GiB allowed; Of the allocated memory 22.10 GiB is "
        "allocated by PyTorch, and 44.00 MiB is reserved by PyTorch but unallocated."
    )
    assert memory_line(RuntimeError(limited)) == (
        naming(
            "2.00 GiB asked for", "22.10 GiB taken of 23.40 GiB", "(--gpu-memory-gib)", "44.69 GiB free of 79.11 GiB"
        )
    )
