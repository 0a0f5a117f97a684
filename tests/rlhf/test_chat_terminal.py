"""chat.py in a real terminal: streaming, interruption, and text that might steer the terminal."""

import os
import pty
import select
import subprocess
import sys
import time
from pathlib import Path

import pytest
from support.scripted_model import SHOWN

ROOT = Path(__file__).resolve().parents[2]


# The first terminal that the leader of a session opens is the one whose Ctrl-C it gets. A job in the background of a
# shell inherits a SIGINT that is ignored.
IN_TERMINAL = """
import os, signal, sys
os.close(os.open(os.ttyname(0), os.O_RDWR))
signal.signal(signal.SIGINT, signal.default_int_handler)
os.execv(sys.argv[1], sys.argv[1:])
"""


class Terminal:
    """chat.py in a pseudo-terminal."""

    def __init__(self, *argv: str) -> None:
        self.seen = ""
        self.fd, inside = pty.openpty()
        # Not pty.fork(): to copy a pytest worker that has run thousands of tests can take more memory than is free.
        self.process = subprocess.Popen(
            [sys.executable, "-c", IN_TERMINAL, sys.executable, "chat.py", *argv],
            cwd=ROOT, env=os.environ | {"TERM": "xterm"}, start_new_session=True,
            stdin=inside, stdout=inside, stderr=inside,
        )  # fmt: skip
        os.close(inside)

    def type(self, text: str) -> None:
        os.write(self.fd, text.encode())

    def wait_for(self, text: str, timeout_s: float = 60.0) -> str:
        """What came up to and with `text`."""
        deadline = time.monotonic() + timeout_s
        while text not in self.seen:
            ready, _, _ = select.select([self.fd], [], [], max(deadline - time.monotonic(), 0))
            assert ready, f"no {text!r} in {self.seen!r}"
            try:
                self.seen += os.read(self.fd, 4096).decode(errors="replace")
            except OSError:  # the other end is closed
                pytest.fail(f"the program ended before {text!r}: {self.seen!r}")
        before, _, self.seen = self.seen.partition(text)
        return before + text

    def exit_code(self) -> int:
        return self.process.wait()

    def close(self) -> None:
        """No process is left, also where a test failed."""
        self.process.kill()
        self.process.wait()
        os.close(self.fd)


@pytest.fixture
def in_terminal():
    """Starts chat.py in a pseudo-terminal."""
    opened: list[Terminal] = []

    def start(*argv: str) -> Terminal:
        opened.append(Terminal(*argv))
        return opened[-1]

    yield start
    for terminal in opened:
        terminal.close()


@pytest.mark.slow
def test_talking_in_a_terminal(endless, in_terminal):
    terminal = in_terminal("--path", endless, "--temperature", "0", "--max-new-tokens", "20000")
    assert "Ctrl-C stops a reply" in terminal.wait_for("> ")
    terminal.type("/hlep\n")
    terminal.wait_for("did you mean /help")
    terminal.type("hello\n")
    terminal.wait_for("ababab")  # it streams: 20000 tokens are far away
    terminal.type("\x03")
    terminal.wait_for("stopped; the conversation keeps this part")
    terminal.wait_for("> ")
    time.sleep(0.3)  # CPython prints the prompt a moment before it listens to signals
    terminal.type("\x03")
    terminal.wait_for("Ctrl-D or /exit leaves")
    terminal.type("/clear\n")
    terminal.wait_for("a new conversation")
    terminal.wait_for("> ")
    terminal.type("\x04")
    assert terminal.exit_code() == 0


def test_what_a_model_says_cannot_steer_the_terminal(speaking, in_terminal):
    terminal = in_terminal("--path", speaking, "--temperature", "0")
    terminal.wait_for("> ")
    terminal.type("hello\n")
    assert "\x1b[31m" not in terminal.wait_for(SHOWN)
    terminal.type("/exit\n")
    assert terminal.exit_code() == 0
