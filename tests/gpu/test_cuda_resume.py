"""A killed run goes on exactly on GPUs too, with deterministic kernels (goal R17): bf16, all three steps."""

from importlib.util import find_spec
from pathlib import Path

import pytest
import torch
from stage_runs import kill_and_compare, regroup
from test_kill import check, tell

EXACT = "--dtype bf16 --deterministic true"
IN_8_BITS = "--optimizer-states 8bit --critic-zero-stage 1"


@pytest.fixture
def folder(folder: Path, tmp_path: Path) -> Path:
    for path in folder.iterdir():
        (tmp_path / path.name).symlink_to(path)
    return tmp_path


@pytest.mark.gpu
@pytest.mark.parametrize("stage", ["sft", "reward", "ppo"])
def test_a_killed_run_goes_on_exactly(folder, stage):
    check(tell(kill_and_compare, stage, folder, count=3, seed=1, more=EXACT))


@pytest.mark.gpu
def test_fp16_with_its_loss_scales(folder):
    check(tell(kill_and_compare, "ppo", folder, count=2, seed=2, more="--dtype fp16 --deterministic true"))


@pytest.mark.gpu
@pytest.mark.skipif(find_spec("bitsandbytes") is None, reason="needs bitsandbytes")
def test_moments_in_8_bits(folder):
    check(tell(kill_and_compare, "ppo", folder, count=2, seed=3, more=f"{EXACT} {IN_8_BITS}"))


@pytest.mark.gpu
@pytest.mark.two_gpus
@pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two CUDA devices")
def test_from_two_gpus_to_one(folder):
    found = tell(regroup, "ppo", folder, count=1, more="--dtype fp32 --deterministic true")
    print(found["worst"])
    assert found["whole"] and found["worst"] < 1e-5, found
