"""The answers to one request while they are sampled: what the worker's thread delivers, read by the server's loop."""

import asyncio
from collections.abc import AsyncIterator, Callable
from contextlib import suppress
from dataclasses import dataclass, field

from pipeline.generation.rollouts import Prompt, RandomKey, Sampling
from pipeline.generation.session import Request
from pipeline.inference.serving.bodies import ApiError
from pipeline.inference.serving.replies import ServedText
from pipeline.inference.serving.worker import Ended, Event, Failed, Piece, ServedModel


@dataclass(slots=True, eq=False)
class Answers:
    """The answers to one request, with the events of all of them in one queue.

    model: the model that gives them.
    num_prompts: prompts of the request.
    num_each: answers to each prompt.
    prompts: tokens of each prompt, once they are encoded.
    num_left: answers that have not ended.
    queued: (number of the answer, event), in the order in which they came.
    submitted: the requests in the model's session.
    """

    model: ServedModel
    num_prompts: int
    num_each: int
    prompts: list[list[int]] = field(default_factory=list)
    num_left: int = 0
    queued: "asyncio.Queue[tuple[int, Event]]" = field(default_factory=asyncio.Queue)
    submitted: list[Request] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.num_left = self.count

    @property
    def count(self) -> int:
        """The number of answers."""
        return self.num_prompts * self.num_each

    def receive(self, number: int, event: Event) -> None:
        """Queue an event."""
        self.num_left -= not isinstance(event, Piece)
        self.queued.put_nowait((number, event))

    def submission(self, sampling: Sampling, seed: int, **how: bool) -> Callable[[], None]:
        """Return a function that submits the requests, for the worker's thread, `how` as in `ServedModel.start`.

        Equal prompts get other random numbers each, by their copy's number.
        """
        loop = asyncio.get_running_loop()

        def submit() -> None:
            for number in range(self.count):
                index, sample = divmod(number, self.num_each)
                ids = self.prompts[index]

                def deliver(event: Event, number: int = number) -> None:
                    with suppress(RuntimeError):  # the loop is closed: the server ends
                        loop.call_soon_threadsafe(self.receive, number, event)

                key = RandomKey(seed, "answer", self.prompts[:index].count(ids))
                request = self.model.start(Prompt.of(ids), sampling, key, sample, deliver, **how)
                self.submitted.append(request)

        return submit

    async def events(self) -> AsyncIterator[tuple[int, Piece | Ended]]:
        """Yield the events until the last answer has ended. Raises ApiError."""
        num_running = self.count
        while num_running:
            number, event = await self.queued.get()
            if isinstance(event, Failed):
                raise ApiError(500, event.message, "server_error")
            num_running -= isinstance(event, Ended)
            yield number, event

    async def collected(self) -> list[ServedText]:
        """Return all answers when the last one has ended. Raises ApiError."""
        texts = [ServedText() for _ in range(self.count)]
        async for number, event in self.events():
            if isinstance(event, Ended):
                texts[number].ended = event
            else:
                texts[number].text += event.text
        return texts

    def withdraw(self) -> None:
        """Forget all requests, on the worker's thread."""
        for request in self.submitted:
            self.model.withdraw(request)
