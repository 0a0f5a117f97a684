"""The thread that owns the models of `rlhf serve`: it alone uses their tokenizers, sessions and forward passes.

worker.call(work)         runs `work` between two steps; returns a future of what it returns
model.start(...)          submits a request to the model's session, which joins those that run (on this thread)
Piece, Ended, Failed      what the request's `deliver` is called with, on this thread
model.withdraw(request)   frees the request's slot (on this thread)
"""

import queue
import threading
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, field
from typing import TypeVar

import torch

from pipeline.errors import InputError, say
from pipeline.generation.rollouts import Prompt, RandomKey, Sampling
from pipeline.generation.session import Capacity, Finished, Reason, Request, Session
from pipeline.inference.answers import AnswerStreamer, ChatModel
from pipeline.out_of_memory import is_out_of_memory
from pipeline.tensor_ops import gather_log_probs

T = TypeVar("T")
# Tokens of a prompt that a completion's first token is decoded with. Chosen by hand.
CONTEXT_TOKENS = 8
PIECE = 256  # tokens of a prompt whose logits are in fp32 at a time. Chosen by hand.
NOT_FINITE = "the model's logits are not finite"


@dataclass(frozen=True, slots=True)
class Piece:
    """The next piece of an answer's text.

    text: the piece.
    tokens: (token, log-probability) since the last piece; the end of their text may wait for the next piece.
    """

    text: str
    tokens: Sequence[tuple[int, float]]


@dataclass(frozen=True, slots=True)
class Ended:
    """The end of an answer: why, its tokens, and their log-probabilities at the request's temperature."""

    reason: Reason
    ids: list[int]
    log_probs: list[float]


@dataclass(frozen=True, slots=True)
class Failed:
    """The end of an answer by an error."""

    message: str


Event = Piece | Ended | Failed
Deliver = Callable[[Event], None]


@dataclass(slots=True)
class StoppedText:
    """The text of an answer before the first of its stop texts; a piece that may begin one waits for the next."""

    stop: Sequence[str]
    waiting: str = ""
    has_stopped: bool = False

    def add(self, piece: str) -> str:
        """Return what is certain to come before a stop text."""
        text = "" if self.has_stopped else self.waiting + piece
        starts = [start for one in self.stop if (start := text.find(one)) >= 0]
        if starts:
            self.has_stopped, self.waiting = True, ""
            return text[: min(starts)]
        beginnings = (n for one in self.stop for n in range(1, len(one)) if text.endswith(one[:n]))
        length = len(text) - max(beginnings, default=0)
        self.waiting = text[length:]
        return text[:length]


@dataclass(slots=True)
class ServedAnswer:
    """An answer that is being sampled.

    deliver: called with each event.
    streamer: makes text of its tokens.
    has_log_probs: log-probabilities are read; else they are 0.
    tokens: (token, log-probability) since the last piece.
    """

    deliver: Deliver
    streamer: AnswerStreamer
    has_log_probs: bool
    tokens: list[tuple[int, float]] = field(default_factory=list)


