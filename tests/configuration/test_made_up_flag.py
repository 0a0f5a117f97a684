"""A flag is defined at its field alone: whatever reads flags finds the worked example, and those of this file."""

import dataclasses
import json
import re
from pathlib import Path

import pytest
from pydantic import ValidationError
from support.messages import naming, refusal
from support.worked_examples import examples

from pipeline.configuration.flag_checks import idle_flags
from pipeline.configuration.flag_table import flag, flag_table
from pipeline.configuration.flags import parse
from pipeline.configuration.groups import ModelConfig
from pipeline.configuration.help import help_text
from pipeline.configuration.resolved import Resolved
from pipeline.configuration.resume_rules import check_resumed, record_of, values_by_rule
from pipeline.errors import InputError
from rlhf.stages import STAGES
from rlhf.train_plan import make_plan
from step1_sft.config import SFTConfig
from step3_ppo.config import PPOConfig
from website.flags import tables

TOKEN = "hf_" + "a1B2" * 6
KEY = "zero_optimization.sub_group_size"


class MadeUpModel(ModelConfig):
    """Model"""

    made_up: str = flag("nothing", "A made-up meaning")
    made_up_folder: str = flag("", "Made-up files", kind="written path", on_resume="free")
    made_up_text: str = flag("", "Made-up words", kind="text", on_resume="free")
    made_up_size: int = flag(3, "A made-up size", on_resume="rounding", needs="--zero-stage 3", deepspeed=KEY)


def with_example() -> type[SFTConfig]:
    """Stage 1's configuration with the flag of the worked example."""
    (field,) = re.findall(r"^\+    (focal_gamma: .*)$", examples()["flag"], re.MULTILINE)
    names = {"flag": flag, "SFTConfig": SFTConfig}
    exec(f"class WithExample(SFTConfig):\n    'Stage 1.'\n\n    {field}\n", names)
    return names["WithExample"]


class MadeUp(with_example()):
    """A stage with made-up flags."""

    model: MadeUpModel = MadeUpModel()


class MadeUpPair(PPOConfig):
    """A stage with two models that have made-up flags."""

    actor: MadeUpModel = MadeUpModel()
    critic: MadeUpModel = MadeUpModel()


def parsed(*words: str) -> Resolved:
    return parse(MadeUp, list(words), section="sft")


def errors_of(*words: str) -> list[str]:
    return refusal(parsed, *words)


def test_it_is_in_help_and_reference():
    meaning = "A token of probability p weighs (1 - p) to this power; 0: all alike"
    assert f"  --focal-gamma float\n      {meaning} [0.0]\n" in help_text(MadeUp, "x", ["--help-all"])
    assert f"| `--focal-gamma` | `float` | `0.0` | {meaning} |" in tables(flag_table(MadeUp).values())
    assert {"actor_made_up", "critic_made_up"} <= set(flag_table(MadeUpPair))


def test_it_is_read_from_the_command_line_and_from_yaml(tmp_path):
    assert parsed("--focal-gamma", "2").config.focal_gamma == 2
    assert errors_of("--focal-gamma", "-1")[0].startswith("--focal-gamma: got '-1'")
    (tmp_path / "run.yaml").write_text("sft: {focal_gamma: 3}\n")
    resolved = parsed("--config", str(tmp_path / "run.yaml"))
    assert resolved.config.focal_gamma == 3 and str(resolved.origins["focal_gamma"]) == str(tmp_path / "run.yaml")


def test_train_py_takes_it_as_an_override(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    stages = (dataclasses.replace(STAGES[0], config=MadeUp), *STAGES[1:])
    monkeypatch.setattr("rlhf.stages.STAGES", stages)
    plan = make_plan(["--step", "1", "--actor-model", "tiny", "--sft.focal-gamma", "2"], prog="train.py")
    assert plan.stages[1].resolved.config.focal_gamma == 2 and plan.stages[1].argv[-4:-2] == ["--focal-gamma", "2"]
    with pytest.raises(InputError, match="--reward.focal-gamma: unknown flag"):
        make_plan(["--actor-model", "tiny", "--reward.focal-gamma", "2"], prog="train.py")


def resumed(*words: str) -> None:
    """Compare a run under `words` with a checkpoint that the defaults wrote."""
    before, after = parsed().config, parsed(*words).config
    saved, current = (record_of(config, None, "same") for config in (before, after))
    check_resumed(Path("step-1"), saved, current, after)


def test_a_resumed_run_follows_what_its_field_says():
    with pytest.raises(InputError, match=naming("--focal-gamma ... 2.0 ... checkpoint ... 0.0")):
        resumed("--focal-gamma", "2")
    resumed("--made-up-folder", "elsewhere", "--made-up-text", "y", "--made-up-size", "4")
    assert values_by_rule(parsed("--made-up-size", "4").config, "rounding")["made_up_size"] == 4


def test_a_checkpoint_that_compared_it_under_an_older_rule_is_resumed():
    current, older = values_by_rule(parsed().config, "same"), {"made_up_size": 9}
    check_resumed(Path("step-1"), {"settings": current | older}, {"settings": current}, parsed().config)


def test_paths_are_checked(tmp_path):
    (tmp_path / "file").write_text("")
    assert errors_of("--made-up-folder", "a\nb")[0] == naming("--made-up-folder", r"'a\nb' (command line)")
    assert errors_of("--made-up-folder", str(tmp_path / "file"))[0].endswith("a file, expected a folder")
    assert parsed("--made-up", "a\nb", "--made-up-text", "a\nb")


def test_secrets_are_refused_but_in_free_text():
    (line,) = errors_of("--made-up", TOKEN)
    assert line == naming("--made-up ... token or password") and TOKEN not in line
    assert parsed("--made-up-text", TOKEN).config.model.made_up_text == TOKEN


def test_it_is_named_where_it_has_no_effect():
    idle = parsed("--made-up-size", "4", "--made-up", "x")
    (line,) = idle_flags(idle.config, idle.origins)
    assert line == naming("--made-up-size 4 (command line) ... no effect ... --zero-stage 3, got --zero-stage 0")


def test_the_users_json_sets_it(tmp_path):
    (tmp_path / "ds.json").write_text(json.dumps({"zero_optimization": {"stage": 3, "sub_group_size": 7}}))
    resolved = parsed("--deepspeed-config", str(tmp_path / "ds.json"))
    assert resolved.config.model.made_up_size == 7 and str(resolved.origins["made_up_size"]) == str(
        tmp_path / "ds.json"
    )
    (line,) = errors_of("--deepspeed-config", str(tmp_path / "ds.json"), "--made-up-size", "4")
    assert line == naming(f"{KEY} ... 7 ... --made-up-size is 4 (command line)")


@pytest.mark.parametrize(
    "rule",
    [{"on_resum": "free"}, {"on_resume": "sam"}, {"needs": "a crytic"}, {"read_if": "gamma"}, {"aliases": "a b"}],
)
def test_a_misspelt_rule_is_an_error_where_the_flag_is_defined(rule):
    with pytest.raises(ValidationError, match=next(iter(rule))):
        flag(0, "A made-up meaning", **rule)
