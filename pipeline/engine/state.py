"""What evolves in a training engine, as fragments: fp32 weights and AdamW's moments, for every ZeRO stage.

The 16-bit weights are the rounded fp32 ones, so they are made again, not stored. DeepSpeed's own checkpoints are
pickles, are not written atomically, and a flipped bit in them goes unseen; this reads and writes none of them.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch

from pipeline import dist
from pipeline.engine.fragments import Fragment, FragmentReader
from pipeline.partitions import local_range

MOMENTS = ("exp_avg", "exp_avg_sq")
# What a DeepSpeed loss scaler, and the engine's own monitors, count.
SCALER_FIELDS = ("cur_scale", "cur_iter", "last_overflow_iter", "cur_hysteresis")
ENGINE_FIELDS = ("global_steps", "global_samples", "micro_steps", "skipped_steps")


@dataclass(frozen=True, slots=True)
class Piece:
    """`numel` elements of the parameter `name` from `start` on, kept from `offset` on in a master tensor."""

    name: str
    offset: int
    start: int
    numel: int


@dataclass(frozen=True, slots=True)
class Master:
    """An fp32 tensor that AdamW updates on this rank, and the pieces of parameters in it."""

    tensor: Any
    pieces: list[Piece]


def masters(engine: Any) -> list[Master]:
    """The fp32 tensors of a TrainingEngine's optimizer on this rank."""
    names = {id(parameter): name for name, parameter in engine.module.named_parameters()}
    optimizer = engine.optimizer
    if engine.partitions_weights:
        groups = zip(optimizer.fp32_partitioned_groups_flat, optimizer.fp16_groups, strict=True)
        return [Master(flat, stage_3_pieces(group, names)) for flat, group in groups]
    if engine.partitions_optimizer:
        groups = zip(optimizer.single_partition_of_fp32_groups, optimizer.bit16_groups, strict=True)
        return [Master(flat, flat_pieces(group, names)) for flat, group in groups]
    return [Master(tensor, [Piece(names[id(p)], 0, 0, p.numel())]) for tensor, p in unpartitioned(optimizer)]


def unpartitioned(optimizer: Any) -> Iterator[tuple[Any, Any]]:
    """(fp32 tensor, parameter of the model) at stage 0: the same tensor in fp32, a copy of it in 16 bits."""
    if not hasattr(optimizer, "fp32_groups"):
        for group in optimizer.param_groups:
            yield from ((parameter, parameter) for parameter in group["params"])
        return
    for copies, group in zip(optimizer.fp32_groups, optimizer.fp16_groups, strict=True):
        yield from zip(copies, group, strict=True)


def flat_pieces(group: list[Any], names: dict[int, str]) -> list[Piece]:
    """Stages 1 and 2: the parameters' stretches that lie in this rank's part of the flat group."""
    pieces = []
    for parameter in group:
        mapping = parameter._hp_mapping
        if mapping is not None:
            here, there = mapping.hp_fragment_address, mapping.lp_fragment_address
            pieces.append(Piece(names[id(parameter)], here.start, there.start, here.numel))
    return pieces


def stage_3_pieces(group: list[Any], names: dict[int, str]) -> list[Piece]:
    """Stage 3: each parameter is cut into equal shards, the last of which may end in padding."""
    pieces, offset = [], 0
    for parameter in group:
        start, numel = local_range(parameter)
        if numel:
            pieces.append(Piece(names[id(parameter)], offset, start, numel))
        offset += parameter.partition_numel()
    return pieces


def engine_fragments(engine: Any) -> Iterator[Fragment]:
    """What this rank has to write: `<kind>/<parameter>` with kinds weights, exp_avg, exp_avg_sq, step."""
    if not engine.partitions_optimizer and not dist.is_main():
        return  # all ranks hold the same
    inner = getattr(engine.optimizer, "optimizer", engine.optimizer)
    for master in masters(engine):
        state = inner.state.get(master.tensor, {})
        kept = {"weights": master.tensor.data} | {kind: state[kind] for kind in MOMENTS if kind in state}
        for piece in master.pieces:
            for kind, tensor in kept.items():
                values = tensor.reshape(-1)[piece.offset : piece.offset + piece.numel]
                yield Fragment(f"{kind}/{piece.name}", piece.start, values)
            if state and piece.start == 0:
                yield Fragment(f"step/{piece.name}", 0, torch.as_tensor(state["step"], dtype=torch.float32).reshape(1))


