"""Memory of states by hand-worked cases, real engines and DeepSpeed's own estimators; of runs by what was measured."""

from dataclasses import replace
from typing import Any

import pytest
import torch
from deepspeed.runtime.zero.stage_1_and_2 import estimate_zero2_model_states_mem_needs
from engine.test_engine_memory import accumulate, tiny_engine
from support.ds_arguments import built
from support.in_process import group_of_one
from support.kept_tables import table_lines
from support.marks import of_tested_torch
from support.source_tree import ROOT

from benchmarks.speed.planned import (
    FOUR,
    OPT,
    RUNS,
    peak_summary,
    planned,
    planner_of,
    ppo,
    table,
    time_summary,
    time_table,
)
from pipeline.configuration.groups import DeepSpeedConfig
from pipeline.engine.memory import model_memory
from pipeline.engine.state import masters
from pipeline.files import GIB
from pipeline.launching.target import Target
from pipeline.planning.measurement import ModelSize
from pipeline.planning.page import model_lines, phase_lines
from pipeline.planning.states import page_locked, states_of
from pipeline.training.steps import step_together

KEPT = {name: table_lines("plans_202611.jsonl.bz2", name) for name in ("memory", "times")}
N = 10**9
SIZE = ModelSize(weights=N, trained=N, embeddings=10**8, linear=8 * 10**8, largest=10**8, layer=2 * 10**7,
                 num_bytes=2 * N, element=2)  # fmt: skip


def states(stage: int, ranks: int, size: ModelSize = SIZE, *, zero: Any = None, **settings: object):
    user = {"zero_optimization": zero or {}}
    json = built(DeepSpeedConfig(**settings), zero_stage=stage, world_size=ranks, user_json=user)
    return states_of(size, json, "fp32", Target("GPU", 80 * GIB, (ranks,)), gather="auto")


def test_states_of_each_zero_stage_by_hand():
    """A weight in bf16 has 2 bytes, its gradient 2, the master 4, the moments 8; 8 ranks, buckets of 2e8 x 2 bytes."""
    plain = states(0, 8)
    assert (plain.weights, plain.optimizer, plain.gradients, plain.step) == (2 * N, 12 * N, 2 * N, 4 * N)
    first = states(1, 8)
    assert (first.weights, first.optimizer, first.gradients) == (2 * N, 12 * N / 8, 2 * N)
    second = states(2, 8)
    assert (second.optimizer, second.gradients, second.buckets) == (12 * N / 8, 2 * N / 8, 8 * 10**8)  # two buckets
    assert states(2, 8, zero={"overlap_comm": False, "reduce_bucket_size": 5e8}).buckets == 10**9
    assert states(2, 1).buckets == 0  # nothing to reduce
    third = states(3, 8)
    assert (third.weights, third.optimizer, third.lasting_gradients) == (2 * N / 8, 12 * N / 8, 2 * N / 8 + 4 * 10**8)
    assert third.step == (2 + 4) * N / 8  # gradients of a sub-group as one tensor, and a copy in fp32
    assert states(3, 1, sub_group_size=10**8).step == (2 + 4) * 10**8
    assert third.gathered == 2 * N and states(3, 8, zero3_gather="auto").host == 0  # an eighth of the device: whole
    assert states(3, 1).gathered == 0  # a single partition is used where it lies
    offloaded = states(3, 1, offload_parameters=True)
    assert offloaded.weights == 0 and offloaded.gathered == 2 * N  # all weights are below 1e9 live ones


def test_moments_in_8_bits_by_hand():
    """The master in fp32, a byte for each moment, and a scale in fp32 for 256 of each."""
    for stage, ranks in ((0, 1), (2, 8)):
        json = built(zero_stage=stage, world_size=ranks, optimizer_states="8bit")
        held = states_of(SIZE, json, "8bit", Target("GPU", 80 * GIB, (ranks,)), gather="auto")
        assert held.optimizer == (4 + 2 + 2 * 4 / 256) * N / ranks
        assert replace(held, optimizer=0) == replace(states(stage, ranks), optimizer=0)


def test_states_in_bf16_by_hand():
    bf16 = {"bf16": {"enabled": True, "bf16_master_weights_and_grads": True, "bf16_optimizer_states": True}}
    held = states_of(SIZE, built(user_json=bf16), "fp32", Target("GPU", 80 * GIB, (8,)), gather="auto")
    assert (held.optimizer, held.step) == ((2 + 2 + 2) * N / 8, (2 + 2) * N / 8)


