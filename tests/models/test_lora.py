"""LoRA: which layers, what is trained, merged weights, and the reference policy."""

import pytest
import torch
from support.tiny_models import NUM_TOKENS, random_rows
from torch import nn
from transformers import AutoModelForCausalLM, GPT2Config

from pipeline.errors import InputError
from pipeline.models.loading import load_causal_lm
from pipeline.models.lora import add_lora, is_lora, linear_names, merged_weight
from pipeline.models.reward_model import load_reward_model
from pipeline.models.source import ModelSource

ROW = random_rows(0, (8,))[0].unsqueeze(0)


def with_adapters(folder: str, *, only_lora: bool = True, name: str = "all-linear", dropout: float = 0.0):
    model = load_causal_lm(folder, dtype=torch.float32)
    settings = {"dim": 4, "alpha": 8.0, "dropout": dropout, "module_name": name}
    return add_lora(model, **settings, only_lora=only_lora, task="CAUSAL_LM", seed=0)


@torch.no_grad()
def fill_b(model: nn.Module, seed: int = 0) -> None:
    """B, which starts as zero, gets random values, as if trained."""
    generator = torch.Generator().manual_seed(seed)
    for name, parameter in model.named_parameters():
        if "lora_B" in name:
            parameter.copy_(0.2 * torch.randn(parameter.shape, generator=generator))


@torch.no_grad()
def logits(model: nn.Module) -> torch.Tensor:
    return model(input_ids=ROW).logits


def test_at_step_0_the_model_is_the_base_model(causal_folder):
    base = logits(load_causal_lm(causal_folder, dtype=torch.float32))
    wrapped = with_adapters(causal_folder)
    torch.testing.assert_close(logits(wrapped), base, rtol=0, atol=0)
    assert is_lora(wrapped) and not is_lora(load_causal_lm(causal_folder, dtype=torch.float32))


def test_first_values_are_a_function_of_the_seed_and_touch_no_global_generator(tiny_folders):
    before = torch.get_rng_state()
    first, second = (with_adapters(tiny_folders["opt"]).state_dict() for _ in range(2))
    assert torch.get_rng_state().equal(before)
    assert all(first[name].equal(second[name]) for name in first)


def test_all_linear_layers_but_the_head_get_lora(tiny_folders):
    llama = load_causal_lm(tiny_folders["llama"], dtype=torch.float32)
    assert len(linear_names(llama, "all-linear")) == 2 * 7 and "lm_head" not in linear_names(llama, "all-linear")
    opt = load_causal_lm(tiny_folders["opt"], dtype=torch.float32)
    assert len(linear_names(opt, "all-linear")) == 2 * 6
    reward = load_reward_model(ModelSource(tiny_folders["llama-reward"]), dtype=torch.float32).model
    assert len(linear_names(reward, "all-linear")) == 2 * 7


def test_a_pattern_picks_layers_by_name(tiny_folders):
    model = load_causal_lm(tiny_folders["opt"], dtype=torch.float32)
    assert linear_names(model, "q_proj") == [f"model.decoder.layers.{n}.self_attn.q_proj" for n in (0, 1)]


def test_a_pattern_that_matches_nothing_is_an_error(causal_folder):
    with pytest.raises(InputError, match="--lora-module-name nothing_like_it: .*_proj"):
        with_adapters(causal_folder, name="nothing_like_it")


def test_only_optimize_lora_freezes_all_else(causal_folder):
    trained = [name for name, p in with_adapters(causal_folder).named_parameters() if p.requires_grad]
    assert trained and all("lora_" in name for name in trained)


def test_without_it_everything_learns_but_what_lora_stands_for(causal_folder):
    model = with_adapters(causal_folder, only_lora=False)
    frozen = {name for name, p in model.named_parameters() if not p.requires_grad}
    assert frozen == {name for name, _ in model.named_parameters() if name.endswith("base_layer.weight")}


