"""`rlhf convert` from its command line: folders of DeepSpeed-Chat, written by support/deepspeed_chat.py."""

import json
import os
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from support import deepspeed_chat as dschat
from support.command_run import run_command
from support.families import family_config
from support.in_process import error_lines
from support.messages import naming
from support.real_tokenizers import load_opt_tokenizer
from support.tiny_models import EOS, NAMES, PAD, padded, random_rows, tiny_config
from support.tiny_run import make_folder, opt_config
from torch import nn
from transformers import (
    AutoConfig,
    AutoModelForCausalLM,
    AutoModelForSequenceClassification,
    AutoTokenizer,
    GPT2TokenizerFast,
    PreTrainedTokenizerFast,
)

from pipeline.models.reward_model import last_token_scores, load_reward_model
from pipeline.models.source import ModelSource
from rlhf import chat
from rlhf.models.convert import main
from step2_reward import eval as reward_eval

LORA = {"opt": "decoder.layers.", "opt-350m": "decoder.layers.", "llama": "layers."}
VOCABULARY = 408  # 379 tokens of conftest.bpe_folder; DeepSpeed-Chat's multiple of 8, and more
IDS = padded(random_rows(0), side="right", extra=2, fill=PAD)
CLOSE = {"rtol": 1e-5, "atol": 1e-5}


def config_of(name: str, **changes: Any):
    return tiny_config(name, vocab_size=VOCABULARY, **changes)


def converted(source: Path, output: Path, tokenizer: Path | str = "", *words: str) -> Path:
    flags = ["--tokenizer", str(tokenizer)] if tokenizer else []
    assert main([str(source), str(output), *flags, *words]) == 0
    return output


def refused(capsys: pytest.CaptureFixture, *words: object) -> str:
    """The one line of a command that ends with 2."""
    capsys.readouterr()
    assert main([*map(str, words)]) == 2
    lines = error_lines(capsys.readouterr().err)
    assert len(lines) == 1, lines
    return lines[0]


@torch.no_grad()
def logits(model: nn.Module) -> torch.Tensor:
    return model(input_ids=IDS[0], attention_mask=IDS[1].long()).logits[IDS[1]]


@torch.no_grad()
def end_scores(model: dschat.RewardModel) -> torch.Tensor:
    """Score of each row's last token, one row at a time."""
    lengths = IDS[1].sum(1).tolist()
    rows = [row[:length].unsqueeze(0) for row, length in zip(IDS[0], lengths, strict=True)]
    return torch.stack([model(row, torch.ones_like(row))[0, -1] for row in rows])


@torch.no_grad()
def scores_after(folder: Path) -> torch.Tensor:
    """By this project's own class, and by transformers alone, which must agree."""
    ours = load_reward_model(ModelSource(str(folder)), dtype=torch.float32).eval()
    values = last_token_scores(ours(*IDS), IDS[1].sum(1))
    plain, info = AutoModelForSequenceClassification.from_pretrained(folder, output_loading_info=True)
    assert not any(info.values()), info
    torch.testing.assert_close(plain.eval()(IDS[0], attention_mask=IDS[1].long()).logits.squeeze(1), values, **CLOSE)
    return values


# --- actors ---


@pytest.mark.parametrize("lora", [False, True], ids=["full", "lora"])
@pytest.mark.parametrize("name", NAMES)
def test_an_actor_gives_the_same_logits(bpe_folder, bpe_tokenizer, tmp_path, name, lora):
    """LoRA parts that were not fused are merged; `transformers` finds every key, and no other."""
    model = dschat.actor(config_of(name), lora=LORA[name] if lora else "")
    source = dschat.save(model, tmp_path / "sft", bpe_tokenizer)
    assert lora == any("lora" in key for key in torch.load(source / "pytorch_model.bin", weights_only=True))
    output = converted(source, tmp_path / "out", bpe_folder)
    found, info = AutoModelForCausalLM.from_pretrained(output, output_loading_info=True)
    assert not any(info.values()), info
    torch.testing.assert_close(logits(found.eval()), logits(model), **CLOSE)
    assert found.config.pad_token_id == PAD != model.config.pad_token_id == EOS
    assert sorted(path.suffix for path in output.iterdir() if path.stem.endswith("model")) == [".safetensors"]
    assert not [path.name for path in output.iterdir() if str(tmp_path).encode() in path.read_bytes()]


