"""Make the demo's data, tokenizer and untrained model."""

import json
from collections.abc import Iterable
from pathlib import Path
from random import Random
from typing import TYPE_CHECKING, Any

from demo.rule import make_answer, make_pair, make_prompt

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

NUM_TRAIN_PROMPTS = 3600
NUM_TEST_PROMPTS = 600
NUM_DOCUMENTS = 1200
VOCABULARY = 640


def write_lines(path: Path, rows: Iterable[dict[str, Any]]) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")


def make_data(folder: Path, *, seed: int) -> None:
    """Write `data/train.jsonl` and `data/test.jsonl` (pairs; no common prompt), and `text.jsonl` for the base model."""
    random = Random(seed)
    prompts: dict[str, None] = {}  # a set in the order of creation
    while len(prompts) < NUM_TRAIN_PROMPTS + NUM_TEST_PROMPTS:
        prompts[make_prompt(random)] = None
    pairs = [(prompt, *make_pair(random)) for prompt in prompts]
    rows = [{"prompt": prompt, "chosen": chosen, "rejected": rejected} for prompt, chosen, rejected in pairs]
    write_lines(folder / "data" / "train.jsonl", rows[:NUM_TRAIN_PROMPTS])
    write_lines(folder / "data" / "test.jsonl", rows[NUM_TRAIN_PROMPTS:])
    write_lines(folder / "text.jsonl", ({"text": make_document(random)} for _ in range(NUM_DOCUMENTS)))


def make_document(random: Random) -> str:
    """Return plain text, not a dialogue, from which the base model learns the words of the demo."""
    prompts = [make_prompt(random) for _ in range(3)]
    return " ".join(f"{prompt} {make_answer(random)}" for prompt in prompts)


def make_tokenizer(folder: Path) -> Any:
    """Return a byte-level BPE tokenizer trained on the demo's text, with OPT's special tokens."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, processors, trainers
    from transformers import PreTrainedTokenizerFast

    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=VOCABULARY,
        special_tokens=["<s>", "<pad>", "</s>", "<unk>"],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    texts = [json.loads(line)["text"] for line in (folder / "text.jsonl").read_text(encoding="utf-8").splitlines()]
    tokenizer.train_from_iterator([*texts, "\n\nHuman: \n\nAssistant: "], trainer)
    tokenizer.post_processor = processors.TemplateProcessing(single="</s> $A", special_tokens=[("</s>", 2)])
    special = {"bos_token": "</s>", "eos_token": "</s>", "pad_token": "<pad>", "unk_token": "<unk>"}
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer, **special)


def make_model(folder: Path, *, seed: int) -> None:
    """Write `untrained/`: a model with random weights, and the tokenizer."""
    save_model(folder / "untrained", make_tokenizer(folder), seed=seed, max_tokens=128)


def save_model(
    folder: Path, tokenizer: "PreTrainedTokenizerBase", *, seed: int, max_tokens: int, init_std: float = 0.02
) -> None:
    """Write an OPT of two layers with random weights, and its tokenizer."""
    import torch
    from transformers import OPTConfig, OPTForCausalLM

    torch.manual_seed(seed)
    config = OPTConfig(
        vocab_size=len(tokenizer),
        hidden_size=128,
        num_hidden_layers=2,
        num_attention_heads=4,
        ffn_dim=512,
        word_embed_proj_dim=128,
        max_position_embeddings=max_tokens,
        init_std=init_std,
        bos_token_id=tokenizer.bos_token_id,
        eos_token_id=tokenizer.eos_token_id,
        pad_token_id=tokenizer.pad_token_id,
    )
    OPTForCausalLM(config).save_pretrained(folder)
    tokenizer.save_pretrained(folder)
