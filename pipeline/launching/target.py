"""The hardware that a run is planned for: this machine, or hardware that `--target` describes.

This module imports no torch. `--target` takes one of three descriptions:

- The name of a device of DEVICES: its data sheet's speeds, and USABLE of its data sheet's memory.
- A memory such as `24GB`: USABLE of it; the speeds are not known.
- A YAML file: memory as the file gives it; speeds that it lacks come from the data sheet of its device.
"""

import re
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from pipeline.configuration.ds_config import EngineDtype
from pipeline.configuration.flags import load_yaml
from pipeline.device import DeviceConstants, query_gpu, stored_constants
from pipeline.errors import EnvironmentFault, InputError, nearest
from pipeline.files import GIB
from pipeline.launching.machine import count_gpus
from pipeline.processes import memory_of_machine

# Share of a GPU's memory, by its data sheet or driver, that a process can have (measured: 79.1 of an H100's 80 GiB, 139
# of an H200's 141).
USABLE = 0.985
# Data sheets: memory in GiB, TB/s, dense 16-bit TFLOP/s.
DEVICES = {
    "B200-180GB": (180, 8.0, 2250.0),
    "H200-141GB": (141, 4.8, 989.0),
    "H100-80GB": (80, 3.35, 989.0),
    "A100-80GB": (80, 2.0, 312.0),
    "A100-40GB": (40, 1.555, 312.0),
    "A6000-48GB": (48, 0.768, 155.0),
    "L40S-48GB": (48, 0.864, 362.0),
    "RTX5090-32GB": (32, 1.792, 209.0),
    "V100-32GB": (32, 0.9, 125.0),
    "A10-24GB": (24, 0.6, 125.0),
    "L4-24GB": (24, 0.3, 121.0),
    "RTX4090-24GB": (24, 1.008, 165.0),
    "RTX3090-24GB": (24, 0.936, 71.0),
    "V100-16GB": (16, 0.9, 125.0),
    "T4-16GB": (16, 0.32, 65.0),
}  # fmt: skip
# Shares of their data sheet that H200s reached: matrix products 792 of 989 TFLOP/s, copies 4.29 of 4.8 TB/s. Plans
# compute times from data sheets, so measured speeds are divided by these shares.
PRODUCTS, COPIES = 0.80, 0.89
# Largest relative difference of this GPU's measured memory from a described device's up to which `with_constants`
# takes the two for the same device. An A100 of 40 GB and one of 80 GB differ by more.
SAME_MEMORY = 0.1
# Largest relative difference of two memory sizes that `is_same` takes for the same: USABLE of the driver's figure, and
# the size that `rlhf train --check` measured on the same GPU.
SAME_SIZE = 0.02
SIZE = re.compile(r"(\d+\.\d+)(?= GiB each)", re.ASCII)  # in the text of a target
TARGET = re.compile(r"(?:(?:(\d+)x)?(\d+)x)?([A-Za-z][\w-]*|(\d+)GB)", re.ASCII)
SPEEDS = ("tb_per_s", "tflops")  # as in DEVICES
LIMIT = 1_000_000  # upper bound of each number of a description, and of all its GPUs; more is a typing error
FIELDS = ("hosts", "gpus", "name", "memory_gib", "host_memory_gib", *SPEEDS)