@pytest.mark.parametrize("tied", [True, False])
def test_a_folder_saved_under_zero_3_holds_a_tied_weight_once(bpe_folder, bpe_tokenizer, tmp_path, tied):
    model = dschat.actor(config_of("opt", tie_word_embeddings=tied), seed=4)
    source = dschat.save(model, tmp_path / "actor_ema", bpe_tokenizer, zero_stage=3)
    output = converted(source, tmp_path / "out", bpe_folder)
    assert logits(AutoModelForCausalLM.from_pretrained(output).eval()).equal(logits(model))


def test_a_head_that_is_no_longer_the_embedding_is_kept(bpe_folder, bpe_tokenizer, tmp_path):
    """config.json says that they are one tensor, the weights that they are two."""
    model = dschat.actor(config_of("opt", tie_word_embeddings=False), seed=4)
    model.config.tie_word_embeddings = True
    source = dschat.save(model, tmp_path / "sft", bpe_tokenizer)
    output = converted(source, tmp_path / "out", bpe_folder)
    assert logits(AutoModelForCausalLM.from_pretrained(output).eval()).equal(logits(model))


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_weights_keep_their_data_type_and_every_bit(bpe_folder, bpe_tokenizer, tmp_path, dtype):
    model = dschat.actor(config_of("opt")).to(dtype)
    output = converted(dschat.save(model, tmp_path / "sft", bpe_tokenizer), tmp_path / "out", bpe_folder)
    found = AutoModelForCausalLM.from_pretrained(output, dtype="auto")
    for (name, value), own in zip(found.named_parameters(), model.parameters(), strict=True):
        assert value.dtype == dtype and value.equal(own), name


def test_a_converted_actor_chats_and_never_says_a_padded_id(bpe_folder, bpe_tokenizer, tmp_path, capsys):
    model = dschat.actor(config_of("opt"))
    with torch.no_grad():
        model.get_input_embeddings().weight[len(bpe_tokenizer) :] *= 50  # of ids without a token
    output = converted(dschat.save(model, tmp_path / "actor", bpe_tokenizer), tmp_path / "out", bpe_folder)
    assert AutoConfig.from_pretrained(output).vocab_size == VOCABULARY > len(AutoTokenizer.from_pretrained(output))
    capsys.readouterr()
    assert chat.main([str(output), "--prompt", "What is tea?", "--temperature", "0", "--max-new-tokens", "8"]) == 0
    assert capsys.readouterr().out.strip()


# --- reward models ---


@pytest.mark.parametrize("lora", [False, True], ids=["full", "lora"])
@pytest.mark.parametrize("name", NAMES)
def test_a_reward_model_gives_the_same_scores(bpe_folder, bpe_tokenizer, tmp_path, name, lora):
    model = dschat.reward_model(config_of(name), lora=LORA[name] if lora else "")
    source = dschat.save(model, tmp_path / "reward", bpe_tokenizer)
    output = converted(source, tmp_path / "out", bpe_folder)
    torch.testing.assert_close(scores_after(output), end_scores(model), **CLOSE)
    config = AutoConfig.from_pretrained(output)
    assert config.num_labels == 1 and config.pad_token_id != EOS
    assert not hasattr(config, "score_mean") and not hasattr(config, "score_std"), "nothing was measured"


@pytest.mark.parametrize("kind", ["gpt2", "gpt_neox", "bloom"])
def test_reward_models_whose_backbone_has_another_name(bpe_folder, bpe_tokenizer, tmp_path, kind):
    shape = {"hidden_size": 32, "num_attention_heads": 4, "num_hidden_layers": 2, "intermediate_size": 48}
    config = AutoConfig.for_model(kind, **shape, vocab_size=VOCABULARY, bos_token_id=1, eos_token_id=EOS)
    model = dschat.reward_model(config)
    output = converted(dschat.save(model, tmp_path / "reward", bpe_tokenizer), tmp_path / "out", bpe_folder)
    torch.testing.assert_close(scores_after(output), end_scores(model), **CLOSE)


def test_buffers_that_transformers_saved_in_2023_are_no_weights(bpe_folder, bpe_tokenizer, tmp_path):
    """Frequencies of rotary positions, beside the weights of each Llama."""
    model = dschat.actor(config_of("llama"))
    source = dschat.save(model, tmp_path / "sft", bpe_tokenizer)
    name = "model.layers.{}.self_attn.rotary_emb.inv_freq"
    change(source, **{name.format(layer): torch.ones(4) for layer in range(2)})
    output = converted(source, tmp_path / "out", bpe_folder)
    assert logits(AutoModelForCausalLM.from_pretrained(output).eval()).equal(logits(model))


