"""chat.py in a real terminal: streaming, interruption, editing, and text that might steer the terminal."""

import json
import os
import pty
import re
import select
import subprocess
import sys
import termios
import time
from pathlib import Path

import pyte
import pytest
from support.scripted_model import SHOWN, TEXT

from rlhf.chat import COMMANDS

ROOT = Path(__file__).resolve().parents[2]
LINES, COLUMNS = 50, 250


# The first terminal that the leader of a session opens is the one whose Ctrl-C it gets. A job in the background of a
# shell inherits a SIGINT that is ignored.
IN_TERMINAL = """
import os, signal, sys
os.close(os.open(os.ttyname(0), os.O_RDWR))
signal.signal(signal.SIGINT, signal.default_int_handler)
os.execv(sys.argv[1], sys.argv[1:])
"""


class Terminal:
    """chat.py in a pseudo-terminal, whose screen `lines` reads."""

    def __init__(self, *argv: str, **env: str) -> None:
        self.seen = ""
        self.screen = pyte.Screen(COLUMNS, LINES)
        self.emulator = pyte.Stream(self.screen)
        self.fd, inside = pty.openpty()
        termios.tcsetwinsize(inside, (LINES, COLUMNS))
        # Not pty.fork(): to copy a pytest worker that has run thousands of tests can take more memory than is free.
        self.process = subprocess.Popen(
            [sys.executable, "-c", IN_TERMINAL, sys.executable, "chat.py", *argv],
            cwd=ROOT, env=os.environ | {"TERM": "xterm"} | env, start_new_session=True,
            stdin=inside, stdout=inside, stderr=inside,
        )  # fmt: skip
        os.close(inside)

    def type(self, text: str) -> None:
        os.write(self.fd, text.encode())

    def wait_for(self, text: str, timeout_s: float = 20.0) -> str:
        """What came up to and with `text`."""
        deadline = time.monotonic() + timeout_s
        while text not in self.seen:
            self.read(deadline, text)
        before, _, self.seen = self.seen.partition(text)
        return before + text

    def read(self, deadline: float, text: str) -> None:
        """Read what comes next; fails if that does not come, or `text` cannot come any more."""
        ready, _, _ = select.select([self.fd], [], [], max(deadline - time.monotonic(), 0))
        assert ready, f"no {text!r} in {self.seen!r}"
        try:
            came = os.read(self.fd, 4096).decode(errors="replace")
        except OSError:  # the other end is closed
            pytest.fail(f"the program ended before {text!r}: {self.seen!r}")
        self.seen += came
        self.emulator.feed(came)

    def wait_for_last(self, *lines: str, timeout_s: float = 20.0) -> None:
        """Wait until these are the last lines of the screen."""
        deadline = time.monotonic() + timeout_s
        while self.lines()[-len(lines) :] != [*lines]:
            self.read(deadline, "\n".join(self.lines()))

    def lines(self) -> list[str]:
        """The lines of the screen that hold something, without spaces at their ends."""
        return [line.rstrip() for line in self.screen.display if line.strip()]

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

    def start(*argv: str, **env: str) -> Terminal:
        opened.append(Terminal(*argv, **env))
        return opened[-1]

    yield start
    for terminal in opened:
        terminal.close()


@pytest.mark.slow
def test_talking_in_a_terminal(endless, in_terminal):
    terminal = in_terminal("--path", endless, "--temperature", "0", "--max-new-tokens", "20000")
    terminal.wait_for("Ctrl-C stops a reply")
    terminal.wait_for_last(">")
    terminal.type("/hlep\n")
    terminal.wait_for("did you mean /help")
    terminal.type("hello\n")
    terminal.wait_for("ababab")  # it streams: 20000 tokens are far away
    terminal.type("\x03")
    terminal.wait_for("stopped; the conversation keeps this part")
    terminal.wait_for_last(">")
    terminal.type("\x03")
    terminal.wait_for("Ctrl-D or /exit leaves")
    terminal.type("/clear\n")
    terminal.wait_for("a new conversation")
    terminal.wait_for_last(">")
    terminal.type("\x04")
    assert terminal.exit_code() == 0


def test_what_a_model_says_cannot_steer_the_terminal(speaking, in_terminal):
    terminal = in_terminal("--path", speaking, "--temperature", "0")
    terminal.wait_for_last(">")
    terminal.type("hello\n")
    shown = terminal.wait_for(SHOWN)
    assert "\x1b[31m" not in shown
    assert "\x1b[6n" not in shown, "the terminal is asked for the cursor's place, and may not answer"
    terminal.type("/exit\n")
    assert terminal.exit_code() == 0


