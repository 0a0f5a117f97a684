"""The cards (README.md) of model folders, rendered from templates/, and the code example that they share."""

import functools
from typing import Any

from jinja2 import Environment, PackageLoader, StrictUndefined

from pipeline.checkpoints import card_results
from pipeline.checkpoints.shared_names import code, table
from pipeline.console import fenced, visible
from pipeline.files import OURS
from pipeline.run import evaluations


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
