"""Sixty wrong configurations: each ends in one line and exit 2 before a model is loaded, with the nearest valid name.

The table: command, its wrong words (flags that differ from a valid run's), what the line says, files to write first.
A name that starts with `@` stands for a file of the case's folder.
"""

import re
from pathlib import Path
from typing import Any, NamedTuple

import pytest
from input_calls import call, flags, stage_words, stopped_at_the_models
from support.messages import naming

from pipeline.errors import dashed
from rlhf.stages import STAGES
from rlhf.train_config import TrainConfig, train_help
from rlhf.train_plan import why_not_common

FOLDER_SIZES = {"num_train": 12, "num_test": 2}

YAML, JSON = "c.yaml", "ds.json"


class Case(NamedTuple):
    """One wrong configuration."""

    command: str
    changes: dict[str, Any]
    says: str
    files: dict[str, str] = {}


def typo(command: str, wrong: str, right: str, value: object = 1) -> Case:
    return Case(command, {wrong: value}, f"{dashed(wrong)} ... {dashed(right)}?")


def in_yaml(command: str, text: str, says: str) -> Case:
    return Case(command, {"config": f"@{YAML}"}, says, {YAML: text})


def in_json(text: str, says: str, command: str = "sft", **changes: Any) -> Case:
    return Case(command, {"deepspeed_config": f"@{JSON}", **changes}, says, {JSON: text})


