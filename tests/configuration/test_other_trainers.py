"""Flags of other trainers are answered with the flag of this project or with why there is none."""

import re

import pytest
from support.messages import naming, refusal

from pipeline.configuration.flags import parse
from pipeline.configuration.names import normalise
from pipeline.errors import dashed
from rlhf.chat import ChatConfig
from rlhf.main import run_subcommand
from rlhf.rewards.sample import SampleConfig
from rlhf.stages import STAGES
from rlhf.train_plan import make_plan

# Name and value -> the flag of stage 1, of PPO and of all stages of `rlhf train` (the same where it is not said).
OURS = {
    "use_peft": ("true", "--lora-dim", "--actor-lora-dim or --critic-lora-dim", "--lora-dim"),
    "lr": (
        "1e-4", "--learning-rate", "--actor-learning-rate or --critic-learning-rate",
        "--sft.learning-rate or --reward.learning-rate or --ppo.actor-learning-rate or --ppo.critic-learning-rate",
    ),
    "epochs": ("3", *["--num-train-epochs"] * 3),
    "per_device_batch_size": ("8", *["--per-device-train-batch-size"] * 3),
}  # fmt: skip
# Name -> value, and what the reason holds where there is no such flag.
WHY_NOT = {
    "num_generations": ("8", "num_samples_per_prompt"),
    "chat_template": ("my.jinja", "chat_template.jinja in the model's folder"),
    "use_vllm": ("true", "--generation-engine"),
}
NO_COUNTERPART = "without a counterpart here"
# Flags of TRL, LLaMA-Factory, OpenRLHF and veRL that are none here.
FOREIGN = """
assistant_only_loss bits completion_only_loss dataloader_num_workers dataset_num_proc disable_tqdm do_train
finetuning_type fsdp global_batch_size group_by_length kl_penalty log_completions logging_dir lora_target
mask_truncated_completions micro_batch_size neftune_noise_alpha num_iterations optim padding_free precision
ref_model_mixup_alpha remove_unused_columns reward_funcs run_name save_path scale_rewards steps_per_generation
sync_ref_model tf32 tokenizer_path torch_compile train_file use_liger_kernel vf_coef vllm_gpu_memory_utilization
vllm_mode warmup_ratio
""".split()


def answers(stage, *words: str) -> list[str]:
    """The error lines of a stage by itself."""
    return refusal(parse, stage.config, list(words), section=stage.section)


def refused(*words: str) -> list[str]:
    """The error lines of `rlhf train`."""
    return refusal(make_plan, ["--actor-model", "tiny", *words], prog="train.py")


@pytest.mark.parametrize("name", OURS)
def test_a_name_is_answered_with_ours(name, tmp_path):
    value, of_one, of_ppo, of_all = OURS[name]
    file = tmp_path / "c.yaml"
    for stage in STAGES:
        ours = of_ppo if stage.section == "ppo" else of_one
        assert answers(stage, f"--{name}", value) == [naming(f"{dashed(name)} ... {ours}")]
        file.write_text(f"{stage.section}:\n  {name}: {value}\n")
        parts = f"{file} ... {name} ... {normalise(ours.replace('--', ''))}"
        assert answers(stage, "--config", str(file)) == [naming(parts)]
        if stage.section != "dpo":
            assert refused("--config", str(file)) == [naming(stage.section, parts)]
    assert refused(f"--{name}", value) == [naming(f"{dashed(name)} ... {of_all}")]
    assert refused(f"--sft.{name}", value) == [naming(f"{dashed('sft.' + name)} ... {of_one.replace('--', '--sft.')}")]


@pytest.mark.parametrize("name", WHY_NOT)
def test_a_name_without_a_counterpart_is_answered_with_why_not(name, tmp_path):
    value, reason = WHY_NOT[name]
    file = tmp_path / "c.yaml"
    for stage in STAGES:
        (line,) = answers(stage, f"--{name}", value)
        file.write_text(f"{name}: {value}\n")
        (of_file,) = answers(stage, "--config", str(file))
        for said in (line, of_file):
            assert normalise(reason) in normalise(said) and (
                NO_COUNTERPART in said or (stage.section, name) == ("ppo", "num_generations")
            )
    for words in ((f"--sft.{name}", value), ("--step", "1", f"--{name}", value)):
        (line,) = refused(*words)
        assert NO_COUNTERPART in line and normalise(reason) in normalise(line)
    (line,) = refused(f"--{name}", value)
    assert normalise(reason) in normalise(line)


