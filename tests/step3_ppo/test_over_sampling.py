"""Rollouts with --over-sample: which prompts are trained on, what the next rollout continues, and exact resumes."""

import json
import os
import signal
from collections.abc import Iterator
from copy import deepcopy
from dataclasses import dataclass, field, replace
from functools import partial
from itertools import count, pairwise
from pathlib import Path
from typing import Any

import pytest
import torch
from support.command_run import run_command
from support.messages import naming
from support.ppo_runs import ppo_words, run_ppo
from support.tiny_run import read_metrics
from transformers import AutoModelForCausalLM, PreTrainedTokenizerBase

from pipeline.configuration.flags import parse
from pipeline.data.batching import epoch_order
from pipeline.errors import InputError
from pipeline.generation.rollouts import Prompt, RandomKey, draw, rollout_uniforms
from step3_ppo import training
from step3_ppo.config import PPOConfig
from step3_ppo.experience import Collected, Responses, Scores
from step3_ppo.models import hybrid_engine
from step3_ppo.models.needs import needs
from step3_ppo.over_sampling import OverSampling
from step3_ppo.state import PPO

K, LIMIT = 2, 24
FUNCTIONS = """
import json
def length(prompts, completions, completion_ids, **columns):
    with open(__file__ + ".calls", "a") as file:
        file.write(json.dumps([prompts[0], completion_ids]) + "\\n")
    return [float(len(ids)) for ids in completion_ids]
"""


@dataclass(frozen=True)
class Seen:
    """A rollout: what is trained on, scores of the models, responses that the next and that this one carries on."""

    ppo: PPO
    responses: Responses
    scores: Scores
    carried: Responses | None
    before: Responses | None


@pytest.fixture(scope="module")
def folder(folder: Path) -> Path:
    (folder / "rewards.py").write_text(FUNCTIONS)
    lines = (folder / "train.jsonl").read_text().splitlines(keepends=True)
    (folder / "few.jsonl").write_text("".join(lines[:22]))
    return folder


@pytest.fixture
def rollouts(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[Seen]]:
    """The rollouts of a run in this process."""
    kept, reward = list[Seen](), training.reward

    def noted(ppo: Any, responses: Responses, scores: Scores, judged: Any, *, state: Any, control: Any) -> Collected:
        kept.append(Seen(ppo, responses, scores, state.left, state.carried))
        return reward(ppo, responses, scores, judged, state=state, control=control)

    monkeypatch.setattr(training, "reward", noted)
    yield kept


def words(folder: Path, out: Path, **changes: Any) -> list[str]:
    """8 prompts of 24 a rollout and an optimizer step for half of them, twice; 4 further ones."""
    flags = {
        "data_path": folder / "few.jsonl", "eval_data_path": None, "eval_interval": 0, "eval_fraction": 0,
        "rollout_batch_size": 8 * K, "gradient_accumulation_steps": 2, "num_train_epochs": 2, "reward_workers": 1,
        "method": "grpo", "num_samples_per_prompt": K, "over_sample": 0.5, "max_answer_seq_len": LIMIT,
        "stop_strings": "e", "reward_function": f"{folder}/rewards.py:length",
    }  # fmt: skip
    return ppo_words(folder, out, **flags | changes)


@dataclass
class Row:
    """A response: the row of its prompt, its tokens, those of earlier rollouts, and whether it has ended."""

    row: int
    ids: list[int] = field(default_factory=list)
    log_probs: list[float] = field(default_factory=list)
    earlier: int = 0
    finished: bool = False

    @property
    def has_ended(self) -> bool:
        return self.finished or len(self.ids) == LIMIT


def rows_of(responses: Responses | None) -> list[Row]:
    """The rows that count."""
    if responses is None:
        return []
    assert responses.earlier is not None
    return [
        Row(
            int(responses.row_index[n]),
            responses.sequences[n][responses.trained[n]].tolist(),
            responses.sampler_log_probs[n, : responses.response_lengths[n]].tolist(),
            int(responses.earlier[n]),
            bool(responses.finished[n]),
        )
        for n in responses.valid.nonzero().flatten().tolist()
    ]


