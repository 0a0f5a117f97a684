"""The benchmark: its bounds against numbers worked by hand, the baseline's formulas, and a row on tiny models."""

import importlib.util
import json
import math
import os
import subprocess
import sys
from importlib import metadata
from pathlib import Path

import pytest
import torch
from support.tiny_run import opt_config
from transformers import OPTForCausalLM

from benchmarks.speed import dschat_math, phases
from benchmarks.speed.figures import Figures, holds, quotient
from benchmarks.speed.jobs import showing
from benchmarks.speed.random_models import config_of, hazard_for, set_end_probability
from benchmarks.speed.report import markdown
from benchmarks.speed.roofline import Device, data_sheet, measure
from benchmarks.speed.work import (
    Shape,
    generation_seconds,
    lora_weights,
    ppo_flops,
    shape_of,
    state_bytes,
    step_bounds,
)
from pipeline.generation.eager import EagerGenerator
from pipeline.generation.episodes import generate
from pipeline.generation.rollouts import Prompt, RandomKey, Sampling, Vocabulary

ROOT = Path(__file__).resolve().parents[2]
EOS = 2
TINY = Shape(layers=2, hidden=4, kv_width=2, layer_weights=10, head_weights=6)
CRITIC = Shape(layers=1, hidden=2, kv_width=2, layer_weights=5, head_weights=6)
SLOW = Device("abacus", bandwidth=100.0, flops=1000.0)


# --- bytes and operations -------------------------------------------------------------------------------------------


def test_shape_of_opt_1_3b():
    shape = shape_of(config_of("1.3b"))
    # A layer: 4 x 2048^2 + 2 x 2048 x 8192 = 50,331,648; 24 of them. Head: 50,272 x 2048.
    assert (shape.layer_weights, shape.head_weights) == (1_207_959_552, 102_957_056)
    assert shape.weight_bytes == 2_621_833_216
    assert shape.kv_bytes == 2 * 2 * 24 * 2048 == 196_608


def test_shape_of_opt_350m_has_projections_around_narrow_embeddings():
    shape = shape_of(config_of("350m"))
    assert shape.layer_weights == 24 * 12 * 1024**2 + 2 * 1024 * 512
    assert shape.head_weights == 50_272 * 512


@pytest.mark.parametrize(
    ("name", "millions"),
    [("llama-3-8b", 8030.0), ("llama-3-1b", 1235.7), ("qwen2.5-1.5b", 1543.6), ("qwen2.5-0.5b", 494.0)],
)
def test_published_numbers_of_weights(name, millions):
    config = config_of(name)
    shape = shape_of(config)
    counted = shape.layer_weights + shape.head_weights * (1 if config.tie_word_embeddings else 2)
    assert counted / 1e6 == pytest.approx(millions, rel=1e-3)


def test_shape_of_llama():
    shape = shape_of(config_of("llama-7b"))
    assert shape.layer_weights == 32 * (4 * 4096**2 + 3 * 4096 * 11_008) == 6_476_005_376
    assert (shape.head_weights, shape.kv_bytes) == (32_000 * 4096, 2 * 2 * 32 * 4096)
    # 4 heads of 64 for K and V under 32 for the queries.
    grouped = shape_of(config_of("llama-1b"))
    assert grouped.kv_bytes == 2 * 2 * 22 * 256
    assert grouped.layer_weights == 22 * (2 * 2048**2 + 2 * 2048 * 256 + 3 * 2048 * 5632)


def test_decode_step_of_opt_1_3b_on_an_h200():
    shape, device = shape_of(config_of("1.3b")), Device("H200", 4.8e12, 790e12)
    two, three = (generation_seconds(shape, device, prompt=384, lengths=[n] * 64) for n in (1, 2))
    # (2,621,833,216 + 64 x 385 x 196,608) / 4.8e12: the 1.55 ms that are known.
    assert three - two == pytest.approx(1.5555e-3, rel=1e-3)


def test_forward_flops_by_hand():
    # Linear 2 x 10 x 4 tokens; attention 4 x 2 layers x 4 wide x (9 + 1) / 2 pairs; head 2 x 6 x 2 positions.
    assert TINY.forward_flops([3, 1], head_tokens=2) == 80 + 160 + 24