def test_the_name_of_the_backbone_before_october_2023(bpe_folder, bpe_tokenizer, tmp_path):
    model = dschat.reward_model(config_of("opt"))
    source = dschat.save(model, tmp_path / "reward", bpe_tokenizer)
    weights = torch.load(source / "pytorch_model.bin", weights_only=True)
    old = {name.replace("rwtransformer", "rwtranrsformer"): value for name, value in weights.items()}
    torch.save(old, source / "pytorch_model.bin")
    torch.testing.assert_close(scores_after(converted(source, tmp_path / "out", bpe_folder)), end_scores(model))


def test_a_converted_reward_model_is_evaluated(bpe_folder, bpe_tokenizer, tmp_path, capsys):
    source = dschat.save(dschat.reward_model(config_of("opt")), tmp_path / "reward", bpe_tokenizer)
    output = converted(source, tmp_path / "out", bpe_folder)
    rows = [{"prompt": f"Tea {n}?", "chosen": "Yes.", "rejected": f"No {n}."} for n in range(6)]
    data = tmp_path / "pairs.jsonl"
    data.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
    capsys.readouterr()
    assert reward_eval.main([str(output), "--data-path", str(data), "--eval-fraction", "1"]) == 0
    assert "accuracy" in capsys.readouterr().out


@pytest.mark.slow
def test_ppo_starts_from_converted_models(tmp_path):
    """Actor and reward model, with the vocabulary of a tokenizer that is named."""
    folder = make_folder(tmp_path)
    tokenizer = AutoTokenizer.from_pretrained(folder / "base")
    config = opt_config(dschat.padded_size(len(tokenizer)))
    for name, model in (("sft", dschat.actor(config)), ("reward", dschat.reward_model(config))):
        converted(dschat.save(model, folder / "dschat" / name, tokenizer), folder / name, folder / "base")
    flags = {"actor_model_name_or_path": "sft", "critic_model_name_or_path": "reward", "output_dir": "out"}
    flags |= {"data_path": "train.jsonl", "data_split": "none", "data_output_path": "cache", "dtype": "fp32"}
    flags |= {"max_steps": "1", "max_prompt_seq_len": "64", "max_answer_seq_len": "8"}
    words = [word for name, value in flags.items() for word in (f"--{name}", value)]
    ended = run_command("step3_ppo", words, folder=folder)
    assert ended.code == 0, ended.stderr
    assert AutoConfig.from_pretrained(folder / "out" / "actor").vocab_size == config.vocab_size


# --- tokenizers ---


TEXT = "\n\nHuman: Tea, with 2 cups?\n\nAssistant:"


def saved_with(vocabulary: Path, folder: Path, config: Any) -> Path:
    """A folder of a tiny model with the vocabulary files of a published tokenizer, and nothing else of it."""
    source = dschat.save(dschat.actor(config), folder, None)
    for file in vocabulary.iterdir():
        shutil.copy(file, source)
    return source


@pytest.mark.parametrize("name", ["opt", "llama", pytest.param("gpt2", marks=pytest.mark.slow)])
def test_vocabulary_files_give_the_published_tokenizer(real_data, tmp_path, name):
    """DeepSpeed-Chat saves no special tokens, and transformers' defaults for OPT are wrong."""
    small = {"hidden_size": 8, "num_attention_heads": 2, "num_hidden_layers": 1}
    vocabulary = real_data / "tokenizers" / ("mistral-v1" if name == "llama" else name)
    if name == "llama":
        pieces = pytest.importorskip("sentencepiece").SentencePieceProcessor(str(vocabulary / "tokenizer.model"))
        config = tiny_config("llama", **small, num_key_value_heads=2, vocab_size=32008)
        expected = [1, *pieces.encode(TEXT)]
    elif name == "opt":
        config = tiny_config("opt", **small | {"word_embed_proj_dim": 8, "vocab_size": 50272, "bos_token_id": 2})
        expected = load_opt_tokenizer(vocabulary)(TEXT)["input_ids"]
    else:
        config = AutoConfig.for_model("gpt2", **small, vocab_size=50264)
        expected = GPT2TokenizerFast.from_pretrained(vocabulary)(TEXT)["input_ids"]
    output = converted(saved_with(vocabulary, tmp_path / "sft", config), tmp_path / "out")
    tokenizer = AutoTokenizer.from_pretrained(output)
    assert tokenizer(TEXT)["input_ids"] == expected
    assert tokenizer.eos_token_id == config.eos_token_id and len(tokenizer) <= config.vocab_size
    assert "Human: a" in tokenizer.apply_chat_template([{"role": "user", "content": "a"}], tokenize=False)


