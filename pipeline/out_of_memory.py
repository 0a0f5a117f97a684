"""Errors for want of memory, of a device or of the host, told in one line: how much was asked for, how much was free.

For stages and commands alike; what to lower depends on their flags and is the caller's to say. Imports no torch.
"""

import os
import re
from collections.abc import Mapping

from pipeline.heartbeat import Phase
from pipeline.processes import GIB, free_memory, read_process

# As CUDA, cuBLAS, torch's CPU allocator, the kernel and C++ say it.
WORDS = (
    "out of memory", "can't allocate memory", "Cannot allocate memory", "bad_alloc", "CUBLAS_STATUS_ALLOC_FAILED",
)  # fmt: skip
# "Tried to allocate 2.00 GiB" (CUDA), "you tried to allocate 800 bytes" (CPU), "Unable to allocate 7.28 TiB" (numpy).
ASKED = re.compile(r"(?:tried|unable) to allocate ([\d.]+) ?(bytes|[KMGTP]?i?B)", re.IGNORECASE)
FREE_ON_DEVICE = re.compile(r"total capacity of ([\d.]+ \w+) of which ([\d.]+ \w+) is free")

# The flag that says how many rows pass through a model at once in a phase of a step.
BATCH_FLAGS = {
    "generate": "per_device_generation_batch_size",
    "train": "per_device_train_batch_size",
    "evaluate": "per_device_eval_batch_size",
}
# Phase -> [batch size that the flags ask for, batch size in force since an out-of-memory error]; KEPT_CACHE -> [1, 0]
# where the buffers of generation are no longer kept between rollouts.
Halved = Mapping[str, list[int]]
KEPT_CACHE = "cache"
# Batches that a job is started again with after an out-of-memory error: "train:8:4,score:16384:8192". No character of
# it means something to the shell that DeepSpeed's launcher puts it through.
HALVED = "PYTHON_RUN_HALVED"


class BatchTooLarge(Exception):
    """Want of memory for a batch of a phase, which `halved` has half as large, for another start.

    halved is empty where a single row was too much; `flag` is then what cannot be lower.
    """

    def __init__(self, cause: BaseException, phase: Phase, *, flag: str, halved: Halved) -> None:
        super().__init__(f"phase {phase}: {memory_line(cause)}")
        self.phase, self.flag, self.halved = phase, flag, halved


def batches_in_words(halved: Halved, *phases: str) -> str:
    """Return `--per_device_train_batch_size 4 instead of 8` for these phases, or for all."""
    return ", ".join(batch_in_words(phase, *halved[phase]) for phase in phases or halved)


def batch_in_words(phase: str, asked: int, size: int) -> str:
    if phase == KEPT_CACHE:
        return "the KV cache given back after each rollout"
    name = f"--{BATCH_FLAGS[phase]}" if phase in BATCH_FLAGS else f"tokens at once ({phase})"
    return f"{name} {size} instead of {asked}"


def halved_as_text(halved: Halved) -> str:
    """Return the value of the variable HALVED for ranks that start with these batches."""
    return ",".join(f"{phase}:{asked}:{size}" for phase, (asked, size) in halved.items())


def halved_before() -> dict[str, list[int]]:
    """Return the batches that this job was started again with; empty at its first start."""
    parts = [part.split(":") for part in filter(None, os.environ.get(HALVED, "").split(","))]
    return {phase: [int(asked), int(size)] for phase, asked, size in parts}


def is_out_of_memory(error: BaseException) -> bool:
    """Tell whether an error says that memory could not be had."""
    return isinstance(error, MemoryError) or any(words in str(error) for words in WORDS)


def memory_line(error: BaseException) -> str:
    """Return `out of memory: 2.00 GiB asked for, 44.69 MiB free of 79.11 GiB on the device`, as far as it is known."""
    text = str(error)
    match = ASKED.search(text)
    asked = f"{size(match[1], match[2])} asked for, " if match else ""
    if free := FREE_ON_DEVICE.search(text):
        return f"out of memory: {asked}{free[2]} free of {free[1]} on the device"
    if "CUDA" in text or "CUBLAS" in text:
        return f"out of memory on the device: {asked}{' '.join(text.split())[:100]}"
    own = read_process(os.getpid())
    held = f" (this process held {own.rss_bytes / GIB:.1f} GiB)" if own else ""
    return f"out of memory on the host: {asked}{free_memory()}{held}"


def size(number: str, unit: str) -> str:
    """Return a size as it is, but `2.50 GiB` of a number of bytes."""
    return f"{int(number) / GIB:.2f} GiB" if unit == "bytes" else f"{number} {unit}"
