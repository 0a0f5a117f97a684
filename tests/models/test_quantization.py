"""Quantised bases: int8 against hand-worked numbers and a slow loop, and what a cast and LoRA leave of them."""

import importlib.util
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from support.families import FAMILIES, family_config
from support.messages import naming
from support.tiny_models import NUM_TOKENS, random_rows
from torch import nn
from torch.nn import functional
from transformers import AutoModelForCausalLM

from pipeline.engine.memory import num_bytes, storages, weight_tensors
from pipeline.errors import EnvironmentFault, InputError
from pipeline.kernels.int8_linear import Int8Linear, dequantise_rows, quantise_rows
from pipeline.models.loaded import check_finite
from pipeline.models.loading import load_causal_lm
from pipeline.models.lora import add_lora, check_quantization, keep_norms_in_fp32, quantise_to_int8
from pipeline.models.reward_model import load_reward_model
from pipeline.models.source import ModelSource

NF4 = pytest.mark.skipif(importlib.util.find_spec("bitsandbytes") is None, reason="bitsandbytes is not installed")
ROW = random_rows(0, (8,))[0].unsqueeze(0)


def int8_layer(weight: torch.Tensor, bias: torch.Tensor | None = None) -> Int8Linear:
    layer = nn.Linear(weight.shape[1], weight.shape[0], bias=bias is not None)
    layer.weight.data = weight
    if bias is not None:
        layer.bias.data = bias
    return Int8Linear(layer)


def test_codes_and_scales_by_hand() -> None:
    """127 / 12.7 = 10 codes a unit: 12.7 -> 127, -1.04 -> -10.4, 0.26 -> 2.6; a row of zeros has scale 0."""
    codes, scale = quantise_rows(torch.tensor([[12.7, -1.04, 0.26], [0.0, 0.0, 0.0], [-0.127, 0.0, 0.0634]]))
    assert codes.tolist() == [[127, -10, 3], [0, 0, 0], [-127, 0, 63]]
    assert scale.flatten().tolist() == pytest.approx([0.1, 0.0, 0.001])
    expected = torch.tensor([[12.7, -1.0, 0.3], [0.0, 0.0, 0.0], [-0.127, 0.0, 0.063]])
    torch.testing.assert_close(dequantise_rows(codes, scale, torch.float32), expected)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_values_against_a_loop_over_numbers(dtype: torch.dtype) -> None:
    weight = torch.randn(5, 7, generator=torch.Generator().manual_seed(0)).to(dtype)
    codes, scale = quantise_rows(weight)
    found = dequantise_rows(codes, scale, dtype)
    assert (codes.dtype, scale.dtype, found.dtype) == (torch.int8, torch.float32, dtype)
    for row, values in enumerate(weight.tolist()):
        step = max(map(abs, values)) / 127
        for column, value in enumerate(values):
            expected = torch.tensor(round(value / step) * step).to(dtype)
            assert found[row, column].item() == pytest.approx(expected.item(), rel=torch.finfo(dtype).eps)
            assert abs(found[row, column].item() - value) <= step / 2 + 127 * step * torch.finfo(dtype).eps


def test_forward_and_backward_are_those_of_the_dequantised_weight() -> None:
    generator = torch.Generator().manual_seed(1)
    weight, bias, x = (torch.randn(shape, generator=generator) for shape in ((6, 4), (6,), (3, 2, 4)))
    layer, plain = int8_layer(weight, bias), dequantise_rows(*quantise_rows(weight), torch.float32)
    inputs = [x.clone().requires_grad_() for _ in range(2)]
    outputs = [layer(inputs[0]), functional.linear(inputs[1], plain, bias)]
    torch.testing.assert_close(outputs[0], outputs[1], rtol=0, atol=0)
    for output in outputs:
        output.square().sum().backward()
    torch.testing.assert_close(inputs[0].grad, inputs[1].grad)
    assert layer.weight.grad is None and layer.scale.grad is None


