"""Step 1 over ranks: what tests/multi/test_ranks_sft.py compares."""

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import torch
from deepspeed.runtime.zero import partition_parameters
from pytest import MonkeyPatch
from stages import (
    PARTIAL_STEP,
    ROWS_PER_STEP,
    Words,
    current_world,
    make_run,
    read_back,
    supervised_words,
    training_rows,
    watched_steps,
    weights,
)
from support.bare_control import bare_control
from support.ds_arguments import zero_file
from transformers import AutoModelForCausalLM

from pipeline import dist
from pipeline.data.batching import SFTBatch
from pipeline.data.loader import Step
from pipeline.engine.moving_average import MovingAverage
from pipeline.models.source import ModelSource
from pipeline.rendezvous import num_ranks
from pipeline.training.steps import note_skipped_step
from step1_sft import training
from step1_sft.config import SFTConfig


def take_step(sft: training.SFT, step: Step[SFTBatch], state: training.State) -> float:
    """One pass of the loop's body; the loss of a trained token."""
    loss = training.accumulate_gradients(sft, step, state, bare_control(sft.run, sft.engine))
    stepped = training.step_together([sft.engine], sft.rate(state.step), loss=loss)
    state.count_step(stepped=stepped, engines=[sft.engine])
    if not stepped:
        note_skipped_step(sft.run, state, rows=step.rows, input_ids=[], cause="not finite")
    return loss / step.num_trained


def setup(inputs: Path, micro: int, words: Words = ()) -> training.SFT:
    """Everything of a run at a constant rate, with `micro` rows a micro-batch and ROWS_PER_STEP rows a step."""
    run = make_run(SFTConfig, "sft", [*supervised_words(inputs, micro), "--eval-fraction", 0, *words])
    return replace(training.build(run, run.resolved.config), rate=lambda step: 1.0)


def steps(inputs: Path, micro: int, words: Words = (), *, first: int = 0, count: int = 3) -> dict[str, Any]:
    """Losses and gradient norms of some steps, and all gradients of the first one."""
    sft = setup(inputs, micro, words)
    state = training.State(step=first)
    seen: list[Any] = []
    losses, norms = [], []
    with watched_steps(training, seen):
        for _ in range(count):
            losses.append(take_step(sft, sft.loader.step(state.step), state))
            norms.append(sft.engine.last_gradient_norm)
    return {"losses": losses, "norms": norms, "gradients": seen[0][0], "skipped": state.skipped_updates}


