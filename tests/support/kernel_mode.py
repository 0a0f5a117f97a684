"""Triton's interpreter is switched on where there is no CUDA device; to be imported before transformers.

Triton reads the variable when its own library is imported, which transformers' models do by way of torch._dynamo.
"""

import os
from functools import cache
from typing import Any

import torch


def remember_what_never_changes() -> None:
    """Let the interpreter search triton's language once, not in each call of a kernel: a third of a kernel's time."""
    from triton.runtime import interpreter

    language, np_dtype = interpreter.tl, interpreter._get_np_dtype
    by_name: dict[str, Any] = {}

    @cache
    def builtins(owner: Any) -> list[str]:
        return [name for name, member in interpreter.inspect.getmembers(owner) if language.core.is_builtin(member)]

    def patch_builtin(owner: Any, builder: Any, scope: Any) -> None:
        for name in builtins(owner):
            member = getattr(owner, name)
            if language.core.is_builtin(member):  # else it is patched already
                interpreter._patch_attr(owner, name, member, builder, scope)

    def dtype_of(kind: Any) -> Any:
        name = kind.scalar.name
        if name not in by_name:
            by_name[name] = np_dtype(kind)
        return by_name[name]

    interpreter._patch_builtin, interpreter._get_np_dtype = patch_builtin, dtype_of


if not torch.cuda.is_available():
    os.environ.setdefault("TRITON_INTERPRET", "1")
    remember_what_never_changes()
