"""The ranks of a job on several hosts, each with an agent: greet, compare, start, watch and end them.

The module imports no torch.
If a host shares no folder with this one, its agent sends the outcomes and heartbeats of its ranks as messages.
"""

import os
import random
import time
from collections.abc import Mapping, Sequence
from dataclasses import asdict, replace
from pathlib import Path
from typing import IO

from pipeline.errors import EXIT_FAULT, EnvironmentFault, StoppedRun, counted, raise_lines, show
from pipeline.heartbeat import replace_text
from pipeline.launching.host_agent import write_end
from pipeline.launching.hosts import address_of, starts_by_host
from pipeline.launching.ranks import POLL_S
from pipeline.launching.remote_host import ENDING_S, Host, Message, passed_on
from pipeline.launching.request import LaunchRequest
from pipeline.processes import Signals
from pipeline.run.layout import lock_file
from pipeline.run.outcome import SUPERVISOR

START_S = 60.0
PING_S = 1.0
MEASURING = "pipeline.run.measure_device"
PORTS = range(20000, 30000)  # below the ports that Linux gives to outgoing connections
PORT_BY_HAND = 29500  # DeepSpeed's default, used if the user starts each host

# Inputs that must be the same on each host: (name of a flag, path, "data" or "model").
Inputs = Sequence[tuple[str, str, str]]


def port_of(request: LaunchRequest) -> int:
    """Return the port of rank 0 of a job on several hosts."""
    return request.master_port or (PORT_BY_HAND if request.launcher == "none" else random.choice(PORTS))


class RemoteRanks:
    """The hosts of a job, from the greeting of their agents to the end of their ranks."""

    def __init__(
        self,
        request: LaunchRequest,
        module: str,
        run_dir: Path,
        environment: Mapping[str, str],
        *,
        signals: Signals,
        inputs: Inputs = (),
        output: IO[bytes] | None = None,
    ) -> None:
        """Connect to the agents of all hosts. Raises EnvironmentFault if one does not answer, or if hosts differ."""
        self._request, self.run_dir, self._signals = request, run_dir, signals
        self._supervisor = environment.get(SUPERVISOR, "")
        self._starts = starts_by_host(request, module, port_of(request))
        self._pinged_s = 0.0
        self._must_stop = self._has_stopped = False
        self.hosts: list[Host] = []
        # With --launcher none, each host has its own supervisor and lock.
        lock = None if request.launcher == "none" else lock_file(run_dir).read_text(encoding="utf-8")
        here = list(self._starts)[request.node_rank] if request.launcher == "none" else ""
        job: Message = {
            "cwd": os.getcwd(),
            "run_dir": str(run_dir),
            "lock": lock,
            "environment": passed_on(environment),
        }
        job |= {"packages": ["pipeline", module.partition(".")[0]], "inputs": list(inputs)}
        try:
            for name, start in self._starts.items():
                if name == here or not here:
                    port, last = start.port if start.first == 0 else 0, int(start.devices[-1])
                    content = {**job, "port": port, "last_gpu": last}
                    ranks = range(start.first, start.first + len(start.devices))
                    self.hosts.append(Host(name, ranks, request, content, output))
            self._greet()
        except BaseException:
            self.close()
            raise

    def _greet(self) -> None:
        end = time.monotonic() + START_S
        waiting, problems = list(self.hosts), list[str]()
        while waiting and time.monotonic() < end and self._signals.first is None:
            time.sleep(POLL_S / 2)
            for host in list(waiting):
                code = host.ended()
                if messages := host.messages():
                    host.greeting = messages[0]
                    problems += [f"{host.name}: {line}" for line in host.greeting.get("problems", ())]
                    waiting.remove(host)
                elif code is not None:
                    problems.append(f"{host.name}: {host.why_no_agent(code)}")
                    waiting.remove(host)
        if self._signals.first is None:
            problems += [f"{host.name}: no answer for {START_S:.0f} s; is the host up?" for host in waiting]
            raise_lines(problems or differences(self.hosts), EnvironmentFault)

    def start(self, module: str = "") -> None:
        """Start the ranks of every host: of the job's module, or of another `module` without flags."""
        for host in self.hosts if self._signals.first is None else ():
            start = replace(self._starts[host.name], address=address_of(self._request, list(self._starts)))
            host.tell({"start": asdict(replace(start, module=module, argv=()) if module else start)})
            host.heard_s = time.monotonic()

    def stop(self) -> None:
        """Request that all ranks stop; the next `poll` sends it to the agents."""
        self._must_stop = True

    def poll(self) -> None:
        """Read the hosts' messages, find lost hosts, and ping."""
        for host in self.hosts:
            for message in host.messages():
                self._take(host, message)
            if host.is_lost():
                self._lose(host)
        stops = self._must_stop and not self._has_stopped
        if stops or time.monotonic() - self._pinged_s > PING_S:
            self._pinged_s, self._has_stopped = time.monotonic(), self._must_stop
            for host in self.hosts:
                host.tell({"stop": stops})  # also the sign that this process is alive

    def silent_code(self) -> int | None:
        """Return the exit code of a rank that failed before it wrote an outcome; None if there is no such rank."""
        return next((host.code for host in self.hosts if host.code), None)

    def have_ended(self) -> bool:
        return all(host.code is not None for host in self.hosts)

    def _take(self, host: Host, message: Message) -> None:
        """Process an agent's message: the end of its ranks, or files of a folder that is not shared."""
        if "ended" in message:
            host.code = message["ended"]
        for name, text in message.get("files", {}).items():
            file = self.run_dir / name
            file.parent.mkdir(parents=True, exist_ok=True)
            replace_text(file, text)

    def _lose(self, host: Host) -> None:
        """Write the outcomes of the ranks of a lost host, since they cannot write them here."""
        code, silent = host.process.poll(), time.monotonic() - host.heard_s
        seen = f"the connection ended with {code}" if code is not None else f"no message for {silent:.0f} s"
        host.code = EXIT_FAULT
        why = f"{host.name} is lost: {seen}; its link or the machine is down; when it is back the same command resumes"
        for rank in host.ranks:
            write_end(self.run_dir, rank, why, host=host.name, supervisor=self._supervisor)

    def close(self) -> None:
        """End the ranks of all hosts, and the connections."""
        for host in self.hosts:
            host.close()
        until_s = time.monotonic() + ENDING_S
        for host in self.hosts:
            host.end(until_s)


