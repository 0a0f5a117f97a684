"""A model larger than a GPU, on real ones: layers on the host or on a second GPU give the answers of one whole GPU."""

import pytest
import torch
from support.tiny_models import save_tiny

from pipeline.inference.answer_rows import Answer
from pipeline.inference.answer_settings import ReplySettings
from pipeline.inference.answers import generate_answers, load_chat_model
from pipeline.models import loaded

pytestmark = pytest.mark.gpu
PROMPTS = [[2, 17, 33, 45], [2, 60, 61, 62, 63, 64, 65], [2, 9]]
LIMIT = 60 * 2**20  # of about 105 MB


@pytest.fixture(scope="module")
def folder(bpe_folder, tmp_path_factory) -> str:
    sizes = {"hidden_size": 512, "intermediate_size": 2048, "num_attention_heads": 8, "num_hidden_layers": 6}
    return save_tiny("llama", bpe_folder, tmp_path_factory.mktemp("large") / "llama", **sizes)


def answers_of(folder: str) -> tuple[list[list[Answer]], list[int]]:
    """The answers, and the bytes that the loaded model takes on each GPU."""
    before = [torch.cuda.memory_allocated(n) for n in range(torch.cuda.device_count())]
    chat_model = load_chat_model(folder, dtype=torch.float32)
    taken = [torch.cuda.memory_allocated(n) - bytes for n, bytes in enumerate(before)]
    return generate_answers(chat_model, PROMPTS, ReplySettings(max_new_tokens=12, temperature=0.8), seed=5), taken


def test_layers_on_the_host(folder, monkeypatch):
    whole, taken = answers_of(folder)
    assert taken[0] > LIMIT
    monkeypatch.setattr(loaded, "memory_limits", lambda: {0: LIMIT, "cpu": 2**40})
    spread, taken = answers_of(folder)
    assert spread == whole and 0 < taken[0] < LIMIT


@pytest.mark.two_gpus
@pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two CUDA devices")
def test_layers_on_two_gpus(folder, monkeypatch):
    whole, _ = answers_of(folder)
    monkeypatch.setattr(loaded, "memory_limits", lambda: {0: LIMIT, 1: 2 * LIMIT, "cpu": 2**40})
    spread, taken = answers_of(folder)
    assert spread == whole and 0 < taken[0] < LIMIT and taken[1] > 0


def test_limits_are_a_share_of_what_is_free():
    limits = loaded.memory_limits()
    assert list(limits) == [*range(torch.cuda.device_count()), "cpu"]
    assert limits[0] <= 0.8 * torch.cuda.get_device_properties(0).total_memory
