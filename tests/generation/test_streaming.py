"""Streamed weights in one process: groups of layers, slices of several ranks, lockstep, memory, and what is refused.

tests/multi/test_ranks_streaming.py has real ranks under ZeRO-3.
"""

from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from support.decode_models import (
    DEVICE,
    FUSED,
    assert_same,
    generator_of,
    llama,
    opt,
    plain_logits,
    poll_often,
    random_prompts,
    rollouts,
    shaken_all,
)
from support.in_process import error_lines, leave_group, undone_afterwards
from support.messages import naming
from support.tiny_run import make_folder

from pipeline.dist import RankGroup
from pipeline.errors import InputError
from pipeline.generation.backends import whole_weights_fit
from pipeline.generation.episodes import generate
from pipeline.generation.forwards import fused_weights
from pipeline.generation.forwards.fused import FusedForward
from pipeline.generation.forwards.fused_weights import ALIGNMENT, group_layers
from pipeline.generation.forwards.static import StaticCacheForward
from pipeline.generation.forwards.streaming import (
    GatherBuffers,
    StreamedWeights,
    check_streamed_weights_fit,
    view_of_bytes,
)
from pipeline.generation.options import GenerationOptions, why_not_streamed
from pipeline.generation.rollouts import GenerationStopped, RandomKey, Sampling
from pipeline.generation.scheduler import Lockstep
from pipeline.generation.slots import GenerationBuffers
from pipeline.generation.sources import WeightSource
from pipeline.models.decoders.families import read_architecture
from pipeline.models.lora import add_lora
from step3_ppo.config import PPOConfig
from step3_ppo.main import main
from step3_ppo.rollout import generation_options

IDS = [5, 77]
TOLERANCE = {"rtol": 1e-5, "atol": 2e-5}

# --- groups ---


def layer(*units: int) -> list[torch.Tensor]:
    """Tensors that fill this many units of ALIGNMENT, but for their last bytes."""
    return [torch.empty(ALIGNMENT * unit - 2, dtype=torch.uint8, device="meta") for unit in units]


# (units of each layer, limit in units, layers of each group)
CUTS = {
    "as many as fit": ([2] * 7, 6, [3, 3, 1]),
    "one byte less": ([2] * 7, 6 - 1 / ALIGNMENT, [2, 2, 2, 1]),
    "layers above the limit": ([9, 1, 9, 9], 4, [1, 1, 1, 1]),
    "different sizes": ([1, 3, 4, 1, 1, 2], 4, [2, 1, 3]),
    "all in one": ([1, 2], 100, [2]),
}


@pytest.mark.parametrize("name", CUTS)
def test_groups_hold_as_many_layers_as_fit(name):
    sizes, limit, expected = CUTS[name]
    groups = group_layers([layer(size) for size in sizes], 3, int(limit * ALIGNMENT))
    assert [len(group.layers) for group in groups] == expected
    assert [number for group in groups for number in group.layers] == list(range(len(sizes)))


@pytest.mark.parametrize("ranks", [1, 2, 3, 8])
def test_tensors_do_not_overlap_in_equal_slices(ranks):
    """Tensors are aligned and do not overlap, and the slices of all ranks have one length."""
    layers = [layer(1, 4), layer(3), layer(2, 2)]
    for group in group_layers(layers, ranks, 8 * ALIGNMENT):
        specs = [spec for number in group.layers for spec in layers[number]]
        starts = [start for actual in group.starts for start in actual]
        ends = [start + spec.nbytes for start, spec in zip(starts, specs, strict=True)]
        assert all(start % ALIGNMENT == 0 for start in starts)
        assert all(end <= start for end, start in zip(ends, [*starts[1:], group.num_bytes], strict=True))
        assert group.num_bytes % (ranks * ALIGNMENT) == 0 and group.num_bytes - ends[-1] <= ranks * ALIGNMENT + 2


def test_a_tensor_is_a_view_of_its_bytes():
    buffer = torch.zeros(600, dtype=torch.uint8)
    value = torch.arange(6.0).view(2, 3).bfloat16()
    view_of_bytes(buffer, 256, value).copy_(value)
    assert torch.equal(buffer[256:268], value.view(-1).view(torch.uint8)) and buffer.count_nonzero() <= 12
    assert torch.equal(view_of_bytes(buffer.clone(), 256, value), value)


