"""The fused backend: our own prefill and decode step for the decoders of models/decoders, on Triton kernels.

It computes what the forward pass of transformers does, on the tensors of fused_weights.py. N prompts of P tokens; M
slots (rows of the KV cache); H hidden size, V vocabulary.
"""

from collections.abc import Callable, Sequence
from functools import partial
from itertools import accumulate
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional

from pipeline.dist import RankGroup
from pipeline.generation.forwards.fused_weights import BlockWeights, DecodeWeights, Norm
from pipeline.generation.forwards.kv_cache import CacheLayout, KeyValueCache, Rest
from pipeline.generation.forwards.projections import Projection, Shard
from pipeline.kernels.attention_choice import disable_cudnn_attention
from pipeline.kernels.decode_attention import attend, store_prompts
from pipeline.kernels.decode_layers import Branch, NormWeights, add_norm, gated, rotate
from pipeline.kernels.int8_linear import dequantise_rows
from pipeline.kernels.split_kv import HeadLayout, SplitKVSchedule
from pipeline.kernels.split_matmul import int8_matmul, split_matmul
from pipeline.models.decoders.architecture import Architecture
from pipeline.tensor_ops import linear_relu

# Activations of an MLP without a gate, besides the ReLU of `linear`.
FUNCTIONS: dict[str, Callable[[Tensor], Tensor]] = {
    "silu": functional.silu,
    "gelu": functional.gelu,
    "gelu_tanh": partial(functional.gelu, approximate="tanh"),
}


def head_layout(architecture: Architecture, number: int, order: Sequence[str], shard: Shard) -> HeadLayout:
    """Return the columns of q, k and v in the joined projection of this rank, and how layer `number` attends."""
    heads, kv_heads = architecture.num_heads // shard.size, architecture.num_kv_heads // shard.size
    widths = [(heads if name == "q" else kv_heads) * architecture.head_dim for name in order]
    offsets = dict(zip(order, accumulate(widths, initial=0), strict=False))
    return HeadLayout(
        heads, kv_heads, architecture.head_dim, offsets["q"], offsets["k"], offsets["v"], architecture.scale,
        window=architecture.blocks[number].window or 0, cap=architecture.cap or 0.0,
    )  # fmt: skip


def norm_weights(norm: Norm) -> NormWeights:
    """Return what the kernels read of a norm."""
    return NormWeights(*norm.weights(), **norm.kind)


def linear(x: Tensor, projection: Projection, *, relu: bool = False) -> Tensor:
    """Return x @ W.T + b plus unmerged adapters; the ReLU is part of the product's epilogue if possible."""
    weight, bias, scale = projection.weight, projection.bias, projection.scale
    if scale is not None:
        y = int8_matmul(x, weight, scale) if x.is_cuda else None
        if y is None:
            y = functional.linear(x, dequantise_rows(weight, scale, x.dtype))
        y = y if bias is None else y.add_(bias)
    elif relu and bias is not None:
        return linear_relu(x, weight, bias)
    else:
        y = functional.linear(x, weight, bias)
    if (adapters := projection.adapters) is not None:
        y.addmm_(functional.linear(x, adapters.down.tensor), adapters.up.tensor.T, alpha=adapters.scaling)
    return y.relu_() if relu else y


