"""One supervised job: a launcher in a session of its own, whose ranks are watched, stopped, ended and judged.

The state of the ranks is read by rank_watch.py; verdict.py makes the exit code of it.
"""

import importlib
import json
import os
import shlex
import shutil
import signal
import socket
import subprocess
import time
from collections.abc import Mapping, Sequence
from contextlib import nullcontext, suppress
from functools import partial
from pathlib import Path
from typing import IO, Any

from pipeline import errors
from pipeline.configuration.flags import Resolved, flag_words
from pipeline.configuration.run_flags import RESUME, TRIED, RunConfig
from pipeline.console import say
from pipeline.data.cache import cache_folder
from pipeline.launching.dry_run import dry_run_stage
from pipeline.launching.launcher import PARENT, POLL_S, tuned_flags
from pipeline.launching.machine import (
    check_first_host,
    check_local_port,
    is_on_one_machine,
    launcher_values,
    ranks_by_host,
)
from pipeline.launching.plan import without_flag
from pipeline.launching.rank_watch import RankWatch
from pipeline.launching.verdict import JobStatus, Verdict, hang_verdict, judge
from pipeline.out_of_memory import HALVED, Halved, batches_in_words, halved_as_text
from pipeline.processes import Signals, end_with_parent, free_memory, kill_session, num_oom_kills, send
from pipeline.run.earlier_runs import automatic_words, write_choice
from pipeline.run.entry import read_flags
from pipeline.run.evaluations import metrics_lines
from pipeline.run.layout import automatic_file, run_folder
from pipeline.run.lock import locked
from pipeline.run.outcome import RUN_DIR, SUPERVISOR, check_nobody_left, clear_outcomes

# By name, since nothing in pipeline/ imports a stage: module -> module and name of its configuration class, section.
STAGES = {
    "step1_sft.main": ("step1_sft.config", "SFTConfig", "sft"),
    "step2_reward.main": ("step2_reward.config", "RewardConfig", "reward"),
    "step3_ppo.main": ("step3_ppo.config", "PPOConfig", "ppo"),
}
HOST_LAUNCHER, MEASURING = "pipeline.launching.host_launcher", "pipeline.run.measure_device"
MEMORY_WORDS = "out of memory"
TRIAL_STEPS = 3  # that a micro-batch must have memory for
RANKS_PER_POLL = 64  # with more ranks the files are read less often
SETTLE_S = 2.0  # after a rank's failure, for the others to write theirs
AGENTS_SETTLE_S = 10.0  # for those of other hosts, of which an agent tells
LAUNCHER_S = 6.0  # for the launcher to end with the signal that a rank died of
ENDING_S = 15.0  # how long a rank may outlive one that has stopped: they stop together, after the save


def run_job(module: str, words: list[str], command: list[str], signals: Signals) -> int:
    """Run `command`, which starts the stage `module` with `words`; print how it ended; return the exit code.

    Raises:
        InputError: wrong flags or hosts. EnvironmentFault: the folder is in use, not writable, or the port is taken.
    """
    # SIGTERM when the `rlhf train` that started this process dies; one started by hand may outlive its shell.
    if os.environ.get(PARENT) == str(os.getppid()):
        end_with_parent(os.getppid(), signal.SIGTERM)
    tuning = launcher_values(command)["--autotuning"]
    # The file of a search holds lists, of which a stage never hears.
    resolved, section = stage_flags(module, without_flag(words, "deepspeed_config") if tuning else words)
    slots = None if resolved.config.run.target else ranks_by_host(command)
    if resolved.config.run.starts_nothing:
        dry_run_stage(resolved, section, slots=slots)
        return errors.EXIT_DONE
    run_dir = run_folder(resolved.config.run, section)
    if "--check" in command:
        if is_on_one_machine(command):
            own = [word for word in command[: command.index("--module")] if word != "--check"]
            return subprocess.call([*own, "--module", MEASURING])
        with locked(run_dir):
            return subprocess.call(command, env={**os.environ, RUN_DIR: str(run_dir.resolve())})
    check_first_host(command)
    again, variables = list[str](), dict[str, str]()
    with locked(run_dir) if is_first_host(command) else nullcontext():
        if searches := bool(tuning or resolved.config.run.auto_fit or resolved.config.run.auto_batch):
            command = [*command, *chosen_words(resolved, section, command, signals)]
        if tuning == "tune":
            return errors.EXIT_DONE
        if tuning:
            del command[(place := command.index("--autotuning")) : place + 2]
        while True:
            check_nobody_left(run_dir)
            if is_first_host(command):
                clear_outcomes(run_dir)
            # Ranks that were ended just now, by a search or before another start, may still hold it.
            check_local_port(command, patience_s=ENDING_S if variables or searches else 0.0)
            job = Job(run_dir, [*command, *again], resolved.config.run.rank_timeout_s, variables, signals=signals)
            try:
                verdict = job.supervise()
            finally:
                job.kill()
            if not verdict.halved:
                break
            # What is saved is of this run: it cleared the folder, if it was to, before its first step.
            resumes = any(run_dir.glob("checkpoints/*/manifest.json"))
            again, variables = list(RESUME) if resumes else [], {HALVED: halved_as_text(verdict.halved)}
            start = "from the last checkpoint" if resumes else "from the first step"
            cause, batches = verdict.lines[0].removeprefix("error: "), batches_in_words(verdict.halved)
            say(f"{cause}; starting again {start} with {batches}")
    say(*verdict.lines)
    return verdict.code