CASES = [
    # Names of flags.
    typo("sft", "learning_rat", "learning_rate"),
    typo("sft", "max_seq_leng", "max_seq_len"),
    Case("sft", {"max_seq_length": 1}, "--max-seq-length ... --max-seq-len"),
    typo("reward", "centring_coef", "centering_coef"),
    typo("reward", "num_train_epoch", "num_train_epochs"),
    typo("reward", "lora_dimension", "lora_dim"),
    typo("ppo", "actor_learningrate", "actor_learning_rate"),
    typo("ppo", "critic_zero_stag", "critic_zero_stage"),
    typo("ppo", "kl_coeff", "kl_coef"),
    Case("sft", {"learning_rate": "1e30"}, "--learning-rate ... '1e30' (command line) ... 10"),
    Case("ppo", {"critic_lora_learning_rate": 11}, "--critic-lora-learning-rate ... '11' (command line) ... less than"),
    Case("ppo", {"actor_lora_alpha": "1e38"}, "--actor-lora-alpha ... '1e38' (command line) ... less than"),
    Case("ppo", {"learning_rate": 1}, "--learning-rate ... --actor-learning-rate or --critic-learning-rate"),
    typo("chat", "max_new_token", "max_new_tokens"),
    typo("prompt_eval", "rewards_model", "reward_model"),
    typo("reward_eval", "data_paths", "data_path"),
    Case("sft", {"eval_batch": 4}, "--eval-batch ... --per-device-eval-batch-size?"),
    Case("train", {"eval_batch": 4}, "--eval-batch ... --per-device-eval-batch-size?"),
    Case("train", {"sft.learning_rte": 1}, "--sft.learning-rte ... --sft.learning-rate?"),
    Case("train", {"actor-modle": "tiny"}, "--actor-modle ... --actor-model?"),
    # Words that no value may be.
    Case("sft", {"dtype": "bf61"}, "--dtype: got 'bf61' (command line): ", {}),
    Case("sft", {"lr_scheduler_type": "cosin"}, "did you mean cosine?"),
    Case("reward", {"reward_loss": "last_tokn"}, "did you mean last_token?"),
    Case("reward", {"long_pairs": "truncate"}, "did you mean truncate_left?"),
    Case("ppo", {"kl_estimator": "k4"}, "--kl-estimator: got 'k4'"),
    Case("sft", {"template": "tokeniser"}, "did you mean tokenizer?"),
    Case("chat", {"dtype": "fp64"}, "--dtype: got 'fp64' (command line)"),
    Case("train", {"actor-model": "1.5b"}, "--actor-model: got '1.5b'"),
    Case("train", {"deployment-type": "single_gpus"}, "did you mean single_gpu?"),
    # Types.
    Case("sft", {"max_seq_len": "many"}, "--max-seq-len ... 'many' (command line) ... integer"),
    Case("sft", {"learning_rate": "fast"}, "--learning-rate: got 'fast'"),
    Case("reward", {"packing": "true"}, "--packing: unknown flag"),
    Case("sft", {"packing": "maybe"}, "--packing: got 'maybe'"),
    Case("ppo", {"ppo_epochs": "1.5"}, "--ppo-epochs: got '1.5'"),
    Case("sft", {"seed": ["1", "2"]}, "--seed ... 2 values (1 2) ... one"),
    in_yaml("sft", "sft: {seed: [1]}", "--seed: got [1] ("),
    in_yaml("reward", "learning_rate: {a: 1}", "learning_rate: unknown section"),
    # Ranges.
    Case("sft", {"max_seq_len": 4}, "--max-seq-len ... '4' (command line) ... greater than"),
    Case("sft", {"learning_rate": "-1e-5"}, "--learning-rate: got '-1e-5'"),
    Case("sft", {"learning_rate": "nan"}, "--learning-rate: got 'nan'"),
    Case("sft", {"learning_rate": "inf"}, "--learning-rate: got 'inf'"),
    Case("reward", {"eval_fraction": "1"}, "--eval-fraction: got '1'"),
    Case("ppo", {"gamma": "1.01"}, "--gamma: got '1.01'"),
    Case("ppo", {"actor_zero_stage": "4"}, "--actor-zero-stage: got '4'"),
    Case("prompt_eval", {"top_p": "0"}, "--top-p: got '0'"),
    Case("sft", {"data_split": "2,4"}, "--data-split ... '2,4' ... three numbers"),
    Case("sft", {"data_path": "train.jsonl:1.5"}, "got the weight '1.5', expected"),
    Case("sft", {"data_split": "1e308,1e308,1e308"}, "--data-split: got '1e308,1e308,1e308', expected"),
    Case("ppo", {"num_samples_per_prompt": 1_000_000}, "--num-samples-per-prompt ... 4096"),
    Case("prompt_eval", {"num_return_sequences": 4097, "temperature": 1}, "--num-return-sequences ... 4096"),
    Case("sft", {"lora_dim": 1_000_000}, "--lora-dim ... '1000000' (command line) ... 16384"),
    # Conflicts.
    Case("sft", {"packing": "true", "attn_implementation": "flash_attention_2"}, "--packing ... flash_attention_2"),
    Case("reward", {"reward_loss": "per_token", "centering_coef": "0.1"}, "--centering-coef ... per_token"),
    Case("ppo", {"kl_in_loss": "true"}, "--kl-estimator ... k1 ... gradient"),
    Case(
        "ppo",
        {"per_device_train_batch_size": 3, "per_device_generation_batch_size": 16},
        "--per-device-generation-batch-size 15 ... --rollout-batch-size 15",
    ),
    Case("ppo", {"actor_lora_dropout": "0.1"}, "--actor-lora-dropout: got 0.1"),
    Case("ppo", {"max_answer_seq_len": 200}, "--max-prompt-seq-len + --max-answer-seq-len 264: the model"),
    Case("prompt_eval", {"num_return_sequences": 2}, "--num-return-sequences: 2 answers need"),
    Case("prompt_eval", {"max_new_tokens": 120}, "the model's 128 positions"),
    # YAML.
    in_yaml("sft", "max_sequence_len: 5", "c.yaml ... max_sequence_len ... max_seq_len?"),
    in_yaml("ppo", "ppo:\n  kl_targt: 5", "c.yaml ... kl_targt ... kl_target?"),
    in_yaml("train", "sft: {seed: 1}\nrewad: {seed: 1}", "c.yaml ... rewad ... reward?"),
    in_yaml("train", "sfft: {seed: 1}", "c.yaml ... sfft ... sft?"),
    in_yaml("sft", f"seed: {'1' * 5000}", "c.yaml: not YAML ... limit (4300 digits)"),
    in_yaml("sft", f"seed: 0x{'f' * 5000}", "c.yaml: not YAML ... limit (4300 digits)"),
    in_yaml("ppo", f"ppo: {{seed: {':'.join(['59'] * 3000)}}}", "c.yaml: not YAML ... limit (4300 digits)"),
    in_yaml("reward", "seed: 1\nseed: 2", "c.yaml ... line 2 ... seed ... twice"),
    # DeepSpeed's JSON, which DeepSpeed itself would take without a word.
    in_json('{"gradient_clippping": 1}', "gradient_clippping: ... no such key", command="reward"),
    in_json('{"zero_optimisation": {"stage": 2}}', "did you mean zero_optimization?"),
    in_json('{"zero_optimization": {"stage": 2, "overlap_com": true}}', "did you mean overlap_comm?"),
    in_json('{"zero_optimization": {"offload_optimizer": {"devise": "cpu"}}}', "did you mean device?"),
    in_json('{"train_micro_batch_size_per_gpu": 3}', "got 3, but --per-device-train-batch-size is 4",
            per_device_train_batch_size=4),
    in_json('{"optimizer": {"type": "Lion"}}', "optimizer.type 'Lion'"),
    in_json('{"fp16": {"enabled": true}, "bf16": {"enabled": true}}', "bf16 and fp16 ... both", dtype="auto"),
]  # fmt: skip