def test_between_the_passes_only_codes_are_kept() -> None:
    """Else each layer of a forward pass would hold its weight in 16 bits until the backward pass."""
    layer, kept = int8_layer(torch.randn(6, 4)), []
    with torch.autograd.graph.saved_tensors_hooks(lambda tensor: kept.append(tensor) or tensor, lambda tensor: tensor):
        layer(torch.randn(3, 4, requires_grad=True))
    assert {(tensor.dtype, tensor.data_ptr()) for tensor in kept} == {
        (part.dtype, part.data_ptr()) for part in (layer.weight, layer.scale)
    }


def test_a_cast_of_the_model_changes_no_scale() -> None:
    layer = int8_layer(torch.randn(6, 4))
    before = layer.scale.clone()
    assert nn.Sequential(layer).bfloat16()[0].scale.equal(before) and layer.weight.dtype == torch.int8


def test_a_quantised_model_is_the_model_of_its_dequantised_weights(causal_folder: str) -> None:
    found, plain = (load_causal_lm(causal_folder, dtype=torch.float32, quantization=kind) for kind in ("int8", "none"))
    layers = {name: module for name, module in found.named_modules() if isinstance(module, Int8Linear)}
    linear = {
        n for n, m in plain.named_modules() if isinstance(m, nn.Linear) and m is not plain.get_output_embeddings()
    }
    assert layers.keys() == linear and found.get_output_embeddings().weight.dtype == torch.float32
    before = plain(input_ids=ROW).logits
    for name, layer in layers.items():
        weight = plain.get_submodule(name).weight
        weight.data = dequantise_rows(*quantise_rows(weight.data), torch.float32)
        assert layer.weight.dtype == torch.int8
    torch.testing.assert_close(found(input_ids=ROW).logits, plain(input_ids=ROW).logits, rtol=0, atol=0)
    assert not torch.equal(before, plain(input_ids=ROW).logits)


def test_the_score_head_keeps_its_type(reward_folder: str) -> None:
    model = load_reward_model(ModelSource(reward_folder), dtype=torch.float32, quantization="int8").model
    assert model.score.weight.dtype == torch.float32
    assert sum(isinstance(module, Int8Linear) for module in model.modules()) >= 12


def test_adapters_on_int8_start_as_the_base_and_give_gradients(causal_folder: str) -> None:
    base = load_causal_lm(causal_folder, dtype=torch.float32, quantization="int8")
    expected = base(input_ids=ROW).logits
    settings = {"dim": 4, "alpha": 8.0, "dropout": 0.0, "module_name": "all-linear"}
    model = add_lora(base, **settings, only_lora=True, task="CAUSAL_LM", seed=0)
    found = model(input_ids=ROW).logits
    torch.testing.assert_close(found, expected, rtol=0, atol=0)
    found.logsumexp(-1).sum().backward()
    gradients = {name: p.grad for name, p in model.named_parameters() if p.requires_grad}
    assert gradients and all("lora_" in name and grad is not None for name, grad in gradients.items())


def test_a_weight_that_is_not_finite_is_found_behind_its_codes(causal_folder: str) -> None:
    model = load_causal_lm(causal_folder, dtype=torch.float32)
    layer = next(m for m in model.modules() if isinstance(m, nn.Linear))
    layer.weight.data[1, 1] = float("nan")
    with pytest.raises(InputError, match="scale"):
        check_finite(nn.Sequential(Int8Linear(layer)), "a-model")


def test_norms_compute_in_fp32_under_16_bit_activations(tiny_folders: dict[str, str]) -> None:
    """The casts that an engine makes come first. Without quantisation norms stay as they were."""
    model = load_causal_lm(tiny_folders["llama"], dtype=torch.float32, quantization="int8").bfloat16()
    norm, x = model.model.norm, torch.randn(2, 3, 32).bfloat16()
    keep_norms_in_fp32(model, "none")
    assert norm.weight.dtype == torch.bfloat16
    keep_norms_in_fp32(model, "int8")
    wide, seen = x.float(), []
    expected = wide * (wide.square().mean(-1, keepdim=True) + norm.variance_epsilon).rsqrt() * norm.weight
    norm.register_forward_hook(lambda module, inputs, output: seen.append(output.dtype))
    assert norm.weight.dtype == torch.float32 and norm(x).equal(expected.bfloat16()) and seen == [torch.bfloat16]
    model(input_ids=ROW)


