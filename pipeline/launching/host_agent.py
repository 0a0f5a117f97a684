"""Agent on one host of a job: for host_launcher.py it starts, stops and ends the ranks there, and says how they do.

It reads JSON lines from its standard input and writes such lines; when they cease it ends its ranks, so that none
outlives the job or the link. Where the run's folder is not shared it sends the ranks' beats and outcomes.
"""

import hashlib
import json
import os
import platform
import signal
import socket
import subprocess
import sys
import threading
import time
from contextlib import ExitStack, suppress
from dataclasses import asdict
from importlib import metadata
from pathlib import Path
from typing import Any

from pipeline.configuration.resume_rules import values_by_rule
from pipeline.errors import EXIT_FAULT, RunError
from pipeline.files import model_fingerprint
from pipeline.heartbeat import replace_json
from pipeline.launching.job import stage_flags
from pipeline.launching.machine import check_port, count_present_gpus, runs_on_cpu
from pipeline.launching.rank_watch import RankState, RankWatch
from pipeline.launching.verdict import JobStatus, cause_of_death
from pipeline.processes import free_memory, kill_session, num_oom_kills, send
from pipeline.run.earlier_runs import data_content
from pipeline.run.layout import beat_file, lock_file, outcome_file
from pipeline.run.lock import locked
from pipeline.run.outcome import AGENT, SUPERVISOR, Outcome, check_nobody_left, clear_outcomes, read_outcome

SETTLE_S = 3.0  # after a rank's failure, for the others to write theirs
LAUNCHER_S = 6.0  # for the ranks' launcher to end with the signal that one of them died of
SILENCE_S = 40.0  # of the launcher: this host is cut off, and its ranks end before the launcher gives it up
PING_S = 1.0
POLL_S = 0.2

PROJECT = ("pipeline", "step1_sft", "step2_reward", "step3_ppo", "launch", "rlhf")
PACKAGES = ("torch", "deepspeed", "transformers", "peft", "numpy")

Message = dict[str, Any]


def say(content: Message) -> None:
    """Write a line to the launcher, which may be gone."""
    with suppress(OSError):
        print(json.dumps({"agent": content}), flush=True)


def facts(chosen: int) -> Message:
    """Return what must be the same on all hosts, and `gpus`, of which `chosen` are to be used; imports no torch."""
    code, root = hashlib.sha256(), Path(__file__).resolve().parents[2]
    for package in PROJECT:
        for file in sorted((root / package).rglob("*.py")):
            code.update(str(file.relative_to(root)).encode() + file.read_bytes())
    versions = {name: metadata.version(name) for name in PACKAGES}
    same = {"python": platform.python_version(), **versions, "code of the project": code.hexdigest()[:8]}
    return {"same": same, "gpus": 0 if runs_on_cpu() else count_present_gpus(), "chosen": chosen}


def contents(module: str, words: list[str]) -> dict[str, str]:
    """Return flag -> fingerprint of each local source and start model of a stage; empty: this host has no such path."""
    config, found = stage_flags(module, words)[0].config, dict[str, str]()
    sources = [(name, path, data_content) for name, paths in values_by_rule(config, "data").items() for path in paths]
    models = [(name, path, model_fingerprint) for name, path in values_by_rule(config, "model").items()]
    for name, path, read in [*sources, *models]:
        try:
            found[f"--{name} {path}"] = read(path)
        except (RunError, OSError):
            found[f"--{name} {path}"] = ""
    return found


def write_end(run_dir: Path, rank: int, message: str, *, host: str, supervisor: str) -> None:
    """Write the outcome of a rank that could not write it; one that it has written stays."""
    before = read_outcome(run_dir, rank)
    own = before if before and before.supervisor == supervisor else None
    if own and own.code is not None:
        return
    name, pid = (own.host, own.pid) if own else (host, 0)
    outcome = Outcome(rank, EXIT_FAULT, message, False, pid, name, supervisor, time.time())
    outcome_file(run_dir, rank).parent.mkdir(parents=True, exist_ok=True)
    replace_json(outcome_file(run_dir, rank), asdict(outcome))


