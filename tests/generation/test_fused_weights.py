"""Decode weights follow the trained ones: no copy is stale, and what is adjacent in memory is a view."""

import weakref
from collections.abc import Iterator
from itertools import product

import numpy as np
import pytest
import torch
from support.decode_models import DEVICE, FUSED, PAD, fused, llama, opt, plain_logits, shaken, with_lora
from torch import nn

from pipeline.generation.forwards.fused import FusedForward, linear
from pipeline.generation.forwards.fused_weights import DecodeWeights
from pipeline.generation.forwards.projections import (
    Projection,
    Shard,
    WeightTensor,
    bias_shards,
    joined_view,
    weight_shards,
)
from pipeline.kernels.int8_linear import Int8Linear
from pipeline.models.decoders.architecture import Rows
from pipeline.models.decoders.families import read_architecture

IDS = [5, 77]
TOLERANCE = {"rtol": 1e-5, "atol": 2e-5}


@torch.no_grad()
def last_logits(function: FusedForward) -> torch.Tensor:
    """Return the logits (V,) after IDS, which depend on every weight."""
    function.prepare(4)
    one = torch.zeros(1, dtype=torch.int64, device=DEVICE)
    ids, length = torch.tensor([IDS], device=DEVICE), torch.tensor([len(IDS)], device=DEVICE)
    return function.prefill(ids, length, function.new_cache(1, 4), slots=one, source=one)[0]


# The parameters that only this model has: all others occur in the two models of which every parameter is tested.
OWN = {"opt": "", "llama": "", "opt-350m": "project", "qwen2": "layers.1.self_attn", "qwen3": "1.self_attn"}
JOINED = {"phi-3": "layers.1.", "gpt2": "h.1.", "pythia": "layers.1.", "olmo-2": "layers.1.", "gemma-3": "layers.1."}


@pytest.mark.few(1)
@pytest.mark.parametrize("name", [*OWN, *(pytest.param(name, marks=pytest.mark.slow) for name in JOINED)])
def test_no_tensor_is_stale_after_a_refresh(name):
    """One parameter changes at a time; the logits are the model's again."""
    model = FUSED[name]()
    function = fused(model)
    before = last_logits(function)
    stale = []
    for key, parameter in model.named_parameters():
        if (OWN | JOINED)[name] not in key:
            continue
        kept = parameter.detach().clone()
        shaken(parameter)
        function.weights.refresh()
        expected = plain_logits(model, IDS)[-1]
        # A bias of the keys shifts all scores of a query alike: no model feels it.
        moved = (expected - before).abs().max() > 1e-3 or key.endswith("k_proj.bias")
        if not moved or not torch.allclose(last_logits(function), expected, **TOLERANCE):
            stale.append(key)
        parameter.data.copy_(kept)
    assert stale == []


def test_a_refresh_keeps_every_address():
    """A captured graph stays valid."""
    model = llama(attention_bias=True)
    function = fused(model)
    last_logits(function)
    addresses = function.addresses()
    for parameter in model.parameters():
        shaken(parameter)
    function.weights.refresh()
    assert function.addresses() == addresses and len(set(addresses)) == len(addresses)
    function.prepare(4)
    assert function.addresses() == addresses


def test_a_change_without_a_refresh_is_not_seen_where_there_are_copies():
    """The tests above rely on this: there is something to refresh."""
    model = llama()
    function = fused(model)
    before = last_logits(function)
    shaken(model.model.layers[1].self_attn.k_proj.weight)
    assert torch.equal(last_logits(function), before)


# --- views instead of copies ---


@torch.no_grad()
def flattened(model: nn.Module) -> None:
    """Lay all matrices out in one buffer and all vectors in another, in their order, as DeepSpeed's groups do."""
    for is_matrix in (True, False):
        group = [parameter for parameter in model.parameters() if (parameter.dim() > 1) == is_matrix]
        buffer = torch.cat([parameter.flatten() for parameter in group])
        start = 0
        for parameter in group:
            end = start + parameter.numel()
            parameter.data = buffer[start:end].view_as(parameter)
            start = end


