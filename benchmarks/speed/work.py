"""Compute what a transformer costs: bytes that decoding must read, and matrix operations of its passes.

Counted: linear layers, attention over causal rows, and the head where its outputs are used. Not counted: biases, norms,
embedding look-ups, recomputation. A multiplication and its addition are two operations; weights are in 16 bits.
"""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

BYTES = 2  # of a weight, and of an element of K or V, in 16 bits


@dataclass(frozen=True, slots=True)
class Shape:
    """Sizes of a decoder.

    layer_weights: elements of the linear layers, the head left out. head_weights: vocabulary x width of the head.
    kv_width: elements of K of one token in one layer. hidden: width of the queries of one token.
    """

    layers: int
    hidden: int
    kv_width: int
    layer_weights: int
    head_weights: int

    @property
    def weight_bytes(self) -> int:
        """Return the bytes of weights that one decode step reads, whatever the batch."""
        return BYTES * (self.layer_weights + self.head_weights)

    @property
    def kv_bytes(self) -> int:
        """K and V of one token in all layers."""
        return 2 * BYTES * self.layers * self.kv_width

    def forward_flops(self, lengths: Iterable[int], *, head_tokens: int = 0) -> float:
        """A forward pass over causal rows of these lengths, the head at `head_tokens` positions.

        2 a weight and token; attention: scores and mixing, 2 * hidden each a pair, and half of length^2 pairs.
        """
        rows = list(lengths)
        pairs = sum(length * length for length in rows) / 2
        linear = 2.0 * self.layer_weights * sum(rows)
        return linear + 4.0 * self.layers * self.hidden * pairs + 2.0 * self.head_weights * head_tokens


def shape_of(config: Any) -> Shape:
    """The shape of an OPT or Llama-like configuration of transformers."""
    hidden, layers = config.hidden_size, config.num_hidden_layers
    if config.model_type == "opt":
        width = config.word_embed_proj_dim
        projections = 2 * hidden * width if width != hidden else 0
        each = 4 * hidden * hidden + 2 * hidden * config.ffn_dim
        return Shape(layers, hidden, hidden, layers * each + projections, config.vocab_size * width)
    head_dim = getattr(config, "head_dim", None) or hidden // config.num_attention_heads
    queries, kv_width = config.num_attention_heads * head_dim, config.num_key_value_heads * head_dim
    each = 2 * hidden * queries + 2 * hidden * kv_width + 3 * hidden * config.intermediate_size
    return Shape(layers, queries, kv_width, layers * each, config.vocab_size * hidden)


def lora_weights(config: Any, rank: int) -> int:
    """Trainable elements of LoRA on every linear layer but the head: rank x (inputs + outputs) of each."""
    hidden = config.hidden_size
    if config.model_type == "opt":
        sides = 4 * 2 * hidden + 2 * (hidden + config.ffn_dim)
    else:
        shape = shape_of(config)
        sides = 2 * (hidden + shape.hidden) + 2 * (hidden + shape.kv_width) + 3 * (hidden + config.intermediate_size)
    return config.num_hidden_layers * rank * sides


def state_bytes(weights: int, trainable: int) -> int:
    """Model states: 16-bit weights; of what is trained a 16-bit gradient, an fp32 copy and AdamW's two moments."""
    return BYTES * weights + trainable * (BYTES + 3 * 4)


def generation_seconds(shape: Shape, device: Any, *, prompt: int, lengths: Sequence[int]) -> float:
    """The bound of sampling responses of `lengths` tokens to prompts of `prompt` tokens.

    One pass over the prompts at full matrix throughput gives the first tokens. Each later step reads the weights once,
    and K and V of all live rows once, at full bandwidth; a row that has ended is read no more.
    """
    prefill = shape.forward_flops([prompt] * len(lengths), head_tokens=len(lengths)) / device.flops
    read = 0
    for step in range(1, max(lengths)):
        live = sum(length > step for length in lengths)
        read += shape.weight_bytes + shape.kv_bytes * live * (prompt + step)
    return prefill + read / device.bandwidth


def ppo_flops(
    actor: Shape, critic: Shape, *, prompt: int, lengths: Sequence[int], frozen: bool = False
) -> dict[str, float]:
    """Matrix work of scoring (reference, reward, values) and of training (actor and critic, forward and twice that).

    frozen: the actor's weights are a frozen base under LoRA, whose backward pass makes no gradients of weights.
    """
    rows, answered = [prompt + length for length in lengths], sum(lengths)
    policy = actor.forward_flops(rows, head_tokens=answered)
    values = critic.forward_flops(rows)
    return {"score": policy + 2 * values, "train": (2 if frozen else 3) * policy + 3 * values}


def step_bounds(
    actor: Shape,
    critic: Shape,
    device: Any,
    *,
    prompt: int,
    lengths: Sequence[int],
    gpus: int = 1,
    frozen: bool = False,
) -> dict[str, float]:
    """The least seconds of a PPO step on `gpus` devices with `lengths` responses on each, and samples/s of all."""
    flops = ppo_flops(actor, critic, prompt=prompt, lengths=lengths, frozen=frozen)
    found = {
        "generate_s": generation_seconds(actor, device, prompt=prompt, lengths=lengths),
        "score_s": flops["score"] / device.flops,
        "train_s": flops["train"] / device.flops,
    }
    found["step_s"] = sum(found.values())
    found["generate_tokens_per_s"] = gpus * sum(lengths) / found["generate_s"]
    found["samples_per_s"] = gpus * len(lengths) / found["step_s"]
    return found
