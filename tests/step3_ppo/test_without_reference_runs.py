"""Without a reference as a user has it: what is planned, two ranks, and a run of a version that always had one."""

import json
from pathlib import Path
from typing import Any

import pytest
from support.command_run import files_of, run_command
from support.messages import naming
from support.ppo_runs import ppo_words, run_ppo
from support.saved_state import write_state
from support.tiny_run import read_metrics

from benchmarks.speed.planned import planner_of
from pipeline.configuration.flag_checks import idle_flags
from pipeline.configuration.flags import parse
from pipeline.configuration.resolved import Resolved
from pipeline.configuration.resume_rules import batch_sizes, memory_flags, values_by_rule
from pipeline.errors import InputError
from pipeline.preparation.stage_entry import read_flags
from pipeline.reporting.page import write_report
from pipeline.run.earlier_runs import is_finished
from step3_ppo.config import PPOConfig
from step3_ppo.stage import STAGE

FOLDER_SIZES = {"num_train": 16, "num_test": 4}
KL = {"objective/kl", "objective/kl_k3", "objective/kl_coef"}
REWARD = "def fifth(completions):\n    return [len(text) % 5 / 4 for text in completions]\n"
STEPS = 3


@pytest.fixture(scope="module")
def folder(folder: Path) -> Path:
    (folder / "rewards.py").write_text(REWARD)
    return folder


def words(folder: Path, out: Path, **changes: Any) -> list[str]:
    flags = {
        "reward_function": f"{folder}/rewards.py:fifth", "rollout_batch_size": 8, "num_samples_per_prompt": 4,
        "max_steps": STEPS, "method": "grpo",
    }  # fmt: skip
    return ppo_words(folder, out, **flags | changes)


def resolved_of(folder: Path, out: Path, **changes: Any) -> Resolved:
    return parse(PPOConfig, words(folder, out, **changes), section="ppo")


@pytest.mark.parametrize(
    ("changes", "roles"),
    [
        ({}, ["actor"]),
        ({"log_kl": "true"}, ["actor", "reference"]),
        ({"kl_coef": 0.01}, ["actor", "reference"]),
        ({"kl_coef": 0.01, "kl_target": 3}, ["actor", "reference"]),
        ({"method": "rloo"}, ["actor", "reference"]),
        ({"method": "rloo", "kl_coef": 0}, ["actor"]),
        ({"method": "reinforce_pp", "kl_coef": 0}, ["actor"]),
        ({"method": "ppo", "kl_coef": 0}, ["actor", "critic"]),
        ({"actor_lora_dim": 2, "log_kl": "true"}, ["actor"]),
    ],
    ids=str,
)
def test_only_a_divergence_that_weighs_or_is_logged_has_a_reference(folder, tmp_path, changes, roles):
    config = resolved_of(folder, tmp_path, **changes).config
    assert [role.name for role in config.held_roles] == roles
    found = STAGE.needs(config, {}, "bf16", 1)
    assert [use.role for use in found.models] == roles
    passes = [(one.role, one.without_adapters) for one in found.phases["score"]]
    assert (("actor", True) in passes) == ("actor_lora_dim" in changes) and (("reference", False) in passes) == (
        "reference" in roles
    )


def test_the_plan_counts_less_by_the_bytes_of_its_weights():
    given = "--actor-model-name-or-path tiny --method grpo --reward-function length --old-log-probs sampler"
    made = [planner_of("ppo", given + more, "1xH100") for more in ("", " --log-kl true")]
    plans = [planner.memory(resolved) for planner, resolved in made]
    assert "reference" not in plans[0].sizes and plans[1].sizes["reference"].num_bytes > 1e5
    for phase in ("generate", "score", "train"):
        states = [plan.phases[phase].states for plan in plans]
        assert states[1] - states[0] == plans[1].sizes["reference"].num_bytes
    scored = plans[0].phases["score"]
    assert scored.activations == scored.gathered == 0, "no pass is made"


def test_its_offload_is_named_where_there_is_none(folder, tmp_path):
    for changes, count in (({}, 1), ({"log_kl": "true"}, 0)):
        given = resolved_of(folder, tmp_path, offload_reference_model="true", actor_zero_stage=3, **changes)
        lines = [line for line in idle_flags(given.config, given.origins) if "--offload-reference-model " in line]
        assert len(lines) == count
        assert all(line == naming("needs --kl-coef or --log-kl, got --kl-coef 0.0, --log-kl False") for line in lines)


def trained(folder: Path, out: Path, **changes: Any) -> int:
    return run_ppo(words(folder, out, **changes))


