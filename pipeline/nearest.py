"""Suggestions for misspelt names."""

import difflib
from collections.abc import Iterable


def nearest(name: str, valid: Iterable[str]) -> str:
    """`; did you mean X?` for the valid name that is nearest to `name`, or nothing."""
    close = difflib.get_close_matches(name, list(valid), n=1, cutoff=0.6)
    return f"; did you mean {close[0]}?" if close else ""