def attend_prompts(q: Tensor, k: Tensor, v: Tensor, layout: HeadLayout, positions: Tensor | None = None) -> Tensor:
    """Attend causally within prompts: q (N, Hq, P, D), k and v (N, Hkv, T, D) -> (N, Hq, P, D).

    positions: (N, P), those of the queries among the T keys; None: P = T.
    """
    width, group = k.shape[2], q.shape[1] // k.shape[1]
    options: dict[str, Any] = {"scale": layout.scale, "enable_gqa": group > 1}
    if positions is None and not layout.cap and not 0 < layout.window < width:
        return functional.scaled_dot_product_attention(q, k, v, is_causal=True, **options)
    columns = torch.arange(width, device=q.device)
    distance = (columns[:, None] if positions is None else positions[:, None, :, None]) - columns
    visible = (distance >= 0) & (distance < (layout.window or width))
    if positions is None and not layout.cap:
        return functional.scaled_dot_product_attention(q, k, v, attn_mask=visible, **options)
    k, v = k.repeat_interleave(group, 1), v.repeat_interleave(group, 1)
    if not layout.cap:
        return functional.scaled_dot_product_attention(q, k, v, attn_mask=visible, scale=layout.scale)
    scores = torch.tanh(q @ k.transpose(2, 3) * (layout.scale / layout.cap)) * layout.cap
    return scores.float().masked_fill(~visible, -torch.inf).softmax(-1).to(q.dtype) @ v


def norm_heads_together(qkv: Tensor, layout: HeadLayout, norms: tuple[NormWeights, NormWeights]) -> None:
    """Norm q and k of each row in place, each over all its heads (OLMo 2)."""
    parts = ((layout.q_offset, layout.num_heads), (layout.k_offset, layout.num_kv_heads))
    for (start, heads), norm in zip(parts, norms, strict=True):
        part = qkv[:, start : start + heads * layout.head_dim]
        whole = part.contiguous()
        part.copy_(add_norm(whole, None, norm, keep_sum=False, out=whole))


def add_to(x: Tensor, branch: Branch | None, norm: Norm | None, *, out: Tensor) -> Tensor:
    """Add a branch, if any, to x (M, H) in place; return norm(x), written to `out`, or x itself without a norm."""
    if norm is None:
        return x if branch is None else x.copy_(add_branch(x, branch))
    return add_norm(x, branch, norm_weights(norm), keep_sum=branch is not None and out is not x, out=out)


def add_branch(x: Tensor, branch: Branch) -> Tensor:
    """Return x + branch, (M, H)."""
    values = branch.values.sum(0, dtype=torch.float32) if branch.values.dim() == 3 else branch.values
    return (x + values if branch.bias is None else x + values + branch.bias).to(x.dtype)


