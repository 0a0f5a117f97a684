"""Data, tokenizer and models that are small enough to train in seconds."""

import json
from collections.abc import Iterable, Mapping
from pathlib import Path
from random import Random
from typing import Any

import numpy as np
import pytest
import torch
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, processors, trainers
from transformers import OPTConfig, OPTForCausalLM, OPTForSequenceClassification, PreTrainedTokenizerFast

from pipeline.training.metrics import Metric

SCORE_MEAN, SCORE_STD = 0.25, 1.5
VOCABULARY = 400

ANIMALS = "otter badger heron fox hare robin weasel magpie toad beaver lynx marten".split()
COLOURS = "red grey white brown black golden".split()
PLACES = "river bridge mill garden harbour forest orchard".split()
KIND, UNKIND = "gentle brave honest warm calm".split(), "rude cruel lazy bitter nasty".split()


def make_folder(
    folder: Path, *, num_train: int = 64, num_test: int = 8, num_documents: int = 64, **config: Any
) -> Path:
    """`train.jsonl` and `test.jsonl` (pairs), `text.jsonl`, and the model folders `base/` and `scorer/`.

    config: fields of the models' configurations.
    """
    random = Random(7)
    pairs = [make_pair(prompt, random) for prompt in make_prompts(num_train + num_test, random)]
    write_lines(folder / "train.jsonl", pairs[:num_train])
    write_lines(folder / "test.jsonl", pairs[num_train:])
    documents = [" ".join(make_pair(prompt, random)["chosen"] for prompt in ANIMALS[:4]) for _ in range(num_documents)]
    write_lines(folder / "text.jsonl", [{"text": text} for text in documents])
    tokenizer = make_tokenizer([*documents, *(f"\n\nHuman: {row['prompt']}\n\nAssistant: " for row in pairs)])
    save_base(folder / "base", tokenizer, **config)
    save_scorer(folder / "scorer", tokenizer, **config)
    return folder


def make_prompts(count: int, random: Random) -> list[str]:
    """Different requests; some are longer than others."""
    names = [f"the {colour} {animal} by the {place}" for colour in COLOURS for animal in ANIMALS for place in PLACES]
    return [f"{random.choice(['Describe', 'Tell me about'])} {name}." for name in random.sample(names, count)]


def make_pair(prompt: str, random: Random) -> dict[str, str]:
    kind, unkind = (" and ".join(random.choice(words) for _ in range(random.randint(1, 4))) for words in (KIND, UNKIND))
    return {"prompt": prompt, "chosen": f"It was {kind}.", "rejected": f"It was {unkind}."}


def write_lines(path: Path, rows: Iterable[dict[str, Any]]) -> None:
    path.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")


def make_tokenizer(texts: list[str]) -> PreTrainedTokenizerFast:
    """A byte-level BPE tokenizer with OPT's special tokens: </s> begins and ends a text."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=VOCABULARY,
        special_tokens=["<s>", "<pad>", "</s>", "<unk>"],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator(texts, trainer)
    tokenizer.post_processor = processors.TemplateProcessing(single="</s> $A", special_tokens=[("</s>", 2)])
    special = {"bos_token": "</s>", "eos_token": "</s>", "pad_token": "<pad>", "unk_token": "<unk>"}
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer, **special)


def opt_config(vocab_size: int, **changes: Any) -> OPTConfig:
    settings = {
        "vocab_size": vocab_size,
        "hidden_size": 32,
        "num_hidden_layers": 2,
        "num_attention_heads": 2,
        "ffn_dim": 64,
        "word_embed_proj_dim": 32,
        "max_position_embeddings": 128,
        "init_std": 0.1,
        "bos_token_id": 2,
        "eos_token_id": 2,
        "pad_token_id": 1,
    }
    return OPTConfig(**(settings | changes))


def save_base(folder: Path, tokenizer: Any, *, seed: int = 15, **config: Any) -> None:
    """A causal language model whose EOS comes early for some prompts and late for others."""
    torch.manual_seed(seed)
    model = OPTForCausalLM(opt_config(len(tokenizer), **config))
    with torch.no_grad():
        model.get_input_embeddings().weight[tokenizer.eos_token_id] *= 6
    model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)


def save_scorer(folder: Path, tokenizer: Any, *, seed: int = 2, **config: Any) -> None:
    """A reward model as step 2 leaves it: `score` head, statistics of its scores in the configuration."""
    torch.manual_seed(seed)
    model = OPTForSequenceClassification(opt_config(len(tokenizer), num_labels=1, **config))
    with torch.no_grad():
        model.score.weight.normal_(std=0.3)
    model.config.score_mean, model.config.score_std = SCORE_MEAN, SCORE_STD
    model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)


def read_metrics(run_dir: Path) -> list[dict[str, Any]]:
    """The lines of metrics.jsonl."""
    return [json.loads(line) for line in (run_dir / "metrics.jsonl").read_text(encoding="utf-8").splitlines()]


def assert_rows_give_means(run_dir: Path, *names: str) -> None:
    """The evaluations of metrics.jsonl are means of the rows' values that the run has kept."""
    lines = [json.loads(line) for line in (run_dir / "row_values.jsonl").read_text(encoding="utf-8").splitlines()]
    means = {name: [np.average(line[name], weights=line.get("weight")) for line in lines] for name in names}
    told = [line for line in read_metrics(run_dir) if "eval_rows" in line]
    assert [line["step"] for line in lines] == [line["step"] for line in told] and len(told) > 1
    for name in names:
        assert means[name] == pytest.approx([line[name] for line in told], rel=1e-4, abs=1e-5), name
        assert all(len(kept[name]) == line["eval_rows"] for kept, line in zip(lines, told, strict=True))


def numbers_and_metrics(run_dir: Path, metrics: Mapping[str, Metric]) -> tuple[set[str], set[str]]:
    """Return what a run wrote that is no metric of its stage, and the metrics that it did not write."""
    written = {name for line in read_metrics(run_dir) for name in line} - {"stage", "step", "time"}
    declared = {name for name in written if name in metrics or name.removeprefix("eval_") in metrics}
    return written - declared, metrics.keys() - written - {name.removeprefix("eval_") for name in written}


def take_lines(source: Path, target: Path, count: int) -> None:
    """The first `count` lines of a text file."""
    target.write_text("".join(source.read_text(encoding="utf-8").splitlines(keepends=True)[:count]), encoding="utf-8")
