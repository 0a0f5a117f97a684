"""Fused layers against torch's and transformers' own: values, all gradients, and whole models.

Gates and rotary positions by themselves are tested in test_gates.py.
On a CPU the Triton kernels run in triton's interpreter; tests/gpu compares 16 bits.
"""

from types import SimpleNamespace
from typing import Any

import pytest
import torch
from peft import LoraConfig, get_peft_model
from support.decode_models import DEVICE, FUSED, opt
from torch import nn
from torch.nn import functional
from transformers.models.llama.modeling_llama import LlamaRMSNorm

from pipeline.kernels import norm_kernels
from pipeline.kernels.norm_kernels import FusedNorm, FusedReluLinear
from pipeline.models.forward import fused_layers
from pipeline.models.forward.fused_layers import fuse_layers
from pipeline.models.loading import use_gradient_checkpointing

CUDA = torch.device("cuda")
TOLERANCE = {"rtol": 1e-4, "atol": 1e-5}
EPS = 0.1  # large, so that a norm without it is another one


def random(*shape: int, seed: int = 0) -> torch.Tensor:
    generator = torch.Generator().manual_seed(sum(shape) + 1000 * seed)
    return torch.randn(shape, generator=generator).to(DEVICE)


@pytest.fixture
def small_runs(monkeypatch):
    """Several programs, of several rows each, on few rows."""
    monkeypatch.setattr(norm_kernels, "NORM_PROGRAMS_TIMES_WIDTH", 3 * 37)
    monkeypatch.setattr(norm_kernels, "RELU_PROGRAMS", 6)
    monkeypatch.setattr(norm_kernels, "RELU_ROWS", 4)


@pytest.fixture
def kernels_anywhere(monkeypatch):
    """The kernels also where there is no GPU, in triton's interpreter."""
    monkeypatch.setattr(fused_layers, "can_use_kernels", lambda *_: True)


def gradients_of(out: torch.Tensor, *inputs: torch.Tensor) -> tuple[torch.Tensor, ...]:
    """Return the gradients of a weighted sum with a different weight for each element."""
    return torch.autograd.grad((out * random(*out.shape, seed=9)).sum(), inputs)


def assert_close(actual: tuple[torch.Tensor, ...], expected: tuple[torch.Tensor, ...]) -> None:
    assert len(actual) == len(expected)
    for index, (one, other) in enumerate(zip(actual, expected, strict=True)):
        assert one.dtype == other.dtype
        torch.testing.assert_close(one, other, **TOLERANCE, msg=lambda text, index=index: f"{index}: {text}")


# --- norms ---


@pytest.mark.parametrize("shape", [(2, 4, 37), (1, 37), (11, 37), (5, 64)])
@pytest.mark.parametrize("affine", ["weight and bias", "weight", "neither"])
def test_layer_norm_is_torchs(shape, affine, small_runs):
    x = (random(*shape) + 0.7).requires_grad_()
    weight = None if affine == "neither" else (1 + random(shape[-1], seed=1)).requires_grad_()
    bias = random(shape[-1], seed=2).requires_grad_() if affine == "weight and bias" else None
    inputs = [tensor for tensor in (x, weight, bias) if tensor is not None]
    out, expected = (
        FusedNorm.apply(x, weight, bias, (EPS, False)),
        functional.layer_norm(x, x.shape[-1:], weight, bias, EPS),
    )
    torch.testing.assert_close(out, expected, **TOLERANCE)
    assert_close(gradients_of(out, *inputs), gradients_of(expected, *inputs))


@pytest.mark.parametrize("shape", [(2, 4, 37), (1, 37), (11, 64)])
def test_rms_norm_is_transformers(shape, small_runs):
    norm = LlamaRMSNorm(shape[-1], eps=EPS).to(DEVICE)
    norm.weight.data += random(shape[-1], seed=1)
    x = (random(*shape) + 0.7).requires_grad_()
    out, expected = FusedNorm.apply(x, norm.weight, None, (EPS, True)), norm(x)
    torch.testing.assert_close(out, expected, **TOLERANCE)
    assert_close(gradients_of(out, x, norm.weight), gradients_of(expected, x, norm.weight))


def test_norm_of_frozen_weights_and_of_no_row():
    x, weight, bias = random(3, 8).requires_grad_(), random(8, seed=1), random(8, seed=2)
    out = FusedNorm.apply(x, weight, bias, (EPS, False))
    (actual,) = gradients_of(out, x)
    (expected,) = gradients_of(functional.layer_norm(x, (8,), weight, bias, EPS), x)
    torch.testing.assert_close(actual, expected, **TOLERANCE)
    nothing = torch.zeros(0, 8, device=DEVICE, requires_grad=True)
    weight.requires_grad_()
    of_nothing = gradients_of(FusedNorm.apply(nothing, weight, bias, (EPS, False)), nothing, weight)
    assert of_nothing[0].shape == (0, 8) and not of_nothing[1].any()


