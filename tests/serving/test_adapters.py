"""A base and adapters on it in one server: each answers as its merged model, and the base's weights are there once."""

from pathlib import Path

import openai
import pytest
import torch
from support.scripted_model import random_model
from support.served_models import answers_in_turn
from support.trained_folders import save_as_trained

from pipeline.data.templates import encode_prompt
from pipeline.data.turns import Message
from pipeline.inference.answer_settings import ReplySettings
from pipeline.inference.answers import generate_answers, load_chat_model
from pipeline.inference.serving.worker import prompt_log_probs
from rlhf.serve import load_chat_models

ADAPTERS = ("one/adapter", "two/adapter")
QUESTION = "hello"
SETTINGS = ReplySettings(max_new_tokens=24)


@pytest.fixture(scope="module")
def folder(bpe_folder: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """`base`, a random model, and two adapters on it; their merged models are in the folders above them."""
    folder = tmp_path_factory.mktemp("adapters")
    random_model(bpe_folder, folder / "base")
    for seed, name in enumerate(ADAPTERS, 1):
        save_as_trained(folder / "base", (folder / name).parent, lora=True, seed=seed)
    return folder


def paths_in(folder: Path) -> dict[str, str]:
    """What is served -> the whole model with the same function."""
    whole = {name: str((folder / name).parent) for name in ADAPTERS}
    return {str(folder / name): path for name, path in whole.items()} | {str(folder / "base"): str(folder / "base")}


def test_each_answers_as_its_merged_model(folder):
    """Interleaved: an answer of the base comes after those of adapters on it, and one of an adapter once more."""
    paths = paths_in(folder)
    shared = load_chat_models(list(paths), torch.float32)
    prompt = [*encode_prompt(shared[str(folder / "base")].tokenizer, [Message("user", QUESTION)])]
    replies = set()
    for served in [*paths, *paths]:
        whole = load_chat_model(paths[served], dtype=torch.float32)
        (((own,),), ((expected,),)) = (
            generate_answers(model, [prompt], SETTINGS, seed=3) for model in (shared[served], whole)
        )
        assert own.ids == expected.ids
        assert own.log_prob == pytest.approx(expected.log_prob, abs=1e-4)
        values = [prompt_log_probs(model, prompt)[0] for model in (shared[served], whole)]
        torch.testing.assert_close(*map(torch.tensor, values), rtol=0, atol=1e-4)
        replies.add(own.ids)
    assert len(replies) == len(paths)


def test_the_weights_of_the_base_are_there_once(folder):
    shared = load_chat_models(list(paths_in(folder)), torch.float32)
    base = load_chat_model(str(folder / "base"), dtype=torch.float32).model
    counts = {one.data_ptr(): one.numel() for model in shared.values() for one in model.model.parameters()}
    adapters = sum(
        one.numel() for model in shared.values() for name, one in model.model.named_parameters() if "lora_" in name
    )
    assert sum(counts.values()) == sum(one.numel() for one in base.parameters()) + adapters
    assert adapters > 0


def test_an_adapter_alone_is_merged(folder):
    """It needs no weights beside those of its base, and is faster so."""
    (alone,) = load_chat_models([str(folder / ADAPTERS[0])], torch.float32).values()
    assert not [name for name, _ in alone.model.named_parameters() if "lora_" in name]


def test_running_requests_of_all_get_their_own_answers(folder):
    """Steps of the models alternate, as in the server's thread."""
    paths = paths_in(folder)
    shared = load_chat_models(list(paths), torch.float32)
    prompt = encode_prompt(shared[str(folder / "base")].tokenizer, [Message("user", QUESTION)])
    found = answers_in_turn(shared, prompt, SETTINGS, seed=3)
    for path, whole in paths.items():
        model = load_chat_model(whole, dtype=torch.float32)
        [[expected]] = generate_answers(model, [prompt], SETTINGS, seed=3)
        assert found[path] == expected.ids


@pytest.mark.slow
def test_adapters_are_served_by_their_paths(folder, started_server):
    server = started_server(["base", *ADAPTERS], folder)
    client = openai.OpenAI(base_url=f"{server.url}/v1", api_key=server.token, max_retries=0)
    names = ["base", *ADAPTERS]
    assert [one.id for one in client.models.list()] == names
    messages = [{"role": "user", "content": QUESTION}]
    settings = ReplySettings(max_new_tokens=24, temperature=0)
    for name in names:
        model = load_chat_model(paths_in(folder)[str(folder / name)], dtype=torch.float32)
        prompt = encode_prompt(model.tokenizer, [Message("user", QUESTION)])
        [[expected]] = generate_answers(model, [prompt], settings, seed=0)
        reply = client.chat.completions.create(model=name, messages=messages, max_tokens=24, temperature=0)
        assert reply.choices[0].message.content == expected.text
