"""The processes of a benchmark: models made, this project's own command lines, and workers; one after the other.

Each run has a process of its own, so that none starts with another's memory. Imports no torch.
"""

import argparse
import json
import os
import re
import shutil
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, Self

import psutil

from benchmarks.speed import phases
from pipeline.launching.machine import free_port

ROOT = Path(__file__).resolve().parents[2]
TAIL_LINES = 15
PPO_LRS = ["--actor_learning_rate", "1e-6", "--critic_learning_rate", "1e-6"]
NO_HELD_OUT = ["--eval_fraction", "0", "--data_split", "none", "--enable_tensorboard", "false"]
# Prompts that are longer than wanted on purpose, and cut: then all of them have the same number of tokens.
WORDS_PER_TOKEN = 1.6


class BenchError(Exception):
    """A run failed; holds the end of its log."""


def environment(site: str = "") -> dict[str, str]:
    """Modules of the project and of `site`; no network, no variables of another launcher."""
    launched = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "MASTER_ADDR", "MASTER_PORT", "LOCAL_WORLD_SIZE")
    kept = {name: value for name, value in os.environ.items() if name not in launched}
    paths = [str(ROOT), *filter(None, [site, kept.get("PYTHONPATH")])]
    quiet = {"PYTHONWARNINGS": "ignore", "HF_HUB_OFFLINE": "1", "TOKENIZERS_PARALLELISM": "false"}
    return kept | quiet | {"PYTHONPATH": os.pathsep.join(paths), "PYTHONUNBUFFERED": "1"}


def showing(gpus: Sequence[int]) -> dict[str, str]:
    """The variable that shows a process some of the GPUs that this one sees, by their number among these."""
    seen = [name for name in os.environ.get("CUDA_VISIBLE_DEVICES", "").split(",") if name]
    return {"CUDA_VISIBLE_DEVICES": ",".join(seen[gpu] if seen else str(gpu) for gpu in gpus)}


def launched(module: str, words: Sequence[object], *, gpus: int) -> list[str]:
    """`python -m MODULE WORDS`, or the same under DeepSpeed's launcher on several GPUs of this machine."""
    start = [sys.executable, "-m"]
    if gpus > 1:
        start += ["deepspeed.launcher.runner", "--hostfile", os.devnull, "--master_port", str(free_port())]
        start += ["--num_gpus", str(gpus), "--no_local_rank", "--module"]
    return [*start, module, *map(str, words)]


class HostPeak:
    """Peak GiB of the machine's memory in use while a block runs, above what was in use before.

    Of the whole machine: page-locked memory is not in every process's own count.
    """

    def __init__(self) -> None:
        self.gib = 0.0
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._watch, args=(self._used(),), daemon=True)

    @staticmethod
    def _used() -> int:
        memory = psutil.virtual_memory()
        return memory.total - memory.available

    def _watch(self, before: int) -> None:
        while not self._stop.wait(0.1):
            self.gib = max(self.gib, (self._used() - before) / 2**30)

    def __enter__(self) -> Self:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._stop.set()
        self._thread.join()


def run_logged(title: str, command: Sequence[str], log: Path, variables: dict[str, str]) -> str:
    """Run a command to its end, its output in a file; print how long it took, and return its stdout.

    Raises:
        BenchError: it failed.
    """
    started = time.monotonic()
    with log.open("w", encoding="utf-8") as file:
        done = subprocess.run(
            command, cwd=ROOT, env=variables, stdout=subprocess.PIPE, stderr=file, text=True, check=False
        )
        file.write(done.stdout)
    print(f"{title}: {time.monotonic() - started:.0f} s", file=sys.stderr, flush=True)
    if done.returncode:
        raise BenchError(f"{' '.join(command[:4])} ...: exit code {done.returncode}\n{log_tail(log)}")
    return done.stdout


