"""What `train.py` says at the end of a stage and proposes next, with stand-ins for stages; how it splits its words."""

import json
import re
import shlex
from pathlib import Path

import pytest
from support.launch_stub import TINY, notes, train, write_row_values
from support.marks import slow_but
from support.messages import naming

from rlhf.train import command_for
from rlhf.train_config import split_overrides
from rlhf.train_plan import make_plan

PERPLEXITY, SCORES, KL = "eval_perplexity", "eval_objective/scores", "eval_objective/kl"
CUT = "eval_completions/truncated_fraction"
MEANING = {
    "titles": {name: name for name in (PERPLEXITY, "eval_accuracy", SCORES, KL)},
    "starts": [[-1, 2, 1000.0]],  # two ranks
    "metrics": {"perplexity": {"better": -1}, "accuracy": {"better": 1}, "objective/scores": {"better": 1}},
}
WORSE = {  # stage -> first and last evaluation -> what the stage's line says of them
    "1": (
        {PERPLEXITY: 15.0, "eval_rows": 25, "time": 1000.0},
        {PERPLEXITY: None, "eval_rows": 25, "time": 6400.0, "num_tokens": 2_000_000},
        "== stage 1: done in ... eval_perplexity 15 -> nan (25 sequences), WORSE ... eval_perplexity, 3 GPU hours, "
        "2M tokens; model: out/sft",
    ),
    "1 lora": ({PERPLEXITY: 15.0}, {PERPLEXITY: None}, "15 -> nan, WORSE"),
    "3 lora": ({SCORES: 0.5}, {SCORES: None}, "0.5 -> nan, WORSE"),
    "1 from nan": (
        {PERPLEXITY: None, "eval_rows": 25}, {PERPLEXITY: 15.0, "eval_rows": 25},
        "eval_perplexity nan -> 15 (25 sequences);",
    ),
    "1 kept": ({PERPLEXITY: 15.0}, {PERPLEXITY: 20.0}, "eval_perplexity 15 -> 15; model"),
    "2": (
        {"eval_accuracy": 0.9, "eval_rows": 400}, {"eval_accuracy": 0.5, "eval_rows": 400},
        "0.9 -> 0.5 (400 pairs), WORSE",
    ),
    "2 few": (
        {"eval_accuracy": 0.7, "eval_rows": 20}, {"eval_accuracy": 0.6, "eval_rows": 20},
        "0.7 -> 0.6 (20 pairs), no difference ... 20 rows",
    ),
    "3": (
        {SCORES: 0.5, KL: 0.0, CUT: 0.2}, {SCORES: None, KL: 9.0, CUT: 1.0},
        "WORSE ... eval_objective/scores ... --max-answer-seq-len;",
    ),
    "3 cut": ({SCORES: 0.5, CUT: 0.4}, {SCORES: 0.6, CUT: 1.0}, "0.5 -> 0.6, WORSE ... every answer"),
    "3 well": (
        {SCORES: 0.5, KL: -2e-8, CUT: 0.9}, {SCORES: 0.5, KL: 2, CUT: 1.0, "eval_rows": 8},
        "eval_objective/scores 0.5 -> 0.5, eval_objective/kl 0 -> 2 (8 responses)",
    ),
}  # fmt: skip


