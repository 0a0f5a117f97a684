"""Runs whose responses functions reward: alone and beside a reward model, with each method."""

import json
import sys
from pathlib import Path
from typing import Any

import pytest
from support.messages import naming
from support.ppo_runs import ppo_words, run_ppo
from support.saved_state import write_state
from support.tiny_run import read_metrics

FOLDER_SIZES = {"num_train": 16, "num_test": 4}
FUNCTIONS = """
import json
import os
import signal
import time
from scale import SIGN
def length(completions, **columns):
    return [SIGN * len(text) / 10 for text in completions]

def keyed(completions, api_key, answer_key):
    assert api_key.startswith("canary-")
    return [1.0] * len(completions)

def tokens(completion_ids):
    return [[0.1] * len(ids) for ids in completion_ids]

def odd(prompts, completions):
    return [None if len(text) % 2 else 1.0 for text in completions]

def wrong(completions):
    return ["good"] * len(completions)

def raises(completions):
    raise RuntimeError("no luck")

def hangs(completions):
    time.sleep(3)  # less than the default of the limit

def hangs_always(prompts):
    with open(__file__ + ".asked", "a") as file:
        file.write(prompts[0].split()[-1] + "\\n")
    time.sleep(3)

def fails_first(prompts, completions):
    with open(__file__.replace("rewards.py", "test.jsonl")) as file:
        held_out = [json.loads(line)["prompt"] for line in file]
    if prompts[0] in held_out[:3]:
        raise RuntimeError("no luck")
    time.sleep(2 if prompts[0] in held_out else 0)
    return [float(len(text)) for text in completions]

def who(completions):
    with open(__file__ + ".pids", "a") as file:
        print(os.getpid(), file=file)
    time.sleep(0.2)
    return [0.0] * len(completions)

def stops(completions):
    with open(__file__ + ".stops", "a") as file:
        file.write("x")
    if os.path.getsize(file.name) == 1:
        guard = open(f"/proc/{os.getppid()}/stat").read()
        os.kill(int(guard.rpartition(")")[2].split()[1]), signal.SIGINT)
    time.sleep(5)
    return [0.0] * len(completions)

def passes(completions):
    return [float(len(text) > 12) for text in completions]

def unlucky(completions):
    if any(len(text) % 3 == 0 for text in completions):
        raise RuntimeError("no luck")
    return [1.0] * len(completions)
"""


@pytest.fixture(scope="module")
def folder(folder: Path) -> Path:
    (folder / "rewards.py").write_text(FUNCTIONS)
    (folder / "scale.py").write_text("SIGN = 1")
    return folder


def trained(folder: Path, out: Path, *functions: str, **changes: Any) -> int:
    flags = {"rollout_batch_size": 8, "gradient_accumulation_steps": 2, "max_steps": 3, "method": "reinforce_pp"}
    entries = (name if name.startswith("{") else f"{folder}/rewards.py:{name}" for name in functions)
    return run_ppo([*ppo_words(folder, out, **flags | changes), "--reward-function", *entries])


def errors(capsys: pytest.CaptureFixture[str]) -> list[str]:
    return [line for line in capsys.readouterr().err.splitlines() if line.startswith("error: ")]


@pytest.mark.few(1)
@pytest.mark.parametrize("method", ["ppo", "grpo", "rloo", "reinforce_pp"])
def test_functions_alone_reward_with_each_method(folder, tmp_path, method):
    changes = {"num_samples_per_prompt": 4} if method in ("grpo", "rloo") else {}
    more = () if changes else ("tokens:0.5",)
    assert trained(folder, tmp_path, "length", *more, "odd", method=method, **changes) == 0
    lines = [line for line in read_metrics(tmp_path / "runs/ppo") if "step_s" in line]
    assert len(lines) == 3 and all(line["reward_failures/length"] == 0 for line in lines)
    assert all(line["reward/odd"] == 1.0 for line in lines if line["reward/odd"] is not None)
    folders = {"actor", "runs"} | ({"critic"} if method == "ppo" else set())
    assert {path.name for path in tmp_path.iterdir()} == folders
    if method == "ppo":  # a critic that knows nothing says 0, which explains nothing and adds no noise
        explained = [line["value/explained_variance"] for line in lines]
        assert explained[0] == 0.0 and all(explained[1:])


def test_a_wrong_value_ends_the_run_with_2_and_all_saved(folder, tmp_path, capsys):
    assert trained(folder, tmp_path, "wrong") == 2
    (line,) = errors(capsys)
    assert "wrong" in line and "'good'" in line and "prompt" in line
    assert (tmp_path / "runs/ppo/checkpoints/step-0").is_dir()


