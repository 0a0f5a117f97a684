"""Step 2 over ranks: what tests/multi/test_ranks_reward.py compares."""

from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any
from unittest.mock import patch

import torch
from stages import (
    PARTIAL_STEP,
    ROWS_PER_STEP,
    Words,
    make_run,
    read_back,
    supervised_words,
    training_rows,
    watched_steps,
)
from support.bare_control import bare_control
from torch.nn.functional import logsigmoid
from transformers import AutoModelForSequenceClassification

from pipeline import dist
from pipeline.data.batching import PairBatch
from pipeline.data.loader import Step
from pipeline.models.partitions import gathered
from pipeline.rendezvous import num_ranks
from step2_reward import training
from step2_reward.config import RewardConfig
from step2_reward.pair_scores import score_pairs, score_statistics, summary


def take_step(reward: training.Reward, step: Step[PairBatch], state: training.State) -> float:
    """One pass of the loop's body; the loss of a pair."""
    loss = training.accumulate_gradients(reward, step, state, bare_control(reward.run, reward.engine))
    stepped = training.step_together([reward.engine], reward.rate(state.step), loss=loss)
    state.count_step(stepped=stepped, engines=[reward.engine])
    return loss / step.num_rows


def setup(inputs: Path, micro: int, words: Words = ()) -> training.Reward:
    """Everything of a run at a constant rate."""
    held_out = ("--eval-data-path", inputs / "test.jsonl", "--per-device-eval-batch-size", 3)
    run = make_run(RewardConfig, "reward", [*supervised_words(inputs, micro), *held_out, *words])
    return replace(training.build(run, run.resolved.config), rate=lambda step: 1.0)


def steps(inputs: Path, micro: int, words: Words = (), *, first: int = 0, count: int = 3) -> dict[str, Any]:
    """Evaluation before, losses and norms of some steps, all gradients of the first one, and the fresh head."""
    reward = setup(inputs, micro, words)
    scores = score_pairs(reward.engine, reward.held_out(3), reward.run.world.device)
    state = training.State(step=first)
    seen: list[Any] = []
    losses, norms = [], []
    head = next(p for name, p in reward.engine.module.named_parameters() if "score" in name and p.requires_grad)
    with gathered([head]):
        fresh_head = head.detach().clone()
    with watched_steps(training, seen):
        for _ in range(count):
            losses.append(take_step(reward, reward.loader.step(state.step), state))
            norms.append(reward.engine.last_gradient_norm)
    return {
        "losses": losses,
        "norms": norms,
        "gradients": seen[0][0],
        "head": fresh_head,
        "scores": {"chosen": scores.chosen, "rejected": scores.rejected},
        "summary": summary(scores),
    }


def exact(inputs: Path, step: int) -> dict[str, Any]:
    """The mean pair loss of a step by transformers alone, row by row, and its gradients."""
    reward = setup(inputs, ROWS_PER_STEP // dist.world_size())
    model = AutoModelForSequenceClassification.from_pretrained(inputs / "base", dtype=torch.float32, num_labels=1)
    model.eval().score.weight.data.copy_(reward.engine.module.model.score.weight)
    rows = training_rows(reward.loader, step)
    total = torch.zeros((), dtype=torch.float64)
    for row in rows:
        sides = [model(torch.tensor([row[name]])).logits[0, 0] for name in ("chosen_ids", "rejected_ids")]
        loss = -logsigmoid(sides[0] - sides[1]) / len(rows)
        loss.backward()
        total += loss.detach().double()
    found = {f"model.{name}": p.grad for name, p in model.named_parameters() if p.grad is not None}
    return {"losses": [total.item()], "gradients": found, "rows": len(rows)}


def saved(inputs: Path, micro: int, words: Words) -> dict[str, Any]:
    """What was written after one step, as read from disk."""
    reward = setup(inputs, micro, words)
    state = training.State()
    take_step(reward, reward.loader.step(0), state)
    state.score_mean, state.score_std = score_statistics(
        score_pairs(reward.engine, reward.held_out(3), reward.run.world.device)
    )
    training.save(reward, state)
    model, found = read_back(AutoModelForSequenceClassification, Path(reward.config.run.output_dir))
    return found | {"statistics": [model.config.score_mean, model.config.score_std]}


def some_held_out(inputs: Path) -> dict[str, Any]:
    """Pairs of an evaluation in one batch of three pairs on each rank, whatever batch it is made in."""
    reward = setup(inputs, 2, ("--eval-iters", 1))
    scores = [score_pairs(reward.engine, reward.held_out(size), reward.run.world.device) for size in (3, 1)]
    return {"rows": [summary(found)["eval_rows"] for found in scores]}


def last_pairs(inputs: Path) -> dict[str, Any]:
    """Scores of the last five pairs to train on, of all ranks."""
    reward = setup(inputs, 2)
    with patch.object(training, "SCORED_PAIRS", 5):
        batches = training.last_training_pairs(reward, training.State())
    scores = score_pairs(reward.engine, batches, reward.run.world.device)
    return {"chosen": sorted(map(float, scores.chosen)), "rejected": sorted(map(float, scores.rejected))}


def cases() -> dict[str, Any]:
    per_rank = ROWS_PER_STEP // num_ranks()
    found: dict[str, Any] = {"exact": partial(exact, step=0), "exact partial": partial(exact, step=PARTIAL_STEP)}
    found["some held out"] = some_held_out
    found["last pairs"] = last_pairs
    for stage in range(4):
        here = ("--zero-stage", stage)
        for micro in (per_rank, 2, 1):
            found[f"z{stage} m{micro}"] = partial(steps, micro=micro, words=here)
        found[f"z{stage} partial"] = partial(steps, micro=2, words=here, first=PARTIAL_STEP)
        found[f"z{stage} bf16"] = partial(steps, micro=2, words=(*here, "--dtype", "bf16"))
    for stage in (0, 3):
        here = ("--zero-stage", stage)
        for name, words in {
            "lora": ("--lora-dim", 4),
            "recomputed": ("--gradient-checkpointing",),
            "per token": ("--reward-loss", "per_token"),
            "centred": ("--centering-coef", 0.01),
        }.items():
            found[f"z{stage} {name}"] = partial(steps, micro=2, words=(*here, *words))
        found[f"z{stage} saved"] = partial(saved, micro=2, words=here)
        found[f"z{stage} saved lora"] = partial(saved, micro=2, words=(*here, "--lora-dim", 4))
    whole = ("--zero-stage", 3, "--deepspeed-config", "")
    found["z3 unpartitioned"] = partial(steps, micro=2, words=whole)
    found["z3 unpartitioned saved lora"] = partial(saved, micro=2, words=(*whole, "--lora-dim", 4))
    for stage in (1, 2, 3):
        found[f"z{stage} offload"] = partial(steps, micro=2, words=("--zero-stage", stage, "--offload"))
    return found
