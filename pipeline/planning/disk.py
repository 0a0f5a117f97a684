"""Count the disk space of a stage for models, checkpoints and offload to NVMe, and the host memory of a checkpoint."""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from pipeline.configuration.ds_config import Json, is_on_nvme
from pipeline.configuration.groups import OptimizerStates
from pipeline.configuration.run_flags import RunConfig
from pipeline.files import GIB, free_bytes
from pipeline.planning.measurement import ModelSize, model_size
from pipeline.planning.memory import MemoryPlan
from pipeline.planning.needs import ModelUse
from pipeline.planning.states import FP32, MOMENTS, state_bytes


@dataclass(frozen=True, slots=True)
class Outputs:
    """Bytes of a stage's outputs.

    models: bytes of each model folder, in the order of the stage's outputs.
    checkpoint: bytes of fp32 weights and moments, and of moving averages.
    num_checkpoints: most checkpoints that exist at a time.
    """

    models: Sequence[int]
    checkpoint: int
    num_checkpoints: int


def outputs(models: Sequence[ModelUse], dtype: str, run: RunConfig, *, saves_adapters: bool) -> Outputs:
    """Count the outputs of a stage that holds `models` and trains in `dtype`; saves_adapters: --save-adapter-only.

    Raises:
        InputError, EnvironmentFault: see `model_size`.
    """
    whole, averages, checkpoint = list[int](), list[int](), 0
    for use in models:
        if not use.trained:
            continue
        size, copies = model_size(use, dtype), 2 if use.averaged else 1
        element = size.element if run.save_dtype == "auto" else FP32 if run.save_dtype == "fp32" else FP32 // 2
        only_adapter = saves_adapters and not use.has_values or use.settings.quantization != "none"
        whole.append((size.trained if only_adapter else size.weights) * element)
        averages += whole[-1:] if use.averaged else []
        checkpoint += size.trained * (FP32 * copies + MOMENTS)
    num_checkpoints = run.keep_checkpoints and 1 + (run.keep_checkpoints if run.save_steps else 0)
    return Outputs([*whole, *averages], checkpoint, num_checkpoints)


def with_checkpoint(
    plan: MemoryPlan, models: Sequence[ModelUse], engines: Mapping[str, Json], run: RunConfig, moments: OptimizerStates
) -> MemoryPlan:
    """Return the plan with the host memory for writing a checkpoint, on the machine of rank 0.

    `--save-in-background` copies the checkpoint to host memory: each rank its partition, and rank 0 everything that is
    not partitioned. 8-bit moments are always converted to fp32 on the host. On a CPU, a process's own share counts in
    its phases, and rank 0's other tensors count for the machine.
    """
    background, share_of_each, machine = run.save_in_background, 0, 0  # the numbers: bytes of each process, and of all
    for use in models if run.keep_checkpoints else ():
        if not use.trained:
            continue
        size, engine = plan.sizes[use.role], engines[use.role]
        stage, share = engine["zero_optimization"]["stage"], -(-size.trained // plan.ranks)
        state = int(sum(state_bytes(size, engine, "fp32"))) if background else 0
        each = state + (MOMENTS if moments == "8bit" else 0)
        average = FP32 if background and use.averaged else 0
        for num_bytes, lowest in ((each, 1), (average, 3)):  # bytes a weight, the lowest ZeRO stage that partitions it
            elements, writers = (share, plan.per_host) if stage >= lowest else (size.trained, 1)
            share_of_each += num_bytes * elements if writers == plan.per_host else 0
            machine += num_bytes * elements * writers
    if plan.on_cpu:
        phases = {name: replace(peak, states=peak.states + share_of_each) for name, peak in plan.phases.items()}
        return replace(
            plan, phases=phases, host=plan.host + machine - share_of_each * plan.per_host, checkpoint=machine
        )
    return replace(plan, host=plan.host + machine, checkpoint=machine)


def nvme_files(
    sizes: Mapping[str, ModelSize], engines: Mapping[str, Json], *, ranks: int, per_host: int
) -> dict[Path, int]:
    """Return the bytes of DeepSpeed's files in each folder of NVMe on a machine, for all models and processes there.

    Weights have their own dtype; a tied head counts again, since it is written before it is tied. Master weights,
    moments and gradients are fp32. Tensors below 1 MiB are included, though DeepSpeed keeps them in memory.

    Args:
        sizes, engines: sizes and DeepSpeed JSONs of a stage's models, by role.
        per_host: processes of a machine.
    """
    taken: dict[Path, int] = {}
    for role, size in sizes.items():
        zero, shares = engines[role]["zero_optimization"], list[tuple[Path, int]]()
        if is_on_nvme(engines[role], "offload_param"):
            # With several models, each has its own folder below the given one.
            folder = Path(zero["offload_param"]["nvme_path"])
            whole = size.num_bytes + size.tied * size.element
            shares.append((folder.parent if len(sizes) > 1 else folder, whole))
        if is_on_nvme(engines[role], "offload_optimizer"):
            shares.append((Path(zero["offload_optimizer"]["nvme_path"]), (2 * FP32 + MOMENTS) * size.trained))
        for folder, whole in shares:
            taken[folder] = taken.get(folder, 0) + -(-whole // ranks) * per_host
    return taken


def earlier_files(folder: Path) -> Iterator[Path]:
    """Yield the files that earlier runs left in a folder of NVMe; a run deletes them when it starts."""
    for below in ("", "*/"):  # the second if several models have a folder each
        yield from folder.glob(f"{below}zero_stage_3/*/rank*/*.tensor.swp")


def without_room(files: Mapping[Path, int]) -> Iterator[str]:
    """Yield a line for each folder of this machine with too little space, counting earlier runs' files as free."""
    for folder, size in files.items():
        room = free_bytes(folder) + sum(file.stat().st_size for file in earlier_files(folder))
        if size > room:
            fault = f"{folder} (NVMe) has room for {room / GIB:.2f} of {size / GIB:.2f} GiB"
            yield f"{fault}: free some, or give an nvme_path on another disk"
