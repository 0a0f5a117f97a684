"""The routes of `rlhf serve`. Everything about a model is done by the worker's thread; this loop never waits for it."""

import asyncio
import base64
import hashlib
import re
import secrets
from collections import Counter
from collections.abc import AsyncIterator, Awaitable, Callable, Collection, Mapping
from dataclasses import dataclass, field
from functools import partial
from importlib.resources import files
from typing import Any, TypeVar

from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.requests import ClientDisconnect, Request
from starlette.responses import HTMLResponse, JSONResponse, PlainTextResponse, Response, StreamingResponse
from starlette.routing import Route

from pipeline.data.templates import encode_prompt
from pipeline.data.turns import BadRowError, Turns, check_turns, encoder_of, parse_turns
from pipeline.errors import InputError
from pipeline.generation.rollouts import Prompt, RandomKey, Sampling
from pipeline.generation.session import Request as Submitted
from pipeline.inference.answer_scores import AnswerScorer, score_answers
from pipeline.inference.serving.bodies import ApiError, ChatBody, CompletionBody, Ids, ScoreBody, VoteBody, parse
from pipeline.inference.serving.guard import Guard, read_body
from pipeline.inference.serving.replies import FINISH, Json, Reply, ServedText, echo, event_line
from pipeline.inference.serving.votes import Votes
from pipeline.inference.serving.worker import Ended, Failed, Piece, ServedModel, Worker

T = TypeVar("T")
SCORED_AT_ONCE = 8
NOT_STORED = {"cache-control": "no-store"}


