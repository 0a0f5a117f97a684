"""LoRA layers as one function against peft's own forward pass: outputs, gradients, what is kept, and when it serves.

In fp64, so that a term that is missing shows; tests/gpu compares 16 bits.
"""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from peft import LoraConfig
from peft.tuners.lora import Linear as PeftLinear
from support.decode_models import FUSED, shaken, with_lora
from torch import nn
from transformers.pytorch_utils import Conv1D

from pipeline.kernels.int8_linear import Int8Linear
from pipeline.kernels.lora_linear import AdaptedLinear
from pipeline.models.forward import fused_layers
from pipeline.models.forward.fused_layers import LoraLinear, fuse_layers
from pipeline.models.loading import base_model, use_gradient_checkpointing
from pipeline.models.lora import keep_start_adapter, merge_adapter, start_model
from pipeline.planning.counting import PassCounter

CUDA = torch.device("cuda")
IDS = torch.randint(3, 300, (3, 7), generator=torch.Generator().manual_seed(0))
TOLERANCE = {"rtol": 1e-6, "atol": 1e-9}
INPUTS, OUTPUTS, RANK, SCALING = 10, 6, 3, 2.5


@pytest.fixture
def calls(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Fuse on a CPU too; every call of the function adds the rows of its input."""
    rows: list[int] = []

    class Counted:
        @staticmethod
        def apply(x: torch.Tensor, *rest: Any) -> torch.Tensor:
            rows.append(x.numel() // x.shape[-1])
            return AdaptedLinear.apply(x, *rest)

    monkeypatch.setattr(
        fused_layers, "is_of_one_type", lambda x, *them: all(p is None or p.dtype == x.dtype for p in them)
    )
    monkeypatch.setattr(fused_layers, "has_triton", lambda: True)
    monkeypatch.setattr(fused_layers, "AdaptedLinear", Counted)
    return rows


def random(*shape: int, seed: int = 0) -> torch.Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(sum(shape) + 100 * seed), dtype=torch.float64)


def adapted(base: nn.Module, **settings: Any) -> Any:
    """peft's layer over `base` with an adapter of random A and B."""
    config = LoraConfig(r=RANK, lora_alpha=SCALING * RANK, fan_in_fan_out=isinstance(base, Conv1D), **settings)  # type: ignore[arg-type]
    layer = PeftLinear(base.requires_grad_(False), "default", config, r=RANK, lora_alpha=config.lora_alpha).double()  # type: ignore[arg-type]
    shaken(layer.lora_B["default"].weight)
    return layer


def fused(layer: Any) -> Any:
    assert fuse_layers(layer, CUDA) == 1 and type(layer) is LoraLinear
    return layer


BASES: dict[str, Callable[[], Any]] = {
    "linear": lambda: nn.Linear(INPUTS, OUTPUTS, bias=False),
    "linear with a bias": lambda: nn.Linear(INPUTS, OUTPUTS),
    "GPT-2's, transposed": lambda: Conv1D(OUTPUTS, INPUTS),
    "int8": lambda: Int8Linear(nn.Linear(INPUTS, OUTPUTS)),
}
SHAPES = {"2-D": (5, INPUTS), "3-D": (2, 4, INPUTS), "one row": (INPUTS,), "no row": (0, 3, INPUTS)}


def passed(layer: Any, x: torch.Tensor) -> dict[str, torch.Tensor]:
    """The output of a layer, and the gradients of its parameters and of x that are wanted."""
    layer.zero_grad()
    out = layer(x)
    trained = {name: p for name, p in [*layer.named_parameters(), ("x", x)] if p.requires_grad}
    gradients = torch.autograd.grad((out * random(*out.shape, seed=9)).sum(), list(trained.values()))
    return {"out": out.detach(), **dict(zip(trained, gradients, strict=True))}


@pytest.mark.parametrize("base", BASES)
@pytest.mark.parametrize("shape", SHAPES)
def test_a_layer_is_pefts(calls, base, shape):
    torch.manual_seed(0)
    layer = adapted(BASES[base]())
    x = random(*SHAPES[shape]).requires_grad_()
    expected = passed(layer, x)
    actual = passed(fused(layer), x)
    assert actual.keys() == expected.keys() and len(expected) == 4 and len(calls) == 1
    for name, value in expected.items():
        torch.testing.assert_close(actual[name], value, **TOLERANCE, msg=lambda text, name=name: f"{name}: {text}")


def stretched(layer: Any) -> torch.Tensor:
    """Inputs that are a transposed view, and a gradient of one number for all outputs."""
    x = random(INPUTS, 4, 3).transpose(0, 2).requires_grad_()
    return torch.cat([g.flatten() for g in torch.autograd.grad(layer(x).sum(), (x, layer.lora_A["default"].weight))])


def test_views_and_stretched_gradients(calls):
    layer = adapted(nn.Linear(INPUTS, OUTPUTS))
    expected = stretched(layer)
    torch.testing.assert_close(stretched(fused(layer)), expected, **TOLERANCE)
    assert calls == [12]


@pytest.mark.parametrize("wanted", ["A", "B", "bias", "x"])
def test_each_gradient_alone(calls, wanted):
    """A first layer's input needs none. With `--only-optimize-lora false` the base's bias is trained, by peft's way."""
    layer = adapted(nn.Linear(INPUTS, OUTPUTS)).requires_grad_(False)
    x = random(5, INPUTS).requires_grad_(wanted == "x")
    parts = {"A": layer.lora_A["default"].weight, "B": layer.lora_B["default"].weight, "bias": layer.base_layer.bias}
    if wanted in parts:
        parts[wanted].requires_grad_()
    expected = passed(layer, x)
    actual = passed(fused(layer), x)
    assert actual.keys() == expected.keys() and len(expected) == 2 and calls == [5] * (wanted != "bias")
    for name, value in expected.items():
        torch.testing.assert_close(actual[name], value, **TOLERANCE)


def kept_bytes(layer: Any, x: torch.Tensor) -> int:
    """Bytes that autograd keeps of a pass beside parameters and their views."""
    storages: dict[int, int] = {}
    known = {parameter.untyped_storage().data_ptr() for parameter in layer.parameters()}

    def keep(tensor: torch.Tensor) -> torch.Tensor:
        storages[tensor.untyped_storage().data_ptr()] = tensor.untyped_storage().nbytes()
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(keep, lambda one: one):
        out = layer(x)
    assert out.requires_grad
    return sum(size for address, size in storages.items() if address not in known)


@pytest.mark.parametrize("base", BASES)
def test_it_keeps_the_input_and_what_has_the_width_of_the_rank(calls, base):
    layer = adapted(BASES[base]())
    x = random(2, 4, INPUTS).requires_grad_()
    before = kept_bytes(layer, x)
    assert kept_bytes(fused(layer), x) == before == 8 * 8 * (INPUTS + RANK) and calls


def pass_over(layer: Any, x: torch.Tensor) -> tuple[int, int, int]:
    """(bytes that the kernels of both passes touch, launches, peak of live bytes) on the meta device."""
    weights = torch.empty(len(x), layer.out_features, dtype=x.dtype, device="meta")
    with PassCounter([*layer.parameters(), x, weights]) as counter:
        torch.autograd.grad(layer(x), [x, *(p for p in layer.parameters() if p.requires_grad)], weights)
    num_bytes = sum(kernel.num_bytes * count for kernel, count in counter.kernels.items())
    return num_bytes, counter.kernels.total(), counter.peak


def test_it_passes_over_memory_less_often(calls):
    """An output was written by B, scaled (2), added (3); its gradient scaled (2); the input's gradient added (3)."""
    rows, width = 4096, 512
    layer = adapted(nn.Linear(width, width, bias=False)).to("meta")
    x = torch.empty(rows, width, dtype=torch.float64, device="meta", requires_grad=True)
    before, launches, peak = pass_over(layer, x)
    now, fewer, lower = pass_over(fused(layer), x)
    whole = rows * width * 8
    # Of the input's gradient: product with A (1) and the sum (3) against a sum within the product (2).
    assert (round((before - now) / whole, 1), launches - fewer) == (4 + 2 + 2, 12 - 8) and lower < peak


# --- what is not fused ---


def variant(layer: Any) -> None:
    layer.lora_variant["default"] = object()


def another(layer: Any, *, and_default: bool) -> None:
    layer.update_layer("other", 2, lora_alpha=8, config=LoraConfig(r=2, lora_dropout=0.0))
    layer.double()
    shaken(layer.lora_B["other"].weight)
    layer.set_adapter(["default", "other"] if and_default else "other")


def thawed(layer: Any) -> None:
    layer.base_layer.weight.requires_grad_()


def by_layer(layer: Any) -> None:
    for parameter in layer.parameters():
        parameter.gathered_by_layer = True


STATES: dict[str, tuple[bool, Callable[[Any], Any]]] = {
    "as it is": (True, lambda layer: None),
    "another adapter alone": (True, lambda layer: another(layer, and_default=False)),
    "two adapters": (False, lambda layer: another(layer, and_default=True)),
    "disabled": (False, lambda layer: layer.enable_adapters(False)),
    "merged": (False, lambda layer: layer.merge()),
    "merged, then not": (True, lambda layer: (layer.merge(), layer.unmerge())),
    "an adapter that is not there": (False, lambda layer: setattr(layer, "_active_adapter", "none")),
    "a trained base weight": (False, thawed),
    "a weight that ZeRO-3 gathers by layer": (False, by_layer),
}


@pytest.mark.parametrize("state", STATES)
@torch.no_grad()
def test_states_of_a_layer(calls, state):
    takes, change = STATES[state]
    torch.manual_seed(0)
    plain, mine = (adapted(nn.Linear(INPUTS, OUTPUTS)) for _ in range(2))
    mine.load_state_dict(plain.state_dict())
    fused(mine)
    x = random(2, 4, INPUTS)
    for layer in (plain, mine):
        torch.manual_seed(1)
        change(layer)
    torch.testing.assert_close(mine(x), plain(x), **TOLERANCE)
    assert bool(calls) == takes and repr(mine).startswith("lora.")


@pytest.mark.parametrize("trains", [True, False])
def test_dropout_is_pefts(calls, trains):
    """The same numbers of the generator are dropped; without dropout the layer is fused."""
    layer = adapted(nn.Linear(INPUTS, OUTPUTS), lora_dropout=0.5).train(trains)
    x = random(8, INPUTS)
    torch.manual_seed(3)
    expected = layer(x)
    torch.manual_seed(3)
    torch.testing.assert_close(fused(layer)(x), expected, **TOLERANCE)
    assert bool(calls) is not trains


@pytest.mark.parametrize("settings", [{"use_dora": True}, {"lora_bias": True}], ids=str)
def test_other_kinds_of_adapters_are_pefts(calls, settings):
    layer = adapted(nn.Linear(INPUTS, OUTPUTS), **settings)
    x = random(8, INPUTS)
    expected = layer(x)
    assert fused(layer)(x).equal(expected) and not calls


def test_an_adapter_for_each_row_is_pefts(calls):
    layer = adapted(nn.Linear(INPUTS, OUTPUTS)).eval()
    x, names = random(2, INPUTS), ["__base__", "default"]
    expected = layer(x, adapter_names=names)
    torch.testing.assert_close(fused(layer)(x, adapter_names=names), expected, **TOLERANCE)
    assert not calls and not torch.allclose(layer(x), expected)


def test_other_bases_are_pefts(calls):
    class Doubled(nn.Linear):
        def forward(self, input: torch.Tensor) -> torch.Tensor:
            return 2 * super().forward(input)

    layer = adapted(Doubled(INPUTS, OUTPUTS))
    x = random(8, INPUTS)
    expected = layer(x)
    assert fused(layer)(x).equal(expected) and not calls


def test_a_cpu_computes_as_before(monkeypatch):
    """peft's own numbers stay, to the last digit."""
    monkeypatch.setattr(fused_layers, "AdaptedLinear", None)
    monkeypatch.setattr(fused_layers, "has_triton", lambda: True)
    layer = adapted(nn.Linear(INPUTS, OUTPUTS))
    x = random(8, INPUTS)
    expected = layer(x)
    assert fused(layer)(x).equal(expected)


# --- models ---


def checkpointed(model: Any) -> Any:
    use_gradient_checkpointing(base_model(model))
    return model


def trained(model: Any) -> dict[str, torch.Tensor]:
    """Loss and all gradients of a training pass."""
    model.train().zero_grad()
    torch.manual_seed(0)  # GPT-2 has dropout
    loss = model(input_ids=IDS, labels=IDS, use_cache=False).loss
    loss.backward()
    return {"loss": loss.detach()} | {
        name: p.grad.clone() for name, p in model.named_parameters() if p.grad is not None
    }


# Model, settings of its adapters, LoRA layers, change.
MODELS: dict[str, tuple[str, dict[str, Any], int, Callable[[Any], Any]]] = {
    "llama": ("llama", {}, 14, lambda model: model),
    "llama, recomputed": ("llama", {}, 14, checkpointed),
    "llama, int8": ("llama", {"int8": True}, 14, lambda model: model),
    "gpt2": ("gpt2", {}, 8, lambda model: model),
    "llama and its other weights": ("llama", {"only_lora": False}, 14, lambda model: model),
    "opt": ("opt", {}, 12, lambda model: model),
    "opt, recomputed": ("opt", {}, 12, checkpointed),
}


@pytest.mark.parametrize("name", MODELS)
def test_models_train_as_with_peft(calls, monkeypatch, name):
    monkeypatch.setattr(fused_layers, "can_use_kernels", lambda *_: False)  # norms as they are
    kind, settings, number, change = MODELS[name]
    plain, mine = (change(with_lora(FUSED[kind](), **settings).double()) for _ in range(2))
    fuse_layers(mine, CUDA)
    assert list(mine.state_dict()) == list(plain.state_dict())
    expected, actual = trained(plain), trained(mine)
    assert len(calls) == number * (2 if "recomputed" in name else 1)
    assert actual.keys() == expected.keys() and len(expected) >= 2 * number + 1
    for key, value in expected.items():
        torch.testing.assert_close(actual[key], value, **TOLERANCE, msg=lambda text, key=key: f"{key}: {text}")


def test_the_model_that_training_began_with(calls):
    """A frozen adapter, or none, in the place of the trained one; afterwards the trained one again, and merged."""

    @torch.no_grad()
    def logits(model: Any) -> torch.Tensor:
        return model(input_ids=IDS).logits

    for keeps in (False, True):
        calls.clear()
        model = with_lora(FUSED["llama"]()).double()
        if keeps:
            keep_start_adapter(model)
            model.double()
        fuse_layers(model, CUDA)
        before = logits(model)
        for name, parameter in model.named_parameters():
            if "lora_" in name and ".default." in name:
                shaken(parameter)
        now, used = logits(model), len(calls)
        with start_model(model):
            start = logits(model)
        assert (len(calls) == used + 14) == keeps and torch.allclose(start, before, **TOLERANCE) == keeps
        assert logits(model).equal(now) and not torch.allclose(now, before)
        torch.testing.assert_close(logits(merge_adapter(model)), now, **TOLERANCE)