class Jobs:
    """Runs of one row, by name, with what each of them found; a run that fails is noted and the others go on.

    options: those of run.py. extra: flags that are handed on to this project's commands. after_each: called when a run
    has ended and is noted.
    """

    def __init__(self, options: argparse.Namespace, extra: Sequence[str]) -> None:
        self.options, self.extra = options, list(extra)
        self.folder = Path(options.work).resolve()
        self.models = self.folder / f"{options.actor}-{options.critic}"
        self.runs: dict[str, dict[str, Any]] = {}
        self.after_each: Callable[[], object] = lambda: None
        self.host_gib = 0.0  # of the last run
        self.config: dict[str, Any] = {}
        self.variables: dict[str, str] = {}  # of all runs, besides those of `environment`

    # --- processes ---------------------------------------------------------------------------------------------------

    def run(self, name: str, command: Sequence[str], *, site: str = "") -> str:
        """Run a command to its end, its output in <work>/<name>.log; returns its stdout. site: a folder of packages."""
        print(f"[bench] {name} ...", file=sys.stderr, flush=True)
        with HostPeak() as peak:
            try:
                variables = environment(site) | self.variables
                return run_logged(f"[bench] {name}", command, self.folder / f"{plain(name)}.log", variables)
            finally:
                self.host_gib = peak.gib

    def worker(
        self, name: str, module: str, words: Sequence[object], *, gpus: int = 1, site: str = ""
    ) -> dict[str, Any]:
        """Run a module of this folder and return its last line of JSON; {} if it failed."""
        try:
            found = json.loads(last_json(self.run(name, launched(module, words, gpus=gpus), site=site)))
        except BenchError as error:
            found = self._failed(error)
        return self._keep(name, found, words)

    def project(self, name: str, stage: str, words: Sequence[object], *, gpus: int = 1) -> dict[str, Any]:
        """Medians of a stage's own metrics, by its own command line; {} where it failed."""
        output = self.fresh(name)
        command = launched(f"{stage}.main", [*words, *output_words(output), *self.extra], gpus=gpus)
        found = self.measured(name, command, output / "run", [*words, *self.extra], gpus=gpus)
        shutil.rmtree(output / "model", ignore_errors=True)
        return found

    def measured(
        self, name: str, command: Sequence[str], run_dir: Path, words: Sequence[object], *, gpus: int = 1
    ) -> dict[str, Any]:
        """Medians of what a command writes to `run_dir`, its start and its choices; {} where it failed.

        words: what is kept of the command.
        """
        began = time.time()
        try:
            self.run(name, command)
            found = self.read(run_dir) | {"start_s": phases.start_seconds(run_dir, began)}
        except BenchError as error:
            found = self._failed(error)
        return self._keep(name, found | {"gpus": gpus}, words)

    def fresh(self, name: str) -> Path:
        """An empty folder for a run's output."""
        output = self.folder / "runs" / plain(name)
        shutil.rmtree(output, ignore_errors=True)
        output.mkdir(parents=True)
        return output

    def read(self, run_dir: Path) -> dict[str, Any]:
        """A finished run's medians, and the sizes that it chose; the first run's configuration is kept."""
        settings = json.loads((run_dir / "config.json").read_text(encoding="utf-8"))
        values = {flag: setting["value"] for flag, setting in settings.items()}
        self.config = self.config or values
        sizes = phases.sizes_of(values, phases.training_lines(run_dir)[-1])
        return phases.measure(run_dir, warm_up=self.options.warm_up) | {"sizes": sizes}

    def _failed(self, error: BenchError) -> dict[str, Any]:
        print(f"[bench] failed: {error}", file=sys.stderr, flush=True)
        return {"error": str(error)}

    def _keep(self, name: str, found: dict[str, Any], words: Sequence[object]) -> dict[str, Any]:
        shown = [Path(word).name if isinstance(word, Path) else word for word in words]
        self.runs[name] = found | {"host_gib": self.host_gib, "flags": " ".join(map(str, shown))}
        self.after_each()
        return {} if "error" in found else found

    @property
    def failed(self) -> list[str]:
        return [name for name, found in self.runs.items() if "error" in found]

    # --- what the runs share -----------------------------------------------------------------------------------------

    def make_models(self, *, early: bool = False) -> Path:
        """The folder of actor, critic, tokenizer, prompts; made once for all rows that want the same."""
        options = self.options
        words = {"actor": options.actor, "critic": options.critic, "prompts": 0}
        if early:
            words |= {"mean_length": options.mean_length, "longest": options.answer}
        made = self.models / "made.json"
        if made.exists() and json.loads(made.read_text(encoding="utf-8")).items() >= words.items():
            return self.models
        self.folder.mkdir(parents=True, exist_ok=True)
        self.run("models", launched("benchmarks.speed.random_models", ["--output", self.models, *flags(words)], gpus=1))
        made.write_text(json.dumps(words), encoding="utf-8")
        return self.models

    def step3(self, name: str, *words: object, gpus: int = 1, batch: int = 0, actor: str = "actor") -> dict[str, Any]:
        """This project's PPO with `batch` responses a step and GPU; `words` are further flags."""
        options = self.options
        every = [*ppo_words(options, self.prompts(), batch=batch, actor=actor), *words]
        return self.project(name, "step3_ppo", every, gpus=gpus)

    def prompts(self) -> Path:
        """A file of as many prompts as the longest run takes, each longer than wanted."""
        from benchmarks.speed.random_models import make_prompts

        options = self.options
        count = (options.warm_up + options.steps) * options.batch * max(options.gpus)
        words = int(options.prompt * WORDS_PER_TOKEN) + 9
        file = self.models / f"prompts-{count}-{words}.jsonl"
        if not file.exists():
            make_prompts(file, count, words)
        return file

    def baseline(
        self, name: str, *, gpus: int = 1, zero_stage: int | None = None, actor: str = "actor"
    ) -> dict[str, Any]:
        """DeepSpeed-Chat's loop with the same models, batch, lengths, dtype and ZeRO stage; {} where it is left out."""
        options = self.options
        if not options.baseline:
            return {}
        micro = options.baseline_micro_batch or min(options.batch, 64)
        stage = options.zero_stage if zero_stage is None else zero_stage
        # A step at stage 3 takes over a minute: one of warm-up and one measured say enough.
        counts = (1, 1) if stage == 3 and not options.baseline_steps else (options.warm_up, options.steps)
        words = {"actor": self.models / actor, "critic": self.models / "critic", "dtype": options.dtype}
        words |= {"batch": options.batch, "micro_batch": micro, "prompt": options.prompt, "answer": options.answer}
        words |= {"zero_stage": stage, "warm_up": counts[0], "steps": options.baseline_steps or counts[1]}
        words["early_stop"] = int(actor != "actor")
        return self.worker(name, "benchmarks.speed.deepspeed_chat", flags(words), gpus=gpus)

    def device(self) -> dict[str, Any]:
        """Bandwidth and throughput of this machine's device, measured now."""
        options = self.options
        return self.worker(
            "device", "benchmarks.speed.roofline", ["--copy_mib", options.copy_mib, "--matrix", options.matrix]
        )


