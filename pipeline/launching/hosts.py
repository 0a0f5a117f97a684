"""Hosts and devices of a launch request: the host file, and the ranks that start on each host. It imports no torch."""

import os
import re
import socket
from collections.abc import Mapping, Sequence
from pathlib import Path

from pipeline.errors import EnvironmentFault, InputError, nearest
from pipeline.launching.machine import check_device_count, count_gpus, count_present_gpus, visible_gpus
from pipeline.launching.ranks import RankStart
from pipeline.launching.request import LaunchRequest
from pipeline.rendezvous import LOOPBACK

# A name must not begin with a dash: ssh would take it as an option.
HOST_LINE = re.compile(r"([A-Za-z0-9][\w.@-]*)\s+slots=(\d{1,4})\s*(#.*)?", re.ASCII)
DEFAULT_HOSTFILE = Path("/job/hostfile")  # DeepSpeed's own


def read_hostfile(path: Path) -> dict[str, int]:
    """Return host -> slots from DeepSpeed's host file. Raises InputError with file, line and how it should read."""
    try:
        lines = path.read_text(encoding="utf-8-sig").splitlines()  # editors on Windows write a byte order mark
    except (OSError, UnicodeDecodeError) as error:
        reason = error.strerror if isinstance(error, OSError) else "not text"
        raise InputError(f"--hostfile: {path}: cannot read it: {reason}; expected lines `name slots=GPUS`") from None
    hosts: dict[str, int] = {}
    for number, text in enumerate(lines, start=1):
        line = text.strip()
        if not line or line.startswith("#"):
            continue
        match = HOST_LINE.fullmatch(line)
        if not match or not int(match[2]):
            raise InputError(f"--hostfile: {path}:{number}: got {line!r}, expected {corrected(line)}")
        if match[1] in hosts:
            total = hosts[match[1]] + int(match[2])
            raise InputError(
                f"--hostfile: {path}:{number}: got {match[1]} again, expected one line for each host, such as "
                f"`{match[1]} slots={total}`"
            )
        hosts[match[1]] = int(match[2])
    if not hosts:
        raise InputError(f"--hostfile: {path}: got no host, expected lines `name slots=GPUS`")
    return hosts


