"""The connection to one host of a job: start an agent there (host_agent.py) by ssh or srun, and talk to it."""

import json
import os
import queue
import shlex
import shutil
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import IO, Any

from pipeline.errors import EnvironmentFault, show
from pipeline.launching.request import LaunchRequest
from pipeline.processes import PIPELINE, kill_sessions

ENDING_S = 5.0  # seconds for a connection to end by itself
SILENCE_S = 60.0  # seconds of silence after which a host counts as lost; its agent has ended its ranks before
AGENT = [sys.executable, "-u", "-m", "pipeline.launching.host_agent"]
# Prefixes of the environment variables that are sent to all hosts; DeepSpeed's file adds others.
PASSED_ON = (
    "NCCL", "PYTHON", "GLOO", "UCX", "DS_", "HF_", "TRANSFORMERS_", "OMP_", "TORCH", "TOKENIZERS_", "WANDB_",
    "TRACKIO_", "SWANLAB_", "MLFLOW_", PIPELINE,
)  # fmt: skip
ENVIRONMENT_FILE = ".deepspeed_env"

Message = dict[str, Any]


class Host:
    """A host of the job. Its agent gets the job and answers with a greeting.

    name: its name in the host file.
    ranks: the numbers of its ranks.
    process: the local process that connects to the agent.
    greeting: the agent's first message.
    code: None while its ranks run; then 0, or the exit code of a rank that wrote no outcome.
    heard_s: time of its last message, in seconds of the monotonic clock.
    """

    def __init__(
        self, name: str, ranks: Sequence[int], request: LaunchRequest, job: Message, output: IO[bytes] | None = None
    ) -> None:
        self.name, self.ranks = name, ranks
        self.greeting: Message = {}
        self.code: int | None = None
        self.heard_s = time.monotonic()
        self._inbox: queue.SimpleQueue[Message] = queue.SimpleQueue()
        self._command = agent_command(name, request)
        if not shutil.which(self._command[0]):
            raise EnvironmentFault(f"{name}: needs {self._command[0]}, which is not installed on this machine")
        self.process = subprocess.Popen(
            self._command,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=output,
            text=True,
            start_new_session=True,
        )
        self._reader = threading.Thread(target=self._read, args=(self.process,), daemon=True)
        self._reader.start()
        self.tell(job)

    def _read(self, process: "subprocess.Popen[str]") -> None:
        assert process.stdout
        for line in process.stdout:
            self.heard_s = time.monotonic()
            try:
                self._inbox.put(json.loads(line)["agent"])
            except (ValueError, KeyError, TypeError):
                show(f"{self.name}: {line.rstrip()}")  # a login shell's greeting

    def messages(self) -> list[Message]:
        return [self._inbox.get() for _ in range(self._inbox.qsize())]

    def tell(self, content: Message) -> None:
        """Send a message; a lost host shows by its silence and by the end of its process."""
        assert self.process.stdin
        with suppress(OSError):
            self.process.stdin.write(json.dumps(content) + "\n")
            self.process.stdin.flush()

    def close(self) -> None:
        """Close the connection; the agent then ends its ranks."""
        with suppress(OSError):
            assert self.process.stdin
            self.process.stdin.close()

    def end(self, until_s: float) -> None:
        """Wait for the end of the connection; kill its process at `until_s` of the monotonic clock."""
        with suppress(subprocess.TimeoutExpired):
            self.process.wait(max(0.0, until_s - time.monotonic()))
        kill_sessions([self.process.pid])
        self.process.wait()

    def ended(self) -> int | None:
        """Return the exit code of the connecting process once all of its messages are read; else None."""
        if (code := self.process.poll()) is not None:
            self._reader.join(ENDING_S)
        return code if self._inbox.empty() else None

    def is_lost(self) -> bool:
        return self.code is None and (time.monotonic() - self.heard_s > SILENCE_S or self.ended() is not None)

    def why_no_agent(self, code: int) -> str:
        """Return why no agent answered, and what to do."""
        way = self._command[0]
        if way == "ssh" and code == 255:
            return f"not reachable (ssh ended with 255); `ssh {self.name} true` must work without a password"
        if code == 127:
            return f"no {sys.executable} there; install the Python environment at the same path on each host"
        return f"{way} ended with {code}, its output is above; the project must be at the same path on each host"


def agent_command(host: str, request: LaunchRequest) -> list[str]:
    """Return the command that starts the agent of a host. On this host it needs no connection."""
    if request.launcher == "srun":
        one = ["--nodes=1", "--ntasks=1", f"--nodelist={host}", "--overlap", "--cpu-bind=none", "--unbuffered"]
        return ["srun", *one, *AGENT]
    if request.launcher == "none" or is_here(host):
        return AGENT
    port = ["-p", str(request.ssh_port)] if request.ssh_port else []
    return ["ssh", "-T", "-o", "BatchMode=yes", "-o", "ConnectTimeout=15", *port, host, shell_line(request)]


def shell_line(request: LaunchRequest) -> str:
    """Return the command line that starts the agent in a shell of another host."""
    activated = f". {shlex.quote(request.venv_script)} && " if request.venv_script else ""
    path = shlex.quote(os.environ.get("PYTHONPATH", ""))
    return f"{activated}PYTHONPATH={path} PYTHONSAFEPATH=1 exec {shlex.join(AGENT)}"


def is_here(host: str) -> bool:
    """Return True if a name or address is this machine's."""
    if host in ("localhost", socket.gethostname()):
        return True
    with suppress(OSError), socket.socket() as probe:
        probe.bind((socket.gethostbyname(host), 0))
        return True
    return False


def passed_on(environment: Mapping[str, str]) -> Mapping[str, str]:
    """Return the variables for all hosts: those of PASSED_ON, and of DeepSpeed's file here or in the home folder."""
    variables = {name: value for name, value in environment.items() if name.startswith(PASSED_ON)}
    for folder in (Path.home(), Path.cwd()):
        with suppress(OSError):
            lines = (folder / os.environ.get("DS_ENV_FILE", ENVIRONMENT_FILE)).read_text(encoding="utf-8").splitlines()
            variables |= dict(line.strip().split("=", 1) for line in lines if "=" in line)
    return variables
