"""An engine's state written under one ZeRO stage and read under another, by the ranks of a group: see the tests."""

from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import nn

from pipeline import dist
from pipeline.engine.engine import TrainingEngine
from pipeline.engine.fragments import FragmentReader, write_fragments
from pipeline.engine.state import counters, engine_fragments, restore_counters, restore_fragments

DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16}


def make_engine(stage: int, dtype: str) -> TrainingEngine:
    """Two layers whose sizes no number of ranks divides, in two parameter groups."""
    torch.manual_seed(0)
    module = nn.Sequential(nn.Linear(5, 7), nn.Linear(7, 3)).to(DTYPES[dtype])
    config = {
        "train_micro_batch_size_per_gpu": 1,
        "gradient_accumulation_steps": 1,
        "gradient_clipping": 1.0,
        "zero_optimization": {"stage": stage, "stage3_param_persistence_threshold": 8},
        "bf16": {"enabled": dtype == "bf16"},
        "zero_force_ds_cpu_optimizer": False,
    }
    named = list(module.named_parameters())
    groups = [
        {"params": [p for name, p in named if name.endswith(kind)], "lr": rate, "weight_decay": decay}
        for kind, rate, decay in (("weight", 1e-2, 0.1), ("bias", 3e-2, 0.0))
    ]
    return TrainingEngine(module, groups, config, betas=(0.9, 0.95), eps=1e-8)


def losses(engine: TrainingEngine, count: int) -> list[float]:
    """Losses of `count` steps, summed over ranks; each rank has rows of its own."""
    found = []
    for _ in range(count):
        rows = torch.arange(10.0).view(2, 5).sin()
        rows = rows[dist.rank() :: dist.world_size()].to(next(engine.module.parameters()).dtype)
        loss = engine(rows).float().pow(2).sum()
        engine.backward(loss * dist.world_size(), last=True)
        engine.gradient_norm()
        engine.step(1.0)
        found.append(dist.sum_over_ranks(loss.detach().double()).item())
    return found


def written(inputs: Path, stage: int, dtype: str) -> dict[str, Any]:
    """Three steps, a checkpoint that stays in `inputs`, and the losses of three more."""
    engine = make_engine(stage, dtype)
    losses(engine, 3)
    folder = inputs / f"state-{dist.world_size()}-{stage}-{dtype}"
    dist.on_main(folder.mkdir)
    write_fragments(folder / f"rank-{dist.rank()}.safetensors", list(engine_fragments(engine)))
    torch.distributed.barrier()
    return {"after": losses(engine, 3), "counters": counters(engine)["engine"]}


def read(inputs: Path, stage: int, dtype: str, origin: str, used: bool) -> dict[str, Any]:
    """The losses of three steps of an engine that reads what `written` left; `used`: it had taken a step of its own."""
    engine = make_engine(stage, dtype)
    if used:
        losses(engine, 1)
    files = sorted((inputs / f"state-{origin}-{dtype}").glob("*.safetensors"))
    restore_fragments(engine, FragmentReader(files))
    restore_counters(engine, {"scaler": {}, "engine": {"global_steps": 3}})
    return {"after": losses(engine, 3)}


def cases() -> dict[str, Any]:
    found: dict[str, Any] = {}
    origins = [f"{ranks}-{stage}" for ranks in (1, 2) for stage in range(4)]
    for dtype in DTYPES:
        for stage in range(4):
            found[f"write {stage} {dtype}"] = partial(written, stage=stage, dtype=dtype)
        for stage in range(4):
            for origin in origins:
                name = f"read {origin} {stage} {dtype}"
                found[name] = partial(read, stage=stage, dtype=dtype, origin=origin, used=origin.endswith("2"))
    return found
