"""Matrix operations of training steps, and peak rates of devices: the two numbers behind MFU.

The count includes linear layers, attention and head, on real tokens, with the gradients that training needs. It
excludes recomputation under gradient checkpointing and passes over padding, because they are no progress.
"""

import re
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from transformers.pytorch_utils import Conv1D

from pipeline.models.loading import base_model

# Dense 16-bit TFLOP/s of a device, by a word of its name: vendors' data sheets, but for the SXM forms of H100 and H200,
# which have the same cores and reach this on large matrices (989 in the data sheet).
PEAK_TFLOPS = {
    "H200": 790.0, "GH200": 790.0, "H100": 790.0, "A100": 312.0, "A6000": 155.0, "L40S": 362.0, "L40": 181.0,
    "V100": 125.0,
}  # fmt: skip


def peak_flops(device: torch.device) -> float | None:
    """Return the matrix operations per second of a CUDA device in 16 bits, or None if it is unknown."""
    if device.type != "cuda":
        return None
    words = re.split(r"[ -]", torch.cuda.get_device_name(device))
    return next((PEAK_TFLOPS[word] * 1e12 for word in words if word in PEAK_TFLOPS), None)


@dataclass(frozen=True, slots=True)
class TrainingWork:
    """The size of a model's passes in training.

    layers: number of layers with attention.
    attention_width: width of all heads together.
    weights: weights of the linear layers without the head.
    trained_weights: those of `weights` that are trained.
    head_weights: weights of the head.
    trained_head_weights: those of `head_weights` that are trained.
    """

    layers: int
    attention_width: int
    weights: int
    trained_weights: int
    head_weights: int
    trained_head_weights: int

    def flops(self, *, num_tokens: int, num_squares: int, num_head_tokens: int = 0) -> float:
        """Count the operations of forward and backward passes over causal rows, with the head at part of their tokens.

        Forward: 2 for each weight and token; attention: 2 * width * length^2 for each row and layer. Backward: as much
        for the gradients of inputs; those of weights only where weights are trained (with LoRA few are); attention has
        two inputs for each of its products.

        Args:
            num_squares: the sum of the rows' squared lengths.
        """
        linear = 4.0 * self.weights + 2.0 * self.trained_weights
        head = 4.0 * self.head_weights + 2.0 * self.trained_head_weights
        attention = 6.0 * self.layers * self.attention_width * num_squares
        return num_tokens * linear + num_head_tokens * head + attention


def training_work(model: nn.Module) -> TrainingWork:
    """Measure a transformers or peft model; ZeRO-3's partitioned weights are counted whole.

    The work of an encoder-decoder model is not counted: its tokens go through one half of the weights each.
    """
    inner = base_model(model)
    if inner.config.is_encoder_decoder:
        return TrainingWork(0, 0, 0, 0, 0, 0)
    head = inner.get_output_embeddings() if hasattr(inner, "get_output_embeddings") else None
    linear = [
        module
        for name, module in model.named_modules()
        if isinstance(module, (torch.nn.Linear, Conv1D)) and module is not head and "score" not in name.split(".")
    ]
    heads = [] if head is None else [head]
    config = base_model(model).config.get_text_config()
    # Heads may be wider than the hidden states together (Qwen3), and not every architecture has heads.
    width = getattr(config, "num_attention_heads", 0) * (getattr(config, "head_dim", None) or 0) or config.hidden_size
    return TrainingWork(config.num_hidden_layers, width, *numel(linear), *numel(heads))


def numel(layers: list[Any]) -> tuple[int, int]:
    """Return the number of weights of all linear layers, quantised or partitioned, and of those that are trained."""
    shapes = [(x.nx, x.nf) if isinstance(x, Conv1D) else (x.in_features, x.out_features) for x in layers]
    sizes = [(n * m, layer.weight.requires_grad) for (n, m), layer in zip(shapes, layers, strict=True)]
    return sum(size for size, _ in sizes), sum(size for size, is_trained in sizes if is_trained)


def training_mfu(flops: float, *, seconds: float, world_size: int, device: torch.device) -> dict[str, float]:
    """Return `mfu` of a training step of `flops` operations on all ranks; {} where these or the peak are unknown."""
    peak = peak_flops(device)
    return {} if peak is None or not flops else {"mfu": flops / (seconds * peak * world_size)}
