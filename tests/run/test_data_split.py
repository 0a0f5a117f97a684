"""`--data-split auto`: resolved once for the stages of a command, held by runs that go on, taken from other stages'."""

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from support.launch_stub import TINY, started, train
from support.messages import naming

from pipeline.checkpoints.checkpoint_files import manifest_entry, write_manifest
from pipeline.configuration.flags import parse
from pipeline.configuration.rank_rules import Choice
from pipeline.configuration.resolved import Resolved
from pipeline.configuration.stage import Stage
from pipeline.errors import InputError
from pipeline.preparation.stage_entry import read_flags
from pipeline.run import run as run_module
from pipeline.run.data_split import data_of
from pipeline.run.resolve import not_given, with_command_rules
from pipeline.run.run import Run, begin
from pipeline.run.stop_request import StopRequest
from rlhf.stages import stage_of
from rlhf.train_plan import make_plan
from step1_sft.config import SFTConfig
from step3_ppo.main import main as ppo_main

NAMES = {1: "sft", 2: "reward", 3: "ppo"}


@pytest.fixture(autouse=True)
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    for name in ("a", "b", "c", "d"):
        (tmp_path / f"{name}.jsonl").write_text('{"prompt": "x", "chosen": "y", "rejected": "z"}\n')
    return tmp_path


def splits(steps: str, *words: str) -> dict[str, str]:
    """Section -> the split that `train.py --step STEPS` hands to each stage."""
    plan = make_plan([*TINY, "--step", *steps, *words], prog="train.py")
    for planned in plan.chosen:
        text = planned.resolved.config.data.data_split
        read = parse(planned.stage.config, planned.argv, section=planned.stage.section)
        assert read.config.data.data_split == text, "the stage is told"
    return {planned.stage.section: planned.resolved.config.data.data_split for planned in plan.chosen}


COMMON = ("--data-path", "a.jsonl")


@pytest.mark.parametrize(
    ("steps", "split", "shares"),
    [("123", "2,4,4", (2,)), ("13", "2,4,4", (1, 2)), ("23", "0,4,4", (2,)), ("3", "none", (1, 2))],
)
def test_dpo_takes_the_share_of_step_2_where_that_does_not_run(steps, split, shares):
    plan = make_plan([*TINY, "--step", *steps, *COMMON, "--method", "dpo"], prog="train.py")
    assert {planned.resolved.config.data.data_split for planned in plan.chosen} == {split}
    (options,) = data_of(plan.chosen[-1].stage, plan.chosen[-1].resolved.config)
    assert (options.title, options.rows, options.shares) == ("dpo", "pairs", shares)
    kto = make_plan([*TINY, "--step", *steps, *COMMON, "--method", "kto"], prog="train.py")
    (options,) = data_of(kto.chosen[-1].stage, kto.chosen[-1].resolved.config)
    assert (options.title, options.rows, options.shares) == ("dpo", "responses", shares)


def takes_both(steps: str, *words: str) -> bool:
    plan = make_plan([*TINY, "--step", *steps, *COMMON, "--method", "dpo", *words], prog="train.py")
    planned = plan.chosen[-1]
    return bool(parse(planned.stage.config, planned.argv, section="dpo").config.data.take_reward_share)


def test_dpo_leaves_the_share_of_a_reward_model_of_an_earlier_command():
    assert takes_both("3") and takes_both("13") and not takes_both("123")
    save_run("reward", "2,4,4", "b.jsonl")
    assert takes_both("3"), "of other rows"
    (Path("output/runs/reward/config.json")).write_text('{"data_path": {"value": ["a.jsonl"]}}')
    assert not takes_both("3") and not takes_both("13")
    assert takes_both("3", "--dpo.take-reward-share", "true") and takes_both("3", "--output-dir", "elsewhere")
    (Path("output/runs/reward/done.json")).unlink()
    assert takes_both("3"), "it has saved nothing"