@pytest.mark.parametrize(
    ("entry", "reason"),
    [
        ({"name": "format_match", "args": {"patern": "a"}}, "'patern' ... pattern?"),
        ({"name": "regex_match", "args": {"pattern": "("}}, "missing ), unterminated subpattern"),
        ({"name": "overlong"}, "needs max_length"),
    ],
)
def test_wrong_settings_of_the_box_are_told_before_the_start(folder, tmp_path, capsys, entry, reason):
    assert trained(folder, tmp_path, "length", json.dumps(entry)) == 2
    (line,) = errors(capsys)
    assert line.startswith(f"error: --reward-function {entry['name']}: ") and line == naming(reason)
    assert not (tmp_path / "runs/ppo/checkpoints").exists()


def test_failures_end_the_run_with_2_and_their_first_cause(folder, tmp_path, capsys):
    assert trained(folder, tmp_path, "raises") == 2
    (line,) = errors(capsys)
    assert "no luck" in line and "8 of the last 8" in line


@pytest.mark.slow
def test_calls_have_a_limit_of_time_and_processes_of_their_own(folder, tmp_path, capsys):
    assert trained(folder, tmp_path / "hangs", "hangs", reward_timeout_s=0.3) == 2
    (line,) = errors(capsys)
    assert "8 timed out" in line
    file = folder / "rewards.py.pids"
    for workers in (1, 3):
        assert trained(folder, tmp_path / str(workers), "who", reward_workers=workers, max_steps=1) == 0
        assert len(set(file.read_text().splitlines())) == workers
        file.unlink()


def test_a_stop_waits_for_no_function(folder, tmp_path):
    assert trained(folder, tmp_path, "stops") == 75
    assert len((folder / "rewards.py.stops").read_text()) < 4, "each held-out prompt was scored before it stopped"


@pytest.mark.slow
def test_a_function_that_always_hangs_ends_the_run_before_all_prompts_were_asked_for(folder, tmp_path, capsys):
    """64 responses are expected to 4 held-out prompts; 20 that fail are enough, which two prompts have.

    They are above 1 % of the last 1,000, whatever the other 32 get.
    """
    changes = {"eval_samples_per_prompt": 16, "reward_timeout_s": 0.2, "max_reward_failures": 0.01}
    assert trained(folder, tmp_path, "hangs_always", **changes) == 2
    (line,) = errors(capsys)
    assert "hangs_always gave no value for" in line and "timed out" in line
    calls = len((folder / "rewards.py.asked").read_text().splitlines())
    assert 17 <= calls < 4 * 17, "a prompt has one call for its responses, and one for each alone"


@pytest.mark.slow
def test_a_function_that_fails_for_the_first_prompts_alone_goes_on_within_its_limit(folder, tmp_path):
    """48 of 64 responses have failed while the others are waited for, and more may fail."""
    changes = {"eval_samples_per_prompt": 16, "max_reward_failures": 0.9, "max_steps": 1}
    assert trained(folder, tmp_path, "fails_first", **changes) == 0
    (line, *_) = [line for line in read_metrics(tmp_path / "runs/ppo") if "eval_rows" in line]
    assert line["eval_reward_failures/fails_first"] == 0.75


def test_some_failures_are_masked_and_counted(folder, tmp_path, capsys):
    long = {"rollout_batch_size": 16, "num_train_epochs": 20, "save_steps": 0}
    assert trained(folder, tmp_path / "all", "unlucky", **long, max_reward_failures=1.0, max_steps=12) == 0
    lines = [line for line in read_metrics(tmp_path / "all/runs/ppo") if "reward_failures/unlucky" in line]
    assert sum(line["rows_masked"] for line in lines) >= 20, "from here on a share ends a run"
    assert len(lines) == 6 and all(0 < line["reward_failures/unlucky"] < 1 for line in lines)
    assert [line["rows_masked"] for line in lines] == [16 * line["reward_failures/unlucky"] for line in lines]
    assert all(line["reward/unlucky"] == 1.0 for line in lines)
    capsys.readouterr()
    assert trained(folder, tmp_path / "few", "unlucky", **long, max_reward_failures=0.05, max_steps=20) == 2
    (line,) = errors(capsys)
    assert "no luck" in line and "raised" in line


