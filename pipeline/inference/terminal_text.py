"""Make text from models, files and keyboards safe to print on a terminal and to encode as UTF-8."""

# Lone surrogates, which UTF-8 cannot encode, and characters that make a line read in another direction.
UNSAFE = [*range(0xD800, 0xE000), 0x200E, 0x200F, *range(0x202A, 0x202F), *range(0x2066, 0x206A)]
CONTROL = [*range(0x20), *range(0x7F, 0xA0)]
ESCAPES = {code: f"\\x{code:02x}" for code in CONTROL if chr(code) not in "\n\t"}
ESCAPES |= {code: f"\\u{code:04x}" for code in UNSAFE}


def printable(text: str) -> str:
    """Escape every control character but newline and tab in `text` as \\xNN or \\uNNNN.

    Other characters are unchanged, so pieces of a stream can be escaped one by one.
    """
    return text.translate(ESCAPES)


def valid_unicode(text: str) -> str:
    """Replace every lone surrogate in `text` by '?': keyboards and JSON files may have them, tokenizers refuse them."""
    return text.encode("utf-8", "replace").decode("utf-8")