def test_offload_puts_states_on_the_host():
    """Gradients in fp32 are there, too; below ZeRO stage 3 the new weights, at stage 3 the gradients in bf16."""
    unpinned = {"offload_optimizer": {"pin_memory": False}, "offload_param": {"pin_memory": False}}
    optimizer = states(2, 8, zero=unpinned, offload=True)
    assert (optimizer.optimizer, optimizer.gradients, optimizer.host) == (0, 0, (4 + 8 + 4 + 2) * N / 8)
    both = states(3, 8, zero=unpinned, offload=True, offload_parameters=True)
    assert (both.weights, both.optimizer, both.host) == (0, 0, (2 + 16 + 2) * N / 8)


def test_page_locked_blocks_are_rounded_up_to_powers_of_two():
    """125,000,000 weights: 500 MB in fp32 are 2**29 bytes, 250 MB in bf16 2**28; sub-groups of 30 million 2**27."""
    share = N // 8
    below = states(2, 8, offload=True)
    assert below.host == 8 * share + 2 * 2**29 + 2**28  # moments; master, gradient; weights
    smaller = states(3, 8, offload=True, sub_group_size=30_000_000)
    assert smaller.host == 12 * share + 4 * 2**27 + 2**25 + 2**28  # four groups, and one of 5 million
    both = states(3, 8, offload=True, offload_parameters=True)
    assert both.host == 12 * share + 2**29 + 2**28 + 2**28 + 2 * share  # those of loading stay page-locked
    assert [page_locked(size) for size in (0, 1, 4, 5)] == [0, 1, 4, 8]


def test_a_pass_without_gradients_holds_a_layer_and_embeddings_at_zero_stage_3():
    """Of 100 billion weights in layers of 2 billion, no billion is whole until it is expected again."""
    large = replace(SIZE, weights=100 * N, trained=100 * N, num_bytes=200 * N, layer=2 * 10**8)
    held = states(3, 8, large)
    assert (held.gathered, held.passing) == (2 * N, 2 * (2 * 10**8 + 10**8))
    assert states(3, 8).passing == states(3, 8).gathered == 2 * N  # gathered once a phase, whatever it does


def test_weights_on_a_disk_leave_buffers_on_the_host():
    disk = {"device": "nvme", "nvme_path": "/disk", "buffer_count": 14, "buffer_size": 1000, "max_in_cpu": 100}
    json = {"zero_optimization": {"stage": 3, "offload_param": disk}}
    held = states_of(SIZE, json, None, Target("GPU", 80 * GIB, (8,)), gather="auto")
    assert (held.weights, held.host) == (0, 2 * (14 * 1000 + 100))
    assert held.gathered == 2 * N  # all weights stay below 1e9 live ones until they are used again
    json["zero_optimization"]["stage3_max_reuse_distance"] = 0
    at_once = states_of(SIZE, json, None, Target("GPU", 80 * GIB, (8,)), gather="auto")
    assert at_once.gathered == 2 * (2 * 10**7 + 10**8)  # a layer and the embeddings: nothing is prefetched


@pytest.mark.parametrize("ranks", [2, 4, 8])
def test_zero_2_agrees_with_deepspeeds_estimator(ranks):
    """It counts 16-bit weights, and 18 bytes a weight over the ranks: gradients in 16 and 32 bits, master, moments."""
    _, on_device = estimate_zero2_model_states_mem_needs(N, ranks, 1, cpu_offload=False)
    held = states(2, ranks)
    fp32_gradients = held.step - held.gradients  # beside a flat copy of the 16-bit ones
    assert held.weights + held.gradients + held.optimizer + fp32_gradients == on_device
    assert states(2, ranks, offload=True).weights == estimate_zero2_model_states_mem_needs(N, ranks, 1)[1]


@pytest.mark.parametrize("stage, dtype", [(0, "fp32"), (0, "bf16"), (1, "fp32"), (1, "bf16"), (2, "bf16"), (3, "bf16")])
def test_states_are_those_of_a_real_engine(stage, dtype):
    """After a step, up to DeepSpeed's padding to even numbers: 33 weights, and its buckets."""
    with group_of_one():
        engine = tiny_engine(stage, dtype)
        accumulate(engine)
        assert step_together([engine], 1.0, loss=0.0)
        real = model_memory(engine, torch.device("cpu"))
        numel = sum(master.numel() for master, _ in masters(engine))
    element = 2 if dtype == "bf16" else 4
    size = replace(SIZE, weights=numel, trained=numel, num_bytes=numel * element, element=element)
    json = built(DeepSpeedConfig(dtype=dtype), zero_stage=stage, dtype=dtype, world_size=1, device="cpu")
    json["zero_optimization"]["stage"] = stage
    held = states_of(size, json, "fp32", Target("GPU", GIB, (1,)), gather="auto")
    bucket = element * json["zero_optimization"].get("reduce_bucket_size", 0)
    assert held.weights == pytest.approx(real.weights, abs=4 * element)
    assert held.optimizer == pytest.approx(real.optimizer, abs=12 * 4)
    gradients = held.gradients + (held.lasting_gradients - bucket if stage == 3 else 0)
    assert gradients == pytest.approx(real.gradients, abs=4 * element)


