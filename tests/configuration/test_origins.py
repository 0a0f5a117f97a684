"""Origins of values: the order of authority, and the entries of a run's config.json. No torch."""

import json
from pathlib import Path

import pytest

from pipeline.configuration.flags import parse
from pipeline.configuration.origins import Kind, Origin
from pipeline.run.evaluations import run_settings
from step1_sft.config import SFTConfig
from step3_ppo.config import PPOConfig

KINDS = list(Kind)


@pytest.mark.parametrize("kind", KINDS)
def test_an_entry_of_a_runs_file_is_read_as_it_was_written(kind: Kind, tmp_path: Path) -> None:
    # A source that looks like another kind's text: the file says the kind by itself.
    for source in ("", "chosen for method default", "launch/presets/x.yaml"):
        origin = Origin(kind, source)
        (tmp_path / "config.json").write_text(json.dumps({"seed": {"value": 3} | origin.entry}))
        assert run_settings(tmp_path) == {"seed": (3, origin)}


def test_an_entry_without_a_kind_is_as_of_a_file_that_its_text_names() -> None:
    for wrong in ("plan", {"kind": []}, {"kind": "OTHER"}, {}, None):
        for text in ("default", "chosen for 2 x H100", "my/run.yaml"):
            assert Origin.of_entry({"from": text, "origin": wrong}) == Origin(Kind.FILE, text)


def test_what_was_given_stands_above_what_was_computed() -> None:
    assert [kind.name for kind in KINDS] == [
        "DEFAULT", "METHOD", "FOLLOWS", "PLAN", "EARLIER_RUN", "DEEPSPEED_JSON", "PRESET", "FILE", "COMMAND_LINE"
    ]  # fmt: skip
    assert [kind for kind in KINDS if Origin(kind).is_given] == KINDS[5:]
    assert [kind for kind in KINDS if Origin(kind).is_by_hand] == [*KINDS[5:6], *KINDS[7:]]


def test_the_greater_kind_wins(tmp_path: Path) -> None:
    """Every layer that a command can have, each with a value of its own; the strongest is taken away one by one."""
    files = {kind: tmp_path / f"{kind.name}.yaml" for kind in (Kind.PRESET, Kind.FILE)}
    for place, file in enumerate(files.values()):
        file.write_text(f"kl_coef: 0.{place + 1}\nnum_samples_per_prompt: 4\n")
    words = {
        Kind.METHOD: ["--method", "rloo", "--reward-model", "r"],
        Kind.PRESET: ["--preset", str(files[Kind.PRESET])],
        Kind.FILE: ["--config", str(files[Kind.FILE])],
        Kind.COMMAND_LINE: ["--kl-coef", "0.9"],
    }
    expected = {Kind.COMMAND_LINE: 0.9, Kind.FILE: 0.2, Kind.METHOD: 0.05}  # a preset's value is PPO's
    for kind, value in expected.items():
        resolved = parse(PPOConfig, [word for one in words if one <= kind for word in words[one]], section="ppo")
        assert (resolved.config.ppo.kl_coef, resolved.origins["kl_coef"].kind) == (value, kind)
    words[Kind.METHOD] = ["--method", "ppo", "--reward-model", "r"]
    resolved = parse(PPOConfig, [*words[Kind.METHOD], *words[Kind.PRESET]], section="ppo")
    assert (resolved.config.ppo.kl_coef, resolved.origins["kl_coef"].kind) == (0.1, Kind.PRESET)


def test_a_deepspeed_json_gives_what_nobody_else_does(tmp_path: Path) -> None:
    (tmp_path / "ds.json").write_text(json.dumps({"gradient_clipping": 0.5}))
    resolved = parse(SFTConfig, ["--deepspeed-config", str(tmp_path / "ds.json")], section="sft")
    assert resolved.origins["max_grad_norm"] == Origin(Kind.DEEPSPEED_JSON, str(tmp_path / "ds.json"))
    assert resolved.is_given("max_grad_norm") and not resolved.is_given("learning_rate")
