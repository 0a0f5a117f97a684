"""Compare fused parts of a layer with torch's and Liger-Kernel's: `python -m benchmarks.speed.fused_parts`, on one GPU.

Times (ms) of a forward pass, and of one with its backward pass and the memory (GiB) that it takes, and relative errors
of the output and of each gradient against torch in fp32, in bf16, of an RMSNorm, a SiLU gate, rotary positions and the
head with its log-probabilities, by token (as PPO needs them) and as one loss, in the shapes of two models. One
JSON line for each part and kind; Liger-Kernel's are left out where it cannot be imported. `--pieces CONFIG` times the
exact divergence of two models' distributions by the bytes of a piece instead.
"""

import argparse
import json
from collections.abc import Callable, Iterator
from functools import partial
from importlib import import_module
from itertools import product
from statistics import median
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional
from torch.utils.checkpoint import checkpoint
from transformers import AutoConfig, AutoModelForCausalLM
from transformers.models.llama.modeling_llama import apply_rotary_pos_emb

from pipeline.files import GIB
from pipeline.kernels.gate_kernels import FusedGate, FusedRotary
from pipeline.kernels.norm_kernels import FusedNorm
from pipeline.kernels.token_statistics import LogitScaling, token_statistics
from pipeline.models.forward import causal_lm
from pipeline.models.forward.causal_lm import ROW_TOKENS, CausalLM, Comparison

# Model: tokens, hidden size, width of the MLP, heads, key heads, channels of a head, vocabulary.
SHAPES = {
    "Qwen2.5-1.5B": (16_384, 1536, 8960, 12, 2, 128, 151_936),
    "Llama-3-8B": (4096, 4096, 14_336, 32, 8, 128, 128_256),
}
HEADS = ("head, by token", "head, one loss")
EPS = 1e-6
# Written before each run: no run finds its inputs in the device's cache, and while it is written the host can launch.
SPACER_BYTES = 2**30

Part = Callable[..., Tensor | tuple[Tensor, ...]]


def torch_norm(x: Tensor, weight: Tensor) -> Tensor:
    """Norm (..., H) as Llama's of transformers does."""
    normed = x.float() * torch.rsqrt(x.float().square().mean(-1, keepdim=True) + EPS)
    return weight * normed.to(x.dtype)


def torch_head(hidden: Tensor, weight: Tensor, targets: Tensor) -> Tensor:
    """Return the log-probabilities (T,) in fp32 of targets (T,) under hidden (T, H) and the head's weight (V, H)."""
    return -functional.cross_entropy(functional.linear(hidden, weight).float(), targets, reduction="none")


def fused_head(hidden: Tensor, weight: Tensor, targets: Tensor) -> Tensor:
    """The same as CausalLM computes them: piece by piece of a row's tokens, each computed again for its gradient."""

    def head(part: Tensor, next_ids: Tensor) -> Tensor:
        return token_statistics(functional.linear(part, weight), next_ids, LogitScaling(), with_entropy=False)[0]

    pairs = zip(hidden.split(ROW_TOKENS), targets.split(ROW_TOKENS), strict=True)
    if not torch.is_grad_enabled():
        return torch.cat([head(*pair) for pair in pairs])
    return torch.cat([checkpoint(head, *pair, use_reentrant=False) for pair in pairs])


def usual_parts() -> dict[str, Part]:
    """Parts by torch: of norm (x, weight), gate (gate, up), rotary (q, k, cos, sin), head (hidden, weight, targets)."""
    return {
        "rms norm": torch_norm,
        "gate": lambda gate, up: functional.silu(gate) * up,
        "rotary": apply_rotary_pos_emb,
        "head, by token": torch_head,
        "head, one loss": lambda *given: -torch_head(*given).sum(),
    }


def fused_parts() -> dict[str, Part]:
    """The same by this project's kernels."""
    return {
        "rms norm": lambda x, weight: FusedNorm.apply(x, weight, None, (EPS, True)),
        "gate": lambda gate, up: FusedGate.apply(gate, up, "silu"),
        "rotary": FusedRotary.apply,
        "head, by token": fused_head,
        "head, one loss": lambda *given: -fused_head(*given).sum(),
    }


def liger_parts() -> dict[str, Part]:
    """The same by Liger-Kernel, none where it is missing; some of it overwrites its inputs, which costs no time."""
    names = ("rms_norm", "swiglu", "rope", "fused_linear_cross_entropy")
    try:
        norm, gate, rotary, head = (import_module(f"liger_kernel.ops.{name}") for name in names)
    except ImportError:
        return {}

    def loss(reduction: str, *given: Tensor) -> Tensor:
        compute = head.LigerFusedLinearCrossEntropyFunction.apply
        values: Tensor = compute(*given, None, None, -100, 0.0, 0.0, reduction)[0]
        return values

    return {
        # Its gradient overwrites that of the output unless the last argument forbids it.
        "rms norm": lambda x, weight: norm.LigerRMSNormFunction.apply(x, weight, EPS, 0.0, "llama", False),
        "gate": gate.LigerSiLUMulFunction.apply,
        "rotary": rotary.LigerRopeFunction.apply,
        "head, by token": lambda *given: -loss("none", *given),
        "head, one loss": partial(loss, "sum"),
    }


