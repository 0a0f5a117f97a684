"""Tables that a report leaves to a file of benchmarks/raw, as the lines of Markdown that its page had."""

import bz2
import json

from support.source_tree import ROOT


def table_lines(file: str, report: str, part: str = "") -> list[str]:
    """The lines of a report's tables in `benchmarks/raw/<file>`, of one part or of all."""
    tables = map(json.loads, bz2.decompress((ROOT / "benchmarks/raw" / file).read_bytes()).splitlines())
    lines = []
    for table in (x["rows"] for x in tables if x["report"] == report and part in ("", x["part"])):
        cells = [list(table[0]), ["---"] * len(table[0]), *(row.values() for row in table)]
        lines += [f"| {' | '.join(map(str, row))} |" for row in cells]
    return lines
