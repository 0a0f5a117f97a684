"""An engine's state fits every ZeRO stage and number of ranks; on the same ones it is exact to the bit."""

from collections.abc import Iterator

import pytest
from group import Rank, running
from support.marks import slow_but

TOLERANCE = 1e-6  # losses are about 1
DTYPES = ("fp32", "bf16")
SAME = [(ranks, stage, dtype) for ranks in (1, 2) for stage in range(4) for dtype in DTYPES]
OTHER = [
    (f"{ranks}-{source}", stage, dtype)
    for ranks in (1, 2) for source in range(4) for stage in range(4) for dtype in DTYPES
]  # fmt: skip
# Each writer and each reader once.
QUICK = [("1-0", 3, "fp32"), ("1-1", 2, "fp32"), ("2-2", 1, "fp32"), ("2-3", 0, "fp32"), ("2-3", 1, "bf16")]

Found = dict[int, list[Rank]]


@pytest.fixture(scope="module")
def found(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Found]:
    """World size -> rank -> case -> result."""
    folder = tmp_path_factory.mktemp("checkpoint-ranks")
    (folder / "inputs").mkdir()
    with running("worker_checkpoint", (1, 2), folder, folder / "inputs") as groups:
        yield groups


@pytest.mark.parametrize(("ranks", "stage", "dtype"), slow_but([(1, 0, "fp32"), (2, 3, "bf16"), (2, 2, "fp32")], SAME))
def test_the_same_stage_and_ranks_go_on_bit_for_bit(found: Found, ranks: int, stage: int, dtype: str) -> None:
    for rank in found[ranks]:
        expected = rank[f"write {stage} {dtype}"]["after"]
        assert rank[f"read {ranks}-{stage} {stage} {dtype}"]["after"] == expected
        assert len(set(expected)) == 3, "weights move, so that a state that was not read would show"


@pytest.mark.parametrize(("origin", "stage", "dtype"), slow_but(QUICK, OTHER))
def test_another_stage_or_number_of_ranks_goes_on_up_to_rounding(
    found: Found, origin: str, stage: int, dtype: str
) -> None:
    ranks, source = map(int, origin.split("-"))
    expected = found[ranks][0][f"write {source} {dtype}"]["after"]
    # In bf16 the sum over another number of ranks rounds the first gradient: the losses after it differ.
    for size in (1, 2) if dtype == "fp32" else (ranks,):
        assert found[size][0][f"read {origin} {stage} {dtype}"]["after"] == pytest.approx(expected, abs=TOLERANCE)
    assert found[2][0][f"read {origin} {stage} {dtype}"]["after"][0] == pytest.approx(expected[0], abs=TOLERANCE)


def test_deepspeeds_own_counts_are_kept(found: Found) -> None:
    assert found[2][0]["write 2 fp32"]["counters"]["global_steps"] == 6
