"""The last match of a regular expression; as a program, the search for one, which the kernel's alarm ends.

A pattern can take for ever on a text: `(a+)+b` on a long run of `a`. Python's engine lets no exception in, so that only
the end of its process ends it. It starts in 0.03 s of processor time: it imports nothing of this project.
"""

import json
import re
import signal
import sys


def last_match(pattern: re.Pattern[str], text: str) -> str | None:
    """Return the last match of a pattern, of its first group where it has one; None where there is none."""
    matches = list(pattern.finditer(text))
    return matches[-1][1 if pattern.groups else 0] if matches else None


def main() -> None:
    """Read a limit in seconds, a pattern and a text as JSON, and write the last match, or null."""
    seconds, pattern, text = json.load(sys.stdin)
    signal.signal(signal.SIGALRM, signal.SIG_DFL)
    signal.setitimer(signal.ITIMER_REAL, seconds)
    json.dump(last_match(re.compile(pattern, re.DOTALL), text), sys.stdout)


if __name__ == "__main__":
    main()
