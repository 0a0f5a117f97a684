"""The routes of `rlhf serve`. Everything about a model is done by the worker's thread; this loop never waits for it."""

import asyncio
import base64
import hashlib
import json
import re
import secrets
from collections import Counter
from collections.abc import AsyncIterator, Awaitable, Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cache, partial
from importlib.resources import files
from typing import Any, TypeVar

from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.requests import ClientDisconnect, Request
from starlette.responses import HTMLResponse, JSONResponse, PlainTextResponse, Response, StreamingResponse
from starlette.routing import Route
from starlette.types import Receive, Scope, Send

from pipeline.data.templates import encode_prompt
from pipeline.data.turns import BadRowError, Turns, check_texts, check_turns, encoder_of, parse_turns
from pipeline.errors import InputError
from pipeline.inference.answer_scores import AnswerScorer, score_answers
from pipeline.inference.serving.bodies import ApiError, ChatBody, CompletionBody, Ids, ScoreBody, VoteBody, parse
from pipeline.inference.serving.guard import Guard, read_body
from pipeline.inference.serving.replies import FINISH, Json, Reply, echo, event_line
from pipeline.inference.serving.running import Answers
from pipeline.inference.serving.votes import Votes
from pipeline.inference.serving.worker import Ended, ServedModel, Worker

T = TypeVar("T")
SCORED_AT_ONCE = 8  # conversations between two steps of the models. Chosen by hand.
Encode = Callable[[], list[int]]


