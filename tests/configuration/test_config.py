"""The configuration models, the presets that fill them, and the reference that is made from them."""

import itertools
import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
from pydantic import ValidationError
from support.messages import naming

from pipeline.configuration.flag_table import flag_table, flat_items
from pipeline.configuration.flags import load_yaml, parse
from pipeline.configuration.groups import ONLY_IN_JSON
from pipeline.configuration.origins import Kind, Origin
from pipeline.errors import InputError
from rlhf.known_models import SIZES
from rlhf.train_config import TrainConfig
from step1_sft.config import SFTConfig
from step2_reward.config import RewardConfig
from step3_dpo.config import DPOConfig
from step3_ppo.config import PPOConfig
from step3_ppo.flags.generation import check_generation

ROOT = Path(__file__).resolve().parents[2]
PRESETS = ROOT / "launch" / "presets"
STAGES = {"sft": SFTConfig, "reward": RewardConfig, "ppo": PPOConfig, "dpo": DPOConfig}
# Start models of presets that are not named after a size of OPT.
OTHERS = {
    "tiny": "output/demo/base", "t5-3b": "google-t5/t5-3b", "chinese": "bigscience/bloom-1b1",
    "japanese": "ai-forever/mGPT", "llama-2-7b": "meta-llama/Llama-2-7b-hf",
    "llama-2-7b-lora": "meta-llama/Llama-2-7b-hf", "1.3b-lora": "facebook/opt-1.3b", "6.7b-lora": "facebook/opt-6.7b",
}  # fmt: skip
ALL_STAGES = ("llama-2-7b", "llama-2-7b-lora")
CLASSES = ("small", "1b", "3b", "8b")  # recipes for a size; the command line names the model
SFT_ALONE = ("t5-3b", "chinese", "japanese")
# What the presets held when each stage of a model had a file: name of the file -> flags.
BEFORE = json.loads(Path(__file__).with_name("presets_of_a_file_each.json").read_text(encoding="utf-8"))
ALL = {**STAGES, "train": TrainConfig}


@pytest.mark.parametrize("section", ALL)
def test_every_flag_has_a_meaning_and_a_valid_default(section):
    for name, flag in flag_table(ALL[section]).items():
        assert flag.info.description, name
    config = parse(ALL[section], [], section=section).config
    assert type(config).model_validate(config.model_dump()) == config


@pytest.mark.parametrize("section", STAGES)
def test_dropout_is_off_and_no_dtype_is_forced(section):
    values = dict(flat_items(parse(STAGES[section], [], section=section).config))
    assert values["dtype"] == "auto"
    assert {value for name, value in values.items() if name.endswith("lora_dropout")} == {0.0}


def test_configurations_are_frozen_and_closed():
    config = parse(SFTConfig, [], section="sft").config
    with pytest.raises(ValidationError):
        config.keep_best = True
    with pytest.raises(ValidationError):
        SFTConfig(keep_bst=True)
    changed = config.run.replace(max_steps=3)
    assert (changed.max_steps, config.run.max_steps) == (3, 0)
    with pytest.raises(ValidationError):
        config.run.replace(max_steps=-1)


# --- presets --------------------------------------------------------------------------------------------------------


def test_there_is_a_preset_for_each_size_with_a_section_for_each_stage():
    sections = {file.stem: list(load_yaml(str(file))) for file in PRESETS.iterdir()}
    expected = dict.fromkeys((*SIZES, *ALL_STAGES, *CLASSES), list(STAGES))
    assert sections == expected | dict.fromkeys(SFT_ALONE, ["sft"])


def test_known_models_have_presets_and_no_name_stands_twice():
    families = load_yaml(str(PRESETS.parent / "models.yaml")).values()
    models = [(name, *found[:2]) for family in families for name, found in family.items()]
    presets = {preset for _, _, preset in models}
    assert {*ALL_STAGES, *CLASSES} <= presets <= {file.stem for file in PRESETS.iterdir()}
    assert len({name for name, _, _ in models} | set(SIZES)) == len(models) + len(SIZES)
    assert all(hub_id.count("/") == 1 for _, hub_id, _ in models)


