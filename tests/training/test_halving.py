"""Out-of-memory errors in the passes of a step: it is made again in halved batches, as if they had been asked for."""

import json
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from functools import wraps
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from support.ds_arguments import PARTITIONED_FILE
from support.messages import naming
from support.run_words import run_stage, run_words, start_flags
from transformers import OPTForCausalLM

from pipeline.configuration.groups import OptimizerConfig
from pipeline.models.forward.causal_lm import CausalLM
from pipeline.models.reward_model import TokenValueModel
from pipeline.out_of_memory import HALVED, BatchTooLarge, batches_in_words, halved_as_text, halved_before
from pipeline.training.halving import Halving, take_halved
from pipeline.training.recorder import Recorder
from pipeline.training.steps import Counters
from step3_ppo import training as ppo_training
from step3_ppo.models.hybrid_engine import HybridEngine

FOLDER_SIZES = {"num_train": 24, "num_test": 6}
CUDA = (
    "CUDA out of memory. Tried to allocate 2.00 GiB. "
    "GPU 0 has a total capacity of 79.11 GiB of which 44.69 MiB is free."
)
PPO = {"per_device_generation_batch_size": 8, "per_device_eval_batch_size": 4, "ppo_epochs": 2, "max_steps": 4}


class FailsBackward(torch.autograd.Function):
    """The identity, for whose gradient there is no memory."""

    @staticmethod
    def forward(ctx: Any, hidden: torch.Tensor) -> torch.Tensor:
        return hidden.view_as(hidden)

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> Any:
        raise torch.OutOfMemoryError(CUDA)


@contextmanager
def out_of_memory(
    above: int, *, of: type, number: int = 1, times: int = 1, grad: bool = True, backward: bool = False
) -> Iterator[list[int]]:
    """From the `number`-th on, `times` passes of a model with more than `above` rows fail, in one of both directions.

    The list has the rows of those that failed.
    """
    true_forward, seen, failed = of.forward, [], []

    @wraps(true_forward)
    def forward(self: Any, input_ids: torch.Tensor, *more: Any, **named: Any) -> Any:
        seen.append(len(input_ids) > above and torch.is_grad_enabled() == grad)
        if not seen[-1] or not number <= sum(seen) < number + times:
            return true_forward(self, input_ids, *more, **named)
        failed.append(len(input_ids))
        if not backward:
            raise torch.OutOfMemoryError(CUDA)
        layer = self.model.get_decoder().layers[0]  # the others have their gradients by then
        hook = layer.register_forward_hook(lambda module, given, output: FailsBackward.apply(output))
        try:
            return true_forward(self, input_ids, *more, **named)
        finally:
            hook.remove()

    of.forward = forward
    try:
        yield failed
    finally:
        of.forward = true_forward


def run(stage: str, folder: Path, out: Path, micro_batch: int, accumulation: int = 1, **changes: Any) -> int:
    """A run of a few steps in this process; its exit code."""
    flags = start_flags(stage, folder) | {
        "enable_tensorboard": "false", "adam_eps": 1e-3, "output_dir": out if stage == "ppo" else out / stage,
        "per_device_train_batch_size": micro_batch, "gradient_accumulation_steps": accumulation,
    }  # fmt: skip
    rates = {"actor_learning_rate": 1e-3, "critic_learning_rate": 1e-3}
    flags |= PPO | rates if stage == "ppo" else {"learning_rate": 1e-3, "max_steps": 3}
    return run_stage(stage, run_words(folder, **flags | changes))


def metrics(out: Path, stage: str, name: str) -> list[Any]:
    """The values of a metric, in order."""
    lines = map(json.loads, (out / "runs" / stage / "metrics.jsonl").read_text().splitlines())
    return [line[name] for line in lines if name in line]


def halved(out: Path, stage: str, step: int) -> dict[str, list[int]]:
    """What a checkpoint says of the batches in force."""
    state = json.loads((out / f"runs/{stage}/checkpoints/step-{step}/state.json").read_text())["state"]
    return (state["ppo"] if stage == "ppo" else state)["halved"]


