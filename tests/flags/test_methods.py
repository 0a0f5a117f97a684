"""Methods: defaults, where values come from, what a preset says, flags of other models and of idle stages."""

import json
import re
from pathlib import Path

import pytest
from support.messages import naming

from pipeline.configuration.flags import parse
from pipeline.configuration.resolved import Resolved
from pipeline.configuration.resume_rules import check_resumed, removed_flags, values_by_rule
from pipeline.errors import InputError, dashed
from rlhf.train_plan import make_plan
from step3_ppo.config import PPOConfig

PRESET = """
train_batch_size: 64
kl_coef: 0.3
num_samples_per_prompt: 2
critic_learning_rate: 2.0e-5
value_clip: 0.5
actor_learning_rate: 4.0e-6
"""


def resolved(*words: str) -> Resolved:
    return parse(PPOConfig, ["--actor-model-name-or-path", "a", *words], section="ppo")


@pytest.mark.parametrize(
    ("method", "expected"),
    [
        ("grpo", {"num_samples_per_prompt": 8, "kl_coef": 0.0, "kl_in_loss": True, "whiten_advantages": False}),
        ("rloo", {"num_samples_per_prompt": 4, "kl_coef": 0.05, "kl_in_loss": False, "whiten_advantages": False}),
        ("reinforce_pp", {"num_samples_per_prompt": 1, "kl_coef": 0.1, "whiten_advantages": True}),
    ],
)
def test_a_method_brings_its_defaults_below_all_that_is_given(tmp_path: Path, method: str, expected: dict) -> None:
    (tmp_path / "preset.yaml").write_text(PRESET)
    (tmp_path / "own.yaml").write_text("kl_coef: 0.7\n")
    words = ("--method", method, "--reward-model-name-or-path", "r")
    plain = resolved(*words)
    values = {**plain.config.sampling.model_dump(), **plain.config.ppo.model_dump()}
    assert {name: values[name] for name in expected} == expected
    assert all(
        str(plain.origins[name]) == f"method {method}" and not plain.is_given(name)
        for name in expected.keys() - ({"kl_coef", "kl_in_loss"} if method != "grpo" else set()) - {"kl_coef"}
    )
    with_preset = resolved(*words, "--preset", str(tmp_path / "preset.yaml"))
    assert with_preset.config.sampling.num_samples_per_prompt == expected["num_samples_per_prompt"]
    assert with_preset.config.ppo.kl_coef == expected["kl_coef"], "a preset's are of PPO"
    assert with_preset.config.actor.learning_rate == 4e-6 and with_preset.config.critic.learning_rate == 5e-6
    by_file = resolved(*words, "--preset", str(tmp_path / "preset.yaml"), "--config", str(tmp_path / "own.yaml"))
    assert (by_file.config.ppo.kl_coef, str(by_file.origins["kl_coef"])) == (0.7, str(tmp_path / "own.yaml"))
    assert resolved(*words, "--kl-coef", "0.9").config.ppo.kl_coef == 0.9


def test_ppo_takes_all_of_its_preset(tmp_path: Path) -> None:
    (tmp_path / "preset.yaml").write_text(PRESET)
    found = resolved("--preset", str(tmp_path / "preset.yaml"))
    assert (found.config.ppo.kl_coef, found.config.sampling.num_samples_per_prompt) == (0.3, 2)
    assert (found.config.critic.learning_rate, found.config.ppo.value_clip) == (2e-5, 0.5)


