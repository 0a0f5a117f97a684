"""`--old_log_probs auto`: whose log-probabilities a run takes, decided before it starts and held on resume."""

import json
from pathlib import Path

import pytest
import torch
from support.in_process import undone_afterwards
from support.tiny_run import make_folder

from pipeline.configuration.flags import parse
from pipeline.configuration.global_batch import with_ranks
from pipeline.run.entry import read_flags
from step3_ppo.config import PPOConfig
from step3_ppo.main import main
from step3_ppo.models.needs import models_of, needs, old_log_probs
from step3_ppo.stage import STAGE


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_folder(tmp_path_factory.mktemp("log_probs"), num_train=8, num_test=2)


def config_of(folder: Path, words: str, ranks: int = 1) -> PPOConfig:
    models = f"--actor_model_name_or_path {folder / 'base'} --critic_model_name_or_path {folder / 'scorer'}"
    config = with_ranks(parse(PPOConfig, f"{models} {words}".split(), section="ppo"), ranks).config
    assert isinstance(config, PPOConfig)
    return config


@pytest.mark.parametrize(
    ("words", "ranks", "dtype", "expected"),
    [
        ("", 1, "bf16", "sampler"),
        ("", 4, "fp16", "sampler"),
        ("--actor_zero_stage 3 --num_samples_per_prompt 4 --gradient_accumulation_steps 2", 2, "bf16", "sampler"),
        ("--temperature 0.7", 1, "bf16", "sampler"),
        ("--actor_lora_dim 2 --actor_quantization int8", 1, "bf16", "sampler"),
        ("--actor_lora_dim 2 --merge_lora_for_generation false", 1, "bf16", "trainer"),  # the static backend
        ("", 1, "fp32", "trainer"),
        ("--top_p 0.9", 1, "bf16", "trainer"),
        ("--top_k 10", 1, "bf16", "trainer"),
        ("--ppo_epochs 2", 1, "bf16", "trainer"),
        ("--rollout_batch_size 32", 1, "bf16", "trainer"),
        ("--rollout_batch_size 32", 2, "bf16", "sampler"),
        ("--actor_lora_dim 2", 1, "bf16", "trainer"),
        ("--generation_engine eager", 1, "bf16", "trainer"),
        ("--generation_engine static", 1, "bf16", "trainer"),
        ("--old_log_probs trainer", 1, "bf16", "trainer"),
        ("--old_log_probs sampler", 1, "fp32", "sampler"),
    ],
)
def test_a_run_on_a_gpu_takes_the_samplers_where_nothing_speaks_against_it(folder, words, ranks, dtype, expected):
    config = config_of(folder, words, ranks)
    assert old_log_probs(config, models_of(config, {})[0], dtype, ranks) == expected


def test_a_plan_has_the_pass_that_its_run_makes(folder):
    passes = {
        whose: [one for one in needs(config_of(folder, words), {}, "bf16", 1).phases["score"] if one.role == "actor"]
        for whose, words in {"auto": "", "trainer": "--old_log_probs trainer", "no": "--top_k 5"}.items()
    }
    assert [len(passes[whose]) for whose in ("auto", "trainer", "no")] == [0, 1, 1]


def test_on_a_cpu_it_is_the_trainers(folder):
    config = config_of(folder, "")
    device = torch.device("cpu")
    assert old_log_probs(config, models_of(config, {})[0], "bf16", 1, device) == "trainer"


def test_a_run_writes_down_what_it_has_decided_and_holds_it(folder, tmp_path):
    words = [
        *("--actor_model_name_or_path", folder / "base", "--critic_model_name_or_path", folder / "scorer"),
        *("--data_path", folder / "train.jsonl", "--data_output_path", folder / "cache", "--dtype", "fp32"),
        *("--max_prompt_seq_len", 48, "--max_answer_seq_len", 8, "--max_steps", 1, "--output_dir", tmp_path / "out"),
        *("--per_device_train_batch_size", 4),
    ]
    words = [str(word) for word in words]
    with undone_afterwards():
        assert main(words) == 0
    run = tmp_path / "out/runs/ppo"
    decided = json.loads((run / "config.json").read_text())["old_log_probs"]
    assert (decided["value"], decided["from"]) == ("trainer", "--old_log_probs auto")
    # As of a run on a GPU, whose done.json and checkpoint say so.
    done = json.loads((run / "done.json").read_text())
    done["settings"]["old_log_probs"] = "sampler"
    (run / "done.json").write_text(json.dumps(done))
    resolved = read_flags(STAGE, words)
    assert (
        resolved.config.ppo.old_log_probs == "sampler" and resolved.origins["old_log_probs"] == "--old_log_probs auto"
    )
    given = read_flags(STAGE, [*words, "--old_log_probs", "trainer"])
    assert given.config.ppo.old_log_probs == "trainer" and given.origins["old_log_probs"] == "command line"
    afresh = read_flags(STAGE, [*words, "--resume", "never"])
    assert afresh.config.ppo.old_log_probs == "auto"
