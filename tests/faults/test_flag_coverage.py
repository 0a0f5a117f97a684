"""Every flag is made to be ignored, and its test is seen to fail.

Runs that differ in one flag are made in this process. The other tests run in a pytest of their own, with the flag
ignored in every process that it starts. `--shard K/N` takes one part of the flags.
"""

import re
from pathlib import Path
from typing import Any

import pytest
from flag_runs import CONFIGS, check_flag, make_flag_inputs, plain_run, seen_to_fail
from flag_tests import FLAG_TESTS, NAMED, ONE_PLACE, WITHOUT_EFFECT
from support.source_tree import ROOT, STAGES

from pipeline.configuration.flag_table import flag_table


def test_every_flag_of_every_command_has_a_test() -> None:
    keys = [*FLAG_TESTS, *NAMED, *WITHOUT_EFFECT]
    declared = {f"{command}.{name}" for command, config in CONFIGS.items() for name in flag_table(config)}
    assert declared - set(keys) == set(), "a flag without a test"
    assert set(keys) - declared == set(), "a test of a flag that is not there"
    assert len(keys) == len(set(keys)), "a flag in two tables"
    for test in set(NAMED.values()):
        file, _, function = test.partition("[")[0].partition("::")
        assert f"\ndef {function}(" in (ROOT / "tests" / file).read_text(encoding="utf-8"), test


def test_flags_that_one_place_reads_for_all_are_named_in_no_stage() -> None:
    sources = [file for name in STAGES for file in (ROOT / name).rglob("*.py")]
    text = "\n".join(file.read_text(encoding="utf-8") for file in sources)
    names = (r"run\.auto" if name == "auto" else name for name in ONE_PLACE)  # a word of other flags, too
    assert [name for name in names if re.search(rf"\b{name}\b", text)] == []


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_flag_inputs(tmp_path_factory.mktemp("flags"))


@pytest.fixture(scope="module")
def plain(folder: Path, tmp_path_factory: pytest.TempPathFactory) -> Any:
    """What runs without the flag leave, each made once for the tests that share it."""
    return plain_run(folder, tmp_path_factory)


@pytest.mark.faults
@pytest.mark.parametrize("key", FLAG_TESTS)
def test_a_run_with_the_flag_is_another_one_unless_it_is_ignored(
    key: str, folder: Path, tmp_path: Path, plain: Any
) -> None:
    check_flag(key, FLAG_TESTS[key], plain, folder, tmp_path)


@pytest.mark.faults
@pytest.mark.parametrize("key", NAMED)
def test_the_named_test_fails_when_the_flag_is_ignored(key: str) -> None:
    has_failed = seen_to_fail(key, NAMED[key])
    assert has_failed, f"{NAMED[key]} passes although {key} is ignored"
