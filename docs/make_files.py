"""Write docs/files.md, the Python files without the tests, each with its first sentence: python docs/make_files.py"""

import ast
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
FOLDERS = ("pipeline", "step1_sft", "step2_reward", "step3_ppo", "step3_dpo", "rlhf", "demo", "docs")
INTRODUCTION = """# Files

Every Python file with its first sentence, without the tests, made by `make reference` from the docstrings: edit those,
not this page. [The README](../README.md#where-things-are) says what the folders are, [reading.md](reading.md) in which
order to read.
"""


def first_sentence(path: Path) -> str:
    """The first sentence of a module's docstring on one line, '' where the module has none."""
    text = ast.get_docstring(ast.parse(path.read_text(encoding="utf-8"))) or ""
    paragraph = " ".join(text.partition("\n\n")[0].split())
    sentence, end, _ = paragraph.partition(". ")
    return sentence + end.strip()


def section(folder: Path) -> str:
    """A heading, what the package's docstring says, and one line per file of a folder (not of those below it)."""
    files = sorted(folder.glob("*.py"))
    name = "Programs" if folder == ROOT else f"`{folder.relative_to(ROOT).as_posix()}/`"
    about = [first_sentence(file) + "\n" for file in files if file.name == "__init__.py"]
    lines = [f"- `{file.name}`: {first_sentence(file)}".rstrip(": ") for file in files if file.name != "__init__.py"]
    return "\n".join([f"## {name}\n", *about, *lines])


def list_of_files() -> str:
    """The text of docs/files.md."""
    below = [path.parent for folder in FOLDERS for path in (ROOT / folder).rglob("*.py")]
    folders = sorted(set(below), key=lambda path: (FOLDERS.index(path.relative_to(ROOT).parts[0]), path))
    return "\n\n".join([INTRODUCTION.rstrip(), *map(section, [ROOT, *folders])]) + "\n"


if __name__ == "__main__":
    (ROOT / "docs" / "files.md").write_text(list_of_files(), encoding="utf-8")