def restore_fragments(engine: Any, reader: FragmentReader) -> None:
    """Set fp32 weights, moments and step counts, and make the model's weights from them. A collective.

    Raises:
        CheckpointError: the files lack a part of a parameter.
    """
    inner = getattr(engine.optimizer, "optimizer", engine.optimizer)
    for master in masters(engine):
        flat = master.tensor.data.view(-1)
        for piece in master.pieces:
            reader.read_into(f"weights/{piece.name}", piece.start, flat[piece.offset : piece.offset + piece.numel])
        restore_moments(inner, master, reader)
    refresh_weights(engine)


def restore_moments(inner: Any, master: Master, reader: FragmentReader) -> None:
    """AdamW's state of one master tensor; it stays empty where no step was taken yet."""
    stepped = [piece for piece in master.pieces if f"step/{piece.name}" in reader]
    if not stepped:
        inner.state.pop(master.tensor, None)
        return
    step = torch.zeros(1)
    reader.read_into(f"step/{stepped[0].name}", 0, step)
    state = inner.state[master.tensor]
    state["step"] = step[0].to(master.tensor.device, copy=True)
    for kind in MOMENTS:
        moment = torch.zeros_like(master.tensor, requires_grad=False)
        for piece in stepped:
            stretch = moment.view(-1)[piece.offset : piece.offset + piece.numel]
            reader.read_into(f"{kind}/{piece.name}", piece.start, stretch)
        state[kind] = moment


@torch.no_grad()
def refresh_weights(engine: Any) -> None:
    """Round the fp32 weights into the model's own. A collective."""
    optimizer = engine.optimizer
    if engine.partitions_weights:
        refresh_stage_3(optimizer)
    elif engine.partitions_optimizer:
        optimizer.update_lp_params()
        for number in range(len(optimizer.bit16_groups)):
            optimizer._update_model_bit16_weights(number)
    else:
        for master, parameter in unpartitioned(optimizer):
            if master is not parameter:
                parameter.data.copy_(master.data)


def refresh_stage_3(optimizer: Any) -> None:
    """As DeepSpeed's own loading does: flat shards, then the parameters' views of them, then what stays whole."""
    flats = zip(optimizer.fp16_partitioned_groups_flat, optimizer.fp32_partitioned_groups_flat, strict=True)
    for number, (rounded, master) in enumerate(flats):
        rounded.data.copy_(master.data)
        shards = optimizer.fp16_partitioned_groups[number]
        for shard, values in zip(shards, optimizer.unflatten(rounded, shards), strict=True):
            shard.data = values.data
    if persistent := optimizer.persistent_parameters:
        persistent[0].partition(persistent)
        persistent[0].all_gather(persistent)


def counters(engine: Any) -> dict[str, Any]:
    """Loss scale and DeepSpeed's own counts, as JSON values."""
    scaler = loss_scaler(engine.optimizer)
    scale = {name: getattr(scaler, name) for name in SCALER_FIELDS if hasattr(scaler, name)}
    return {"scaler": scale, "engine": {name: getattr(engine.deepspeed, name) for name in ENGINE_FIELDS}}


def restore_counters(engine: Any, saved: dict[str, Any]) -> None:
    """Set what `counters` gave, as far as this engine has it: without fp16, stage 0 has no loss scaler."""
    scaler = loss_scaler(engine.optimizer)
    for name, value in saved["scaler"].items():
        if hasattr(scaler, name):
            setattr(scaler, name, value)
    for name, value in saved["engine"].items():
        setattr(engine.deepspeed, name, value)


def loss_scaler(optimizer: Any) -> Any:
    """DeepSpeed's loss scaler; None where nothing is scaled."""
    return getattr(optimizer, "loss_scaler", None) or getattr(optimizer, "loss_scale_config", None)
