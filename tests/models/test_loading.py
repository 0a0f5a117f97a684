"""Loading models: dropout off without touching what is saved, wrong inputs in one line, parts of a model."""

import json

import pytest
import torch
from support.families import family_config
from support.messages import naming
from support.tiny_models import IDS, random_rows, tiny_config
from transformers import AutoModelForCausalLM, GPT2Config

from pipeline.engine.start_models import StartModel
from pipeline.errors import InputError
from pipeline.models.loading import (
    backbone,
    base_model,
    dropout_fields,
    load_causal_lm,
    use_gradient_checkpointing,
    without_dropout,
)
from pipeline.models.paths import check_language_model
from pipeline.models.source import ModelSource


def two_forwards(model: torch.nn.Module) -> list[torch.Tensor]:
    row = random_rows(0, (12,))[0].unsqueeze(0)
    return [model.train()(input_ids=row).logits for _ in range(2)]


def test_two_forwards_in_training_mode_are_bit_equal(causal_folder):
    first, second = two_forwards(load_causal_lm(causal_folder, dtype=torch.float32))
    assert first.equal(second)


def test_the_same_model_loaded_by_transformers_is_random_in_training_mode(causal_folder):
    """So that the test above can fail."""
    first, second = two_forwards(AutoModelForCausalLM.from_pretrained(causal_folder, attn_implementation="eager"))
    assert not first.equal(second)


def test_the_source_configuration_keeps_its_dropouts(tiny_folders):
    model = load_causal_lm(tiny_folders["opt"], dtype=torch.float32)
    assert (model.config.dropout, model.config.layerdrop) == (0.0, 0.0)
    assert (model.source_config.dropout, model.source_config.layerdrop) == (0.1, 0.1)


def test_every_dropout_field_is_found():
    assert {"dropout", "attention_dropout", "layerdrop"} <= set(dropout_fields(tiny_config("opt")))
    gpt2 = GPT2Config()
    assert {"resid_pdrop", "embd_pdrop", "attn_pdrop"} <= set(dropout_fields(gpt2))
    quiet = without_dropout(gpt2)
    assert [getattr(quiet, name) for name in dropout_fields(gpt2)] == [0.0] * len(dropout_fields(gpt2))
    assert gpt2.resid_pdrop == 0.1


def test_fields_named_probability_are_dropouts_too():
    config = GPT2Config(hidden_dropout_prob=0.1, **IDS)
    assert "hidden_dropout_prob" in dropout_fields(config)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_the_wanted_dtype_wins_over_the_saved_one(causal_folder, dtype):
    assert {p.dtype for p in load_causal_lm(causal_folder, dtype=dtype).parameters()} == {dtype}


def test_a_folder_without_weights_is_refused_in_one_line(tmp_path):
    tiny_config("llama").save_pretrained(tmp_path)
    with pytest.raises(InputError, match="holds no weights") as caught:
        load_causal_lm(str(tmp_path), dtype=torch.float32)
    assert "\n" not in str(caught.value) and str(tmp_path) in str(caught.value)


def test_a_folder_without_a_configuration_is_refused(tmp_path):
    with pytest.raises(InputError, match="holds no model"):
        load_causal_lm(str(tmp_path), dtype=torch.float32)


def test_backbone_gives_hidden_states_for_the_head(causal_folder):
    model = load_causal_lm(causal_folder, dtype=torch.float32)
    row = random_rows(1, (5,))[0].unsqueeze(0)
    hidden = backbone(model)(input_ids=row).last_hidden_state
    torch.testing.assert_close(model.get_output_embeddings()(hidden), model(input_ids=row).logits)
    assert base_model(model) is model and ModelSource(causal_folder).base is None


def test_gradient_checkpointing_changes_no_gradient(causal_folder):
    row = random_rows(2, (7,))[0].unsqueeze(0)
    gradients = []
    for checkpointed in (False, True):
        model = load_causal_lm(causal_folder, dtype=torch.float32).train()
        if checkpointed:
            use_gradient_checkpointing(model)
        assert backbone(model).training
        model(input_ids=row, labels=row).loss.backward()
        gradients.append([p.grad for p in model.parameters()])
    assert model.is_gradient_checkpointing
    for plain, recomputed in zip(*gradients, strict=True):
        torch.testing.assert_close(recomputed, plain)


def test_only_training_warns_of_what_experts_do_not_get(tmp_path, caplog):
    path = str(tmp_path)
    AutoModelForCausalLM.from_config(family_config("qwen3-moe", 50)).save_pretrained(path)
    load_causal_lm(path, dtype=torch.float32)  # as chat does
    assert not caplog.messages
    StartModel("--model", path, ModelSource(path), check_language_model).warn_of_limits()
    assert caplog.text == naming("auxiliary loss ... experts ... LoRA")


def test_training_names_a_field_that_is_not_understood(tmp_path, caplog):
    """Its forward pass is transformers', which goes by it; past their length these positions depend on the batch."""
    path = str(tmp_path)
    rope = {"rope_type": "dynamic", "factor": 2.0, "rope_theta": 10000.0}
    for changes in ({}, {"rope_parameters": rope}):
        AutoModelForCausalLM.from_config(tiny_config("llama", **changes)).save_pretrained(path)
        StartModel("--model", path, ModelSource(path), check_language_model).warn_of_limits()
    assert caplog.messages == [naming(f"{path}: config.json: rope_parameters ... dynamic ... untested")]


def test_a_private_field_that_transformers_writes_is_no_reason_to_warn(tmp_path, caplog):
    """Gemma 3's pattern of windows, which `layer_types` spells out."""
    config = family_config("gemma-3", 50)
    config.save_pretrained(tmp_path)
    assert "_sliding_window_pattern" in (tmp_path / "config.json").read_text()
    file = tmp_path / "config.json"
    # Transformers writes the first for a model that it read from a GGUF file; its versions 4 wrote the second.
    unread = {"_model_name_or_path": "Some Model 1B", "_attn_implementation_autoset": True}
    file.write_text(json.dumps(json.loads(file.read_text()) | unread))
    read = ModelSource(str(tmp_path)).config
    assert read.layer_types == config.layer_types == ["sliding_attention", "full_attention"]
    assert not caplog.messages and unread.keys().isdisjoint(vars(read))


def test_capped_attention_scores_are_kept(tmp_path):
    """sdpa in older versions of transformers drops the cap: such a model is loaded with eager attention, or refused."""
    config = family_config("gemma-2", 50)
    AutoModelForCausalLM.from_config(config).save_pretrained(tmp_path)
    for asked in ("auto", "eager"):
        loaded = load_causal_lm(str(tmp_path), dtype=torch.float32, attn_implementation=asked)
        assert loaded.config._attn_implementation == "eager"
    with pytest.raises(InputError, match="--attn-implementation sdpa: .*caps its attention scores"):
        load_causal_lm(str(tmp_path), dtype=torch.float32, attn_implementation="sdpa")
