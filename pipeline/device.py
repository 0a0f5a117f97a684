"""Store the measured constants of this machine's GPU in the user's cache folder, for plans.

`run/measure_device.py` measures them and `launching/target.py` reads them. The module imports no torch.
"""

import os
import subprocess
from contextlib import suppress
from dataclasses import asdict, dataclass
from importlib import metadata
from pathlib import Path

from pipeline.files import GIB, cache_folder, cache_path, read_object, write_json

# Bytes (expected, high) of a GPU that a process uses outside torch's allocator, measured
# (benchmarks/reports/memory.md): the CUDA context with its kernels, on an H200. A figure measured on this machine
# replaces the expected one.
CONTEXT = (GIB * 6 // 10, GIB * 12 // 10)
# The same for the buffers of NCCL, with several ranks.
NCCL = (GIB // 2, GIB)


@dataclass(frozen=True, slots=True)
class DeviceConstants:
    """Measured constants of a GPU; 0 for a constant that could not be measured.

    name: name of the GPU.
    day: date of the measurement (ISO).
    memory: bytes that a process can have.
    tflops: TFLOP/s of matrix products in bf16.
    tb_per_s: TB/s of copies on the GPU, bytes read and bytes written.
    host_gb_per_s: GB/s of a copy from page-locked host memory.
    context: bytes that CUDA takes with its kernels.
    nccl: bytes that a communicator takes.
    """

    name: str
    day: str
    memory: int
    tflops: float
    tb_per_s: float
    host_gb_per_s: float
    context: int = 0
    nccl: int = 0

    def __str__(self) -> str:
        speeds = f"{self.tflops:.0f} TFLOP/s, {self.tb_per_s:.3g} TB/s, {self.host_gb_per_s:.3g} GB/s from the host"
        return f"{self.name}, measured {self.day}: {speeds}, {bytes_of_cuda(self, 1)[0] / GIB:.2f} GiB of CUDA's own"


def query_gpu(*fields: str) -> list[str]:
    """Return nvidia-smi's values for the first visible GPU; [] if it does not print them."""
    gpu = os.environ.get("CUDA_VISIBLE_DEVICES", "").partition(",")[0].strip() or "0"
    values = next(iter(query_smi("-i", gpu, f"--query-gpu={','.join(fields)}")), [])
    return values if len(values) == len(fields) else []


def query_smi(*options: str) -> list[list[str]]:
    """Return the rows that nvidia-smi prints for a query; [] without nvidia-smi."""
    command = ["nvidia-smi", *options, "--format=csv,noheader,nounits"]
    with suppress(OSError):
        output = subprocess.run(command, capture_output=True, text=True, check=False).stdout
        return [[value.strip() for value in line.split(",")] for line in output.splitlines()]
    return []


def constants_file() -> Path:
    """Return the file of measured constants: device, torch and driver -> constants."""
    return cache_path(None) / "devices.json"


def device_key() -> str:
    """Return this machine's GPU, torch and driver in words, by which constants are stored; empty without a GPU."""
    values = query_gpu("name", "driver_version")
    return f"{values[0]}, torch {metadata.version('torch')}, driver {values[1]}" if values else ""


def stored_constants() -> DeviceConstants | None:
    """Return the constants that were measured for this machine's GPU, torch and driver; None: not measured."""
    stored = read_object(constants_file())
    with suppress(TypeError, KeyError):  # another commit, which measured other constants, may have written the file
        return DeviceConstants(**stored[device_key()]) if stored else None
    return None


def store_constants(constants: DeviceConstants) -> None:
    """Store the constants of this machine's GPU beside those of other devices. Raises EnvironmentFault."""
    cache_folder(None)
    write_json(constants_file(), read_object(constants_file()) | {device_key(): asdict(constants)})


def bytes_of_cuda(measured: DeviceConstants | None, ranks: int) -> tuple[int, int]:
    """Return the bytes of a GPU that CUDA and, with several ranks, NCCL use: (expected, high).

    A measured figure above the high one is ignored: other processes used the GPU during the measurement.
    """
    figures = (measured.context, measured.nccl) if measured else (0, 0)
    parts = list(zip(figures, (CONTEXT, NCCL), strict=True))[: 1 if ranks == 1 else 2]
    expected = sum(figure if 0 < figure <= limits[1] else limits[0] for figure, limits in parts)
    return expected, expected + sum(limits[1] - limits[0] for _, limits in parts)