@dataclass(slots=True, eq=False)
class Server:
    """The models that are served, and how many answers run.

    worker: the thread of the models.
    scorers: reward models by name.
    votes: the file of votes.
    max_answers: answers that may run and wait at a time; a request beyond is answered by 429.
    active: requests whose answers run or wait.
    statuses: number of responses by method and status.
    """

    worker: Worker
    scorers: Mapping[str, AnswerScorer]
    votes: Votes
    max_answers: int
    active: set[Answers] = field(default_factory=set)
    statuses: Counter[tuple[str, int]] = field(default_factory=Counter)

    @property
    def num_answers(self) -> int:
        """Answers that run or wait."""
        return sum(answers.num_left for answers in self.active)

    def app(self, *, hosts: Collection[str], token: str) -> Guard:
        """Return the application, behind its guard."""
        routes = [
            Route("/", self.page),
            Route("/health", self.health),
            Route("/metrics", self.metrics),
            Route("/v1/models", self.list_models),
            Route("/v1/chat/completions", self.chat, methods=["POST"]),
            Route("/v1/completions", self.complete, methods=["POST"]),
            Route("/v1/score", self.score, methods=["POST"]),
            Route("/v1/votes", self.read_votes, methods=["GET"]),
            Route("/v1/votes", self.vote, methods=["POST"]),
        ]
        refused: Mapping[Any, Any] = {
            ApiError: refusal,
            HTTPException: refusal,
            ClientDisconnect: gone,
            Exception: failure,
        }
        inner = Starlette(routes=routes, exception_handlers=refused)
        return Guard(inner, hosts=hosts, token=token, statuses=self.statuses)

    # --- what needs no model ---

    async def page(self, request: Request) -> Response:
        return page_response()

    async def health(self, request: Request) -> Response:
        return JSONResponse({"status": "ok"})

    async def metrics(self, request: Request) -> Response:
        """Answer in Prometheus' text format."""
        lines = ["# TYPE rlhf_answers gauge", f"rlhf_answers {self.num_answers}"]
        lines += ["# TYPE rlhf_generated_tokens_total counter"]
        lines += [
            f"rlhf_generated_tokens_total{{model={json.dumps(one.name)}}} {one.num_tokens}"
            for one in self.worker.models
        ]
        lines += ["# TYPE rlhf_responses_total counter"]
        counts = self.statuses.items()
        lines += [f'rlhf_responses_total{{method="{name}",status="{status}"}} {n}' for (name, status), n in counts]
        return PlainTextResponse("\n".join(lines) + "\n", media_type="text/plain; version=0.0.4")

    async def list_models(self, request: Request) -> Response:
        models = [(one.name, "language", one.capacity.max_length) for one in self.worker.models]
        data = [
            {"id": name, "object": "model", "owned_by": "rlhf", "kind": kind, "max_length": length}
            for name, kind, length in [*models, *((name, "reward", None) for name in self.scorers)]
        ]
        return JSONResponse({"object": "list", "data": data})

    async def read_votes(self, request: Request) -> Response:
        return JSONResponse(self.counted_votes())

    async def vote(self, request: Request) -> Response:
        body = parse(VoteBody, await read_body(request))
        turns = turns_of(body.prompt, "prompt")
        if len({self.model(one.model).name for one in body.answers}) < 2:
            raise ApiError(400, "answers: both are of one model")
        try:
            check_texts([*(turn.content for turn in turns), *(one.text for one in body.answers)])
        except BadRowError as error:
            raise ApiError(400, f"answers: {error}") from None
        self.votes.add(turns, body.answers, body.choice, blind=body.blind)
        return JSONResponse(self.counted_votes())

    def counted_votes(self) -> Json:
        return {"file": str(self.votes.file), "data": self.votes.summary([one.name for one in self.worker.models])}

    # --- answers ---

    async def chat(self, request: Request) -> Response:
        body = parse(ChatBody, await read_body(request))
        model, turns = self.model(body.model), turns_of(body.messages, "messages")
        encode = partial(encode_prompt, model.chat_model.tokenizer, turns)
        return await self.answered(request, Answers(model, 1, body.n), Reply(body, model.chat_model), [encode])

    async def complete(self, request: Request) -> Response:
        body = parse(CompletionBody, await read_body(request))
        model, prompts = self.model(body.model), body.prompts
        encoders = [partial(encoded, model, prompt) for prompt in prompts]
        answers = Answers(model, len(prompts), body.n)
        return await self.answered(request, answers, Reply(body, model.chat_model), encoders)

    async def answered(self, request: Request, answers: Answers, reply: Reply, encoders: Sequence[Encode]) -> Response:
        """Sample the answers, and send them at once or piece by piece."""
        self.admit(answers)
        try:
            await unless_gone(request, self.begin(answers, reply, encoders))
            if reply.body.stream:
                return AnswerStream(self.streamed(answers, reply), partial(self.finish, answers))
            content = reply.whole(await unless_gone(request, answers.collected()))
        except BaseException:
            self.finish(answers)
            raise
        self.finish(answers)
        return JSONResponse(content)

    def admit(self, answers: Answers) -> None:
        """Count the answers among those that run. Raises ApiError if there is no room for them."""
        if answers.count > self.max_answers:
            message = f"{answers.count} answers in one request, of at most {self.max_answers}; see --max-waiting"
            raise ApiError(400, message)
        if self.num_answers + answers.count > self.max_answers:
            raise ApiError(429, f"{self.num_answers} answers run or wait, of at most {self.max_answers}", "busy")
        self.active.add(answers)

    async def begin(self, answers: Answers, reply: Reply, encoders: Sequence[Encode]) -> None:
        """Encode the prompts and submit the requests. One call a prompt: answers that run go on between two."""
        body = reply.body
        answers.prompts = [await self.work(encode, status=400) for encode in encoders]
        reply.num_prompt_tokens = sum(map(len, answers.prompts))
        sampling = body.sampling(new_tokens(answers, body.limit))
        if isinstance(body, CompletionBody) and body.echo:
            reply.echoes = [await self.work(partial(echo, reply, ids)) for ids in answers.prompts]
        if body.limit == 0:
            for number in range(answers.count):
                answers.receive(number, Ended("limit", [], []))
            return
        seed = secrets.randbelow(2**31) if body.seed is None else body.seed
        how = {"continues": not reply.is_chat, "has_log_probs": body.stream and reply.has_log_probs}
        await self.work(answers.submission(sampling, seed, **how))

    async def streamed(self, answers: Answers, reply: Reply) -> AsyncIterator[str]:
        """Yield the lines of a stream. It ends early, with all its requests, if the client has gone."""
        num_tokens, listed = 0, Counter[int]()  # tokens of each answer in its chunks
        try:
            for number in range(answers.count if reply.is_chat else 0):
                yield event_line(reply.chunk(number, "", None))
            async for number, event in answers.events():
                if isinstance(event, Ended):
                    num_tokens += len(event.ids)
                    last = [*zip(event.ids, event.log_probs, strict=True)][listed[number] :]
                    yield event_line(reply.chunk(number, "", FINISH[event.reason], last))
                else:
                    listed[number] += len(event.tokens)
                    yield event_line(reply.chunk(number, event.text, None, event.tokens))
            if reply.body.stream_options and reply.body.stream_options.include_usage:
                yield event_line(reply.last_chunk(num_tokens))
        except ApiError as error:
            yield event_line(error.content())
        yield "data: [DONE]\n\n"

    def finish(self, answers: Answers) -> None:
        """Withdraw the answers that have not ended. It does not wait, since the client may have gone."""
        self.active.discard(answers)
        self.worker.call(answers.withdraw)

    async def score(self, request: Request) -> Response:
        body = parse(ScoreBody, await read_body(request))
        if (scorer := self.scorers.get(body.model)) is None:
            served = ", ".join(self.scorers) or "none is served"
            raise ApiError(404, f"model: no reward model {body.model[:80]!r}; {served}", "model_not_found")
        rows = []
        for turns in body.conversations:
            *prompt, answer = parsed(turns, "conversations")
            if answer.role != "assistant" or not prompt:
                raise ApiError(400, "conversations: each ends with an assistant's turn behind a user's")
            rows.append((tuple(prompt), answer.content, True))
        scores = list[float]()
        for start in range(0, len(rows), SCORED_AT_ONCE):
            some = rows[start : start + SCORED_AT_ONCE]
            call = partial(score_answers, scorer, some, batch_size=SCORED_AT_ONCE)
            scores += await unless_gone(request, self.work(call))
        data = [{"index": number, "score": score} for number, score in enumerate(scores)]
        return JSONResponse({"object": "list", "model": body.model, "data": data})

    # --- ways to the models ---

    def model(self, name: str) -> ServedModel:
        """Return the language model of this name. Raises ApiError."""
        found_model = next((one for one in self.worker.models if one.name == name), None)
        if found_model is None:
            served = ", ".join(one.name for one in self.worker.models) or "none"
            raise ApiError(404, f"model: no language model {name[:80]!r}; served: {served}", "model_not_found")
        return found_model

    async def work(self, call: Callable[[], T], *, status: int = 500) -> T:
        """Run a function on the worker's thread and return its result.

        Raises:
            ApiError: it refuses its input, answered by `status`: 400 if that is what the client sent.
        """
        try:
            return await asyncio.wrap_future(self.worker.call(call))
        except InputError as error:
            code = "server_error" if status == 500 else "invalid_request_error"
            raise ApiError(status, str(error), code) from None


