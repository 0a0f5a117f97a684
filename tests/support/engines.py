"""A model under DeepSpeed in a world of one, whatever the ZeRO stage."""

from typing import Any

from support.ds_arguments import PARTITIONED, built

from pipeline.configuration.groups import ModelConfig
from pipeline.engine.engine import TrainingEngine
from pipeline.engine.parameter_groups import parameter_groups
from pipeline.models.forward.causal_lm import CausalLM


def engine_of(model: Any, zero_stage: int) -> TrainingEngine:
    """All parameters of ZeRO-3 are partitioned, and of stage 2 too on one rank."""
    module = CausalLM(model)
    partitioned = {"zero_optimization": PARTITIONED["zero_optimization"] | {"overlap_comm": False}}
    settings = built(
        user_json=partitioned, zero_stage=zero_stage, dtype="fp32", micro_batch_size=2, gradient_accumulation_steps=1,
        world_size=1, max_grad_norm=0.0, device=next(model.parameters()).device.type,
    )  # fmt: skip
    settings["zero_optimization"]["stage"] = zero_stage
    groups = parameter_groups(module, ModelConfig(learning_rate=0.05, weight_decay=0.1, lora_learning_rate=0.05))
    return TrainingEngine(module.train(), groups, settings, betas=(0.9, 0.95), eps=1e-8)
