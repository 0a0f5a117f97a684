"""Weights that are not finite are refused by file and tensor, whatever the folder's form and the ZeRO stage."""

import json
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from support.in_process import group_of_one
from support.messages import naming
from support.ppo_updates import engine_of
from support.tiny_models import save_tiny

from pipeline.errors import InputError
from pipeline.models.forward.causal_lm import CausalLM
from pipeline.models.loaded import check_finite
from pipeline.models.loading import load_causal_lm
from pipeline.models.lora import add_lora

WEIGHT = "model.decoder.layers.1.fc1.weight"


def model_with(folder, value: float, *, dtype=torch.float32):
    """A loaded model one of whose weights is `value`, in memory alone."""
    model = load_causal_lm(str(folder), dtype=dtype)
    with torch.no_grad():
        model.get_parameter(WEIGHT)[3, 2] = value
    return model


def spoil(file: Path, name: str, value: float) -> None:
    weights = load_file(file)
    weights[name].view(-1)[5] = value
    save_file(weights, file, metadata={"format": "pt"})


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_every_finite_number_passes(tiny_folders, dtype):
    for value in (torch.finfo(dtype).max, -torch.finfo(dtype).max, torch.finfo(dtype).tiny):
        check_finite(model_with(tiny_folders["opt"], value, dtype=dtype), tiny_folders["opt"])


@pytest.mark.parametrize("value", [float("nan"), float("inf"), -float("inf")])
def test_the_shard_of_a_model_in_several_files_is_named(bpe_folder, tmp_path, value):
    folder = Path(save_tiny("opt", bpe_folder, tmp_path / "whole"))
    sharded = tmp_path / "sharded"
    load_causal_lm(str(folder), dtype=torch.float32).save_pretrained(sharded, max_shard_size="20KB")
    file = json.loads((sharded / "model.safetensors.index.json").read_text())["weight_map"][WEIGHT]
    spoil(sharded / file, WEIGHT, value)
    model = load_causal_lm(str(sharded), dtype=torch.float32)
    with pytest.raises(InputError, match=naming(f"{sharded / file} ... {WEIGHT} ... NaN or infinity")):
        check_finite(model, str(sharded))


def test_the_adapter_or_its_base_is_named(bpe_folder, tmp_path):
    base = save_tiny("opt", bpe_folder, tmp_path / "base")
    model = load_causal_lm(base, dtype=torch.float32)
    model.name_or_path = base
    settings = {"dim": 4, "alpha": 8.0, "dropout": 0.0, "module_name": "fc1", "only_lora": True, "seed": 0}
    add_lora(model, **settings, task="CAUSAL_LM").save_pretrained(tmp_path / "adapter")
    file = tmp_path / "adapter" / "adapter_model.safetensors"
    name = next(name for name in load_file(file) if "lora_B" in name)
    spoil(file, name, float("nan"))
    merged = load_causal_lm(str(tmp_path / "adapter"), dtype=torch.float32)
    with pytest.raises(InputError, match=f"{file}: .*lora_B.* holds NaN"):
        check_finite(merged, str(tmp_path / "adapter"))


def test_a_number_beyond_the_type_of_training_is_not_the_files_fault(bpe_folder, tmp_path):
    folder = Path(save_tiny("opt", bpe_folder, tmp_path / "large"))
    spoil(folder / "model.safetensors", WEIGHT, 1e5)
    check_finite(load_causal_lm(str(folder), dtype=torch.bfloat16), str(folder))
    with pytest.raises(InputError, match=naming(f"{WEIGHT} ... not in float16 ... --dtype bf16")):
        check_finite(load_causal_lm(str(folder), dtype=torch.float16), str(folder))


@pytest.mark.parametrize("zero_stage", [0, 3])
def test_the_weights_of_an_engine_are_looked_at_where_they_are(tiny_folders, zero_stage):
    with group_of_one():
        for value, finite in ((1.0, True), (float("nan"), False)):
            engine = engine_of(CausalLM(model_with(tiny_folders["opt"], value)), zero_stage=zero_stage)
            if finite:
                check_finite(engine.module, "a/hub-id")
                continue
            with pytest.raises(InputError, match=naming(f"a/hub-id ... model.{WEIGHT} ... NaN or infinity")):
                check_finite(engine.module, "a/hub-id")