def test_norm_of_a_view_that_is_not_contiguous():
    x = random(8, 6, seed=3).requires_grad_()
    out = FusedNorm.apply(x.t(), None, None, (EPS, False))
    expected = functional.layer_norm(x.t(), (8,), None, None, EPS)
    assert_close(gradients_of(out, x), gradients_of(expected, x))


# --- linear layers with a ReLU ---


@pytest.mark.parametrize(("rows", "width"), [(1, 5), (9, 64), (23, 70), (70, 130)])
def test_relu_linear_is_torchs(rows, width, small_runs):
    x, weight, bias = random(rows, 12), random(width, 12, seed=1), random(width, seed=2)
    inputs = [tensor.requires_grad_() for tensor in (x, weight, bias)]
    out, expected = FusedReluLinear.apply(*inputs), functional.relu(functional.linear(*inputs))
    torch.testing.assert_close(out, expected, **TOLERANCE)
    assert_close(gradients_of(out, *inputs), gradients_of(expected, *inputs))


def test_relu_passes_no_gradient_at_zero():
    """Torch's ReLU does not either."""
    x, weight, bias = torch.zeros(3, 4, device=DEVICE), random(5, 4), torch.zeros(5, device=DEVICE)
    inputs = [tensor.requires_grad_() for tensor in (x, weight, bias)]
    assert not any(gradient.any() for gradient in gradients_of(FusedReluLinear.apply(*inputs), *inputs))


def test_a_nan_passes_into_gradients():
    """Torch's ReLU passes it too: a check of gradients must see it."""
    gradient, bias_gradient = norm_kernels.relu_gradient(
        torch.ones(2, 3, device=DEVICE), torch.tensor([[1.0, 0.0, torch.nan], [0.0, 0.0, 1.0]], device=DEVICE)
    )
    assert gradient.tolist() == [[1, 0, 1], [0, 0, 1]] and bias_gradient.tolist() == [1, 0, 2]


def test_what_is_frozen_is_not_kept_for_the_backward_pass():
    x, weight, bias = random(6, 4).requires_grad_(), random(5, 4, seed=1), random(5, seed=2)
    kept: list[torch.Tensor] = []
    with torch.autograd.graph.saved_tensors_hooks(lambda tensor: (kept.append(tensor), tensor)[1], lambda one: one):
        out = FusedReluLinear.apply(x, weight, bias)
    assert [tuple(tensor.shape) for tensor in kept] == [(5, 4), (6, 5)]
    assert_close(gradients_of(out, x), gradients_of(functional.relu(functional.linear(x, weight, bias)), x))


def test_gradients_that_are_not_contiguous():
    """That of a sum is one number, stretched; that of a transposed result lies the other way round."""
    x, weight, bias, factors = (tensor.requires_grad_() for tensor in (
        random(6, 4), random(5, 4, seed=1), random(5, seed=2), random(5, 6, seed=3)))  # fmt: skip
    for total in (torch.sum, lambda out: (out.t() * factors).sum()):
        for fused, plain in (
            (FusedReluLinear.apply(x, weight, bias), functional.relu(functional.linear(x, weight, bias))),
            (FusedNorm.apply(random(6, 5) * bias, None, None, (EPS, False)),
             functional.layer_norm(random(6, 5) * bias, (5,), eps=EPS)),
        ):  # fmt: skip
            assert_close(torch.autograd.grad(total(fused), (bias,)), torch.autograd.grad(total(plain), (bias,)))


# --- models ---


def loss_and_gradients(model: nn.Module) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
    ids = torch.randint(3, 300, (3, 7), generator=torch.Generator().manual_seed(0)).to(DEVICE)
    model.train().zero_grad()
    loss = model(input_ids=ids, labels=ids, use_cache=False).loss
    loss.backward()
    return loss, {name: p.grad.clone() for name, p in model.named_parameters() if p.grad is not None}


def assert_same_training(make, number: int, *, change=lambda model: model) -> None:
    """A fused model has the loss, the gradients and the names of the model as it was; `number` layers are fused."""
    plain, fused = change(make()).to(DEVICE), change(make()).to(DEVICE)
    fused.load_state_dict(plain.state_dict())
    assert fuse_layers(fused, CUDA) == number
    assert list(fused.state_dict()) == list(plain.state_dict())
    (loss, gradients), (expected_loss, expected) = loss_and_gradients(fused), loss_and_gradients(plain)
    torch.testing.assert_close(loss, expected_loss, **TOLERANCE)
    assert gradients.keys() == expected.keys() and len(expected) >= 2
    for name, gradient in expected.items():
        torch.testing.assert_close(
            gradients[name], gradient, **TOLERANCE, msg=lambda text, name=name: f"{name}: {text}"
        )