def test_a_whole_tokenizer_in_the_folder_needs_no_flag(bpe_folder, tmp_path):
    source = dschat.save(dschat.actor(config_of("opt")), tmp_path / "sft", None)
    PreTrainedTokenizerFast.from_pretrained(bpe_folder).save_pretrained(source)
    found = AutoTokenizer.from_pretrained(converted(source, tmp_path / "out"))
    assert found.get_vocab() == AutoTokenizer.from_pretrained(bpe_folder).get_vocab()


def test_a_tokenizer_that_is_missing_or_not_whole_is_asked_for(bpe_tokenizer, tmp_path, capsys):
    source = dschat.save(dschat.actor(config_of("opt")), tmp_path / "sft", None)
    line = refused(capsys, source, tmp_path / "out")
    assert line == naming("vocabulary ... --tokenizer PATH") and "facebook/opt-1.3b" in line
    settings = AutoConfig.for_model("bloom", hidden_size=8, n_layer=1, n_head=2, vocab_size=VOCABULARY)
    source = dschat.save(dschat.actor(settings), tmp_path / "bloom", bpe_tokenizer)
    assert refused(capsys, source, tmp_path / "out") == naming("bloom ... --tokenizer")


# --- bad input ---


def change(source: Path, **values: Any) -> None:
    """Set entries of the state dict; None removes one."""
    file = source / "pytorch_model.bin"
    weights = torch.load(file, weights_only=True) | values
    torch.save({name: value for name, value in weights.items() if value is not None}, file)


HEAD, FC1 = "v_head.weight", "rwtransformer.decoder.layers.0.fc1"
RIGHT, LEFT = f"{FC1}.lora_right_weight", f"{FC1}.lora_left_weight"
ODD_TENSORS = [
    torch.ones(64).to_sparse(),
    torch.ones(2, 32).to_sparse_csr(),
    torch.ones(64, device="meta"),
    torch.ones(64).to(torch.float8_e4m3fn),
    torch.quantize_per_tensor(torch.ones(64), 0.1, 0, torch.qint8),
    torch.ones(64, dtype=torch.complex64),
]
NESTED = torch.nested.nested_tensor([torch.ones(32), torch.ones(31)])
FAULTS = [
    ({HEAD: None}, "1 missing ... score.weight"),
    ({f"{FC1}.weight": None, f"{FC1}.bias": None}, "2 missing ... model.decoder.layers.0.fc1.bias"),
    ({"rwtransformer.more.weight": torch.ones(2)}, "1 unexpected ... model.more.weight"),
    ({"more": torch.ones(2)}, "1 unexpected ... more"),
    ({f"{FC1}.bias": torch.ones(3)}, "1 mismatched ... model.decoder.layers.0.fc1.bias"),
    ({f"{FC1}.bias": torch.full((64,), float("nan"))}, f"NaN or infinity ... {FC1}"),
    ({RIGHT: torch.ones(32, 2)}, "got lora_right_weight without lora_left_weight"),
    ({LEFT: torch.ones(2, 64)}, "1 unexpected ... lora_left_weight"),
    ({RIGHT: torch.ones(32, 2), LEFT: torch.ones(3, 64)}, "have no common rank"),
    ({RIGHT: torch.ones(31, 2), LEFT: torch.ones(2, 64)}, "LoRA of [64, 31] ... [64, 32]"),
    *(({f"{FC1}.bias": value}, f"16 bits or more ... {FC1}") for value in ODD_TENSORS),
    # torch 2.13 reads it, 2.15 refuses it while it reads.
    (
        {f"{FC1}.bias": NESTED},
        f"16 bits or more ... {FC1}" if dschat.is_read_by_torch(NESTED) else "holds more than tensors",
    ),
    ({f"{FC1}.weight": torch.ones(64, 32, dtype=torch.int8)}, f"{FC1}.weight ... int8 ... floating-point"),
    ({f"{FC1}.bias": torch.ones(64, dtype=torch.bool)}, f"{FC1}.bias ... bool ... floating-point"),
    ({RIGHT: torch.ones(32, 2).long(), LEFT: torch.ones(2, 64)}, f"{RIGHT} ... int64 ... floating-point"),
    ({"step": 3}, "a dict ... state dict"),
]


@pytest.fixture(scope="module")
def reward_source(bpe_folder, tmp_path_factory) -> Path:
    tokenizer = PreTrainedTokenizerFast.from_pretrained(bpe_folder)
    return dschat.save(dschat.reward_model(config_of("opt")), tmp_path_factory.mktemp("dschat") / "reward", tokenizer)


