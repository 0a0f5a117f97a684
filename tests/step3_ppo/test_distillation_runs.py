"""Distillation as a user has it: a command, its refusals, its plan, a stop and a resume."""

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
from support.in_process import error_lines
from support.marks import slow_but
from support.messages import naming
from support.ppo_runs import ppo_words, run_ppo
from support.tiny_run import read_metrics, save_base
from transformers import AutoTokenizer

from benchmarks.speed.planned import planner_of
from pipeline.configuration.ds_config import Placement
from pipeline.configuration.flags import parse
from pipeline.configuration.resolved import Resolved
from pipeline.models.forward.causal_lm import COMPARED_BYTES
from step3_ppo.config import PPOConfig
from step3_ppo.stage import STAGE, starts

FOLDER_SIZES = {"num_train": 16, "num_test": 4}
STEPS = 4
REWARD = "def fifth(completions):\n    return [len(text) % 5 / 4 for text in completions]\n"


@pytest.fixture(scope="module")
def folder(folder: Path) -> Path:
    tokenizer = AutoTokenizer.from_pretrained(folder / "base")
    save_base(folder / "teacher", tokenizer, seed=3, hidden_size=48, ffn_dim=96, word_embed_proj_dim=48)
    (folder / "rewards.py").write_text(REWARD)
    return folder


def words(folder: Path, out: Path, **changes: Any) -> list[str]:
    flags = {
        "actor_model_name_or_path": None, "actor_model": folder / "base", "teacher_model": folder / "teacher",
        "method": "distill", "rollout_batch_size": 8, "max_steps": STEPS, "ppo_epochs": 2,
    }  # fmt: skip
    return ppo_words(folder, out, **flags | changes)


def resolved_of(folder: Path, out: Path, **changes: Any) -> Resolved:
    return parse(PPOConfig, words(folder, out, **changes), section="ppo")


def trained(folder: Path, out: Path, **changes: Any) -> int:
    return run_ppo(words(folder, out, **changes))


CASES = {
    "exact": {},
    "sampled": {"kl_in_loss": "false", "kl_estimator": "k1"},
    "rewarded": {"reward_function": "@rewards.py:fifth", "num_samples_per_prompt": 2},
    "judged, LoRA": {"reward_model": "@scorer", "num_samples_per_prompt": 2, "actor_lora_dim": 2},
}


@pytest.mark.parametrize("case", slow_but(["exact"], CASES))
def test_it_trains_saves_and_resumes(folder, tmp_path, case):
    """Stopped within a rollout: the rest of it is of the policy that began it."""
    changes = {name: str(value).replace("@", f"{folder}/") for name, value in CASES[case].items()}
    assert trained(folder, tmp_path / "whole", **changes) == 0
    assert trained(folder, tmp_path / "parts", max_steps=STEPS - 1, **changes) == 0
    assert trained(folder, tmp_path / "parts", **changes) == 0
    assert sorted(path.name for path in (tmp_path / "whole").iterdir()) == ["actor", "runs"]
    whole, parts = (read_metrics(tmp_path / name / "runs/ppo") for name in ("whole", "parts"))
    steps, resumed = ([line for line in lines if "step_s" in line] for lines in (whole, parts))
    assert [line["step"] for line in steps] == [line["step"] for line in resumed] == [1, 2, 3, 4]
    for name in ("loss/policy", "loss/kl", "actor/grad_norm", "policy/approx_kl", "objective/scores"):
        assert [line.get(name) for line in resumed] == [line.get(name) for line in steps], name
    assert all(("loss/kl" in line) == (case != "sampled") and line["actor/grad_norm"] > 0 for line in steps)
    assert ("objective/scores" in steps[0]) == (case != "exact")
    last = [line for line in whole if "eval_rows" in line][-1]
    assert last["eval_objective/teacher_kl"] > 0 and "eval_objective/kl" not in last
    assert (last["eval_objective/scores"] == -last["eval_objective/teacher_kl"]) == ("reward" not in str(changes))
    weights = [(path / "actor/model.safetensors").read_bytes() for path in (tmp_path / "whole", tmp_path / "parts")
               if "LoRA" not in case]  # fmt: skip
    assert len({*weights}) <= 1
    state = json.loads((tmp_path / f"whole/runs/ppo/checkpoints/step-{STEPS}/state.json").read_text())
    assert list(state["engines"]) == ["actor"] and "teacher model" in state["fingerprints"]