@pytest.mark.parametrize(
    ("words", "flag", "hint"),
    [
        (
            "--method grpo --reward-model-name-or-path r --critic-learning-rate 1e-5",
            "critic-learning-rate",
            "no critic",
        ),
        ("--method rloo --reward-model-name-or-path r --value-clip 0.1", "value-clip", "no critic"),
        ("--method rloo --reward-model-name-or-path r --gae-lambda 0.9", "gae-lambda", "no critic"),
        ("--reward-function exact_match --reward-clip 3", "reward-clip", "no reward model"),
        ("--reward-function exact_match --reward-model-zero-stage 3", "reward-model-zero-stage", "no reward model"),
        (
            "--method grpo --reward-function exact_match --num-samples-per-prompt 1",
            "num-samples-per-prompt",
            "2 or more",
        ),
        ("--method rloo --reward-function exact_match --scale-by-group false", "scale-by-group", "needs --method grpo"),
        ("--method grpo --reward-function exact_match --group-baseline true", "group-baseline", "got --method grpo"),
        ("--policy-loss cispo --policy-clip-high 0.3", "policy-clip-high", "cispo"),
        ("--policy-loss cispo --dual-clip 3", "dual-clip", "cispo"),
        ("--dual-clip 0.5", "dual-clip", "above 1"),
        ("--off-policy-weights token_mask --off-policy-low 3", "off-policy-low", "above --off-policy-cap 2"),
        ("--method grpo --reward-function exact_match --gamma 0.9", "gamma", "not go with --method grpo"),
        ("--method rloo --reward-function exact_match --gamma 0.9", "gamma", "not go with --method rloo"),
        (
            "--method grpo --reward-function exact_match --reward-model r --replace-equal-groups true",
            "replace-equal-groups",
            "not go with a reward model",
        ),
        ("--method distill --teacher-model t --kl-target 3", "kl-target", "not go with a teacher"),
        ("--method distill --teacher-model t --gamma 0.9", "gamma", "KL in the loss"),
        ("--ratio-cap 6", "ratio-cap", "--policy-loss clipped"),
        ("--ema-decay 0.5", "ema-decay", "needs --enable-ema, got --enable-ema False"),
        ("--unsup-coef 3", "unsup-coef", "needs --unsupervised-data-path"),
        ("--policy-loss cispo --policy-clip 0.3", "policy-clip", "cispo"),
        ("--policy-loss cispo --ratio-cap 0.9", "ratio-cap", "1"),
        (
            "--kl-coef 0 --kl-target 3",
            "kl-target",
            "needs --kl-coef, got --kl-coef 0",
        ),
        ("--method grpo --reward-function exact_match --kl-target 3", "kl-target", "kl-coef"),
        ("--kl-horizon 50", "kl-horizon", "needs --kl-target"),
        ("--off-policy-weights none --off-policy-cap 3", "off-policy-cap", "--off-policy-weights none"),
        ("--off-policy-weights token_truncate --off-policy-low 0.3", "off-policy-low", "token_mask or"),
        ("--off-policy-low 0.3", "off-policy-low", "got --off-policy-weights auto"),
        ("--method grpo", "reward-model-name-or-path", "--reward-function"),
        ("--reward-function exact_mach", "reward-function", "exact_match"),
        ("--method ppp", "method", "ppo"),
    ],
)
def test_what_does_not_go_together_is_one_line(words: str, flag: str, hint: str) -> None:
    with pytest.raises(InputError) as error:
        resolved(*words.split())
    (line,) = str(error.value).splitlines()
    assert line.startswith((f"--{flag}: ", f"--{flag} ")) and hint in line, line


def test_settings_of_a_function_may_be_a_mapping_in_a_yaml_file(tmp_path: Path) -> None:
    (tmp_path / "own.yaml").write_text(
        "reward_function:\n  - name: length\n    weight: 0.5\n    args: {low: 3, high: 12}\n  - exact_match:2\n"
    )
    found = resolved("--config", str(tmp_path / "own.yaml")).config.reward_functions
    assert [(one.name, one.weight, dict(one.args)) for one in found] == [
        ("length", 0.5, {"low": 3, "high": 12}),
        ("exact_match", 2.0, {}),
    ]


def test_functions_alone_take_no_penalty_for_a_response_that_did_not_end() -> None:
    alone, beside = resolved("--reward-function", "exact_match"), ("--reward-model-name-or-path", "r")
    assert alone.config.ppo.missing_eos_penalty == 0.0 and not alone.config.has_reward_model
    assert resolved("--reward-function", "exact_match", *beside).config.ppo.missing_eos_penalty == 1.0
    assert (
        resolved("--reward-function", "exact_match", "--missing-eos-penalty", "2").config.ppo.missing_eos_penalty == 2
    )


@pytest.mark.parametrize(
    ("words", "expected"),
    [
        ("--step 1 2 3 --method grpo", {"actor_": "output/sft", "reward_model_": "output/reward"}),
        ("--step 1 3 --method rloo --ppo.reward-function exact_match", {"actor_": "output/sft"}),
        ("--step 1 3 --ppo.reward-function exact_match", {"actor_": "output/sft", "critic_": "output/sft"}),
        ("--step 1 2 3", {"actor_": "output/sft", "critic_": "output/reward"}),
    ],
)
def test_the_chain_names_the_starts_of_the_models_that_there_are(words: str, expected: dict) -> None:
    plan = make_plan([*words.split(), "--actor-model", "1.3b"], prog="train.py")
    stage = plan.stages[3]
    given = dict(zip(stage.argv[::2], stage.argv[1::2], strict=False))
    names = {prefix: stage.stage.path_flag(prefix) for prefix in ("actor_", "critic_", "reward_model_")}
    assert {prefix: given[flag] for prefix, name in names.items() if (flag := dashed(name)) in given} == expected
    assert ("--critic-zero-stage" in json.dumps(stage.argv)) is False


