"""The modules beside a reward function's file that it imports: what else its values depend on."""

import ast
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path

from pipeline.files import digest


def modules_beside(file: Path) -> dict[str, str]:
    """Return {path below the file's folder: SHA-256} of the modules there that it imports, also one by another.

    They are read, not run: import statements count wherever they stand. This project's own package is left out.
    """
    folder, found, waiting = file.parent, dict[str, str](), [file]
    while waiting:
        for name in imported_names(waiting.pop(), folder):
            parts = name.split(".")
            for number in range(1, len(parts) + 1 if parts[0] != __name__.partition(".")[0] else 1):
                base = folder.joinpath(*parts[:number])
                for path in (base.with_name(f"{base.name}.py"), base / "__init__.py"):
                    if path.is_file() and path != file and (key := path.relative_to(folder).as_posix()) not in found:
                        found[key] = digest(path)
                        waiting.append(path)
    return dict(sorted(found.items()))


def imported_names(file: Path, folder: Path) -> Iterator[str]:
    """Yield the dotted names that a file's import statements could mean; none where it is no Python."""
    nodes = list[ast.AST]()
    with suppress(SyntaxError, ValueError, RecursionError):
        nodes = list(ast.walk(ast.parse(file.read_bytes())))
    for node in nodes:
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            above = file.relative_to(folder).parts[: -node.level] if node.level else ()
            start = ".".join([*above, *filter(None, [node.module])])
            yield from (f"{start}.{alias.name}".strip(".") for alias in node.names)
