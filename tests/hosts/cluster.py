"""Hosts of one machine as tests use them: commands on each, train.py over all of them, and what they print."""

import os
import subprocess
import sys
import time
from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
SSHD = "/usr/sbin/sshd"
SPACE = f"rlhf-{os.getpid()}"  # marks what is of this session: another one may run beside it


@dataclass(slots=True)
class Host(ABC):
    """One host: what it calls itself, its name or address, and the login that a host file holds."""

    name: str
    address: str
    login: str

    @abstractmethod
    def command(self, words: Sequence[object], folder: Path) -> list[str]:
        """Return the words that run a command there, in a folder that it sees."""

    @abstractmethod
    def cut(self) -> None:
        """Cut its link: packets are lost without a word. On a loopback address only new connections are refused."""

    @abstractmethod
    def mend(self) -> None:
        """Undo `cut`."""

    @abstractmethod
    def pids(self, text: str) -> list[int]:
        """Return the processes there whose command line holds a text, by their numbers there, in order."""

    def run(self, *words: object, folder: Path = Path("/"), **more: object) -> subprocess.CompletedProcess[str]:
        options = {"capture_output": True, "text": True, "check": False, "timeout": 300, **more}
        return subprocess.run(self.command(words, folder), **options)


@dataclass(frozen=True, slots=True)
class Cluster:
    """Hosts, the folder that each sees (one of all, or each its own), and why they are no network namespaces."""

    disk: Path
    hosts: Mapping[str, Host]
    no_namespaces: str = ""

    def require_namespaces(self, what: str) -> None:
        """Skip a test of what loopback addresses cannot show."""
        if self.no_namespaces:
            pytest.skip(f"{what}: not on loopback addresses ({self.no_namespaces})")

    def start(self, host: str, *words: object, folder: Path | None = None, **more: str) -> "Running":
        """Start a command on a host, in that folder or another one."""
        errors = self.disk / f"{host}-{time.monotonic_ns()}.err"
        command = self.hosts[host].command(words, folder or self.disk)
        with errors.open("wb") as file:
            process = subprocess.Popen(command, stdout=file, stderr=file, env={**environment(), **more})
        return Running(process, errors)

    def train(self, host: str, *words: object, folder: Path | None = None) -> "Running":
        """Start train.py on all hosts from one of them."""
        given = ("--deployment-type", "multi_node", "--hostfile", self.disk / "hosts", *words)
        return self.start(host, sys.executable, ROOT / "train.py", *given, folder=folder)

    def stop(self, host: str) -> None:
        """Send SIGTERM to the train.py of a host."""
        self.hosts[host].run("kill", "-TERM", self.hosts[host].pids("train.py --deployment-type")[0])


@dataclass(frozen=True, slots=True)
class Running:
    """A command on a host, and the file with what it has printed."""

    process: subprocess.Popen[bytes]
    errors: Path

    @property
    def text(self) -> str:
        return self.errors.read_text(errors="replace")

    def wait(self, timeout_s: float = 480) -> int:
        try:
            return self.process.wait(timeout_s)
        except subprocess.TimeoutExpired:
            self.process.kill()
            raise AssertionError(f"still running after {timeout_s} s: {self.text}") from None

    def wait_for(self, file: Path, timeout_s: float = 90) -> None:
        """Wait until a file exists."""
        end = time.monotonic() + timeout_s
        while not file.exists():
            assert self.process.poll() is None and time.monotonic() < end, self.text
            time.sleep(0.05)


def write_keys(folder: Path) -> None:
    for key in ("host", "user"):
        subprocess.run(["ssh-keygen", "-q", "-t", "ed25519", "-N", "", "-f", folder / f"{key}_key"], check=True)


def sshd_config(folder: Path) -> str:
    """Return the lines that let in whoever has the key of `write_keys`, and nobody else."""
    return (
        f"HostKey {folder}/host_key\nAuthorizedKeysFile {folder}/user_key.pub\nStrictModes no\nUsePAM no\n"
        "PidFile none\nPermitRootLogin yes\nPasswordAuthentication no\nMaxStartups 100\n"
    )


def ssh_config(folder: Path) -> str:
    return (
        f"Host *\nIdentityFile {folder}/user_key\nUserKnownHostsFile {folder}/known\nStrictHostKeyChecking no\n"
        "LogLevel ERROR\n"
    )


def wait_for_ssh(hosts: Mapping[str, Host]) -> None:
    first = next(iter(hosts.values()))
    end = time.monotonic() + 20
    for name, host in hosts.items():
        while True:
            with suppress(IndexError, FileNotFoundError):
                if first.run("ssh", "-o", "ConnectTimeout=2", host.login, "true").returncode == 0:
                    break
            assert time.monotonic() < end, f"{name}: no sshd"
            time.sleep(0.1)


def environment() -> dict[str, str]:
    """The environment of a run on these hosts: on their CPUs, one thread for each rank."""
    hidden = ("CUDA_VISIBLE_DEVICES", "TMPDIR")
    kept = {name: value for name, value in os.environ.items() if name not in hidden}
    return {**kept, "OMP_NUM_THREADS": "1", "DS_ACCELERATOR": "cpu"}
