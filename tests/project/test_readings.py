"""Readings of the code, each with the number that it must not pass; sizes of files are in test_budgets.py.

`make readings` prints them.
"""

import ast
import io
import tokenize
from collections.abc import Callable, Iterator, Mapping
from graphlib import TopologicalSorter
from pathlib import Path

import pytest
from support.source_tree import functions, imports_in, relative, source_files, tree_of

# --- limits: raised or lowered by an issue alone ---------------------------------------------------------------------

MAX_CODE_LINES = 34_700
MAX_ARROWS = 130  # pairs of packages of which one imports the other, the leaf modules as one package
MAX_FLOORS = 11  # the longest way of imports from package to package, each leaf module and program by itself
MAX_IMPORTED = 25  # files of the project that one file imports
MAX_ZERO_STAGE_LINES, MAX_ZERO_STAGE_FILES = 20, 10
MAX_LAUNCHING_FILES = 15
MAX_UNTYPED = 0  # parameters of UNTYPED_NAMES that are Any

UNTYPED_NAMES = ("config", "model", "tokenizer", "kind")
# Words that do not say what a value is; none of them is a whole name.
VAGUE_NAMES = {
    "made", "away", "beside", "told", "asked", "found", "kept", "held", "own", "known", "place", "cut", "wanted",
    "begun",
}  # fmt: skip
# Figurative names of classes, each replaced by the field's word; no class of the repository has one.
REPLACED_CLASSES = {"Twin", "Fate", "Ticket", "Harvest", "Room", "Course"}
# What a new process starts by `python -m`, and the packages whose data files are read.
ENTRY_POINTS = {
    "rlhf.preflight", "pipeline.launching.host_agent", "pipeline.run.measure_device", "pipeline.rewards.worker",
    "pipeline.checkpoints", "pipeline.inference", "pipeline.inference.serving", "pipeline.reporting",
    "pipeline.reporting.main",
}  # fmt: skip
# Files that import a module by a name that they put together.
IMPORT_BY_NAME = {"rlhf/main.py"}

# --- what is read ----------------------------------------------------------------------------------------------------

FILES = {relative(path): path for path in [*source_files(), *source_files("demo")]}
TREES = {name: tree_of(path) for name, path in FILES.items()}
TEXTS = {name: path.read_text(encoding="utf-8") for name, path in FILES.items()}
MODULES = {name.removesuffix(".py").removesuffix("/__init__").replace("/", "."): name for name in FILES}
NOT_CODE = (tokenize.COMMENT, tokenize.NL, tokenize.NEWLINE, tokenize.INDENT, tokenize.DEDENT, tokenize.ENDMARKER)
DOCUMENTED = (ast.Module, ast.ClassDef, ast.FunctionDef, ast.AsyncFunctionDef)
Graph = Mapping[str, set[str]]


def code_lines(text: str) -> int:
    """Lines that hold code: neither blank, nor a comment alone, nor part of a docstring."""
    lines: set[int] = set()
    for token in tokenize.generate_tokens(io.StringIO(text).readline):
        if token.type not in NOT_CODE:
            lines.update(range(token.start[0], token.end[0] + 1))
    for node in ast.walk(ast.parse(text)):
        if isinstance(node, DOCUMENTED) and ast.get_docstring(node) is not None:
            lines.difference_update(range(node.body[0].lineno, node.body[0].end_lineno + 1))
    return len(lines)


def imported_files(name: str) -> set[str]:
    """Other files of the project that a file imports, anywhere in it."""
    modules = (full if full in MODULES else full.rpartition(".")[0] for full in imports_in(TREES[name]))
    return {MODULES[module] for module in modules if module in MODULES} - {name}


def room(name: str) -> str:
    """A file's package; a leaf module of pipeline/ and a program of the top level are rooms of their own."""
    parts = Path(name).parts
    return "/".join(parts[: 2 if parts[0] == "pipeline" else 1])


def package(name: str) -> str:
    """A file's package, `pipeline` for all leaf modules."""
    return "pipeline" if room(name) == name and "/" in name else room(name)


