"""chat.py in a real terminal: streaming, interruption, and text that might steer the terminal."""

import os
import pty
import select
import signal
import sys
import time
from pathlib import Path

import pytest
from support.scripted_model import SHOWN

ROOT = Path(__file__).resolve().parents[2]


class Terminal:
    """chat.py in a pseudo-terminal."""

    def __init__(self, *argv: str) -> None:
        self.seen = ""
        self.pid, self.fd = pty.fork()
        if self.pid == 0:
            os.chdir(ROOT)
            os.environ["TERM"] = "xterm"
            # A job in the background of a shell inherits a SIGINT that is ignored.
            signal.signal(signal.SIGINT, signal.default_int_handler)
            os.execv(sys.executable, [sys.executable, "chat.py", *argv])

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
        code = os.waitstatus_to_exitcode(os.waitpid(self.pid, 0)[1])
        self.pid = 0
        return code

    def close(self) -> None:
        """No process is left, also where a test failed."""
        if self.pid:
            os.kill(self.pid, signal.SIGKILL)
            os.waitpid(self.pid, 0)


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


def test_talking_in_a_terminal(endless, in_terminal):
    terminal = in_terminal("--path", endless, "--temperature", "0", "--max_new_tokens", "20000")
    assert "Ctrl-C stops a reply" in terminal.wait_for("> ")
    terminal.type("/hlep\n")
    terminal.wait_for("did you mean /help")
    terminal.type("hello\n")
    terminal.wait_for("ababab")  # it streams: 20000 tokens are far away
    terminal.type("\x03")
    terminal.wait_for("stopped; the conversation keeps this much")
    terminal.wait_for("> ")
    time.sleep(0.3)  # CPython prints the prompt a moment before it listens to signals
    terminal.type("\x03")
    terminal.wait_for("Ctrl-D or /exit leaves")
    terminal.type("/clear\n")
    terminal.wait_for("a new conversation")
    terminal.wait_for("> ")
    terminal.type("\x04")
    assert terminal.exit_code() == 0


@pytest.mark.slow
def test_what_a_model_says_cannot_steer_the_terminal(speaking, in_terminal):
    terminal = in_terminal("--path", speaking, "--temperature", "0")
    terminal.wait_for("> ")
    terminal.type("hello\n")
    assert "\x1b[31m" not in terminal.wait_for(SHOWN)
    terminal.type("/exit\n")
    assert terminal.exit_code() == 0
