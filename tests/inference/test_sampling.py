"""The sampling of `rlhf sample` by each generation backend, whose requests wait for places in other ways."""

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import pytest
import torch
from support.decode_models import FUNCTIONS
from support.scripted_model import ending_model

from pipeline.generation.generator import Generator
from pipeline.inference.answer_scores import read_prompts, scored_answers
from pipeline.inference.answer_settings import SampleSettings
from pipeline.inference.answers import ChatModel, load_chat_model
from pipeline.models.source import ModelSource
from pipeline.rewards.pool import RewardPool


@pytest.fixture(scope="module")
def path(bpe_folder, tmp_path_factory) -> str:
    return ending_model(bpe_folder, tmp_path_factory.mktemp("model"))


def sampled(chat_model: ChatModel, path: str, file: str, batch_size: int, stop: Sequence[str] = ()) -> list[Any]:
    data = read_prompts([file], ModelSource(path), column_map="", max_length=0, max_new_tokens=6)
    settings = SampleSettings(n=2, max_new_tokens=6, temperature=1.0, top_p=0.9, stop_strings=[*stop])
    with RewardPool([], num_workers=1, timeout_s=1) as pool:
        rows = scored_answers(chat_model, data, pool, settings, first=1, batch_size=batch_size, seed=3)
        return [(prompt.number, answers) for prompt, answers, _ in rows]


@pytest.mark.few(1)
@pytest.mark.parametrize(("forward", "batch_size"), [("static", 1), ("static", 9), ("fused", 2)])
def test_answers_are_those_of_the_eager_backend(forward: str, batch_size: int, path, tmp_path):
    """One prompt is there twice; prompts of other lengths, fewer and more of them than there are places."""
    (tmp_path / "q.jsonl").write_text(
        "".join(f'{{"prompt": "{text}"}}\n' for text in ("a", "b c d", "a", "e" * 30, "f", "g h"))
    )
    file, eager = str(tmp_path / "q.jsonl"), load_chat_model(path, dtype=torch.float32)
    expected = sampled(eager, path, file, 3)
    source = Generator(FUNCTIONS[forward](eager.model), eager.vocabulary)
    other = replace(eager, sessions=lambda: source)
    result = sampled(other, path, file, batch_size)
    assert [number for number, _ in result] == [2, 3, 4, 5, 6]
    for (_, answers), (_, others) in zip(result, expected, strict=True):
        assert len(answers) == 2
        for one, twin in zip(answers, others, strict=True):
            assert (one.text, one.num_tokens, one.finish_reason) == (twin.text, twin.num_tokens, twin.finish_reason)
            assert one.log_prob == pytest.approx(twin.log_prob, abs=1e-3)
    assert {one.finish_reason for _, answers in result for one in answers} == {"end", "limit"}


def test_a_stop_string_ends_an_answer_which_is_else_the_same(path, tmp_path):
    (tmp_path / "q.jsonl").write_text("".join(f'{{"prompt": "{text}"}}\n' for text in "abcdefgh"))
    file, chat_model = str(tmp_path / "q.jsonl"), load_chat_model(path, dtype=torch.float32)
    without = [one for _, answers in sampled(chat_model, path, file, 3) for one in answers]
    stop = next(one.text for one in without if one.finish_reason == "limit")[2:4]
    answers = [one for _, answers in sampled(chat_model, path, file, 3, [stop, "never"]) for one in answers]
    for one, whole in zip(answers, without, strict=True):
        if stop in whole.text:  # the token that completes it may have more characters
            assert one.finish_reason == "stop" and stop in one.text and whole.text.startswith(one.text)
            assert one.num_tokens <= whole.num_tokens and one.log_prob >= whole.log_prob - 1e-4
        else:
            assert (one.text, one.num_tokens, one.finish_reason) == (whole.text, whole.num_tokens, whole.finish_reason)
    assert {one.finish_reason for one in answers} >= {"stop", "limit"}
    assert any(one.num_tokens < whole.num_tokens for one, whole in zip(answers, without, strict=True))