def merged(graph: Graph, part_of: Callable[[str], str]) -> dict[str, set[str]]:
    """The graph of parts, from one of files."""
    parts: dict[str, set[str]] = {part_of(name): set() for name in graph}
    for name, others in graph.items():
        parts[part_of(name)] |= {part_of(other) for other in others} - {part_of(name)}
    return parts


def floors(graph: Graph) -> int:
    """The longest way through a graph, counted in nodes."""
    heights: dict[str, int] = {}
    for node in TopologicalSorter(graph).static_order():
        heights[node] = 1 + max((heights[other] for other in graph[node]), default=0)
    return max(heights.values())


def named_modules(tree: ast.Module) -> Iterator[str]:
    """Modules of the project's packages that are named in strings."""
    constants = (node.value for node in ast.walk(tree) if isinstance(node, ast.Constant))
    return (value for value in constants if isinstance(value, str) and "." in value and value in MODULES)


def imports_by_name(tree: ast.Module) -> bool:
    """Whether import_module is called with anything but a plain string."""
    calls = [node for node in ast.walk(tree) if isinstance(node, ast.Call)]
    called = [call for call in calls if ast.unparse(call.func).endswith("import_module")]
    return any(not isinstance(call.args[0], ast.Constant) for call in called)


def untyped(tree: ast.Module) -> list[str]:
    """Parameters of UNTYPED_NAMES that are Any, or have no type."""
    arguments = [node for function in functions(tree) for node in ast.walk(function.args) if isinstance(node, ast.arg)]
    return [node.arg for node in arguments if node.arg in UNTYPED_NAMES and is_any(node.annotation)]


def is_any(annotation: ast.expr | None) -> bool:
    return annotation is None or "Any" in ast.unparse(annotation).split(" | ")


def vague(tree: ast.Module) -> list[str]:
    """Functions, classes, parameters, variables and fields whose name is one of VAGUE_NAMES."""
    names: list[str] = []
    for node in ast.walk(tree):
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
            names.append(node.name)
        elif isinstance(node, ast.arg):
            names.append(node.arg)
        elif isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store):
            names.append(node.id)
        elif isinstance(node, ast.Attribute) and isinstance(node.ctx, ast.Store):
            names.append(node.attr)
    return [name for name in names if name.strip("_").lower() in VAGUE_NAMES]


def undocumented(tree: ast.Module) -> list[str]:
    """Fields without a line `name: ...` in the docstring of a dataclass of more than four fields."""
    missing: list[str] = []
    for node in ast.walk(tree):
        if isinstance(node, ast.ClassDef) and any("dataclass" in ast.unparse(one) for one in node.decorator_list):
            fields = [one.target.id for one in node.body if isinstance(one, ast.AnnAssign)]
            lines = (ast.get_docstring(node) or "").splitlines()
            if len(fields) > 4:
                missing += [name for name in fields if not any(line.startswith(f"{name}: ") for line in lines)]
    return missing


IMPORTS = {name: imported_files(name) for name in FILES}

# --- the readings ----------------------------------------------------------------------------------------------------


def zero_stage_lines() -> dict[str, int]:
    """Lines that name zero_stage, by file."""
    lines = {name: sum("zero_stage" in line for line in text.splitlines()) for name, text in TEXTS.items()}
    return {name: count for name, count in lines.items() if count}


def launching_files() -> list[str]:
    return [name for name in FILES if room(name) == "pipeline/launching" and not name.endswith("__init__.py")]


# What is read -> how, and the most that it may be.
READINGS: dict[str, tuple[Callable[[], int], int]] = {
    "lines of code": (lambda: sum(map(code_lines, TEXTS.values())), MAX_CODE_LINES),
    "imports between packages": (lambda: sum(map(len, merged(IMPORTS, package).values())), MAX_ARROWS),
    "longest way of imports": (lambda: floors(merged(IMPORTS, room)), MAX_FLOORS),
    "files that one file imports": (lambda: max(map(len, IMPORTS.values())), MAX_IMPORTED),
    "lines that name a ZeRO stage": (lambda: sum(zero_stage_lines().values()), MAX_ZERO_STAGE_LINES),
    "files that name a ZeRO stage": (lambda: len(zero_stage_lines()), MAX_ZERO_STAGE_FILES),
    "files of pipeline/launching": (lambda: len(launching_files()), MAX_LAUNCHING_FILES),
    "parameters without a type": (lambda: sum(len(untyped(tree)) for tree in TREES.values()), MAX_UNTYPED),
}


