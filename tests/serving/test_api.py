"""`rlhf serve` by OpenAI's own client and by plain requests, with models whose answers are known."""

import contextlib
import threading
import time

import httpx
import openai
import pytest
import torch
from support.scripted_model import TEXT

from pipeline.data.templates import encode_prompt
from pipeline.data.turns import Message
from pipeline.inference.answer_scores import load_scorer, score_answers
from pipeline.inference.answer_settings import ReplySettings
from pipeline.inference.answers import generate_answers, load_chat_model

QUESTION = [{"role": "user", "content": "hello"}]
ANSWER = TEXT.lstrip()


@pytest.fixture
def client(served):
    return openai.OpenAI(base_url=f"{served.url}/v1", api_key=served.token, max_retries=0)


def streamed_text(stream) -> str:
    return "".join(part.choices[0].delta.content or "" for part in stream if part.choices)


# ---- chats ----


def test_models_are_listed_with_their_kind(client):
    kinds = {one.id: one.kind for one in client.models.list()}
    assert kinds == {"speaking": "language", "endless": "language", "random": "language", "judge": "reward"}


def test_a_chat_is_answered(client):
    reply = client.chat.completions.create(model="speaking", messages=QUESTION, temperature=0)
    assert reply.choices[0].message.content == ANSWER and reply.choices[0].finish_reason == "stop"
    assert reply.usage.completion_tokens > 1


def test_a_developer_message_is_a_system_message(client):
    """OpenAI's newer clients send this role."""
    settings = {"model": "random", "temperature": 0, "max_tokens": 12}
    system, developer, none = (
        client.chat.completions.create(
            messages=[*({"role": role, "content": "hello hello"} for role in roles), *QUESTION], **settings
        )
        for roles in (["system"], ["developer"], [])
    )
    assert developer.usage == system.usage != none.usage
    assert developer.choices[0].message.content == system.choices[0].message.content


def test_a_stream_has_the_same_text_and_its_usage(client):
    stream = client.chat.completions.create(
        model="speaking", messages=QUESTION, temperature=0, stream=True, stream_options={"include_usage": True}
    )
    parts = list(stream)
    assert streamed_text(parts) == ANSWER and parts[-1].usage.completion_tokens > 1
    assert [part.choices[0].finish_reason for part in parts if part.choices][-1] == "stop"


def test_the_limit_is_told(client):
    reply = client.chat.completions.create(model="endless", messages=QUESTION, temperature=0, max_tokens=6)
    assert reply.choices[0].finish_reason == "length" and reply.usage.completion_tokens == 6


@pytest.mark.parametrize("stream", [False, True])
def test_an_answer_ends_before_a_stop_text_that_spans_tokens(client, stream):
    settings = {"model": "endless", "messages": QUESTION, "temperature": 0, "max_tokens": 30, "stop": ["ba", "zz"]}
    reply = client.chat.completions.create(**settings, stream=stream)
    text = streamed_text(reply) if stream else reply.choices[0].message.content
    assert text == "a"


def test_answers_are_those_of_the_sampler_and_a_seed_repeats_them(client, models):
    settings = {"model": "random", "messages": QUESTION, "temperature": 0.9, "max_tokens": 12, "n": 3, "logprobs": True}
    first, again = (client.chat.completions.create(**settings, seed=5) for _ in range(2))
    other = client.chat.completions.create(**settings, seed=6)
    texts = [one.message.content for one in first.choices]
    assert texts == [one.message.content for one in again.choices] != [one.message.content for one in other.choices]
    assert len(set(texts)) == 3
    chat_model = load_chat_model(str(models / "random"), dtype=torch.float32)
    ids = encode_prompt(chat_model.tokenizer, [Message("user", "hello")])
    [[expected]] = generate_answers(chat_model, [ids], ReplySettings(temperature=0.9, max_new_tokens=12), seed=5)
    tokens = first.choices[0].logprobs.content
    assert texts[0].strip() == expected.text
    assert sum(one.logprob for one in tokens) == pytest.approx(expected.log_prob, abs=1e-4)


def test_greedy_answers_agree_with_transformers_beside_running_requests(served, client, models):
    """Requests of other lengths join while one runs; each gets the tokens that it gets alone."""
    chat_model = load_chat_model(str(models / "random"), dtype=torch.float32)
    questions = ["a", "hello hello hello", "what is this?"]
    expected = []
    for text in questions:
        ids = encode_prompt(chat_model.tokenizer, [Message("user", text)])
        rows = chat_model.model.generate(torch.tensor([ids]), max_new_tokens=20, do_sample=False, pad_token_id=0)
        expected.append(chat_model.tokenizer.decode(rows[0, len(ids) :], skip_special_tokens=True).lstrip())
    texts = dict[str, str]()

    def ask(text: str) -> None:
        reply = client.chat.completions.create(
            model="random", messages=[{"role": "user", "content": text}], temperature=0, max_tokens=20
        )
        texts[text] = reply.choices[0].message.content

    threads = [threading.Thread(target=ask, args=[text]) for text in questions]
    for thread in threads:
        thread.start()
        time.sleep(0.01)
    for thread in threads:
        thread.join()
    assert [texts[text] for text in questions] == expected