@dataclass(frozen=True, slots=True)
class Target:
    """Machines with GPUs, or with processes on a CPU; a figure that is not known is 0.

    name: name of the GPU, or CPU.
    memory: bytes of a GPU's memory, or of a CPU's, that a process can have.
    slots: number of ranks of each machine, in the order of ranks; a rank is a GPU, or a process on a CPU.
    tb_per_s: TB/s of a GPU's memory.
    tflops: TFLOP/s of a GPU in 16 bits.
    host_memory: bytes of a machine's memory.
    described: the target was described by the user; False: it is this machine.
    measured: measured constants of this machine's GPU, if the target has the same GPU; else None.
    is_limited: `memory` is the value of --gpu-memory-gib.
    """

    name: str
    memory: int
    slots: tuple[int, ...] = (1,)
    tb_per_s: float = 0.0
    tflops: float = 0.0
    host_memory: int = 0
    described: bool = True
    measured: DeviceConstants | None = None
    is_limited: bool = False

    @property
    def source(self) -> str:
        """The source of the speeds, in words."""
        if self.measured:
            return f"measured here on {self.measured.day}"
        if self.described:
            return f"{'data sheet' if self.has_speeds_of_sheet else 'as described'}, not measured"
        return f"{'data sheet' if self.tflops else 'not known'}, not measured; `rlhf train --check` measures it"

    @property
    def has_speeds_of_sheet(self) -> bool:
        return self.name in DEVICES and DEVICES[self.name][1:] == (self.tb_per_s, self.tflops)

    @property
    def limit(self) -> str:
        """Text to append to a memory size: " (--gpu-memory-gib)" if that flag limits it, else ""."""
        return " (--gpu-memory-gib)" if self.is_limited else ""

    @property
    def is_cpu(self) -> bool:
        return self.name == "CPU"

    @property
    def dtype(self) -> EngineDtype:
        """The value of `--dtype auto` on this hardware: bf16 if the device supports it, else fp32."""
        return "fp32" if self.is_cpu or re.search(r"V100|T4", self.name) else "bf16"

    @property
    def num_gpus(self) -> int:
        return sum(self.slots)

    @property
    def hosts(self) -> int:
        return len(self.slots)

    @property
    def gpus(self) -> int:
        """The GPUs of the largest machine."""
        return max(self.slots)

    @property
    def is_uneven(self) -> bool:
        return len(set(self.slots)) > 1

    def is_same(self, words: str) -> bool:
        """Return True if `words`, another target as text, names this hardware; memory sizes may differ by SAME_SIZE."""
        here, other = SIZE.split(str(self)), SIZE.split(words)
        if len(here) == len(other) == 3 and here[::2] == other[::2]:
            return abs(float(other[1]) / float(here[1]) - 1) < SAME_SIZE
        return here == other

    def __str__(self) -> str:
        hosts = f"{self.hosts} x " if self.hosts > 1 else ""
        gpus = f"({' + '.join(map(str, self.slots))})" if self.is_uneven else f"{hosts}{self.gpus}"
        gib = self.memory / GIB
        size = f"{gib:.{1 if gib >= 0.1 else 2}f} GiB{self.limit} each" if self.memory else "of unknown memory"
        return f"{gpus} x {self.name}, {size}"