@torch.no_grad()
def advance(model: Any, tokenizer: PreTrainedTokenizerBase, prompt: Any, row: Row, sample: int, key: RandomKey) -> None:
    """Draw the next token by a whole forward pass."""
    ids = [*prompt["prompt_ids"], *row.ids]
    keyed = Prompt.of(ids[: len(ids) - len(row.ids) + row.earlier]).prompt_id if row.earlier else prompt["prompt_id"]
    uniforms = rollout_uniforms(key, torch.tensor([keyed]), torch.tensor([sample]), LIMIT)
    logits = model(torch.tensor([ids])).logits[:, -1]
    token = int(draw(logits[:, : len(tokenizer)], uniforms[:, len(row.ids) - row.earlier]))
    row.ids.append(token)
    row.log_probs.append(float(logits.log_softmax(-1)[0, token]))
    row.finished = token == tokenizer.eos_token_id or "e" in tokenizer.decode(row.ids)


def by_hand(seen: Seen, epoch: int) -> Iterator[tuple[list[Row], list[Row]]]:
    """The rows that the rollouts of an epoch train on and carry on, of a model that does not change.

    All responses of a rollout get a token at a time, until those to so many prompts have ended as are trained on.
    """
    model = AutoModelForCausalLM.from_pretrained(seen.ppo.config.actor.model_name_or_path, dtype=torch.float32).eval()
    tokenizer, prompts = seen.ppo.models.tokenizer, seen.ppo.prompts.train
    order = epoch_order(seen.ppo.config.run.seed, epoch, len(prompts)).tolist()
    key, groups = RandomKey(seen.ppo.config.run.seed, "rollout", epoch), list[list[Row]]()
    while groups or order:
        num_trained = min(8, len(groups) + len(order))
        while order and len(groups) < 12:
            row = order.pop(0)
            groups.append([Row(row) for _ in range(K)])
        for row in (row for group in groups for row in group):
            row.earlier = len(row.ids)
        ended = list[list[Row]]()
        while len(ended) < num_trained:
            ended += [one for one in groups if one not in ended and all(row.has_ended for row in one)]
            for group in groups if len(ended) < num_trained else ():
                for sample, row in enumerate(group):
                    if not row.has_ended:
                        advance(model, tokenizer, prompts[row.row], row, sample, key)
        trained = [one for one in groups if any(one is other for other in ended[:num_trained])]
        groups = [one for one in groups if not any(one is other for other in trained)]
        yield [row for group in trained for row in group], deepcopy([row for group in groups for row in group])


def test_a_rollout_ends_when_enough_prompts_have_all_their_responses(
    folder: Path, tmp_path: Path, rollouts: list[Seen]
) -> None:
    """Tokens and prompts are those of a slow loop, in three rollouts of each of two epochs."""
    assert run_ppo(words(folder, tmp_path, actor_learning_rate=1e-30, per_device_generation_batch_size=5)) == 0
    expected = [pair for epoch in range(2) for pair in by_hand(rollouts[0], epoch)]
    assert len(rollouts) == len(expected) == 6
    for seen, (trained, carried) in zip(rollouts, expected, strict=True):
        found = rows_of(seen.responses)
        assert [(row.row, row.ids, row.earlier) for row in found] == [
            (one.row, one.ids, one.earlier) for one in trained
        ]
        for row, one in zip([*found, *rows_of(seen.carried)], [*trained, *carried], strict=True):
            assert (row.row, row.ids, row.finished) == (one.row, one.ids, one.finished)
            torch.testing.assert_close(row.log_probs, one.log_probs, rtol=0, atol=1e-5)
    lengths = [[len(row.ids) for row in rows_of(seen.responses)] for seen in rollouts]
    assert max(lengths[0]) < max(lengths[1]) and any(
        len(row.ids) == LIMIT for seen in rollouts for row in rows_of(seen.responses)
    )
    assert [len(one) for one in lengths] == [16, 16, 12] * 2 and all(seen.carried is None for seen in rollouts[2::3])
    assert rollouts[2].responses.valid.tolist() == [True] * 12 + [False] * 4, "padding is behind the others"