def test_generation_reads_weights_once_a_step_and_live_rows_alone():
    # Step 1: 32 + 16 x 3 keys; step 2: 32 + 16 x 4; the second row has ended before. First: two prompts of 2 tokens.
    prefill = 2 * 10 * 4 + 4 * 2 * 4 * (4 + 4) / 2 + 2 * 6 * 2
    found = generation_seconds(TINY, SLOW, prompt=2, lengths=[3, 1])
    assert found == pytest.approx(prefill / 1000 + (80 + 96) / 100)


def test_generation_with_both_rows_alive_reads_both():
    both, one = (generation_seconds(TINY, SLOW, prompt=2, lengths=lengths) for lengths in ([2, 2], [2, 1]))
    assert both - one == pytest.approx(16 * 3 / 100)


def test_step_bounds_by_hand():
    # Rows of 5 and 3 tokens, 4 of them answers. Actor: 160 + 4 x 2 x 4 x 34 / 2 + 2 x 6 x 4; critic: 80 + 4 x 2 x 17.
    actor, critic = 160 + 544 + 48, 80 + 136
    lengths = [3, 1]
    assert ppo_flops(TINY, CRITIC, prompt=2, lengths=lengths) == {
        "score": actor + 2 * critic,
        "train": 3 * (actor + critic),
    }
    frozen = ppo_flops(TINY, CRITIC, prompt=2, lengths=lengths, frozen=True)
    assert frozen == {"score": actor + 2 * critic, "train": 2 * actor + 3 * critic}
    bounds = step_bounds(TINY, CRITIC, SLOW, prompt=2, lengths=lengths, gpus=2)
    generation = generation_seconds(TINY, SLOW, prompt=2, lengths=lengths)
    total = generation + (actor + 2 * critic) / 1000 + 3 * (actor + critic) / 1000
    assert bounds["step_s"] == pytest.approx(total)
    assert bounds["samples_per_s"] == pytest.approx(2 * 2 / total)
    assert bounds["generate_tokens_per_s"] == pytest.approx(2 * 4 / generation)


def test_whole_step_of_the_reference_setting():
    bounds = step_bounds(
        *(shape_of(config_of(name)) for name in ("1.3b", "350m")),
        Device("H200", 4.8e12, 790e12),
        prompt=256,
        lengths=[256] * 64,
    )
    # 255 steps over 257 to 511 keys, 384 on average; prompts of 64 x 256 tokens, the head at 64 of them.
    read = 255 * (2_621_833_216 + 64 * 384 * 196_608) / 4.8e12
    linear, attention = 2 * 1_207_959_552 * 64 * 256, 24 * 4 * 2048 * 64 * 256**2 / 2
    prefill = (linear + attention + 2 * 102_957_056 * 64) / 790e12
    assert bounds["generate_s"] == pytest.approx(read + prefill, rel=1e-9)
    # 6 operations a weight and token of 64 x 512: 1.208 and 0.303 billion weights, the head over half of the tokens.
    linear = 6 * 64 * 512 * (1_207_959_552 + 303_038_464 + 102_957_056 / 2)
    attention = 3 * 24 * 4 * (2048 + 1024) * 64 * 512**2 / 2
    assert bounds["train_s"] == pytest.approx((linear + attention) / 790e12, rel=1e-9)


def test_lora_weights_and_model_states():
    # rank 64 on 24 layers: four of 2048 + 2048 sides, two of 2048 + 8192.
    assert lora_weights(config_of("1.3b"), 64) == 24 * 64 * (4 * 4096 + 2 * 10_240)
    assert lora_weights(config_of("llama-tiny"), 4) == 2 * 4 * (2 * 64 + 2 * (32 + 16) + 3 * (32 + 48))
    assert state_bytes(100, 10) == 200 + 10 * 14


def test_measured_device_is_plausible_and_data_sheets_go_by_name():
    device = measure(copy_mib=16, matrix=256)
    assert 1e8 < device.bandwidth < 1e13
    assert 1e8 < device.flops < 1e16
    assert data_sheet(device) == device
    assert data_sheet(Device("NVIDIA H200", 1.0, 2.0)) == Device("NVIDIA H200", 4.8e12, 790e12)


# --- the baseline's formulas ----------------------------------------------------------------------------------------


