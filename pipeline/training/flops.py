"""Matrix work of a forward pass, and what devices can do: the two numbers behind MFU.

Counted: weights, attention and head at the positions actually computed; a backward pass is twice the forward.
Recomputation under gradient checkpointing is not counted.
"""

from dataclasses import dataclass
from typing import Any

import torch

from pipeline.models.loading import base_model
from pipeline.models.partitions import whole_numel

# Dense bf16 TFLOP/s of a device, by a part of its name (vendors' data sheets; H200: measured on real matrices).
PEAK_TFLOPS = {"H200": 790.0, "H100": 790.0, "A100": 312.0, "A6000": 155.0, "L40": 181.0, "V100": 125.0}


def peak_flops(device: torch.device) -> float | None:
    """Return the matrix operations per second of a CUDA device in 16 bits, or None where they are not known."""
    if device.type != "cuda":
        return None
    name = torch.cuda.get_device_name(device)
    return next((tflops * 1e12 for part, tflops in PEAK_TFLOPS.items() if part in name), None)


@dataclass(frozen=True, slots=True)
class ForwardWork:
    """The size of a forward pass: configuration, weights of the linear layers but the head, the head's width."""

    config: Any
    parameters: int
    head_width: int

    def flops(self, *, num_tokens: int, num_rows: int, num_head_tokens: int = 0) -> float:
        """Count the operations of a forward pass over causal rows of `num_tokens` tokens, the head at some of them.

        2 per weight and token; attention 2 * hidden * length per layer and token; the head where it is computed.
        """
        attention = 2.0 * self.config.num_hidden_layers * self.config.hidden_size * num_tokens / max(num_rows, 1)
        head = 2.0 * self.head_width * self.config.vocab_size
        return num_tokens * (2.0 * self.parameters + attention) + num_head_tokens * head


def forward_work(model: Any) -> ForwardWork:
    """Measure a transformers or peft model; ZeRO-3's partitioned weights are counted whole."""
    head = model.get_output_embeddings() if hasattr(model, "get_output_embeddings") else None
    linear = [
        module
        for name, module in model.named_modules()
        if isinstance(module, torch.nn.Linear) and module is not head and "score" not in name.split(".")
    ]
    count = sum(whole_numel(module.weight) for module in linear)
    return ForwardWork(base_model(model).config.get_text_config(), count, getattr(head, "in_features", 0))


def training_mfu(flops: float, *, seconds: float, world_size: int, device: torch.device) -> dict[str, float]:
    """`mfu` of a training step whose forward pass took `flops` on all ranks together; {} where the peak is unknown."""
    peak = peak_flops(device)
    return {} if peak is None else {"mfu": 3.0 * flops / (seconds * peak * world_size)}
