"""The bodies of answers, as OpenAI's clients read them: whole, or as the lines of a stream."""

import json
import secrets
import time
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from itertools import accumulate
from typing import Any, NamedTuple

from pipeline.inference.answers import ChatModel, decode
from pipeline.inference.serving.bodies import ChatBody, CompletionBody
from pipeline.inference.serving.worker import Ended, prompt_log_probs

FINISH = {"end": "stop", "stop": "stop", "limit": "length"}
Json = dict[str, Any]


@dataclass(slots=True)
class ServedText:
    """An answer as it grows: its text, and how it ended."""

    text: str = ""
    ended: Ended | None = None


class TokenText(NamedTuple):
    """A token of a text, as a completion lists it.

    text: its text.
    log_prob: its log-probability; None: the first token of a prompt has none.
    top: the likeliest token there and this one, with their log-probabilities; None as above.
    """

    text: str
    log_prob: float | None
    top: dict[str, float] | None


class Echo(NamedTuple):
    """A prompt that the answer repeats: its text, and its tokens if log-probabilities are requested."""

    text: str
    tokens: Sequence[TokenText]


@dataclass(slots=True)
class Reply:
    """The answers to one request.

    body: the request.
    chat_model: the model.
    num_prompt_tokens: of all prompts.
    echoes: the prompts that the answers repeat; empty: none.
    _offsets: for each answer of a stream the characters of its tokens in earlier chunks.
    _id: a random name.
    _created: seconds since 1970.
    """

    body: ChatBody | CompletionBody
    chat_model: ChatModel
    num_prompt_tokens: int = 0
    echoes: Sequence[Echo] = ()
    _offsets: Counter[int] = field(default_factory=Counter)
    _id: str = field(default_factory=lambda: secrets.token_hex(12))
    _created: int = field(default_factory=lambda: int(time.time()))

    @property
    def is_chat(self) -> bool:
        return isinstance(self.body, ChatBody)

    @property
    def has_log_probs(self) -> bool:
        """True if log-probabilities are asked for. A completion asks for 0 or more likeliest tokens."""
        return self.body.logprobs is not None and self.body.logprobs is not False

    def head(self, *, streamed: bool) -> Json:
        kind = "text_completion" if not self.is_chat else f"chat.completion{'.chunk' if streamed else ''}"
        prefix = "chatcmpl" if self.is_chat else "cmpl"
        return {"id": f"{prefix}-{self._id}", "object": kind, "created": self._created, "model": self.body.model}

    def usage(self, num_tokens: int) -> Json:
        numbers = {"prompt_tokens": self.num_prompt_tokens, "completion_tokens": num_tokens}
        return numbers | {"total_tokens": sum(numbers.values())}

    def chunk(self, number: int, text: str, finish: str | None, new: Sequence[tuple[int, float]] | None = None) -> Json:
        """Return a line of a stream about answer `number`.

        new: (token, log-probability) since its last line; None for the first line of a chat.
        """
        delta = ({"role": "assistant"} if new is None else {}) | ({"content": text} if text or new is None else {})
        piece: Json = {"delta": delta} if self.is_chat else {"text": text}
        if self.has_log_probs:
            tokens = self.sampled(new or ())
            piece["logprobs"] = self.listed(tokens, self._offsets[number]) if new else None
            self._offsets[number] += sum(len(one.text) for one in tokens)
        return self.head(streamed=True) | {"choices": [{"index": number} | piece | {"finish_reason": finish}]}

    def last_chunk(self, num_tokens: int) -> Json:
        """Return the line with the numbers of tokens, behind all answers."""
        return self.head(streamed=True) | {"choices": [], "usage": self.usage(num_tokens)}

    def whole(self, answers: Sequence[ServedText]) -> Json:
        """Return all answers as one body."""
        num_tokens = sum(len(one.ended.ids) for one in answers if one.ended)
        choices = [self.choice(number, one.text, one.ended) for number, one in enumerate(answers) if one.ended]
        return self.head(streamed=False) | {"choices": choices, "usage": self.usage(num_tokens)}

    def choice(self, number: int, text: str, ended: Ended) -> Json:
        """Return an answer that has ended."""
        echo = self.echoes[number // self.body.n] if self.echoes else Echo("", ())
        text, log_probs = echo.text + text, None
        if self.has_log_probs:
            log_probs = self.listed([*echo.tokens, *self.sampled(zip(ended.ids, ended.log_probs, strict=True))])
        content: Json = {"message": {"role": "assistant", "content": text}} if self.is_chat else {"text": text}
        return {"index": number, "finish_reason": FINISH[ended.reason]} | content | {"logprobs": log_probs}

    def sampled(self, tokens: Iterable[tuple[int, float]]) -> list[TokenText]:
        """Return (token, log-probability) of an answer with texts; the session retains no values of other tokens."""
        pairs = [(decode_token(self.chat_model, token), value) for token, value in tokens]
        return [TokenText(text, value, {text: value}) for text, value in pairs]

    def listed(self, tokens: Sequence[TokenText], offset: int = 0) -> Json:
        """Return the field `logprobs`. `offset`: characters of the answer before these tokens."""
        if not self.is_chat:
            return completion_log_probs(tokens, offset)
        return {
            "content": [
                {"token": text, "logprob": log_prob, "bytes": whole_bytes(text), "top_logprobs": []}
                for text, log_prob, _ in tokens
            ]
        }


def decode_token(chat_model: ChatModel, token: int) -> str:
    """Return the text of one token, special or not."""
    return str(chat_model.tokenizer.decode([token], clean_up_tokenization_spaces=False))


def whole_bytes(token: str) -> list[int] | None:
    """Return the bytes of a token's text; None for a part of a character, whose text does not have them."""
    return None if "\ufffd" in token else list(token.encode())


def completion_log_probs(tokens: Sequence[TokenText], offset: int) -> Json:
    """Return the field `logprobs` of a completion, whose first token begins at character `offset`."""
    return {
        "tokens": [one.text for one in tokens],
        "token_logprobs": [one.log_prob for one in tokens],
        "top_logprobs": [one.top for one in tokens],
        "text_offset": list(accumulate((len(one.text) for one in tokens), initial=offset))[:-1],
    }


def echo(reply: Reply, ids: Sequence[int]) -> Echo:
    """Return a prompt as its answer repeats it, with log-probabilities by a forward pass (worker's thread)."""
    chat_model = reply.chat_model
    text = decode(chat_model.tokenizer, ids)
    if not reply.has_log_probs:
        return Echo(text, ())
    log_probs, likeliest = prompt_log_probs(chat_model, ids)
    first, *others = (decode_token(chat_model, token) for token in ids)
    # The likeliest token comes last, so that its value stays where two tokens have the same text.
    tokens = [
        TokenText(one, value, {one: value, decode_token(chat_model, token): best})
        for one, value, (token, best) in zip(others, log_probs, likeliest, strict=True)
    ]
    return Echo(text, [TokenText(first, None, None), *tokens])


def event_line(content: Json) -> str:
    """Return a line of a stream of server-sent events."""
    return f"data: {json.dumps(content)}\n\n"  # in ASCII: clients may end a line at U+2028