def test_baseline_rewards_put_the_clamped_score_where_the_answer_ends():
    log_probs, ref = torch.tensor([[1.0, 2.0, 3.0, 4.0]] * 2), torch.zeros(2, 4)
    # Prompt of 2; the first row has 1 token of answer and padding, the second one 3.
    mask = torch.tensor([[1, 1, 1, 0, 0], [1, 1, 1, 1, 1]]).bool()
    rewards = dschat_math.token_rewards(log_probs, ref, torch.tensor([9.0, -2.0]), mask, prompt=2)
    expected = torch.tensor([[-0.1, -0.2, -0.3 + 5.0, 0.0], [-0.1, -0.2, -0.3, -0.4 - 2.0]])
    torch.testing.assert_close(rewards, expected)


def test_baseline_advantages():
    rewards, values = torch.tensor([[9.0, 1.0, 2.0]]), torch.tensor([[9.0, 0.5, 0.25]])
    advantages, returns = dschat_math.gae(rewards, values, prompt=2)
    # Last: 2 - 0.25. Before: 1 + 0.25 - 0.5 + 0.95 x 1.75.
    torch.testing.assert_close(advantages, torch.tensor([[0.75 + 0.95 * 1.75, 1.75]]))
    torch.testing.assert_close(returns, torch.tensor([[0.75 + 0.95 * 1.75 + 0.5, 2.0]]))


def test_baseline_losses():
    mask = torch.tensor([[True, True, False]])
    new, old = torch.tensor([[math.log(1.5), math.log(0.5), 5.0]]), torch.zeros(1, 3)
    # Ratio 1.5 with advantage 1 is clipped to 1.2; ratio 0.5 with advantage -1: the larger loss is that of 0.8.
    loss = dschat_math.actor_loss(new, old, torch.tensor([[1.0, -1.0, 7.0]]), mask)
    assert loss.item() == pytest.approx((-1.2 + 0.8) / 2)
    values, returns = torch.tensor([[1.0, 0.1, 9.0]]), torch.tensor([[1.0, 0.0, 0.0]])
    # Clipped to 0.2: error 0.8 against 0; unclipped 0.1.
    assert dschat_math.critic_loss(values, old, returns, mask).item() == pytest.approx(0.5 * (0.64 + 0.01) / 2)


def test_baseline_log_probs_are_those_of_the_next_tokens():
    logits, ids = torch.randn(2, 4, 7), torch.randint(0, 7, (2, 4))
    expected = [[logits[row, t].log_softmax(-1)[ids[row, t + 1]] for t in range(3)] for row in range(2)]
    torch.testing.assert_close(dschat_math.token_log_probs(logits, ids), torch.tensor(expected))


# --- responses that end by themselves -------------------------------------------------------------------------------


@pytest.mark.parametrize(("mean", "longest"), [(110.0, 256), (25.0, 64), (1.5, 8)])
def test_hazard_gives_the_mean(mean, longest):
    hazard = hazard_for(mean, longest)
    ends = [(1 - hazard) ** (n - 1) * hazard for n in range(1, longest)]
    expected = sum(n * share for n, share in enumerate(ends, start=1)) + longest * (1 - hazard) ** (longest - 1)
    assert expected == pytest.approx(mean, rel=1e-6)


def test_a_model_with_an_end_probability_ends_as_often():
    torch.manual_seed(0)
    model = OPTForCausalLM(opt_config(512, init_std=0.02)).to(torch.bfloat16).eval()
    wanted = hazard_for(25.0, 64)
    assert set_end_probability(model, wanted) == pytest.approx(wanted, rel=0.05)
    prompts = [Prompt([5, 6, 7, 8 + n], n) for n in range(400)]
    source = EagerGenerator(model.float(), Vocabulary(frozenset({EOS}), 1))
    request = {"num_samples": 1, "num_slots": 400, "sampling": Sampling(64), "key": RandomKey(0, "bench")}
    rollout = generate(source, prompts, **request)
    lengths = torch.tensor([len(response) for response in rollout.responses]).float()
    # The standard error of the mean of 400 lengths is about 1.
    assert lengths.mean().item() == pytest.approx(25.0, abs=3.0)
    assert lengths.max() == 64


# --- reading and printing -------------------------------------------------------------------------------------------