@dataclass(slots=True, eq=False)
class ServedModel:
    """A language model with a session that stays open.

    name: its name in requests.
    chat_model: the model.
    capacity: limits of the session.
    num_tokens: tokens that were drawn.
    _answers: those that have not.
    _session: the session, once it is open.
    """

    name: str
    chat_model: ChatModel
    capacity: Capacity
    num_tokens: int = 0
    _answers: dict[Request, ServedAnswer] = field(default_factory=dict)
    _session: Session | None = None

    def session(self) -> Session:
        """Return the session of all requests; the first call opens it and allocates its memory. Raises InputError."""
        if self._session is None:
            self._session = self.chat_model.sessions().session(self.capacity)
        return self._session

    @property
    def is_idle(self) -> bool:
        """True if no request runs or waits."""
        return self._session is None or self._session.is_idle

    def start(
        self,
        prompt: Prompt,
        sampling: Sampling,
        key: RandomKey,
        sample: int,
        deliver: Deliver,
        *,
        continues: bool,
        has_log_probs: bool = False,
    ) -> Request:
        """Submit a request.

        continues: its text continues the prompt, so that white space at its start is kept.
        has_log_probs: pieces of its text have the log-probabilities of their tokens.
        """
        text = StoppedText(sampling.stop)
        has_begun = continues

        def show(certain: str) -> None:
            nonlocal has_begun
            if shown := certain if has_begun else certain.lstrip():
                has_begun = True
                deliver(Piece(shown, served.tokens))
                served.tokens = []

        def deliver_all(event: Event) -> None:
            if isinstance(event, Ended):
                show(text.waiting)
            deliver(event)

        streamer = AnswerStreamer(self.chat_model, lambda piece: show(text.add(piece)), prompt.ids[-CONTEXT_TOKENS:])
        request = self.session().submit(prompt, sampling, key, sample=sample, streams=True)
        served = self._answers[request] = ServedAnswer(deliver_all, streamer, has_log_probs)
        return request

    def withdraw(self, request: Request) -> None:
        """Forget a request; one that has ended is forgotten already."""
        if self._answers.pop(request, None) and self._session:
            self._session.withdraw(request)

    def advance(self) -> None:
        """Compute the next tokens of the running requests and deliver them. An error of the model ends them all."""
        try:
            events = self.session().advance()
        except BaseException as error:  # of Rust, a tokenizer's panic is no Exception
            lack = "the GPU's memory does not suffice; serve with a lower --max-requests or --max-length"
            message = lack if is_out_of_memory(error) else f"the model failed: {type(error).__name__}: {error}"
            say(f"error: {self.name}: {message}")
            for running in self._answers.values():
                running.deliver(Failed(message))
            self._answers.clear()
            self._session = None
            return
        for event in events:
            if (answer := self._answers.get(event.request)) is None:
                continue  # it was withdrawn
            try:
                if isinstance(event, Finished):
                    del self._answers[event.request]
                    self._end(answer, event)
                elif answer.has_log_probs and not event.log_probs.isfinite().all():  # no JSON has such a number
                    self.withdraw(event.request)
                    answer.deliver(Failed(NOT_FINITE))
                else:
                    self.num_tokens += len(event.ids)
                    log_probs = event.log_probs.tolist() if answer.has_log_probs else [0.0] * len(event.ids)
                    answer.tokens += zip(event.ids, log_probs, strict=True)
                    answer.streamer.take(event.ids)
            except BaseException as error:
                self.withdraw(event.request)
                answer.deliver(Failed(f"its tokens could not be decoded: {type(error).__name__}: {error}"))

    def _end(self, answer: ServedAnswer, event: Finished) -> None:
        ids, log_probs = event.ids.tolist(), event.log_probs.tolist()
        if not event.log_probs.isfinite().all():
            answer.deliver(Failed(NOT_FINITE))
            return
        answer.streamer.end()
        answer.deliver(Ended(event.reason, ids, log_probs))


@torch.inference_mode()
def prompt_log_probs(chat_model: ChatModel, ids: Sequence[int]) -> tuple[list[float], list[tuple[int, float]]]:
    """Return for each token but the first its log-probability, and the likeliest token there with its own."""
    device = chat_model.model.device
    tokens = torch.tensor([ids], device=device)
    logits = chat_model.model(tokens, use_cache=False).logits[0, :-1]
    log_probs, likeliest = list[float](), list[tuple[int, float]]()
    for rows, chosen in zip(logits.split(PIECE), tokens[0, 1:].split(PIECE), strict=True):
        rows = rows.float()
        if not rows.isfinite().all():
            raise InputError(NOT_FINITE)
        best = rows.argmax(-1)
        log_probs += gather_log_probs(rows, chosen).tolist()
        likeliest += zip(best.tolist(), gather_log_probs(rows, best).tolist(), strict=True)
    return log_probs, likeliest


class Worker(threading.Thread):
    """The thread of the models."""

    def __init__(self, models: Sequence[ServedModel]) -> None:
        super().__init__(name="models", daemon=True)
        self.models = models
        self._ends = False
        self._calls = queue.SimpleQueue[Callable[[], None]]()

    def call(self, work: Callable[[], T]) -> Future[T]:
        """Run `work` on the thread; the future has its result or error. A future that is cancelled is not run."""
        future = Future[T]()

        def run() -> None:
            if future.set_running_or_notify_cancel():
                try:
                    future.set_result(work())
                except BaseException as error:
                    future.set_exception(error)

        self._calls.put(run)
        return future

    def run(self) -> None:
        """Run calls as they come, and advance the sessions with requests."""
        while not self._ends:
            if all(model.is_idle for model in self.models):
                self._calls.get()()
            while not self._calls.empty():
                self._calls.get()()
            for model in self.models:
                if not model.is_idle:
                    model.advance()

    def end(self) -> None:
        """End the thread after its step: a process that exits in the middle of one may abort."""
        self._ends = True
        self.call(lambda: None)
        self.join()

    def open_sessions(self) -> None:
        """Start the thread and open all sessions, which allocates their memory. Raises InputError."""
        self.start()
        for model in self.models:
            self.call(model.session).result()
