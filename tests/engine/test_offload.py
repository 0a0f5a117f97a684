"""Models whose optimizer states or weights are in host memory: the numbers of those that are not, and exact resume."""

import json
import os
import re
import shutil
import socket
from pathlib import Path

import pytest
import torch
from deepspeed.accelerator import get_accelerator
from deepspeed.ops.op_builder.builder import CUDAOpBuilder
from deepspeed.runtime.swap_tensor import optimizer_utils, partitioned_param_swapper
from safetensors.torch import load_file, save_file
from support.ds_arguments import PARTITIONED, PARTITIONED_FILE
from support.in_process import group_of_one
from support.messages import naming
from support.run_words import run_stage, run_words

from pipeline.configuration.flags import parse
from pipeline.dist import World
from pipeline.engine import start_models
from pipeline.errors import EnvironmentFault
from pipeline.planning import disk, page
from pipeline.preparation.room import make_room
from pipeline.run.run import Run
from step1_sft.config import SFTConfig
from step1_sft.stage import STAGE as SFT

FOLDER_SIZES = {"num_train": 24, "num_test": 4}

STATES, WEIGHTS = {"offload_optimizer": "cpu"}, {"offload_weights": "cpu"}
CASES = {"1": STATES, "2": STATES, "3": STATES, "3 weights": WEIGHTS, "3 both": STATES | WEIGHTS}


def train(folder: Path, out: Path, *, code: int = 0, **changes: object) -> None:
    flags = {
        "enable_tensorboard": "false", "adam_eps": 1e-3, "per_device_train_batch_size": 2,
        "gradient_accumulation_steps": 2, "output_dir": out,
    }  # fmt: skip
    stage = "ppo" if "actor_model_name_or_path" in changes else "reward" if "reward" in out.name else "sft"
    assert run_stage(stage, run_words(folder, **flags | changes)) == code


def apart(found: Path, expected: Path) -> float:
    one, other = load_file(found / "model.safetensors"), load_file(expected / "model.safetensors")
    return max((one[name] - other[name]).abs().max().item() for name in other)


@pytest.fixture(scope="module")
def sft(folder: Path) -> dict[str, object]:
    return {"model_name_or_path": folder / "base", "max_seq_len": 96, "learning_rate": 1e-3}


@pytest.fixture(scope="module")
def plain(folder: Path, sft: dict[str, object]) -> Path:
    train(folder, folder / "plain/sft", max_steps=4, **sft)
    return folder / "plain/sft"


QUICK = ("2", "3 both")


@pytest.mark.few(1)
@pytest.mark.parametrize("case", [pytest.param(c, marks=() if c in QUICK else pytest.mark.slow) for c in CASES])
def test_a_model_on_the_host_learns_the_same_and_resumes_exactly(folder, plain, sft, tmp_path, case) -> None:
    given = {**sft, **CASES[case], "zero_stage": case[0], "deepspeed_config": PARTITIONED_FILE}
    train(folder, tmp_path / "whole/sft", max_steps=4, **given)
    train(folder, tmp_path / "parts/sft", max_steps=2, **given, lr_scheduler_type="constant")
    train(folder, tmp_path / "constant/sft", max_steps=4, **given, lr_scheduler_type="constant")
    train(folder, tmp_path / "parts/sft", max_steps=4, **given, lr_scheduler_type="constant")
    assert apart(tmp_path / "whole/sft", plain) < 1e-6
    assert apart(tmp_path / "parts/sft", tmp_path / "constant/sft") == 0.0


@pytest.mark.slow
def test_actor_and_critic_are_on_the_host_apart(folder, tmp_path) -> None:
    ppo = {
        "actor_model_name_or_path": folder / "base", "critic_model_name_or_path": folder / "scorer", "max_steps": 2,
        "max_prompt_seq_len": 48, "max_answer_seq_len": 12, "per_device_generation_batch_size": 4,
        "actor_zero_stage": 3, "critic_zero_stage": 3,
    }  # fmt: skip
    train(folder, tmp_path / "plain", **ppo)
    critic = {"critic_offload_optimizer": "cpu", "critic_offload_weights": "cpu"}
    train(folder, tmp_path / "critic", **ppo, **critic)
    train(folder, tmp_path / "actor", **ppo, actor_offload_optimizer="cpu", actor_offload_weights="cpu")
    for case in ("critic", "actor"):
        assert max(apart(tmp_path / case / model, tmp_path / "plain" / model) for model in ("actor", "critic")) < 1e-6


