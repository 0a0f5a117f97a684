"""Fused layers in bf16, compiled: as near to fp32 as torch's and peft's own, alone and in a model."""

import pytest
import torch
from support.decode_models import FUSED, opt, with_lora
from support.families import family_config
from torch.nn import functional
from transformers import AutoModelForCausalLM
from transformers.models.llama.modeling_llama import apply_rotary_pos_emb

from pipeline.kernels.gate_kernels import FusedGate, FusedRotary
from pipeline.kernels.int8_linear import dequantise_rows, quantise_rows
from pipeline.kernels.lora_linear import AdaptedLinear, Frozen
from pipeline.kernels.norm_kernels import FusedNorm, FusedReluLinear
from pipeline.models.forward import fused_layers
from pipeline.models.forward.fused_layers import LoraLinear, fuse_layers
from pipeline.models.loading import use_gradient_checkpointing

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


@pytest.mark.parametrize("shape", [(3, 500, 1000), (1, 1, 5), (1024, 8960)])
@pytest.mark.parametrize("activation", ["silu", "gelu_tanh"])
def test_gates_in_bf16(activation, shape):
    """Output and both gradients; the output is torch's own but for a few numbers."""
    torch.manual_seed(0)
    gate, up, weights = (random(*shape).bfloat16().float() for _ in range(3))

    def plain(gate, up):
        return (functional.silu(gate) if activation == "silu" else functional.gelu(gate, approximate="tanh")) * up

    def fused(gate, up):
        return FusedGate.apply(gate, up, activation)

    outputs = [compute(gate.bfloat16(), up.bfloat16()) for compute in (fused, plain)]
    assert (outputs[0] == outputs[1]).float().mean() > 0.99
    assert_as_near(*outputs, plain(gate, up), "output")
    exact = gradients_of(plain, [gate, up], weights, torch.float32)
    found, usual = (gradients_of(one, [gate, up], weights.bfloat16(), torch.bfloat16) for one in (fused, plain))
    for index, right in enumerate(exact):
        assert_as_near(found[index], usual[index], right, index)


@pytest.mark.parametrize("joint", [False, True])
@pytest.mark.parametrize(
    ("heads", "kv_heads", "size"), [(12, 2, 128), (32, 8, 128), (3, 1, 80), (9, 3, 64), (8, 1, 256), (5, 5, 20)]
)
def test_rotations_in_bf16(heads, kv_heads, size, joint):
    """Output and both gradients, of projections of their own or of slices of one; angles of each row or of all."""
    torch.manual_seed(size)
    rows, length = 3, 300
    q, k = (random(rows, length, n, size).bfloat16().float() for n in (heads, kv_heads))
    turns = torch.cat(2 * [1000 * random(1 if joint else rows, length, size // 2)], -1)
    cos, sin = turns.cos().bfloat16(), turns.sin().bfloat16()

    def both(rotate):
        def compute(q, k):
            if joint:
                q, k = torch.cat([q, k, k], 2).split([heads, kv_heads, kv_heads], 2)[:2]
            rotated = rotate(q.transpose(1, 2), k.transpose(1, 2), cos.to(q.dtype), sin.to(q.dtype))
            return torch.cat([x.transpose(1, 2) for x in rotated], 2)

        return compute

    fused, plain = both(FusedRotary.apply), both(apply_rotary_pos_emb)
    assert_as_near(*(one(q.bfloat16(), k.bfloat16()) for one in (fused, plain)), plain(q, k), "output")
    weights = random(rows, length, heads + kv_heads, size).bfloat16().float()
    exact = gradients_of(plain, [q, k], weights, torch.float32)
    found, usual = (gradients_of(one, [q, k], weights.bfloat16(), torch.bfloat16) for one in (fused, plain))
    for index, right in enumerate(exact):
        assert_as_near(found[index], usual[index], right, index)


@pytest.mark.parametrize("change", ["whole", "checkpointed", "lora"])
@pytest.mark.parametrize("name", ["llama-3", "qwen2", "qwen3", "gemma", "phi-3"])
def test_gated_models_in_bf16(name, change):
    """Log-probabilities and all gradients together: as they are, with activations made again, and of adapters."""
    ids = torch.randint(3, 300, (16, 48), generator=torch.Generator().manual_seed(0)).to(CUDA)
    heads = {"num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 64}
    config = family_config(name, 301, hidden_size=256, intermediate_size=512, **heads)

    def make(*, fused: bool, dtype: torch.dtype) -> torch.nn.Module:
        torch.manual_seed(0)
        model = AutoModelForCausalLM.from_config(config)
        if change == "lora":
            model = with_lora(model, dim=16)
            for key, parameter in model.named_parameters():
                if "lora_" in key:
                    torch.nn.init.normal_(parameter, std=0.02)
        model = model.bfloat16().to(CUDA, dtype).train()
        assert not fused or fuse_layers(model, CUDA) > 0
        if change == "checkpointed":
            use_gradient_checkpointing(model)
        return model

    def outcome(**kind) -> tuple[torch.Tensor, torch.Tensor]:
        model = make(**kind)
        log_probs = model(input_ids=ids, use_cache=False).logits.float().log_softmax(-1)
        log_probs[:, :-1].gather(-1, ids[:, 1:, None]).mean().neg().backward()
        gradients = [p.grad.float().flatten() for p in model.parameters() if p.grad is not None]
        return log_probs.detach(), torch.cat(gradients)

    exact = outcome(fused=False, dtype=torch.float32)
    found, usual = (outcome(fused=fused, dtype=torch.bfloat16) for fused in (True, False))
    for part, one, other, right in zip(("output", "gradients"), found, usual, exact, strict=True):
        assert_as_near(one, other, right, (name, part))


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
