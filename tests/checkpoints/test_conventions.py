"""The folders of a tiny run of all stages, against what vLLM, SGLang, TGI, llama.cpp's converter and peft look for."""

import json
import logging
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any, NamedTuple, cast

import pytest
import torch
from peft import PeftModel
from safetensors.torch import load_file
from support.command_run import run_command
from support.families import FACTORS, family_config, save_family
from support.messages import naming
from support.tiny_models import padded, random_rows, randomise
from transformers import (
    AutoConfig,
    AutoModelForCausalLM,
    AutoModelForSequenceClassification,
    AutoTokenizer,
    GenerationConfig,
    LlamaConfig,
    LlamaForCausalLM,
    LlamaTokenizerFast,
)

from pipeline.checkpoints import model_folder
from pipeline.checkpoints.model_folder import save_model, save_tokenizer, with_former_fields
from pipeline.models.loading import load_language_model
from pipeline.models.lora import add_lora
from pipeline.models.reward_model import last_token_scores, load_reward_model
from pipeline.models.source import ModelSource, prepare_tokenizer
from rlhf.models import merge

CLOSE = {"rtol": 1e-4, "atol": 1e-4}
TEMPLATE = (
    "{% for message in messages %}<|start|>{{ message['role'] }}\n{{ message['content'] }}<|end|>{% endfor %}"
    "{% if add_generation_prompt %}<|start|>assistant\n{% endif %}"
)
SPECIAL = ["<|start|>", "<|end|>", "<|tool|>"]
ROPE = {
    "rope_type": "llama3", "rope_theta": 500000.0, "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0,
    "original_max_position_embeddings": 64,
}  # fmt: skip
PIECES = b"a SentencePiece model, which nothing here reads"
BASE, EOS, PAD, END, TOOL = "start", 2, 1, 401, 402


