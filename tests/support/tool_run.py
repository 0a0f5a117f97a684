"""A folder for runs with tools: a model that samples whole calls, prompts, tools, a reward, an environment."""

from pathlib import Path
from random import Random
from typing import Any

import torch
from support.run_words import run_words
from support.tiny_run import make_prompts, make_tokenizer, opt_config, write_lines
from support.tool_templates import HERMES, with_template
from tokenizers import AddedToken
from transformers import OPTForCausalLM, PreTrainedTokenizerBase

CALL = '<tool_call>\n{{"name": "{}", "arguments": {}}}\n</tool_call>'
# Each is one token, so that a random model samples whole calls.
CALLS = {
    "add": CALL.format("add", '{"a": 2, "b": 3}'),
    "say": CALL.format("say", '{"text": "é"}'),
    "fail": CALL.format("fail", "{}"),
    "wrong": CALL.format("sub", "{}"),
    "slow": CALL.format("slow", "{}"),
    "look": CALL.format("look", '{"step": 1}'),
}
WORDS = (" yes", " no")
FUNCTIONS = '''
import json
import os
import time

def add(a: int, b: int) -> int:
    """Add two numbers.

    Args:
        a: The first number.
        b: The second number.
    """
    return a + b

async def say(text: str) -> str:
    """Say a text.

    Args:
        text: What to say.
    """
    return f"said {text}<|im_end|>"

def fail() -> str:
    """Raise an error."""
    raise ValueError("no luck")

def slow() -> str:
    """Take too long."""
    time.sleep(60)

def calls(prompts, completions, completion_ids):
    """The number of results that stand in each completion; writes down what it gets."""
    with open(__file__ + ".seen", "a") as file:
        file.write(json.dumps([prompts, completions, completion_ids]) + "\\n")
    return [float(sum(turn["role"] == "tool" for turn in turns)) for turns in completions]


class World:
    def reset(self, number=0):
        self.position = number
        return f" You are at {number}."

    def look(self, step: int) -> str:
        """Take a step and look.

        Args:
            step: The length of the step.
        """
        self.position += step
        return f"at {self.position}"

    def get_reward(self) -> float:
        return float(self.position)
'''


def make_tool_folder(folder: Path, *names: str, num_train: int = 8, num_test: int = 4) -> Path:
    """`base/`, `train.jsonl`, `test.jsonl` and `tools.py`; the model samples the calls of these names, and words."""
    prompts = make_prompts(num_train + num_test, Random(7))
    rows = [{"messages": [{"role": "user", "content": text}], "number": n} for n, text in enumerate(prompts)]
    write_lines(folder / "train.jsonl", rows[:num_train])
    write_lines(folder / "test.jsonl", rows[num_train:])
    (folder / "tools.py").write_text(FUNCTIONS, encoding="utf-8")
    tokenizer = tool_tokenizer(prompts)
    chosen = [*(CALLS[name] for name in names), *WORDS, "<|im_end|>", "<|im_end|>"]
    save_sampler(folder / "base", tokenizer, tokenizer.convert_tokens_to_ids(chosen))
    return folder


def tool_tokenizer(prompts: list[str]) -> PreTrainedTokenizerBase:
    tokenizer = with_template(make_tokenizer([*prompts, FUNCTIONS]), HERMES, "tiny")
    tokenizer.eos_token = "<|im_end|>"
    tokenizer.add_tokens([AddedToken(text, normalized=False) for text in [*CALLS.values(), *WORDS]])
    return tokenizer


def save_sampler(folder: Path, tokenizer: PreTrainedTokenizerBase, ids: list[int], **config: Any) -> None:
    """Save a random model that samples these tokens alone, each with a probability that the context changes."""
    torch.manual_seed(3)
    settings = {"tie_word_embeddings": False, "max_position_embeddings": 1200, "eos_token_id": tokenizer.eos_token_id}
    model = OPTForCausalLM(opt_config(len(tokenizer), **settings | config))
    with torch.no_grad():
        head, norm = model.lm_head.weight, model.model.decoder.final_layer_norm
        norm.weight[0], norm.bias[0] = 0.0, 1.0  # the first number is 1 at each position
        head[:, 0] = -40.0
        head[ids, 0] = 0.0
    model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)


def tool_words(folder: Path, out: Path, *names: str, **changes: Any) -> list[str]:
    """Return the flags of a small GRPO run with these tools; a change to None leaves a flag out."""
    flags = {
        "actor_model_name_or_path": folder / "base", "output_dir": out, "max_prompt_seq_len": 950,
        "max_answer_seq_len": 192, "per_device_train_batch_size": 4, "actor_learning_rate": 1e-3, "method": "grpo",
        "num_samples_per_prompt": 4, "rollout_batch_size": 16, "gradient_accumulation_steps": 2, "max_steps": 4,
        "lr_scheduler_type": "constant", "enable_tensorboard": "false", "dtype": "fp32",
        "reward_function": f"{folder}/tools.py:calls",
    }  # fmt: skip
    tools = ["--tools", *(f"{folder}/tools.py:{name}" for name in names)] if names else []
    return [*run_words(folder, **flags | changes), *tools]
