"""Rules of health on recorded metrics of runs that have the illness, and of runs that have not."""

import json
import logging
import math
import re
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

from pipeline.configuration.resolved import Resolved
from pipeline.configuration.run_flags import RunConfig
from pipeline.dist import World
from pipeline.training.health import RULES, Health, History, no_gain
from pipeline.training.recorder import Recorder
from step3_ppo.config import PPOConfig
from step3_ppo.metrics import METRICS, SHOWN
from step3_ppo.stage import STAGE

RECORDED = Path(__file__).parent / "recorded"
STEPS = {"sft": 160, "sft_still": 160, "reward": 160, "reward_still": 160, "ppo": 160, "ppo_absurd": 40, "ppo_long": 40}


def recorded(name: str) -> list[dict]:
    return [json.loads(line) for line in (RECORDED / f"{name}.jsonl").read_text(encoding="utf-8").splitlines()]


def history_of(lines: list[dict], *, total_steps: int) -> History:
    """Lines of metrics.jsonl, and of samples.jsonl, which have a `score`."""
    history = History(total_steps, rate_flag="actor_learning_rate")
    samples = [line for line in lines if "score" in line]
    for line in lines:
        if "score" not in line:
            history.add(line["step"], line)
    for step in dict.fromkeys(line["step"] for line in samples):
        history.add_samples([line for line in samples if line["step"] == step])
    return history


def findings(lines: list[dict], *, total_steps: int) -> dict[str, str]:
    history = history_of(lines, total_steps=total_steps)
    return {rule.name: text for rule in RULES if (text := rule(history))}


@pytest.mark.parametrize(
    ("name", "ill"),
    [
        ("sft", set()),
        ("sft_still", {"nothing_learnt"}),
        ("reward", set()),
        ("reward_still", {"nothing_learnt"}),
        ("ppo", {"nothing_learnt"}),  # its reward model gives nearly all answers the same score
        ("ppo_absurd", {"falling_entropy", "empty_responses", "nothing_learnt"}),
        ("ppo_long", {"paid_for_length", "cut_responses"}),
    ],
)
def test_recorded_runs_have_what_they_suffer_from(name, ill):
    """Tiny models: trained as usual; at a rate of 1e-9; PPO at 1e-2 without a KL penalty; rewarded for length alone."""
    assert findings(recorded(name), total_steps=STEPS[name]).keys() == ill


def ppo_lines(count: int = 8, **values: float | None) -> list[dict]:
    """The recorded steps of a healthy run of PPO, the first ones, with other values of some metrics."""
    steps = [line for line in recorded("ppo") if "objective/kl" in line][:count]
    return [line | values for line in steps]


@pytest.mark.parametrize(
    ("metric", "rule", "healthy", "ill", "cure"),
    [
        # Bounds by hand: 10 nats, for 200 tokens 20; -1 nat; half of the responses; a tenth of the entropy.
        ("objective/kl", "high_kl", 9.9, 10.1, "--kl-coef"),
        ("objective/kl", "negative_kl", -0.99, -1.01, "--top-p"),
        ("completions/truncated_fraction", "cut_responses", 0.5, 0.51, "--max-answer-seq-len"),
        ("completions/empty_fraction", "empty_responses", 0.5, 0.51, "--missing-eos-penalty"),
    ],
)
def test_a_rule_finds_what_is_beyond_its_bound_and_names_the_cure(metric, rule, healthy, ill, cure):
    assert rule not in findings(ppo_lines(**{metric: healthy}), total_steps=100)
    found = findings(ppo_lines(**{metric: ill}), total_steps=100)
    assert cure in found[rule]
    assert findings(ppo_lines(**{metric: None}), total_steps=100).keys() <= {"empty_responses"}, "null is no number"


@pytest.mark.parametrize(
    ("share", "explained", "found"),
    [(0.9, None, False), (0.91, None, True), (1.0, 0.5, False)],  # a critic compares with other prompts
)
def test_rewards_that_leave_nothing_to_compare(share, explained, found):
    lines = ppo_lines(**{"groups/equal": share, "value/explained_variance": explained})
    assert ("equal_rewards" in findings(lines, total_steps=100)) is found


