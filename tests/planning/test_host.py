"""The memory of hosts in a plan: of a CPU's processes, and beside GPUs of their processes and what is offloaded."""

import json
import re
from pathlib import Path

import pytest
from support.command_run import run_command
from support.messages import naming
from support.tiny_run import make_folder, opt_config
from transformers import AutoTokenizer, OPTForCausalLM

from benchmarks.speed.planned import planner_of
from pipeline.files import GIB
from pipeline.planning.memory import HEAP_REST, PROCESS, PROCESS_WITH_GPU, MemoryPlan
from pipeline.planning.page import StagePlanner, fits, host_text
from pipeline.planning.remedies import Remedies
from pipeline.planning.states import page_locked

UNPINNED = {"zero_optimization": {"offload_optimizer": {"pin_memory": False}}}
WORDS = "--model-name-or-path 125m --per-device-train-batch-size 1 --max-seq-len 64"
PPO = (
    "--actor-model-name-or-path 125m --critic-model-name-or-path 125m --max-answer-seq-len 16"
    " --max-prompt-seq-len 16 --per-device-train-batch-size 1 --per-device-generation-batch-size 1"
)


def planned(folder: Path, words: str = WORDS, **target: object) -> tuple[StagePlanner, object]:
    """SFT of OPT-125M on the hardware of these fields, as a file describes it."""
    file = folder / "target.yaml"
    file.write_text(json.dumps(target), encoding="utf-8")
    return planner_of("sft", words, str(file))


def memory(folder: Path, words: str = WORDS, **target: object):
    planner, resolved = planned(folder, words, **target)
    return planner.memory(resolved)


@pytest.mark.slow
def test_processes_on_a_cpu_hold_all_that_a_gpu_and_its_host_would(tmp_path):
    """In fp32 a weight takes 4 bytes, its moments 8; ZeRO-2 has a master of 4 more, gradient and new weight too."""
    cpu = {"name": "CPU", "gpus": 2, "memory_gib": 8}
    plain = memory(tmp_path, **cpu)
    weights = plain.sizes["model"].weights
    train = plain.phases["train"]
    assert plain.states["model"].resident == train.states == 12 * weights
    assert plain.host == 0 and plain.per_host == 2
    expected, high = (train.total + PROCESS[place] + HEAP_REST[place] for place in (0, 1))
    assert plain.reserved() == (expected, high) and plain.on_host == (2 * expected, 2 * high)
    offloaded = memory(tmp_path, f"{WORDS} --zero-stage 2 --offload true", **cpu)
    assert offloaded.phases["train"].states == (4 + (4 + 8 + 4 + 4) / 2) * weights and offloaded.host == 0
    told = host_text(offloaded, planned(tmp_path, **cpu)[0].target)
    assert told.endswith(f": {(4 + 8 + 4 + 4) * weights / GIB:.2f} offloaded, 2 processes")
    (tmp_path / "ds.json").write_text(json.dumps(UNPINNED), encoding="utf-8")
    unpinned = f"{WORDS} --zero-stage 2 --offload true --dtype fp32 --deepspeed-config {tmp_path / 'ds.json'}"
    gpu = memory(tmp_path, unpinned, **cpu | {"name": "mine"})
    assert gpu.host == 2 * (4 + 8 + 4 + 4) / 2 * weights
    assert gpu.on_host == (gpu.host + 2 * PROCESS_WITH_GPU[0], gpu.host + 2 * PROCESS_WITH_GPU[1])


def test_buckets_on_a_cpu_are_no_larger_than_the_gradients_that_fill_them(tmp_path):
    """A bucket of 200,000,000 elements is page by page given to a process that writes to it, and whole on a GPU."""
    words = f"{WORDS} --zero-stage 3 --dtype fp32"
    cpu, gpu = (memory(tmp_path, words, name=name, gpus=2, memory_gib=80) for name in ("CPU", "mine"))
    weights = cpu.sizes["model"].weights
    assert cpu.states["model"].buckets == 4 * weights and gpu.states["model"].buckets == 4 * 200_000_000


def test_states_on_a_disk_leave_four_buffers_of_a_sub_group_on_the_host(tmp_path):
    """In fp32, page-locked: of a million elements, or of all where a sub-group holds them; and gradients in 16 bits."""
    user = {"zero_optimization": {"stage": 3, "offload_optimizer": {"device": "nvme", "nvme_path": "/disk"}}}
    (tmp_path / "ds.json").write_text(json.dumps(user), encoding="utf-8")
    words = f"{WORDS} --deepspeed-config {tmp_path / 'ds.json'} --sub-group-size"
    few, whole = (memory(tmp_path, f"{words} {size}", gpus=2, memory_gib=80) for size in (10**6, 10**9))
    weights = whole.sizes["model"].weights
    assert few.host == 2 * 4 * 4 * 10**6 + 2 * weights and whole.host == (4 * 4 + 2) * weights


