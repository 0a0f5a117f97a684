"""The DeepSpeed JSON of each engine of a stage, on this machine or the target that it is planned for; no torch."""

from pipeline.configuration.ds_config import Json, Placement
from pipeline.configuration.rank_rules import with_ranks
from pipeline.configuration.resolved import Resolved
from pipeline.configuration.stage import Stage
from pipeline.launching.machine import device_kind
from pipeline.launching.target import parse_target


def engine_jsons(stage: Stage, resolved: Resolved, *, ranks: int | None) -> dict[str, Json]:
    """Return the DeepSpeed JSON of each engine of a stage, by the engine's name.

    Args:
        ranks: None where only the launcher will know.

    Raises:
        InputError: settings that contradict each other, one per line.
    """
    described = resolved.config.run.target
    target = parse_target(described) if described else None
    resolved, device = with_ranks(resolved, ranks), ("cpu" if target.is_cpu else "cuda") if target else device_kind()
    config = resolved.config
    dtype, best = config.deepspeed.dtype, target.dtype if target else "bf16" if device == "cuda" else "fp32"
    placement = Placement(
        device=device,
        dtype=best if dtype == "auto" else dtype,
        ranks=ranks,
        run_dir=stage.run_folder(config.run),
        one_node=target is not None and target.hosts == 1,
    )
    jsons: dict[str, Json] = config.engine_jsons(resolved.origins, placement)
    return jsons
