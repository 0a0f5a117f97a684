"""Generation as a service: requests are submitted one by one, and each response comes when it has ended.

    generator.session(...)    opens a session on the weights as they are now, with room for so many responses at a time
    session.submit(...)       a request: a prompt with its own settings, limit, stop texts and random numbers
    session.advance()         computes the next tokens of all that run, and returns what is new
    session.withdraw(...)     ends a request without a response; its place is free for another one
    generate(...)             submits all prompts and advances until the last has ended: a rollout

`generator.Generator` has sessions of the fused and static backend, `eager.EagerGenerator` those of the eager one. A
response does not depend on the requests beside it, but for the rounding of another batch shape.
"""

from abc import ABC, abstractmethod
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import astuple, dataclass, field
from typing import Literal, Protocol

import torch

from pipeline.generation.rollouts import Prompt, RandomKey, Rollout, Sampling, Vocabulary


@dataclass(slots=True, eq=False)
class Ticket:
    """A request that was submitted.

    number: its place in the order of submission.
    prompt: the prompt; requests of one object share its prefill.
    sampling: settings, limit and stop texts.
    key: with the prompt's id and `sample` the key of the random numbers.
    sample: number of the response among those to its prompt.
    streams: True = its tokens are reported before it has ended.
    is_withdrawn: True = nothing of it is reported any more.
    seen: tokens that have been looked at, where it streams or has stop texts.
    """

    number: int
    prompt: Prompt
    sampling: Sampling
    key: RandomKey
    sample: int
    streams: bool = False
    is_withdrawn: bool = False
    seen: list[int] = field(default_factory=list)

    @property
    def is_watched(self) -> bool:
        """True where the host looks at the tokens as they are drawn."""
        return self.streams or bool(self.sampling.stop)


@dataclass(frozen=True, slots=True)
class Tokens:
    """The tokens that a response with `streams` has got since they were last reported."""

    ticket: Ticket
    ids: list[int]


@dataclass(frozen=True, slots=True)
class Finished:
    """A response that has ended.

    ticket: its request.
    ids: (T,) int64, its tokens; an EOS, and the token that completes a stop text, are part of them.
    log_probs: (T,) fp32, log-probabilities at the request's temperature under the untruncated distribution.
    reason: "end" by an EOS, "stop" by a stop text, "limit" by its number of tokens.
    """

    ticket: Ticket
    ids: torch.Tensor
    log_probs: torch.Tensor
    reason: Literal["end", "stop", "limit"]


@dataclass(frozen=True, slots=True)
class Room:
    """The room of a session. A request may have fewer tokens; more responses wait for those before them.

    num_slots: responses at a time.
    max_new_tokens: tokens of the longest response.
    max_length: tokens of the longest prompt and its response together.
    """

    num_slots: int
    max_new_tokens: int
    max_length: int

    def union(self, other: "Room") -> "Room":
        """Return a room that covers both."""
        return Room(*(max(pair) for pair in zip(astuple(self), astuple(other), strict=True)))


NO_ROOM = Room(0, 0, 0)


class Session(ABC):
    """Requests and their responses; for the ranks of a tensor-parallel group or in lockstep each call is a collective.

    device: where prompts and responses are.
    waiting: requests that have not started.
    is_idle: True = nothing runs and nothing waits, on any rank in lockstep.
    """

    def __init__(self, room: Room, vocabulary: Vocabulary, device: torch.device) -> None:
        self.room, self.vocabulary, self.device = room, vocabulary, device
        self.waiting: deque[Ticket] = deque()
        self.is_idle, self._num_tickets = True, 0

    def submit(
        self, prompt: Prompt, sampling: Sampling, key: RandomKey, *, sample: int = 0, streams: bool = False
    ) -> Ticket:
        """Queue a request for response number `sample` to a prompt; `streams`: report its tokens as they are drawn.

        Raises:
            ValueError: it is longer than the room, or has stop texts where there is no text.
        """
        new, known, room = sampling.max_new_tokens, len(prompt.ids), self.room
        if not 1 <= new <= room.max_new_tokens or not 1 <= known <= room.max_length - new:
            raise ValueError(
                f"a request of {known} prompt tokens and up to {new} new ones: the session has room for 1 to "
                f"{room.max_new_tokens} new tokens, and {room.max_length} in all"
            )
        if sampling.stop and self.vocabulary.decode is None:
            raise ValueError("a request with stop texts: the session has no tokenizer to decode its tokens")
        ticket = Ticket(self._num_tickets, prompt, sampling, key, sample, streams)
        self._num_tickets += 1
        self.waiting.append(ticket)
        self.is_idle = False
        return ticket

    def withdraw(self, ticket: Ticket) -> None:
        """End a request, whether it waits or runs: nothing more of it is reported, and its place is free."""
        ticket.is_withdrawn = True
        if ticket in self.waiting:
            self.waiting.remove(ticket)

    @abstractmethod
    def advance(self, *, stop: bool = False) -> list[Tokens | Finished]:
        """Start requests where there is room, compute next tokens of those that run, and return what is new.

        Raises:
            GenerationStopped: `stop` is True, on any rank that generates with this one.
        """


