"""`rlhf merge` from its command line: merged weights, the difference that it prints, and what it refuses."""

import json
import logging.handlers
import re
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from peft import PeftModel
from safetensors.torch import load_file, save_file
from support.families import save_family
from support.messages import naming
from support.model_card import run_example
from support.tiny_models import save_tiny
from support.tiny_t5 import make_t5_folder
from torch import nn
from transformers import (
    AutoModelForCausalLM,
    AutoModelForSeq2SeqLM,
    AutoModelForSequenceClassification,
    AutoTokenizer,
    PreTrainedTokenizerFast,
)
from transformers.utils import logging as transformers_log

from pipeline.checkpoints.cards import card
from pipeline.checkpoints.model_folder import save_model
from pipeline.errors import EXIT_DONE, EXIT_INPUT, InputError
from pipeline.files import OURS
from pipeline.models import loading
from pipeline.models.loading import load_causal_lm, load_language_model
from pipeline.models.lora import add_lora
from pipeline.models.reward_model import check_head, load_reward_model, score_head_fields
from pipeline.models.source import ModelSource
from pipeline.models.weight_files import ADAPTER_WEIGHTS
from rlhf.models.export import main as export
from rlhf.models.merge import SENTENCES, main, sixteen_bits

SETTINGS = {"dim": 4, "alpha": 8.0, "dropout": 0.0, "module_name": "all-linear", "only_lora": True, "seed": 0}
LINE = re.compile(r"largest difference ([0-9.e-]+), mean ([0-9.e-]+)")


@torch.no_grad()
def save_adapter(model: nn.Module, base: str, folder: Path, kind: str, **changes: object) -> str:
    """An adapter, with B and a new head as if trained, of a run whose settings say that its base was `kind`."""
    generator = torch.Generator().manual_seed(1)
    for name, parameter in model.named_parameters():
        if "lora_B" in name or "modules_to_save" in name:
            parameter.add_(0.2 * torch.randn(parameter.shape, generator=generator))
    tokenizer = PreTrainedTokenizerFast.from_pretrained(base)
    group = "critic" if changes else "model"
    documents = {OURS: json.dumps({group: {"quantization": kind}})}
    save_model(model, tokenizer, folder, dtype=torch.float32, documents=documents, **changes)
    return str(folder)


@pytest.fixture(scope="module")
def base(bpe_folder: Path, tmp_path_factory: pytest.TempPathFactory) -> str:
    return save_tiny("llama", bpe_folder, tmp_path_factory.mktemp("merge") / "base")


@pytest.fixture(scope="module")
def adapter(base: str) -> str:
    model = load_causal_lm(base, dtype=torch.float32, quantization="int8")
    return save_adapter(add_lora(model, **SETTINGS, task="CAUSAL_LM"), base, Path(base).parent / "adapter", "int8")


def test_the_base_of_an_adapter_alone_is_not_copied(adapter: str) -> None:
    assert {path.name for path in Path(adapter).glob("*.safetensors")} == {"adapter_model.safetensors"}
    assert not (Path(adapter) / "config.json").exists()


def test_the_command_that_an_error_prints_makes_what_was_wanted(adapter: str, tmp_path: Path) -> None:
    """A new score head on the adapter's quantised base is refused; on the merged model it is not."""
    given: dict[str, Any] = {"new_head": True, "quantization": "int8"}
    with pytest.raises(InputError) as refused:
        check_head(ModelSource(adapter), **given)
    command = re.search(r"; rlhf merge (\S+) FOLDER makes it$", str(refused.value))
    assert command and main([command[1], str(tmp_path / "merged")]) == EXIT_DONE
    check_head(ModelSource(str(tmp_path / "merged")), **given)


def test_a_base_without_a_name_gets_none(base: str, tmp_path: Path) -> None:
    """Nothing is taken for the working directory."""
    model: Any = add_lora(load_causal_lm(base, dtype=torch.float32), **SETTINGS, task="CAUSAL_LM")
    model.peft_config["default"].base_model_name_or_path = ""
    folder = save_adapter(model, base, tmp_path / "adapter", "none", merged=False)
    assert not json.loads(Path(folder, "adapter_config.json").read_text())["base_model_name_or_path"]


def test_merged_weights_are_the_original_ones_plus_the_product(base: str, adapter: str, tmp_path: Path) -> None:
    assert main([adapter, f"{tmp_path}/merged", "--dtype", "fp32"]) == EXIT_DONE
    original, lora = load_file(f"{base}/model.safetensors"), load_file(f"{adapter}/adapter_model.safetensors")
    found = load_file(tmp_path / "merged" / "model.safetensors")
    assert found.keys() == original.keys()
    for name, weight in original.items():
        layer = f"base_model.model.{name.removesuffix('.weight')}"
        if f"{layer}.lora_A.weight" in lora:
            weight = weight + 8 / 4 * lora[f"{layer}.lora_B.weight"] @ lora[f"{layer}.lora_A.weight"]
        torch.testing.assert_close(found[name], weight)
    assert len(lora) == 2 * 2 * 7


