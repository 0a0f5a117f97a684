"""Runs in which a flag is ignored: small runs in this process, and tests in a pytest of their own."""

import hashlib
import importlib
import io
import json
import os
import shutil
import signal
import subprocess
import sys
import tempfile
from collections.abc import Callable
from functools import cache, partial
from pathlib import Path
from typing import Any

import pytest
from flag_tests import FlagTest
from ignored_flag import DEFAULT, FIELD, ignore
from input_calls import call, make_inputs, stage_words
from pydantic import BaseModel
from support.source_tree import ROOT
from support.tiny_run import save_base, save_scorer, write_lines
from transformers import AutoTokenizer

from pipeline.configuration.flag_table import flag_table
from pipeline.engine.memory import ModelMemory
from rlhf.chat import ChatConfig
from rlhf.compare import CompareConfig
from rlhf.models.convert import ConvertConfig
from rlhf.models.export import ExportConfig
from rlhf.models.merge import MergeConfig
from rlhf.report import ReportConfig
from rlhf.rewards.eval import EvalConfig
from rlhf.rewards.reward import RewardTrialConfig
from rlhf.rewards.sample import SampleConfig
from rlhf.train_config import TrainConfig
from step1_sft.config import SFTConfig
from step2_reward.config import RewardConfig, RewardEvalConfig
from step3_dpo.config import DPOConfig
from step3_ppo.config import PPOConfig

CONFIGS: dict[str, type[BaseModel]] = {
    "sft": SFTConfig,
    "reward": RewardConfig,
    "ppo": PPOConfig,
    "dpo": DPOConfig,
    "reward_eval": RewardEvalConfig,
    "chat": ChatConfig,
    "prompt_eval": CompareConfig,
    "eval": EvalConfig,
    "sample": SampleConfig,
    "train": TrainConfig,
    "export": ExportConfig,
    "merge": MergeConfig,
    "convert": ConvertConfig,
    "reward_trial": RewardTrialConfig,
    "report": ReportConfig,
}
SITE = ROOT / "tests" / "faults" / "site"
TIMEOUT_S = 400.0

CHANGING = ("time", "_s", "_per_s", "mfu", "gib", "seconds", "rss")
TRAINED = {"per_device_train_batch_size": 4, "max_steps": 2, "learning_rate": 1e-3, "data_output_path": "@cache"}
ROLLOUTS = {"per_device_generation_batch_size": 4, "max_prompt_seq_len": 64, "max_answer_seq_len": 12}
ANSWERS = {"max_new_tokens": 12}
SIZES: dict[str, dict[str, Any]] = {
    "sft": TRAINED,
    "reward": TRAINED,
    "ppo": TRAINED | ROLLOUTS,
    "dpo": TRAINED,
    "reward_eval": {"eval_fraction": 0.9},
    "chat": {"model": "@other", **ANSWERS},
    "prompt_eval": ANSWERS,
    "eval": {"eval_fraction": 0.9, **ANSWERS},
    "sample": ANSWERS,
}
OF_A_MODEL = ("learning_rate", "lora_", "model_name_or_path", "zero_stage", "weight_decay")  # of the actor in stage 3


# --- the flag that is ignored ---


def owner_of(key: str) -> tuple[type, str]:
    """Return the class that defines the field of a flag, given as `<command>.<flag>`, and the field's name."""
    command, _, name = key.partition(".")
    config: Any = CONFIGS[command]
    table = flag_table(config)
    *groups, field = table[name if name in table else f"actor_{name}"].path
    for group in groups:
        config = config.model_fields[group].annotation
    return next(parent for parent in config.__mro__ if field in parent.__dict__.get("__annotations__", {})), field


def default_of(key: str) -> Any:
    """Return the default of a flag; an empty value of its type where it is required."""
    command, _, name = key.partition(".")
    table = flag_table(CONFIGS[command])
    flag = table[name if name in table else f"actor_{name}"]
    required = flag.info.is_required()
    return ([] if flag.is_list else "") if required else flag.default


