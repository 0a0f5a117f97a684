"""Defaults that follow from other flags, LoRA's rate and the length of an answer; other ones are refused by name."""

import json
from pathlib import Path
from types import SimpleNamespace

import pytest
from support.messages import naming

from pipeline.checkpoints.checkpoint_files import manifest_entry, write_manifest
from pipeline.configuration.flag_checks import idle_flags
from pipeline.configuration.flag_table import flag_table
from pipeline.configuration.origins import Kind, Origin
from pipeline.configuration.rank_rules import Choice
from pipeline.configuration.resolved import Resolved
from pipeline.configuration.resume_rules import check_resumed, defaults_of, differences, record_of, values_by_rule
from pipeline.errors import InputError, dashed
from pipeline.files import read_object
from pipeline.preparation.dry_run import show_flags
from pipeline.preparation.stage_entry import read_flags
from pipeline.run import run as run_module
from pipeline.run.earlier_runs import checkpoint_state
from pipeline.run.evaluations import unfinished_answers
from pipeline.run.layout import done_file
from pipeline.run.resolve import not_given, with_choice
from rlhf.stages import stage_of
from rlhf.train_plan import make_plan
from step3_dpo.config import LORA_FACTOR as OF_DPO
from step3_ppo.config import PPOConfig
from step3_ppo.flags.methods import LORA_FACTOR, PPO_LORA_FACTOR

RANK = {"sft": "--lora-dim 8", "reward": "--lora-dim 8", "dpo": "--lora-dim 8", "ppo": "--actor-lora-dim 8"}
MODELS = {"ppo": "--actor-model-name-or-path a"}
ALONE = "--reward-function exact_match"
GRPO = f"--method grpo {ALONE}"
OLD_RATE, OLD_LENGTH = 5e-4, 256  # what versions without these defaults have


@pytest.fixture(autouse=True)
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    Path("a.jsonl").write_text('{"prompt": "x", "chosen": "y", "rejected": "z"}\n')
    return tmp_path


def read(section: str, words: str = "") -> Resolved:
    """The settings of a stage by itself, LoRA's without being asked for."""
    common = f"{MODELS.get(section, '--model-name-or-path a')} --data-path a.jsonl --run-dir run"
    return read_flags(stage_of(section), f"{common} {words}".split())


def values(section: str, words: str = "") -> dict[str, object]:
    return values_by_rule(read(section, words).config, "same")


def save(section: str, words: str, *, done: bool = False, **changes: object) -> None:
    """Leave a finished run, or its checkpoint, with these flags and `changes`."""
    settings = values(section, words) | changes
    record = Path("run/done.json" if done else "run/checkpoints/step-3/state.json")
    record.parent.mkdir(parents=True)
    Path("run/run.lock").touch()
    Path("run/env.json").write_text(json.dumps({"stage": section, "versions": {}}))
    record.write_text(json.dumps({"settings": settings, "sizes": {}}))
    if not done:
        write_manifest(record.parent, 3, {record.name: manifest_entry(record)})


