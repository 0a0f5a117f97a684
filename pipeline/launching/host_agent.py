"""The agent on one host of a job: it starts, stops and ends the ranks there for remote_ranks.py, and reports on them.

It reads JSON lines from its standard input and writes JSON lines. When the input ends, it ends its ranks, so that none
outlives the job or the connection. If the run's folder is not shared, the agent sends the ranks' heartbeats and
outcomes.
"""

import hashlib
import json
import os
import platform
import signal
import socket
import sys
import threading
import time
from collections.abc import Sequence
from contextlib import ExitStack, suppress
from dataclasses import asdict
from importlib import metadata
from pathlib import Path
from typing import Any

from pipeline.errors import EXIT_DONE, EXIT_FAULT, RunError, dashed
from pipeline.files import model_fingerprint
from pipeline.heartbeat import replace_json
from pipeline.launching.machine import check_port, count_present_gpus, runs_on_cpu
from pipeline.launching.rank_watch import RankState, RankWatch
from pipeline.launching.ranks import POLL_S, RankStart, kill_ranks, start_ranks
from pipeline.launching.verdict import JobStatus, cause_of_death
from pipeline.processes import free_memory, num_oom_kills
from pipeline.run.earlier_runs import data_content
from pipeline.run.layout import beat_file, lock_file, outcome_file
from pipeline.run.lock import locked
from pipeline.run.outcome import AGENT, SUPERVISOR, Outcome, check_nobody_left, clear_outcomes, read_outcome

SILENCE_S = 40.0  # seconds without the supervisor, after which the ranks end; shorter than the supervisor's own limit
PING_S = 1.0

# Libraries whose versions must be the same on all hosts.
LIBRARIES = ("torch", "deepspeed", "transformers", "peft", "numpy")

Message = dict[str, Any]


def facts(chosen: int, packages: Sequence[str]) -> Message:
    """Return facts that must be the same on all hosts, the number of GPUs, and `chosen`, the GPUs to use."""
    code, root = hashlib.sha256(), Path(__file__).resolve().parents[2]
    for package in packages:
        for file in sorted((root / package).rglob("*.py")):
            code.update(str(file.relative_to(root)).encode() + file.read_bytes())
    versions = {name: metadata.version(name) for name in LIBRARIES}
    same = {"python": platform.python_version(), **versions, "code of the project": code.hexdigest()[:8]}
    return {"same": same, "gpus": 0 if runs_on_cpu() else count_present_gpus(), "chosen": chosen}


def contents(inputs: Sequence[Sequence[str]]) -> dict[str, str]:
    """Return flag -> fingerprint of each local source and start model; an empty one: this host has no such path."""
    result: dict[str, str] = {}
    for name, path, kind in inputs:
        try:
            result[f"{dashed(name)} {path}"] = (data_content if kind == "data" else model_fingerprint)(path)
        except (RunError, OSError):
            result[f"{dashed(name)} {path}"] = ""
    return result


def write_end(run_dir: Path, rank: int, message: str, *, host: str, supervisor: str) -> None:
    """Write the outcome of a rank that could not write it; an outcome that the rank wrote itself stays."""
    before = read_outcome(run_dir, rank)
    said = before if before and before.supervisor == supervisor else None
    if said and said.code is not None:
        return
    name, pid = (said.host, said.pid) if said else (host, 0)
    outcome = Outcome(rank, EXIT_FAULT, message, False, pid, name, supervisor, time.time())
    outcome_file(run_dir, rank).parent.mkdir(parents=True, exist_ok=True)
    replace_json(outcome_file(run_dir, rank), asdict(outcome))