# Of two layers: norms, ReLUs, and the last norm; then gates and attention layers.
FUSABLE = {
    "opt": 2 * 2 + 2 + 1,
    "opt-350m": 2 * 2 + 2,
    "opt without biases": 2 * 2 + 1,
    "opt without a last norm": 2 * 2 + 2,
    "llama": 2 * 2 + 1 + 2 * 2,
    "mistral": 2 * 2 + 1 + 2 * 2,
    "qwen2": 2 * 2 + 1 + 2 * 2,
    "qwen3": 2 * 4 + 1 + 2 * 2,
    "gemma": 2 * 2,
}
FUSABLE_TOO = {
    "smollm3": 2 * 2 + 1 + 2 * 2,
    "gemma-3": 2 * 2,
    "phi-3": 2 * 2 + 1 + 2,
    "phi-4-mini": 2 * 2 + 1 + 2,
    "pythia": 2 * 2 + 1,
}


@pytest.mark.few(6)
@pytest.mark.parametrize("taken", [True, False])
@pytest.mark.parametrize("name", [*FUSABLE, *(pytest.param(name, marks=pytest.mark.slow) for name in FUSABLE_TOO)])
def test_fused_models_train_as_before(monkeypatch, name, taken):
    """Models train by the kernels, and by torch where inputs are too small for them."""
    monkeypatch.setattr(fused_layers, "can_use_kernels", lambda *_: taken)
    assert_same_training(FUSED[name], (FUSABLE | FUSABLE_TOO)[name])


@pytest.mark.parametrize("name", ["opt", "llama"])
def test_a_fused_model_is_not_fused_again(name):
    model = FUSED[name]()
    assert fuse_layers(model, CUDA) == FUSABLE[name] and fuse_layers(model, CUDA) == 0
    norms = {type(module) for module in model.modules() if isinstance(module, fused_layers.RMSNorm)}
    assert len(norms) == (name == "llama")


def test_another_activation_stays(kernels_anywhere):
    assert_same_training(lambda: opt(activation_function="gelu"), 2 * 2 + 1)


@pytest.mark.few(1)
@pytest.mark.parametrize("name", ["opt", "qwen2"])
def test_activations_may_be_made_again(kernels_anywhere, name):
    def checkpointed(model: nn.Module) -> nn.Module:
        use_gradient_checkpointing(model)
        return model

    assert_same_training(FUSED[name], FUSABLE[name], change=checkpointed)


def test_an_adapter_stands_before_the_relu(kernels_anywhere):
    """So that the two are not fused; the layers without one are, and the linear layer with its adapter."""

    def adapted(model: nn.Module) -> nn.Module:
        torch.manual_seed(0)
        config = LoraConfig(r=2, target_modules=r".*layers\.0\.fc1", init_lora_weights=False)
        return get_peft_model(model, config)  # type: ignore[arg-type]

    assert_same_training(opt, 7, change=adapted)


def test_a_cpu_computes_as_before():
    model = opt()
    kinds = [type(module) for module in model.modules()]
    assert fuse_layers(model, torch.device("cpu")) == 0 and kinds == [type(module) for module in model.modules()]


def test_where_the_kernels_serve(monkeypatch):
    """On a GPU, where types agree and there is enough to do: small inputs cost the host more than the device gains."""
    large, dtype = fused_layers.MIN_ELEMENTS + 1, torch.bfloat16
    x: Any = SimpleNamespace(is_cuda=True, dtype=dtype)
    assert fused_layers.can_use_kernels(x, large, torch.zeros(4, dtype=dtype), None)
    assert not fused_layers.can_use_kernels(x, large, torch.zeros(4)), "a fp32 weight under 16-bit inputs"
    assert not fused_layers.can_use_kernels(x, fused_layers.MIN_ELEMENTS, None)
    assert not fused_layers.can_use_kernels(torch.zeros(2, 4), large, None), "on a CPU"
    monkeypatch.setattr(torch, "is_autocast_enabled", lambda device: device == "cuda")
    assert not fused_layers.can_use_kernels(x, large, None), "torch chooses types itself"


def test_each_layer_says_how_much_it_gives(monkeypatch):
    asked = []
    monkeypatch.setattr(fused_layers, "can_use_kernels", lambda x, size, *_: bool(asked.append(size)))
    model = opt().to(DEVICE)
    fuse_layers(model, CUDA)
    model(input_ids=torch.full((3, 7), 5, device=DEVICE), use_cache=False)
    norm, relu = 3 * 7 * 32, 3 * 7 * 48
    assert asked == [norm, norm, relu] * 2 + [norm]
    asked.clear()
    llama = FUSED["llama"]().to(DEVICE)
    fuse_layers(llama, CUDA)
    llama(input_ids=torch.full((3, 7), 5, device=DEVICE), use_cache=False)
    query, gate = 3 * 7 * 32, 3 * 7 * 40
    assert asked == [norm, query, norm, gate] * 2 + [norm]
