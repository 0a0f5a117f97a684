"""Runs of a stage in forked children, which are killed, stopped and compared with runs in one go."""

import importlib
import json
import os
import random
import shutil
import signal
import sys
import time
import traceback
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass, replace
from multiprocessing.process import BaseProcess
from pathlib import Path
from typing import Any

from support import forks
from support.ports import free_port
from support.run_words import run_words, start_flags

MODELS = {"sft": ("sft",), "reward": ("reward",), "ppo": ("actor", "critic", "actor_ema"), "dpo": ("dpo",)}
LOSSES = ("loss/policy", "loss/value", "loss/ptx", "policy/approx_kl", "actor/grad_norm", "critic/grad_norm")
CLOCK = ("time", "_s", "_per_s", "mfu", "_gib")  # ends of names of times, rates and memory


@dataclass(frozen=True, slots=True)
class Story:
    """A stage's run with all that evolves in it.

    stage: its section.
    folder: the inputs of tests/support/tiny_run.py.
    steps: optimizer steps.
    ranks: processes.
    more: further words of its command line.
    method: of stage 3; those without a critic have the function `length` of `rewards.py` for a reward model.
    """

    stage: str
    folder: Path
    steps: int = 8
    ranks: int = 1
    more: tuple[object, ...] = ()
    method: str = "ppo"

    def words(self, out: str) -> list[str]:
        flags = start_flags(self.stage, self.folder) | {
            "num_train_epochs": 100, "max_steps": self.steps, "save_steps": 1, "eval_interval": 3, "eval_iters": 2,
            "output_dir": self.folder / out if self.stage == "ppo" else self.folder / out / self.stage,
        }  # fmt: skip
        flags |= {"ppo": PPO, "dpo": PREFERENCES}.get(self.stage, PRETRAINING)
        if self.stage == "ppo":
            flags["unsupervised_data_path"] = self.folder / "text.jsonl"
        if self.method != "ppo":
            flags = {name: value for name, value in flags.items() if not name.startswith("critic_")}
            flags |= {"method": self.method, "reward_function": f"{self.folder}/rewards.py:length"}
        return [*run_words(self.folder, **flags), *map(str, self.more)]

    def run_dir(self, out: str) -> Path:
        return self.folder / out / "runs" / self.stage

    def log(self, out: str) -> Path:
        return self.folder / f"{out}.{self.stage}.log"


PRETRAINING = {
    "learning_rate": 1e-3,
    "per_device_train_batch_size": 2,
    "gradient_accumulation_steps": 2,
    "zero_stage": 2,
    "lora_dim": 4,
    "lora_dropout": 0.2,
    "keep_best": "true",
}
PREFERENCES = {name: value for name, value in PRETRAINING.items() if name != "keep_best"}
# LoRA, EMA, ptx, an adaptive KL coefficient, and two epochs of two updates on each rollout.
PPO = {
    "unsup_coef": 0.5,
    "actor_learning_rate": 1e-3,
    "critic_learning_rate": 1e-3,
    "per_device_generation_batch_size": 8,
    "per_device_train_batch_size": 2,
    "gradient_accumulation_steps": 2,
    "ppo_epochs": 2,
    "kl_coef": 0.1,
    "kl_target": 0.5,
    "kl_horizon": 100,
    "enable_ema": "true",
    "actor_zero_stage": 2,
    "critic_zero_stage": 3,
}


def start(story: Story, out: str, *further: object, first: Callable[[], None] | None = None) -> list[BaseProcess]:
    """Start a child a rank that runs the stage's `main`. `first` is called in each before that; it can be pickled."""
    port, words = free_port(), [*story.words(out), *map(str, further)]
    return [forks.start(child, story, out, words, r, port, first) for r in range(story.ranks)]


def child(story: Story, out: str, words: list[str], rank: int, port: int, first: Callable[[], None] | None) -> None:
    """The body of a child; it never returns."""
    code = 70
    try:
        log = story.log(out)
        forks.write_output_to(log, log)
        if story.ranks > 1:
            os.environ |= forks.rank_variables(rank, story.ranks, port)
        if first is not None:
            first()
        code = importlib.import_module(f"{forks.PACKAGES[story.stage]}.main").main(words)
    except BaseException:
        traceback.print_exc()
    finally:
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(code)


