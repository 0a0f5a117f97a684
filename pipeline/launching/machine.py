"""Devices and ports of this machine, read without torch, so that a run that cannot work ends before it starts."""

import os
import shutil
import socket
import subprocess
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Literal

from pipeline.device import query_smi
from pipeline.errors import EnvironmentFault, counted

PORT_POLL_S = 0.1
# MiB that an idle GPU may have in use. Idle GPUs report less than 100; a CUDA context takes about 500.
IDLE_MIB = 200
NVIDIA, AMD = Path("/dev"), Path("/sys/class/kfd/kfd/topology/nodes")  # where a driver shows its GPUs


def count_present_gpus() -> int:
    """Return the number of GPUs of this machine, by nvidia-smi or, without it, by the files of the drivers."""
    if not shutil.which("nvidia-smi"):
        nodes = [file.read_text(encoding="utf-8").strip() for file in AMD.glob("*/gpu_id")]
        return len(list(NVIDIA.glob("nvidia[0-9]*"))) or sum(node != "0" for node in nodes)
    listed = subprocess.run(["nvidia-smi", "-L"], capture_output=True, text=True, check=False).stdout
    return sum(line.startswith("GPU ") for line in listed.splitlines())


def runs_on_cpu() -> bool:
    """Return whether DS_ACCELERATOR=cpu selects the CPU, which it may on a machine with GPUs."""
    return os.environ.get("DS_ACCELERATOR") == "cpu"


def count_gpus() -> int:
    """Return the number of `visible_gpus`. Raises EnvironmentFault if CUDA_VISIBLE_DEVICES names none."""
    return len(visible_gpus())


def visible_gpus() -> list[str]:
    """Return the GPUs that a process sees: those of CUDA_VISIBLE_DEVICES if it is set, else the numbers of all.

    [] with DS_ACCELERATOR=cpu. Raises EnvironmentFault if CUDA_VISIBLE_DEVICES names none.
    """
    present = 0 if runs_on_cpu() else count_present_gpus()
    visible = os.environ.get("CUDA_VISIBLE_DEVICES")
    if visible is None or not present:
        return [str(number) for number in range(present)]
    names = [name.strip() for name in visible.split(",") if name.strip() not in ("", "-1")]
    if not names:
        raise EnvironmentFault(
            f"CUDA_VISIBLE_DEVICES={visible!r} hides all {present} GPUs of this machine; unset it, "
            "or set DS_ACCELERATOR=cpu to run on the CPU"
        )
    return names[:present]


def holders(visible: Sequence[str]) -> dict[str, tuple[str, str]]:
    """Return visible GPU -> its number, and how others use it, in words ("": they do not). {} if that is not known.

    nvidia-smi does not list processes of other containers; they show by memory in use. A GPU that draws a screen always
    has memory in use, so its memory is ignored.
    """
    rows = query_smi("--query-gpu=index,uuid,memory.used,display_active")
    table = {name: row for row in rows if len(row) == 4 for name in row[:2]}
    listed = query_smi("--query-compute-apps=gpu_uuid,pid")
    gpus: dict[str, tuple[str, str]] = {}
    for name in visible:
        number, uuid, used, draws = table.get(name, [""] * 4)  # a part of a GPU (MIG) has no row
        by = ", ".join(row[1] for row in listed if row[0] == uuid)
        is_in_use = by or (used.isdigit() and int(used) > IDLE_MIB and draws != "Enabled")
        gpus[name] = number, f"{used} MiB in use{f' by process {by}' if by else ''}" if is_in_use else ""
    return gpus if set(visible) <= table.keys() else {}


def choose_gpus(count: int, had: int, *, starts: bool) -> tuple[dict[str, Any], str]:
    """Return the launcher's flags for a run on free GPUs of this machine, and a line that names them; "" without GPUs.

    Args:
        count: GPUs of --num-gpus; 0: as many as the run had, or all that are free.
        had: ranks of the run to resume; 0: there is no such run.
        starts: False in a dry run; then the line names missing GPUs, and no error is raised.

    Raises:
        EnvironmentFault: fewer GPUs are free than requested, or than the run had.
    """
    visible, num_gpus = visible_gpus(), count or had
    if not visible:
        return {"deployment_type": "single_node" if num_gpus > 1 else "single_gpu", "num_gpus": num_gpus}, ""
    check_device_count(count)
    gpus = holders(visible)
    in_use = {name: what for name, (_, what) in gpus.items() if what}
    free = [name for name in visible if name not in in_use]
    why, line = f"--num-gpus {count}" if count else f"the run had {counted(had, 'rank')}", ""
    if num_gpus > len(free) or not free:
        busy = "".join(f", GPU {name}: {what}" for name, what in in_use.items())
        line = (
            f"{f'{why}, but ' if num_gpus else ''}{len(free)} of {len(visible)} GPUs are free{busy}; wait, or give "
            f"{f'--num-gpus {len(free)}, or ' if free else ''}--deployment-type single_node, which takes all"
        )
        if starts:
            raise EnvironmentFault(line)
        free, in_use = visible, {}
    chosen = free[: num_gpus or None]
    flags: dict[str, Any] = {"deployment_type": "single_node" if chosen[1:] else "single_gpu", "num_gpus": 0}
    if chosen != visible:
        numbers = ",".join(gpus[name][0] for name in chosen if gpus)
        flags |= {"include": f"localhost:{numbers}"} if in_use else {"num_gpus": len(chosen)}
    left = ", ".join(f"{name} ({in_use.get(name, why)})" for name in visible if name not in chosen)
    unknown = "" if gpus else "; nvidia-smi does not say whether other processes use them"
    return flags, line or f"GPUs of this run: {', '.join(chosen)}{f'; not used: {left}' if left else ''}{unknown}"


def device_kind() -> Literal["cpu", "cuda"]:
    """Return torch's name for the devices of this machine; torch calls AMD's GPUs cuda too."""
    return "cuda" if count_gpus() else "cpu"


def check_device_count(count: int) -> None:
    """Raise EnvironmentFault if there are more ranks than GPUs or, without GPUs, more processes than cores."""
    if gpus := count_gpus():
        if count > gpus:
            here = f"{counted(gpus, 'GPU')} {'is' if gpus == 1 else 'are'} visible here"
            raise EnvironmentFault(f"--num-gpus: got {count}, but {here}; give at most {gpus}")
    elif count > (cores := len(os.sched_getaffinity(0))):
        raise EnvironmentFault(
            f"--num-gpus: got {count}, but this machine has no GPU and {counted(cores, 'core')}; "
            f"give at most {counted(cores, 'process')}"
        )


def check_port(port: int) -> None:
    """Raise EnvironmentFault if something listens on `port` of this machine."""
    with socket.socket() as probe:
        # torch's store sets this option too: a port that only waits for its last packets counts as free.
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind(("", port))
        except OSError as error:
            raise EnvironmentFault(
                f"--master-port: {port}: {error.strerror}; give another one, or leave it out on a single machine"
            ) from None


def free_port() -> int:
    """Return a port of this machine on which nothing listens."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


def wait_for_free_port(port: int, patience_s: float) -> None:
    """Wait until nothing listens on a port. Raises EnvironmentFault after `patience_s` seconds."""
    end = time.monotonic() + patience_s
    while True:
        try:
            return check_port(port)
        except EnvironmentFault:
            if time.monotonic() > end:
                raise
            time.sleep(PORT_POLL_S)
