"""Hosts that are loopback addresses, each with an sshd of its own: no root needed, but disk and name are shared."""

import os
import pwd
import shutil
import signal
import socket
import subprocess
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path

from cluster import SPACE, SSHD, Host, ssh_config, sshd_config, wait_for_ssh, write_keys
from support.launch_stub import write_program

MARK = "TESTED_HOST"  # variable of all processes of a host, by which they are found


@dataclass(slots=True)
class Loopback(Host):
    """One host; `folder` holds the configuration of its sshd, and `bin` the ssh that knows the hosts' ports."""

    folder: Path
    bin: Path
    sshd: subprocess.Popen[bytes] | None = None

    @property
    def mark(self) -> str:
        return f"{MARK}={SPACE}-{self.address}"

    def command(self, words: Sequence[object], folder: Path) -> list[str]:
        path = f"PATH={self.bin}:{os.environ['PATH']}"
        return ["env", f"--chdir={folder}", self.mark, path, *map(str, words)]

    def cut(self) -> None:
        if self.sshd:
            self.sshd.kill()
            self.sshd.wait()

    def mend(self) -> None:
        with (self.folder / "sshd.log").open("ab") as log:
            command = [SSHD, "-D", "-e", "-f", self.folder / "sshd_config"]
            self.sshd = subprocess.Popen(command, stdout=log, stderr=log, stdin=subprocess.DEVNULL)

    def pids(self, text: str) -> list[int]:
        found = []
        for process in Path("/proc").glob("[0-9]*"):
            with suppress(OSError):  # it has ended, or is another user's
                if self.mark.encode() in (process / "environ").read_bytes().split(b"\0"):
                    words = (process / "cmdline").read_bytes().replace(b"\0", b" ").decode(errors="replace")
                    found += [int(process.name)] if text in words else []
        return sorted(found)


@contextmanager
def loopback(folder: Path, disk: Path, names: Sequence[str]) -> Iterator[dict[str, Loopback]]:
    """Yield hosts of these names, which share all but their addresses; their processes end with the context."""
    if os.geteuid() == 0:
        Path("/run/sshd").mkdir(exist_ok=True)
    files = folder / "ssh"
    files.mkdir()
    write_keys(files)
    login, hosts = pwd.getpwuid(os.geteuid()).pw_name, dict[str, Loopback]()
    write_program(disk / "bin/ssh", f'#!/bin/sh\nexec {shutil.which("ssh")} -F "{files}/ssh_config" "$@"\n')
    try:
        for number, name in enumerate(names, start=2):
            own, address = files / name, f"127.0.0.{number}"
            own.mkdir()
            host = Loopback(socket.gethostname(), address, f"{login}@{address}", own, disk / "bin")
            with socket.socket() as probe:
                probe.bind((address, 0))
                port = probe.getsockname()[1]
            (own / "sshd_config").write_text(
                f"{sshd_config(files)}ListenAddress {address}:{port}\nSetEnv {host.mark}\n"
            )
            with (files / "ssh_config").open("a") as file:
                file.write(f"Host {address}\nPort {port}\n")
            host.mend()
            hosts[name] = host
        with (files / "ssh_config").open("a") as file:
            file.write(ssh_config(files))
        (disk / "hosts").write_text("".join(f"{host.login} slots=1\n" for host in hosts.values()))
        wait_for_ssh(hosts)
        yield hosts
    finally:
        for host in hosts.values():
            host.cut()
            for pid in host.pids(""):
                with suppress(ProcessLookupError):
                    os.kill(pid, signal.SIGKILL)
