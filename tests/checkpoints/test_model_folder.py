"""Saved folders, read back by transformers and peft alone."""

import json
import os
from pathlib import Path

import pytest
import torch
from peft import PeftModel
from safetensors.torch import load_file
from support.model_card import run_example
from support.tiny_models import EOS, NAMES, PAD, padded, random_rows, save_tiny
from torch import nn
from transformers import (
    AutoConfig,
    AutoModelForCausalLM,
    AutoModelForSequenceClassification,
    AutoTokenizer,
    GenerationConfig,
    PreTrainedTokenizerFast,
)

from pipeline.checkpoints import model_folder as saving
from pipeline.checkpoints.cards import card
from pipeline.checkpoints.model_folder import save_model, state_dict
from pipeline.engine.moving_average import MovingAverage
from pipeline.errors import DivergedError, EnvironmentFault, InputError
from pipeline.files import OURS, with_new_folder, write_json
from pipeline.models.loading import load_causal_lm
from pipeline.models.lora import add_lora
from pipeline.models.reward_model import (
    TokenValueModel,
    initialise_head,
    last_token_scores,
    load_reward_model,
    pad_id_for_pooling,
)
from pipeline.models.source import ModelSource

ROW = random_rows(0, (8,))[0].unsqueeze(0)
EXACT = {"rtol": 0, "atol": 0}
CLOSE = {"rtol": 1e-4, "atol": 1e-4}


def tokenizer(folder: str) -> PreTrainedTokenizerFast:
    return PreTrainedTokenizerFast.from_pretrained(folder)


def save(model: nn.Module, source: str, folder: Path, *, dtype: torch.dtype = torch.float32, **settings) -> Path:
    save_model(
        model, tokenizer(source), folder, dtype=dtype, documents={"README.md": "# A model\n", OURS: "{}"}, **settings
    )
    return folder


def reloaded(auto_class, folder: Path) -> nn.Module:
    """By from_pretrained, with every key accounted for."""
    model, info = auto_class.from_pretrained(folder, output_loading_info=True)
    assert not any(info.values()), info
    return model.eval()


@torch.no_grad()
def logits(model: nn.Module) -> torch.Tensor:
    return model(input_ids=ROW).logits


def names_in(folder: Path) -> list[str]:
    return [name for file in sorted(folder.glob("*.safetensors")) for name in load_file(file)]


def with_lora(model: nn.Module, task: str) -> nn.Module:
    """LoRA whose B is not zero any more."""
    settings = {"dim": 4, "alpha": 8.0, "dropout": 0.0, "module_name": "all-linear", "only_lora": True, "seed": 0}
    model = add_lora(model, **settings, task=task).eval()
    generator = torch.Generator().manual_seed(1)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if "lora_B" in name:
                parameter.copy_(0.2 * torch.randn(parameter.shape, generator=generator))
    return model


# --- language models ---


def test_a_saved_model_is_read_by_transformers_with_no_key_left(causal_folder, tmp_path):
    model = load_causal_lm(causal_folder, dtype=torch.float32)
    folder = save(model, causal_folder, tmp_path / "sft")
    assert logits(reloaded(AutoModelForCausalLM, folder)).equal(logits(model))
    assert AutoTokenizer.from_pretrained(folder).get_vocab() == tokenizer(causal_folder).get_vocab()
    assert (folder / "README.md").read_text() == "# A model\n"
    assert not list(folder.glob("*.bin")) and GenerationConfig.from_pretrained(folder).eos_token_id == EOS


def test_the_saved_configuration_is_the_sources_own(causal_folder, tmp_path):
    folder = save(load_causal_lm(causal_folder, dtype=torch.float32), causal_folder, tmp_path / "sft")
    before, after = (AutoConfig.from_pretrained(path).to_dict() for path in (causal_folder, folder))
    for name in ("_name_or_path", "transformers_version"):
        before.pop(name, None), after.pop(name, None)
    assert after == before and (before.get("dropout", 0.1), before.get("layerdrop", 0.1)) == (0.1, 0.1)


