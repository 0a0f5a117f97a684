"""Settings that only a DeepSpeed JSON has, in the JSON of an engine and as the installed DeepSpeed reads them."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from support.ds_arguments import built

from pipeline.configuration.ds_config import Placement
from pipeline.configuration.flags import parse
from pipeline.configuration.groups import DeepSpeedConfig
from step3_ppo.config import PPOConfig

OF_BUCKETS = {"reduce_bucket_size": 2e3, "allgather_bucket_size": 11, "overlap_comm": False}
OF_WEIGHTS = {
    "reduce_bucket_size": 9, "overlap_comm": False, "stage3_param_persistence_threshold": 7,
    "stage3_max_reuse_distance": 4,
}  # fmt: skip
UNPINNED = {"offload_optimizer": {"pin_memory": False}, "offload_param": {"pin_memory": False}}


def test_what_only_a_json_says_is_deepspeeds():
    """The scale of fp16 and the type of the reduction, as DeepSpeed reads them from what an engine is given."""
    from deepspeed.runtime.config import DeepSpeedConfig as Installed

    scale = {"loss_scale": 128, "initial_scale_power": 8, "loss_scale_window": 50, "hysteresis": 1, "min_loss_scale": 2}
    user = {"fp16": scale, "communication_data_type": "fp32", "wall_clock_breakdown": True}
    config = built(user_json=user, dtype="fp16", world_size=1)
    assert config["fp16"] == {"enabled": True} | scale
    parsed = Installed(config)
    assert parsed.float16_config.model_dump().items() >= scale.items()
    assert parsed.communication_data_type == torch.float32 and parsed.wall_clock_breakdown is True


@pytest.mark.parametrize(("stage", "zero"), [(2, OF_BUCKETS), (3, OF_WEIGHTS)])
def test_what_only_a_json_says_of_zero_is_deepspeeds(stage: int, zero: dict[str, Any]) -> None:
    """Sizes and overlapping in place of ours; blocks of offload have the flag's device, and the pinning of the JSON."""
    from deepspeed.runtime.config import DeepSpeedConfig as Installed

    user = {"zero_optimization": zero | UNPINNED}
    settings = DeepSpeedConfig(offload=True, offload_parameters=stage == 3)
    config = built(settings, zero_stage=stage, user_json=user)
    assert config["zero_optimization"].items() >= zero.items()
    parsed = Installed(built(settings, zero_stage=stage, user_json=user, world_size=1))
    names = {name: name.removeprefix("stage3_") for name in zero if name != "overlap_comm"}
    assert {name: getattr(parsed.zero_config, names[name]) for name in names} == {name: zero[name] for name in names}
    assert parsed.zero_config.overlap_comm is False
    assert parsed.zero_config.offload_optimizer.device == "cpu" and not parsed.zero_config.offload_optimizer.pin_memory
    assert not parsed.zero_config.offload_param.pin_memory


def test_what_only_a_json_says_of_zero_is_that_of_all_models_of_stage_3(tmp_path: Path) -> None:
    """Also where a model's own flag says what of it is offloaded, and for models that are only read."""
    file = tmp_path / "ds.json"
    file.write_text(json.dumps({"zero_optimization": {"stage": 3} | OF_WEIGHTS | UNPINNED}))
    words = ["--deepspeed-config", str(file), "--offload", "--critic-offload-optimizer", "cpu"]
    resolved = parse(PPOConfig, [*words, "--critic-offload-weights", "cpu"], section="ppo")
    place = Placement(device="cuda", dtype="bf16", ranks=2, run_dir=Path("output/runs/ppo"))
    zeros = {
        name: one["zero_optimization"] for name, one in resolved.config.engine_jsons(resolved.origins, place).items()
    }
    assert all(zeros[name].items() >= OF_WEIGHTS.items() for name in ("actor", "critic"))
    assert {one["stage3_param_persistence_threshold"] for one in zeros.values()} == {7}
    unpinned = {"device": "cpu", "pin_memory": False}
    assert zeros["actor"]["offload_optimizer"] == zeros["critic"]["offload_optimizer"] == unpinned
    assert zeros["critic"]["offload_param"] == unpinned


def test_monitors():
    """Those that a JSON enables write into the run's folder, unless the JSON names another one."""
    places = {"tensorboard": {"enabled": True}, "csv_monitor": {"enabled": True, "output_path": "elsewhere"}}
    config = built(user_json=places | {"wandb": {"enabled": True}})
    assert config["tensorboard"] == {
        "enabled": True, "output_path": "output/runs/sft/deepspeed", "job_name": "tensorboard"
    }  # fmt: skip
    assert config["csv_monitor"] == {"enabled": True, "output_path": "elsewhere", "job_name": "csv_monitor"}
    assert config["wandb"] == {"enabled": True, "group": "output/runs/sft"}
    assert built(user_json={"wandb": {"enabled": False}})["wandb"] == {"enabled": False}
    assert "wandb" not in built(user_json={"wandb": "auto"})
