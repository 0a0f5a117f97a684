"""Hosts on one machine: network namespaces behind a bridge, each with its own name, /tmp, processes and sshd."""

import os
import shutil
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
SPACE = f"rlhf-{os.getpid()}"  # begins the names of all namespaces: another session may have its own
SWITCH = f"{SPACE}-switch"
PROGRAMS = ("ip", "unshare", "nsenter", "ssh", "ssh-keygen", "/usr/sbin/sshd", "pdsh")

# Becomes the first process of a host. Its /tmp is its own; of the machine's it sees the folders that are named.
BOOT = """
set -e
name=$1 files=$2; shift 2
hostname "$name"
ip link set lo up
mount --bind "$files/hosts" /etc/hosts
mount --bind "$files/ssh_config" /etc/ssh/ssh_config
mount -t tmpfs none /run
mkdir /run/sshd /run/kept
i=0; for pair; do mkdir "/run/kept/$((i += 1))"; mount --bind "${pair%%:*}" "/run/kept/$i"; done
mount -t tmpfs none /tmp
i=0; for pair; do mkdir -p "${pair#*:}"; mount --move "/run/kept/$((i += 1))" "${pair#*:}"; done
exec /usr/sbin/sshd -D -e -f "$files/sshd_config"
"""


def why_impossible() -> str:
    """The reason why this machine cannot be several hosts; empty if it can."""
    if missing := [program for program in PROGRAMS if not shutil.which(program)]:
        return f"not installed: {', '.join(missing)} (apt-get install openssh-server pdsh iproute2 util-linux)"
    if hidden := [path for path in (str(ROOT), sys.executable) if path.startswith("/tmp/")]:
        return f"{hidden[0]} is below /tmp, of which each host has its own: use a checkout and an environment elsewhere"
    probe = f"{SWITCH}-probe"
    made = subprocess.run(["ip", "netns", "add", probe], capture_output=True, text=True, check=False)
    subprocess.run(["ip", "netns", "delete", probe], capture_output=True, check=False)
    if made.returncode:
        return f"no network namespaces here (they need root): {made.stderr.strip()}"
    return ""


def call(*words: object) -> str:
    return subprocess.run([*map(str, words)], check=True, capture_output=True, text=True).stdout


@dataclass(frozen=True, slots=True)
class Host:
    """One host; `init` is the process that its namespaces belong to."""

    name: str
    init: subprocess.Popen[bytes]

    def command(self, words: Sequence[object], folder: Path) -> list[str]:
        """The words that run a command there, in a folder that it sees."""
        child = Path(f"/proc/{self.init.pid}/task/{self.init.pid}/children").read_text().split()[0]
        return [
            "nsenter",
            f"--target={child}",
            "--net",
            "--uts",
            "--mount",
            "--pid",
            "env",
            f"--chdir={folder}",
            *map(str, words),
        ]

    def run(self, *words: object, folder: Path = Path("/"), **more: object) -> subprocess.CompletedProcess[str]:
        options = {"capture_output": True, "text": True, "check": False, "timeout": 300, **more}
        return subprocess.run(self.command(words, folder), **options)

    def cut(self) -> None:
        """Cut its link: packets are lost without a word."""
        call("ip", "-n", SWITCH, "link", "set", f"to-{self.name}", "down")

    def mend(self) -> None:
        call("ip", "-n", SWITCH, "link", "set", f"to-{self.name}", "up")


@dataclass(frozen=True, slots=True)
class Cluster:
    """Hosts, and the folder that each sees: one of all, or each its own."""

    disk: Path
    hosts: dict[str, Host]

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
        self.hosts[host].run("kill", "-TERM", self.pids(host, "train.py --deployment-type")[0])

    def pids(self, host: str, text: str) -> list[int]:
        """The processes on a host whose command line holds a text, by their numbers there."""
        listed = self.hosts[host].run("ps", "-eo", "pid=,args=").stdout.splitlines()
        return [int(line.split()[0]) for line in listed if text in line]


@dataclass(frozen=True, slots=True)
class Running:
    """A command on a host, and the file with what it has printed."""

    process: subprocess.Popen[bytes]
    errors: Path

    @property
    def text(self) -> str:
        return self.errors.read_text(errors="replace")

    def wait(self, timeout_s: float = 240) -> int:
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


