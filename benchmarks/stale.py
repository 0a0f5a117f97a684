"""List what has changed since the measurements of each page were made: python benchmarks/stale.py

A page names the commit and the paths of the code that was measured: `<!-- measured at 18bb250: step3_ppo demo -->`.
"""

import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
MARK = re.compile(r"<!-- measured at ([0-9a-f]{7,40}): ([^<>]+?) -->")
PAGES = ("*.md", "docs/**/*.md", "benchmarks/reports/*.md")


def marks(root: Path) -> Iterator[tuple[str, str, list[str]]]:
    """Yield (page, commit, paths) of each mark of the pages."""
    for page in sorted(page for pattern in PAGES for page in root.glob(pattern)):
        for commit, paths in MARK.findall(page.read_text(encoding="utf-8")):
            yield page.relative_to(root).as_posix(), commit, paths.split()


def git(root: Path, *words: str) -> str:
    return subprocess.run(["git", "-C", root, *words], check=True, capture_output=True, text=True).stdout.strip()


def changes(root: Path, commit: str, paths: list[str]) -> str:
    """Return how many commits have changed these paths since a commit, and how many files and lines in all."""
    count = int(git(root, "rev-list", "--count", f"{commit}..HEAD", "--", *paths))
    if not count:
        return "nothing has changed"
    return f"{count} commits, {git(root, 'diff', '--shortstat', commit, 'HEAD', '--', *paths)}"


def main(root: Path) -> None:
    for page, commit, paths in marks(root):
        try:
            found = changes(root, commit, paths)
        except subprocess.CalledProcessError as error:
            sys.exit(f"error: {page}: {error.stderr.strip().splitlines()[0]}")
        print(f"{page}, measured at {commit} ({' '.join(paths)}): {found}")


if __name__ == "__main__":
    main(ROOT)