# --- slices of several ranks ---


class OneOf(RankGroup):
    """One of three ranks in this process; `peers` holds the buffers of all."""

    def __init__(self, rank: int, peers: list[GatherBuffers]) -> None:
        self.rank, self.size, self.peers, self.gathered = rank, 3, peers, 0

    def gather(self, whole: torch.Tensor, part: torch.Tensor) -> None:
        own = [piece.data_ptr() for piece in self.peers[self.rank]._slices]
        number = own.index(part.data_ptr())
        whole.copy_(torch.cat([peer._slices[number] for peer in self.peers]))
        self.gathered += 1


def all_ranks(model: Any, group_bytes: int, monkeypatch: pytest.MonkeyPatch) -> list[StreamedWeights]:
    """Return the refreshed weights of three ranks."""
    monkeypatch.setattr(fused_weights, "GROUP_BYTES", group_bytes)
    peers: list[GatherBuffers] = []
    ranks = [StreamedWeights(read_architecture(model), OneOf(rank, peers)) for rank in range(3)]
    refresh(ranks)
    peers.extend(weights._buffers for weights in ranks)
    return ranks


def refresh(ranks: list[StreamedWeights]) -> None:
    """Refresh all ranks, and overwrite the gather buffers by NaN."""
    for weights in ranks:
        weights.refresh()
        for number in range(len(weights.groups)):
            weights._buffers.whole(number).fill_(255)


@torch.no_grad()
def last_logits(weights: StreamedWeights) -> torch.Tensor:
    """Return the logits (V,) after IDS."""
    function = FusedForward(weights)
    function.prepare(4)
    one = torch.zeros(1, dtype=torch.int64, device=DEVICE)
    ids, length = torch.tensor([IDS], device=DEVICE), torch.tensor([len(IDS)], device=DEVICE)
    return function.prefill(ids, length, function.new_cache(1, 4), slots=one, source=one)[0]


def with_adapters() -> Any:
    settings: dict[str, Any] = {"dim": 3, "alpha": 12, "dropout": 0.0, "module_name": "all-linear", "seed": 1}
    wrapped = add_lora(llama(num_hidden_layers=3), only_lora=True, task="CAUSAL_LM", **settings).eval()
    shaken_all(list(wrapped.parameters()))
    return wrapped


# Bytes of a group: two layers of five, and each layer by itself.
STREAMED: dict[str, tuple[Callable[[], Any], int, list[int]]] = {
    "opt": (lambda: opt(num_hidden_layers=5), 60_000, [2, 2, 1]),
    "norms behind, projections outside": (
        lambda: opt(num_hidden_layers=3, do_layer_norm_before=False, word_embed_proj_dim=16), 1, [1, 1, 1],
    ),
    "llama": (lambda: llama(num_hidden_layers=3, attention_bias=True, mlp_bias=True), 1, [1, 1, 1]),
    "norms of heads": (FUSED["qwen3"], 1, [1, 1]),
    "adapters": (with_adapters, 1, [1, 1, 1]),
    "all in one": (opt, 10**6, [2]),
}  # fmt: skip


@pytest.mark.parametrize("name", STREAMED)
def test_gathered_layers_compute_the_models_function(name, monkeypatch):
    make, group_bytes, expected = STREAMED[name]
    model = make()
    ranks = all_ranks(model, group_bytes, monkeypatch)
    assert [len(group.layers) for group in ranks[0].groups] == expected
    for weights in ranks:
        before = last_logits(weights)
        torch.testing.assert_close(before, plain_logits(model, IDS)[-1], **TOLERANCE)
        assert weights.ranks.gathered == len(expected)
    addresses = ranks[1].addresses()
    shaken_all(list(model.parameters()))
    refresh(ranks)
    torch.testing.assert_close(last_logits(ranks[1]), plain_logits(model, IDS)[-1], **TOLERANCE)
    assert (last_logits(ranks[1]) - before).abs().max() > 1e-2
    assert ranks[1].addresses() == addresses, "a captured graph stays valid"


