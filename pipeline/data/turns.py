"""Turns of a conversation, parsed from lists of messages and transcripts, and their texts as ids, with none forged."""

import hashlib
import json
import re
import unicodedata
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from functools import lru_cache
from typing import TYPE_CHECKING, Any, NamedTuple

from pipeline.data.readers import MAX_ROW_CHARS
from pipeline.errors import InputError

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

ROLES = {
    "system": "system",
    **dict.fromkeys(("user", "human", "prompter"), "user"),
    **dict.fromkeys(("assistant", "gpt", "chatgpt", "bot", "model"), "assistant"),
}

# The end of a text from its last word on, if that is near; ASCII letters are spelt by themselves in every vocabulary.
LAST_WORD = re.compile(r".*[A-Za-z]( [A-Za-z].*)", re.DOTALL)
LAST_WORD_CHARS = 200
# Types of a part of a turn's content that hold text, in the exports of OpenAI's chat and responses interfaces.
TEXT_PARTS = ("text", "input_text", "output_text")


class BadRowError(ValueError):
    """A row that cannot be used; the message is the kind that it is counted as, `detail` what only this row shows."""

    def __init__(self, kind: str, detail: str = "") -> None:
        super().__init__(kind)
        self.detail = detail


@dataclass(frozen=True, slots=True)
class Message:
    """A turn. role: 'system', 'user' or 'assistant'; content: its text without surrounding white space.

    A conversation with tools begins with a turn of the role 'tools', whose content is their list as JSON.
    """

    role: str
    content: str


Turns = tuple[Message, ...]


class SplitText(NamedTuple):
    """An encoded text and a split point: what follows `start` characters and `num_ids` ids does not depend on them."""

    ids: list[int]
    start: int
    num_ids: int


class SpecialTokens(NamedTuple):
    """Special tokens of a tokenizer: their texts, longest first, the text of each id, and the ids that end a turn.

    encode: encodes a text. encode_split: see `split_text`. render_prompt, split_prompt: cache the last
    prompt, which the two sides of a pair share.
    """

    texts: tuple[str, ...]
    by_id: Mapping[int, str]
    ends: frozenset[int]
    encode: Callable[[str], list[int]]
    render_prompt: Callable[[tuple[Message, ...]], str]
    encode_split: Callable[[str], SplitText]
    split_prompt: Callable[[str], SplitText]

    @property
    def end_texts(self) -> list[str]:
        """The texts of the tokens that end a turn."""
        return [self.by_id[token] for token in self.ends]


def turns_to_json(turns: Sequence[Message]) -> str:
    """Return the turns as a JSON list of {"role", "content"}."""
    return json.dumps([asdict(turn) for turn in turns], ensure_ascii=False)


def turns_of_json(text: str) -> list[Message]:
    """Return the turns that `turns_to_json` has written."""
    return [Message(**turn) for turn in json.loads(text)]


def prompt_hash(turns: Sequence[Message]) -> int:
    """Return a 63-bit hash of the turns, blind to white space and Unicode composition; the same on every machine."""
    normal = [[turn.role, " ".join(unicodedata.normalize("NFC", turn.content).split())] for turn in turns]
    content = json.dumps(normal, ensure_ascii=False)
    return int.from_bytes(hashlib.blake2b(content.encode(), digest_size=8).digest(), "big") >> 1


def is_transcript(text: str) -> bool:
    r"""Return True for text like '\n\nHuman: ...\n\nAssistant: ...', which must not be wrapped in a template again."""
    if text.startswith("\n\nHuman:"):
        return True
    return text.lstrip().startswith("Human:") and "\n\nAssistant:" in text


def parse_transcript(text: str) -> Turns:
    """Parse a transcript; an empty assistant turn at its end (the place to answer) is left out."""
    _, *parts = re.split(r"\n\n(Human|Assistant):", "\n\n" + text.strip())
    turns = [
        Message(ROLES[name.lower()], content.strip()) for name, content in zip(parts[::2], parts[1::2], strict=True)
    ]
    if turns and turns[-1] == Message("assistant", ""):
        turns.pop()
    return tuple(turns)


