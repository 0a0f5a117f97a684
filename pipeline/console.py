"""The terminal of a command: its width, lines that fit, output that outlives its reader, and Ctrl-C."""

import errno
import io
import logging
import os
import re
import shlex
import signal
import sys
import textwrap
from collections.abc import Iterable
from contextlib import suppress
from types import FrameType
from typing import Any

from pipeline.errors import EXIT_INTERRUPTED, EnvironmentFault, printable

WIDTH = 80  # columns of a page
HELP, HELP_ALL = ("-h", "--help"), ("--help-all", "--help_all")  # words that ask for help
GONE = (errno.EPIPE, errno.EIO)  # a pipe without a reader, a terminal that was closed


class LastingFile(io.FileIO):
    """A file descriptor of the console. Once it cannot be written, it and its copies in children lead to /dev/null.

    is_needed: True raises EnvironmentFault where it cannot be written for another reason than that nobody reads.
    """

    is_needed = False

    def write(self, data: Any) -> int:
        """Write bytes; bytes that nobody can read count as written."""
        try:
            return super().write(data)
        except OSError as error:
            os.dup2(os.open(os.devnull, os.O_WRONLY), self.fileno())
            if self.is_needed and error.errno not in GONE:
                raise EnvironmentFault(f"standard output cannot be written: {error.strerror}") from None
            return len(memoryview(data))


class PrintableFormatter(logging.Formatter):
    """Lines in which no text of models or data can steer a terminal."""

    def format(self, record: logging.LogRecord) -> str:
        """Return the line of a record."""
        return printable(super().format(record))


def outlive_console(*, needs_output: bool = False) -> None:
    """Make printing never fail because nobody reads; streams that a test has replaced are left as they are.

    Args:
        needs_output: raise EnvironmentFault where standard output is closed, and later where it cannot be written.
    """
    if logging.lastResort:  # what prints the warnings of a command that sets up no log
        logging.lastResort.setFormatter(PrintableFormatter())
    for number, name in enumerate(("stdout", "stderr"), start=1):
        stream = getattr(sys, name)
        if stream is None:  # closed: the next file that is opened would get its number, and what children print
            if needs_output and number == 1:
                raise EnvironmentFault("standard output is closed; lead it to /dev/null where nobody needs it")
            os.dup2(os.open(os.devnull, os.O_RDWR), number)
            stream = os.fdopen(number, "w", encoding="utf-8", closefd=False)
        elif stream is not getattr(sys, f"__{name}__"):
            continue
        stream.flush()
        setattr(sys, name, lasting_stream(stream.fileno(), stream, by_line=name == "stderr" or stream.isatty()))
    if needs_output and isinstance(raw := getattr(getattr(sys.stdout, "buffer", None), "raw", None), LastingFile):
        raw.is_needed = True


def lasting_stream(descriptor: int, like: Any, *, by_line: bool = True) -> io.TextIOWrapper:
    """Return a text stream on a file descriptor, a LastingFile, with the encoding of the stream `like`."""
    file = io.BufferedWriter(LastingFile(descriptor, "w", closefd=False))
    return io.TextIOWrapper(file, encoding=like.encoding, errors=like.errors, line_buffering=by_line)


def terminal_width() -> int:
    """Return the columns of stderr's terminal: COLUMNS, else what it says itself; WIDTH where it is none.

    Neither shutil nor rich can say it: they ask descriptors 1 and 2, which belong to libraries while a stage runs.
    """
    if (columns := os.environ.get("COLUMNS", "")).isdecimal() and int(columns):
        return int(columns)
    with suppress(OSError, ValueError):
        return os.get_terminal_size(sys.stderr.fileno()).columns or WIDTH
    return WIDTH


def fitted(text: str) -> str:
    """Return text in lines that are no wider than the terminal of stderr; as it is where that is none.

    Of `[sft] 4/8  training loss 6.66  ...`, parts that two spaces divide stay whole.
    """
    if not sys.stderr.isatty():
        return text
    width, lines = terminal_width(), list[str]()
    for line in text.split("\n"):
        whole = re.sub(r"(?<=\S) (?=\S)", "\u00a0", line) if line.startswith("[") else line
        lines.append(wrapped(whole, width).replace("\u00a0", " ") if len(line) > width else line)
    return "\n".join(lines)


def quit_on_interrupt() -> None:
    """End this process without a traceback on Ctrl-C, until `raise_on_interrupt`: imports have nothing to clean up."""
    if signal.getsignal(signal.SIGINT) is signal.default_int_handler:
        signal.signal(signal.SIGINT, _quit)


def raise_on_interrupt() -> None:
    """Make Ctrl-C a KeyboardInterrupt again, for a command that catches it."""
    if signal.getsignal(signal.SIGINT) is _quit:
        signal.signal(signal.SIGINT, signal.default_int_handler)


def _quit(number: int, frame: FrameType | None) -> None:
    os._exit(EXIT_INTERRUPTED)


def wrapped(line: str, width: int = WIDTH) -> str:
    """Return a line in lines of at most `width` columns, what follows its label below what stands behind it."""
    label = re.match(r" *\S+ {2,}", line)
    indent = " " * (label.end() if label else len(line) - len(line.lstrip()) + 2)
    return textwrap.fill(line, width, subsequent_indent=indent, break_long_words=False, break_on_hyphens=False)


def with_hyphens(words: Iterable[str]) -> list[str]:
    """Return the words of a command line with `-` in the names of its flags; values are unchanged."""
    return [re.sub("^--[^=]*", lambda match: match[0].replace("_", "-"), word) for word in words]


def shell_lines(words: Iterable[str]) -> str:
    """Return a command line in lines that a shell reads as one, as wide as the terminal where words allow.

    A flag and its first value are in one line.
    """
    pieces, lines = list[str](), [""]
    for word in map(shlex.quote, with_hyphens(words)):
        is_value = bool(pieces) and pieces[-1].startswith("--") and " " not in pieces[-1] and not word.startswith("--")
        pieces[-1:] = [f"{pieces[-1]} {word}"] if is_value else [*pieces[-1:], word]
    for piece in pieces:
        if lines[-1].strip() and len(lines[-1]) + len(piece) > terminal_width() - len("$  \\"):
            lines.append("   ")
        lines[-1] += f" {piece}"
    return " \\\n".join(lines).removeprefix(" ")


def code_span(text: str) -> str:
    """Return a text as code in one line of Markdown, also in a table's cell, in which nothing is markup."""
    return "`" + text.replace("\n", " ").replace("`", "'").replace("|", "\\|") + "`"


def fence(text: str, least: int = 3) -> str:
    """Return backticks that begin and end `text` in Markdown: more than stand together in it, at `least` so many."""
    return "`" * max(least, 1 + max(map(len, re.findall("`+", text)), default=0))


def valid_unicode(text: str) -> str:
    """Replace every lone surrogate in `text` by '?': keyboards and JSON files may have them, tokenizers refuse them."""
    return text.encode("utf-8", "replace").decode("utf-8")
