"""Flags from models: names, types, layers, origins, errors. No torch."""

from typing import Literal

import pytest
from pydantic import Field
from support.launch_stub import fastest_run_s

from pipeline.configuration.dschat_flags import ALIASES, RETIRED
from pipeline.configuration.flag_table import flag_table, flat_items
from pipeline.configuration.flags import parse, read_yaml, scan
from pipeline.configuration.groups import Group
from pipeline.configuration.help import help_text, reference
from pipeline.errors import InputError, nearest
from step1_sft.config import SFTConfig
from step2_reward.config import RewardConfig
from step3_ppo.config import PPOConfig

STAGES = {"sft": SFTConfig, "reward": RewardConfig, "ppo": PPOConfig}


class Model(Group):
    """Model"""

    rate: float = Field(1e-5, gt=0, description="Peak rate")
    stage: int = Field(0, ge=0, le=3, description="What is partitioned")


class Data(Group):
    """Data"""

    paths: list[str] = Field(["a", "b"], min_length=1, description="Files, 100 % of them")
    kind: Literal["auto", "plain"] = Field("auto", description="Kind")
    shuffle: bool = Field(False, description="Shuffle")
    columns: str = Field("", description="Names")


class One(Group):
    """A stage with one model."""

    model: Model = Model(rate=1e-3)
    data: Data = Data()
    steps: int = Field(0, ge=0, description="Steps; 0: all")


class Two(Group):
    """A stage with two models."""

    actor: Model = Model()
    critic: Model = Model(rate=2e-5)


def one(*words: str):
    return parse(One, list(words), section="sft")


def errors_of(*words: str, config_class: type[Group] = One) -> list[str]:
    with pytest.raises(InputError) as caught:
        parse(config_class, list(words), section="sft")
    return str(caught.value).splitlines()


# --- names ----------------------------------------------------------------------------------------------------------


def test_groups_are_flat_and_doubled_groups_have_a_prefix():
    assert list(flag_table(One)) == ["rate", "stage", "paths", "kind", "shuffle", "columns", "steps"]
    assert list(flag_table(Two)) == ["actor_rate", "actor_stage", "critic_rate", "critic_stage"]
    assert flag_table(One)["rate"].default == 1e-3, "the field's default, not the group's"
    two = parse(Two, ["--critic_stage", "3"], section="ppo").config
    assert (two.actor.stage, two.critic.stage, two.critic.rate) == (0, 3, 2e-5)


def test_dashes_and_equal_signs():
    resolved = parse(PPOConfig, ["--actor-learning-rate=2e-6", "--kl_coef", "0.2"], section="ppo")
    assert resolved.config.actor.learning_rate == 2e-6 and resolved.config.ppo.kl_coef == 0.2
    assert one("--columns=a-b=c").config.data.columns == "a-b=c"


def test_no_abbreviations():
    assert errors_of("--rat", "1") == ["--rat: unknown flag; did you mean --rate?"]


def test_values_are_never_changed():
    words = ["a b", 'say "x"', "two\nlines", "-1", "", "C:\\x", "a-b_c"]
    assert one("--paths", *words).config.data.paths == words
    assert one("--columns=--odd").config.data.columns == "--odd"


def test_scan():
    found = list(scan(["x", "--a-b", "1", "2", "--c=3", "--d"]))
    assert found == [("", ["x"]), ("a_b", ["1", "2"]), ("c", ["3"]), ("d", [])]
    assert list(scan([])) == []


def test_nearest():
    assert nearest("learning_rat", ["seed", "learning_rate"]) == "; did you mean learning_rate?"
    assert nearest("zzz", ["seed"]) == ""


# --- types ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("word", "value"), [("", True), ("true", True), ("false", False), ("1", True), ("no", False)])
def test_switches(word, value):
    assert one("--shuffle", *([word] if word else [])).config.data.shuffle is value


def test_numbers():
    assert one("--steps", "5e2").config.steps == 500
    assert one("--rate", "2e-5").config.model.rate == 2e-5
    assert errors_of("--steps", "5e-1") == [
        "--steps: found '5e-1' (command line): Input should be a valid integer, unable to parse string as an integer"
    ]


