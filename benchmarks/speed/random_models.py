"""Folders with random models of published shapes, a tokenizer, prompts and pairs, for runs whose speed is measured.

`python -m benchmarks.speed.random_models --output FOLDER --actor 1.3b --critic 350m --prompts 1300`
"""

import argparse
import json
import math
from collections.abc import Iterable
from pathlib import Path
from random import Random
from typing import Any

import torch

from demo.make import make_data, make_tokenizer
from demo.rule import make_prompt

PARTIAL = {"rope_type": "default", "rope_theta": 10_000.0, "partial_rotary_factor": 0.25}
OPT_VOCABULARY, LLAMA_VOCABULARY, QWEN_VOCABULARY = 50272, 32000, 151936
EOS = 2
# Zhang et al. 2022 (OPT), table 1; Touvron et al. 2023 (Llama), table 2; the published configurations of all.
SHAPES: dict[str, dict[str, Any]] = {
    "tiny": {
        "hidden_size": 32,
        "num_hidden_layers": 2,
        "num_attention_heads": 2,
        "ffn_dim": 64,
        "vocab_size": 1024,
    },
    "125m": {"hidden_size": 768, "num_hidden_layers": 12, "num_attention_heads": 12, "ffn_dim": 3072},
    "350m": {
        "hidden_size": 1024,
        "num_hidden_layers": 24,
        "num_attention_heads": 16,
        "ffn_dim": 4096,
        "word_embed_proj_dim": 512,
        "do_layer_norm_before": False,
    },
    "1.3b": {"hidden_size": 2048, "num_hidden_layers": 24, "num_attention_heads": 32, "ffn_dim": 8192},
    "13b": {"hidden_size": 5120, "num_hidden_layers": 40, "num_attention_heads": 40, "ffn_dim": 20480},
    "30b": {"hidden_size": 7168, "num_hidden_layers": 48, "num_attention_heads": 56, "ffn_dim": 28672},
    "llama-tiny": {
        "hidden_size": 32,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "intermediate_size": 48,
        "vocab_size": 1024,
    },
    "llama-1b": {
        "hidden_size": 2048,
        "num_hidden_layers": 22,
        "num_attention_heads": 32,
        "num_key_value_heads": 4,
        "intermediate_size": 5632,
    },
    "llama-7b": {
        "hidden_size": 4096,
        "num_hidden_layers": 32,
        "num_attention_heads": 32,
        "num_key_value_heads": 32,
        "intermediate_size": 11008,
    },
    "llama-3-1b": {
        "hidden_size": 2048,
        "num_hidden_layers": 16,
        "num_attention_heads": 32,
        "num_key_value_heads": 8,
        "intermediate_size": 8192,
        "vocab_size": 128256,
        "tie_word_embeddings": True,
        "max_position_embeddings": 131072,
    },
    "llama-3-8b": {
        "hidden_size": 4096,
        "num_hidden_layers": 32,
        "num_attention_heads": 32,
        "num_key_value_heads": 8,
        "intermediate_size": 14336,
        "vocab_size": 128256,
    },
    "qwen2.5-0.5b": {
        "hidden_size": 896,
        "num_hidden_layers": 24,
        "num_attention_heads": 14,
        "num_key_value_heads": 2,
        "intermediate_size": 4864,
    },
    "qwen2.5-1.5b": {
        "hidden_size": 1536,
        "num_hidden_layers": 28,
        "num_attention_heads": 12,
        "num_key_value_heads": 2,
        "intermediate_size": 8960,
        "max_position_embeddings": 32768,
    },
    "qwen3-0.6b": {
        "hidden_size": 1024,
        "num_hidden_layers": 28,
        "num_attention_heads": 16,
        "num_key_value_heads": 8,
        "intermediate_size": 3072,
        "max_position_embeddings": 40960,
    },
    "qwen3-1.7b": {
        "hidden_size": 2048,
        "num_hidden_layers": 28,
        "num_attention_heads": 16,
        "num_key_value_heads": 8,
        "intermediate_size": 6144,
    },
    "mistral-7b": {"hidden_size": 4096, "num_hidden_layers": 32, "intermediate_size": 14336},
    "pythia-410m": {"hidden_size": 1024, "num_hidden_layers": 24, "intermediate_size": 4096},
    "pythia-1.4b": {"hidden_size": 2048, "num_hidden_layers": 24, "intermediate_size": 8192},
    "olmo2-1b": {"hidden_size": 2048, "num_hidden_layers": 16, "intermediate_size": 8192},
    # Radford et al. 2019 (GPT-2, the largest), and Raffel et al. 2020 (T5, 3B and 11B).
    "gpt2-tiny": {"n_embd": 32, "n_layer": 2, "n_head": 2, "vocab_size": 1024},
    "gpt2-xl": {"n_embd": 1600, "n_layer": 48, "n_head": 25},
    "t5-tiny": {"d_model": 32, "d_kv": 16, "d_ff": 64, "num_layers": 2, "num_heads": 2, "vocab_size": 1024},
    "t5-3b": {"d_model": 1024, "d_kv": 128, "d_ff": 16384, "num_layers": 24, "num_heads": 32},
    "t5-11b": {"d_model": 1024, "d_kv": 128, "d_ff": 65536, "num_layers": 24, "num_heads": 128},
}
# Scale of the final norm where responses end early. Small: the chance of an end is then nearly the same in every
# state. Not 0: no gradient would reach the layers, and products of zeros are faster than real ones.
END_NORM_SCALE = 0.1


