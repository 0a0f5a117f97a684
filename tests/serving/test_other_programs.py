"""Other programs load the folders that training writes, and answer as `rlhf chat`: the commands of chat_and_serve.md.

Nothing is trained, see `support.trained_folders`.
"""

import os
import shutil
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from functools import partial
from importlib.util import find_spec
from pathlib import Path
from types import ModuleType
from typing import Any

import httpx
import openai
import pytest
import torch
from support.ports import free_port
from support.scripted_model import TEXT, random_model, scripted_model, tiny_config
from support.trained_folders import save_as_trained
from transformers import AutoModelForCausalLM, AutoTokenizer, GPT2TokenizerFast, LlamaForCausalLM, LlamaTokenizerFast

from pipeline.data.templates import encode_prompt
from pipeline.data.turns import Message
from pipeline.inference.answer_settings import ReplySettings
from pipeline.inference.answers import load_chat_model
from pipeline.inference.chat_session import Conversation, Reply

QUESTIONS = ("What is a heron?", "How do I make tea?")
MAX_TOKENS = 16
STARTS_WITHIN_S = 120


def own_replies(folder: Path) -> list[Reply]:
    """The greedy replies of `rlhf chat` to the questions, one after the other."""
    settings = ReplySettings(temperature=0, max_new_tokens=MAX_TOKENS)
    conversation = Conversation(load_chat_model(str(folder), dtype=torch.float32), settings)
    return [conversation.say(question, lambda _: None) for question in QUESTIONS]


@pytest.fixture
def transformers_serve(tmp_path: Path) -> Iterator[Callable[[str], str]]:
    """Run `transformers serve MODEL` on the CPU in the test's folder; return its address when it is ready."""
    if absent := [name for name in ("fastapi", "uvicorn", "openai") if find_spec(name) is None]:
        pytest.skip(f"{', '.join(absent)} is not installed: pip install 'transformers[serving]'")
    processes: list[subprocess.Popen] = []

    def start(model: str) -> str:
        port = free_port()
        address, log = f"http://127.0.0.1:{port}", tmp_path / "serve.log"
        words = ["serve", model, "--device", "cpu", "--host", "127.0.0.1", "--port", str(port)]
        environment = os.environ | {"HF_HUB_OFFLINE": "1", "OMP_NUM_THREADS": "1"}
        with log.open("w") as out:
            command = [sys.executable, "-m", "transformers.cli.transformers", *words]
            processes.append(subprocess.Popen(command, cwd=tmp_path, env=environment, stdout=out, stderr=out))
        end = time.monotonic() + STARTS_WITHIN_S
        while processes[-1].poll() is None and time.monotonic() < end:
            try:
                if httpx.get(f"{address}/health").json() == {"status": "ok"}:
                    return address
            except httpx.TransportError:
                time.sleep(0.2)
        raise AssertionError(log.read_text()[-3000:])

    yield start
    for process in processes:
        process.terminate()
        process.wait(30)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("make", "lora"),
    [(partial(scripted_model, text=TEXT), False), (random_model, True)],
    ids=["all-weights", "merged-lora"],
)
def test_transformers_serve_gives_the_greedy_replies_of_chat(bpe_folder, tmp_path, transformers_serve, make, lora):
    folder = save_as_trained(make(bpe_folder, tmp_path / "start"), tmp_path / "output/actor", lora=lora)
    assert (folder / "adapter").is_dir() == lora
    client = openai.OpenAI(base_url=f"{transformers_serve('output/actor')}/v1", api_key="none", max_retries=0)
    messages: list[Any] = []
    for question, own in zip(QUESTIONS, own_replies(folder), strict=True):
        messages.append({"role": "user", "content": question})
        answer = client.chat.completions.create(
            model="output/actor", messages=messages, temperature=0, max_tokens=MAX_TOKENS
        )
        text = answer.choices[0].message.content or ""
        assert text.strip() == own.text != ""
        assert answer.choices[0].finish_reason == {"end": "stop", "limit": "length"}[own.ending]
        messages.append({"role": "assistant", "content": own.text})


def gpt2_tokenizer(data: Path, folder: Path) -> None:
    GPT2TokenizerFast.from_pretrained(data / "tokenizers" / "gpt2").save_pretrained(folder)


