"""Matrix products of decode steps: split along the inner dimension, or by the int8 codes of a quantised weight.

The output projections of attention and MLP have too few tiles for a large GPU, so several programs share a tile. The
kernel that adds the result to the residual also sums their partial products (`decode_layers.add_norm`). Codes are
dequantised in registers, so that a decode step reads one byte per weight.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor
from triton.tools.tensor_descriptor import TensorDescriptor

# Rows up to which the Triton kernel is faster than cuBLAS, with its tile (outputs, inner dimension) and its number of
# loads in flight; measured on an H200 (benchmarks/reports/decode.md, third round).
MAX_TRITON_ROWS = 64
TILE_OUTPUTS, TILE_INNER, STAGES = 32, 128, 4
# Most programs of one product: on each of the 132 multiprocessors of an H200 two of that kernel, or one of cuBLAS.
MAX_TRITON_PROGRAMS, MAX_CUBLAS_PROGRAMS = 264, 132
# Rows and columns of a tile that cuBLAS is assumed to use, and half the smallest inner dimension of a split: cuBLAS got
# slower with shorter ones in the same measurement.
CUBLAS_TILE, CUBLAS_STEP = 128, 512
# Most splits of one product: eight were slower than four in the same measurement.
MAX_SPLITS = 4


@triton.jit
def _split_matmul(
    x, weight, scale, summands, rows, outputs, split_width,
    ROWS: tl.constexpr, OUTPUTS: tl.constexpr, INNER: tl.constexpr, STAGES: tl.constexpr, IS_INT8: tl.constexpr,
):  # fmt: skip
    n, split = tl.program_id(0), tl.program_id(1)
    r, c = tl.arange(0, ROWS), n * OUTPUTS + tl.arange(0, OUTPUTS)
    if IS_INT8:
        factor = tl.load(scale + c, mask=c < outputs, other=0.0)
    total = tl.zeros([ROWS, OUTPUTS], tl.float32)
    # A descriptor reads zeros outside of its tensor, so remainders need no mask.
    for k in tl.range(split * split_width, (split + 1) * split_width, INNER, num_stages=STAGES):
        w = weight.load([n * OUTPUTS, k])
        a = x.load([0, k])
        if IS_INT8:  # rounded once, as Int8Linear rounds
            w = (w.to(tl.float32) * factor[:, None]).to(a.dtype)
        total = tl.dot(a, w.T, total, input_precision="ieee")
    at = (split * rows + r)[:, None].to(tl.int64) * outputs + c[None, :]
    tl.store(summands + at, total.to(summands.dtype.element_ty), mask=(r < rows)[:, None] & (c < outputs)[None, :])


def split_matmul(x: Tensor, weight: Tensor) -> Tensor | None:
    """Return x (M, K) @ weight (N, K).T as S summands (S, M, N), which the caller sums in fp32.

    Returns None if a plain product is faster, or if an operand is not contiguous, aligned and of a 16-bit type.
    """
    if x.dtype != weight.dtype or not _fits_copy_engine(x, weight):
        return None
    return _triton_split_k(x, weight) if len(x) <= MAX_TRITON_ROWS else _cublas_split_k(x, weight)


def int8_matmul(x: Tensor, codes: Tensor, scale: Tensor) -> Tensor | None:
    """Return x (M, K) @ (codes (N, K) * scale (N, 1)).T as (M, N) in the dtype of x.

    Returns None if the caller should dequantise and multiply: for more than MAX_TRITON_ROWS rows, or if an operand is
    not contiguous and aligned, or x not of a 16-bit type.
    """
    if len(x) > MAX_TRITON_ROWS or not _fits_copy_engine(x, codes):
        return None
    outputs = len(codes)
    few = 2 * triton.cdiv(outputs, TILE_OUTPUTS) <= MAX_TRITON_PROGRAMS  # not measured on a GPU yet
    tile = TILE_OUTPUTS // 2 if few else TILE_OUTPUTS
    out = torch.empty(len(x), outputs, dtype=x.dtype, device=x.device)
    _launch(x, codes, scale, out, tile=tile)
    return out


def _fits_copy_engine(x: Tensor, weight: Tensor) -> bool:
    """Return True for contiguous operands whose rows begin at multiples of 16 bytes, x in a 16-bit type."""
    if x.dtype not in (torch.bfloat16, torch.float16) or not (x.is_contiguous() and weight.is_contiguous()):
        return False
    addresses = (x.data_ptr(), weight.data_ptr(), weight.shape[1] * weight.element_size())
    return all(address % 16 == 0 for address in addresses)


def _triton_split_k(x: Tensor, weight: Tensor) -> Tensor:
    """Return S summands of x @ weight.T, (S, M, N) in fp32, by the Triton kernel."""
    (rows, inner), outputs = x.shape, len(weight)
    tiles, steps = triton.cdiv(outputs, TILE_OUTPUTS), triton.cdiv(inner, TILE_INNER)
    num_splits = _num_splits(tiles, steps, MAX_TRITON_PROGRAMS)
    summands = torch.empty(num_splits, rows, outputs, dtype=torch.float32, device=x.device)
    _launch(x, weight, None, summands, num_splits=num_splits)
    return summands


def _launch(
    x: Tensor, weight: Tensor, scale: Tensor | None, out: Tensor, *, tile: int = TILE_OUTPUTS, num_splits: int = 1
) -> None:
    """Write the products of each split to `out`, (S, M, N), or (M, N) where S is 1."""
    steps = triton.cdiv(x.shape[1], TILE_INNER)
    _split_matmul[(triton.cdiv(len(weight), tile), num_splits)](
        TensorDescriptor.from_tensor(x, [MAX_TRITON_ROWS, TILE_INNER]),
        TensorDescriptor.from_tensor(weight, [tile, TILE_INNER]),
        scale, out, len(x), len(weight), triton.cdiv(steps, num_splits) * TILE_INNER,
        ROWS=MAX_TRITON_ROWS, OUTPUTS=tile, INNER=TILE_INNER, STAGES=STAGES, IS_INT8=scale is not None, num_warps=4,
    )  # fmt: skip


def _cublas_split_k(x: Tensor, weight: Tensor) -> Tensor | None:
    """Return S summands of x @ weight.T, (S, M, N) in bfloat16, by cuBLAS; None if it should not split.

    Rounded summands add as little noise as one rounded product, unless they cancel. In float16 they could overflow, so
    float16 is not split.
    """
    if x.dtype != torch.bfloat16:
        return None
    (rows, inner), outputs = x.shape, len(weight)
    tiles = triton.cdiv(outputs, CUBLAS_TILE) * triton.cdiv(rows, CUBLAS_TILE)
    num_splits = _num_splits(tiles, inner // CUBLAS_STEP, MAX_CUBLAS_PROGRAMS)
    while inner % (8 * num_splits):  # splits are aligned too
        num_splits //= 2
    if num_splits == 1:
        return None
    by_split = x.view(rows, num_splits, -1).transpose(0, 1)
    return torch.bmm(by_split, weight.view(outputs, num_splits, -1).permute(1, 2, 0))


def _num_splits(tiles: int, steps: int, max_programs: int) -> int:
    """Return the most splits that `max_programs` allows: 1, 2 or 4, each with two or more of the `steps` on average."""
    splits = 1
    while splits < MAX_SPLITS and tiles * splits * 2 <= max_programs and steps >= splits * 4:
        splits *= 2
    return splits
