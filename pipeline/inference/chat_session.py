"""A conversation with a model: its turns, what of them fits into the model, and one reply at a time.

Every reply starts from the whole conversation rendered by the tokenizer's template and encoded afresh. Sampled ids of
earlier replies are not kept: where they equal the encoded text nothing would change, and where they differ (a reply
that was cut off has no end token; text that the tokenizer would split otherwise) training has seen the encoded text.
"""

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Literal

from pipeline.data.templates import encode_prompt
from pipeline.data.turns import Message
from pipeline.errors import InputError
from pipeline.inference.answer_settings import ReplySettings
from pipeline.inference.answers import AnswerStreamer, ChatModel, decode, generate_answers
from pipeline.inference.terminal_text import valid_unicode

Emit = Callable[[str], None]
Ending = Literal["end", "limit", "stopped"]  # the model's end token, the token limit, the user


@dataclass(frozen=True, slots=True)
class Reply:
    """A finished reply; num_forgotten: the oldest turns that were left out for it from now on."""

    text: str
    num_tokens: int
    ending: Ending
    num_forgotten: int
    time_s: float


class Conversation:
    """The turns so far. Raises InputError at once if the model's template takes no system turn but one is given."""

    def __init__(self, chat_model: ChatModel, settings: ReplySettings, *, system: str = "", seed: int = 0) -> None:
        self.chat_model = chat_model
        self.settings = settings
        self.seed = seed
        self.turns: list[Message] = []
        self._system: list[Message] = []
        self._num_replies = 0
        self.start_afresh(system)

    def start_afresh(self, system: str | None = None) -> None:
        """Forget all turns; `system` replaces the system prompt ('' removes it), None keeps it."""
        if system is not None:
            text = valid_unicode(system).strip()
            new = [Message("system", text)] if text else []
            encode_prompt(self.chat_model.tokenizer, [*new, Message("user", "a")])
            self._system = new
        self.turns = []

    def take_back(self) -> str:
        """Remove the last question and its reply; returns the question, '' if there is none."""
        if not self.turns:
            return ""
        question = self.turns[-2].content
        self.turns = self.turns[:-2]
        return question

    def say(self, text: str, emit: Emit) -> Reply:
        """The model's reply to `text`, handed to `emit` in pieces while it is made.

        A KeyboardInterrupt stops the reply and keeps what there is. An empty reply leaves no turns behind: templates
        and training know no empty turns. The n-th reply is drawn with the seed + n, so that a second try differs.
        """
        turns = [*self.turns, Message("user", valid_unicode(text).strip())]
        prompt, num_forgotten = self._fitting(turns)
        start = time.perf_counter()
        ids, ending = self._stream(prompt, without_leading_space(emit))
        time_s = time.perf_counter() - start
        answer = decode(self.chat_model.tokenizer, ids).strip()
        kept = [*turns, Message("assistant", answer)] if answer else self.turns
        self.turns = kept[num_forgotten:]
        return Reply(answer, len(ids), ending, num_forgotten, time_s)

    def _stream(self, prompt: Sequence[int], emit: Emit) -> tuple[list[int], Ending]:
        """The reply's ids without the end token, and what ended it."""
        streamer = AnswerStreamer(self.chat_model, emit)
        settings = self.settings.model_copy(update={"max_new_tokens": self._limit(prompt)})
        self._num_replies += 1
        seed = self.seed + self._num_replies
        try:
            generate_answers(self.chat_model, [prompt], settings, seed=seed, streamer=streamer)
        except KeyboardInterrupt:
            streamer.end()
            return streamer.ids, "stopped"
        return streamer.ids, "end" if streamer.finished else "limit"

    def _fitting(self, turns: Sequence[Message]) -> tuple[list[int], int]:
        """The prompt's ids, and how many of the oldest turns had to be left out for it.

        Questions go together with their replies; the system prompt stays. Kept free for the reply are max_new_tokens,
        but at most half of the positions; the last question alone may take more.
        """
        positions = self.chat_model.num_positions
        reserved = 0 if positions is None else min(self.settings.max_new_tokens, positions // 2)
        for start in range(0, len(turns), 2):
            prompt = encode_prompt(self.chat_model.tokenizer, [*self._system, *turns[start:]])
            if positions is None or len(prompt) + reserved <= positions:
                return prompt, start
        if positions is not None and len(prompt) >= positions:
            raise InputError(f"this message needs {len(prompt)} tokens; the model has {positions} positions in all")
        return prompt, start

    def _limit(self, prompt: Sequence[int]) -> int:
        positions = self.chat_model.num_positions
        wanted = self.settings.max_new_tokens
        return wanted if positions is None else min(wanted, positions - len(prompt))


def without_leading_space(emit: Emit) -> Emit:
    """`emit`, not called before the first character that is no white space."""
    started = False

    def trimmed(piece: str) -> None:
        nonlocal started
        piece = piece if started else piece.lstrip()
        if piece:
            started = True
            emit(piece)

    return trimmed