def test_a_sentence_beyond_the_positions_is_refused(
    adapter: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main([adapter, f"{tmp_path}/merged", "--sentences", "short", "long " * 500]) == EXIT_INPUT
    (line,) = [line for line in capsys.readouterr().err.splitlines() if line.startswith("error: ")]
    assert line == naming("--sentences ... 64 positions")
    assert not (tmp_path / "merged").exists()


def test_an_adapter_whose_expression_does_not_end_is_refused(
    adapter: str, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of target_modules, as peft matches them with each module's name; it would take years."""
    monkeypatch.setattr(loading, "MAX_MATCH_S", 0.2)
    path = shutil.copytree(adapter, tmp_path / "adapter")
    config = json.loads((path / "adapter_config.json").read_text())
    (path / "adapter_config.json").write_text(json.dumps(config | {"target_modules": "(.*.*)*(.*.*)*(.*.*)*!"}))
    assert main([str(path), f"{tmp_path}/merged"]) == EXIT_INPUT
    assert capsys.readouterr().err == naming(f"error: {path} ... target_modules ... 0.2 s")


def test_an_adapter_that_is_merged_while_loading_is_trained_as_a_whole(adapter: str) -> None:
    """peft froze the weights of its base."""
    models = [load_causal_lm(adapter, dtype=torch.float32)]
    settings: dict[str, Any] = {"dtype": torch.float32, "quantization": "none", "new_head": True}
    models.append(load_reward_model(ModelSource(adapter), **settings).model)
    assert all(parameter.requires_grad for model in models for parameter in model.parameters())


@torch.no_grad()
def test_an_adapter_gives_the_trained_function_again_on_the_quantised_base(base: str, tmp_path: Path) -> None:
    model = add_lora(load_causal_lm(base, dtype=torch.float32, quantization="int8"), **SETTINGS, task="CAUSAL_LM")
    again = load_causal_lm(
        save_adapter(model, base, tmp_path / "adapter", "int8"), dtype=torch.float32, quantization="int8"
    )
    ids = torch.arange(5, 25).unsqueeze(0)
    torch.testing.assert_close(again.eval()(input_ids=ids).logits, model.eval()(input_ids=ids).logits, rtol=0, atol=0)


@torch.no_grad()
def test_the_printed_difference_is_that_of_the_two_functions(
    adapter: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    trained = load_causal_lm(adapter, dtype=torch.float32, quantization="int8").eval()
    words = ["--dtype", "fp32", "--sentences", "The otter.", "So it was."]
    assert main([adapter, f"{tmp_path}/merged", *words]) == EXIT_DONE
    title, kind, *lines = capsys.readouterr().out.splitlines()
    assert title.endswith("in float32") and "int8 base" in kind and len(lines) == 2
    merged = AutoModelForCausalLM.from_pretrained(tmp_path / "merged").eval()
    tokenizer = AutoTokenizer.from_pretrained(tmp_path / "merged")
    for text, line in zip(words[3:], lines, strict=True):
        ids = tokenizer(text, return_tensors="pt").input_ids
        difference = (trained(input_ids=ids).logits - merged(input_ids=ids).logits).abs()
        expected = [difference.max().item(), difference.mean().item()]
        assert [float(figure) for figure in LINE.search(line).groups()] == pytest.approx(expected, rel=1e-3)
        assert difference.max() > 1e-2 and repr(text) in line


def test_against_a_base_that_was_not_quantised_only_rounding_differs(
    adapter: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main([adapter, f"{tmp_path}/merged", "--dtype", "fp32", "--quantization", "none"]) == EXIT_DONE
    found = LINE.findall(capsys.readouterr().out)
    assert len(found) == len(SENTENCES) and all(float(largest) < 1e-4 for largest, _ in found)


def test_without_a_flag_the_weights_get_16_bits(base: str, adapter: str, tmp_path: Path) -> None:
    assert main([adapter, f"{tmp_path}/merged"]) == EXIT_DONE
    weights = load_file(tmp_path / "merged" / "model.safetensors")
    assert {weight.dtype for weight in weights.values()} == {torch.bfloat16}
    half = load_causal_lm(base, dtype=torch.float32).config
    half.dtype = torch.float16
    assert sixteen_bits(half) == torch.float16


@pytest.mark.filterwarnings("error:fan_in_fan_out")
def test_a_layer_that_is_stored_transposed_is_no_reason_to_warn(bpe_folder: Path, tmp_path: Path) -> None:
    """GPT-2's, which quantisation turns round."""
    base = str(shutil.copytree(bpe_folder, tmp_path / "base"))
    save_family("gpt2", Path(base))
    model = add_lora(load_causal_lm(base, dtype=torch.float32, quantization="int8"), **SETTINGS, task="CAUSAL_LM")
    adapter = save_adapter(model, base, tmp_path / "adapter", "int8")
    for quantization in ("int8", "none"):
        load_causal_lm(adapter, dtype=torch.float32, quantization=quantization)


def test_a_reward_models_adapter_brings_its_head(
    base: str, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    start = load_reward_model(ModelSource(base), dtype=torch.float32, quantization="int8", new_head=True)
    start.model = add_lora(start.model, **SETTINGS, task="SEQ_CLS")
    fields = score_head_fields(
        PreTrainedTokenizerFast.from_pretrained(base), score_mean=0.5, score_std=2.0, label="value"
    )
    folder = save_adapter(start.model, base, tmp_path / "adapter", "int8", config_changes=fields)
    reports = logging.handlers.BufferingHandler(100)
    transformers_log.set_verbosity_warning()
    transformers_log.add_handler(reports)
    assert main([folder, f"{tmp_path}/merged", "--dtype", "fp32"]) == EXIT_DONE
    transformers_log.remove_handler(reports)
    assert not reports.buffer, "transformers calls the head new, which the adapter brings"
    assert "scores of the int8 base" in capsys.readouterr().out
    ids, mask = torch.arange(5, 25).unsqueeze(0), torch.ones(1, 20, dtype=torch.bool)
    merged, exact = (
        load_reward_model(ModelSource(path), dtype=torch.float32).eval() for path in (f"{tmp_path}/merged", folder)
    )
    torch.testing.assert_close(merged(ids, mask), exact(ids, mask), rtol=1e-4, atol=1e-4)
    quantised = load_reward_model(ModelSource(folder), dtype=torch.float32, quantization="int8").eval()
    torch.testing.assert_close(quantised(ids, mask), start.eval()(ids, mask), rtol=0, atol=0)
    assert merged.config.score_mean == 0.5 and merged.config.score_std == 2.0
    (Path(folder) / "chat_template.jinja").write_text("{% for message in messages %}{{ message.content }}{% endfor %}")
    example = card("example.py", scores=True, adapter=True, seq2seq=False)
    (Path(folder) / "README.md").write_text(f"```python\n{example}```")
    run_example(Path(folder), monkeypatch)


@pytest.mark.parametrize("name", ["lora_A.weight", "model.score.weight"])
def test_an_adapter_that_lacks_a_weight_is_not_filled_with_random_numbers(
    name: str, base: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Two merges of such a folder differed."""
    model = load_reward_model(ModelSource(base), dtype=torch.float32, quantization="int8", new_head=True).model
    fields = score_head_fields(PreTrainedTokenizerFast.from_pretrained(base), score_mean=0, score_std=1, label="value")
    model = add_lora(model, **SETTINGS, task="SEQ_CLS")
    folder = save_adapter(model, base, tmp_path / "adapter", "int8", config_changes=fields)
    file = Path(folder) / ADAPTER_WEIGHTS
    weights = load_file(file)
    weights.pop(next(key for key in weights if key.endswith(name)))
    save_file(weights, file, metadata={"format": "pt"})
    assert main([folder, f"{tmp_path}/merged"]) == EXIT_INPUT
    (line,) = capsys.readouterr().err.splitlines()
    assert line == naming(f"error: {folder} ... 1 weights ... {ADAPTER_WEIGHTS}") and name[:6] in line
    assert not (tmp_path / "merged").exists()


@pytest.mark.parametrize(
    ("factor", "says"),
    [
        (1e15, ": ... NaN or infinity"),
        (float("nan"), f"/{ADAPTER_WEIGHTS}: base_model."),
    ],
)
def test_an_adapter_whose_outputs_are_not_finite_is_not_merged(
    factor: float, says: str, adapter: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Differences were printed as nan where its weights are finite; else a learning rate was blamed."""
    folder = shutil.copytree(adapter, tmp_path / "large")
    weights = {key: value * factor for key, value in load_file(folder / ADAPTER_WEIGHTS).items()}
    save_file(weights, folder / ADAPTER_WEIGHTS, metadata={"format": "pt"})
    assert main([str(folder), f"{tmp_path}/merged"]) == EXIT_INPUT
    assert capsys.readouterr().err == naming(f"{folder}{says}")
    assert not (tmp_path / "merged").exists()


@pytest.mark.few(1)
@torch.no_grad()
@pytest.mark.parametrize("quantization", ["none", "int8"])
@pytest.mark.parametrize("changes", [{}, {"feed_forward_proj": "gated-gelu", "tie_word_embeddings": False}])
def test_an_encoder_decoder_models_adapter_is_merged(
    tmp_path: Path, changes: dict[str, Any], quantization: str, monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:  # fmt: skip
    """T5's and FLAN-T5's shape, against peft alone on the unquantised base."""
    base = str(make_t5_folder(tmp_path / "made", **changes) / "t5")
    model = load_language_model(ModelSource(base), dtype=torch.float32, quantization=quantization)
    model = add_lora(model, **SETTINGS, task="SEQ_2_SEQ_LM")
    adapter = save_adapter(model, base, tmp_path / "adapter", quantization, merged=False)
    assert main([adapter, f"{tmp_path}/merged", "--dtype", "fp32"]) == EXIT_DONE
    printed = capsys.readouterr().out
    assert len(LINE.findall(printed)) == len(SENTENCES)
    if quantization == "none":
        assert all(float(largest) < 1e-4 for largest, _ in LINE.findall(printed))
    row = {"input_ids": torch.arange(5, 25)[None], "decoder_input_ids": torch.tensor([[0, 7, 9, 11, 13]])}
    plain = AutoModelForSeq2SeqLM.from_pretrained(base).eval()
    start = plain(**row).logits
    expected = PeftModel.from_pretrained(plain, adapter).eval()(**row).logits
    merged = AutoModelForSeq2SeqLM.from_pretrained(tmp_path / "merged").eval()
    torch.testing.assert_close(merged(**row).logits, expected, rtol=1e-4, atol=1e-4)
    assert (expected - start).abs().max() > 1e-2
    run_example(tmp_path / "merged", monkeypatch)


@pytest.mark.few(1)
@torch.no_grad()
@pytest.mark.parametrize("name", ["opt", "gpt2", "reward", "t5"])
def test_an_adapter_on_stored_codes_is_merged_into_their_values(
    name: str, bpe_folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """On two layers only: those without an adapter have values, too; GPT-2's are stored transposed."""
    kind = {"reward": "llama-3"}.get(name, name)
    if name == "t5":
        base = make_t5_folder(tmp_path / "made") / "t5"
    else:
        base = Path(shutil.copytree(bpe_folder, tmp_path / "base"))
        save_family(kind, base)
    assert export([str(base), "--output", f"{tmp_path}/int8", "--dtype", "int8"]) == EXIT_DONE
    some = SETTINGS | {"module_name": {"gpt2": "c_proj", "opt": "fc1", "t5": "wi"}.get(name, "up_proj")}
    changes, int8 = {}, f"{tmp_path}/int8"
    if name == "reward":
        model = load_reward_model(ModelSource(int8), dtype=torch.float32, quantization="int8", new_head=True).model
        model.score.weight.normal_(generator=torch.Generator().manual_seed(2))
        changes["config_changes"] = score_head_fields(
            PreTrainedTokenizerFast.from_pretrained(base), score_mean=0.5, score_std=2.0, label="value"
        )
    else:
        model = load_language_model(ModelSource(int8), dtype=torch.float32, quantization="int8")
    task = {"reward": "SEQ_CLS", "t5": "SEQ_2_SEQ_LM"}.get(name, "CAUSAL_LM")
    adapter = save_adapter(add_lora(model, **some, task=task), int8, tmp_path / "adapter", "int8", **changes)
    capsys.readouterr()
    assert main([adapter, f"{tmp_path}/merged", "--dtype", "fp32"]) == EXIT_DONE
    printed = capsys.readouterr().out
    assert naming(f"int8 codes of {int8} ... float32") in printed.splitlines()
    assert len(LINE.findall(printed)) == 3 and all(float(found) < 1e-4 for found, _ in LINE.findall(printed))
    auto_class = {"reward": AutoModelForSequenceClassification, "t5": AutoModelForSeq2SeqLM}.get(name)
    _, info = (auto_class or AutoModelForCausalLM).from_pretrained(tmp_path / "merged", output_loading_info=True)
    assert not info["missing_keys"] and not info["unexpected_keys"]


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["{adapter}"], "--folders ... 1 ... two ... rlhf merge ADAPTER OUTPUT"),
        (["{base}", "out"], "holds no adapter"),
        (["{adapter}", "{base}"], "exists; name a new folder"),
        (["{adapter}", "--output", "out"], "--output ... --folders ... before any flag"),
    ],
)
def test_what_cannot_be_merged_is_one_line(
    words: list[str], message: str, base: str, adapter: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main([word.format(base=base, adapter=adapter) for word in words]) == EXIT_INPUT
    error = capsys.readouterr().err.strip()
    assert error == naming(message) and "\n" not in error
