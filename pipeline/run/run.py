"""Run one rank of a stage, from its first log line to its exit code: earlier runs, logs, config.json, outcome file.

The loops are in the stages. A supervisor, if there is one, decides how the job ended (pipeline/launching/verdict.py).
"""

import logging
import os
import platform
import shutil
import socket
import subprocess
import sys
import traceback
from collections.abc import Mapping
from contextlib import nullcontext, suppress
from dataclasses import dataclass, field, replace
from importlib import metadata
from pathlib import Path
from typing import Any

from pipeline import dist, heartbeat
from pipeline.configuration.ds_config import Json
from pipeline.configuration.flag_checks import idle_flags
from pipeline.configuration.flag_table import ZERO_STAGE, flag_table, flags_of_key, flat_items
from pipeline.configuration.resolved import Resolved, applied
from pipeline.configuration.stage import Stage, StageConfig
from pipeline.errors import (
    EXIT_DONE,
    EXIT_ENVIRONMENT,
    EXIT_FAULT,
    EXIT_STOPPED,
    EnvironmentFault,
    RunError,
    StoppedRun,
    dashed,
    print_error,
    say,
)
from pipeline.files import PROJECT, own_version, refused_by_disk, write_json
from pipeline.out_of_memory import BatchTooLarge, Halved, is_out_of_memory, memory_line
from pipeline.redact import masked, redacted
from pipeline.run.earlier_runs import clear, is_finished
from pipeline.run.host_storage import detect_shared_storage, on_each_storage
from pipeline.run.layout import beat_file, environment_file, lock_file, plan_file, rank_log_file, rows_file
from pipeline.run.lock import locked
from pipeline.run.logs import file_log, libraries_print_to, start_logging
from pipeline.run.outcome import (
    check_nobody_left,
    clear_outcomes,
    is_first_to_fail,
    is_reported,
    local_supervisor,
    own_rank,
    supervisor_name,
    write_outcome,
)
from pipeline.run.resolve import RUN_RULES, Choose, with_choice
from pipeline.run.stop_request import StopRequest, stop_without

log = logging.getLogger(__name__)

PACKAGES = ("torch", "deepspeed", "transformers", "datasets", "peft", "safetensors", "pydantic")
# Phase -> flags of any stage that lower its memory if they are lowered.
LOWERED_IN: dict[heartbeat.Phase, tuple[str, ...]] = {
    "start": (),
    "generate": ("per_device_generation_batch_size", "per_device_eval_batch_size", "max_answer_seq_len"),
    "score": ("per_device_train_batch_size", "max_prompt_seq_len", "max_answer_seq_len"),
    "train": ("per_device_train_batch_size", "max_seq_len", "max_answer_seq_len"),
    "evaluate": ("per_device_eval_batch_size", "max_seq_len"),
    "save": (),
}


def describe_environment(world: dist.World) -> dict[str, Any]:
    """Return versions, hardware and commit for env.json, without environment variables, which may hold secrets."""
    import torch

    return {
        "python": platform.python_version(),
        "platform": platform.platform(),
        "versions": {PROJECT: own_version(), **{name: metadata.version(name) for name in PACKAGES}},
        "device": torch.cuda.get_device_name(world.device) if world.device.type == "cuda" else "cpu",
        "num_ranks": world.size,
        "cpu_count": os.cpu_count(),
        "commit": git_commit(),
        "command": masked(sys.argv),
    }


def git_commit() -> str | None:
    """Return the commit of the checkout that this runs from; None for an installed project."""
    root = Path(__file__).resolve().parents[2]
    if not (root / ".git").exists() or not shutil.which("git"):
        return None  # a repository around an installed project belongs to another project
    done = subprocess.run(["git", "-C", str(root), "rev-parse", "HEAD"], capture_output=True, text=True, check=False)
    return done.stdout.strip() or None


def check_writable(run_dir: Path, rank: int) -> None:
    """Raise EnvironmentFault if the run's folder cannot be written."""
    probe = run_dir / f".probe-{rank}"  # one file per rank, because another rank may delete its own at any moment
    try:
        run_dir.mkdir(parents=True, exist_ok=True)
        probe.touch()
        probe.unlink()
    except OSError as error:
        raise EnvironmentFault(f"{run_dir}: cannot write there: {error.strerror}") from None


