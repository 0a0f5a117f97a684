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
from pipeline import dist
from pipeline.configuration.flag_checks import idle_flags
from pipeline.configuration.flags import parse
from pipeline.configuration.rank_rules import Choice
from pipeline.configuration.resolved import Resolved
from pipeline.configuration.resume_rules import batch_sizes, memory_flags, values_by_rule
from pipeline.errors import InputError
from pipeline.preparation.stage_entry import read_flags
from pipeline.reporting.page import write_report
from pipeline.run.earlier_runs import is_finished
from pipeline.run.resolve import not_given, with_choice
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


def made_older(checkpoint: Path) -> None:
    """Leave out of a checkpoint what a version without the flag did not write."""
    state = json.loads((checkpoint / "state.json").read_text())
    del state["settings"]["log_kl"]
    write_state(checkpoint, state)


def test_a_checkpoint_says_whether_its_run_has_one_where_nobody_does(folder, tmp_path, monkeypatch):
    config = resolved_of(folder, tmp_path).config
    checkpoint = STAGE.run_folder(config.run) / "checkpoints/step-1"
    settings = values_by_rule(config, "same")
    sizes, layout = batch_sizes(config, 1), {"rollout_batch_size": 8}
    write_state(checkpoint, {"step": 1, "settings": settings, "sizes": sizes, "layout": layout})
    (checkpoint.parents[1] / "env.json").write_text(json.dumps({"stage": "ppo", "versions": {}}))
    (checkpoint.parents[1] / "run.lock").touch()
    given = words(folder, tmp_path)
    assert not read_flags(STAGE, given).config.ppo.log_kl
    made_older(checkpoint)
    found = read_flags(STAGE, given)
    assert found.config.ppo.log_kl and str(found.origins["log_kl"]) == f"auto: as {checkpoint.parents[1]} has it"
    assert not read_flags(STAGE, [*given, "--overwrite"]).config.ppo.log_kl
    with pytest.raises(InputError, match=naming("--log-kl ... False ... checkpoint ... True")):
        is_finished(checkpoint.parents[1], read_flags(STAGE, [*given, "--log-kl", "false"]).config, ranks=1)
    # A host that does not see the checkpoint has what rank 0 has.
    of_rank_0 = not_given(found)
    monkeypatch.setattr(dist, "on_main", lambda work: of_rank_0 if isinstance(value := work(), dict) else value)
    other, _ = with_choice(STAGE, resolved_of(folder, tmp_path), lambda stage, resolved: Choice(), 1)
    assert other.config.ppo.log_kl


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
def test_a_run_of_an_older_version_goes_on_with_its_reference(folder, tmp_path, lora):
    """By the same command, which has no flag for it; a new run of that command has none."""
    whole, parts, new = (tmp_path / name for name in ("whole", "parts", "new"))
    assert trained(folder, whole, log_kl="true", **lora) == 0
    assert trained(folder, parts, log_kl="true", max_steps=STEPS - 1, **lora) == 0
    made_older(parts / f"runs/ppo/checkpoints/step-{STEPS - 1}")
    (parts / "runs/ppo/done.json").unlink()
    assert read_flags(STAGE, words(folder, parts, **lora)).config.ppo.log_kl
    assert trained(folder, parts, **lora) == 0
    assert numbers(parts) == numbers(whole) and [line.keys() > KL for line in numbers(whole)] == [True, False, True]
    assert trained(folder, parts, **lora) == 0, "it is finished: nothing to do"
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