def test_a_checkpoint_that_does_not_know_the_flag_had_no_reference_at_weight_0(folder, tmp_path):
    """As it has none now: a run with one is another run, with one line that names the flag."""
    config = resolved_of(folder, tmp_path).config
    checkpoint = STAGE.run_folder(config.run) / "checkpoints/step-1"
    settings = {name: value for name, value in values_by_rule(config, "same").items() if name != "log_kl"}
    write_state(checkpoint, {"step": 1, "settings": settings, "sizes": batch_sizes(config, 1)})
    (checkpoint.parents[1] / "env.json").write_text(json.dumps({"stage": "ppo", "versions": {}}))
    (checkpoint.parents[1] / "run.lock").touch()
    given = words(folder, tmp_path)
    found = read_flags(STAGE, given)
    assert not found.config.ppo.log_kl and found.origins["log_kl"].is_default
    assert not is_finished(checkpoint.parents[1], found.config, ranks=1)
    with pytest.raises(InputError, match=naming("--log-kl ... True ... checkpoint ... False")):
        is_finished(checkpoint.parents[1], read_flags(STAGE, [*given, "--log-kl", "true"]).config, ranks=1)


def test_the_memory_of_a_run_follows_the_weight_of_its_divergence(folder, tmp_path):
    with_it, without = (resolved_of(folder, tmp_path, kl_coef=weight).config for weight in (0.1, 0))
    assert memory_flags(with_it) != memory_flags(without)


def numbers(out: Path) -> list[dict[str, Any]]:
    """What each step logged, without times and memory."""
    lines = [line for line in read_metrics(out / "runs/ppo") if "step_s" in line]
    other = ("time", "step_s", "memory", "host_memory", "generate_tokens", "tokens_per", "samples_per")
    return [{name: value for name, value in line.items() if not name.startswith(other)} for line in lines]


@pytest.mark.slow
@pytest.mark.parametrize("lora", [{}, {"actor_lora_dim": 2, "actor_lora_learning_rate": 1e-2}], ids=["full", "LoRA"])
def test_a_run_with_it_goes_on_with_it_and_trains_as_one_without(folder, tmp_path, lora, capsys):
    whole, parts, new = (tmp_path / name for name in ("whole", "parts", "new"))
    assert trained(folder, whole, log_kl="true", **lora) == 0
    assert trained(folder, parts, log_kl="true", max_steps=STEPS - 1, **lora) == 0
    (parts / "runs/ppo/done.json").unlink()
    capsys.readouterr()
    assert trained(folder, parts, **lora) == 2
    assert naming("--log-kl ... False ... checkpoint ... True") in capsys.readouterr().err.splitlines()
    assert trained(folder, parts, log_kl="true", **lora) == 0
    assert numbers(parts) == numbers(whole) and [line.keys() > KL for line in numbers(whole)] == [True, False, True]
    assert trained(folder, parts, log_kl="true", **lora) == 0, "it is finished: nothing to do"
    assert trained(folder, new, **lora) == 0
    assert numbers(new) == [
        {name: value for name, value in line.items() if name not in KL | {"loss/kl"}} for line in numbers(whole)
    ]
    for other in (parts, new):
        found = [files_of(out / "actor") for out in (whole, other)]
        first, second = ({p.name: data for p, data in one.items() if p.suffix == ".safetensors"} for one in found)
        assert first and first == second
    for out in (whole, new):
        write_report([out / "runs/ppo"], out / "report")
        texts = [path.read_text() for path in (*out.glob("report/**/*.md"), out / "actor/README.md")]
        texts.append((out / "report/report.html").read_text().replace("KL of the update", ""))
        assert len(texts) == 3 and ["KL" in text for text in texts] == [out == whole] * 3


@pytest.mark.slow
@pytest.mark.parametrize("zero_stage", [2, 3])
def test_two_ranks_train_without_it_as_with_it(folder, tmp_path, zero_stage):
    found = []
    for log_kl in ("true", "false"):
        out = tmp_path / log_kl
        given = words(folder, out, log_kl=log_kl, actor_zero_stage=zero_stage, max_steps=2)
        ended = run_command("step3_ppo", given, folder=tmp_path, ranks=2)
        assert ended.code == 0, ended.stderr
        found.append(numbers(out))
    with_it, without = found
    assert without == [{name: line[name] for name in line if name not in KL | {"loss/kl"}} for line in with_it]
    assert len(without) == 2 and all(line.keys() > KL for line in with_it)
