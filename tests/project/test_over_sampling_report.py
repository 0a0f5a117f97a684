"""The decode steps that the report on --over-sample has are those of its command, and of the rule by hand."""

import pytest
from support.source_tree import ROOT

from benchmarks import over_sampling
from benchmarks.over_sampling import decode_steps


def test_the_table_is_what_the_command_prints(capsys: pytest.CaptureFixture[str]) -> None:
    over_sampling.main()
    title, *rows = capsys.readouterr().out.splitlines()
    report = (ROOT / "benchmarks/reports/over_sampling_cpu_202612.md").read_text(encoding="utf-8")
    assert "\n".join([title, "|---|---|---|---|---|", *rows]) in report and len(rows) == 6


@pytest.mark.parametrize(("share", "steps"), [(0.0, 48), (1.0, 24), (3.0, 16)])
def test_rollouts_of_equal_groups_by_hand(share: float, steps: float) -> None:
    """A group takes 40 tokens, seen at a look at 48; with twice as many prompts 24 are left, and rollouts of 32 and 16
    follow each other; with four times as many two groups end at each look."""
    assert decode_steps([[40, 3], [1, 40]], share, prompts=2) == steps
