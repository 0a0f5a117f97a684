"""A reward model and a plain Python reward side by side, in a run of one process."""

import json
import math
from dataclasses import replace
from functools import partial

import pytest
import torch
from support.messages import naming
from support.ppo_loop import PPOLoop, loop_on_random_prompts
from support.ppo_settings import ppo_config
from support.ppo_updates import MEAN, STD
from torch import Tensor

from pipeline.errors import Interrupted
from pipeline.rewards.rows import Scale, ScoredRows
from step3_ppo import training

COEFFICIENTS = {"reward_clip": 0.8, "missing_eos_penalty": 0.3, "gamma": 1.0, "gae_lambda": 1.0}


class TokensPerGuess:
    """Scores by plain Python what the row's other columns say of it; no score where they say none."""

    name, weight, scale, reads_columns = "guess", -0.5, Scale(2.0, 3.0), True

    def __init__(self) -> None:
        self.seen: list[int] = []
        self.guesses: list[float] = []

    def score(self, rows: ScoredRows) -> Tensor:
        self.seen.append(len(rows.finished))
        guesses = [row.extra.get("guess", math.nan) for row in rows]
        self.guesses += guesses
        return torch.tensor([len(row.ids) / guess for row, guess in zip(rows, guesses, strict=True)])


def loop_of(world, folder, folders, guesses: list[float | None], **ppo) -> tuple[PPOLoop, TokensPerGuess]:
    """The loop on four prompts, of which those with a guess have it in a column; those held out guess 9, 10, 11."""
    loop = loop_on_random_prompts(world, folder, ppo_config(folders, **(COEFFICIENTS | ppo)))
    texts = [json.dumps({} if guess is None else {"guess": guess}) for guess in guesses]
    rows = [json.dumps({"guess": 9.0 + n}) for n in range(3)]
    train, held_out = (
        data.remove_columns("extra").add_column("extra", column)
        for data, column in ((loop.ppo.prompts.train, texts), (loop.ppo.prompts.eval, rows))
    )
    loop.ppo = replace(loop.ppo, prompts=replace(loop.ppo.prompts, train=train, eval=held_out))
    second = TokensPerGuess()
    loop.ppo.models.rewards.append(second)
    return loop, second


def test_a_run_learns_from_the_weighted_sum_of_a_reward_model_and_a_function(world, trained_folders, tmp_path):
    guesses = [1.0, 2.0, 4.0, 8.0]
    alone = loop_on_random_prompts(world, tmp_path, ppo_config(trained_folders, **COEFFICIENTS))
    alone.collect()
    loop, second = loop_of(world, tmp_path, trained_folders, guesses)
    rollout = loop.collect()
    responses, judged = rollout.responses, loop.judged
    assert sum(second.seen) == 4 and judged.shape == (4, 2)
    assert judged[:, 0].equal(alone.judged[:, 0]), "the reward model's scores are as without the other"
    raw = []
    for n in range(4):
        length = int(responses.prompt_lengths[n] + responses.response_lengths[n])
        mine = length / guesses[int(responses.row_index[n])]
        assert judged[n, 1].item() == pytest.approx(mine, rel=1e-6)
        model = judged[n, 0].item()
        total = min(max((model - MEAN) / STD, -0.8), 0.8) - 0.5 * min(max((mine - 2) / 3, -0.8), 0.8)
        total -= 0.0 if responses.finished[n] else 0.3
        kl = (rollout.experience.log_probs - rollout.experience.ref_log_probs)[n].sum().item()
        returned = rollout.experience.targets.returns[n, 0].item()
        assert returned == pytest.approx(total - loop.state.kl_coef * kl, rel=1e-4, abs=1e-5)
        raw.append(model - 0.5 * mine)
    assert rollout.metrics["objective/scores"] == pytest.approx(sum(raw) / 4, rel=1e-5)
    loop.update(rollout)
    loop.evaluate()
    assert set(second.guesses[4:]) == {9.0, 10.0, 11.0}, "held-out responses go with the columns of their own prompts"
    samples = [json.loads(line) for line in (tmp_path / "samples.jsonl").open(encoding="utf-8")]
    found = loop.control.evaluations[-1]["eval_objective/scores"]
    assert sum(sample["score"] for sample in samples) / 3 == pytest.approx(found, abs=1e-4)