def test_another_teacher_is_not_resumed_with(folder, tmp_path, capsys):
    assert trained(folder, tmp_path, max_steps=1) == 0
    save_base(tmp_path / "other", AutoTokenizer.from_pretrained(folder / "base"), seed=9)
    capsys.readouterr()
    assert trained(folder, tmp_path, teacher_model=tmp_path / "other") == 2
    assert any("--teacher-model-name-or-path: the content" in line for line in error_lines(capsys.readouterr().err))


REFUSED = {
    "no teacher": ({"teacher_model": None}, "--teacher-model-name-or-path: missing"),
    "no weight": ({"kl_coef": 0}, "--kl-coef: got 0"),
    "a target": ({"kl_target": 3}, "--kl-target"),
    "exact in the reward": ({"kl_in_loss": "false"}, "--kl-estimator: got reverse_kl ... --kl-in-loss true"),
    "one response of a prompt": ({"reward_function": "length"}, "--num-samples-per-prompt: got 1 ... method distill"),
    "a second baseline": ({"group_baseline": "true", "num_samples_per_prompt": 2}, "--group-baseline"),
    "another method": (
        {"method": "reinforce_pp", "reward_function": "length"},
        "--teacher- ... no teacher ... --method distill",
    ),
    "too long": ({"max_answer_seq_len": 120}, "--max-prompt-seq-len + --max-answer-seq-len"),
    "k3 as a reward": ({"kl_in_loss": "false", "kl_estimator": "k3"}, "--kl-estimator: got k3 in the reward"),
    "a discount of nothing": ({"gamma": 0.9}, "--gamma: with the KL in the loss"),
    "a penalty of nothing": ({"missing_eos_penalty": 1}, "--missing-eos-penalty ... --num-samples-per-prompt 2"),
    "a clip of nothing": ({"policy_clip": 0.1}, "--policy-clip: without rewards"),
    "an exact KL without a weight": (
        {"method": "grpo", "teacher_model": None, "reward_function": "length", "kl_estimator": "jsd"},
        "--kl-estimator: got jsd at --kl-coef 0",
    ),
}


@pytest.mark.parametrize("case", REFUSED)
def test_what_is_wrong_is_a_line(folder, tmp_path, capsys, case):
    changes, message = REFUSED[case]
    assert trained(folder, tmp_path / "out", **changes) == 2
    assert any(line == naming(message) for line in error_lines(capsys.readouterr().err))


def test_a_teacher_of_other_tokens_is_refused_with_both_sizes(folder, tmp_path, capsys):
    shutil.copytree(folder / "teacher", tmp_path / "teacher")
    tokenizer = AutoTokenizer.from_pretrained(tmp_path / "teacher")
    size = len(tokenizer)
    tokenizer.add_tokens(["<another>"])
    tokenizer.save_pretrained(tmp_path / "teacher")
    assert trained(folder, tmp_path / "out", teacher_model=tmp_path / "teacher") == 2
    message = f"--teacher-model-name-or-path {tmp_path / 'teacher'} ... {size + 1} tokens ... {size}"
    assert any(line == naming(message) for line in error_lines(capsys.readouterr().err))
    file = folder / "teacher/tokenizer.json"  # as many tokens, two of which have changed places
    swapped = json.loads(file.read_text())
    vocabulary = swapped["model"]["vocab"]
    vocabulary["a"], vocabulary["b"] = vocabulary["b"], vocabulary["a"]
    (tmp_path / "teacher/tokenizer.json").write_text(json.dumps(swapped))
    assert trained(folder, tmp_path / "out", teacher_model=tmp_path / "teacher") == 2
    assert any("its vocabulary" in line for line in error_lines(capsys.readouterr().err))


def test_a_teacher_of_fewer_positions_is_refused(folder, tmp_path, capsys):
    save_base(tmp_path / "short", AutoTokenizer.from_pretrained(folder / "base"), max_position_embeddings=50)
    assert trained(folder, tmp_path / "out", teacher_model=tmp_path / "short") == 2
    (line,) = [line for line in error_lines(capsys.readouterr().err) if "positions" in line]
    assert f"{tmp_path}/short has 50 positions" in line


