"""Load a reward function, call it with the arguments that it names, and check its values; in a worker or a rank.

The signature is TRL's: `reward(prompts, completions, completion_ids, **columns)` returns a value for each completion.
Each worker imports this module, so it imports only modules that load fast.
"""

import hashlib
import importlib.util
import inspect
import sys
from collections.abc import Callable, Collection, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from types import SimpleNamespace
from typing import Any, Literal

from pipeline.errors import InputError, nearest

FailureKind = Literal["raised", "timed out", "worker died", "no connection"]
OURS = ("prompts", "completions", "completion_ids")
# Arguments of TRL that concern its trainer: `trainer_state.global_step` is the step, what is logged is dropped.
TRAINERS = ("trainer_state", "log_extra", "log_metric")
# Classes of errors, also of libraries, by which an endpoint that does not answer is recognised.
UNREACHABLE = {"ConnectionError", "URLError", "gaierror", "ConnectError", "ConnectTimeout", "EnvironmentFault"}
MAX_VALUE = 3.4028234e38  # of fp32
MAX_MESSAGE, MAX_SHOWN = 300, 40  # characters


class RefusedError(Exception):
    """A function that cannot be had, or what it returned cannot be used; the message names it."""


@dataclass(frozen=True, slots=True)
class Signature:
    """The parameters of a function, and the process in which it runs.

    named: its parameters.
    needed: parameters without a default.
    takes_all: True if it has **kwargs.
    in_rank: True if it runs in the process of the rank, as the built-in judge does by `runs_in = "rank"`.
    column: the column that a built-in function reads unless its args name another, "" for none; None: it has no such
        setting.
    """

    named: Sequence[str]
    needed: Sequence[str]
    takes_all: bool
    in_rank: bool
    column: str | None = None

    def takes(self, name: str) -> bool:
        return self.takes_all or name in self.named

    def reason_against(self, args: Mapping[str, Any], columns: Collection[str]) -> str:
        """Return why it cannot be called with its own args and these columns of rows, or an empty text."""
        if unknown := [name for name in args if name in OURS or not self.takes(name)]:
            return f"args: it has no argument {unknown[0]!r}, only {', '.join(self.named)}"
        column = "" if self.column is None else args.get("column", self.column)
        if column in self.named:
            return f"args: column: {column!r} is a name that it has itself; rename the column of the data"
        needed = {*self.needed} | ({column} if column else set())
        missing = needed.difference(OURS, TRAINERS, args, columns)
        return reason_of_missing(missing, columns) if missing else ""


def reason_of_missing(missing: Collection[str], columns: Collection[str]) -> str:
    """Return why a function cannot be called whose `missing` columns the data does not have beside `columns`."""
    columns_of_data = f"only {', '.join(columns)}" if columns else "none for rewards"
    return f"it needs the column {min(missing)!r}, and the data has {columns_of_data}{nearest(min(missing), columns)}"


def functions_of_box() -> Mapping[str, Callable[..., Any]]:
    from pipeline.rewards.box.table import BOX

    return BOX


def load(target: str, digest: str, what: Literal["function", "class"] = "function") -> Callable[..., Any]:
    """Return a built-in function, or one of a user's file, which is imported once in a process.

    what: for messages.

    Raises:
        RefusedError: the file is no longer that of `digest`, or has no such function.
    """
    file, _, name = target.rpartition(":")
    if not file:
        return functions_of_box()[name]
    module_name = f"reward_functions_{digest}"
    if module_name not in sys.modules:
        if hashlib.sha256(Path(file).read_bytes()).hexdigest() != digest:
            raise RefusedError("the file has changed since the start; a run uses one version, restore it")
        spec = importlib.util.spec_from_file_location(module_name, file)
        assert spec and spec.loader
        module = sys.modules[module_name] = importlib.util.module_from_spec(spec)
        try:
            spec.loader.exec_module(module)
        except BaseException:
            del sys.modules[module_name]
            raise
    function = getattr(sys.modules[module_name], name, None)
    if not callable(function):
        is_other = inspect.isfunction if what == "function" else inspect.isclass
        others = [other for other, value in vars(sys.modules[module_name]).items() if is_other(value)]
        raise RefusedError(f"the file has no {what} {name!r}, only {', '.join(others) or 'none at all'}")
    return function


def check_args(target: str, args: Mapping[str, Any], signature: Signature, *, in_rank: bool = False) -> None:
    """Call a built-in function without responses, where it runs.

    Raises:
        RefusedError: a setting that it refuses, or a package that it needs.
        EnvironmentFault: a judge whose key is not in the environment.
    """
    if ".py:" not in target and signature.in_rank == in_rank:
        from pipeline.rewards.box.table import check_settings

        try:
            check_settings(target, args)
        except InputError as error:
            raise RefusedError(str(error).removeprefix(f"reward function {target}: ")) from error


def signature_of(function: Callable[..., Any], *, is_of_box: bool) -> Signature:
    """Return what a function takes. Raises RefusedError where it cannot be called by names."""
    try:
        parameters = inspect.signature(function).parameters.values()
    except ValueError:
        raise RefusedError("Python does not know its parameters; wrap it in a function of your own") from None
    if alone := [one.name for one in parameters if one.kind is one.POSITIONAL_ONLY]:
        raise RefusedError(f"its parameter {alone[0]!r} cannot be given by name; take the / out of its signature")
    if hasattr(function, "runs_in") and not is_of_box:
        raise RefusedError("runs_in: only the built-in judge has it; leave it out, --reward-env NAME gives it a key")
    named = [one for one in parameters if one.kind in (one.POSITIONAL_OR_KEYWORD, one.KEYWORD_ONLY)]
    return Signature(
        named=[one.name for one in named],
        needed=[one.name for one in named if one.default is one.empty],
        takes_all=any(one.kind is one.VAR_KEYWORD for one in parameters),
        in_rank=getattr(function, "runs_in", "worker") == "rank",
        column=next((one.default for one in named if is_of_box and one.name == "column"), None),
    )


