"""A model's files are read once for all checks, the tokenizer and loading; what is loaded changes nothing of them."""

from collections import Counter
from pathlib import Path
from typing import Any

import pytest
import torch
from peft import LoraConfig, get_peft_model
from support.tiny_models import save_tiny
from transformers import AutoModelForCausalLM, AutoTokenizer, LlamaConfig, MambaConfig

from pipeline.engine.start_models import check_start_models
from pipeline.models import source as source_module
from pipeline.models import weight_files
from pipeline.models.loading import load_language_model
from pipeline.models.lora import STORED_INT8_ENTRY
from pipeline.models.source import ModelSource, has_key_value_cache, prepare_tokenizer
from step1_sft.checks import start_models
from step1_sft.config import SFTConfig


@pytest.fixture
def reads(monkeypatch: pytest.MonkeyPatch) -> Counter[str]:
    """How often configurations, tokenizers and headers of weights were read since the test began."""
    counts = Counter[str]()

    def count(module: Any, name: str) -> None:
        original = getattr(module, name)

        def counted(*args: Any, **words: Any) -> Any:
            counts[name.strip("_")] += 1
            return original(*args, **words)

        monkeypatch.setattr(module, name, counted)

    count(source_module, "_load_config")
    count(source_module, "load_tokenizer")
    count(weight_files, "read_shapes")
    return counts


@pytest.fixture
def adapter(causal_folder: str, tmp_path: Path) -> str:
    """A LoRA adapter of `causal_folder`."""
    config = LoraConfig(r=2, target_modules=["q_proj"], task_type="CAUSAL_LM")
    get_peft_model(AutoModelForCausalLM.from_pretrained(causal_folder), config).save_pretrained(tmp_path)
    AutoTokenizer.from_pretrained(causal_folder).save_pretrained(tmp_path)
    return str(tmp_path)


def start(path: str) -> ModelSource:
    """Check, tokenizer and weights of a model that stage 1 starts from, as `build` takes them."""
    config = SFTConfig(model={"model_name_or_path": path, "lora_dim": 2}, data={"data_path": ["-"], "max_seq_len": 32})
    (source,) = check_start_models(start_models(config, {}))
    assert prepare_tokenizer(source, "auto") is source.tokenizer
    load_language_model(source, dtype=torch.float32, merged=False)
    return source


def test_a_stage_reads_each_file_of_its_model_once(causal_folder: str, reads: Counter[str]) -> None:
    start(causal_folder)
    assert reads == {"load_config": 1, "load_tokenizer": 1, "read_shapes": 1}


def test_an_adapter_and_its_base_are_read_once_each(adapter: str, causal_folder: str, reads: Counter[str]) -> None:
    """`check_plain_lora` reads the adapter's header once more."""
    source = start(adapter)
    assert source.base is source.whole and source.whole.path == causal_folder
    assert reads == {"load_config": 2, "load_tokenizer": 1, "read_shapes": 3}


def test_loading_leaves_the_configuration_as_it_is(bpe_folder: Path, tmp_path: Path) -> None:
    """Dropouts are set to 0, the entry of stored codes is dropped and the data type set in copies only."""
    source = ModelSource(save_tiny("opt", bpe_folder, tmp_path))
    source.config.quantization_config = {"quant_method": "rlhf_int8"} | STORED_INT8_ENTRY
    before = source.config.to_dict()
    assert before["dropout"] > 0
    with pytest.raises(Exception, match="weights are not in its files"):  # 16-bit weights have no scales
        load_language_model(source, dtype=torch.bfloat16)
    assert source.config.to_dict() == before
    del source.config.quantization_config
    before = source.config.to_dict()
    model = load_language_model(source, dtype=torch.bfloat16)
    assert source.config.to_dict() == before and model.source_config is not source.config


def test_a_cache_of_keys_and_values_is_found_by_either_of_its_names(monkeypatch):
    """transformers 5.24 names it `cache`, as it names the states of models without attention."""

    class Decoder:
        def forward(self, input_ids, cache=None):
            raise NotImplementedError

    kinds = dict.fromkeys((LlamaConfig, MambaConfig), Decoder)
    monkeypatch.setattr("pipeline.models.source.MODEL_FOR_CAUSAL_LM_MAPPING", kinds)
    assert has_key_value_cache(LlamaConfig()) and not has_key_value_cache(MambaConfig())
