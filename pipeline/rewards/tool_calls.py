"""Tools and environments in a worker: their schemas, their calls, and the results as text for the model.

Each worker imports this module, so it imports only modules that load fast.
"""

import inspect
import json
import re
import time
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any

from pipeline.rewards.calls import RefusedError, cause_of, is_number, load_beside, plain, shown, signature_of

if TYPE_CHECKING:
    import asyncio

MAX_RESULT = 20_000  # characters of a result that the model gets; chosen by hand, some 5,000 tokens
OWN_METHODS = ("reset", "get_reward")  # of an environment, which the model cannot call
# Folders of an absolute path; in quotes, as errors of the system have it, with blanks.
FOLDERS = re.compile(r"""(?<=['"])~?/(?:[^'"/]+/)+(?=[^'"/])|(?<![\w.:/~-])~?/(?:[\w.@+-]+/)+(?=[\w.@+-])""")
MODULE = re.compile(r"reward_functions_[0-9a-f]+\.")  # the name of the user's module, see `load`
MEND = "a tool has a Google-style docstring, with a line on each argument under Args:, and a type hint for each"


class ToolCalls:
    """The tools of a worker process, and the environments that live in it, by the number of their episode."""

    def __init__(self) -> None:
        self._instances = dict[int, Any]()
        self._loop: asyncio.AbstractEventLoop | None = None

    def answer(self, request: Mapping[str, Any]) -> dict[str, Any]:
        """Return the answer to a request. What a called tool raises is its result; all else that is raised is not."""
        is_environment = request["flag"] == "--environment"
        code = load_beside(request["target"], request["digest"], "class" if is_environment else "function")
        number = request.get("instance", -1)
        match request["do"]:
            case "describe" if is_environment:
                return described_environment(code)
            case "describe":
                schemas = [schema_of(code, request["target"].rpartition(":")[2])]
                return {"schemas": schemas, "has_reward": False, "needs": []}
            case "reset":
                return {"text": self._reset(code, number, request["row"])}
            case "call":
                method = getattr(self._instances[number], request["method"]) if is_environment else code
                return self._call(method, request["arguments"], request["target"])
            case "end":
                return {"reward": self._reward(self._instances.pop(number))}
            case "forget":
                self._instances.pop(number, None)
        return {}

    def _reset(self, create: Callable[[], Any], number: int, row: Mapping[str, Any]) -> str | None:
        """Create the instance of an episode, and return what its `reset` returned."""
        instance = create()
        signature = signature_of(instance.reset, is_of_box=False)
        text = self._result(instance.reset(**{name: value for name, value in row.items() if signature.takes(name)}))
        if not isinstance(text, str | None):
            raise RefusedError(f"reset returned {shown(text)}, expected a text or None")
        self._instances[number] = instance
        return None if text is None else limited(text)

    def _call(self, tool: Callable[..., Any], arguments: Mapping[str, Any], target: str) -> dict[str, Any]:
        """Return the result of a call as text; "cause": what the tool raised, with the line of the user's file."""
        start, cause = time.monotonic(), None
        try:
            result = self._result(tool(**arguments))
            text = result if isinstance(result, str) else json.dumps(result, ensure_ascii=False, default=str)
        except MemoryError:  # the process is full, perhaps of what other episodes have stored in it
            raise
        except BaseException as error:  # also SystemExit
            text, cause = error_text(error), cause_of(error, target)[1]
        return {"text": limited(text), "cause": cause, "seconds": time.monotonic() - start}

    def _reward(self, instance: Any) -> float | None:
        value = plain(self._result(instance.get_reward()))
        if not (value is None or is_number(value)):
            raise RefusedError(f"get_reward returned {shown(value)}, expected a finite number or None")
        return None if value is None else float(value)

    def _result(self, value: Any) -> Any:
        """Return a value, or the result of a coroutine: in one loop, as connections outlive calls."""
        if not inspect.isawaitable(value):
            return value
        import asyncio

        async def awaited() -> Any:
            return await value

        self._loop = self._loop or asyncio.new_event_loop()
        return self._loop.run_until_complete(awaited())


def described_environment(create: Callable[[], Any]) -> dict[str, Any]:
    """Create an instance, and return the schemas of its methods. Raises RefusedError where it is no environment."""
    if needed := signature_of(create, is_of_box=False).needed:
        raise RefusedError(f"it is created without arguments and needs {needed[0]!r}; give it a default")
    instance = create()
    # Members of the class, as TRL lists them: those of the instance would compute its properties.
    names = [name for name, _ in inspect.getmembers(type(instance), inspect.isfunction) if not name.startswith("_")]
    if "reset" not in names:
        raise RefusedError("it has no method reset, which begins an episode and returns a text or None")
    if names == ["reset"]:
        raise RefusedError("it has no public method besides reset, which the model could call, and no get_reward")
    signature_of(instance.reset, is_of_box=False)
    schemas = [schema_of(getattr(instance, name), name) for name in names if name not in OWN_METHODS]
    needs = signature_of(instance.reset, is_of_box=False).needed
    return {"schemas": schemas, "has_reward": "get_reward" in names, "needs": [*needs]}


def schema_of(tool: Callable[..., Any], name: str) -> dict[str, Any]:
    """Return the JSON schema of a tool with this name. Raises RefusedError where its text has none."""
    from transformers.utils import get_json_schema

    signature_of(tool, is_of_box=False)
    for one in inspect.signature(tool).parameters.values():
        if one.kind in (one.VAR_POSITIONAL, one.VAR_KEYWORD):
            raise RefusedError(f"{name}: its parameter {one} has no schema; name each argument")
    try:
        schema = get_json_schema(tool)
        return {**schema, "function": {**schema["function"], "name": name}}
    except Exception as error:
        reason = MODULE.sub("", re.split("\n|, likely", str(error))[0]).rstrip(".!")
        raise RefusedError(f"{name}: {reason}; {MEND}") from error


def error_text(error: BaseException) -> str:
    """Return the result of a call that raised, in one line, in which a path is only its last name."""
    try:
        message = FOLDERS.sub("", " ".join(str(error).split()))
    except Exception:
        message = "its message cannot be read"
    return f"Error: {type(error).__name__}: {message}".removesuffix(": ")


def limited(text: str) -> str:
    """Return a text that a tokenizer takes, of MAX_RESULT characters and a note on how many there were."""
    whole = text[:MAX_RESULT].encode(errors="replace").decode()  # half of a surrogate pair is no UTF-8
    return whole if len(text) <= MAX_RESULT else f"{whole}\n[truncated: {MAX_RESULT:,} of {len(text):,} characters]"