@pytest.mark.slow
def test_the_next_policy_goes_on_where_the_last_one_stopped(folder: Path, tmp_path: Path, rollouts: list[Seen]) -> None:
    """What earlier policies sampled stays, with its log-probabilities, and is weighted; functions see whole answers."""
    calls = folder / "rewards.py.calls"
    calls.unlink(missing_ok=True)
    assert run_ppo(words(folder, tmp_path, actor_learning_rate=0.01)) == 0
    for before, after in pairwise(rollouts):
        begun = {(row.row, n % K): row for n, row in enumerate(rows_of(before.carried))}
        both = [*rows_of(after.responses), *rows_of(after.carried)]
        going_on = {(row.row, n % K): row for n, row in enumerate(both) if (row.row, n % K) in begun}
        assert going_on.keys() == begun.keys()
        for name, first in begun.items():
            row = going_on[name]
            assert row.ids[: len(first.ids)] == first.ids and row.log_probs[: len(first.ids)] == first.log_probs
            assert row.earlier in (len(first.ids), len(row.ids))
            assert (len(row.ids) > len(first.ids)) == (not first.has_ended)
    lines = [line for line in read_metrics(tmp_path / "runs/ppo") if "completions/mean_length" in line]
    answers = [json.loads(line) for line in calls.read_text().splitlines()]
    assert len(answers) == 44 and len({prompt for prompt, _ in answers}) == 22
    trained = sorted(row.ids for seen in rollouts for row in rows_of(seen.responses))
    assert sorted(ids for _, group in answers for ids in group) == trained
    for seen, line in zip(rollouts, lines, strict=True):
        rows = rows_of(seen.responses)
        tokens, earlier = sum(len(row.ids) for row in rows), sum(row.earlier for row in rows)
        assert line["completions/carried_fraction"] == pytest.approx(earlier / tokens)
        on, before = (sum(len(row.ids) for row in rows_of(one)) for one in (seen.carried, seen.before))
        assert line["generate_tokens_per_s"] * line["time/generate_s"] == pytest.approx(tokens + on - before, rel=1e-3)
        assert line["policy/sampler_error"] < 1e-5, "of the tokens of this policy"
        differs = (seen.scores.log_probs - seen.responses.sampler_log_probs).abs()
        mask = seen.responses.response_mask & ~seen.responses.current_mask
        assert (line["policy/weights_cut"] > 0) <= bool(earlier) and bool(earlier) == (differs[mask].sum() > 0.1)
    assert [line["completions/carried_fraction"] > 0.1 for line in lines] == [False, True, True] * 2


def state_of(out: Path, step: int) -> dict[str, Any]:
    state: dict[str, Any] = json.loads((out / f"runs/ppo/checkpoints/step-{step}/state.json").read_text())["state"]
    return state["ppo"]  # type: ignore[no-any-return]


@pytest.mark.slow
def test_a_run_that_ends_anywhere_goes_on_exactly(folder: Path, tmp_path: Path) -> None:
    """Two steps a rollout: checkpoints between rollouts, and within one whose rest waits for the next."""
    assert run_ppo(words(folder, tmp_path / "whole", max_steps=9)) == 0
    for limit in (1, 2, 3, 6, 8, 9):
        assert run_ppo(words(folder, tmp_path / "parts", max_steps=limit)) == 0
    assert state_of(tmp_path / "whole", 9) == state_of(tmp_path / "parts", 9)
    whole, parts = ((tmp_path / name / "actor/model.safetensors").read_bytes() for name in ("whole", "parts"))
    assert whole == parts != (folder / "base/model.safetensors").read_bytes()


SHARED = {"inference_tp_size": 2, "generation_engine": "fused"}