def run(story: Story, out: str, *further: object, first: Callable[[], None] | None = None) -> int:
    return forks.exit_code(start(story, out, *further, first=first))


def send(children: list[BaseProcess], number: int) -> None:
    """A signal to every child that is still there."""
    for process in children:
        if process.is_alive() and process.pid is not None:
            with suppress(ProcessLookupError):
                os.kill(process.pid, number)


def run_killed(story: Story, out: str, after_s: float) -> int:
    """Start a run and SIGKILL all its ranks after a time, unless they have ended; its exit code."""
    children = start(story, out)
    time.sleep(after_s)
    send(children, signal.SIGKILL)
    return forks.exit_code(children)


def wait_for_step(story: Story, out: str, step: int, children: list[BaseProcess]) -> None:
    """Until metrics.jsonl has a line of `step` or a child has ended."""
    file, wanted = story.run_dir(out) / "metrics.jsonl", f'"step": {step},'
    while not (file.is_file() and wanted in file.read_text(encoding="utf-8")):
        if not children[0].is_alive():
            return
        time.sleep(0.01)


# --- what a run has left ----------------------------------------------------------------------------------------------


def findings(story: Story, out: str) -> dict[str, Any]:
    """All that must not depend on an interruption: numbers, weights, optimizer state, samples, TensorBoard."""
    run_dir = story.run_dir(out)
    checkpoint = run_dir / "checkpoints" / f"step-{story.steps}"
    state = json.loads((checkpoint / "state.json").read_text())
    manifest = json.loads((checkpoint / "manifest.json").read_text())
    hashes = {name: entry["sha256"] for name, entry in manifest["files"].items() if name.endswith(".safetensors")}
    models = {
        f"{name}/{file.name}": file.read_bytes()
        for name in MODELS[story.stage]
        for file in sorted((run_dir.parents[1] / name).rglob("*.safetensors"))
    }
    samples = run_dir / "samples.jsonl"
    return {
        "metrics": metrics(run_dir),
        "state": without_clock(state["state"]),
        "engines": state["engines"],
        "shards": hashes,
        "models": {name: hash(content) for name, content in models.items()},
        "samples": samples.read_text() if samples.is_file() else "",
        "curves": curves(run_dir / "tensorboard"),
    }


def without_clock(value: Any) -> Any:
    if isinstance(value, dict):
        return {name: without_clock(part) for name, part in value.items() if not name.endswith(CLOCK)}
    return value


def metrics(run_dir: Path) -> list[dict[str, Any]]:
    """All lines of metrics.jsonl without what depends on the clock."""
    lines = (run_dir / "metrics.jsonl").read_text(encoding="utf-8").splitlines()
    return [without_clock(json.loads(line)) for line in lines]


def curves(folder: Path) -> dict[str, list[tuple[int, float]]]:
    """(step, value) of every TensorBoard scalar that does not depend on the clock, as TensorBoard shows them."""
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    events = EventAccumulator(str(folder), size_guidance={"scalars": 0})
    events.Reload()
    names = [name for name in events.Tags()["scalars"] if not name.endswith(CLOCK)]
    return {name: [(event.step, event.value) for event in events.Scalars(name)] for name in names}


def differences(found: dict[str, Any], expected: dict[str, Any]) -> list[str]:
    """The names of what differs."""
    return [name for name in expected if found[name] != expected[name]]


# --- whole runs against disturbed ones --------------------------------------------------------------------------------


def run_well(story: Story, out: str) -> None:
    """Run to the end, which has to be reached without an error."""
    log = story.log(out)
    assert run(story, out) == 0, log.read_text(encoding="utf-8")[-2000:]


def tell_whole(story: Story) -> tuple[dict[str, Any], float]:
    """(findings of a run in one go, seconds of a second one, which finds the data built as the killed ones will)."""
    run_well(story, "whole")
    started = time.monotonic()
    run_well(story, "again")
    seconds = time.monotonic() - started
    expected = findings(story, "whole")
    apart = differences(findings(story, "again"), expected)
    assert not apart, f"two whole runs differ: {apart}"
    return expected, seconds


def wait_for_next_second() -> None:
    """Wait, so that TensorBoard reads the files of two runs in the order of their starts.

    It orders them by their names, which have the second and the process: 9999 comes after 10000.
    """
    time.sleep(1.0 - time.time() % 1.0)


