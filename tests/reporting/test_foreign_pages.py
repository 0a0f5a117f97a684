"""`rlhf report` replaces pages and pictures of a report alone."""

import json
import re
import shutil
from pathlib import Path

import pytest
from support.messages import naming
from support.recorded_runs import record

from pipeline.errors import InputError
from pipeline.reporting import page as page_module
from pipeline.reporting.page import write_report
from rlhf.main import main

# How 5748f88's pages began.
HTML = """<!doctype html>
<html lang="en">
<head>
<meta charset="utf-8">
<meta name="viewport" content="width=device-width, initial-scale=1">
<meta http-equiv="Content-Security-Policy" content="default-src 'none'; style-src 'unsafe-inline'; img-src data:">
<meta name="color-scheme" content="light dark">
<title>Report of sft</title>
"""
OF_BEFORE = {"report.html": HTML, "report.md": "# Report of sft\n\n2026-11-02 10:15. **Better than at the start**: x\n"}


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setattr(page_module, "svg", lambda panel, salt: "<svg></svg>")
    monkeypatch.setattr(page_module, "write_png", lambda file, panels: file.touch())
    return record(tmp_path / "output", "sft", steps=1)


@pytest.mark.parametrize(
    ("name", "text"),
    [
        ("report.html", "<!doctype html>\n<title>Report of my year</title>"),
        ("report.html", ""),
        ("report.md", "# Report of my year\n"),
        ("curves/elliptic.png", "x"),
    ],
)
def test_what_no_report_wrote_stays_as_it_is(folder, capsys, name, text):
    (folder / name).parent.mkdir(exist_ok=True)
    (folder / name).write_text(text)
    for _ in range(2):  # a refused report does not make it ours
        assert main(["report", str(folder)]) == 2
        (line,) = capsys.readouterr().err.splitlines()
        file = folder / name.partition("/")[0]
        assert line == naming(f"error: {file} ... --output")
    assert (folder / name).read_text() == text
    assert not {"report.html", "report.md", "curves"} - {name.partition("/")[0]} & {p.name for p in folder.iterdir()}


def test_pages_of_before_and_what_a_killed_report_left_are_replaced(folder, monkeypatch):
    for name, text in OF_BEFORE.items():
        (folder / name).write_text(text)
    write_report([folder], folder)
    assert all((folder / name).read_text() != text for name, text in OF_BEFORE.items())
    write_report([folder], folder)
    for name in (*OF_BEFORE, "curves"):
        (shutil.rmtree if name == "curves" else Path.unlink)(folder / name)

    def killed(*given: object) -> None:
        raise KeyboardInterrupt

    with monkeypatch.context() as patches, pytest.raises(KeyboardInterrupt):
        patches.setattr(page_module, "write_group", killed)
        write_report([folder], folder)
    assert (folder / "curves").is_dir() and not (folder / "report.html").exists()
    write_report([folder], folder)


def test_a_page_that_is_a_folder_is_refused(folder):
    (folder / "report.html").mkdir()
    with pytest.raises(InputError, match=naming("report.html ... no report wrote")):
        write_report([folder], folder)


MARKUP = "[x](http://e) ![i](j) *b* _c_ `d` | <img src=e> ~~f~~\n# g"


def test_messages_titles_and_names_are_no_markup_in_markdown(tmp_path, folder):
    meaning = json.loads((folder / "meaning.json").read_text())
    metrics = {
        name: metric | {"title": MARKUP, "unit": MARKUP, "group": MARKUP} for name, metric in meaning["metrics"].items()
    }
    (folder / "meaning.json").write_text(json.dumps(meaning | {"title": MARKUP, "stage": MARKUP, "metrics": metrics}))
    outcome = json.loads((folder / "outcome" / "rank-0.json").read_text())
    (folder / "outcome" / "rank-0.json").write_text(json.dumps(outcome | {"code": 1, "message": MARKUP}))
    write_report([folder], folder)
    text = (folder / "report.md").read_text()
    outside = re.sub(r"^(`{3,})text$.*?^\1$", "", text, flags=re.S | re.M)
    outside = re.sub(r"(?<!\\)`[^`\n]*`|\]\(curves/[^)]*\)", "", outside)
    assert outside.count("x\\](http") >= 4
    assert not re.search(r"(?<!\\)(\]\(http|!?\[i|\*b|_c|`d|~~)|<img|^# g", outside, re.M)


def test_a_group_leads_to_no_other_folder(tmp_path, folder):
    meaning = json.loads((folder / "meaning.json").read_text())
    for metric in meaning["metrics"].values():
        metric["group"] = f"/../../../{'x' * 300}/../evil"
    (folder / "meaning.json").write_text(json.dumps(meaning))
    before = {path for path in tmp_path.rglob("*") if folder not in path.parents}
    write_report([folder], folder)
    assert {path for path in tmp_path.rglob("*") if folder not in path.parents} == before
    assert [path.suffix for path in (folder / "curves").iterdir()] == [".png"]


def test_pictures_are_not_written_through_a_link(tmp_path, folder):
    (tmp_path / "mine").mkdir()
    for name, text in OF_BEFORE.items():
        (folder / name).write_text(text)
    (folder / "curves").symlink_to(tmp_path / "mine")
    with pytest.raises(InputError, match=naming("curves ... no report wrote")):
        write_report([folder], folder)
    (folder / "curves").unlink()
    (tmp_path / "mine" / "thesis.txt").write_text("x")
    (folder / ".report.md.writing").symlink_to(tmp_path / "mine" / "thesis.txt")
    write_report([folder], folder)
    assert (tmp_path / "mine" / "thesis.txt").read_text() == "x"