def exact(inputs: Path, step: int) -> dict[str, Any]:
    """The mean over a step's trained tokens by transformers alone, row by row, and its gradients."""
    sft = setup(inputs, ROWS_PER_STEP // dist.world_size())
    model = AutoModelForCausalLM.from_pretrained(inputs / "base", dtype=torch.float32).eval()
    units = training_rows(sft.loader, step)
    count = sum(sum(row["trained"]) for row in units)
    total = torch.zeros((), dtype=torch.float64)
    for row in units:
        ids, trained = torch.tensor([row["ids"]]), torch.tensor(row["trained"][1:])
        log_probs = torch.log_softmax(model(ids).logits[0, :-1], dim=-1)
        loss = -log_probs.gather(1, ids[0, 1:, None])[:, 0][trained].sum() / count
        loss.backward()
        total += loss.detach().double()
    found = {f"model.{name}": parameter.grad for name, parameter in model.named_parameters()}
    return {"losses": [total.item()], "gradients": found, "rows": len(units)}


def bad_gradient(inputs: Path, words: Words) -> dict[str, Any]:
    """A NaN in the last rank's gradient: nothing moves, it is counted, and the next step equals that of a clean run."""
    sft = setup(inputs, 2, words)
    state, step = training.State(), sft.loader.step(0)
    before = weights(sft.engine)
    poisoned = next(p for name, p in sft.engine.module.named_parameters() if name.endswith("fc1.bias"))
    if current_world().rank == dist.world_size() - 1:
        hook = poisoned.register_hook(lambda grad: grad * float("nan"))
    take_step(sft, step, state)
    if current_world().rank == dist.world_size() - 1:
        hook.remove()
    after = weights(sft.engine)
    moved = max((before[name] - after[name]).abs().max().item() for name in before)
    skipped, bad = state.skipped_updates, state.bad_in_a_row
    seen: list[Any] = []
    with watched_steps(training, seen):
        loss = take_step(sft, step, state)
    return {
        "moved": moved,
        "counts": [skipped, bad, state.skipped_updates, state.bad_in_a_row, state.step],
        "losses": [loss],
        "norms": [sft.engine.last_gradient_norm],
        "gradients": seen[0][0],
        "weights": weights(sft.engine),
    }


def saved(inputs: Path, micro: int, words: Words) -> dict[str, Any]:
    """Weights in the folder written after one step, and its adapter, as read from disk on rank 0."""
    sft = setup(inputs, micro, words)
    state = training.State()
    take_step(sft, sft.loader.step(0), state)
    training.save(sft, state)
    model, found = read_back(AutoModelForCausalLM, Path(sft.config.run.output_dir))
    ids = torch.arange(3, 43).reshape(2, 20)
    with torch.no_grad():
        logits = model.eval()(ids).logits
    return found | {"logits": logits, "trained_logits": live_logits(sft.engine, ids)}


@torch.no_grad()
def live_logits(engine: Any, ids: torch.Tensor) -> torch.Tensor:
    with engine.generation():
        return engine.module.model(ids).logits


def with_hpz(inputs: Path, gather: str, lora: Words) -> dict[str, Any]:
    """Losses under ZeRO++'s hpZ in groups of two ranks, with a moving average saved after each step; and resumed.

    groups: ranks that each collective gathered weights over. parts: of the trained weights before a step, in how many
    each is cut in the second partition; 0 where it has none.
    """
    file = dist.on_main(lambda: zero_file(inputs, stage=3, zero_hpz_partition_size=2))
    words = ("--deepspeed-config", file, "--zero3-gather", gather, *lora)
    sft, state, losses = setup(inputs, 2, words), training.State(), []
    average = MovingAverage(sft.engine.module, decay=0.5)
    groups, parts = list[int](), list[int]()
    with second_partitions(sft, groups, parts):
        for _ in range(3):
            losses.append(take_step(sft, sft.loader.step(state.step), state))
            average.update()
            with average.swapped_in():
                weights(sft.engine)
    found = {"losses": losses, "groups": sorted(set(groups)), "parts": sorted(set(parts))}
    return found | {"resume": checkpointed(inputs, 2, words)}


@contextmanager
def second_partitions(sft: training.SFT, groups: list[int], parts: list[int]) -> Iterator[None]:
    """Note what `with_hpz` tells of the second partition."""
    gather, step = partition_parameters._dist_allgather_fn, training.step_together

    def noted_gather(own: torch.Tensor, whole: torch.Tensor, group: Any = None) -> Any:
        groups.append(whole.numel() // own.numel())
        return gather(own, whole, group)

    def noted_step(engines: Any, *given: Any, **named: Any) -> bool:
        for parameter in sft.engine.module.parameters():
            second = parameter.ds_secondary_tensor
            parts.append(0 if second is None else -(-parameter.ds_numel // second.numel()))
        return step(engines, *given, **named)

    with MonkeyPatch.context() as patch:
        patch.setattr(partition_parameters, "_dist_allgather_fn", noted_gather)
        patch.setattr(training, "step_together", noted_step)
        yield


def checkpointed(inputs: Path, micro: int, words: Words) -> dict[str, Any]:
    """Three steps; and two, a checkpoint and its model, a new engine that loads it, and the third."""
    whole = steps(inputs, micro, words)
    sft = setup(inputs, micro, words)
    state = training.State()
    for _ in range(2):
        take_step(sft, sft.loader.step(state.step), state)
    _, control = sft.resume(training.State, training.METRICS, training.SHOWN)
    control.save(state, sft.content(state), lambda: training.save(sft, state))
    fresh = replace(
        sft,
        engine=training.language_model_engine(
            sft.run, ModelSource(sft.config.model.model_name_or_path), sft.config.model
        ),
    )
    resumed, _ = fresh.resume(training.State, training.METRICS, training.SHOWN)
    loss = take_step(fresh, sft.loader.step(resumed.step), resumed)
    return {
        "uninterrupted": whole["losses"][2],
        "resumed": loss,
        "norms": [whole["norms"][2], fresh.engine.last_gradient_norm],
        "run": str(sft.run.folder),
        "model": sft.config.run.output_dir,
    }


def some_held_out(inputs: Path) -> dict[str, Any]:
    """Rows of an evaluation in two batches of one row on each rank, whatever batch it is made in; and all of them."""
    words = ("--eval-data-path", inputs / "test.jsonl", "--per-device-eval-batch-size", 1, "--eval-iters")
    some, whole = setup(inputs, 2, (*words, 2)), setup(inputs, 2, (*words, 0))
    found = [training.measure(sft, sft.held_out(size)) for sft, size in ((some, 1), (some, 3), (whole, 3))]
    return {"rows": [metrics["eval_rows"] for metrics, _ in found], "losses": [rows["eval_loss"] for _, rows in found]}


def cases() -> dict[str, Any]:
    size = num_ranks()
    per_rank = ROWS_PER_STEP // size
    found: dict[str, Any] = {"exact": partial(exact, step=0), "exact partial": partial(exact, step=PARTIAL_STEP)}
    for stage in range(4):
        for micro in (per_rank, 2, 1):
            found[f"z{stage} m{micro}"] = partial(steps, micro=micro, words=("--zero-stage", stage))
        found[f"z{stage} partial"] = partial(steps, micro=2, words=("--zero-stage", stage), first=PARTIAL_STEP)
        found[f"z{stage} bad"] = partial(bad_gradient, words=("--zero-stage", stage))
        found[f"z{stage} bf16"] = partial(steps, micro=2, words=("--zero-stage", stage, "--dtype", "bf16"))
        found[f"z{stage} bad bf16"] = partial(bad_gradient, words=("--zero-stage", stage, "--dtype", "bf16"))
        found[f"z{stage} resume"] = partial(checkpointed, micro=2, words=("--zero-stage", stage))
        bf16 = ("--zero-stage", stage, "--dtype", "bf16")
        found[f"z{stage} resume bf16"] = partial(checkpointed, micro=2, words=bf16)
    found["some held out"] = some_held_out
    lora = ("--lora-dim", 4)
    for stage in (0, 3):
        here = ("--zero-stage", stage)
        for dtype in ("fp32", "bf16"):
            words = (*here, *lora, "--dtype", dtype)
            found[f"z{stage} resume lora {dtype}"] = partial(checkpointed, micro=2, words=words)
        found[f"z{stage} lora"] = partial(steps, micro=2, words=(*here, *lora))
        found[f"z{stage} recomputed"] = partial(steps, micro=2, words=(*here, "--gradient-checkpointing"))
        found[f"z{stage} recomputed lora"] = partial(steps, micro=2, words=(*here, *lora, "--gradient-checkpointing"))
        found[f"z{stage} saved"] = partial(saved, micro=2, words=here)
        found[f"z{stage} saved lora"] = partial(saved, micro=2, words=(*here, *lora))
        found[f"z{stage} packed"] = partial(steps, micro=1, words=(*here, "--packing"))
    for stage in (1, 2, 3):
        found[f"z{stage} offload"] = partial(steps, micro=2, words=("--zero-stage", stage, "--offload"))
        found[f"z{stage} offload bad"] = partial(bad_gradient, words=("--zero-stage", stage, "--offload"))
    whole = ("--zero-stage", 3, "--deepspeed-config", "")
    found["z3 unpartitioned"] = partial(steps, micro=2, words=whole)
    found["z3 unpartitioned saved"] = partial(saved, micro=2, words=whole)
    found["z3 unpartitioned saved lora"] = partial(saved, micro=2, words=(*whole, *lora))
    found["z3 by layers"] = partial(steps, micro=2, words=("--zero-stage", 3, "--zero3-gather", "layers"))
    found["z3 offload parameters"] = partial(
        steps, micro=2, words=("--zero-stage", 3, "--offload", "--offload-parameters")
    )
    for gather in ("once", "layers"):
        found[f"z3 hpz {gather}"] = partial(with_hpz, gather=gather, lora=())
        found[f"z3 hpz {gather} lora"] = partial(with_hpz, gather=gather, lora=lora)
    return found