def apart(found: Path, expected: Path) -> float:
    """The largest difference of two models' weights."""
    one, other = load_file(found / "model.safetensors"), load_file(expected / "model.safetensors")
    assert one.keys() == other.keys()
    return max((one[name] - other[name]).abs().max().item() for name in one)


@pytest.fixture(scope="module")
def plain(folder: Path) -> Callable[[str], Path]:
    """The output of a stage that was asked for the halved micro-batch; each is run when a test first asks for it."""
    made: dict[str, Path] = {}

    def output(stage: str) -> Path:
        if stage not in made:
            made[stage] = folder / f"plain-{stage}"
            assert run(stage, folder, made[stage], 2, 4) == 0
        return made[stage]

    return output


SLOW = pytest.mark.slow
STAGES = [(zero, backward) for zero in ("0", "1", "2", "3", "3 layers") for backward in (False, True)]
QUICK = [("0", False), ("2", True), ("3", True)]


@pytest.mark.parametrize(("zero", "backward"), [pytest.param(*s, marks=() if s in QUICK else SLOW) for s in STAGES])
def test_a_step_is_made_again_in_halved_micro_batches(folder, plain, tmp_path, zero, backward):
    """The second micro-batch fails, so that there are gradients of the first one to be dropped."""
    stage, _, gather = zero.partition(" ")
    partitioned = {"zero_stage": stage, "zero3_gather": gather or "auto", "deepspeed_config": PARTITIONED_FILE}
    with out_of_memory(2, of=CausalLM, number=2, backward=backward) as failed:
        assert run("sft", folder, tmp_path, 4, 2, **partitioned) == 0
    assert failed == [4] and apart(tmp_path / "sft", plain("sft") / "sft") < 1e-6
    assert metrics(tmp_path, "sft", "loss") == pytest.approx(metrics(plain("sft"), "sft", "loss"), abs=1e-6)
    assert metrics(tmp_path, "sft", "micro_batch_size") == [2, 2, 2] and halved(tmp_path, "sft", 3) == {"train": [4, 2]}
    assert halved(plain("sft"), "sft", 3) == {}


def test_a_step_of_stage_2_is_made_again(folder, plain, tmp_path):
    with out_of_memory(4, of=TokenValueModel, number=2, backward=True) as failed:
        assert run("reward", folder, tmp_path, 4, 2) == 0
    assert failed == [8], "a pair has two rows"
    assert apart(tmp_path / "reward", plain("reward") / "reward") < 1e-6


@pytest.mark.slow
@pytest.mark.parametrize(
    ("of", "number", "changes"),
    [
        (CausalLM, 1, {}),
        pytest.param(TokenValueModel, 2, {"actor_zero_stage": 2, "critic_zero_stage": 3}, marks=SLOW),
        # The second update of the first rollout: the policy that made the old log-probabilities has moved.
        pytest.param(CausalLM, 4, {}, marks=SLOW),
    ],
)
def test_an_update_of_ppo_is_made_again(folder, plain, tmp_path, of, number, changes):
    with out_of_memory(3, of=of, number=number, times=2, backward=True) as failed:
        assert run("ppo", folder, tmp_path, 4, 2, **changes) == 0
    assert len(failed) == 1 and halved(tmp_path, "ppo", 4) == {"train": [4, 2]}
    for model in ("actor", "critic"):
        assert apart(tmp_path / model, plain("ppo") / model) < 1e-6
    for name in ("loss/policy", "loss/value", "policy/approx_kl", "actor/grad_norm"):
        assert metrics(tmp_path, "ppo", name) == pytest.approx(metrics(plain("ppo"), "ppo", name), abs=1e-5)
    assert max(metrics(tmp_path, "ppo", "policy/first_ratio_error")) < 1e-6