def test_long_responses_may_have_a_higher_kl():
    length = {"completions/mean_length": 200.0}
    assert "high_kl" not in findings(ppo_lines(**length, **{"objective/kl": 19.9}), total_steps=100)
    assert "high_kl" in findings(ppo_lines(**length, **{"objective/kl": 20.1}), total_steps=100)


@pytest.mark.parametrize("name", ["ppo_absurd", "ppo_long"])
def test_a_run_without_a_reference_is_looked_at_without_a_kl(name, caplog):
    """At --kl-coef 0 no line has objective/kl, and no sample a kl: other rules find what they find beside it."""
    whole = [line | ({"objective/kl": -50.0} if "objective/kl" in line else {}) for line in recorded(name)]
    lines = [{key: value for key, value in line.items() if "kl" not in key} for line in whole]
    with_it, without = (findings(rows, total_steps=STEPS[name]) for rows in (whole, lines))
    assert with_it.pop("negative_kl") and len(with_it) >= 2 and without == with_it
    Health(history_of(lines, total_steps=STEPS[name])).look()
    warned = [record.message for record in caplog.records if record.levelno == logging.WARNING]
    assert len(warned) == len(without) and not any("the KL" in text or "mean KL" in text for text in warned)


def test_a_mean_of_few_values_says_nothing():
    high = {"objective/kl": 50.0, "completions/truncated_fraction": 1.0}
    assert findings(ppo_lines(4, **high), total_steps=100).keys() == set()
    assert findings(ppo_lines(5, **high), total_steps=100).keys() == {"high_kl", "cut_responses"}
    assert findings(ppo_lines(1, **{"objective/kl": -1.01}), total_steps=100).keys() == {"negative_kl"}, "but this"


def test_an_entropy_that_falls_below_a_tenth_of_the_first_ones():
    first = ppo_lines(10, **{"objective/entropy": 2.0})
    for last, found in ((0.21, False), (0.19, True)):
        later = [line | {"objective/entropy": last} for line in [*first, *first]]
        assert ("falling_entropy" in findings([*first, *later], total_steps=100)) == found


@pytest.mark.parametrize(
    ("errors", "found"),
    [
        # Bounds by hand: 4 x the first rollout's, and 0.05 nats.
        ([0.01, 0.03, 0.049], False),
        ([0.01, 0.051], True),
        ([0.02, 0.079], False),
        ([0.02, 0.081], True),
        ([0.02, 0.081, 0.01], False),
        ([None, 0.02, None, 0.09], True),
        ([0.0, 0.0, 0.06], True),
    ],
)
def test_sampler_and_trainer_that_come_apart(errors, found):
    lines = [{"step": step, "policy/sampler_mean_error": error} for step, error in enumerate(errors, 1)]
    text = findings(lines, total_steps=100).get("sampler_drifts", "")
    assert bool(text) == found and (not found or "--off-policy-weights token_truncate" in text)


@pytest.mark.parametrize(("bound", "error", "found"), [(0.05, 0.04, False), (0.05, 0.06, True), (1.0, 0.9, False)])
def test_sampler_and_trainer_that_are_apart_from_the_first_rollout_on(bound, error, found):
    history = History(100, sampler_bound=bound)
    for step, value in enumerate([error, 0.0], 1):
        history.add(step, {"policy/sampler_error": value})
    assert ("sampler_apart" in {rule.name for rule in RULES if rule(history)}) == found


def answers(step: int, *, tokens: float, score: float, slope: float = 0.0) -> list[dict]:
    """Eight answers of about so many tokens; their scores rise by `slope` a token, about a mean `score`."""
    apart = {
        -3: 0.1,
        -2: -0.1,
        -1: -0.1,
        -0.5: 0.1,
        0.5: 0.1,
        1: -0.1,
        2: -0.1,
        3: 0.1,
    }  # with noise that no length has
    return [{"step": step, "tokens": tokens + x, "score": score + slope * x + noise} for x, noise in apart.items()]


