"""What users of DeepSpeed-Chat bring along: each flag of its programs, each argument line of its scripts."""

import importlib
import re

import pytest
from support.dschat_scripts import FLAGS, REFUSED, SCRIPTS
from support.marks import slow_but
from support.source_tree import ROOT

from pipeline.configuration.flags import parse
from pipeline.configuration.names import Names, normalise
from pipeline.errors import InputError, dashed
from rlhf import chat, compare
from rlhf.train_config import TrainConfig
from step1_sft.config import SFTConfig
from step2_reward.config import RewardConfig, RewardEvalConfig
from step3_ppo.config import PPOConfig

PROGRAMS = {
    "sft": SFTConfig, "reward": RewardConfig, "dpo": RewardConfig, "ppo": PPOConfig, "train": TrainConfig,
    "chat": chat.ChatConfig, "prompt_eval": compare.CompareConfig, "rw_eval": RewardEvalConfig,
}  # fmt: skip
STAGES = {1: "step1_sft.main", 2: "step2_reward.main", 3: "step3_ppo.main"}


@pytest.mark.parametrize(("program", "flag"), [(name, flag) for name in FLAGS for flag in FLAGS[name].split()])
def test_every_flag_works_or_is_refused_with_its_reason(program, flag):
    names = Names(PROGRAMS[program])
    if flag in names.flag_of or flag in names.ignored:
        return
    with pytest.raises(InputError) as refused:
        parse(PROGRAMS[program], [f"--{flag}", "1"], section="none")
    line = next(line for line in str(refused.value).splitlines() if line.startswith(f"{dashed(flag)}:"))
    assert "without a counterpart here: " in line and "did you mean" not in line


@pytest.mark.few(1)
@pytest.mark.parametrize("script", slow_but(list(SCRIPTS)[::5], SCRIPTS))
def test_every_script_goes_through_the_dry_run_of_its_stage(script, tmp_path, monkeypatch, capsys):
    step, ranks, line = SCRIPTS[script]
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("WORLD_SIZE", str(ranks))
    monkeypatch.setattr("pipeline.preparation.preflight.free_bytes", lambda folder: 2**50)
    monkeypatch.setattr("pipeline.launching.target.memory_of_machine", lambda: 2**50)
    code = importlib.import_module(STAGES[step]).main([*line.split(), "--explain"])
    printed = capsys.readouterr()
    lines = printed.err.splitlines()
    errors = [line for line in lines if ": not planned: " not in line]  # of models on the hub without a shape here
    assert [normalise(re.match(r"error: --([\w-]+):", error)[1]) for error in errors] == REFUSED.get(script, [])
    assert code == (2 if errors else 3 if lines else 0)
    if errors:
        return
    rows = dict(row.split(maxsplit=1) for row in printed.out.splitlines() if re.match(r"  \w+ +\S", row))
    known, words = Names(PROGRAMS[{1: "sft", 2: "reward", 3: "ppo"}[step]]).flag_of, line.split()
    for word, value in zip(words, [*words[1:], "--"], strict=True):
        if word.startswith("--") and word[2:] in known:
            shown = rows[known[word[2:]]].removesuffix("command line").strip()
            expected = "True" if value.startswith("--") else value
            assert shown.startswith("[") or shown == expected or float(shown) == float(expected), word


def test_dropout_other_than_0_is_refused():
    with pytest.raises(InputError, match="--dropout: got '0.1'"):
        parse(SFTConfig, ["--dropout", "0.1"], section="sft")
    assert parse(SFTConfig, ["--dropout", "0"], section="sft").config.model.dropout == 0


def test_the_page_names_every_flag_that_is_spelt_otherwise_or_gone():
    page = (ROOT / "docs" / "coming_from" / "deepspeed_chat.md").read_text(encoding="utf-8")
    tables = list(map(Names, PROGRAMS.values()))
    names = {name for table in tables for name in (*table.ignored, *table.refused)}
    assert sorted(name for name in names if f"`--{name}`" not in page) == []
