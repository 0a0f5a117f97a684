"""The benchmark's row of commands as a user types them: nothing is tuned in them, and its figures are of their runs."""

import json
import os
import subprocess
import sys
import time
from pathlib import Path
from statistics import median

import pytest

from benchmarks.speed import run, typed
from benchmarks.speed.hub import full_rows, hub_variables, publish_rows
from benchmarks.speed.jobs import BenchError, Jobs
from demo.make import make_data, make_tokenizer
from pipeline.data.templates import HUMAN_ASSISTANT_TEMPLATE

ROOT = Path(__file__).resolve().parents[2]
# What says which models are trained on what, and how; all else of a typed command is where to write and when to stop.
OF_TRAINING = {"step", "deployment-type", "actor-model", "reward-model", "data-path", "actor_lora_dim", "lora_dim",
               "method", "reward-function"}  # fmt: skip
OF_OUTPUT = {"output-dir", "max_steps", "keep_checkpoints", "save_adapter_only"}


def names_in(command: str) -> set[str]:
    return {word[2:] for word in command.split() if word.startswith("--")}


def play(monkeypatch, rates: dict[str, float | None]) -> None:
    """Let runs end at once with these samples/s, or fail where there is none; one that is not named cuts the row."""

    def ended(self, name, command, site=""):
        self.models.mkdir(exist_ok=True)
        if name in ("device", "models"):
            return '{"name": "cpu"}'
        if name not in rates:
            raise KeyboardInterrupt
        if (rate := rates[name]) is None:
            raise BenchError("exit code 2")
        if name.startswith(typed.BASELINE):
            return json.dumps({"samples_per_s": rate, "peak_gib": 1.0})
        # Nothing else decides where a typed run's metrics are.
        names = [word.replace("-", "_") for word in command]
        has_run_dir = "__run_dir" in names
        folder = command[names.index("__run_dir" if has_run_dir else "__output_dir") + 1]
        folder = Path(folder) if has_run_dir else Path(folder, "runs/ppo")
        folder.mkdir(parents=True)
        values = {"per_device_train_batch_size": 8, "gradient_accumulation_steps": 4}
        values |= {"per_device_generation_batch_size": 32}
        values |= {"actor_gradient_checkpointing": False, "critic_gradient_checkpointing": True}
        (folder / "config.json").write_text(json.dumps({name: {"value": value} for name, value in values.items()}))
        line = {"step_s": 20.0, "samples_per_s": rate, "tokens_per_s": 1.0, "skipped_updates": 0, "micro_batch_size": 4}
        (folder / "metrics.jsonl").write_text(json.dumps(line | {"time": time.time() + 100}) + "\n")
        return ""

    monkeypatch.setattr(Jobs, "run", ended)
    monkeypatch.setattr(typed, "make_hub", lambda jobs, case: jobs.folder / "hub")


def play_row(tmp_path: Path, *words: str) -> int:
    file = tmp_path / "found.jsonl"
    return run.main(["typed", "--case", "tiny", "--work", str(tmp_path), "--json", str(file), *words])


def last_line(tmp_path: Path) -> dict:
    return json.loads((tmp_path / "found.jsonl").read_text().splitlines()[-1])


def figures_of(found: dict) -> dict[str, float]:
    return {figure["name"]: figure["value"] for figure in found["figures"]}


def test_medians_are_of_the_runs_that_did_not_fail_and_the_others_are_shown(tmp_path, monkeypatch, capsys):
    play(monkeypatch, {"typed 1": 10, "tuned 1": 20, "typed 2": 30, "tuned 2": None, "typed 3": 14, "tuned 3": 40})
    assert play_row(tmp_path, "--baseline", "0") == 1
    found, printed = last_line(tmp_path), capsys.readouterr().out
    assert list(found["runs"]) == ["device", "typed 1", "tuned 1", "typed 2", "tuned 2", "typed 3", "tuned 3"]
    assert found["failed"] == ["tuned 2"] and "FAILED: tuned 2: exit code 2" in printed
    figures = figures_of(found)
    assert (figures["samples/s, default settings"], figures["samples/s, tuned"]) == (14, 30)
    assert figures["samples/s with default settings over tuned"] == pytest.approx(14 / 30)
    assert figures["seconds from the command to the first step, default settings"] == pytest.approx(80, abs=5)
    assert found["runs"]["typed 1"]["sizes"] == "8 x 4, halved to 4, sampling 32, critic checkpointing"


