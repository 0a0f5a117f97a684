"""Matrix work of a forward pass, and what devices can do: the two numbers behind MFU.

Counted: weights, attention and head at the positions actually computed; a backward pass is twice the forward.
Recomputation under gradient checkpointing is not counted.
"""

from typing import Any

import torch

# Dense bf16 TFLOP/s of a device, by a part of its name (vendors' data sheets; H200: measured on real matrices).
PEAK_TFLOPS = {"H200": 790.0, "H100": 790.0, "A100": 312.0, "A6000": 155.0, "L40": 181.0, "V100": 125.0}


def peak_flops(device: torch.device) -> float | None:
    """Matrix operations a second of a CUDA device in 16 bits, or None where they are not known."""
    if device.type != "cuda":
        return None
    name = torch.cuda.get_device_name(device)
    return next((tflops * 1e12 for part, tflops in PEAK_TFLOPS.items() if part in name), None)


def matrix_parameters(model: torch.nn.Module) -> int:
    """Weights of linear layers (partitioned ones counted whole), the output head not included."""
    head = getattr(model, "lm_head", None) or getattr(model, "score", None)
    linear = [m for m in model.modules() if isinstance(m, torch.nn.Linear) and m is not head]
    return sum(getattr(m.weight, "ds_numel", m.weight.numel()) for m in linear)


def forward_flops(config: Any, parameters: int, *, num_tokens: int, num_head_tokens: int, length: float) -> float:
    """Operations of one forward pass over `num_tokens` tokens in causal rows of mean `length`.

    2 per weight and token; attention 4 * hidden * length / 2 per layer and token; the head where it is computed.
    """
    config = config.get_text_config()
    attention = 2.0 * config.num_hidden_layers * config.hidden_size * length
    head = 2.0 * config.hidden_size * config.vocab_size
    return num_tokens * (2.0 * parameters + attention) + num_head_tokens * head