@pytest.mark.parametrize("size", sorted(file.stem for file in PRESETS.iterdir()))
def test_presets_parse_and_fit(size):
    file = PRESETS / f"{size}.yaml"
    for section, given in load_yaml(str(file)).items():
        resolved = parse(STAGES[section], ["--preset", str(file)], section=section)
        values = dict(flat_items(resolved.config))
        assert {name for name, origin in resolved.origins.items() if origin == Origin(Kind.PRESET, str(file))} == set(
            given
        )
        if section == "ppo":
            rows = values["per_device_train_batch_size"] * values["gradient_accumulation_steps"]
            assert resolved.config.rollout_size(1).responses == rows, "one step from one update phase"
        if section == "reward":  # the demo's answers are alike in length
            assert values["balance_lengths"] == (size != "tiny")
        if section == "dpo":
            assert not values["model_name_or_path"], "stage 1's output, which train.py names"
        elif section != "ppo":
            default = dict(flat_items(parse(STAGES[section], [], section=section).config))["model_name_or_path"]
            expected = OTHERS.get(size, f"facebook/opt-{size}") if size not in CLASSES else default
            assert values["model_name_or_path"] == expected


@pytest.mark.parametrize("file", sorted(PRESETS.iterdir()), ids=lambda file: file.name)
def test_presets_are_short_and_each_section_says_what_it_is(file):
    lines = file.read_text().splitlines()
    heads = [after for line, after in itertools.pairwise(lines) if line.removesuffix(":") in STAGES]
    assert len(heads) == len(load_yaml(str(file))) and all(line.startswith("  # Stage ") for line in heads)
    assert len(lines) <= 80 and max(map(len, lines)) <= 120


@pytest.mark.parametrize("name", BEFORE)
def test_presets_have_the_values_that_a_file_for_each_stage_had(name, monkeypatch):
    """But for ZeRO stages, which the plan chooses. That file is not read any more."""
    monkeypatch.chdir(ROOT)
    size, _, section = name.rpartition(".")
    gone = {flag for flag, *_ in ONLY_IN_JSON}  # they were given at their defaults
    before = {flag: BEFORE[name][flag] for flag in BEFORE[name].keys() - gone if not flag.endswith("zero_stage")}
    assert load_yaml(f"launch/presets/{size}.yaml")[section] == before
    for flag in ("preset", "config"):
        assert parse(STAGES[section], [f"--{flag}", f"launch/presets/{size}.yaml"], section=section).notes == ()
        with pytest.raises(InputError, match=naming(f"launch/presets/{name}.yaml ... No such file")):
            parse(STAGES[section], [f"--{flag}", f"launch/presets/{name}.yaml"], section=section)


def test_no_preset_but_the_demos_says_what_the_plan_chooses():
    for file in PRESETS.iterdir():
        for section, given in load_yaml(str(file)).items():
            chosen = {name for name, flag in flag_table(STAGES[section]).items() if flag.auto}
            assert not chosen & given.keys() or file.stem == "tiny"


def test_a_preset_that_there_never_was_is_not_read():
    for name in ("chinese.ppo.yaml", "12b.sft.yaml", "1.3b.rm.yaml"):
        with pytest.raises(InputError, match=naming(f"{name} ... No such file")):
            parse(SFTConfig, ["--preset", str(PRESETS / name)], section="sft")


# --- borders --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "module",
    [
        "pipeline.configuration.groups",
        "pipeline.configuration.flags",
        "pipeline.configuration.ds_config",
        "rlhf.train_plan",
        "pipeline.launching.scripts",
        "train",
    ],
)
def test_configuration_imports_neither_torch_nor_deepspeed(module):
    code = f"import sys, {module}; assert not {{'torch', 'deepspeed', 'transformers'}} & set(sys.modules)"
    subprocess.run([sys.executable, "-c", code], cwd=ROOT, check=True)


