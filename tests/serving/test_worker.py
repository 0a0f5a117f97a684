"""The thread of the models goes on after errors of a model, of its tokenizer, and of its memory."""

import math
import queue
from typing import Any

import pytest
import torch

from pipeline.data import templates
from pipeline.data.turns import Message
from pipeline.errors import InputError
from pipeline.generation.rollouts import Prompt, RandomKey, Sampling
from pipeline.generation.session import Capacity, Finished, Session, Tokens
from pipeline.inference.answers import AnswerStreamer, load_chat_model
from pipeline.inference.serving import worker as workers
from pipeline.inference.serving.worker import Ended, Failed, Piece, ServedModel, StoppedText, Worker

ROOM = Capacity(num_slots=2, max_new_tokens=20, max_length=64)


class Panic(BaseException):
    """An error like those of Rust, which are no Exception."""


@pytest.fixture
def model(models) -> ServedModel:
    return ServedModel("speaking", load_chat_model(str(models / "speaking"), dtype=torch.float32), ROOM)


@pytest.fixture
def worker(model) -> Worker:
    worker = Worker([model])
    worker.open_sessions()
    return worker


def answered(
    worker: Worker, model: ServedModel, *, has_log_probs: bool = False, stop: tuple[str, ...] = ()
) -> list[Any]:
    """The events of a request, to its end."""
    events: queue.Queue[Any] = queue.Queue()
    how = (Prompt.of([5, 6, 7]), Sampling(20, 0, stop=stop), RandomKey(1, "answer"), 0, events.put)
    worker.call(lambda: model.start(*how, continues=False, has_log_probs=has_log_probs)).result(10)
    found = [events.get(timeout=10)]
    while isinstance(found[-1], Piece):
        found.append(events.get(timeout=10))
    return found


@pytest.mark.parametrize("stop", [(), ("!",), ("x",)], ids=str)
def test_pieces_of_several_tokens_are_the_text_and_tokens_of_single_ones(worker, model, monkeypatch, stop):
    """As on a GPU, where a session reports the tokens of a few steps at once."""
    single = answered(worker, model, has_log_probs=True, stop=stop)
    advance = type(model.session()).advance

    def several(session: Session) -> list[Tokens | Finished]:
        events: list[Tokens | Finished] = []
        for event in (event for _ in range(4) if not session.is_idle for event in advance(session)):
            if isinstance(event, Tokens) and events and isinstance(last := events[-1], Tokens):
                events[-1] = Tokens(event.request, last.ids + event.ids, torch.cat([last.log_probs, event.log_probs]))
            else:
                events.append(event)
        return events

    monkeypatch.setattr(type(model.session()), "advance", several)
    found = answered(worker, model, has_log_probs=True, stop=stop)
    assert found[-1] == single[-1] and len(found) < len(single)
    texts, tokens = zip(*(("".join(one.text for one in each[:-1]), [token for one in each[:-1] for token in one.tokens])
                          for each in (found, single)), strict=True)  # fmt: skip
    assert texts[0] == texts[1] != ""
    ended = [*zip(single[-1].ids, single[-1].log_probs, strict=True)]
    assert [each == ended[: len(each)] and len(each) > 1 for each in tokens] == [True, True]


def test_an_error_of_the_model_ends_its_answers_and_the_next_request_is_served(worker, model, monkeypatch):
    """Also if the session cannot be opened again at once."""
    with monkeypatch.context() as broken:
        broken.setattr(type(model.session()), "advance", lambda *_: 1 / 0)
        (event,) = answered(worker, model)
        assert isinstance(event, Failed) and "ZeroDivisionError" in event.message
    assert isinstance(answered(worker, model)[-1], Ended)
    assert worker.is_alive()


@pytest.mark.parametrize("value", [float("nan"), float("inf")])
def test_logits_that_are_not_finite_end_an_answer_with_log_probs(worker, model, monkeypatch, value):
    """No piece has such a log-probability, and the request's slot is free again."""
    logits = model.chat_model.model.lm_head.forward
    with monkeypatch.context() as broken:
        broken.setattr(model.chat_model.model.lm_head, "forward", lambda *args: logits(*args) * value)
        *pieces, last = answered(worker, model, has_log_probs=True)
        assert last == Failed("the model's logits are not finite")
        assert all(math.isfinite(log_prob) for piece in pieces for _, log_prob in piece.tokens)
    assert isinstance(answered(worker, model, has_log_probs=True)[-1], Ended) and model.is_idle