def differences(hosts: Sequence[Host]) -> list[str]:
    """Return a line for each difference between a host and the first one, and for each host with too few GPUs."""
    lines, first = [], hosts[0]
    for host in hosts:
        facts, contents = host.greeting["facts"], host.greeting["contents"]
        for name, value in facts["same"].items():
            if value != (expected := first.greeting["facts"]["same"][name]):
                lines.append(f"{host.name}: {name} is {value}, {first.name} has {expected}; install the same on both")
        if facts["gpus"] < facts["chosen"] and any(other.greeting["facts"]["gpus"] for other in hosts):
            lines.append(
                f"{host.name}: GPU {facts['chosen'] - 1} is requested, it has {facts['gpus']}; lower its slots in the "
                "host file, or give --exclude"
            )
        for name, content in contents.items():
            if content != (expected := first.greeting["contents"].get(name)):
                is_missing = content in ("", name.partition(" ")[2])  # a missing model folder counts as a hub id
                what = "is not there, or unreadable" if is_missing else f"is not what {first.name} has"
                lines.append(f"{host.name}: {name}: {what}; copy it from the host that has the right one")
    return lines


def check_hosts(request: LaunchRequest, module: str, run_dir: Path, *, signals: Signals, inputs: Inputs) -> None:
    """Check that all hosts can run the job; print a line for each, and the bandwidth between them.

    Raises:
        EnvironmentFault: a host does not answer or differs, or the hosts' ranks do not reach each other.
    """
    ranks = RemoteRanks(request, module, run_dir, os.environ, signals=signals, inputs=inputs)
    try:
        for host in ranks.hosts if signals.first is None else ():
            same, gpus = host.greeting["facts"]["same"], host.greeting["facts"]["gpus"]
            folder = "shared with the first host" if host.greeting["shared"] else "on a disk of its own"
            words = [counted(gpus, "GPU"), counted(len(host.ranks), "rank")]
            words += [f"{name} {value}" for name, value in same.items()]
            show(f"{host.name}: {', '.join(words)}; {run_dir.name}: {folder}")
        if request.launcher != "none":
            ranks.start(MEASURING)
            while not ranks.have_ended() and not ranks.silent_code() and signals.first is None:
                time.sleep(POLL_S / 2)
                ranks.poll()
        if signals.first is not None:
            raise StoppedRun("stopped while the hosts were checked")
        if ranks.silent_code():
            raise EnvironmentFault(
                "the ranks of the hosts do not reach each other, their output is above: name the network by "
                "NCCL_SOCKET_IFNAME (GLOO_SOCKET_IFNAME without GPUs) and --master-addr, and open its ports"
            )
        show(f"{counted(len(ranks.hosts), 'host')} can run {module}; nothing was started")
    finally:
        ranks.close()
