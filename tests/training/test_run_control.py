"""The control of a run: what is due at which step, and what a stop becomes."""

import json
import logging
import math
import re
from contextlib import nullcontext
from dataclasses import asdict
from types import SimpleNamespace

import pytest
import torch
from support.messages import naming

from pipeline.checkpoints.checkpoint import Content
from pipeline.checkpoints.fingerprint import RunFingerprint
from pipeline.configuration.origins import COMMAND_LINE
from pipeline.configuration.resolved import Resolved
from pipeline.configuration.run_flags import RunConfig
from pipeline.data.counts import Counts
from pipeline.dist import World
from pipeline.errors import DivergedError, EnvironmentFault, InputError, Interrupted, StoppedRun, dashed
from pipeline.training.run_control import RunControl
from pipeline.training.steps import LONG_STEP_S, Counters, Stopping, divergence_advice, note_skipped_step
from step1_sft.config import SFTConfig
from step1_sft.metrics import METRICS
from step1_sft.stage import STAGE
from step3_ppo.config import PPOConfig
from step3_ppo.stage import STAGE as PPO_STAGE


class Saves:
    """Stands for the Saver: keeps the steps of the checkpoints, or refuses them as a full disk does."""

    def __init__(self, *, full: bool = False) -> None:
        self.full, self.steps, self.finished = full, [], 0

    def save(self, content, *, step: int) -> None:
        if self.full:
            raise EnvironmentFault("no space left")
        self.steps.append(step)

    def finish(self) -> None:
        self.finished += 1


def make_control(
    folder, *, resumed_step: int | None = None, full: bool = False, model=None, rows=None, **settings
) -> RunControl:
    config = SFTConfig(run=RunConfig(output_dir=str(folder / "sft"), **settings), model=model or {})
    run = SimpleNamespace(
        world=World(rank=0, size=1, device=torch.device("cpu")), folder=folder, stage=STAGE,
        resolved=Resolved(config, {}), stopped=lambda step, total: StoppedRun(f"{step} of {total}"), contents={},
        rows=rows or {},
    )  # fmt: skip
    fingerprint = RunFingerprint({}, {}, {}, {}, inputs={"data_path": ["abc:1"]}, total_steps=9)
    control = RunControl(run, fingerprint, resumed_step=resumed_step, metrics=METRICS, engines={}, counts=Counts())
    control._saver = Saves(full=full)
    return control


def content(state: Counters) -> Content:
    return Content(state=asdict(state), engines={})


def due(control: RunControl, name: str, **counters: int) -> list[int]:
    """The steps of ten at which `evaluation_is_due` or `save_is_due` answers True."""
    return [step for step in range(10) if getattr(control, name)(Counters(step=step, **counters))]


def test_evaluations_are_due_at_the_interval_and_once_a_step(tmp_path):
    control = make_control(tmp_path, eval_interval=3)
    assert due(control, "evaluation_is_due") == [0, 3, 6, 9]
    assert due(control, "evaluation_is_due", evaluated=6) == [0, 3, 9]
    assert due(make_control(tmp_path, eval_interval=0), "evaluation_is_due") == [0]


def test_checkpoints_are_due_at_the_interval_but_not_where_one_is(tmp_path):
    assert due(make_control(tmp_path, save_steps=4), "save_is_due") == [4, 8], "nothing is to be saved at the start"
    assert due(make_control(tmp_path, save_steps=4, resumed_step=4), "save_is_due") == [8]
    assert due(make_control(tmp_path, save_steps=0), "save_is_due") == []
    control = make_control(tmp_path, save_steps=4)
    control.save(Counters(step=8), content(Counters(step=8)), lambda: None)
    assert control._saver.steps == [8] and due(control, "save_is_due") == []


def test_training_goes_on_where_the_disk_is_full(tmp_path):
    control, models = make_control(tmp_path, full=True), []
    control.save(Counters(step=2), content(Counters(step=2)), lambda: models.append("saved"))
    assert models == ["saved"]


def test_an_interrupted_run_saves_its_state_and_is_stopped(tmp_path):
    control, state = make_control(tmp_path), Counters(step=5)
    with pytest.raises(StoppedRun, match="6 of 9"), control.resumable(state, lambda: content(state)):
        state.step = 6
        raise Interrupted
    assert control._saver.steps == [6] and control._saver.finished == 1


