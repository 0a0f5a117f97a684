"""Bases that bitsandbytes stored in 4 bits: loaded as transformers loads them, refused by one line, and planned."""

import importlib.util
import json
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from support.families import save_family
from support.messages import naming
from support.stored_nf4 import store_nf4
from support.tiny_models import random_rows, save_tiny
from transformers import AutoModelForCausalLM, AutoModelForSequenceClassification, AutoTokenizer

from pipeline.configuration.groups import ModelConfig
from pipeline.engine.memory import num_bytes, storages, weight_tensors
from pipeline.engine.start_models import check_settings
from pipeline.errors import EXIT_DONE, EXIT_INPUT, EnvironmentFault, InputError
from pipeline.models.loaded import check_finite
from pipeline.models.loading import load_causal_lm
from pipeline.models.lora import add_lora, is_lora, quantization_of
from pipeline.models.reward_model import load_reward_model
from pipeline.models.source import ModelSource
from pipeline.planning.measurement import model_size
from pipeline.planning.needs import ModelUse
from rlhf.models import export, merge

NF4 = pytest.mark.skipif(importlib.util.find_spec("bitsandbytes") is None, reason="bitsandbytes is not installed")
ROW = random_rows(0, (8,))[0].unsqueeze(0)
ENTRY = {"quant_method": "bitsandbytes", "load_in_4bit": True, "bnb_4bit_quant_type": "nf4"}
SKIP = ["lm_head", "model.layers.0.mlp"]
LORA: dict[str, Any] = {
    "dim": 2,
    "alpha": 4.0,
    "dropout": 0.0,
    "module_name": "all-linear",
    "only_lora": True,
    "seed": 0,
}


@pytest.fixture(scope="module")
def base(bpe_folder: Path, tmp_path_factory: pytest.TempPathFactory) -> str:
    return save_tiny("llama", bpe_folder, tmp_path_factory.mktemp("stored") / "base", attention_dropout=0.0)


def with_entry(base: str, folder: Path, **entry: Any) -> str:
    """The model at `base` with `entry` as quantization_config in config.json; its weights stay 16 bits."""
    shutil.copytree(base, folder)
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(config | {"quantization_config": entry}))
    return str(folder)


@NF4
@torch.no_grad()
@pytest.mark.parametrize(
    "entry",
    [
        {},
        {"bnb_4bit_use_double_quant": False, "llm_int8_skip_modules": SKIP},
        {"bnb_4bit_quant_storage": "bfloat16", "bnb_4bit_compute_dtype": "bfloat16"},
    ],
    ids=["double", "single-skipped", "stored-as-bf16"],
)
@pytest.mark.parametrize("quantization", ["nf4", "auto"])
def test_a_stored_base_is_loaded_as_transformers_loads_it(
    entry: dict[str, Any], quantization: str, base: str, tmp_path: Path
) -> None:
    """Its numbers, in its own blocks, but computed in the type that is asked for; twice: an evaluation repacks none."""
    folder = store_nf4(base, tmp_path / "nf4", **entry)
    theirs = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).train()
    for module in theirs.modules():
        if hasattr(module, "compute_dtype"):
            module.compute_dtype = torch.float32
    model = load_causal_lm(folder, dtype=torch.float32, quantization=quantization)
    assert quantization_of(model) == "nf4" and not hasattr(model.source_config, "quantization_config")
    for mode in (model.train(), model.eval(), model.train()):
        torch.testing.assert_close(mode(input_ids=ROW).logits, theirs(input_ids=ROW).logits, rtol=0, atol=0)
    packed = {name for name, weight in model.named_parameters() if weight.dtype == torch.uint8}
    assert len(packed) == 14 - 3 * bool(entry.get("llm_int8_skip_modules"))
    check_finite(model, folder)


@NF4
def test_the_type_of_the_other_weights_is_the_one_asked_for(base: str, tmp_path: Path) -> None:
    """transformers leaves them as they are stored."""
    folder = store_nf4(base, tmp_path / "nf4", dtype=torch.bfloat16)
    for dtype in (torch.float32, torch.float16):
        model = load_causal_lm(folder, dtype=dtype, quantization="nf4")
        assert {weight.dtype for weight in model.parameters()} == {torch.uint8, dtype}
        assert model(input_ids=ROW).logits.dtype == dtype


