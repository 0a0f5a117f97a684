"""What has changed since a page's figures were measured, and that every page of figures says of what they are."""

import subprocess
from pathlib import Path

import pytest
from support.source_tree import ROOT

from benchmarks import stale


def git(root: Path, *words: str) -> str:
    settings = ("-c", "user.name=a", "-c", "user.email=a@b.c", "-c", "commit.gpgsign=false")
    return subprocess.run(["git", *settings, *words], cwd=root, check=True, capture_output=True, text=True).stdout


@pytest.fixture
def root(tmp_path: Path) -> Path:
    """A repository of two commits: the first measured, the second changed one of its paths."""
    for folder in ("benchmarks/reports", "docs", "code", "other"):
        (tmp_path / folder).mkdir(parents=True)
    for file in ("code/a.py", "other/b.py"):
        (tmp_path / file).write_text("1\n")
    git(tmp_path, "init", "-q")
    git(tmp_path, "add", ".")
    git(tmp_path, "commit", "-qm", "first")
    first = git(tmp_path, "rev-parse", "--short=7", "HEAD").strip()
    (tmp_path / "code/a.py").write_text("1\n2\n3\n")
    git(tmp_path, "commit", "-qam", "second")
    (tmp_path / "benchmarks/reports/fast.md").write_text(f"# Fast\n\n<!-- measured at {first}: code other -->\nText.\n")
    (tmp_path / "docs/fresh.md").write_text(f"# Fresh\n\n<!-- measured at {first}: other -->\n")
    return tmp_path


def test_changes_of_the_named_paths_are_counted(root: Path, capsys: pytest.CaptureFixture[str]) -> None:
    stale.main(root)
    fast, fresh = capsys.readouterr().out.splitlines()
    assert fast.startswith("benchmarks/reports/fast.md, measured at ") and fresh.startswith(
        "docs/fresh.md, measured at "
    )
    assert fast.endswith(" (code other): 1 commits, 1 file changed, 2 insertions(+)")
    assert fresh.endswith(" (other): nothing has changed")


def test_a_commit_that_is_not_there_is_one_line(root: Path) -> None:
    (root / "docs/fresh.md").write_text("<!-- measured at 0123456789: other -->\n")
    with pytest.raises(SystemExit, match=r"error: docs/fresh.md: .*0123456789"):
        stale.main(root)


def test_every_report_names_its_commit_and_paths_that_are_there() -> None:
    found = list(stale.marks(ROOT))
    reports = {file.relative_to(ROOT).as_posix() for file in (ROOT / "benchmarks/reports").glob("*_*.md")}
    others = {"CONTRIBUTING.md", "benchmarks/reports/memory.md", "benchmarks/reports/times.md"}
    assert reports | others <= {page for page, *_ in found}
    demos = [commit for page, commit, _ in found if page == "benchmarks/reports/methods_cpu_202611.md"]
    assert demos == ["a5126ec", "885d406"], "two runs of the demo, each with its commit"
    assert not [(page, path) for page, _, paths in found for path in paths if not (ROOT / path).exists()]