@pytest.mark.parametrize(
    ("skipped", "bad", "error", "words"),
    [
        (2, 2, None, ""),
        (3, 3, DivergedError, "all 3 steps were skipped"),
        (3, 1, DivergedError, "all 3 steps were skipped"),
        (3, 0, InputError, "none of 3 steps"),
    ],
)
def test_a_run_whose_steps_were_all_skipped_is_not_done(tmp_path, skipped, bad, error, words):
    """Of steps that had nothing to learn from none is bad: nothing has diverged."""
    written, is_done = [], error is None
    control = make_control(tmp_path)
    state = Counters(step=3, skipped_updates=skipped, bad_in_a_row=bad)
    with nullcontext() if is_done else pytest.raises(error, match=words):
        control.finish(state, content(state), lambda: written.append("models"))
    assert written == (["models"] if is_done else []) and control._saver.steps == ([3] if is_done else [])
    assert (tmp_path / "done.json").is_file() == is_done


@pytest.mark.parametrize(("lora_dim", "rate"), [(0, "--actor-learning-rate"), (2, "--actor-lora-learning-rate")])
def test_a_run_that_diverges_names_the_rate_of_the_weights_that_it_trains(tmp_path, lora_dim, rate):
    config = PPOConfig(actor={"lora_dim": lora_dim}, critic={"lora_dim": 2 - lora_dim})
    run = SimpleNamespace(
        folder=tmp_path, stage=PPO_STAGE, resolved=Resolved(config, {}),
        world=World(rank=1, size=2, device=torch.device("cpu")),
    )  # fmt: skip
    state = Counters(step=3, bad_in_a_row=config.optimizer.max_bad_steps)
    with pytest.raises(DivergedError, match=f"lower {rate} where a loss"):
        note_skipped_step(run, state, rows=[1], input_ids=[], cause="loss or gradient not finite")


@pytest.mark.parametrize(("dtype", "is_advised"), [("fp16", True), ("fp32", False), ("auto", False)])
def test_bf16_is_advised_only_in_the_place_of_fp16(tmp_path, dtype, is_advised):
    run = SimpleNamespace(folder=tmp_path, resolved=SimpleNamespace(config=SFTConfig(deepspeed={"dtype": dtype})))
    assert ("--dtype bf16" in divergence_advice(run, "--learning-rate")) == is_advised


def test_a_full_disk_ends_a_run_that_is_to_stop(tmp_path):
    """What it has learnt since the last checkpoint would be lost without a word."""
    with (
        pytest.raises(EnvironmentFault, match="no space"),
        make_control(tmp_path, full=True).resumable(Counters(step=1), lambda: content(Counters(step=1))),
    ):
        raise Interrupted


def test_a_stop_right_after_a_save_writes_nothing_twice(tmp_path):
    """Within the step that follows; what has been evaluated since makes another state."""
    control, state = make_control(tmp_path), Counters(step=4)
    control.save(state, content(state), lambda: None)
    with pytest.raises(StoppedRun), control.resumable(state, lambda: content(state)):
        raise Interrupted
    assert control._saver.steps == [4] and control._saver.finished == 1
    with pytest.raises(StoppedRun), control.resumable(state, lambda: content(state)):
        state.evaluated = 4
        raise Interrupted
    assert control._saver.steps == [4, 4]


def test_a_save_that_the_disk_refused_is_tried_again_by_a_stop(tmp_path):
    control, state = make_control(tmp_path, full=True), Counters(step=4)
    control.save(state, content(state), lambda: None)
    control._saver.full = False
    with pytest.raises(StoppedRun), control.resumable(state, lambda: content(state)):
        raise Interrupted
    assert control._saver.steps == [4]


def test_a_run_whose_last_checkpoint_finds_no_room_is_not_done(tmp_path, caplog):
    """Its model is saved, and the command ends with the disk's own line: it does not say that training goes on."""
    control, models = make_control(tmp_path, full=True), []
    with pytest.raises(EnvironmentFault, match="no space left"):
        control.finish(Counters(step=9), content(Counters(step=9)), lambda: models.append("saved"))
    assert models == ["saved"] and not (tmp_path / "done.json").exists() and "goes on" not in caplog.text


@pytest.mark.parametrize("last", [2.0, 4.0])
@pytest.mark.parametrize(("lora_dim", "rate"), [(0, "learning_rate"), (2, "lora_learning_rate")])
def test_a_run_that_ends_worse_than_it_began_says_so_in_its_log(tmp_path, caplog, last, lora_dim, rate):
    control = make_control(tmp_path, model={"lora_dim": lora_dim})
    for step, value in ((0, 3.0), (9, last)):
        losses = [math.log(value) + n / 10 for n in range(-3, 4)]
        values = {"eval_perplexity": value, "eval_rows": 7, "num_tokens": 1_000_000 * step}
        control.recorder.write_evaluation(step, values, {"eval_loss": losses})
    with caplog.at_level(logging.INFO):
        control.finish(Counters(step=9), content(Counters(step=9)), lambda: None)
    assert re.search(r"\n  cost +.*, 9M tokens\n", caplog.text)
    warned = [record.getMessage() for record in caplog.records if record.levelno == logging.WARNING]
    text = naming("ends worse ... held-out perplexity 3 -> 4 (7 sequences)", f"lower {dashed(rate)}")
    assert warned == ([text] if last > 3 else [])