@pytest.mark.parametrize(
    "name", ["opt", "opt-350m", "llama, own keys, tied", "llama with biases", "qwen2", "qwen3", "phi-3", "gpt2"]
)
def test_nothing_is_copied_where_weights_are_adjacent(name):
    model = FUSED[name]()
    flattened(model)
    function = fused(model)
    assert function.weights.num_copied_bytes == 0
    order = "kvq" if name.startswith("opt") else "qkv"
    assert all(block.order == list(order) for block in function.weights.blocks)
    torch.testing.assert_close(last_logits(function), plain_logits(model, IDS)[-1], **TOLERANCE)
    for parameter in model.parameters():
        shaken(parameter)
    torch.testing.assert_close(last_logits(function), plain_logits(model, IDS)[-1], **TOLERANCE)


def test_joined_projections_alone_are_copied_elsewhere():
    model = opt()
    layer = model.model.decoder.layers[0].self_attn
    joined = [getattr(layer, f"{name}_proj") for name in "qkv"]
    numbers = sum(p.numel() for module in joined for p in module.parameters())
    assert fused(model).weights.num_copied_bytes == 2 * numbers * 4


def test_of_heads_that_are_interleaved_a_copy_is_made_of_one_projection():
    """GPT-NeoX; a quarter of a layer."""
    model = FUSED["pythia"]()
    layer = model.gpt_neox.layers[0].attention.query_key_value
    assert known_before(DecodeWeights(read_architecture(model))) == 2 * 4 * sum(p.numel() for p in layer.parameters())


def pieces() -> Iterator[tuple[str, list[torch.Tensor]]]:
    buffer = torch.arange(60.0)
    first, second, third = (buffer[start : start + 20].view(5, 4) for start in (0, 20, 40))
    other = torch.zeros(5, 4)
    array = np.zeros(40, dtype=np.float32)
    yield "a gap", [first, third]
    yield "the other order", [second, first]
    yield "one twice", [first, first]
    yield "another storage", [first, other]
    yield "the next address of another storage", [torch.from_numpy(array[:20]), torch.from_numpy(array[20:])]
    yield "another width", [first, buffer[20:40].view(4, 5)]
    yield "another type", [first, buffer.view(torch.int32)[20:40].view(5, 4)]
    yield "not contiguous", [first, buffer[20:40].view(4, 5).T]
    yield "a first part that is not contiguous", [buffer[0:20].view(4, 5).T, second]


@pytest.mark.parametrize(("what", "parts"), pieces(), ids=[what for what, _ in pieces()])
def test_what_is_not_adjacent_is_no_view(what, parts):
    assert joined_view(parts) is None


def test_what_is_adjacent_is_one_view():
    buffer = torch.arange(60.0)
    parts = [buffer[8:20].view(3, 4), buffer[20:40].view(5, 4), buffer[40:44].view(1, 4)]
    actual = joined_view(parts)
    assert actual is not None and torch.equal(actual, torch.cat(parts)) and actual.data_ptr() == parts[0].data_ptr()
    buffer[30] = -1.0
    assert torch.equal(actual, torch.cat(parts))
    vectors = joined_view([buffer[3:5], buffer[5:9]])
    assert vectors is not None and vectors.tolist() == [3.0, 4.0, 5.0, 6.0, 7.0, 8.0]
    assert torch.equal(joined_view(parts[:1]), parts[0])


def test_a_weight_tensor_turns_from_copy_to_view_and_back():
    """DeepSpeed may move weights; the tensor then follows."""
    sources = [torch.zeros(2, 3), torch.ones(1, 3)]
    tensor = WeightTensor(lambda: sources, torch.empty(3, 3, device="meta"), copied=False)
    tensor.refresh()
    assert tensor.num_copied_bytes == 36 and tensor.tensor.sum() == 3
    buffer = torch.arange(9.0)
    sources[:] = [buffer[:6].view(2, 3), buffer[6:].view(1, 3)]
    tensor.refresh()
    assert tensor.num_copied_bytes == 0 and tensor.tensor.data_ptr() == buffer.data_ptr()
    sources[:] = [torch.full((2, 3), 4.0), torch.full((1, 3), 5.0)]
    tensor.refresh()
    assert tensor.tensor.flatten().tolist() == [4.0] * 6 + [5.0] * 3


# --- LoRA ---


