"""Exit codes of a run, the errors that carry them, and functions that print lines to a terminal."""

import difflib
import os
import re
import sys
from collections.abc import Callable, Iterable
from typing import TextIO

EXIT_DONE = 0
EXIT_FAULT = 1
EXIT_INPUT = 2
EXIT_ENVIRONMENT = 3
EXIT_DIVERGED = 4
EXIT_NO_CHECKPOINT = 5
EXIT_STOPPED = 75
EXIT_INTERRUPTED = 130  # the shell's convention for SIGINT
# Lone surrogates, which UTF-8 cannot encode, and characters that reverse the direction of a line.
UNSAFE = [*range(0xD800, 0xE000), 0x200E, 0x200F, *range(0x202A, 0x202F), *range(0x2066, 0x206A)]
CONTROL = [*range(0x20), *range(0x7F, 0xA0)]
ESCAPES = {code: f"\\x{code:02x}" for code in CONTROL if chr(code) not in "\n\t"}
ESCAPES |= {code: f"\\u{code:04x}" for code in UNSAFE}


class RunError(Exception):
    """An expected end of a run: printed as one line without a traceback, then the process exits with `code`."""

    code = EXIT_FAULT


class InputError(RunError):
    """Bad data, flags or files. The message names the file, row or flag, its value, and what would be right."""

    code = EXIT_INPUT


class ContradictionError(InputError):
    """Values of a stage that are valid one by one, but contradict each other."""


class EnvironmentFault(RunError):
    """A machine that lacks what a run needs: port, GPUs, disk space, host, network, library version."""

    code = EXIT_ENVIRONMENT


class DivergedError(RunError):
    """Non-finite losses or gradients too many times in a row."""

    code = EXIT_DIVERGED


class CheckpointError(RunError):
    """A missing or unusable checkpoint where one is needed."""

    code = EXIT_NO_CHECKPOINT


class StoppedRun(RunError):
    """A stop on request with everything saved; the same command resumes."""

    code = EXIT_STOPPED


class Interrupted(Exception):
    """The run is to stop; a half-finished rollout or the gradients of a step are dropped.

    error: the error that the run ends with once it is saved; None: a stop was requested.
    """

    def __init__(self, error: RunError | None = None) -> None:
        super().__init__()
        self.error = error


def raise_lines(lines: Iterable[str], kind: type[RunError] = InputError) -> None:
    """Raise an error of this kind with these lines, if there are any."""
    if text := "\n".join(lines):
        raise kind(text)


def takes_escapes(stream: TextIO) -> bool:
    """Return whether a stream is a terminal that understands escape sequences."""
    return stream.isatty() and os.environ.get("TERM") != "dumb"


def is_coloured(stream: TextIO) -> bool:
    """Return whether text on a stream is coloured: NO_COLOR: never; FORCE_COLOR: always; else on a terminal."""
    return not os.environ.get("NO_COLOR") and (bool(os.environ.get("FORCE_COLOR")) or takes_escapes(stream))


def painted(line: str) -> str:
    """Return a line for stderr, its first word in red if that is `error:` and stderr has colours."""
    return re.sub("^error:", "\x1b[31merror:\x1b[0m", line) if is_coloured(sys.stderr) else line


def printable(text: str) -> str:
    """Escape every control character but newline and tab in `text` as \\xNN or \\uNNNN.

    Other characters are unchanged, so pieces of a stream can be escaped one by one.
    """
    return text.translate(ESCAPES)


def say(*lines: str) -> None:
    """Print lines to stderr; on a terminal they replace a progress bar that a killed rank may have left."""
    # Return to the start of the line, erase it, show the cursor.
    left = "\r\x1b[K\x1b[?25h" if takes_escapes(sys.stderr) else ""
    text = "\n".join(painted(printable(line)) for line in lines)
    print(left + text, end="\n" if lines else "", file=sys.stderr, flush=True)


def show(*lines: str) -> None:
    """Print lines to standard output; as in `say`, control characters of models, files and names are escaped."""
    print(*map(printable, lines), sep="\n", end="\n" if lines else "", flush=True)


def print_error(error: RunError) -> int:
    """Print an error to stderr, `error: ` before each of its lines. Returns its exit code."""
    say(*(f"error: {line}" for line in str(error).splitlines()))
    return error.code


def dashed(name: str) -> str:
    """Return a flag as it is typed in a shell: `--kl-coef` for kl_coef."""
    return f"--{name.replace('_', '-')}"


def nearest(name: str, valid: Iterable[str], spell: Callable[[str], str] = str) -> str:
    """Return `; did you mean X?` for the valid name that is nearest to `name`, or an empty string.

    Names that contain all parts of `name`, if it has several, rank before all others. At the cutoff of two thirds, at
    least half of the longer name's letters match. `spell`: how X is written.
    """
    names, words = list(valid), set(re.findall(r"[a-z0-9]+", name))
    with_all = [right for right in names if len(words) > 1 and words <= set(re.findall(r"[a-z0-9]+", right))]
    close = difflib.get_close_matches(name, with_all or names, n=1, cutoff=0.0 if with_all else 2 / 3)
    return f"; did you mean {spell(close[0])}?" if close else ""


def counted(number: int, noun: str) -> str:
    """Return `1 rank`, `2 ranks`, `2 batches`."""
    return f"{number} {noun}" if number == 1 else f"{number} {noun}{'es' if noun.endswith(('tch', 'ss')) else 's'}"
