"""Log-probabilities in streams: the joined lines are the answer that is sent at once, by OpenAI's own client."""

from itertools import accumulate

import openai
import pytest

QUESTION = [{"role": "user", "content": "hello"}]
SETTINGS = [
    {"model": "random", "temperature": 0.9, "max_tokens": 24, "n": 3, "seed": 5},
    {"model": "random", "temperature": 0, "max_tokens": 24},
    {"model": "speaking", "temperature": 0},  # with characters of several tokens, and an end token
    {"model": "speaking", "temperature": 0, "stop": ["\n", "o"]},
    {"model": "endless", "temperature": 0, "max_tokens": 30, "stop": ["ba", "zz"]},
]


@pytest.fixture
def client(served):
    return openai.OpenAI(base_url=f"{served.url}/v1", api_key=served.token, max_retries=0)


def lines_of(stream, number: int) -> list:
    return [one for part in stream for one in part.choices if one.index == number]


@pytest.mark.parametrize("settings", SETTINGS, ids=str)
def test_the_joined_lines_of_a_chat_are_the_whole_answer(client, settings):
    settings = {**settings, "messages": QUESTION, "logprobs": True}
    create = client.chat.completions.create
    whole, parts = create(**settings), list(create(**settings, stream=True))
    for choice in whole.choices:
        first, *lines = lines_of(parts, choice.index)
        assert first.logprobs is None and first.delta.role == "assistant"
        assert "".join(line.delta.content or "" for line in lines) == choice.message.content
        assert lines[-1].finish_reason == choice.finish_reason
        tokens = [token for line in lines for token in (line.logprobs.content if line.logprobs else [])]
        expected = choice.logprobs.content
        assert [(one.token, one.bytes) for one in tokens] == [(one.token, one.bytes) for one in expected]
        assert [one.logprob for one in tokens] == pytest.approx([one.logprob for one in expected], abs=1e-5)
        assert all(one.top_logprobs == [] for one in tokens) and len(expected) > 1


@pytest.mark.parametrize("settings", SETTINGS, ids=str)
def test_the_joined_lines_of_a_completion_are_the_whole_answer(client, settings):
    settings = {"max_tokens": 40, **settings, "prompt": ["hello", "what is this"], "logprobs": 1}
    whole, parts = client.completions.create(**settings), list(client.completions.create(**settings, stream=True))
    assert len(whole.choices) == 2 * settings.get("n", 1)
    for choice in whole.choices:
        lines, expected = lines_of(parts, choice.index), choice.logprobs
        assert "".join(line.text for line in lines) == choice.text
        found = [line.logprobs for line in lines if line.logprobs]
        for name in ("tokens", "text_offset"):
            assert [value for one in found for value in getattr(one, name)] == getattr(expected, name)
        values = [value for one in found for value in one.token_logprobs]
        assert values == pytest.approx(expected.token_logprobs, abs=1e-5)
        tops = [top for one in found for top in one.top_logprobs]
        assert tops == [{token: value} for token, value in zip(expected.tokens, values, strict=True)]


@pytest.mark.parametrize("model", ["random", "speaking"])
def test_a_line_has_the_tokens_of_its_text(client, model):
    """Their texts cover the stream's text at each line, up to a character whose last token is missing."""
    settings = {"model": model, "prompt": "hello", "temperature": 0, "max_tokens": 30, "logprobs": 1}
    lines = lines_of(client.completions.create(**settings, stream=True), 0)
    assert len(lines) > 5 and sum(bool(line.logprobs) for line in lines) > 4
    texts = accumulate(line.text for line in lines)
    covered = accumulate("".join(line.logprobs.tokens if line.logprobs else []) for line in lines)
    for text, tokens in zip(texts, covered, strict=True):
        assert len(tokens) >= len(text) and ("\ufffd" in tokens or tokens.startswith(text))


@pytest.mark.parametrize("logprobs", [False, None])
def test_lines_without_the_request_have_no_field(served, logprobs):
    body = {"model": "speaking", "messages": QUESTION, "temperature": 0, "stream": True, "logprobs": logprobs}
    text = served.post("/v1/chat/completions", **body).text
    assert "data: {" in text and "logprobs" not in text