@NF4
def test_score_heads_are_not_in_4_bits(base: str, tmp_path: Path, tiny_folders: dict[str, str]) -> None:
    """Neither a new one, which is not among the modules that the folder names, nor one that was stored."""
    causal, none = (
        store_nf4(base, tmp_path / f"causal-{len(names)}", llm_int8_skip_modules=names) for names in (["lm_head"], [])
    )
    scorer = store_nf4(tiny_folders["llama-reward"], tmp_path / "scorer", auto_class=AutoModelForSequenceClassification)
    for folder, new_head in ((causal, True), (none, True), (scorer, False)):
        model = load_reward_model(ModelSource(folder), dtype=torch.float32, quantization="nf4", new_head=new_head).model
        assert quantization_of(model) == "nf4" and model.score.weight.dtype == torch.float32
    stored = load_file(Path(tiny_folders["llama-reward"], "model.safetensors"))["score.weight"]
    assert model.score.weight.equal(stored)


@NF4
def test_a_stored_number_that_is_not_finite_is_found_in_its_file(base: str, tmp_path: Path) -> None:
    """Codes that are stored as 16-bit numbers may spell NaN, the scales may not."""
    file = Path(store_nf4(base, tmp_path / "nf4", bnb_4bit_quant_storage="bfloat16"), "model.safetensors")
    weights = load_file(file)
    name = "model.layers.1.mlp.up_proj.weight"
    weights[name][3] = float("nan")
    save_file(weights, file, metadata={"format": "pt"})
    check_finite(load_causal_lm(str(file.parent), dtype=torch.float32), str(file.parent))
    weights[f"{name}.nested_absmax"][0] = float("nan")
    save_file(weights, file, metadata={"format": "pt"})
    with pytest.raises(InputError, match=f"model.safetensors: {name}.nested_absmax holds NaN"):
        check_finite(load_causal_lm(str(file.parent), dtype=torch.float32), str(file.parent))