def test_deepspeed_chats_loop_takes_its_turn_and_only_where_its_models_are(tmp_path, monkeypatch):
    rates = {"typed 1": 10, "tuned 1": 20, "DeepSpeed-Chat 1": 5, "typed 2": 12, "tuned 2": 20, "DeepSpeed-Chat 2": 3}
    play(monkeypatch, rates)
    assert play_row(tmp_path, "--repeats", "2") == 0
    found = last_line(tmp_path)
    assert list(found["runs"]) == ["device", *rates]
    assert figures_of(found)["samples/s, DeepSpeed-Chat"] == 4
    assert figures_of(found)["samples/s with default settings over DeepSpeed-Chat"] == pytest.approx(11 / 4)
    assert [name for name, case in typed.CASES.items() if case.beside] == ["ppo-1.3b", "tiny"]


def test_the_measured_choice_takes_turns_with_the_planned_one(tmp_path, monkeypatch):
    given: dict[str, list[str]] = {}
    ended = typed.with_default_settings

    def noted(jobs, case, name, *more):
        given[name] = list(more)
        ended(jobs, case, name, *more)

    monkeypatch.setattr(typed, "with_default_settings", noted)
    play(monkeypatch, {"planned 1": 10, "measured 1": 12, "planned 2": 14, "measured 2": 18})
    file = tmp_path / "found.jsonl"
    words = ["measured", "--case", "tiny", "--repeats", "2", "--work", str(tmp_path), "--json", str(file)]
    assert run.main(words) == 0
    assert list(given) == ["planned 1", "measured 1", "planned 2", "measured 2"]
    assert list(given.values()) == [["--auto", "plan"], ["--auto", "measure"]] * 2
    figures = figures_of(last_line(tmp_path))
    assert (figures["samples/s, --auto plan"], figures["samples/s, --auto measure"]) == (12, 15)
    assert figures["samples/s of --auto measure over plan"] == pytest.approx(15 / 12)


def test_a_row_without_a_tuned_run_has_no_quotient(tmp_path, monkeypatch):
    play(monkeypatch, {"typed 1": 10, "tuned 1": None})
    assert play_row(tmp_path, "--repeats", "1", "--baseline", "0") == 1
    assert "samples/s with default settings over tuned" not in figures_of(last_line(tmp_path))


def test_a_row_that_is_cut_off_keeps_the_figures_of_the_runs_that_ended(tmp_path, monkeypatch):
    play(monkeypatch, {"typed 1": 10, "tuned 1": 20})
    with pytest.raises(KeyboardInterrupt):
        play_row(tmp_path)
    assert figures_of(last_line(tmp_path))["samples/s with default settings over tuned"] == 0.5


@pytest.mark.parametrize(
    ("case", "batch", "lengths", "rank"),
    [("ppo-1.3b", 64, (256, 256), 0), ("ppo-llama-7b-lora", 32, (256, 256), 64),
     ("ppo-llama-3-8b-lora", 128, (512, 512), 64), ("ppo-qwen2.5-1.5b", 128, (512, 512), 0),
     ("grpo-qwen2.5-1.5b", 128, (512, 512), 0),
     ("sft-1.3b", 64, (512,), 0), ("sft-8b", 64, (1024,), 0), ("reward-350m", 64, (512,), 0)],
)  # fmt: skip
def test_a_case_has_the_sizes_of_its_preset_and_no_flag_of_speed(case, batch, lengths, rank):
    found = typed.defaults_of(case)
    names = ("prompt", "answer") if len(lengths) == 2 else ("seq_len",)
    assert found["batch"] == batch and tuple(found[name] for name in names) == lengths
    assert found["actor_lora_dim"] == rank
    assert names_in(f"{typed.CASES[case].models} {typed.CASES[case].training}") <= OF_TRAINING | OF_OUTPUT
    assert Path(typed.planned(typed.CASES[case]).resolved.preset).name.endswith(".yaml")


def test_rows_have_nearly_the_length_that_they_may_have_and_no_more(tmp_path):
    make_data(tmp_path, seed=0)
    tokenizer = make_tokenizer(tmp_path)
    tokenizer.chat_template = "{{- bos_token -}}" + HUMAN_ASSISTANT_TEMPLATE

    def length(row: dict[str, str], answer: str) -> int:
        turns = [{"role": "user", "content": row["prompt"]}]
        turns += [{"role": "assistant", "content": row[answer]}] if answer else []
        return len(tokenizer.apply_chat_template(turns, add_generation_prompt=not answer, return_dict=False))

    prompts = list(full_rows(tokenizer, "ppo", 20, tokens=64, seed=0))
    assert all(56 <= length(row, "") <= 64 for row in prompts)
    pairs = list(full_rows(tokenizer, "reward", 20, tokens=128, seed=0))
    assert all(118 <= max(length(row, "chosen"), length(row, "rejected")) <= 128 for row in pairs)
    assert all(length(row, "chosen") > 128 for row in full_rows(tokenizer, "sft", 20, tokens=128, seed=0))
    assert len({row["prompt"] for row in prompts}) == 20


