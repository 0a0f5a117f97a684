"""The memory of hosts in a plan: of a CPU's processes, and beside GPUs of their processes and what is offloaded."""

import json
import re
from pathlib import Path

import pytest
from bench.planned import planner_of
from support.command_run import run_command
from support.tiny_run import make_folder, opt_config
from transformers import AutoTokenizer, OPTForCausalLM

from pipeline.planning.memory import HEAP_REST, PROCESS, PROCESS_BESIDE_GPU
from pipeline.planning.page import StagePlanner, fits

WORDS = "--model_name_or_path 125m --per_device_train_batch_size 1 --max_seq_len 64"


def planned(folder: Path, words: str = WORDS, **target: object) -> tuple[StagePlanner, object]:
    """SFT of OPT-125M on the hardware of these fields, as a file describes it."""
    file = folder / "target.yaml"
    file.write_text(json.dumps(target), encoding="utf-8")
    return planner_of("sft", words, str(file), folder)


def memory(folder: Path, words: str = WORDS, **target: object):
    planner, resolved = planned(folder, words, **target)
    return planner.memory(resolved)


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
    offloaded = memory(tmp_path, f"{WORDS} --zero_stage 2 --offload true", **cpu)
    assert offloaded.phases["train"].states == (4 + (4 + 8 + 4 + 4) / 2) * weights and offloaded.host == 0
    unpinned = f"{WORDS} --zero_stage 2 --offload true --dtype fp32 --pin_memory false"
    gpu = memory(tmp_path, unpinned, **cpu | {"name": "mine"})
    assert gpu.host == 2 * (4 + 8 + 4 + 4) / 2 * weights
    assert gpu.on_host == (gpu.host + 2 * PROCESS_BESIDE_GPU[0], gpu.host + 2 * PROCESS_BESIDE_GPU[1])


def test_buckets_on_a_cpu_are_no_larger_than_the_gradients_that_fill_them(tmp_path):
    """A bucket of 500,000,000 elements is page by page given to a process that writes to it, and whole on a GPU."""
    words = f"{WORDS} --zero_stage 3 --dtype fp32"
    cpu, gpu = (memory(tmp_path, words, name=name, gpus=2, memory_gib=80) for name in ("CPU", "mine"))
    weights = cpu.sizes["model"].weights
    assert cpu.states["model"].buckets == 4 * weights and gpu.states["model"].buckets == 4 * 500_000_000


def test_states_on_a_disk_leave_four_buffers_of_a_sub_group_on_the_host(tmp_path):
    """In fp32, page-locked: of a million elements, or of all where a sub-group holds them."""
    user = {"zero_optimization": {"stage": 3, "offload_optimizer": {"device": "nvme", "nvme_path": "/disk"}}}
    (tmp_path / "ds.json").write_text(json.dumps(user), encoding="utf-8")
    words = f"{WORDS} --deepspeed_config {tmp_path / 'ds.json'} --sub_group_size"
    few, whole = (memory(tmp_path, f"{words} {size}", gpus=2, memory_gib=80) for size in (10**6, 10**9))
    assert few.host == 2 * 4 * 4 * 10**6 and whole.host == 2 * 4 * 4 * whole.sizes["model"].weights / 2


def test_gpus_fit_only_where_the_host_has_memory_for_their_processes(tmp_path):
    """Eight processes of 2 GiB are 16 GiB."""
    for host_gib, does_fit in ((15.9, False), (16.1, True)):
        planner, resolved = planned(tmp_path, gpus=8, memory_gib=80, host_memory_gib=host_gib)
        assert fits(planner.memory(resolved), planner.target) == does_fit


@pytest.mark.slow
def test_the_plan_of_a_process_on_a_cpu_is_near_what_a_run_measures(tmp_path, monkeypatch):
    """140 million weights; the heap of so few tokens is small, so that the plan is above the run."""
    monkeypatch.chdir(make_folder(tmp_path, num_train=8, num_test=4))
    config = opt_config(400, hidden_size=512, word_embed_proj_dim=512, ffn_dim=32768, num_hidden_layers=4)
    OPTForCausalLM(config).save_pretrained(tmp_path / "wide")
    AutoTokenizer.from_pretrained(tmp_path / "base").save_pretrained(tmp_path / "wide")
    words = "--model_name_or_path wide --data_path train.jsonl --data_split none --max_seq_len 48 --max_steps 2 "
    words += "--output_dir out/sft --run_dir run --keep_checkpoints 0 --per_device_train_batch_size 2"
    page = run_command("step1_sft", [*words.split(), "--dry-run"], folder=tmp_path)
    done = run_command("step1_sft", words.split(), folder=tmp_path)
    assert (page.code, done.code) == (0, 0), done.stderr
    low, expected, _ = map(float, re.search(r"\n  train .+?([\d.]+) +([\d.]+) +([\d.]+)\n", page.stdout).groups())
    lines = (tmp_path / "run/metrics.jsonl").read_text(encoding="utf-8").splitlines()
    measured = max(json.loads(line).get("host_memory_gib", 0.0) for line in lines)
    assert low < measured and abs(expected - measured) < 0.75 and expected > 3.0
