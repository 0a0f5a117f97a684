"""Optimizer groups of real models: every trainable parameter once, decay only where it belongs."""

import torch

from pipeline.configuration.groups import ModelConfig
from pipeline.engine.parameter_groups import parameter_groups
from pipeline.models.forward.causal_lm import CausalLM
from pipeline.models.loading import load_causal_lm
from pipeline.models.lora import add_lora
from pipeline.models.reward_model import load_reward_model
from pipeline.models.source import ModelSource


def named_groups(model: torch.nn.Module) -> tuple[dict[str, set[str]], dict[str, dict]]:
    """Group -> names of its parameters, and group -> the group."""
    groups = parameter_groups(model, ModelConfig(learning_rate=1e-3, weight_decay=0.1, lora_learning_rate=5e-2))
    names = {id(parameter): name for name, parameter in model.named_parameters()}
    return {g["name"]: {names[id(p)] for p in g["params"]} for g in groups}, {g["name"]: g for g in groups}


def test_matrices_decay_and_the_rest_does_not(causal_folder):
    model = CausalLM(load_causal_lm(causal_folder, dtype=torch.float32))
    found, groups = named_groups(model)
    decaying = {
        name for name, module in model.named_modules()
        if isinstance(module, torch.nn.Linear) and not (name.endswith("lm_head") and model.config.tie_word_embeddings)
    }  # fmt: skip
    assert found["decay"] == {f"{name}.weight" for name in decaying}
    assert set(found) == {"decay", "no_decay"}
    rest = found["no_decay"]
    assert any("embed_tokens" in name for name in rest) and any("norm" in name for name in rest)
    assert found["decay"] | rest == {name for name, _ in model.named_parameters()} and not found["decay"] & rest
    assert (groups["decay"]["weight_decay"], groups["no_decay"]["weight_decay"]) == (0.1, 0.0)
    assert {group["lr"] for group in groups.values()} == {1e-3}


def test_a_tied_head_is_an_embedding(tiny_folders):
    model = CausalLM(load_causal_lm(tiny_folders["opt"], dtype=torch.float32))
    found, _ = named_groups(model)
    assert not any("lm_head" in name for name in found["decay"] | found["no_decay"])
    assert "model.model.decoder.embed_tokens.weight" in found["no_decay"]
    assert "model.model.decoder.embed_positions.weight" in found["no_decay"]


def test_the_reward_head_decays(reward_folder):
    found, _ = named_groups(load_reward_model(ModelSource(reward_folder), dtype=torch.float32))
    assert "model.score.weight" in found["decay"]


def test_lora_weights_have_their_own_rate_and_frozen_ones_no_group(reward_folder):
    model = load_reward_model(ModelSource(reward_folder), dtype=torch.float32)
    settings = {"dim": 4, "alpha": 8.0, "dropout": 0.0, "module_name": "all-linear"}
    model.model = add_lora(model.model, **settings, only_lora=True, task="SEQ_CLS", seed=0)
    found, groups = named_groups(model)
    assert set(found) == {"decay", "lora"}
    assert found["lora"] == {name for name, _ in model.named_parameters() if "lora_" in name}
    (head,) = found["decay"]
    assert head.endswith("score.modules_to_save.default.weight")
    assert (groups["lora"]["lr"], groups["decay"]["lr"]) == (5e-2, 1e-3)