class SessionSource(Protocol):
    """A generation backend, loaded with a model."""

    def session(self, room: Room) -> Session: ...


def look_at(ticket: Ticket, ids: list[int], vocabulary: Vocabulary) -> tuple[list[Tokens | Finished], int | None]:
    """Look at the tokens of a watched response: what to report of them, and its length where a stop text ends it."""
    first = len(ticket.seen)
    if len(ids) <= first:  # also of a response that had to start again
        return [], None
    length = stopped_length(ticket, ids, vocabulary)
    ticket.seen = ids[:length]
    new = ticket.seen[first:]
    return ([Tokens(ticket, new)] if ticket.streams and new else []), length


def stopped_length(ticket: Ticket, ids: list[int], vocabulary: Vocabulary) -> int | None:
    """Return the number of tokens after which the text first contains a stop text; None where it contains none."""
    stop, decode = ticket.sampling.stop, vocabulary.decode
    if not stop or decode is None or not any(text in decode(ids) for text in stop):
        return None
    lengths = range(len(ticket.seen) + 1, len(ids))
    return next((n for n in lengths if any(text in decode(ids[:n]) for text in stop)), len(ids))


def ended(
    ticket: Ticket, ids: torch.Tensor, log_probs: torch.Tensor, *, is_end: bool, vocabulary: Vocabulary
) -> list[Tokens | Finished]:
    """Return what is to report of a response (T,) that has ended, by an EOS or at its limit; [] if it is withdrawn."""
    if ticket.is_withdrawn:
        return []
    reason: Literal["end", "stop", "limit"] = "end" if is_end else "limit"
    events: list[Tokens | Finished] = []
    if ticket.is_watched:
        events, length = look_at(ticket, ids.tolist(), vocabulary)
        if length is not None:
            ids, log_probs, reason = ids[:length], log_probs[:length], "stop"
    return [*events, Finished(ticket, ids, log_probs, reason)]


def generate(
    source: SessionSource,
    prompts: Sequence[Prompt],
    *,
    num_samples: int,
    num_slots: int,
    sampling: Sampling,
    key: RandomKey,
    should_stop: Callable[[], bool] = lambda: False,
) -> Rollout:
    """Sample `num_samples` responses to each prompt, `num_slots` of them at a time.

    Raises:
        GenerationStopped: `should_stop` answered True between two steps, on any rank that generates with this one.
    """
    longest = max(len(prompt.ids) for prompt in prompts) + sampling.max_new_tokens
    room = Room(min(num_slots, len(prompts) * num_samples), sampling.max_new_tokens, longest)
    session = source.session(room)
    tickets = [session.submit(prompt, sampling, key, sample=n) for prompt in prompts for n in range(num_samples)]
    responses: dict[int, Finished] = {}
    while True:
        for event in session.advance(stop=should_stop()):
            if isinstance(event, Finished):
                responses[event.ticket.number] = event
        if session.is_idle:
            return joined(tickets, [responses[ticket.number] for ticket in tickets], session.device)


def joined(tickets: Sequence[Ticket], responses: Sequence[Finished], device: torch.device) -> Rollout:
    """Return the responses to the tickets as a rollout."""
    rows = {id(ticket.prompt): torch.as_tensor(ticket.prompt.ids, dtype=torch.int64) for ticket in tickets}
    on_device = torch.cat(list(rows.values())).to(device).split([len(row) for row in rows.values()])
    prompts = dict(zip(rows, on_device, strict=True))
    return Rollout(
        prompts=[prompts[id(ticket.prompt)] for ticket in tickets],
        responses=[response.ids for response in responses],
        log_probs=[response.log_probs for response in responses],
        finished=torch.tensor([response.reason != "limit" for response in responses], device=device),
    )
