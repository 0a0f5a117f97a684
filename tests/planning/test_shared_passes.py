"""Passes whose rows share their prompts: the plan counts what passes, for the shapes that a run would form."""

import math
from itertools import chain
from typing import Any

import pytest
import torch

from benchmarks.speed.planned import PlannerWithoutSharing, planner_of
from pipeline.dist import World
from pipeline.files import GIB
from pipeline.planning.needs import Pass
from pipeline.planning.page import StagePlanner
from pipeline.training.micro_batches import Lengths, micro_batches, scoring_batches

GRPO = (
    "--method grpo --actor-model-name-or-path qwen2.5-1.5b --num-samples-per-prompt 8 --reward-function exact_match "
    "--preset launch/presets/1b.yaml --per-device-generation-batch-size 16 --generation-batches 1 "
)
MICRO_32 = "--per-device-train-batch-size 32 --gradient-accumulation-steps 4"


def passes(words: str, planner: type[StagePlanner] = StagePlanner, target: str = "1xH200") -> dict[str, list[Pass]]:
    one, resolved = planner_of("ppo", GRPO + words, target, planner)
    return dict(one.needs(resolved).phases)


@pytest.mark.parametrize(
    ("words", "shared"),
    [
        (MICRO_32, 28 * 256),  # four groups of eight
        ("--per-device-train-batch-size 4 --gradient-accumulation-steps 32", 3 * 256),  # half a group
        (f"{MICRO_32} --ppo-epochs 2", 0),  # the second epoch shuffles
        (f"{MICRO_32} --actor-attn-implementation eager", 0),
        (f"{MICRO_32} --dtype fp32", 0),
        (f"{MICRO_32} --dtype fp16", 0),  # a V100 has no kernel for it
        (f"{MICRO_32} --num-samples-per-prompt 2 --per-device-generation-batch-size 64", 16 * 256),
    ],
)
def test_a_training_pass_shares_the_prompts_of_its_groups(words: str, shared: int):
    (train,) = passes(f"{words} --max-prompt-seq-len 256 --max-answer-seq-len 256")["train"]
    assert train.shared == shared and bool(train.copied) == bool(shared)
    # Qwen2.5-1.5B: 28 layers of 2 heads of keys and values, 128 wide, in bf16.
    assert train.copied == shared * 28 * 2 * 2 * 128 * 2


def test_with_checkpointing_the_copies_of_a_layer_are_held():
    (train,) = passes(f"{MICRO_32} --actor-gradient-checkpointing true")["train"]
    assert train.copied == train.shared * 2 * 2 * 128 * 2 > 0


def scoring(prompt: int, answer: int) -> int:
    """Tokens that the plan lets pass through the reference, with a batch of 128 rows."""
    found = passes(f"{MICRO_32} --log-kl true --max-prompt-seq-len {prompt} --max-answer-seq-len {answer}")
    one = found["score"][-1]
    assert one.role == "reference" and one.shared
    return one.rows * one.length - one.shared


@pytest.mark.parametrize(("prompt", "answer"), [(256, 256), (64, 700), (900, 40)])
@pytest.mark.parametrize("most_prompt", [1.0, 0.1])
@pytest.mark.parametrize(("micro", "rows"), [(4, 96), (8, 96), (12, 96), (32, 96), (12, 36), (12, 60), (18, 36)])
def test_no_micro_batch_passes_more_than_the_plan_counts(prompt, answer, most_prompt, micro, rows):
    """Also where all prompts but one are short, or all answers but one, and steps that end within a group of eight."""
    steps = rows // micro
    prompts_at_once = rows // math.gcd(rows, 8)
    words = (
        f"--max-prompt-seq-len {prompt} --max-answer-seq-len {answer} "
        f"--per-device-generation-batch-size {prompts_at_once} "
        f"--per-device-train-batch-size {micro} --gradient-accumulation-steps {steps}"
    )
    (planned,) = passes(words)["train"]
    limit = planned.rows * planned.length - planned.shared
    short = max(1, int(prompt * most_prompt))
    for answers in ([answer] * rows, [answer] + [max(1, answer // 9)] * (rows - 1)):
        count = 8 * prompts_at_once
        prompts = [prompt] * 8 + [short] * (count - 8)
        answers = (answers * 8)[:count]
        lengths = Lengths(prompts, answers, unit=32, packs=True, groups=[row // 8 for row in range(count)])
        world = World(0, 1, torch.device("cpu"))
        for batch in chain(*micro_batches(range(count), lengths, rows_per_step=rows, world=world, size=micro)):
            assert (batch.num_packed_tokens or batch.num_tokens) <= planned.rows * planned.length
            if batch.shared:
                assert batch.num_tokens <= limit
    scored = Lengths(prompts, [answer] * count, unit=32, packs=True, groups=[row // 8 for row in range(count)])
    most = scoring(prompt, answer)
    for batch in scoring_batches(scored, world=world):
        assert not batch.shared or batch.num_tokens <= most


# Peaks of training in GiB and seconds of training on one H200 with random weights, by default settings but for the
# rows of a micro-batch, which the runs chose (raw/shared_prompts_h200_202611.jsonl.bz2). The plan that chose them
# stored the logits of the first alone.
MEASURED = [(512, True, 67.58, 1.38, 95.06, 2.206), (1024, False, 69.93, 1.64, 124.51, 3.326)]


@pytest.mark.parametrize(("prompt", "stores", "gib", "seconds", "gib_before", "seconds_before"), MEASURED)
def test_memory_and_time_of_measured_runs(prompt, stores, gib, seconds, gib_before, seconds_before):
    words = f"{GRPO} {MICRO_32} --max-prompt-seq-len {prompt} --max-answer-seq-len 512"

    def found(planner: type[StagePlanner]) -> tuple[float, float]:
        one, resolved = planner_of("ppo", words, "1xH200", planner)
        plan: Any = one.counted(resolved, stores_logits=stores)
        return plan.phases["train"].total / GIB, one.seconds(resolved, plan)["train"]

    for measured, planned in (
        ((gib, seconds), found(StagePlanner)),
        ((gib_before, seconds_before), found(PlannerWithoutSharing)),
    ):
        assert planned[0] == pytest.approx(measured[0], rel=0.05)
        assert planned[1] == pytest.approx(measured[1], rel=0.20)
