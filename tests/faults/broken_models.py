"""Model folders that are broken in one way each, made from the tiny ones; shared by tests of input and of security."""

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import torch
from peft import LoraConfig, get_peft_model
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM

Break = Callable[[Path], object]
WEIGHTS, ADAPTER = "model.safetensors", "adapter_model.safetensors"
MISSING = object()


class Broken(NamedTuple):
    """What is done to the folder `source`, and what the one line says; `at_load`: only the weights show it."""

    change: Break
    says: str
    source: str = "base"
    at_load: bool = False


def set_json(file: str, **values: Any) -> Break:
    """Fields of a JSON file; MISSING takes one away."""

    def change(folder: Path) -> None:
        content = json.loads((folder / file).read_text(encoding="utf-8")) | values
        content = {name: value for name, value in content.items() if value is not MISSING}
        (folder / file).write_text(json.dumps(content), encoding="utf-8")

    return change


def config(**values: Any) -> Break:
    return set_json("config.json", **values)


def tokenizer(**values: Any) -> Break:
    return set_json("tokenizer_config.json", **values)


def text(file: str, content: str | bytes) -> Break:
    data = content.encode() if isinstance(content, str) else content
    return lambda folder: (folder / file).write_bytes(data)


def without(*files: str) -> Break:
    return lambda folder: [(folder / file).unlink() for file in files]


def cut(file: str, share: float) -> Break:
    """Only the first `share` of a file's bytes."""

    def change(folder: Path) -> None:
        data = (folder / file).read_bytes()
        (folder / file).write_bytes(data[: int(share * len(data))])

    return change


def all_of(*changes: Break) -> Break:
    return lambda folder: [change(folder) for change in changes]


def adapter(**values: Any) -> Break:
    """Nothing but an adapter's configuration."""

    def change(folder: Path) -> None:
        for path in folder.iterdir():
            path.unlink()
        (folder / "adapter_config.json").write_text(json.dumps({"peft_type": "LORA"} | values), encoding="utf-8")

    return change


def lora(change: Callable[[dict[str, Any]], object]) -> Break:
    """An adapter, whose base is moved into `whole/` below it, with its weights changed."""

    def make_adapter(folder: Path) -> None:
        files = list(folder.iterdir())
        (folder / "whole").mkdir()
        for file in files:
            shutil.copy(file, folder / "whole" / file.name)
        for name in (WEIGHTS, "config.json"):
            (folder / name).unlink()
        model: Any = AutoModelForCausalLM.from_pretrained(folder / "whole")
        settings = LoraConfig(r=2, target_modules=["q_proj", "v_proj"], task_type="CAUSAL_LM")
        get_peft_model(model, settings).save_pretrained(folder)
        weights = load_file(folder / ADAPTER)
        change(weights)
        save_file(weights, folder / ADAPTER, metadata={"format": "pt"})

    return make_adapter


def stored_as(dtype: torch.dtype) -> Break:
    """One weight in another type."""

    def change(folder: Path) -> None:
        weights = load_file(folder / WEIGHTS)
        weights[FIRST_NORM] = weights[FIRST_NORM].to(dtype)
        save_file(weights, folder / WEIGHTS, metadata={"format": "pt"})

    return change


def pickled_as(dtype: torch.dtype) -> Break:
    """The same in a `.bin` file alone."""

    def change(folder: Path) -> None:
        weights = load_file(folder / WEIGHTS)
        (folder / WEIGHTS).unlink()
        torch.save(weights | {FIRST_NORM: weights[FIRST_NORM].to(dtype)}, folder / "pytorch_model.bin")

    return change


def template(content: Any) -> Break:
    return tokenizer(chat_template=content)


FIRST_NORM = "model.decoder.layers.0.final_layer_norm.weight"
Q_OF_LAYER_1 = "base_model.model.model.decoder.layers.1.self_attn.q_proj.lora_"


def gives_up(folder: Path) -> None:
    """Give the tokenizer an expression that tries too many ways to match a prompt of these tests."""
    file = folder / "tokenizer.json"
    content = json.loads(file.read_text(encoding="utf-8"))
    split = {"type": "Split", "pattern": {"Regex": "((.|.)*)*\\d"}, "behavior": "Isolated", "invert": False}
    content["pre_tokenizer"] = {"type": "Sequence", "pretokenizers": [split, content["pre_tokenizer"]]}
    file.write_text(json.dumps(content), encoding="utf-8")


