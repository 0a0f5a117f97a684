"""Every declared flag has a test that fails when the flag is ignored: twin runs here, the others by name."""

import hashlib
import json
import shutil
from functools import cache
from pathlib import Path
from typing import Any

import pytest
from flag_coverage import ELSEWHERE, RESOLVED_ONLY, TWINS, Twin
from input_calls import call, make_inputs, stage_words
from support.source_tree import ROOT
from support.tiny_run import save_base, save_scorer, write_lines
from transformers import AutoTokenizer

from pipeline.configuration.flag_table import flag_table
from pipeline.launching.train_config import TrainConfig
from rlhf.chat import ChatConfig
from rlhf.compare import CompareConfig
from step1_sft.config import SFTConfig
from step2_reward.config import RewardConfig, RewardEvalConfig
from step3_ppo.config import PPOConfig

CONFIGS = (SFTConfig, RewardConfig, PPOConfig, RewardEvalConfig, ChatConfig, CompareConfig, TrainConfig)

CHANGING = ("time", "_s", "_per_s", "mfu", "gib", "seconds", "rss")
SIZES = {"per_device_train_batch_size": 4, "max_steps": 2, "learning_rate": 1e-3, "data_output_path": "@cache"}
PPO_SIZES = {
    "per_device_generation_batch_size": 4,
    "max_prompt_seq_len": 64,
    "max_answer_seq_len": 12,
    "reward_clip": 5.0,
}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = make_inputs(tmp_path_factory.mktemp("flags"))
    tokenizer = AutoTokenizer.from_pretrained(folder / "base")
    save_base(folder / "other", tokenizer, seed=3)
    save_scorer(folder / "other-scorer", tokenizer, seed=5)
    shutil.copytree(folder / "base", folder / "templated")
    tokenizer.chat_template = "{% for m in messages %}{{ m.role }}: {{ m.content }}</s>{% endfor %}"
    tokenizer.save_pretrained(folder / "templated")
    turns = [{"role": role, "content": f"{role} {n}"} for n in range(2) for role in ("user", "assistant")]
    write_lines(
        folder / "turns.jsonl", [{"messages": [{"role": "user", "content": f"{n}"}, *turns[1:]]} for n in range(8)]
    )
    more = [{"prompt": f"Say {n}.", "chosen": f"It is {n}.", "rejected": "No."} for n in range(6)]
    write_lines(folder / "more.jsonl", more)
    return folder


def seen(twin: Twin, folder: Path, out: Path, flags: dict[str, Any]) -> Any:
    """What a run with these flags leaves of what the twin looks at."""
    twice = flags.pop("twice", False)
    prefix = "actor_" if twin.stage == "ppo" else ""
    single = ("learning_rate", "lora_", "zero_stage", "weight_decay")
    flags = {f"{prefix}{name}" if name.startswith(single) and prefix else name: value for name, value in flags.items()}
    flags = {name: folder / value[1:] if str(value).startswith("@") else value for name, value in flags.items()}
    if flags.get("run_dir"):
        flags["run_dir"] = out / "elsewhere"
    words = stage_words(twin.stage, folder, out, **flags)
    endings = [call(twin.stage, words) for _ in range(2 if twice else 1)]
    assert endings[-1].code == 0, endings[-1].stderr
    return LOOKS[twin.look](out, endings[-1].stderr)


def weights(out: Path, printed: str) -> list[str]:
    files = [path for path in sorted((out / "model").rglob("*.safetensors")) if "checkpoints" not in path.parts]
    return [hashlib.sha256(path.read_bytes()).hexdigest() for path in files]


def metrics(out: Path, printed: str) -> list[dict[str, Any]]:
    (file,) = out.rglob("metrics.jsonl")
    rows = [json.loads(line) for line in file.read_text().splitlines()]
    return [{name: value for name, value in row.items() if not name.endswith(CHANGING)} for row in rows]


def files(out: Path, printed: str) -> list[str]:
    names = (path.relative_to(out).as_posix() for path in out.rglob("*") if path.is_file() or "step-" in path.name)
    return sorted("events" if "tfevents" in name else name for name in names)


def dtype(out: Path, printed: str) -> str:
    return json.loads((out / "model" / "config.json").read_text())["dtype"]


LOOKS = {"weights": weights, "metrics": metrics, "files": files, "dtype": dtype, "printed": lambda out, text: text}


@pytest.fixture(scope="module")
def plain(folder: Path, tmp_path_factory: pytest.TempPathFactory) -> Any:
    """What the run without the flag leaves, made once for the twins that share it."""

    @cache
    def run(stage: str, look: str, both: str) -> Any:
        flags = {**(SIZES | PPO_SIZES if stage == "ppo" else SIZES), **json.loads(both)}
        return seen(Twin(None, look, stage), folder, tmp_path_factory.mktemp("plain"), flags)  # type: ignore[arg-type]

    return run


@pytest.mark.faults
@pytest.mark.parametrize("name", TWINS)
def test_a_run_with_the_flag_is_another_one(name: str, folder: Path, tmp_path: Path, plain: Any) -> None:
    twin = TWINS[name]
    flags = {**(SIZES | PPO_SIZES if twin.stage == "ppo" else SIZES), **twin.both, name: twin.value}
    assert seen(twin, folder, tmp_path, flags) != plain(twin.stage, twin.look, json.dumps(twin.both))


def declared() -> set[str]:
    """Every flag of every command; those of step 3's two models once, by the name that steps 1 and 2 give them."""
    names = {name for config in CONFIGS for name in flag_table(config)}
    single = {name.removeprefix("actor_").removeprefix("critic_") for name in names}
    return {name for name in names if name.removeprefix("actor_").removeprefix("critic_") not in names - {name}} | (
        single & names
    )


def test_every_flag_has_a_test() -> None:
    covered = TWINS.keys() | ELSEWHERE.keys() | RESOLVED_ONLY.keys()
    assert declared() - covered == set(), "a flag without a test"
    assert covered - declared() - {"actor_zero_stage"} == set(), "no such flag"


@pytest.mark.parametrize("test", sorted(set(ELSEWHERE.values())))
def test_the_tests_that_are_named_exist(test: str) -> None:
    file, _, name = test.partition("::")
    assert f"def {name}(" in (ROOT / "tests" / file).read_text(encoding="utf-8")


def test_debug_shows_the_traceback(folder: Path, tmp_path: Path) -> None:
    words = stage_words("sft", folder, tmp_path, data_path=folder / "none.jsonl")
    assert "Traceback" in call("sft", [*words, "--debug"]).stderr and "Traceback" not in call("sft", words).stderr


def test_rows_are_kept_where_the_flag_says(folder: Path, tmp_path: Path) -> None:
    words = stage_words("sft", folder, tmp_path, data_output_path=tmp_path / "rows", **FEW)
    assert call("sft", words).code == 0
    assert list((tmp_path / "rows").glob("sft-*/train.arrow"))


def test_progress_lines_are_as_far_apart_as_the_flag_says(folder: Path, tmp_path: Path) -> None:
    def lines(apart: int) -> int:
        words = stage_words("sft", folder, tmp_path / str(apart), print_steps=apart, **{**FEW, "max_steps": 4})
        return call("sft", words).stderr.count("steps/s")

    assert (lines(1), lines(2)) == (4, 2)


FEW = {"per_device_train_batch_size": 4, "max_steps": 1}
