"""Measure a device's copy bandwidth and matrix throughput: `python -m benchmarks.speed.roofline` prints JSON."""

import argparse
import json
from dataclasses import asdict, dataclass

import torch

from pipeline.run.measure_device import copy_bandwidth, matrix_throughput

# Word in a device's name -> bytes/s of its data sheet, and dense bf16 operations/s (H200: the figure that real matrices
# reach, against which MFU is given).
DATA_SHEETS = {"H200": (4.8e12, 790e12), "H100": (3.35e12, 790e12), "A100": (2.04e12, 312e12)}


@dataclass(frozen=True, slots=True)
class Device:
    """A device's bandwidth (bytes/s between its memory and its cores, read or written) and matrix operations/s."""

    name: str
    bandwidth: float
    flops: float


def data_sheet(measured: Device) -> Device:
    """The published figures of a known device, else the measured ones."""
    for word, (bandwidth, flops) in DATA_SHEETS.items():
        if word in measured.name:
            return Device(measured.name, bandwidth, flops)
    return measured


def measure(*, copy_mib: int = 0, matrix: int = 0) -> Device:
    """Measure the device of this process; 0: sizes that fit its kind."""
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    on_gpu = device.type == "cuda"
    num_bytes = (copy_mib or (8192 if on_gpu else 64)) * 2**20
    bandwidth = copy_bandwidth(device, num_bytes)
    flops = matrix_throughput(device, matrix or (8192 if on_gpu else 256))
    return Device(torch.cuda.get_device_name(device) if on_gpu else "cpu", bandwidth, flops)


def main() -> None:
    """Print the measured roofline of this device as JSON."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--copy_mib", type=int, default=0, help="MiB that are copied; 0: by the device's kind")
    parser.add_argument("--matrix", type=int, default=0, help="rows of the square matrices; 0: by the device's kind")
    options = parser.parse_args()
    print(json.dumps(asdict(measure(copy_mib=options.copy_mib, matrix=options.matrix))))


if __name__ == "__main__":
    main()
