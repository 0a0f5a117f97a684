"""Responses that call tools: each is a conversation of the model with the tools, in rollouts and in `rlhf reward`.

`episodes.generate` requests the answer to each turn. The processes of reward functions make it while other responses
are sampled, and it is written as the chat template writes it.
"""

import json
import logging
import sys
from collections.abc import Callable, Collection, Iterator, Sequence
from concurrent.futures import Future
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any, Self, TypeVar

import torch
from torch import Tensor
from transformers import PreTrainedTokenizerBase

from pipeline.data.templates import encode_prompt
from pipeline.data.tool_turns import SampledTurn, ToolTurns
from pipeline.data.turns import parse_tools, turns_of_json
from pipeline.errors import InputError, RunError
from pipeline.generation.episodes import Episode
from pipeline.generation.rollouts import GenerationStopped, Prompt
from pipeline.heartbeat import result_of
from pipeline.inference.answer_rows import Answer
from pipeline.rewards.calls import reason_of_missing
from pipeline.rewards.functions import RewardFunction
from pipeline.rewards.pool import Failure, RewardPool
from pipeline.rewards.rollout import EndedResponse, FunctionCalls
from pipeline.rewards.tool_flags import ToolConfig, descriptions
from pipeline.rewards.tools import ToolResult, Tools
from pipeline.rewards.worker_flags import WorkerFlags, worker_limits
from pipeline.rewards.workers import Workers

log = logging.getLogger(__name__)

Turn = dict[str, Any]
T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class Calls:
    """The calls of the user's code: a context, at whose end the processes of this rank are stopped.

    rewards: those of reward functions.
    tools: those of tools; None: there are none.
    workers: processes of both; None: there are neither.
    """

    rewards: FunctionCalls
    tools: "ToolUse | None"
    workers: Workers | None

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *error: object) -> None:
        if self.tools is not None:
            self.tools.tools.close()
        self.rewards.close()
        if self.workers is not None:
            self.workers.close()


def make_calls(
    functions: Sequence[RewardFunction],
    flags: ToolConfig,
    limits: WorkerFlags,
    *,
    max_failures: float,
    takes_tokens: bool,
    columns: Collection[str],
    sources: Sequence[str],
    tokenizer: PreTrainedTokenizerBase,
    max_prompt: int,
) -> Calls:
    """Return the calls of functions and tools, each of which is loaded once on this rank. A collective.

    Args:
        max_failures, takes_tokens: see `FunctionCalls`.
        columns: those of the prompts that no layout reads.
        sources: data paths of the prompts.
        max_prompt: tokens of the longest prompt.

    Raises:
        InputError: see `FunctionCalls.check`, `Tools.check` and `ToolTurns`.
    """
    workers = Workers(**worker_limits(limits)) if functions or flags.by_title else None
    tools = None
    if workers and flags.by_title:
        tools = make_tools(flags, limits, workers, tokenizer, columns=columns, max_prompt=max_prompt)
    rewards = FunctionCalls(
        RewardPool(functions, workers=workers) if functions else None,
        max_failures=max_failures,
        takes_tokens=takes_tokens,
        environment=flags.environment_class if tools is not None and tools.tools.has_reward else None,
        has_tools=tools is not None,
    )
    rewards.check(columns, sources)
    return Calls(rewards, tools, workers)


def make_tools(
    flags: ToolConfig,
    limits: WorkerFlags,
    workers: Workers,
    tokenizer: PreTrainedTokenizerBase,
    *,
    columns: Collection[str],
    max_prompt: int,
) -> "ToolUse":
    """Return the tools that the flags name, loaded and checked; see `make_calls`."""
    tools = Tools(flags.functions, flags.environment_class, workers)
    tools.check(described := descriptions(flags, limits))
    needed = {name for one in described for name in one["needs"]}
    if missing := needed - {*columns, "prompt"}:
        reason = reason_of_missing(missing, columns)
        raise InputError(f"--environment {flags.environment}: reset: {reason}")
    names = ", ".join(one["function"]["name"] for one in tools.schemas)
    log.info("tools: %s; at most %d turns in a response", names, flags.max_turns)
    return ToolUse(tools, ToolTurns(tokenizer, tools.schemas), flags.max_turns, tokenizer, max_prompt)


