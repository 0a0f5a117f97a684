"""Recognise tokens and passwords and keep them out of settings and messages.

Settings are written into config.json, env.json, model cards and logs, so a secret is no setting: it is refused as one.
"""

import json
import re
from collections.abc import Mapping
from contextlib import suppress
from typing import Any

MASK = "***"
SECRET = re.compile(
    r"""\bhf_[A-Za-z0-9]{16,}                                       # Hugging Face
    |\b(?:sk|pk|rk)-[A-Za-z0-9_-]{16,}                              # OpenAI and others
    |\bgh[opsur]_[A-Za-z0-9]{16,}|\bgithub_pat_\w{16,}              # GitHub
    |\bAKIA[0-9A-Z]{16}\b                                           # AWS
    |\bxox[abprs]-[A-Za-z0-9-]{10,}                                 # Slack
    |\beyJ[\w-]{10,}\.[\w-]{10,}\.[\w-]+                            # JSON web tokens
    |(?<=://)[^/\s:@]*:[^/\s@]+(?=@)                                # user:password in a URL
    |(?<=[?&])(?:access_)?(?:token|key|api_?key|secret|password|sig|signature)=[^&\s]+
    """,
    re.VERBOSE | re.IGNORECASE,
)


SECRET_NAME = re.compile(r"(?:^|[_.])(?:api_?key|key|token|password|secret)$", re.IGNORECASE)
# Variables that hold a secret or lead to one, as AWS_SECRET_ACCESS_KEY, PGPASSWORD, HF_TOKEN_PATH and SSH_AUTH_SOCK.
SECRET_VARIABLE = re.compile(
    r"secret|passw(?:or)?d|passphrase|pass(?:file)?(?![a-z])|_pwd(?![a-z])|credential|api_?key|authorization|bearer|cookie"
    r"|dsn(?![a-z])|connection_?string|webhook|netrc|(?<![a-z])(?:key|token|auth|pat|jwt)s?(?![a-z])",
    re.IGNORECASE,
)
# Arguments of functions that have a word of a secret in their name and are none: answer_key, stop_token, max_tokens.
PLAIN_ARGUMENT = re.compile(
    r"tokens|(?<!api_)(?:key|token)_(?!.*(?:secret|pass))\w+$"
    r"|(?:^|_)(?:answer|stop|start|end|eos|bos|pad|mask|think|sort|cache)_(?:key|token)$",
    re.IGNORECASE,
)


def shown(name: str, value: object) -> str:
    """Return a setting as Python writes it, or *** if its name says that it is a secret, or it looks like one."""
    return MASK if SECRET_NAME.search(name) else redacted(repr(value))


def masked(value: Any, *, is_secret: bool = False) -> Any:
    """Return a setting as it may be written: *** for what the name of a secret stands for, in a mapping or its JSON."""
    if isinstance(value, Mapping):
        words = {name: re.sub("(?<=[a-z])(?=[A-Z])", "_", str(name)) for name in value}
        named = {
            name for name, word in words.items() if SECRET_VARIABLE.search(word) and not PLAIN_ARGUMENT.search(word)
        }
        return {name: masked(one, is_secret=is_secret or name in named) for name, one in value.items()}
    if isinstance(value, list):
        return [masked(one, is_secret=is_secret) for one in value]
    if is_secret:
        return MASK
    head, brace, rest = value.partition("{") if isinstance(value, str) else ("", "", "")
    with suppress(ValueError, RecursionError):
        after = masked(before := json.loads(brace + rest))
        return value if after == before else head + json.dumps(after)
    return value


def shown_value(value: Any) -> str:
    """Return a flag's value as an error or a note shows it: the words of a list."""
    return " ".join(map(str, masked(value))) or "none" if isinstance(value, list) else str(value)


def redacted(text: str) -> str:
    """Replace whatever looks like a token or a password by ***."""
    return SECRET.sub(MASK, text)


def without_secrets(environment: Mapping[str, str]) -> dict[str, str]:
    """Return the variables whose names and values look like no secret."""
    return {
        name: value
        for name, value in environment.items()
        if not SECRET_VARIABLE.search(name) and not SECRET.search(value)
    }


def repeated(flag: str, before: Any) -> str:
    """Return the note on a flag that is given again: the last value counts."""
    return f"{flag}: given more than once; the last replaces {redacted(shown_value(before))}"