@pytest.mark.parametrize(
    ("make", "module_name"),
    [
        *product([opt, llama], ["all-linear", "v_proj"]),
        *(pytest.param(FUSED[name], "all-linear", marks=pytest.mark.slow) for name in ("phi-3", "gpt2", "pythia")),
    ],
)
def test_adapters_are_added_to_a_copy(make, module_name):
    wrapped = with_lora(make(), module_name=module_name)
    before = {name: value.clone() for name, value in wrapped.state_dict().items()}
    function = fused(wrapped)
    torch.testing.assert_close(last_logits(function), plain_logits(wrapped, IDS)[-1], **TOLERANCE)
    with wrapped.disable_adapter():
        assert (plain_logits(wrapped, IDS)[-1] - last_logits(function)).abs().max() > 1e-2
    for name, parameter in wrapped.named_parameters():
        assert torch.equal(parameter, before[name]), name
        if "lora_" in name:
            shaken(parameter)
    function.weights.refresh()
    torch.testing.assert_close(last_logits(function), plain_logits(wrapped, IDS)[-1], **TOLERANCE)


def test_adapters_of_the_projections_around_the_layers_are_added():
    """OPT-350m's embeddings are narrower than its layers: all-linear adds adapters there too."""
    model = with_lora(FUSED["opt-350m"]())
    adapters = {name: value for name, value in model.named_parameters() if "project_" in name and "lora_" in name}
    assert len(adapters) == 4
    for parameter in adapters.values():
        shaken(parameter)
    torch.testing.assert_close(last_logits(fused(model)), plain_logits(model, IDS)[-1], **TOLERANCE)


def test_copies_are_freed_with_the_decode_weights():
    """The next update needs their memory at once, and garbage may be collected much later."""
    weights = fused(llama()).weights
    copy = weakref.ref(weights.blocks[0].qkv.weight)
    assert copy() is not None and weights.num_copied_bytes
    del weights
    assert copy() is None


def test_what_will_be_copied_is_known_before():
    """Copies are of layers that are not adjacent, have adapters, or are sharded over two ranks; views need none."""
    for model in (llama(), opt()):
        assert known_before(DecodeWeights(read_architecture(model))) > 0
        for rank in (0, 1):
            assert known_before(DecodeWeights(read_architecture(model), Shard(rank, 2))) > 0
        flattened(model)
        assert known_before(DecodeWeights(read_architecture(model))) < 1000, "biases at the most"
    for name in ("v_proj", "o_proj", "up_proj", "down_proj"):
        assert known_before(DecodeWeights(read_architecture(with_lora(llama(), module_name=name)))) > 0


def known_before(weights: DecodeWeights) -> int:
    """Return the bytes that `refresh` copies, which it must have announced."""
    said = weights.num_bytes_to_copy
    weights.refresh()
    assert weights.num_copied_bytes == said
    return said


def test_adapters_are_added_where_the_weights_are_adjacent_too():
    model = llama()
    flattened(model)
    wrapped = with_lora(model, module_name="q_proj")
    torch.testing.assert_close(last_logits(fused(wrapped)), plain_logits(wrapped, IDS)[-1], **TOLERANCE)


# --- int8 bases, whose adapters stay unmerged ---


@pytest.mark.parametrize(
    ("name", "module_name"),
    [("llama with biases", "all-linear"), ("llama", "v_proj"), ("opt-350m", "all-linear"),
     *(pytest.param(name, "all-linear", marks=pytest.mark.slow) for name in JOINED)],
)  # fmt: skip
def test_an_int8_base_with_adapters_is_the_models_function(name, module_name):
    model = with_lora(FUSED[name](), int8=True, module_name=module_name)
    function = fused(model)
    torch.testing.assert_close(last_logits(function), plain_logits(model, IDS)[-1], **TOLERANCE)
    addresses = function.addresses()
    for key, parameter in model.named_parameters():
        if "lora_" in key:
            shaken(parameter)
    before = last_logits(function)
    function.weights.refresh()
    assert function.addresses() == addresses and (last_logits(function) - before).abs().max() > 1e-3
    torch.testing.assert_close(last_logits(function), plain_logits(model, IDS)[-1], **TOLERANCE)


