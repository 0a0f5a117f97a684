"""Out-of-memory errors of a device or of the host in one line: how much was requested, how much was free.

Stages and commands use it, and add which of their flags to lower. The module imports no torch.
"""

import os
import re
from collections.abc import Mapping

from pipeline.errors import dashed
from pipeline.files import GIB
from pipeline.heartbeat import Phase
from pipeline.processes import free_memory, read_process

# Parts of out-of-memory messages of CUDA, cuBLAS, torch's CPU allocator, the kernel and C++.
WORDS = (
    "out of memory", "can't allocate memory", "Cannot allocate memory", "bad_alloc", "CUBLAS_STATUS_ALLOC_FAILED",
)  # fmt: skip
# The requested size: "Tried to allocate 2.00 GiB" (CUDA), "you tried to allocate 800 bytes" (CPU), "Unable to allocate
# 7.28 TiB" (numpy).
REQUESTED = re.compile(r"(?:tried|unable) to allocate ([\d.]+) ?(bytes|[KMGTP]?i?B)", re.IGNORECASE)
SIZE = r"([\d.]+ \w+)"
FREE = rf"total capacity of {SIZE} of which {SIZE} is free"
FREE_ON_DEVICE = re.compile(FREE)
USED_ON_DEVICE = re.compile(rf"{FREE}.*?this process has {SIZE} memory in use", re.DOTALL)
UNITS = {"bytes": 1, "KiB": 2**10, "MiB": 2**20, "GiB": GIB, "TiB": 2**40}
# Part of torch's message if --gpu-memory-gib is given.
ALLOWED = re.compile(r"([\d.]+ \w+) allowed; Of the allocated memory ([\d.]+ \w+) is")

# Phase -> the flag for the rows that pass through a model at once.
BATCH_FLAGS = {
    "generate": "per_device_generation_batch_size",
    "train": "per_device_train_batch_size",
    "evaluate": "per_device_eval_batch_size",
}
# Phase -> batch sizes: [the flag's, the one since an out-of-memory error]. KEPT_CACHE -> [1, 0] if the buffers of
# generation are freed after each rollout.
Halved = Mapping[str, list[int]]
KEPT_CACHE = "cache"
# Environment variable with the batch sizes of a job that starts again after an out-of-memory error, such as
# "train:8:4,score:16384:8192". It has no characters that a shell interprets. Variables with its prefix are sent to
# other hosts (launching/remote_host.py).
HALVED = "PYTHON_RUN_HALVED"


class BatchTooLarge(Exception):
    """An out-of-memory error in a batch of a phase; `halved` has the batch sizes for another start.

    It is empty if a single row is too large; `flag` is then the flag that cannot be lower.
    """

    def __init__(self, cause: BaseException, phase: Phase, *, flag: str, halved: Halved) -> None:
        super().__init__(f"phase {phase}: {memory_line(cause)}")
        self.phase, self.flag, self.halved = phase, flag, halved


def batches_in_words(halved: Halved, *phases: str) -> str:
    """Return `--per-device-train-batch-size 4 instead of 8` for these phases, or for all."""
    return ", ".join(batch_in_words(phase, *halved[phase]) for phase in phases or halved)


def batch_in_words(phase: str, requested: int, size: int) -> str:
    if phase == KEPT_CACHE:
        return "the KV cache freed after each rollout"
    name = dashed(BATCH_FLAGS[phase]) if phase in BATCH_FLAGS else f"tokens at once ({phase})"
    return f"{name} {size} instead of {requested}"


def halved_as_text(halved: Halved) -> str:
    """Return the value of the environment variable HALVED for ranks that start with these batches."""
    return ",".join(f"{phase}:{requested}:{size}" for phase, (requested, size) in halved.items())


def halved_before() -> dict[str, list[int]]:
    """Return the batches that this job was started again with; empty at its first start."""
    parts = [part.split(":") for part in filter(None, os.environ.get(HALVED, "").split(","))]
    return {phase: [int(requested), int(size)] for phase, requested, size in parts}


def is_out_of_memory(error: BaseException) -> bool:
    """Return True if an error is an out-of-memory error."""
    return isinstance(error, MemoryError) or any(words in str(error) for words in WORDS)


def memory_line(error: BaseException) -> str:
    """Return `out of memory: 2.00 GiB asked for, 44.69 MiB free of 79.11 GiB on the device`, without unknown parts."""
    text = str(error)
    match = REQUESTED.search(text)
    requested = f"{size(match[1], match[2])} asked for, " if match else ""
    if free := FREE_ON_DEVICE.search(text):
        limit = ALLOWED.search(text)
        allowed = f"{limit[2]} taken of {limit[1]} allowed (--gpu-memory-gib), " if limit else ""
        return f"out of memory: {requested}{allowed}{free[2]} free of {free[1]} on the device{used_by_others(text)}"
    if "CUDA" in text or "CUBLAS" in text:
        return f"out of memory on the device: {requested}{' '.join(text.split())[:100]}"
    process = read_process(os.getpid())
    resident = f" (this process held {process.rss_bytes / GIB:.1f} GiB)" if process else ""
    return f"out of memory on the host: {requested}{free_memory()}{resident}"


def used_by_others(text: str) -> str:
    """Return `, 62.1 GiB used by other processes` from a CUDA error; empty for less than a GiB."""
    if not (uses := USED_ON_DEVICE.search(text)):
        return ""
    total_gib, *known_gib = (float(number) * UNITS[unit] / GIB for number, unit in map(str.split, uses.groups()))
    others_gib = total_gib - sum(known_gib)
    return f", {others_gib:.1f} GiB used by other processes" if others_gib >= 1 else ""


def size(number: str, unit: str) -> str:
    """Return a size with its unit; bytes are converted to GiB."""
    return f"{int(number) / GIB:.2f} GiB" if unit == "bytes" else f"{number} {unit}"
