"""Products of few rows with a wide weight, split along the inner dimension so that all multiprocessors read weights.

A decode step is bound by the bandwidth at which weights are read. Layers with few outputs (attention's and the MLP's
output projections) make too few tiles for a large GPU; here several programs share a tile, and the kernel that adds the
result to the residual sums their parts (`kernels.add_norm`).
"""

import torch
import triton
import triton.language as tl
from torch import Tensor
from triton.tools.tensor_descriptor import TensorDescriptor

MAX_ROWS = 256
# Programs of one product: about two on each multiprocessor of the largest GPUs.
MOST_PROGRAMS = 264
MOST_PARTS = 4


@triton.jit
def _split_matmul(
    x, weight, parts, rows, outputs, share,
    ROWS: tl.constexpr, OUTPUTS: tl.constexpr, INNER: tl.constexpr, STAGES: tl.constexpr,
):  # fmt: skip
    n, part, m = tl.program_id(0), tl.program_id(1), tl.program_id(2)
    total = tl.zeros([ROWS, OUTPUTS], tl.float32)
    # Outside of a tensor a descriptor reads zeros: remainders need no mask.
    for k in tl.range(part * share, (part + 1) * share, INNER, num_stages=STAGES):
        w = weight.load([n * OUTPUTS, k])
        a = x.load([m * ROWS, k])
        total = tl.dot(a, w.T, total, input_precision="ieee")
    r, c = m * ROWS + tl.arange(0, ROWS), n * OUTPUTS + tl.arange(0, OUTPUTS)
    at = (part * rows + r)[:, None].to(tl.int64) * outputs + c[None, :]
    tl.store(parts + at, total, mask=(r < rows)[:, None] & (c < outputs)[None, :])


def can_split(x: Tensor, weight: Tensor) -> bool:
    """Whether the kernel takes these: few rows of a 16-bit type, aligned for the copy engine."""
    fits = len(x) <= MAX_ROWS and x.dtype == weight.dtype and x.dtype in (torch.bfloat16, torch.float16)
    aligned = weight.is_contiguous() and weight.data_ptr() % 16 == 0 and weight.shape[1] % 8 == 0
    return fits and aligned


def split_matmul(x: Tensor, weight: Tensor) -> Tensor:
    """x (M, K) @ weight (N, K) transposed, as parts (S, M, N) fp32 to be summed."""
    (rows, inner), outputs = x.shape, len(weight)
    tile_rows, tile_outputs, tile_inner, stages = _tile(rows)
    tiles = triton.cdiv(outputs, tile_outputs) * triton.cdiv(rows, tile_rows)
    steps = triton.cdiv(inner, tile_inner)
    num_parts = 1
    while num_parts < MOST_PARTS and tiles * num_parts * 2 <= MOST_PROGRAMS and steps >= num_parts * 4:
        num_parts *= 2
    parts = torch.empty(num_parts, rows, outputs, dtype=torch.float32, device=x.device)
    _split_matmul[(triton.cdiv(outputs, tile_outputs), num_parts, triton.cdiv(rows, tile_rows))](
        TensorDescriptor.from_tensor(x, [tile_rows, tile_inner]),
        TensorDescriptor.from_tensor(weight, [tile_outputs, tile_inner]),
        parts, rows, outputs, triton.cdiv(steps, num_parts) * tile_inner,
        ROWS=tile_rows, OUTPUTS=tile_outputs, INNER=tile_inner, STAGES=stages, num_warps=4,
    )  # fmt: skip
    return parts


def _tile(rows: int) -> tuple[int, int, int, int]:
    """(rows, outputs, inner) of a tile, and loads in flight: the fastest on an H200 (docs/experiments.md)."""
    if rows <= 64:
        return 64, 32, 128, 4
    return (128, 64, 64, 6) if rows <= 128 else (128, 128, 64, 6)