def test_the_last_of_a_repeated_flag_counts():
    assert one("--steps", "1", "--steps", "2").config.steps == 2


# --- files and layers -----------------------------------------------------------------------------------------------


def test_layers_and_origins(tmp_path):
    preset, config = tmp_path / "p.yaml", tmp_path / "c.yaml"
    preset.write_text("steps: 1\nrate: 1e-4\nstage: 1\n")
    config.write_text("sft: {rate: 2e-4, stage: 2}\nppo: {anything: 1}\n")
    resolved = one("--stage", "3", "--config", str(config), "--preset", str(preset))
    assert dict(flat_items(resolved.config)) == {
        "rate": 2e-4, "stage": 3, "paths": ["a", "b"], "kind": "auto", "shuffle": False, "columns": "", "steps": 1
    }  # fmt: skip
    assert resolved.origins == {
        "rate": str(config), "stage": "command line", "steps": str(preset),
        "paths": "default", "kind": "default", "shuffle": "default", "columns": "default",
    }  # fmt: skip


def test_yaml_scientific_notation_is_a_number(tmp_path):
    file = tmp_path / "c.yaml"
    file.write_text("rate: 2e-5\nsteps: 5e2\ncolumns: 1e3x\n")
    assert read_yaml(str(file), "sft") == {"rate": 2e-5, "steps": 500.0, "columns": "1e3x"}
    config = one("--config", str(file)).config
    assert config.model.rate == 2e-5 and config.steps == 500


def test_yaml_conveniences(tmp_path):
    file = tmp_path / "c.yaml"
    file.write_text("paths: only.jsonl\ncolumns: 7\n")
    config = one("--config", str(file)).config
    assert config.data.paths == ["only.jsonl"] and config.data.columns == "7"


def test_yaml_takes_dashes_and_old_names(tmp_path):
    file = tmp_path / "c.yaml"
    file.write_text("per-device-training-batch-size: 3\n")
    assert read_yaml(str(file), "ppo") == {"per_device_train_batch_size": 3}


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("- a\n", "c.yaml: found a list, wanted `flag: value` lines"),
        ("a: [1\nb: 2\n", "c.yaml: line 2:"),
        ("steps: 1\nsteps: 2\n", "c.yaml: line 2: steps: occurs twice"),
        ("sft: 3\n", "c.yaml: sft: found 3, wanted"),
        ("sft: {}\nsteps: 3\n", "c.yaml: steps: beside the sections sft; put flags into a section"),
        ("sft: {}\nrewrd: {}\n", "did you mean reward?"),
        ("stpes: 3\n", "c.yaml: stpes: unknown flag; did you mean steps?"),
        ("kind: plan\n", "did you mean plain?"),
        ("steps:\n", "--steps: found None"),
    ],
)
def test_yaml_errors(tmp_path, text, message):
    file = tmp_path / "c.yaml"
    file.write_text(text)
    (line,) = errors_of("--config", str(file))
    assert message in line


def test_missing_file():
    assert errors_of("--config", "none.yaml") == ["none.yaml: cannot read it: No such file or directory"]


# --- errors ---------------------------------------------------------------------------------------------------------


def test_all_errors_together(tmp_path):
    file = tmp_path / "c.yaml"
    file.write_text("shufle: true\nstage: 9\n")
    lines = errors_of("stray", "--rate", "x", "--steps", "--kindd", "a", "--columns", "a", "b", "--config", str(file))
    assert lines == [
        "found 'stray' before any flag, wanted --FLAG VALUE",
        "--steps: found no value, wanted int",
        "--kindd: unknown flag; did you mean --kind?",
        "--columns: found 2 values (a b), wanted one; quote a value with spaces",
        f"{file}: shufle: unknown flag; did you mean shuffle?",
        "--rate: found 'x' (command line): Input should be a valid number, unable to parse string as a number",
        f"--stage: found 9 ({file}): Input should be less than or equal to 3",
    ]


def test_choices_name_the_nearest():
    assert errors_of("--kind", "plane") == [
        "--kind: found 'plane' (command line): Input should be 'auto' or 'plain'; did you mean plain?"
    ]


