"""Models larger than a GPU: some layers stay on the host, and answers and scores are those of one whole device.

A GPU is played by the CPU under another name: what is moved, and when, is the same.
"""

from pathlib import Path

import accelerate
import pytest
import torch
from safetensors.torch import load_file, save_file
from support.messages import naming
from support.tiny_models import NAMES, save_tiny

from pipeline.errors import InputError
from pipeline.inference.answer_rows import Answer
from pipeline.inference.answer_scores import AnswerScorer, load_scorer
from pipeline.inference.answer_settings import ReplySettings
from pipeline.inference.answers import generate_answers, load_chat_model
from pipeline.models import loaded
from pipeline.models.loading import default_device, load_causal_lm
from pipeline.models.lora import add_lora
from pipeline.rewards.reward_model import score_ids

PROMPTS = [[2, 17, 33, 45], [2, 60, 61, 62, 63, 64, 65], [2, 9]]


@pytest.fixture
def small_gpus(monkeypatch):
    """Return a function that limits the first GPUs to so many bytes each; without a GPU, they are the CPU."""
    dispatch = accelerate.dispatch_model

    def on_cpu(model, devices, **options):
        return dispatch(model, {k: torch.device("cpu") if d != "cpu" else d for k, d in devices.items()}, **options)

    def limit(*sizes: int) -> None:
        monkeypatch.setattr(loaded, "memory_limits", lambda: dict(enumerate(sizes)) | {"cpu": 2**40})
        if not torch.cuda.is_available():
            monkeypatch.setattr(accelerate, "dispatch_model", on_cpu)

    return limit


def on_host(model: torch.nn.Module) -> list[str]:
    """The parameters that are only in memory while their layer computes."""
    return [name for name, parameter in model.named_parameters() if parameter.is_meta]


def answers_of(folder: str) -> tuple[list[list[Answer]], list[str]]:
    chat_model = load_chat_model(folder, dtype=torch.float32)
    settings = ReplySettings(max_new_tokens=12, temperature=0.8)
    return generate_answers(chat_model, PROMPTS, settings, seed=5), on_host(chat_model.model)


@pytest.fixture
def deep(bpe_folder, tmp_path):
    """Return a function that makes a model of six layers, 33 KB each in OPT, and embeddings of 51 KB."""
    return lambda name, **options: save_tiny(name, bpe_folder, tmp_path / name, num_hidden_layers=6, **options)


QUICK = [pytest.param(name, marks=() if name == "llama" else pytest.mark.slow) for name in NAMES]


@pytest.mark.parametrize("name", QUICK)
@pytest.mark.parametrize("sizes", [(150_000,), (110_000, 110_000), (180_000, 180_000)])
def test_answers_are_those_of_a_model_that_fits(deep, name, small_gpus, capsys, sizes):
    folder = deep(name)
    whole, nothing = answers_of(folder)
    small_gpus(*sizes)
    spread, offloaded = answers_of(folder)
    assert spread == whole and nothing == []
    told = capsys.readouterr().err
    assert bool(offloaded) == ("on the host" in told) and ("on GPU 1" in told) == (len(sizes) > 1)
    assert offloaded or len(sizes) > 1


@pytest.mark.slow
def test_an_adapter_is_merged_before_layers_are_spread(deep, small_gpus, tmp_path):
    base = deep("llama")
    settings = {"alpha": 8, "dropout": 0.0, "module_name": "", "only_lora": True, "task": "CAUSAL_LM", "seed": 0}
    wrapped = add_lora(load_causal_lm(base, dtype=torch.float32), dim=4, base=base, **settings)
    with torch.no_grad():
        for name, parameter in wrapped.named_parameters():
            if "lora_B" in name:
                parameter.normal_()
    wrapped.save_pretrained(tmp_path / "adapter")
    whole, _ = answers_of(str(tmp_path / "adapter"))
    assert whole != answers_of(base)[0]
    small_gpus(150_000)
    spread, offloaded = answers_of(str(tmp_path / "adapter"))
    assert spread == whole and offloaded


@torch.no_grad()
def scores(judge: AnswerScorer) -> list[float]:
    return score_ids(judge.model, PROMPTS, judge.tokenizer, default_device()).tolist()


@pytest.mark.parametrize("name", QUICK)
def test_scores_are_those_of_a_model_that_fits(deep, name, small_gpus):
    folder = deep(name, reward=True)
    whole = scores(load_scorer(folder, dtype=torch.float32))
    small_gpus(150_000)
    judge = load_scorer(folder, dtype=torch.float32)
    assert scores(judge) == whole
    assert "model.score.weight" in on_host(judge.model)


def test_a_gpu_that_takes_no_layer_is_one_line(deep, small_gpus):
    small_gpus(1)
    with pytest.raises(InputError, match=naming("no layer ... 0.0 GiB, 80 % ... free more")):
        load_chat_model(deep("opt"), dtype=torch.float32)


def test_weights_that_stay_on_the_host_are_checked_too(deep, small_gpus):
    folder = Path(deep("opt"))
    weights = load_file(folder / "model.safetensors")
    weights["model.decoder.layers.5.fc2.weight"][0, 0] = torch.nan
    save_file(weights, folder / "model.safetensors", metadata={"format": "pt"})
    small_gpus(150_000)
    with pytest.raises(InputError, match=r"layers.5.fc2.weight holds NaN or infinity"):
        load_chat_model(str(folder), dtype=torch.float32)