@dataclass(frozen=True, slots=True)
class Run:
    """A run as its loop knows it.

    world: ranks and device.
    folder: folder of the run.
    stage: stage that is run.
    resolved: settings with the origin of each.
    stop: request to stop.
    engine_jsons: DeepSpeed JSON of each engine; empty until `pipeline.engine.build` needs one.
    contents: fingerprints of the data (by flag) and models (by name) that the run began with; empty until computed.
    rows: content of rows.json, on rank 0 once its rows are read (`pipeline/preparation/inputs.py`).
    plan: expectations of the plan that chose flags; {} without a plan.
    """

    world: dist.World
    folder: Path
    stage: Stage
    resolved: Resolved
    stop: StopRequest
    engine_jsons: dict[str, Json] = field(default_factory=dict)
    contents: dict[str, Any] = field(default_factory=dict)
    rows: dict[str, Any] = field(default_factory=dict)
    plan: Mapping[str, Any] = field(default_factory=dict)

    def stopped(self, step: int, total_steps: int) -> StoppedRun:
        """Return the exception to raise once the checkpoint of `step` is written."""
        config = self.resolved.config.run
        how = "the same command resumes"
        left_out = ["--overwrite"] if config.overwrite else []
        left_out += [f"--resume {config.resume}"] if config.resume != "auto" else []
        if left_out:
            how = f"the same command without `{' '.join(left_out)}` resumes"
        if not config.keep_checkpoints:
            how = "no checkpoint is stored (--keep-checkpoints 0): the same command starts over"
        return StoppedRun(f"stopped at step {step} of {total_steps}; {how}")


def take_folder(run: Run) -> None:
    """Clear the folder of a run that starts afresh; write config.json (origin of every flag), env.json and rows.json.

    The loop calls this when models and data are loaded, so a run that is refused earlier deletes nothing. A collective.
    """

    def take() -> None:
        resolved = run.resolved
        settings = {
            name: {"value": masked(value)} | resolved.origins[name].entry for name, value in flat_items(resolved.config)
        }
        with refused_by_disk(run.folder):
            if resolved.config.run.resumes_from == "never":
                clear(run.folder)
            # First of all: this file marks the folder as a run's (pipeline/run/output_checks.py).
            write_json(environment_file(run.folder), {"stage": run.stage.section, **describe_environment(run.world)})
            write_json(run.folder / "config.json", settings)
            if run.plan:
                write_json(plan_file(run.folder), run.plan)
            if run.rows:
                write_json(rows_file(run.folder), run.rows)

    on_each_storage(take)


def run_stage(stage: Stage, resolved: Resolved, *, choose: Choose, stop: StopRequest | None = None) -> int:
    """Run a stage's loop; its errors become one line, an exit code, and this rank's outcome file.

    It writes nothing if another run has locked the folder. A supervisor locks it for its ranks.
    """
    folder = stage.run_folder(resolved.config.run)
    owns_folder = supervisor_name() is None and own_rank() == 0
    try:
        check_writable(folder, own_rank())
        with locked(folder, resolved.config.outputs) if owns_folder else nullcontext():
            if owns_folder:
                check_nobody_left(folder)
                clear_outcomes(folder)
            heartbeat.start(beat_file(folder, own_rank()))
            return run_rank(folder, stop or StopRequest(), stage, resolved, choose)
    except EnvironmentFault as error:
        return print_error(error)
    finally:
        heartbeat.end()


