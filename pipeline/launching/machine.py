"""Devices of this machine, ports and the host file, read without torch so that a run is refused before it starts."""

import os
import re
import shutil
import socket
import subprocess
from collections.abc import Mapping
from pathlib import Path
from typing import Literal

from pipeline.errors import EnvironmentFault, InputError, nearest

# A name that began with a dash would be an option to ssh.
HOST_LINE = re.compile(r"([A-Za-z0-9][\w.@-]*)\s+slots=(\d+)\s*(#.*)?", re.ASCII)
DEFAULT_HOSTFILE = Path("/job/hostfile")  # DeepSpeed's own


def count_present_gpus() -> int:
    """Return the number of NVIDIA GPUs of this machine."""
    if not shutil.which("nvidia-smi"):
        return 0
    listed = subprocess.run(["nvidia-smi", "-L"], capture_output=True, text=True, check=False).stdout
    return sum(line.startswith("GPU ") for line in listed.splitlines())


def runs_on_cpu() -> bool:
    """Return whether DS_ACCELERATOR=cpu asks for the CPU, also where there are GPUs."""
    return os.environ.get("DS_ACCELERATOR") == "cpu"


def count_gpus() -> int:
    """Return the number of NVIDIA GPUs that a process sees: those of CUDA_VISIBLE_DEVICES if it is set, else all.

    None with DS_ACCELERATOR=cpu. Raises EnvironmentFault where CUDA_VISIBLE_DEVICES names none.
    """
    if runs_on_cpu():
        return 0
    present = count_present_gpus()
    visible = os.environ.get("CUDA_VISIBLE_DEVICES")
    if visible is None or not present:
        return present
    count = len([name for name in visible.split(",") if name.strip() not in ("", "-1")])
    if not count:
        raise EnvironmentFault(
            f"CUDA_VISIBLE_DEVICES={visible!r} hides all {present} GPUs of this machine; unset it, "
            "or set DS_ACCELERATOR=cpu to run on the CPU"
        )
    return min(count, present)


def device_kind() -> Literal["cpu", "cuda"]:
    """Return torch's name for the devices of this machine; AMD's GPUs are cuda to it too."""
    return "cuda" if count_gpus() or (Path("/dev/kfd").exists() and not runs_on_cpu()) else "cpu"


def check_device_count(asked: int) -> None:
    """Raise EnvironmentFault for more ranks than GPUs; without GPUs, for more processes than cores."""
    if gpus := count_gpus():
        if asked > gpus:
            raise EnvironmentFault(f"--num-gpus: found {asked}, but {gpus} GPUs are visible here; give at most {gpus}")
    elif asked > (cores := len(os.sched_getaffinity(0))):
        raise EnvironmentFault(
            f"--num-gpus: found {asked}, but this machine has no GPU and {cores} cores; give at most {cores} processes"
        )


def check_port(port: int) -> None:
    """Raise EnvironmentFault if something listens on `port` of this machine."""
    with socket.socket() as probe:
        # As torch's own store does: a port that only waits for its last packets is free.
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind(("", port))
        except OSError as error:
            raise EnvironmentFault(
                f"--master-port: {port}: {error.strerror}; give another one, or leave it out on a single machine"
            ) from None


def read_hostfile(path: Path) -> dict[str, int]:
    """Return host -> slots from DeepSpeed's host file. Raises InputError naming the file and the line."""
    try:
        lines = path.read_text(encoding="utf-8").splitlines()
    except (OSError, UnicodeDecodeError) as error:
        reason = error.strerror if isinstance(error, OSError) else "not text"
        raise InputError(f"--hostfile: {path}: cannot read it: {reason}") from None
    hosts: dict[str, int] = {}
    for number, line in enumerate(lines, start=1):
        if not line.strip() or line.lstrip().startswith("#"):
            continue
        match = HOST_LINE.fullmatch(line.strip())
        if not match or not int(match[2]):
            raise InputError(f"--hostfile: {path}:{number}: found {line.strip()!r}, wanted `name slots=NUMBER`")
        if match[1] in hosts:
            raise InputError(f"--hostfile: {path}:{number}: {match[1]} stands twice; add its slots up in one line")
        hosts[match[1]] = int(match[2])
    if not hosts:
        raise InputError(f"--hostfile: {path}: found no host, wanted `name slots=NUMBER` lines")
    return hosts


def count_chosen(hosts: Mapping[str, int], flag: Literal["--include", "--exclude"], text: str) -> int | None:
    """Return the number of GPUs that the launcher's --include or --exclude chooses; None where that cannot be told.

    Args:
        hosts: host -> number of its GPUs; 0: it has none, and processes on its CPU are not checked.
        text: `host:0,1@host`, as DeepSpeed's launcher reads it; a host alone stands for all of its GPUs.

    Raises:
        InputError: an unknown host or GPU number, or no GPU is left.
    """
    chosen: dict[str, set[int]] = {}
    for part in text.split("@"):
        host, colon, slots = part.partition(":")
        if host not in hosts:
            raise InputError(f"{flag}: {host}: unknown host{nearest(host, hosts)}; there are {', '.join(hosts)}")
        if not re.fullmatch(r"\d+(,\d+)*" if colon else "", slots):
            raise InputError(f"{flag}: {part}: found {slots!r}, wanted numbers of GPUs such as {host}:0,1")
        numbers = set(map(int, slots.split(","))) if colon else set(range(hosts[host]))
        if hosts[host] and (unknown := sorted(number for number in numbers if number >= hosts[host])):
            raise InputError(f"{flag}: {host}:{unknown[0]}: no such GPU; {host} has 0 to {hosts[host] - 1}")
        chosen[host] = chosen.get(host, set()) | numbers
    if not all(hosts.values()):
        return None
    count = sum(map(len, chosen.values()))
    if not (count := count if flag == "--include" else sum(hosts.values()) - count):
        raise InputError(f"{flag}: {text}: leaves no GPU")
    return count