@pytest.mark.slow
@pytest.mark.parametrize(
    ("of_two", "of_both"),
    [({}, {}), ({"actor_zero_stage": 3}, {}), (SHARED, {"max_answer_seq_len": 8, "max_steps": 4})],
    ids=["0", "3", "shared weights, fused"],
)
def test_two_ranks_do_what_one_does(
    of_two: dict[str, Any], of_both: dict[str, Any], folder: Path, tmp_path: Path
) -> None:
    lines = []
    for ranks in (1, 2):
        changes = {"gradient_accumulation_steps": 2 // ranks, **(of_two if ranks == 2 else {}), **of_both}
        done = run_command("step3_ppo", words(folder, tmp_path / str(ranks), **changes), folder=tmp_path, ranks=ranks)
        assert done.code == 0, done.stderr
        lines.append([line for line in read_metrics(tmp_path / str(ranks) / "runs/ppo") if "epoch" in line])
    names = ("completions/mean_length", "completions/carried_fraction", "objective/scores", "loss/policy")
    assert len(lines[0]) == len(lines[1]) == (2 if of_both else 6)
    assert lines[0][1]["completions/carried_fraction"] > 0.1
    for one, two in zip(*lines, strict=True):
        assert [two[name] for name in names] == pytest.approx([one[name] for name in names], abs=1e-4)


def stop_at_look(number: int, rank: int) -> None:
    """Send SIGTERM to this process before it looks for the given time, if it has this rank."""
    looks, is_enough = count(1), OverSampling.is_enough

    def looked(self: OverSampling, length: int, *, stop: bool) -> bool:
        if next(looks) == number and os.environ["RANK"] == str(rank):
            os.kill(os.getpid(), signal.SIGTERM)
        return is_enough(self, length, stop=stop)

    OverSampling.is_enough = looked  # type: ignore[method-assign]


@pytest.mark.slow
def test_a_stop_on_one_rank_drops_the_rollout_on_both(folder: Path, tmp_path: Path) -> None:
    """In the second rollout, whose first prompts have been carried on."""
    changes: dict[str, Any] = {"gradient_accumulation_steps": 1, "num_train_epochs": 1}
    for name, first in (("whole", None), ("parts", partial(stop_at_look, 12, 1)), ("parts", None)):
        given = words(folder, tmp_path / name, **changes)
        done = run_command("step3_ppo", given, folder=tmp_path, ranks=2, first=first)
        assert (done.code == 0) == (first is None), done.stderr
        if first is not None:
            assert state_of(tmp_path / name, 2)["rollout"] == 1 and "stopped at step 2" in done.stderr
    whole, parts = ((tmp_path / name / "actor/model.safetensors").read_bytes() for name in ("whole", "parts"))
    assert whole == parts


def test_responses_at_the_limit_are_carried_on_as_they_are(folder: Path, tmp_path: Path, rollouts: list[Seen]) -> None:
    """All of them end with the first token, so that the second rollout trains on those of the first alone."""
    assert run_ppo(words(folder, tmp_path, max_answer_seq_len=1, over_sample=1.0, num_train_epochs=1)) == 0
    rows = [rows_of(seen.responses) for seen in rollouts]
    assert [{row.earlier for row in one} for one in rows] == [{0}, {1}, {1}]
    assert sorted(row.row for one in rows for row in one) == sorted([*range(22)] * K)


def test_further_prompts_wait_for_no_others(folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    slots, generate = list[int](), hybrid_engine.generate

    def noted(*args: Any, num_slots: int, **request: Any) -> Any:
        slots.append(num_slots)
        return generate(*args, num_slots=num_slots, **request)

    monkeypatch.setattr(hybrid_engine, "generate", noted)
    assert run_ppo(words(folder, tmp_path, max_steps=1)) == 0
    assert slots == [12 * K]


def test_weights_and_log_probabilities_follow(folder: Path, tmp_path: Path) -> None:
    one_step = {"gradient_accumulation_steps": 4}
    config, without = (
        parse(PPOConfig, words(folder, tmp_path, over_sample=share, **one_step), section="ppo").config
        for share in (0.5, 0.0)
    )
    assert (config.weights_off_policy("fp32"), without.weights_off_policy("fp32")) == ("token_truncate", "none")
    assert not config.may_take_sampled_log_probs("bf16", 1) and without.may_take_sampled_log_probs("bf16", 1)
    size = config.rollout_size(2)
    assert (size.with_further(8), size.slots, size.at_once) == (12, 12, 4)
    size = replace(size, over_sample=0.07)
    assert (size.with_further(100), size.with_further(101)) == (107, 109)


def test_the_plan_prefills_what_is_carried_on(folder: Path, tmp_path: Path) -> None:
    """The prompt's 48 tokens, and the 24 of a response; slots of further prompts too."""
    for share, rows, length in ((0.5, 12 * K, 48 + LIMIT), (0.0, 8 * K, 48)):
        config = parse(PPOConfig, words(folder, tmp_path, over_sample=share), section="ppo").config
        (prefill,) = needs(config, {}, "fp32", 1).phases["generate"]
        assert (prefill.rows, prefill.length) == (rows, length)


@pytest.mark.parametrize(
    ("changes", "expected"),
    [
        ({"replace_equal_groups": "true"}, "--over-sample ... --replace-equal-groups"),
        ({"old_log_probs": "sampler"}, "--over-sample ... --old-log-probs sampler"),
        ({"tools": "@:length"}, "--over-sample ... --tools"),
    ],
)
def test_what_it_does_not_go_with_is_refused(
    changes: dict[str, str], expected: str, folder: Path, tmp_path: Path
) -> None:
    changes = {name: value.replace("@", f"{folder}/rewards.py") for name, value in changes.items()}
    with pytest.raises(InputError, match=naming(expected)):
        parse(PPOConfig, words(folder, tmp_path, **changes), section="ppo")
