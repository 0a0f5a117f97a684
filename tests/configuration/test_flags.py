"""Flags from models: names, types, layers, origins, errors. No torch."""

from typing import ClassVar, Literal

import pytest
from pydantic import Field
from support.messages import naming, refusal

from pipeline.configuration.flag_table import flag, flag_table, flat_items
from pipeline.configuration.flags import parse, read_yaml, scan
from pipeline.configuration.groups import Group, ModelConfig
from pipeline.configuration.help import help_text
from pipeline.configuration.names import Names
from pipeline.configuration.origins import COMMAND_LINE, DEFAULT, Kind, Origin
from pipeline.errors import InputError, nearest
from rlhf.chat import ChatConfig
from rlhf.compare import CompareConfig
from rlhf.rewards.sample import SampleConfig
from rlhf.stages import SECTIONS
from rlhf.train_config import TrainConfig
from step1_sft.config import SFTConfig
from step2_reward.config import RewardConfig, RewardEvalConfig
from step3_dpo.config import DPOConfig
from step3_ppo.config import PPOConfig
from website.flags import tables

STAGES = {"sft": SFTConfig, "reward": RewardConfig, "ppo": PPOConfig, "dpo": DPOConfig}


class Model(Group):
    """Model"""

    has_role: ClassVar[bool] = True
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


class WithoutCritic(Group):
    """A stage with the first of those two models."""

    actor: Model = Model()


def one(*words: str):
    return parse(One, list(words), section="sft")


def errors_of(*words: str, config_class: type[Group] = One) -> list[str]:
    return refusal(parse, config_class, list(words), section="sft", sections=SECTIONS)


# --- names ----------------------------------------------------------------------------------------------------------


def test_groups_are_flat_and_models_with_a_role_have_a_prefix():
    assert list(flag_table(One)) == ["rate", "stage", "paths", "kind", "shuffle", "columns", "steps"]
    assert list(flag_table(Two)) == ["actor_rate", "actor_stage", "critic_rate", "critic_stage"]
    assert list(flag_table(WithoutCritic)) == ["actor_rate", "actor_stage"], "the same names with one model less"
    assert flag_table(One)["rate"].default == 1e-3, "the field's default, not the group's"
    two = parse(Two, ["--critic-stage", "3"], section="ppo").config
    assert (two.actor.stage, two.critic.stage, two.critic.rate) == (0, 3, 2e-5)


def test_dashes_and_equal_signs():
    resolved = parse(PPOConfig, ["--actor-learning-rate=2e-6", "--kl-coef", "0.2"], section="ppo")
    assert resolved.config.actor.learning_rate == 2e-6 and resolved.config.ppo.kl_coef == 0.2
    assert one("--columns=a-b=c").config.data.columns == "a-b=c"


def test_no_abbreviations():
    assert errors_of("--rat", "1") == [naming("--rat ... --rate?")]


def test_values_are_never_changed():
    words = ["a b", 'say "x"', "two\nlines", "-1", "", "C:\\x", "a-b_c"]
    assert one("--paths", *words).config.data.paths == words
    assert one("--columns=--odd").config.data.columns == "--odd"


def test_a_flag_with_other_dashes_is_refused_wherever_it_stands():
    for dashes in ("\u2014", "\u2013-", "\uff0d\uff0d", "\u2212\u2212"):
        line = naming(f"{dashes}shuffle=no ... {dashes[0]!r} ... --shuffle=no")
        assert errors_of("--paths", "x", f"{dashes}shuffle=no") == errors_of(f"{dashes}shuffle=no") == [line]
    words = ["\u2014 no, thanks", "\u20145", "a\u2014b", "\u2014"]
    assert one("--paths", *words).config.data.paths == words
    assert one("--columns=\u2014odd").config.data.columns == "\u2014odd"


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
    assert errors_of("--steps", "5e-1") == [naming("--steps ... '5e-1' (command line) ... integer")]


def test_the_last_of_a_repeated_flag_counts_and_a_note_says_so():
    resolved = one("--steps", "1", "--steps", "2")
    assert resolved.config.steps == 2
    assert resolved.notes == (naming("--steps ... more than once ... 1"),)
    assert "hf_" not in str(one("--steps", f"hf_{'a' * 20}", "--steps", "2").notes)


# --- files and layers -----------------------------------------------------------------------------------------------


def test_layers_and_origins(tmp_path):
    preset, config = tmp_path / "p.yaml", tmp_path / "c.yaml"
    preset.write_text("steps: 1\nrate: 1e-4\nstage: 1\n")
    config.write_text("sft: {rate: 2e-4, stage: 2}\nppo: {anything: 1}\n")
    resolved = one("--stage", "3", "--config", str(config), "--preset", str(preset))
    assert dict(flat_items(resolved.config)) == {
        "rate": 2e-4, "stage": 3, "paths": ["a", "b"], "kind": "auto", "shuffle": False, "columns": "", "steps": 1
    }  # fmt: skip
    assert resolved.origins == dict.fromkeys(("paths", "kind", "shuffle", "columns"), DEFAULT) | {
        "rate": Origin(Kind.FILE, str(config)), "stage": COMMAND_LINE, "steps": Origin(Kind.PRESET, str(preset))
    }  # fmt: skip