def test_a_teacher_is_planned_with_its_own_flags(folder, tmp_path):
    for given, expected in (
        ({"teacher_model_quantization": "int8"}, ("int8", 0)),
        ({"teacher_model_zero_stage": 3}, ("none", 3)),
    ):
        config = resolved_of(folder, tmp_path, actor_zero_stage=0, **given).config
        assert [role.name for role in config.held_roles] == ["actor", "teacher"]
        actor, teacher = (config.flags_of(role) for role in config.held_roles)
        assert (teacher.quantization, teacher.zero_stage) == expected and (actor.quantization, actor.zero_stage) == (
            "none",
            0,
        )
    starts = {model.flag: model.path for model in STAGE.start_models(config, {})}
    assert starts == {
        "--actor-model-name-or-path": f"{folder}/base",
        "--teacher-model-name-or-path": f"{folder}/teacher",
    }
    assert (config.ppo.missing_eos_penalty, config.ppo.kl_coef, config.ppo.kl_estimator) == (0, 1, "reverse_kl")
    place = Placement(device="cuda", dtype="bf16", ranks=1, run_dir=tmp_path, one_node=True)
    for offloads, device in (("true", "cpu"), ("false", "none")):
        resolved = resolved_of(folder, tmp_path, teacher_model_zero_stage=3, offload_reference_model=offloads)
        made = resolved.config.engine_jsons(resolved.origins, place)["teacher"]["zero_optimization"]
        assert made.get("offload_param", {"device": "none"})["device"] == device
    needs = STAGE.needs(config, {}, "bf16", 1)
    (update,) = [one for one in needs.phases["train"] if one.role == "teacher"]
    (actor_update,) = [one for one in needs.phases["train"] if one.role == "actor"]
    assert (update.times, update.rows) == (actor_update.times, actor_update.rows) and update.times > 1
    roles = {phase: [(one.role, one.trains) for one in passes] for phase, passes in needs.phases.items()}
    assert ("teacher", False) in roles["train"] and "teacher" not in dict(roles["score"])
    sampled = resolved_of(folder, tmp_path, kl_in_loss="false", kl_estimator="k1").config
    roles = {
        phase: [one.role for one in passes] for phase, passes in STAGE.needs(sampled, {}, "bf16", 1).phases.items()
    }
    assert "teacher" in roles["score"] and "teacher" not in roles["train"]


def test_the_plan_counts_the_bytes_of_the_teacher():
    models = "--actor-model-name-or-path tiny --teacher-model-name-or-path tiny"
    given = f"{models} --method distill --old-log-probs sampler"
    plans = [planner.memory(resolved) for planner, resolved in (
        planner_of("ppo", given + more, "1xH100") for more in ("", " --teacher-model-quantization int8")
    )]  # fmt: skip
    assert plans[0].sizes["teacher"].num_bytes > plans[1].sizes["teacher"].num_bytes > 1e5
    for phase in ("generate", "score", "train"):
        fewer = plans[0].phases[phase].states - plans[1].phases[phase].states
        assert fewer == plans[0].sizes["teacher"].num_bytes - plans[1].sizes["teacher"].num_bytes


def test_the_plan_counts_what_an_exact_divergence_holds_in_updates():
    """The Jensen-Shannon divergence holds the middle of two distributions too, for a piece of the tokens."""
    given = "--method distill --actor-model-name-or-path qwen2.5-0.5b --teacher-model-name-or-path qwen2.5-0.5b"
    given += " --per-device-train-batch-size 16 --kl-estimator "
    planned = (planner_of("ppo", given + kind, "1xH100") for kind in ("jsd", "reverse_kl"))
    both, one = (planner.memory(resolved).phases for planner, resolved in planned)
    assert both["train"].activations - one["train"].activations > 2 * COMPARED_BYTES
    assert both["score"] == one["score"]


@pytest.mark.parametrize(
    ("given", "prefixes"),
    [
        ({"method": "distill"}, ["actor_"]),
        ({"method": "distill", "reward_function": ["length"]}, ["actor_"]),
        ({"method": "distill", "reward_model_name_or_path": "r"}, ["actor_", "reward_model_"]),
    ],
)
def test_without_rewards_no_reward_model_is_looked_for(given, prefixes):
    assert list(starts(given)) == prefixes