def ignored(key: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Let the flag's field answer its default in this process until the test ends."""
    owner, field = owner_of(key)
    ignore(owner, field, default_of(key), partial(monkeypatch.setattr, raising=False))


def seen_to_fail(key: str, test: str) -> bool:
    """Return True if a test that passes fails where the flag is ignored; skips where the test is skipped."""
    assert passes(test), f"{test} fails as it is"
    owner, field = owner_of(key)
    variables = {FIELD: f"{owner.__module__}:{owner.__qualname__}.{field}", DEFAULT: json.dumps(default_of(key))}
    code, printed = run_test(test, variables)
    assert code in (0, 1), printed[-3000:]
    return code == 1


@cache
def passes(test: str) -> bool:
    code, printed = run_test(test, {})
    if code == 0 and " passed" not in printed:
        pytest.skip(f"{test} is skipped here: {printed[-500:]}")
    print(printed[-3000:])
    return code == 0


def run_test(test: str, variables: dict[str, str]) -> tuple[int, str]:
    """Run one test in a pytest of its own, whose processes all import the `sitecustomize` of tests/faults/site."""
    words = ["-x", "-p", "no:cacheprovider", "-p", "no:xdist", "-c", ROOT / "pyproject.toml", "--rootdir", ROOT]
    kept = {name: value for name, value in os.environ.items() if not name.startswith("PYTEST_")}
    with tempfile.TemporaryDirectory() as folder:
        process = subprocess.Popen(
            [sys.executable, "-m", "pytest", *map(str, words), f"--basetemp={folder}/tmp", ROOT / "tests" / test],
            cwd=folder,  # the defaults of output folders are relative
            env={**kept, "PYTHONPATH": str(SITE), **variables},
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            start_new_session=True,
        )
        try:
            printed, _ = process.communicate(timeout=TIMEOUT_S)
        finally:
            if process.poll() is None:
                os.killpg(process.pid, signal.SIGKILL)
                process.wait()
    return process.returncode, printed


# --- runs that differ in one flag ---


def make_flag_inputs(folder: Path) -> Path:
    """Make the inputs of all these runs."""
    make_inputs(folder)
    tokenizer = AutoTokenizer.from_pretrained(folder / "base")
    save_base(folder / "other", tokenizer, seed=3)
    save_scorer(folder / "other-scorer", tokenizer, seed=5)
    save_scorer(folder / "other-judge", AutoTokenizer.from_pretrained(folder / "judge"), seed=5)
    shutil.copytree(folder / "base", folder / "templated")
    tokenizer.chat_template = "{{ greeting }}{% for m in messages %}{{ m.role }}: {{ m.content }}</s>{% endfor %}"
    tokenizer.save_pretrained(folder / "templated")
    turns = [{"role": role, "content": f"{role} {n}"} for n in range(2) for role in ("user", "assistant")]
    write_lines(
        folder / "turns.jsonl", [{"messages": [{"role": "user", "content": f"{n}"}, *turns[1:]]} for n in range(8)]
    )
    more = [{"prompt": f"Say {n}.", "chosen": f"It is {n}.", "rejected": "No."} for n in range(6)]
    write_lines(folder / "more.jsonl", more)
    return folder


def plain_run(folder: Path, tmp_path_factory: pytest.TempPathFactory) -> Callable[[str, FlagTest], Any]:
    """Return a function that returns what a run without the flag leaves; tests that share such a run run it once."""

    @cache
    def run(command: str, look: str, spy: str, both: str) -> Any:
        test = FlagTest(None, look, spy=spy)
        code, left = run_with(command, test, folder, tmp_path_factory.mktemp("plain"), json.loads(both))
        assert code == 0, left
        return left

    def without_flag(key: str, test: FlagTest) -> Any:
        command, _, name = key.partition(".")
        is_set = f"--{name}" in stage_words(command, folder, folder, **SIZES[command])
        both = test.both if name in test.both or not is_set else {**test.both, name: None}
        return run(command, test.look, test.spy, json.dumps(both))

    return without_flag


def check_flag(key: str, test: FlagTest, plain: Callable[[str, FlagTest], Any], folder: Path, out: Path) -> None:
    """Assert that the run with the flag leaves something else, and that this assertion fails if the flag is ignored."""
    command, _, name = key.partition(".")
    flags, without = {**test.both, name: test.value}, plain(key, test)
    code, left = run_with(command, test, folder, out / "given", flags)
    assert code == 0, left
    assert left != without, "the flag changes nothing that is looked at"
    with pytest.MonkeyPatch.context() as patch:
        ignored(key, patch)
        code, left = run_with(command, test, folder, out / "ignored", flags)
    is_noticed = code != 0 or left == without
    assert is_noticed, "the runs differ even if the flag is ignored"


def run_with(command: str, test: FlagTest, folder: Path, out: Path, flags: dict[str, Any]) -> tuple[int, Any]:
    """Run a command with these flags; return its exit code and what it leaves of what the test compares."""
    flags = {**SIZES[command], **flags}
    runs = 2 if flags.pop("twice", False) else 1
    if command == "ppo":
        flags = {f"actor_{name}" if name.startswith(OF_A_MODEL) else name: value for name, value in flags.items()}
    words = stage_words(command, folder, out, **{name: placed(value, folder, out) for name, value in flags.items()})
    out.mkdir(parents=True, exist_ok=True)
    calls: list[str] = []
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("HF_HUB_OFFLINE", "1")
        patch.setattr(sys, "stdin", io.StringIO())
        patch.chdir(out)
        if test.spy:
            watch_calls(test.spy, calls, patch)
        endings = [call(command, words) for _ in range(runs)]
    if endings[-1].code:
        return endings[-1].code, endings[-1].stderr
    return 0, LOOKS[test.look](out, endings[-1], calls)


def placed(value: Any, folder: Path, out: Path) -> Any:
    """Return a value with its @ replaced by the folder of the inputs, or of this run if there is no such input."""
    if isinstance(value, list):
        return [placed(item, folder, out) for item in value]
    if not str(value).startswith("@"):
        return value
    shared = folder / value[1:]
    return shared if shared.exists() or value == "@cache" else out / value[1:]


def watch_calls(spy: str, calls: list[str], patch: pytest.MonkeyPatch) -> None:
    """Note every call of `module:Class.method`: the data type of the model; of `model_memory`, what it returned."""
    module, _, path = spy.partition(":")
    *parents, name = path.split(".")
    owner: Any = importlib.import_module(module)
    for parent in parents:
        owner = getattr(owner, parent)
    original = getattr(owner, name)

    def watched(*given: Any, **named: Any) -> Any:
        result = original(*given, **named)
        calls.append(str(result if isinstance(result, ModelMemory) else getattr(given[0], "dtype", "")))
        return result

    patch.setattr(owner, name, watched)


def models(out: Path) -> list[Path]:
    """Return the configurations of the models that a run has saved."""
    return [file.parent / "config.json" for file in sorted((out / "model").rglob("model.safetensors"))]


def weights(out: Path) -> list[str]:
    files = [path for path in sorted((out / "model").rglob("*.safetensors")) if "checkpoints" not in path.parts]
    return [hashlib.sha256(path.read_bytes()).hexdigest() for path in files]


def metrics(out: Path) -> list[dict[str, Any]]:
    (file,) = out.rglob("metrics.jsonl")
    rows = [json.loads(line) for line in file.read_text().splitlines()]
    return [{name: value for name, value in row.items() if not name.endswith(CHANGING)} for row in rows]


def files(out: Path) -> list[str]:
    paths = (path for path in out.rglob("*") if path.is_file() or "step-" in path.name)
    return sorted("events" if "tfevents" in path.name else path.relative_to(out).as_posix() for path in paths)


LOOKS: dict[str, Callable[..., Any]] = {
    "weights": lambda out, ending, calls: weights(out),
    "metrics": lambda out, ending, calls: metrics(out),
    "files": lambda out, ending, calls: files(out),
    "dtype": lambda out, ending, calls: [json.loads(file.read_text())["dtype"] for file in models(out)],
    "printed": lambda out, ending, calls: ending.stderr,
    "answer": lambda out, ending, calls: ending.stdout,
    "calls": lambda out, ending, calls: calls,
}
