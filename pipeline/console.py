"""Standard output and error that may lose their reader without harm. For runs that outlive the terminal or pipe."""

import errno
import io
import os
import sys
from typing import Any

GONE = (errno.EPIPE, errno.EIO)  # a pipe without a reader, a terminal that was closed


class LastingFile(io.FileIO):
    """A file descriptor of the console. When its reader has gone, it and its copies in children lead to /dev/null."""

    def write(self, data: Any) -> int:
        """Write bytes; bytes that nobody can read count as written."""
        try:
            return super().write(data)
        except OSError as error:
            if error.errno not in GONE:
                raise
            os.dup2(os.open(os.devnull, os.O_WRONLY), self.fileno())
            return len(memoryview(data))


def outlive_console() -> None:
    """Make printing never fail because nobody reads; streams that a test has replaced are left as they are."""
    for name in ("stdout", "stderr"):
        stream = getattr(sys, name)
        if stream is None or stream is not getattr(sys, f"__{name}__"):
            continue
        stream.flush()
        file = io.BufferedWriter(LastingFile(stream.fileno(), "w", closefd=False))
        lasting = io.TextIOWrapper(
            file, encoding=stream.encoding, errors=stream.errors, line_buffering=name == "stderr" or stream.isatty()
        )
        setattr(sys, name, lasting)