def test_the_gradients_of_zero_stage_3_are_twice_on_the_host_while_an_engine_is_made(tmp_path):
    """Page-locked ones are a copy of others, which leave again."""
    words = f"{WORDS} --zero-stage 3 --offload true --dtype bf16"
    (tmp_path / "ds.json").write_text(json.dumps(UNPINNED), encoding="utf-8")
    ways = ("", f" --deepspeed-config {tmp_path / 'ds.json'}")
    pinned, plain = (memory(tmp_path, f"{words}{way}", memory_gib=80) for way in ways)
    weights = plain.sizes["model"].weights
    held = 12 * weights + page_locked(4 * weights) + page_locked(2 * weights)
    assert plain.host == (12 + 4 + 2) * weights and pinned.host == held + 2 * weights


BF16_STATES = '{"bf16": {"enabled": true, "bf16_master_weights_and_grads": true, "bf16_optimizer_states": true}}'


@pytest.mark.parametrize(
    "flags, target, each",
    [
        ("--zero-stage 2", {"gpus": 2}, 12),  # two halves
        ("--zero-stage 2", {"hosts": 2}, 12 / 2),  # a half on each machine
        ("", {"gpus": 2}, 12),  # the first rank writes all
        ("", {"hosts": 2}, 12),
        ("--zero-stage 2 --deepspeed-config bf16.json", {"gpus": 2}, 2 + 2 + 2),
        ("--optimizer-states 8bit", {}, 12 + 8),  # moments in fp32, and their copy
        ("--keep-checkpoints 0", {}, 0),
    ],
)
def test_a_checkpoint_that_is_written_in_the_background_is_copied_to_the_host(
    tmp_path, monkeypatch, flags, target, each
):
    """Weights in fp32 and two moments; below ZeRO stage 1 by the first rank alone."""
    monkeypatch.chdir(tmp_path)
    Path("bf16.json").write_text(BF16_STATES, encoding="utf-8")
    hardware = {"name": "mine", "memory_gib": 80, "host_memory_gib": 64} | target
    words = f"{WORDS} --dtype bf16 {flags}"
    planner, resolved = planned(tmp_path, f"{words} --save-in-background true", **hardware)
    plan, in_turn = planner.memory(resolved), memory(tmp_path, words, **hardware)
    weights = plan.sizes["model"].weights
    assert plan.checkpoint == plan.host == each * weights
    assert in_turn.host == (8 * weights if "8bit" in flags else 0) and in_turn.phases == plan.phases
    assert plan.on_host[0] - in_turn.on_host[0] == plan.host - in_turn.host
    said = f"{plan.checkpoint / GIB:.2f} for a checkpoint, " if each else "GiB of each machine's 64.00: "
    assert said in host_text(plan, planner.target)


@pytest.mark.parametrize("critic", ["none", "cpu"])
def test_engines_are_made_one_after_another(tmp_path, critic):
    """A critic that is offloaded takes more than the room which the actor's gradients left."""
    ways = f"--actor-offload-optimizer cpu --critic-offload-optimizer {critic} --dtype bf16"
    words = f"{PPO} {ways} --actor-zero-stage 3 --critic-zero-stage 3"
    (tmp_path / "target.yaml").write_text("memory_gib: 80", encoding="utf-8")
    planner, resolved = planner_of("ppo", words, str(tmp_path / "target.yaml"))
    plan = planner.memory(resolved)
    held, last = plan.states, "actor" if critic == "none" else "critic"
    assert plan.host == held["actor"].host + held["critic"].host + 2 * plan.sizes[last].trained


