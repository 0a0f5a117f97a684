"""The command line of `rlhf serve`, and of `chat.py --serve`."""

import contextlib
import os
import shutil
import signal
import socket
import subprocess
import sys
import threading
import time
from pathlib import Path

import httpx
import pytest
from support.messages import naming

from rlhf import serve

ROOT = Path(__file__).resolve().parents[2]


def refused(*words: str, cwd: Path) -> str:
    """The only line of stderr of a command that serves nothing."""
    environment = os.environ | {"PYTHONPATH": str(ROOT)}
    command = [sys.executable, str(ROOT / "chat.py"), "--serve", *words]
    done = subprocess.run(command, cwd=cwd, env=environment, capture_output=True, text=True, timeout=120, check=False)
    assert (done.returncode, done.stdout) == (2, "")
    (line,) = done.stderr.splitlines()
    return line


@pytest.mark.parametrize(
    ("words", "said"),
    [
        ([], "error: --model: missing ... python chat.py --serve output/actor"),
        (["speaking", "speaking"], "error: --model: speaking is named twice"),
        (["./speakin"], "error: --model: ./speakin: no such folder; did you mean speaking?"),
        (["speaking", "--max-length", "513", "--port", "0"], "error: --max-length: got 513 ... 512 positions"),
        (["speaking", "--port", "0", "--votes", "speaking/config.json"], "error: --votes: ... is no vote"),
    ],
    ids=str,
)
def test_what_cannot_be_served_is_one_line(models, words, said):
    assert refused(*words, cwd=models) == naming(said)


def test_a_part_of_an_answer_does_not_wait_for_the_one_before():
    """Without the option, Linux sends a body 40 ms after its head on a connection that stays open."""
    with (
        serve.listening("127.0.0.1", 0) as listener,
        socket.create_connection(listener.getsockname()),
        listener.accept()[0] as accepted,
    ):
        assert accepted.getsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY) != 0


def test_a_port_in_use_is_told_before_models_are_loaded(models):
    with socket.create_server(("127.0.0.1", 0)) as listener:
        port = listener.getsockname()[1]
        assert refused("speaking", "--port", str(port), cwd=models) == naming(
            f"error: --port: cannot listen on 127.0.0.1, port {port}: ... 0 takes a free one"
        )


def test_models_of_one_name_are_named_by_their_paths():
    assert serve.model_names(["a/actor", "b/actor", "b/sft"]) == ["a/actor", "b/actor", "sft"]


def test_flags_reach_the_server(models, tmp_path, started_server):
    """Of other numbers of slots, lengths, types and files than the defaults; on this machine's IPv6 address."""
    shutil.copytree(models / "endless", tmp_path / "endless")
    words = ["endless", "--max-requests", "2", "--max-waiting", "1", "--max-length", "40", "--dtype", "bf16"]
    server = started_server([*words, "--votes", "mine.jsonl", "--host", "localhost"], tmp_path)
    with server.client() as client:
        assert client.get("/v1/models").json()["data"][0]["max_length"] == 40
        assert client.get("/v1/votes").json()["file"] == "mine.jsonl"
    body = {"model": "endless", "messages": [{"role": "user", "content": "a"}], "temperature": 0}
    assert "of at most 3" in server.post("/v1/chat/completions", **body, n=4).text
    usage = server.post("/v1/chat/completions", **body, n=3).json()["usage"]
    assert usage["total_tokens"] - usage["prompt_tokens"] == 3 * (40 - usage["prompt_tokens"])
    server.process.terminate()
    assert server.process.wait(30) in (0, 130, 143, -15)


@pytest.mark.slow
def test_ctrl_c_ends_running_answers_without_a_traceback(models, started_server):
    server = started_server(["endless"], models)
    body = {"model": "endless", "messages": [{"role": "user", "content": "a"}], "n": 4}

    def ask() -> None:
        with contextlib.suppress(httpx.HTTPError):
            server.post("/v1/chat/completions", **body)

    asking = threading.Thread(target=ask)
    asking.start()
    while not server.num_answers:
        time.sleep(0.1)
    server.process.send_signal(signal.SIGINT)
    assert server.process.wait(60) == 130
    asking.join()
    assert server.process.stdout is not None and "Traceback" not in server.process.stdout.read()