def mistral_tokenizer(data: Path, folder: Path) -> None:
    LlamaTokenizerFast.from_pretrained(data / "tokenizers" / "mistral-v1").save_pretrained(folder)
    shutil.copyfile(data / "tokenizers" / "mistral-v1" / "tokenizer.model", folder / "tokenizer.model")


@pytest.fixture(params=[gpt2_tokenizer, mistral_tokenizer], ids=["byte-level-bpe", "sentencepiece"])
def trained(request: pytest.FixtureRequest, real_data: Path, tmp_path: Path) -> Path:
    """A tiny Llama with a published tokenizer, whose pre-tokenizer the converter knows by its hash."""
    start = tmp_path / "start"
    request.param(real_data, start)
    tokenizer = AutoTokenizer.from_pretrained(start)
    config = tiny_config(vocab_size=len(tokenizer))
    config.bos_token_id, config.eos_token_id = tokenizer.bos_token_id, tokenizer.eos_token_id
    torch.manual_seed(0)
    model = LlamaForCausalLM(config)
    torch.nn.init.normal_(model.lm_head.weight, std=0.5)
    model.save_pretrained(start)
    return save_as_trained(start, tmp_path / "actor", lora=False)


@pytest.fixture
def converted(trained: Path, tmp_path: Path) -> Path:
    """The GGUF file of the folder, in fp32."""
    program = Path(os.environ.get("RLHF_LLAMA_CPP", "")) / "convert_hf_to_gguf.py"
    if not program.is_file():
        pytest.skip("set RLHF_LLAMA_CPP to llama.cpp's folder with convert_hf_to_gguf.py")
    file = tmp_path / "actor.gguf"
    command = [sys.executable, str(program), str(trained), "--outfile", str(file), "--outtype", "f32"]
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, timeout=300, check=False)
    assert done.returncode == 0, done.stderr[-3000:]
    return file


@pytest.fixture
def gguf() -> ModuleType:
    return pytest.importorskip("gguf", reason="gguf is not installed, which reads the converted file")


@pytest.mark.slow
def test_a_converted_folder_keeps_weights_tokenizer_and_template(gguf, trained, converted):
    fields = gguf.GGUFReader(converted).fields
    tokenizer = AutoTokenizer.from_pretrained(trained)
    assert fields["tokenizer.ggml.tokens"].contents() == tokenizer.convert_ids_to_tokens(range(len(tokenizer)))
    assert fields["tokenizer.chat_template"].contents() == tokenizer.chat_template
    for name, number in (("bos", tokenizer.bos_token_id), ("eos", tokenizer.eos_token_id)):
        assert fields[f"tokenizer.ggml.{name}_token_id"].contents() == number
    kind = fields["tokenizer.ggml.model"].contents()
    begins = fields.get("tokenizer.ggml.add_bos_token")
    assert (begins.contents() if begins else kind == "llama") is False  # llama.cpp's default
    read = AutoModelForCausalLM.from_pretrained(converted.parent, gguf_file=converted.name, dtype=torch.float32)
    expected = AutoModelForCausalLM.from_pretrained(trained, dtype=torch.float32).state_dict()
    torch.testing.assert_close(read.state_dict(), expected, rtol=0, atol=0)


@pytest.mark.slow
def test_llama_cpp_gives_the_greedy_replies_of_chat(trained, converted):
    library = pytest.importorskip("llama_cpp", reason="llama_cpp is not installed: pip install llama-cpp-python")
    model = library.Llama(str(converted), n_ctx=256, verbose=False)
    tokenizer = AutoTokenizer.from_pretrained(trained)
    prompt = encode_prompt(tokenizer, [Message("user", QUESTIONS[0])])
    # As llama-server encodes the text of a template: add_bos lets the file decide whether BOS comes first.
    assert model.tokenize(tokenizer.decode(prompt).encode(), add_bos=True, special=True) == list(prompt)
    messages: list[Any] = []
    for question, own in zip(QUESTIONS, own_replies(trained), strict=True):
        messages.append({"role": "user", "content": question})
        answer = model.create_chat_completion(messages, temperature=0, max_tokens=MAX_TOKENS, repeat_penalty=1.0)
        text = own.text.replace("\ufffd", "")  # bytes of half a character, which llama_cpp leaves out
        assert answer["choices"][0]["message"]["content"].strip() == text != ""
        messages.append({"role": "assistant", "content": own.text})