def corrected(line: str) -> str:
    """Return the probable correction of a wrong line of a host file, or the general form of a line."""
    name = re.match(r"[A-Za-z0-9][\w.-]*", line, re.ASCII)
    if not name or "=" in name[0] or line.startswith("slots"):
        return "`name slots=GPUS`, with a name that begins with a letter or digit"
    rest = line[name.end() :]
    if rest.count(":") > 1:
        return "a name or an IPv4 address: DeepSpeed takes no IPv6 address"
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
        hosts: host -> number of its GPUs; 0: it has none; then indices of its processes on the CPU are not checked.
        included, excluded: `host:0,1@host`; a host alone stands for all of its GPUs.
        num_nodes, num_gpus: take the first hosts, and of each the first GPUs; 0: all.

    Raises:
        InputError: a host or GPU number is unknown, more are requested than exist, or no GPU remains.
    """
    flag, text = ("--exclude", excluded) if excluded else ("--include", included)
    named: dict[str, set[int]] = {}
    for part in text.split("@") if text else ():
        host, colon, slots = part.partition(":")
        if host not in hosts:
            raise InputError(f"{flag}: {host}: unknown host{nearest(host, hosts)}; there are {', '.join(hosts)}")
        if not re.fullmatch(r"\d+(,\d+)*" if colon else "", slots):
            raise InputError(f"{flag}: {part}: got {slots!r}, expected numbers of GPUs such as {host}:0,1")
        numbers = set(map(int, slots.split(","))) if colon else set(range(hosts[host]))
        if hosts[host] and (unknown := sorted(number for number in numbers if number >= hosts[host])):
            raise InputError(f"{flag}: {host}:{unknown[0]}: no such GPU; {host} has 0 to {hosts[host] - 1}")
        named[host] = named.get(host, set()) | numbers
    if num_nodes > len(hosts):
        raise InputError(f"--num-nodes: got {num_nodes}, but there are {len(hosts)} hosts: {', '.join(hosts)}")
    chosen: dict[str, list[int]] = {}
    for host, count in list(hosts.items())[: num_nodes or None]:
        if count and num_gpus > count:
            raise InputError(f"--num-gpus: got {num_gpus}, but {host} has slots={count}; give at most {count}")
        there = set(range(num_gpus or count))
        if numbers := named.get(host, set()) if included else there - named.get(host, set()):
            chosen[host] = sorted(numbers)
    if not chosen and all(hosts.values()):
        raise InputError(f"{flag}: {text}: leaves no GPU")
    return chosen


def chosen_hosts(request: LaunchRequest) -> dict[str, list[int]]:
    """Return host -> numbers of its GPUs, for a request for several hosts. Raises InputError."""
    file = Path(request.hostfile or DEFAULT_HOSTFILE)
    if not request.hostfile and not file.is_file():
        raise InputError(f"--hostfile: several machines need it, and there is no {file}; its lines: `name slots=8`")
    choices = bool(request.include), bool(request.exclude), bool(request.num_nodes or request.num_gpus)
    if sum(choices) > 1:
        raise InputError("--include, --exclude, --num-nodes and --num-gpus: give --include, --exclude, or the numbers")
    hosts = chosen_gpus(
        read_hostfile(file),
        included=request.include,
        excluded=request.exclude,
        num_nodes=request.num_nodes,
        num_gpus=request.num_gpus,
    )
    if not 0 <= request.node_rank < len(hosts):
        raise InputError(
            f"--node-rank: got {request.node_rank}, expected 0 to {len(hosts) - 1}, the index of this host in {file}"
        )
    return hosts


def chosen_devices(request: LaunchRequest) -> list[str]:
    """Return the GPUs of the ranks of a request for this machine; on a CPU the indices of the processes.

    Raises:
        InputError: a GPU number that is not there. EnvironmentFault: more GPUs than CUDA_VISIBLE_DEVICES leaves.
    """
    if request.include or request.exclude:
        hosts = {"localhost": count_present_gpus()}
        chosen = chosen_gpus(hosts, included=request.include, excluded=request.exclude)
        return [str(number) for number in chosen.get("localhost", [0])]
    if not (visible := visible_gpus()):
        return [str(number) for number in range(request.num_gpus or 1)]
    check_device_count(request.num_gpus)
    return visible[: request.num_gpus or (1 if request.deployment == "single_gpu" else None)]


def take_cpu_without_gpu(request: LaunchRequest) -> None:
    """Set the environment variables of a run on the CPU if this machine has no GPU; its processes share the cores."""
    if not request.is_on_one_machine or count_gpus():
        return
    os.environ.setdefault("DS_ACCELERATOR", "cpu")
    os.environ.pop("CUDA_VISIBLE_DEVICES", None)
    cores = len(os.sched_getaffinity(0))
    os.environ.setdefault("OMP_NUM_THREADS", str(max(1, cores // len(chosen_devices(request)))))


def ranks_by_host(request: LaunchRequest) -> list[int]:
    """Return how many ranks a request starts on each machine. A CPU gets one process by default.

    Raises:
        InputError: the host file is wrong, or does not have a host or GPU number of the request.
    """
    if request.is_on_one_machine:
        return [len(chosen_devices(request))]
    return [len(numbers) for numbers in chosen_hosts(request).values()]


def starts_by_host(request: LaunchRequest, module: str, port: int) -> dict[str, RankStart]:
    """Return host -> the `RankStart` of its ranks, without the address of rank 0.

    A request for one machine has the host localhost. Raises InputError: see `ranks_by_host`.
    """
    if request.is_on_one_machine:
        devices = {"localhost": chosen_devices(request)}
    else:
        devices = {host: [str(number) for number in numbers] for host, numbers in chosen_hosts(request).items()}
    starts, first, num_ranks = {}, 0, sum(map(len, devices.values()))
    for host, names in devices.items():
        starts[host] = RankStart(
            module=module,
            argv=request.argv,
            devices=names,
            first=first,
            num_ranks=num_ranks,
            port=port,
            log_folder=request.enable_each_rank_log,
        )
        first += len(names)
    return starts


def address_of(request: LaunchRequest, names: Sequence[str]) -> str:
    """Return the address at which the other hosts reach the first one. Raises EnvironmentFault."""
    if request.master_addr or request.is_on_one_machine:
        return request.master_addr or LOOPBACK
    try:
        address = socket.gethostbyname(names[0].rpartition("@")[2])
        if address.startswith("127.") and len(names) > 1:
            # The first host's name resolves to the loopback interface: take the interface to the second host.
            with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
                probe.connect((socket.gethostbyname(names[1].rpartition("@")[2]), 9))
                address = str(probe.getsockname()[0])
    except OSError as error:
        reason = error.strerror or error
        raise EnvironmentFault(f"{names[0]}: its address is unknown: {reason}; give --master-addr ADDRESS") from None
    return address
