"""Constants of this machine's GPU, measured once and kept in the user's cache folder for plans.

`measure_device.py` makes them and `launching/target.py` reads them. Imports no torch.
"""

import os
import subprocess
from contextlib import suppress
from dataclasses import asdict, dataclass
from importlib import metadata
from pathlib import Path

from pipeline.data.cache import cache_folder, cache_path
from pipeline.files import GIB, read_object, write_json


@dataclass(frozen=True, slots=True)
class DeviceConstants:
    """Measured constants of a GPU, 0 where one could not be measured.

    day: of the measurement (ISO). memory: bytes that a process can have. tflops: of products in bf16. tb_per_s: read
    and written by copies. host_gb_per_s: of a copy from page-locked host memory. context, nccl: bytes that CUDA with
    its kernels takes, and a communicator. link_gb_per_s: sent by each GPU of this machine in an all-reduce.
    """

    name: str
    day: str
    memory: int
    tflops: float
    tb_per_s: float
    host_gb_per_s: float
    context: int = 0
    nccl: int = 0
    link_gb_per_s: float = 0.0

    def __str__(self) -> str:
        speeds = f"{self.tflops:.0f} TFLOP/s, {self.tb_per_s:.3g} TB/s, {self.host_gb_per_s:.3g} GB/s from the host"
        return f"{self.name}, measured {self.day}: {speeds}, {self.context / GIB:.2f} GiB of CUDA's own"


def query_gpu(*fields: str) -> list[str]:
    """Return nvidia-smi's values of the first visible GPU; [] where it does not tell them."""
    gpu = os.environ.get("CUDA_VISIBLE_DEVICES", "").partition(",")[0].strip() or "0"
    query = ["nvidia-smi", "-i", gpu, f"--query-gpu={','.join(fields)}", "--format=csv,noheader,nounits"]
    with suppress(OSError):
        answer = subprocess.run(query, capture_output=True, text=True, check=False).stdout
        values = [value.strip() for value in answer.partition("\n")[0].split(",")]
        return values if len(values) == len(fields) else []
    return []


def constants_file() -> Path:
    """Return the file of measured constants: device, torch and driver -> constants."""
    return cache_path(None) / "devices.json"


def device_key() -> str:
    """Return this machine's GPU, torch and driver in words, as constants are kept by; empty where there is no GPU."""
    found = query_gpu("name", "driver_version")
    return f"{found[0]}, torch {metadata.version('torch')}, driver {found[1]}" if found else ""


def kept_constants() -> DeviceConstants | None:
    """Return the constants that were measured for this machine's GPU, torch and driver; None: not measured."""
    kept = read_object(constants_file())
    with suppress(TypeError, KeyError):  # of another version of this file
        return DeviceConstants(**kept[device_key()]) if kept else None
    return None


def keep_constants(constants: DeviceConstants) -> None:
    """Write the constants of this machine's GPU to the file, beside those of others. Raises EnvironmentFault."""
    cache_folder(None)
    write_json(constants_file(), read_object(constants_file()) | {device_key(): asdict(constants)})