@NF4
def test_nf4_weights_that_are_not_finite_are_found_in_their_file(tiny_folders: dict[str, str], tmp_path: Path) -> None:
    """What bitsandbytes makes of NaN depends on the device."""
    folder = shutil.copytree(tiny_folders["llama"], tmp_path / "model")
    weights = load_file(folder / "model.safetensors")
    check_finite(load_causal_lm(str(folder), dtype=torch.float32, quantization="nf4"), str(folder))
    weights["model.layers.1.mlp.up_proj.weight"][3, 3] = float("nan")
    save_file(weights, folder / "model.safetensors", metadata={"format": "pt"})
    with pytest.raises(InputError, match=r"model.safetensors: model.layers.1.mlp.up_proj.weight holds NaN"):
        check_finite(load_causal_lm(str(folder), dtype=torch.float32, quantization="nf4"), str(folder))


@NF4
@torch.no_grad()
def test_nf4_values_are_those_of_bitsandbytes_and_stay_after_an_evaluation(tiny_folders: dict[str, str]) -> None:
    """Its layers would repack their weights at an evaluation on a CPU, and round the scales."""
    from bitsandbytes import functional as functions

    model = load_causal_lm(tiny_folders["llama"], dtype=torch.float32, quantization="nf4")
    plain = load_causal_lm(tiny_folders["llama"], dtype=torch.float32)
    for module in plain.model.layers.modules():
        if isinstance(module, nn.Linear):
            packed = functions.quantize_4bit(module.weight.data, compress_statistics=True, quant_type="nf4")
            module.weight.data = functions.dequantize_4bit(*packed)
    expected = plain.eval()(input_ids=ROW).logits
    for _ in range(2):
        torch.testing.assert_close(model.train()(input_ids=ROW).logits, expected, rtol=1e-4, atol=1e-4)
        torch.testing.assert_close(model.eval()(input_ids=ROW).logits, expected, rtol=1e-4, atol=1e-4)


def test_nf4_without_bitsandbytes_is_one_line(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    check_quantization("int8", "--quantization")
    with pytest.raises(
        EnvironmentFault, match=naming("--quantization nf4 ... pip install bitsandbytes ... int8")
    ) as raised:
        check_quantization("nf4", "--quantization")
    assert "\n" not in str(raised.value)


def test_memory_counts_one_byte_a_weight(causal_folder: str) -> None:
    model = load_causal_lm(causal_folder, dtype=torch.float32, quantization="int8")
    codes = sum(
        module.weight.numel() + 4 * module.out_features for module in model.modules() if isinstance(module, Int8Linear)
    )
    others = {id(p): 4 * p.numel() for p in model.parameters() if p.dtype == torch.float32 and p.shape[-1] != 1}
    buffers = sum(buffer.numel() * buffer.element_size() for buffer in model.buffers())
    assert num_bytes(storages(weight_tensors(model))) == codes + sum(others.values()) + buffers


@pytest.mark.parametrize("name", FAMILIES)
def test_every_family_trains_adapters_on_int8(name: str) -> None:
    """In 16 bits under fp32 norms: near the same layers in fp32, and every adapter gets a gradient."""
    torch.manual_seed(0)
    model: Any = AutoModelForCausalLM.from_config(family_config(name, NUM_TOKENS)).eval()
    quantise_to_int8(model)
    expected = model(input_ids=ROW).logits.log_softmax(-1)
    settings = {"dim": 2, "alpha": 4.0, "dropout": 0.0, "module_name": "all-linear"}
    model = add_lora(model.bfloat16(), **settings, only_lora=True, task="CAUSAL_LM", seed=0)
    keep_norms_in_fp32(model, "int8")
    found = model(input_ids=ROW).logits
    assert found.dtype == torch.bfloat16
    torch.testing.assert_close(found.float().log_softmax(-1), expected, rtol=0, atol=0.1)
    found.float().logsumexp(-1).sum().backward()
    missing = [key for key, p in model.named_parameters() if "lora_B" in key and p.grad is None]
    assert missing == []
