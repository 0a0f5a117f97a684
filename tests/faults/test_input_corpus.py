"""Malformed inputs through each command's own main: no traceback, one line that names file and row, exit 2.

Rows that are left out by policy are counted instead, and the run goes on to its model (section 4 of
docs/contribute/design.md).
"""

from pathlib import Path
from typing import Any

import pytest
from input_calls import call, stage_words, stopped_at_the_models
from input_corpus import CASES, STAGES, Case
from support.marks import slow

FOLDER_SIZES = {"num_train": 12, "num_test": 2}
NUM_CASES = 300
FLAG = {"prompt_eval": "prompts"}


def one_stage_each() -> list[Any]:
    """The cases, each file quick in one stage: stages read files by the same functions, and take turns."""
    files: dict[tuple[str, str], list[Case]] = {}
    for case in CASES:
        files.setdefault((case.name, "a stage" if case.command in STAGES else case.command), []).append(case)
    quick = {cases[number % len(cases)] for number, cases in enumerate(files.values())}
    return [case if case in quick else slow((case,)) for case in CASES]


def test_there_are_enough() -> None:
    assert len({case.id for case in CASES}) == len(CASES) >= NUM_CASES


@pytest.mark.parametrize("case", one_stage_each(), ids=lambda case: case.id)
def test_a_malformed_file(case: Case, folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    file = tmp_path / case.name
    file.write_bytes(case.content)
    words = stage_words(case.command, folder, tmp_path / "out", **{FLAG.get(case.command, "data_path"): file})
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    with stopped_at_the_models(monkeypatch):
        ending = call(case.command, words)
    if case.ending == "REFUSED":
        assert ending.code == 2 and len(ending.errors) == 1, ending.stderr
        assert case.says in ending.errors[0].replace(f"{tmp_path}/", ""), ending.errors
        return
    assert ending.loaded, ending.stderr
    if case.ending == "TAKEN":
        assert case.says in ending.stderr
    else:
        found = [line.replace(f"{tmp_path}/", "") for line in ending.counts]
        assert any(line.startswith(case.says) for line in found), found