@pytest.mark.parametrize(
    ("tokens", "score", "slope", "found"),
    [
        (40, 2.0, 0.1, True),  # 20 tokens more are worth 2 points: the whole gain
        (40, 2.0, 0.07, False),  # they are worth 1.4: 0.6 of 2 are left
        (29, 0.9, 0.1, False),  # not half as long again
        (40, 0.0, 0.1, False),  # no gain
        (40, 2.0, 0.0, False),  # length is worth nothing
    ],
)
def test_a_gain_that_is_length_alone(tokens, score, slope, found):
    lines = [*answers(0, tokens=20, score=0.0, slope=slope), *answers(9, tokens=tokens, score=score, slope=slope)]
    text = findings(lines, total_steps=100).get("paid_for_length", "")
    assert bool(text) == found
    if found:
        (matched,) = re.findall("from 20 to 40 tokens; at equal length they rise by ([^:]+):", text)
        assert float(matched) == pytest.approx(0, abs=1e-9)


def pairs(accuracy: float, rows: int, step: int = 50) -> list[dict]:
    return [{"step": step, "eval_accuracy": accuracy, "eval_rows": rows}]


def test_an_accuracy_of_kto_is_judged_by_no_coin():
    """Its share of right sides depends on the shares of labels."""
    lines = [line | {"eval_z0": 0.0} for line in pairs(0.3, 100)]
    assert findings(lines, total_steps=100) == {}


def test_steps_of_the_critic_alone_do_not_count_as_steps_without_learning():
    lines = [{"step": step, "objective/scores": 0.3 + 0.05 * (-1) ** step} for step in range(1, 61)]
    history = history_of(lines, total_steps=200)
    assert no_gain(history)
    history.frozen_steps = 50
    assert not no_gain(history)  # 10 of 150 steps
    history.step = 90
    assert no_gain(history)  # 40 of 150


def test_an_accuracy_that_chance_gives():
    """Two standard errors of 100 pairs are 0.1; too few pairs, or the first quarter of the run, say nothing."""
    assert findings(pairs(0.6, 100), total_steps=100).keys() == {"chance_accuracy"}
    assert findings(pairs(0.3, 100), total_steps=100).keys() == {"chance_accuracy"}
    steps = [{"step": step, "accuracy": 0.9} for step in range(1, 100)]
    before_training = [*pairs(0.5, 100, step=0), *steps]
    for healthy in (pairs(0.61, 100), pairs(0.5, 29), pairs(0.5, 100, step=24), before_training):
        assert findings(healthy, total_steps=100) == {}


def test_nothing_is_said_to_be_learnt_too_early_or_where_the_loss_falls():
    flat = [{"step": step, "loss": 1.0 + 0.01 * (step % 2)} for step in range(1, 41)]
    assert findings(flat[:29], total_steps=40) == {}, "too few values"
    assert findings(flat, total_steps=200) == {}, "not yet a quarter"
    assert findings(flat, total_steps=160).keys() == {"nothing_learnt"}
    falls = [line | {"loss": line["loss"] - 0.001 * line["step"]} for line in flat]
    rises = [line | {"loss": line["loss"] + 0.001 * line["step"]} for line in flat]
    assert findings(falls, total_steps=160) == {} and findings(rises, total_steps=160).keys() == {"nothing_learnt"}
    scores = [{"step": line["step"], "objective/scores": line["loss"]} for line in rises]
    assert findings(scores, total_steps=160) == {}, "a score is to rise"


def test_a_teacher_judges_tokens_and_pays_for_no_length():
    """Cut responses teach as much as whole ones, and a longer one gets no more for it."""
    lines = recorded("ppo_long")
    taught = [line | {"eval_objective/teacher_kl": 1.0} if "eval_rows" in line else line for line in lines]
    assert findings(lines, total_steps=STEPS["ppo_long"]).keys() == {"paid_for_length", "cut_responses"}
    assert not findings(taught, total_steps=STEPS["ppo_long"])


@pytest.mark.parametrize(("falls", "is_taught", "found"), [(0.0, True, True), (0.02, True, False), (0.0, False, False)])
def test_distillation_without_rewards_is_judged_by_the_divergence_in_its_loss(falls, is_taught, found):
    lines = [{"step": step, "loss/kl": 1 + 0.1 * math.sin(step) - falls * step} for step in range(1, 51)]
    first = [{"step": 0, "eval_rows": 8.0} | ({"eval_objective/teacher_kl": 1.0} if is_taught else {})]
    assert ("nothing_learnt" in findings(first + lines, total_steps=50)) == found


