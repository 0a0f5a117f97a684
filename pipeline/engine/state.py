"""The state of a training engine as fragments: fp32 weights and AdamW's moments, for every ZeRO stage.

The 16-bit weights are not stored, since they are the rounded fp32 ones. DeepSpeed's own checkpoints are not used: they
are pickles, are not written atomically, and do not detect a flipped bit.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from pipeline import dist
from pipeline.engine.eight_bit import BLOCK, moments, restore_moment, scales, start_state
from pipeline.engine.engine import TrainingEngine, loss_scaler
from pipeline.engine.fragments import Fragment, FragmentReader
from pipeline.models.partitions import local_range

MOMENTS = ("exp_avg", "exp_avg_sq")
# Counters of a DeepSpeed loss scaler, and of the DeepSpeed engine.
SCALER_FIELDS = ("cur_scale", "cur_iter", "last_overflow_iter", "cur_hysteresis")
ENGINE_FIELDS = ("global_steps", "global_samples", "micro_steps", "skipped_steps")


@dataclass(frozen=True, slots=True)
class Piece:
    """The elements of the parameter `name` from `start` on; `span` is their range in a flattened fp32 tensor."""

    name: str
    start: int
    span: slice


def masters(engine: TrainingEngine) -> list[tuple[Any, list[Piece]]]:
    """Return the fp32 tensors that an engine's AdamW updates on this rank, each with the pieces of parameters in it."""
    names = {id(parameter): name for name, parameter in engine.module.named_parameters()}
    optimizer = engine.optimizer
    if engine.partitions_weights:
        groups = zip(optimizer.fp32_partitioned_groups_flat, optimizer.fp16_groups, strict=True)
        return [(flat, stage_3_pieces(group, names)) for flat, group in groups]
    if engine.partitions_optimizer:
        groups = zip(optimizer.single_partition_of_fp32_groups, optimizer.bit16_groups, strict=True)
        return [(flat, flat_pieces(group, names)) for flat, group in groups]
    return [(tensor, [Piece(names[id(p)], 0, slice(p.numel()))]) for tensor, p in unpartitioned(optimizer)]


def is_on_disk(engine: TrainingEngine, number: int) -> bool:
    """Return whether the `number`-th of `masters` and its moments are in a file between steps (offload to NVMe)."""
    return engine.partitions_weights and engine.optimizer._swappable_optimizer_subgroup(number)


@contextmanager
def in_memory(engine: TrainingEngine, number: int) -> Iterator[None]:
    """Keep the `number`-th of `masters` and its moments in memory; changes are written back to their file."""
    if not is_on_disk(engine, number):
        yield
        return
    engine.optimizer._optimizer_states_and_gradient_swap_in(number)
    try:
        yield
    finally:
        engine.optimizer._optimizer_states_and_gradient_swap_out(number)


def swap_files(engine: TrainingEngine, master: Any) -> dict[int, str]:
    """Return the file, by the tensor's id, of each tensor of one of `masters` that DeepSpeed keeps on NVMe."""
    swapped = engine.optimizer.optimizer_swapper.swap_params_info[master.ds_id]
    return dict(zip(map(id, swapped.get_compute_tensors()), swapped.get_swap_paths(), strict=True))


def mapped(file: str, numel: int, dtype: torch.dtype) -> torch.Tensor:
    """Map the first elements of a file; only elements that are read take memory, until the tensor is released."""
    return torch.from_file(file, shared=False, size=numel, dtype=dtype)


def unpartitioned(optimizer: Any) -> Iterator[tuple[Any, Any]]:
    """Yield (fp32 tensor, parameter of the model) at ZeRO stage 0; in fp32 both are the same tensor."""
    if not hasattr(optimizer, "fp32_groups"):
        for group in optimizer.param_groups:
            yield from ((parameter, parameter) for parameter in group["params"])
        return
    for copies, group in zip(optimizer.fp32_groups, optimizer.fp16_groups, strict=True):
        yield from zip(copies, group, strict=True)


def flat_pieces(group: list[Any], names: dict[int, str]) -> list[Piece]:
    """Return the pieces of parameters in this rank's part of a flat group, for ZeRO stages 1 and 2."""
    pieces = []
    for parameter in group:
        if (mapping := parameter._hp_mapping) is not None:
            here, there = mapping.hp_fragment_address, mapping.lp_fragment_address
            span = slice(here.start, here.start + here.numel)
            pieces.append(Piece(names[id(parameter)], there.start, span))
    return pieces


def stage_3_pieces(group: list[Any], names: dict[int, str]) -> list[Piece]:
    """Return the pieces for ZeRO stage 3: each parameter is sharded equally; the last shard may end in padding."""
    pieces, offset = [], 0
    for parameter in group:
        start, numel = local_range(parameter)
        if numel:
            pieces.append(Piece(names[id(parameter)], start, slice(offset, offset + numel)))
        offset += parameter.partition_numel()
    return pieces