def kill_and_compare(story: Story, count: int, seed: int) -> dict[str, Any]:
    """`count` runs, each killed at a random time, resumed, and compared with a run in one go.

    Runs that had ended before the signal came are not counted, and the next signals come sooner: the machine may have
    had other work while the whole run was timed. There may be twice as many as wanted.
    """
    draw = random.Random(seed)
    expected, length = tell_whole(story)
    killed, wrong, latest = 0, [], length
    for number in range(3 * count):
        if killed == count:
            break
        after = draw.uniform(0.0, latest)
        in_time = run_killed(story, "killed", after) == -signal.SIGKILL
        killed += in_time
        latest *= 1.0 if in_time else 0.9
        wait_for_next_second()
        code = run(story, "killed")
        apart = [f"exit {code}"] if code else differences(findings(story, "killed"), expected)
        wrong += [f"{number} after {after:.2f} s: {', '.join(apart)}"] if apart else []
        shutil.rmtree(story.folder / "killed", ignore_errors=True)
    return {"killed": killed, "runs": count, "wrong": wrong, "run_s": length}


def chain(story: Story, count: int, seed: int) -> dict[str, Any]:
    """One run that is killed `count` times before it comes to its end."""
    draw = random.Random(seed)
    expected, length = tell_whole(story)
    codes = []
    for number in range(count):
        children = start(story, "chained")
        wait_for_step(story, "chained", 1 + number * story.steps // (count + 1), children)
        time.sleep(draw.uniform(0.0, 0.3 * length / story.steps))
        send(children, signal.SIGKILL)
        codes.append(forks.exit_code(children))
        wait_for_next_second()
    code = run(story, "chained")
    apart = [f"exit {code}"] if code else differences(findings(story, "chained"), expected)
    return {"killed": codes.count(-signal.SIGKILL), "runs": count, "wrong": apart, "run_s": length}


def stop_anywhere() -> None:
    """In a child: every step counts as long, so that a stop acts between micro-batches too."""
    importlib.import_module("pipeline.training.steps").LONG_STEP_S = -1.0


def stop_and_compare(story: Story, count: int, seed: int) -> dict[str, Any]:
    """As `kill_and_compare` with SIGTERM: the run stops by itself with 75 and says how long that took."""
    draw = random.Random(seed)
    expected, length = tell_whole(story)
    stopped, wrong, seconds, latest = 0, [], [], length
    for number in range(3 * count):
        if stopped == count:
            break
        children = start(story, "stopped", first=stop_anywhere)
        time.sleep(draw.uniform(0.3, 1.0) * latest)
        signalled = time.monotonic()
        send(children, signal.SIGTERM)
        code = forks.exit_code(children)
        seconds.append(time.monotonic() - signalled)
        stopped += code == 75
        latest *= 1.0 if code == 75 else 0.9
        wait_for_next_second()
        again = run(story, "stopped")
        apart = [] if code in (0, 75) and again == 0 else [f"exit {code}, then {again}"]
        apart = apart or differences(findings(story, "stopped"), expected)
        wrong += [f"{number}: {', '.join(apart)}"] if apart else []
        shutil.rmtree(story.folder / "stopped", ignore_errors=True)
    return {"killed": stopped, "runs": count, "wrong": wrong, "run_s": length, "longest_stop_s": max(seconds)}


def regroup(story: Story, count: int, seed: int) -> dict[str, Any]:
    """Half of a rollout's updates on two ranks at stage 2, the other half on one at stage 0, against all on two."""
    same = ("--lr-scheduler-type", "constant", "--eval-interval", 0, "--save-steps", 0)
    cut = ("--per-device-generation-batch-size", 4, "--gradient-accumulation-steps", 1)
    two = replace(story, ranks=2, steps=4, more=(*same, *cut))
    half = replace(two, steps=2)
    one = replace(story, steps=4, more=(*same, "--actor-zero-stage", 0, "--critic-zero-stage", 0))
    assert [run(two, "whole"), run(half, "parts"), run(one, "parts")] == [0, 0, 0]
    lines = [
        [line for line in metrics(story.run_dir(out)) if line["step"] > 2 and "loss/policy" in line]
        for out in ("whole", "parts")
    ]
    apart = [abs(mine[name] - theirs[name]) for mine, theirs in zip(*lines, strict=True) for name in LOSSES]
    return {"whole": lines[0], "worst": max(apart)}