def test_a_tied_head_is_saved_once_and_an_untied_one_too(bpe_folder, tiny_folders, tmp_path):
    folder = save(load_causal_lm(tiny_folders["opt"], dtype=torch.float32), tiny_folders["opt"], tmp_path / "tied")
    assert "lm_head.weight" not in names_in(folder)
    assert names_in(folder).count("model.decoder.embed_tokens.weight") == 1
    untied = save_tiny("opt", bpe_folder, tmp_path / "source", tie_word_embeddings=False)
    folder = save(load_causal_lm(untied, dtype=torch.float32), untied, tmp_path / "untied")
    assert "lm_head.weight" in names_in(folder)
    assert logits(reloaded(AutoModelForCausalLM, folder)).equal(logits(load_causal_lm(untied, dtype=torch.float32)))


def test_collected_weights_hold_a_tied_one_once(tiny_folders):
    model = load_causal_lm(tiny_folders["opt"], dtype=torch.float32)
    collected = state_dict(model, dtype=torch.bfloat16)
    assert set(collected) == {name for name, _ in model.named_parameters()}
    assert {value.dtype for value in collected.values()} == {torch.bfloat16}


@pytest.mark.parametrize(("value", "dtype"), [(float("nan"), torch.float32), (1e5, torch.float16)])
def test_a_model_that_is_not_finite_does_not_replace_the_last_one(causal_folder, tmp_path, value, dtype):
    """Also where only the data type of the file cannot hold a weight."""
    model = load_causal_lm(causal_folder, dtype=torch.float32)
    folder = save(model, causal_folder, tmp_path / "sft", dtype=dtype)
    before = {path.name: path.read_bytes() for path in folder.iterdir()}
    name, weight = next((name, weight) for name, weight in model.named_parameters() if "norm" in name)
    weight.data[0] = value
    with pytest.raises(DivergedError, match=f"nothing is saved: 1 of .* float.., .* {name}"):
        save(model, causal_folder, folder, dtype=dtype)
    assert {path.name: path.read_bytes() for path in folder.iterdir()} == before


def test_an_adapter_that_is_not_finite_is_not_saved(tiny_folders, tmp_path):
    model = with_lora(load_causal_lm(tiny_folders["opt"], dtype=torch.float32), "CAUSAL_LM")
    name, weight = next((name, weight) for name, weight in model.named_parameters() if "lora_A" in name)
    weight.data[0] = float("inf")
    with pytest.raises(DivergedError):
        save(model, tiny_folders["opt"], tmp_path / "adapter", merged=False)
    assert not (tmp_path / "adapter").exists()


def test_above_the_shard_size_there_are_shards_and_an_index(causal_folder, tmp_path, monkeypatch):
    monkeypatch.setattr(saving, "SHARD_SIZE", "40KB")
    model = load_causal_lm(causal_folder, dtype=torch.float32)
    folder = save(model, causal_folder, tmp_path / "sft")
    index = json.loads((folder / "model.safetensors.index.json").read_text())
    assert len(set(index["weight_map"].values())) > 1 and sorted(index["weight_map"]) == sorted(names_in(folder))
    assert logits(reloaded(AutoModelForCausalLM, folder)).equal(logits(model))


def test_the_saved_type_is_the_wanted_one(causal_folder, tmp_path):
    model = load_causal_lm(causal_folder, dtype=torch.float32)
    folder = save(model, causal_folder, tmp_path / "sft", dtype=torch.bfloat16)
    assert AutoConfig.from_pretrained(folder).dtype == torch.bfloat16
    found = AutoModelForCausalLM.from_pretrained(folder, dtype="auto")
    for (name, saved), own in zip(found.named_parameters(), model.parameters(), strict=True):
        assert saved.equal(own.bfloat16()), name
    assert next(model.parameters()).dtype == torch.float32