class Agent:
    """The ranks of this host, and the link to the launcher."""

    def __init__(self, job: Message) -> None:
        self.job, self.run_dir = job, Path(job["run_dir"])
        self.heard_s, self.stop, self.is_cut_off = time.monotonic(), False, False
        self.start: list[str] = []
        self.sent: dict[str, str] = {}
        self.oom_kills = num_oom_kills()
        self.is_shared = False

    def problems(self, stack: ExitStack) -> list[str]:
        """Enter the folders of the run; return what is wrong with this host, a line for each."""
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
        """Read the launcher's lines until there are no more."""
        for line in sys.stdin:
            self.heard_s = time.monotonic()
            message = json.loads(line)
            self.start = self.start or message.get("start", [])
            self.stop = self.stop or message.get("stop", False)
        self.is_cut_off = True

    def is_alone(self) -> bool:
        return self.is_cut_off or time.monotonic() - self.heard_s > SILENCE_S

    def run(self) -> int:
        """Start the ranks and follow them to their end; return the exit code of their launcher."""
        environment = {**os.environ, AGENT: f"{os.getpid()}@{socket.gethostname()}"}
        command = [sys.executable, "-u", "-m", "deepspeed.launcher.launch", *self.start]
        # The ranks' words are not ours: they go where errors go.
        process = subprocess.Popen(
            command, env=environment, start_new_session=True, stdin=subprocess.DEVNULL, stdout=sys.stderr
        )
        watch = RankWatch(self.run_dir, environment.get(SUPERVISOR, ""), session=process.pid)
        signalled, pinged = set[int](), 0.0
        try:
            while not self.is_alone():
                time.sleep(POLL_S)
                ended = process.poll() is not None
                memory = free_memory()
                watch.poll()
                for state in watch.ranks.values():
                    if state.died_s is not None and state.outcome.code is None:
                        self.tell_death(state, process, memory)
                        pinged = 0.0
                for state in watch.running_locally() if self.stop else ():
                    if state.outcome.pid not in signalled:
                        signalled.add(state.outcome.pid)
                        send(state.outcome.pid, signal.SIGTERM)
                if time.monotonic() - pinged > PING_S or ended:
                    pinged = time.monotonic()
                    say({"files": {} if self.is_shared else self.changed_files(watch)})
                if ended and not watch.running_locally():
                    break
        finally:
            kill_session(process.pid)
        return process.wait()

    def tell_death(self, state: RankState, process: "subprocess.Popen[bytes]", memory: str) -> None:
        """Write how a rank ended that was killed; its launcher tells the signal."""
        with suppress(subprocess.TimeoutExpired):
            process.wait(LAUNCHER_S)
        kills = num_oom_kills() - self.oom_kills
        why = cause_of_death(state, JobStatus(self.run_dir, process.poll(), False, memory, kills))
        outcome = state.outcome
        write_end(self.run_dir, outcome.rank, why, host=outcome.host, supervisor=outcome.supervisor)

    def changed_files(self, watch: RankWatch) -> dict[str, str]:
        """Return the outcomes and beats of the ranks here that have changed since the last call: path -> text."""
        changed = {}
        for rank in watch.ranks:
            for file in (outcome_file(self.run_dir, rank), beat_file(self.run_dir, rank)):
                with suppress(OSError):
                    name, text = str(file.relative_to(self.run_dir)), file.read_text(encoding="utf-8")
                    if self.sent.get(name) != text:
                        changed[name] = self.sent[name] = text
        return changed


def main() -> int:
    """Do what the launcher says; return the exit code of the ranks' launcher."""
    agent = Agent(json.loads(sys.stdin.readline()))
    for number in (signal.SIGINT, signal.SIGHUP):
        signal.signal(number, signal.SIG_IGN)  # the launcher's end is noticed by the end of its lines
    with ExitStack() as stack:
        problems = agent.problems(stack)
        found = contents(*agent.job["check"]) if agent.job["check"] and not problems else {}
        said = {"problems": problems, "shared": agent.is_shared, "contents": found}
        say({**said, "facts": facts(agent.job["last_gpu"] + 1)})
        if problems:
            return EXIT_FAULT
        threading.Thread(target=agent.listen, daemon=True).start()
        while not agent.start and not agent.is_alone():
            time.sleep(POLL_S / 4)
        code = agent.run() if agent.start else EXIT_FAULT
        say({"ended": code})
    return code


if __name__ == "__main__":
    sys.exit(main())