@pytest.mark.parametrize(("split", "taken"), [("2,4,4", "2,4,4"), ("2,4,0", "none")])
def test_dpo_behind_a_command_of_stages_1_and_2_has_its_share_or_a_note(split, taken, capsys):
    """With 2,4,0 the one share that is not stage 1's is the reward model's."""
    for run in ("sft", "reward"):
        save_run(run, split)
    assert splits("3", *COMMON, "--method", "dpo") == {"dpo": taken}
    assert ("so some rows train both" in capsys.readouterr().out) is (taken == "none")


@pytest.mark.parametrize("done", [True, False], ids=["finished", "with a checkpoint"])
@pytest.mark.parametrize("took", [True, False])
def test_dpo_goes_on_with_the_shares_that_it_had(took, done):
    folder = save_run("dpo", "2,4,4", done=done)
    record = next(file for file in folder.rglob("*.json") if file.name in ("done.json", "state.json"))
    record.write_text(json.dumps({"settings": {"data_split": "2,4,4", "take_reward_share": took}}))
    if not done:
        write_manifest(record.parent, 3, {record.name: manifest_entry(record)})
    assert [takes_both(steps) for steps in ("3", "13", "123")] == [took] * 3
    assert takes_both("3", "--overwrite"), "it starts afresh"


@pytest.mark.parametrize(
    ("steps", "words", "expected"),
    [
        ("123", COMMON, ["2,4,4", "2,4,4", "2,4,4"]),
        ("12", COMMON, ["2,4,0", "2,4,0"]),
        ("13", COMMON, ["2,0,4", "2,0,4"]),
        ("23", COMMON, ["0,4,4", "0,4,4"]),
        ("2", COMMON, ["none"]),
        ("2", (*COMMON, "--data-split", "auto"), ["none"]),
        ("123", (*COMMON, "--data-split", "1,1,1"), ["1,1,1"] * 3),
        ("123", (*COMMON, "--data-split", "none"), ["none"] * 3),
        ("123", (*COMMON, "--sft.data-split", "3,1,1"), ["3,1,1"] * 3),
        ("123", (*COMMON, "--sft.data-split", "none"), ["none", "0,4,4", "0,4,4"]),
    ],
)
def test_stages_of_one_command_on_one_source_share_it(steps, words, expected):
    assert splits(steps, *words) == dict(zip([NAMES[int(step)] for step in steps], expected, strict=True))


def of(sft: str, reward: str, ppo: str) -> list[str]:
    return [f"--sft.data-path={sft}", f"--reward.data-path={reward}", f"--ppo.data-path={ppo}"]


def test_stages_without_a_common_source_take_all_rows():
    assert splits("123", *of("a.jsonl", "b.jsonl", "c.jsonl")) == dict.fromkeys(NAMES.values(), "none")
    assert splits("123", *of("a.jsonl", "b.jsonl", "b.jsonl")) == {"sft": "none", "reward": "0,4,4", "ppo": "0,4,4"}
    words = [*of("a.jsonl", "a.jsonl", "c.jsonl"), "--reward.data-path", "a.jsonl", "c.jsonl"]
    assert set(splits("123", *words).values()) == {"2,4,4"}, "two of them by way of the third: else shares overlap"
    words = [*of("a.jsonl", "b.jsonl", "a.jsonl"), "--ppo.data-path", "a.jsonl", "b.jsonl"]
    assert set(splits("123", *words).values()) == {"2,4,4"}


@pytest.mark.parametrize(
    ("first", "second", "common"),
    [
        ("a.jsonl", "./x/../a.jsonl:0.5", True),
        ("a.jsonl", "{}/a.jsonl", True),
        ("rows", "rows/part", True),
        ("rows", "rows2", False),
        ("org/set@v1:0.3", "org/set", True),
        ("org/set", "org/set2", False),
    ],
)
def test_a_source_is_the_same_by_another_spelling(folder, first, second, common):
    for name in ("x", "rows", "rows/part", "rows2"):
        (folder / name).mkdir()
    found = splits("12", f"--sft.data-path={first}", f"--reward.data-path={second.format(folder)}")
    assert set(found.values()) == {"2,4,0" if common else "none"}