def test_a_flag_of_stages_in_the_files_section_of_train_is_sent_to_theirs(tmp_path):
    file = tmp_path / "c.yaml"
    file.write_text("train: {step: 1, lr: 1e-5, data_path: rows.jsonl, beta: 1, no_flag: 2}\n")
    assert refused("--config", str(file)) == [
        naming(f"{file}: train: lr: ... under sft or reward or ppo or dpo"),
        naming(f"{file}: train: data_path: ... under sft or reward or ppo or dpo"),
        naming(f"{file}: train: beta: ... under ppo or dpo"),
    ]
    file.write_text("train: {step: 1, no_flag: 2}\n")
    assert refused("--config", str(file)) == [naming(f"{file} ... no_flag: unknown flag")]


def test_rewards_are_not_whitened_and_a_batch_of_generation_is_that_of_a_rollout():
    ppo = next(stage for stage in STAGES if stage.section == "ppo")
    assert answers(ppo, "--whiten-rewards", "true") == [naming("--whiten-rewards ... --whiten-advantages")]
    assert answers(ppo, "--generation-batch-size", "8") == [naming("--generation-batch-size ... --rollout-batch-size")]


def test_a_file_for_deepspeed_is_that_of_another_flag(tmp_path):
    parts = "deepspeed ... 'ds.json' ({}) ... boolean ... --{}deepspeed-config"
    file = tmp_path / "c.yaml"
    file.write_text("deepspeed: ds.json\n")
    for stage in STAGES:
        assert answers(stage, "--deepspeed", "ds.json") == [naming("--" + parts.format("command line", ""))]
        assert answers(stage, "--config", str(file)) == [naming("--" + parts.format(file, ""))]
    assert refused("--step", "1", "--deepspeed", "ds.json") == [naming("--sft." + parts.format("command line", "sft."))]


def in_both(one: str, other: str) -> int:
    """The length of the longest common subsequence of two words."""
    before = [0] * (len(other) + 1)
    for letter in one:
        row = [0]
        for place, there in enumerate(other):
            row.append(before[place] + 1 if letter == there else max(row[-1], before[place + 1]))
        before = row
    return before[-1]


@pytest.mark.parametrize("stage", STAGES, ids=lambda stage: stage.section)
def test_no_guess_shares_less_than_half_of_its_letters(stage):
    guesses = 0
    for name in FOREIGN:
        (line,) = answers(stage, f"--{name}", "1")
        if match := re.search(r"did you mean --([\w-]+)\?", line):
            guesses += 1
            one, other = name.replace("_", ""), match[1].replace("-", "")
            assert 2 * in_both(one, other) >= max(len(one), len(other)), line
    assert 0 < guesses < len(FOREIGN) / 4


@pytest.mark.parametrize(
    ("command", "name", "says"),
    [
        ("sample", "num_generations", "here it is --n"),
        ("sample", "max_completion_length", "here it is --max-new-tokens"),
        ("chat", "max_tokens", "here it is --max-new-tokens"),
        ("chat", "chat_template", "chat_template.jinja in the model's folder"),
        ("sample", "use_vllm", "docs/guides/chat_and_serve.md"),
    ],
)
def test_commands_that_answer_know_names_of_other_programs(command, name, says, capsys):
    assert run_subcommand(command, ["model", f"--{name}", "8"], prog=f"rlhf {command}") == 2
    line = capsys.readouterr().err.splitlines()[0]
    assert line.startswith(f"error: {dashed(name)}: ") and says in line


def test_commands_that_answer_take_the_long_name_of_a_model():
    for config in (ChatConfig, SampleConfig):
        assert parse(config, ["--model-name-or-path", "output/sft"], section="none").config.model == "output/sft"
