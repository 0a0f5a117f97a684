"""The modules beside a reward function's file that it imports: what else its values depend on."""

import ast
import sys
from collections.abc import Iterator, Mapping
from contextlib import suppress
from pathlib import Path

from pipeline.files import digest
from pipeline.rewards.calls import RefusedError

PROJECT = __name__.partition(".")[0]


def modules_beside(file: Path) -> dict[str, str]:
    """Return {path below the file's folder: SHA-256} of the modules there that it imports, also one by another.

    They are read, not run: import statements count wherever they stand. This project's own package is left out.
    """
    folder, digests, waiting = file.parent, dict[str, str](), [file]
    while waiting:
        for parts in imported_names(waiting.pop(), folder):
            for base in [folder.joinpath(*parts[: n + 1]) for n in range(len(parts)) if parts[0] != PROJECT]:
                for path in (base.with_suffix(".py"), base / "__init__.py"):
                    if path.is_file() and (key := path.relative_to(folder).as_posix()) not in digests:
                        digests[key] = digest(path)
                        waiting.append(path)
    return digests


def imported_names(file: Path, folder: Path) -> Iterator[list[str]]:
    """Yield the parts of each name that a file's import statements may mean; none where it is no Python."""
    with suppress(SyntaxError, ValueError, RecursionError):
        for node in ast.walk(ast.parse(file.read_bytes())):
            if isinstance(node, ast.Import | ast.ImportFrom):
                level, module = getattr(node, "level", 0), getattr(node, "module", None)
                above = file.relative_to(folder).parts[:-level] if level else ()
                names = (".".join(filter(None, [*above, module, alias.name])) for alias in node.names)
                yield from (name.split(".") for name in names)


def check_modules(target: str, digests: Mapping[str, str], seen: set[str]) -> list[str]:
    """Return the paths of modules beside a user's file that are imported now and are not in `digests`.

    Args:
        digests: path below the file's folder -> SHA-256 of its content at the start; see `modules_beside`.
        seen: names of checked modules; the function adds to it.

    Raises RefusedError where one of them has another content.
    """
    file, unknown = Path(target.rpartition(":")[0]), list[str]()
    for name in sys.modules.keys() - seen if file.name else ():
        seen.add(name)
        path = Path(str(getattr(getattr(sys.modules.get(name), "__spec__", None), "origin", None)))
        is_of_others = path == file or name.split(".")[0] == PROJECT or "site-packages" in path.parts
        if path.is_relative_to(file.parent) and not is_of_others:
            key = path.relative_to(file.parent).as_posix()
            if key not in digests:
                unknown.append(key)
            elif digest(path) != digests[key]:
                raise RefusedError(f"{key} has changed since the start; a run uses one version, restore it")
    return unknown