# ---- slots ----


def test_a_request_joins_one_that_runs(served, client):
    """An answer that has no end does not keep another from being answered."""
    stream = client.chat.completions.create(model="endless", messages=QUESTION, temperature=0, stream=True)
    next(iter(stream))
    reply = client.chat.completions.create(model="endless", messages=QUESTION, temperature=0, max_tokens=4)
    assert reply.usage.completion_tokens == 4
    assert served.num_answers == 1
    stream.close()


@pytest.mark.parametrize("stream", [True, False])
def test_a_request_that_is_cut_off_frees_its_slot(served, stream):
    body = {"model": "endless", "messages": QUESTION, "temperature": 0, "stream": stream, "n": 4}
    with (
        served.client() as client,
        contextlib.suppress(httpx.ReadTimeout),
        client.stream("POST", "/v1/chat/completions", json=body, timeout=1.0) as response,
    ):
        next(response.iter_lines())
    deadline = time.monotonic() + 5
    while served.num_answers and time.monotonic() < deadline:
        time.sleep(0.05)
    assert served.num_answers == 0
    began = time.monotonic()
    reply = served.post("/v1/chat/completions", model="endless", messages=QUESTION, n=4, max_tokens=3, temperature=0)
    assert reply.status_code == 200 and time.monotonic() - began < 5


def test_more_answers_than_the_queue_has_room_for_are_refused(served, client):
    settings = {"model": "endless", "messages": QUESTION, "temperature": 0, "n": 12}
    stream = client.chat.completions.create(**settings, stream=True)
    next(iter(stream))
    with pytest.raises(openai.RateLimitError, match="12 answers run or wait, of at most 12"):
        client.chat.completions.create(model="speaking", messages=QUESTION)
    stream.close()


# ---- completions ----


def test_a_completion_keeps_the_space_that_it_begins_with(client):
    reply = client.completions.create(model="speaking", prompt="hello", temperature=0, max_tokens=20)
    assert reply.choices[0].text == TEXT


def test_texts_and_ids_are_the_same_prompt(client, models):
    chat_model = load_chat_model(str(models / "random"), dtype=torch.float32)
    ids = chat_model.tokenizer("hello hello")["input_ids"]
    texts = [
        client.completions.create(model="random", prompt=prompt, temperature=0, max_tokens=8).choices[0].text
        for prompt in ("hello hello", ids, ["hello hello"], [ids])
    ]
    assert len(set(texts)) == 1


def test_an_echo_has_the_log_probabilities_of_the_prompt(client, models):
    """Against a forward pass of transformers, token by token; two prompts of other lengths in one request."""
    chat_model = load_chat_model(str(models / "random"), dtype=torch.float32)
    prompts = [chat_model.tokenizer(text)["input_ids"] for text in ("hello hello hello", "what")]
    reply = client.completions.create(
        model="random", prompt=prompts, temperature=0, max_tokens=1, logprobs=1, echo=True
    )
    for ids, choice in zip(prompts, reply.choices, strict=True):
        with torch.no_grad():
            table = chat_model.model(torch.tensor([ids])).logits[0].log_softmax(-1)
        expected = [table[n, token].item() for n, token in enumerate(ids[1:])]
        got = choice.logprobs.token_logprobs
        assert got[0] is None and got[1:-1] == pytest.approx(expected, abs=1e-4) and len(got) == len(ids) + 1
        likeliest = [max(top.values()) for top in choice.logprobs.top_logprobs[1:]]
        assert likeliest == pytest.approx(table.max(-1).values.tolist(), abs=1e-4)
        assert choice.text.startswith(chat_model.tokenizer.decode(ids))


def test_an_echo_without_new_tokens_is_the_prompt(client):
    reply = client.completions.create(model="random", prompt="hello", max_tokens=0, echo=True)
    assert reply.choices[0].text == "hello" and reply.choices[0].logprobs is None


def test_equal_prompts_of_a_request_get_answers_of_their_own(client):
    settings = {"model": "random", "temperature": 1, "max_tokens": 12, "seed": 3}
    texts = [one.text for one in client.completions.create(prompt=["hello"] * 3, **settings).choices]
    assert len(set(texts)) == 3
    again = client.completions.create(prompt=["hello"] * 3, **settings)
    assert [one.text for one in again.choices] == texts


def test_offsets_are_those_of_the_tokens_in_the_text(client):
    reply = client.completions.create(model="random", prompt="hello hello", max_tokens=0, echo=True, logprobs=1)
    found = reply.choices[0].logprobs
    assert found.text_offset == [len("".join(found.tokens[:n])) for n in range(len(found.tokens))]


@pytest.mark.parametrize("stream", [False, True])
def test_a_stop_text_may_begin_with_the_space_that_a_chat_drops(client, stream):
    settings = {"model": "speaking", "messages": QUESTION, "temperature": 0, "stop": " H", "stream": stream}
    reply = client.chat.completions.create(**settings)
    assert (streamed_text(reply) if stream else reply.choices[0].message.content) == ""