def test_yaml_scientific_notation_is_a_number(tmp_path):
    file = tmp_path / "c.yaml"
    file.write_text("rate: 2e-5\nsteps: 5e2\ncolumns: 1e3x\n")
    assert read_yaml(str(file), "sft") == ({"rate": 2e-5, "steps": 500.0, "columns": "1e3x"}, [])
    config = one("--config", str(file)).config
    assert config.model.rate == 2e-5 and config.steps == 500


def test_yaml_conveniences(tmp_path):
    file = tmp_path / "c.yaml"
    file.write_text("paths: only.jsonl\ncolumns: 7\n")
    config = one("--config", str(file)).config
    assert config.data.paths == ["only.jsonl"] and config.data.columns == "7"


def test_yaml_takes_dashes_and_old_names(tmp_path):
    file = tmp_path / "c.yaml"
    file.write_text("per-device-training-batch-size: 3\nper_device_generation_batch_size: 3\n")
    config = parse(PPOConfig, ["--config", str(file)], section="ppo").config
    assert config.optimizer.per_device_train_batch_size == 3


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("- a\n", "c.yaml ... a list ... `flag: value`"),
        ("a: [1\nb: 2\n", "c.yaml: line 2:"),
        ("steps: 1\nsteps: 2\n", "c.yaml ... line 2 ... steps ... twice"),
        ("a_b: 1\na-b: 2\n", "c.yaml ... line 2 ... a-b ... twice"),
        ("sft: {a-b: 1, a_b: 2}\n", "c.yaml ... line 1 ... a_b ... twice"),
        ("sft: 3\n", "c.yaml: sft: got 3"),
        ("sft: {}\nsteps: 3\n", "c.yaml ... steps ... sections sft"),
        ("sft: {}\nrewrd: {}\n", "did you mean reward?"),
        ("stpes: 3\n", "c.yaml ... stpes ... steps?"),
        ("kind: plan\n", "did you mean plain?"),
        ("steps:\n", "--steps: got None"),
    ],
)
def test_yaml_errors(tmp_path, text, message):
    file = tmp_path / "c.yaml"
    file.write_text(text)
    (line,) = errors_of("--config", str(file))
    assert line == naming(message)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("made_up: {rate: 1}\nsft: {steps: 3}\n", ""),
        ("sfft: {steps: 3}\n", "c.yaml ... sfft ... section ... sft?"),
        ("steps: {a: 1}\n", "c.yaml: steps: unknown section"),
    ],
)
def test_a_stage_by_itself_takes_sections_of_stages_that_it_does_not_know(tmp_path, text, message):
    file = tmp_path / "c.yaml"
    file.write_text(text)
    if not message:
        assert parse(One, ["--config", str(file)], section="sft").config.steps == 3
        return
    with pytest.raises(InputError, match=naming(message)):
        parse(One, ["--config", str(file)], section="sft")


def test_missing_file():
    assert errors_of("--config", "none.yaml") == [naming("none.yaml ... No such file")]


# --- errors ---------------------------------------------------------------------------------------------------------


def test_all_errors_together(tmp_path):
    file = tmp_path / "c.yaml"
    file.write_text("shufle: true\nstage: 9\n")
    lines = errors_of("stray", "--rate", "x", "--steps", "--kindd", "a", "--columns", "a", "b", "--config", str(file))
    assert lines == [
        naming("'stray' ... --FLAG VALUE"),
        naming("--steps ... no value ... int"),
        naming("--kindd ... --kind?"),
        naming("--columns ... 2 values (a b) ... one"),
        naming(f"{file} ... shufle ... shuffle?"),
        naming("--rate ... 'x' (command line) ... number"),
        naming(f"--stage ... 9 ({file}) ... 3"),
    ]


def test_choices_name_the_nearest():
    assert errors_of("--kind", "plane") == [
        naming("--kind ... 'plane' (command line) ... 'auto' or 'plain' ... plain?")
    ]


def test_checks_over_several_fields_keep_their_message():
    (line,) = errors_of("--kl-in-loss", config_class=PPOConfig)
    assert line == naming("--kl-estimator ... k1 ... --kl-in-loss ... grpo ... k2 or k3 ... --kl-in-loss false")
    own = ("--actor-offload-optimizer", "cpu")
    parse(PPOConfig, ["--offload-optimizer-during-rollout", *own], section="ppo")  # the critic's still move
    (line,) = errors_of("--offload-optimizer-during-rollout", "--offload", config_class=PPOConfig)
    assert line == naming("--offload-optimizer-during-rollout ... --offload")


# --- names ----------------------------------------------------------------------------------------------------------


class Named(Group):
    """A stage whose flags have several names."""

    model: str = flag("", "Model", aliases=("path",), positional=True)
    rate: float = flag(0.0, "Rate", other_tools="lr step_size", ignored={"fused": "it always is"})
    end: str = flag("", "End", refused={"stop_word": "use --end"})