def test_the_head_of_a_reward_model_learns_with_lora(reward_folder):
    model = load_reward_model(ModelSource(reward_folder), dtype=torch.float32).model
    settings = {"dim": 4, "alpha": 8.0, "dropout": 0.0, "module_name": "all-linear"}
    wrapped = add_lora(model, **settings, only_lora=True, task="SEQ_CLS", seed=0)
    trained = [name for name, p in wrapped.named_parameters() if p.requires_grad and "lora_" not in name]
    assert len(trained) == 1 and trained[0].endswith("score.modules_to_save.default.weight")


def test_merged_weights_give_the_same_function(causal_folder):
    model = with_adapters(causal_folder)
    fill_b(model)
    expected, base = logits(model), logits(load_causal_lm(causal_folder, dtype=torch.float32))
    assert (expected - base).abs().max() > 0.1
    plain = load_causal_lm(causal_folder, dtype=torch.float32)
    names = linear_names(plain, "all-linear")
    for name in names:
        layer = model.get_base_model().get_submodule(name)
        before = layer.get_base_layer().weight.clone()
        plain.get_submodule(name).weight.data.copy_(merged_weight(layer))
        assert layer.get_base_layer().weight.equal(before)
    torch.testing.assert_close(logits(plain), expected, rtol=1e-4, atol=1e-4)


def test_merging_in_16_bits_rounds_once(tiny_folders):
    model = add_lora(
        load_causal_lm(tiny_folders["llama"], dtype=torch.bfloat16), dim=4, alpha=8.0, dropout=0.0,
        module_name="q_proj", only_lora=True, task="CAUSAL_LM", seed=0,
    )  # fmt: skip
    fill_b(model)
    layer = model.get_base_model().model.layers[0].self_attn.q_proj
    a, b = layer.lora_A["default"].weight, layer.lora_B["default"].weight
    expected = layer.get_base_layer().weight.float() + 2.0 * b.float() @ a.float()
    assert merged_weight(layer).equal(expected.bfloat16())


def test_layers_that_store_their_weight_transposed_are_merged_right():
    model = AutoModelForCausalLM.from_config(GPT2Config(n_embd=32, n_layer=1, n_head=2, vocab_size=NUM_TOKENS)).eval()
    settings = {"dim": 4, "alpha": 8.0, "dropout": 0.0, "module_name": "c_attn"}
    model = add_lora(model, **settings, only_lora=True, task="CAUSAL_LM", seed=0).eval()
    fill_b(model)
    expected, base = logits(model), model.get_base_model()
    layer = base.transformer.h[0].attn.c_attn
    layer.get_base_layer().weight.data.copy_(merged_weight(layer))
    with model.disable_adapter():
        torch.testing.assert_close(logits(model), expected, rtol=1e-4, atol=1e-4)


def test_the_reference_is_the_model_without_its_adapters(causal_folder):
    model = with_adapters(causal_folder)
    fill_b(model)
    tuned, base = logits(model), logits(load_causal_lm(causal_folder, dtype=torch.float32))
    with model.disable_adapter():
        torch.testing.assert_close(logits(model), base, rtol=0, atol=0)
    torch.testing.assert_close(logits(model), tuned, rtol=0, atol=0)


def test_an_exception_leaves_the_adapters_on(causal_folder):
    model = with_adapters(causal_folder)
    fill_b(model)
    tuned = logits(model)
    trained = {name for name, p in model.named_parameters() if p.requires_grad}
    with pytest.raises(RuntimeError, match="inside"), model.disable_adapter():
        raise RuntimeError("inside")
    torch.testing.assert_close(logits(model), tuned, rtol=0, atol=0)
    assert {name for name, p in model.named_parameters() if p.requires_grad} == trained


def test_what_is_trained_stays_trained_after_the_reference_pass(causal_folder):
    """peft's disable_adapter switches requires_grad off inside: it must come back."""
    model = with_adapters(causal_folder)
    trained = {name for name, p in model.named_parameters() if p.requires_grad}
    with model.disable_adapter():
        logits(model)
    assert {name for name, p in model.named_parameters() if p.requires_grad} == trained
