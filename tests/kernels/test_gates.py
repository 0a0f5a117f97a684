"""Gates and rotary positions in one kernel against torch's and transformers' own: values, gradients, what is kept.

On a CPU the Triton kernels run in triton's interpreter; tests/gpu compares 16 bits.
"""

import functools

import pytest
import torch
from support.decode_models import DEVICE, FUSED, llama, with_lora
from torch.nn import functional
from transformers.models.llama import modeling_llama

from pipeline.kernels import gate_kernels
from pipeline.kernels.gate_kernels import FusedGate, FusedRotary
from pipeline.models.forward import fused_layers
from pipeline.models.forward.fused_layers import fuse_layers, rotate_positions

CUDA = torch.device("cuda")
TOLERANCE = {"rtol": 1e-5, "atol": 1e-5}
ACTIVATIONS = {"silu": functional.silu, "gelu_tanh": lambda x: functional.gelu(x, approximate="tanh")}


def random(*shape: int, seed: int = 0) -> torch.Tensor:
    generator = torch.Generator().manual_seed(sum(shape) + 1000 * seed)
    return torch.randn(shape, generator=generator).to(DEVICE)


def gradients_of(outs, *inputs: torch.Tensor) -> tuple[torch.Tensor, ...]:
    """Return the gradients of a weighted sum with a different weight for each element of each output."""
    total = sum((out * random(*out.shape, seed=9 + n).to(out.dtype)).sum() for n, out in enumerate(outs))
    return torch.autograd.grad(total, inputs, retain_graph=True)


# --- gates ---


@pytest.mark.parametrize("shape", [(5,), (2, 3, 7), (4, 40)])
@pytest.mark.parametrize("activation", ACTIVATIONS)
def test_gate_is_torchs(monkeypatch, shape, activation):
    """In fp32, and as near to fp64: several programs, the last one in part."""
    monkeypatch.setattr(gate_kernels, "GATE_BLOCK", 16)
    gate, up = (2 * random(*shape)).requires_grad_(), random(*shape, seed=1).requires_grad_()
    out = FusedGate.apply(gate, up, activation)
    gradients = gradients_of([out], gate, up)
    for dtype in (torch.float32, torch.float64):
        inputs = [x.detach().to(dtype).requires_grad_() for x in (gate, up)]
        expected = ACTIVATIONS[activation](inputs[0]) * inputs[1]
        for found, wanted in zip((out, *gradients), (expected, *gradients_of([expected], *inputs)), strict=True):
            torch.testing.assert_close(found, wanted.float(), **TOLERANCE)


@pytest.mark.filterwarnings("ignore:overflow encountered in exp")  # numpy's, under the interpreter
def test_gate_of_extreme_numbers_and_of_none():
    """A sigmoid that is 0 or 1, and a NaN, which is to be seen in gradients."""
    values = [-200.0, -90.0, 0.0, 90.0, 200.0, torch.nan]
    gate, up = torch.tensor(values, device=DEVICE, requires_grad=True), torch.full((6,), 2.0, device=DEVICE)
    up.requires_grad_()
    out, expected = FusedGate.apply(gate, up, "silu"), functional.silu(gate) * up
    torch.testing.assert_close(out, expected, equal_nan=True)
    for found, wanted in zip(gradients_of([out], gate, up), gradients_of([expected], gate, up), strict=True):
        torch.testing.assert_close(found, wanted, equal_nan=True)
    nothing = torch.zeros(0, 8, device=DEVICE, requires_grad=True)
    assert [x.shape for x in gradients_of([FusedGate.apply(nothing, nothing, "silu")], nothing)] == [(0, 8)]


def test_the_activation_is_rounded_before_its_product():
    """As torch rounds in 16 bits; a sigmoid that differs in fp32's last bit is seldom rounded otherwise."""
    gate, up = (random(64, 40, seed=seed).half() for seed in (1, 2))
    active, found = functional.silu(gate.float()), FusedGate.apply(gate, up, "silu")
    once, twice = ((x.float() * up.float()).half() for x in (active, active.half()))
    assert (found == twice).float().mean() > 0.995 and (found == once).float().mean() < 0.8


