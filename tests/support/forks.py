"""Processes that are forked from a server which has imported the heavy libraries: they start in no time.

Importing torch, DeepSpeed and transformers costs a fresh process five seconds. The server never computes, so that no
thread of it is missing in a child; a test's own process may have computed. Each pytest worker has one server.
"""

import importlib.util
import multiprocessing
import os
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from multiprocessing import forkserver
from multiprocessing.process import BaseProcess
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[2]
PATHS = tuple(str(ROOT / folder) for folder in (".", "tests", "tests/faults", "tests/multi"))
PACKAGES = {"sft": "step1_sft", "reward": "step2_reward", "ppo": "step3_ppo", "dpo": "step3_dpo"}
PRELOADED = [
    "pipeline.engine.engine", "pipeline.checkpoints.model_folder", "step3_ppo.models.hybrid_engine",
    "torch.utils.tensorboard", "peft", "transformers.models.opt.modeling_opt",
    *(f"{package}.{name}" for package in PACKAGES.values() for name in ("main", "training")),
    "rlhf.main", "rlhf.train", "support.warm",
]  # fmt: skip
LAUNCHED = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")

context = multiprocessing.get_context("forkserver")


def environment() -> dict[str, str]:
    """Variables of a run: none of a launcher's, one thread, offline."""
    kept = {name: value for name, value in os.environ.items() if name not in LAUNCHED}
    paths = os.pathsep.join(filter(None, [str(ROOT), os.environ.get("PYTHONPATH")]))
    return kept | {"PYTHONPATH": paths, "OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1"}


@contextmanager
def server_variables() -> Iterator[None]:
    """Environment of the server, which its children start from."""
    before = dict(os.environ)
    paths = filter(None, [*PATHS, os.environ.get("PYTHONPATH")])  # Python 3.11 gives its server no sys.path
    os.environ |= {"OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1", "PYTHONPATH": os.pathsep.join(paths)}
    for name in os.environ.keys() & LAUNCHED:  # of a test that is at work in this process
        del os.environ[name]
    if os.environ.get("DS_ACCELERATOR") != "cpu" and Path("/dev/nvidiactl").exists():
        os.environ["PYTORCH_NVML_BASED_CUDA_CHECK"] = "1"  # the other check would keep children from using CUDA
    else:
        os.environ["DS_ACCELERATOR"] = "cpu"
    try:
        yield
    finally:
        os.environ.clear()
        os.environ.update(before)


def preloaded() -> list[str]:
    """Return the modules of the server: none where bitsandbytes, which peft imports, would start CUDA in it."""
    starts_cuda = os.environ.get("DS_ACCELERATOR") != "cpu" and importlib.util.find_spec("bitsandbytes") is not None
    return [] if starts_cuda else PRELOADED


def start(target: Callable[..., None], *arguments: Any) -> BaseProcess:
    """Call `target(*arguments)`, all of which can be pickled, in a child of the server; starts that first."""
    sys.path[:0] = [path for path in PATHS if path not in sys.path]
    context.set_forkserver_preload(preloaded())
    with server_variables():
        forkserver.ensure_running()
    process = context.Process(target=target, args=arguments)
    process.start()
    return process


def rank_variables(rank: int, ranks: int, port: int) -> dict[str, str]:
    """Environment of one of several ranks of this machine, as torchrun writes it."""
    own = {"RANK": rank, "LOCAL_RANK": rank, "WORLD_SIZE": ranks, "LOCAL_WORLD_SIZE": ranks, "MASTER_PORT": port}
    return {name: str(value) for name, value in own.items()} | {"MASTER_ADDR": "127.0.0.1"}


def write_output_to(stdout: Path, stderr: Path) -> None:
    """Send this process's output, also that of its libraries, to the ends of two files."""
    for stream, path in ((1, stdout), (2, stderr)):
        with path.open("ab") as file:
            os.dup2(file.fileno(), stream)


def exit_code(children: list[BaseProcess]) -> int:
    """Wait for all ranks; the first exit code that is not 0, negative for a signal."""
    for process in children:
        process.join()
    return next((process.exitcode for process in children if process.exitcode), 0)
