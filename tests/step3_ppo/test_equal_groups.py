"""Prompts whose responses are all rewarded alike are replaced by further ones of the epoch, and left out after that."""

import json
from collections import Counter
from dataclasses import asdict
from itertools import groupby
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from support.messages import naming
from support.ppo_runs import ppo_words, run_ppo
from support.tiny_run import read_metrics

from pipeline.configuration.flags import parse
from pipeline.errors import InputError
from step3_ppo.config import PPOConfig
from step3_ppo.experience import Responses
from step3_ppo.rollout import Schedule, replace_groups
from step3_ppo.state import PPO, State

FOLDER_SIZES = {"num_train": 24, "num_test": 2}
K, PAD = 2, 9
SCORES = dict[int, float]()  # of responses, by their numbers
# Each call appends its step, its prompt and its values to a file.
FUNCTIONS = """
import json
def some(prompts, completions, trainer_state):
    values = [float(len(text) > 14) for text in completions]
    with open(__file__ + ".calls", "a") as file:
        print(json.dumps([trainer_state.global_step, prompts[0], values]), file=file)
    return values

def none(completions):
    return [1.0] * len(completions)

def tokens(completion_ids):
    return [[0.1] * len(ids) for ids in completion_ids]
"""


def rows(scores: list[float], *, first: int, width: int = 3) -> Responses:
    """Responses that are told apart by their numbers; NaN: a row of padding."""
    count, values = len(scores), torch.tensor(scores)
    numbers = torch.arange(first, first + count)
    SCORES.update(zip(numbers.tolist(), scores, strict=True))
    tokens = numbers.unsqueeze(1).expand(-1, 2 + width).clone()
    return Responses(
        sequences=tokens, trained=(torch.arange(2 + width) >= 2).expand(count, -1),
        sampler_log_probs=-tokens[:, 2:].float(), finished=numbers % 2 == 0, valid=~values.isnan(),
        row_index=numbers, order=torch.arange(count),
    )  # fmt: skip


def scores_of(responses: Responses) -> list[float]:
    return [SCORES[number] for number in responses.row_index.tolist()]


def alike(responses: Responses) -> torch.Tensor:
    groups = torch.tensor(scores_of(responses)).view(-1, K)
    return groups[:, 0] == groups[:, 1]