def test_a_row_that_a_reward_cannot_judge_is_masked(world, trained_folders, tmp_path):
    loop, _ = loop_of(world, tmp_path, trained_folders, [1.0, None, 4.0, 8.0])
    rollout = loop.collect()
    place = rollout.responses.row_index.tolist().index(1)
    assert rollout.metrics["rows_masked"] == 1
    assert rollout.experience.response_mask.any(1).tolist() == [n != place for n in range(4)]


def test_a_masked_row_is_no_part_of_the_mean_that_is_trained_on(world, trained_folders, tmp_path):
    """The ratio is 1: the loss is minus the mean advantage of the other rows' tokens."""
    settings = {"accumulation": 2, "whiten_advantages": False}
    loop, _ = loop_of(world, tmp_path, trained_folders, [1.0, None, 4.0, 8.0], **settings)
    rollout = loop.collect()
    mask, responses = rollout.experience.response_mask, rollout.responses
    assert mask.sum() < responses.response_mask.sum()
    update = training.step_objectives(loop.ppo, rollout, loop.state, loop.control)
    assert update.size.num_trained == mask.sum() and update.size.num_response_tokens == responses.response_mask.sum()
    assert update.metrics["loss/policy"] == pytest.approx(-rollout.experience.advantages[mask].mean().item(), rel=1e-4)


def test_scores_of_another_number_than_the_rows_are_refused(world, trained_folders, tmp_path):
    loop, second = loop_of(world, tmp_path, trained_folders, [1.0] * 4)
    second.score = lambda rows: torch.zeros(1)
    with pytest.raises(ValueError, match=naming("guess ... shape [1] ... 4 rows")):
        loop.collect()


def test_scoring_is_halved_where_a_reward_lacks_memory(world, trained_folders, tmp_path):
    """What is halved is the size that was read last: that of scoring, whose micro-batches rewards judge too."""
    loop, second = loop_of(world, tmp_path, trained_folders, [1.0] * 4)
    state, halving = loop.state, loop.control.halving
    responses = training.sample(loop.ppo, state, loop.control)

    def fail(rows: ScoredRows) -> Tensor:
        raise torch.cuda.OutOfMemoryError("CUDA out of memory.")

    second.score, before = fail, TokensPerGuess.score
    with halving.when_out_of_memory(state):
        training.score_rewards(loop.ppo, responses, loop.ppo.prompts.train, state, loop.control)
    (size,) = (halved for phase, (_, halved) in state.halved.items() if phase == "score")
    second.score = before.__get__(second)
    judged = training.score_rewards(loop.ppo, responses, loop.ppo.prompts.train, state, loop.control).values
    longest = int((responses.prompt_lengths + responses.response_lengths).max())
    assert judged.shape == (4, 2) and size >= longest and state.halved.keys() == {"score"}


def test_a_stop_between_two_batches_of_the_judges_ends_scoring(world, trained_folders, tmp_path):
    loop, second = loop_of(world, tmp_path, trained_folders, [1.0] * 4)
    responses = training.sample(loop.ppo, loop.state, loop.control)

    def stop() -> None:
        raise Interrupted

    loop.control.stopping.within_step = stop
    with pytest.raises(Interrupted):
        training.score_rewards(loop.ppo, responses, loop.ppo.prompts.train, loop.state, loop.control)
    assert second.seen == []


def test_each_pass_releases_the_frozen_weights_that_it_read(world, trained_folders, tmp_path, monkeypatch):
    """At ZeRO stage 3 they are gathered for a pass: an update has the memory of none."""
    loop, _ = loop_of(world, tmp_path, trained_folders, [1.0] * 4)
    released = list[str]()
    for name, engine in loop.ppo.models.frozen.items():
        monkeypatch.setattr(engine, "release_gathered", partial(released.append, name))
    responses = training.sample(loop.ppo, loop.state, loop.control)
    training.score(loop.ppo, responses, loop.state, loop.control)
    assert released == ["reference"]
    training.score_rewards(loop.ppo, responses, loop.ppo.prompts.train, loop.state, loop.control)
    assert released == ["reference", "reward"]