def test_averaged_weights_are_saved_while_swapped_in(tiny_folders, tmp_path):
    model = load_causal_lm(tiny_folders["opt"], dtype=torch.float32)
    average = MovingAverage(model, decay=0.75)
    first = {name: p.detach().clone() for name, p in model.named_parameters()}
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.mul_(2.0)
    average.update()
    expected = logits(model)
    with average.swapped_in():
        folder = save(model, tiny_folders["opt"], tmp_path / "actor_ema")
    saved = reloaded(AutoModelForCausalLM, folder)
    for name, parameter in saved.named_parameters():  # 0.75 w + 0.25 * 2 w
        torch.testing.assert_close(parameter.detach(), 1.25 * first[name])
    assert logits(model).equal(expected)


# --- LoRA ---


def test_merged_folder_and_adapter_give_the_trained_function(causal_folder, tmp_path):
    model = with_lora(load_causal_lm(causal_folder, dtype=torch.float32), "CAUSAL_LM")
    expected = logits(model)
    folder = save(model, causal_folder, tmp_path / "sft")
    assert logits(model).equal(expected)  # saving left the model as it was
    torch.testing.assert_close(logits(reloaded(AutoModelForCausalLM, folder)), expected, **CLOSE)
    base = AutoModelForCausalLM.from_pretrained(causal_folder)
    torch.testing.assert_close(logits(PeftModel.from_pretrained(base, folder / "adapter").eval()), expected, **CLOSE)
    again = load_causal_lm(str(folder / "adapter"), dtype=torch.float32)
    torch.testing.assert_close(logits(again), expected, **CLOSE)
    assert not any("lora" in name or "base_layer" in name for name in names_in(folder))


@pytest.mark.parametrize(("mask", "mode"), [(0o022, 0o644), (0o027, 0o640), (0o077, 0o600)])
def test_all_files_have_the_permissions_that_the_umask_gives(causal_folder, tmp_path, mask, mode):
    """Safetensors writes weights for their owner alone: a server under another user could not read them."""
    before = os.umask(mask)
    try:
        model = with_lora(load_causal_lm(causal_folder, dtype=torch.float32), "CAUSAL_LM")
        folder = save(model, causal_folder, tmp_path / "sft")
    finally:
        os.umask(before)
    files = [path for path in folder.rglob("*") if path.is_file()]
    assert {path.name for path in files} >= {"model.safetensors", "adapter_model.safetensors", "config.json"}
    assert {oct(path.stat().st_mode & 0o777) for path in files} == {oct(mode)}


def test_only_the_adapter_on_request(tiny_folders, tmp_path):
    source = tiny_folders["llama"]
    model = with_lora(load_causal_lm(source, dtype=torch.float32), "CAUSAL_LM")
    folder = save(model, source, tmp_path / "sft", merged=False)
    assert not (folder / "model.safetensors").exists() and (folder / "adapter_model.safetensors").exists()
    torch.testing.assert_close(logits(load_causal_lm(str(folder), dtype=torch.float32)), logits(model), **CLOSE)
    assert AutoTokenizer.from_pretrained(folder).eos_token_id == EOS


def test_the_example_of_an_adapters_card_runs(tiny_folders, tmp_path, monkeypatch):
    source = tiny_folders["llama"]
    folder = save(with_lora(load_causal_lm(source, dtype=torch.float32), "CAUSAL_LM"), source, tmp_path, merged=False)
    (folder / "chat_template.jinja").write_text("{% for message in messages %}{{ message.content }}{% endfor %}")
    example = card("example.py", scores=False, adapter=True, seq2seq=False)
    (folder / "README.md").write_text(f"```python\n{example}```")
    run_example(folder, monkeypatch)


# --- reward models ---


def trained_reward_model(source: str, *, lora: bool) -> TokenValueModel:
    """A language model with a fresh head, as step 2 makes it."""
    reward = load_reward_model(ModelSource(source), dtype=torch.float32, new_head=True)
    initialise_head(reward.model.score, seed=3)
    if lora:
        reward.model = with_lora(reward.model, "SEQ_CLS")
        head = reward.model.get_base_model().score.modules_to_save["default"]
        nn.init.normal_(head.weight, generator=torch.Generator().manual_seed(5))
    return reward.eval()


