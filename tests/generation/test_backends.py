"""The generation backend that a model gets: the fastest that supports it, and the reasons against the faster ones."""

import sys
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
import triton
from support.decode_models import COMMON, EXPERTS, cohere, family, gpt_neox, llama, opt
from support.families import FAMILIES
from support.messages import naming
from torch import nn
from transformers import (
    FalconConfig,
    FalconForCausalLM,
    GPTNeoConfig,
    GPTNeoForCausalLM,
    LlamaConfig,
)

from pipeline.errors import InputError
from pipeline.generation.backends import BACKENDS, choose_backend
from pipeline.generation.forwards.static import StaticCacheForward
from pipeline.generation.options import GenerationOptions
from pipeline.generation.sources import check_tensor_parallelism
from pipeline.models.forward import packed_attention
from pipeline.models.lora import add_lora, quantise_to_int8

NEO = GPTNeoConfig(
    vocab_size=301, hidden_size=32, num_layers=2, num_heads=2, attention_types=[[["global", "local"], 1]]
)
ACTIVATIONS = "is not among relu, silu, swish, gelu, gelu_new, gelu_pytorch_tanh"
CPU, CUDA = torch.device("cpu"), torch.device("cuda")  # nothing is put there


def changed(model: Any, **config: Any) -> Any:
    for name, value in config.items():
        setattr(model.config, name, value)
    return model


def with_adapters(model: Any) -> Any:
    return add_lora(
        model, dim=2, alpha=4, dropout=0.0, module_name="all-linear", only_lora=True, task="CAUSAL_LM", seed=0
    )


def quantised(model: Any) -> Any:
    quantise_to_int8(model)
    return with_adapters(model)


bloom = partial(family, "bloom")


@dataclass
class LlamaWithSinks(LlamaConfig):
    attention_sinks: int = 4


def llama_with_sinks() -> Any:
    model = llama()
    model.config = LlamaWithSinks(**COMMON, num_attention_heads=2)
    model.config._attn_implementation = "sdpa"
    return model


class ScaledNorm(nn.RMSNorm):
    """A norm that no table knows."""


def llama_with_another_norm() -> Any:
    model = llama()
    model.model.norm = ScaledNorm(32)
    return model


ROPE = {"rope_theta": 10_000.0}
# The backend that auto takes on a GPU, and the reasons of its fallbacks.
AUTO: dict[str, tuple[Any, GenerationOptions, str, list[str]]] = {
    "opt": (opt, GenerationOptions(max_sequence_length=10**6), "fused", []),
    "llama": (llama, GenerationOptions(), "fused", []),
    "opt with merged adapters": (lambda: with_adapters(opt()), GenerationOptions(), "fused", []),
    "opt with unmerged adapters": (
        lambda: with_adapters(opt()), GenerationOptions(merge_lora=False), "static",
        ["fused ... unmerged adapters ... --merge-lora-for-generation false"],
    ),
    "an int8 base": (
        lambda: quantised(llama()), GenerationOptions(merge_lora=False), "fused", [],
    ),
    "another activation": (
        lambda: changed(opt(), activation_function="quick_gelu"), GenerationOptions(), "static",
        [f"fused: config.json: activation_function quick_gelu {ACTIVATIONS}"],
    ),
    "another gate": (
        lambda: changed(llama(), hidden_act="relu2"), GenerationOptions(), "static",
        [f"fused: config.json: hidden_act relu2 {ACTIVATIONS}"],
    ),
    "rotary tables that grow": (
        lambda: changed(llama(), rope_parameters={**ROPE, "rope_type": "dynamic"}), GenerationOptions(), "eager",
        ["fused ... config.json: rope_parameters ... dynamic",
         "static ... type dynamic ... sequence"],
    ),
    "longrope on the static backend": (
        lambda: with_adapters(family("phi-4-mini")), GenerationOptions(merge_lora=False), "eager",
        ["fused ... unmerged adapters ... --merge-lora-for-generation false",
         "static ... type longrope ... sequence"],
    ),
    "a kernel that takes no mask": (
        lambda: changed(family("qwen3-moe"), _attn_implementation="flash_attention_2"), GenerationOptions(), "eager",
        ["fused ... model type qwen3_moe",
         "static ... flash_attention_2 ... no mask"],
    ),
    "gpt-neo": (
        lambda: GPTNeoForCausalLM(NEO), GenerationOptions(), "eager",
        ["fused ... model type gpt_neo", "static ... window of tokens"],
    ),
    "falcon with alibi": (
        lambda: FalconForCausalLM(FalconConfig(vocab_size=301, hidden_size=32, num_hidden_layers=1,
                                               num_attention_heads=2, alibi=True)), GenerationOptions(), "eager",
        ["fused ... model type falcon",
         "static ... (alibi) ... own mask"],
    ),
    "partial rotary beside norms of heads": (
        lambda: changed(family("qwen3"), rope_parameters={**ROPE, "partial_rotary_factor": 0.5}), GenerationOptions(),
        "static", ["fused ... config.json: rope_parameters ... partial_rotary_factor"],
    ),
    "a field that a later version declares": (
        llama_with_sinks, GenerationOptions(), "eager",
        [f"{name}: config.json: attention_sinks 4" for name in ("fused", "static")],
    ),
    "a norm of another class": (
        llama_with_another_norm, GenerationOptions(), "static", ["fused: norms of type ScaledNorm"]
    ),
    "attention that sees what follows": (
        lambda: changed(family("gemma-3"), use_bidirectional_attention=True), GenerationOptions(), "eager",
        [f"{name}: config.json: use_bidirectional_attention True" for name in ("fused", "static")],
    ),
    "attention that takes bounds too": (
        lambda: changed(family("qwen3-moe"), _attn_implementation=packed_attention.NAME), GenerationOptions(), "static",
        ["fused ... model type qwen3_moe"],
    ),
    "bloom": (
        bloom, GenerationOptions(), "eager",
        ["fused ... model type bloom", "static ... position_ids"],
    ),
    "cohere": (cohere, GenerationOptions(), "static", ["fused ... model type cohere"]),
}  # fmt: skip


