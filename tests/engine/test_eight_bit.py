"""AdamW with moments in 8 bits or bf16: what a checkpoint holds of them, numbers beside fp32, and exact resume."""

import importlib.util
import json

import pytest
import torch
from safetensors.torch import load_file
from support.in_process import undone_afterwards

from pipeline.configuration.flags import parse
from pipeline.engine.eight_bit import BLOCK, moments, restore_moment, scales
from pipeline.errors import EnvironmentFault
from step1_sft.checks import start_models
from step1_sft.config import SFTConfig
from step1_sft.main import main

FOLDER_SIZES = {"num_train": 24, "num_test": 4}
needs_bitsandbytes = pytest.mark.skipif(
    importlib.util.find_spec("bitsandbytes") is None, reason="bitsandbytes is not installed"
)


def state_of(codes: torch.Tensor, scale: torch.Tensor) -> dict[str, torch.Tensor]:
    """A first moment of bitsandbytes: a signed table without -1, so that the largest value may not be in it."""
    table = torch.cat([torch.linspace(-0.993, 0, 128), torch.linspace(0.007, 1, 128)])
    second = {"state2": codes.clone(), "qmap2": table, "absmax2": scale.clone()}
    return {"state1": codes, "qmap1": table, "absmax1": scale} | second


def test_the_codes_return_from_what_a_checkpoint_holds():
    numel = 5 * BLOCK + 7
    codes = torch.randint(256, (numel,), generator=torch.Generator().manual_seed(1), dtype=torch.uint8)
    state = state_of(codes, torch.tensor([1e-9, 3.0, 1e-30, 7e4, 0.1, 2.0]))
    saved = {kind: (moments(state)[kind], scales(state)[kind]) for kind in ("exp_avg", "exp_avg_sq")}
    by_hand = torch.tensor([state["qmap1"][int(code)] * state["absmax1"][i // BLOCK] for i, code in enumerate(codes)])
    assert torch.equal(saved["exp_avg"][0], by_hand)
    new = state_of(torch.zeros_like(codes), torch.zeros(6))
    for kind, (values, scale) in saved.items():
        restore_moment(new, kind, values, scale)
    assert torch.equal(new["state1"], codes) and torch.equal(new["state2"], codes)
    assert torch.equal(new["absmax1"], state["absmax1"])


def test_other_blocks_are_rounded_by_their_own_scales():
    """The largest is kept where the table has 1; nothing is further off than half the table's widest gap, and 0.7 %."""
    values = torch.randn(3 * BLOCK, generator=torch.Generator().manual_seed(2))
    state = state_of(torch.zeros(3 * BLOCK, dtype=torch.uint8), torch.zeros(3))
    restore_moment(state, "exp_avg", values, None)
    largest = values.view(-1, BLOCK).abs().amax(1)
    assert torch.equal(state["absmax1"], largest)
    off = (moments(state)["exp_avg"] - values).abs().view(-1, BLOCK) / largest[:, None]
    assert 0 < off.max() < 0.0075


def test_without_bitsandbytes_it_is_one_line_before_data_are_read(monkeypatch):
    monkeypatch.setattr("pipeline.engine.start_models.find_spec", lambda name: None)
    config = parse(SFTConfig, ["--optimizer-states", "8bit", "--data-path", "x"], section="sft").config
    checks = start_models(config, {})[0].packages
    with pytest.raises(EnvironmentFault, match="^--optimizer-states 8bit: pip install bitsandbytes"):
        [check() for check in checks]


def losses(folder, out, *words: str, steps: int) -> list[float]:
    """The losses of a run of stage 1 on the CPU, which goes on where `out` has a checkpoint."""
    flags = (
        f"--model-name-or-path {folder / 'base'} --data-path {folder / 'train.jsonl'} --data-split none --dtype fp32 "
        f"--eval-data-path {folder / 'test.jsonl'} --data-output-path {folder / 'cache'} --max-seq-len 96 "
        f"--per-device-train-batch-size 4 --learning-rate 1e-3 --lr-scheduler-type constant --output-dir {out / 'sft'} "
        f"--enable-tensorboard false --max-steps {steps}"
    )
    with undone_afterwards():
        assert main([*flags.split(), *words]) == 0
    lines = map(json.loads, (out / "runs/sft/metrics.jsonl").read_text(encoding="utf-8").splitlines())
    return [line["loss"] for line in lines if "loss" in line]


@needs_bitsandbytes
@pytest.mark.parametrize("stage", ["1", pytest.param("0", marks=pytest.mark.slow)])
def test_a_run_is_near_fp32_and_resumes_exactly(folder, tmp_path, stage):
    words = ("--zero-stage", stage, "--optimizer-states", "8bit")
    whole = losses(folder, tmp_path / "whole", *words, steps=5)
    losses(folder, tmp_path / "parts", *words, steps=3)
    assert losses(folder, tmp_path / "parts", *words, steps=5) == whole
    plain = losses(folder, tmp_path / "plain", "--zero-stage", stage, steps=5)
    assert whole != plain and whole == pytest.approx(plain, abs=0.01)
    losses(folder, tmp_path / "other", *words, steps=3)
    other = "10"[int(stage)]
    assert losses(folder, tmp_path / "other", *words, "--zero-stage", other, steps=5) == pytest.approx(whole, abs=0.01)
    back = losses(folder, tmp_path / "other", "--optimizer-states", "fp32", "--zero-stage", "2", steps=7)
    assert len(back) == 7 and back[6] < back[0], "the states are read by an AdamW in fp32 too"


@pytest.mark.slow
def test_states_in_bf16_are_two_bytes_each_and_resume_exactly(folder, tmp_path):
    """By DeepSpeed's own keys; benchmarks/reports/states.md says what they cost."""
    file = tmp_path / "bf16.json"
    file.write_text(json.dumps({"bf16": {"bf16_master_weights_and_grads": True, "bf16_optimizer_states": True}}))
    words = ("--deepspeed-config", str(file), "--zero-stage", "1", "--dtype", "bf16")
    whole = losses(folder, tmp_path / "whole", *words, steps=4)
    losses(folder, tmp_path / "parts", *words, steps=2)
    assert losses(folder, tmp_path / "parts", *words, steps=4) == whole
    (written,) = (tmp_path / "whole/runs/sft/checkpoints").glob("step-4/*.safetensors")
    kinds = {(name.partition("/")[0], tensor.dtype) for name, tensor in load_file(written).items()}
    assert {(kind, torch.bfloat16) for kind in ("weights", "exp_avg", "exp_avg_sq")} < kinds
