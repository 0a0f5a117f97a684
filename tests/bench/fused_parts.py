"""Compare fused parts of a layer on one GPU with torch's own and Liger-Kernel's: `python -m bench.fused_parts`.

Times (ms) of a forward pass, and of one with its backward pass, and relative errors of the output and of each gradient
against torch in fp32, in bf16, of an RMSNorm, a SiLU gate and rotary positions in the shapes of two models. One JSON
line for each part and kind; Liger-Kernel's are left out where it cannot be imported.
"""

import argparse
import json
from collections.abc import Callable, Iterator
from functools import partial
from importlib import import_module
from statistics import median
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional
from transformers.models.llama.modeling_llama import apply_rotary_pos_emb

from pipeline.kernels.gate_kernels import FusedGate, FusedRotary
from pipeline.kernels.norm_kernels import FusedNorm

# Model: tokens, hidden size, width of the MLP, heads, key heads, channels of a head.
SHAPES = {
    "Qwen2.5-1.5B": (16_384, 1536, 8960, 12, 2, 128),
    "Llama-3-8B": (4096, 4096, 14_336, 32, 8, 128),
}
EPS = 1e-6
# Written before each run: no run finds its inputs in the device's cache, and while it is written the host can launch.
SPACER_BYTES = 2**30

Part = Callable[..., Tensor | tuple[Tensor, ...]]


def torch_norm(x: Tensor, weight: Tensor) -> Tensor:
    """Norm (..., H) as Llama's of transformers does."""
    normed = x.float() * torch.rsqrt(x.float().square().mean(-1, keepdim=True) + EPS)
    return weight * normed.to(x.dtype)


def usual_parts() -> dict[str, Part]:
    """Parts by torch and transformers: of norm (x, weight), gate (gate, up), rotary (q, k, cos, sin)."""
    return {
        "rms norm": torch_norm,
        "gate": lambda gate, up: functional.silu(gate) * up,
        "rotary": apply_rotary_pos_emb,
    }


def fused_parts() -> dict[str, Part]:
    """The same by this project's kernels."""
    return {
        "rms norm": lambda x, weight: FusedNorm.apply(x, weight, None, (EPS, True)),
        "gate": lambda gate, up: FusedGate.apply(gate, up, "silu"),
        "rotary": FusedRotary.apply,
    }


def liger_parts() -> dict[str, Part]:
    """The same by Liger-Kernel, none where it is missing; some of it overwrites its inputs, which costs no time."""
    try:
        norm, gate, rotary = (import_module(f"liger_kernel.ops.{name}") for name in ("rms_norm", "swiglu", "rope"))
    except ImportError:
        return {}
    return {
        # Its gradient overwrites that of the output unless the last argument forbids it.
        "rms norm": lambda x, weight: norm.LigerRMSNormFunction.apply(x, weight, EPS, 0.0, "llama", False),
        "gate": gate.LigerSiLUMulFunction.apply,
        "rotary": rotary.LigerRopeFunction.apply,
    }


def inputs_of(part: str, shape: tuple[int, ...], device: torch.device) -> tuple[list[Tensor], list[Tensor]]:
    """Return (tensors with a gradient, others) of a part in bf16; q and k lie in memory as projections give them."""
    tokens, hidden, width, heads, kv_heads, size = shape
    random = partial(torch.randn, device=device, dtype=torch.bfloat16)
    if part == "rms norm":
        return [random(1, tokens, hidden), 1 + 0.1 * random(hidden)], []
    if part == "gate":
        return [random(1, tokens, width) for _ in range(2)], []
    speeds = 10_000.0 ** -torch.linspace(0, 1, size // 2, device=device)
    angles = torch.arange(tokens, device=device)[None, :, None] * speeds
    turns = torch.cat([angles, angles], -1)
    pair = [random(1, tokens, n, size).transpose(1, 2) for n in (heads, kv_heads)]
    return pair, [turns.cos().bfloat16(), turns.sin().bfloat16()]


def outcome(compute: Part, given: list[Tensor], rest: list[Tensor], weights: list[Tensor]) -> list[Tensor]:
    """Return outputs, and gradients of their sum weighted by `weights`, in the type of `given`."""
    leaves = [tensor.clone().requires_grad_() for tensor in given]
    outs = compute(*(leaf.clone() for leaf in leaves), *rest)  # copies, which a kernel may overwrite
    outs = outs if isinstance(outs, tuple) else (outs,)
    gradients = torch.autograd.grad(outs, leaves, [weight.clone() for weight in weights])
    return [*(out.detach() for out in outs), *gradients]


def milliseconds(run: Callable[[], Any], repeats: int) -> float:
    """Return the median time on the device of `run`, after three runs that do not count."""
    times, spacer = [], torch.empty(SPACER_BYTES, dtype=torch.int8, device="cuda")
    for _ in range(repeats + 3):
        spacer.zero_()
        start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        start.record()
        run()
        end.record()
        end.synchronize()
        times.append(start.elapsed_time(end))
    return round(median(times[3:]), 4)


def times(compute: Part, given: list[Tensor], rest: list[Tensor], weights: list[Tensor], repeats: int) -> Iterator[Any]:
    """Yield the name and the milliseconds of a forward pass, and of one with its backward pass."""
    leaves = [tensor.clone().requires_grad_() for tensor in given]
    with torch.no_grad():
        yield "forward_ms", milliseconds(lambda: compute(*leaves, *rest), repeats)
    yield "both_ms", milliseconds(lambda: torch.autograd.grad(compute(*leaves, *rest), leaves, weights), repeats)


def compare(part: str, model: str, kinds: dict[str, dict[str, Part]], repeats: int) -> None:
    """Print a JSON line for each kind that has the part."""
    torch.manual_seed(0)
    given, rest = inputs_of(part, SHAPES[model], torch.device("cuda"))
    usual = kinds["torch"][part]
    weights = [torch.randn_like(out) for out in (given if part == "rotary" else given[:1])]
    exact = outcome(usual, *([tensor.float() for tensor in each] for each in (given, rest, weights)))
    for kind, parts in kinds.items():
        if part not in parts:
            continue
        found = outcome(parts[part], given, rest, weights)
        errors = [((x.float() - right).norm() / right.norm()).item() for x, right in zip(found, exact, strict=True)]
        line = {"model": model, "part": part, "kind": kind} | dict(times(parts[part], given, rest, weights, repeats))
        print(json.dumps(line | {"errors": [float(f"{error:.3g}") for error in errors]}), flush=True)


def main() -> None:
    """Print all comparisons."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--repeats", type=int, default=30, help="runs of which the median is given")
    options = parser.parse_args()
    print(json.dumps({"device": torch.cuda.get_device_name(), "torch": torch.__version__}))
    kinds = {"torch": usual_parts(), "ours": fused_parts(), "liger": liger_parts()}
    for model in SHAPES:
        for part in kinds["torch"]:
            compare(part, model, kinds, options.repeats)


if __name__ == "__main__":
    main()