def test_inputs_that_are_not_contiguous():
    joined, factors = random(6, 8).requires_grad_(), random(4, 6, seed=3)
    for total in (torch.sum, lambda out: (out.t() * factors).sum()):
        found = torch.autograd.grad(total(FusedGate.apply(*joined.chunk(2, -1), "silu")), joined)
        wanted = torch.autograd.grad(total(functional.silu(joined[:, :4]) * joined[:, 4:]), joined)
        torch.testing.assert_close(found, wanted, **TOLERANCE)


def test_a_gate_keeps_its_inputs_alone():
    """Torch keeps the activation too."""
    gate, up = random(6, 4).requires_grad_(), random(6, 4, seed=1).requires_grad_()
    out = FusedGate.apply(gate, up, "silu")  # torch 2.11 frees what is saved with the output
    saved = out.grad_fn.saved_tensors
    assert len(saved) == 2 and saved[0] is gate and saved[1] is up


# --- rotary positions ---


def heads_of(rows: int, length: int, heads: int, size: int, seed: int) -> torch.Tensor:
    """(B, H, S, D) as a projection gives them: heads of a token lie side by side."""
    return random(rows, length, heads * size, seed=seed).view(rows, length, heads, size).transpose(1, 2)


def angles(rows: int, length: int, size: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Cos and sin (B, S, D) of other positions in each row."""
    turns = torch.cat(2 * [3 * random(rows, length, size // 2, seed=5)], -1)
    return turns.cos(), turns.sin()


@pytest.mark.parametrize(
    ("rows", "length", "heads", "kv_heads", "size", "tables"),
    [(2, 3, 4, 2, 8, 2), (2, 3, 4, 2, 8, 1), (1, 5, 3, 1, 20, 1), (3, 1, 2, 2, 2, 3)],
)
def test_rotation_is_transformers(rows, length, heads, kv_heads, size, tables):
    q, k = (heads_of(rows, length, n, size, seed=n).requires_grad_() for n in (heads, kv_heads))
    cos, sin = angles(tables, length, size)
    found = FusedRotary.apply(q, k, cos, sin)
    wanted = modeling_llama.apply_rotary_pos_emb(q, k, cos, sin)
    for pair in ((found, wanted), (gradients_of(found, q, k), gradients_of(wanted, q, k))):
        for one, other in zip(*pair, strict=True):
            torch.testing.assert_close(one, other, **TOLERANCE)
            assert one.stride() == q.stride() or one.shape != q.shape or length == 1
    double = gradients_of(modeling_llama.apply_rotary_pos_emb(*(x.double() for x in (q, k, cos, sin))), q, k)
    torch.testing.assert_close(gradients_of(found, q, k), double, **TOLERANCE)


def test_rotation_of_any_layout():
    """Slices of a joint projection, contiguous heads, transposed channels, and a gradient that is one number."""
    joint = random(2, 3, 8 * 4).requires_grad_()
    cos, sin = angles(1, 3, 4)

    def rotated(rotate) -> torch.Tensor:
        q, k, _ = joint.split([4 * 4, 2 * 4, 2 * 4], -1)
        q, k = (x.unflatten(-1, (-1, 4)).transpose(1, 2) for x in (q, k))
        outs = (*rotate(q, k, cos, sin), *rotate(q.contiguous(), k.mT.contiguous().mT, cos, sin))
        return torch.cat([out.sum(dim=(0, 2, 3)) for out in outs] + [outs[0].square().flatten()])

    found, wanted = rotated(FusedRotary.apply), rotated(modeling_llama.apply_rotary_pos_emb)
    torch.testing.assert_close(found, wanted, **TOLERANCE)
    torch.testing.assert_close(gradients_of([found], joint), gradients_of([wanted], joint), **TOLERANCE)


def test_rotation_keeps_the_angles_alone():
    q, k = (heads_of(1, 3, n, 4, seed=n).requires_grad_() for n in (2, 1))
    cos, sin = angles(1, 3, 4)
    rotated, _ = FusedRotary.apply(q, k, cos, sin)  # torch 2.11 frees what is saved with the output
    saved = rotated.grad_fn.saved_tensors
    assert saved[0] is cos and saved[1] is sin and len(saved) == 2


def test_a_part_of_each_head_is_left_to_transformers(monkeypatch):
    monkeypatch.setattr(fused_layers, "can_use_kernels", lambda *_: True)
    asked = []
    pair = (random(1, 2, 3, 8), random(1, 1, 3, 8))
    rotate_positions(lambda *given, **_: asked.append(given), *pair, *angles(1, 3, 4))
    rotate_positions(lambda *given, **_: asked.append(given), *pair, *angles(1, 3, 8), unsqueeze_dim=2)
    assert len(asked) == 2
    found = rotate_positions(lambda *_: asked.append(1), *pair, *angles(1, 3, 8))
    assert len(asked) == 2 and [x.shape for x in found] == [x.shape for x in pair]


# --- models ---


def test_other_models_keep_transformers_function(monkeypatch):
    """A fused attention layer has names of its own; its class has the code of transformers'."""
    before = modeling_llama.apply_rotary_pos_emb
    fused, other = llama(), llama()
    fuse_layers(fused, CUDA)
    asked = []
    monkeypatch.setattr(fused_layers, "can_use_kernels", lambda *given: bool(asked.append(given)))
    ids = torch.full((1, 3), 5, device=DEVICE)
    wanted = other(input_ids=ids, use_cache=False).logits
    assert not asked and modeling_llama.apply_rotary_pos_emb is before
    assert fused(input_ids=ids, use_cache=False).logits.equal(wanted) and asked
    attention = fused.model.layers[0].self_attn
    assert type(attention).__name__ == "LlamaAttention" and isinstance(attention, modeling_llama.LlamaAttention)


def test_positions_are_fused_below_a_decorator(monkeypatch):
    """transformers 5.24 wraps the forward pass of attention layers: its own globals do not hold the function."""
    before = modeling_llama.LlamaAttention.forward
    while hasattr(before, "__wrapped__"):
        before = before.__wrapped__

    @functools.wraps(before)
    def decorated(*args, **kwargs):
        return before(*args, **kwargs)

    monkeypatch.setattr(modeling_llama.LlamaAttention, "forward", decorated)
    fused, other = llama(), llama()
    # Norms, MLPs and attention of two layers, and the last norm.
    assert fuse_layers(fused, CUDA) == 2 * 4 + 1 and fuse_layers(fused, CUDA) == 0
    asked = []
    monkeypatch.setattr(fused_layers, "can_use_kernels", lambda *given: bool(asked.append(given)))
    ids = torch.full((1, 3), 5, device=DEVICE)
    assert fused(input_ids=ids, use_cache=False).logits.equal(other(input_ids=ids, use_cache=False).logits) and asked


def test_an_unknown_activation_stays():
    model = llama(hidden_act="tanh")
    assert fuse_layers(model, CUDA) == 2 * 2 + 1 + 2


@pytest.mark.parametrize("name", ["llama", "qwen3"])
def test_adapters_inside_a_gate_go_on(monkeypatch, name):
    """LoRA on all linear layers, among them those around the gate: all gradients are as before."""
    monkeypatch.setattr(fused_layers, "can_use_kernels", lambda *_: True)
    ids = torch.randint(3, 300, (2, 6), generator=torch.Generator().manual_seed(0)).to(DEVICE)

    def gradients(model: torch.nn.Module) -> dict[str, torch.Tensor]:
        model(input_ids=ids, labels=ids, use_cache=False).loss.backward()
        return {name: p.grad for name, p in model.named_parameters() if p.grad is not None}

    plain, fused = (with_lora(FUSED[name]()).to(DEVICE) for _ in range(2))
    adapted = 2 * 7  # linear layers
    assert fuse_layers(fused, CUDA) == (2 * 2 + 1 if name == "llama" else 2 * 4 + 1) + 2 * 2 + adapted
    found, wanted = gradients(fused), gradients(plain)
    assert found.keys() == wanted.keys() and any("gate_proj.lora_A" in name for name in wanted)
    for key, gradient in wanted.items():
        torch.testing.assert_close(
            found[key], gradient, rtol=1e-4, atol=1e-5, msg=lambda text, key=key: f"{key}: {text}"
        )
