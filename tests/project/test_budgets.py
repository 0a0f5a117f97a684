"""Sizes that keep the code readable, and a docstring on everything public."""

import ast
import re
import statistics
from collections import Counter

import pytest
from support.source_tree import ROOT, functions, relative, source_files, tree_of

FILES = {relative(path): path for path in source_files()}
TREES = {name: tree_of(path) for name, path in FILES.items()}
MAX_FILE_LINES = 400
MAX_TEST_FILE_LINES = 400
MAX_FILES = 16  # Python files of a folder
MAX_FUNCTION_LINES = 80
MAX_POSITIONAL = 5
MAX_REPORT_LINES = 60
MAX_RAW_BYTES = 3_000_000  # of what is kept of measurements
# Words that do not begin the first line of a docstring: it is a verb in the imperative, or a noun phrase.
NO_BEGINNING = set(
    "after against among as at before behind beside between by during for from how if in into of on over per since "
    "through to under until what when where whether which who with within without".split()
)
# A loss over two sequences of tensors: names would not make it clearer.
WIDE = {"step2_reward/loss.py per_token_loss"}


def length(node: ast.FunctionDef | ast.AsyncFunctionDef) -> int:
    """Lines from `def` to the end, its docstring not counted."""
    total = node.end_lineno - node.lineno + 1
    first = node.body[0]
    return total - (first.end_lineno - first.lineno + 1 if ast.get_docstring(node) is not None else 0)


def all_functions() -> list[tuple[str, ast.FunctionDef]]:
    return [(f"{name}:{node.lineno} {node.name}", node) for name, tree in TREES.items() for node in functions(tree)]


def test_functions_are_short():
    lengths = sorted(length(node) for _, node in all_functions())
    assert statistics.median(lengths) <= 12
    assert lengths[int(0.9 * len(lengths))] <= 45


def test_no_function_is_too_long():
    long = {where: length(node) for where, node in all_functions() if length(node) > MAX_FUNCTION_LINES}
    assert long == {}


def test_no_file_is_too_long():
    sizes = {name: len(path.read_text(encoding="utf-8").splitlines()) for name, path in FILES.items()}
    assert {name: size for name, size in sizes.items() if size > MAX_FILE_LINES} == {}


def test_no_test_file_is_too_long():
    sizes = {relative(path): len(path.read_text(encoding="utf-8").splitlines()) for path in source_files("tests")}
    assert {name: size for name, size in sizes.items() if size > MAX_TEST_FILE_LINES} == {}


def test_what_is_kept_of_measurements_is_small():
    sizes = [path.stat().st_size for path in (ROOT / "benchmarks/raw").iterdir()]
    assert len(sizes) > 20 and sum(sizes) < MAX_RAW_BYTES


def test_numbers_of_measurements_are_compressed_lines():
    names = [path.name for path in (ROOT / "benchmarks/raw").iterdir()]
    assert [name for name in names if not name.endswith((".jsonl.bz2", ".png"))] == []


def test_reports_are_short():
    """At most 60 lines; lines have 120 characters at most, but for rows of tables, comments and commands."""
    pages = {relative(path): path.read_text("utf-8") for path in (ROOT / "benchmarks/reports").iterdir()}
    assert len(pages) > 30 and {page: len(text.splitlines()) for page, text in pages.items() if is_long(text)} == {}


def test_reports_have_question_answer_and_command():
    """Each mark begins one line, so that readers and `grep` find what was asked, what came out and how to repeat it."""
    mark = re.compile(r"^\*\*(Question|Answer|Repeat):\*\* \S", re.MULTILINE)
    pages = (ROOT / "benchmarks/reports").iterdir()
    marks = {path.name: mark.findall(path.read_text("utf-8")) for path in pages}
    assert {name: found for name, found in marks.items() if sorted(found) != ["Answer", "Question", "Repeat"]} == {}