@pytest.mark.parametrize(
    ("missing", "told"),
    [
        ("g++", "g++ (Debian, Ubuntu: apt-get install g++) ... offload to cpu"),
        (
            "libaio",
            "libaio ... (Debian, Ubuntu: apt-get install libaio-dev) ... offload",
        ),
    ],
)
def test_what_a_disk_needs_is_one_line_with_its_package(
    folder, sft, tmp_path, monkeypatch, capsys, missing, told
) -> None:
    """The compiler and the ninja of this machine are not asked: only what is missing is looked at."""
    builder = get_accelerator().get_op_builder("AsyncIOBuilder")
    which, here = shutil.which, {name: name for name in start_models.BUILT_WITH if name != missing}
    monkeypatch.setattr(
        start_models.shutil, "which", lambda name: here.get(name) if name in start_models.BUILT_WITH else which(name)
    )
    monkeypatch.setattr(builder, "is_compatible", lambda self, verbose: missing != "libaio")
    user = {"zero_optimization": {"stage": 3, "offload_optimizer": {"device": "nvme", "nvme_path": str(tmp_path)}}}
    file = tmp_path / "ds.json"
    file.write_text(json.dumps(user))
    for kind in ({"max_steps": 1}, {"dry_run": "true"}):
        train(folder, tmp_path / "sft", code=3, deepspeed_config=file, **kind, **sft)
        (line,) = [line for line in capsys.readouterr().err.splitlines() if line.startswith("error: ")]
        key = f"error: --deepspeed-config {file}: zero_optimization.offload_optimizer.device nvme"
        assert line == naming(key, told)
    train(folder, tmp_path / "sft", deepspeed_config=file, target="1xH100", **sft)
    assert "\n  sft      fits " in capsys.readouterr().out, "on another machine, nobody knows"


@pytest.fixture
def on_disk(tmp_path, monkeypatch):
    """Return a function that writes a DeepSpeed JSON: the blocks of tiny models are in files below `disk`."""
    for module in (optimizer_utils, partitioned_param_swapper):
        monkeypatch.setattr(module, "MIN_AIO_BYTES", 1024)  # else a tiny model's states stay in memory

    def write(*blocks: str, reuse_distance: int | None = None, **weights: int) -> dict[str, object]:
        disk = {"device": "nvme", "nvme_path": str(tmp_path / "disk"), "pin_memory": False}
        zero = {block: disk | (weights if block == "offload_param" else {}) for block in blocks}
        zero |= PARTITIONED["zero_optimization"] | {"stage": 3}
        zero |= {} if reuse_distance is None else {"stage3_max_reuse_distance": reuse_distance}
        user = {"zero_optimization": zero, "aio": {"block_size": 1024}}
        (tmp_path / "ds.json").write_text(json.dumps(user))
        return {"deepspeed_config": tmp_path / "ds.json"}

    return write


def earlier_file(disk: Path) -> Path:
    """The path of a file as DeepSpeed leaves them in a folder of NVMe."""
    file = disk / "zero_stage_3/optimizer/rank0/0_195.tensor.swp"
    file.parent.mkdir(parents=True, exist_ok=True)
    return file


ADVICE = ": free some, or give an nvme_path on another disk"
BUFFERS = {"buffer_size": 100_000, "buffer_count": 15, "max_in_cpu": 0}


@pytest.mark.faults
@pytest.mark.skipif(not get_accelerator().create_op_builder("AsyncIOBuilder").is_compatible(), reason="needs libaio")
@pytest.mark.parametrize("stage", ["sft", "reward"])
@pytest.mark.parametrize(
    ("blocks", "written"),
    [
        (("offload_optimizer",), "*exp_avg*"),
        (("offload_param",), "*_param.tensor.swp"),
        (("offload_optimizer", "offload_param"), "*_param.tensor.swp"),
    ],
)
def test_a_model_on_a_disk_learns_the_same_and_resumes_exactly(
    folder, sft, tmp_path, on_disk, stage, blocks, written
) -> None:
    """DeepSpeed compiles what it reads and writes with, once on a machine, which takes a minute."""
    train(folder, tmp_path / "plain" / stage, max_steps=4, **sft)
    given = {**sft, **on_disk(*blocks, **BUFFERS)}
    train(folder, tmp_path / "whole" / stage, max_steps=4, **given)
    assert [path for path in (tmp_path / "disk").rglob(written) if path.stat().st_size > 0]
    assert apart(tmp_path / "whole" / stage, tmp_path / "plain" / stage) < 1e-6
    train(folder, tmp_path / "constant" / stage, max_steps=4, **given, lr_scheduler_type="constant")
    train(folder, tmp_path / "parts" / stage, max_steps=2, **given, lr_scheduler_type="constant")
    train(folder, tmp_path / "parts" / stage, max_steps=4, **given, lr_scheduler_type="constant")
    assert apart(tmp_path / "parts" / stage, tmp_path / "constant" / stage) == 0.0