@pytest.mark.parametrize(("words", "expected"), [((), 0.0), (("--reward-model-name-or-path", "r"), 1.0)])
def test_auto_is_the_penalty_that_holds_where_none_is_given(tmp_path: Path, words: tuple[str, ...], expected: float):
    (tmp_path / "own.yaml").write_text("missing_eos_penalty: auto\n")
    (tmp_path / "four.yaml").write_text("missing_eos_penalty: 4\n")
    auto, four = ["--missing-eos-penalty", "auto"], ["--config", str(tmp_path / "four.yaml")]
    for given in (auto, ["--config", str(tmp_path / "own.yaml")], [*four, *auto]):
        found = resolved("--method", "grpo", "--reward-function", "exact_match", *words, *given)
        assert found.config.ppo.missing_eos_penalty == expected


def test_a_note_names_a_flag_of_a_stage_that_does_not_run_unless_a_later_one_reads_its_folder(
    tmp_path, monkeypatch, capsys
):
    monkeypatch.chdir(tmp_path)
    words = ["--step", "3", "--actor-model", "tiny", "--sft.output-dir", "mine", "--ppo.kl-coef", "0.2"]
    plan = make_plan([*words, "--sft.seed=4", "--dpo.beta", "0.1", "--dpo.beta", "0.2"], prog="python train.py")
    assert capsys.readouterr().out.splitlines() == [
        naming("--sft.seed ... sft is not"),
        naming("--dpo.beta ... dpo is not"),
    ]
    assert plan.stages[3].argv[2:4] == ["--actor-model-name-or-path", "mine"]
    unread = ["note: --reward-zero-stage changes nothing: no stage that runs has a reward model or a critic"]
    for method, notes in (("dpo", unread), ("ppo", [])):
        make_plan([*words[:4], "--method", method, "--reward-zero-stage", "2"], prog="python train.py")
        assert capsys.readouterr().out.splitlines() == notes


@pytest.mark.parametrize(
    ("words", "critic"),
    [
        ("--ppo.reward-function exact_match", "out/sft"),
        ("--ppo.reward-function exact_match --ppo.actor-model-name-or-path here", "here"),
        ("--ppo.reward-function exact_match --ppo.actor-model here", "here"),
        ("--ppo.reward-function exact_match --ppo.critic-model there", "there"),
        ("--ppo.reward-function exact_match --ppo.actor-model here --ppo.critic-model there", "there"),
        ("--ppo.actor-model here", "out/reward"),
    ],
)
def test_a_critic_without_a_reward_model_starts_as_its_actor_does(
    words: str, critic: str, tmp_path: Path, monkeypatch
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "out/sft").mkdir(parents=True)
    argv = ["--step", "3", "--actor-model", "tiny", "--reward-model", "tiny", "--output-dir", "out", *words.split()]
    (planned,) = make_plan(argv, prog="train.py").chosen
    actor = "here" if "actor-model" in words else "out/sft"
    config = planned.resolved.config
    assert (config.actor.model_name_or_path, config.critic.model_name_or_path) == (actor, critic)


@pytest.mark.parametrize(
    ("words", "section", "found"),
    [
        ("", "ppo", "rloo"),
        ("--method grpo", "ppo", "grpo"),
        ("--method ppo", "ppo", "ppo"),
        ("--method kto", "dpo", "kto"),
        ("--method dpo", "dpo", "dpo"),
        ("--method kto --dpo.method ipo", "dpo", "ipo"),
    ],
)
def test_a_method_on_the_command_line_is_stronger_than_a_file(tmp_path: Path, words: str, section: str, found: str):
    rewarded = "reward_function: exact_match, actor_learning_rate: 1.0e-6"
    (tmp_path / "own.yaml").write_text(f"ppo: {{method: rloo, {rewarded}}}\ndpo: {{method: ipo}}\n")
    argv = ["--step", "3", "--actor-model", "tiny", "--config", str(tmp_path / "own.yaml"), *words.split()]
    (planned,) = make_plan(argv, prog="train.py").chosen
    config = planned.resolved.config
    assert (planned.stage.section, config.method if section == "dpo" else config.ppo.method) == (section, found)