class FusedForward:
    """The forward passes (`backends.CachedForward`) on decode weights; `group` has the other shards of them."""

    preserves_free_slots = True  # a decode step neither reads nor writes slots that are not active
    fits_graph = True  # a CUDA graph can hold a decode step
    can_grow = True  # attention reads as many positions of the cache as a slot has tokens

    def __init__(self, weights: DecodeWeights, group: RankGroup | None = None) -> None:
        self.weights, self.architecture = weights, weights.architecture
        self.group, self.lockstep = group or RankGroup(1), weights.lockstep
        self.layouts = [
            head_layout(self.architecture, number, block.order, weights.shard)
            for number, block in enumerate(weights.blocks)
        ]
        first, dtype = self.layouts[0], self.architecture.head.weight.dtype  # also known before the weights are read
        self.cache_layout = CacheLayout(len(self.layouts), first.num_kv_heads, first.head_dim, dtype)
        self._rotary: dict[str, tuple[Tensor, Tensor]] = {}  # cos and sin of each kind of layers

    @property
    def device(self) -> torch.device:
        return self._head.device

    @property
    def num_copied_bytes(self) -> int:
        """Return the device memory of copied weights in bytes."""
        return self.weights.num_copied_bytes

    @property
    def _head(self) -> Tensor:
        return self.weights.weight_of(self.architecture.head)

    def refresh(self) -> None:
        """Read the trained weights again. A collective under ZeRO-3."""
        self.weights.refresh()

    def addresses(self) -> tuple[int, ...]:
        """Return the address of every tensor that a decode step reads besides its inputs."""
        return (*self.weights.addresses(), *(table.data_ptr() for tables in self._rotary.values() for table in tables))

    def prepare(self, cache_length: int) -> None:
        """Create rotary tables for `cache_length` tokens, unless there are tables that are long enough."""
        for kind, rotary in self.architecture.rotary.items():
            if kind not in self._rotary or len(self._rotary[kind][0]) < cache_length:
                self._rotary[kind] = rotary_table(rotary, cache_length, self._head, self.architecture.max_tokens)

    def new_cache(self, num_slots: int, cache_length: int) -> KeyValueCache:
        return self.cache_layout.new(num_slots, cache_length, self.device)

    def prefill(
        self, ids: Tensor, lengths: Tensor, cache: KeyValueCache, *, slots: Tensor, source: Tensor | Rest
    ) -> Tensor:
        """Compute prompts into the cache; return the logits (N, V) after each prompt's last token.

        Args:
            ids: (N, P) int64, padded on the right. lengths: (N,) int64.
            slots, source: (R,) int64: slot slots[i] gets prompt source[i] (several samples share a prompt); with a
                `Rest`, slot slots[i] gets row i behind the first tokens of its prompt, which it has.
        """
        rows, width = ids.shape
        disable_cudnn_attention()
        places = source.positions if isinstance(source, Rest) else None
        positions = torch.arange(width, dtype=torch.int32, device=ids.device).repeat(rows)
        positions = positions if places is None else places.flatten().int()

        def mix(layer: int, qkv: Tensor) -> Tensor:
            layout = self.layouts[layer]
            heads, kv_heads, head_dim = layout.num_heads, layout.num_kv_heads, layout.head_dim
            parts = ((layout.q_offset, heads), (layout.k_offset, kv_heads), (layout.v_offset, kv_heads))
            q, k, v = (  # (N, Hq, P, D), (N, Hkv, P, D)
                qkv[:, first : first + number * head_dim].view(rows, width, number, head_dim).transpose(1, 2)
                for first, number in parts
            )
            keys, values = cache.keys[layer], cache.values[layer]
            if isinstance(source, Rest):
                k, v = source.stored(k, keys, slots), source.stored(v, values, slots)
            else:
                store_prompts(qkv, keys, values, slots=slots, source=source, layout=layout, width=width)
            mixed = attend_prompts(q, k, v, layout, places)
            return mixed.transpose(1, 2).reshape(rows * width, -1)

        hidden = self._run(self._embed(ids.flatten(), positions), positions, mix)
        last = torch.arange(rows, device=ids.device) * width + lengths - 1
        return self._logits(hidden[last])

    def decode_step(self, tokens: Tensor, lengths: Tensor, active: Tensor, cache: KeyValueCache) -> Tensor:
        """Append one token to each slot: (M,) int64 tokens at positions `lengths` (M,) int32 -> (M, V) logits.

        Slots with `active` 0, (M,) int32, are not written, and their logits are undefined.
        """
        schedule = SplitKVSchedule.create(lengths, active, layout=self.layouts[0], cache_length=cache.length)

        def mix(layer: int, qkv: Tensor) -> Tensor:
            layout = self.layouts[layer]
            mixed = qkv.new_empty(len(qkv), layout.num_heads * layout.head_dim)
            keys, values = cache.keys[layer], cache.values[layer]
            attend(qkv, keys, values, schedule=schedule, layout=layout, out=mixed)
            return mixed

        return self._logits(self._run(self._embed(tokens, lengths), lengths, mix))

    def _embed(self, tokens: Tensor, positions: Tensor) -> Tensor:
        architecture, weights = self.architecture, self.weights
        x = functional.embedding(tokens, weights.weight_of(architecture.tokens))
        if architecture.embedding_scale is not None:
            x = x * architecture.embedding_scale.to(x.dtype)
        if weights.project_in is not None:
            x = linear(x, weights.project_in)
        if architecture.positions is None:
            return x
        learned = weights.weight_of(architecture.positions)
        return x + functional.embedding(positions + architecture.position_offset, learned)

    def _run(self, x: Tensor, positions: Tensor, mix: Callable[[int, Tensor], Tensor]) -> Tensor:
        """Run all layers over x (T, H), which is overwritten; `mix` is a layer's attention on its joined q, k and v."""
        blocks, architecture = self.weights.blocks, self.architecture
        if not architecture.norm_first:
            for number, block in enumerate(self.weights.iterate_layers()):
                branch = self._attention(block, number, x, positions, mix)
                add_to(x, branch, block.attention_norm, out=x)
                add_to(x, self._mlp(block, x), block.mlp_norm, out=x)
            return add_to(x, None, self.weights.final_norm, out=torch.empty_like(x))
        out = torch.empty_like(x)
        h = add_to(x, None, blocks[0].attention_norm, out=out)
        following = [*(block.attention_norm for block in blocks[1:]), self.weights.final_norm]
        for number, (block, next_norm) in enumerate(zip(self.weights.iterate_layers(), following, strict=True)):
            branch = self._attention(block, number, h, positions, mix)
            if architecture.is_parallel:
                other = add_to(x, None, block.mlp_norm, out=out)
                x.copy_(add_branch(x, branch))
                branch = self._mlp(block, other)
            else:
                branch = self._mlp(block, add_to(x, branch, block.mlp_norm, out=out))
            h = add_to(x, branch, next_norm, out=out)
        return h

    def _attention(
        self, block: BlockWeights, number: int, h: Tensor, positions: Tensor, mix: Callable[[int, Tensor], Tensor]
    ) -> Branch:
        qkv, layout, kind = linear(h, block.qkv), self.layouts[number], self.architecture.blocks[number].rotary
        norms = (
            None if block.head_norms is None else (norm_weights(block.head_norms[0]), norm_weights(block.head_norms[1]))
        )
        if norms is not None and self.architecture.joins_head_norms:
            norm_heads_together(qkv, layout, norms)
            norms = None
        if kind is not None:
            rotate(qkv, self._rotary[kind], lengths=positions, layout=layout, norms=norms)
        return self._branch(mix(number, qkv), block.out, block.attention_out_norm)

    def _mlp(self, block: BlockWeights, h: Tensor) -> Branch:
        activation, is_gated = self.architecture.activation, self.architecture.is_gated
        up = linear(h, block.up, relu=activation == "relu" and not is_gated)
        if is_gated:
            up = gated(up, activation)
        elif activation != "relu":
            up = FUNCTIONS[activation](up)
        return self._branch(up, block.down, block.mlp_out_norm)

    def _branch(self, x: Tensor, projection: Projection, norm: Norm | None) -> Branch:
        """Apply the last projection of attention or MLP, and its norm; the result is added to the residual."""
        can_split = self.group.size == 1 and norm is None and x.is_cuda
        summands = split_matmul(x, projection.weight) if can_split else None
        if summands is not None:
            return Branch(summands, projection.bias)
        y = linear(x, projection)
        if self.group.size > 1:
            self.group.add(y)
        return Branch(y if norm is None else add_norm(y, None, norm_weights(norm), keep_sum=False, out=y))

    def _logits(self, hidden: Tensor) -> Tensor:
        if self.weights.project_out is not None:
            hidden = linear(hidden, self.weights.project_out)
        return self.architecture.scaling.apply_(functional.linear(hidden, self._head))


def rotary_table(
    rotary: Callable[..., Any], positions: int, like: Tensor, max_tokens: int | None = None
) -> tuple[Tensor, Tensor]:
    """Return cos and sin, each (positions, R / 2), in `like`'s dtype and device; both halves of R rotate alike.

    max_tokens: longest sequence; later rows of the tables are not read, and repeat the last row.
    """
    ids = torch.arange(positions, device=like.device).clamp(max=(max_tokens or positions) - 1).unsqueeze(0)
    cos, sin = rotary(like.new_empty(1, 1, 1), position_ids=ids)
    half = cos.shape[-1] // 2
    return cos[0, :, :half].contiguous(), sin[0, :, :half].contiguous()
