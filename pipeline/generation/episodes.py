"""Rollouts: all prompts are submitted to a session, and a turn that is answered, as by a tool, is followed by another.

A response is an episode: turns of the model, and between them the tokens that answer them. Those are never sampled, so
they are not trained on. The ids of a turn stay as they were sampled: no text of them is encoded again.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import Protocol

import torch

from pipeline.generation.rollouts import GenerationStopped, Prompt, RandomKey, Rollout, Sampling
from pipeline.generation.session import Capacity, Finished, Reason, Request, Session, SessionSource

# Answers are taken in when so many of the slots wait for them, or when nothing else is sampled. Both follow from the
# tokens alone: if an answer were taken in as soon as it is there, the batch of a prefill, and in 16 bits its rounding,
# would depend on the time that tools take. A larger share leaves more slots empty, a smaller one waits more often.
# Chosen by hand.
WAITING_SHARE = 1 / 4


@dataclass(frozen=True)  # without slots, for the cached property
class Segment:
    """A piece of an episode.

    ids: (T,) int64.
    log_probs: (T,) fp32, as those of `Finished`; None: the tokens are not the model's.
    """

    ids: torch.Tensor
    log_probs: torch.Tensor | None

    @cached_property
    def on_host(self) -> list[int]:
        """The ids as a list, which waits for the device once."""
        return self.ids.tolist()


@dataclass(slots=True, eq=False)
class Episode:
    """A response of one or more turns.

    number: its row in the rollout.
    prompt: what it answers.
    sample: index among the responses to the prompt.
    segments: turns of the model, and what answered them, in order; the last one is the model's.
    length: tokens of all segments.
    reason: why the last turn ended.
    request: that of the last turn.
    """

    number: int
    prompt: Prompt
    sample: int
    segments: list[Segment] = field(default_factory=list)
    length: int = 0
    reason: Reason = "limit"
    request: Request | None = None

    @property
    def turns(self) -> list[list[int]]:
        """The ids of each segment, on the host."""
        return [segment.on_host for segment in self.segments]

    def add(self, ids: torch.Tensor, log_probs: torch.Tensor | None) -> None:
        self.segments.append(Segment(ids, log_probs))
        self.length += len(ids)

    def continued(self, ids: Sequence[int]) -> Prompt:
        """Return the prompt of the next turn, which `ids` begin; its random numbers are keyed by all ids before it."""
        return Prompt.of([*self.prompt.ids, *(token for turn in self.turns for token in turn), *ids])


class Answers(Protocol):
    """Source of answers to turns of the model."""

    def answer(self, episode: Episode) -> Callable[[], list[int]] | None:
        """Begin to answer the last turn; None: the episode has ended, as it has where `reason` is not "end".

        The function that is returned waits for the answer. It returns the ids between the turn's end and the model's
        next token, [] if the episode ends after all. It raises GenerationStopped if the generation is to stop.
        """

    def ended(self, episode: Episode) -> None:
        """Take note of an episode that has ended, while others are sampled."""


@dataclass(frozen=True, slots=True)
class NoAnswers:
    """Episodes of one turn. note: called with each when it has ended."""

    note: Callable[[Episode], None] = lambda episode: None

    def answer(self, episode: Episode) -> None:
        """Return None: the first turn is the last."""

    def ended(self, episode: Episode) -> None:
        self.note(episode)


def generate(
    source: SessionSource,
    prompts: Sequence[Prompt],
    *,
    num_samples: int,
    num_slots: int,
    sampling: Sampling,
    key: RandomKey,
    answers: Answers = NoAnswers(),
    should_stop: Callable[[], bool] = lambda: False,
) -> Rollout:
    """Sample `num_samples` responses to each prompt, `num_slots` of them at a time.

    Args:
        sampling: its limit of tokens holds for all turns of a response and what answers them together.

    Raises:
        GenerationStopped: `should_stop` returned True between two steps, on any rank that generates with this one.
    """
    longest = max(len(prompt.ids) for prompt in prompts) + sampling.max_new_tokens
    capacity = Capacity(min(num_slots, len(prompts) * num_samples), sampling.max_new_tokens, longest)
    session = source.session(capacity)
    samples = [(prompt, n) for prompt in prompts for n in range(num_samples)]
    episodes = [Episode(number, prompt, n) for number, (prompt, n) in enumerate(samples)]
    collect(session, episodes, sampling=sampling, key=key, answers=answers, should_stop=should_stop)
    return rollout_of(episodes, session.device)


def collect(
    session: Session,
    episodes: Sequence[Episode],
    *,
    sampling: Sampling,
    key: RandomKey,
    answers: Answers,
    should_stop: Callable[[], bool],
) -> None:
    """Sample all episodes to their ends. Raises GenerationStopped, see `generate`."""
    running = {session.submit(one.prompt, sampling, key, sample=one.sample): one for one in episodes}
    waiting: list[tuple[Episode, Callable[[], list[int]]]] = []
    stopped = False  # all ranks that generate together learn of it in the next step, and raise
    while True:
        for event in session.advance(stop=stopped or should_stop()):
            if isinstance(event, Finished):
                episode = running.pop(event.request)
                episode.add(event.ids, event.log_probs)
                episode.reason, episode.request = event.reason, event.request
                if (ids_of_answer := answers.answer(episode)) is None:
                    answers.ended(episode)
                else:
                    event.request.seen = episode.segments[-1].on_host  # as its slot has them for the next turn
                    waiting.append((episode, ids_of_answer))
        is_idle = session.is_idle
        if is_idle or len(waiting) >= WAITING_SHARE * session.capacity.num_slots:
            try:
                for episode, ids_of_answer in waiting:
                    if (request := next_turn(session, episode, ids_of_answer(), sampling, key)) is None:
                        answers.ended(episode)
                    else:
                        running[request] = episode
            except GenerationStopped:
                stopped = True
            waiting.clear()
        if is_idle and not session.any_rank(bool(running) or stopped):
            return


def next_turn(session: Session, episode: Episode, ids: list[int], sampling: Sampling, key: RandomKey) -> Request | None:
    """Submit the next turn behind `ids`; None if there are none, or if they leave no room for a turn."""
    room = sampling.max_new_tokens - episode.length - len(ids)
    if not ids:
        return None
    if room < 1:
        episode.reason = "limit"
        return None
    prompt = episode.continued(ids)
    episode.add(torch.tensor(ids, device=session.device), None)
    how = replace(sampling, max_new_tokens=room)
    return session.submit(prompt, how, key, sample=episode.sample, after=episode.request)


def rollout_of(episodes: Sequence[Episode], device: torch.device) -> Rollout:
    """Return episodes that have ended as a rollout."""
    rows = {id(one.prompt): torch.as_tensor(one.prompt.ids, dtype=torch.int64) for one in episodes}
    on_device = torch.cat(list(rows.values())).to(device).split([len(row) for row in rows.values()])
    prompts = dict(zip(rows, on_device, strict=True))
    segments = [one.segments for one in episodes]
    return Rollout(
        prompts=[prompts[id(one.prompt)] for one in episodes],
        responses=[joined([segment.ids for segment in row]) for row in segments],
        sampled=[
            joined([torch.full(segment.ids.shape, segment.log_probs is not None) for segment in row])
            for row in segments
        ],
        log_probs=[joined([one.log_probs for one in row if one.log_probs is not None]) for row in segments],
        finished=torch.tensor([one.reason != "limit" for one in episodes], device=device),
    )


def joined(parts: Sequence[torch.Tensor]) -> torch.Tensor:
    """Return the parts, (T,) each, as one tensor."""
    return parts[0] if len(parts) == 1 else torch.cat(list(parts))
