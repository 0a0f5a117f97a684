"""LoRA's learning rates in stage 3: GRPO, DPO and PPO of a small model at several rates, each with two seeds.

    python -m benchmarks.lora_rates --base FOLDER --data FOLDER --json rates.jsonl --parallel 6

FOLDER of `--data` holds the files of real rows that `python -m benchmarks.learning` reads. Each run adds a line to the
file of JSON lines; a run that has its line is not made again.
"""

import argparse
import json
import shutil
import sys
import threading
from collections.abc import Iterator
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

from benchmarks.learning import rows
from benchmarks.learning.jobs import Jobs, Work, flags
from benchmarks.speed.jobs import BenchError
from pipeline.run.evaluations import evaluations

RANK, ALPHA = 32, 16
# The rates of LoRA at this alpha; the second of the last pair has the product of rate and scale of 5e-4 at it.
GRID = ((1e-5, ALPHA), (3e-5, ALPHA), (1e-4, ALPHA), (5e-4, ALPHA), (2.5e-4, 2 * ALPHA))
FULL_RATES = {"grpo": 1e-5, "ppo": 1e-5, "dpo": 5e-6}  # of all weights, beside the grid
PPO_RATES = ((1e-4, ALPHA), (5e-4, ALPHA))
SHARED = {"step": 3, "deployment_type": "single_gpu", "data_split": "none"}
SAMPLED = SHARED | {
    "ppo.reward_function": "instructions", "ppo.train_batch_size": 256, "ppo.max_prompt_seq_len": 256,
    "ppo.max_answer_seq_len": 128, "ppo.max_steps": 60, "ppo.eval_interval": 30, "ppo.eval_samples_per_prompt": 4,
    "ppo.log_kl": "true", "ppo.keep_checkpoints": 0,
}  # fmt: skip
METHODS: dict[str, dict[str, Any]] = {
    "grpo": SAMPLED,
    "ppo": SAMPLED,
    "dpo": SHARED | {
        "dpo.balance_lengths": "true", "dpo.per_device_train_batch_size": 32, "dpo.max_seq_len": 768,
        "dpo.max_steps": 100, "dpo.eval_interval": 50, "dpo.long_pairs": "truncate_left", "dpo.keep_checkpoints": 0,
    },
}  # fmt: skip
DATA = {"ppo": ("instructions_train", "instructions_test"), "dpo": ("proxy", "pairs_test")}  # by section


@dataclass(frozen=True, slots=True)
class Setting:
    """A run: its method, its rate, LoRA's alpha (0: all weights are trained) and its seed."""

    method: str
    rate: float
    alpha: int
    seed: int

    @property
    def name(self) -> str:
        """Its name in files, as `grpo-0.0001-a16-s1`."""
        return f"{self.method}-{self.rate:g}-a{self.alpha}-s{self.seed}"

    @property
    def section(self) -> str:
        """The section of its flags, which its run's folder is named after."""
        return "dpo" if self.method == "dpo" else "ppo"

    def flags(self, base: str, folder: Path) -> dict[str, Any]:
        """Return the flags of its run, whose data are below `folder`."""
        section, part = self.section, "" if self.method == "dpo" else "actor_"
        train, held_out = (folder / "data" / f"{name}.jsonl" for name in DATA[section])
        given = METHODS[self.method] | {"method": self.method, "actor_model": base, "data_path": train}
        given |= {f"{section}.eval_data_path": held_out, "seed": self.seed, "data_seed": self.seed}
        given |= {"output_dir": folder / "runs" / self.name}
        if self.method == "ppo":
            given["ppo.critic_model"] = base
        if not self.alpha:
            return given | {f"{section}.{part}learning_rate": self.rate}
        lora = {"lora_dim": RANK, "lora_alpha": self.alpha, "lora_learning_rate": self.rate}
        return given | {f"{section}.{part}{name}": value for name, value in lora.items()}


def settings(methods: list[str], seeds: int) -> Iterator[Setting]:
    """Yield the runs of a grid: per seed all rates of LoRA, then the rate of all weights."""
    for seed in range(1, seeds + 1):
        for method in methods:
            rates = PPO_RATES if method == "ppo" else GRID
            yield from (Setting(method, rate, alpha, seed) for rate, alpha in rates)
            yield Setting(method, FULL_RATES[method], 0, seed)


def run(jobs: Jobs, setting: Setting, base: str, more: dict[str, Any], file: Path, lock: threading.Lock,
        gpu: int | None) -> None:  # fmt: skip
    """Train once and add the evaluations to the file. Raises BenchError."""
    output = jobs.folder / "runs" / setting.name
    shutil.rmtree(output, ignore_errors=True)
    jobs.run(setting.name, "rlhf", ["train", *flags(setting.flags(base, jobs.folder) | more)], gpu=gpu)
    if not (found := evaluations(output / "runs" / setting.section)):
        raise BenchError(f"{setting.name}: no evaluation in its metrics")
    with lock, file.open("a", encoding="utf-8") as out:
        out.write(json.dumps({"name": setting.name, "evals": found}) + "\n")


def works(options: argparse.Namespace, jobs: Jobs, more: dict[str, Any]) -> Iterator[Work]:
    """Yield the runs that have no line yet."""
    done = {row["name"] for row in rows.read_lines(options.json)} if options.json.exists() else set()
    lock = threading.Lock()
    for setting in settings(options.methods, options.seeds):
        if setting.name not in done:
            yield partial(run, jobs, setting, options.base, more, options.json, lock)


def main() -> int:
    """Make the data and the runs; return 1 if one of them failed."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.lora_rates", description=__doc__)
    parser.add_argument("--base", required=True, help="folder of the model")
    parser.add_argument("--data", type=Path, required=True, help="folder of the files of real rows")
    parser.add_argument("--work", type=Path, default=Path("output/lora_rates"), help="folder of rows, logs and runs")
    parser.add_argument("--json", type=Path, required=True, help="file to which each run adds a line")
    parser.add_argument("--methods", nargs="*", choices=METHODS, default=list(METHODS))
    parser.add_argument("--seeds", type=int, default=2)
    parser.add_argument("--gpus", type=int, default=0, help="GPUs to use; 0: none, on a CPU")
    parser.add_argument("--parallel", type=int, default=1, help="runs at a time on each GPU")
    parser.add_argument("--more", default="{}", help="flags of each run as JSON")
    options = parser.parse_args()
    jobs = Jobs(options.work.resolve(), options.gpus, options.parallel)
    if not (jobs.folder / "data").exists():
        rows.make(options.data, jobs.folder / "data")
        rows.make_instructions(options.data, jobs.folder / "data")
    return min(jobs.each(list(works(options, jobs, json.loads(options.more)))), 1)


if __name__ == "__main__":
    sys.exit(main())
