"""The bodies of answers, as OpenAI's clients read them: whole, or as the lines of a stream."""

import json
import secrets
import time
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import accumulate
from typing import Any

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


@dataclass(frozen=True, slots=True)
class TokenTexts:
    """The tokens of a text with their log-probabilities, as a completion lists them.

    tokens: text of each token.
    log_probs: log-probability of each; None: the first token of a prompt has none.
    top: for each token the likeliest token there and its own, with their log-probabilities; None as above.
    """

    tokens: list[str]
    log_probs: list[float | None]
    top: list[dict[str, float] | None]

    def __add__(self, other: "TokenTexts") -> "TokenTexts":
        return TokenTexts(self.tokens + other.tokens, self.log_probs + other.log_probs, self.top + other.top)


@dataclass(frozen=True, slots=True)
class Echo:
    """A prompt that the answer repeats: its text, and its tokens if log-probabilities are asked for."""

    text: str
    tokens: TokenTexts | None


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
            self._offsets[number] += sum(map(len, tokens.tokens))
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
        tokens = self.sampled([*zip(ended.ids, ended.log_probs, strict=True)]) if self.has_log_probs else None
        shared = {"index": number, "finish_reason": FINISH[ended.reason]}
        if self.is_chat:
            content = {"message": {"role": "assistant", "content": text}}
            return shared | content | {"logprobs": tokens and self.listed(tokens)}
        if self.echoes:
            echo = self.echoes[number // self.body.n]
            text, tokens = echo.text + text, tokens and echo.tokens and echo.tokens + tokens
        return shared | {"text": text, "logprobs": tokens and self.listed(tokens)}

    def sampled(self, tokens: Sequence[tuple[int, float]]) -> TokenTexts:
        """Return (token, log-probability) of an answer with texts; the session retains no values of other tokens."""
        pairs = [(decode_token(self.chat_model, token), value) for token, value in tokens]
        return TokenTexts([text for text, _ in pairs], [value for _, value in pairs], [dict([pair]) for pair in pairs])

    def listed(self, tokens: TokenTexts, offset: int = 0) -> Json:
        """Return the field `logprobs`. `offset`: characters of the answer before these tokens."""
        if not self.is_chat:
            return completion_log_probs(tokens, offset)
        return {
            "content": [
                {"token": token, "logprob": log_prob, "bytes": whole_bytes(token), "top_logprobs": []}
                for token, log_prob in zip(tokens.tokens, tokens.log_probs, strict=True)
            ]
        }


def decode_token(chat_model: ChatModel, token: int) -> str:
    """Return the text of one token, special or not."""
    return str(chat_model.tokenizer.decode([token], clean_up_tokenization_spaces=False))


def whole_bytes(token: str) -> list[int] | None:
    """Return the bytes of a token's text; None for a part of a character, whose text does not have them."""
    return None if "\ufffd" in token else list(token.encode())


def completion_log_probs(tokens: TokenTexts, offset: int) -> Json:
    """Return the field `logprobs` of a completion, whose first token begins at character `offset`."""
    lengths = [len(text) for text in tokens.tokens]
    return {
        "tokens": tokens.tokens,
        "token_logprobs": tokens.log_probs,
        "top_logprobs": tokens.top,
        "text_offset": list(accumulate(lengths, initial=offset))[:-1],
    }


def echo(reply: Reply, ids: Sequence[int]) -> Echo:
    """Return a prompt as its answer repeats it, with log-probabilities by a forward pass (worker's thread)."""
    chat_model = reply.chat_model
    text = decode(chat_model.tokenizer, ids)
    if not reply.has_log_probs:
        return Echo(text, None)
    log_probs, likeliest = prompt_log_probs(chat_model, ids)
    texts = [decode_token(chat_model, token) for token in ids]
    # The likeliest token comes last, so that its value stays where two tokens have the same text.
    top = [
        {text: value, decode_token(chat_model, token): best}
        for text, value, (token, best) in zip(texts[1:], log_probs, likeliest, strict=True)
    ]
    return Echo(text, TokenTexts(texts, [None, *log_probs], [None, *top]))


def event_line(content: Json) -> str:
    """Return a line of a stream of server-sent events."""
    return f"data: {json.dumps(content)}\n\n"  # in ASCII: clients may end a line at U+2028