def test_there_are_sixty() -> None:
    assert len(CASES) >= 60


def words_of(case: Case, folder: Path, out: Path) -> list[object]:
    """The command line, after the case's files were written."""
    for name, text in case.files.items():
        (out / name).write_text(text, encoding="utf-8")
    changes = {
        name: str(out / value[1:]) if isinstance(value, str) and value.startswith("@") else value
        for name, value in case.changes.items()
    }
    return flags(**changes) if case.command == "train" else stage_words(case.command, folder, out, **changes)


@pytest.mark.parametrize("case", CASES, ids=lambda case: f"{case.command}-{next(iter(case.changes))}")
def test_a_wrong_configuration_is_refused(
    case: Case, folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(folder)
    with stopped_at_the_models(monkeypatch):
        ending = call(case.command, words_of(case, folder, tmp_path))
    assert ending.code == 2, ending.stderr
    assert len(ending.errors) == 1 and ending.errors[0] == naming(case.says), ending.errors
    assert not list(tmp_path.rglob("*.safetensors"))


@pytest.mark.parametrize("command", ["sft", "reward"])
def test_a_length_beyond_the_positions_is_refused_before_the_model_is_loaded(
    command: str, folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with stopped_at_the_models(monkeypatch):
        ending = call(command, stage_words(command, folder, tmp_path, max_seq_len=129))
    assert ending.code == 2 and not ending.loaded
    assert ending.errors == [
        naming(f"error: --max-seq-len 129 ... {folder / 'base'} ... 128 positions ... --max-seq-len 128")
    ]


@pytest.mark.parametrize(
    ("command", "changes", "says"),
    [
        ("sft", {"quantization": "int8"}, "--quantization int8 ... --lora-dim 16"),
        (
            "reward",
            {"offload": "true", "zero_stage": 0},
            "--offload ... 1, 2 or 3 ... stage 0 ... --zero-stage",
        ),
        ("ppo", {"critic_quantization": "int8"}, "--critic-quantization int8 ... not trained"),
    ],
)
def test_flags_that_contradict_each_other_are_refused_before_data_are_read(
    command: str, changes: dict[str, Any], says: str, folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with stopped_at_the_models(monkeypatch):
        ending = call(command, stage_words(command, folder, tmp_path, **changes))
    assert ending.code == 2 and len(ending.errors) == 1 and ending.errors[0] == naming(says), ending.errors
    assert not (tmp_path / "cache").exists()


def test_the_train_help_names_flags_of_all_stages() -> None:
    stages = {stage.number: stage for stage in STAGES}
    line = re.search(r"^  (--.*): for all stages$", train_help(TrainConfig, "train.py"), re.MULTILINE)
    assert line and {"--show-data", "--target", "--explain", "--auto"} == set(line[1].split(", "))
    assert all(why_not_common(flag, stages) == "" for flag in line[1].split(", "))


def test_the_valid_runs_come_to_their_models(folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Otherwise the cases could all be refused for another reason."""
    with stopped_at_the_models(monkeypatch):
        for command in ("sft", "reward", "ppo", "dpo"):
            assert call(command, stage_words(command, folder, tmp_path / command)).loaded
