"""A tiny T5, a unigram tokenizer as its family has one, and a toy translation that it learns in seconds."""

from pathlib import Path
from random import Random
from typing import Any

import torch
from support.tiny_run import write_lines
from tokenizers import Tokenizer, decoders, models, normalizers, pre_tokenizers, processors
from transformers import PreTrainedTokenizerFast, T5Config, T5ForConditionalGeneration

# A word for word translation.
WORDS = dict(
    zip(
        "the a house tree dog cat river old small red sees finds and near".split(),
        "das ein haus baum hund kater fluss alt klein rot sieht findet und nahe".split(),
        strict=True,
    )
)
TASK = "translate English to German: "


def make_translations(count: int, *, seed: int = 3) -> list[dict[str, str]]:
    """Rows of `prompt` and `response`; all prompts differ."""
    random, sources = Random(seed), dict[str, str]()
    while len(sources) < count:
        words = [random.choice(list(WORDS)) for _ in range(random.randint(1, 4))]
        sources[" ".join(words)] = " ".join(WORDS[word] for word in words)
    return [{"prompt": TASK + source, "response": target} for source, target in sources.items()]


def make_t5_tokenizer(texts: list[str]) -> PreTrainedTokenizerFast:
    """A unigram tokenizer with T5's special tokens, pieces and order: <pad> 0, </s> 1 at each end, <unk> 2."""
    special = ["<pad>", "</s>", "<unk>", "<extra_id_0>"]
    letters = sorted({letter for text in texts for letter in text.replace(" ", "\u2581")})
    words = sorted({f"\u2581{word}" for text in texts for word in text.split()} - {*letters})
    pieces = [*((text, 0.0) for text in special), *((word, -5.0) for word in words), *((one, -9.0) for one in letters)]
    tokenizer = Tokenizer(models.Unigram(pieces, unk_id=2))
    tokenizer.normalizer = normalizers.NFKC()
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence([pre_tokenizers.WhitespaceSplit(), pre_tokenizers.Metaspace()])
    tokenizer.decoder = decoders.Metaspace()
    tokenizer.add_special_tokens(special)
    tokenizer.post_processor = processors.TemplateProcessing(single="$A </s>", special_tokens=[("</s>", 1)])
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, pad_token="<pad>", eos_token="</s>", unk_token="<unk>",
        extra_special_tokens=["<extra_id_0>"],
    )  # fmt: skip


def t5_config(vocab_size: int, **changes: Any) -> T5Config:
    settings = {
        "vocab_size": vocab_size, "d_model": 32, "d_kv": 16, "d_ff": 64, "num_layers": 2, "num_heads": 2,
        "relative_attention_num_buckets": 8, "relative_attention_max_distance": 16, "decoder_start_token_id": 0,
    }  # fmt: skip
    return T5Config(**(settings | changes))


def make_t5_folder(folder: Path, *, num_train: int = 64, num_test: int = 8, **changes: Any) -> Path:
    """`train.jsonl` and `test.jsonl` of translations, and the model folder `t5/`; `changes` are of its config."""
    rows = make_translations(num_train + num_test)
    folder.mkdir(exist_ok=True)
    write_lines(folder / "train.jsonl", rows[:num_train])
    write_lines(folder / "test.jsonl", rows[num_train:])
    tokenizer = make_t5_tokenizer([text for row in rows for text in row.values()])
    torch.manual_seed(5)
    T5ForConditionalGeneration(t5_config(len(tokenizer), **changes)).save_pretrained(folder / "t5")
    tokenizer.save_pretrained(folder / "t5")
    return folder
