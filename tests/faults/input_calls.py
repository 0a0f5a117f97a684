"""Call a command's own `main(argv)` in this process and see how it ended; shared by the tests of wrong input.

Stages stop where their first model would be loaded, so that a case takes hundredths of a second and a load is noticed.
"""

import io
import re
import shutil
from collections.abc import Callable, Iterator
from contextlib import contextmanager, redirect_stderr, redirect_stdout
from dataclasses import dataclass
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from support.in_process import undone_afterwards
from support.tiny_run import make_folder
from transformers import AutoTokenizer

from pipeline.data.templates import set_template
from pipeline.errors import EnvironmentFault
from rlhf import chat, compare, train
from rlhf.rewards import eval as evaluation
from rlhf.rewards import sample
from step1_sft import training as sft_training
from step1_sft.main import main as sft_main
from step2_reward import eval as reward_eval
from step2_reward import training as reward_training
from step2_reward.main import main as reward_main
from step3_dpo import training as dpo_training
from step3_dpo.main import main as dpo_main
from step3_ppo import build as ppo_build
from step3_ppo.main import main as ppo_main

EXIT_LOADED = 3
MAINS: dict[str, Callable[[list[str]], int]] = {
    "sft": sft_main,
    "reward": reward_main,
    "ppo": ppo_main,
    "dpo": dpo_main,
    "chat": chat.main,
    "prompt_eval": compare.main,
    "eval": evaluation.main,
    "sample": sample.main,
    "reward_eval": reward_eval.main,
    "train": train.main,
}


@dataclass(frozen=True, slots=True)
class Ending:
    """How a call ended; `loaded` says that a stage came to where it loads its first model."""

    code: int
    stdout: str
    stderr: str

    @property
    def loaded(self) -> bool:
        return self.code == EXIT_LOADED and "a model would be loaded now" in self.stderr

    @property
    def errors(self) -> list[str]:
        """The lines that a user reads as errors."""
        return [line for line in self.stderr.splitlines() if line.startswith("error: ")]

    @property
    def counts(self) -> list[str]:
        """What happened to rows: `2 prompt is null (first: a.jsonl:3)`."""
        return re.findall(r"^  rows: (.*)$", self.stderr, flags=re.MULTILINE)


def call(command: str, words: list[object]) -> Ending:
    """Run a command's main. An exception that comes through is a fault of ours, and fails the test."""
    out, err = io.StringIO(), io.StringIO()
    with undone_afterwards(), redirect_stdout(out), redirect_stderr(err):
        code = MAINS[command]([str(word) for word in words])
    return Ending(code, out.getvalue(), err.getvalue())


def make_inputs(folder: Path) -> Path:
    """tiny_run.make_folder with few rows, and `judge`."""
    return add_judge(make_folder(folder, num_train=12, num_test=2))


def add_judge(folder: Path) -> Path:
    """Save `judge` beside the models of a tiny folder: the scorer as step 2 saves it, with its template."""
    shutil.copytree(folder / "scorer", folder / "judge")
    tokenizer = AutoTokenizer.from_pretrained(folder / "judge")
    set_template(tokenizer, "human_assistant")
    tokenizer.save_pretrained(folder / "judge")
    return folder


def flags(**values: object) -> list[object]:
    """`--name value ...`; a list gives several values, None leaves a flag out."""
    words: list[object] = []
    for name, value in values.items():
        if value is None:
            continue
        words += [f"--{name}", *(value if isinstance(value, list) else [value])]
    return words


def stage_words(command: str, folder: Path, out: Path, **changes: object) -> list[object]:
    """A small valid run of a command in the folder that tiny_run.make_folder made, with some flags changed."""
    common = {"data_output_path": out / "cache", "output_dir": out / "model", "dtype": "fp32", "max_steps": 1}
    rows = {"data_path": folder / "train.jsonl", "eval_data_path": folder / "test.jsonl", "data_split": "none"}
    valid: dict[str, dict[str, object]] = {
        "sft": {**common, **rows, "model_name_or_path": folder / "base", "max_seq_len": 96},
        "reward": {**common, **rows, "model_name_or_path": folder / "base", "max_seq_len": 96},
        "dpo": {**common, **rows, "model_name_or_path": folder / "base", "max_seq_len": 96},
        "ppo": {
            **common, **rows, "actor_model_name_or_path": folder / "base",
            "critic_model_name_or_path": folder / "scorer", "max_prompt_seq_len": 64, "max_answer_seq_len": 32,
        },
        "chat": {"model": folder / "base", "prompt": "Describe the otter.", "max_new_tokens": 4, "temperature": 0},
        "prompt_eval": {"model": [folder / "base", folder / "base"], "max_new_tokens": 4},
        "eval": {"model": folder / "base", "data_path": folder / "train.jsonl", "max_new_tokens": 4},
        "sample": {"model": folder / "base", "data": folder / "test.jsonl", "max_new_tokens": 4},
        "reward_eval": {"model": folder / "judge", "data_path": folder / "train.jsonl", "max_seq_len": 96},
    }  # fmt: skip
    return flags(**{**valid[command], **changes})


@contextmanager
def stopped_at_the_models(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Every stage raises where it would load its first model; so does whoever calls transformers to load one."""
    from transformers import AutoModelForCausalLM, AutoModelForSequenceClassification

    def stop(*args: Any, **kwargs: Any) -> Any:
        raise EnvironmentFault("a model would be loaded now")

    with monkeypatch.context() as patches:
        for owner, name in (
            (sft_training, "language_model_engine"),
            (reward_training, "value_model_engine"),
            (dpo_training, "reference_log_probs"),
            (ppo_build, "make_schedule"),
            (AutoModelForCausalLM, "from_pretrained"),
            (AutoModelForSequenceClassification, "from_pretrained"),
        ):
            patches.setattr(owner, name, stop)
        patches.setattr(ppo_build, "make_models", models_without_weights)
        yield


def models_without_weights(run: Any, config: Any, *others: Any) -> Any:
    """What step 3 has to know before its rows: the checks of its models, and the actor's tokenizer."""
    from step3_ppo.models.engines import make_sources

    return SimpleNamespace(tokenizer=make_sources(run, config).tokenizer)
