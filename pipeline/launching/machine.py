"""Devices and ports of this machine, read without torch so that a run is refused before it starts."""

import os
import shutil
import socket
import subprocess
import time
from pathlib import Path
from typing import Literal

from pipeline.errors import EnvironmentFault, counted

PORT_POLL_S = 0.1
NVIDIA, AMD = Path("/dev"), Path("/sys/class/kfd/kfd/topology/nodes")  # where a driver shows its GPUs


def count_present_gpus() -> int:
    """Return the number of GPUs of this machine: by nvidia-smi, or where there is none by what the drivers show."""
    if not shutil.which("nvidia-smi"):
        nodes = [file.read_text(encoding="utf-8").strip() for file in AMD.glob("*/gpu_id")]
        return len(list(NVIDIA.glob("nvidia[0-9]*"))) or sum(node != "0" for node in nodes)
    listed = subprocess.run(["nvidia-smi", "-L"], capture_output=True, text=True, check=False).stdout
    return sum(line.startswith("GPU ") for line in listed.splitlines())


def runs_on_cpu() -> bool:
    """Return whether DS_ACCELERATOR=cpu asks for the CPU, also where there are GPUs."""
    return os.environ.get("DS_ACCELERATOR") == "cpu"


def count_gpus() -> int:
    """Return the number of GPUs that a process sees: those of CUDA_VISIBLE_DEVICES if it is set, else all.

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


def visible_gpus() -> list[str]:
    """Return the GPUs that a process sees, as CUDA_VISIBLE_DEVICES names them, else by number. See `count_gpus`."""
    count = count_gpus()
    names = os.environ.get("CUDA_VISIBLE_DEVICES") or ",".join(map(str, range(count)))
    return [name.strip() for name in names.split(",") if name.strip()][:count]


def device_kind() -> Literal["cpu", "cuda"]:
    """Return torch's name for the devices of this machine; AMD's GPUs are cuda to it too."""
    return "cuda" if count_gpus() else "cpu"


def check_device_count(count: int) -> None:
    """Raise EnvironmentFault for more ranks than GPUs; without GPUs, for more processes than cores."""
    if gpus := count_gpus():
        if count > gpus:
            here = f"{counted(gpus, 'GPU')} {'is' if gpus == 1 else 'are'} visible here"
            raise EnvironmentFault(f"--num-gpus: found {count}, but {here}; give at most {gpus}")
    elif count > (cores := len(os.sched_getaffinity(0))):
        raise EnvironmentFault(
            f"--num-gpus: found {count}, but this machine has no GPU and {counted(cores, 'core')}; "
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


def free_port() -> int:
    """Return a port of this machine on which nothing listens."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


def wait_for_free_port(port: int, patience_s: float) -> None:
    """Wait until nothing listens on a port. Raises EnvironmentFault if that takes longer than `patience_s`."""
    end = time.monotonic() + patience_s
    while True:
        try:
            return check_port(port)
        except EnvironmentFault:
            if time.monotonic() > end:
                raise
            time.sleep(PORT_POLL_S)
