"""Products with few outputs, split along the inner dimension so that all multiprocessors have work.

Attention's and the MLP's output projections make too few tiles for a large GPU; here several programs share a tile, and
the kernel that adds the result to the residual sums their parts (`layer_kernels.add_norm`).
"""

import torch
import triton
import triton.language as tl
from torch import Tensor
from triton.tools.tensor_descriptor import TensorDescriptor

# Up to here the kernel below is the fastest on an H200, with this tile and as many loads in flight; then cuBLAS is
# (docs/experiments.md).
FEW_ROWS = 64
TILE_OUTPUTS, TILE_INNER, STAGES = 32, 128, 4
# Programs of one product: about two of that kernel, or one of cuBLAS, on each multiprocessor of the largest GPUs.
MOST_PROGRAMS, MOST_CUBLAS_PROGRAMS = 264, 132
CUBLAS_TILE, CUBLAS_STEP = 128, 512
MOST_PARTS = 4


@triton.jit
def _split_matmul(
    x, weight, parts, rows, outputs, share,
    ROWS: tl.constexpr, OUTPUTS: tl.constexpr, INNER: tl.constexpr, STAGES: tl.constexpr,
):  # fmt: skip
    n, part = tl.program_id(0), tl.program_id(1)
    total = tl.zeros([ROWS, OUTPUTS], tl.float32)
    # Outside of a tensor a descriptor reads zeros: remainders need no mask.
    for k in tl.range(part * share, (part + 1) * share, INNER, num_stages=STAGES):
        w = weight.load([n * OUTPUTS, k])
        a = x.load([0, k])
        total = tl.dot(a, w.T, total, input_precision="ieee")
    r, c = tl.arange(0, ROWS), n * OUTPUTS + tl.arange(0, OUTPUTS)
    at = (part * rows + r)[:, None].to(tl.int64) * outputs + c[None, :]
    tl.store(parts + at, total, mask=(r < rows)[:, None] & (c < outputs)[None, :])


def split_matmul(x: Tensor, weight: Tensor) -> Tensor | None:
    """x (M, K) @ weight (N, K) transposed, as parts (S, M, N) whose sum in fp32 it is; None: a plain product is better.

    Takes 16-bit types alone, contiguous and aligned for the copy engine.
    """
    fits = x.dtype == weight.dtype and x.dtype in (torch.bfloat16, torch.float16)
    aligned = x.data_ptr() % 16 == weight.data_ptr() % 16 == 0 and weight.shape[1] % 8 == 0
    if not (fits and aligned and x.is_contiguous() and weight.is_contiguous()):
        return None
    return _of_few_rows(x, weight) if len(x) <= FEW_ROWS else _of_more_rows(x, weight)


def _of_few_rows(x: Tensor, weight: Tensor) -> Tensor:
    """Parts in fp32."""
    (rows, inner), outputs = x.shape, len(weight)
    tiles, steps = triton.cdiv(outputs, TILE_OUTPUTS), triton.cdiv(inner, TILE_INNER)
    num_parts = _num_parts(tiles, steps, MOST_PROGRAMS)
    parts = torch.empty(num_parts, rows, outputs, dtype=torch.float32, device=x.device)
    _split_matmul[(tiles, num_parts)](
        TensorDescriptor.from_tensor(x, [FEW_ROWS, TILE_INNER]),
        TensorDescriptor.from_tensor(weight, [TILE_OUTPUTS, TILE_INNER]),
        parts, rows, outputs, triton.cdiv(steps, num_parts) * TILE_INNER,
        ROWS=FEW_ROWS, OUTPUTS=TILE_OUTPUTS, INNER=TILE_INNER, STAGES=STAGES, num_warps=4,
    )  # fmt: skip
    return parts


def _of_more_rows(x: Tensor, weight: Tensor) -> Tensor | None:
    """Parts in bfloat16, as ranks of tensor parallelism round theirs; in float16 parts could overflow.

    Their noise is that of a product that is rounded once, unless parts cancel.
    """
    if x.dtype != torch.bfloat16:
        return None
    (rows, inner), outputs = x.shape, len(weight)
    tiles = triton.cdiv(outputs, CUBLAS_TILE) * triton.cdiv(rows, CUBLAS_TILE)
    num_parts = _num_parts(tiles, inner // CUBLAS_STEP, MOST_CUBLAS_PROGRAMS)
    while inner % (8 * num_parts):  # parts are aligned too
        num_parts //= 2
    if num_parts == 1:
        return None
    by_part = x.view(rows, num_parts, -1).transpose(0, 1)
    return torch.bmm(by_part, weight.view(outputs, num_parts, -1).permute(1, 2, 0))


def _num_parts(tiles: int, steps: int, most: int) -> int:
    """As many as `most` programs allow, each with two of the `steps` along the inner dimension or more on average."""
    parts = 1
    while parts < MOST_PARTS and tiles * parts * 2 <= most and steps >= parts * 4:
        parts *= 2
    return parts