def chosen_words(resolved: Resolved, section: str, command: list[str], signals: Signals) -> list[str]:
    """Return the words that --auto_fit, --auto_batch and --autotuning add to a command, and write them as a preset.

    Raises:
        InputError, EnvironmentFault, StoppedRun: see `planning.automatic.chosen_flags` and `tuned_flags`.
    """
    run: RunConfig = resolved.config.run
    run_dir = run_folder(run, section)
    file = automatic_file(run_dir)
    tuning = launcher_values(command)["--autotuning"]
    if (words := automatic_words(resolved, run_dir, tuned=tuning == "run")) is not None:
        say(f"as chosen before ({file}): {shlex.join(words) or 'nothing that no flag of this command replaces'}")
        return words
    if tuning:
        if section != "sft" or not is_on_one_machine(command) or run.auto_fit or run.auto_batch:
            raise errors.InputError("--autotuning: for stage 1 on one machine, and without --auto_fit and --auto_batch")
        flags = tuned_flags(command, signals, run_dir, resolved)
    else:
        # By name: it plans models, which are above this package.
        automatic = importlib.import_module("pipeline.planning.automatic")
        cache = cache_folder(resolved.config.data.data_output_path or None)
        tries = partial(try_batch, command, signals=signals, folder=run_dir / "auto_batch")
        flags = automatic.chosen_flags(resolved, section, command, tries, cache=cache)
    file.unlink(missing_ok=True)  # of an earlier run, which nothing is to resume with
    if flags:
        write_choice(file, resolved, flags)
        say(f"written to {file}, a file for --preset or --config")
    return flag_words(flags)


def stage_flags(module: str, words: list[str]) -> tuple[Resolved, str]:
    """Return (checked configuration, section) of a stage. Raises InputError for wrong flags, or any other module."""
    if module not in STAGES:
        raise errors.InputError(f"{module}: not a stage; wanted one of {', '.join(STAGES)}")
    config_module, class_name, section = STAGES[module]
    config_class = getattr(importlib.import_module(config_module), class_name)
    return read_flags(config_class, words, section, prog=module), section


def is_first_host(command: Sequence[str]) -> bool:
    """Return True unless another host is the first of several that are started by hand (--node_rank)."""
    return launcher_values(command)["--node_rank"] in ("", "0")


