"""Launcher of a job on several hosts: over ssh or srun it starts an agent on each host (host_agent.py).

`python -m pipeline.launching.host_launcher FLAGS --module MODULE WORD...` takes the flags of DeepSpeed's launcher. With
--no_ssh it starts the ranks of one host, and its like is started on each of the others by hand. Imports no torch.
"""

import argparse
import base64
import json
import os
import queue
import random
import shlex
import shutil
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

from pipeline.console import outlive_console
from pipeline.errors import EXIT_FAULT, EnvironmentFault, InputError, RunError, counted, print_error
from pipeline.launching.host_agent import SETTLE_S, Message, write_end
from pipeline.launching.machine import hosts_of_launcher
from pipeline.run.layout import lock_file
from pipeline.run.outcome import RUN_DIR, SUPERVISOR

START_S = 60.0
PING_S = 1.0
POLL_S = 0.1
SILENCE_S = 60.0  # of a host, which is then lost; its agent has ended its ranks before
ENDING_S = 5.0
PORTS = range(20000, 30000)  # below those that Linux gives to outgoing connections
# Variables that go to all hosts, and DeepSpeed's file with others.
PASSED_ON = ("NCCL", "PYTHON", "GLOO", "UCX", "DS_", "HF_", "TRANSFORMERS_", "OMP_", "TORCH", "TOKENIZERS_", "WANDB_")
ENVIRONMENT_FILE = ".deepspeed_env"


class Host:
    """A host of the job: the process that leads to its agent, the numbers of its ranks and what it said last."""

    def __init__(self, name: str, ranks: Sequence[int], command: Sequence[str]) -> None:
        self.name, self.ranks = name, ranks
        self.said: dict[str, Any] = {}  # its first message
        self.code: int | None = None  # of its ranks' launcher, once it has ended
        self.heard_s = time.monotonic()
        self._inbox: queue.SimpleQueue[Message] = queue.SimpleQueue()
        if not shutil.which(command[0]):
            raise EnvironmentFault(f"{name}: needs {command[0]}, which is not installed on this machine")
        self.process = subprocess.Popen(
            command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, start_new_session=True
        )
        threading.Thread(target=self._read, daemon=True).start()

    def _read(self) -> None:
        assert self.process.stdout
        for line in self.process.stdout:
            self.heard_s = time.monotonic()
            try:
                self._inbox.put(json.loads(line)["agent"])
            except (ValueError, KeyError, TypeError):
                print(f"{self.name}: {line}", end="", flush=True)  # a login shell's greeting

    def messages(self) -> list[Message]:
        return [self._inbox.get() for _ in range(self._inbox.qsize())]

    def tell(self, content: Message) -> None:
        """Send a message; a host that is gone is noticed by `messages` and the end of its process."""
        assert self.process.stdin
        with suppress(OSError):
            self.process.stdin.write(json.dumps(content) + "\n")
            self.process.stdin.flush()

    def close(self) -> None:
        """Have the agent end its ranks, which it does when nobody writes to it any more."""
        with suppress(OSError):
            assert self.process.stdin
            self.process.stdin.close()

    def is_lost(self) -> bool:
        silent = time.monotonic() - self.heard_s > SILENCE_S
        return self.code is None and (silent or self.process.poll() is not None)