@pytest.mark.slow
def test_both_ways_train_the_same_on_a_cpu_and_the_quotient_is_of_their_metrics(tmp_path):
    file = tmp_path / "found.jsonl"
    sizes = "--case tiny --warm-up 1 --steps 2 --copy-mib 8 --matrix 128"

    def row(*words: str) -> subprocess.CompletedProcess[str]:
        rest = ["--work", str(tmp_path), "--json", str(file), *words]
        return subprocess.run(
            [sys.executable, "-m", "benchmarks.speed", "typed", *sizes.split(), *rest],
            env=os.environ | {"OMP_NUM_THREADS": "1"}, capture_output=True, text=True, timeout=300, check=False,
        )  # fmt: skip

    done = row("--repeats", "2", "--baseline", "0")
    assert done.returncode == 0, done.stdout + done.stderr
    found = json.loads(done.stdout.splitlines()[-1])
    assert found["failed"] == [] and len(file.read_text().splitlines()) == 1
    runs, rates = found["runs"], {"typed": [], "tuned": []}
    for way, folder in (("typed", "runs/ppo"), ("tuned", "run")):
        for turn in (1, 2):
            metrics = tmp_path / "runs" / f"{way}-{turn}" / folder / "metrics.jsonl"
            lines = [line for line in map(json.loads, metrics.read_text().splitlines()) if "step_s" in line]
            assert len(lines) == 3
            rates[way].append(sum(line["samples_per_s"] for line in lines[1:]) / 2)  # the median of two
            assert runs[f"{way} {turn}"]["samples_per_s"] == pytest.approx(rates[way][-1])
            assert 0 < runs[f"{way} {turn}"]["start_s"] < 100
            assert runs[f"{way} {turn}"]["sizes"] == "32 x 2, sampling 64"
    figures = figures_of(found)
    ratio = median(rates["typed"]) / median(rates["tuned"])
    assert figures["samples/s with default settings over tuned"] == pytest.approx(ratio)
    assert runs["typed 1"]["flags"].startswith(
        "python train.py --step 3 --deployment-type single_gpu --actor-model tiny"
    )
    assert names_in(runs["typed 1"]["flags"]) <= OF_TRAINING | OF_OUTPUT
    # 64 rows of nearly 40 tokens and of 32: as much work by either command, from the data set in the cache.
    assert runs["typed 1"]["tokens_per_step"] == pytest.approx(runs["tuned 1"]["tokens_per_step"])
    assert 64 * 60 < runs["typed 1"]["tokens_per_step"] <= 64 * 72

    # Behind --: for the tuned run.
    done = row("--repeats", "1", "--baseline", "0", "--", "--actor-learning-rate", "fast")
    assert done.returncode == 1
    found = json.loads(done.stdout.splitlines()[-1])
    assert found["failed"] == ["tuned 1"] and "--actor-learning-rate" in found["runs"]["tuned 1"]["error"]
    assert "samples/s with default settings over tuned" not in figures_of(found) and "FAILED: tuned 1" in done.stdout


@pytest.mark.slow
@pytest.mark.parametrize("case", ["tiny-sft", "tiny-reward"])
def test_stages_1_and_2_start_from_a_model_with_a_published_name(tmp_path, case):
    sizes = f"--case {case} --warm-up 0 --steps 1 --repeats 1 --copy-mib 8 --matrix 128 --work {tmp_path}"
    done = subprocess.run(
        [sys.executable, "-m", "benchmarks.speed", "typed", *sizes.split()],
        env=os.environ | {"OMP_NUM_THREADS": "1"}, capture_output=True, text=True, timeout=300, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stdout + done.stderr
    found = json.loads(done.stdout.splitlines()[-1])
    assert found["config"]["model_name_or_path"].startswith("facebook/opt-")
    rows = {"tiny-sft": 64, "tiny-reward": 2 * 64}[case]
    for way in ("typed 1", "tuned 1"):
        assert 0.95 * 512 < found["runs"][way]["tokens_per_step"] / rows <= 512


def test_a_data_set_in_the_cache_is_read_without_a_network(tmp_path):
    splits = {"train": [{"prompt": f"p{n}"} for n in range(5)], "test": [{"prompt": "held out"}]}
    publish_rows(tmp_path / "hub", "Org/some-set", splits)
    code = "import datasets; s = datasets.load_dataset('Org/some-set'); print([len(s[n]) for n in ('train', 'test')])"
    variables = os.environ | hub_variables(tmp_path / "hub") | {"HF_HUB_OFFLINE": "1"}
    done = subprocess.run([sys.executable, "-c", code], env=variables, capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[5, 1]"