def is_long(text: str) -> bool:
    prose = re.sub(r"^(?:\||<!--|!\[)[^\n]*$|^```.*?^```$", "", text, flags=re.MULTILINE | re.DOTALL)
    return len(text.splitlines()) > MAX_REPORT_LINES or any(len(line) > 120 for line in prose.splitlines())


def test_a_long_report_is_found():
    assert is_long("a\n" * 61) and is_long(f"a\n{'a' * 121}\n") and not is_long(f"|{'a' * 121}\n" + "a\n" * 59)


def test_each_file_of_measurements_is_named_by_a_report():
    text = "".join(path.read_text("utf-8") for path in (ROOT / "benchmarks").rglob("*.md"))
    assert [path.name for path in (ROOT / "benchmarks/raw").iterdir() if path.name not in text] == []


def test_each_package_has_its_folder_of_tests():
    """Its name is the package's; leaf modules of pipeline/ are tested in tests/leaves, inner packages with theirs."""
    modules = [path.relative_to(ROOT).parent for path in FILES.values() if path.name != "__init__.py"]
    folders = {folder.parts[:2][-1].replace("pipeline", "leaves") for folder in modules if folder.parts}
    assert len(folders) > 10
    assert {name for name in folders if not list((ROOT / "tests" / name).glob("test_*.py"))} == set()


def test_no_folder_has_too_many_files():
    modules = (name for name in FILES if not name.endswith("__init__.py"))
    sizes = Counter(name.rpartition("/")[0] for name in modules)
    assert {folder: size for folder, size in sizes.items() if size > MAX_FILES} == {}


def test_packages_hold_a_docstring_and_nothing_else():
    """Nothing is re-exported: a name is imported from the module that defines it."""
    packages = {name: tree for name, tree in TREES.items() if name.endswith("__init__.py")}
    assert packages
    assert [name for name, tree in packages.items() if len(tree.body) != 1 or not ast.get_docstring(tree)] == []


def is_kernel(node: ast.FunctionDef) -> bool:
    """Whether triton compiles it: it knows no parameters by name alone."""
    return any("triton.jit" in ast.unparse(decorator) for decorator in node.decorator_list)


def positional(node: ast.FunctionDef) -> int:
    names = [argument.arg for argument in [*node.args.posonlyargs, *node.args.args]]
    return len([name for name in names if name not in ("self", "cls")])


def test_more_than_five_parameters_are_given_by_name():
    wide = {
        f"{name} {node.name}" for name, tree in TREES.items() for node in functions(tree)
        if positional(node) > MAX_POSITIONAL and not is_kernel(node)
    }  # fmt: skip
    assert wide == WIDE


def undocumented(tree: ast.Module) -> list[str]:
    """Public functions, classes and methods of public classes without a docstring, but for those that say it all.

    A function of up to five lines whose name and types are its meaning needs none.
    """
    found = [] if ast.get_docstring(tree) else ["module"]

    def look(body: list[ast.stmt]) -> None:
        for node in body:
            if not isinstance(node, ast.FunctionDef | ast.ClassDef) or node.name.startswith("_"):
                continue
            short = isinstance(node, ast.FunctionDef) and length(node) <= 5
            if ast.get_docstring(node) is None and not short:
                found.append(f"{node.lineno} {node.name}")
            if isinstance(node, ast.ClassDef):
                look(node.body)

    look(tree.body)
    return found


@pytest.mark.parametrize("name", TREES)
def test_what_is_public_says_what_it_is_for(name):
    assert undocumented(TREES[name]) == []


def test_a_docstring_begins_with_a_verb_or_a_noun():
    documented = (ast.Module, ast.ClassDef, ast.FunctionDef, ast.AsyncFunctionDef)
    firsts = {
        f"{name} {getattr(node, 'name', '')}": (ast.get_docstring(node) or "-").split()[0].lower().strip(":,`")
        for name, tree in TREES.items()
        for node in ast.walk(tree) if isinstance(node, documented)
    }  # fmt: skip
    assert len(firsts) > 1000 and {where: word for where, word in firsts.items() if word in NO_BEGINNING} == {}
