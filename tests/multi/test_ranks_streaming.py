"""Streamed weights give the rollout that whole weights do, whatever each rank samples."""

from collections.abc import Iterator
from typing import Any

import pytest
import torch
from compare import TOLERANCE, apart
from group import Rank, running
from support.marks import slow_but
from support.tiny_run import make_folder, take_lines

Found = list[Rank]
MODELS = {"opt": [1, 1], "llama": [1, 1, 1], "lora": [1, 1]}  # layers of each group


@pytest.fixture(scope="module")
def found(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Found]:
    """Rank -> case -> findings."""
    folder = tmp_path_factory.mktemp("streaming")
    make_folder(folder)
    take_lines(folder / "train.jsonl", folder / "few.jsonl", 20)
    with running("worker_streaming", (2,), folder, folder) as groups:
        yield groups[2]


def assert_same(mine: dict[str, Any], reference: dict[str, Any]) -> None:
    assert mine["responses"] == reference["responses"] and mine["finished"] == reference["finished"]
    torch.testing.assert_close(mine["log_probs"], reference["log_probs"], rtol=TOLERANCE, atol=TOLERANCE)


@pytest.mark.few(1)
@pytest.mark.parametrize("name", slow_but(["llama", "lora"], MODELS))
def test_streamed_weights_sample_what_whole_ones_do(found: Found, name: str) -> None:
    """Before and after a step of the optimizer and a change of every number."""
    for rank in found:
        for part in ("first", "second"):
            assert_same(rank[name][part]["streamed"], rank[name][part]["whole"])
        assert rank[name]["first"]["whole"]["responses"] != rank[name]["second"]["whole"]["responses"]
        assert rank[name]["groups"] == {"whole": [], "streamed": MODELS[name]}
        assert rank[name]["same addresses"]


@pytest.mark.slow
def test_the_ranks_sample_different_things(found: Found) -> None:
    lengths = [[len(row) for row in rank["opt"]["first"]["whole"]["responses"]] for rank in found]
    assert [len(rows) for rows in lengths] == [6, 2] and len(set(lengths[0])) > 1


def test_a_rank_holds_its_slice_and_two_groups(found: Found) -> None:
    """Beside what lies outside the layers: the embedding and the head, and a few norms."""
    for rank in found:
        total, slices, buffers = rank["llama"]["bytes"]
        outside = 4 * 32 * (2 * 301 + 7)
        assert total == slices + buffers + outside
        assert 4 * slices == 3 * buffers, "half of three layers, two buffers of one"


@pytest.mark.slow
def test_a_stop_on_one_rank_stops_the_others(found: Found) -> None:
    for rank in found:
        assert rank["stopped"]["stopped"] and rank["stopped"]["asked"] == 3
        assert_same(rank["stopped"]["next"], rank["opt"]["first"]["whole"])


def test_all_ranks_stream_where_whole_weights_do_not_fit_on_one(found: Found) -> None:
    for rank in found:
        assert rank["decided"] == {"fits": [], "does not fit": [1, 1]}


@pytest.mark.slow
def test_rollout_weights_changes_no_rollout_of_step_3(found: Found) -> None:
    for rank in found:
        case = rank["step 3"]
        assert case["groups"] == [1, 1]
        assert 0 < case["stopped"] < len(case["streamed"]["finished"]), "stop strings end some of them"
        assert case["streamed"]["sequences"].equal(case["whole"]["sequences"])
        assert apart(case["streamed"], case["whole"]) < TOLERANCE