def load_beside(target: str, digest: str, what: Literal["function", "class"] = "function") -> Callable[..., Any]:
    """Return what `load` does; a user's file can import those beside it, as a script can."""
    file, _, _ = target.rpartition(":")
    if file and (folder := str(Path(file).parent)) not in sys.path:
        sys.path.insert(0, folder)
    return load(target, digest, what)


def loaded_function(target: str, digest: str) -> tuple[Callable[..., Any], Signature]:
    """Return a function, see `load_beside`, and its signature."""
    function = load_beside(target, digest)
    return function, signature_of(function, is_of_box=".py:" not in target)


@dataclass(frozen=True)
class Call:
    """A call of a function with the responses of one prompt.

    lengths: tokens of each response.
    each: arguments that have a value for each response.
    repeated: arguments that are the same for each.
    args: the function's own arguments.
    step: step of the training.
    """

    lengths: list[int]
    each: Mapping[str, list[Any]]
    repeated: Mapping[str, Any]
    args: Mapping[str, Any]
    step: int

    def arguments(self, signature: Signature) -> dict[str, Any]:
        """Return the keyword arguments of the function."""
        of_trainer = dict.fromkeys(TRAINERS, _dropped) | {"trainer_state": SimpleNamespace(global_step=self.step)}
        repeated = {name: [value] * len(self.lengths) for name, value in self.repeated.items()}
        taken = {name: value for name, value in of_trainer.items() if signature.takes(name)}
        return repeated | taken | {**self.args} | {**self.each}


def _dropped(*args: Any, **kwargs: Any) -> None:
    """Stand for what TRL logs with."""


def checked_values(values: Any, lengths: Sequence[int]) -> list[Any]:
    """Return what a function returned: for each response a finite float, a list of them (one a token), or None.

    Numbers may be those of numpy and torch, and so may the lists.

    Args:
        lengths: tokens of each response.

    Raises:
        RefusedError: anything else.
    """
    values = plain(values)
    if not isinstance(values, list):
        raise RefusedError(
            f"returned {shown(values)}, expected a list with a value for each of {len(lengths)} responses"
        )
    if len(values) != len(lengths):
        raise RefusedError(f"returned {len(values)} values for {len(lengths)} responses, expected one for each")
    return [_checked(value, length, number) for number, (value, length) in enumerate(zip(values, lengths, strict=True))]


def _checked(value: Any, length: int, number: int) -> Any:
    value = plain(value)
    if value is None or is_number(value):
        return None if value is None else float(value)
    problem = f"response {number}: returned {shown(value)}"
    if not isinstance(value, list):
        raise RefusedError(f"{problem}, expected a finite number, a list of them, or None")
    tokens = [plain(token) for token in value]
    if len(tokens) != length:
        raise RefusedError(f"{problem} of {len(tokens)} values for {length} tokens, expected one for each")
    if wrong := [token for token in tokens if not is_number(token)]:
        raise RefusedError(f"{problem} with {shown(wrong[0])}, expected finite numbers alone")
    return [float(token) for token in tokens]


def plain(value: Any) -> Any:
    """Return lists and numbers of numpy and torch as Python's, and a tuple as a list."""
    if isinstance(value, tuple):
        return list(value)
    return value.tolist() if hasattr(value, "tolist") else value


def is_number(value: Any) -> bool:
    """Return True for a number that is finite in fp32."""
    return isinstance(value, int | float) and -MAX_VALUE <= value <= MAX_VALUE


def shown(value: Any) -> str:
    """Return what a message calls a value: a short number or text as Python writes it, of all else the type."""
    kind, text = type(value).__name__, ""
    if isinstance(value, str | int | float):
        with suppress(ValueError):  # Python does not write numbers of thousands of digits
            text = repr(value)
    return f"{text} ({kind})" if 0 < len(text) <= MAX_SHOWN else f"a value of type {kind}"


def cause_of(error: BaseException, target: str) -> tuple[FailureKind, str]:
    """Return the kind of failure that an error of a function is, and its message, with the line of the user's file."""
    import traceback

    message = " ".join(traceback.format_exception_only(error)[-1].split())[:MAX_MESSAGE]
    if isinstance(error, MemoryError):
        message += "; the memory of its process is --reward-worker-gib"
    file = target.rpartition(":")[0]
    lines = [frame.lineno for frame in traceback.extract_tb(error.__traceback__) if frame.filename == file]
    if isinstance(error, SyntaxError) and error.filename == file:
        lines.append(error.lineno)
    where = f" ({Path(file).name}:{lines[-1]})" if lines else ""
    names, causes = set[str](), [error]
    for one in causes:
        names |= {kind.__name__ for kind in type(one).__mro__}
        causes += [one.__cause__] if one.__cause__ else []
    if "HTTPError" in names:  # an answer; urllib's is a URLError
        names.discard("URLError")
    return "no connection" if names & UNREACHABLE else "raised", message + where


def answer_to(error: BaseException, target: str) -> dict[str, Any]:
    """Return the answer to a call that raised an error; the trace of a function's own error is printed."""
    if isinstance(error, RefusedError):
        return {"refused": str(error)}
    kind, message = cause_of(error, target)
    return {"failed": [kind, message]}
