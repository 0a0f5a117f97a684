"""The cards (README.md) of model folders, rendered from templates/, and the code example that they share."""

import functools
import re
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

from jinja2 import Environment, PackageLoader, StrictUndefined

from pipeline.checkpoints import card_results
from pipeline.checkpoints.shared_names import code, table
from pipeline.console import fenced, visible
from pipeline.files import OURS, refused_by_disk, write_text
from pipeline.run import evaluations

# Comments around a section of a card that `rlhf eval` writes.
EVALUATION_MARKS = ("<!-- rlhf eval -->", "<!-- end of rlhf eval -->")


@functools.cache
def templates() -> Environment:
    """Return the templates. Only their filters and `table` escape text."""
    blocks: dict[str, Any] = {"trim_blocks": True, "lstrip_blocks": True, "keep_trailing_newline": True}
    environment = Environment(loader=PackageLoader("pipeline.checkpoints"), undefined=StrictUndefined, **blocks)
    environment.filters |= {"code": code, "fenced": fenced, "visible": visible}
    environment.globals |= {"results": card_results, "evaluations": evaluations, "table": table, "settings_file": OURS}
    return environment


def card(name: str, **content: Any) -> str:
    """Return the text of a template, by its name without `.j2`."""
    return templates().get_template(f"{name}.j2").render(content)


def add_evaluation(folder: Path, about: str, heading: Sequence[str], rows: Iterable[Sequence[str]]) -> None:
    """Write the table of an evaluation into the card of a model that training saved, in the place of an earlier one.

    about: what was evaluated, as Markdown.
    """
    file, (begin, end) = folder / "README.md", EVALUATION_MARKS
    if not (folder / OURS).is_file() or not file.is_file():
        return
    rest = re.sub(rf"\n{begin}\n.*?{end}\n", "", file.read_text(encoding="utf-8"), flags=re.DOTALL)
    with refused_by_disk(folder):
        write_text(file, f"{rest}\n{begin}\n## Later evaluation\n\n{about}\n\n{table(heading, rows)}\n\n{end}\n")
