"""Statistics of a reward model's scores against numbers worked by hand in the comments."""

import math

import pytest

from step2_reward.statistics import (
    Verdict,
    accuracy,
    accuracy_by_length,
    calibration,
    estimate,
    length_bucket,
    mean_margin,
    num_distinct_words,
    trivial_rules,
    verdict,
)


def test_estimate_by_hand():
    # 1, 2, 6: mean 3, squares 4 + 1 + 9 = 14, variance 14 / 2 = 7, error sqrt(7 / 3).
    found = estimate([1.0, 2.0, 6.0])
    assert (found.mean, found.count) == (3.0, 3)
    assert found.standard_error == pytest.approx(math.sqrt(7 / 3), rel=1e-12)


def test_estimate_of_one_pair_has_no_error():
    assert estimate([0.5]).standard_error is None


def test_accuracy_counts_a_tie_as_half():
    # Right, right, wrong, tie: (1 + 1 + 0 + 0.5) / 4 = 0.625.
    # Deviations 0.375, 0.375, -0.625, -0.125: squares sum to 0.6875; sqrt(0.6875 / 3 / 4) = 0.239357.
    found = accuracy([1.0, 0.2, -1.0, 3.0], [0.0, 0.1, 0.0, 3.0])
    assert found.mean == 0.625
    assert found.standard_error == pytest.approx(0.239357, abs=1e-6)


def test_mean_margin_is_signed():
    # Margins 2, -1, 0.5: mean 0.5; deviations 1.5, -1.5, 0: variance 4.5 / 2; error sqrt(2.25 / 3).
    found = mean_margin([2.0, 0.0, 1.5], [0.0, 1.0, 1.0])
    assert found.mean == pytest.approx(0.5, rel=1e-12)
    assert found.standard_error == pytest.approx(math.sqrt(0.75), rel=1e-12)


def test_unequal_lists_are_refused():
    with pytest.raises(ValueError):
        accuracy([1.0, 2.0], [0.0])


def test_calibration_by_hand():
    # Margins log 3 (p 0.75) three times and -log 3 (p 0.25) once. In both orders bin 7 holds 4 comparisons at 0.75
    # (3 won, and the one of the wrong pair turned round: lost), bin 2 the mirror image: observed 0.75 and 0.25.
    found = calibration([math.log(3)] * 3 + [0.0], [0.0] * 3 + [math.log(3)])
    counts = [row.count for row in found.bins]
    assert counts == [0, 0, 4, 0, 0, 0, 0, 4, 0, 0]
    assert found.bins[7].predicted == pytest.approx(0.75, rel=1e-12)
    assert (found.bins[7].observed, found.bins[2].observed) == (0.75, 0.25)
    assert found.expected_error == pytest.approx(0.0, abs=1e-12)
    assert (found.bins[0].predicted, found.bins[0].low, found.bins[9].high) == (None, 0.0, 1.0)


def test_calibration_error_of_an_overconfident_model():
    # Margins +log 9 (p 0.9) and -log 9 (p 0.1): each bin at 0.9 and 0.1 is right half the time: |0.9 - 0.5| = 0.4.
    found = calibration([math.log(9), 0.0], [0.0, math.log(9)])
    assert found.expected_error == pytest.approx(0.4, rel=1e-9)


def test_calibration_of_ties_and_huge_margins():
    assert calibration([1.0], [1.0]).expected_error == 0.0  # p 0.5, once won, once lost
    assert calibration([2000.0], [-2000.0]).bins[9].observed == 1.0  # no overflow; p 1.0 lies in the last bin


@pytest.mark.parametrize(
    ("chosen", "rejected", "bucket"),
    [(100, 90, "similar"), (100, 89, "longer_wins"), (89, 100, "shorter_wins"), (0, 0, "similar")],
)
def test_length_bucket_edges(chosen, rejected, bucket):
    assert length_bucket(chosen, rejected) == bucket


def test_accuracy_by_length_shows_a_model_that_reads_only_the_length():
    lengths = ([10, 20, 5, 8], [5, 10, 10, 16])
    found = accuracy_by_length(*lengths, *lengths)  # the score is the length
    assert {name: row.mean for name, row in found.items()} == {"shorter_wins": 0.0, "longer_wins": 1.0}
    assert [row.count for row in found.values()] == [2, 2]


def test_trivial_rules_by_hand():
    # Characters 3 : 5, 4 : 4, 9 : 2 -> longer 0, 0.5, 1; shorter 1, 0.5, 0.
    # Distinct words 1 : 1 (go go), 2 : 1, 2 : 1 -> 0.5, 1, 1.
    found = trivial_rules(["yes", "a bc", "one. two!"], ["go go", "word", "no"])
    assert found["longer wins"].mean == 0.5
    assert found["shorter wins"].mean == 0.5
    assert found["more distinct words"].mean == pytest.approx(2.5 / 3, rel=1e-12)


def test_the_verdict_compares_pair_by_pair_with_the_best_rule():
    """Longer wins 3 of 4 pairs. By hand: gains 0, 0, 0, 1 have mean 0.25, standard error 0.25; 40 pairs have less."""
    good, bad = ["long one", "long one", "long one", "no"], ["a", "b", "c", "much longer"]
    perfect = [1.0] * 4, [0.0] * 4
    found = verdict(*perfect, good, bad)
    assert (found.rule, found.gain.mean, found.gain.count) == ("longer wins", 0.25, 4)
    assert found.gain.standard_error == pytest.approx(0.25) and not found.is_better
    assert verdict(*(side * 10 for side in perfect), good * 10, bad * 10).is_better
    as_the_rule = [float(len(text)) for text in good * 10], [float(len(text)) for text in bad * 10]
    assert verdict(*as_the_rule, good * 10, bad * 10) == Verdict("longer wins", estimate([0.0] * 40), is_better=False)
    assert not verdict([1.0], [0.0], ["a"], ["bb"]).is_better, "one pair shows nothing"


@pytest.mark.parametrize(("wins", "is_better"), [(14, False), (18, True)])
def test_a_verdict_is_better_where_the_gain_is_more_than_two_standard_errors(wins, is_better):
    """20 pairs of like answers, on which every rule ties; gains of +-0.5 are 1.9 and 5.8 standard errors above 0."""
    scores = [1.0] * wins + [-1.0] * (20 - wins)
    found = verdict(scores, [0.0] * 20, ["a b"] * 20, ["c d"] * 20)
    mean = (2 * wins - 20) / 40
    error = math.sqrt((0.25 - mean**2) / 19)
    assert (found.gain.mean, found.gain.standard_error) == (pytest.approx(mean), pytest.approx(error))
    assert found.is_better == is_better == (mean > 2 * error) and mean > error


def test_distinct_words_ignore_case_and_split_unspaced_scripts():
    assert num_distinct_words("The the THE cat") == 2
    assert num_distinct_words("你好你 ok") == 3