class Launcher:
    """The hosts of a job, from the first greeting to the end of their ranks."""

    def __init__(self, words: Sequence[str]) -> None:
        place = words.index("--module")
        self.flags, self.passed = parsed(words[:place])
        self.command = list(words[place:])
        self.checked = [self.command[1], self.command[2:]] if self.flags.check else []
        self.gpus = hosts_of_launcher(words)
        self.run_dir = Path(os.environ[RUN_DIR])
        self.hosts: list[Host] = []
        self.stop = self.end = False
        signal.signal(signal.SIGUSR1, lambda *_: setattr(self, "stop", True))
        for number in (signal.SIGTERM, signal.SIGINT):
            signal.signal(number, lambda *_: setattr(self, "end", True))

    def run(self) -> int:
        """Run the job to its end; return the exit code of the first host that failed, or 0. Raises EnvironmentFault."""
        names, first = list(self.gpus), 0
        alone = names[self.flags.node_rank] if self.flags.no_ssh else ""
        try:
            for name, numbers in self.gpus.items():
                if name == alone or not alone:
                    ranks = range(first, first + len(numbers))
                    self.hosts.append(Host(name, ranks, agent_command(name, self.flags)))
                first += len(numbers)
            self.greet()
            if self.flags.check:
                return self.show()
            self.start()
            return self.watch()
        finally:
            self.close()

    def greet(self) -> None:
        """Wait until every host has answered. Raises EnvironmentFault with a line for each that has not."""
        port, lock = self.flags.master_port, None  # without ssh each host has a supervisor of its own
        if not self.flags.no_ssh:
            lock = lock_file(self.run_dir).read_text(encoding="utf-8")
        for host in self.hosts:
            job = {"cwd": os.getcwd(), "run_dir": str(self.run_dir), "lock": lock, "environment": passed_on()}
            own = {"port": port if host.ranks[0] == 0 else 0, "last_gpu": self.gpus[host.name][-1]}
            host.tell({**job, **own, "check": self.checked})
        end = time.monotonic() + START_S
        waiting, problems = list(self.hosts), list[str]()
        while waiting and time.monotonic() < end and not self.end:
            time.sleep(POLL_S)
            for host in list(waiting):
                if messages := host.messages():
                    host.said = messages[0]
                    problems += [f"{host.name}: {line}" for line in host.said.get("problems", ())]
                    waiting.remove(host)
                elif (code := host.process.poll()) is not None:
                    problems.append(f"{host.name}: {why_no_agent(self.flags, host.name, code)}")
                    waiting.remove(host)
        problems += [f"{host.name}: no answer for {START_S:.0f} s; is it up?" for host in waiting if not self.end]
        if problems := problems or differences(self.hosts):
            raise EnvironmentFault("\n".join(problems))

    def show(self) -> int:
        """Print a line for each host, all of which could run the job, and the bandwidth between them.

        Raises:
            EnvironmentFault: the hosts' ranks do not reach each other.
        """
        for host in self.hosts:
            same, gpus = host.said["facts"]["same"], host.said["facts"]["gpus"]
            folder = "shared with the first host" if host.said["shared"] else "on a disk of its own"
            words = [counted(gpus, "GPU"), counted(len(host.ranks), "rank")]
            words += [f"{name} {value}" for name, value in same.items()]
            print(f"{host.name}: {', '.join(words)}; {self.run_dir.name}: {folder}", flush=True)
        module, self.command = self.command[1], ["--module", "pipeline.run.measure_device"]
        if not self.flags.no_ssh:
            self.start()
            if self.watch() and not self.end:
                raise EnvironmentFault(
                    "the ranks of the hosts do not reach each other, their words are above: name the network by "
                    "NCCL_SOCKET_IFNAME (GLOO_SOCKET_IFNAME without GPUs) and --master-addr, and open its ports"
                )
        print(f"{counted(len(self.hosts), 'host')} can run {module}; nothing was started", flush=True)
        return 0

    def start(self) -> None:
        """Tell every host to start its ranks."""
        encoded = base64.urlsafe_b64encode(json.dumps(self.gpus).encode()).decode()
        names = list(self.gpus)
        address = self.flags.master_addr or address_of(names)
        for host in self.hosts:
            words = [f"--world_info={encoded}", f"--node_rank={names.index(host.name)}", f"--master_addr={address}"]
            words += [f"--master_port={self.flags.master_port}", "--log_level=critical", *self.passed]
            host.tell({"start": [*words, *self.command], "ranks": len(host.ranks)})

    def watch(self) -> int:
        """Follow the hosts until all have ended, or a while after one has failed; return the exit code."""
        pinged, failed, told = 0.0, 0.0, False
        while not self.end:
            time.sleep(POLL_S)
            for host in self.hosts:
                for message in host.messages():
                    self.take(host, message)
                if host.is_lost():
                    self.lose(host)
            codes = [host.code for host in self.hosts]
            if any(codes):
                failed = failed or time.monotonic()
            if None not in codes or (failed and time.monotonic() - failed > SETTLE_S):
                break
            stop = self.stop  # once: a signal that came between two looks would be taken as told
            if time.monotonic() - pinged > PING_S or stop > told:
                pinged = time.monotonic()
                for host in self.hosts:
                    host.tell({"stop": stop and not told})
                told = stop
        return next((host.code for host in self.hosts if host.code), 0)

    def take(self, host: Host, message: Message) -> None:
        """Take in what an agent says: that its ranks have ended, or a file of a folder that is not shared."""
        if "ended" in message:
            host.code = message["ended"]
        for name, text in message.get("files", {}).items():
            file = self.run_dir / name
            file.parent.mkdir(parents=True, exist_ok=True)
            beside = file.with_name(f".{file.name}.writing")
            beside.write_text(text, encoding="utf-8")
            beside.replace(file)

    def lose(self, host: Host) -> None:
        """Write for the ranks of a host that is gone how they ended, since they cannot."""
        code, silent = host.process.poll(), time.monotonic() - host.heard_s
        seen = f"the connection ended with {code}" if code is not None else f"no word from it for {silent:.0f} s"
        host.code = EXIT_FAULT
        why = f"{host.name} is lost: {seen}; its link or the machine is down; when it is back the same command resumes"
        for rank in host.ranks:
            write_end(self.run_dir, rank, why, host=host.name, supervisor=os.environ.get(SUPERVISOR, ""))

    def close(self) -> None:
        """End the ranks of all hosts, and the connections."""
        for host in self.hosts:
            host.close()
        end = time.monotonic() + ENDING_S
        for host in self.hosts:
            with suppress(subprocess.TimeoutExpired):
                host.process.wait(max(0.0, end - time.monotonic()))
            host.process.kill()
            host.process.wait()