@NF4
@torch.no_grad()
@pytest.mark.parametrize("kind", ["llama", "gpt2"])
@pytest.mark.parametrize("entry", [{}, {"bnb_4bit_quant_storage": "bfloat16", "llm_int8_skip_modules": SKIP}])
def test_an_adapter_on_a_stored_base_stays_apart_and_is_merged_into_its_values(
    kind: str, entry: dict[str, Any], base: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """GPT-2's layers are transposed in 16 bits, and not in 4."""
    if kind == "gpt2":
        base = str(shutil.copytree(base, tmp_path / "base"))
        save_family("gpt2", Path(base))
    folder, adapter = store_nf4(base, tmp_path / "nf4", **entry), tmp_path / "adapter"
    model = add_lora(load_causal_lm(folder, dtype=torch.float32), task="CAUSAL_LM", **LORA)
    model.peft_config["default"].base_model_name_or_path = folder
    for name, weight in model.named_parameters():
        if "lora_B" in name:
            weight.normal_(std=0.2, generator=torch.Generator().manual_seed(1))
    model.save_pretrained(adapter)
    AutoTokenizer.from_pretrained(base).save_pretrained(adapter)
    again = load_causal_lm(str(adapter), dtype=torch.float32)
    assert is_lora(again) and quantization_of(again) == "nf4"
    assert merge.main([str(adapter), f"{tmp_path}/merged", "--dtype", "fp32"]) == EXIT_DONE
    assert "the nf4 codes of" in capsys.readouterr().out
    merged, info = AutoModelForCausalLM.from_pretrained(tmp_path / "merged", output_loading_info=True)
    assert not info["missing_keys"] and not info["unexpected_keys"]
    torch.testing.assert_close(merged(input_ids=ROW).logits, again.eval()(input_ids=ROW).logits, rtol=0, atol=1e-4)


@NF4
@pytest.mark.parametrize("double", [True, False])
def test_as_many_bytes_are_planned_as_are_taken(double: bool, bpe_folder: Path, tmp_path: Path) -> None:
    """But for the constants of each layer, which the doubly quantised scales of a model this small do not hide."""
    shape = {"hidden_size": 256, "intermediate_size": 512, "vocab_size": 400}
    base = save_tiny("llama", bpe_folder, tmp_path / "base", **shape)
    entry = {"bnb_4bit_use_double_quant": double, "llm_int8_skip_modules": SKIP}
    folder = store_nf4(base, tmp_path / "nf4", **entry)
    model = load_causal_lm(folder, dtype=torch.float32, quantization="nf4")
    use = ModelUse("model", folder, ModelConfig(lora_dim=2, quantization="nf4"), trained=False)
    taken = num_bytes(storages(weight_tensors(model)))
    assert model_size(use, "fp32").num_bytes == pytest.approx(taken, rel=0.001)


def test_stored_weights_are_planned_without_bitsandbytes(base: str, tmp_path: Path) -> None:
    """Per weight 4 bits and 4 bytes for each 64, or 0.127 bits; the skipped layer keeps 2 bytes; norms take 4 for 2."""
    use = ModelUse("model", base, ModelConfig(lora_dim=2, quantization="nf4"), trained=False)
    plain = model_size(ModelUse("model", base, ModelConfig(), trained=False), "bf16").num_bytes
    linear, skipped = 2 * (2 * 32 * 32 + 2 * 32 * 16 + 3 * 32 * 48), 3 * 32 * 48
    norms = 5 * 32 * 2
    assert plain - model_size(use, "bf16").num_bytes == int(linear * (1.5 - 0.127 / 8)) - norms
    for name, double, share in (("double", True, 0.127 / 8), ("single", False, 4 / 64)):
        entry = ENTRY | {"bnb_4bit_use_double_quant": double, "llm_int8_skip_modules": SKIP}
        use = ModelUse("model", with_entry(base, tmp_path / name, **entry), use.settings, trained=False)
        assert plain - model_size(use, "bf16").num_bytes == int((linear - skipped) * (1.5 - share)) - norms


def test_the_flag_says_what_is_stored(base: str, tmp_path: Path) -> None:
    folder = with_entry(base, tmp_path / "nf4", **ENTRY)
    check_settings(ModelSource(folder), ModelConfig(lora_dim=2, quantization="nf4"))
    says = "nf4 ... stored as nf4 ... --{}quantization nf4, with LoRA"
    for kind in ("none", "int8"):
        with pytest.raises(InputError, match=naming(says.format("actor-"))):
            check_settings(ModelSource(folder), ModelConfig(quantization=kind), "actor_")
        with pytest.raises(InputError, match=naming(says.format(""))):
            load_causal_lm(folder, dtype=torch.float32, quantization=kind)


@pytest.mark.parametrize(
    ("entry", "stored"),
    [
        (ENTRY | {"bnb_4bit_quant_type": "fp4"}, "fp4"),
        ({"load_in_4bit": True}, "fp4"),  # bitsandbytes' default
        ({"quant_method": "bitsandbytes", "load_in_8bit": True, "load_in_4bit": False}, "bitsandbytes"),
    ],
)
def test_what_else_bitsandbytes_stores_is_refused(
    entry: dict[str, Any], stored: str, base: str, tmp_path: Path
) -> None:
    folder = with_entry(base, tmp_path / "model", **entry)
    with pytest.raises(InputError, match=naming(f"stored as {stored} ... quantization_config ... cannot")):
        check_settings(ModelSource(folder), ModelConfig(lora_dim=2, quantization="nf4"))


def test_no_int8_codes_are_made_of_4_bits(base: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    folder = with_entry(base, tmp_path / "nf4", **ENTRY)
    assert export.main([folder, "--output", f"{tmp_path}/int8", "--dtype", "int8"]) == EXIT_INPUT
    line = naming(f"error: --checkpoint ... {folder} ... nf4 ... 16-bit original")
    assert capsys.readouterr().err.splitlines()[-1] == line


def test_a_stored_base_without_bitsandbytes_is_one_line(
    base: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    folder = with_entry(base, tmp_path / "nf4", **ENTRY)
    for kind, says in (("auto", f"{folder}: its weights are stored as nf4"), ("nf4", "--quantization nf4")):
        with pytest.raises(EnvironmentFault, match=naming("pip install bitsandbytes ... not installed")) as raised:
            load_causal_lm(folder, dtype=torch.float32, quantization=kind)
        assert str(raised.value).startswith(f"{says}: ") and "\n" not in str(raised.value)
