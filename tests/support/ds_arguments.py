"""Arguments shared by the tests of the DeepSpeed JSON and of engines that take one."""

import json
import tempfile
from pathlib import Path
from typing import Any, Literal

from pipeline.configuration.ds_config import EngineDtype, Placement, training_json
from pipeline.configuration.groups import DeepSpeedConfig, ModelConfig, OptimizerConfig, OptimizerStates
from pipeline.configuration.origins import Origin
from pipeline.configuration.resolved import Resolved
from step1_sft.config import SFTConfig

# A DeepSpeed JSON under which ZeRO stage 3 partitions all weights, also the small ones of a tiny model.
PARTITIONED_FILE = Path(__file__).with_name("partitioned.json")
PARTITIONED: dict[str, Any] = json.loads(PARTITIONED_FILE.read_text(encoding="utf-8"))


def zero_file(folder: Path, **zero: Any) -> Path:
    """Write a DeepSpeed JSON with this `zero_optimization`, and with all weights partitioned at ZeRO stage 3."""
    file = folder / f"{'-'.join(f'{name}-{value}' for name, value in zero.items())}.json"
    both = PARTITIONED["zero_optimization"] | zero
    file.write_text(json.dumps({"zero_optimization": both}), encoding="utf-8")
    return file


def built(
    settings: DeepSpeedConfig | None = None,
    *,
    zero_stage: int = 2,
    dtype: EngineDtype = "bf16",
    micro_batch_size: int = 4,
    gradient_accumulation_steps: int = 2,
    world_size: int = 8,
    max_grad_norm: float = 1.0,
    optimizer_states: OptimizerStates = "fp32",
    device: Literal["cpu", "cuda"] = "cuda",
    one_node: bool = False,
    user_json: dict[str, Any] | None = None,
    origins: dict[str, Origin] | None = None,
    **model: Any,
) -> dict[str, Any]:
    """The DeepSpeed JSON of an engine that trains under everyday settings; `user_json` is read from a file.

    model: further flags of the model that is trained.
    """
    optimizer = OptimizerConfig(
        per_device_train_batch_size=micro_batch_size,
        gradient_accumulation_steps=gradient_accumulation_steps,
        max_grad_norm=max_grad_norm,
        optimizer_states=optimizer_states,
    )
    place = Placement(device=device, dtype=dtype, ranks=world_size, run_dir=Path("output/runs/sft"), one_node=one_node)
    with tempfile.TemporaryDirectory() as folder:
        file, settings = Path(folder) / "ds.json", settings or DeepSpeedConfig()
        if user_json is not None:
            file.write_text(json.dumps(user_json))
            settings = DeepSpeedConfig.model_validate(settings.model_dump() | {"deepspeed_config": str(file)})
        config = SFTConfig(model=ModelConfig(zero_stage=zero_stage, **model), optimizer=optimizer, deepspeed=settings)
        return training_json(Resolved(config, origins or {}), config.model, place)