def test_memory_is_known_before_it_is_allocated(monkeypatch):
    """A model that shares no memory layout with its decode weights: everything is copied."""
    model = llama(num_hidden_layers=5)
    (weights, *_) = all_ranks(model, 60_000, monkeypatch)
    layers = sum(p.numel() * 4 for name, p in model.named_parameters() if "proj" in name)
    assert layers / 3 <= weights.slice_bytes < layers / 3 + 5 * 10 * ALIGNMENT
    assert weights.gather_bytes == 2 * weights.groups[0].num_bytes and len(weights.groups) == 3
    assert weights.replicated_bytes == sum(p.numel() * 4 for p in model.parameters()) - layers
    assert weights.num_bytes_to_copy == weights.slice_bytes + weights.gather_bytes + weights.replicated_bytes
    assert weights.num_copied_bytes == weights.slice_bytes + weights.gather_bytes, "norms and embeddings are views"


# --- lockstep ---

PROMPTS = random_prompts((3, 1))


class Others(Lockstep):
    """Other ranks, which run two prefills in their first scheduler iteration and decode for six iterations."""

    def __init__(self) -> None:
        self.turns, self.helped, self.stops = 0, 0, False

    def largest(self, *values: int) -> list[int]:
        if len(values) == 1:
            return list(values)
        self.turns += 1
        theirs = (self.stops, 2 if self.turns == 1 else 0, 2 if self.turns < 6 else 0, False, False, 0, False)
        return [max(pair) for pair in zip(values, theirs, strict=True)]

    def join_prefill(self) -> None:
        self.helped += 1


def test_a_rank_goes_on_as_long_as_others_do(monkeypatch):
    poll_often(monkeypatch)
    model, lockstep = llama(), Others()
    function = StaticCacheForward(model)
    function.lockstep = lockstep
    gen = generator_of(function)
    steps: list[int] = []
    advance = GenerationBuffers.decode

    def watched(buffers: GenerationBuffers, number: int) -> None:
        steps.append(number)
        advance(buffers, number)

    monkeypatch.setattr(GenerationBuffers, "decode", watched)
    assert_same(*rollouts(model, gen, PROMPTS, sampling=Sampling(3), num_slots=2))
    assert lockstep.turns == 6 and lockstep.helped == 1, "one pass of its own, of two"
    assert steps == [2] * 5


def test_a_rank_stops_where_another_does():
    lockstep = Others()
    lockstep.stops = True
    function = StaticCacheForward(opt())
    function.lockstep = lockstep
    gen = generator_of(function)
    with pytest.raises(GenerationStopped):
        generate(gen, PROMPTS, num_samples=1, num_slots=2, sampling=Sampling(3), key=RandomKey(3, "r"))
    assert lockstep.turns == 1


# --- memory ---

MIB = 2**20


@pytest.fixture
def free_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    """1024 MiB are free."""
    monkeypatch.setattr(torch.cuda, "memory_reserved", lambda device: 0)
    monkeypatch.setattr(torch.cuda, "memory_allocated", lambda device: 0)
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda device: (1024 * MIB, 2048 * MIB))


# 0.9 * 1024 MiB = 921.6 MiB hold 800 MiB of weights and 8 rows of 15 MiB.
@pytest.mark.parametrize(("weights", "row", "fit"), [(800, 15, True), (800, 16, False), (1000, 0, False)])
def test_whole_weights_fit_next_to_some_slots(free_memory, caplog, weights, row, fit):
    with caplog.at_level("INFO", logger="pipeline.generation.backends"):
        assert whole_weights_fit(weights * MIB, row * MIB, torch.device("cuda")) == fit
        assert whole_weights_fit(weights * MIB, row * MIB, torch.device("cpu"))
    (line,) = caplog.messages
    assert line == naming(f"{weights / 1024:.2f} GiB, 8 slots ... {row / 128:.2f} GiB, of 1.00 GiB")


def streamed_of(slices: int, gathered: int, replicated: int) -> Any:
    groups = [SimpleNamespace(layers=range(3)), SimpleNamespace(layers=range(3, 4))]
    sizes = {"slice_bytes": slices * MIB, "gather_bytes": gathered * MIB, "replicated_bytes": replicated * MIB}
    total = (slices + gathered + replicated) * MIB
    return SimpleNamespace(ranks=SimpleNamespace(size=4), groups=groups, num_bytes_to_copy=total, **sizes)