def test_phases_are_medians_after_the_warm_up(tmp_path):
    times = [9.0, 1.0, 3.0, 2.0]
    lines = [
        {"step": n, "step_s": 2 * t, "tokens_per_s": 10.0, "samples_per_s": 4 / t, "time/generate_s": t, "mfu": None,
         "gpu_memory_gib": t, "skipped_updates": 0, "loss/policy": None if n == 2 else 0.5}
        for n, t in enumerate(times)
    ]  # fmt: skip
    text = "".join(json.dumps(line) + "\n" for line in [{"step": 0, "eval_loss": 1.0}, *lines])
    (tmp_path / "metrics.jsonl").write_text(text, encoding="utf-8")
    found = phases.measure(tmp_path, warm_up=1)
    assert (found["generate_s"], found["step_s"], found["samples_per_s"]) == (2.0, 4.0, 2.0)
    assert (found["tokens_per_step"], found["steps"], found["peak_gib"]) == (40.0, 3, 9.0)
    assert found["finite"] is False
    assert "mfu" not in found


def test_targets():
    assert [holds(1.3, "<= 1.3"), holds(1.31, "<= 1.3"), holds(3, ">= 3"), holds(2.9, ">= 3")] == [True, False] * 2
    assert [quotient(3.0, 2.0), quotient(None, 2.0), quotient(3.0, 0.0)] == [1.5, None, None]
    figures = Figures(checked=False)
    figures.add("a", 1.0, "s", "<= 0.5")
    figures.add("missing", None)
    assert [(f.name, f.met) for f in figures.found] == [("a", None)]


# --- a row ----------------------------------------------------------------------------------------------------------