def engine_fragments(engine: TrainingEngine) -> Iterator[Fragment]:
    """Yield the fragments of this rank: `<kind>/<parameter>` with kinds weights, exp_avg, exp_avg_sq, step."""
    if not engine.partitions_optimizer and not dist.is_main():
        return  # all ranks have equal states
    inner = getattr(engine.optimizer, "optimizer", engine.optimizer)
    for number, (master, pieces) in enumerate(masters(engine)):
        state = inner.state.get(master, {})
        tensors = {"weights": master} | moments(state)
        files = swap_files(engine, master) if is_on_disk(engine, number) else {}
        for kind, values in scales(state).items():
            yield Fragment(scales_name(engine, kind, number, master), 0, values)
        for piece in pieces:
            for kind, tensor in tensors.items():
                whole = mapped(files[id(tensor)], piece.span.stop, tensor.dtype) if files else tensor.data.reshape(-1)
                yield Fragment(f"{kind}/{piece.name}", piece.start, whole[piece.span])
            if state and piece.start == 0:
                yield Fragment(f"step/{piece.name}", 0, torch.as_tensor(state["step"], dtype=torch.float32).reshape(1))


def restore_fragments(engine: TrainingEngine, reader: FragmentReader) -> None:
    """Read fp32 weights, moments and step counts, and round the weights into the model's. A collective.

    Raises:
        CheckpointError: the files lack a part of a parameter.
    """
    for number, (master, pieces) in enumerate(masters(engine)):
        with in_memory(engine, number):
            restore_master(engine, number, master, pieces, reader)
    dist.meet()  # ranks may read at very different speeds
    refresh_weights(engine)


def read_weights(module: nn.Module, reader: FragmentReader, *, prefix: str = "weights/") -> None:
    """Read the trained weights of a checkpoint into a module without an engine, rounded to its data type.

    Args:
        prefix: prefix of the tensors' names: "weights/" for an engine's, "" for a moving average's.

    Raises:
        CheckpointError: the files lack a part of a parameter.
    """
    for name, parameter in module.named_parameters():
        if parameter.requires_grad:
            reader.read_into(f"{prefix}{name}", 0, parameter.data.view(-1))


def scales_name(engine: TrainingEngine, kind: str, number: int, master: Any) -> str:
    """Return the name of the scales of a moment in 8 bits: they belong to one sharding of the parameters."""
    return f"{kind}_scales/{dist.rank() if engine.partitions_optimizer else 0}/{number}/{master.numel()}"


def restore_master(
    engine: TrainingEngine, number: int, master: Any, pieces: list[Piece], reader: FragmentReader
) -> None:
    """Read the `number`-th of `masters`, an fp32 tensor of the inner optimizer, with its moments and step count."""
    inner = getattr(engine.optimizer, "optimizer", engine.optimizer)
    for piece in pieces:
        reader.read_into(f"weights/{piece.name}", piece.start, master.data.view(-1)[piece.span])
    stepped = [piece for piece in pieces if f"step/{piece.name}" in reader]
    if not stepped:
        inner.state.pop(master, None)  # AdamW's state is empty before the first step
        return
    step = torch.zeros(1)
    reader.read_into(f"step/{stepped[0].name}", 0, step)
    state = inner.state[master]
    if engine.states == "8bit":
        state = start_state(inner, master, int(step))
    else:
        state["step"] = step[0].to(master.device, copy=True)
    for kind in MOMENTS:
        values = torch.zeros_like(master, requires_grad=False)
        for piece in stepped:
            reader.read_into(f"{kind}/{piece.name}", piece.start, values.view(-1)[piece.span])
        if engine.states == "8bit":
            saved = None
            if (name := scales_name(engine, kind, number, master)) in reader:
                saved = torch.zeros(-(-master.numel() // BLOCK), device=master.device)
                reader.read_into(name, 0, saved)
            restore_moment(state, kind, values.view(-1), saved)
        else:
            state[kind] = values


@torch.no_grad()
def refresh_weights(engine: TrainingEngine) -> None:
    """Copy the rounded fp32 weights into the model. A collective."""
    optimizer = engine.optimizer
    if engine.partitions_weights:
        # The shards, in memory or in their files; then small parameters, which every rank has whole.
        for number in range(len(optimizer.fp32_partitioned_groups_flat)):
            with in_memory(engine, number):
                optimizer._reassign_or_swap_out_partitioned_parameters(number)
        optimizer.invalidate_secondary_tensor()  # ZeRO++'s hpZ would be read instead of the shards
        if persistent := optimizer.persistent_parameters:
            persistent[0].partition(persistent)
            persistent[0].all_gather(persistent)
    elif engine.partitions_optimizer:
        optimizer.update_lp_params()
        for number in range(len(optimizer.bit16_groups)):
            optimizer._update_model_bit16_weights(number)
    else:
        for master, parameter in unpartitioned(optimizer):
            if master is not parameter:
                parameter.data.copy_(master.data)


def counters(engine: TrainingEngine) -> dict[str, Any]:
    """Return the loss scale and DeepSpeed's counters as JSON values."""
    scaler = loss_scaler(engine.optimizer)
    scale = {name: getattr(scaler, name) for name in SCALER_FIELDS if hasattr(scaler, name)}
    return {"scaler": scale, "engine": {name: getattr(engine.deepspeed, name) for name in ENGINE_FIELDS}}


def restore_counters(engine: TrainingEngine, saved: dict[str, Any]) -> None:
    """Set what `counters` returned, for counters that this engine has: ZeRO stage 0 has a loss scaler in fp16 only."""
    scaler = loss_scaler(engine.optimizer)
    for name, value in saved["scaler"].items():
        if hasattr(scaler, name):
            setattr(scaler, name, value)
    for name, value in saved["engine"].items():
        setattr(engine.deepspeed, name, value)