def within(value: float, measured: float) -> bool:
    return abs(value - measured) <= max(0.05 * measured, 1.0)


@pytest.mark.parametrize("number", [0, 1, *(pytest.param(n, marks=pytest.mark.slow) for n in range(2, len(RUNS)))])
def test_peaks_are_those_that_were_measured(number):
    """Within the larger of 5 % and 1 GiB."""
    assert within(planned(RUNS[number]), RUNS[number].measured)


@of_tested_torch
@pytest.mark.slow
@pytest.mark.parametrize(("report", "lines"), [("memory", table), ("times", time_table)])
def test_the_kept_rows_are_the_scripts(report, lines):
    head, _, *rows = lines()
    assert [head, *rows] == [*KEPT[report][:1], *KEPT[report][2:]] and len(rows) > 25


@pytest.mark.parametrize(("report", "summary"), [("memory", peak_summary), ("times", time_summary)])
def test_the_summary_in_the_report_is_that_of_the_kept_rows(report, summary):
    text = (ROOT / f"benchmarks/reports/{report}.md").read_text(encoding="utf-8")
    assert "\n".join(summary(KEPT[report])) in text


def test_a_summary_counts_what_is_near_and_shows_the_farthest():
    """A phase's rows of a run that was not made have no difference, and a phase that a run has not is an empty cell."""
    peaks = ["head", "rule", "| a | 1 | train | 3.0 | 4.1 | -1.1 | |", "| b | 1 | train | 33.0 | 32.0 | +1.0 | yes |",
             "| c | 4 | train | 9.0 | not run | | |", "| d | 1 | score | 41.9 | 40.0 | +1.9 | yes |",
             "| e | 1 | score | 42.1 | 40.0 | +2.1 | |"]  # fmt: skip
    assert peak_summary(peaks)[2:] == [
        "| train | 2 | 1 | -1.1: 3.0 for 4.1 | +1.0: 33.0 for 32.0 |",
        "| score | 2 | 1 | +1.9: 41.9 for 40.0 | +2.1: 42.1 for 40.0 |",
    ]
    seconds = [
        "head",
        "rule",
        "| a | 1 |  |  | 0.79 / 1.00 (**-21%**) |",
        "| b | 1 | 2.2 / 2.0 (+10%) | 1 / 1 (+0%) | 1.20 / 1.00 (+20%) |",
    ]
    assert time_summary(seconds)[2:] == [
        "| generate | 1 | 1 | 1 | +10 %: 2.2 / 2.0 | +10 %: 2.2 / 2.0 |",
        "| score | 1 | 1 | 1 | +0 %: 1 / 1 | +0 %: 1 / 1 |",
        "| train | 2 | 0 | 1 | -21 %: 0.79 / 1.00 | +20 %: 1.20 / 1.00 |",
    ]


def plan_of(words: str, target: str):
    planner, resolved = planner_of("ppo", words, target)
    return planner.memory(resolved)


@pytest.mark.slow
def test_the_flag_alone_says_that_moments_have_8_bits(tmp_path):
    """DeepSpeed's key that lets it take such an optimizer is not the sign of one: a user's file may hold it, too."""
    (tmp_path / "ds.json").write_text('{"zero_allow_untested_optimizer": true}')
    words = ("", f"--deepspeed-config {tmp_path / 'ds.json'}", "--optimizer-states 8bit")
    plain, file, rounded = (plan_of(ppo(OPT, 16, 4, 2, more), "1xH200") for more in words)
    assert file == plain
    for role, held in rounded.states.items():
        saved = (8 - 2 - 8 / 256) * plain.sizes[role].trained if plain.states[role].optimizer else 0
        assert held.optimizer == pytest.approx(plain.states[role].optimizer - saved, abs=1)


