"""Worked examples, of docs/contribute/adding.md and of examples/: patches by anchor, and copies of the project."""

import re
import shutil
from functools import cache
from pathlib import Path

from support.source_tree import PACKAGES, ROOT

PAGE = ROOT / "docs/contribute/adding.md"
FILES = {path.stem: path for path in sorted((ROOT / "tests/support/examples").glob("*.patch"))}
COPIED = (*PACKAGES, "tests/support", "tests/faults")
IGNORED = shutil.ignore_patterns("__pycache__")
# A section of the page: its title, and the text up to the next title.
SECTION = re.compile(r"^## An? (.*?)\n(.*?)(?=^## |\Z)", re.MULTILINE | re.DOTALL)
# A changed file in a patch: "--- a/FILE" or "--- /dev/null", "+++ b/FILE", then its hunks.
CHANGED_FILE = re.compile(r"^--- (\S+)\n\+\+\+ b/(\S+)\n(.*?)(?=^--- |\Z)", re.MULTILINE | re.DOTALL)


def block(kind: str, language: str = "diff") -> str:
    """Return the block of `language` in the page's section about this kind."""
    sections = dict(SECTION.findall(PAGE.read_text(encoding="utf-8")))
    (found,) = re.findall(rf"^```{language}\n(.*?)^```$", sections[kind], re.MULTILINE | re.DOTALL)
    return found


@cache
def examples() -> dict[str, str]:
    """Return the patch of each kind: those of the page first, then those of the folder."""
    page = dict(SECTION.findall(PAGE.read_text(encoding="utf-8")))
    shown = {kind: block(kind) for kind, text in page.items() if "```diff\n" in text}
    return shown | {kind: path.read_text(encoding="utf-8") for kind, path in FILES.items()}


def apply(patch: str, folder: Path) -> None:
    """Apply a patch to files below `folder`.

    A hunk begins with a bare "@@". Its unmarked and "-" lines must be in the file once, one below the other.
    """
    files = CHANGED_FILE.findall(patch)
    assert files, f"no file is changed: {patch!r}"
    for before, name, hunks in files:
        path = folder / name
        assert (before == "/dev/null") != path.exists(), f"{name}: a new file that exists, or a file that does not"
        text = path.read_text(encoding="utf-8") if path.exists() else ""
        first, *rest = re.split(r"^@@\n", hunks, flags=re.MULTILINE)
        assert rest and not first, f"{name}: text before the first @@: {first!r}"
        for hunk in rest:
            text = with_hunk(text, hunk, name)
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text, encoding="utf-8")


def with_hunk(text: str, hunk: str, name: str) -> str:
    """Return the text with a hunk applied."""
    lines = [line or " " for line in hunk.splitlines()]  # editors remove the space of an empty line
    assert all(line[0] in " -+" for line in lines), f"{name}: a line without a mark in {hunk!r}"
    old, new = ("".join(f"{line[1:]}\n" for line in lines if line[0] in marks) for marks in (" -", " +"))
    if not text:
        return new
    starts = [found.start() for found in re.finditer(rf"^(?={re.escape(old)})", text, re.MULTILINE)]
    assert old and len(starts) == 1, f"{name}: got {len(starts)} times, expected once:\n{old}"
    return text[: starts[0]] + new + text[starts[0] + len(old) :]


def copied_project(folder: Path, *kinds: str) -> Path:
    """Copy the project with what its tests share, and apply the examples of these kinds to the copy."""
    for name in COPIED:
        shutil.copytree(ROOT / name, folder / name, ignore=IGNORED)
    for kind in kinds:
        apply(examples()[kind], folder)
    return folder
