"""Responses that are empty, never end or end at once, on one rank or on all: PPO goes on with finite numbers (R10).

Two ranks: where they did not make the same number of collective calls, the run would hang or fail.
"""

import json
import os
from functools import partial
from pathlib import Path

import pytest
import torch
from stage_runs import Story, metrics, start
from support.forks import exit_code
from support.marks import rare_but
from transformers import AutoTokenizer

EOS, WORD = 2, 70
LENGTH = 12  # max_answer_seq_len of start_flags


def always_draw(token: int, *, rank: str) -> None:
    """In this rank's process every token that is sampled is `token`; rank "all": in every process."""
    if rank in ("all", os.environ.get("RANK", "0")):
        import pipeline.generation.eager

        def drawn(logits: torch.Tensor, uniform: torch.Tensor) -> torch.Tensor:
            return torch.full((len(logits),), token)

        pipeline.generation.eager.draw = drawn


TWO = ("--per-device-generation-batch-size", 4, "--gradient-accumulation-steps", 1, "--eval-interval", 0)


def run(folder: Path, out: str, token: int, rank: str, *more: object) -> list[dict[str, float]]:
    """The lines of updates of a run on two ranks; it came to its end with finite losses."""
    story = Story("ppo", folder, steps=8, ranks=2, more=(*TWO, *more))
    assert exit_code(start(story, out, first=partial(always_draw, token, rank=rank))) == 0
    lines = [line for line in metrics(story.run_dir(out)) if "loss/policy" in line]
    assert len(lines) == 8 and lines[-1]["skipped_updates"] == 0
    for line in lines:
        assert all(line[name] is not None for name in ("loss/policy", "loss/value", "actor/grad_norm"))
    return [line for line in lines if "completions/mean_length" in line]


@pytest.mark.parametrize("rank", rare_but(["all"], ["all", "1"]))
def test_an_eos_at_once(folder, rank):
    (first, _) = run(folder, f"eos-{rank}", EOS, rank)
    if rank == "all":
        assert first["completions/mean_length"] == 1.0 and first["completions/empty_fraction"] == 1.0
        log = Story("ppo", folder).run_dir("eos-all") / "log.txt"
        assert "an EOS alone" in log.read_text()
    else:
        assert 1.0 < first["completions/mean_length"] < LENGTH and first["completions/empty_fraction"] >= 0.5


@pytest.mark.faults
@pytest.mark.parametrize("rank", ["0", "1"])
def test_responses_that_never_end(folder, rank):
    (first, _) = run(folder, f"endless-{rank}", WORD, rank)
    assert first["completions/truncated_fraction"] >= 0.5


@pytest.mark.faults
@pytest.mark.parametrize("token", [EOS, WORD])
def test_a_padding_token_that_is_the_eos(folder, tmp_path, token):
    """The masks come from lengths: the real EOS is rewarded and trained."""
    for name in ("base", "scorer"):
        (tmp_path / name).mkdir()
        for file in (folder / name).iterdir():
            (tmp_path / name / file.name).write_bytes(file.read_bytes())
        tokenizer = AutoTokenizer.from_pretrained(tmp_path / name)
        tokenizer.pad_token = tokenizer.eos_token
        tokenizer.save_pretrained(tmp_path / name)
        assert json.loads((tmp_path / name / "tokenizer_config.json").read_text())["pad_token"] == "</s>"
    paths = ("--actor-model-name-or-path", tmp_path / "base", "--critic-model-name-or-path", tmp_path / "scorer")
    (first, _) = run(folder, f"pad-{token}", token, "1", *paths)
    assert first["completions/mean_length"] > 1.0