def save_reward(reward: TokenValueModel, source: str, folder: Path, pad_token: str | None = None, **settings) -> Path:
    own = tokenizer(source)
    own.pad_token = pad_token or own.pad_token
    changes = {"num_labels": 1, "pad_token_id": pad_id_for_pooling(own), "score_mean": 0.5, "score_std": 2.0}
    save_model(
        reward.model, own, folder, dtype=torch.float32, documents={OURS: "{}"}, config_changes=changes, **settings
    )  # fmt: skip
    return folder


@pytest.mark.parametrize("lora", [False, True], ids=["full", "lora"])
def test_a_reward_folder_gives_the_same_raw_scores_in_transformers(causal_folder, tmp_path, lora):
    reward = trained_reward_model(causal_folder, lora=lora)
    rows = [torch.cat([row, torch.tensor([EOS])]) for row in random_rows(4)]
    ids, mask = padded(rows, side="right", extra=2, fill=PAD)
    with torch.no_grad():
        expected = last_token_scores(reward(ids, mask), mask.sum(1))
    folder = save_reward(reward, causal_folder, tmp_path / "reward")
    model = reloaded(AutoModelForSequenceClassification, folder)
    with torch.no_grad():
        found = model(input_ids=ids, attention_mask=mask.long()).logits
    assert found.shape == (4, 1) and model.config.num_labels == 1
    torch.testing.assert_close(found.squeeze(1), expected, **CLOSE)
    again = load_reward_model(ModelSource(str(folder)), dtype=torch.float32).eval()
    with torch.no_grad():
        torch.testing.assert_close(last_token_scores(again(ids, mask), mask.sum(1)), expected, **CLOSE)
    assert (again.config.score_mean, again.config.score_std) == (0.5, 2.0)
    assert "score.weight" in names_in(folder) and "score.bias" not in names_in(folder)


def test_the_trained_head_is_in_the_adapter(tiny_folders, tmp_path):
    source = tiny_folders["opt"]
    reward = trained_reward_model(source, lora=True)
    folder = save_reward(reward, source, tmp_path / "reward")
    assert any(name.endswith("score.weight") for name in names_in(folder / "adapter"))
    base = AutoModelForSequenceClassification.from_pretrained(source, num_labels=1)
    model = PeftModel.from_pretrained(base, folder / "adapter").eval()
    model.config.pad_token_id = PAD
    with torch.no_grad():
        found = model(input_ids=ROW).logits
        expected = reward(ROW, torch.ones_like(ROW, dtype=torch.bool))[:, -1:]
    torch.testing.assert_close(found, expected, **CLOSE)


def test_an_adapters_configuration_is_the_same_in_every_process(bpe_folder, tmp_path):
    """Its layers are a set for peft, which condenses 20 or more of them; the order of a set is chance."""
    source = save_tiny("opt", bpe_folder, tmp_path / "source", num_hidden_layers=4)
    settings = {"dim": 4, "alpha": 8.0, "dropout": 0.0, "only_lora": True, "task": "CAUSAL_LM", "seed": 0}
    for pattern, number in (("layers.1", 6), ("all-linear", 6)):
        model = add_lora(load_causal_lm(source, dtype=torch.float32), module_name=pattern, **settings)
        folder = save(model, source, tmp_path / pattern, merged=False)
        layers = json.loads((folder / "adapter_config.json").read_text())["target_modules"]
        assert layers == sorted(layers) and len(layers) == number


def test_generation_pads_with_the_tokenizers_padding(bpe_folder, tmp_path):
    """Published models name the EOS, or nothing."""
    source = save_tiny("opt", bpe_folder, tmp_path / "source")
    GenerationConfig(pad_token_id=EOS, eos_token_id=EOS, temperature=0.6, do_sample=True).save_pretrained(source)
    folder = save(load_causal_lm(source, dtype=torch.float32), source, tmp_path / "sft")
    saved = GenerationConfig.from_pretrained(folder)
    assert saved.pad_token_id == tokenizer(folder).pad_token_id == PAD != EOS
    assert (saved.eos_token_id, saved.temperature, saved.do_sample) == (EOS, 0.6, True)