@dataclass(slots=True)
class ToolConversation:
    """A response with tools, as far as it has come.

    messages: its turns as reward functions get them: the policy's, and of role `tool` what tools returned.
    num_turns: turns of the policy.
    num_calls: calls, failed ones included.
    num_failed: calls that were wrong, or whose tool raised.
    seconds: time of its tools.
    failure: why it is left out of the training: a call took too long, or its process died.
    """

    messages: list[Turn] = field(default_factory=list)
    num_turns: int = 0
    num_calls: int = 0
    num_failed: int = 0
    seconds: float = 0.0
    failure: Failure | None = None


@dataclass(frozen=True, slots=True)
class ToolUse:
    """The tools of a run.

    tools: their calls.
    turns: how the chat template writes calls and results.
    max_turns: most turns of the policy in a response.
    tokenizer: that of the policy.
    max_prompt: tokens of the longest prompt.
    """

    tools: Tools
    turns: ToolTurns
    max_turns: int
    tokenizer: PreTrainedTokenizerBase
    max_prompt: int


@dataclass(slots=True)
class Talk:
    """The conversations of a rollout on this rank. It answers turns for `episodes.generate`.

    use: the tools of the run.
    rows: prompt data set.
    chosen: row of each prompt; None: padding, which calls nothing.
    num_samples: conversations with each prompt.
    should_stop: returns True if the run is to stop.
    note: called with each episode that has ended.
    conversations: one for each episode, by its number.
    error: ends the run once it is saved: a file has changed, or an environment breaks its interface.
    """

    use: ToolUse
    rows: Any
    chosen: Sequence[int | None]
    num_samples: int
    should_stop: Callable[[], bool]
    note: Callable[[Episode], None]
    error: RunError | None = None
    conversations: list[ToolConversation] = field(init=False)

    def __post_init__(self) -> None:
        self.conversations = [ToolConversation() for _ in range(len(self.chosen) * self.num_samples)]
        self.use.tools.close()  # the conversations of a rollout that was stopped

    def prompts(self) -> list[Prompt]:
        """Begin all conversations, and return the prompts; an environment adds its text to the last user turn.

        A prompt that is too long with it loses its responses.
        """
        k, openings = self.num_samples, list[list[Future[str | None | Failure]]]()
        for index, row in enumerate(self.chosen):
            columns = {} if row is None else json.loads(self.rows[row].get("extra", "{}"))
            columns |= {} if row is None else {"prompt": json.loads(self.rows[row]["messages"])}
            numbers = [] if row is None else range(index * k, (index + 1) * k)  # padding calls nothing
            openings.append([self.use.tools.begin(number, columns) for number in numbers])
        return [self._prompt(index, futures) for index, futures in enumerate(openings)]

    def _prompt(self, index: int, openings: "Sequence[Future[str | None | Failure]]") -> Prompt:
        row, texts = self.rows[self.chosen[index] or 0], list[str]()
        plain, first = Prompt(row["prompt_ids"], row["prompt_id"]), index * self.num_samples
        for n, future in enumerate(openings):
            try:
                text = self.waited(future)
            except GenerationStopped:  # before the first step, in which all ranks learn of it
                return plain
            if isinstance(text, Failure):
                self.conversations[first + n].failure = text
            else:
                texts.append(text or "")
        if not any(texts):
            return plain
        where = f"--environment: reset() for row {(self.chosen[index] or 0) + 1}"
        if len(set(texts)) > 1:
            why = "returned different texts for responses to one prompt; make the text from the row alone"
            self.error = InputError(f"{where}: {why}")
            return plain
        turns = [*parse_tools(self.use.tools.schemas), *turns_of_json(row["messages"])]
        turns[-1] = replace(turns[-1], content=turns[-1].content + texts[0])
        ids = encode_prompt(self.use.tokenizer, turns)
        if len(ids) <= self.use.max_prompt:
            return Prompt(ids, row["prompt_id"])
        why = f"with its text the prompt has {len(ids)} tokens; raise --max-prompt-seq-len {self.use.max_prompt}"
        for one in self.conversations[first : first + self.num_samples]:
            one.failure = Failure("raised", f"{where}: {why}")
        return plain

    def stops(self) -> bool:
        """Return True if the generation is to stop: on request, or because of an error of the user's code."""
        return self.error is not None or self.should_stop()

    def waited(self, future: "Future[T]") -> T:
        """Return the result of a call. Raises GenerationStopped if the generation is to stop."""

        def check() -> None:
            if self.stops():
                raise GenerationStopped

        try:
            return result_of(future, check)
        except RunError as error:
            self.error = error
            raise GenerationStopped from None

    def answer(self, episode: Episode) -> Callable[[], list[int]] | None:
        """Begin the calls of the last turn; see `Answers`."""
        talk, turn = self.conversations[episode.number], self.use.turns.read(episode.segments[-1].on_host)
        talk.num_turns += 1
        talk.messages.append(turn.message)
        is_over = talk.num_turns >= self.use.max_turns or talk.failure is not None or episode.reason != "end"
        if is_over or not turn.calls or self.chosen[episode.number // self.num_samples] is None:
            return None
        return partial(self._ids_of, talk, turn, self.use.tools.call(episode.number, turn.calls))

    def _ids_of(
        self, talk: ToolConversation, turn: SampledTurn, future: "Future[list[ToolResult] | Failure]"
    ) -> list[int]:
        results = self.waited(future)
        if isinstance(results, Failure):
            talk.failure = results
            return []
        talk.num_calls += len(results)
        talk.num_failed += sum(one.failed for one in results)
        talk.seconds += sum(one.seconds for one in results)
        talk.messages += [{"role": "tool", "name": one.name, "content": one.text} for one in results]
        return self.use.turns.results([(one.name, one.text) for one in results], turn.call_ids)

    def ended(self, episode: Episode) -> None:
        """Note a conversation that has ended."""
        messages = self.conversations[episode.number].messages
        while messages[-1]["role"] == "tool":  # results that left no room for another turn
            messages.pop()
        self.note(episode)

    def response(self, episode: Episode) -> EndedResponse:
        """End a conversation in its environment; return it as reward functions get it."""
        reward = self.use.tools.end(episode.number)
        ids = [token for turn in episode.turns[::2] for token in turn]
        conversation = self.conversations[episode.number]
        return EndedResponse(ids, conversation.messages, reward, conversation.failure)

    def counts(self, device: torch.device) -> Tensor:
        """(N, 5) fp32, see `Responses.tool_counts`."""
        counts = [
            (one.num_turns, one.num_calls, one.num_failed, one.seconds, one.failure is not None)
            for one in self.conversations
        ]
        return torch.tensor(counts, dtype=torch.float32, device=device)


@contextmanager
def open_tools(flags: ToolConfig, limits: WorkerFlags, tokenizer: PreTrainedTokenizerBase) -> Iterator[ToolUse | None]:
    """Yield the tools of a chat, with processes of their own; None if the flags name none. Raises as `make_calls`."""
    if not flags.by_title:
        yield None
        return
    with Workers(**worker_limits(limits)) as workers:
        yield make_tools(flags, limits, workers, tokenizer, columns=(), max_prompt=sys.maxsize)


class ToolEpisode:
    """The tools of one reply in a chat.

    opening: text of the environment that is added to the question.
    """

    def __init__(self, use: ToolUse, messages: Sequence[Turn]) -> None:
        """Begin an episode.

        Args:
            messages: the conversation so far, the question included.

        Raises:
            InputError: `reset` of the environment failed or returned no text.
        """
        self._use, self._num_turns = use, 0
        use.tools.close()  # the episode of a reply that was stopped
        opening = result_of(use.tools.begin(0, {"prompt": [*messages]}))
        if isinstance(opening, Failure):
            raise InputError(f"--environment: reset: {opening.message}")
        self.opening = opening or ""

    def results_of(self, reply: Answer, emit: Callable[[str], None]) -> list[int]:
        """Make the calls of a turn, and emit their results.

        Returns the ids between the turn and the next one; [] if it calls nothing, or may not.
        """
        self._num_turns += 1
        turn = self._use.turns.read(reply.ids)
        if not turn.calls or reply.finish_reason != "end" or self._num_turns >= self._use.max_turns:
            return []
        results = result_of(self._use.tools.call(0, turn.calls))
        if isinstance(results, Failure):
            raise InputError(f"--tools: {results.message}")
        emit("".join(f"\n[{one.name}] {one.text}" for one in results) + "\n")
        return self._use.turns.results([(one.name, one.text) for one in results], turn.call_ids)

    def end(self) -> float | None:
        """End the episode, and return the environment's reward; None if it gives none."""
        reward = result_of(self._use.tools.end(0))
        return None if isinstance(reward, Failure) else reward
