"""The cheapest changes of settings for a plan that does not fit, in order, each planned anew with the ones before."""

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, replace
from importlib.util import find_spec
from typing import Any

from pipeline.configuration.ds_config import Json
from pipeline.configuration.flag_table import flat_items
from pipeline.configuration.flags import Resolved, validated
from pipeline.configuration.global_batch import with_ranks
from pipeline.configuration.groups import STAGE
from pipeline.errors import RunError
from pipeline.files import GIB
from pipeline.planning.memory import MemoryPlan
from pipeline.planning.page import StagePlanner, fits, host_text

Values = Mapping[str, Any]
LORA_DIM = 16
LEAST_SHARE = 0.01  # Share of what is missing below which a change is not worth its cost.
OFFLOAD_DURING_ROLLOUT = "offload_optimizer_during_rollout"


def named(values: Values, flag: str) -> list[str]:
    """Return the flags of this name: one, or in stage 3 one of each trained model."""
    return [name for name in (flag, f"actor_{flag}", f"critic_{flag}") if name in values]


def smaller_micro_batch(values: Values, ranks: int) -> dict[str, Any]:
    """Halve the micro-batch, to a divisor of a rank's rows in an optimizer step, whose number stays the same.

    --train_batch_size gives that number where the ranks divide it; else the rows that it was rounded to.
    """
    micro, meant = values["per_device_train_batch_size"], values["train_batch_size"]
    rows = micro * values["gradient_accumulation_steps"]
    total: dict[str, Any] = {}
    if meant and meant % ranks == 0:
        rows = meant // ranks
    elif meant:
        total = {"train_batch_size": rows * ranks}  # accumulation follows from it
    sizes = [size for size in range(1, micro) if rows % size == 0 and size <= -(-micro // 2)]
    if not sizes:
        return {}
    return {"per_device_train_batch_size": sizes[-1], "gradient_accumulation_steps": rows // sizes[-1], **total}


def with_checkpointing(values: Values, ranks: int) -> dict[str, Any]:
    return {name: True for name in named(values, "gradient_checkpointing") if not values[name]}


def save_synchronously(values: Values, ranks: int) -> dict[str, Any]:
    return {"save_in_background": False} if values["save_in_background"] else {}


def partitioned(stage: int) -> Callable[[Values, int], dict[str, Any]]:
    """Return the change to a ZeRO stage, where there are ranks to partition over."""

    def change(values: Values, ranks: int) -> dict[str, Any]:
        new: dict[str, Any] = {name: stage for name in named(values, STAGE) if ranks > 1 and values[name] < stage}
        return new | {"optimizer_states": "fp32"} if new and stage == 3 else new

    return change


def states_in_8_bits(values: Values, ranks: int) -> dict[str, Any]:
    """Round the moments where bitsandbytes is installed; offload and ZeRO stage 3 have them in fp32."""
    return {"optimizer_states": "8bit"} if find_spec("bitsandbytes") else {}


def offload_states_during_rollout(values: Values, ranks: int) -> dict[str, Any]:
    """Keep optimizer states in host memory during rollouts; no change where the stage has none."""
    return {} if values["offload"] or OFFLOAD_DURING_ROLLOUT not in values else {OFFLOAD_DURING_ROLLOUT: True}


def optimizer_offload(values: Values, ranks: int) -> dict[str, Any]:
    """Keep optimizer states in host memory always, at ZeRO stage 1 at least."""
    if values["offload"]:
        return {}
    changed = {"offload": True, "optimizer_states": "fp32"} | {
        name: 1 for name in named(values, STAGE) if not values[name]
    }
    return changed | ({OFFLOAD_DURING_ROLLOUT: False} if OFFLOAD_DURING_ROLLOUT in values else {})


def parameter_offload(values: Values, ranks: int) -> dict[str, Any]:
    stages = named(values, STAGE)
    return (
        {} if values["offload_parameters"] or any(values[name] < 3 for name in stages) else {"offload_parameters": True}
    )


def lora(values: Values, ranks: int) -> dict[str, Any]:
    return {name: LORA_DIM for name in named(values, "lora_dim") if not values[name]}


def int8_base(values: Values, ranks: int) -> dict[str, Any]:
    """Quantise the frozen weights, which ZeRO stage 3 does not partition."""
    chosen = {name: "int8" for name in named(values, "quantization") if values[name] == "none"}
    return chosen and chosen | {"offload_parameters": False} | {
        name: min(2, values[name]) for name in named(values, STAGE)
    }


# (change, what it costs), the cheapest first.
CHANGES: tuple[tuple[Callable[[Values, int], dict[str, Any]], str], ...] = (
    (save_synchronously, "training waits for each checkpoint"),
    (smaller_micro_batch, "smaller products"),
    (with_checkpointing, "one more forward pass"),
    (partitioned(1), "the weights are gathered once a step"),
    (partitioned(2), "gradients are reduced in each micro-batch"),
    (states_in_8_bits, "rounded moments"),
    (offload_states_during_rollout, "states cross the bus twice a rollout"),
    (optimizer_offload, "states cross the bus each step"),
    (partitioned(3), "weights are gathered in each pass"),
    (parameter_offload, "weights cross the bus in each pass"),
    (lora, "another training: adapters only"),
    (int8_base, "rounded base weights"),
)


@dataclass(frozen=True, slots=True)
class Change:
    """Flags that are changed together.

    flags: their names and new values.
    resolved: the settings with them.
    plan: the plan with them.
    gained: bytes freed of a GPU.
    gained_on_host: bytes freed of the host.
    cost: what they cost, in words.
    """

    flags: Mapping[str, Any]
    resolved: Resolved
    plan: MemoryPlan
    gained: int
    gained_on_host: int
    cost: str

    def __str__(self) -> str:
        flags = " ".join(f"--{name} {str(value).lower()}" for name, value in self.flags.items())
        expected, _ = self.plan.reserved()
        gained = [f"{size(self.gained)} ({expected / GIB:.1f} GiB expected)"] if self.gained > 0 else []
        gained += [f"{size(self.gained_on_host)} of the host"] if self.gained_on_host > 0 else []
        return f"{flags}: gives back {' and '.join(gained)}; cost: {self.cost}"


def size(num_bytes: int) -> str:
    """Return `1.2 GiB`, or `34 MiB` below a tenth of it."""
    return f"{num_bytes / GIB:.1f} GiB" if num_bytes >= GIB // 10 else f"{num_bytes / 2**20:.0f} MiB"


def changes(planner: StagePlanner, resolved: Resolved) -> Iterator[Change]:
    """Yield each change that gives back what is missing, planned with those before it, until the plan fits.

    After each change the cheapest are tried first again: activations may be the peak once states are small. No change
    raises a micro-batch: `--auto_batch` finds the largest one.
    """
    target, before = planner.target, planner.memory(resolved)
    while not fits(before, target):
        cheapest = next(filter(None, (changed(planner, resolved, before, *change) for change in CHANGES)), None)
        if cheapest is None:
            return
        resolved, before = cheapest.resolved, cheapest.plan
        yield cheapest


def changed(
    planner: StagePlanner,
    resolved: Resolved,
    before: MemoryPlan,
    change: Callable[[Values, int], dict[str, Any]],
    cost: str,
) -> Change | None:
    """Return a change of settings that are planned as `before`; None where it changes nothing or hardly helps."""
    target, values = planner.target, dict(flat_items(resolved.config))
    new = {name: value for name, value in change(values, target.num_gpus).items() if values[name] != value}
    if not new:
        return None
    try:
        config: Any = validated(type(resolved.config), values | new, resolved.origins)
        resolved = with_ranks(replace(resolved, config=config), target.num_gpus)
        plan = planner.memory(resolved)
    except RunError:
        return None  # settings that do not go together
    gained = before.phases[before.worst].total - plan.phases[plan.worst].total
    gained_on_host = before.host - plan.host
    lacking = before.reserved()[0] - target.memory
    lacking_on_host = before.on_host[0] - target.host_memory if target.host_memory else 0
    if not (helps(gained, lacking) or helps(gained_on_host, lacking_on_host)):
        return None
    # Accumulation follows from --train_batch_size.
    new.pop("gradient_accumulation_steps" if values["train_batch_size"] else "", None)
    return Change(new, resolved, plan, gained, gained_on_host, cost)


def helps(gained: int, lacking: int) -> bool:
    """Tell whether bytes are lacking, and these are more than a negligible part of them."""
    return lacking > 0 and gained >= LEAST_SHARE * lacking


def ladder(planner: StagePlanner, resolved: Resolved) -> Iterator[str]:
    """Yield a line for each change, and a last one: whether they are enough, and what they take of the host."""
    plan = planner.memory(resolved)
    for change in changes(planner, resolved):
        resolved, plan = change.resolved, change.plan
        yield str(change)
    if not fits(plan, planner.target):
        on_disk = replace(planner, jsons_of=lambda settings: with_nvme(planner.jsons_of(settings))).memory(resolved)
        if gained := plan.host - on_disk.host:
            yield (
                '"offload_optimizer": {"device": "nvme", "nvme_path": FOLDER} in a --deepspeed_config: gives back '
                f"{gained / GIB:.1f} GiB of the host; cost: states cross the disk each step"
            )
        plan = on_disk
    if fits(plan, planner.target):
        yield f"with these it fits, and takes of the host {host_text(plan, planner.target)}"
    else:
        yield "no change of flags is enough: take more GPUs, larger ones, shorter rows or a smaller model"


def with_nvme(engines: Mapping[str, Json]) -> dict[str, Json]:
    """Return engines whose optimizer states are on NVMe where they were in host memory, under ZeRO stage 3."""
    moved = dict(engines)
    for role, engine in engines.items():
        zero = engine["zero_optimization"]
        if zero["stage"] == 3 and (zero.get("offload_optimizer") or {}).get("device") == "cpu":
            moved[role] = engine | {"zero_optimization": zero | {"offload_optimizer": {"device": "nvme"}}}
    return moved
