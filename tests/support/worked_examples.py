"""The worked examples of CONTRIBUTING.md: diffs, and copies of the project that they are applied to."""

import re
import shutil
import subprocess
import textwrap
from pathlib import Path

from support.source_tree import PACKAGES, ROOT

COPIED = (*PACKAGES, "tests/support", "tests/faults")
KINDS = ("flag", "metric", "monitor", "reward", "estimator", "objective", "generation backend", "family", "stage")
IGNORED = shutil.ignore_patterns("__pycache__")


def example(title: str, language: str = "diff") -> str:
    """Return the block of `language` below the item `title`."""
    page = (ROOT / "CONTRIBUTING.md").read_text(encoding="utf-8")
    below = rf"^- \*\*{title}\*\*(?:(?!^- ).)*?  ```{language}\n(.*?)  ```$"
    (block,) = re.findall(below, page, re.MULTILINE | re.DOTALL)
    return textwrap.dedent(block)


def copied_project(folder: Path, *titles: str) -> Path:
    """Copy the project with what its tests share, and apply the examples of these titles to the copy."""
    for name in COPIED:
        shutil.copytree(ROOT / name, folder / name, ignore=IGNORED)
    for title in titles:
        applied = subprocess.run(
            ["git", "apply", "--unidiff-zero", "-"], cwd=folder, input=example(title), text=True, capture_output=True
        )
        assert applied.returncode == 0, f"{title}: {applied.stderr}"
    return folder
