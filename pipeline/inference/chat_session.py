"""A conversation with a model: its turns, fitted into the model's positions, and one reply at a time.

Each reply renders the whole conversation by the tokenizer's template and encodes it again. The ids of earlier replies
are not reused, since training has seen encoded text, which may differ: a truncated reply has no end token, and
tokenizers may split the text differently. The terminal is in `rlhf/chat.py`.

With tools a reply is several turns of the model, whose ids stay as they were sampled. Later replies see the last one.
"""

import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from typing import Literal

from pipeline.console import valid_unicode
from pipeline.data.templates import RefusedTurnsError, encode_prompt
from pipeline.data.turns import Message, parse_tools
from pipeline.errors import InputError
from pipeline.inference.answer_rows import Answer
from pipeline.inference.answer_scores import AnswerScorer, score_answers
from pipeline.inference.answer_settings import ReplySettings
from pipeline.inference.answers import AnswerStreamer, ChatModel, decode, generate_answers
from pipeline.inference.tool_conversations import ToolEpisode, ToolUse

Emit = Callable[[str], None]
Ending = Literal["end", "limit", "stopped"]  # the model's end token or a stop string, the token limit, the user


@dataclass(frozen=True, slots=True)
class Reply:
    """A finished reply.

    text: text of the reply.
    num_tokens: tokens of the reply.
    ending: why the reply ended.
    num_forgotten: oldest turns that were dropped to make it fit.
    time_s: seconds that the reply took.
    reward: what the environment of the tools gives the reply; None without one.
    """

    text: str
    num_tokens: int
    ending: Ending
    num_forgotten: int
    time_s: float
    reward: float | None = None


class Conversation:
    """A conversation. Raises InputError at once for a system prompt that the model's template does not accept."""

    def __init__(
        self,
        chat_model: ChatModel,
        settings: ReplySettings,
        *,
        system: str = "",
        seed: int = 0,
        tools: ToolUse | None = None,
    ) -> None:
        self.chat_model, self.tools = chat_model, tools
        self.settings = settings
        self.seed = seed
        self.turns: list[Message] = []
        self._ended: list[bool] = []  # of each reply in `turns`: whether the model ended it
        self._system: list[Message] = []
        self._num_replies = 0
        self._positions = chat_model.num_positions or sys.maxsize
        self.start_afresh(system)

    def start_afresh(self, system: str | None = None) -> None:
        """Forget all turns; `system` replaces the system prompt ('' removes it), None keeps it."""
        if system is not None:
            text = valid_unicode(system).strip()
            new = [Message("system", text)] if text else []
            encode_prompt(self.chat_model.tokenizer, [*new, Message("user", "a")])
            self._system = new
        self.turns, self._ended = [], []

    @property
    def messages(self) -> list[dict[str, str]]:
        """The system prompt and all turns, as a row of data."""
        return [asdict(turn) for turn in (*self._system, *self.turns)]

    def score(self, scorer: AnswerScorer) -> float:
        """Return a reward model's raw score of the last reply, of which there is one, given all turns before it."""
        *prompt, reply = *self._system, *self.turns
        [score] = score_answers(scorer, [(tuple(prompt), reply.content, self._ended[-1])], batch_size=1)
        return score

    def take_back(self) -> str:
        """Remove the last question and its reply; return the question, or '' without one."""
        question = self.turns[-2].content if self.turns else ""
        self.turns, self._ended = self.turns[:-2], self._ended[:-1]
        return question

    def say(self, text: str, emit: Emit) -> Reply:
        """Generate the reply to `text`; call `emit` with each piece as soon as it is complete.

        A KeyboardInterrupt stops the reply and keeps its text so far. An empty reply adds no turns: templates and
        training have no empty turns. The n-th reply is drawn with the seed + n, so that a second try differs. With
        tools the text of a reply is its last turn.
        """
        turns = [*self.turns, Message("user", valid_unicode(text).strip())]
        episode = ToolEpisode(self.tools, [asdict(turn) for turn in turns]) if self.tools else None
        question = Message("user", turns[-1].content + (episode.opening if episode else ""))
        prompt, num_forgotten = self._fitting_prompt([*turns[:-1], question])
        room, num_tokens = min(self.settings.max_new_tokens, self._positions - len(prompt)), 0
        self._num_replies += 1
        start = time.perf_counter()
        while True:
            streamer, added = AnswerStreamer(self.chat_model, emit), list[int]()
            try:
                reply = self._generated(prompt, room, streamer)
                ending: Ending = "end" if reply.finished else "limit"
                added = episode.results_of(reply, emit) if episode else []
            except KeyboardInterrupt:
                streamer.end()
                ending = "stopped"
            num_tokens += len(streamer.ids)
            if not added:
                break
            if (room := room - len(reply.ids) - len(added)) < 1:
                ending = "limit"
                break
            prompt = [*prompt, *reply.ids, *added]
        reward = episode.end() if episode and ending != "stopped" else None  # its end would wait for a call that runs
        time_s = time.perf_counter() - start
        answer = decode(self.chat_model.tokenizer, streamer.ids).strip()
        all_turns = [*turns, Message("assistant", answer)] if answer else self.turns
        all_ended = [*self._ended, ending == "end"] if answer else self._ended
        self.turns, self._ended = all_turns[num_forgotten:], all_ended[num_forgotten // 2 :]
        return Reply(answer, num_tokens, ending, num_forgotten, time_s, reward)

    def _generated(self, prompt: list[int], room: int, streamer: AnswerStreamer) -> Answer:
        settings, seed = self.settings.model_copy(update={"max_new_tokens": room}), self.seed + self._num_replies
        [[reply]] = generate_answers(self.chat_model, [prompt], settings, seed=seed, streamer=streamer)
        return reply

    def _fitting_prompt(self, turns: Sequence[Message]) -> tuple[list[int], int]:
        """Encode the prompt; return its ids and how many of the oldest turns had to be dropped."

        Questions are dropped together with their replies; the system prompt stays. max_new_tokens positions, but at
        most half of all, are reserved for the reply; the last question may use them too.
        """
        reserved = min(self.settings.max_new_tokens, self._positions // 2)
        offered = parse_tools(self.tools.tools.schemas) if self.tools else ()
        for start in range(0, len(turns), 2):
            try:
                prompt = encode_prompt(self.chat_model.tokenizer, [*offered, *self._system, *turns[start:]])
            except RefusedTurnsError:  # the template of encoder-decoder models takes one question at a time
                if start + 1 == len(turns):
                    raise
                continue
            if len(prompt) + reserved <= self._positions:
                return prompt, start
        if len(prompt) >= self._positions:
            raise InputError(f"this message needs {len(prompt)} tokens; the model has {self._positions} positions")
        return prompt, start