def test_old_log_probs_are_made_again_in_the_new_cut(folder, tmp_path, monkeypatch):
    """The pass before the failed update (behind that of the evaluation) is false: its rest would show in the ratio."""
    true_pass, sizes = ppo_training.policy_log_probs, []

    def noted(models: Any, passes: Any, **named: Any) -> Any:
        sizes.append(max(len(batch.rows) for batch in passes.batches))
        log_probs, entropy = true_pass(models, passes, **named)
        return (log_probs - 0.5 if len(sizes) == 2 else log_probs), entropy

    monkeypatch.setattr(ppo_training, "policy_log_probs", noted)
    with out_of_memory(2, of=CausalLM) as failed:
        assert run("ppo", folder, tmp_path, 4, 2, max_steps=1) == 0
    assert len(failed) == 1 and metrics(tmp_path, "ppo", "policy/first_ratio_error")[0] < 1e-6


@pytest.mark.parametrize(
    ("phase", "of", "above", "number", "sizes"),
    [
        ("generate", OPTForCausalLM, 4, 3, [8, 4]),
        pytest.param("score", TokenValueModel, 1, 2, [16384, 8192], marks=SLOW),
        pytest.param("evaluate", OPTForCausalLM, 3, 2, [4, 2], marks=SLOW),
    ],
)
def test_a_rollout_and_an_evaluation_are_made_again(folder, plain, tmp_path, phase, of, above, number, sizes):
    """Of the sampler's passes those of the evaluation have 4 rows, those of a rollout 8."""
    with out_of_memory(above, of=of, number=number, grad=False) as failed:
        assert run("ppo", folder, tmp_path, 2, 4) == 0
    assert len(failed) == 1 and halved(tmp_path, "ppo", 4) == {phase: sizes}
    for model in ("actor", "critic"):
        assert apart(tmp_path / model, plain("ppo") / model) < 1e-6


@pytest.mark.slow
def test_buffers_of_generation_are_given_back_before_a_batch_is_halved(folder, plain, tmp_path, monkeypatch):
    """An engine without buffers stands for one that holds them until it is told; a resumed run is told at its start."""
    released: list[HybridEngine] = []
    true_release = HybridEngine.always_release
    monkeypatch.setattr(HybridEngine, "holds_buffers", property(lambda engine: not engine.options.release_cache))
    monkeypatch.setattr(
        HybridEngine, "always_release", lambda engine: (released.append(engine), true_release(engine))[1]
    )
    with out_of_memory(1, of=CausalLM, number=2, backward=True) as failed:
        assert run("ppo", folder, tmp_path, 2, 4) == 0
    assert failed == [2] and len(released) == 1 and halved(tmp_path, "ppo", 4) == {"cache": [1, 0]}
    assert all(apart(tmp_path / model, plain("ppo") / model) == 0 for model in ("actor", "critic"))
    with out_of_memory(1, of=CausalLM) as failed:
        assert run("ppo", folder, tmp_path, 2, 4, max_steps=5) == 0
    assert failed == [2] and len(released) == 2, "released at the start, so that now the batch is halved"
    assert halved(tmp_path, "ppo", 5) == {"cache": [1, 0], "train": [2, 1]}


def test_ranks_start_again_without_the_buffers(monkeypatch):
    class Held:
        holds_buffers = True

    several, state = SimpleNamespace(world=SimpleNamespace(size=2)), Counters()
    halving = Halving(several, [], buffers=Held())  # type: ignore[arg-type]
    with pytest.raises(BatchTooLarge) as error, halving.when_out_of_memory(state):
        assert halving.batch_size(state, "train", 4) == 4
        raise torch.OutOfMemoryError(CUDA)
    assert error.value.halved == {"cache": [1, 0]}
    assert batches_in_words(error.value.halved) == "the KV cache freed after each rollout"
    monkeypatch.setenv(HALVED, halved_as_text(error.value.halved))
    assert halved_before() == error.value.halved


def test_an_error_before_a_turn_reads_a_batch_size_halves_none():
    """Not that of the turn before."""
    state, run = Counters(), SimpleNamespace(world=SimpleNamespace(size=1))
    halving = Halving(run, [])  # type: ignore[arg-type]
    with halving.when_out_of_memory(state):
        halving.batch_size(state, "train", 4)
    with pytest.raises(torch.OutOfMemoryError, match="CUDA out of memory"), halving.when_out_of_memory(state):
        raise torch.OutOfMemoryError(CUDA)
    assert state.halved == {}