def test_each_finding_is_said_once_until_it_has_gone_away(caplog):
    looked = Health(History(1000))
    for step in range(1, 101):
        caplog.clear()
        looked.history.add(step, {"completions/empty_fraction": 0.9 if step in (2, 3, 12, 32, 53, 90) else 0.0})
        looked.look()
        said = [record.message for record in caplog.records if record.levelno == logging.WARNING]
        # Nothing was got 19 times before step 32, and 20 times before step 53.
        assert len(said) == (step in (2, 53, 90)) and all(text.startswith(f"health: step {step}: ") for text in said)


@pytest.mark.parametrize(
    ("dtype", "error", "found"), [("fp32", 0.06, 1), ("fp32", 0.04, 0), ("bf16", 0.9, 0), ("fp16", 1.1, 1)]
)
def test_a_recorder_allows_rounding_as_large_as_the_weights_have(tmp_path, caplog, dtype, error, found):
    config = PPOConfig(deepspeed={"dtype": dtype})
    world = World(rank=0, size=1, device=torch.device("cpu"))
    run = SimpleNamespace(world=world, folder=tmp_path, stage=STAGE, resolved=Resolved(config, {}))
    recorder = Recorder(run, RunConfig(monitors=[]), start_step=-1, total_steps=9, metrics=METRICS, shown=SHOWN)
    recorder.write_training(1, {"policy/sampler_error": error}, seconds=1.0, num_tokens=1, num_rows=1)
    recorder.end_progress()
    assert caplog.text.count("in a token's log-probability") == found


def test_a_recorder_says_it_with_the_flags_of_the_stage_and_goes_on_from_what_is_recorded(tmp_path, caplog):
    """The first rollout's error is that of the file where the run goes on; audits are named as such, once."""
    caplog.set_level(logging.INFO)
    world = World(rank=0, size=1, device=torch.device("cpu"))
    run = SimpleNamespace(world=world, folder=tmp_path, stage=STAGE, resolved=Resolved(PPOConfig(), {}))

    def record(steps: range, start_step: int, error: float) -> None:
        settings = {"start_step": start_step, "total_steps": 99, "metrics": METRICS, "shown": SHOWN}
        recorder = Recorder(run, RunConfig(monitors=[]), **settings)
        for step in steps:
            values = {"policy/sampler_mean_error": error, "completions/empty_fraction": 1.0}
            recorder.write_training(step, values, seconds=1.0, num_tokens=1, num_rows=1)
        recorder.end_progress()

    record(range(1, 3), -1, 0.02)
    assert caplog.text.count("health: ") == 1 and caplog.text.count("an audit of the metrics") == 1
    caplog.clear()
    record(range(3, 5), 2, 0.09)
    assert caplog.text.count("by 0.020 in the first rollout") == 1


@pytest.mark.parametrize("is_first_there", [True, False])
def test_a_recorder_that_goes_on_compares_with_the_very_first_evaluation(tmp_path, caplog, is_first_there):
    """Answers were short at the start and long when the run was stopped: a gain that is length alone is found."""
    world = World(rank=0, size=1, device=torch.device("cpu"))
    run = SimpleNamespace(world=world, folder=tmp_path, stage=STAGE, resolved=Resolved(PPOConfig(), {}))
    long = {"tokens": 40, "score": 2.0, "slope": 0.1}
    without_score = {"step": 0, "tokens": 500, "score": None}
    first = [without_score, *answers(0, tokens=20, score=0.0, slope=0.1)] if is_first_there else []
    lines = [json.dumps(row) + "\n" for row in (*first, *answers(6, **long))]
    (tmp_path / "samples.jsonl").write_text("".join(lines))
    recorder = Recorder(run, RunConfig(monitors=[]), start_step=6, total_steps=99, metrics=METRICS, shown=SHOWN)
    recorder.show_samples(9, [row | {"prompt": "p", "response": "r", "finished": True} for row in answers(9, **long)])
    recorder.end_progress()
    assert caplog.text.count("from 20 to 40 tokens") == is_first_there
    assert caplog.text.count("the reward pays for length") == is_first_there
