"""Errors for want of memory, of a device or of the host, told in one line: how much was asked for, how much was free.

For stages and commands alike; what to lower depends on their flags and is the caller's to say. Imports no torch.
"""

import os
import re

from pipeline.processes import GIB, free_memory, read_process

# As CUDA, cuBLAS, torch's CPU allocator, the kernel and C++ say it.
WORDS = (
    "out of memory", "can't allocate memory", "Cannot allocate memory", "bad_alloc", "CUBLAS_STATUS_ALLOC_FAILED",
)  # fmt: skip
# "Tried to allocate 2.00 GiB" (CUDA), "you tried to allocate 800 bytes" (CPU), "Unable to allocate 7.28 TiB" (numpy).
ASKED = re.compile(r"(?:tried|unable) to allocate ([\d.]+) ?(bytes|[KMGTP]?i?B)", re.IGNORECASE)
FREE_ON_DEVICE = re.compile(r"total capacity of ([\d.]+ \w+) of which ([\d.]+ \w+) is free")


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