def test_what_makes_room_for_what():
    """The KV cache: 24 layers x keys and values of 2,048 numbers in bf16; 64 slots x 512 tokens: 6 GiB."""
    whole = plan_of(ppo(OPT, 16, 4, 2), "1xH200")
    assert whole.phases["generate"].rollout == 6 * GIB and whole.keeps_buffers
    assert whole.phases["train"].rollout == 6 * GIB and whole.slots == 64
    small = plan_of(ppo(OPT, 16, 4, 2), "1xA100-40GB")  # less than a third of it is free beside the cache
    assert not small.keeps_buffers and small.phases["train"].rollout == 0 and small.phases["generate"].rollout > 0
    away = plan_of(ppo(OPT, 16, 4, 2, "--offload-optimizer-during-rollout true"), "1xH200")
    states = sum(held.optimizer for held in away.states.values())
    assert whole.phases["generate"].states - away.phases["generate"].states == states == away.host
    assert away.phases["train"].states == whole.phases["train"].states
    few = plan_of(ppo(OPT, 16, 4, 2), "1xRTX4090")  # states alone take more than it has
    assert few.slots == 1 and few.phases["generate"].total > 23.6 * GIB


@pytest.mark.parametrize("stage", [2, 3])
def test_the_columns_of_the_models_add_up_to_the_states_of_a_phase(stage):
    """Of gradients too: at the peak of training, buckets among them. The moving average is 4 bytes a weight."""
    plan = plan_of(ppo(OPT, 16, 4, stage, "--enable-ema true"), FOUR)
    lines = [line.replace(" -", " 0") for line in model_lines(plan)[5:]]
    cells = {line[2:19].rstrip(): [float(cell) for cell in line[19:].split()] for line in lines}
    shares = 4 if stage == 3 else 1
    assert cells["moving average"][:2] == [pytest.approx(4 * 1.3158e9 / GIB / shares, abs=0.01), 0]
    phases = {line[2:19].rstrip(): line[19:].split() for line in phase_lines(plan)}
    lasting = sum(sum(cells[name]) for name in cells if name != "gradients")
    assert float(phases["states"][2]) == pytest.approx(lasting, abs=0.04)
    assert float(phases["gradients"][2]) == pytest.approx(sum(cells["gradients"]), abs=0.02) and any(cells["gradients"])


def test_epochs_have_their_plural():
    planner, resolved = planner_of("ppo", ppo(OPT, 16, 4, 2, "--ppo-epochs 2 --old-log-probs trainer"), "1xH200")
    assert planner.needs(resolved).batch[2] == "64 responses x 2 epochs / 64 rows = 2 optimizer steps a rollout"


def test_a_moving_average_is_where_the_weights_are():
    """A rank has its share of both at ZeRO stage 3, in host memory where the weights are offloaded."""
    words = "--enable-ema true --actor-offload-weights cpu"
    whole, shared, away = (
        plan_of(ppo(OPT, 16, 4, stage, more), FOUR)
        for stage, more in ((2, "--enable-ema true"), (3, "--enable-ema true"), (3, words))
    )
    bare = plan_of(ppo(OPT, 16, 4, 3, "--actor-offload-weights cpu"), FOUR)
    size = 4 * whole.sizes["actor"].trained
    assert (whole.states["actor"].average, shared.states["actor"].average) == (size, size // 4)
    assert away.states["actor"].average == 0 and away.host - bare.host == 4 * (size // 4)


def test_the_pool_of_a_graph_is_reserved_and_in_no_tensor():
    """64 rows of 50,272 logits in bf16, 6.1 MiB, 24 bytes each where the nucleus is drawn from; 2.8 MiB of a layer."""
    plain, nucleus = (plan_of(ppo(OPT, 16, 4, 2, more), "1xH200") for more in ("", "--top-p 0.9"))
    small = plan_of(ppo(OPT, 16, 4, 2), "1xA100-40GB")  # whose cache is given back
    assert {name: phase.graph // 2**20 for name, phase in plain.phases.items()} == dict.fromkeys(plain.phases, 20)
    assert {name: phase.graph // 2**20 for name, phase in small.phases.items()} == {
        "generate": 20,
        "score": 0,
        "train": 0,
    }
    assert nucleus.phases["generate"] == replace(plain.phases["generate"], graph=100 * 2**20)
    assert phase_lines(small)[-1].startswith("  graph    0.02 in generate: ") and "besides" in phase_lines(small)[-2]
    assert nucleus.reserved("generate")[0] - plain.reserved("generate")[0] == 80 * 2**20


@pytest.mark.slow
def test_layers_are_gathered_where_the_weights_are_large():
    """On 40 GB an eighth is less than Llama-7B's 12.6 GiB, so a thousand million elements are whole at a time."""
    from benchmarks.speed.planned import LLAMA

    held = plan_of(ppo(LLAMA, 1, 4, 3), "4xA100-40GB").states["actor"]
    assert held.gathered == 2 * 10**9
    assert plan_of(ppo(LLAMA, 1, 4, 3), FOUR).states["actor"].gathered == pytest.approx(12.55 * GIB, rel=0.01)
