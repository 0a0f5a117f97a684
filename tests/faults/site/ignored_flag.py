"""Make a flag be ignored, in this process or in every one that is started from it: its field answers its default.

Tests of the flags use it; the variables reach launchers and ranks, which import this folder's sitecustomize.
"""

import importlib.util
import json
import os
import sys
from collections.abc import Callable, Iterator
from importlib.abc import MetaPathFinder
from typing import Any

FIELD, DEFAULT = "IGNORED_FLAG_FIELD", "IGNORED_FLAG_DEFAULT"  # "module:Class.field", and JSON


def ignore(owner: Any, field: str, default: Any, change: Callable[..., None] = setattr) -> None:
    """Let instances of the class `owner` answer `default` for `field`; `change` is setattr, or one that is undone."""

    def read(self: Any, name: str) -> Any:
        value = super(owner, self).__getattribute__(name)
        return default if name == field else value

    def dump(self: Any, **options: Any) -> dict[str, Any]:
        values = super(owner, self).model_dump(**options)
        return values | ({field: default} if field in values else {})

    def pairs(self: Any) -> Iterator[tuple[str, Any]]:
        return ((name, default if name == field else value) for name, value in super(owner, self).__iter__())

    change(owner, "__getattribute__", read)
    change(owner, "__iter__", pairs)
    change(owner, "model_dump", dump)


class Ignoring(MetaPathFinder):
    """An import hook that changes the class of `FIELD` as soon as its module has been executed."""

    def __init__(self) -> None:
        self.module, _, name = os.environ[FIELD].partition(":")
        self.owner, _, self.field = name.partition(".")

    def find_spec(self, name: str, path: Any = None, target: Any = None) -> Any:
        """Return the spec of the class's module with our step behind its execution; None for all others."""
        if name != self.module:
            return None
        sys.meta_path.remove(self)
        spec = importlib.util.find_spec(name)
        assert spec is not None and spec.loader is not None
        execute = spec.loader.exec_module

        def execute_and_change(module: Any) -> None:
            execute(module)
            ignore(getattr(module, self.owner), self.field, json.loads(os.environ[DEFAULT]))

        spec.loader.exec_module = execute_and_change  # type: ignore[method-assign]
        return spec


def ignore_in_this_process() -> None:
    """Install the hook; called by sitecustomize, before any module of the project is imported."""
    sys.meta_path.insert(0, Ignoring())