@pytest.mark.parametrize(
    ("section", "words", "flag", "expected", "origin"),
    [
        ("sft", "", "lora_learning_rate", 2e-4, "default"),
        ("reward", "--learning-rate 1e-3", "lora_learning_rate", 2e-4, "default"),
        ("dpo", "", "lora_learning_rate", OF_DPO * 1e-6, f"auto: {OF_DPO:g} x --learning-rate"),
        ("dpo", "--method kto --learning-rate 3e-7", "lora_learning_rate", OF_DPO * 3e-7, "auto"),
        ("dpo", "--lora-learning-rate auto", "lora_learning_rate", OF_DPO * 1e-6, "auto"),
        ("dpo", "--lora-learning-rate 7e-6", "lora_learning_rate", 7e-6, "command line"),
        ("ppo", GRPO, "actor_lora_learning_rate", LORA_FACTOR * 1e-6, f"auto: {LORA_FACTOR:g} x --actor-learning-rate"),
        ("ppo", ALONE, "actor_lora_learning_rate", PPO_LORA_FACTOR * 1e-6, "auto"),
        ("ppo", f"{ALONE} --critic-lora-dim 4", "critic_lora_learning_rate", PPO_LORA_FACTOR * 5e-6, "auto"),
    ],
)
def test_lora_has_the_rate_of_its_stage_unless_one_is_given(section, words, flag, expected, origin, capsys):
    resolved = read(section, f"{RANK[section]} {words} --explain")
    show_flags(stage_of(section), resolved, ranks=1)
    (line,) = [line.split() for line in capsys.readouterr().out.splitlines() if line.startswith(f"  {flag} ")]
    assert float(line[1]) == pytest.approx(expected, rel=1e-6) and " ".join(line[2:]).startswith(origin)
    assert resolved.is_given(flag) == (origin == "command line")
    assert not list(idle_flags(resolved.config, resolved.origins))


def test_a_file_that_says_auto_or_a_preset_without_a_rate_takes_that_of_the_stage():
    Path("own.yaml").write_text("lora_learning_rate: auto\nlearning_rate: 2.0e-6\nlora_dim: 8\n")
    Path("preset.yaml").write_text("lora_learning_rate: 9.0e-6\n")
    assert read("dpo", "--preset preset.yaml --lora-dim 8").config.model.lora_learning_rate == 9e-6
    found = read("dpo", "--preset preset.yaml --config own.yaml").config.model.lora_learning_rate
    assert found == pytest.approx(OF_DPO * 2e-6)
    plan = make_plan(["--actor-model", "13b", "--method", "dpo", "--step", "3"], prog="train.py")
    assert plan.chosen[0].resolved.config.model.lora_learning_rate == pytest.approx(OF_DPO * 1e-6)


@pytest.mark.parametrize(
    ("words", "expected", "origin"),
    [
        (GRPO, 512, "method grpo, where functions alone reward"),
        (ALONE, 512, "method ppo, where functions alone reward"),
        (f"{GRPO} --max-answer-seq-len auto", 512, "method grpo, where functions alone reward"),
        (f"{GRPO} --max-answer-seq-len 300", 300, "command line"),
        (f"{GRPO} --reward-model-name-or-path r", 256, "default"),
        ("--critic-model-name-or-path c", 256, "default"),
    ],
)
def test_functions_alone_reward_longer_answers(words, expected, origin):
    resolved = read("ppo", words)
    assert (resolved.config.sampling.max_answer_seq_len, str(resolved.origins["max_answer_seq_len"])) == (
        expected,
        origin,
    )


def test_a_preset_says_how_long_answers_are():
    Path("preset.yaml").write_text("max_answer_seq_len: 32\n")
    assert read("ppo", f"{GRPO} --preset preset.yaml").config.sampling.max_answer_seq_len == 32


CASES = [  # section, words, what a run of before these defaults has, and now has by its record alone
    ("dpo", RANK["dpo"], {"lora_learning_rate": OLD_RATE}),
    ("dpo", RANK["dpo"], {"lora_learning_rate": 5e-6}),  # of a preset, which does not say it any more
    ("dpo", "", {"lora_learning_rate": OLD_RATE}),
    ("sft", RANK["sft"], {"lora_learning_rate": OLD_RATE}),
    ("ppo", f"{ALONE} {RANK['ppo']}", {"actor_lora_learning_rate": OLD_RATE, "max_answer_seq_len": OLD_LENGTH}),
    ("ppo", GRPO, {"max_answer_seq_len": OLD_LENGTH}),
]


