"""Which rung generation takes: the fastest that computes this model's function, and in words why not a faster one."""

import sys
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import triton
from support.decode_models import COMMON, gpt_neox, llama, mistral, opt
from transformers import (
    BloomConfig,
    BloomForCausalLM,
    CohereConfig,
    CohereForCausalLM,
    FalconConfig,
    FalconForCausalLM,
    GPTNeoConfig,
    GPTNeoForCausalLM,
)

from pipeline.errors import InputError
from pipeline.generation.backends import choose_rung
from pipeline.generation.hybrid_engine import HybridEngine
from pipeline.generation.options import RungSettings
from pipeline.models import packed_attention
from pipeline.models.lora import add_lora

NEO = GPTNeoConfig(
    vocab_size=301, hidden_size=32, num_layers=2, num_heads=2, attention_types=[[["global", "local"], 1]]
)
CPU, CUDA = torch.device("cpu"), torch.device("cuda")  # nothing is put there
TYPES = "is not among opt, llama, mistral, qwen2, qwen3"


def changed(model: Any, **config: Any) -> Any:
    for name, value in config.items():
        setattr(model.config, name, value)
    return model


def with_adapters(model: Any) -> Any:
    return add_lora(
        model, dim=2, alpha=4, dropout=0.0, module_name="all-linear", only_lora=True, task="CAUSAL_LM", seed=0
    )


def bloom() -> Any:
    return BloomForCausalLM(BloomConfig(vocab_size=301, hidden_size=32, n_layer=1, n_head=2))


def cohere() -> Any:
    return CohereForCausalLM(CohereConfig(**COMMON, num_attention_heads=2, intermediate_size=40))


