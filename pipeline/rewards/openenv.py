"""Environments of OpenEnv as those of `--environment`: `class Game(OpenEnv)` in a file of the user's.

OpenEnv itself is not imported: an environment has `reset()` and `step(action)`, and what these return has `reward` and
`done`, beside its observation (a client's) or among its fields (an environment's in this process).
"""

import inspect
import json
from collections.abc import Callable
from typing import Any, ClassVar

from pydantic import BaseModel

SHOWN_APART = {"done", "reward", "metadata"}  # fields of an observation that the model does not get


class OpenEnv:
    """An environment whose actions are calls of the tool `step`, with the fields of an action as arguments.

    The reward of a response is the sum of those of its steps.

    environment: makes an environment of OpenEnv, or a client: a class, or a `functools.partial` of one.
    action: the model of its actions; the descriptions of its fields are those of the arguments.
    """

    environment: ClassVar[Callable[[], Any]]
    action: ClassVar[type[BaseModel]]

    def __init_subclass__(cls) -> None:
        """Give the class its tool."""
        fields = {name: field for name, field in cls.action.model_fields.items() if name not in SHOWN_APART}

        def step(self: OpenEnv, **arguments: Any) -> str:
            return self._step(arguments)

        about = (inspect.getdoc(cls.action) or cls.action.__name__).split("\n\n")[0]
        lines = [f"    {name}: {field.description or name}" for name, field in fields.items()]
        step.__doc__ = "\n".join([about, "", "Args:", *lines] if lines else [about])
        step.__annotations__ = {name: field.annotation for name, field in fields.items()} | {"return": str}
        parameters = [inspect.Parameter("self", inspect.Parameter.POSITIONAL_OR_KEYWORD)]
        for name, field in fields.items():
            default = inspect.Parameter.empty if field.is_required() else field.get_default()
            kind = inspect.Parameter.KEYWORD_ONLY
            parameters.append(inspect.Parameter(name, kind, default=default, annotation=field.annotation))
        step.__signature__ = inspect.Signature(parameters)  # type: ignore[attr-defined]
        cls.step = step  # type: ignore[attr-defined]

    def reset(self, seed: int | None = None) -> str:
        """Begin an episode, with the seed of the row if that has one; return the first observation."""
        environment = type(self).environment()
        self._environment = environment.sync() if hasattr(environment, "sync") else environment  # of a client
        self._reward, self._is_done = 0.0, False
        return self._observed(self._environment.reset() if seed is None else self._environment.reset(seed=seed))

    def get_reward(self) -> float:
        """End the episode, and return the sum of its rewards."""
        if hasattr(self._environment, "close"):
            self._environment.close()
        return self._reward

    def _step(self, arguments: dict[str, Any]) -> str:
        if self._is_done:
            raise ValueError("the episode has ended: no further step is possible")
        return self._observed(self._environment.step(self.action(**arguments)))

    def _observed(self, result: Any) -> str:
        """Note the reward and the end of a result; return its observation as the model gets it."""
        self._reward, self._is_done = self._reward + float(result.reward or 0.0), bool(result.done)
        observation = getattr(result, "observation", result)
        values = observation if isinstance(observation, dict) else observation.model_dump()
        shown = {name: value for name, value in values.items() if name not in SHOWN_APART}
        only = next(iter(shown.values())) if len(shown) == 1 else None
        return only if isinstance(only, str) else json.dumps(shown, ensure_ascii=False, default=str)