def save_run(run: str, split: str | None, path: str = "a.jsonl", *, done: bool = True) -> Path:
    """A run of another stage that is finished, or has a checkpoint; without a split it is of an older version."""
    folder = Path("output/runs") / run
    folder.mkdir(parents=True)
    settings = {} if split is None else {"data_split": split}
    record = folder / ("done.json" if done else "checkpoints/step-3/state.json")
    record.parent.mkdir(parents=True, exist_ok=True)
    record.write_text(json.dumps({"settings": {"seed": 1234, **settings}}))
    if not done:
        write_manifest(record.parent, 3, {record.name: manifest_entry(record)})
    values = {"data_path": [path], **settings}
    (folder / "config.json").write_text(json.dumps({name: {"value": value} for name, value in values.items()}))
    (folder / "env.json").write_text(json.dumps({"stage": run}))
    return folder


@pytest.mark.parametrize("done", [True, False], ids=["finished", "with a checkpoint"])
@pytest.mark.parametrize(("split", "held"), [("2,4,4", "2,4,4"), ("none", "none"), (None, "2,4,4")])
def test_a_run_that_goes_on_holds_its_split(split, held, done):
    """Also one of before, when all were 2,4,4."""
    folder = save_run("reward", split, done=done)
    assert splits("2", *COMMON) == {"reward": held}
    assert splits("2", *COMMON, "--overwrite") == {"reward": "none"}, "it starts afresh"
    assert splits("2", *COMMON, "--data-split", "0,1,0") == {"reward": "0,1,0"}, "which the run then refuses"
    if not done:
        words = ["--reward.resume", str(folder / "checkpoints/step-3"), "--reward.run-dir", "elsewhere"]
        assert splits("2", *COMMON, *words) == {"reward": held}


@pytest.mark.parametrize(
    ("steps", "words", "error"),
    [
        ("123", ("--data-split", "2,4,0"), "2,4,0 ... stage 3"),
        ("2", ("--data-split", "1,0,1"), "1,0,1 ... stage 2"),
        ("123", ("--method", "kto", "--data-split", "2,4,0"), "2,4,0 ... stage 3"),
        ("12", ("--data-split", "2,4"), "'2,4'"),
    ],
)
def test_a_split_without_a_row_for_a_stage_is_refused_before_any_starts(steps, words, error):
    with pytest.raises(InputError) as found:
        splits(steps, *COMMON, *words)
    assert (
        str(found.value) == naming(error)
        and "data-split" in str(found.value).replace("_", "-")
        and "\n" not in str(found.value)
    )
    assert splits("13", *COMMON, "--method", "kto", "--data-split", "2,4,0")["dpo"] == "2,4,0", "it has stage 2's too"


def test_a_command_takes_the_split_of_another_stage_on_its_source(capsys):
    """So a stopped command goes on with other steps."""
    save_run("sft", "2,4,4")
    assert splits("2", *COMMON) == {"reward": "2,4,4"}
    assert splits("23", *COMMON) == {"reward": "2,4,4", "ppo": "2,4,4"}, "with 0,4,4 they would meet rows of stage 1"
    assert splits("2", "--data-path", "b.jsonl") == {"reward": "none"}, "other rows"
    assert splits("2", *COMMON, "--output-dir", "elsewhere") == {"reward": "none"}
    assert splits("123", *COMMON) == dict.fromkeys(NAMES.values(), "2,4,4")
    assert capsys.readouterr().out == ""


@pytest.mark.parametrize("split", ["none", "2,4,0"])
def test_rows_that_another_stage_has_used_are_told_of(capsys, split):
    save_run("sft", split)
    assert splits("3", *COMMON) == {"ppo": "none"}
    told = f"sft reads the same source ... --data-split {split} ... --data-split 2,4,4"
    assert capsys.readouterr().out == naming(f"note: ppo: {told}")
    assert splits("23", *COMMON) == {"reward": "0,4,4", "ppo": "0,4,4"}
    assert capsys.readouterr().out == naming(f"note: reward: {told}")