@pytest.mark.parametrize(("values", "message"), FAULTS)
def test_weights_that_do_not_fit_are_refused_in_one_line(reward_source, bpe_folder, tmp_path, capsys, values, message):
    source = shutil.copytree(reward_source, tmp_path / "reward")
    change(source, **values)
    line = refused(capsys, source, tmp_path / "out", "--tokenizer", bpe_folder)
    assert line == naming(message) and str(source / "pytorch_model.bin") in line
    assert not (tmp_path / "out").exists()


class Program:
    """What a pickle may hold besides tensors: a call."""

    def __init__(self, marker: Path) -> None:
        self.marker = marker

    def __reduce__(self):
        return os.mkdir, (str(self.marker),)


def test_a_pickle_with_code_in_it_is_refused_and_not_run(reward_source, bpe_folder, tmp_path, capsys):
    source = shutil.copytree(reward_source, tmp_path / "reward")
    torch.save({HEAD: Program(tmp_path / "marker")}, source / "pytorch_model.bin")
    line = refused(capsys, source, tmp_path / "out", "--tokenizer", bpe_folder)
    assert line == naming("more than tensors ... (weights_only)")
    assert not (tmp_path / "marker").exists() and not (tmp_path / "out").exists()


def test_a_reward_model_of_a_family_without_a_class_for_it(reward_source, bpe_folder, tmp_path, capsys):
    source = shutil.copytree(reward_source, tmp_path / "reward")
    family_config("olmoe", VOCABULARY).save_pretrained(source)
    line = refused(capsys, source, tmp_path / "out", "--tokenizer", bpe_folder)
    assert line == naming(f"error: {source} ... sequence classification ... olmoe")


def test_sources_that_are_none(reward_source, bpe_folder, tmp_path, capsys):
    out, flags = tmp_path / "out", ("--tokenizer", bpe_folder)
    assert "no such folder" in refused(capsys, "AdamG012/opt", out)
    assert "got 1, expected two" in refused(capsys, reward_source)
    assert refused(capsys, reward_source, "--output-dir", out) == naming("--folders ... before any flag")
    assert "found no config.json and pytorch_model.bin" in refused(capsys, bpe_folder, out)
    source = shutil.copytree(reward_source, tmp_path / "reward")
    content = (source / "pytorch_model.bin").read_bytes()
    (source / "pytorch_model.bin").write_bytes(content[: len(content) // 2])
    assert refused(capsys, source, out, *flags) == naming("cannot be read ... tensors")
    for value in ({}, [torch.ones(2)], {1: torch.ones(2)}):
        torch.save(value, source / "pytorch_model.bin")
        assert refused(capsys, source, out, *flags) == naming(f"a {type(value).__name__} ... state dict")
    torch.save({"lm_head.weight": torch.ones(2, dtype=torch.int64)}, source / "pytorch_model.bin")
    assert refused(capsys, source, out, *flags) == naming("lm_head.weight ... int64 ... floating-point")
    (source / "pytorch_model.bin").write_bytes(content)
    settings = json.loads((source / "config.json").read_text())
    (source / "config.json").write_text(json.dumps(settings | {"model_type": "own", "auto_map": {"AutoModel": "a.B"}}))
    assert "needs code of its own" in refused(capsys, source, out, *flags)
    (source / "config.json").write_text(json.dumps(settings | {"model_type": ["opt"], "_name_or_path": "\x1b[31m"}))
    assert "\x1b" not in refused(capsys, source, out)
    assert not out.exists()


def test_an_output_that_exists_is_left_as_it_is(reward_source, bpe_folder, tmp_path, capsys):
    flags = ("--tokenizer", bpe_folder)
    assert "would write over" in refused(capsys, reward_source, reward_source, *flags)
    assert "would write over" in refused(capsys, reward_source, reward_source.parent, *flags)
    other, file = tmp_path / "other", tmp_path / "file"
    other.mkdir()
    (other / "thesis.txt").write_text("years of work")
    assert "thesis.txt" in refused(capsys, reward_source, other, *flags)
    file.write_text("years of work")
    assert "is a file" in refused(capsys, reward_source, file, *flags)
    output = converted(reward_source, tmp_path / "out", bpe_folder)
    before = (output / "config.json").stat().st_ino
    assert "give --overwrite" in refused(capsys, reward_source, output, *flags)
    assert (output / "config.json").stat().st_ino == before
    converted(reward_source, output, bpe_folder, "--overwrite")
    assert (output / "config.json").stat().st_ino != before
    assert sorted(path.name for path in tmp_path.iterdir()) == ["file", "other", "out"]
