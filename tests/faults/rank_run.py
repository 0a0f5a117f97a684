"""A stage with two real ranks through a launch script, to be disturbed from outside; and what it leaves behind."""

import json
import os
import signal
import subprocess
import sys
import time
import uuid
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
SITE = Path(__file__).resolve().parent / "site"
MARKER = "RANK_RUN_TEST"
START_S = 120.0  # until a run must have got to its first steps
RUN_FOLDERS = {1: "sft/runs/out", 2: "reward/runs/out", 3: "ppo/out/runs/ppo"}
LIMITLESS = {"num_train_epochs": 1000, "max_steps": 100_000, "enable_tensorboard": "false", "print_steps": 1000}


def words(step: int, data: Path, **changes: object) -> list[str]:
    """Flags of a tiny run that goes on until it is ended; `data` is tiny_run's folder."""
    outputs = {1: "sft/out", 2: "reward/out", 3: "ppo/out"}
    models: dict[str, object] = {
        "model_name_or_path": data / "base",
        "max_seq_len": 96,
        "learning_rate": 1e-6,
        "zero_stage": 1,
    }
    if step == 3:
        models = {
            "actor_model_name_or_path": data / "base",
            "critic_model_name_or_path": data / "scorer",
            "max_prompt_seq_len": 48,
            "max_answer_seq_len": 12,
            "per_device_generation_batch_size": 8,
        }
    flags = {
        **models,
        "data_path": data / "train.jsonl",
        "eval_data_path": data / "test.jsonl",
        "data_split": "none",
        "data_output_path": data / "cache",
        "per_device_train_batch_size": 4,
        "dtype": "fp32",
        "output_dir": outputs[step],
        **LIMITLESS,
        **changes,
    }
    return [str(word) for name, value in flags.items() for word in (f"--{name}", value)]


@dataclass(frozen=True, slots=True)
class Ended:
    """Exit code, standard error, and seconds from the disturbance to the end."""

    code: int
    stderr: str
    took_s: float

    @property
    def last_lines(self) -> str:
        return "\n".join(self.stderr.splitlines()[-4:])


@dataclass(frozen=True, slots=True)
class RankRun:
    """A running job; all of its processes carry `marker` in their environment."""

    process: subprocess.Popen[bytes]
    folder: Path
    run_dir: Path
    marker: str

    @property
    def stderr(self) -> str:
        return (self.folder / f"{self.marker}.err").read_text(errors="replace")

    def pid(self, rank: int) -> int:
        """The process id that a rank of this run tells, once it does."""
        file = self.run_dir / "outcome" / f"rank-{rank}.json"

        def there() -> bool:
            return file.is_file() and json.loads(file.read_text())["supervisor"] != ""

        self.wait(there)
        return json.loads(file.read_text())["pid"]

    def wait(self, done: Callable[[], bool]) -> None:
        """Until `done`; fails with the run's words where it ends before."""
        end = time.monotonic() + START_S
        while not done():
            assert self.process.poll() is None, self.stderr
            assert time.monotonic() < end, self.stderr
            time.sleep(0.02)

    def wait_for_steps(self, count: int) -> None:
        """Until `count` more training steps are in metrics.jsonl."""
        wanted = self.steps() + count
        self.wait(lambda: self.steps() >= wanted)

    def steps(self) -> int:
        file = self.run_dir / "metrics.jsonl"
        return len(file.read_text().splitlines()) if file.is_file() else 0

    def send(self, rank: int, number: int) -> None:
        os.kill(self.pid(rank), number)

    def ended(self, since: float, limit_s: float = 60.0) -> Ended:
        """Wait for the end; `since` is time.monotonic() of the disturbance."""
        code = self.process.wait(limit_s)
        return Ended(code, self.stderr, time.monotonic() - since)

    def left(self) -> list[int]:
        """Processes of this run that still live."""
        return [pid for pid in all_pids() if self.marker in environment_of(pid) and state_of(pid) not in ("Z", "X", "")]

    def clean_up(self) -> None:
        for pid in self.left():
            os.kill(pid, signal.SIGKILL)
        self.process.wait()


def launch(folder: Path, command: Sequence[str], run_dir: Path) -> RankRun:
    """Start `command` in `folder`, with what lets a test disturb its ranks."""
    marker = uuid.uuid4().hex
    environment = os.environ | {
        "PYTHON": sys.executable,
        "PYTHONPATH": f"{SITE}:{ROOT}",
        "HF_HUB_OFFLINE": "1",
        "OMP_NUM_THREADS": "1",
        MARKER: marker,
    }
    with (folder / f"{marker}.err").open("wb") as stderr:
        process = subprocess.Popen(
            command, cwd=folder, env=environment, stdout=subprocess.DEVNULL, stderr=stderr, start_new_session=True
        )
    return RankRun(process, folder, run_dir, marker)


def start(step: int, folder: Path, data: Path, **changes: object) -> RankRun:
    """Two ranks of `step` by launch/single_node.sh."""
    script = str(ROOT / "launch" / "single_node.sh")
    command = ["bash", script, "--num-gpus", "2", str(step), *words(step, data, **changes)]
    return launch(folder, command, folder / RUN_FOLDERS[step])


def all_pids() -> list[int]:
    return [int(path.name) for path in Path("/proc").iterdir() if path.name.isdigit()]


def environment_of(pid: int) -> str:
    try:
        return Path(f"/proc/{pid}/environ").read_bytes().decode(errors="replace")
    except OSError:
        return ""


def state_of(pid: int) -> str:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
    except OSError:
        return ""


def listening_addresses(pids: Sequence[int]) -> set[str]:
    """Hexadecimal addresses, as the kernel writes them, on which these processes listen for TCP connections."""
    inodes = set()
    for pid in pids:
        for link in Path(f"/proc/{pid}/fd").iterdir():
            try:
                inodes.add(os.readlink(link))
            except OSError:
                continue
    found = set()
    for name in ("tcp", "tcp6"):
        for line in Path(f"/proc/{pids[0]}/net/{name}").read_text().splitlines()[1:]:
            fields = line.split()
            if fields[3] == "0A" and f"socket:[{fields[9]}]" in inodes:
                found.add(fields[1].partition(":")[0])
    return found