class Agent:
    """The ranks of this host, and the connection to the supervisor."""

    def __init__(self, job: Message) -> None:
        self.job, self.run_dir = job, Path(job["run_dir"])
        self.heard_s, self.must_stop, self.is_cut_off = time.monotonic(), False, False
        self.start: Message = {}
        self.sent: dict[str, str] = {}
        self.oom_kills = num_oom_kills()
        self.is_shared = False

    def say(self, content: Message) -> None:
        """Write a line to the supervisor; if nobody reads it, note that the connection is cut."""
        try:
            print(json.dumps({"agent": content}), flush=True)
        except OSError:
            self.is_cut_off = True

    def problems(self, stack: ExitStack) -> list[str]:
        """Enter the folders of the run; return a line for each problem of this host."""
        try:
            os.chdir(self.job["cwd"])
        except OSError as error:
            return [f"{self.job['cwd']}: {error.strerror}; the working folder must be there on each host"]
        os.environ.update(self.job["environment"])
        self.is_shared = self.job["lock"] is None
        with suppress(OSError):
            self.is_shared |= lock_file(self.run_dir).read_text(encoding="utf-8") == self.job["lock"] != ""
        try:
            if self.job["port"]:
                check_port(self.job["port"])
            if not self.is_shared:
                stack.enter_context(locked(self.run_dir))
                check_nobody_left(self.run_dir)
                clear_outcomes(self.run_dir)
        except RunError as error:
            return str(error).splitlines()
        return []

    def listen(self) -> None:
        """Read the supervisor's lines until there are no more."""
        for line in sys.stdin:
            self.heard_s = time.monotonic()
            message = json.loads(line)
            self.start = self.start or message.get("start", {})
            self.must_stop = self.must_stop or message.get("stop", False)
        self.is_cut_off = True

    def is_alone(self) -> bool:
        return self.is_cut_off or time.monotonic() - self.heard_s > SILENCE_S

    def run(self) -> int:
        """Start the ranks and watch them to their end; return 0, or the exit code of a rank that wrote no outcome."""
        environment = {**os.environ, AGENT: f"{os.getpid()}@{socket.gethostname()}"}
        # Standard output is for messages to the supervisor: the ranks' output goes to standard error.
        started = start_ranks(RankStart(**self.start), environment, sys.stderr)
        watch = RankWatch(self.run_dir, environment.get(SUPERVISOR, ""), started)
        pinged_s = 0.0
        try:
            while not self.is_alone():
                time.sleep(POLL_S)
                has_ended = all(process.poll() is not None for process in started.values())
                memory = free_memory()
                watch.poll()
                for state in watch.ranks.values():
                    if state.died_s is not None and state.outcome.code is None:
                        self.tell_death(state, memory)
                        pinged_s = 0.0
                if self.must_stop:
                    watch.stop_ranks()
                if time.monotonic() - pinged_s > PING_S or has_ended or watch.silent_code():
                    pinged_s = time.monotonic()
                    self.say({"files": {} if self.is_shared else self.changed_files(watch)})
                if has_ended or watch.silent_code():
                    break
        finally:
            kill_ranks(started)
        return watch.silent_code() or 0

    def tell_death(self, state: RankState, memory: str) -> None:
        """Write the outcome of a rank that was killed."""
        kills = num_oom_kills() - self.oom_kills
        why = cause_of_death(state, JobStatus(self.run_dir, None, False, memory, kills))
        outcome = state.outcome
        write_end(self.run_dir, outcome.rank, why, host=outcome.host, supervisor=outcome.supervisor)

    def changed_files(self, watch: RankWatch) -> dict[str, str]:
        """Return the files of outcomes and heartbeats that have changed since the last call: path -> text."""
        changed = {}
        for rank in watch.ranks:
            for file in (outcome_file(self.run_dir, rank), beat_file(self.run_dir, rank)):
                with suppress(OSError):
                    name, text = str(file.relative_to(self.run_dir)), file.read_text(encoding="utf-8")
                    if self.sent.get(name) != text:
                        changed[name] = self.sent[name] = text
        return changed


def main() -> int:
    """Run the supervisor's job, the first line of standard input; return the exit code."""
    agent = Agent(json.loads(sys.stdin.readline()))
    for number in (signal.SIGINT, signal.SIGHUP):
        signal.signal(number, signal.SIG_IGN)  # the end of the connection tells the agent that the supervisor ended
    with ExitStack() as stack:
        problems = agent.problems(stack)
        fingerprints = {} if problems else contents(agent.job["inputs"])
        greeting = {"problems": problems, "shared": agent.is_shared, "contents": fingerprints}
        agent.say({**greeting, "facts": facts(agent.job["last_gpu"] + 1, agent.job["packages"])})
        if problems:
            return EXIT_FAULT
        threading.Thread(target=agent.listen, daemon=True).start()
        while not agent.start and not agent.is_alone():
            time.sleep(POLL_S / 4)
        if agent.start:
            agent.say({"ended": agent.run()})
    return EXIT_DONE


if __name__ == "__main__":
    sys.exit(main())