class Job:
    """A launcher that runs in a session of its own, and the state of its ranks."""

    def __init__(
        self,
        run_dir: Path,
        command: Sequence[str],
        rank_timeout_s: float,
        variables: Mapping[str, str],
        *,
        signals: Signals,
        output: IO[bytes] | None = None,
    ) -> None:
        name = f"{os.getpid()}@{socket.gethostname()}"
        # torch's warnings in C++ are about connections to a rank that has ended, with a page of addresses each.
        environment = {"TORCH_CPP_LOG_LEVEL": "ERROR", **os.environ, **variables, SUPERVISOR: name}
        environment[RUN_DIR] = str(run_dir.resolve())
        self._oom_kills = num_oom_kills()
        self._process = subprocess.Popen(
            command, start_new_session=True, env=environment, stdin=subprocess.DEVNULL, stdout=output, stderr=output
        )
        self._watch = RankWatch(run_dir, name, session=self._process.pid)
        self._on_one_machine = is_on_one_machine(command)
        self._has_agents = HOST_LAUNCHER in command
        self._signals = signals
        self._timeout_s = rank_timeout_s
        self._signalled: set[int] = set()  # pids that got SIGTERM; 0: the user was told of it
        self._memory = ""
        self._ended_first: float | None = None

    @property
    def is_asked_to_stop(self) -> bool:
        """True once this process got a signal that ends the job."""
        return self._signals.first is not None

    def supervise(self) -> Verdict:
        """Watch until the job has ended or must be ended; processes may be left."""
        while True:
            self._watch.poll()
            if not self._watch.has_failed():
                self._memory = free_memory()  # afterwards it is free again
            if verdict := self.ending():
                return verdict
            time.sleep(max(POLL_S, POLL_S * len(self._watch.ranks) / RANKS_PER_POLL))

    def ending(self) -> Verdict | None:
        """Return the verdict if the job is to end now; forwards a stop request."""
        if self._signals.second is not None:
            return Verdict(128 + self._signals.second, ["second signal: killed all processes of this step"])
        if self.is_asked_to_stop and not self.forward_stop():
            return self.verdict(None)
        if self._watch.has_failed():
            return self.after_failure()
        if hung := self._watch.hung(self._timeout_s):
            return hang_verdict(hung, self.status(None))
        if self._process.poll() is not None and not self._watch.running_locally():
            self._watch.poll()
            return self.verdict(self._process.returncode)
        return self.verdict(None) if self.is_straggling() else None

    def forward_stop(self) -> bool:
        """Send SIGTERM to each rank of this machine, once; False if no rank has started yet."""
        if not self._watch.ranks:
            return False
        running = self._watch.running_locally()
        hosts = ", ".join(sorted({s.outcome.host for s in self._watch.ranks.values() if s.is_running}))
        if (running or self._has_agents) and not self._signalled:
            self._signalled.add(0)
            say("stopping, with a checkpoint where training has begun; a second signal kills at once")
        elif not self._signalled and hosts:
            self._signalled.add(0)
            say(f"the ranks run on {hosts}: send SIGTERM to one of them there; a second signal here kills")
        if self._has_agents:  # which signal the ranks of all hosts
            self._process.send_signal(signal.SIGUSR1)
            return True
        for state in running:
            if state.outcome.pid not in self._signalled:
                self._signalled.add(state.outcome.pid)
                send(state.outcome.pid, signal.SIGTERM)
        return True

    def after_failure(self) -> Verdict:
        """Let the other ranks write their outcomes, end them, and wait for the launcher to tell a rank's signal."""
        end = time.monotonic() + (AGENTS_SETTLE_S if self._has_agents else SETTLE_S)
        while self.may_say_more() and time.monotonic() < end:
            time.sleep(POLL_S / 2)
            self._watch.poll()
        for state in self._watch.running_locally():
            send(state.outcome.pid, signal.SIGKILL)
        died_locally = any(state.died_s is not None for state in self._watch.ranks.values())
        if died_locally:
            with suppress(subprocess.TimeoutExpired):
                self._process.wait(LAUNCHER_S)
        return self.verdict(self._process.poll() if died_locally else None)

    def may_say_more(self) -> bool:
        """Return True while a rank here runs on, or only errors are known that follow from a rank of another host."""
        failed = [state for state in self._watch.ranks.values() if state.outcome.has_failed]
        follows = all(state.outcome.secondary for state in failed)
        return bool(self._watch.running_locally()) or (self._has_agents and follows)

    def is_straggling(self) -> bool:
        """Return True if some ranks stopped long ago and others wait for them in a collective, deaf to signals."""
        codes = {state.outcome.code for state in self._watch.ranks.values()}
        if errors.EXIT_STOPPED not in codes or not self._watch.running_locally():
            return False
        self._ended_first = self._ended_first or time.monotonic()
        return time.monotonic() - self._ended_first > ENDING_S

    def verdict(self, launcher_code: int | None) -> Verdict:
        return judge(list(self._watch.ranks.values()), self.status(launcher_code))

    def status(self, launcher_code: int | None) -> JobStatus:
        """Return the state of the job apart from its ranks."""
        return JobStatus(
            self._watch.run_dir,
            launcher_code,
            asked_to_stop=self.is_asked_to_stop,
            memory=self._memory,
            oom_kills=num_oom_kills() - self._oom_kills,
        )

    def kill(self) -> None:
        """End all processes of this machine that the job started; on others, let the launcher do it."""
        if self._process.poll() is None and not self._on_one_machine:
            self._process.terminate()
            with suppress(subprocess.TimeoutExpired):
                self._process.wait(LAUNCHER_S)
        for state in self._watch.running_locally():
            send(state.outcome.pid, signal.SIGKILL)  # ssh starts ranks in another session
        kill_session(self._process.pid)
        self._process.wait()


