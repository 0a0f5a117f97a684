"""Decoders of other types are refused where they make logits by more than a head, a scale and a cap."""

from types import SimpleNamespace
from typing import Any

import pytest
import torch
from support.decode_models import random_weights
from support.messages import naming
from transformers import AutoConfig, AutoModelForCausalLM

from pipeline.engine.build import check_function
from pipeline.engine.engine import FrozenEngine
from pipeline.errors import InputError
from pipeline.models.forward.causal_lm import CausalLM

SHAPE: dict[str, Any] = {
    "vocab_size": 61, "hidden_size": 32, "num_hidden_layers": 1, "num_attention_heads": 2, "num_key_value_heads": 1,
    "intermediate_size": 48, "bos_token_id": 2, "eos_token_id": 2, "pad_token_id": 1,
}  # fmt: skip
MAMBA = {"mamba_d_ssm": 64, "mamba_n_heads": 4, "mamba_d_head": 16, "mamba_n_groups": 1, "mamba_d_state": 8}
# Model type -> (fields of its configuration, True where its logits are made as ours).
KINDS: dict[str, tuple[dict[str, Any], bool]] = {
    "stablelm": ({}, True),
    "cohere": ({"logit_scale": 0.25}, True),
    "granite": ({"logits_scaling": 4.0}, True),
    "falcon_h1": (MAMBA | {"lm_head_multiplier": 0.5}, False),
    "modernbert-decoder": ({}, False),  # its head has a layer and a norm in front
}


def engine_of(model: Any) -> FrozenEngine:
    return FrozenEngine(CausalLM(random_weights(model).cpu()), {"zero_optimization": {"stage": 0}}, torch.device("cpu"))


@pytest.mark.parametrize("kind", KINDS)
def test_other_logits_than_the_models_own_are_refused(kind: str) -> None:
    fields, is_known = KINDS[kind]
    engine = engine_of(AutoModelForCausalLM.from_config(AutoConfig.for_model(kind, **(SHAPE | fields))))
    if is_known:
        check_function(engine, "model")
        return
    with pytest.raises(InputError, match=naming(f"model ... {kind} ... logits")):
        check_function(engine, "model")


def test_weights_on_a_disk_are_not_read_for_it() -> None:
    engine = engine_of(AutoModelForCausalLM.from_config(AutoConfig.for_model("falcon_h1", **(SHAPE | MAMBA))))
    weight: Any = next(engine.module.parameters())
    weight.ds_id, weight.ds_tensor = 0, SimpleNamespace(final_location="nvme")
    check_function(engine, "model")
