"""Tables that a report leaves to a file of benchmarks/raw, as the lines of Markdown that its page had."""

from support.source_tree import ROOT

from benchmarks.learning.quality import read_kept


def table_lines(file: str, report: str) -> list[str]:
    """The lines of a report's tables in `benchmarks/raw/<file>`."""
    lines = []
    for table in (kept["rows"] for kept in read_kept(ROOT / "benchmarks/raw" / file) if kept["report"] == report):
        cells = [list(table[0]), ["---"] * len(table[0]), *(row.values() for row in table)]
        lines += [f"| {' | '.join(map(str, row))} |" for row in cells]
    return lines