@pytest.mark.slow
def test_the_moving_average_is_copied_too_and_a_process_on_a_cpu_holds_its_copy(tmp_path):
    def plan_of(flags: str, **target: object) -> MemoryPlan:
        file = tmp_path / "target.yaml"
        file.write_text(json.dumps({"memory_gib": 80, **target}), encoding="utf-8")
        planner, resolved = planner_of("ppo", f"{PPO} --enable-ema true {flags}", str(file))
        return planner.memory(resolved)

    for stage, averages in ((1, 4), (3, 4 / 2)):  # two machines with a half each, but for what is not partitioned
        flags = f"--actor-zero-stage {stage} --critic-zero-stage {stage} --save-in-background true"
        plan = plan_of(flags, name="mine", hosts=2)
        actor, critic = (plan.sizes[role].trained for role in ("actor", "critic"))
        assert plan.host == pytest.approx(12 * (actor + critic) / 2 + averages * actor, abs=64)
    plain, saved = (plan_of(f"--save-in-background {value}", name="CPU") for value in ("false", "true"))
    more = saved.phases["train"].states - plain.phases["train"].states
    assert more == saved.checkpoint == 12 * (actor + critic) + 4 * actor and saved.host == 0


@pytest.mark.parametrize("stage, averages", [(0, 4), (1, 4), (3, 4 / 2)])
def test_of_processes_on_a_cpu_each_copies_its_partition_and_the_first_one_what_has_none(tmp_path, stage, averages):
    def plan_of(flags: str) -> MemoryPlan:
        words = f"{PPO} --enable-ema true --actor-zero-stage {stage} --critic-zero-stage {stage} {flags}"
        (tmp_path / "target.yaml").write_text("name: CPU\nmemory_gib: 80\ngpus: 2", encoding="utf-8")
        planner, resolved = planner_of("ppo", words, str(tmp_path / "target.yaml"))
        return planner.memory(resolved)

    plain, saved = (plan_of(f"--save-in-background {value}") for value in ("false", "true"))
    actor, critic = (saved.sizes[role].trained for role in ("actor", "critic"))
    copied = 12 * (actor + critic) + 4 * actor
    assert saved.checkpoint == pytest.approx(copied, abs=64)
    assert saved.on_host[0] - plain.on_host[0] == saved.checkpoint
    share = 6 * (actor + critic) if stage else 0
    more = saved.phases["train"].states - plain.phases["train"].states
    assert more == pytest.approx(share + (averages * actor if stage == 3 else 0), abs=64)


def test_gpus_fit_only_where_the_host_has_memory_for_their_processes(tmp_path):
    """Eight processes of 2 GiB are 16 GiB."""
    for host_gib, does_fit in ((15.9, False), (16.1, True)):
        planner, resolved = planned(tmp_path, gpus=8, memory_gib=80, host_memory_gib=host_gib)
        assert fits(planner.memory(resolved), planner.target) == does_fit


def test_a_host_without_room_for_the_copy_lets_training_wait_for_checkpoints(tmp_path):
    """2 GiB of the process, 1.4 of the copy."""
    words = f"{WORDS} --dtype bf16 --save-in-background true"
    planner, resolved = planned(tmp_path, words, name="mine", memory_gib=80, host_memory_gib=3)
    assert not fits(planner.memory(resolved), planner.target)
    (change,) = Remedies.of(planner, resolved).same.changes
    assert str(change) == naming("--save-in-background false ... 1.4 GiB of the host ... each checkpoint")


@pytest.mark.slow
def test_the_plan_of_a_process_on_a_cpu_is_near_what_a_run_measures(tmp_path, monkeypatch):
    """140 million weights; the heap of so few tokens is small, so that the plan is above the run."""
    monkeypatch.chdir(make_folder(tmp_path, num_train=8, num_test=4))
    config = opt_config(400, hidden_size=512, word_embed_proj_dim=512, ffn_dim=32768, num_hidden_layers=4)
    OPTForCausalLM(config).save_pretrained(tmp_path / "wide")
    AutoTokenizer.from_pretrained(tmp_path / "base").save_pretrained(tmp_path / "wide")
    words = "--model-name-or-path wide --data-path train.jsonl --data-split none --max-seq-len 48 --max-steps 2 "
    words += "--output-dir out/sft --run-dir run --keep-checkpoints 0 --per-device-train-batch-size 2"
    page = run_command("step1_sft", [*words.split(), "--explain"], folder=tmp_path)
    done = run_command("step1_sft", words.split(), folder=tmp_path)
    assert (page.code, done.code) == (0, 0), done.stderr
    low, expected = (float(re.search(rf"\n  {name} +([\d.]+) ", page.stdout)[1]) for name in ("low", "expected"))
    lines = (tmp_path / "run/metrics.jsonl").read_text(encoding="utf-8").splitlines()
    measured = max(json.loads(line).get("host_memory_gib", 0.0) for line in lines)
    assert low < measured and abs(expected - measured) < 0.75 and expected > 3.0
