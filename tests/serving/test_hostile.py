"""Requests that nobody who means well sends: one clear answer each, or a closed connection, and no memory kept."""

import json
import socket
import time
from pathlib import Path

import psutil
import pytest

BODY = json.dumps({"model": "speaking", "messages": [{"role": "user", "content": "hello"}], "max_tokens": 2}).encode()
CHAT = "/v1/chat/completions"
DEEP = b'{"model":' + b"[" * 100_000 + b"]" * 100_000 + b"}"


def exchanged(served, raw: bytes, *, wait_s: float = 10.0) -> bytes:
    """Send bytes and return all that comes back until the connection is closed or silent."""
    host, port = served.url.removeprefix("http://").split(":")
    with socket.create_connection((host, int(port)), timeout=wait_s) as connection:
        received = b""
        try:
            connection.sendall(raw)
            while part := connection.recv(65536):
                received += part
        except OSError:  # the server has closed it, or says nothing more
            pass
    return received


def request(served, *, method="POST", path=CHAT, body=BODY, length: object = None, **changed: str | None) -> bytes:
    """Return a request; headers that are None are left out."""
    host = served.url.removeprefix("http://")
    headers: dict[str, str | None] = {"Host": host, "Authorization": f"Bearer {served.token}", "Connection": "close"}
    headers["Content-Length"] = str(len(body) if length is None else length)
    headers |= {name.replace("_", "-"): value for name, value in changed.items()}
    lines = [f"{name}: {value}" for name, value in headers.items() if value is not None]
    return "\r\n".join([f"{method} {path} HTTP/1.1", *lines, "", ""]).encode("latin-1") + body


REFUSED_BY_HEADER = {
    "no token": ({"Authorization": None}, 401),
    "wrong token": ({"Authorization": "Bearer wrong"}, 401),
    "empty token": ({"Authorization": "Bearer "}, 401),
    "basic": ({"Authorization": "Basic Zm9vOmJhcg=="}, 401),
    "token of another alphabet": ({"Authorization": "Bearer \xfc\xfc"}, 401),
    "long token": ({"Authorization": f"Bearer {'x' * 10_000}"}, 401),
    "token in the path": ({"Authorization": None, "path": f"{CHAT}?token=TOKEN"}, 401),
    "token in a cookie": ({"Authorization": None, "Cookie": "token=TOKEN"}, 401),
    "other host": ({"Host": "example.com"}, 403),
    "rebound host": ({"Host": "127.0.0.1.nip.io:80"}, 403),
    "host without port": ({"Host": "127.0.0.1"}, 403),
    "empty host": ({"Host": ""}, 403),
    "foreign origin": ({"Origin": "https://example.com"}, 403),
    "null origin": ({"Origin": "null"}, 403),
    "origin of another port": ({"Origin": "http://127.0.0.1:1"}, 403),
    "preflight": ({"method": "OPTIONS", "Access_Control_Request_Method": "POST"}, 405),
    "PUT": ({"method": "PUT"}, 405),
    "DELETE": ({"method": "DELETE", "path": "/v1/votes"}, 405),
    "TRACE": ({"method": "TRACE"}, 405),
    "CONNECT": ({"method": "CONNECT"}, 405),
    "invented method": ({"method": "BREW"}, 405),
    "GET of a POST": ({"method": "GET"}, 405),
    "no route": ({"path": "/v1/files"}, 404),
    "path upward": ({"method": "GET", "path": "/../../etc/passwd"}, 404),
    "encoded path upward": ({"method": "GET", "path": "/%2e%2e/%2e%2e/etc/passwd"}, 404),
    "file of the package": ({"method": "GET", "path": "/page.html"}, 404),
    "NUL in the path": ({"method": "GET", "path": "/%00"}, 404),
    "long path": ({"method": "GET", "path": "/" + "a" * 10_000}, 404),
    "length of 100 MB": ({"length": 100_000_000}, 413),
    "length just above": ({"length": 2**20 + 1}, 413),
    "two lengths": ({"length": "5, 6"}, 400),
    "negative length": ({"length": -1}, 400),
    "length of letters": ({"length": "ten"}, 400),
    "length and chunks": ({"Transfer_Encoding": "chunked"}, 400),
    "unknown transfer": ({"Content_Length": None, "Transfer_Encoding": "gzip"}, 400),
    "web socket": ({"method": "GET", "path": "/ws", "Upgrade": "websocket", "Connection": "Upgrade", "body": b""}, 404),
}
REFUSED_BY_BODY = {
    "empty": b"",
    "no JSON": b"hello",
    "bytes": bytes(range(256)),
    "a list": b"[]",
    "a number": b"1e400",
    "deep": DEEP,
    "half": BODY[:-5],
    "lone surrogate": BODY.replace(b"hello", b"\\ud800"),
    "NaN": BODY.replace(b'"max_tokens": 2', b'"temperature": NaN'),
    "infinite": BODY.replace(b'"max_tokens": 2', b'"temperature": Infinity'),
    "huge number": BODY.replace(b'"max_tokens": 2', b'"max_tokens": ' + b"9" * 5000),
    "content of a dict": BODY.replace(b'"hello"', b'{"a": 1}'),
    "messages of nulls": BODY.replace(b'[{"role"', b'[null, {"role"'),
    "role of a class": BODY.replace(b'"user"', b'"__class__"'),
    "model of a path": BODY.replace(b'"speaking"', b'"../../etc/passwd"'),
    "model of a template": BODY.replace(b'"speaking"', b'"{{ 7 * 7 }}"'),
    "own chat template": BODY[:-1] + b', "chat_template": "{{ x }}"}',
    "many stops": BODY[:-1] + b', "stop": ' + json.dumps(["x"] * 1000).encode() + b"}",
    "long stop": BODY[:-1] + b', "stop": "' + b"x" * 100_000 + b'"}',
    "many choices": BODY[:-1] + b', "n": 1000000}',
}