PPO = {
    "max_prompt_seq_len": 48, "max_answer_seq_len": 12, "per_device_generation_batch_size": 4, "actor_zero_stage": 3,
    "critic_zero_stage": 3, "lr_scheduler_type": "constant",
}  # fmt: skip


@pytest.mark.faults
@pytest.mark.skipif(not get_accelerator().create_op_builder("AsyncIOBuilder").is_compatible(), reason="needs libaio")
@pytest.mark.parametrize(
    ("blocks", "flags", "on_the_disk"),
    [
        (("offload_optimizer",), {}, set()),
        (("offload_param",), {"critic_offload_weights": "cpu"}, {"actor"}),
        (
            ("offload_optimizer", "offload_param"),
            {"offload_reference_model": "true", "offload_reward_model": "true"},
            {"actor", "critic", "reference", "reward"},
        ),
    ],
)
def test_models_of_stage_3_on_a_disk_learn_the_same_and_resume_exactly(
    folder, tmp_path, on_disk, blocks, flags, on_the_disk
) -> None:
    ppo = {"actor_model_name_or_path": folder / "base", "critic_model_name_or_path": folder / "scorer", **PPO}
    train(folder, tmp_path / "plain", max_steps=4, **ppo)
    given = {**ppo, **on_disk(*blocks, **BUFFERS), **flags}
    train(folder, tmp_path / "whole", max_steps=4, **given)
    weights = {path.relative_to(tmp_path / "disk").parts[0] for path in (tmp_path / "disk").rglob("*_param.tensor.swp")}
    assert weights == on_the_disk
    states = {path.name.split("-")[1] for path in (tmp_path / "disk").rglob("exp_avg-*")}
    assert (len(states) > 2) == ("offload_optimizer" in blocks)
    train(folder, tmp_path / "parts", max_steps=2, **given)
    train(folder, tmp_path / "parts", max_steps=4, **given)
    for model in ("actor", "critic"):
        assert apart(tmp_path / "whole" / model, tmp_path / "plain" / model) < 1e-6
        assert apart(tmp_path / "parts" / model, tmp_path / "whole" / model) == 0.0


@pytest.mark.faults
@pytest.mark.skipif(not get_accelerator().create_op_builder("AsyncIOBuilder").is_compatible(), reason="needs libaio")
def test_buffers_and_start_weights_that_a_disk_hides_are_checked(folder, sft, tmp_path, on_disk, capfd) -> None:
    """A rollout without the fused backend gathers all 14 weights; NaN in a file is looked for in the start model."""
    ppo = {"actor_model_name_or_path": folder / "base", "critic_model_name_or_path": folder / "scorer", **PPO}
    few = on_disk("offload_param", reuse_distance=0, **{**BUFFERS, "buffer_count": 13})
    train(folder, tmp_path / "ppo", code=2, max_steps=1, **ppo, **few)
    assert refusal(capfd) == naming("buffer_count ... 13 ... eager ... 14 or more")
    shutil.copytree(folder / "base", tmp_path / "bad")
    weights = load_file(tmp_path / "bad/model.safetensors")
    weights["model.decoder.layers.1.fc1.weight"][0, 0] = float("nan")
    save_file(weights, tmp_path / "bad/model.safetensors", metadata={"format": "pt"})
    bad = {**sft, "model_name_or_path": tmp_path / "bad"}
    train(folder, tmp_path / "sft", code=2, max_steps=1, **bad, **on_disk("offload_param", **BUFFERS))
    assert "model.decoder.layers.1.fc1.weight" in refusal(capfd)


def refusal(captured: pytest.CaptureFixture[str]) -> str:
    return "\n".join(line for line in captured.readouterr().err.splitlines() if line.startswith(("error: ", "  ")))


def test_buffers_that_do_not_hold_the_weights_of_a_layer_are_refused(
    folder, sft, tmp_path, on_disk, monkeypatch, capsys
) -> None:
    monkeypatch.setattr(start_models, "check_disk_offload", lambda file: None)  # of the compiler and libaio
    given = {**sft, **on_disk("offload_param", reuse_distance=0, buffer_size=1000, buffer_count=5)}
    train(folder, tmp_path / "sft", code=2, max_steps=1, **given)
    said = refusal(capsys)
    # Two layers, each of four projections of the attention and two of the MLP.
    assert re.search(r"offload_param.buffer_size: got 1000, \S+/base .* \d+ or more", said)
    assert re.search(r"offload_param.buffer_count: got 5, \S+/base .* 12 or more", said)


