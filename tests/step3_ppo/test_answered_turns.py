"""Rows with tokens of tools between those of the policy: response space, micro-batches, rewards, checkpoints."""

from types import SimpleNamespace
from typing import Any

import pytest
import torch
from support.ppo_loop import KeptMetrics  # noqa: F401  step 3 is imported first
from torch import Tensor

from pipeline.generation.rollouts import Rollout
from pipeline.training.micro_batches import MicroBatch
from step3_ppo.experience import Collected, Experience, Responses, RewardScores, pack_responses
from step3_ppo.flags.groups import PPOCoefficients
from step3_ppo.rewarding import is_scored, reward_responses
from step3_ppo.rollout_metrics import tool_metrics
from step3_ppo.scoring import scored_rows
from step3_ppo.state import PPO, State

PAD = 1
# Of each row the prompt's length, and whose each token behind it is: the policy's (1) or a tool's (0).
ROWS = [(3, [1, 1, 0, 0, 0, 1, 1]), (3, [1]), (2, [1, 0, 1, 0, 0, 1]), (4, [1, 1, 1, 1])]
COUNTS = [[2.0, 3.0, 1.0, 0.5, 0.0], [1.0, 0.0, 0.0, 0.0, 0.0], [3.0, 2.0, 1.0, 0.25, 1.0], [1.0, 0.0, 0.0, 0.0, 0.0]]


def packed(**changes: Any) -> Responses:
    """Token ids count up from 100 in each row; log-probabilities are minus the number of the policy's token."""
    wholes = [torch.arange(start + len(behind)) + 100 * (n + 1) for n, (start, behind) in enumerate(ROWS)]
    rollout = Rollout(
        prompts=[row[:start] for row, (start, _) in zip(wholes, ROWS, strict=True)],
        responses=[row[start:] for row, (start, _) in zip(wholes, ROWS, strict=True)],
        sampled=[torch.tensor(behind, dtype=torch.bool) for _, behind in ROWS],
        log_probs=[-1.0 - torch.arange(sum(behind)) for _, behind in ROWS],
        finished=torch.tensor([True, True, False, True]),
    )
    given = {
        "valid": torch.tensor([True, True, True, False]),
        "row_index": torch.tensor([7, 7, 9, 9]),
        "order": torch.arange(4),
        "tool_counts": torch.tensor(COUNTS),
    }
    return pack_responses(rollout, pad_id=PAD, max_sequence=14, max_response=8, **given | changes).trimmed()


def test_response_space_has_the_policys_tokens_alone() -> None:
    responses = packed()
    assert responses.prompt_lengths.tolist() == [3, 3, 2, 4] and responses.sequence_lengths.tolist() == [10, 4, 8, 8]
    assert responses.response_lengths.tolist() == [4, 1, 3, 4] and responses.sampler_log_probs.shape == (4, 4)
    positions = torch.arange(10.0).expand(4, 10)
    # Behind a prompt of 3 tokens stand two of the policy's, three of a tool's, and two more.
    assert responses.in_response_space(positions).tolist() == [[2, 3, 7, 8], [2, 0, 0, 0], [1, 3, 6, 0], [3, 4, 5, 6]]
    assert responses.response_mask.sum(1).tolist() == [4, 1, 3, 0], "the last row only fills the rollout"


def test_micro_batches_count_all_tokens_and_select_the_policys() -> None:
    responses = packed()
    lengths = responses.lengths(packs=True)
    assert lengths.whole == responses.sequence_lengths.tolist() and lengths.prompts == [3, 3, 2, 4]
    batch = MicroBatch.of((0, 2), lengths)
    assert (batch.length, batch.width, batch.num_response_tokens, batch.num_packed_tokens) == (10, 4, 7, 18)
    both = MicroBatch.of((0, 1), lengths)
    assert both.shared == (3,) and both.num_tokens == 14 - 3, "rows share their prompt, and no answer of a tool"
    part = responses.select(torch.tensor(batch.rows)).narrowed(batch.length, batch.width)
    assert int(part.trained[:, 1:].sum()) == batch.num_response_tokens


