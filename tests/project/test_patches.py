"""Patches by anchor: lines that move break none; an anchor that is missing or there twice is an error."""

from pathlib import Path

import pytest
from support.worked_examples import CHANGED_FILE, apply, copied_project, examples

PATCH = """--- a/a.txt
+++ b/a.txt
@@
 one
+more
@@
-two
+2
--- /dev/null
+++ b/folder/b.txt
@@
+new
"""


def test_hunks_and_new_files(tmp_path: Path) -> None:
    (tmp_path / "a.txt").write_text("zero\none\n\ntwo\nthree\n")
    apply(f"What it does.\n\n{PATCH}", tmp_path)
    assert (tmp_path / "a.txt").read_text() == "zero\none\nmore\n\n2\nthree\n"
    assert (tmp_path / "folder/b.txt").read_text() == "new\n"


@pytest.mark.parametrize(
    ("text", "count"), [("zero\ntwo\n", 0), ("one\none\ntwo\n", 2), ("one more\ntwo\n", 0), ("  one\ntwo\n", 0)]
)
def test_an_anchor_is_whole_lines_and_there_once(tmp_path: Path, text: str, count: int) -> None:
    (tmp_path / "a.txt").write_text(text)
    with pytest.raises(AssertionError, match=rf"a\.txt: got {count} times, expected once:\none"):
        apply(PATCH, tmp_path)


def test_a_new_file_replaces_none(tmp_path: Path) -> None:
    (tmp_path / "a.txt").write_text("one\ntwo\n")
    (tmp_path / "folder").mkdir()
    (tmp_path / "folder/b.txt").write_text("old\n")
    with pytest.raises(AssertionError, match="folder/b.txt: a new file that exists"):
        apply(PATCH, tmp_path)


def test_lines_that_move_break_no_example(tmp_path: Path) -> None:
    """Every file that an example changes begins with further lines."""
    folder = copied_project(tmp_path)
    changed = {
        name for patch in examples().values() for before, name, _ in CHANGED_FILE.findall(patch) if "a/" in before
    }
    assert len(changed) > 15
    for name in changed:
        (folder / name).write_text("# moved\n" * 7 + (folder / name).read_text(encoding="utf-8"), encoding="utf-8")
    for patch in examples().values():
        apply(patch, folder)
