"""Make text from models, files and keyboards safe to print on a terminal and to encode as UTF-8."""

import unicodedata

KEPT = frozenset("\n\t")
# Characters that change the direction of the text after them: they can make a line read as another one.
DIRECTION = frozenset("\u200e\u200f\u202a\u202b\u202c\u202d\u202e\u2066\u2067\u2068\u2069")


def printable(text: str) -> str:
    """Escape every control character but newline and tab in `text` as \\xNN or \\uNNNN.

    Other characters are unchanged, so pieces of a stream can be escaped one by one.
    """
    return "".join(_escaped(character) if _is_control(character) else character for character in text)


def _is_control(character: str) -> bool:
    if character in KEPT:
        return False
    # Cc: C0, DEL and C1 controls; Cs: lone surrogates, which UTF-8 cannot encode.
    return unicodedata.category(character) in ("Cc", "Cs") or character in DIRECTION


def _escaped(character: str) -> str:
    code = ord(character)
    return f"\\x{code:02x}" if code < 0x100 else f"\\u{code:04x}"


def valid_unicode(text: str) -> str:
    """Replace every lone surrogate in `text` by '?': keyboards and JSON files may have them, tokenizers refuse them."""
    return text.encode("utf-8", "replace").decode("utf-8")