class NamedPair(Group):
    """A stage with two models that have several names."""

    actor: ModelConfig = ModelConfig()
    critic: ModelConfig = ModelConfig()


def test_an_alias_and_a_word_before_any_flag_are_the_flag():
    for words in (["x", "--rate", "2"], ["--path", "x", "--rate", "2"], ["--model", "y", "--path", "x", "--rate=2"]):
        resolved = parse(Named, words, section="sft")
        assert (resolved.config.model, resolved.config.rate) == ("x", 2.0)
        assert resolved.origins["model"] == COMMAND_LINE


def test_a_file_may_use_an_alias_but_not_both_names(tmp_path):
    file = tmp_path / "c.yaml"
    file.write_text("path: x\n")
    assert parse(Named, ["--config", str(file)], section="sft").config.model == "x"
    file.write_text("path: x\nmodel: y\nstop-word: z\n")
    assert errors_of("--config", str(file), config_class=Named) == [
        naming(f"{file} ... model ... --model ... twice"),
        naming(f"{file} ... stop_word ... --end"),
    ]


def test_names_of_other_tools_are_answered_with_the_flag():
    assert errors_of("--lr", "1", "--step-size", "1", config_class=Named) == [
        naming("--lr ... --rate"),
        naming("--step-size ... --rate"),
    ]
    (line,) = errors_of("--lora-r", "1", config_class=NamedPair)
    assert line == naming("--lora-r ... --actor-lora-dim or --critic-lora-dim")
    (line,) = errors_of("--critic-lora-r", "1", config_class=NamedPair)
    assert line == naming("--critic-lora-r ... --critic-lora-dim?")


def test_what_changes_nothing_is_accepted_with_a_note(tmp_path):
    resolved = parse(Named, ["--fused", "7", "--rate", "2"], section="sft")
    assert resolved.config.rate == 2.0
    assert resolved.notes == (naming("--fused ... changes nothing"),)
    assert errors_of("--fused", "7", "stray", config_class=Named)[0].startswith("--fused: got 2 values (7 stray)")
    (tmp_path / "c.yaml").write_text("fused: true\n")
    (note,) = parse(Named, ["--config", str(tmp_path / "c.yaml")], section="sft").notes
    assert note == naming(f"{tmp_path / 'c.yaml'} ... fused ... changes nothing")


def test_a_models_flags_without_its_name_mean_the_first_model():
    config = parse(NamedPair, ["--lora-dim", "8", "--model", "x", "--critic-model", "y"], section="ppo").config
    assert (config.actor.lora_dim, config.critic.lora_dim) == (8, 0)
    assert (config.actor.model_name_or_path, config.critic.model_name_or_path) == ("x", "y")
    assert (
        "(also --actor-model-name-or-path, --model-name-or-path, --model)"
        in flag_table(NamedPair)["actor_model_name_or_path"].meaning
    )


@pytest.mark.parametrize(
    "config_class",
    [SFTConfig, RewardConfig, PPOConfig, RewardEvalConfig, TrainConfig, ChatConfig, CompareConfig, SampleConfig],
)
def test_a_name_means_one_flag(config_class):
    table, names = flag_table(config_class), Names(config_class)
    assert len(names.flag_of) == sum(
        1 + len(row.aliases) + len(row.switches) + len(row.renamed) for row in table.values()
    )
    assert not names.flag_of.keys() & (names.ignored.keys() | names.refused.keys())
    assert "model" in names.flag_of, "the one name for a model's path"


def test_a_required_flag_that_is_left_out_is_named():
    (line,) = errors_of("output/reward", config_class=RewardEvalConfig)
    assert line == naming("--data-path ... missing ... str ...: Rows")


def test_an_unknown_section_hides_no_other_error(tmp_path):
    file = tmp_path / "c.yaml"
    file.write_text("sft: {stpes: 3, stage: 9}\nrewrd: {}\nrate: 1\n")
    lines = errors_of("--config", str(file))
    assert lines == [
        naming(f"{file} ... rewrd ... reward? ... train, sft, reward, ppo, dpo"),
        naming(f"{file} ... rate ... sections sft"),
        naming(f"{file} ... stpes ... steps?"),
        naming(f"--stage ... 9 ({file}) ... 3"),
    ]


# --- help and reference ---------------------------------------------------------------------------------------------


@pytest.mark.parametrize("section", STAGES)
def test_help_names_every_flag(section):
    text = help_text(STAGES[section], "x", ["--help-all"])
    assert all(f"{flag.shown} " in text for flag in flag_table(STAGES[section]).values())
    assert max(len(line) for line in text.splitlines() if not line.startswith("  --")) <= 80


def test_help_text_of_one_flag():
    assert "  --paths str ...\n      Files, 100 % of them [a b]\n  --kind auto|plain\n" in help_text(One, "x")


def test_reference_row():
    assert "| `--kind` | `auto|plain` | `auto` | Kind |" in tables(flag_table(One).values())