def test_prefetching_of_weights_on_a_disk_is_refused(folder, sft, tmp_path, on_disk, capsys) -> None:
    given = {**sft, **on_disk("offload_param", **BUFFERS)}
    user = json.loads((tmp_path / "ds.json").read_text())
    user["zero_optimization"]["stage3_prefetch_bucket_size"] = 1000
    (tmp_path / "ds.json").write_text(json.dumps(user))
    train(folder, tmp_path / "sft", code=2, max_steps=1, **given)
    assert refusal(capsys) == naming("stage3_prefetch_bucket_size ... 1000 ... 0 ... NVMe")


def test_an_average_of_weights_on_a_disk_is_refused(folder, tmp_path, on_disk, capsys) -> None:
    ppo = {"actor_model_name_or_path": folder / "base", "critic_model_name_or_path": folder / "scorer", **PPO}
    given = on_disk("offload_param")
    train(folder, tmp_path / "ppo", code=2, max_steps=1, enable_ema="true", **ppo, **given)
    assert refusal(capsys) == naming("--enable-ema ... actor's weights on NVMe")


def test_a_plan_says_whether_a_disk_has_room_for_what_is_offloaded(
    folder, sft, tmp_path, on_disk, monkeypatch, capsys
) -> None:
    """16 bytes a weight of masters, moments and gradients, 4 of weights and the tied head; earlier files are room."""
    monkeypatch.setattr(start_models, "check_disk_offload", lambda file: None)  # of the compiler and libaio
    given = {**sft, **on_disk("offload_optimizer", "offload_param", **BUFFERS), "explain": "true"}
    tensors = load_file(folder / "base/model.safetensors")
    needed = 20 * sum(tensor.numel() for tensor in tensors.values())
    needed += 4 * tensors["model.decoder.embed_tokens.weight"].numel()
    monkeypatch.setattr(disk, "GIB", 1)
    for room, code in ((needed - 101, 3), (needed - 100, 0)):
        monkeypatch.setattr(disk, "free_bytes", lambda folder, room=room: room)
        earlier_file(tmp_path / "disk").write_bytes(b"x" * 100)
        train(folder, tmp_path / "sft", code=code, **given)
        captured = capsys.readouterr()
        fault = f"{tmp_path / 'disk'} (NVMe) has room for {room + 100:.2f} of {needed:.2f} GiB{ADVICE}"
        assert (f"error: sft: {fault}\n" in captured.err) == (code == 3)
        page = " ".join(captured.out.split())
        assert (f"; {fault} " in page) == (code == 3)
        assert f", 0.00 GiB in {tmp_path / 'disk'} (NVMe) " in page


@pytest.mark.parametrize("stage", ["sft", "reward", "ppo"])
def test_a_start_is_refused_where_the_plan_finds_no_room(folder, sft, tmp_path, on_disk, monkeypatch, capsys, stage):
    """By the same line, before rows and models are read; what an earlier run has left is deleted, and nothing else."""
    monkeypatch.setattr(start_models, "check_disk_offload", lambda file: None)  # of the compiler and libaio
    given = {**sft, **on_disk("offload_optimizer", "offload_param", **BUFFERS)}
    if stage == "ppo":
        models = {"actor_model_name_or_path": folder / "base", "critic_model_name_or_path": folder / "scorer"}
        given = {**PPO, **models, **{name: given[name] for name in given if name not in sft}}
    monkeypatch.setattr(disk, "free_bytes", lambda folder: 1)
    train(folder, tmp_path / stage, code=3, dry_run="true", **given)
    (planned,) = re.findall(rf"^error: {stage}: (.* \(NVMe\) .*)$", capsys.readouterr().err, flags=re.MULTILINE)
    earlier = earlier_file(tmp_path / "disk"), earlier_file(tmp_path / "disk/actor")
    others = tmp_path / "disk/zero_stage_3/notes.tensor.swp", tmp_path / "disk/.draft.swp"
    for file in (*earlier, *others):
        file.write_bytes(b"x" * 100)
    train(folder, tmp_path / stage, code=3, max_steps=1, data_output_path=tmp_path / "rows", **given)
    assert refusal(capsys) == f"error: {planned}" and planned.endswith(ADVICE)
    assert [file.exists() for file in (*earlier, *others)] == [False, False, True, True]
    assert not (tmp_path / "rows").exists()