def test_a_folder_of_a_run_that_saved_nothing_says_nothing(capsys):
    (save_run("sft", "2,4,4") / "done.json").unlink()
    assert splits("2", *COMMON) == {"reward": "none"} and capsys.readouterr().out == ""


def by_hand(stage: str, *words: str) -> Resolved:
    folders = ["--output-dir", "output" if stage == "ppo" else f"output/{stage}"]
    return read_flags(stage_of(stage), [*words, *folders, "--data-path", "a.jsonl"])


def test_a_stage_by_hand_does_the_same():
    resolved = by_hand("sft")
    assert resolved.config.data.data_split == "none" and resolved.notes == ()
    assert str(resolved.origins["data_split"]) == "--data-split auto"
    save_run("sft", "2,4,0")
    resolved = by_hand("reward", "--run-dir", "elsewhere")
    assert resolved.config.data.data_split == "2,4,0" and resolved.notes == ()
    resolved = by_hand("ppo", "--actor-model-name-or-path", "x", "--critic-model-name-or-path", "y")
    assert resolved.config.data.data_split == "none", "2,4,0 has nothing for it"
    (note,) = resolved.notes
    assert note == naming("sft ... the same source ... --data-split 2,4,0")


def test_a_split_that_is_none_is_refused_in_one_line(capsys):
    models = ["--actor-model-name-or-path", "x", "--critic-model-name-or-path", "y", "--data-path", "a.jsonl"]
    save_run("sft", "2,4")
    assert ppo_main(models) == 2
    assert capsys.readouterr().err == naming("error: --data-split ... '2,4' ... three numbers")
    with pytest.raises(InputError, match="data path 'a.jsonl:7'"):
        splits("12", "--data-path", "a.jsonl:7")


def test_a_stage_without_shares_takes_all_rows():
    sft, whole = stage_of("sft"), stage_without_shares()
    given = parse(sft.config, ["--data-path", "a.jsonl"], section="sft")
    found = with_command_rules({sft: given, whole: given})
    assert [resolved.config.data.data_split for resolved in found.values()] == ["none", "none"]


def stage_without_shares(**changes: Any) -> Stage:
    class WithoutShares(SFTConfig):
        shares = ()

    return replace(stage_of("sft"), **({"config": WithoutShares, "section": "other"} | changes))


def test_rank_0_says_it_where_hosts_see_other_runs(monkeypatch, tmp_path):
    trained: list[str] = []
    stage = stage_without_shares(loop=lambda: lambda run, config: trained.append(run.resolved.config.data.data_split))
    given = parse(stage.config, ["--data-path", "a.jsonl"], section="sft")
    resolved = with_command_rules({stage: given})[stage]
    of_rank_0 = not_given(given.changed({"data_split": "2,4,4"}))
    answers = iter((False, of_rank_0, Choice(), {}))  # finished, unset flags, choice, decisions
    monkeypatch.setattr(run_module.dist, "on_main", lambda work: next(answers))
    world = run_module.dist.World(1, 2, None)  # type: ignore[arg-type]  # no device is used
    begin(Run(world, tmp_path, stage, resolved, StopRequest()), lambda stage, resolved: Choice())
    assert trained == ["2,4,4"]


@pytest.mark.slow
def test_the_stages_of_a_stopped_command_go_on_one_by_one(folder):
    """As real processes, with stand-ins for the ranks."""

    def run(*steps: str) -> list[list[str]]:
        (folder / "log.jsonl").unlink(missing_ok=True)
        done = train(folder, *TINY, *COMMON, "--step", *steps, STUB_OUTCOMES="0")
        assert done.returncode == 0, done.stderr
        return [words[-2:] for words in started(folder)]

    assert run("1", "2") == [["--data-split", "2,4,0"]] * 2
    assert run("1", "2") == [], "finished"
    assert run("2", "3") == [["--data-split", "none"]]