@pytest.mark.parametrize("name", READINGS)
def test_a_reading_is_within_its_limit(name):
    read, limit = READINGS[name]
    assert ((value := read()) > 0) == (limit > 0) and value <= limit


def test_lines_of_code_are_counted_without_what_is_written_for_readers():
    text = '"""About\n\nit."""\n\n# Why.\nx = [  # how\n    1,\n\n]\n\n\ndef f():\n    "It."\n    return """a\n\nb"""\n'
    assert code_lines(text) == 3 + 1 + 3


@pytest.mark.parametrize("graph", [IMPORTS, merged(IMPORTS, room)], ids=["files", "packages"])
def test_nothing_imports_in_a_circle(graph):
    TopologicalSorter(graph).prepare()  # raises CycleError, which names the circle


def test_floors_are_the_longest_way():
    assert floors({"a": {"b", "c"}, "b": {"c"}, "c": set(), "d": {"c"}}) == 3


def test_only_entry_points_are_named_in_strings():
    named = {module for tree in TREES.values() for module in named_modules(tree)}
    assert named == ENTRY_POINTS


def test_modules_are_imported_by_statements():
    assert {name for name, tree in TREES.items() if imports_by_name(tree)} <= IMPORT_BY_NAME


def test_an_import_by_a_name_that_is_put_together_is_found():
    assert imports_by_name(ast.parse("importlib.import_module(f'{stage}.needs')"))
    assert not imports_by_name(ast.parse("import_module('transformers')")), "of the project's: see above"


@pytest.mark.parametrize(
    "code", ["def f(model: Any): ...", "def f(*, config: Any | None = None): ...", "def f(tokenizer): ..."]
)
def test_a_parameter_without_a_type_is_found(code):
    assert untyped(ast.parse(code)) and not untyped(ast.parse("def f(model: Module, kind: str, other: Any): ..."))


def test_names_say_what_a_value_is():
    names = {name: vague(tree) for name, tree in TREES.items()}
    assert {name: found for name, found in names.items() if found} == {}


def test_classes_have_the_fields_names():
    trees = [*TREES.values(), *map(tree_of, source_files("tests", "benchmarks", "website"))]
    names = {node.name for tree in trees for node in ast.walk(tree) if isinstance(node, ast.ClassDef)}
    assert len(names) > 400 and names & REPLACED_CLASSES == set()


@pytest.mark.parametrize(
    "code",
    ["def told(): ...", "def f(*, made): ...", "ASKED = 1", "a, (own, b) = c", "self._held = 1", "kept: int = 1",
     "[1 for away in b]"],
)  # fmt: skip
def test_a_vague_name_is_found(code):
    assert vague(ast.parse(code)) and not vague(ast.parse("def asked_for(x): kept_cache = f(own=x.found)"))


def test_dataclasses_document_each_field():
    fields = {name: undocumented(tree) for name, tree in TREES.items()}
    assert {name: missing for name, missing in fields.items() if missing} == {}


def test_an_undocumented_field_is_found():
    code = '@dataclass(frozen=True)\nclass C:\n    """It.\n\n    a: x. b: y.\n    """\n' + "".join(
        f"    {name}: int\n" for name in "abcde"
    )
    assert undocumented(ast.parse(code)) == ["b", "c", "d", "e"]
    assert undocumented(ast.parse(code.replace("    e: int\n", ""))) == [], "four need no lines"


if __name__ == "__main__":
    for name, (read, limit) in READINGS.items():
        print(f"{name:<30}{read():>8,} of {limit:,}")