@pytest.mark.few(1)
@pytest.mark.parametrize("case", slow_but(["1", "2", "3", "3 well"], WORSE))
def test_a_stage_that_ends_worse_than_it_began_says_so_and_proposes_no_chat(tmp_path, case):
    first, last, said = WORSE[case]
    number, section = case[0], {"1": "sft", "2": "reward", "3": "ppo"}[case[0]]
    run_dir = tmp_path / "out/runs" / section
    run_dir.mkdir(parents=True)
    (run_dir / "env.json").write_text(json.dumps({"stage": section, "versions": {}}))
    rows = {"1": "sequences", "2": "pairs", "3": "prompts"}[number]
    (run_dir / "meaning.json").write_text(json.dumps({**MEANING, "rows": rows}))
    lines = [{"step": step, **line} for step, line in enumerate((first, last))]
    (run_dir / "metrics.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    if "eval_accuracy" in first:
        write_row_values(run_dir, lines)
    more = {"1 kept": ["--sft.keep-best"], "1 lora": ["--lora-dim", "2"], "3 lora": ["--lora-dim", "2"]}.get(case, [])
    for name in ("sft", "reward") if number == "3" else ():
        (tmp_path / "out" / name).mkdir()
        (tmp_path / "out" / name / "config.json").write_text("{}")
        (tmp_path / "out" / name / "model.safetensors").touch()
    done = train(tmp_path, *TINY, "--step", number, "--output-dir", "out", *more, STUB_OUTCOMES="0")
    assert " ".join(done.stdout.split()) == naming(said), done.stdout + done.stderr
    following = done.stdout.splitlines()[-1]
    if "WORSE" in said:
        rate = {"1": "--sft.learning-rate", "2": "--reward.learning-rate", "3": "--ppo.actor-learning-rate"}[number]
        rate = rate.replace("learning", "lora-learning") if "lora" in case else rate
        assert following.startswith(f"next: stage {number} ended worse") and following.endswith(f"a lower {rate}")
    else:
        assert following.startswith("next: python train.py --step 3" if number == "2" else "next: python chat.py")


@pytest.mark.slow
def test_each_stage_knows_its_place_and_how_long_the_later_ones_took(tmp_path):
    """A stage that has not run before has no known time; a last line that was cut short counts for nothing."""
    (tmp_path / "a.jsonl").write_text('{"prompt": "a", "chosen": "b", "rejected": "c"}\n')
    for section, times in (("reward", (100.0, 130.0)), ("ppo", (200.0, 260.0))):
        run_dir = tmp_path / "out/runs" / section
        run_dir.mkdir(parents=True)
        (run_dir / "env.json").write_text(json.dumps({"stage": section, "versions": {}}))
        (run_dir / "metrics.jsonl").write_text("".join(json.dumps({"step": 1, "time": time}) + "\n" for time in times))

    def places() -> list[str]:
        words = ("--step", "1", "2", "3", "--output-dir", "out", "--data-path", "a.jsonl", "--overwrite")
        done = train(tmp_path, *TINY, *words, gpus=1, STUB_OUTCOMES="0,0,0")
        assert done.returncode == 0, done.stderr
        found = [note["environment"]["RLHF_PIPELINE"] for note in notes(tmp_path)]
        (tmp_path / "log.jsonl").unlink()
        return found

    assert places() == ["1/3 90", "2/3 60", "3/3"]
    with (tmp_path / "out/runs/ppo/metrics.jsonl").open("a") as file:
        file.write('{"step": 2, "ti')
    assert places() == ["1/3 90", "2/3 60", "3/3"]
    (tmp_path / "out/runs/ppo/metrics.jsonl").write_text('{"step": 2, "ti')
    assert places() == ["1/3", "2/3", "3/3"]


def test_split_overrides():
    own, overrides = split_overrides(["--step", "1", "--sft.a", "b", "-1", "--x", "--ppo.c=d"], ["sft", "ppo"])
    assert own == ["--step", "1", "--x"] and overrides == {"sft": ["--a", "b", "-1"], "ppo": ["--c=d"]}


def test_a_command_for_another_stage_leaves_out_flags_that_this_one_alone_has():
    words = ["--learning-rate", "1e-5", "--data-path", "a b.jsonl", "--balance-lengths", "--max-seq-len=96"]
    given = ["--actor-model", "tiny", *words, "--reward.seed", "3"]
    expected = "rlhf train --step 3 --actor-model tiny --data-path 'a b.jsonl' --reward.seed 3"
    assert command_for(3, given, "rlhf train") == expected
    assert command_for(2, given, "rlhf train").endswith(f"{shlex.join(words)} --reward.seed 3")


@pytest.mark.slow
def test_the_commands_that_train_prints_are_plans_of_the_stages_that_they_name(tmp_path, monkeypatch):
    refused = train(tmp_path, "--step", "3", "--output-dir", "my out").stderr
    words = ("--step", "2", "--output-dir", "my out", "--balance-lengths", "--max-seq-len=96")
    ended = train(tmp_path, *TINY, *words, STUB_OUTCOMES="0").stdout
    printed = [*re.findall("train it: (.*)", refused), ended.splitlines()[-1].removeprefix("next: ")]
    monkeypatch.chdir(tmp_path)
    plans = [make_plan(shlex.split(command)[2:], prog="x").chosen for command in printed]
    assert [[(one.stage.number, one.model_dir) for one in plan] for plan in plans] == [
        [(1, Path("my out/sft"))],
        [(2, Path("my out/reward"))],
        [(3, Path("my out/actor"))],
    ]