INDEX = "model.safetensors.index.json"
HEADER = (8).to_bytes(8, "little") + b"{[[[[[[[" + b"0" * 64
FAILS = "the chat template of {path} rejects a conversation: "
SILENT = "its chat template omits the content of user or assistant turns; give --template human_assistant"

BROKEN: dict[str, Broken] = {
    "no-config": Broken(without("config.json"), "holds no model (no config.json)"),
    "half-config": Broken(cut("config.json", 0.5), "config.json: cannot be read as JSON"),
    "empty-config": Broken(text("config.json", ""), "config.json: cannot be read as JSON"),
    "list-config": Broken(text("config.json", "[1]"), "config.json: got a JSON list, expected an object"),
    "utf16-config": Broken(text("config.json", "{}".encode("utf-16")), "config.json: cannot be read as JSON"),
    "deep-config": Broken(text("config.json", "[" * 100_000), "config.json: cannot be read as JSON"),
    "no-type": Broken(config(model_type=MISSING), "cannot read a model configuration: Unrecognized model"),
    "unknown-type": Broken(config(model_type="alien"), "cannot read a model configuration"),
    "number-as-type": Broken(config(model_type=7), "cannot read a model configuration"),
    "list-as-type": Broken(config(model_type=["opt"]), "cannot read a model configuration"),
    "word-as-size": Broken(config(hidden_size="big"), "Field 'hidden_size' expected int, got str"),
    "unknown-dtype": Broken(config(dtype="evil"), "cannot read a model configuration"),
    "translation": Broken(
        config(model_type="t5", decoder_start_token_id=2), "weights are not in its files", at_load=True
    ),
    "encoder": Broken(config(model_type="bert"), "bert does not generate text from left to right"),
    "speech": Broken(config(model_type="whisper"), "whisper does not generate text from left to right"),
    "negative-size": Broken(config(hidden_size=-1), "config.json: got hidden_size -1, expected 0 to"),
    "negative-layers": Broken(config(num_hidden_layers=-2), "got num_hidden_layers -2, expected 0 to 1000"),
    "negative-width": Broken(config(ffn_dim=-64), "config.json: got ffn_dim -64, expected 0 to"),
    "endless-layers": Broken(config(num_hidden_layers=200_000), "got num_hidden_layers 200000, expected 0 to 1000"),
    "odd-heads": Broken(config(num_attention_heads=5), "must be divisible by num_heads", at_load=True),
    "one-more-layer": Broken(config(num_hidden_layers=3), "16 weights are not in its files", at_load=True),
    "other-width": Broken(config(hidden_size=64, word_embed_proj_dim=64), "the shapes in its files", at_load=True),
    "fewer-positions": Broken(config(max_position_embeddings=96), "the shapes in its files", at_load=True),
    "reward-model": Broken(lambda folder: None, "is a reward model (OPTFor", source="scorer", at_load=True),
    "larger-vocabulary": Broken(config(vocab_size=500), "config.json says vocab_size 500, but model.decoder."),
    "smaller-vocabulary": Broken(config(vocab_size=300), "rows; take config.json and weights from the same"),
    "no-weights": Broken(without(WEIGHTS), "holds no weights (no model.safetensors)"),
    "half-weights": Broken(cut(WEIGHTS, 0.5), "model.safetensors: cut short or"),
    "empty-weights": Broken(text(WEIGHTS, ""), "model.safetensors: cut short or no safetensors file (0 bytes"),
    "absurd-header": Broken(text(WEIGHTS, b"\xff" * 64), "cut short or no safetensors file (64 bytes"),
    "broken-header": Broken(text(WEIGHTS, HEADER), "cut short or no safetensors file ("),
    "tail-on-weights": Broken(
        lambda folder: (folder / WEIGHTS).write_bytes((folder / WEIGHTS).read_bytes() + b"x"), "cut short or no"
    ),
    "lost-shard": Broken(
        all_of(without(WEIGHTS), text(INDEX, '{"weight_map": {"a": "model-1.safetensors"}}')), "1 of its 1 files are"
    ),
    "shard-elsewhere": Broken(
        all_of(without(WEIGHTS), text(INDEX, '{"weight_map": {"a": "../base/model.safetensors"}}')), "are missing"
    ),
    "int8-weights": Broken(stored_as(torch.int8), f"{FIRST_NORM} is stored as I8, not as floating-point numbers"),
    "bool-weights": Broken(stored_as(torch.bool), f"{FIRST_NORM} is stored as BOOL, not as floating-point numbers"),
    "complex-weights": Broken(stored_as(torch.complex64), f"{FIRST_NORM} is stored as C64, not as floating-point"),
    "int8-pickle": Broken(pickled_as(torch.int8), f"pytorch_model.bin: {FIRST_NORM} is stored as int8, not as"),
    "int64-pickle": Broken(pickled_as(torch.int64), f"pytorch_model.bin: {FIRST_NORM} is stored as int64, not as"),
    "bool-pickle": Broken(pickled_as(torch.bool), f"pytorch_model.bin: {FIRST_NORM} is stored as bool, not as"),
    "complex-pickle": Broken(pickled_as(torch.complex64), f"{FIRST_NORM} is stored as complex64, not as"),
    "half-index": Broken(all_of(without(WEIGHTS), text(INDEX, '{"weight')), "cannot be read as an index of weights"),
    "no-tokenizer": Broken(without("tokenizer.json", "tokenizer_config.json"), "holds no tokenizer (no tokenizer"),
    "half-tokenizer": Broken(cut("tokenizer.json", 0.5), "no tokenizer that transformers can load"),
    "half-tokenizer-config": Broken(cut("tokenizer_config.json", 0.5), "no tokenizer that transformers can load"),
    "no-eos": Broken(
        tokenizer(eos_token=None, bos_token=None, pad_token=None, unk_token=None), "has no EOS token to end a turn with"
    ),
    "adapter-without-weights": Broken(adapter(base_model_name_or_path="x"), "an adapter without adapter_model"),
    "adapter-without-base": Broken(adapter(), "base_model_name_or_path is missing"),
    "adapter-that-scales": Broken(
        adapter(base_model_name_or_path="x", lora_alpha=1e38), "lora_alpha: got 1e+38, expected a number of at most 1,0"
    ),
    "adapter-that-scales-a-layer": Broken(
        adapter(base_model_name_or_path="x", lora_alpha=1, alpha_pattern={"q_proj": float("nan")}),
        "lora_alpha: got nan",
    ),
    "half-adapter": Broken(
        all_of(adapter(), text("adapter_config.json", '{"peft')), "adapter_config.json: cannot be read as JSON"
    ),
    "adapter-lacks-a-matrix": Broken(
        lora(lambda weights: weights.pop(Q_OF_LAYER_1 + "A.weight")),
        f"1 weights are not in its adapter_model.safetensors, the first is {Q_OF_LAYER_1}A.default.weight",
        at_load=True,
    ),
    "adapter-of-more-layers": Broken(
        lora(lambda weights: weights.update({Q_OF_LAYER_1.replace("1", "7") + "A.weight": torch.ones(2, 32)})),
        f"1 weights of another model are in its adapter_model.safetensors, the first is {Q_OF_LAYER_1[:20]}",
        at_load=True,
    ),
    "adapter-of-another-rank": Broken(
        lora(lambda weights: weights.update({Q_OF_LAYER_1 + "B.weight": torch.ones(32, 3)})),
        f"size mismatch for {Q_OF_LAYER_1}B.default.weight: copying a param with shape torch.Size([32, 3])",
        at_load=True,
    ),
    "regular-expression": Broken(gives_up, "its tokenizer fails on a text: Onig: Regex search error"),
    "template-syntax": Broken(template("{% for m in messages %}"), FAILS + "Unexpected end of template"),
    "template-attribute": Broken(template("{{ messages[0].foo.bar }}"), FAILS + "'dict object' has no attribute"),
    "template-type": Broken(template("{{ 1 + 'a' }}"), FAILS + "unsupported operand"),
    "template-zero": Broken(template("{{ 1 / 0 }}"), FAILS + "division by zero"),
    "template-memory": Broken(template("{{ 'a' * 10**17 }}"), FAILS + "MemoryError"),
    "template-filter": Broken(template("{{ messages|nosuch }}"), FAILS + "No filter named"),
    "template-include": Broken(template("{% include '/etc/passwd' %}"), FAILS + "no loader"),
    "template-refuses": Broken(template("{{ raise_exception('never') }}"), FAILS + "never"),
    "template-empty": Broken(template(""), SILENT),
    "template-constant": Broken(template("hello"), SILENT),
    "template-other-key": Broken(template("{% for m in messages %}{{ m['text'] }}{% endfor %}"), SILENT),
    "template-number": Broken(template(7), "its chat template: got int, expected a text"),
    "template-huge": Broken(template("x" * 100_001), "got 100001 characters, expected a text of at most 100000"),
}  # fmt: skip


def make(name: str, folder: Path, target: Path) -> Path:
    """The broken folder, as `target`/<name>."""
    broken = BROKEN[name]
    path = target / name
    shutil.copytree(folder / broken.source, path)
    broken.change(path)
    return path