def test_a_generation_config_that_transformers_would_not_write_is_saved_each_time(bpe_folder, tmp_path):
    """A temperature without do_sample, as some models are published; the model keeps it between two saves."""
    source = save_tiny("opt", bpe_folder, tmp_path / "source")
    write_json(Path(source) / "generation_config.json", {"temperature": 0.6, "eos_token_id": [EOS, 9]})
    model = load_causal_lm(source, dtype=torch.float32)
    texts = [(save(model, source, tmp_path / name) / "generation_config.json").read_text() for name in ("a", "b")]
    settings = json.loads(texts[0])
    assert texts[0] == texts[1] and model.generation_config.temperature == 0.6
    assert (settings["temperature"], settings["eos_token_id"], settings["pad_token_id"]) == (0.6, [EOS, 9], PAD)


def test_padding_that_is_the_eos_does_not_reach_the_reward_folder(tiny_folders, tmp_path):
    source = tiny_folders["opt"]
    folder = save_reward(trained_reward_model(source, lora=False), source, tmp_path / "reward", pad_token="</s>")
    assert AutoConfig.from_pretrained(folder).pad_token_id not in (None, EOS)


# --- replacing a folder ---


@pytest.mark.parametrize("name", NAMES[-1:])
def test_a_writer_that_fails_leaves_the_old_folder_whole(tiny_folders, tmp_path, monkeypatch, name):
    source, out = tiny_folders[name], tmp_path / "output"
    model = load_causal_lm(source, dtype=torch.float32)
    folder = save(model, source, out / "sft")
    before = {path.name: path.read_bytes() for path in folder.iterdir()}

    def breaks(*args, **kwargs):
        raise OSError("no space left on device")

    monkeypatch.setattr(PreTrainedTokenizerFast, "save_pretrained", breaks)
    with torch.no_grad():
        model.lm_head.weight.add_(1.0)
    with pytest.raises(EnvironmentFault, match="no space"):
        save(model, source, folder)
    assert {path.name: path.read_bytes() for path in folder.iterdir()} == before
    assert [path.name for path in out.iterdir()] == ["sft"]


def test_a_new_folder_replaces_the_old_one_and_what_a_crash_left(tmp_path):
    folder = tmp_path / "a" / "sft"
    for name in (".sft.writing", ".sft.old", "sft"):
        (tmp_path / "a" / name).mkdir(parents=True)
        (tmp_path / "a" / name / "stale.txt").write_text("old")
    (folder / OURS).write_text("{}")
    with_new_folder(folder, lambda fresh: (fresh / "new.txt").write_text("new"))
    assert [path.name for path in folder.iterdir()] == ["new.txt"]
    assert [path.name for path in folder.parent.iterdir()] == ["sft"]


def test_a_folder_that_is_not_ours_stays(tmp_path):
    (tmp_path / "thesis.txt").write_text("years of work")
    with pytest.raises(InputError, match="thesis.txt"):
        with_new_folder(tmp_path, lambda fresh: (fresh / "new.txt").write_text("new"))
    assert [path.name for path in tmp_path.iterdir()] == ["thesis.txt"]


def test_an_interrupt_is_no_reason_to_leave_half_a_folder(tmp_path):
    def interrupted(fresh: Path) -> None:
        (fresh / "half.txt").write_text("half")
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        with_new_folder(tmp_path / "sft", interrupted)
    assert list(tmp_path.iterdir()) == []


def test_json_is_replaced_whole(tmp_path):
    path = tmp_path / "state.json"
    write_json(path, {"step": 1})
    with pytest.raises(TypeError):
        write_json(path, {"step": object()})
    assert json.loads(path.read_text()) == {"step": 1} and list(tmp_path.iterdir()) == [path]