def run_rank(folder: Path, stop: StopRequest, stage: Stage, resolved: Resolved, choose: Choose) -> int:
    """Run one rank from its first log line to its outcome file; returns the exit code."""
    run_config = resolved.config.run
    rank = own_rank()
    code, message, secondary, trace = EXIT_DONE, "done", False, ""
    halved: Halved = {}
    try:
        if supervisor := local_supervisor():
            stop_without(supervisor)
        if rank == 0 or supervisor_name() is not None:
            write_outcome(folder, rank, None, "running")
        start_logging(folder, rank, stage, verbose=run_config.verbose)
        with nullcontext() if run_config.verbose else libraries_print_to(rank_log_file(folder, rank)):
            world = dist.start(timeout_s=run_config.process_group_timeout_s)
            if not detect_shared_storage(lock_file(folder)) and world.is_main:
                log.info("the hosts share no storage here: each stores all checkpoints and models")
            begin(Run(world, folder, stage, resolved, stop), choose)
    except RunError as error:
        code, message, trace = error.code, redacted(str(error)), traceback.format_exc()
        file_log.info(message)
    except Exception as error:
        trace = traceback.format_exc()
        code, message = described(error, resolved.config)
        message, secondary = redacted(message), dist.follows_from_another_rank(error)
        halved = error.halved if isinstance(error, BatchTooLarge) else {}
        file_log.exception("%s", message)
    if run_config.debug:
        say(redacted(trace))
    stop.is_set()  # from now on a signal must not end the process as it does before the loop
    heartbeat.end()
    with suppress(OSError):  # on a full disk the message is only printed
        write_outcome(folder, rank, code, message, secondary=secondary, halved=halved)
    report(folder, code, message, secondary=secondary)
    if code in (EXIT_DONE, EXIT_STOPPED):
        # Only without an error: after one the other ranks may hang in a collective.
        dist.finish()
    return code


def described(error: Exception, config: StageConfig) -> tuple[int, str]:
    """Return the exit code and the message of an unexpected error; one line for an out-of-memory error."""
    if not is_out_of_memory(error):
        return EXIT_FAULT, f"{type(error).__name__}: {error}".rstrip(": ")
    phase, line = heartbeat.current_phase(), f"phase {heartbeat.current_phase()}: {memory_line(error)}"
    at_least = ""  # the flag that cannot be lower
    if isinstance(error, BatchTooLarge):
        phase, line = error.phase, str(error)
        if error.halved and supervisor_name() is not None:
            return EXIT_ENVIRONMENT, line  # the supervisor starts the job again
        at_least = "" if error.halved else error.flag
        line += f", with {dashed(at_least)} 1" if at_least else ""
    lower = [dashed(name) for name in flag_table(type(config)) if name in LOWERED_IN[phase] and name != at_least]
    recompute = [dashed(name) for name in flag_table(type(config)) if name.endswith("gradient_checkpointing")]
    shard = [dashed(name) for name in flags_of_key(type(config), ZERO_STAGE)]
    ways = [
        f"lower {' or '.join(lower)}" if lower else "",
        f"give {' or '.join(recompute)}" if phase == "train" else "",
        f"shard the models with {' or '.join(shard)}",
    ]
    return EXIT_ENVIRONMENT, f"{line}; {', or '.join(filter(None, ways))}"


def begin(run: Run, choose: Choose) -> None:
    """Start the loop unless the folder holds this run and it has finished. choose: see `enter`."""
    config = run.resolved.config
    if dist.on_main(lambda: is_finished(run.folder, config, ranks=run.world.size)):
        return
    resolved, chosen = with_choice(run.stage, run.resolved, choose, run.world.size)
    run = replace(run, resolved=resolved, plan=chosen.plan)
    decided = dist.on_main(lambda: run.stage.resolve_auto(run))
    run = replace(run, resolved=applied(RUN_RULES, run.resolved, decided))
    if run.world.is_main:
        if chosen.line:
            log.info("chosen by the plan: %s", chosen.line)
        on_cpu = run.world.device.type == "cpu"
        for line in [*run.resolved.notes, *idle_flags(run.resolved.config, run.resolved.origins, on_cpu=on_cpu)]:
            log.warning("%s", line)
    run.stage.loop()(run, run.resolved.config)


def report(folder: Path, code: int, message: str, *, secondary: bool) -> None:
    """Print how a run without a supervisor ended: once, the first error of all ranks."""
    if code == EXIT_DONE or is_reported(code, folder) or not is_first_to_fail(folder, secondary=secondary):
        return
    if code == EXIT_STOPPED:
        say(message)
        return
    lines = message.splitlines()
    if code == EXIT_FAULT:
        lines[0] = f"rank {own_rank()} on {socket.gethostname()}: {lines[0]}"
        lines.append(f"the traceback is in {rank_log_file(folder, own_rank())}")
    say(*(f"error: {line}" for line in lines))
