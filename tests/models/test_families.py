"""Families of models through the three steps, by the real commands; what is refused, and what is called untested.

Every family trains on two ranks once. Full or LoRA, ZeRO stage 0 or 3, one or two ranks are dealt so that each pair of
values meets in some family; Llama and Qwen3 have all of them. Experts have no ZeRO stage 3. OLMoE has no class for
scores: its critic is a Llama with its tokenizer.
"""

import json
import re
import shutil
from itertools import combinations, product
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file
from support.command_run import Ended, run_command
from support.families import FAMILIES, save_family
from support.family_runs import check_ppo, check_reward, check_sft
from support.in_process import error_lines
from support.messages import naming
from support.tiny_run import make_folder
from transformers import (
    AutoConfig,
    AutoTokenizer,
    FuyuConfig,
    Gemma3Config,
    Gemma3ForConditionalGeneration,
    Llama4ForCausalLM,
    Llama4TextConfig,
    XLNetConfig,
)

from pipeline.model_types import MODEL_TYPES

DEALT: dict[str, list[tuple[str, int, int]]] = {
    "llama-2": [("full", 0, 1)],
    "llama-3": list(product(("full", "lora"), (0, 3), (1, 2))),
    "mistral": [("lora", 0, 2)],
    "qwen2": [("full", 3, 2), ("lora", 0, 1)],
    "qwen3": list(product(("full", "lora"), (0, 3), (1, 2))),
    "gemma": [("lora", 0, 2)],
    "gemma-2": [("full", 3, 2), ("lora", 3, 1)],
    "gemma-3": [("lora", 3, 2), ("full", 0, 1)],
    "phi-3": [("lora", 0, 2), ("full", 3, 1)],
    "phi-4-mini": [("full", 0, 1)],
    "smollm3": [("full", 3, 2), ("lora", 0, 1)],
    "gpt2": [("lora", 3, 2), ("full", 0, 1)],
    "pythia": [("full", 0, 2), ("lora", 3, 1)],
    "bloom": [("lora", 0, 2), ("full", 3, 1)],
    "olmo-2": [("full", 3, 2), ("lora", 0, 1)],
    "opt": [("lora", 3, 2), ("full", 0, 1)],
    "qwen3-moe": [("full", 0, 2), ("lora", 2, 1)],
    "olmoe": [("full", 0, 2)],
}
RUNS = [(name, *case) for name, cases in DEALT.items() for case in cases]
SHARED = {
    "data_path": "train.jsonl", "eval_data_path": "test.jsonl", "data_split": "none", "max_steps": 1,
    "data_output_path": "cache", "dtype": "fp32", "keep_checkpoints": 0, "enable_tensorboard": "false",
}  # fmt: skip
# Steps that lower the losses; in stage 3 one that shows in the policy.
RATES = {"learning_rate": 5e-4, "lora_learning_rate": 2e-3}
ACTOR_RATES = {"actor_learning_rate": 1e-3, "actor_lora_learning_rate": 2e-2}
NUM_NEW = 4
UNKNOWN_FIELDS = {
    "final_logit_softcapping": 1.0, "layer_types": ["sliding_attention", "full_attention"], "logit_scale": 0.25,
    "query_pre_attn_scalar": 0.01, "sliding_window": 3,
}  # fmt: skip


def run(folder: Path, stage: str, ranks: int = 1, **flags: Any) -> Ended:
    words = [str(word) for name, value in (SHARED | flags).items() for word in (f"--{name}", value)]
    return run_command(stage, words, folder=folder, ranks=ranks)


def three_steps(folder: Path, kind: str, zero: int, ranks: int, scorer: str = "sft") -> list[Ended]:
    dim = 4 if kind == "lora" else 0
    greedy = {"max_prompt_seq_len": 48, "max_answer_seq_len": NUM_NEW, "top_k": 1}
    stages = {"actor_zero_stage": zero, "critic_zero_stage": zero, "lora_dim": dim, "critic_lora_dim": dim}
    both = {"max_seq_len": 96, "zero_stage": zero, "lora_dim": dim} | RATES
    models = {"actor_model_name_or_path": "sft", "critic_model_name_or_path": "reward"}
    return [
        run(folder, "step1_sft", ranks, model_name_or_path="base", output_dir="sft", **both),
        run(folder, "step2_reward", ranks, model_name_or_path=scorer, output_dir="reward", **both),
        run(folder, "step3_ppo", ranks, **models, **stages, **greedy, **ACTOR_RATES),
    ]


