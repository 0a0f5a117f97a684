"""RLHF of a real checkpoint on real preferences, judged by a gold reward model that no policy is trained against.

`python tests/learning models --base FOLDER --data FOLDER` trains SFT, the proxies and gold; `best_of_n`, `frontier` and
`ablations` add to the work folder; `report FILE` writes the tables and plots from what is there. A run that is finished
is not made again. Flags behind `--` go to all of this project's commands.
"""

import argparse
import sys
from pathlib import Path
from typing import Any

from learning import models, policies, report, rows
from learning.jobs import Jobs
from pipeline.launching.machine import count_gpus

COMMANDS = ("models", "best_of_n", "frontier", "ablations", "report")


def numbers(kind: type) -> Any:
    return lambda text: [kind(part) for part in text.split(",")]


def make_parser() -> argparse.ArgumentParser:
    """Options of all commands."""
    parser = argparse.ArgumentParser(prog="python tests/learning", description=__doc__)
    parser.add_argument("command", choices=COMMANDS)
    parser.add_argument("--work", type=Path, default=Path("output/learning"), help="folder of data, models and runs")
    parser.add_argument("--base", help="the checkpoint, a plain Hugging Face folder (command models)")
    parser.add_argument("--data", type=Path, help="the folder of real data (command models)")
    parser.add_argument("--depths", type=numbers(int), default=[10, 20, 30], help="layers of the proxies (10,20,30)")
    parser.add_argument("--kl_coefs", type=numbers(float), default=[0.01, 0.05, 0.2], help="(0.01,0.05,0.2)")
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--steps", type=int, default=300, help="of each PPO run (300)")
    parser.add_argument("--num_samples", type=int, default=64, help="answers to each prompt for best-of-n (64)")
    parser.add_argument("--gpus", type=int, default=None, help="GPUs to use; by default all")
    parser.add_argument("--parallel", type=int, default=1, help="processes at a time on each GPU (1)")
    parser.add_argument("--output", type=Path, default=Path("output/learning/report.md"), help="file of the report")
    parser.add_argument("--title", default="What PPO learns from a reward model", help="of the report")
    return parser


def pairs_of(words: list[str]) -> dict[str, Any]:
    """Return the flags behind `--`, given as --name value."""
    return {name.removeprefix("--"): value for name, value in zip(words[::2], words[1::2], strict=True)}


def main() -> int:
    """Run one command; return 1 if one of its runs failed."""
    words = sys.argv[1:]
    at = words.index("--") if "--" in words else len(words)
    given, more = make_parser().parse_args(words[:at]), pairs_of(words[at + 1 :])
    work = given.work.resolve()
    jobs = Jobs(work, count_gpus() if given.gpus is None else given.gpus, given.parallel)
    if given.command == "report":
        report.write(work, given.output, given.title)
        return 0
    if given.command == "models":
        rows.make(given.data, work / "data")
        return min(models.make(jobs, given.base, given.depths, more=more), 1)
    if given.command == "best_of_n":
        return policies.best_of_n(jobs, given.depths, num_samples=given.num_samples)
    if given.command == "frontier":
        wanted = policies.frontier(given.depths, given.kl_coefs, given.seeds)
    else:
        depth, folder = max(given.depths), work / "models"
        wanted = policies.ablations(depth, given.seeds, work / "data" / "text.jsonl", folder / "fresh")
    return min(policies.train(jobs, wanted, group=given.command, steps=given.steps, more=more), 1)