def save_start_model(folder: Path) -> Path:
    """A tiny Llama in the habits of published ones: two EOS ids, another token that ends turns, a temperature."""
    tokenizer = AutoTokenizer.from_pretrained(folder / "base")
    tokenizer.add_special_tokens({"extra_special_tokens": SPECIAL})
    tokenizer.chat_template = TEMPLATE
    assert tokenizer.convert_tokens_to_ids(["</s>", *SPECIAL]) == [EOS, 400, END, TOOL]
    shape = {"hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "num_attention_heads": 4}
    ids = {"vocab_size": len(tokenizer), "bos_token_id": EOS, "eos_token_id": [EOS, TOOL]}
    config = LlamaConfig(**shape, **ids, num_key_value_heads=2, max_position_embeddings=128, rope_parameters=ROPE)
    model = LlamaForCausalLM(config)
    randomise(model, 0)
    model.save_pretrained(folder / BASE)
    tokenizer.save_pretrained(folder / BASE)
    # transformers would not write this one: do_sample is missing. Published ones are like it.
    settings = {"eos_token_id": [EOS, TOOL], "temperature": 0.6, "top_p": 0.9}
    (folder / BASE / "generation_config.json").write_text(json.dumps(settings))
    (folder / BASE / "tokenizer.model").write_bytes(PIECES)
    return folder / BASE


@pytest.fixture(scope="module")
def outputs(folder: Path) -> Path:
    """One step of each stage: SFT with LoRA, and with the adapter alone; the reward model; PPO."""
    start = save_start_model(folder)
    common = {"data_path": folder / "train.jsonl", "data_split": "none", "max_steps": 1, "dtype": "fp32"}
    common |= {"data_output_path": folder / "cache", "enable_tensorboard": "false", "eval_fraction": 0}

    def run(stage: str, **flags: Any) -> None:
        words = [word for name, value in (common | flags).items() for word in (f"--{name}", value)]
        ended = run_command(stage, words, folder=folder)
        assert ended.code == 0 and "FutureWarning" not in ended.stderr, ended.stderr

    supervised = {"model": start, "max_seq_len": 96, "learning_rate": 0.05}
    run("step1_sft", **supervised, output_dir="sft", lora_dim=2)
    run("step1_sft", **supervised, output_dir="only", lora_dim=2, save_adapter_only="true")
    run("step2_reward", **supervised, output_dir="reward", save_dtype="bf16")
    models = {"actor_model_name_or_path": "sft", "critic_model_name_or_path": "reward", "output_dir": "."}
    rollout = {"per_device_generation_batch_size": 4, "per_device_train_batch_size": 4}
    run("step3_ppo", **models, **rollout, max_prompt_seq_len=64, max_answer_seq_len=4)
    return folder


def read(file: Path) -> dict[str, Any]:
    return json.loads(file.read_text(encoding="utf-8"))


def weights_are_safetensors(folder: Path) -> None:
    names = [path.name for path in folder.iterdir()]
    assert "model.safetensors" in names and not [name for name in names if name.endswith((".bin", ".pt", ".pth"))]


def tensors_have_transformers_names(folder: Path) -> None:
    scores = "SequenceClassification" in read(folder / "config.json")["architectures"][0]
    auto = AutoModelForSequenceClassification if scores else AutoModelForCausalLM
    _, info = auto.from_pretrained(folder, output_loading_info=True)
    assert not any(info.values()), info


def config_names_the_class(folder: Path) -> None:
    kind = "CausalLM" if folder.name in ("sft", "actor") else "SequenceClassification"
    config = read(folder / "config.json")
    assert (config["architectures"], config["model_type"]) == ([f"LlamaFor{kind}"], "llama")


def config_names_the_type_of_the_weights(folder: Path) -> None:
    types = {str(value.dtype) for value in load_file(folder / "model.safetensors").values()}
    config = read(folder / "config.json")
    assert {f"torch.{config[name]}" for name in ("dtype", "torch_dtype")} == types


def config_has_rotary_positions_by_both_names(folder: Path) -> None:
    config = read(folder / "config.json")
    assert config["rope_parameters"] == ROPE and config["rope_theta"] == ROPE["rope_theta"]
    assert config["rope_scaling"].items() >= {name: ROPE[name] for name in ROPE if name != "rope_theta"}.items()


def embedding_has_the_rows_that_config_says(folder: Path) -> None:
    rows = load_file(folder / "model.safetensors")["model.embed_tokens.weight"].shape[0]
    assert rows == read(folder / "config.json")["vocab_size"] == 403


def template_is_a_file(folder: Path) -> None:
    assert (folder / "chat_template.jinja").read_text() == TEMPLATE
    assert "chat_template" not in read(folder / "tokenizer_config.json")


def tokenizer_is_one_of_transformers_4_too(folder: Path) -> None:
    config = read(folder / "tokenizer_config.json")
    assert (folder / "tokenizer.json").is_file() and config["tokenizer_class"] == "PreTrainedTokenizerFast"
    assert config["additional_special_tokens"] == SPECIAL and "extra_special_tokens" not in config
    assert (config["eos_token"], config["pad_token"]) == ("</s>", "<pad>")
    assert AutoTokenizer.from_pretrained(folder).extra_special_tokens == SPECIAL


def sentencepiece_model_is_that_of_the_start_model(folder: Path) -> None:
    assert (folder / "tokenizer.model").read_bytes() == PIECES
    added = read(folder / "tokenizer_config.json")["added_tokens_decoder"]
    assert {number: token["content"] for number, token in added.items()}.items() >= {"402": "<|tool|>"}.items()


def generation_ends_at_every_end(folder: Path) -> None:
    settings = read(folder / "generation_config.json")
    assert settings["eos_token_id"] == [EOS, TOOL, END] and settings["pad_token_id"] == PAD
    assert (settings["temperature"], settings["top_p"]) == (0.6, 0.9) and "_from_model_config" not in settings
    assert GenerationConfig.from_pretrained(folder).eos_token_id == [EOS, TOOL, END]


def head_is_a_regression_with_one_label(folder: Path) -> None:
    config, head = read(folder / "config.json"), load_file(folder / "model.safetensors")
    assert len(config["id2label"]) == 1 and config["problem_type"] == "regression"
    assert head["score.weight"].shape == (1, 32) and "score.bias" not in head and "lm_head.weight" not in head
    assert config["pad_token_id"] == PAD


def adapter_has_the_files_of_peft(folder: Path) -> None:
    config, tensors = read(folder / "adapter_config.json"), load_file(folder / "adapter_model.safetensors")
    assert (config["peft_type"], config["task_type"], config["bias"]) == ("LORA", "CAUSAL_LM", "none")
    assert (config["r"], config["lora_alpha"], config["modules_to_save"]) == (2, 16, None)
    assert Path(config["base_model_name_or_path"]).name == BASE
    layers = {name.removeprefix("base_model.model.").rpartition(".lora_")[0] for name in tensors}
    kinds = ["down_proj", "gate_proj", "k_proj", "o_proj", "q_proj", "up_proj", "v_proj"]
    assert config["target_modules"] == sorted({name.rpartition(".")[2] for name in layers}) == kinds
    assert {f"base_model.model.{name}.lora_{part}.weight" for name in layers for part in "AB"} == set(tensors)
    assert len(layers) == 14 and all(name.startswith("model.layers.") for name in layers)


class Convention(NamedTuple):
    """A check, the folders that it holds for, and the programs that ask for it."""

    check: Callable[[Path], None]
    folders: tuple[str, ...]
    programs: str


LANGUAGE, SCORES, ADAPTERS = ("sft", "actor"), ("reward", "critic"), ("sft/adapter", "only")
WHOLE = LANGUAGE + SCORES
CONVENTIONS = (
    # vLLM and SGLang glob *.safetensors, TGI model*.safetensors, llama.cpp's convert_hf_to_gguf.py model*.safetensors.
    Convention(weights_are_safetensors, WHOLE, "vLLM, SGLang, TGI, llama.cpp"),
    # All four map tensors by transformers' names; one that is unknown ends loading.
    Convention(tensors_have_transformers_names, WHOLE, "vLLM, SGLang, TGI, llama.cpp"),
    # vLLM, SGLang and llama.cpp choose the implementation by `architectures`, TGI by `model_type`.
    Convention(config_names_the_class, WHOLE, "vLLM, SGLang, TGI, llama.cpp"),
    # `--dtype auto` of vLLM and SGLang; `torch_dtype` is its name before transformers 4.56.
    Convention(config_names_the_type_of_the_weights, WHOLE, "vLLM, SGLang"),
    # `rope_theta` and `rope_scaling` before transformers 5: programs of that time take 10,000 where they find none.
    Convention(config_has_rotary_positions_by_both_names, WHOLE, "vLLM, SGLang, TGI, llama.cpp"),
    # llama.cpp stops at an id beyond vocab_size and fills up missing ones; vLLM checks the shape on loading.
    Convention(embedding_has_the_rows_that_config_says, WHOLE, "vLLM, llama.cpp"),
    # By transformers since 4.44, by gguf's SpecialVocab where tokenizer_config.json has no template.
    Convention(template_is_a_file, (*WHOLE, "only"), "vLLM, SGLang, llama.cpp"),
    # Those on transformers 4 know neither the class TokenizersBackend nor a list of extra_special_tokens.
    Convention(tokenizer_is_one_of_transformers_4_too, (*WHOLE, "only"), "TGI, llama.cpp, older vLLM and SGLang"),
    # Without one llama.cpp refuses Gemma 1 and 2 and Phi-3; it finds added tokens in tokenizer_config.json.
    Convention(sentencepiece_model_is_that_of_the_start_model, (*WHOLE, "only"), "llama.cpp"),
    # vLLM, SGLang and TGI stop at the ids of generation_config.json, and vLLM samples by its settings.
    Convention(generation_ends_at_every_end, LANGUAGE, "vLLM, SGLang, TGI"),
    # vLLM answers the sigmoid of a score unless `problem_type` is regression.
    Convention(head_is_a_regression_with_one_label, SCORES, "vLLM, transformers"),
    # vLLM needs r, lora_alpha, target_modules and no modules_to_save; older SGLang the last parts of names. TGI and
    # peft look for base_model.model.<name>.lora_A.weight and lora_B.weight.
    Convention(adapter_has_the_files_of_peft, ADAPTERS, "vLLM, SGLang, TGI, llama.cpp's convert_lora_to_gguf.py, peft"),
)


@pytest.mark.parametrize(
    ("check", "name"),
    [
        pytest.param(convention.check, name, id=f"{convention.check.__name__}-{name}")
        for convention in CONVENTIONS
        for name in convention.folders
    ],
)
def test_a_folder_keeps_the_convention(outputs: Path, check: Callable[[Path], None], name: str) -> None:
    check(outputs / name)


CONVERTED = {
    # Family: its class of tokenizer, tokens that are added to those of the SentencePiece model.
    "gemma-2": ("GemmaTokenizer", ["<pad>", "<mask>", "<start_of_turn>", "<end_of_turn>"]),
    "phi-3": ("LlamaTokenizer", ["<|endoftext|>", "<|user|>", "<|end|>"]),
}


def pieces_of(folder: Path) -> dict[int, str]:
    """What llama.cpp's converter takes: pieces of tokenizer.model, overwritten by tokenizer_config.json's tokens."""
    model = pytest.importorskip("sentencepiece").SentencePieceProcessor(str(folder / "tokenizer.model"))
    added = read(folder / "tokenizer_config.json")["added_tokens_decoder"]
    own = {number: model.id_to_piece(number) for number in range(model.vocab_size())}
    return own | {int(number): token["content"] for number, token in added.items()}


@pytest.mark.few(1)
@pytest.mark.parametrize("name", CONVERTED)
def test_the_vocabulary_of_a_converter_is_that_of_training(real_data: Path, tmp_path: Path, name: str) -> None:
    """After two savings, an adapter's and the merged model's."""
    kind, special = CONVERTED[name]
    source = real_data / "tokenizers" / "mistral-v1" / "tokenizer.model"
    tokenizer = LlamaTokenizerFast.from_pretrained(source.parent)
    tokenizer.add_special_tokens({"extra_special_tokens": special})
    tokenizer.save_pretrained(tmp_path / "base")
    settings = read(tmp_path / "base" / "tokenizer_config.json") | {"tokenizer_class": kind}
    (tmp_path / "base" / "tokenizer_config.json").write_text(json.dumps(settings))
    save_family(name, tmp_path / "base")
    (tmp_path / "base" / "tokenizer.model").write_bytes(source.read_bytes())
    model = add_lora(
        load_language_model(ModelSource(str(tmp_path / "base")), dtype=torch.float32),
        **{"dim": 2, "alpha": 4.0, "dropout": 0.0, "module_name": "all-linear", "only_lora": True, "seed": 0},
        task="CAUSAL_LM",
    )
    loaded = prepare_tokenizer(ModelSource(str(tmp_path / "base")), "human_assistant")
    save_model(model, loaded, tmp_path / "only", dtype=torch.float32, documents={}, merged=False)
    assert merge.main([str(tmp_path / "only"), str(tmp_path / "merged")]) == 0
    for folder in (tmp_path / "only", tmp_path / "merged"):
        assert (folder / "tokenizer.model").read_bytes() == source.read_bytes()
        found = AutoTokenizer.from_pretrained(folder)
        assert pieces_of(folder) == {number: piece for piece, number in tokenizer.get_vocab().items()}
        assert found("Tea?<|end|><end_of_turn>").input_ids == loaded("Tea?<|end|><end_of_turn>").input_ids


@pytest.mark.parametrize("begins", [True, False])
def test_a_converter_is_told_whether_texts_begin_with_bos(real_data: Path, tmp_path: Path, begins: bool) -> None:
    """llama.cpp takes what gguf finds, and without a finding puts BOS before each text of a SentencePiece model."""
    start, saved = tmp_path / "start", tmp_path / "saved"
    for folder in (start, saved):
        folder.mkdir()
    (start / "tokenizer.model").write_bytes((real_data / "tokenizers" / "mistral-v1" / "tokenizer.model").read_bytes())
    names = {"bos_token": "<s>", "eos_token": "</s>", "unk_token": "<unk>", "tokenizer_class": "LlamaTokenizer"}
    (start / "tokenizer_config.json").write_text(json.dumps(names | {"add_bos_token": begins}))
    save_tokenizer(AutoTokenizer.from_pretrained(start), saved)
    assert read(saved / "tokenizer_config.json")["add_bos_token"] is begins
    assert ("<s>" in AutoTokenizer.from_pretrained(saved)("Tea?").tokens()) is begins
    gguf = pytest.importorskip("gguf", reason="gguf is not installed, which llama.cpp's converter reads folders with")
    assert gguf.SpecialVocab(saved).add_special_token["bos"] is begins


@pytest.mark.parametrize("scaling", [{"rope_type": "default"}, {"rope_type": "linear", "factor": 4.0}])
@pytest.mark.parametrize("kind", ["llama", "qwen3", "gemma2", "gemma3_text", "phi", "gpt_neox", "stablelm", "olmo2"])
def test_former_names_of_rotary_positions_change_nothing(tmp_path: Path, kind: str, scaling: dict[str, Any]) -> None:
    """transformers reads both names; a value that it took from the former one alone would win here."""
    partial = {"partial_rotary_factor": 0.5} if kind in ("phi", "gpt_neox", "stablelm") else {}
    rope = scaling | {"rope_theta": 77000.0} | partial
    nested = {"full_attention": rope, "sliding_attention": {"rope_type": "default", "rope_theta": 5000.0}}
    config = AutoConfig.for_model(kind, rope_parameters=nested if kind == "gemma3_text" else rope)
    config.dtype = "float16"
    config.save_pretrained(tmp_path)
    written = with_former_fields(read(tmp_path / "config.json"))
    former = {"rope_theta": 77000.0, **partial, "torch_dtype": "float16"}
    if kind == "gpt_neox":
        former = {"rotary_emb_base": 77000.0, "rotary_pct": 0.5, "torch_dtype": "float16"}
    if kind == "gemma3_text":
        former["rope_local_base_freq"] = 5000.0
    assert {name: written.get(name) for name in former} == former
    assert written.get("rope_scaling", {"rope_type": "default"}).items() >= scaling.items()
    (tmp_path / "config.json").write_text(json.dumps(written))
    found = AutoConfig.from_pretrained(tmp_path)
    assert found.rope_parameters == config.rope_parameters and found.dtype == torch.float16


@pytest.mark.parametrize(
    ("name", "former"),
    [
        # The only three entries that Phi3Config of transformers 4 takes; what else it needs are fields of their own.
        ("phi-4-mini", {"rope_scaling": {"type": "longrope"} | FACTORS, "original_max_position_embeddings": 96}),
        ("phi-4-mini", {"rope_theta": 100.0, "partial_rotary_factor": 0.5}),
        ("qwen3-moe", {"num_experts": 4, "num_experts_per_tok": 2}),  # Qwen3MoeConfig of transformers 4 assumes 128
        ("olmoe", {"num_experts": 4}),
    ],
)
def test_fields_that_transformers_4_demands_change_nothing(tmp_path: Path, name: str, former: dict[str, Any]) -> None:
    config = family_config(name, 500)
    config.dtype = "float16"
    config.save_pretrained(tmp_path)
    written = with_former_fields(read(tmp_path / "config.json"))
    assert {field: written.get(field) for field in former} == former
    (tmp_path / "config.json").write_text(json.dumps(written))
    again = AutoConfig.from_pretrained(tmp_path)
    assert with_former_fields(again.to_diff_dict() | {"dtype": "float16"}).items() >= former.items()
    found, expected = again.to_dict(), config.to_dict()
    (found.get("rope_parameters") or {}).pop("type", None)  # both names, where only the former one was
    assert {field: found.get(field) for field in expected} | {"_name_or_path": ""} == expected


@torch.no_grad()
def test_no_card_names_a_folder_of_this_machine(outputs: Path) -> None:
    """adapter_config.json does: peft finds the base there."""
    pages = [file for name in ("README.md", "training_config.json") for file in outputs.rglob(name)]
    assert len(pages) >= 10 and {"sft", "only", "actor"} <= {file.parent.name for file in pages}
    assert not [file for file in pages if str(outputs) in file.read_text(encoding="utf-8")]


def test_an_adapter_on_its_base_is_the_merged_model(outputs: Path) -> None:
    row = random_rows(0, (12,))[0].unsqueeze(0)
    merged = AutoModelForCausalLM.from_pretrained(outputs / "sft").eval()(row).logits
    plain = AutoModelForCausalLM.from_pretrained(outputs / BASE).eval()(row).logits
    assert (merged - plain).abs().max() > 0.01
    for name in ADAPTERS:  # the same run twice
        base = AutoModelForCausalLM.from_pretrained(outputs / BASE)
        found = PeftModel.from_pretrained(base, outputs / name).eval()(row).logits
        torch.testing.assert_close(found, merged, **CLOSE)


@torch.no_grad()
@pytest.mark.parametrize("name", SCORES)
def test_transformers_alone_gives_the_scores(outputs: Path, name: str) -> None:
    """Of rows that end in EOS and are padded: what docs/reference/files.md promises to other programs."""
    rows = [torch.cat([row, torch.tensor([EOS])]) for row in random_rows(1)]
    ids, mask = padded(rows, side="right", extra=2, fill=PAD)
    model = AutoModelForSequenceClassification.from_pretrained(outputs / name, num_labels=1, dtype=torch.float32)
    ours = load_reward_model(ModelSource(str(outputs / name)), dtype=torch.float32).eval()
    expected = last_token_scores(ours(ids, mask), mask.sum(1))
    torch.testing.assert_close(model.eval()(ids, mask.long()).logits.squeeze(1), expected, **CLOSE)
    assert expected.std() > 0.01


@pytest.mark.parametrize(
    ("start", "given", "says"), [("bfloat16", "auto", True), ("float32", "auto", False), ("bfloat16", "fp32", False)]
)
def test_a_model_that_is_saved_larger_than_its_start_says_so(tmp_path, monkeypatch, caplog, start, given, says):
    saved: list[torch.dtype] = []
    monkeypatch.setattr(model_folder, "save_model", lambda *_, dtype, **__: saved.append(dtype))
    monkeypatch.setattr(model_folder, "model_documents", lambda *_, **__: {})
    monkeypatch.setattr(model_folder, "weights_dtype", lambda _: torch.float32)
    monkeypatch.setattr(model_folder, "base_model", lambda model: model)
    config = SimpleNamespace(run=SimpleNamespace(save_dtype=given), deepspeed=SimpleNamespace(save_adapter_only=False))
    run: Any = SimpleNamespace(resolved=SimpleNamespace(config=config))
    model: Any = torch.nn.Linear(1, 1)
    model.source_config = SimpleNamespace(dtype=getattr(torch, start))
    module, none = torch.nn.ModuleDict({"model": model}), cast(Any, None)
    with caplog.at_level(logging.INFO):
        model_folder.save_trained(run, module, none, tmp_path / "sft", model=cast(Any, object()), kind="x", step=1)
    text = naming(f"{tmp_path / 'sft'} ... float32 ... bfloat16")
    assert saved == [torch.float32] and (caplog.text == text) == says
