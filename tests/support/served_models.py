"""Requests to the models of a server, whose steps alternate as in its thread."""

from collections.abc import Sequence

from pipeline.generation.rollouts import Prompt, RandomKey
from pipeline.generation.session import Capacity
from pipeline.inference.answer_settings import ReplySettings
from pipeline.inference.answers import ChatModel, sampling_of
from pipeline.inference.serving.worker import Ended, ServedModel


def answers_in_turn(
    models: dict[str, ChatModel], prompt: Sequence[int], settings: ReplySettings, *, seed: int
) -> dict[str, tuple[int, ...]]:
    """The ids of each model's answer to a prompt."""
    room = Capacity(2, settings.max_new_tokens, 64 + settings.max_new_tokens)
    served = [ServedModel(name, model, room) for name, model in models.items()]
    found: dict[str, tuple[int, ...]] = {}
    for model in served:

        def deliver(event: object, name: str = model.name) -> None:
            if isinstance(event, Ended):
                found[name] = tuple(event.ids)

        model.start(Prompt.of(prompt), sampling_of(settings), RandomKey(seed, "answer"), 0, deliver, continues=False)
    while len(found) < len(served):
        for model in served:
            if not model.is_idle:
                model.advance()
    return found