def test_a_start_goes_on_where_a_disk_has_just_enough_room(folder, sft, tmp_path, on_disk, monkeypatch, capsys) -> None:
    """As for the plan, earlier files are room; the next thing that a start does is to read rows."""
    monkeypatch.setattr(start_models, "check_disk_offload", lambda file: None)
    given = {**sft, **on_disk("offload_optimizer"), "data_path": tmp_path / "missing.jsonl"}
    needed = 16 * sum(tensor.numel() for tensor in load_file(folder / "base/model.safetensors").values())
    for room, said in ((needed, "missing.jsonl"), (needed - 1, "(NVMe) has room for")):
        monkeypatch.setattr(disk, "free_bytes", lambda folder, room=room: room)
        train(folder, tmp_path / "sft", code=2 if room == needed else 3, max_steps=1, **given)
        assert said in refusal(capsys)


def test_a_folder_of_nvme_that_cannot_be_written_is_refused(folder, sft, tmp_path, on_disk, monkeypatch, capsys):
    monkeypatch.setattr(start_models, "check_disk_offload", lambda file: None)
    (tmp_path / "disk").write_text("a file")
    train(folder, tmp_path / "sft", code=3, max_steps=1, **sft, **on_disk("offload_optimizer"))
    assert refusal(capsys) == naming(f"error: {tmp_path / 'disk'} ... cannot be written ... File exists")


def test_each_machine_needs_room_for_its_own_processes(folder, sft, tmp_path, on_disk, monkeypatch) -> None:
    """Two of four ranks are here: they write half of 16 bytes a weight."""
    monkeypatch.setenv("LOCAL_WORLD_SIZE", "2")
    monkeypatch.setattr(disk, "GIB", 1)
    words = {**sft, **on_disk("offload_optimizer"), "data_path": folder / "train.jsonl", "output_dir": tmp_path / "sft"}
    resolved = parse(SFTConfig, [str(word) for name in words for word in (f"--{name}", words[name])], section="sft")
    run = Run(World(0, 4, torch.device("cpu")), tmp_path, SFT, resolved, stop=None)
    needed = 8 * sum(tensor.numel() for tensor in load_file(folder / "base/model.safetensors").values())
    monkeypatch.setattr(disk, "free_bytes", lambda folder: needed - 1)
    line = naming(f"{socket.gethostname()}: {tmp_path / 'disk'} (NVMe) ... {needed - 1:.2f} of {needed:.2f} GiB")
    with pytest.raises(EnvironmentFault, match=line):
        make_room(run)


@pytest.mark.faults
@pytest.mark.skipif(not get_accelerator().create_op_builder("AsyncIOBuilder").is_compatible(), reason="needs libaio")
def test_files_on_a_disk_are_as_large_as_the_plan_says(folder, sft, tmp_path, on_disk, monkeypatch, capfd) -> None:
    """Up to what is too small for a file, and to whole kilobytes."""
    monkeypatch.setattr(page, "GIB", 1)
    given = {**sft, **on_disk("offload_optimizer", "offload_param", **BUFFERS)}
    train(folder, tmp_path / "plan", explain="true", **given)
    told = " ".join(capfd.readouterr().out.split())
    planned = float(re.search(r", ([\d.]+) GiB in \S+/disk \(NVMe\)", told)[1])
    train(folder, tmp_path / "sft", max_steps=1, **given)
    written = sum(file.stat().st_size for file in (tmp_path / "disk").rglob("*.swp"))
    assert written == pytest.approx(planned, rel=0.05)


def test_deepspeed_compiles_for_the_gpu_where_the_environment_names_one_that_it_cannot_read(monkeypatch):
    """Images for Hopper set 9.0a; what writes to NVMe holds no kernel, but its builder reads the variable."""

    class Builder(CUDAOpBuilder):
        absolute_name = sources = lambda self: []

    monkeypatch.setenv("TORCH_CUDA_ARCH_LIST", "9.0a")
    with group_of_one():
        monkeypatch.setattr(torch.cuda, "device_count", lambda: 1)
        monkeypatch.setattr(torch.cuda, "get_device_capability", lambda _: (9, 0))
        builder = Builder("any")
        builder.jit_mode = True
        assert builder.compute_capability_args() == [] and os.environ["TORCH_CUDA_ARCH_LIST"] == "9.0+PTX"
