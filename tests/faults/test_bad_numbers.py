"""Numbers that are not finite: the step changes nothing and is counted, or the row is masked; for good, the run ends.

Goal R11: twelve places, each once and permanently. Injected in a forked child ahead of the stage's `main`.
"""

import json
import math
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from stage_runs import Story, metrics, start
from support.forks import exit_code
from support.messages import naming

from step3_dpo import reference

STEPS = 8
LIMIT = 6  # not the default, and more than a rollout has updates


def spoiled(call: Callable[..., Any], spoil: Callable[[Any], Any], *, times: int) -> Callable[..., Any]:
    """`call` whose results are spoiled from the second call on, `times` times."""
    seen = 0

    def wrapper(*given: Any, **further: Any) -> Any:
        nonlocal seen
        seen += 1
        result = call(*given, **further)
        return spoil(result) if 2 <= seen < 2 + times else result

    return wrapper


def patch(place: str, spoil: Callable[[Any], Any], *, times: int) -> None:
    """Spoil what the function at `place` (module:name) returns."""
    import importlib

    module_name, name = place.split(":")
    module = importlib.import_module(module_name)
    setattr(module, name, spoiled(getattr(module, name), spoil, times=times))


def spoil_gradient(package: str, name: str, *, times: int) -> None:
    """A NaN in one weight's gradient, as a broken kernel would leave it."""
    import importlib

    module = importlib.import_module(package)
    make = getattr(module, name)

    def wrapper(*given: Any, **further: Any) -> Any:
        engine = make(*given, **further)
        weight = [parameter for parameter in engine.module.parameters() if parameter.requires_grad][0]
        weight.register_hook(spoiled(lambda gradient: gradient, lambda gradient: gradient * math.nan, times=times))
        return engine

    setattr(module, name, wrapper)


def first_row(field: str, value: float) -> Callable[[Any], Any]:
    def spoil(scores: Any) -> Any:
        (getattr(scores, field) if field else scores)[0] = value
        return scores

    return spoil


def in_tuple(result: tuple[torch.Tensor, Any]) -> tuple[torch.Tensor, Any]:
    return result[0] * math.nan, result[1]


SKIPS: dict[str, tuple[str, Callable[[int], None]]] = {
    "sft loss": ("sft", lambda n: patch("step1_sft.training:token_sum_loss", lambda loss: loss * math.nan, times=n)),
    "sft loss inf": ("sft", lambda n: patch("step1_sft.training:token_sum_loss", lambda x: x * math.inf, times=n)),
    "sft gradient": ("sft", lambda n: spoil_gradient("step1_sft.training", "language_model_engine", times=n)),
    # Its gradient is finite: only the loss itself tells.
    "sft loss alone": (
        "sft",
        lambda n: patch("step1_sft.training:token_sum_loss", lambda loss: loss + math.inf, times=n),
    ),
    "reward loss": ("reward", lambda n: patch("step2_reward.training:batch_loss", lambda x: x * math.nan, times=n)),
    "reward gradient": ("reward", lambda n: spoil_gradient("step2_reward.training", "value_model_engine", times=n)),
    "dpo loss": ("dpo", lambda n: patch("step3_dpo.training:loss_of", lambda loss: loss * math.nan, times=n)),
    "dpo gradient": ("dpo", lambda n: spoil_gradient("step3_dpo.training", "language_model_engine", times=n)),
    "ppo policy loss": ("ppo", lambda n: patch("step3_ppo.objectives:policy_loss", in_tuple, times=n)),
    "ppo value loss": ("ppo", lambda n: patch("step3_ppo.objectives:value_loss", in_tuple, times=n)),
    "ppo all rewards": (
        "ppo",
        lambda n: patch("step3_ppo.training:reward_model_scores", lambda x: x * math.nan, times=n),
    ),
}
MASKS: dict[str, Callable[[int], None]] = {
    "reward nan": lambda n: patch("step3_ppo.training:reward_model_scores", first_row("", math.nan), times=n),
    "reward inf": lambda n: patch("step3_ppo.training:reward_model_scores", first_row("", math.inf), times=n),
    "values nan": lambda n: patch("step3_ppo.training:score_responses", first_row("values", math.nan), times=n),
}
QUICK = ("sft loss alone", "ppo all rewards")
PLACES = [pytest.param(name, marks=() if name in QUICK else pytest.mark.faults) for name in SKIPS]