def check_trained(folder: Path) -> None:
    check_sft(folder)
    check_reward(folder)
    check_ppo(folder, NUM_NEW)


def test_each_pair_of_values_is_dealt_to_some_family() -> None:
    alone = [case for name, cases in DEALT.items() if name not in ("llama-3", "qwen3") for case in cases]
    for first, second in combinations(range(3), 2):
        values = (("full", "lora"), (0, 3), (1, 2))
        assert {(case[first], case[second]) for case in alone} >= set(product(values[first], values[second]))
    assert {name for name, _, _, ranks in RUNS if ranks == 2} >= set(DEALT) - {"llama-2", "phi-4-mini"}
    assert {FAMILIES[name][0] for name in DEALT} == set(MODEL_TYPES) - {"t5"}


@pytest.mark.slow
@pytest.mark.parametrize(("name", "kind", "zero", "ranks"), RUNS)
def test_a_family_goes_through_the_three_steps(name: str, kind: str, zero: int, ranks: int, tmp_path: Path) -> None:
    folder = make_folder(tmp_path, num_train=8, num_test=2)
    save_family(name, folder / "base")
    scorer = "sft"
    if name == "olmoe":
        scorer = str(shutil.copytree(folder / "base", folder / "critic"))
        save_family("llama-2", folder / "critic")
    for ended, trained in zip(three_steps(folder, kind, zero, ranks, scorer), (name, scorer, name), strict=True):
        assert ended.code == 0, ended.stderr
        assert "is untested here" not in ended.stderr
        has_experts = name == "qwen3-moe" or trained == "olmoe"
        assert ("router's auxiliary loss" in ended.stderr) == has_experts
    check_trained(folder)


@pytest.mark.slow
def test_an_untested_type_is_called_so_where_it_enters_and_not_again(tmp_path: Path) -> None:
    folder = make_folder(tmp_path, num_train=8, num_test=2)
    save_family("stablelm", folder / "base")
    ended = three_steps(folder, "full", 3, 2)
    assert [one.code for one in ended] == [0, 0, 0], ended[-1].stderr
    assert [one.stderr.count("is untested here") for one in ended] == [1, 0, 0]
    check_trained(folder)


@pytest.mark.slow
def test_fields_that_a_class_does_not_know_are_named_once_and_train_no_other_model(tmp_path: Path) -> None:
    folder = make_folder(tmp_path, num_train=8, num_test=2)
    save_family("llama-3", folder / "base")
    file = folder / "base/config.json"
    file.write_text(json.dumps(json.loads(file.read_text()) | UNKNOWN_FIELDS))
    ended = three_steps(folder, "full", 0, 1)
    assert [one.code for one in ended] == [0, 0, 0], ended[-1].stderr
    line = naming(f"base: config.json: {', '.join(UNKNOWN_FIELDS)} ... LlamaConfig")
    assert [len(re.findall(line, one.stderr)) for one in ended] == [1, 0, 0]
    check_trained(folder)


@pytest.mark.slow
def test_a_model_whose_logits_are_made_in_another_way_is_refused_before_it_is_trained(tmp_path: Path) -> None:
    folder = make_folder(tmp_path, num_train=8, num_test=2)
    save_family("modernbert", folder / "base")
    ended = run(folder, "step1_sft", model_name_or_path="base", max_seq_len=96, output_dir="out")
    assert ended.code == 2 and naming("error: base ... modernbert-decoder ... logits") in ended.stderr.splitlines()
    assert not (folder / "out").exists()


