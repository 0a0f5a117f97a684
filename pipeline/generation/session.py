"""Generation by sessions: requests are submitted one by one, and each response is returned when it has ended.

    generator.session(...)    opens a session on the current weights, with a capacity of responses at a time
    session.submit(...)       queues a request: a prompt with its own settings, limit, stop texts and random numbers
    session.advance()         computes the next tokens of all running requests, and returns new events
    session.withdraw(...)     forgets a request and frees its slot

`episodes.generate` samples a rollout by a session: all prompts, and turn after turn where tools answer.
`generator.Generator` has sessions of the fused and static backends, `eager.EagerGenerator` those of the eager one. A
response does not depend on other requests, except for rounding in another batch shape, and in the prefill of a prompt
that continues what a slot has (`Request.num_shared`).
"""

from abc import ABC, abstractmethod
from collections import deque
from collections.abc import Sequence
from dataclasses import astuple, dataclass, field
from typing import Literal, Protocol

import torch

from pipeline.generation.rollouts import Prompt, RandomKey, Sampling, Vocabulary

Reason = Literal["end", "stop", "limit"]
TOKENS_PER_CHARACTER = 4  # at most, one for each byte
INCOMPLETE = "\ufffd"  # the decoded form of bytes that are no whole character


@dataclass(slots=True, eq=False)
class Request:
    """A submitted request.

    number: its index in the order of submission.
    prompt: the prompt; requests with the same object share its prefill.
    sampling: settings, limit and stop texts.
    key: the key of the random numbers, completed by the prompt's id and `sample`.
    sample: index of the response among those to its prompt.
    streams: whether its tokens are reported before it has ended.
    after: the ended request whose tokens the prompt begins with, if the caller knows one; one that streams may continue
        any.
    seen: tokens that the host has read, if it streams, has stop texts, or may be continued.
    is_withdrawn: nobody waits for it any more.
    start: first tokens of the prompt that its slot has from an earlier request; the scheduler sets it.
    """

    number: int
    prompt: Prompt
    sampling: Sampling
    key: RandomKey
    sample: int
    streams: bool = False
    after: "Request | None" = None
    seen: list[int] = field(default_factory=list)
    is_withdrawn: bool = False
    start: int = 0

    @property
    def is_watched(self) -> bool:
        """True if the host reads the tokens while they are drawn."""
        return self.streams or bool(self.sampling.stop)

    @property
    def row(self) -> int:
        """The identity of its row in a prefill. Samples share that of their prompt if no slot has a part of it."""
        return id(self if self.start else self.prompt)

    def num_shared(self, ids: Sequence[int]) -> int:
        """Return the number of first tokens of `ids` that its slot has; 0 if they are less than half of either.

        The slot has no key of the last token that was drawn. The last token of `ids` is computed for its logits.
        """
        cached = [*self.prompt.ids, *(() if self.is_withdrawn else self.seen)][:-1]
        most = min(len(cached), len(ids) - 1)
        shared = next((n for n in range(most) if cached[n] != ids[n]), most)
        return shared if 2 * shared >= max(len(cached), len(ids)) else 0


@dataclass(frozen=True, slots=True)
class Tokens:
    """The tokens of a streamed response since its last report, with log-probabilities (T,) as those of `Finished`."""

    request: Request
    ids: list[int]
    log_probs: torch.Tensor


@dataclass(frozen=True, slots=True)
class Finished:
    """A response that has ended.

    request: its request.
    ids: (T,) int64, its tokens; an EOS, and the token that completes a stop text, are part of them.
    log_probs: (T,) fp32, log-probabilities at the request's temperature under the untruncated distribution.
    reason: "end" by an EOS, "stop" by a stop text, "limit" by its number of tokens.
    """

    request: Request
    ids: torch.Tensor
    log_probs: torch.Tensor
    reason: Reason


@dataclass(frozen=True, slots=True)
class Capacity:
    """The limits of a session: its largest batch and longest sequences. Requests beyond `num_slots` wait.

    num_slots: responses that are sampled at a time.
    max_new_tokens: tokens of the longest response.
    max_length: tokens of the longest prompt and its response together.
    """

    num_slots: int
    max_new_tokens: int
    max_length: int

    def union(self, other: "Capacity") -> "Capacity":
        """Return the smallest capacity that covers both."""
        return Capacity(*(max(pair) for pair in zip(astuple(self), astuple(other), strict=True)))


NO_CAPACITY = Capacity(0, 0, 0)


