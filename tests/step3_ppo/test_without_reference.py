"""Without a weight of the KL no reference is loaded, planned, run or logged; rewards and losses are the same."""

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
from bench.planned import planner_of
from peft import LoraConfig, get_peft_model
from support.command_run import files_of, run_command
from support.in_process import undone_afterwards
from support.ppo_loop import PPOLoop, loop_on_random_prompts
from support.ppo_settings import make_run, ppo_config
from support.ppo_updates import equal_weights, weights
from support.tiny_run import make_folder, read_metrics
from transformers import AutoModelForCausalLM

from pipeline.checkpoints.checkpoint_files import manifest_entry, write_manifest
from pipeline.configuration.flag_checks import idle_flags
from pipeline.configuration.flags import Resolved, parse
from pipeline.models.lora import START
from pipeline.run.entry import read_flags
from step3_ppo.config import PPOConfig
from step3_ppo.main import main
from step3_ppo.models.engines import make_models, make_sources
from step3_ppo.stage import STAGE

KL = {"objective/kl", "objective/kl_k3", "objective/kl_coef"}
STEPS, LORA = 3, {"lora_dim": 2}


def loop_of(world, folders, path: Path, *, log_kl: bool, **settings: Any) -> PPOLoop:
    return loop_on_random_prompts(world, path, ppo_config(folders, kl_coef=0.0, log_kl=log_kl, **settings))


@pytest.mark.parametrize(
    "settings",
    [{}, {"kl_in_loss": True, "kl_estimator": "k3"}, {"kl_in_loss": True, "kl_estimator": "k2", "actor": LORA}],
    ids=["in the reward", "in the loss", "in the loss, LoRA"],
)
def test_rewards_losses_and_weights_are_the_same_to_the_bit(world, trained_folders, tmp_path, settings):
    with_it, without = (loop_of(world, trained_folders, tmp_path, log_kl=given, **settings) for given in (True, False))
    lora = "actor" in settings
    assert sorted(without.ppo.models.named()) == ["actor", "critic", "reward"]
    assert sorted(with_it.ppo.models.named()) == ["actor", "critic", *(() if lora else ["reference"]), "reward"]
    for _ in range(2):
        rollouts = [loop.collect() for loop in (with_it, without)]
        known, plain = (rollout.experience for rollout in rollouts)
        assert plain.ref_log_probs is None is without.scores.ref_log_probs and known.ref_log_probs is not None
        assert known.advantages.equal(plain.advantages) and known.targets.returns.equal(plain.targets.returns)
        for loop, rollout in zip((with_it, without), rollouts, strict=True):
            loop.update(loop.restored(rollout))
    steps, plain_steps = ([values for _, values in loop.course.steps] for loop in (with_it, without))
    for values, plain_values in zip(steps, plain_steps, strict=True):
        assert values.keys() - plain_values.keys() <= KL | {"loss/kl"} and not plain_values.keys() & (KL | {"loss/kl"})
        assert {name: values[name] for name in plain_values} == plain_values
    assert abs(steps[-2]["objective/kl"]) > 0, "the second rollout's policy has moved"
    for role in ("actor", "critic"):
        assert equal_weights(*(weights(loop.ppo.models.trained[role]) for loop in (with_it, without)))


def test_an_evaluation_has_samples_without_a_divergence(world, trained_folders, tmp_path):
    loop = loop_of(world, trained_folders, tmp_path, log_kl=False)
    loop.evaluate()
    (found,) = loop.course.evaluations
    assert "eval_objective/scores" in found and not any("kl" in name for name in found)
    rows = [json.loads(line) for line in (tmp_path / "samples.jsonl").read_text().splitlines()]
    assert len(rows) == 3 and all("score" in row and "kl" not in row for row in rows)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_folder(tmp_path_factory.mktemp("reference"), num_train=16, num_test=4)


def words(folder: Path, out: Path, **changes: Any) -> list[str]:
    flags = {
        "actor_model_name_or_path": folder / "base", "reward_function": "length",
        "data_path": folder / "train.jsonl", "eval_data_path": folder / "test.jsonl", "data_split": "none",
        "data_output_path": folder / "cache", "output_dir": out, "max_prompt_seq_len": 48, "max_answer_seq_len": 8,
        "rollout_batch_size": 8, "per_device_train_batch_size": 4, "dtype": "fp32", "num_samples_per_prompt": 4,
        "actor_learning_rate": 1e-3, "max_steps": STEPS, "lr_scheduler_type": "constant", "enable_tensorboard": "false",
        "method": "grpo",
    } | changes  # fmt: skip
    return [str(word) for name, value in flags.items() for word in (f"--{name}", value)]


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
    given = "--actor_model_name_or_path 125m --method grpo --reward_function length --old_log_probs sampler"
    made = [planner_of("ppo", given + more, "1xH100") for more in ("", " --log_kl true")]
    plans = [planner.memory(resolved) for planner, resolved in made]
    assert "reference" not in plans[0].sizes and plans[1].sizes["reference"].num_bytes > 2.4e8
    for phase in ("generate", "score", "train"):
        states = [plan.phases[phase].states for plan in plans]
        assert states[1] - states[0] == plans[1].sizes["reference"].num_bytes
    scored = plans[0].phases["score"]
    assert scored.activations == scored.gathered == 0, "no pass is made"