PARSE = """
import sys
from pipeline.configuration.flags import parse
from step1_sft.config import SFTConfig
parse(SFTConfig, sys.argv[1:], section="sft")
print({"torch", "deepspeed"} <= set(sys.modules))
"""


@pytest.mark.parametrize(("words", "is_loaded"), [([], "False"), (["--deepspeed-config", "ds.json"], "True")])
def test_a_parse_loads_deepspeed_for_a_json_alone_and_prints_nothing_of_it(tmp_path, words, is_loaded):
    (tmp_path / "ds.json").write_text('{"gradient_clipping": 0.5}')
    environment = {name: value for name, value in os.environ.items() if name != "DS_ACCELERATOR"}
    environment |= {"CUDA_VISIBLE_DEVICES": "", "PYTHONPATH": str(ROOT)}
    call = [sys.executable, "-c", PARSE, *words]
    done = subprocess.run(call, cwd=tmp_path, env=environment, capture_output=True, text=True, check=True)
    assert done.stdout.split() == [is_loaded] and done.stderr == ""


def test_an_accelerator_that_deepspeed_does_not_have_is_named_in_one_line(tmp_path):
    (tmp_path / "ds.json").write_text("{}")
    call = [sys.executable, "train.py", "--step", "1", "--deepspeed-config", str(tmp_path / "ds.json"), "--dry-run"]
    done = subprocess.run(call, cwd=ROOT, env=os.environ | {"DS_ACCELERATOR": "tpu"}, capture_output=True, text=True)
    assert done.returncode == 3
    assert done.stderr.startswith("error: DeepSpeed: DS_ACCELERATOR") and done.stderr.count("\n") == 1


def ppo_config(**sampling):
    config = PPOConfig()
    actor = {"zero_stage": sampling.pop("stage", 0), "lora_dim": sampling.pop("lora", 0)}
    return config.replace(
        actor=config.actor.replace(**actor).model_dump(), sampling=config.sampling.replace(**sampling).model_dump()
    )


@pytest.mark.parametrize(
    ("flags", "ranks", "says"),
    [
        ({"inference_tp_size": 3}, 4, "--inference-tp-size 3 ... 4 ranks ... 1"),
        ({"inference_tp_size": 8}, 4, "--inference-tp-size 8 ... 4 ranks ... 4"),
        ({"inference_tp_size": 3}, None, ""),
        ({"inference_tp_size": 2, "generation_engine": "static"}, 2, "--inference-tp-size 2 ... fused"),
        (
            {"rollout_weights": "streamed"},
            2,
            "--rollout-weights streamed: needs --actor-zero-stage 3",
        ),
        ({"rollout_weights": "streamed", "stage": 3}, 1, "--rollout-weights streamed ... 1 rank ... several"),
        (
            {"rollout_weights": "streamed", "stage": 3, "inference_tp_size": 2},
            2,
            "got --inference-tp-size 2, expected 1",
        ),
        ({"rollout_weights": "streamed", "stage": 3, "generation_engine": "eager"}, 2, "got the eager backend"),
        ({"rollout_weights": "streamed", "stage": 3}, None, ""),
        ({"generation_engine": "fused", "merge_lora_for_generation": False, "lora": 2}, 1, "--generation-engine fused"),
        ({"generation_engine": "fused", "merge_lora_for_generation": False}, 1, ""),
    ],
)
def test_what_no_model_can_do_is_seen_without_one(flags, ranks, says):
    config = ppo_config(**flags)
    if not says:
        return check_generation(config.sampling, config.actor, ranks)
    with pytest.raises(InputError) as refused:
        check_generation(config.sampling, config.actor, ranks)
    (line,) = str(refused.value).splitlines()
    assert line.startswith("--") and line == naming(says)
