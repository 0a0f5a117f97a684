"""A stand-in for the hub on the loopback interface: it keeps what the hub's own client uploads to it."""

import base64
import json
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any


class Hub(ThreadingHTTPServer):
    """requests: paths in order. created: bodies of new repositories. files: name -> content that was committed.

    refused: beginnings of paths that are answered by 403. tokens: what requests were authorised with.
    """

    daemon_threads = True

    def __init__(self, refused: tuple[str, ...]) -> None:
        super().__init__(("127.0.0.1", 0), Handler)
        self.refused, self.requests, self.tokens = refused, list[str](), set[str]()
        self.created, self.files = list[dict[str, Any]](), dict[str, bytes]()

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.server_port}"


class Handler(BaseHTTPRequestHandler):
    """Answers what an upload asks: a new repository, how each file is sent, and a commit."""

    server: Hub

    def do_POST(self) -> None:
        hub, body = self.server, self.body()
        hub.requests.append(self.path)
        hub.tokens.add(self.headers.get("Authorization", ""))
        if self.path.startswith(hub.refused) and hub.refused:
            self.answer(403, {"error": "You have no right to do this"})
        elif self.path == "/api/repos/create":
            hub.created.append(json.loads(body))
            self.answer(200, {"url": f"{hub.url}/{hub.created[-1]['organization']}/{hub.created[-1]['name']}"})
        elif "/preupload/" in self.path:
            names = [file["path"] for file in json.loads(body)["files"]]
            kinds = [{"path": name, "uploadMode": "regular", "shouldIgnore": False} for name in names]
            self.answer(200, {"files": kinds})
        elif "/commit/" in self.path:
            for line in map(json.loads, body.splitlines()):
                if line["key"] == "file":
                    hub.files[line["value"]["path"]] = base64.b64decode(line["value"]["content"])
            self.answer(200, {"commitUrl": f"{hub.url}/org/tiny/commit/{'c' * 40}", "commitOid": "c" * 40})
        else:
            self.answer(200, {})

    def do_GET(self) -> None:
        self.server.requests.append(self.path)
        self.answer(404, {"error": "not here"})

    do_HEAD = do_GET

    def body(self) -> bytes:
        """Return the whole body, which may come in chunks."""
        if self.headers.get("Transfer-Encoding") != "chunked":
            return self.rfile.read(int(self.headers.get("Content-Length", 0)))
        parts = []
        while size := int(self.rfile.readline(), 16):
            parts.append(self.rfile.read(size))
            self.rfile.readline()
        self.rfile.readline()
        return b"".join(parts)

    def answer(self, status: int, content: dict[str, Any]) -> None:
        text = json.dumps(content).encode()
        self.send_response(status)
        self.send_header("Content-Type", "application/json")
        self.send_header("Content-Length", str(len(text)))
        self.end_headers()
        self.wfile.write(text if self.command != "HEAD" else b"")

    def log_message(self, *words: Any) -> None:
        pass


@contextmanager
def hub_server(*refused: str) -> Iterator[Hub]:
    """Serve in a thread while the context lasts."""
    hub = Hub(refused)
    thread = threading.Thread(target=hub.serve_forever, daemon=True)
    thread.start()
    try:
        yield hub
    finally:
        hub.shutdown()
        hub.server_close()
        thread.join()
