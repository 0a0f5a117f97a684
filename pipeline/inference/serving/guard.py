"""Checks of every request before its route: Host, Origin, token; and how long a client may take to send one."""

import asyncio
import secrets
from collections import Counter
from collections.abc import Collection
from typing import Any

from starlette.datastructures import Headers
from starlette.types import ASGIApp, Message, Receive, Scope, Send
from uvicorn.protocols.http.h11_impl import H11Protocol

from pipeline.inference.serving.bodies import ApiError

# Seconds that a client may take to send the head of a request, and its body; bytes of a body. Chosen by hand.
HEAD_S = 10.0
BODY_S = 20.0
MAX_BODY = 2**20
# Routes without a token: the page has no secret, and a monitor needs none.
OPEN = ("/", "/health")
METHODS = ("GET", "POST", "HEAD")


class TimedProtocol(H11Protocol):
    """HTTP whose connections end if the head of a request takes longer than HEAD_S seconds."""

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        """Await the head of the first request."""
        super().connection_made(transport)
        self._await_head()

    def on_response_complete(self) -> None:
        """Await the head of the next request; uvicorn's own limit ends only connections that are silent."""
        super().on_response_complete()
        self._await_head()

    def _await_head(self) -> None:
        self.loop.call_later(HEAD_S, self._end_without_request, self.cycle)

    def _end_without_request(self, last: object) -> None:
        if self.cycle is last and not self.transport.is_closing():
            self.transport.close()


class Guard:
    """Refuses requests of other origins, for other hosts, or without the token, and counts answers by status.

    hosts: values of the header Host that are served; empty: any.
    token: the bearer token.
    statuses: number of responses by method and status.
    """

    def __init__(self, app: ASGIApp, *, hosts: Collection[str], token: str, statuses: Counter[tuple[str, int]]) -> None:
        self.app, self.hosts, self.token, self.statuses = app, hosts, token, statuses

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Serve a request or refuse it."""
        if scope["type"] != "http":  # no route has a web socket
            await self.app(scope, receive, send)
            return

        async def counted(message: Message) -> None:
            if message["type"] == "http.response.start":
                method = scope["method"] if scope["method"] in METHODS else "other"
                self.statuses[method, message["status"]] += 1
            await send(message)

        try:
            self.check(scope)
        except ApiError as error:
            await error.response(closes=True)(scope, receive, counted)
            return
        await self.app(scope, receive, counted)

    def check(self, scope: Scope) -> None:
        """Raise ApiError for a request that is not to be served."""
        headers = Headers(scope=scope)
        host = headers.get("host", "")
        if self.hosts and host not in self.hosts:
            raise ApiError(403, f"Host: {host[:80]!r} is not served here")
        origin = headers.get("origin")
        if origin is not None and origin != f"http://{host}":
            raise ApiError(403, f"Origin: {origin[:80]!r} may not use this server")
        if scope["method"] not in METHODS:
            raise ApiError(405, f"method {scope['method'][:20]!r} is not served", "method_not_allowed")
        if "content-length" in headers and "transfer-encoding" in headers:  # a proxy may take one, and this the other
            raise ApiError(400, "both Content-Length and Transfer-Encoding are given")
        scheme, _, given = headers.get("authorization", "").partition(" ")
        is_right = scheme.lower() == "bearer" and secrets.compare_digest(given.strip().encode(), self.token.encode())
        if scope["path"] not in OPEN and not is_right:
            raise ApiError(401, "give the token that the server printed, as Authorization: Bearer TOKEN", "no_token")


async def read_body(request: Any) -> bytes:
    """Read the body of a request. Raises ApiError if it is longer than MAX_BODY or takes longer than BODY_S."""
    length = request.headers.get("content-length", "0")
    too_long = ApiError(413, f"the body is longer than {MAX_BODY:,} bytes")
    if not length.isdecimal() or int(length) > MAX_BODY:
        raise too_long
    content = bytearray()
    try:
        async with asyncio.timeout(BODY_S):
            async for part in request.stream():
                content += part
                if len(content) > MAX_BODY:
                    raise too_long
    except TimeoutError:
        raise ApiError(408, f"the body took longer than {BODY_S:g} seconds") from None
    return bytes(content)
