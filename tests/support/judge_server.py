"""A chat server on the loopback interface with scripted answers, in the place of an LLM judge."""

import json
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

ASKS = "Rating: N\n"
SHORT = {"template": ASKS + "{prompt}|{completion}"}


def rates(number):
    """The body of an answer of a chat model with a rating."""
    return says(f"Good.\nRating: {number}")


def says(text):
    """The body of an answer of a chat model."""
    return json.dumps({"choices": [{"message": {"role": "assistant", "content": text}}]})


class Server(ThreadingHTTPServer):
    """`script`: the question and how often it was asked -> status, body, further headers."""

    daemon_threads = True

    def __init__(self, script):
        super().__init__(("127.0.0.1", 0), Handler)
        self.script, self.requests, self.now, self.most = script, [], 0, 0
        self.lock, self.is_left = threading.Lock(), threading.Event()

    def handle_error(self, *args):
        self.is_left.set()  # by a client that has gone before the end of its answer

    @property
    def settings(self):
        return {"url": f"http://127.0.0.1:{self.server_port}/v1", "model": "m", "wait_s": 0.001, **SHORT}

    @property
    def questions(self):
        return [request["messages"][0]["content"].removeprefix(ASKS) for _, _, request in self.requests]


class Handler(BaseHTTPRequestHandler):
    def do_POST(self):
        request = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        server = self.server
        with server.lock:
            server.requests.append((self.path, dict(self.headers), request))
            server.now += 1
            server.most = max(server.most, server.now)
            question = request["messages"][0]["content"].removeprefix(ASKS)
            number = server.questions.count(question)
        status, body, *headers = server.script(question, number)
        with server.lock:
            server.now -= 1
        self.send_response(status)
        for name, value in [("Content-Length", len(body.encode())), *headers]:
            self.send_header(name, str(value))
        self.end_headers()
        self.wfile.write(body.encode())

    def log_message(self, *args):
        pass


@contextmanager
def judge_servers() -> Iterator[Callable[..., Server]]:
    """A function that starts a server with a script; all of them end with the context."""
    servers = []

    def start(script) -> Server:
        servers.append(Server(script))
        threading.Thread(target=servers[-1].serve_forever, kwargs={"poll_interval": 0.01}, daemon=True).start()
        return servers[-1]

    yield start
    for server in servers:
        server.shutdown()
        server.server_close()