def config_of(shape: str) -> Any:
    """The transformers configuration of one of SHAPES, without dropout; ids are those of the demo's tokenizer."""
    from transformers import (
        GPT2Config,
        GPTNeoXConfig,
        LlamaConfig,
        MistralConfig,
        Olmo2Config,
        OPTConfig,
        Qwen2Config,
        Qwen3Config,
        T5Config,
    )

    sizes = SHAPES[shape]
    common = {"bos_token_id": EOS, "eos_token_id": EOS, "pad_token_id": 1}
    if shape.startswith("gpt2"):
        return GPT2Config(**(common | {"resid_pdrop": 0.0, "embd_pdrop": 0.0, "attn_pdrop": 0.0} | sizes))
    if shape.startswith("t5"):
        return T5Config(**(common | {"decoder_start_token_id": 1, "dropout_rate": 0.0} | sizes))
    if shape.startswith("llama"):
        own = {"vocab_size": LLAMA_VOCABULARY, "max_position_embeddings": 4096, "tie_word_embeddings": False}
        return LlamaConfig(**(common | own | sizes))
    if shape.startswith("qwen3"):
        own = {"vocab_size": QWEN_VOCABULARY, "max_position_embeddings": 4096, "tie_word_embeddings": True}
        return Qwen3Config(**(common | own | {"head_dim": 128} | sizes))
    if shape.startswith("mistral"):
        own = {"num_attention_heads": 32, "num_key_value_heads": 8, "vocab_size": 32768, "sliding_window": None}
        return MistralConfig(**(common | own | {"max_position_embeddings": 4096} | sizes))
    if shape.startswith("pythia"):
        own = {"num_attention_heads": 16, "vocab_size": 50304, "max_position_embeddings": 2048}
        return GPTNeoXConfig(**(common | own | {"rope_parameters": PARTIAL} | sizes))
    if shape.startswith("olmo2"):
        own = {"num_attention_heads": 16, "vocab_size": 100352, "max_position_embeddings": 4096}
        return Olmo2Config(**(common | own | sizes))
    if shape.startswith("qwen"):
        own = {"vocab_size": QWEN_VOCABULARY, "max_position_embeddings": 4096, "tie_word_embeddings": True}
        return Qwen2Config(**(common | own | sizes))
    own = {"vocab_size": OPT_VOCABULARY, "dropout": 0.0, "word_embed_proj_dim": sizes["hidden_size"]}
    return OPTConfig(**(common | own | sizes))


def hazard_for(mean: float, longest: int) -> float:
    """The chance p of an end at each token that gives lengths cut at T = `longest` this mean: (1 - (1 - p)^T) / p."""
    low, high = 1e-9, 1.0
    for _ in range(100):
        middle = math.sqrt(low * high)
        is_long = -math.expm1(longest * math.log1p(-middle)) / middle > mean if middle < 1.0 else False
        low, high = (middle, high) if is_long else (low, middle)
    return low


