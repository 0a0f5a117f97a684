"""A growing difference of sampler and trainer is told of once."""

import json
import math
from dataclasses import asdict

import pytest

from step3_ppo.rollout_metrics import warn_of_drift
from step3_ppo.state import State


@pytest.mark.parametrize(
    ("errors", "warned"),
    [
        # Bounds by hand: 4 x the first rollout's, and 0.05 nats.
        ([0.01, 0.03, 0.049], []),
        ([0.01, 0.051, 0.06], [1]),
        ([0.02, 0.079, 0.081, 0.2, 0.01, 0.3], [2, 5]),
        ([math.nan, 0.02, math.nan, 0.09], [3]),
        ([0.0, 0.0, 0.06], [2]),
    ],
)
def test_told_once_when_it_is_four_times_the_first_ones(caplog, errors, warned):
    """Each rollout's state goes through the file of a checkpoint, and is sampled again after a stop."""
    state, found = State(), []
    for number, error in enumerate(errors):
        for _ in range(2):
            caplog.clear()
            state.tally("sampler_drift", warn_of_drift(error, state.tallied("sampler_drift"), step=number))
            state = State(**json.loads(json.dumps(asdict(state))))
        found += [number] * bool(caplog.records)
        assert not caplog.records or "--off_policy_weights token_truncate" in caplog.text
        state.finish_rollout()
    assert found == warned