def status_of(answer: bytes) -> int:
    assert answer.startswith(b"HTTP/1.1 "), answer[:200]
    return int(answer.split()[1])


@pytest.mark.parametrize("name", REFUSED_BY_HEADER)
def test_a_request_is_refused_by_its_head(served, name):
    change, status = REFUSED_BY_HEADER[name]
    answer = exchanged(served, request(served, **change))
    assert status_of(answer) == status, answer
    assert answer.count(b"HTTP/1.1 ") == 1 and served.token.encode() not in answer


@pytest.mark.parametrize("name", REFUSED_BY_BODY)
def test_a_request_is_refused_by_its_body(served, name):
    answer = exchanged(served, request(served, body=REFUSED_BY_BODY[name]))
    assert status_of(answer) in (400, 404), answer
    message = json.loads(answer.partition(b"\r\n\r\n")[2])["error"]["message"]
    assert message and "\n" not in message and len(message) < 400, message


def test_a_body_without_a_length_is_read_up_to_its_limit(served):
    raw = request(served, body=b"", Content_Length=None, Transfer_Encoding="chunked")
    answer = exchanged(served, raw + b"100000\r\n" + b"x" * 2**20 + b"\r\n100000\r\n" + b"x" * 2**20 + b"\r\n")
    assert status_of(answer) == 413


def test_a_head_of_a_megabyte_is_refused(served):
    assert status_of(exchanged(served, request(served, X=" " + "x" * 2**20))) in (400, 431)


@pytest.mark.slow
def test_slow_heads_and_silent_connections_are_ended(served):
    """Each byte comes in time, the head does not."""
    host, port = served.url.removeprefix("http://").split(":")
    with (
        socket.create_connection((host, int(port)), timeout=5) as silent,
        socket.create_connection((host, int(port)), timeout=5) as slow,
    ):
        ended, began = False, time.monotonic()
        while not ended and time.monotonic() - began < 20:
            try:
                slow.send(b"G")
                time.sleep(0.5)
            except OSError:
                ended = True
        assert ended and silent.recv(1) == b""


def test_a_client_that_closes_its_half_is_answered(served):
    host, port = served.url.removeprefix("http://").split(":")
    with socket.create_connection((host, int(port)), timeout=10) as connection:
        connection.sendall(request(served))
        connection.shutdown(socket.SHUT_WR)
        answer = connection.recv(65536)
    assert answer == b"" or status_of(answer) == 200
    assert served.num_answers == 0


def test_no_memory_is_kept(served):
    """After a hundred bodies of a megabyte the process has less than 20 MB more."""
    raw = request(served, body=BODY[:-1] + b', "user": "' + b"x" * (2**20 - 200) + b'"}')
    assert status_of(exchanged(served, raw)) == 200
    process = psutil.Process(served.process.pid)
    before = process.memory_info().rss
    for _ in range(100):
        exchanged(served, raw)
    assert process.memory_info().rss - before < 20 * 2**20


def test_the_server_still_answers(served):
    assert served.post(CHAT, **json.loads(BODY)).status_code == 200
    assert served.process.poll() is None
    assert not list(Path(served.folder).glob("votes*"))
