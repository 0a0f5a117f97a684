"""Ranks that share the weights in a rollout, or partition them, sample what the eager loop does on one rank."""

import pytest
from compare import TOLERANCE, apart, assert_same_responses
from group import Found
from support.marks import slow_but

WORKER = "worker_decode"


def test_rollouts_are_worth_comparing(found: Found) -> None:
    """Some end early, and the weights that change are other ones."""
    for name in ("shared opt", "shared llama"):
        case = found[1][0][name]
        assert any(case["first"]["finished"]) and not all(case["first"]["finished"])
        assert case["first"]["responses"] != case["second"]["responses"]


@pytest.mark.parametrize("name", slow_but(["llama"], ["opt", "opt-350m", "llama"]))
def test_ranks_that_share_the_weights_sample_what_one_rank_does(found: Found, name: str) -> None:
    for rank in found[2]:
        for part in ("first", "second"):
            assert_same_responses(rank[f"shared {name}"][part], found[1][0][f"shared {name}"][part])


@pytest.mark.slow
@pytest.mark.parametrize("case", ["shared llama z3", "whole llama z3"])
def test_zero_3_samples_what_one_rank_does(found: Found, case: str) -> None:
    """The weights are gathered whole on each rank, or the parts that ranks share."""
    for rank in found[2]:
        for part in ("first", "second"):
            assert_same_responses(rank[case][part], found[1][0]["shared llama"][part])


@pytest.mark.slow
def test_ranks_may_draw_different_numbers_of_tokens(found: Found) -> None:
    assert [rank["uneven z3"]["longest"] for rank in found[2]] == [7, 2]
    for rank in found[2]:
        assert_same_responses(rank["uneven z3"]["second"], found[1][0]["shared opt"]["second"])


@pytest.mark.slow
def test_a_stop_on_one_rank_stops_its_group(found: Found) -> None:
    for rank in found[2]:
        assert rank["stopped"]["stopped"] and rank["stopped"]["asked"] == 3
        assert_same_responses(rank["stopped"]["next"], found[1][0]["shared opt"]["first"])


@pytest.mark.slow
def test_inference_tp_size_changes_no_rollout_of_step_3(found: Found) -> None:
    """Each rank copies its half of two layers of width 32; biases of what is cut by inputs it copies whole."""
    reference = found[1][0]["step 3"]["responses"]
    assert 0 < found[1][0]["step 3"]["stopped"] < len(reference["finished"]), "stop strings end some of them"
    for rank in found[2]:
        responses = rank["step 3"]["responses"]
        assert responses["sequences"].equal(reference["sequences"]) and apart(responses, reference) < TOLERANCE
        halves, whole = 4 * 32 * 32 + 2 * 32 * 64 + 3 * 32 + 64, 32 + 32
        assert rank["step 3"]["copied bytes"] == 4 * 2 * (halves // 2 + whole)