def save_gemma_3_with_a_vision_tower(folder: Path) -> None:
    sizes = {"hidden_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2, "intermediate_size": 16}
    text = sizes | {"vocab_size": len(AutoTokenizer.from_pretrained(folder)), "num_key_value_heads": 1, "head_dim": 8}
    vision = sizes | {"image_size": 16, "patch_size": 8}
    config = Gemma3Config(text_config=text, vision_config=vision, mm_tokens_per_image=4)
    Gemma3ForConditionalGeneration(config).save_pretrained(folder)


def save_fuyu(folder: Path) -> None:
    """Its patches pass through a linear layer named like an embedding, which has no row per token."""
    vocab_size = len(AutoTokenizer.from_pretrained(folder))
    FuyuConfig(text_config={"model_type": "persimmon"}, vocab_size=vocab_size).save_pretrained(folder)
    save_file({"model.vision_embed_tokens.weight": torch.zeros(32, 3)}, folder / "model.safetensors")


def save_t5_with_a_vision_tower(folder: Path) -> None:
    config = {"model_type": "t5gemma2", "encoder": {"vision_config": {}, "text_config": {}}, "decoder": {}}
    (folder / "config.json").write_text(json.dumps(config))


def save_xlnet(folder: Path) -> None:
    vocab_size = len(AutoTokenizer.from_pretrained(folder))
    XLNetConfig(vocab_size=vocab_size, d_model=32, n_layer=1, n_head=2).save_pretrained(folder)


def save_config(kind: str, folder: Path) -> None:
    """Another type in config.json; the weights stay."""
    AutoConfig.for_model(kind, vocab_size=len(AutoTokenizer.from_pretrained(folder))).save_pretrained(folder)


def save_embedding_gemma(folder: Path) -> None:
    save_family("gemma-3", folder)
    content = json.loads((folder / "config.json").read_text(encoding="utf-8")) | {"use_bidirectional_attention": True}
    (folder / "config.json").write_text(json.dumps(content), encoding="utf-8")


def save_llama_4(folder: Path) -> None:
    sizes = {
        "hidden_size": 16,
        "num_hidden_layers": 4,
        "num_attention_heads": 2,
        "num_key_value_heads": 1,
        "head_dim": 8,
    }
    experts = {"intermediate_size": 16, "intermediate_size_mlp": 16, "num_local_experts": 2}
    vocab_size = len(AutoTokenizer.from_pretrained(folder))
    Llama4ForCausalLM(Llama4TextConfig(vocab_size=vocab_size, **sizes, **experts)).save_pretrained(folder)


REFUSED = {
    "a vision tower": (
        save_gemma_3_with_a_vision_tower, "step1_sft", {},
        "base: gemma3 ... (config.json: vision_config) ... language model alone",
    ),
    "a linear vision tower": (
        save_fuyu, "step1_sft", {},
        "base: fuyu ... (config.json: image_size) ... language model alone",
    ),
    "a vision tower in an encoder": (
        save_t5_with_a_vision_tower, "step1_sft", {},
        "base: t5gemma2 ... (config.json: encoder.vision_config) ... language model alone",
    ),
    "tokens that see what follows": (
        save_xlnet, "step1_sft", {},
        "base: xlnet ... left to right ... a language model",
    ),
    "tokens that see what follows, by a field": (
        save_embedding_gemma, "step1_sft", {},
        "base ... gemma3_text ... (config.json: use_bidirectional_attention) ... another model",
    ),
    "attention within chunks": (
        save_llama_4, "step1_sft", {},
        "base ... llama4_text ... (config.json: attention_chunk_size) ... another model",
    ),
    "experts under ZeRO-3": (
        lambda folder: save_family("qwen3-moe", folder), "step1_sft", {"zero_stage": 3},
        "base ... 4 experts ... ZeRO stage 3 ... stage 0, 1 or 2",
    ),
    "positions that are in the mask, in packed rows": (
        lambda folder: save_family("bloom", folder), "step1_sft", {"packing": "true"},
        "--packing ... base ... bloom ... a mask ... --packing",
    ),
    "a mask that has no rows, in packed rows": (
        lambda folder: save_config("openai-gpt", folder), "step1_sft", {"packing": "true"},
        "--packing ... base ... openai-gpt ... a mask ... --packing",
    ),
    "positions that nothing sets, in packed rows": (
        lambda folder: save_config("trocr", folder), "step1_sft", {"packing": "true"},
        "--packing ... base ... trocr ... positions ... --packing",
    ),
    "a state that goes on through packed rows": (
        lambda folder: save_family("rwkv", folder), "step1_sft", {"packing": "true"},
        "--packing ... base ... rwkv ... state ... --packing",
    ),
    "a convolution in packed rows": (
        lambda folder: save_family("lfm2", folder), "step1_sft", {"packing": "true"},
        "--packing ... base ... conv layers ... state ... --packing",
    ),
    "a reward model of a family without a class for it": (
        lambda folder: save_family("olmoe", folder), "step2_reward", {},
        "base ... sequence classification ... olmoe ... take another",
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", REFUSED)
def test_what_is_refused_is_refused_in_one_line(name: str, tmp_path: Path) -> None:
    save, stage, flags, line = REFUSED[name]
    folder = make_folder(tmp_path, num_train=8, num_test=2)
    save(folder / "base")
    ended = run(folder, stage, model_name_or_path="base", max_seq_len=96, output_dir="out", **flags)
    assert ended.code == 2 and error_lines(ended.stderr) == [naming(f"error: {line}")]
