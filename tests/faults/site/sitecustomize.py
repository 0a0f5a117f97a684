"""Python imports this first where its folder is in PYTHONPATH: a test makes ranks fail, or a flag be ignored."""

import os
import signal
import time


def fail(*_: object) -> None:
    raise ValueError("on purpose")


def fill_memory(*_: object) -> None:
    bytearray(2**34)


def hang(*_: object) -> None:
    time.sleep(1e6)


if "RANK" in os.environ:
    time.sleep(float(os.environ.get("LATE_RANKS", "0")))
    signal.signal(signal.SIGUSR1, fail)
    signal.signal(signal.SIGUSR2, hang)
    signal.signal(signal.SIGRTMIN, fill_memory)

if "RANK" in os.environ and "OUT_OF_MEMORY" in os.environ:
    rank, above, number = os.environ["OUT_OF_MEMORY"].split(":")
    if os.environ["RANK"] == rank:
        from little_memory import lack_memory

        lack_memory(int(above), int(number))

if "RANK" in os.environ and "GPU_CAP_GIB" in os.environ:
    from little_memory import cap_gpu

    cap_gpu(float(os.environ["GPU_CAP_GIB"]))

if "IGNORED_FLAG_FIELD" in os.environ:
    import ignored_flag

    ignored_flag.ignore_in_this_process()