def test_several_samples_of_held_out_prompts(folder, tmp_path):
    assert trained(folder, tmp_path, "passes", eval_samples_per_prompt=4, max_steps=1) == 0
    (line, *_) = [line for line in read_metrics(tmp_path / "runs/ppo") if "eval_rows" in line]
    samples = [json.loads(text) for text in (tmp_path / "runs/ppo/samples.jsonl").read_text().splitlines()]
    first = [sample for sample in samples if sample["step"] == 0]
    prompts = list(dict.fromkeys(sample["prompt"] for sample in first))
    passed = [[len(s["response"].strip()) > 12 for s in first if s["prompt"] == prompt] for prompt in prompts]
    assert [len(each) for each in passed] == [4] * 4 and line["eval_rows"] == 16
    assert line["eval_pass_at_1/passes"] == pytest.approx(sum(map(sum, passed)) / 16)
    assert line["eval_pass_at_k/passes"] == pytest.approx(sum(map(any, passed)) / 4)


@pytest.mark.few(1)
@pytest.mark.parametrize("method", ["grpo", "reinforce_pp"])
def test_a_resumed_run_equals_one_that_was_not_stopped_and_keeps_to_its_file(folder, tmp_path, capsys, method):
    changes = {"method": method, "num_samples_per_prompt": 2, "reward_scaling": "running", "ppo_epochs": 2}
    assert trained(folder, tmp_path / "whole", "length", "odd", **changes, max_steps=4) == 0
    assert trained(folder, tmp_path / "parts", "length", "odd", **changes, max_steps=3) == 0  # within a rollout's steps
    assert trained(folder, tmp_path / "parts", "length", "odd", **changes, max_steps=4) == 0
    weights = [(tmp_path / name / "actor/model.safetensors").read_bytes() for name in ("whole", "parts")]
    assert weights[0] == weights[1] != (folder / "base/model.safetensors").read_bytes()
    states = [json.loads((tmp_path / name / "runs/ppo/checkpoints/step-4/state.json").read_text())["state"]["ppo"]
              for name in ("whole", "parts")]  # fmt: skip
    assert states[0] == states[1] and states[0]["tallies"]["with"].keys() == {"failures", "spreads"}
    file, text = folder / "rewards.py", (folder / "rewards.py").read_text()
    capsys.readouterr()
    try:
        file.write_text(text.replace("/ 10", "/ 20"))
        assert trained(folder, tmp_path / "parts", "length", "odd", **changes, max_steps=6) == 2
    finally:
        file.write_text(text)
    assert any("file of reward function length" in line for line in errors(capsys))


@pytest.mark.slow
def test_a_resumed_run_keeps_to_the_modules_beside_its_file(folder, tmp_path, capsys):
    """A checkpoint that does not hold one of them is refused as one that holds another content."""
    assert trained(folder, tmp_path, "length", max_steps=1) == 0
    try:
        (folder / "scale.py").write_text("SIGN = -1")
        capsys.readouterr()
        assert trained(folder, tmp_path, "length", max_steps=2) == 2
        assert naming("error: scale.py ... reward function length") in errors(capsys)
        saved = tmp_path / "runs/ppo/checkpoints/step-1"
        state = json.loads((saved / "state.json").read_text())
        del state["columns"]["scale.py of reward function length"]
        write_state(saved, state)
        assert trained(folder, tmp_path, "length", max_steps=2) == 2
        assert naming("error: scale.py ... reward function length ... checkpoint has None") in errors(capsys)
        assert trained(folder, tmp_path, "length", max_steps=2, force_resume="true") == 0
    finally:
        (folder / "scale.py").write_text("SIGN = 1")


def test_a_secret_among_the_args_of_a_function_is_written_nowhere(folder, tmp_path, monkeypatch, capsys):
    """The function has it. Another one is no other run; an argument that only sounds like one is compared."""

    def entry(**args: str) -> str:
        return json.dumps({"name": f"{folder}/rewards.py:keyed", "args": {"answer_key": "a"} | args})

    monkeypatch.setattr(sys, "argv", ["main", entry(api_key="canary-1")])
    assert trained(folder, tmp_path, entry(api_key="canary-1"), max_steps=1) == 0
    files = [path for path in tmp_path.rglob("*") if path.is_file()]
    assert [path for path in files if b"canary" in path.read_bytes()] == []
    assert "answer_key" in (tmp_path / "actor/training_config.json").read_text()
    assert trained(folder, tmp_path, entry(api_key="canary-2"), max_steps=1) == 0
    assert trained(folder, tmp_path, entry(api_key="canary-1", answer_key="b"), max_steps=2) == 2
    printed = capsys.readouterr()
    assert "canary" not in printed.out + printed.err and "--reward-function" in printed.err.splitlines()[-2]