class Session(ABC):
    """Requests and their responses. Each call is a collective of ranks in a tensor-parallel group or in lockstep.

    capacity: the limits that requests must fit.
    vocabulary: ids that end a response or pad it, ids that can be drawn, and the decoding of ids.
    device: device of the responses' tensors.
    waiting: requests that have not started, in the order of submission.
    is_idle: True if no request runs or waits on any rank in lockstep.
    """

    def __init__(self, capacity: Capacity, vocabulary: Vocabulary, device: torch.device) -> None:
        self.capacity, self.vocabulary, self.device = capacity, vocabulary, device
        self.waiting: deque[Request] = deque()
        self.is_idle, self._num_requests = True, 0

    def submit(
        self,
        prompt: Prompt,
        sampling: Sampling,
        key: RandomKey,
        *,
        sample: int = 0,
        streams: bool = False,
        after: Request | None = None,
    ) -> Request:
        """Queue a request for response number `sample` to a prompt.

        Args:
            streams: report its tokens as they are drawn.
            after: an ended request of this session, whose tokens the prompt begins with.

        Raises:
            ValueError: the request does not fit the capacity, or has stop texts and the session has no tokenizer.
        """
        num_new, num_prompt, capacity = sampling.max_new_tokens, len(prompt.ids), self.capacity
        if not 1 <= num_new <= capacity.max_new_tokens or not 1 <= num_prompt <= capacity.max_length - num_new:
            raise ValueError(
                f"a request of {num_prompt} prompt tokens and up to {num_new} new ones: the session has room for 1 to "
                f"{capacity.max_new_tokens} new tokens, and {capacity.max_length} in all"
            )
        if sampling.stop and self.vocabulary.decode is None:
            raise ValueError("a request with stop texts: the session has no tokenizer to decode its tokens")
        request = Request(self._num_requests, prompt, sampling, key, sample, streams, after)
        self._num_requests += 1
        self.waiting.append(request)
        self.is_idle = False
        return request

    def withdraw(self, request: Request) -> None:
        """Forget a request that has not ended: it has no further events, and the next step frees its slot."""
        request.is_withdrawn = True
        if request in self.waiting:
            self.waiting.remove(request)

    def any_rank(self, flag: bool) -> bool:
        """Return True if `flag` is on any rank in lockstep, all of which call it; alone, a rank decides by itself."""
        return flag

    @abstractmethod
    def advance(self, *, stop: bool = False) -> list[Tokens | Finished]:
        """Start requests in free slots, compute the next tokens of running ones, and return new events.

        Raises:
            GenerationStopped: `stop` is True on any rank that generates with this one.
        """


class SessionSource(Protocol):
    """A generation backend, loaded with a model."""

    def session(self, capacity: Capacity) -> Session: ...


def new_events(
    request: Request, ids: torch.Tensor, log_probs: torch.Tensor, reason: Reason | None, vocabulary: Vocabulary
) -> list[Tokens | Finished]:
    """Return the events of a request whose response has these tokens so far.

    `Tokens` come first, if the request streams. `Finished` follows if the response has ended, for `reason` or by a stop
    text; it is truncated after a stop text.

    Args:
        ids, log_probs: (T,) each, all tokens so far.
        reason: why the device ended the response; None while it runs.
    """
    events: list[Tokens | Finished] = []
    if request.is_withdrawn:
        return events
    # A response that had to start again may have fewer tokens than the host has read.
    first = len(request.seen)
    if request.is_watched and (reason or len(ids) > first):
        drawn = ids.tolist()
        length = stopped_length(request.sampling.stop, drawn, vocabulary, seen=first)
        if length is not None:
            ids, log_probs, reason = ids[:length], log_probs[:length], "stop"
        request.seen = drawn[:length]
        is_reported = request.streams and len(request.seen) > first
        events = [Tokens(request, request.seen[first:], log_probs[first:])] if is_reported else []
    return [*events, Finished(request, ids, log_probs, reason)] if reason else events


def stopped_length(stop: Sequence[str], ids: Sequence[int], vocabulary: Vocabulary, *, seen: int = 0) -> int | None:
    """Return the number of tokens after which the text first contains a stop text; None if it contains none.

    Args:
        seen: number of first tokens whose text contains none; only the last of them are decoded again.
    """
    decode = vocabulary.decode
    if not stop or decode is None:
        return None
    # A stop text that a new token completes begins less than its length before that token. The window has one more
    # character, since the first character of a text may be decoded differently than after others.
    start = max(0, seen - TOKENS_PER_CHARACTER * max(map(len, stop)))

    def text_of(length: int) -> str:
        text = decode(ids[start:length])
        return decode(ids[:length]) if INCOMPLETE in text else text

    def contains_stop(text: str) -> bool:
        return any(one in text for one in stop)

    last = text_of(len(ids))
    # Bytes of an incomplete character may hide those before them, if a tokenizer decodes them together.
    if INCOMPLETE not in last and not contains_stop(last):
        return None
    return next((n for n in range(seen + 1, len(ids) + 1) if contains_stop(text_of(n))), None)