@dataclass(slots=True, eq=False)
class Answers:
    """The answers to one request, with the events of all of them in one queue.

    model: the model that gives them.
    prompts: tokens of each prompt.
    num_each: answers to each prompt.
    queued: (number of the answer, event), in the order in which they came.
    submitted: the requests in the model's session.
    """

    model: ServedModel
    prompts: list[list[int]]
    num_each: int
    queued: "asyncio.Queue[tuple[int, Piece | Ended | Failed]]" = field(default_factory=asyncio.Queue)
    submitted: list[Submitted] = field(default_factory=list)

    @property
    def count(self) -> int:
        return len(self.prompts) * self.num_each

    def start(self, sampling: Sampling, seed: int, *, continues: bool) -> Callable[[], None]:
        """Return what submits the requests, on the worker's thread."""
        loop = asyncio.get_running_loop()

        def submit() -> None:
            for number in range(self.count):
                prompt, sample = Prompt.of(self.prompts[number // self.num_each]), number % self.num_each

                def deliver(event: Piece | Ended | Failed, number: int = number) -> None:
                    loop.call_soon_threadsafe(self.queued.put_nowait, (number, event))

                key = RandomKey(seed, "answer")
                self.submitted.append(self.model.start(prompt, sampling, key, sample, deliver, continues=continues))

        return submit

    async def events(self) -> AsyncIterator[tuple[int, Piece | Ended]]:
        """Yield the events until the last answer has ended. Raises ApiError."""
        num_left = self.count
        while num_left:
            number, event = await self.queued.get()
            if isinstance(event, Failed):
                raise ApiError(500, event.message, "server_error")
            num_left -= isinstance(event, Ended)
            yield number, event

    async def collected(self) -> list[ServedText]:
        """Return all answers when the last one has ended. Raises ApiError."""
        texts = [ServedText() for _ in range(self.count)]
        async for number, event in self.events():
            if isinstance(event, Ended):
                texts[number].ended = event
            else:
                texts[number].text += event.text
        return texts

    def withdraw(self) -> None:
        """Forget all requests, on the worker's thread."""
        for request in self.submitted:
            self.model.withdraw(request)


@dataclass(slots=True, eq=False)
class Server:
    """The models that are served, and how many answers run.

    worker: the thread of the models.
    scorers: reward models by name.
    votes: the file of votes.
    max_answers: answers that may run and wait at a time; a request beyond is answered by 429.
    num_answers: those that run or wait.
    statuses: number of responses by method and status.
    """

    worker: Worker
    scorers: Mapping[str, AnswerScorer]
    votes: Votes
    max_answers: int
    num_answers: int = 0
    statuses: Counter[tuple[str, int]] = field(default_factory=Counter)

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
        text = (files("pipeline.inference.serving") / "page.html").read_text(encoding="utf-8")
        return HTMLResponse(text, headers=page_headers(text))

    async def health(self, request: Request) -> Response:
        return JSONResponse({"status": "ok"})

    async def metrics(self, request: Request) -> Response:
        """Answer in Prometheus' text format."""
        lines = ["# TYPE rlhf_answers gauge", f"rlhf_answers {self.num_answers}"]
        lines += ["# TYPE rlhf_generated_tokens_total counter"]
        lines += [f'rlhf_generated_tokens_total{{model="{one.name}"}} {one.num_tokens}' for one in self.worker.models]
        lines += ["# TYPE rlhf_responses_total counter"]
        counts = self.statuses.items()
        lines += [f'rlhf_responses_total{{method="{name}",status="{status}"}} {n}' for (name, status), n in counts]
        return PlainTextResponse("\n".join(lines) + "\n", media_type="text/plain; version=0.0.4")

    async def list_models(self, request: Request) -> Response:
        kinds = {one.name: "language" for one in self.worker.models} | dict.fromkeys(self.scorers, "reward")
        lengths = {one.name: one.capacity.max_length for one in self.worker.models}
        data = [
            {"id": name, "object": "model", "owned_by": "rlhf", "kind": kind, "max_length": lengths.get(name)}
            for name, kind in kinds.items()
        ]
        return JSONResponse({"object": "list", "data": data})

    async def read_votes(self, request: Request) -> Response:
        return JSONResponse(self.counted_votes())

    async def vote(self, request: Request) -> Response:
        body = parse(VoteBody, await read_body(request))
        self.votes.add(turns_of(body.prompt, "prompt"), body.answers, body.choice, blind=body.blind)
        return JSONResponse(self.counted_votes())

    def counted_votes(self) -> Json:
        return {"file": str(self.votes.file), "data": self.votes.summary([one.name for one in self.worker.models])}

    # --- answers ---

    async def chat(self, request: Request) -> Response:
        body = parse(ChatBody, await read_body(request))
        model, turns = self.model(body.model), turns_of(body.messages, "messages")
        ids = await self.work(lambda: encode_prompt(model.chat_model.tokenizer, turns))
        answers = Answers(model, [ids], body.n)
        sampling = body.sampling(new_tokens(answers, body.limit))
        return await self.answered(request, answers, sampling, Reply(body, model.chat_model, len(ids)))

    async def complete(self, request: Request) -> Response:
        body = parse(CompletionBody, await read_body(request))
        model = self.model(body.model)
        prompts = await self.work(lambda: [encoded(model, prompt) for prompt in body.prompts])
        answers = Answers(model, prompts, body.n)
        sampling = body.sampling(new_tokens(answers, body.max_tokens))
        reply = Reply(body, model.chat_model, sum(map(len, prompts)))
        if body.echo:  # one prompt at a time: answers that run go on between two
            reply.echoes = [await self.work(partial(echo, reply, ids)) for ids in prompts]
        if not body.max_tokens:
            nothing = ServedText(ended=Ended("limit", [], []))
            return JSONResponse(reply.whole([nothing] * answers.count))
        return await self.answered(request, answers, sampling, reply)

    async def answered(self, request: Request, answers: "Answers", sampling: Sampling, reply: Reply) -> Response:
        """Sample the answers, and send them at once or piece by piece."""
        body = reply.body
        if body.stream and reply.has_log_probs:
            raise ApiError(400, "logprobs: are not streamed")
        if self.num_answers + answers.count > self.max_answers:
            raise ApiError(429, f"{self.num_answers} answers run or wait, of at most {self.max_answers}", "busy")
        seed = secrets.randbelow(2**31) if body.seed is None else body.seed
        self.num_answers += answers.count
        try:
            await self.work(answers.start(sampling, seed, continues=not reply.is_chat))
        except BaseException:
            self.finish(answers)
            raise
        if body.stream:
            return StreamingResponse(self.streamed(answers, reply), media_type="text/event-stream", headers=NOT_STORED)
        try:
            return JSONResponse(reply.whole(await unless_gone(request, answers.collected())))
        finally:
            self.finish(answers)

    async def streamed(self, answers: "Answers", reply: Reply) -> AsyncIterator[str]:
        """Yield the lines of a stream. It ends early, with all its requests, if the client has gone."""
        num_tokens = 0
        try:
            for number in range(answers.count if reply.is_chat else 0):
                yield event_line(reply.chunk(number, "", None, is_first=True))
            async for number, event in answers.events():
                if isinstance(event, Ended):
                    num_tokens += len(event.ids)
                    yield event_line(reply.chunk(number, "", FINISH[event.reason]))
                else:
                    yield event_line(reply.chunk(number, event.text, None))
            if reply.body.stream_options and reply.body.stream_options.include_usage:
                yield event_line(reply.last_chunk(num_tokens))
        except ApiError as error:
            yield event_line(error.content())
        finally:
            self.finish(answers)
        yield "data: [DONE]\n\n"

    def finish(self, answers: "Answers") -> None:
        """Withdraw what has not ended. It does not wait, since the client may have gone."""
        self.num_answers -= answers.count
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
            scores += await self.work(partial(score_answers, scorer, some, batch_size=SCORED_AT_ONCE))
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

    async def work(self, work: Callable[[], Any]) -> Any:
        """Run `work` on the worker's thread and return its result. Raises ApiError for what it refuses."""
        try:
            return await asyncio.wrap_future(self.worker.call(work))
        except InputError as error:
            raise ApiError(400, str(error)) from None


async def refusal(request: Request, error: Any) -> Response:
    """Answer with an error of a route, or of no route."""
    named = error if isinstance(error, ApiError) else ApiError(error.status_code, error.detail, "no_route")
    headers = {"connection": "close"} if named.status in (408, 413) else None
    return JSONResponse(named.content(), named.status, headers=headers)


async def failure(request: Request, error: Exception) -> Response:
    """Answer with an error of this program, whose traceback is printed."""
    return JSONResponse(
        ApiError(500, f"{type(error).__name__}: see the server's terminal", "server_error").content(), 500
    )


async def gone(request: Request, error: Exception) -> Response:
    """Answer a client that has gone; nothing is sent."""
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
    """Return messages as turns. Raises ApiError."""
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
    if room < (limit or 1):
        raise ApiError(400, f"the prompt has {longest} tokens, which leave room for {max(room, 0)} of an answer")
    return min(limit or room, answers.model.capacity.max_new_tokens)


def page_headers(text: str) -> dict[str, str]:
    """Return headers by which the page runs its own script and style, and loads nothing from elsewhere."""
    allowed = {}
    for name in ("script", "style"):
        content = re.search(f"<{name}>(.*?)</{name}>", text, re.DOTALL)
        digest = hashlib.sha256(content[1].encode() if content else b"").digest()
        allowed[name] = f"{name}-src 'sha256-{base64.b64encode(digest).decode()}'"
    rules = ["default-src 'none'", *allowed.values(), "connect-src 'self'", "img-src data:", "base-uri 'none'"]
    policy = "; ".join([*rules, "form-action 'none'", "frame-ancestors 'none'"])
    headers = {"content-security-policy": policy, "x-content-type-options": "nosniff", "x-frame-options": "DENY"}
    return headers | {"referrer-policy": "no-referrer", "cache-control": "no-store"}
