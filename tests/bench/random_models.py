"""Folders with OPT-shaped random models, a tokenizer and prompts of full length, for runs whose speed is measured.

`python tests/bench/random_models.py --output FOLDER --actor 1.3b --critic 350m --prompts 1300`
"""

import argparse
import json
import sys
from pathlib import Path
from random import Random
from typing import Any

import torch

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from demo.make import make_data, make_tokenizer
from demo.rule import make_prompt

VOCABULARY = 50272
# Zhang et al. 2022 (OPT), table 1, and the published configurations.
SHAPES: dict[str, dict[str, Any]] = {
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
}


def make_model(folder: Path, shape: str, tokenizer: Any, *, scores: bool) -> None:
    """Save a random model of `shape` in bf16; `scores`: a sequence classifier, as step 2 writes it."""
    from transformers import OPTConfig, OPTForCausalLM, OPTForSequenceClassification

    sizes = {"word_embed_proj_dim": SHAPES[shape]["hidden_size"], **SHAPES[shape]}
    config = OPTConfig(vocab_size=VOCABULARY, bos_token_id=2, eos_token_id=2, pad_token_id=1, num_labels=1, **sizes)
    config.score_mean, config.score_std = 0.0, 1.0
    torch.manual_seed(0)
    with torch.device("cuda" if torch.cuda.is_available() else "cpu"):
        model = (OPTForSequenceClassification if scores else OPTForCausalLM)(config)
    model.to(torch.bfloat16).save_pretrained(folder)
    tokenizer.save_pretrained(folder)


def make_prompts(file: Path, count: int, words: int) -> None:
    random = Random(0)
    with file.open("w", encoding="utf-8") as out:
        for _ in range(count):
            out.write(json.dumps({"prompt": " ".join(make_prompt(random) for _ in range(words // 9))}) + "\n")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--output", required=True)
    parser.add_argument("--actor", default="1.3b", choices=SHAPES)
    parser.add_argument("--critic", default="350m", choices=SHAPES)
    parser.add_argument("--prompts", type=int, default=1300)
    options = parser.parse_args()
    folder = Path(options.output)
    make_data(folder, seed=0)
    tokenizer = make_tokenizer(folder)
    make_model(folder / "actor", options.actor, tokenizer, scores=False)
    make_model(folder / "critic", options.critic, tokenizer, scores=True)
    make_prompts(folder / "prompts.jsonl", options.prompts, words=400)


if __name__ == "__main__":
    main()
