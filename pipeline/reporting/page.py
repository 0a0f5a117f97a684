"""The pages of a report, report.html and report.md, with the pictures of curves/ beside them."""

import functools
import re
import shlex
import time
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import groupby
from pathlib import Path
from typing import Any

from filelock import FileLock
from jinja2 import Environment, PackageLoader, StrictUndefined, select_autoescape

from pipeline.console import MOST_TEXT, code_span, fenced, visible
from pipeline.errors import InputError, say
from pipeline.files import read_object, refused_by_disk, write_text
from pipeline.reporting import tables
from pipeline.reporting.curves import GROUPS, Panel, panels_of, svg, write_png
from pipeline.reporting.records import RunRecord, labels_of, runs_of

LOCK, LOCKED_S = ".report.lock", 120.0
PAGES = ("report.md", "report.html")
BEGINNING = re.compile(  # the beginning of a page that this module wrote
    r"# (Report|Comparison) of .*\n\n\d{4}-\d\d-\d\d \d\d:\d\d\. \*\*"
    r"|<!doctype html>\n(<.*\n)+<meta http-equiv=\"Content-Security-Policy\" content=\"default-src 'none'; "
)


@dataclass(frozen=True, slots=True)
class Chapter:
    """A stage of the report.

    key: its name in links and file names.
    title: its heading.
    runs: one run, or several that are compared.
    panels: its pictures.
    """

    key: str
    title: str
    runs: Sequence[RunRecord]
    panels: Sequence[Panel]

    @property
    def groups(self) -> dict[str, list[Panel]]:
        """The pictures by group, in order."""
        return {name: list(part) for name, part in groupby(self.panels, key=lambda panel: panel.group)}

    @classmethod
    def of(cls, key: str, runs: Sequence[RunRecord]) -> "Chapter":
        """Return the chapter of some runs of a stage."""
        kinds = dict.fromkeys(run.kind for run in runs)
        title = " and ".join(kinds) if len(runs) > 1 else runs[0].title
        return cls(file_part(key), title, runs, panels_of(runs))


def plain(text: Any) -> str:
    """Return a text in one line of Markdown without markup; templates escape what HTML would read."""
    return re.sub(r"([\\`*_\[\]|~#$])", r"\\\1", visible(text).replace("\n", " "))


def file_part(text: str) -> str:
    """Return a text as a part of a file name, with other characters replaced."""
    return re.sub(r"[^\w.-]", "_", text)[:80]


def chapters_of(folders: Sequence[Path]) -> list[Chapter]:
    """Return the stages of an output folder or of a run. With several folders, runs of the same stage share a chapter.

    Raises:
        InputError: a folder without a run.
    """
    labels = labels_of(list(folders)) if len(folders) > 1 else [""] * len(folders)
    runs_in = {folder: runs_of(folder, label=label) for folder, label in zip(folders, labels, strict=True)}
    if empty := [folder for folder, runs in runs_in.items() if not runs]:
        raise InputError(f"{empty[0]}: found no run; give an output folder, which has runs/, or the folder of a run")
    runs = [run for one in runs_in.values() for run in one]
    if len(folders) == 1:
        return [Chapter.of(run.label, [run]) for run in runs]
    sections = dict.fromkeys(run.stage for run in runs)
    return [Chapter.of(section, [run for run in runs if run.stage == section]) for section in sections]


@functools.cache
def templates() -> Environment:
    """Return the templates of the pages, which escape all values except this project's own pictures."""
    environment = Environment(
        loader=PackageLoader("pipeline.reporting"),
        autoescape=select_autoescape(("html", "html.j2", "md.j2")),
        undefined=StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    environment.filters |= {"number": tables.number, "duration": tables.duration, "shell": shlex.join}
    environment.filters |= {"visible": visible, "fenced": fenced, "cell": code_span, "plain": plain}
    return environment


def write_report(folders: Sequence[Path], output: Path) -> Path:
    """Write report.html, report.md and curves/ of runs into a folder; return the page.

    Raises:
        InputError: a folder has no run, or has pages that no report wrote. EnvironmentFault: it cannot be written.
    """
    with refused_by_disk(output):
        check_own(output)
        output.mkdir(parents=True, exist_ok=True)
        with FileLock(output / LOCK, timeout=LOCKED_S):
            chapters = [one for one in chapters_of(folders) if is_shown(one.title, [one], {}, folders, output)]
            answers = tables.answers(output)
            answers = answers if is_shown(tables.ANSWERS_FILE, [], answers, folders, output) else {}
            (output / "curves").mkdir(exist_ok=True)
            pictures = [write_group(output, chapter, group) for chapter in chapters for group in chapter.groups]
            content = contents(chapters, answers, folders, output) | {"pictures": pictures}
            for name in PAGES:
                write_text(output / name, templates().get_template(f"{name}.j2").render(content))
    return output / "report.html"


def check_own(output: Path) -> None:
    """Raise InputError if a folder has a page or pictures that no report wrote."""
    pages, curves = [output / name for name in PAGES if (output / name).exists()], output / "curves"
    foreign = [one for one in pages if not (one.is_file() and BEGINNING.match(one.read_text(errors="replace")))]
    if curves.is_symlink() or (not pages and curves.exists() and not (output / LOCK).exists()):
        foreign.append(curves)
    if foreign:
        raise InputError(f"{foreign[0]}: got a file or folder that no report wrote; name another folder by --output")


def write_group(output: Path, chapter: Chapter, group: str) -> tuple[str, str, str]:
    """Write the picture of a group; return the chapter's key, the group's name and the picture's path.

    A picture that is newer than the metrics of its runs is not written again.
    """
    file = output / "curves" / f"{chapter.key}-{file_part(group)}.png"
    written = max((one.stat().st_mtime for run in chapter.runs for one in run.folder.glob("*.jsonl")), default=0.0)
    if len(chapter.runs) > 1 or not file.is_file() or file.stat().st_mtime <= written:
        write_png(file, chapter.groups[group])
    return chapter.key, heading(group), f"curves/{file.name}"


def heading(group: str) -> str:
    return GROUPS.get(group, group.capitalize())


def is_shown(what: str, *given: Any) -> bool:
    """Return True if this can be shown; else print a warning: its files are not as a run writes them.

    given: the arguments of `contents`.
    """
    try:
        content = contents(*given) | {"pictures": []}
        for name in PAGES:
            templates().get_template(f"{name}.j2").render(content)
    except Exception as error:
        say(f"warning: {what} is left out of the report: {type(error).__name__}: {error}"[:MOST_TEXT])
        return False
    return True


def contents(chapters: Sequence[Chapter], answers: Any, folders: Sequence[Path], output: Path) -> dict[str, Any]:
    """Return the values that the templates show."""
    runs = [run for chapter in chapters for run in chapter.runs]
    drawn = {
        chapter.key: [(heading(one.group), one.title, svg(one, f"{chapter.key}-{one.name}")) for one in chapter.panels]
        for chapter in chapters
    }
    return {
        "tables": tables,
        "chapters": chapters,
        "drawn": drawn,
        "is_comparison": len(folders) > 1,
        "verdict": tables.verdict(runs),
        "folder": folders[0].resolve().name if len(folders) == 1 else f"{len(folders)} folders",
        "task": tables.task(output),
        "answers": answers,
        "evaluation": read_object(output / "eval.json"),  # of `rlhf eval --output FOLDER`
        "command": tables.answers_command(runs, output) if len(folders) == 1 else "",
        "written": time.strftime("%Y-%m-%d %H:%M"),
    }