def test_adapters_of_different_scales_on_int8():
    model = with_lora(llama(), int8=True)
    for number, module in enumerate(one for one in model.modules() if hasattr(one, "lora_A")):
        module.scaling["default"] *= 1 + number
    torch.testing.assert_close(last_logits(fused(model)), plain_logits(model, IDS)[-1], **TOLERANCE)


def test_adapters_of_some_joined_layers_have_the_type_of_the_model():
    """The layers between them add no scale's fp32 to the product of 16-bit values."""
    model = with_lora(llama(), int8=True, module_name="v_proj").bfloat16().get_base_model()
    attention = model.model.layers[0].self_attn
    layers = [attention.q_proj, attention.k_proj, attention.v_proj]
    x = torch.randn(5, 32, device=DEVICE, dtype=torch.bfloat16)
    projection = Projection(layers, 0, Shard())
    for tensor in projection.tensors:
        tensor.refresh()
    expected = torch.cat([layer(x) for layer in layers], 1)
    torch.testing.assert_close(linear(x, projection), expected, rtol=2e-2, atol=2e-2)


def test_codes_are_never_copied():
    """They are moved next to each other once, and the model reads them there."""
    model = with_lora(llama(), int8=True)
    before = plain_logits(model, IDS)
    layers = [module for module in model.modules() if isinstance(module, Int8Linear)]
    copied = known_before(DecodeWeights(read_architecture(model)))
    adapters = sum(parameter.nbytes for name, parameter in model.named_parameters() if "lora_" in name)
    scales = sum(layer.scale.nbytes for layer in layers)
    assert copied < 3 * adapters + scales < sum(4 * layer.weight.numel() for layer in layers)
    weights = fused(model).weights
    viewed = {part.weight.untyped_storage().data_ptr() for block in weights.blocks for part in block.projections}
    assert viewed == {layer.weight.untyped_storage().data_ptr() for layer in layers} and len(viewed) == 8
    assert plain_logits(model, IDS).equal(before)
    assert known_before(DecodeWeights(read_architecture(model))) == copied, "the order of q, k and v stays"


@pytest.mark.parametrize("dim", [0, 1])
def test_shards_of_int8_layers_with_adapters_make_up_the_whole(dim):
    attention = with_lora(llama(num_key_value_heads=2), int8=True).get_base_model().model.layers[0].self_attn
    layers, x = [attention.q_proj, attention.v_proj], torch.randn(5, 32, device=DEVICE)
    parts = []
    for rank in range(2):
        projection = Projection(layers, dim, Shard(rank, 2))
        for tensor in projection.tensors:
            tensor.refresh()
        parts.append(linear(x if dim == 0 else x.chunk(2, 1)[rank], projection).unflatten(1, (2, -1)))
    found = torch.cat(parts, 2) if dim == 0 else sum(parts)
    expected = torch.stack([layer(x) for layer in layers], 1)
    torch.testing.assert_close(found, expected, **TOLERANCE)


# --- shards ---


def test_shards_make_up_the_whole():
    layer = torch.nn.Linear(6, 4)
    shards = [Shard(rank, 2) for rank in range(2)]
    for dim in (0, 1):
        weights = [weight_shards([layer], dim, shard)[0] for shard in shards]
        assert torch.equal(torch.cat(weights, dim), layer.weight)
    assert torch.equal(torch.cat([bias_shards([layer], 0, shard)[0] for shard in shards]), layer.bias)
    assert torch.equal(sum(bias_shards([layer], 1, shard)[0] for shard in shards), layer.bias)
    assert PAD not in IDS


def test_shards_of_a_projection_that_joins_several_have_their_heads_of_each():
    """Two heads of two channels, of q, k and v one after the other, or interleaved."""
    layer = torch.nn.Linear(1, 12)
    with torch.no_grad():
        layer.weight.copy_(torch.arange(12.0)[:, None])
    apart = [Rows(layer, (4, 4, 4), index) for index in range(3)]
    mixed = [Rows(layer, (2, 2, 2), index, 2) for index in range(3)]
    for parts, expected in ((apart, [2, 3, 6, 7, 10, 11]), (mixed, [6, 7, 8, 9, 10, 11])):
        found = torch.cat(weight_shards(parts, 0, Shard(1, 2))).flatten()
        assert found.tolist() == expected
