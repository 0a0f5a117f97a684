"""AdamW of bitsandbytes, whose moments have 8 bits, and its moments as fp32 tensors for checkpoints.

256 neighbours of a flattened tensor share a scale, their largest absolute value; the codes index a table of 256
fractions of it. A checkpoint has the values, and the scales for a resume that shards tensors in the same way: with them
the codes are restored exactly.
"""

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional

BLOCK = 256
DIGITS = {"exp_avg": "1", "exp_avg_sq": "2"}  # numbers of the moments in bitsandbytes' names


def adamw_8bit(groups: Sequence[Mapping[str, Any]], *, betas: tuple[float, float], eps: float) -> torch.optim.Optimizer:
    """Create an AdamW with moments in 8 bits; moments of tensors below 4,096 elements are in fp32."""
    from bitsandbytes.optim import AdamW8bit

    optimizer: torch.optim.Optimizer = AdamW8bit(list(groups), betas=betas, eps=eps)
    return optimizer


def moments(state: Mapping[str, Any]) -> dict[str, Tensor]:
    """Return AdamW's moments of a tensor in fp32, by their names: views, or values decoded from 8 bits on the CPU."""
    if "state1" not in state:
        return {kind: state[kind] for kind in DIGITS if kind in state}
    return {kind: state[f"state{n}"] if f"qmap{n}" not in state else values_of(state, n) for kind, n in DIGITS.items()}


def values_of(state: Mapping[str, Any], digit: str) -> Tensor:
    """Return the values of one moment's codes, in fp32 on the CPU."""
    codes, table, scales = (state[f"{name}{digit}"].cpu() for name in ("state", "qmap", "absmax"))
    return table[codes.view(-1).int()] * scales.repeat_interleave(BLOCK)[: codes.numel()]


def scales(state: Mapping[str, Any]) -> dict[str, Tensor]:
    """Return the scales of both moments, one for each block; {} if the moments are in fp32."""
    return {kind: state[f"absmax{n}"] for kind, n in DIGITS.items() if f"absmax{n}" in state}


def start_state(optimizer: Any, master: Tensor, step: int) -> dict[str, Any]:
    """Allocate the state of a tensor of `adamw_8bit`'s optimizer, and return it."""
    for number, group in enumerate(optimizer.param_groups):
        for position, parameter in enumerate(group["params"]):
            if parameter is master:
                optimizer.init_state(group, master, number, position)
    state: dict[str, Any] = optimizer.state[master]
    state["step"] = step
    return state


def restore_moment(state: dict[str, Any], kind: str, values: Tensor, scales: Tensor | None) -> None:
    """Set one moment to fp32 `values`, rounded to 8 bits by `scales`; None: by scales computed from the values."""
    digit = DIGITS[kind]
    if f"qmap{digit}" not in state:
        state[f"state{digit}"].view(-1).copy_(values)
        return
    blocks = functional.pad(values, (0, -len(values) % BLOCK)).view(-1, BLOCK)
    scales = blocks.abs().amax(1) if scales is None else scales
    table = state[f"qmap{digit}"].to(values.device)
    shares = blocks / scales.clamp_min(torch.finfo(torch.float32).tiny)[:, None]
    codes = torch.bucketize(shares, (table[1:] + table[:-1]) / 2, out_int32=True).view(-1)[: len(values)]
    state[f"state{digit}"].view(-1).copy_(codes)
    state[f"absmax{digit}"].copy_(scales)
