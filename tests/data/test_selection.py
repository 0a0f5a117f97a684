"""The split is a partition, the same for every order of the rows, and near its shares."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from pipeline.data.selection import parse_shares, share_of, uniform
from pipeline.errors import InputError

IDS = st.integers(min_value=0, max_value=2**63 - 1)


def test_shares_are_normalised():
    assert parse_shares("2,4,4") == (0.2, 0.4, 0.4)
    assert parse_shares("1, 0,0") == (1.0, 0.0, 0.0)
    assert parse_shares("none") is None


@pytest.mark.parametrize("text", ["", "1,2", "1,2,3,4", "a,b,c", "0,0,0", "-1,1,1", "nan,1,1", "inf,1,1"])
def test_bad_shares_are_refused_with_the_text(text):
    with pytest.raises(InputError, match="--data-split") as error:
        parse_shares(text)
    assert repr(text) in str(error.value)


def test_the_share_of_a_prompt_is_fixed_for_ever():
    """A change would move prompts between the stages of users' runs. Worked out by b2sum of 'step:1234:<id>'."""
    expected = [1, 2, 1, 0, 2, 1, 1, 1, 2, 1, 0, 1]
    assert [share_of(prompt_id, 1234, (0.2, 0.4, 0.4)) for prompt_id in range(12)] == expected


@pytest.mark.parametrize("shares", [(0.2, 0.4, 0.4), (0.5, 0.5, 0.0), (0.0, 0.0, 1.0)])
def test_shares_hold_approximately_and_zero_share_exactly(shares):
    indices = [share_of(prompt_id, 7, shares) for prompt_id in range(20_000)]
    for index, share in enumerate(shares):
        # 5 standard deviations of a binomial share at n = 20,000 are below 0.018.
        assert indices.count(index) / 20_000 == pytest.approx(share, abs=0.018 if 0 < share < 1 else 0)


@given(IDS, st.integers(0, 2**31))
def test_all_or_nothing_fractions(prompt_id, seed):
    assert 0.0 <= uniform("eval", seed, prompt_id) < 1.0
    assert share_of(prompt_id, seed, (0.0, 1.0, 0.0)) == 1


def test_draws_are_independent_of_each_other():
    """Were one hash used for both, the evaluation rows would all be of the first share."""
    evaluated = [prompt_id for prompt_id in range(20_000) if uniform("eval", 3, prompt_id) < 0.1]
    assert len(evaluated) / 20_000 == pytest.approx(0.1, abs=0.011)
    in_first = sum(share_of(prompt_id, 3, (0.2, 0.4, 0.4)) == 0 for prompt_id in evaluated)
    assert in_first / len(evaluated) == pytest.approx(0.2, abs=0.05)


def test_another_seed_gives_another_split():
    shares = (0.2, 0.4, 0.4)
    same = sum(share_of(i, 1, shares) == share_of(i, 2, shares) for i in range(5_000))
    # Independent draws agree with probability 0.04 + 0.16 + 0.16.
    assert same / 5_000 == pytest.approx(0.36, abs=0.04)