def inject(place: str, times: int) -> None:
    """In a child, ahead of its run."""
    (MASKS[place] if place in MASKS else SKIPS[place][1])(times)


def run(folder: Path, stage: str, out: str, place: str, times: int, *, steps: int = STEPS) -> tuple[int, Story]:
    more = ("--max-bad-steps", LIMIT, "--lora-dim", 0) if stage != "ppo" else ("--max-bad-steps", LIMIT)
    story = Story(stage, folder, steps=steps, more=more)
    return exit_code(start(story, out, first=partial(inject, place, times))), story


def assert_weights_are_finite(story: Story, out: str) -> None:
    found = (story.folder / out).rglob("*.safetensors")
    files = [file for file in found if file.name != reference.FILE]  # NaN says there what the run does not read
    assert files
    for file in files:
        assert all(tensor.isfinite().all() for tensor in load_file(file).values() if tensor.is_floating_point()), file


@pytest.mark.few(1)
@pytest.mark.parametrize("place", PLACES)
def test_once_is_skipped_and_counted(folder, place):
    stage = SKIPS[place][0]
    out = f"once-{place.replace(' ', '-')}"
    code, story = run(folder, stage, out, place, 1)
    lines = [line for line in metrics(story.run_dir(out)) if "skipped_updates" in line]
    assert code == 0 and [line["step"] for line in lines] == list(range(1, STEPS + 1))
    skipped = lines[-1]["skipped_updates"]
    assert skipped == (4 if place == "ppo all rewards" else 1), "a rollout without rewards has four updates"
    text = (story.run_dir(out) / "log.txt").read_text()
    assert text.count(" skipped: ") == skipped and "rank 0 had rows " in text
    noted = [json.loads(line) for line in (story.run_dir(out) / "log" / "bad-steps-rank-0.jsonl").open()]
    assert len(noted) == skipped and noted[0]["rows"] and len(noted[0]["input_ids"][0]) >= 1
    assert_weights_are_finite(story, out)


@pytest.mark.few(1)
@pytest.mark.parametrize("place", PLACES)
def test_for_good_ends_with_4(folder, place):
    stage = SKIPS[place][0]
    out = f"always-{place.replace(' ', '-')}"
    code, story = run(folder, stage, out, place, 10**6)
    assert code == 4
    steps = [line["step"] for line in metrics(story.run_dir(out)) if "skipped_updates" in line]
    assert steps == list(range(1, len(steps) + 1)) and len(steps) >= LIMIT, "the step that ends the run has its line"
    outcome = json.loads((story.run_dir(out) / "outcome" / "rank-0.json").read_text())
    assert outcome["message"] == naming(f"{LIMIT} steps ... not finite ... --")
    last = (folder / f"{out}.{stage}.log").read_text()
    assert "Traceback" not in last
    assert_weights_are_finite(story, out)


def test_a_short_run_that_trained_nothing_is_not_done(folder):
    """It ends before `--max-bad-steps` in a row end it."""
    code, story = run(folder, "sft", "short", "sft loss", 10**6, steps=2)
    assert code == 4 and not (story.run_dir("short") / "done.json").exists()
    outcome = json.loads((story.run_dir("short") / "outcome" / "rank-0.json").read_text())
    assert outcome["message"].startswith("all 2 steps were skipped")


@pytest.mark.faults
@pytest.mark.parametrize("place", list(MASKS))
@pytest.mark.parametrize("times", [1, 10**6])
def test_a_bad_row_is_masked_and_counted(folder, place, times):
    out = f"mask-{place.replace(' ', '-')}-{times}"
    code, story = run(folder, "ppo", out, place, times)
    masked = [line["rows_masked"] for line in metrics(story.run_dir(out)) if "rows_masked" in line]
    assert code == 0 and sum(masked) >= 1 and max(masked) == 1
    lines = [line for line in metrics(story.run_dir(out)) if "loss/policy" in line]
    assert lines[-1]["skipped_updates"] == 0 and all(line["loss/policy"] is not None for line in lines)
    assert_weights_are_finite(story, out)
