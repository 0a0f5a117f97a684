"""A run that is killed at any moment, and started again, ends as one that was not: to the last bit and line.

What docs/why/reliability.md promises. The comparison covers all metrics but times, weights, AdamW's moments, the
moving average, loss scales, counters, samples.jsonl and the curves that TensorBoard shows.
"""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from stage_runs import Story, chain, kill_and_compare, regroup, stop_and_compare
from support.marks import rare_but, slow

Work = Callable[[Story, int, int], dict[str, Any]]


@pytest.fixture
def folder(folder: Path, tmp_path: Path) -> Path:
    for path in folder.iterdir():
        (tmp_path / path.name).symlink_to(path)
    return tmp_path


def tell(
    work: Work, stage: str, folder: Path, *, count: int, seed: int = 0, ranks: int = 1, steps: int = 8, more: str = ""
) -> dict[str, Any]:
    """Findings of one of the works of stage_runs.py."""
    return work(Story(stage, folder, steps=steps, ranks=ranks, more=tuple(more.split())), count, seed)


def check(found: dict[str, Any]) -> None:
    print(found)
    assert found["wrong"] == []
    assert found["killed"] == found["runs"], "the runs were alive when the signal came"


@pytest.mark.parametrize(
    ("stage", "count"), [("sft", 1), slow(("sft", 5)), slow(("reward", 3)), slow(("ppo", 5)), slow(("dpo", 3))]
)
def test_a_killed_run_goes_on_exactly(folder, stage, count):
    check(tell(kill_and_compare, stage, folder, count=count))


REWARDS = """
def length(completions):
    return [float(len(text) > 14) for text in completions]
"""
METHODS = {
    "grpo": "--num-samples-per-prompt 4 --replace-equal-groups true",
    "rloo": "--num-samples-per-prompt 2 --reward-scaling running",
    "reinforce_pp": "--reward-scaling batch",
    # VC-PPO and more; the critic's first steps end within a rollout.
    "ppo": "--num-samples-per-prompt 4 --group-baseline true --critic-warmup-steps 3 --returns-lambda 1 "
    "--entropy-coef 0.01 --policy-clip-high 0.28 "
    "--loss-aggregation sequence_mean --reward-function {folder}/rewards.py:length",
}


@pytest.mark.parametrize("method", rare_but(["grpo"], METHODS))
def test_a_killed_run_whose_reward_is_a_function_goes_on_exactly(folder, method):
    (folder / "rewards.py").write_text(REWARDS)
    story = Story("ppo", folder, method=method, more=tuple(METHODS[method].format(folder=folder).split()))
    check(kill_and_compare(story, 2, 7))


@pytest.mark.faults
def test_a_run_that_is_stopped_within_a_step_goes_on_exactly(folder):
    """SIGTERM while it samples, between micro-batches, in evaluations: what is half done is dropped and made again."""
    found = tell(stop_and_compare, "ppo", folder, count=5, more="--gradient-accumulation-steps 4 --ppo-epochs 4")
    check(found)
    assert found["longest_stop_s"] < max(10.0, found["run_s"])


@pytest.mark.faults
@pytest.mark.parametrize(("stage", "ranks"), [("sft", 1), ("reward", 1), ("ppo", 1), ("ppo", 2), ("dpo", 1)])
def test_stopped_at_twenty_random_moments(folder, stage, ranks):
    more = "--per-device-generation-batch-size 4 --gradient-accumulation-steps 1" if ranks == 2 else ""
    found = tell(stop_and_compare, stage, folder, count=20, seed=6, ranks=ranks, more=more)
    check(found)
    assert found["longest_stop_s"] < max(10.0, found["run_s"])


@pytest.mark.faults
def test_killed_again_and_again(folder):
    check(tell(chain, "ppo", folder, count=3))


@pytest.mark.faults
@pytest.mark.parametrize("stage", ["sft", "reward", "ppo", "dpo"])
def test_fifty_random_moments(folder, stage):
    check(tell(kill_and_compare, stage, folder, count=50, seed=1))


@pytest.mark.faults
def test_lora_actor(folder):
    more = "--actor-lora-dim 4 --critic-lora-dim 4 --save-steps 3"
    check(tell(kill_and_compare, "ppo", folder, count=10, seed=2, more=more))


@pytest.mark.faults
@pytest.mark.parametrize("stage", ["sft", "ppo"])
def test_checkpoints_in_the_background(folder, stage):
    check(tell(kill_and_compare, stage, folder, count=10, seed=5, more="--save-in-background true"))


@pytest.mark.faults
def test_ten_kills_in_one_run(folder):
    check(tell(chain, "ppo", folder, count=10, seed=3, steps=24))


@pytest.mark.faults
@pytest.mark.parametrize("zero_stage", range(4))
def test_two_ranks(folder, zero_stage):
    more = f"--actor-zero-stage {zero_stage} --critic-zero-stage {zero_stage} --per-device-generation-batch-size 4"
    more += " --gradient-accumulation-steps 1"
    check(tell(kill_and_compare, "ppo", folder, count=5, seed=4, ranks=2, more=more))


@pytest.mark.slow
def test_another_number_of_ranks_and_zero_stage(folder):
    """Two updates of a rollout on two ranks, the other two on one: on the stored rollout, up to rounding."""
    found = tell(regroup, "ppo", folder, count=1)
    assert found["whole"] and found["worst"] < 1e-6, found