def training_lines(run_dir: Path) -> list[dict[str, Any]]:
    """Return the metrics of a run's optimizer steps so far."""
    lines = [json.loads(line) for line in metrics_lines(run_dir) if line.endswith("}")]
    return [line for line in lines if "step_s" in line]


class Trial(Job):
    """A job that has ended well after a few steps."""

    def ending(self) -> Verdict | None:
        """Return the verdict if the job is to end now."""
        is_done = len(training_lines(self._watch.run_dir)) >= TRIAL_STEPS
        return Verdict(errors.EXIT_DONE, []) if is_done else super().ending()


def try_batch(
    command: list[str], words: list[str], resolved: Resolved, flags: dict[str, Any], *, signals: Signals, folder: Path
) -> bool:
    """Run three steps of a stage with other `words` and `flags`, in a folder that is deleted; tell if it had memory.

    Where another phase lacks it, whatever the micro-batch, it is started again with fewer rows there, as the run would.

    Raises:
        StoppedRun: on a signal. RunError: it ended for another reason than want of memory.
    """
    size, run_dir = flags["per_device_train_batch_size"], folder / "run"
    halved: Halved = {}
    words = [*command, *words, *flag_words({**TRIED, "run_dir": run_dir, "output_dir": folder / "model", **flags})]
    while True:
        shutil.rmtree(folder, ignore_errors=True)
        run_dir.mkdir(parents=True)
        check_local_port(command, patience_s=ENDING_S)
        variables, timeout_s = {HALVED: halved_as_text(halved)}, resolved.config.run.rank_timeout_s
        with (folder / "output.txt").open("wb") as output:
            job = Trial(run_dir, words, timeout_s, variables, signals=signals, output=output)
            try:
                ended = job.supervise()
            finally:
                job.kill()
        halved = ended.halved
        if not halved or "train" in halved:
            break
    lines, text = training_lines(run_dir), "\n".join(line.removeprefix("error: ") for line in ended.lines)
    if ended.code == errors.EXIT_STOPPED or job.is_asked_to_stop:
        shutil.rmtree(folder, ignore_errors=True)
        raise errors.StoppedRun("stopped while micro-batches were tried; the same command starts again")
    lacks = bool(halved) or MEMORY_WORDS in text or any(line["micro_batch_size"] < size for line in lines)
    if not lacks and ended.code != errors.EXIT_DONE:
        raise errors.RunError(f"--auto_batch: a micro-batch of {size}: {text}; its output: {folder / 'output.txt'}")
    peak = f", {lines[-1]['gpu_memory_gib']:.1f} GiB" if lines and "gpu_memory_gib" in lines[-1] else ""
    seconds = f", {min(line['step_s'] for line in lines):.3g} s a step" if lines else ""
    say(f"auto_batch: micro-batch {size}: {'out of memory' if lacks else f'fits{peak}{seconds}'}")
    shutil.rmtree(folder, ignore_errors=True)
    return not lacks
