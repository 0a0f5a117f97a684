"""Write the table of flags in docs/reliability.md from what tests/faults/test_flag_coverage.py saw.

`python docs/make_flag_table.py FILE ...` takes the files that FLAG_RESULTS named, one for each shard or one for all.
It ends with 1, and leaves the page alone, if a flag was not seen to be needed by its test.
"""

import json
import sys
from collections import defaultdict
from collections.abc import Iterable
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
sys.path[:0] = [str(ROOT / folder) for folder in (".", "tests", "tests/faults")]

from flag_tests import NAMED, TWINS, WITHOUT_EFFECT  # noqa: E402

PAGE = ROOT / "docs" / "reliability.md"
BEGIN, END = "<!-- made by docs/make_flag_table.py -->\n", "<!-- end -->\n"


def read_results(files: Iterable[Path]) -> dict[str, tuple[str, bool]]:
    """Return flag -> (test, whether it failed when the flag was ignored); the latest result of a flag counts."""
    lines = [json.loads(line) for file in files for line in file.read_text(encoding="utf-8").splitlines()]
    return {line["flag"]: (line["test"], line["fails_when_ignored"]) for line in sorted(lines, key=lambda x: x["time"])}


def problems(results: dict[str, tuple[str, bool]]) -> list[str]:
    """Return a line for each flag that was not seen to be needed by the test that is named for it now."""
    expected = dict.fromkeys(TWINS, "twin runs") | NAMED
    lines = [f"{key}: no result of {test}" for key, test in expected.items() if results.get(key, ("",))[0] != test]
    return lines + [f"{key}: {test} passes although it is ignored" for key, (test, red) in results.items() if not red]


def table(results: dict[str, tuple[str, bool]]) -> str:
    """Return a row for each test, with the flags that it was seen to fail without."""
    flags: dict[str, list[str]] = defaultdict(list)
    for key, (test, _) in sorted(results.items()):
        flags[test].append(key)
    rows = [
        f"| {test} | {len(keys)} | {' '.join(f'`{key}`' for key in keys)} |" for test, keys in sorted(flags.items())
    ]
    ignored = [f"| none: {reason} | 1 | `{key}` |" for key, reason in WITHOUT_EFFECT.items()]
    return (
        "\n".join(["| test | flags | which fail it when they are ignored |", "|---|---|---|", *rows, *ignored]) + "\n"
    )


def main(files: list[str]) -> int:
    """Write the table; return the exit code."""
    results = read_results(map(Path, files))
    if missing := problems(results):
        print(*missing, sep="\n", file=sys.stderr)
        return 1
    before, _, rest = PAGE.read_text(encoding="utf-8").partition(BEGIN)
    PAGE.write_text(before + BEGIN + table(results) + END + rest.partition(END)[2], encoding="utf-8")
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
