"""MFU's matrix work against torch's own count of the operations that training makes."""

import pytest
import torch
from support.tiny_models import NAMES, random_rows
from torch.utils.flop_counter import FlopCounterMode
from transformers import GPT2Config, GPT2LMHeadModel

from pipeline.models.flops import peak_flops, training_mfu, training_work
from pipeline.models.loading import base_model, load_causal_lm
from pipeline.models.lora import add_lora

LENGTHS = (3, 16, 9)


def training_model(folder, *, lora: bool):
    model = load_causal_lm(folder, dtype=torch.float32, attn_implementation="eager")
    if lora:
        model = add_lora(
            model, dim=4, alpha=8, dropout=0.0, module_name="all-linear", only_lora=True, task="CAUSAL_LM", seed=1
        )
        base_model(model).enable_input_require_grads()  # as gradient checkpointing does: no layer's input is left out
    return model


@pytest.mark.parametrize("lora", [False, True], ids=["full", "lora"])
@pytest.mark.parametrize("name", NAMES)
def test_work_of_a_training_step_equals_torchs_count(tiny_folders, name, lora):
    check_work(training_model(tiny_folders[name], lora=lora))


def test_the_work_of_gpt2s_own_linear_layers_is_counted():
    sizes = {"n_embd": 32, "n_layer": 2, "n_head": 2, "vocab_size": 512, "n_positions": 32}
    check_work(GPT2LMHeadModel(GPT2Config(**sizes, attn_implementation="eager")))


def check_work(model):
    work = training_work(model)
    with FlopCounterMode(display=False) as counter:
        for row in random_rows(3, LENGTHS):
            model(row.unsqueeze(0)).logits.sum().backward()
    tokens, squares = sum(LENGTHS), sum(length**2 for length in LENGTHS)
    found = work.flops(num_tokens=tokens, num_squares=squares, num_head_tokens=tokens)
    # Eager attention computes the whole square; a causal one needs half of it, which is what is counted.
    config = base_model(model).config
    whole_squares = found + 3 * 2.0 * config.num_hidden_layers * config.hidden_size * squares
    # Older versions of transformers multiply matrices for the angles of RoPE.
    assert whole_squares == pytest.approx(counter.get_total_flops(), rel=1e-4)


def test_attention_is_as_wide_as_its_heads(tiny_folders):
    """Qwen3's heads are wider than its hidden states together; a model without heads counts its hidden states."""
    model = load_causal_lm(tiny_folders["llama"], dtype=torch.float32)
    assert training_work(model).attention_width == 32
    model.config.head_dim = 16
    assert training_work(model).attention_width == 4 * 16
    model.config.head_dim = None
    assert training_work(model).attention_width == 32


def test_frozen_weights_need_two_passes_and_trained_ones_three(tiny_folders):
    size = {"num_tokens": 48, "num_squares": 0, "num_head_tokens": 48}
    full, lora = (training_work(training_model(tiny_folders["llama"], lora=lora)) for lora in (False, True))
    adapters = lora.weights - full.weights
    assert lora.trained_weights == adapters > 0 and full.trained_weights == full.weights
    assert lora.flops(**size) - 6.0 * 48 * adapters == pytest.approx(full.flops(**size) * 2 / 3)


def test_mfu_is_a_share_of_what_all_devices_do(monkeypatch):
    monkeypatch.setattr("pipeline.models.flops.peak_flops", lambda device: 100.0)
    assert training_mfu(150.0, seconds=3.0, world_size=2, device=torch.device("cpu")) == {"mfu": 0.25}


def test_an_unknown_device_has_no_mfu():
    assert peak_flops(torch.device("cpu")) is None
    assert training_mfu(50.0, seconds=3.0, world_size=2, device=torch.device("cpu")) == {}


@pytest.mark.parametrize(
    ("name", "tflops"),
    [
        ("NVIDIA L40S", 362), ("NVIDIA L40", 181), ("NVIDIA A100-SXM4-80GB", 312), ("NVIDIA H100 80GB HBM3", 790),
        ("NVIDIA H200", 790), ("NVIDIA RTX A6000", 155), ("NVIDIA L4", None),
    ],
)  # fmt: skip
def test_a_device_is_known_by_a_whole_word_of_its_name(monkeypatch, name, tflops):
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda device: name)
    assert peak_flops(torch.device("cuda")) == (tflops and tflops * 1e12)