def test_streamed_weights_that_do_not_fit_are_refused_with_the_arithmetic(free_memory, caplog):
    with caplog.at_level("INFO", logger="pipeline.generation.forwards.streaming"):
        check_streamed_weights_fit(streamed_of(256, 512, 128), torch.device("cuda"))
    said = "0.25 GiB (1/4 of the layers) ... 0.50 GiB (2 groups of 3 layers) ... 0.12 GiB ... 0.88 GiB"
    assert caplog.text == naming(f"{said} of the 1.00 GiB")
    with pytest.raises(InputError, match="--rollout-weights: also streamed.* take 1.12 GiB .* 1.00 GiB are free"):
        check_streamed_weights_fit(streamed_of(512, 512, 128), torch.device("cuda"))
    check_streamed_weights_fit(streamed_of(10**6, 0, 0), torch.device("cpu"))


# --- the flag ---


@pytest.mark.parametrize("weights", ["auto", "whole", "streamed"])
def test_the_flag_becomes_an_option(weights):
    config = PPOConfig.model_validate(
        {
            "actor": {"model_name_or_path": "a"}, "critic": {"model_name_or_path": "c"}, "data": {"data_path": ["d"]},
            "sampling": {"rollout_weights": weights},
        }
    )  # fmt: skip
    assert generation_options(config, 1).weights == weights
    assert generation_options(PPOConfig.model_validate(config.model_dump() | {"sampling": {}}), 1).weights == "auto"


def reason(*, stage: int = 3, ranks: int = 2, size: int = 1, backend: str = "fused") -> str | None:
    """Return why these ranks cannot stream weights."""
    return why_not_streamed(partitioned=stage == 3, ranks=ranks, tensor_parallel_size=size, backend=backend)


def test_reasons_against_streamed_weights():
    assert reason() is None
    assert reason(stage=2) == "needs --actor-zero-stage 3"
    assert reason(ranks=1).startswith("got 1 rank, expected several")
    assert reason(size=2) == "got --inference-tp-size 2, expected 1"
    assert reason(backend="static") == naming("static ... fused ... --generation-engine")


@pytest.mark.parametrize("weights", ["auto", "whole"])
def test_weights_stay_whole_where_they_fit_or_must(weights, monkeypatch):
    """The device of this rank has no memory left."""
    monkeypatch.setattr("pipeline.generation.sources.whole_weights_fit", lambda *_: False)
    for reason, expected in ((None, weights == "auto"), ("something", False)):
        hybrid: Any = SimpleNamespace(
            options=GenerationOptions(weights=weights),
            device=DEVICE,
            _why_whole=reason,
        )
        function = SimpleNamespace(
            cache_layout=SimpleNamespace(bytes_per_token=1), weights=SimpleNamespace(num_bytes_to_copy=1)
        )
        assert WeightSource._must_stream(hybrid, function) == expected


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    leave_group()  # DeepSpeed keeps that of an earlier file
    yield make_folder(tmp_path_factory.mktemp("streaming"), num_train=4, num_test=2)
    leave_group()


# (flags, complaint)
REFUSED = {
    "weights that are no parts": (
        (),
        "needs --actor-zero-stage 3; else give auto",
    ),
    "one rank": (("--actor-zero-stage", 3), "1 rank ... several ... auto"),
}


@pytest.mark.parametrize("name", REFUSED)
def test_streamed_weights_that_cannot_be_had_are_refused(name, folder, tmp_path, capfd):
    flags, complaint = REFUSED[name]
    words = [
        *("--actor-model-name-or-path", folder / "base", "--critic-model-name-or-path", folder / "scorer"),
        *("--data-path", folder / "train.jsonl", "--data-split", "none", "--data-output-path", folder / "cache"),
        *("--eval-data-path", folder / "test.jsonl", "--output-dir", tmp_path / "out", "--dtype", "fp32"),
        *("--max-prompt-seq-len", 64, "--max-answer-seq-len", 4, "--per-device-generation-batch-size", 2),
        *("--per-device-train-batch-size", 2, "--max-steps", 1),
        *("--enable-tensorboard", "false", "--rollout-weights", "streamed", *flags),
    ]
    with undone_afterwards():
        assert main([str(word) for word in words]) == 2
    actual = [line for line in error_lines(capfd.readouterr().err) if not line.startswith("generation: ")]
    assert actual == [naming(f"error: --rollout-weights streamed: ... {complaint}")]
