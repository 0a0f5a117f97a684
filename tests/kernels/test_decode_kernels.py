"""The other kernels of a decode step against plain torch: norms, rotary positions, the gate, split-K products."""

import pytest
import torch
from support.decode_models import DEVICE, SIXTEEN_BITS
from torch import Tensor
from torch.nn import functional
from transformers import LlamaConfig
from transformers.models.llama.modeling_llama import LlamaRotaryEmbedding, apply_rotary_pos_emb

from pipeline.generation.forwards.fused import add_branch, rotary_table
from pipeline.kernels import split_matmul as split_matmul_module
from pipeline.kernels.decode_layers import Branch, NormWeights, add_norm, gated, rotate
from pipeline.kernels.int8_linear import dequantise_rows, quantise_rows
from pipeline.kernels.split_kv import HeadLayout
from pipeline.kernels.split_matmul import int8_matmul, split_matmul

EPS = 1e-3  # large, so that a norm without it is another one
TOLERANCE = {"rtol": 1e-5, "atol": 1e-5}


def random(*shape: int, seed: int = 0, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    generator = torch.Generator().manual_seed(sum(shape) + 1000 * seed)
    return torch.randn(shape, generator=generator).to(DEVICE, dtype)


# --- residual and norm ---


def plain_norm(x: torch.Tensor, norm: NormWeights) -> torch.Tensor:
    if norm.rms:
        normed = x * (x.square().mean(-1, keepdim=True) + norm.eps).rsqrt()
        return normed if norm.weight is None else normed * norm.weight
    return functional.layer_norm(x, x.shape[-1:], norm.weight, norm.bias, norm.eps)


def norm_of(kind: str, width: int) -> NormWeights:
    """Such as "layer weight bias" or "rms"."""
    weight = 1 + random(width, seed=1) if "weight" in kind else None
    bias = random(width, seed=2) if "bias" in kind else None
    return NormWeights(weight, bias, EPS, rms=kind.startswith("rms"))


def branch_of(kind: str | None, rows: int, width: int) -> Branch | None:
    """None; "whole" (M, H); or "parts" (S, M, H); with a bias where it says so."""
    if kind is None:
        return None
    values = random(5, rows, width, seed=3) if "parts" in kind else random(rows, width, seed=3)
    return Branch(values, random(width, seed=4) if "bias" in kind else None)


@pytest.mark.parametrize("kind", ["layer", "layer weight", "layer weight bias", "rms", "rms weight"])
@pytest.mark.parametrize("branch", [None, "whole", "whole bias", "parts", "parts bias"])
def test_residual_and_norm(kind, branch):
    rows, width = 3, 37
    norm, added = norm_of(kind, width), branch_of(branch, rows, width)
    residual = random(rows, width) + 0.5
    total = residual.clone()
    if added is not None:
        total += added.values.sum(0) if added.values.dim() == 3 else added.values
        total += 0 if added.bias is None else added.bias
    out = torch.empty_like(residual)
    before = residual.clone()
    add_norm(residual, added, norm, keep_sum=False, out=out)
    torch.testing.assert_close(out, plain_norm(total, norm), **TOLERANCE)
    assert torch.equal(residual, before)
    out.zero_()
    add_norm(residual, added, norm, keep_sum=True, out=out)
    torch.testing.assert_close(out, plain_norm(total, norm), **TOLERANCE)
    torch.testing.assert_close(residual, total, **TOLERANCE)


@pytest.mark.parametrize("width", [1, 2, 32, 33, 2048, 2050])
def test_norms_of_any_width(width):
    norm = norm_of("layer weight bias", width)
    x = random(2, width) * 3 + 1
    out = torch.empty_like(x)
    add_norm(x, None, norm, keep_sum=False, out=out)
    torch.testing.assert_close(out, plain_norm(x, norm), rtol=1e-4, atol=1e-4)


def test_the_norm_may_replace_the_residual():
    """OPT-350m continues with the normed values."""
    norm, added = norm_of("layer weight bias", 20), branch_of("parts bias", 3, 20)
    residual = random(3, 20)
    expected = plain_norm(residual + added.values.sum(0) + added.bias, norm)
    add_norm(residual, added, norm, keep_sum=False, out=residual)
    torch.testing.assert_close(residual, expected, **TOLERANCE)


@pytest.mark.parametrize("kind", ["layer weight bias", "rms weight"])
def test_the_sum_is_rounded_once_and_normed_as_it_is_kept(kind):
    """Summands of 16 bits are added in fp32, and the norm reads the residual as the next layer will."""
    norm = norm_of(kind, 40)
    norm = NormWeights(
        norm.weight.to(SIXTEEN_BITS), None if norm.bias is None else norm.bias.to(SIXTEEN_BITS), EPS, norm.rms
    )
    residual, added = random(3, 40, dtype=SIXTEEN_BITS), Branch(random(4, 3, 40, seed=3))
    total = (residual.float() + added.values.sum(0)).to(SIXTEEN_BITS)
    out = torch.empty_like(residual)
    add_norm(residual, added, norm, keep_sum=True, out=out)
    assert torch.equal(residual, total)
    wide = NormWeights(norm.weight.float(), None if norm.bias is None else norm.bias.float(), EPS, norm.rms)
    torch.testing.assert_close(out.float(), plain_norm(total.float(), wide), rtol=1e-2, atol=1e-2)


# --- rotary positions ---

LENGTHS = [0, 1, 5, 9]


def rotary_of(head_dim: int) -> LlamaRotaryEmbedding:
    config = LlamaConfig(hidden_size=4 * head_dim, num_attention_heads=4, head_dim=head_dim)
    return LlamaRotaryEmbedding(config).to(DEVICE)


@pytest.mark.parametrize("head_dim", [2, 16, 20, 24])
@pytest.mark.parametrize(("offsets", "heads"), [((0, 3, 4), (3, 1)), ((4, 2, 0), (2, 2))])
@pytest.mark.parametrize("normed", [False, True])
def test_rotation_is_transformers_own(head_dim, offsets, heads, normed):
    """q and k in place, after their norms where a model has them; v is left alone."""
    q, k, v = (offset * head_dim for offset in offsets)
    layout = HeadLayout(*heads, head_dim, q, k, v, 1.0)
    qkv = random(len(LENGTHS), (heads[0] + 2 * heads[1]) * head_dim)
    before = qkv.clone()
    norms = tuple(NormWeights(1 + random(head_dim, seed=seed), None, EPS, True) for seed in (5, 6)) if normed else None
    rotary = rotary_of(head_dim)
    ids = torch.tensor(LENGTHS, device=DEVICE)
    cos, sin = rotary(qkv, ids[None])
    table = rotary_table(rotary, 10, qkv)
    rotate(qkv, table, lengths=ids.int(), layout=layout, norms=norms)
    parts = []
    for number, (offset, count) in enumerate(((q, heads[0]), (k, heads[1]))):
        part = before[:, offset : offset + count * head_dim].unflatten(1, (count, head_dim)).transpose(0, 1)[None]
        parts.append(plain_norm(part, norms[number]) if norms else part)
    for part, offset in zip(apply_rotary_pos_emb(*parts, cos, sin), (q, k), strict=True):
        expected = part[0].transpose(0, 1).flatten(1)
        torch.testing.assert_close(qkv[:, offset : offset + expected.shape[1]], expected, **TOLERANCE)
    width = heads[1] * head_dim
    assert torch.equal(qkv[:, v : v + width], before[:, v : v + width])


def test_an_rms_norm_with_an_fp32_weight_rounds_once():
    x, weight = random(3, 48, dtype=SIXTEEN_BITS), 1 + random(48, seed=1)
    expected = plain_norm(x.float(), NormWeights(weight, None, EPS, rms=True)).to(x.dtype)
    found = add_norm(x, None, NormWeights(weight, None, EPS, rms=True), keep_sum=False, out=torch.empty_like(x))
    assert (found != expected).float().mean() < 0.01, "rounded twice, a tenth of them differ"


# --- the gate of the MLP ---


@pytest.mark.parametrize("width", [1, 7, 1024, 1030])
@pytest.mark.parametrize("dtype", [torch.float32, SIXTEEN_BITS])
def test_gate(width, dtype):
    joined = random(2, 2 * width, dtype=dtype) * 3
    gate, up = joined.chunk(2, 1)
    tolerance = TOLERANCE if dtype == torch.float32 else {"rtol": 1e-2, "atol": 1e-2}
    torch.testing.assert_close(gated(joined, "silu"), functional.silu(gate) * up, **tolerance)


# --- products split along the inner dimension ---


def operands(rows: int, outputs: int, inner: int, dtype: torch.dtype = SIXTEEN_BITS) -> tuple[Tensor, Tensor]:
    return random(rows, inner, dtype=dtype), random(outputs, inner, seed=1, dtype=dtype)


def summands_of(x: Tensor, weight: Tensor) -> Tensor:
    parts = split_matmul(x, weight)
    assert parts is not None and parts.shape == (len(parts), len(x), len(weight))
    return parts


@pytest.mark.parametrize("rows", [1, 3, 64])
@pytest.mark.parametrize(("outputs", "inner"), [(8, 8), (33, 136), (40, 1032)])
def test_split_products_add_up(rows, outputs, inner):
    x, weight = operands(rows, outputs, inner)
    parts = summands_of(x, weight)
    assert parts.dtype == torch.float32
    torch.testing.assert_close(parts.sum(0).double(), x.double() @ weight.double().T, rtol=1e-4, atol=1e-3)


@pytest.mark.parametrize(
    ("rows", "outputs", "inner", "count"), [(65, 40, 2048, 2), (130, 33, 4096, 4), (65, 40, 4112, 2)]
)
def test_split_products_of_more_rows_err_as_plain_ones(rows, outputs, inner, count):
    x, weight = operands(rows, outputs, inner, torch.bfloat16)
    parts = summands_of(x, weight)
    assert len(parts) == count and parts.dtype == torch.bfloat16
    exact = x.double() @ weight.double().T
    error, plain = ((actual.double() - exact).norm() for actual in (parts.float().sum(0), x @ weight.T))
    assert error <= 1.1 * plain


def test_a_long_inner_dimension_is_split():
    x, weight = operands(2, 40, 1032)
    assert len(summands_of(x, weight)) == 4, "9 steps of 128; a program has 2 on average"
    assert len(summands_of(x[:, :128].contiguous(), weight[:, :128].contiguous())) == 1


def test_few_programs_are_allowed(monkeypatch):
    monkeypatch.setattr(split_matmul_module, "MAX_TRITON_PROGRAMS", 4)  # 40 outputs are 2 tiles of 32
    monkeypatch.setattr(split_matmul_module, "MAX_CUBLAS_PROGRAMS", 4)  # and one of 128, for each of 2 of 128 rows
    x, weight = operands(2, 40, 1032)
    parts = summands_of(x, weight)
    assert len(parts) == 2
    torch.testing.assert_close(parts.sum(0).double(), x.double() @ weight.double().T, rtol=1e-4, atol=1e-3)
    assert len(summands_of(*operands(130, 40, 4096, torch.bfloat16))) == 2
    assert split_matmul(*operands(300, 40, 4096, torch.bfloat16)) is None, "3 tiles; two parts of each would be 6"


# --- products by int8 codes ---


@pytest.mark.few(6)
@pytest.mark.parametrize("rows", [1, 3, 64])
@pytest.mark.parametrize(("outputs", "inner"), [(8, 16), (33, 144), (2130, 272)])
def test_a_product_by_int8_codes_is_that_of_the_dequantised_weight(rows, outputs, inner):
    x, weight = operands(rows, outputs, inner)
    codes, scale = quantise_rows(weight)
    found = int8_matmul(x, codes, scale)
    assert found is not None and found.dtype == x.dtype
    expected = (x.float() @ dequantise_rows(codes, scale, x.dtype).float().T).to(x.dtype)
    # Sums in another order may be rounded to a neighbour.
    torch.testing.assert_close(found, expected, rtol=2 * torch.finfo(x.dtype).eps, atol=1e-2)


def test_codes_are_dequantised_in_the_kernel_as_by_the_layer():
    """Rows of the unit matrix return the weights, rounded once to 16 bits."""
    codes, scale = quantise_rows(random(40, 64))
    found = int8_matmul(torch.eye(64, dtype=SIXTEEN_BITS, device=DEVICE), codes, scale)
    assert found is not None and found.T.equal(dequantise_rows(codes, scale, SIXTEEN_BITS))


def test_what_the_product_by_codes_does_not_take():
    x, (codes, scale) = random(2, 32, dtype=SIXTEEN_BITS), quantise_rows(random(8, 32))
    assert int8_matmul(x, codes, scale) is not None
    assert int8_matmul(x.float(), codes, scale) is None
    assert int8_matmul(random(65, 32, dtype=SIXTEEN_BITS), codes, scale) is None, "many rows"
    assert int8_matmul(x[:, :24].contiguous(), codes[:, :24].contiguous(), scale) is None, "rows of 24 bytes"
    assert int8_matmul(x, codes.T.contiguous().T, scale) is None


@pytest.mark.parametrize("with_bias", [False, True])
def test_summands_are_added_to_a_residual_without_a_norm(with_bias):
    x, parts, bias = random(3, 40), random(4, 3, 40, seed=1), random(40, seed=2) if with_bias else None
    expected = x + parts.sum(0) + (0 if bias is None else bias)
    torch.testing.assert_close(add_branch(x, Branch(parts, bias)), expected, **TOLERANCE)


def test_what_the_split_product_does_not_take():
    x, weight = operands(2, 8, 16)
    assert split_matmul(x, weight) is not None
    assert split_matmul(x.float(), weight.float()) is None
    assert split_matmul(x, weight.to(torch.float16 if DEVICE.type == "cuda" else torch.bfloat16)) is None
    assert split_matmul(*operands(2, 8, 12)) is None, "rows of 24 bytes"
    assert split_matmul(x, random(16, 8, dtype=SIXTEEN_BITS).T) is None
    assert split_matmul(random(16, 2, dtype=SIXTEEN_BITS).T, weight) is None
    shifted = random(8 * 16 + 1, dtype=SIXTEEN_BITS)[1:].view(8, 16)
    assert split_matmul(x, shifted) is None and split_matmul(shifted, weight) is None, "no multiple of 16 bytes"
    assert split_matmul(*operands(65, 8, 1024, torch.bfloat16)) is None, "parts have 1024 or more"
    assert split_matmul(*operands(65, 8, 2056, torch.bfloat16)) is None, "halves of 1028 are no multiple of 8"
    assert split_matmul(*operands(65, 8, 2048, torch.float16)) is None, "parts could overflow"
