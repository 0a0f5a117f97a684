"""Other columns of the prompts on resume: they are compared where a reward reads them, and nowhere else."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from support.messages import naming
from support.tiny_run import write_lines

from pipeline.checkpoints import checkpoint
from pipeline.configuration.flags import parse
from pipeline.errors import InputError
from pipeline.rewards.rows import Scale, ScoredRows
from pipeline.run.run import Run, StopRequest
from step3_ppo import build as building
from step3_ppo.config import PPOConfig
from step3_ppo.stage import STAGE
from step3_ppo.state import State, checkpoint_content

FOLDER_SIZES = {"num_train": 12}
CHANGED = "columns of prompts: got content [0-9a-f]{12}, .* content [0-9a-f]{12}"


class Answers:
    """A reward that reads the column `answer`."""

    name, weight, scale, reads_columns = "answers", 1.0, Scale(0.0, 1.0), True

    def score(self, rows: ScoredRows) -> torch.Tensor:
        return torch.tensor([float(row.extra["answer"]) for row in rows])


@pytest.fixture
def resumes(world, folder: Path, tmp_path: Path, monkeypatch) -> Callable[..., bool]:
    """Build a run on prompts with this column `answer` (None: without it), and say whether a checkpoint was taken."""
    rows = [json.loads(line) for line in (folder / "train.jsonl").open()]
    make_models = building.make_models

    def built(answers: list[int] | None, *, reads: bool, saves: bool = False, force: bool = False) -> bool:
        columns: list[dict[str, Any]] = [{"answer": answer} for answer in answers] if answers else [{}] * len(rows)
        prompts = ({"prompt": row["prompt"], **more} for row, more in zip(rows, columns, strict=True))
        write_lines(tmp_path / "prompts.jsonl", prompts)
        flags = {
            "actor_model_name_or_path": folder / "base", "critic_model_name_or_path": folder / "scorer",
            "data_path": tmp_path / "prompts.jsonl", "data_split": "none", "eval_fraction": 0.25,
            "data_output_path": tmp_path / "cache", "dtype": "fp32", "max_steps": 4,
            "max_prompt_seq_len": 48, "max_answer_seq_len": 12,
            "per_device_train_batch_size": 2, "per_device_generation_batch_size": 4,
            "output_dir": tmp_path / "out", "force_resume": force,
        }  # fmt: skip
        words = [str(word) for name, value in flags.items() for word in (f"--{name}", value)]
        run = Run(world, tmp_path, STAGE, parse(PPOConfig, words, section="ppo"), StopRequest())

        def make(*parts: Any) -> Any:
            models = make_models(*parts)
            if reads:
                models.rewards.append(Answers())
            return models

        monkeypatch.setattr(building, "make_models", make)
        ppo, resumed = building.build(run, run.resolved.config)
        if saves:
            saver = checkpoint.Saver(run, ppo.fingerprint, keep=1, background=False)
            saver.save(checkpoint_content(ppo, State(), None), step=1)
        return resumed is not None

    return built


@pytest.mark.slow
def test_changed_columns_refuse_to_resume_only_where_a_reward_reads_them(resumes):
    answers = list(range(12))
    assert not resumes(answers, reads=False, saves=True)
    assert resumes([*answers[:-1], 77], reads=False), "nothing of the run depends on them"
    with pytest.raises(InputError, match=CHANGED):
        resumes([*answers[:-1], 77], reads=True)
    with pytest.raises(InputError, match=naming("columns of prompts ... None ... checkpoint")):
        resumes(None, reads=True)
    assert resumes([*answers[:-1], 77], reads=True, force=True)
    assert resumes(answers, reads=True), "the checkpoint has their hash though its run did not read them"


def test_columns_that_the_checkpoint_does_not_have_refuse_to_resume_where_a_reward_reads_them(resumes):
    assert not resumes(None, reads=False, saves=True)
    assert resumes(list(range(12)), reads=False) and resumes(None, reads=True)
    with pytest.raises(InputError, match=naming("columns of prompts ... checkpoint has None")):
        resumes(list(range(12)), reads=True)
