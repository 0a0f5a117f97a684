"""A server with the interface of `rlhf serve` and canned answers, for the tests of its page.

The last word of the prompt chooses the answer: see `ANSWERS` and `events`.
"""

import asyncio
import base64
import contextlib
import hashlib
import json
import re
import threading
import time
from collections.abc import AsyncIterator, Iterator
from dataclasses import dataclass, field
from typing import Any

import uvicorn
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import HTMLResponse, JSONResponse, Response, StreamingResponse
from starlette.routing import Route
from support.ports import free_port
from support.source_tree import ROOT

PAGE = ROOT / "pipeline/inference/serving/page.html"
TOKEN = "a-token_of~43.characters"
MARKUP = '<script>window.isBroken = 1</script><img src="x" onerror="window.isBroken = 1"><b>bold</b> &amp; '
ANSWERS = {
    "markup": MARKUP,
    "empty": "",
    "same": "The same words.",
    "rtl": "مرحبا بالعالم. שלום עולם.\n\u202eThis line is reversed by an override.\n😀👩‍👩‍👧‍👦🏳️‍🌈 e\u0301",
    "wide": "x" * 10_000,
    "long": "A heron is a wading bird with long legs.\nIt stands still and waits for fish.\n\n" * 15,
}
Message = dict[str, str]


@dataclass
class Canned:
    """The requests that the server got, and what it answers next.

    models: the rows of GET v1/models
    asked, scored, votes: bodies of the requests for answers, scores and votes
    stopped: number of streams that the browser ended early
    tallies: rows of GET v1/votes
    refuses_votes: whether a vote gets status 500
    """

    models: list[dict[str, Any]]
    asked: list[dict[str, Any]] = field(default_factory=list)
    scored: list[dict[str, Any]] = field(default_factory=list)
    votes: list[dict[str, Any]] = field(default_factory=list)
    stopped: int = 0
    tallies: list[dict[str, Any]] = field(default_factory=list)
    refuses_votes: bool = False


def served(*names: str, reward: bool = True) -> Canned:
    """Return a server's state with these language models, and a reward model."""
    rows = [{"id": name, "object": "model", "kind": "language", "max_length": 1024} for name in names]
    return Canned([*rows, *([{"id": "reward", "object": "model", "kind": "reward"}] if reward else [])])


def policy(page: str) -> str:
    """Return a Content-Security-Policy that allows the page's own script and style alone."""

    def digest(tag: str) -> str:
        found = re.search(f"<{tag}>(.*?)</{tag}>", page, re.DOTALL)
        return base64.b64encode(hashlib.sha256(found[1].encode() if found else b"").digest()).decode()

    return (
        f"default-src 'none'; script-src 'sha256-{digest('script')}'; style-src 'sha256-{digest('style')}'; "
        "img-src data:; "
        "connect-src 'self'; base-uri 'none'; form-action 'none'; frame-ancestors 'none'"
    )


def failure(status: int, message: str) -> JSONResponse:
    """Return an error as the server words it."""
    return JSONResponse({"error": {"message": message, "type": "server_error", "code": status}}, status)


async def events(state: Canned, body: dict[str, Any]) -> AsyncIterator[str]:
    """Yield the lines of a streamed answer; "slow" never ends, "broken" fails midway, "cut" reaches the limit."""
    word = body["messages"][-1]["content"].split()[-1]
    place = [row["id"] for row in state.models].index(body["model"]) + 1
    text = ANSWERS.get(word, f"Answer number {place} to: {body['messages'][-1]['content']}")
    text = text * place if word == "long" else text
    size = len(text) or 1 if word == "markup" else 12  # markup in one part is an element if it is read as such
    parts = (
        re.findall(rf".{{1,{size}}}", text, re.DOTALL)
        if word != "slow"
        else [f"word{number} " for number in range(2000)]
    )

    def line(value: dict[str, Any]) -> str:
        return f"data: {json.dumps(value)}\n\n"

    is_ended = False
    try:
        for number, part in enumerate(parts):
            yield line({"choices": [{"index": 0, "delta": {"content": part}, "finish_reason": None}], "usage": None})
            await asyncio.sleep(0.02 if word == "slow" else 0.001)
            if word == "broken" and number == 1:
                is_ended = True
                yield line({"error": {"message": "The GPU has no memory left.", "type": "server_error", "code": 500}})
                return
        reason = "length" if word == "cut" else "stop"
        yield line({"choices": [{"index": 0, "delta": {}, "finish_reason": reason}], "usage": None})
        usage = {"prompt_tokens": 5, "completion_tokens": len(parts), "total_tokens": 5 + len(parts)}
        yield line({"choices": [], "usage": usage})
        is_ended = True
        yield "data: [DONE]\n\n"
    finally:
        state.stopped += not is_ended


def application(state: Canned) -> Starlette:
    """Return the server of this state, with the page."""

    async def show(request: Request) -> Response:
        text = PAGE.read_text(encoding="utf-8")
        return HTMLResponse(text, headers={"Content-Security-Policy": policy(text), "Cache-Control": "no-store"})

    async def models(request: Request) -> Response:
        return JSONResponse({"object": "list", "data": state.models})

    async def answer(request: Request) -> Response:
        body = await request.json()
        state.asked.append(body)
        if body["messages"][-1]["content"].endswith("busy"):
            return failure(429, "Four requests are running.")
        return StreamingResponse(events(state, body), media_type="text/event-stream")

    async def score(request: Request) -> Response:
        body = await request.json()
        state.scored.append(body)
        return JSONResponse({"data": [{"index": 0, "score": 1.23456 + len(state.scored)}]})

    async def votes(request: Request) -> Response:
        if request.method == "POST":
            if state.refuses_votes:
                return failure(500, "The disk is full.")
            state.votes.append(await request.json())
        return JSONResponse({"file": "votes.jsonl", "data": state.tallies})

    def guarded(handler: Any) -> Any:
        async def guard(request: Request) -> Response:
            if request.headers.get("Authorization") != f"Bearer {TOKEN}":
                return failure(401, "The token is wrong.")
            return await handler(request)

        return guard

    return Starlette(
        routes=[
            Route("/", show),
            Route("/v1/models", guarded(models)),
            Route("/v1/chat/completions", guarded(answer), methods=["POST"]),
            Route("/v1/score", guarded(score), methods=["POST"]),
            Route("/v1/votes", guarded(votes), methods=["GET", "POST"]),
        ]
    )


@contextlib.contextmanager
def running(state: Canned) -> Iterator[str]:
    """Run the server in a thread; yield its address."""
    port = free_port()
    server = uvicorn.Server(uvicorn.Config(application(state), port=port, log_level="error"))
    server.config.timeout_graceful_shutdown = 1
    thread = threading.Thread(target=server.run, daemon=True)
    thread.start()
    end = time.monotonic() + 30
    while not server.started and time.monotonic() < end:
        time.sleep(0.02)
    yield f"http://127.0.0.1:{port}/"
    server.should_exit = True
    thread.join(timeout=10)


def say(page: Any, text: str) -> None:
    """Send a question and wait until its answer has ended."""
    page.fill("#message", text)
    page.press("#message", "Enter")
    page.wait_for_function("() => running === null && talk.messages.length > 0")


def ask_both(page: Any, prompt: str) -> None:
    """Send a prompt to both models and wait until a vote is possible."""
    page.click("#compare-tab")
    page.fill("#prompt", prompt)
    page.press("#prompt", "Enter")
    page.wait_for_selector("#vote button:enabled")


def text_of(page: Any, selector: str = ".answer .text") -> str:
    return page.locator(selector).last.text_content()
