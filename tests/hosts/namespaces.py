"""Hosts that are network namespaces behind a bridge, each with its own name, /tmp, processes and sshd: needs root."""

import shutil
import subprocess
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from cluster import ROOT, SPACE, Host, ssh_config, sshd_config, wait_for_ssh, write_keys

SWITCH = f"{SPACE}-switch"
PROGRAMS = ("ip", "unshare", "nsenter")

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


def why_no_namespaces() -> str:
    """Return the reason why this machine cannot be several hosts with networks and disks of their own, or ""."""
    if missing := [program for program in PROGRAMS if not shutil.which(program)]:
        return f"network namespaces need {', '.join(missing)}: apt-get install iproute2 util-linux"
    probe = f"{SWITCH}-probe"
    made = subprocess.run(["ip", "netns", "add", probe], capture_output=True, text=True, check=False)
    subprocess.run(["ip", "netns", "delete", probe], capture_output=True, check=False)
    if made.returncode:
        return f"network namespaces need root: {made.stderr.strip()}"
    if hidden := [path for path in (str(ROOT), sys.executable) if path.startswith("/tmp/")]:
        return f"with network namespaces each host has a /tmp of its own, and {hidden[0]} is there"
    return ""


def call(*words: object) -> str:
    return subprocess.run([*map(str, words)], check=True, capture_output=True, text=True).stdout


@dataclass(slots=True)
class Namespace(Host):
    """One host; `init` is the process that its namespaces belong to."""

    init: subprocess.Popen[bytes]

    def command(self, words: Sequence[object], folder: Path) -> list[str]:
        child = Path(f"/proc/{self.init.pid}/task/{self.init.pid}/children").read_text().split()[0]
        enter = ["nsenter", f"--target={child}", "--net", "--uts", "--mount", "--pid"]
        return [*enter, "env", f"--chdir={folder}", *map(str, words)]

    def cut(self) -> None:
        call("ip", "-n", SWITCH, "link", "set", f"to-{self.name}", "down")

    def mend(self) -> None:
        call("ip", "-n", SWITCH, "link", "set", f"to-{self.name}", "up")

    def pids(self, text: str) -> list[int]:
        listed = self.run("ps", "-eo", "pid=,args=").stdout.splitlines()
        return [int(line.split()[0]) for line in listed if text in line]


@contextmanager
def namespaces(folder: Path, disk: Path, names: Sequence[str], *, shared: bool) -> Iterator[dict[str, Namespace]]:
    """Hosts of these names, which share the code and perhaps `disk`; all of their processes end with it.

    Where they do not share it, each has a copy of its own, outside at `folder`/NAME.
    """
    files = folder / "ssh"
    files.mkdir()
    write_keys(files)
    lines = [f"10.55.0.{number} {name}" for number, name in enumerate(names, start=1)]
    (files / "hosts").write_text("\n".join(["127.0.0.1 localhost", *lines]) + "\n")
    (disk / "hosts").write_text("".join(f"{name} slots=1\n" for name in names))
    (files / "sshd_config").write_text(sshd_config(files))
    (files / "ssh_config").write_text(ssh_config(files))
    spaces = [SWITCH, *(f"{SPACE}-{name}" for name in names)]
    hosts: dict[str, Namespace] = {}
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
                init = subprocess.Popen([*map(str, words)], stdout=log, stderr=log)
            hosts[name] = Namespace(name, name, name, init)
        wait_for_ssh(hosts)
        yield hosts
    finally:
        for host in hosts.values():
            host.init.kill()
            host.init.wait()
        for name in spaces:
            subprocess.run(["ip", "netns", "delete", name], capture_output=True, check=False)
