"""A base and adapters on it, served on a CUDA device: graphs of their own over the same weights."""

from pathlib import Path

import pytest
import torch
from support.scripted_model import random_model
from support.served_models import answers_in_turn
from support.trained_folders import save_as_trained

from pipeline.generation.forwards.static import StaticCacheForward
from pipeline.generation.generator import Generator
from pipeline.inference.answer_settings import ReplySettings
from pipeline.inference.answers import generate_answers, load_chat_model
from rlhf.serve import load_chat_models

pytestmark = pytest.mark.gpu

SETTINGS = ReplySettings(max_new_tokens=24)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_models_on_one_base_answer_in_turn_each_with_its_adapter(bpe_folder: Path, tmp_path: Path, dtype: torch.dtype):
    random_model(bpe_folder, tmp_path / "base", hidden_size=128)
    for seed in (1, 2):
        save_as_trained(tmp_path / "base", tmp_path / f"{seed}", lora=True, seed=seed)
    whole = {str(tmp_path / f"{seed}/adapter"): str(tmp_path / f"{seed}") for seed in (1, 2)}
    whole[str(tmp_path / "base")] = str(tmp_path / "base")
    shared = load_chat_models(list(whole), dtype)
    for path, model in shared.items():
        source = model.sessions()
        assert isinstance(source, Generator)
        assert isinstance(source.forward, StaticCacheForward) == path.endswith("adapter")
    prompt = [*range(5, 17)]
    found = [answers_in_turn(shared, prompt, SETTINGS, seed=3) for _ in range(2)]
    assert found[0] == found[1] and len({*found[0].values()}) == 3
    if dtype == torch.float32:  # 16 bits round a merged weight
        for path, folder in whole.items():
            [[expected]] = generate_answers(load_chat_model(folder, dtype=dtype), [prompt], SETTINGS, seed=3)
            assert found[0][path] == expected.ids