ROPE = {"rope_theta": 10_000.0}
# What auto takes on a GPU, and why it passes the faster rungs over.
AUTO: dict[str, tuple[Any, RungSettings, str, list[str]]] = {
    "opt": (opt, RungSettings(positions=10**6), "fused", []),
    "llama": (llama, RungSettings(), "fused", []),
    "opt with merged adapters": (lambda: with_adapters(opt()), RungSettings(), "fused", []),
    "opt with adapters beside": (
        lambda: with_adapters(opt()), RungSettings(merge_lora=False), "static",
        ["fused: it knows no adapters beside the weights (--merge_lora_for_generation false)"],
    ),
    "another activation": (
        lambda: changed(opt(), activation_function="gelu"), RungSettings(), "static", ["fused: activation gelu"]
    ),
    "another gate": (lambda: changed(llama(), hidden_act="gelu"), RungSettings(), "static", ["fused: activation gelu"]),
    "rotary tables that grow": (
        lambda: changed(llama(), rope_parameters={**ROPE, "rope_type": "dynamic"}), RungSettings(), "eager",
        ["fused: rotary positions of type dynamic",
         "static: rotary positions of type dynamic depend on how long the sequence is"],
    ),
    "a kernel that takes no mask": (
        lambda: changed(gpt_neox(), _attn_implementation="flash_attention_2"), RungSettings(), "eager",
        [f"fused: model type gpt_neox {TYPES}",
         "static: flash_attention_2 attention takes no mask of every row's own length"],
    ),
    "gpt-neo": (
        lambda: GPTNeoForCausalLM(NEO), RungSettings(), "eager",
        [f"fused: model type gpt_neo {TYPES}", "static: some layers see a window of tokens only"],
    ),
    "falcon with alibi": (
        lambda: FalconForCausalLM(FalconConfig(vocab_size=301, hidden_size=32, num_hidden_layers=1,
                                               num_attention_heads=2, alibi=True)), RungSettings(), "eager",
        [f"fused: model type falcon {TYPES}",
         "static: attention biases by distance (alibi) come with the model's own mask"],
    ),
    "partial rotary": (
        lambda: changed(llama(), rope_parameters={**ROPE, "partial_rotary_factor": 0.5}), RungSettings(), "static",
        ["fused: rotary positions on a part of each head"],
    ),
    "attention that takes bounds too": (
        lambda: changed(gpt_neox(), _attn_implementation=packed_attention.NAME), RungSettings(), "static",
        [f"fused: model type gpt_neox {TYPES}"],
    ),
    "gpt-neox": (gpt_neox, RungSettings(), "static", [f"fused: model type gpt_neox {TYPES}"]),
    "a window as long as the sequences": (mistral, RungSettings(positions=32), "fused", []),
    "no window": (lambda: mistral(None), RungSettings(positions=33), "fused", []),
    "a window shorter than the sequences": (
        mistral, RungSettings(positions=33), "eager",
        ["fused: sequences of 33 tokens are longer than the window 32",
         "static: mistral has layers with another cache than keys and values of all tokens"],
    ),
    "bloom": (
        bloom, RungSettings(), "eager",
        [f"fused: model type bloom {TYPES}", "static: bloom takes no position_ids"],
    ),
    "cohere": (
        cohere, RungSettings(), "eager",
        [f"fused: model type cohere {TYPES}", "static: cohere changes its logits (logit_scale)"],
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", AUTO)
def test_auto_takes_the_fastest_that_fits(name):
    make, settings, rung, reasons = AUTO[name]
    assert choose_rung(make(), settings, CUDA) == (rung, reasons)


def test_a_cpu_has_the_eager_rung():
    """Also where triton's interpreter could run the kernels."""
    reasons = ["fused: there is no CUDA device", "static: there is no CUDA device"]
    assert choose_rung(opt(), RungSettings(), CPU) == ("eager", reasons)


def test_without_triton_there_is_the_eager_rung(monkeypatch):
    monkeypatch.setitem(sys.modules, "triton", None)
    reasons = ["fused: triton is not installed", "static: triton is not installed"]
    assert choose_rung(opt(), RungSettings(), CUDA) == ("eager", reasons)


@pytest.mark.parametrize("wanted", ["fused", "static", "eager"])
def test_a_rung_by_name(monkeypatch, wanted):
    monkeypatch.setattr(triton.knobs.runtime, "interpret", True)
    for device in (CPU, CUDA):
        assert choose_rung(opt(), RungSettings(wanted=wanted), device) == (wanted, [])


# (model, rung that was asked for, complaint)
REFUSED = {
    "fused": (gpt_neox, "fused", f"--generation_engine fused: model type gpt_neox {TYPES}; use auto"),
    "static": (bloom, "static", "--generation_engine static: bloom takes no position_ids; use auto"),
}


@pytest.mark.parametrize("name", REFUSED)
def test_a_rung_by_name_that_does_not_fit_is_refused(name):
    make, wanted, complaint = REFUSED[name]
    with pytest.raises(InputError) as error:
        choose_rung(make(), RungSettings(wanted=wanted), CUDA)
    assert str(error.value) == complaint


@pytest.mark.parametrize("wanted", ["fused", "static"])
def test_kernels_need_a_device_or_the_interpreter(monkeypatch, wanted):
    monkeypatch.setattr(triton.knobs.runtime, "interpret", False)
    with pytest.raises(InputError, match=f"generation_engine {wanted}: there is no CUDA device; use auto"):
        choose_rung(opt(), RungSettings(wanted=wanted), CPU)


# --- ranks that share the weights ---


def check_group(model: Any, size: int, rung: str) -> None:
    HybridEngine._check_group(SimpleNamespace(group=SimpleNamespace(size=size), _model=model, rung=rung))


def test_parts_of_ranks_need_the_fused_rung_and_heads_that_divide():
    check_group(gpt_neox(), 1, "eager")
    check_group(opt(), 2, "fused")
    with pytest.raises(InputError, match="inference_tp_size 2: needs the fused rung, found static"):
        check_group(opt(), 2, "static")
    with pytest.raises(InputError, match="inference_tp_size 2: must divide the 1 heads of keys and values"):
        check_group(llama(), 2, "fused")