def test_a_job_that_was_started_again_has_what_was_halved_last(monkeypatch):
    """Not what the checkpoint says that its last job began from."""
    state = Counters(halved={"train": [4, 2], "score": [900, 450]})
    monkeypatch.setenv(HALVED, halved_as_text({"train": [4, 1], "score": [900, 450]}))
    take_halved(state, OptimizerConfig(per_device_train_batch_size=4))
    assert state.halved == {"train": [4, 1], "score": [900, 450]} and state.batch_size("train", 4) == 1


def test_text_of_the_ptx_loss_is_cut_as_small_as_the_rollout(folder, tmp_path, monkeypatch):
    monkeypatch.setenv(HALVED, halved_as_text({"train": [4, 2]}))
    with out_of_memory(2, of=CausalLM, times=99) as failed:
        assert run("ppo", folder, tmp_path, 4, 2, max_steps=1, unsupervised_data_path=folder / "text.jsonl") == 0
    assert failed == [] and len(metrics(tmp_path, "ppo", "loss/ptx")) == 1


@pytest.mark.parametrize(("stage", "of"), [("sft", CausalLM), pytest.param("reward", TokenValueModel, marks=SLOW)])
def test_the_evaluations_of_stages_1_and_2_are_made_again(folder, plain, tmp_path, stage, of):
    with out_of_memory(2, of=of, grad=False) as failed:
        assert run(stage, folder, tmp_path, 2, 4, per_device_eval_batch_size=3) == 0
    found, expected = (metrics(out, stage, "eval_loss") for out in (tmp_path, plain(stage)))
    assert len(failed) == 1 and len(found) == 2 and found == pytest.approx(expected, abs=1e-6)


@SLOW
def test_an_evaluation_of_some_batches_has_the_same_rows_in_halved_ones(folder, tmp_path):
    some = {"per_device_eval_batch_size": 3, "eval_iters": 1, "max_steps": 1}
    assert run("sft", folder, tmp_path / "plain", 2, **some) == 0
    with out_of_memory(2, of=CausalLM, grad=False):
        assert run("sft", folder, tmp_path / "halved", 2, **some) == 0
    found, expected = (metrics(tmp_path / name, "sft", "eval_loss") for name in ("halved", "plain"))
    assert found == pytest.approx(expected, abs=1e-6)


def test_one_row_that_does_not_fit_ends_the_run_in_one_line(folder, tmp_path, capsys):
    with out_of_memory(0, of=CausalLM, times=99) as failed:
        assert run("sft", folder, tmp_path, 5) == 3
    assert failed == [5, 3, 2, 1]
    (line,) = [line for line in capsys.readouterr().err.splitlines() if line.startswith("error: ")]
    assert line == naming(
        "error: phase train: out of memory ... 2.00 GiB ... 44.69 MiB free of 79.11 GiB",
        "--per-device-train-batch-size 1 ... --max-seq-len ... --gradient-checkpointing ... --zero-stage",
    )


@pytest.mark.parametrize("stage", ["ppo", pytest.param("sft", marks=SLOW)])
def test_an_optimizer_step_that_fails_is_not_made_again(folder, tmp_path, monkeypatch, capsys, stage):
    """It may have changed weights, and its memory does not depend on the batch."""

    def step(self: Any, *given: Any, **named: Any) -> Any:
        raise torch.OutOfMemoryError(CUDA)

    monkeypatch.setattr(torch.optim.AdamW, "step", step)
    assert run(stage, folder, tmp_path, 4, 2) == 3
    assert "done again" not in capsys.readouterr().err


@pytest.mark.parametrize("stage", ["sft", "reward", "ppo"])
def test_a_job_that_was_started_again_has_the_halved_micro_batch(folder, plain, tmp_path, monkeypatch, capsys, stage):
    """What another job's ranks ran out of memory with, as their supervisor says it to those of this one."""
    monkeypatch.setenv(HALVED, halved_as_text({"train": [4, 2]}))
    assert run(stage, folder, tmp_path, 4, 2) == 0
    assert "--per-device-train-batch-size 2 instead of 4\n" in capsys.readouterr().err
    assert set(metrics(tmp_path, stage, "micro_batch_size")) == {2}
    for model in ("actor", "critic") if stage == "ppo" else (stage,):
        assert apart(tmp_path / model, plain(stage) / model) == 0