@torch.no_grad()
def set_end_probability(model: Any, wanted: float) -> float:
    """Let an OPT with tied embeddings draw its EOS with nearly the same chance everywhere; returns that chance.

    The final norm's bias is laid along the EOS embedding: that lifts its logit, and others
    only by their likeness to it. How far is found by bisection on the rounded weights.
    """
    norm, rows = model.model.decoder.final_layer_norm, model.get_output_embeddings().weight.float()
    if rows.shape[1] != norm.bias.numel():
        raise ValueError("early stopping needs an OPT whose last norm stands right before its head")
    direction = rows[EOS] / rows[EOS].square().sum()
    norm.weight.fill_(END_NORM_SCALE)
    # Normalised states add noise of this variance to each logit, and its mean to the partition function.
    noise = (END_NORM_SCALE * rows).square().sum(1) / 2

    def chance(lift: float) -> float:
        norm.bias.copy_(lift * direction)
        return float(torch.softmax(rows @ norm.bias.float() + noise, dim=0)[EOS])

    low, high = -100.0, 100.0
    for _ in range(60):
        middle = (low + high) / 2
        low, high = (middle, high) if chance(middle) < wanted else (low, middle)
    return chance(high)


def make_model(folder: Path, shape: str, tokenizer: Any, *, scores: bool, end_probability: float = 0.0) -> None:
    """Save a random model of `shape` in bf16; `scores`: a sequence classifier, as step 2 writes it."""
    from transformers import AutoModelForCausalLM, AutoModelForSeq2SeqLM, AutoModelForSequenceClassification

    config = config_of(shape)
    if scores:
        config.num_labels, config.score_mean, config.score_std = 1, 0.0, 1.0
    torch.manual_seed(0)
    with torch.device("cuda" if torch.cuda.is_available() else "cpu"):
        written = AutoModelForSeq2SeqLM if config.is_encoder_decoder else AutoModelForCausalLM
        model = (AutoModelForSequenceClassification if scores else written).from_config(config, dtype=torch.bfloat16)
    if end_probability:
        set_end_probability(model, end_probability)
    model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)


def make_full_tokenizer(folder: Path, shapes: Iterable[str]) -> Any:
    """The demo's tokenizer with as many tokens as the smallest vocabulary of SHAPES named; texts have none of the new.

    A policy draws its tokenizer's tokens alone: with few of them a response would often end early.
    """
    from tokenizers import Tokenizer

    tokenizer = make_tokenizer(folder)
    content = json.loads(tokenizer.backend_tokenizer.to_str())
    vocabulary = content["model"]["vocab"]
    num_tokens = min(config_of(shape).vocab_size for shape in shapes)
    vocabulary |= {f"unused-{number}": number for number in range(len(vocabulary), num_tokens)}
    tokenizer._tokenizer = Tokenizer.from_str(json.dumps(content))
    return tokenizer


def text_of(random: Random, words: int) -> str:
    return " ".join(make_prompt(random) for _ in range(max(words // 9, 1)))


def make_prompts(file: Path, count: int, words: int) -> None:
    """A file of different prompts of about `words` words; a word is one token or more."""
    random = Random(0)
    with file.open("w", encoding="utf-8") as out:
        for _ in range(count):
            out.write(json.dumps({"prompt": text_of(random, words)}) + "\n")


def make_pairs(file: Path, count: int, *, prompt_words: int, responses: tuple[int, int]) -> None:
    """A file of pairs whose responses have from the one to the other number of words, evenly."""
    random, (shortest, longest) = Random(1), responses
    with file.open("w", encoding="utf-8") as out:
        for number in range(count):
            words = int(shortest + (longest - shortest) * random.random())
            texts = {name: text_of(random, words) for name in ("chosen", "rejected")}
            out.write(json.dumps({"prompt": f"Number {number}. {text_of(random, prompt_words)}"} | texts) + "\n")


def main() -> None:
    """Make the models and prompts that the options name."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--output", required=True)
    parser.add_argument("--actor", default="1.3b", choices=SHAPES)
    parser.add_argument("--critic", default="350m", choices=SHAPES)
    parser.add_argument("--prompts", type=int, default=1300)
    parser.add_argument("--prompt_words", type=int, default=400)
    parser.add_argument("--mean_length", type=float, default=0.0, help="of a second actor, actor-early; 0: none")
    parser.add_argument("--longest", type=int, default=256, help="tokens at which its responses are cut")
    options = parser.parse_args()
    folder = Path(options.output)
    make_data(folder, seed=0)
    tokenizer = make_full_tokenizer(folder, (options.actor, options.critic))
    make_model(folder / "actor", options.actor, tokenizer, scores=False)
    make_model(folder / "critic", options.critic, tokenizer, scores=True)
    if options.mean_length:
        hazard = hazard_for(options.mean_length, options.longest)
        make_model(folder / "actor-early", options.actor, tokenizer, scores=False, end_probability=hazard)
    make_prompts(folder / "prompts.jsonl", options.prompts, words=options.prompt_words)


if __name__ == "__main__":
    main()