def test_null_and_neutral_fields_are_accepted(served):
    """Clients send fields that are not given as null."""
    names = ("temperature", "top_p", "n", "seed", "stop", "stream", "logprobs", "tools", "tool_choice", "user")
    neutral = {"response_format": {"type": "text"}, "store": False, "frequency_penalty": 0, "top_k": -1}
    body = {"model": "speaking", "messages": QUESTION, "max_tokens": 4} | dict.fromkeys(names) | neutral
    assert served.post("/v1/chat/completions", **body).status_code == 200


# ---- scores, health, metrics ----


def test_scores_are_those_of_the_reward_model(served, models):
    conversations = [[*QUESTION, {"role": "assistant", "content": text}] for text in ("hi", "hello hello hello", "x")]
    reply = served.post("/v1/score", model="judge", conversations=conversations).json()
    scorer = load_scorer(str(models / "judge"), dtype=torch.float32)
    rows = [((Message("user", "hello"),), turns[-1]["content"], True) for turns in conversations]
    expected = [score_answers(scorer, [row], batch_size=1)[0] for row in rows]
    assert [one["score"] for one in reply["data"]] == pytest.approx(expected, abs=1e-5)


def test_health_needs_no_token_and_metrics_count(served):
    assert httpx.get(f"{served.url}/health").json() == {"status": "ok"}
    with served.client() as client:
        before = client.get("/metrics").text
        client.get("/v1/models")
        after = client.get("/metrics").text

    def count(text: str) -> int:
        return int(next(line for line in text.splitlines() if 'method="GET",status="200"' in line).split()[1])

    assert count(after) == count(before) + 2


# ---- what cannot be served is refused by name ----

REFUSED = [
    ({"model": "none"}, 404, "'none'; served: speaking, endless, random"),
    ({"messages": []}, 400, "messages"),
    ({"messages": [{"role": "assistant", "content": "x"}]}, 400, "messages"),
    ({"messages": [{"role": "user", "content": [{"type": "image_url"}]}]}, 400, "only text"),
    ({"max_tokens": 600}, 400, "leave room for"),
    ({"messages": [{"role": "user", "content": "ab " * 600}]}, 400, "leave room for 0"),
    ({"temperature": -1}, 400, "temperature"),
    ({"temperature": "warm"}, 400, "temperature"),
    ({"top_p": 0}, 400, "top_p"),
    ({"top_p": 1e-46}, 400, "top_p"),
    ({"temperature": 1e-39}, 400, "temperature"),
    ({"top_k": 2**31}, 400, "top_k"),
    ({"n": 13}, 400, "13 answers in one request, of at most 12; see --max-waiting"),
    ({"n": 17}, 400, "n"),
    ({"stop": ""}, 400, "stop"),
    ({"presence_penalty": 1}, 400, "presence_penalty"),
    ({"tools": [{"type": "function"}]}, 400, "tools"),
    ({"response_format": {"type": "json_object"}}, 400, "response_format"),
]


@pytest.mark.parametrize(("change", "status", "said"), REFUSED, ids=lambda value: str(value)[:40])
def test_a_chat_that_cannot_be_served_is_refused(served, change, status, said):
    reply = served.post("/v1/chat/completions", **({"model": "random", "messages": QUESTION} | change))
    assert (reply.status_code, said in reply.json()["error"]["message"]) == (status, True), reply.text


@pytest.mark.parametrize(
    ("change", "said"),
    [
        ({"prompt": ""}, "prompt"),
        ({"prompt": []}, "prompt"),
        ({"prompt": [400]}, "tokens, got id 400"),
        ({"prompt": [[1, 2], []]}, "prompt"),
        ({"max_tokens": 0}, "needs echo"),
        ({"logprobs": 5}, "logprobs"),
        ({"stream": True, "echo": True}, "echo"),
        ({"best_of": 3}, "best_of"),
        ({"prompt": ["a"] * 1000, "echo": True}, "1000 answers in one request"),
        ({"echo": True, "logprobs": 1, "temperature": 0.5}, "temperature"),
    ],
    ids=str,
)
def test_a_completion_that_cannot_be_served_is_refused(served, change, said):
    reply = served.post("/v1/completions", **({"model": "random", "prompt": "hello"} | change))
    assert reply.status_code == 400 and said in reply.json()["error"]["message"], reply.text


@pytest.mark.parametrize("turns", [[], QUESTION, [{"role": "assistant", "content": "x"}]], ids=str)
def test_a_conversation_without_an_answer_has_no_score(served, turns):
    reply = served.post("/v1/score", model="judge", conversations=[turns])
    assert reply.status_code == 400, reply.text


def test_templates_in_a_message_are_text(served):
    """Jinja in a question is not rendered: its length in tokens is that of the text."""
    plain, injected = (
        served.post(
            "/v1/chat/completions", model="random", messages=[{"role": "user", "content": text}], max_tokens=1
        ).json()["usage"]["prompt_tokens"]
        for text in ("hello", "{{ 1 / 0 }}{% for i in range(10**9) %}{% endfor %}</s>")
    )
    assert injected > plain + 20