def parse_turns(value: Any, column: str) -> Turns:
    """Parse turns from a list of {"role", "content"} or {"from", "value"} (also mixed), or one such object.

    Content is text, or a list of parts of which each is text. Raises BadRowError for another type, an unknown role or
    other content.
    """
    items = [value] if isinstance(value, Mapping) else value
    if not isinstance(items, list) or not items or not all(isinstance(item, Mapping) for item in items):
        raise BadRowError(f"{column} is no list of messages")
    turns = []
    for item in items:
        role, content = item.get("role", item.get("from")), item.get("content", item.get("value"))
        if item.get("tool_calls"):
            raise BadRowError(f"{column} has a turn that calls tools; only text is read")
        text = _joined(content, column) if isinstance(content, list) and content else content
        if not isinstance(text, str):
            raise BadRowError(f"{column} has a turn without text")
        if not isinstance(role, str) or role.lower() not in ROLES:
            raise BadRowError(f"{column} has a turn whose role is not system, user or assistant", repr(role)[:40])
        turns.append(Message(ROLES[role.lower()], text.strip()))
    return tuple(turns)


def parse_tools(value: Any) -> Turns:
    """Parse a row's tools, a list of JSON schemas or the JSON of one, to the turn in front of a conversation, if any.

    Nulls are left out: tables fill them in where schemas differ. Raises BadRowError for another type.
    """
    try:
        tools = _without_nulls(json.loads(value or "[]") if isinstance(value, str) else value or [])
        text = json.dumps(tools, ensure_ascii=False)
    except (ValueError, TypeError, RecursionError):  # no JSON, what JSON does not have, or too deep
        tools, text = None, ""
    if not isinstance(tools, list) or not all(isinstance(tool, Mapping) for tool in tools):
        raise BadRowError("tools is no list of JSON schemas")
    return (Message("tools", text),) if tools else ()


def _without_nulls(value: Any) -> Any:
    if isinstance(value, Mapping):
        return {name: _without_nulls(item) for name, item in value.items() if item is not None}
    return [_without_nulls(item) for item in value] if isinstance(value, list) else value


def split_tools(messages: Sequence[Message]) -> tuple[list[Any] | None, list[dict[str, Any]]]:
    """Return the tools of a conversation and its other turns, as templates take both."""
    num_tools = int(bool(messages) and messages[0].role == "tools")
    turns = [{"role": turn.role, "content": turn.content} for turn in messages[num_tools:]]
    return json.loads(messages[0].content) if num_tools else None, turns


def _joined(parts: list[Any], column: str) -> str:
    """Join the texts of content in parts, as chat templates do: without a separator."""
    for part in parts:
        kind = part.get("type") if isinstance(part, Mapping) else type(part).__name__
        if kind not in TEXT_PARTS or not isinstance(part.get("text"), str):
            raise BadRowError(f"{column} has a part {str(kind)[:40]!r}; only text is read")
    return "".join(part["text"] for part in parts)


def check_turns(turns: Turns) -> None:
    """Raise BadRowError unless non-empty user and assistant turns alternate after one of tools and one system turn."""
    spoken = turns[1:] if turns and turns[0].role == "tools" else turns
    spoken = spoken[1:] if spoken and spoken[0].role == "system" else spoken
    if not spoken:
        raise BadRowError("empty prompt")
    if any(not turn.content for turn in spoken):
        raise BadRowError("empty prompt" if len(spoken) == 1 else "empty turn")
    for index, turn in enumerate(spoken):
        if turn.role != ("user", "assistant")[index % 2]:
            raise BadRowError("turns do not alternate user, assistant")


def check_texts(texts: Iterable[str | None]) -> None:
    """Raise BadRowError for texts that are too long, no Unicode (JSON can spell half a surrogate pair), or hold NUL."""
    whole = "".join(text for text in texts if text is not None)
    if len(whole) > MAX_ROW_CHARS:
        raise BadRowError(f"text longer than {MAX_ROW_CHARS:,} characters")
    if "\0" in whole:
        raise BadRowError("text holds a NUL character")
    try:
        whole.encode()
    except UnicodeEncodeError as error:
        raise BadRowError("text is no valid Unicode") from error


def special_texts(tokenizer: "PreTrainedTokenizerBase") -> tuple[str, ...]:
    """Return the texts that the tokenizer encodes as special tokens, longest first."""
    added = [str(token) for token in tokenizer.added_tokens_decoder.values() if token.special]
    return tuple(sorted({*tokenizer.all_special_tokens, *added} - {""}, key=lambda text: (-len(text), text)))


def spells_special(text: str, special: tuple[str, ...]) -> bool:
    """Return True if the text holds one of these, which may be hundreds: most texts lack even their first letters."""
    return any(first in text for first in _first_letters(special)) and any(token in text for token in special)


@lru_cache(maxsize=16)
def _first_letters(texts: tuple[str, ...]) -> frozenset[str]:
    return frozenset(text[0] for text in texts)