@pytest.mark.parametrize("name", AUTO)
def test_auto_takes_the_fastest_that_supports_the_model(name):
    make, settings, backend, reasons = AUTO[name]
    assert choose_backend(make(), settings, CUDA) == (backend, [naming(reason) for reason in reasons])


def test_the_table_of_backends_in_the_documentation_is_true():
    """Every family on a GPU."""
    chosen = {name: choose_backend(family(name), GenerationOptions(), CUDA)[0] for name in FAMILIES}
    rows = {backend: sorted(name for name in FAMILIES if chosen[name] == backend) for backend in BACKENDS}
    page = (Path(__file__).parents[2] / "docs" / "why" / "limits.md").read_text(encoding="utf-8")
    for backend, names in rows.items():
        assert f"| {backend} | {', '.join(names)} |\n" in page


def test_a_cpu_has_the_eager_backend():
    """Also where triton's interpreter could run the kernels."""
    reasons = ["fused: there is no CUDA device", "static: there is no CUDA device"]
    assert choose_backend(opt(), GenerationOptions(), CPU) == ("eager", reasons)


def test_without_triton_there_is_the_eager_backend(monkeypatch):
    monkeypatch.setitem(sys.modules, "triton", None)
    reasons = ["fused: triton is not installed", "static: triton is not installed"]
    assert choose_backend(opt(), GenerationOptions(), CUDA) == ("eager", reasons)


@pytest.mark.parametrize("requested", ["fused", "static", "eager"])
def test_a_backend_by_name(monkeypatch, requested):
    monkeypatch.setattr(triton.knobs.runtime, "interpret", True)
    for device in (CPU, CUDA):
        assert choose_backend(opt(), GenerationOptions(backend=requested), device) == (requested, [])


# (model, backend that was asked for, complaint)
REFUSED = {
    "fused": (bloom, "fused", "--generation-engine fused ... bloom ... auto"),
    "static": (bloom, "static", "--generation-engine static ... bloom ... auto"),
}


@pytest.mark.parametrize("name", REFUSED)
def test_a_backend_by_name_that_does_not_fit_is_refused(name):
    make, requested, complaint = REFUSED[name]
    with pytest.raises(InputError) as error:
        choose_backend(make(), GenerationOptions(backend=requested), CUDA)
    assert str(error.value) == naming(complaint)


@pytest.mark.parametrize("requested", ["fused", "static"])
def test_kernels_need_a_device_or_the_interpreter(monkeypatch, requested):
    monkeypatch.setattr(triton.knobs.runtime, "interpret", False)
    with pytest.raises(InputError, match=naming(f"--generation-engine {requested} ... CUDA ... auto")):
        choose_backend(opt(), GenerationOptions(backend=requested), CPU)


# --- tensor parallelism ---


def test_tensor_parallelism_needs_the_fused_backend_and_heads_that_divide():
    check_tensor_parallelism(gpt_neox(), 1, "eager")
    check_tensor_parallelism(opt(), 2, "fused")
    with pytest.raises(InputError, match=naming("--inference-tp-size 2 ... fused ... static")):
        check_tensor_parallelism(opt(), 2, "static")
    with pytest.raises(InputError, match=naming("--inference-tp-size 2 ... 1 heads")):
        check_tensor_parallelism(llama(), 2, "fused")
    with pytest.raises(InputError, match=naming("--inference-tp-size 2 ... olmo2")):
        check_tensor_parallelism(family("olmo-2", num_key_value_heads=2), 2, "fused")


@pytest.mark.parametrize("name", [*EXPERTS, "llama-3"])
def test_only_decode_steps_that_stay_on_the_device_are_captured(name):
    assert StaticCacheForward(family(name)).fits_graph == (name not in EXPERTS)