def parsed(words: Sequence[str]) -> tuple[argparse.Namespace, list[str]]:
    """Return the launcher's flags that count here, and the words for its part on each host. Raises ArgumentError."""
    parser = argparse.ArgumentParser("multi_node.sh", allow_abbrev=False, add_help=False, exit_on_error=False)
    parser.add_argument("--launcher", default="ssh", choices=["ssh", "srun"])
    parser.add_argument("--launcher_args", default="", type=shlex.split)
    parser.add_argument("--ssh_port", type=int)
    parser.add_argument("--no_ssh", action="store_true")
    parser.add_argument("--node_rank", type=int, default=0)
    parser.add_argument("--master_addr", default="")
    parser.add_argument("--master_port", type=int, default=0)
    for names in (("-H", "--hostfile"), ("-i", "--include"), ("-e", "--exclude"), ("--num_nodes",), ("--log_level",)):
        parser.add_argument(*names)
    parser.add_argument("--num_gpus", "--num_accelerators")
    for name in ("--check", "--no_ssh_check", "--force_multi", "-q", "--quiet"):
        parser.add_argument(name, action="store_true")
    flags, passed = parser.parse_known_args(words)
    if not flags.master_port:
        flags.master_port = 29500 if flags.no_ssh else random.choice(PORTS)
    return flags, passed