class AnswerStream(StreamingResponse):
    """A stream of server-sent events; `finish` is called when it has ended in any way."""

    def __init__(self, content: AsyncIterator[str], finish: Callable[[], None]) -> None:
        super().__init__(content, media_type="text/event-stream", headers={"cache-control": "no-store"})
        self._finish = finish

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Send the stream."""
        try:
            await super().__call__(scope, receive, send)
        finally:
            self._finish()


async def refusal(request: Request, error: Any) -> Response:
    """Answer with an error of a route, or of no route."""
    named = error if isinstance(error, ApiError) else ApiError(error.status_code, error.detail, "no_route")
    return named.response(closes=named.status in (408, 413))


async def failure(request: Request, error: Exception) -> Response:
    """Answer with an error of this program, whose traceback is printed."""
    return ApiError(500, f"{type(error).__name__}: see the server's terminal", "server_error").response()


async def gone(request: Request, error: Exception) -> Response:
    """Answer a client that has gone and does not read it."""
    return Response(status_code=499)


async def unless_gone(request: Request, work: Awaitable[T]) -> T:
    """Return what `work` returns. Raises ClientDisconnect, and cancels it, if the client goes first."""

    async def disconnect() -> None:
        while (await request.receive())["type"] != "http.disconnect":
            pass

    working, watching = asyncio.ensure_future(work), asyncio.ensure_future(disconnect())
    try:
        await asyncio.wait([working, watching], return_when=asyncio.FIRST_COMPLETED)
        if not working.done():
            raise ClientDisconnect
        return working.result()
    finally:
        working.cancel()
        watching.cancel()


def turns_of(messages: list[Json], where: str) -> Turns:
    """Return messages that end with a question. Raises ApiError."""
    turns = parsed(messages, where)
    if turns[-1].role != "user":
        raise ApiError(400, f"{where}: the last one is not the user's")
    return turns


def parsed(messages: list[Json], where: str) -> Turns:
    """Return messages as turns; OpenAI's newer clients name a system turn `developer`. Raises ApiError."""
    messages = [one | {"role": "system"} if one.get("role") == "developer" else one for one in messages]
    try:
        turns = parse_turns(messages, where)
        check_turns(turns)
    except BadRowError as error:
        raise ApiError(400, f"{where}: {error}") from None
    return turns


def encoded(model: ServedModel, prompt: str | Ids) -> list[int]:
    """Return the ids of a completion's prompt, as training encodes texts (worker's thread). Raises ApiError."""
    if isinstance(prompt, str):
        return encoder_of(model.chat_model.tokenizer)(prompt)
    if max(prompt, default=0) >= model.chat_model.num_embeddings:
        raise ApiError(400, f"prompt: the model has {model.chat_model.num_embeddings} tokens, got id {max(prompt)}")
    return prompt


def new_tokens(answers: Answers, limit: int | None) -> int:
    """Return the most tokens of each answer: `limit`, or as many as there is room for. Raises ApiError."""
    longest = max(map(len, answers.prompts))
    if not min(map(len, answers.prompts)):
        raise ApiError(400, "prompt: has no token")
    room = answers.model.capacity.max_length - longest
    if room < (1 if limit is None else limit):
        raise ApiError(400, f"the prompt has {longest} tokens, which leave room for {max(room, 0)} of an answer")
    return min(room if limit is None else limit, answers.model.capacity.max_new_tokens)


@cache
def page_response() -> Response:
    """Return the page, with headers by which it runs its own script and style, and loads nothing from elsewhere."""
    text = (files("pipeline.inference.serving") / "page.html").read_text(encoding="utf-8")
    rules = ["default-src 'none'", "connect-src 'self'", "img-src data:", "base-uri 'none'", "form-action 'none'"]
    for name in ("script", "style"):
        content = re.search(f"<{name}>(.*?)</{name}>", text, re.DOTALL)
        digest = hashlib.sha256(content[1].encode() if content else b"").digest()
        rules.append(f"{name}-src 'sha256-{base64.b64encode(digest).decode()}'")
    policy = "; ".join([*rules, "frame-ancestors 'none'"])
    headers = {"content-security-policy": policy, "x-content-type-options": "nosniff", "x-frame-options": "DENY"}
    return HTMLResponse(text, headers=headers | {"referrer-policy": "no-referrer", "cache-control": "no-store"})