def test_a_flag_of_another_method_of_stage_3_is_named_with_its_section(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    words = ["--step", "3", "--actor-model", "tiny", "--method", "kto", "--max-seq-len", "64"]
    with pytest.raises(InputError) as error:
        make_plan([*words, "--rollout-batch-size", "16"], prog="python train.py")
    assert str(error.value) == naming("--rollout-batch-size", "--ppo.rollout-batch-size", "stage 3")
    with pytest.raises(InputError) as error:
        make_plan([*words, "--deployment-type", "foo"], prog="python train.py")
    assert "foo" in str(error.value) and "max_seq_len" not in str(error.value), "it is a flag of this method's stage"


OF_VAPO = {"positive_nll_coef": 0.1, "positive_score": 0.5, "lambda_alpha": 0.05, "off_policy_veto": 1e-4}
IN_THE_JSON = {
    "communication_data_type": "fp32", "loss_scale": 128.0, "initial_scale_power": 8, "loss_scale_window": 50,
    "hysteresis": 1, "min_loss_scale": 2, "deepspeed_monitor": ["csv_monitor"], "wall_clock_breakdown": True,
}  # fmt: skip
OF_ZERO_IN_THE_JSON = {
    "pin_memory": False, "reduce_bucket_size": 9, "allgather_bucket_size": 11, "overlap_comm": False,
    "stage3_param_persistence_threshold": 7, "stage3_max_reuse_distance": 4,
}  # fmt: skip
# Flag -> a value that is not its default, and the last commit that has it.
GONE = {name: (value, "f693daee") for name, value in OF_VAPO.items()}
GONE["approx_kl_stop"] = (0.02, "3ce830e6")
GONE["over_sample"] = (0.5, "5029b7a4")
GONE |= {name: (value, "d0a9914c") for name, value in IN_THE_JSON.items()}
GONE |= {name: (value, "40c195d6") for name, value in OF_ZERO_IN_THE_JSON.items()}


@pytest.mark.parametrize("name", GONE)
def test_a_flag_that_is_gone_is_refused_by_its_name(name):
    value, last = GONE[name]
    with pytest.raises(InputError, match=f"{dashed(name)}: removed after commit {last}: "):
        resolved(dashed(name), str(value))


@pytest.mark.parametrize("name", GONE)
def test_a_checkpoint_of_a_flag_that_is_gone_goes_on_only_if_it_had_its_default(name):
    config, (value, last) = parse(PPOConfig, [], section="ppo").config, GONE[name]
    current, default = values_by_rule(config, "same"), removed_flags(config)[name].default
    now = {"settings": current}
    check_resumed(Path("step-1"), {"settings": current | {name: default}}, now, config)
    with pytest.raises(InputError, match=f"{dashed(name)}: removed after commit {last}: .*{re.escape(str(value))}"):
        check_resumed(Path("step-1"), {"settings": current | {name: value}}, now, config)


def settings_by(folder: Path, fp16: dict[str, int] | None) -> tuple[PPOConfig, dict]:
    """Return the configuration with a DeepSpeed JSON that says this of fp16, and what a checkpoint would have of it."""
    (folder / "ds.json").write_text(json.dumps({"fp16": fp16 or {}}))
    config = parse(PPOConfig, ["--deepspeed-config", str(folder / "ds.json")], section="ppo").config
    return config, values_by_rule(config, "same")


def test_a_checkpoint_that_had_it_resumes_where_the_json_says_the_same(tmp_path: Path) -> None:
    config, current = settings_by(tmp_path, {"loss_scale_window": 500})
    before = current | {"loss_scale_window": 500}  # also what a version with the flag wrote, from flag or JSON
    assert current == before
    check_resumed(Path("step-1"), {"settings": before}, {"settings": current}, config)
    for other in ({"loss_scale_window": 100}, None):
        config, now = settings_by(tmp_path, other)
        with pytest.raises(InputError, match="--loss-scale-window: removed .* got (100|1000), the checkpoint has 500"):
            check_resumed(Path("step-1"), {"settings": before}, {"settings": now}, config)


def test_train_says_of_a_flag_that_is_gone_what_to_do(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    with pytest.raises(InputError) as error:
        make_plan(["--step", "1", "--actor-model", "tiny", "--loss-scale", "5"], prog="train.py")
    assert "--loss-scale: removed after commit d0a9914c: write fp16.loss_scale into" in str(error.value)