def write_files(folder: Path, names: Sequence[str]) -> None:
    """Host names, keys and configurations of ssh and sshd."""
    for key in ("host", "user"):
        call("ssh-keygen", "-q", "-t", "ed25519", "-N", "", "-f", folder / f"{key}_key")
    lines = [f"10.55.0.{number} {name}" for number, name in enumerate(names, start=1)]
    (folder / "hosts").write_text("\n".join(["127.0.0.1 localhost", *lines]) + "\n")
    (folder / "sshd_config").write_text(
        f"HostKey {folder}/host_key\nAuthorizedKeysFile {folder}/user_key.pub\nStrictModes no\nUsePAM no\n"
        "PidFile none\nPermitRootLogin yes\nPasswordAuthentication no\nMaxStartups 100\n"
    )
    (folder / "ssh_config").write_text(
        f"Host *\nIdentityFile {folder}/user_key\nUserKnownHostsFile {folder}/known\nStrictHostKeyChecking no\n"
        "LogLevel ERROR\n"
    )


@contextmanager
def network(folder: Path, disk: Path, names: Sequence[str], *, shared: bool) -> Iterator[dict[str, Host]]:
    """Hosts of these names, which share the code and perhaps `disk`; all of their processes end with it.

    Where they do not share it, each has a copy of its own, outside at `folder`/NAME.
    """
    files = folder / "ssh"
    files.mkdir()
    write_files(files, names)
    spaces = [SWITCH, *(f"{SPACE}-{name}" for name in names)]
    hosts: dict[str, Host] = {}
    try:
        call("ip", "netns", "add", SWITCH)
        call("ip", "-n", SWITCH, "link", "add", "bridge", "type", "bridge")
        call("ip", "-n", SWITCH, "link", "set", "bridge", "up")
        for number, name in enumerate(names, start=1):
            space, link = f"{SPACE}-{name}", f"to-{name}"
            call("ip", "netns", "add", space)
            call("ip", "-n", SWITCH, "link", "add", link, "type", "veth", "peer", "name", "eth0", "netns", space)
            call("ip", "-n", SWITCH, "link", "set", link, "master", "bridge", "up")
            call("ip", "-n", space, "address", "add", f"10.55.0.{number}/24", "dev", "eth0")
            call("ip", "-n", space, "link", "set", "eth0", "up")
            unshare = ("unshare", "--uts", "--mount", "--pid", "--fork", "--mount-proc", "--kill-child")
            own = disk if shared else Path(shutil.copytree(disk, folder / name))
            kept = [f"{own}:{disk}", f"{ROOT}:{ROOT}", f"{files}:{files}"]
            words = ["ip", "netns", "exec", space, *unshare, "bash", "-c", BOOT, "boot", name, files, *kept]
            with (folder / f"{name}.sshd").open("wb") as log:
                hosts[name] = Host(name, subprocess.Popen([*map(str, words)], stdout=log, stderr=log))
        wait_for_ssh(hosts)
        yield hosts
    finally:
        for host in hosts.values():
            host.init.kill()
            host.init.wait()
        for name in spaces:
            subprocess.run(["ip", "netns", "delete", name], capture_output=True, check=False)


def wait_for_ssh(hosts: dict[str, Host]) -> None:
    first = next(iter(hosts.values()))
    end = time.monotonic() + 20
    for name, host in hosts.items():
        while True:
            assert host.init.poll() is None, f"{name} did not start"
            try:
                if first.run("ssh", "-o", "ConnectTimeout=2", name, "true").returncode == 0:
                    break
            except (IndexError, FileNotFoundError):
                pass
            assert time.monotonic() < end, f"{name}: no sshd"
            time.sleep(0.1)


def environment() -> dict[str, str]:
    """The environment of a run on these hosts: on their CPUs, one thread for each rank."""
    hidden = ("CUDA_VISIBLE_DEVICES", "TMPDIR")
    kept = {name: value for name, value in os.environ.items() if name not in hidden}
    return {**kept, "OMP_NUM_THREADS": "1", "DS_ACCELERATOR": "cpu"}
