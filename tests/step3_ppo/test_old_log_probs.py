"""`--old-log-probs auto`: whose log-probabilities a run takes, decided before it starts and held on resume."""

import json
from pathlib import Path

import pytest
import torch
from support.run_words import run_stage

from pipeline.configuration.flags import parse
from pipeline.configuration.rank_rules import with_ranks
from pipeline.preparation.stage_entry import read_flags
from step3_ppo.config import PPOConfig
from step3_ppo.models.needs import models_of, needs, old_log_probs
from step3_ppo.stage import STAGE

FOLDER_SIZES = {"num_train": 8, "num_test": 2}


def config_of(folder: Path, words: str, ranks: int = 1) -> PPOConfig:
    models = f"--actor-model-name-or-path {folder / 'base'} --critic-model-name-or-path {folder / 'scorer'}"
    config = with_ranks(parse(PPOConfig, f"{models} {words}".split(), section="ppo"), ranks).config
    assert isinstance(config, PPOConfig)
    return config


@pytest.mark.parametrize(
    ("words", "ranks", "dtype", "expected"),
    [
        ("", 1, "bf16", "sampler"),
        ("", 4, "fp16", "sampler"),
        ("--actor-zero-stage 3 --num-samples-per-prompt 4 --gradient-accumulation-steps 2", 2, "bf16", "sampler"),
        ("--temperature 0.7", 1, "bf16", "sampler"),
        ("--actor-lora-dim 2 --actor-quantization int8", 1, "bf16", "sampler"),
        ("--actor-lora-dim 2 --merge-lora-for-generation false", 1, "bf16", "trainer"),  # the static backend
        ("", 1, "fp32", "trainer"),
        ("--top-p 0.9", 1, "bf16", "trainer"),
        ("--top-k 10", 1, "bf16", "trainer"),
        ("--ppo-epochs 2", 1, "bf16", "trainer"),
        ("--rollout-batch-size 32", 1, "bf16", "trainer"),
        ("--rollout-batch-size 32", 2, "bf16", "sampler"),
        ("--actor-lora-dim 2", 1, "bf16", "trainer"),
        ("--generation-engine eager", 1, "bf16", "trainer"),
        ("--generation-engine static", 1, "bf16", "trainer"),
        ("--old-log-probs trainer", 1, "bf16", "trainer"),
        ("--old-log-probs sampler", 1, "fp32", "sampler"),
    ],
)
def test_a_run_on_a_gpu_takes_the_samplers_where_nothing_speaks_against_it(folder, words, ranks, dtype, expected):
    config = config_of(folder, words, ranks)
    assert old_log_probs(config, models_of(config, {})[0], dtype, ranks) == expected


def test_a_plan_has_the_pass_that_its_run_makes(folder):
    passes = {
        whose: [one for one in needs(config_of(folder, words), {}, "bf16", 1).phases["score"] if one.role == "actor"]
        for whose, words in {"auto": "", "trainer": "--old-log-probs trainer", "no": "--top-k 5"}.items()
    }
    assert [len(passes[whose]) for whose in ("auto", "trainer", "no")] == [0, 1, 1]


def test_on_a_cpu_it_is_the_trainers(folder):
    config = config_of(folder, "")
    device = torch.device("cpu")
    assert old_log_probs(config, models_of(config, {})[0], "bf16", 1, device) == "trainer"


def test_a_run_writes_down_what_it_has_decided_and_holds_it(folder, tmp_path):
    words = [
        *("--actor-model-name-or-path", folder / "base", "--critic-model-name-or-path", folder / "scorer"),
        *("--data-path", folder / "train.jsonl", "--data-output-path", folder / "cache", "--dtype", "fp32"),
        *("--max-prompt-seq-len", 48, "--max-answer-seq-len", 8, "--max-steps", 1, "--output-dir", tmp_path / "out"),
        *("--per-device-train-batch-size", 4),
    ]
    words = [str(word) for word in words]
    assert run_stage("ppo", words) == 0
    run = tmp_path / "out/runs/ppo"
    decided = json.loads((run / "config.json").read_text())["old_log_probs"]
    assert (decided["value"], decided["from"]) == ("trainer", "--old-log-probs auto")
    # As of a run on a GPU, whose done.json and checkpoint say so.
    done = json.loads((run / "done.json").read_text())
    done["settings"]["old_log_probs"] = "sampler"
    (run / "done.json").write_text(json.dumps(done))
    resolved = read_flags(STAGE, words)
    assert (
        resolved.config.ppo.old_log_probs == "sampler"
        and str(resolved.origins["old_log_probs"]) == "--old-log-probs auto"
    )
    given = read_flags(STAGE, [*words, "--old-log-probs", "trainer"])
    assert given.config.ppo.old_log_probs == "trainer" and str(given.origins["old_log_probs"]) == "command line"
    afresh = read_flags(STAGE, [*words, "--resume", "never"])
    assert afresh.config.ppo.old_log_probs == "auto"