@pytest.mark.parametrize("error", [ValueError, Panic])
@pytest.mark.parametrize("method", ["take", "end"])
def test_an_error_in_decoding_ends_one_answer(worker, model, monkeypatch, error, method):
    with monkeypatch.context() as broken:
        broken.setattr(AnswerStreamer, method, lambda *_: (_ for _ in ()).throw(error("bad")))
        event = answered(worker, model)[-1]
        assert isinstance(event, Failed) and "bad" in event.message
    assert isinstance(answered(worker, model)[-1], Ended)


def test_a_session_that_cannot_be_opened_ends_the_command(model, monkeypatch):
    def refuse(self: Any, capacity: Capacity) -> None:
        raise ValueError("no memory")

    monkeypatch.setattr(type(model.chat_model.sessions()), "session", refuse)
    with pytest.raises(ValueError, match="no memory"):
        Worker([model]).open_sessions()


def test_the_thread_ends_in_the_middle_of_an_answer(worker, model):
    how = (Prompt.of([5, 6, 7]), Sampling(20, 0), RandomKey(1, "answer"), 0, lambda event: None)
    worker.call(lambda: model.start(*how, continues=False)).result(10)
    worker.end()
    assert not worker.is_alive()


def test_calls_are_run_and_their_errors_returned(worker):
    assert worker.call(lambda: 3).result(10) == 3
    with pytest.raises(ZeroDivisionError):
        worker.call(lambda: 1 / 0).result(10)
    assert worker.call(lambda: 4).result(10) == 4


def test_a_template_that_loops_ends_in_time_and_the_next_request_is_served(worker, model, monkeypatch):
    """Its loop depends on the messages, so that no check at the start finds it."""
    tokenizer = model.chat_model.tokenizer
    nested = "".join(f"{{% for {name} in range(99999) %}}" for name in "abc") + "{% endfor %}" * 3
    loops = f"{{% if messages[0]['content'] == 'loop' %}}{nested}{{% endif %}}"
    monkeypatch.setattr(tokenizer, "chat_template", loops + tokenizer.chat_template)
    monkeypatch.setattr(templates, "MAX_RENDER_S", 0.3)
    for _ in range(2):
        encoding = worker.call(lambda: templates.encode_prompt(tokenizer, [Message("user", "loop")]))
        with pytest.raises(InputError, match="does not end within"):
            encoding.result(10)
        assert isinstance(answered(worker, model)[-1], Ended)


def test_log_probabilities_of_a_prompt_are_read_in_pieces(model, monkeypatch):
    rows, gather = list[int](), workers.gather_log_probs

    def gathered(logits: torch.Tensor, index: torch.Tensor) -> torch.Tensor:
        rows.append(len(logits))
        return gather(logits, index)

    ids = [*range(3, 23)]
    whole = workers.prompt_log_probs(model.chat_model, ids)
    monkeypatch.setattr(workers, "gather_log_probs", gathered)
    monkeypatch.setattr(workers, "PIECE", 8)
    assert workers.prompt_log_probs(model.chat_model, ids) == whole
    assert rows == [8, 8, 8, 8, 3, 3]
    assert workers.prompt_log_probs(model.chat_model, [5]) == ([], [])


@pytest.mark.parametrize(
    ("stop", "pieces", "expected"),
    [
        (["end"], ["a e", "n", "d b"], "a "),
        (["end"], ["a e", "n", "x"], "a enx"),
        (["bc", "abcd"], ["x", "ab", "cd"], "x"),
        (["aab"], ["a", "a", "a", "b"], "a"),
        ([], ["a", "b"], "ab"),
    ],
    ids=str,
)
def test_a_text_ends_before_its_first_stop_text(stop, pieces, expected):
    text = StoppedText(stop)
    assert "".join(text.add(piece) for piece in pieces) + text.waiting == expected