def inputs_of(part: str, shape: tuple[int, ...], device: torch.device) -> tuple[list[Tensor], list[Tensor]]:
    """Return (tensors with a gradient, others) of a part in bf16; q and k lie in memory as projections give them."""
    tokens, hidden, width, heads, kv_heads, size, vocabulary = shape
    random = partial(torch.randn, device=device, dtype=torch.bfloat16)
    if part == "rms norm":
        return [random(1, tokens, hidden), 1 + 0.1 * random(hidden)], []
    if part == "gate":
        return [random(1, tokens, width) for _ in range(2)], []
    if part in HEADS:
        weight = hidden**-0.5 * random(vocabulary, hidden)
        return [random(tokens, hidden), weight], [torch.randint(vocabulary, (tokens,), device=device)]
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
    held = torch.cuda.memory_allocated()
    yield "both_ms", milliseconds(lambda: torch.autograd.grad(compute(*leaves, *rest), leaves, weights), repeats)
    torch.cuda.reset_peak_memory_stats()
    torch.autograd.grad(compute(*leaves, *rest), leaves, weights)
    yield "both_gib", round((torch.cuda.max_memory_allocated() - held) / GIB, 2)


def in_fp32(tensor: Tensor) -> Tensor:
    return tensor.float() if tensor.is_floating_point() else tensor


def compare(part: str, model: str, kinds: dict[str, dict[str, Part]], repeats: int) -> None:
    """Print a JSON line for each kind that has the part."""
    torch.manual_seed(0)
    given, rest = inputs_of(part, SHAPES[model], torch.device("cuda"))
    usual = kinds["torch"][part]
    with torch.no_grad():
        outs = usual(*given, *rest)
    outs = outs if isinstance(outs, tuple) else (outs,)
    weights = [torch.randn_like(out) if out.dim() else torch.ones_like(out) for out in outs]
    del outs
    exact = outcome(usual, *([in_fp32(tensor) for tensor in each] for each in (given, rest, weights)))
    for kind, parts in kinds.items():
        if part not in parts:
            continue
        found = outcome(parts[part], given, rest, weights)
        errors = [((x.float() - right).norm() / right.norm()).item() for x, right in zip(found, exact, strict=True)]
        line = {"model": model, "part": part, "kind": kind} | dict(times(parts[part], given, rest, weights, repeats))
        print(json.dumps(line | {"errors": [float(f"{error:.3g}") for error in errors]}), flush=True)


def compared_pieces(path: str, repeats: int) -> None:
    """Print ms and GiB of both passes of a divergence by the bytes of a piece: rows of at most 512 tokens, and tokens.

    path: a model's folder or hub id, whose head is taken with random weights.
    """
    config = AutoConfig.from_pretrained(path)
    config.num_hidden_layers = 1
    with torch.device("cuda"):
        ours, other = (CausalLM(AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16)) for _ in range(2))
    for rows, tokens in ((8, 2000), (32, 8000), (8, 4096)):
        shape = (tokens, config.hidden_size)
        hidden, theirs = (torch.randn(shape, device="cuda", dtype=torch.bfloat16) for _ in range(2))
        targets = torch.randint(config.vocab_size, (tokens,), device="cuda")
        for mib, kind in product((64, 128, 256, 512, 1024), ("reverse_kl", "jsd")):
            causal_lm.COMPARED_BYTES = mib * 2**20
            comparison = Comparison(kind=kind, hidden=theirs, model=other, longest=512)  # type: ignore[arg-type]
            asked = {
                "num_pieces": ours._num_pieces(rows, tokens, comparison),
                "with_entropy": False,
                "comparison": comparison,
            }

            def both(asked: Any = asked, hidden: Tensor = hidden, targets: Tensor = targets) -> None:
                scaling = LogitScaling.from_config(config, 1.0)
                found = ours._in_pieces(hidden.clone().requires_grad_(), targets, scaling, **asked)
                found.divergence.sum().backward()
                ours.zero_grad(set_to_none=True)

            held = torch.cuda.memory_allocated()
            torch.cuda.reset_peak_memory_stats()
            both()
            gib = round((torch.cuda.max_memory_allocated() - held) / GIB, 2)
            line = {"rows": rows, "tokens": tokens, "mib": mib, "kind": kind, "both_gib": gib}
            print(json.dumps(line | {"both_ms": milliseconds(both, repeats)}), flush=True)


def main() -> None:
    """Print all comparisons."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--repeats", type=int, default=30, help="runs of which the median is given")
    parser.add_argument("--part", default="", help="only the parts whose names contain this")
    parser.add_argument("--pieces", default="", help="a model's folder: time its divergence by the bytes of a piece")
    options = parser.parse_args()
    print(json.dumps({"device": torch.cuda.get_device_name(), "torch": torch.__version__}))
    if options.pieces:
        compared_pieces(options.pieces, options.repeats)
        return
    kinds = {"torch": usual_parts(), "ours": fused_parts(), "liger": liger_parts()}
    for model in SHAPES:
        for part in (name for name in kinds["torch"] if options.part in name):
            compare(part, model, kinds, options.repeats)


if __name__ == "__main__":
    main()