def agent_command(host: str, flags: argparse.Namespace) -> list[str]:
    """Return the words that start the agent of a host, without a connection on this one."""
    agent = [sys.executable, "-u", "-m", "pipeline.launching.host_agent"]
    if flags.launcher == "srun" and not flags.no_ssh:
        one = ["--nodes=1", "--ntasks=1", f"--nodelist={host}", "--overlap", "--cpu-bind=none", "--unbuffered"]
        return ["srun", *one, *flags.launcher_args, *agent]
    if flags.no_ssh or is_here(host):
        return agent
    port = ["-p", str(flags.ssh_port)] if flags.ssh_port else []
    path = f"PYTHONPATH={shlex.quote(os.environ.get('PYTHONPATH', ''))} PYTHONSAFEPATH=1 exec"
    ssh = ["ssh", "-T", "-o", "BatchMode=yes", "-o", "ConnectTimeout=15", *port, *flags.launcher_args, host]
    return [*ssh, f"{path} {shlex.join(agent)}"]


def is_here(host: str) -> bool:
    """Return True if a name or address is this machine's."""
    if host in ("localhost", socket.gethostname()):
        return True
    with suppress(OSError), socket.socket() as probe:
        probe.bind((socket.gethostbyname(host), 0))
        return True
    return False


def differences(hosts: Sequence[Host]) -> list[str]:
    """Return a line for each way in which a host differs from the first one, or has fewer GPUs than are asked for."""
    lines, first = [], hosts[0]
    for host in hosts:
        facts, contents = host.said["facts"], host.said["contents"]
        for name, value in facts["same"].items():
            if value != (wanted := first.said["facts"]["same"][name]):
                lines.append(f"{host.name}: {name} is {value}, {first.name} has {wanted}; install the same on both")
        if facts["gpus"] < facts["chosen"] and any(other.said["facts"]["gpus"] for other in hosts):
            lines.append(
                f"{host.name}: GPU {facts['chosen'] - 1} is asked for, it has {facts['gpus']}; lower its slots in the "
                "host file, or give --exclude"
            )
        for name, content in contents.items():
            if content != (wanted := first.said["contents"].get(name)):
                is_missing = content in ("", name.partition(" ")[2])  # a model's folder that is none passes for an id
                what = "is not there, or unreadable" if is_missing else f"is not what {first.name} has"
                lines.append(f"{host.name}: {name}: {what}; copy it from the host that has the right one")
    return lines


def address_of(names: Sequence[str]) -> str:
    """Return the address of the first host at which the others reach it. Raises EnvironmentFault."""
    try:
        address = socket.gethostbyname(names[0].rpartition("@")[2])
        if address.startswith("127.") and len(names) > 1:
            # Its own name is of the loopback interface: take the interface that leads to the second host.
            with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
                probe.connect((socket.gethostbyname(names[1].rpartition("@")[2]), 9))
                address = str(probe.getsockname()[0])
    except OSError as error:
        reason = error.strerror or error
        raise EnvironmentFault(f"{names[0]}: no address known: {reason}; give --master_addr ADDRESS") from None
    return address


def passed_on() -> Mapping[str, str]:
    """Return the variables for all hosts: those of PASSED_ON, and those of DeepSpeed's file here or in the home."""
    variables = {name: value for name, value in os.environ.items() if name.startswith(PASSED_ON)}
    for folder in (Path.home(), Path.cwd()):
        with suppress(OSError):
            lines = (folder / os.environ.get("DS_ENV_FILE", ENVIRONMENT_FILE)).read_text(encoding="utf-8").splitlines()
            variables |= dict(line.strip().split("=", 1) for line in lines if "=" in line)
    return variables


def why_no_agent(flags: argparse.Namespace, host: str, code: int) -> str:
    """Return why no agent has answered, and what to do."""
    words = shlex.join(agent_command(host, flags)[:1])
    if words == "ssh" and code == 255:
        return f"not reachable (ssh ended with 255); `ssh {host} true` must work without a password"
    if code == 127:
        return f"no {sys.executable} there; install the Python environment at the same path on each host"
    return f"{words} ended with {code}, its words are above; the project must be at the same path on each host"


def main(words: list[str]) -> int:
    """Run the job; return its exit code."""
    outlive_console()
    try:
        return Launcher(words).run()
    except argparse.ArgumentError as error:
        return print_error(InputError(f"{error.argument_name}: {error.message}"))
    except RunError as error:
        return print_error(error)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