@pytest.mark.parametrize(("trained", "dropped", "says"), [(8, 10, False), (8, 11, True), (3, 6, True), (4, 5, False)])
def test_a_run_that_dropped_most_of_its_rows_says_so_at_its_end(tmp_path, caplog, trained, dropped, says):
    """The two held-out rows were kept too; those of other stages count on neither side."""
    control = make_control(
        tmp_path, rows={"rows": {"to train on": trained, "held out": 2, "of other stages": 9, "dropped": dropped}}
    )
    control.finish(Counters(step=9), content(Counters(step=9)), lambda: None)
    counts = f"{trained} to train on ... 2 held out, 9 of other stages (--data-split auto) ... {dropped} dropped"
    assert (caplog.text == naming(f"most rows were dropped ... {counts}, of {trained + 11 + dropped}")) == says


@pytest.mark.parametrize(
    ("given", "kept"), [(None, ["step-9"]), (2, ["step-6", "step-9"]), (0, [])], ids=["left out", "2", "0"]
)
def test_a_finished_run_holds_its_newest_checkpoint_alone_or_as_many_as_were_asked_for(tmp_path, caplog, given, kept):
    for step in (3, 6, 9):
        folder = tmp_path / "checkpoints" / f"step-{step}"
        folder.mkdir(parents=True)
        (folder / "model.safetensors").write_bytes(bytes(1_000_000 * step))
    (tmp_path / "checkpoints" / ".step-6.old").mkdir()
    settings = {} if given is None else {"keep_checkpoints": given}
    control = make_control(tmp_path, **settings)
    control._run.resolved.origins.update(dict.fromkeys(settings, COMMAND_LINE))
    with caplog.at_level(logging.INFO):
        control.finish(Counters(step=9), content(Counters(step=9)), lambda: None)
    assert sorted(path.name for path in (tmp_path / "checkpoints").iterdir()) == kept
    said = [line for line in caplog.messages if "checkpoints holds" in line]
    size = {1: "holds step-9, 0.00838 GiB", 2: "holds step-9, step-6, 0.014 GiB"}.get(len(kept))
    assert len(said) == bool(kept) and all(size in line and "--keep-checkpoints 0" in line for line in said)


def test_the_mark_of_a_finished_run_says_what_it_was_made_of(tmp_path):
    control = make_control(tmp_path, max_steps=9, num_train_epochs=2.0)
    control.finish(Counters(step=9), content(Counters(step=9)), lambda: None)
    done = json.loads((tmp_path / "done.json").read_text())
    assert (done["stage"], done["steps"], done["max_steps"], done["num_train_epochs"]) == ("sft", 9, 9, 2.0)
    assert done["inputs"] == {"data_path": ["abc:1"]} and done["sizes"] == {"rows of an optimizer step": 16}
    assert done["settings"]["learning_rate"] == 1e-5 and "print_steps" not in done["settings"]


def test_a_skipped_step_is_no_sign_of_divergence_while_a_loss_scale_can_fall():
    state, settled = Counters(), SimpleNamespace(loss_scale_can_fall=False, is_stepping=True)
    settling = SimpleNamespace(loss_scale_can_fall=True, is_stepping=True)
    for engines, bad in (([settled], 1), ([settled, settled], 2), ([settling, settled], 0), ([settled], 1)):
        state.count_step(stepped=False, engines=engines)
        assert state.bad_in_a_row == bad
    assert (state.step, state.skipped_updates) == (4, 4) and not settled.is_stepping and not settling.is_stepping


@pytest.mark.parametrize(("slowest", "is_stopped"), [(LONG_STEP_S + 1, True), (LONG_STEP_S - 1, False)])
def test_a_long_step_of_any_rank_is_stopped_on_all(monkeypatch, slowest, is_stopped):
    """This rank's own step was short, and all ranks must take part in the same collectives."""
    asked = iter([False, True])
    world = World(rank=0, size=2, device=torch.device("cpu"))
    stop = SimpleNamespace(is_set_on_any_rank=lambda world: next(asked))
    stopping = Stopping(SimpleNamespace(world=world, stop=stop))
    monkeypatch.setattr("pipeline.training.steps.dist.max_over_ranks", lambda value, device: max(value, slowest))
    stopping.between_steps()
    with pytest.raises(Interrupted) if is_stopped else nullcontext():
        stopping.within_step()
