"""Environments of OpenEnv as those of `--environment`: `class Game(OpenEnv)` in a file of the user's.

OpenEnv itself is not imported: an environment has `reset()`, `step(action)` and `close()`, and what the first two
return has `reward` and `done`, beside its observation (a client's) or among its fields (an environment's in this
process).
"""

import json
import weakref
from collections.abc import Callable
from inspect import Parameter, Signature, cleandoc
from typing import Any, ClassVar

from pydantic import BaseModel
from pydantic_core import to_jsonable_python

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
        """Give the class its tool. Raises TypeError where it lacks `environment`, or a pydantic model as `action`."""
        if not (hasattr(cls, "environment") and hasattr(getattr(cls, "action", None), "model_fields")):
            raise TypeError(f"{cls.__name__} needs `environment`, a class of OpenEnv, and `action`, its pydantic model")
        fields = {name: field for name, field in cls.action.model_fields.items() if name not in SHOWN_APART}

        def step(self: OpenEnv, **arguments: Any) -> str:
            return self._step(arguments)

        # Not inspect.getdoc: an action without a docstring would be described by that of OpenEnv's base class.
        about = cleandoc(cls.action.__doc__ or cls.action.__name__).split("\n\n")[0]
        lines = [f"    {name}: {' '.join((field.description or name).split())}" for name, field in fields.items()]
        step.__doc__ = "\n".join([about, "", "Args:", *lines] if lines else [about])
        step.__annotations__ = {name: field.annotation for name, field in fields.items()} | {"return": str}
        parameters = [Parameter("self", Parameter.POSITIONAL_OR_KEYWORD)]
        for name, field in fields.items():
            default = Parameter.empty if field.is_required() else field.get_default()
            parameters.append(Parameter(name, Parameter.KEYWORD_ONLY, default=default, annotation=field.annotation))
        step.__signature__ = Signature(parameters)  # type: ignore[attr-defined]
        cls.step = step  # type: ignore[attr-defined]

    def reset(self, seed: int | None = None) -> str:
        """Begin an episode, with the seed of the row if that has one; return the first observation."""
        environment = type(self).environment()
        self._environment = environment.sync() if hasattr(environment, "sync") else environment  # of a client
        weakref.finalize(self, self._environment.close)  # also of a lost episode: a server has few sessions
        self._reward, self._is_done = 0.0, False
        return self._observed(self._environment.reset() if seed is None else self._environment.reset(seed=seed))

    def get_reward(self) -> float:
        """Return the sum of the rewards of the steps."""
        return self._reward

    def _step(self, arguments: dict[str, Any]) -> str:
        if self._is_done:
            raise ValueError("the episode has ended: no further step is possible")
        result = self._environment.step(self.action(**arguments))
        self._reward += float(result.reward or 0.0)
        return self._observed(result)

    def _observed(self, result: Any) -> str:
        """Note whether a result is the last; return its observation as the model gets it."""
        self._is_done = bool(result.done)
        observation = result if isinstance(result, BaseModel) else result.observation
        shown = to_jsonable_python(observation, exclude=SHOWN_APART, by_alias=False, fallback=str)
        only = next(iter(shown.values())) if len(shown) == 1 else None
        return only if isinstance(only, str) else json.dumps(shown, ensure_ascii=False)