def ppo_words(options: argparse.Namespace, prompts: Path, *, batch: int = 0, actor: str = "actor") -> list[object]:
    """Flags of step 3 as its rows have them: full prompts, one update a rollout, nothing evaluated."""
    batch, models = batch or options.batch, prompts.parent
    micro = min(options.micro_batch, batch)
    return [
        *("--actor_model_name_or_path", models / actor, "--critic_model_name_or_path", models / "critic"),
        *("--data_path", prompts, "--data_output_path", models / "cache", *NO_HELD_OUT),
        *("--long_prompts", "truncate_left", "--max_prompt_seq_len", options.prompt),
        *("--max_answer_seq_len", options.answer, "--per_device_generation_batch_size", batch),
        *("--per_device_train_batch_size", micro, "--gradient_accumulation_steps", batch // micro),
        *("--actor_zero_stage", options.zero_stage, "--critic_zero_stage", options.zero_stage, *PPO_LRS),
        *("--dtype", options.dtype, "--max_steps", options.warm_up + options.steps),
    ]


def flags(values: dict[str, Any]) -> list[object]:
    """--name value --name value ..."""
    return [part for name, value in values.items() for part in (f"--{name}", value)]


def with_underscores(word: str) -> str:
    """Return a flag as the parser names it; `--warm-up=1` is read too. Other words are returned as they are."""
    name, equals, value = word.partition("=")
    return f"--{name[2:].replace('-', '_')}{equals}{value}" if name.startswith("--") else word


def output_words(folder: Path) -> list[object]:
    """Flags of a run whose models nobody wants."""
    return ["--output_dir", folder / "model", "--run_dir", folder / "run", "--keep_checkpoints", 0]


def plain(name: str) -> str:
    """A run's name as that of a file."""
    return re.sub(r"[^A-Za-z0-9_-]+", "-", name)


def log_tail(log: Path) -> str:
    lines = log.read_text(encoding="utf-8", errors="replace").splitlines()
    return "\n".join(lines[-TAIL_LINES:])


def last_json(text: str) -> str:
    """The last line that is a JSON object: libraries print around it."""
    lines = [line for line in text.splitlines() if line.startswith("{")]
    if not lines:
        raise BenchError(f"no line of JSON in the output: {text[-300:]}")
    return lines[-1]
