"""Streamed weights give the rollout that whole weights do, whatever each rank samples."""

import pytest
from compare import TOLERANCE, apart, assert_same_responses
from group import Found
from support.marks import slow_but

WORKER = "worker_streaming"
MODELS = {"opt": [1, 1], "llama": [1, 1, 1], "lora": [1, 1]}  # layers of each group


@pytest.mark.few(1)
@pytest.mark.parametrize("name", slow_but(["llama", "lora"], MODELS))
def test_streamed_weights_sample_what_whole_ones_do(found: Found, name: str) -> None:
    """Before and after a step of the optimizer and a change of every number."""
    for rank in found[2]:
        for part in ("first", "second"):
            assert_same_responses(rank[name][part]["streamed"], rank[name][part]["whole"])
        assert rank[name]["first"]["whole"]["responses"] != rank[name]["second"]["whole"]["responses"]
        assert rank[name]["groups"] == {"whole": [], "streamed": MODELS[name]}
        assert rank[name]["same addresses"]


@pytest.mark.slow
def test_the_ranks_sample_different_things(found: Found) -> None:
    lengths = [[len(row) for row in rank["opt"]["first"]["whole"]["responses"]] for rank in found[2]]
    assert [len(rows) for rows in lengths] == [6, 2] and len(set(lengths[0])) > 1


def test_a_rank_holds_its_slice_and_two_groups(found: Found) -> None:
    """Beside what lies outside the layers: the embedding and the head, and a few norms."""
    for rank in found[2]:
        total, slices, buffers = rank["llama"]["bytes"]
        outside = 4 * 32 * (2 * 301 + 7)
        assert total == slices + buffers + outside
        assert 4 * slices == 3 * buffers, "half of three layers, two buffers of one"


@pytest.mark.slow
def test_a_stop_on_one_rank_stops_the_others(found: Found) -> None:
    for rank in found[2]:
        assert rank["stopped"]["stopped"] and rank["stopped"]["asked"] == 3
        assert_same_responses(rank["stopped"]["next"], rank["opt"]["first"]["whole"])


def test_all_ranks_stream_where_whole_weights_do_not_fit_on_one(found: Found) -> None:
    for rank in found[2]:
        assert rank["decided"] == {"fits": [], "does not fit": [1, 1]}


@pytest.mark.slow
def test_rollout_weights_changes_no_rollout_of_step_3(found: Found) -> None:
    for rank in found[2]:
        case = rank["step 3"]
        assert case["groups"] == [1, 1]
        assert 0 < case["stopped"] < len(case["streamed"]["finished"]), "stop strings end some of them"
        assert case["streamed"]["sequences"].equal(case["whole"]["sequences"])
        assert apart(case["streamed"], case["whole"]) < TOLERANCE