def run_row(row: str, work: Path, *words: str) -> str:
    """A row on tiny models, as a user runs it; returns what it printed."""
    sizes = "--actor tiny --critic tiny --batch 4 --micro-batch 2 --prompt 16 --answer 8 --dtype fp32 --warm-up 1"
    rest = ["--steps", "2", "--copy-mib", "8", "--matrix", "128", "--work", str(work), *words]
    # One thread: more only get into each other's way in models of this size.
    done = subprocess.run(
        [sys.executable, "-m", "benchmarks.speed", row, *sizes.split(), *rest],
        env=os.environ | {"OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
        timeout=180,
        check=False,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


@pytest.fixture(scope="module")
def step3(tmp_path_factory):
    """The row step3: (what it printed, the file that it wrote)."""
    work = tmp_path_factory.mktemp("bench")
    file = work / "found.jsonl"
    return run_row("step3", work, "--json", str(file), "--", "--kl-coef", "0.2"), file


VLLM = """
import time
__version__ = "0.0.test"
class SamplingParams:
    def __init__(self, **settings): self.settings = settings
class Output:
    def __init__(self, length): self.token_ids = [0] * length
class Answer:
    def __init__(self, length): self.outputs = [Output(length)]
class LLM:
    def __init__(self, **settings): self.settings = settings
    def generate(self, prompts, sampling, use_tqdm):
        assert len(prompts) == self.settings["max_num_seqs"] and len(prompts[0]["prompt_token_ids"]) == 16
        time.sleep(0.1 if sampling.settings["logprobs"] is None else 0.2)
        return [Answer(sampling.settings["max_tokens"]) for _ in prompts]
"""


@pytest.mark.faults
def test_the_row_beside_vllm_compares_rates_of_the_same_work(tmp_path):
    """vLLM is played by a module that takes a known time; the real one needs a GPU."""
    (tmp_path / "site").mkdir()
    (tmp_path / "site/vllm.py").write_text(VLLM)
    printed = run_row("vllm", tmp_path / "work", "--vllm", str(tmp_path / "site"), "--batches", "4", "--repeats", "2")
    figures = {figure["name"]: figure["value"] for figure in json.loads(printed.splitlines()[-1])["figures"]}
    # A sleep may last longer than it was asked to, never shorter.
    assert 0.5 * 4 * 8 / 0.1 < figures["vLLM, batch 4"] <= 4 * 8 / 0.1
    assert 0.5 * 4 * 8 / 0.2 < figures["vLLM with log-probabilities, batch 4"] <= 4 * 8 / 0.2
    ratio = figures["this project, batch 4"] / figures["vLLM, batch 4"]
    assert figures["this project over vLLM, batch 4"] == pytest.approx(ratio)


@pytest.mark.faults
def test_the_row_of_data_prepares_as_many_rows_for_each_core(tmp_path):
    words = ("--rows", "2600", "--cores", "1,2", "--repeats", "1")
    found = json.loads(run_row("data", tmp_path, *words).splitlines()[-1])
    runs, figures = found["runs"], {figure["name"]: figure["value"] for figure in found["figures"]}
    assert found["failed"] == [] and found["config"]["max_seq_len"] == 4096
    pairs = [runs[f"pairs, {cores} cores, project"] for cores in (1, 2)]
    assert [run["rows"] for run in pairs] == [2600, 5200]
    assert [run["processes"] for run in pairs] == [1, min(2, len(os.sched_getaffinity(0)))]
    assert figures["rows/s, pairs, 2 cores"] == pytest.approx(5200 / pairs[1]["seconds"])
    if importlib.util.find_spec("trl") is None:
        assert "trl is not installed" in runs["trl"]["flags"] and not any("TRL" in name for name in figures)
    else:
        for kind in ("pairs, 1 cores", "chosen responses, 2 cores"):
            assert figures[f"tokens over TRL's, {kind}"] == 1, "both prepare the same rows"
            rates = [runs[f"{kind}, {library}"]["rows_per_s"] for library in ("project", "trl")]
            assert figures[f"rows/s over TRL's, {kind}"] == pytest.approx(rates[0] / rates[1])
    assert figures["turns/s, conversations of 32 over those of 4"] > 0.5, "a quadratic way gives an eighth"


@pytest.mark.slow
def test_last_line_is_the_json_that_the_file_holds(step3):
    printed, file = step3
    assert printed.splitlines()[-1] == file.read_text(encoding="utf-8").strip()
    found = json.loads(printed.splitlines()[-1])
    assert set(found) == {"row", "settings", "environment", "runs", "figures", "failed", "config"}
    assert found["failed"] == []
    assert found["config"]["kl_coef"] == 0.2  # words behind -- reach the project
    assert "--kl-coef 0.2" in found["runs"]["project"]["flags"]


@pytest.mark.slow
def test_numbers_of_a_row_are_finite_and_fit_together(step3):
    found = json.loads(step3[0].splitlines()[-1])
    runs, figures = found["runs"], {figure["name"]: figure["value"] for figure in found["figures"]}
    own, base, limit = runs["project"], runs["DeepSpeed-Chat"], runs["limit"]
    for run in (own, base, limit):
        for name in ("generate_s", "score_s", "train_s", "step_s", "samples_per_s", "generate_tokens_per_s"):
            assert 0 < run[name] < math.inf, name
    for run in (own, base):
        assert run["generate_s"] + run["score_s"] + run["train_s"] <= 1.5 * run["step_s"]
        assert 0 < run["train_mfu"] < math.inf
    assert own["tokens_per_step"] == pytest.approx(4 * (16 + 8))
    assert base["response_tokens"] == 4 * 8
    assert own["finite"] is True
    assert own["steps"] == base["steps"] == 2
    ratio = own["samples_per_s"] / base["samples_per_s"]
    assert figures["samples/s over DeepSpeed-Chat's"] == pytest.approx(ratio)
    assert figures["samples/s over the limit"] == pytest.approx(own["samples_per_s"] / limit["samples_per_s"])


@pytest.mark.slow
def test_report_holds_versions_sizes_configuration_and_figures(step3):
    found = json.loads(step3[0].splitlines()[-1])
    text = markdown(found)
    for part in (f"torch {metadata.version('torch')}", "batch 4", "kl_coef: 0.2", "| DeepSpeed-Chat ", "Commit "):
        assert part in text
    assert f"{found['figures'][0]['value']:.5g}" in text
    assert found["figures"][0]["met"] is None  # tiny sizes have no targets


@pytest.mark.parametrize(
    ("seen", "shown"), [(None, "1,0"), ("", "1,0"), ("3,2", "2,3"), ("GPU-a,GPU-b", "GPU-b,GPU-a")]
)
def test_runs_take_the_gpus_that_the_benchmark_sees(monkeypatch, seen: str | None, shown: str):
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    if seen is not None:
        monkeypatch.setenv("CUDA_VISIBLE_DEVICES", seen)
    assert showing([1, 0]) == {"CUDA_VISIBLE_DEVICES": shown}