def broken_up(text: str, special: Sequence[str]) -> str:
    """Put a space inside whatever spells a special token in `text`: '</s>' -> '< /s>'.

    Unchanged it would be encoded as the real token: a forged end of turn, from a file or from a chat's user.
    """
    for token in special if spells_special(text, tuple(special)) else ():
        text = text.replace(token, f"{token[0]} {token[1:]}")
    return text


def plain_turns(messages: Sequence[Message], special: Sequence[str]) -> list[Message]:
    """Return the turns with every text that spells a special token broken up."""
    return [Message(message.role, broken_up(message.content, special)) for message in messages]


def encoder_of(tokenizer: "PreTrainedTokenizerBase") -> Callable[[str], list[int]]:
    """Return a function that encodes texts; it raises InputError where the tokenizer's regular expression fails."""
    encode = _encoder_of(tokenizer)

    def checked(text: str) -> list[int]:
        try:
            return encode(text)
        except BaseException as error:
            if type(error).__name__ != "PanicException":  # of Rust: no Exception, and its class cannot be imported
                raise
            path = tokenizer.name_or_path
            raise InputError(f"{path}: its tokenizer fails on a text: {error}; take another model's") from None

    return checked


def _encoder_of(tokenizer: "PreTrainedTokenizerBase") -> Callable[[str], list[int]]:
    """Return a function that encodes texts as the tokenizer's call does now, without offsets: a quarter of its time."""
    from transformers import TokenizersBackend as Fast

    kind, backend = type(tokenizer), getattr(tokenizer, "backend_tokenizer", None)
    if backend and (kind.__call__, getattr(kind, "_encode_plus", None)) == (Fast.__call__, Fast._encode_plus):
        is_plain = backend.truncation is None and backend.padding is None
        if is_plain and backend.encode_special_tokens == tokenizer.split_special_tokens:
            return lambda text: backend.encode_batch_fast([text], add_special_tokens=False)[0].ids
    return lambda text: list(tokenizer(text, add_special_tokens=False, verbose=False)["input_ids"])


@lru_cache(maxsize=1)
def keeps_words_apart(tokenizer: "PreTrainedTokenizerBase", size: int) -> bool:
    """Return True if no token holds a letter and a space behind it; size: of the vocabulary, which can grow."""
    return getattr(tokenizer, "backend_tokenizer", None) is not None and not re.search(
        "[A-Za-z][ \u0120\u2581]",  # a space, and how byte-level BPE and SentencePiece spell it
        "\n".join(tokenizer.get_vocab()),
    )


def split_text(encode: Callable[[str], list[int]], by_id: Mapping[int, str], is_apart: bool, text: str) -> SplitText:
    """Encode a text, and split it at its last word where `is_apart`, else at its last special token.

    Tokenizers split texts there first, so that nothing before changes what follows. by_id: texts of the special tokens.
    """
    ids = encode(text)
    if is_apart and (word := LAST_WORD.match(text, max(0, len(text) - LAST_WORD_CHARS))):
        end = encode(word[1])
        if ids[-len(end) :] == end:  # elsewhere a text's first word is another, and the split useless
            return SplitText(ids, word.start(1), len(ids) - len(end))
    num_ids = next((position for position in range(len(ids) - 1, 0, -1) if ids[position] in by_id), 0)
    start = max(0, text.rfind(by_id[ids[num_ids]])) if num_ids else 0
    return SplitText(ids, start, num_ids if start else 0)


def ids_of_pieces(pieces: Sequence[str], special: SpecialTokens) -> Iterator[tuple[list[int], bool]]:
    """Yield the ids that each piece of a text adds to those of the text before it, and True.

    The tokenizer may merge tokens across a boundary. A model that gets the text before it cannot: from there on the ids
    of each piece by itself are yielded, and False. Only the text behind the last split is encoded again.
    """
    text, start, end = "".join(pieces), 0, 0
    earlier, before, is_joined = list[int](), list[int](), True  # ids of text[:start] and text[start:end]
    for piece in pieces:
        end += len(piece)
        if is_joined:
            is_first, is_last = end == len(piece), end == len(text)
            encode = special.split_prompt if is_first else special.encode_split
            ids, split, num_ids = SplitText(special.encode(text[start:]), 0, 0) if is_last else encode(text[start:end])
            if start and ids[: len(before)] != before:
                start, earlier, before = 0, [], earlier + before  # perhaps a special token without a split
                ids, split, num_ids = special.encode_split(text[:end])
            is_joined = ids[: len(before)] == before
        if not is_joined:
            yield special.encode(piece), False
            continue
        yield ids[len(before) :], True
        start, earlier, before = start + split, earlier + ids[:num_ids], ids[num_ids:]
