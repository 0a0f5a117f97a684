"""The rows of the race: their sizes, their data, this project's flags, and the settings of TRL's side."""

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from benchmarks.speed.hub import full_rows

REWARD = Path(__file__).with_name("trl_grpo.py")
SECTIONS = {"grpo": "ppo", "dpo": "dpo", "sft": "sft"}
Given = dict[str, Any]


@dataclass(frozen=True, slots=True)
class Row:
    """A shape of benchmarks.speed.random_models and the sizes of a step.

    kind: what trains.
    prompts: prompts, pairs or rows of a step. samples: responses to a prompt.
    prompt, answer: tokens; of a pair or a row their sum is its length.
    lora: rank; 0 trains all weights.
    """

    shape: str
    kind: Literal["grpo", "dpo", "sft"] = "grpo"
    prompts: int = 16
    samples: int = 8
    prompt: int = 512
    answer: int = 512
    lora: int = 0
    steps: int = 5
    warm_up: int = 2


ROWS = {
    "grpo-1.5b": Row("qwen2.5-1.5b"),
    "grpo-1.5b-1024": Row("qwen2.5-1.5b", prompt=1024),
    "grpo-1.5b-long": Row("qwen2.5-1.5b", answer=2048, steps=3, warm_up=1),
    "grpo-8b-lora": Row("llama-3-8b", lora=64),
    "dpo-1.5b": Row("qwen2.5-1.5b", "dpo", prompts=64, samples=1, prompt=256, answer=256),
    "sft-1.5b": Row("qwen2.5-1.5b", "sft", prompts=64, samples=1, prompt=256, answer=256),
    "sft-8b-lora": Row("llama-3-8b", "sft", prompts=16, samples=1, prompt=2048, answer=2048, lora=64),
    "tiny": Row("llama-tiny", prompts=2, samples=2, prompt=24, answer=8, steps=2, warm_up=1),
    "tiny-dpo": Row("llama-tiny", "dpo", prompts=4, samples=1, prompt=48, answer=48, steps=2, warm_up=1),
    "tiny-sft": Row("llama-tiny", "sft", prompts=4, samples=1, prompt=48, answer=48, steps=2, warm_up=1),
}
# What TRL's side begins with, and what is tried in turn; of each setting the fastest value stays.
SHARED: Given = {
    "micro_batch": 8, "gradient_checkpointing": False, "use_liger_kernel": False, "weights": "bfloat16",
}  # fmt: skip
VLLM: Given = {"vllm_gpu_memory_utilization": 0.3, "vllm_enable_sleep_mode": False}
START = {"grpo": SHARED | VLLM, "dpo": SHARED | {"precompute_ref_log_probs": True}, "sft": SHARED}
ON_A_CPU: Given = {"micro_batch": 2, "weights": "float32"}
Tried = tuple[tuple[str, tuple[Any, ...]], ...]
TRIED_BY_ALL: Tried = (
    ("micro_batch", (16, 32)),
    ("gradient_checkpointing", (True,)),
    ("micro_batch", (64,)),
    ("use_liger_kernel", (True,)),
)
TRIED: dict[str, Tried] = {
    "grpo": (
        *TRIED_BY_ALL,
        ("vllm_gpu_memory_utilization", (0.2, 0.45)),
        ("vllm_enable_sleep_mode", (True,)),
        ("weights", ("float32",)),
    ),
    "dpo": (*TRIED_BY_ALL, ("precompute_ref_log_probs", (False,)), ("weights", ("float32",))),
    "sft": (("micro_batch", (2, 4)), *TRIED_BY_ALL, ("weights", ("float32",))),
}


def candidates(kind: str, start: Given) -> Iterator[Given]:
    """Yield what is tried one after the other: {name: value} that differs from the start."""
    for name, values in TRIED[kind]:
        for value in values:
            if value != start[name]:
                yield {name: value}


def own_flags(row: Row) -> Given:
    """Return this project's flags of what is trained, without those of folders and data."""
    section, length = SECTIONS[row.kind], row.prompt + row.answer
    given: Given = {
        "train-batch-size": row.prompts * row.samples, "max-steps": row.warm_up + row.steps, "keep-checkpoints": 0,
        "eval-fraction": 0, ("actor-lora-dim" if row.kind == "grpo" else "lora-dim"): row.lora,
    }  # fmt: skip
    if row.kind == "grpo":
        given |= {"reward-function": f"{REWARD}:even", "num-samples-per-prompt": row.samples}
        given |= {"max-prompt-seq-len": row.prompt, "max-answer-seq-len": row.answer}
    else:
        given["max-seq-len"] = length
    stage: Given = {"step": 1} if row.kind == "sft" else {"step": 3, "method": row.kind}
    return stage | {f"{section}.{name}": value for name, value in given.items()}


def rows_of(row: Row, tokenizer: Any) -> dict[str, list[Given]]:
    """Return the rows of both sides, `ours` and `trl`; TRL's are texts of the same chat template."""
    count = row.prompts * (row.steps + row.warm_up)
    section = {"grpo": "ppo", "dpo": "reward", "sft": "sft"}[row.kind]
    tokens = row.prompt if row.kind == "grpo" else row.prompt + row.answer
    rows = list(full_rows(tokenizer, section, count, tokens=tokens, seed=1))
    turns = [[{"role": "user", "content": one["prompt"]}] for one in rows]
    texts = [tokenizer.apply_chat_template(one, tokenize=False, add_generation_prompt=True) for one in turns]
    columns = {"grpo": {}, "dpo": {"chosen": "chosen", "rejected": "rejected"}, "sft": {"completion": "chosen"}}
    answers = [{name: one[column] for name, column in columns[row.kind].items()} for one in rows]
    return {
        "ours": [{"prompt": one["prompt"]} | answer for one, answer in zip(rows, answers, strict=True)],
        "trl": [{"prompt": text} | answer for text, answer in zip(texts, answers, strict=True)],
    }