def this_machine(*slots: int) -> Target:
    """Describe machines like this one; slots: ranks on each of them. Memory is 0 if it is not known."""
    host_memory = memory_of_machine()
    if not count_gpus():
        return Target("CPU", host_memory // max(slots), slots, host_memory=host_memory, described=False)
    name, mib = query_gpu("name", "memory.total") or ("GPU", "0")
    memory = int(int(mib) * 2**20 * USABLE) if mib.isdigit() else 0
    sheets = [sheet for device, sheet in DEVICES.items() if is_model(device, name)]
    # Two sheets match an A100 (40 and 80 GB): take the one with the nearer memory.
    sheet = min(sheets, key=lambda sheet: abs(sheet[0] * GIB - memory), default=(0, 0.0, 0.0))
    return Target(name, memory, slots, sheet[1], sheet[2], host_memory, False)


def is_model(device: str, name: str) -> bool:
    """Return True if a driver's `name` for a GPU is that of `device`, a key of DEVICES; memory is not compared.

    `RTX4090-24GB` matches the name `NVIDIA GeForce RTX 4090`.
    """
    words = re.sub(r"(?<=[A-Za-z])(?=\d)|(?<=\d)(?=[A-Za-z])", " ?", re.escape(device.partition("-")[0]))
    return re.search(rf"\b{words}\b", name) is not None


def with_constants(target: Target) -> Target:
    """Return the target with the constants measured on this machine's GPU, if it has the same device.

    This machine's own target always takes them.
    """
    constants = stored_constants()
    if constants is None or target.is_cpu:
        return target
    # A target file with speeds of its own keeps all of them.
    is_same = (
        target.has_speeds_of_sheet
        and is_model(target.name, constants.name)
        and abs(constants.memory / target.memory - 1) < SAME_MEMORY
    )
    if target.described and not is_same:
        return target
    return replace(
        target,
        memory=constants.memory,
        tb_per_s=constants.tb_per_s / COPIES,
        tflops=constants.tflops / PRODUCTS,
        measured=constants,
    )


def with_limit(target: Target, gib: float) -> Target:
    """Return the target with the memory of each GPU limited to `gib` (--gpu-memory-gib); 0: no limit.

    Raises:
        EnvironmentFault: its GPUs have less memory than that.
    """
    if not gib or target.is_cpu:
        return target
    if 0 < target.memory < int(gib * GIB):
        raise EnvironmentFault(
            f"--gpu-memory-gib {gib:g}: {target.name} has {target.memory / GIB:.2f} GiB; give less, or 0 for all of it"
        )
    return replace(target, memory=int(gib * GIB), is_limited=True)


def parse_target(text: str) -> Target:
    """Read `--target`: `[[HOSTSx]GPUSx]DEVICE` (default: one GPU), or a YAML file with fields of FIELDS.

    A DEVICE is one of DEVICES, or a memory such as `24GB`, whose speeds are not known.

    Raises:
        InputError: a device or field is unknown; the message lists the known ones.
    """
    if Path(text).suffix in (".yaml", ".yml", ".json") or Path(text).is_file():
        return target_of_file(Path(text))
    match = TARGET.fullmatch(text.replace(" ", ""))
    if not match or not 0 < int(match[1] or 1) * int(match[2] or 1) * int(match[4] or 1) < LIMIT:
        raise InputError(
            f"--target {text}: expected DEVICE, GPUSxDEVICE, HOSTSxGPUSxDEVICE (2x8xA100-40GB) or a YAML file"
        )
    slots = (int(match[2] or 1),) * int(match[1] or 1)
    if match[4]:
        return Target(match[3], int(int(match[4]) * USABLE * GIB), slots)
    if re.match(r"MI\d", match[3]):
        raise InputError(
            f"--target {text}: {match[3]}: an AMD GPU, and runs need CUDA; to plan its memory only, give 192GB"
        )
    names = devices_called(match[3])
    if len(names) != 1:
        reason = f"give one of {', '.join(names)}" if names else f"known are {', '.join(DEVICES)}, or give a YAML file"
        raise InputError(f"--target {text}: {match[3]}: {reason}{nearest(match[3], DEVICES) if not names else ''}")
    memory, tb_per_s, tflops = DEVICES[names[0]]
    return Target(names[0], int(memory * USABLE * GIB), slots, tb_per_s, tflops)


def devices_called(name: str) -> list[str]:
    """Return the devices of DEVICES with this name, which may omit the memory: `A100` gives two."""
    return [device for device in DEVICES if name in (device, device.rpartition("-")[0])]


def target_of_file(path: Path) -> Target:
    """Read a target from a YAML file. Missing speeds come from the data sheet of its device, if there is one.

    `memory_gib` is the memory that a process can have: it is not multiplied by USABLE.

    Raises:
        InputError: a field is wrong; the message names the file and the field.
    """
    try:
        content = load_yaml(str(path))
    except InputError as error:
        raise InputError(f"--target: {error}") from None
    if "memory_gib" not in content:
        raise InputError(f"--target: {path}: expected fields {', '.join(FIELDS)}, of which memory_gib is required")
    for name, value in content.items():
        if name not in FIELDS:
            raise InputError(f"--target: {path}: {name}: unknown field{nearest(str(name), FIELDS)}")
        kind: Any = int if name in ("hosts", "gpus") else int | float
        if name == "name" and not (isinstance(value, str) and value):
            raise InputError(f"--target: {path}: name: got {value!r}, expected the name of a device")
        # In Python, `true` is an int too.
        if name != "name" and not (isinstance(value, kind) and not isinstance(value, bool) and 0 < value < LIMIT):
            expected = f"a {'whole ' if kind is int else ''}number above 0 and below {LIMIT:,}"
            raise InputError(f"--target: {path}: {name}: got {value!r:.40}, expected {expected}")
    if content.get("hosts", 1) * content.get("gpus", 1) >= LIMIT:
        raise InputError(f"--target: {path}: hosts x gpus: expected fewer than {LIMIT:,} GPUs")
    name, memory = str(content.get("name", path.stem)), int(content["memory_gib"] * GIB)
    name = min(devices_called(name), key=lambda device: abs(DEVICES[device][0] * GIB - memory), default=name)
    sheet = DEVICES.get(name, (0,) + (0.0,) * len(SPEEDS))[1:]
    speeds = [float(content.get(field, value)) for field, value in zip(SPEEDS, sheet, strict=True)]
    return Target(
        name,
        memory,
        (int(content.get("gpus", 1)),) * int(content.get("hosts", 1)),
        speeds[0],
        speeds[1],
        int(content.get("host_memory_gib", 0) * GIB),
    )
