"""The terminal of a command: width, wrapped lines, output after its reader is gone, and Ctrl-C."""

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
HELP, HELP_ALL = ("-h", "--help"), ("--help-all", "--help_all")  # arguments that request help
GONE = (errno.EPIPE, errno.EIO)  # a pipe without a reader, a terminal that was closed
MOST_TEXT = 1500  # maximum number of characters that a page shows of a text from a model or a file
PLAIN = "\n\t"  # control characters that `visible` does not escape


class LastingFile(io.FileIO):
    """A file descriptor of the console. If a write fails, it and its copies in children are redirected to /dev/null.

    is_needed: raise EnvironmentFault if a write fails for another reason than a closed reader.
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
    """A formatter of log lines that escapes control characters: text of models or data cannot control a terminal."""

    def format(self, record: logging.LogRecord) -> str:
        """Return the line of a record."""
        return printable(super().format(record))


def outlive_console(*, needs_output: bool = False) -> None:
    """Make printing succeed after the reader of a pipe is gone; streams that a test has replaced are unchanged.

    Args:
        needs_output: raise EnvironmentFault if standard output is closed now, or if a later write fails.
    """
    if logging.lastResort:  # prints warnings if the command sets up no log
        logging.lastResort.setFormatter(PrintableFormatter())
    for number, name in enumerate(("stdout", "stderr"), start=1):
        stream = getattr(sys, name)
        if stream is None:  # closed: the next open file would get its number, and children's output
            if needs_output and number == 1:
                raise EnvironmentFault("standard output is closed; redirect it to /dev/null if it is not needed")
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
    """Return the columns of stderr's terminal: COLUMNS, else the terminal's own value; WIDTH if stderr is no terminal.

    shutil and rich read descriptors 1 and 2, which belong to libraries while a stage runs.
    """
    if (columns := os.environ.get("COLUMNS", "")).isdecimal() and int(columns):
        return int(columns)
    with suppress(OSError, ValueError):
        return os.get_terminal_size(sys.stderr.fileno()).columns or WIDTH
    return WIDTH


def fitted(text: str) -> str:
    """Return text wrapped to the width of stderr's terminal; unchanged if stderr is no terminal.

    Parts of `[sft] 4/8  training loss 6.66  ...` that two spaces separate stay whole.
    """
    if not sys.stderr.isatty():
        return text
    width, lines = terminal_width(), list[str]()
    for line in text.split("\n"):
        whole = re.sub(r"(?<=\S) (?=\S)", "\u00a0", line) if line.startswith("[") else line
        lines.append(wrapped(whole, width).replace("\u00a0", " ") if len(line) > width else line)
    return "\n".join(lines)


def quit_on_interrupt() -> None:
    """End this process without a traceback on Ctrl-C, until `raise_on_interrupt`: imports need no cleanup."""
    if signal.getsignal(signal.SIGINT) is signal.default_int_handler:
        signal.signal(signal.SIGINT, _quit)


def raise_on_interrupt() -> None:
    """Make Ctrl-C a KeyboardInterrupt again, for a command that catches it."""
    if signal.getsignal(signal.SIGINT) is _quit:
        signal.signal(signal.SIGINT, signal.default_int_handler)


def _quit(number: int, frame: FrameType | None) -> None:
    os._exit(EXIT_INTERRUPTED)


def wrapped(line: str, width: int = WIDTH) -> str:
    """Wrap a line to at most `width` columns; the text after its label is indented to the column where it starts."""
    label = re.match(r" *\S+ {2,}", line)
    indent = " " * (label.end() if label else len(line) - len(line.lstrip()) + 2)
    return textwrap.fill(line, width, subsequent_indent=indent, break_long_words=False, break_on_hyphens=False)


def with_hyphens(argv: Iterable[str]) -> list[str]:
    """Return the arguments of a command line with `-` in the names of its flags; values are unchanged."""
    return [re.sub("^--[^=]*", lambda match: match[0].replace("_", "-"), word) for word in argv]


def shell_lines(argv: Iterable[str]) -> str:
    """Return a command line wrapped to the terminal's width, with backslashes, so that a shell reads one command.

    A flag and its first value stay on one line.
    """
    pieces, lines = list[str](), [""]
    for word in map(shlex.quote, with_hyphens(argv)):
        is_value = bool(pieces) and pieces[-1].startswith("--") and " " not in pieces[-1] and not word.startswith("--")
        pieces[-1:] = [f"{pieces[-1]} {word}"] if is_value else [*pieces[-1:], word]
    for piece in pieces:
        if lines[-1].strip() and len(lines[-1]) + len(piece) > terminal_width() - len("$  \\"):
            lines.append("   ")
        lines[-1] += f" {piece}"
    return " \\\n".join(lines).removeprefix(" ")


def visible(text: Any, most: int = MOST_TEXT) -> str:
    """Return a text of a model or a file, truncated, with control characters and direction marks escaped.

    most: most characters.
    """
    text = str(text)
    shown = "".join(
        char if char.isprintable() or char in PLAIN or char.isspace() and ord(char) > 0xA0 else ascii(char)[1:-1]
        for char in text[:most]
    )
    return shown + (f" \N{HORIZONTAL ELLIPSIS} ({len(text) - most:,} more characters)" if len(text) > most else "")


def code_span(text: str) -> str:
    """Return a text as code in one line of Markdown, also in a table's cell, in which nothing is markup."""
    return "`" + text.replace("\n", " ").replace("`", "'").replace("|", "\\|") + "`"


def fence(text: str, least: int = 3) -> str:
    """Return backticks that fence `text` in Markdown: more than any run of them in it, and at least `least`."""
    return "`" * max(least, 1 + max(map(len, re.findall("`+", text)), default=0))


def fenced(text: str) -> str:
    """Return a text as a Markdown code block, in which nothing is markup."""
    return f"{fence(text)}text\n{text}\n{fence(text)}"


def valid_unicode(text: str) -> str:
    """Replace each lone surrogate in `text` by '?': keyboards and JSON files produce them, tokenizers refuse them."""
    return text.encode("utf-8", "replace").decode("utf-8")