@pytest.mark.parametrize("kind", ["checkpoint", "finished"])
@pytest.mark.parametrize(("section", "words", "before"), CASES)
def test_a_run_of_another_default_is_refused_by_the_flags_name(section, words, before, kind):
    """Also where the flag is not given: the run goes on by a command that gives the recorded values."""
    save(section, words, done=kind == "finished", **before)
    resolved = read(section, words)
    found = values_by_rule(resolved.config, "same")
    assert all(found[name] != value and not resolved.is_given(name) for name, value in before.items())
    record = read_object(done_file(Path("run"))) if kind == "finished" else checkpoint_state(Path("run"), "auto")[1]
    now = record_of(resolved.config, None, "same")
    lines = list(differences(record, now, resolved.config))
    assert all(
        line == naming(f"{found[name]} ... {before[name]}") for name, line in zip(sorted(before), lines, strict=False)
    )
    given = read(section, " ".join([words, *(f"{dashed(name)} {value}" for name, value in before.items())]))
    assert list(differences(record, record_of(given.config, None, "same"), given.config)) == []


def test_a_value_that_is_given_is_compared_with_that_of_the_run():
    save("dpo", RANK["dpo"], lora_learning_rate=OLD_RATE)
    resolved = read("dpo", f"{RANK['dpo']} --lora-learning-rate 1e-5")
    with pytest.raises(InputError, match=naming("--lora-learning-rate ... 1e-05 ... checkpoint ... 0.0005")):
        check_resumed(*checkpoint_state(Path("run"), "auto"), record_of(resolved.config, None, "same"), resolved.config)


def test_a_flag_that_a_checkpoint_does_not_know_had_the_default_of_now():
    table, defaults = flag_table(PPOConfig), defaults_of(read("ppo", GRPO).config)
    for name in ("max_answer_seq_len", "off_policy_weights", "actor_lora_learning_rate", "log_kl"):
        assert defaults[name] == table[name].default


def test_rank_0_says_it_where_hosts_see_other_runs(monkeypatch):
    stage = stage_of("ppo")
    elsewhere = read("ppo", GRPO)
    save("ppo", GRPO, old_log_probs="trainer")
    of_rank_0 = not_given(read("ppo", GRPO))
    dist = SimpleNamespace(on_main=lambda work: of_rank_0 if isinstance(work(), dict) else work())
    monkeypatch.setattr(run_module.dist, "on_main", dist.on_main)
    found, _ = with_choice(stage, elsewhere, lambda stage, resolved: Choice(), 1)
    assert found.config.ppo.old_log_probs == "trainer" != elsewhere.config.ppo.old_log_probs


def test_another_rank_has_the_values_their_origins_and_the_choice_of_rank_0(monkeypatch):
    """It sees no earlier run; rank 0 alone plans, beside what nobody gave as it has that."""
    words = f"{GRPO} {RANK['ppo']}"
    elsewhere, before = read("ppo", words), {"off_policy_weights": "token_truncate", "old_log_probs": "trainer"}
    save("ppo", words, **before)
    of_rank_0, plan = read("ppo", words), Choice({"actor_gradient_checkpointing": True}, Origin(Kind.PLAN, "2 x GPU"))
    answers = iter((not_given(of_rank_0), plan))
    monkeypatch.setattr(run_module.dist, "on_main", lambda work: next(answers))
    found, choice = with_choice(stage_of("ppo"), elsewhere, lambda *_: pytest.fail("it plans by itself"), 2)
    assert choice == plan and found.values == plan.of(of_rank_0, 2).values
    assert {name: found.values[name] for name in before} == before
    assert {found.origins[name].kind for name in before} == {Kind.FOLLOWS}


def test_a_plan_knows_how_many_answers_of_the_last_run_were_unfinished(folder):
    assert unfinished_answers(folder) == naming("first rollout logs how many")
    lines = [{"step": 0, "eval_completions/truncated_fraction": 0.9}, {"step": 1, "loss": 2.0}]
    lines += [{"step": step, "completions/truncated_fraction": share} for step, share in ((1, 0.568), (2, 0.1))]
    (folder / "metrics.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    (folder / "config.json").write_text(json.dumps({"max_answer_seq_len": {"value": 256}}))
    assert unfinished_answers(folder) == naming("57% ... limit, 256")
