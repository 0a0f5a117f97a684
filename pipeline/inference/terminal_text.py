"""Text from models, files and keyboards made safe: to show on a terminal, which it cannot steer, and to encode."""

import unicodedata

KEPT = frozenset("\n\t")
# Format characters that turn the direction of the text after them: they can make a line read as another one.
DIRECTION = frozenset("\u200e\u200f\u202a\u202b\u202c\u202d\u202e\u2066\u2067\u2068\u2069")


def printable(text: str) -> str:
    """`text` with every control character but newline and tab written as \\xNN or \\uNNNN.

    Every other character comes through as it is, so pieces of a stream can be treated one by one.
    """
    return "".join(_escaped(character) if _steers(character) else character for character in text)


def _steers(character: str) -> bool:
    if character in KEPT:
        return False
    # Cc: C0, DEL and C1 controls; Cs: lone surrogates, which no UTF-8 terminal can be sent.
    return unicodedata.category(character) in ("Cc", "Cs") or character in DIRECTION


def _escaped(character: str) -> str:
    code = ord(character)
    return f"\\x{code:02x}" if code < 0x100 else f"\\u{code:04x}"


def valid_unicode(text: str) -> str:
    """`text` with '?' for every lone surrogate: keyboards and JSON files can bring them, tokenizers refuse them."""
    return text.encode("utf-8", "replace").decode("utf-8")