def test_the_groups_of_further_prompts_stand_in_the_place_of_equal_ones():
    asked, nan = [], float("nan")
    # Of two further prompts one's are told apart; then one prompt is left, and no other.
    found = [rows([0, 1, 1, 1], first=100, width=5), rows([2, 3, nan, nan], first=200, width=1)]

    def more(count: int) -> Responses | None:
        asked.append(count)
        return found[len(asked) - 1] if len(asked) <= 2 else None

    start = rows([1, 2, 3, 3, 4, 5, 6, 6], first=0)
    result = replace_groups(start, more, alike, group_size=K, pad_id=PAD)
    assert asked == [2, 1] and scores_of(result) == [1, 2, 0, 1, 4, 5, 2, 3]
    begun = rows([7, 7, 8, 8, 9, 0], first=0)
    last = replace_groups(begun, lambda _: found[1] if asked.pop() == 1 else None, alike, group_size=K, pad_id=PAD)
    assert last.row_index.tolist() == [200, 201, 2, 3, 4, 5], "where fewer prompts are left, the others stay"
    assert result.row_index.tolist() == [0, 1, 100, 101, 4, 5, 200, 201]
    assert result.order.tolist() == list(range(8))
    for n, number in enumerate(result.row_index.tolist()):
        width = {0: 3, 1: 5, 2: 1}[number // 100]
        assert result.sequences[n].tolist() == [number] * (2 + width) + [PAD] * (5 - width)
        assert result.sampler_log_probs[n].tolist() == [-number] * width + [0] * (5 - width)
        assert result.response_lengths[n] == width and bool(result.finished[n]) == (number % 2 == 0)


def test_after_three_rounds_the_others_stay():
    asked = []

    def more(count: int) -> Responses:
        asked.append(count)
        return rows([7.0] * (K * count), first=100 * len(asked))

    result = replace_groups(rows([1, 1, 2, 3], first=0), more, alike, group_size=K, pad_id=PAD)
    assert asked == [1, 1, 1] and result.row_index.tolist() == [300, 301, 2, 3]
    assert replace_groups(rows([1, 1], first=0), lambda _: None, alike, group_size=K, pad_id=PAD).row_index[0] == 0


@pytest.mark.parametrize("further", [[0, 0, 0, 0], [3, 1, 0, 2], [0, 2, 9, 9], [6, 4, 1, 0], [2, 0, 0, 0]])
def test_an_epoch_visits_each_prompt_once_however_many_are_replaced(further):
    """Of 10 prompts, 4 a rollout; `further` are asked for after each."""
    schedule = Schedule(4, 4, 8, 1, rollouts_per_epoch=3, total_steps=9, num_rollouts=9)
    position, seen = 0, dict[int, list[int]]()
    for number in range(9):
        if schedule.is_done(step=0, position=position):
            break
        for count in (4, further[number % 4]):
            if count and (count == 4 or position % 12):
                key, chosen = schedule.prompts(position, count, seed=3, num_prompts=10)
                assert len(chosen) == count and chosen[0] is not None
                seen.setdefault(key.epoch, []).extend(row for row in chosen if row is not None)
                position = schedule.position_after(position, count, num_prompts=10)
    assert all(len(rows) == len(set(rows)) for rows in seen.values())
    assert all(sorted(seen[epoch]) == list(range(10)) for epoch in list(seen)[:-1]) and len(seen) > 1


@pytest.fixture(scope="module")
def folder(folder: Path) -> Path:
    (folder / "rewards.py").write_text(FUNCTIONS)
    return folder


def trained(folder: Path, out: Path, function: str, **changes: Any) -> int:
    flags = {
        "eval_data_path": None, "rollout_batch_size": 8, "gradient_accumulation_steps": 2, "eval_interval": 0,
        "eval_fraction": 0, "num_train_epochs": 2, "reward_workers": 1, "method": "grpo", "num_samples_per_prompt": 2,
        "replace_equal_groups": "true", "reward_function": f"{folder}/rewards.py:{function}",
    }  # fmt: skip
    return run_ppo(ppo_words(folder, out, **flags | changes))


def test_a_run_by_the_calls_of_its_function(folder, tmp_path):
    """24 prompts, 4 a rollout and a step, two responses each; by hand from what the function was called with."""
    file = folder / "rewards.py.calls"
    file.unlink(missing_ok=True)
    assert trained(folder, tmp_path, "some") == 0
    calls = [json.loads(line) for line in file.read_text().splitlines()]
    lines = [line for line in read_metrics(tmp_path / "runs/ppo") if "step_s" in line]
    by_step = [list(group) for _, group in groupby(calls, lambda call: call[0])]
    assert len(by_step) == len(lines) < 12, "an epoch of 6 rollouts has fewer where prompts are replaced"
    for line, of_step in zip(lines, by_step, strict=True):
        every = [value for _, _, values in of_step for value in values]
        told_apart = [values for _, _, values in of_step if len(set(values)) > 1]
        num_groups = min(4, len(of_step))  # the last rollout of an epoch may have fewer
        assert line["groups/further_prompts"] == len(of_step) - num_groups <= 12
        assert line["objective/sampled_scores"] == pytest.approx(sum(every) / len(every))
        assert line["rows_masked"] == 2 * (num_groups - len(told_apart))
        assert line["groups/equal"] == 1 - len(told_apart) / num_groups
        assert line["objective/scores"] == (0.5 if told_apart else None)
        assert (line["actor/grad_norm"] > 0) if told_apart else line["skipped_updates"]
    assert any(line["groups/further_prompts"] for line in lines) and any(line["objective/scores"] for line in lines)
    assert set(Counter(prompt for _, prompt, _ in calls).values()) == {2} and lines[-1]["epoch"] == 2.0


@pytest.mark.slow
def test_a_resumed_run_goes_on_with_the_next_prompts(folder, tmp_path):
    changes = {"ppo_epochs": 2, "gradient_accumulation_steps": 1}  # 4 steps a rollout
    assert trained(folder, tmp_path / "whole", "some", **changes, max_steps=7) == 0
    for steps in (2, 4, 5, 7):
        assert trained(folder, tmp_path / "parts", "some", **changes, max_steps=steps) == 0
    states = [json.loads((tmp_path / name / "runs/ppo/checkpoints/step-7/state.json").read_text())["state"]["ppo"]
              for name in ("whole", "parts")]  # fmt: skip
    assert states[0] == states[1] and states[0]["tallies"]["with"]["sampled"]["place"] > 4 * 2
    weights = [(tmp_path / name / "actor/model.safetensors").read_bytes() for name in ("whole", "parts")]
    assert weights[0] == weights[1] != (folder / "base/model.safetensors").read_bytes()


def test_where_nothing_is_left_the_step_is_skipped_and_said(folder, tmp_path, capsys):
    assert trained(folder, tmp_path, "none", max_steps=2, max_bad_steps=1) == 2
    written = capsys.readouterr().err
    assert written == naming("step 2 skipped ... every prompt")
    assert written == naming("error: none of 2 steps ... nothing is saved")
    state = State()
    state.count_step(stepped=False, engines=[], is_bad=False)
    assert (state.step, state.skipped_updates, state.bad_in_a_row) == (1, 1, 0)


def test_a_rollout_that_is_sampled_again_begins_at_its_own_prompts():
    """One that was stopped before its first update has noted where the next one begins."""
    ppo = SimpleNamespace(schedule=Schedule(4, 4, 8, 1, rollouts_per_epoch=3, total_steps=9, num_rollouts=9))
    state = State(rollout=2)
    assert (PPO.position(ppo, state), PPO.position(ppo, state, of_next=True)) == (8, 12)
    state.store_tally("sampled", {"place": 17})
    assert (PPO.position(ppo, state), PPO.position(ppo, state, of_next=True)) == (8, 17)
    again = State(**json.loads(json.dumps(asdict(state))))
    again.store_tally("sampled", {"place": 18})
    assert (PPO.position(ppo, again), PPO.position(ppo, again, of_next=True)) == (8, 18)
    again.finish_rollout()
    assert PPO.position(ppo, again) == 18


def test_a_method_that_compares_responses_refuses_values_of_tokens(folder, tmp_path, capsys):
    assert trained(folder, tmp_path, "tokens") == 2
    (line,) = [line for line in capsys.readouterr().err.splitlines() if line.startswith("error: ")]
    assert line == naming("tokens ... a value for each token ... one for each")


@pytest.mark.parametrize(
    ("words", "expected"),
    [
        (["--method", "reinforce_pp"], "--replace-equal-groups ... grpo or rloo ... reinforce_pp"),
        (["--method", "grpo", "--reward-model-name-or-path", "r"], "--replace-equal-groups ... a reward model"),
    ],
)
def test_refused_where_it_means_nothing(words, expected):
    given = ["--actor-model-name-or-path", "a", "--reward-function", "exact_match", "--replace-equal-groups", "true"]
    with pytest.raises(InputError, match=naming(expected)):
        parse(PPOConfig, [*given, *words], section="ppo")


def test_an_evaluation_counts_responses_that_are_rewarded_alike(folder, tmp_path):
    """What --replace-equal-groups leaves out of training is part of what is measured."""
    held_out = {"eval_data_path": folder / "test.jsonl", "eval_samples_per_prompt": 2, "max_steps": 1}
    trained(folder, tmp_path, "none", **held_out)
    line = next(line for line in read_metrics(tmp_path / "runs/ppo") if "eval_rows" in line)
    assert line["eval_rows"] == 4 and line["eval_objective/scores"] == 1.0