def test_reward_models_read_all_tokens() -> None:
    responses = packed()
    batch = MicroBatch.of(range(4), responses.lengths())
    tokenizer: Any = SimpleNamespace(decode=lambda ids, **_: " ".join(map(str, ids.tolist())))
    seen = scored_rows(SimpleNamespace(tokenizer=tokenizer), responses, batch, {7: {}, 9: {}})
    assert seen.mask.sum(1).tolist() == [10, 4, 8, 8]
    seen = scored_rows(SimpleNamespace(tokenizer=tokenizer), responses, batch, [{"messages": "[]"}] * 10)
    assert [one.response for one in seen][2] == "302 303 304 305 306 307"


@pytest.mark.parametrize("turns", ["several", "one"])
def test_a_checkpoint_keeps_the_rows(turns: str) -> None:
    """With their mask; rows of one turn are also read by two lengths, as commits up to 0c0ab5fc stored them."""
    responses = packed()
    if turns == "one":
        responses = packed(tool_counts=None).select(torch.tensor([1, 3]))
    numbers = [torch.rand(responses.sampler_log_probs.shape) for _ in range(3)]
    whole = Collected(responses, Experience(responses.response_mask, *numbers, None), {"objective/kl": 0.5})
    stored = whole.tensors()
    assert "responses/trained" in stored and "responses/prompt_lengths" not in stored
    assert ("responses/tool_counts" in stored) is (turns == "several")
    ways = [dict(stored)]
    if turns == "one":
        lengths = {"prompt_lengths": responses.prompt_lengths, "response_lengths": responses.response_lengths}
        ways.append({name: one for name, one in stored.items() if name != "responses/trained"})
        ways[1] |= {f"responses/{name}": one for name, one in lengths.items()}
    for way in ways:
        found = Collected.restored(way, whole.metrics, torch.device("cpu"))
        assert found.responses.trained.equal(responses.trained)
        again = found.tensors()
        assert again.keys() == stored.keys() and all(again[name].equal(stored[name]) for name in stored)


def judged(responses: Responses, values: list[float]) -> RewardScores:
    """What a run's only function gives these responses."""
    rewards: Any = [SimpleNamespace(name="f", weight=1.0, scale=None)]
    calls = SimpleNamespace(rewards=SimpleNamespace(values=lambda *_: [[value] for value in values]))
    config = SimpleNamespace(rewards=SimpleNamespace(reward_scaling="none"))
    run = SimpleNamespace(stop=SimpleNamespace(is_set=lambda: False))
    return PPO.judged(SimpleNamespace(calls=calls, rewards=rewards, run=run, config=config), responses, State())  # type: ignore[arg-type]


def test_a_lost_row_is_left_out_and_its_group_goes_on() -> None:
    responses = packed(valid=torch.ones(4, dtype=torch.bool))
    scores = judged(responses, [1.0, 3.0, 50.0, 2.0])
    assert is_scored(responses, scores).tolist() == [True, True, False, True]
    zeros = torch.zeros(4, 4)
    passes: Any = SimpleNamespace(log_probs=zeros, ref_log_probs=None, values=None)
    ppo = PPOCoefficients(method="grpo", kl_coef=0.0, whiten_advantages=False, scale_by_group=False)
    found = reward_responses(responses, passes, scores, ppo, kl_coef=0.0, group_size=2)
    assert found.valid.tolist() == [True, True, False, True] and not found.failures["f"].any()
    assert found.experience.response_mask.sum(1).tolist() == [4, 1, 0, 4]
    advantages: Tensor = found.experience.advantages
    assert advantages[0].tolist() == [-1.0] * 4 and advantages[1].tolist() == [1.0, 0, 0, 0]
    assert not advantages[2:].any(), "the other response of its prompt has nothing to be compared with"


def test_metrics_of_tools_are_those_of_rows_that_count() -> None:
    assert tool_metrics(packed(tool_counts=None)) == {}
    found = tool_metrics(packed())
    assert found == {
        "tools/turns": 2.0, "tools/calls": pytest.approx(5 / 3), "tools/failed_calls": pytest.approx(2 / 5),
        "tools/seconds": 0.25, "tools/lost": pytest.approx(1 / 3),
    }  # fmt: skip
    none = tool_metrics(packed(tool_counts=torch.zeros(4, 5)))
    assert none["tools/calls"] == 0 and none["tools/failed_calls"] != none["tools/failed_calls"]