def test_checks_over_several_fields_keep_their_message():
    (line,) = errors_of("--kl_in_loss", config_class=PPOConfig)
    assert line == "kl_in_loss: k1 has no useful gradient as a loss; use --kl_estimator k2 or k3"
    (line,) = errors_of("--offload_optimizer_during_rollout", "--offload", config_class=PPOConfig)
    assert line == "--offload_optimizer_during_rollout: with --offload the states never are on the device"


# --- DeepSpeed-Chat -------------------------------------------------------------------------------------------------

COMMON = """data_path data_split data_output_path per_device_train_batch_size num_train_epochs
    gradient_accumulation_steps lr_scheduler_type num_warmup_steps output_dir seed local_rank offload dtype
    only_optimize_lora compute_fp32_loss enable_tensorboard tensorboard_path add_eot_token deepspeed deepspeed_config
    deepscale deepscale_config"""
ONE_MODEL = """model_name_or_path per_device_eval_batch_size max_seq_len learning_rate weight_decay
    gradient_checkpointing dropout zero_stage lora_dim lora_module_name lora_learning_rate"""
DEEPSPEED_CHAT = {
    "sft": f"{COMMON} {ONE_MODEL} sft_only_data_path eot_token print_loss",
    "reward": f"{COMMON} {ONE_MODEL} num_padding_at_beginning eval_interval eval_iters",
    "ppo": f"""{COMMON} unsupervised_dataset_name unsupervised_dataset_config_name unsup_coef actor_model_name_or_path
        critic_model_name_or_path num_padding_at_beginning per_device_generation_batch_size
        per_device_training_batch_size generation_batches ppo_epochs max_prompt_seq_len max_answer_seq_len
        actor_learning_rate critic_learning_rate actor_weight_decay critic_weight_decay preprocessing_num_workers
        enable_hybrid_engine unpin_actor_parameters release_inference_cache inference_tp_size tp_gather_partition_size
        offload_reference_model offload_reward_model actor_zero_stage critic_zero_stage actor_gradient_checkpointing
        critic_gradient_checkpointing actor_dropout critic_dropout actor_lora_dim critic_lora_dim
        actor_lora_module_name critic_lora_module_name actor_lora_learning_rate critic_lora_learning_rate enable_ema
        enable_mixed_precision_lora align_overflow print_answers print_answers_interval enable_test_mode
        test_stop_step""",
}


@pytest.mark.parametrize("section", STAGES)
def test_every_flag_of_deepspeed_chat_is_known_or_explained(section):
    table = flag_table(STAGES[section])
    names = [ALIASES.get(name, name) for name in DEEPSPEED_CHAT[section].split()]
    assert [name for name in names if name not in table and name not in RETIRED] == []
    assert not set(RETIRED) & set(table), "what exists is not retired"


def test_retired_flags_say_what_to_do():
    (line,) = errors_of("--print_loss")
    assert line == "--print_loss: a flag of DeepSpeed-Chat that is not needed here: use --print_steps"


# --- help and reference ---------------------------------------------------------------------------------------------


@pytest.mark.parametrize("section", STAGES)
def test_help_names_every_flag(section):
    text = help_text(STAGES[section], "x")
    assert all(f"--{name} " in text for name in flag_table(STAGES[section]))
    assert max(map(len, text.splitlines())) <= 120


def test_help_text_of_one_flag():
    assert "  --paths str ...\n      Files, 100 % of them [a b]\n  --kind auto|plain\n" in help_text(One, "x")


def test_reference_row():
    assert "| `--kind` | `auto\\|plain` | `auto` | Kind |" in reference(One)


@pytest.mark.parametrize("module", ["step1_sft", "step2_reward", "step3_ppo"])
def test_help_of_a_stage_is_fast_and_imports_no_torch(module):
    code = (
        f"import sys\nfrom {module}.main import main\ntry: main(['--help'])\n"
        "finally: assert not {'torch', 'deepspeed', 'transformers'} & set(sys.modules)"
    )
    took_s, output = fastest_run_s(code)
    assert took_s < 1.0
    assert "--learning_rate" in output or "--actor_learning_rate" in output