def test_an_adapter_that_goes_on_is_copied_for_a_reference_alone(world, folder, tmp_path):
    base = AutoModelForCausalLM.from_pretrained(folder / "base")
    get_peft_model(base, LoraConfig(r=2, target_modules=["q_proj"])).save_pretrained(tmp_path / "adapter")
    for file in folder.glob("base/tokenizer*"):
        shutil.copy(file, tmp_path / "adapter")
    for log_kl in (False, True):
        given = {"actor_model_name_or_path": tmp_path / "adapter", "actor_lora_dim": 2, "log_kl": log_kl}
        config = resolved_of(folder, tmp_path, **given).config
        run = make_run(world, tmp_path, config)
        models = make_models(run, config, make_sources(run, config))
        assert (START in models.actor.module.model.peft_config) == log_kl


def test_its_offload_is_named_where_there_is_none(folder, tmp_path):
    for changes, count in (({}, 1), ({"log_kl": "true"}, 0)):
        given = resolved_of(folder, tmp_path, offload_reference_model="true", actor_zero_stage=3, **changes)
        lines = [line for line in idle_flags(given.config, given.origins) if "offload_reference_model" in line]
        assert len(lines) == count
        assert all("it needs a reference (--kl_coef above 0, or --log_kl true), found none" in line for line in lines)


def trained(folder: Path, out: Path, **changes: Any) -> int:
    with undone_afterwards():
        return main(words(folder, out, **changes))


def made_older(checkpoint: Path) -> None:
    """Leave out of a checkpoint what a version without the flag did not write."""
    state = json.loads((checkpoint / "state.json").read_text())
    del state["settings"]["log_kl"]
    (checkpoint / "state.json").write_text(json.dumps(state))
    files = [file for file in checkpoint.iterdir() if file.name != "manifest.json"]
    write_manifest(checkpoint, state["step"], {file.name: manifest_entry(file) for file in files})


def numbers(out: Path) -> list[dict[str, Any]]:
    """What each step logged, without times and memory."""
    lines = [line for line in read_metrics(out / "runs/ppo") if "step_s" in line]
    other = ("time", "step_s", "memory", "host_memory", "generate_tokens", "tokens_per", "samples_per")
    return [{name: value for name, value in line.items() if not name.startswith(other)} for line in lines]


@pytest.mark.slow
@pytest.mark.parametrize("lora", [{}, {"actor_lora_dim": 2, "actor_lora_learning_rate": 1e-2}], ids=["full", "LoRA"])
def test_a_run_of_an_older_version_goes_on_with_its_reference(folder, tmp_path, caplog, lora):
    """By the same command, which has no flag for it; a new run of that command has none."""
    whole, parts, new = (tmp_path / name for name in ("whole", "parts", "new"))
    assert trained(folder, whole, log_kl="true", **lora) == 0
    assert trained(folder, parts, log_kl="true", max_steps=STEPS - 1, **lora) == 0
    made_older(parts / f"runs/ppo/checkpoints/step-{STEPS - 1}")
    (parts / "runs/ppo/done.json").unlink()
    assert read_flags(STAGE, words(folder, parts, **lora)).config.ppo.log_kl
    assert trained(folder, parts, **lora) == 0
    assert numbers(parts) == numbers(whole) and all(line.keys() > KL for line in numbers(whole))
    assert trained(folder, parts, **lora) == 0, "it is finished: nothing to do"
    assert trained(folder, new, **lora) == 0
    assert numbers(new) == [
        {name: value for name, value in line.items() if name not in KL | {"loss/kl"}} for line in numbers(whole)
    ]
    for other in (parts, new):
        found = [files_of(out / "actor") for out in (whole, other)]
        first, second = ({p.name: data for p, data in one.items() if p.suffix == ".safetensors"} for one in found)
        assert first and first == second
    pages = [(out / "runs/ppo/report.md").read_text() for out in (whole, new)]
    assert ["KL to the reference" in page for page in pages] == [True, False]


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