def test_optimizer_states_on_the_host_come_back_before_the_turn_begins_anew(folder, plain, tmp_path):
    """They stay there while what failed still holds the device's memory: in the second rollout, when there are any."""
    with out_of_memory(4, of=OPTForCausalLM, number=16, grad=False) as failed:
        assert run("ppo", folder, tmp_path, 2, 4, offload_optimizer_during_rollout="true") == 0
    assert len(failed) == 1 and halved(tmp_path, "ppo", 4) == {"generate": [8, 4]}
    for model in ("actor", "critic"):
        assert apart(tmp_path / model, plain("ppo") / model) < 1e-6


def test_dropout_goes_on_after_an_evaluation(folder, tmp_path):
    """Each step is the same whether an evaluation was before it; without dropout it is another one."""
    lora = {"lora_dim": 2, "lora_module_name": "all-linear", "only_optimize_lora": "true"}
    for name, dropout, interval in (("often", 0.5, 1), ("seldom", 0.5, 99), ("none", 0.0, 99)):
        out = tmp_path / name
        assert run("sft", folder, out, 4, lora_dropout=dropout, eval_interval=interval, **lora) == 0
    often, seldom, none = (metrics(tmp_path / name, "sft", "loss") for name in ("often", "seldom", "none"))
    assert often == seldom and often[1] != none[1]


@pytest.mark.parametrize("place", ["count_step", "write_training"])
def test_a_step_that_was_taken_is_not_taken_again(folder, tmp_path, monkeypatch, capsys, place):
    """Before it is counted and after: the turn of the loop that it belongs to would take it a second time."""
    raised = []

    def failing(*given: Any, **named: Any) -> None:
        raised.append(place)
        raise torch.OutOfMemoryError(CUDA)

    monkeypatch.setattr(Counters if place == "count_step" else Recorder, place, failing)
    assert run("sft", folder, tmp_path, 4, 2) == 3
    assert raised == [place] and "done again" not in capsys.readouterr().err


def test_a_resumed_run_goes_on_with_the_halved_micro_batch_unless_the_flag_is_changed(folder, tmp_path, capsys):
    with out_of_memory(2, of=CausalLM):
        assert run("sft", folder, tmp_path, 4, 2, max_steps=1) == 0
    with out_of_memory(2, of=CausalLM, times=99) as failed:
        assert run("sft", folder, tmp_path, 4, 2, max_steps=2) == 0
    assert "--per-device-train-batch-size 2 instead of 4\n" in capsys.readouterr().err
    assert run("sft", folder, tmp_path, 8, 1, max_steps=3) == 0
    assert "memory ran out" not in capsys.readouterr().err
    assert failed == [] and metrics(tmp_path, "sft", "micro_batch_size") == [2, 2, 8]


@pytest.mark.parametrize("stage", ["sft", pytest.param("reward", marks=SLOW), pytest.param("ppo", marks=SLOW)])
def test_a_run_with_enough_memory_is_the_plain_computation_to_the_byte(folder, plain, tmp_path, monkeypatch, stage):
    monkeypatch.setattr(Halving, "batch_size", lambda halving, state, phase, requested, **_: requested)
    monkeypatch.setattr(Halving, "when_out_of_memory", lambda *_: nullcontext())
    assert run(stage, folder, tmp_path, 2, 4) == 0
    models = sorted(path.relative_to(tmp_path) for path in tmp_path.rglob("*.safetensors") if "runs" not in path.parts)
    assert models and all((tmp_path / m).read_bytes() == (plain(stage) / m).read_bytes() for m in models)
    for name in ("loss", "eval_loss", "grad_norm", "loss/policy", "actor/grad_norm", "objective/scores"):
        assert metrics(tmp_path, stage, name) == metrics(plain(stage), stage, name)
