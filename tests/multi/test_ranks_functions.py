"""Methods without a critic, and reward functions, give the same on 1 and 2 ranks, each of which scores its prompts."""

import json
from pathlib import Path

import pytest
from stage_runs import Story, metrics, run_well
from support.marks import rare_but

# Each call appends its rank, its prompt and its values to a file.
REWARDS = """
import json
import os, psutil
def length(prompts, completions, completion_ids, trainer_state):
    values = [float(len(text) > 14) for text in completions]
    line = [psutil.Process(os.getppid()).ppid(), trainer_state.global_step, prompts[0], completion_ids, values]
    with open(__file__ + ".calls", "a") as file:
        file.write(json.dumps(line) + "\\n")
    return values
"""
WORDS = {
    "grpo": "--num-samples-per-prompt 4 --replace-equal-groups true",
    "rloo": "--num-samples-per-prompt 2 --reward-scaling running",
    "reinforce_pp": "--reward-scaling running --eval-samples-per-prompt 2",
    "ppo": "--num-samples-per-prompt 4 --group-baseline true --critic-warmup-steps 3 --returns-lambda 1 "
    "--entropy-coef 0.01 --policy-clip-high 0.28 "
    "--loss-aggregation sequence_mean --reward-function {folder}/rewards.py:length",
}


@pytest.fixture(scope="module")
def folder(folder: Path) -> Path:
    (folder / "rewards.py").write_text(REWARDS)
    return folder


@pytest.mark.parametrize("method", rare_but(["grpo"], WORDS))
def test_one_rank_and_two(folder, method):
    """The same rollouts, of which each rank's workers have scored a part; numbers up to rounding."""
    lines, calls, file = [], [], folder / "rewards.py.calls"
    for ranks in (1, 2):
        cut = f"--rollout-batch-size 16 --gradient-accumulation-steps {4 // ranks} --actor-zero-stage 2"
        story = Story("ppo", folder, 4, ranks, (*WORDS[method].format(folder=folder).split(), *cut.split()), method)
        file.unlink(missing_ok=True)
        run_well(story, f"{method}-{ranks}")
        lines.append(metrics(story.run_dir(f"{method}-{ranks}")))
        calls.append([json.loads(line) for line in file.read_text().splitlines()])
    one, two = calls
    assert sorted(call[1:] for call in one) == sorted(call[1:] for call in two)
    assert len({call[0] for call in one}) == 1 and len({call[0] for call in two}) == 2
    assert len(lines[0]) == len(lines[1]) and any("loss/policy" in line for line in lines[0])
    for mine, theirs in zip(*lines, strict=True):
        assert mine.keys() - {"micro_batch_size"} == theirs.keys() - {"micro_batch_size"}
        for name in mine.keys() - {"micro_batch_size", "stage"}:
            assert theirs[name] == (
                pytest.approx(mine[name], rel=1e-4, abs=1e-6) if mine[name] is not None else None
            ), name
