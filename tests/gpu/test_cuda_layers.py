"""Fused layers in bf16, compiled: as near to fp32 as torch's and peft's own, alone and in a model."""

import pytest
import torch
from support.decode_models import FUSED, opt, with_lora
from torch.nn import functional

from pipeline.kernels import fused_layers
from pipeline.kernels.fused_layers import LoraLinear, fuse_layers
from pipeline.kernels.int8_linear import dequantise_rows, quantise_rows
from pipeline.kernels.lora_linear import AdaptedLinear, Frozen
from pipeline.kernels.norm_kernels import FusedNorm, FusedReluLinear

pytestmark = pytest.mark.gpu

CUDA = torch.device("cuda")


@pytest.fixture(autouse=True)
def also_small_inputs(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(fused_layers, "MIN_ELEMENTS", 0)


def random(*shape: int) -> torch.Tensor:
    return torch.randn(shape, device=CUDA)


def gradients_of(compute, tensors: list[torch.Tensor], weights: torch.Tensor, dtype: torch.dtype) -> list[torch.Tensor]:
    leaves = [tensor.to(dtype).requires_grad_() for tensor in tensors]
    return list(torch.autograd.grad((compute(*leaves) * weights).sum(), leaves))


def assert_as_near(actual: torch.Tensor, usual: torch.Tensor, right: torch.Tensor, what: object) -> None:
    """`found` errs from `right` no more than torch's `usual` does; a twentieth more is noise."""
    error, allowed = ((one.float() - right).norm() / right.norm() for one in (actual, usual))
    assert error <= 1.05 * allowed + 1e-4, (what, error, allowed)


def rms_norm(x, weight):
    """Compute Llama's norm by torch."""
    return functional.rms_norm(x, (x.shape[-1],), weight, 1e-5)


@pytest.mark.parametrize("width", [64, 1024, 2048, 5120])
@pytest.mark.parametrize("kind", ["layer norm", "rms norm", "relu"])
def test_gradients_in_bf16(kind, width):
    torch.manual_seed(width)
    x = (random(1500, width) + 0.5).bfloat16().float()
    if kind == "layer norm":
        pair = (lambda x, w, b: FusedNorm.apply(x, w, b, (1e-5, False)),
                lambda x, w, b: functional.layer_norm(x, (width,), w, b))  # fmt: skip
        tensors, outputs = [x, 1 + random(width), random(width)], width
    elif kind == "rms norm":
        pair, tensors, outputs = (
            (lambda x, w: FusedNorm.apply(x, w, None, (1e-5, True)), rms_norm),
            [x, 1 + random(width)],
            width,
        )
    else:
        pair = (FusedReluLinear.apply, lambda *p: functional.relu(functional.linear(*p)))
        tensors, outputs = [x, random(192, width) / width**0.5, random(192)], 192
    tensors = [tensor.bfloat16().float() for tensor in tensors]
    weights = random(1500, outputs).bfloat16().float()
    exact = gradients_of(pair[1], tensors, weights, torch.float32)
    fused, plain = (gradients_of(one, tensors, weights.bfloat16(), torch.bfloat16) for one in pair)
    for index, right in enumerate(exact):
        assert_as_near(fused[index], plain[index], right, (kind, index))


@pytest.mark.parametrize("width", [256, 5120])
@pytest.mark.parametrize("base", ["weight", "transposed", "int8"])
def test_lora_in_bf16(base, width):
    """Outputs and gradients against torch's operations in peft's order; the weight is the same in all three."""
    torch.manual_seed(width)
    rows, rank, scaling = 1500, 64, 0.25
    weight, bias = (random(192, width) / width**0.5).bfloat16(), random(192).bfloat16()
    codes, scale = quantise_rows(weight) if base == "int8" else (weight, None)
    if scale is not None:
        weight = dequantise_rows(codes, scale, torch.bfloat16)
    elif base == "transposed":
        codes = weight.t().contiguous().t()

    def fused(x, a, b):
        return AdaptedLinear.apply(x, Frozen(codes, scale, bias, scaling), a, b)

    def plain(x, a, b):
        return (
            functional.linear(x, weight.to(x.dtype), bias.to(x.dtype))
            + functional.linear(functional.linear(x, a), b) * scaling
        )

    tensors = [random(3, rows // 3, width), random(rank, width) / width**0.5, random(192, rank)]
    tensors = [tensor.bfloat16().float() for tensor in tensors]
    weights = random(3, rows // 3, 192).bfloat16().float()
    exact = [plain(*tensors), *gradients_of(plain, tensors, weights, torch.float32)]
    found, usual = (
        [one(*(t.bfloat16() for t in tensors)), *gradients_of(one, tensors, weights.bfloat16(), torch.bfloat16)]
        for one in (fused, plain)
    )
    for index, right in enumerate(exact):
        assert found[index].dtype == torch.bfloat16
        assert_as_near(found[index], usual[index], right, (base, index))


@pytest.mark.parametrize("name", ["opt", "llama", "llama int8", "gpt2"])
def test_lora_models_in_bf16(name):
    """The mean of the logarithms of the gradients' errors, some of which are 20 times others; a tenth more is noise."""
    batches = torch.randint(3, 300, (8, 16, 48), generator=torch.Generator().manual_seed(0)).to(CUDA)

    def gradients(model: torch.nn.Module) -> list[torch.Tensor]:
        found = []
        for ids in batches:
            model.zero_grad()
            model(input_ids=ids, labels=ids, use_cache=False).loss.backward()
            found += [p.grad.float() for p in model.parameters() if p.grad is not None]
        return found

    kind, _, int8 = name.partition(" ")
    exact, plain, fused = (with_lora(FUSED[kind](), int8=bool(int8), alpha=0.3).to(CUDA) for _ in range(3))
    exact.load_state_dict(exact.bfloat16().state_dict())
    exact, plain, fused = exact.float(), plain.bfloat16(), fused.bfloat16()
    for model in (plain, fused):
        fuse_layers(model, CUDA)
    layers = [module for module in plain.modules() if isinstance(module, LoraLinear)]
    assert len(layers) >= 8
    for layer in layers:
        layer.__class__ = fused_layers.PeftLinear
    found, usual, right = map(gradients, (fused, plain, exact))
    assert not all(one.equal(other) for one, other in zip(found, usual, strict=True)), "peft's own layers round so"
    error, allowed = (
        torch.stack([(one - best).norm() / best.norm() for one, best in zip(them, right, strict=True)]).log().mean()
        for them in (found, usual)
    )
    assert error <= allowed + 0.1 and allowed < -2, (name, error.exp(), allowed.exp())


@pytest.mark.parametrize("name", ["opt", "opt-350m", "llama", "qwen3"])
def test_models_in_bf16(name):
    """All gradients of a model together: those of single biases are noise (keys have none but for rounding)."""
    ids = torch.randint(3, 300, (16, 48), generator=torch.Generator().manual_seed(0)).to(CUDA)

    def gradients(model: torch.nn.Module) -> torch.Tensor:
        model(input_ids=ids, labels=ids, use_cache=False).loss.backward()
        return torch.cat([p.grad.float().flatten() for p in model.parameters() if p.grad is not None])

    exact, plain, fused = (FUSED[name]().to(CUDA) for _ in range(3))
    exact.load_state_dict(exact.bfloat16().state_dict())
    assert fuse_layers(fused, CUDA) > 0
    assert_as_near(gradients(fused.bfloat16()), gradients(plain.bfloat16()), gradients(exact.float()), name)


def test_a_step_without_gradients_is_captured_in_a_graph():
    """The static backend captures the forward pass of transformers in a CUDA graph."""
    model = opt().to(CUDA)
    ids = torch.randint(3, 300, (4, 9), device=CUDA)
    fuse_layers(model, CUDA)
    with torch.no_grad():
        side = torch.cuda.Stream()
        side.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(side):
            wanted = model(input_ids=ids, use_cache=False).logits
        torch.cuda.current_stream().wait_stream(side)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            actual = model(input_ids=ids, use_cache=False).logits
        actual.zero_()
        graph.replay()
    torch.testing.assert_close(actual, wanted)
