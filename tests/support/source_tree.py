"""The project's Python files and what their syntax trees say, for the tests of its structure."""

import ast
from collections.abc import Iterator
from functools import cache
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
STAGES = ("step1_sft", "step2_reward", "step3_ppo", "step3_dpo")
PACKAGES = ("pipeline", *STAGES, "launch", "rlhf")  # all that is installed


def source_files(*folders: str) -> list[Path]:
    """Python files below the given folders of the project; the programs of its top level too where none is given."""
    top = [] if folders else sorted(ROOT.glob("*.py"))
    return top + [path for folder in folders or PACKAGES for path in sorted((ROOT / folder).rglob("*.py"))]


@cache
def tree_of(path: Path) -> ast.Module:
    return ast.parse(path.read_text(encoding="utf-8"), filename=str(path))


def imports_in(node: ast.AST) -> Iterator[str]:
    """Dotted names of everything imported at `node` or below; `from a import b` gives a.b."""
    for child in ast.walk(node):
        if isinstance(child, ast.Import):
            yield from (alias.name for alias in child.names)
        elif isinstance(child, ast.ImportFrom):
            yield from (f"{child.module}.{alias.name}" for alias in child.names)


def imports_at_once(tree: ast.Module) -> Iterator[str]:
    """Imports that run when the module is imported: not those inside functions, nor those for type checkers."""
    for statement in tree.body:
        if isinstance(statement, ast.FunctionDef):
            continue
        if isinstance(statement, ast.If) and ast.unparse(statement.test) == "TYPE_CHECKING":
            continue
        yield from imports_in(statement)


def functions(tree: ast.Module) -> Iterator[ast.FunctionDef | ast.AsyncFunctionDef]:
    """Every function and method, those inside others included."""
    return (node for node in ast.walk(tree) if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef))


def relative(path: Path) -> str:
    return path.relative_to(ROOT).as_posix()