def test_messages_of_several_lines_are_edited_sent_recalled_and_saved(speaking, tmp_path, in_terminal):
    """What was typed is in no file but that of /save."""
    terminal = in_terminal("--path", speaking, "--temperature", "0", HOME=str(tmp_path))
    terminal.wait_for_last(">")
    terminal.type("ne\x1b[D\x1b[Do\x1b[F\x1b\rtwo\\\r")  # cursor left, End, Alt-Enter, a backslash
    terminal.wait_for_last("> one", ". two", ".")
    terminal.type("\x1b[200~three\rfour\x1b[201~")  # a paste
    terminal.wait_for_last("> one", ". two", ". three", ". four")
    terminal.type("\r")
    terminal.wait_for("tokens, ")
    terminal.wait_for_last(">")
    assert terminal.lines()[-7:-2] == ["> one", ". two", ". three", ". four", SHOWN]
    terminal.type(f"/save {tmp_path}/talk.jsonl\r")
    terminal.wait_for("as one row")
    messages = [{"role": "user", "content": "one\ntwo\nthree\nfour"}, {"role": "assistant", "content": TEXT.strip()}]
    assert json.loads((tmp_path / "talk.jsonl").read_text()) == {"messages": messages}
    terminal.wait_for_last(">")
    terminal.type("\x1b[A\x1b[A")  # Up twice: what was typed before /save
    terminal.wait_for_last("> one", ". two", ". three", ". four")
    terminal.type("\x03")
    terminal.wait_for_last("Ctrl-D or /exit leaves", ">")
    terminal.type("\x12thr")  # Ctrl-R
    terminal.wait_for_last("> one", ". two", ". three", ". four", "I-search backward: thr")
    terminal.type("\r")  # ends the search
    terminal.wait_for_last("> one", ". two", ". three", ". four")
    terminal.type("\x03")
    terminal.wait_for_last("Ctrl-D or /exit leaves", ">")
    terminal.type("\x1ax")  # Ctrl-Z would stop it if a shell could continue it
    terminal.wait_for_last("> x")
    terminal.type("\x7f\x04")
    assert terminal.exit_code() == 0
    assert [path for path in tmp_path.rglob("*") if path.is_file()] == [tmp_path / "talk.jsonl"]


def test_replies_are_scored_and_commands_completed(speaking, judge, in_terminal):
    terminal = in_terminal("--path", speaking, "--temperature", "0", "--reward-model", judge)
    terminal.wait_for_last(">")
    terminal.type("/sc\t\r")
    terminal.wait_for("/score: there is no reply yet")
    terminal.type("hello\r")
    terminal.wait_for("tokens, ")
    terminal.wait_for_last(">")
    score = re.search(r" s; score (-?[\d.]+)$", terminal.lines()[-2])[1]
    terminal.type("/sc\t\r")
    terminal.wait_for("1.5")
    terminal.wait_for_last(">")
    shown = " ".join(terminal.lines())  # a long path makes it two lines
    assert f"score {score} by {judge}; stage 2 measured a standard deviation of 1.5" in shown
    terminal.type("/set t\t")
    terminal.wait_for_last("/set temperature  /set top_p        /set top_k", "> /set t")
    terminal.type("e\t")
    terminal.wait_for_last("> /set temperature")
    terminal.type("0.5\r")
    terminal.wait_for("temperature 0.5, top_p")
    terminal.wait_for_last(">")
    terminal.type("\t")
    terminal.wait_for_last("> /")
    terminal.type("\t")
    terminal.wait_for("/retry")
    terminal.wait_for_last("> /")
    assert all(command in "\n".join(terminal.lines()[-6:]) for command in COMMANDS)


def test_a_terminal_without_escape_sequences_gets_none(endless, tmp_path, in_terminal):
    """It has the terminal's own editing of a line: 0x7f erases a character."""
    terminal = in_terminal("--path", endless, "--temperature", "0", "--max-new-tokens", "20000", TERM="dumb")
    seen = terminal.wait_for("> ")
    terminal.type("helx\x7flo\\\n")
    seen += terminal.wait_for(". ")
    terminal.type("there\n")
    seen += terminal.wait_for("ababab")
    terminal.type("\x03")
    seen += terminal.wait_for("stopped; the conversation keeps this part") + terminal.wait_for("> ")
    terminal.type(f"/save {tmp_path}/talk.jsonl\n")
    seen += terminal.wait_for("2 messages appended") + terminal.wait_for("> ")
    assert json.loads((tmp_path / "talk.jsonl").read_text())["messages"][0]["content"] == "hello\nthere"
    time.sleep(0.3)  # CPython prints the prompt a moment before it listens to signals
    terminal.type("\x03")
    seen += terminal.wait_for("Ctrl-D or /exit leaves") + terminal.wait_for("> ")
    terminal.type("\x04")
    assert terminal.exit_code() == 0 and "\x1b" not in seen
