"""Rows of Markdown tables, and names of flags, as the pages that are made from the code have them."""

from pipeline.errors import dashed


def row(*cells: str) -> str:
    """Return a row of a table."""
    return f"| {' | '.join(cells)} |"


def escaped(text: str) -> str:
    """Return plain text without what would end its cell; code spans need no such escapes."""
    return text.replace("|", r"\|")


def flag_name(name: str) -> str:
    """Return a flag as it is typed in a shell, as code."""
    return f"`{dashed(name)}`"
