"""Devices of this machine, ports and the host file, read without torch so that a run is refused before it starts."""

import os
import re
import shutil
import socket
import subprocess
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Literal

from pipeline.errors import EnvironmentFault, InputError, counted, nearest

# A name that began with a dash would be an option to ssh.
HOST_LINE = re.compile(r"([A-Za-z0-9][\w.@-]*)\s+slots=(\d{1,4})\s*(#.*)?", re.ASCII)
DEFAULT_HOSTFILE = Path("/job/hostfile")  # DeepSpeed's own
PORT_POLL_S = 0.1
NO_HOSTFILE = "/dev/null"  # launch/_run.sh names it where all ranks are on this machine
# Flags of DeepSpeed's launcher that choose hosts and GPUs, or a search before the run, and their other names.
LAUNCHER_NAMES = {
    "--hostfile": "-H",
    "--include": "-i",
    "--exclude": "-e",
    "--num_nodes": "--num_nodes",
    "--num_gpus": "--num_accelerators",
    "--node_rank": "--node_rank",
    "--autotuning": "--autotuning",
}


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
            here = f"{counted(gpus, 'GPU')} {'is' if gpus == 1 else 'are'} visible here"
            raise EnvironmentFault(f"--num-gpus: found {asked}, but {here}; give at most {gpus}")
    elif asked > (cores := len(os.sched_getaffinity(0))):
        raise EnvironmentFault(
            f"--num-gpus: found {asked}, but this machine has no GPU and {counted(cores, 'core')}; "
            f"give at most {counted(cores, 'process')}"
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
    """Return host -> slots from DeepSpeed's host file. Raises InputError naming file, line and the right one."""
    try:
        lines = path.read_text(encoding="utf-8-sig").splitlines()  # editors of Windows write a byte order mark
    except (OSError, UnicodeDecodeError) as error:
        reason = error.strerror if isinstance(error, OSError) else "not text"
        raise InputError(f"--hostfile: {path}: cannot read it: {reason}; wanted lines `name slots=GPUS`") from None
    hosts: dict[str, int] = {}
    for number, text in enumerate(lines, start=1):
        line = text.strip()
        if not line or line.startswith("#"):
            continue
        match = HOST_LINE.fullmatch(line)
        if not match or not int(match[2]):
            raise InputError(f"--hostfile: {path}:{number}: found {line!r}, wanted {corrected(line)}")
        if match[1] in hosts:
            total = hosts[match[1]] + int(match[2])
            raise InputError(
                f"--hostfile: {path}:{number}: found {match[1]} again, wanted one line for each host, such as "
                f"`{match[1]} slots={total}`"
            )
        hosts[match[1]] = int(match[2])
    if not hosts:
        raise InputError(f"--hostfile: {path}: found no host, wanted lines `name slots=GPUS`")
    return hosts


def corrected(line: str) -> str:
    """Return the line that a wrong line of a host file was probably meant to be, or the form of all lines."""
    name = re.match(r"[A-Za-z0-9][\w.-]*", line, re.ASCII)
    if not name or "=" in name[0] or line.startswith("slots"):
        return "`name slots=GPUS`, with a name that begins with a letter or digit"
    rest = line[name.end() :]
    if rest.count(":") > 1:
        return "a name or an IPv4 address: DeepSpeed takes no address of IPv6"
    if len(re.findall(r"\bslots=", rest)) > 1:
        return f"one host on each line, such as `{name[0]} slots=8`"
    if also := re.match(r"\s+slots=([1-9]\d{0,3})\s+(\w+)=", rest, re.ASCII):
        return f"`{name[0]} slots={also[1]}`: there is no {also[2]}"
    numbers = re.findall(r"\b[1-9]\d{0,3}\b", rest, re.ASCII)
    return f"`{name[0]} slots={numbers[0] if len(numbers) == 1 and not re.search('[-.]', rest) else 'GPUS'}`"


def chosen_gpus(
    hosts: Mapping[str, int], *, included: str = "", excluded: str = "", num_nodes: int = 0, num_gpus: int = 0
) -> dict[str, list[int]]:
    """Return host -> numbers of its GPUs, in the host file's order, as DeepSpeed's launcher chooses them.

    Args:
        hosts: host -> number of its GPUs; 0: it has none, and processes on its CPU are not checked.
        included, excluded: `host:0,1@host`; a host alone stands for all of its GPUs.
        num_nodes, num_gpus: take the first hosts, and of each the first GPUs; 0: all.

    Raises:
        InputError: an unknown host or GPU number, more than there are, or no GPU is left.
    """
    flag, text = ("--exclude", excluded) if excluded else ("--include", included)
    named: dict[str, set[int]] = {}
    for part in text.split("@") if text else ():
        host, colon, slots = part.partition(":")
        if host not in hosts:
            raise InputError(f"{flag}: {host}: unknown host{nearest(host, hosts)}; there are {', '.join(hosts)}")
        if not re.fullmatch(r"\d+(,\d+)*" if colon else "", slots):
            raise InputError(f"{flag}: {part}: found {slots!r}, wanted numbers of GPUs such as {host}:0,1")
        numbers = set(map(int, slots.split(","))) if colon else set(range(hosts[host]))
        if hosts[host] and (unknown := sorted(number for number in numbers if number >= hosts[host])):
            raise InputError(f"{flag}: {host}:{unknown[0]}: no such GPU; {host} has 0 to {hosts[host] - 1}")
        named[host] = named.get(host, set()) | numbers
    if num_nodes > len(hosts):
        raise InputError(f"--num_nodes: found {num_nodes}, but there are {len(hosts)} hosts: {', '.join(hosts)}")
    chosen: dict[str, list[int]] = {}
    for host, count in list(hosts.items())[: num_nodes or None]:
        if count and num_gpus > count:
            raise InputError(f"--num_gpus: found {num_gpus}, but {host} has slots={count}; give at most {count}")
        there = set(range(num_gpus or count))
        if numbers := named.get(host, set()) if included else there - named.get(host, set()):
            chosen[host] = sorted(numbers)
    if not chosen and all(hosts.values()):
        raise InputError(f"{flag}: {text}: leaves no GPU")
    return chosen


def launcher_values(words: Sequence[str]) -> dict[str, str]:
    """Return the values of LAUNCHER_NAMES in a launcher's words, up to --module; "" for those that are not given."""
    own = words[: words.index("--module")] if "--module" in words else words
    given = dict(zip(own, own[1:], strict=False))
    return {flag: given.get(flag) or given.get(name, "") for flag, name in LAUNCHER_NAMES.items()}


def hosts_of_launcher(words: Sequence[str]) -> dict[str, list[int]]:
    """Return host -> numbers of its GPUs that a launcher's words choose, up to --module. Raises InputError."""
    values = launcher_values(words)
    file = Path(values["--hostfile"] or DEFAULT_HOSTFILE)
    if not values["--hostfile"] and not file.is_file():
        raise InputError(f"--hostfile: several machines need one, and there is no {file}; lines of one: `name slots=8`")
    for flag in ("--num_nodes", "--num_gpus"):
        if not re.fullmatch(r"([1-9]\d*)?", values[flag]):
            raise InputError(f"{flag}: found {values[flag]!r}, wanted a number from 1 on")
    include, exclude = values["--include"], values["--exclude"]
    counts = [int(values[flag] or 0) for flag in ("--num_nodes", "--num_gpus")]
    if (include and exclude) or ((include or exclude) and any(counts)):
        raise InputError("--include, --exclude, --num_nodes and --num_gpus: give --include, --exclude, or the numbers")
    hosts = chosen_gpus(
        read_hostfile(file), included=include, excluded=exclude, num_nodes=counts[0], num_gpus=counts[1]
    )
    node_rank = values["--node_rank"] or "0"
    if not node_rank.isdigit() or int(node_rank) >= len(hosts):
        raise InputError(
            f"--node_rank: found {node_rank}, wanted 0 to {len(hosts) - 1}, the place of this host in {file}"
        )
    return hosts


def is_on_one_machine(command: Sequence[str]) -> bool:
    """Return True if the launcher is told to read no host file (launch/_run.sh)."""
    return ("--hostfile", NO_HOSTFILE) in zip(command, command[1:], strict=False)


def check_first_host(command: Sequence[str]) -> None:
    """Raise EnvironmentFault where DeepSpeed's launcher would end with a traceback: its first host is out of reach."""
    if "deepspeed.launcher.runner" not in command or is_on_one_machine(command):
        return
    own = command[: command.index("--module")]
    if "--no_ssh" in own or "--no_ssh_check" in own:
        return
    host = next(iter(hosts_of_launcher(command)))
    port = ["-p", own[own.index("--ssh_port") + 1]] if "--ssh_port" in own else []
    probe = ["ssh", "-o", "PasswordAuthentication=no", *port, host, "hostname"]  # its own
    if not shutil.which("ssh"):
        raise EnvironmentFault("ssh is not installed on this machine; install its package (openssh-client)")
    if subprocess.run(probe, stdin=subprocess.DEVNULL, capture_output=True, check=False).returncode:
        raise EnvironmentFault(f"host {host}: not reachable by ssh; `ssh {host} true` must work without a password")


def check_local_port(command: Sequence[str], *, patience_s: float = 0.0) -> None:
    """Raise EnvironmentFault if the port of a run on only this machine is taken, for so long."""
    port = command[command.index("--master_port") + 1] if "--master_port" in command else ""
    if not is_on_one_machine(command) or not port.isdigit():
        return
    end = time.monotonic() + patience_s
    while True:
        try:
            return check_port(int(port))
        except EnvironmentFault:
            if time.monotonic() > end:
                raise
            time.sleep(PORT_POLL_S)


def num_ranks(words: Sequence[str]) -> int | None:
    """Return the number of ranks that a launcher's words start; None where only it will know. See `ranks_by_host`."""
    slots = ranks_by_host(words)
    return None if slots is None else sum(slots)


def ranks_by_host(words: Sequence[str]) -> list[int] | None:
    """Return how many ranks a launcher's words start on each machine: on a CPU one process, without a number.

    None where only the launcher will know: it counts GPUs that nvidia-smi does not.

    Raises:
        InputError: the host file, or a host or GPU number that is not in it.
    """
    if not is_on_one_machine(words):
        return [len(numbers) for numbers in hosts_of_launcher(words).values()]
    count = ranks_here(launcher_values(words))
    return [count] if count else None


def ranks_here(given: Mapping[str, str]) -> int | None:
    """Return the ranks that a launcher's values start on this machine. Raises InputError."""
    if given["--num_gpus"]:
        return int(given["--num_gpus"])
    if given["--include"] or given["--exclude"]:
        hosts = {"localhost": count_present_gpus()}
        chosen = chosen_gpus(hosts, included=given["--include"], excluded=given["--exclude"])
        return sum(map(len, chosen.values())) or None
    return count_gpus() or (1 if device_kind() == "cpu" else None)
