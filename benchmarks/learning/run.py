"""RLHF of a real checkpoint on real preferences, judged by a gold reward model that no policy is trained against.

`python -m benchmarks.learning all --base FOLDER --data FOLDER` does everything but `quality` and the reports. One by
one: `models` trains SFT, the proxies and gold; `best_of_n`, `frontier` and `ablations` add to the work folder; `report`
writes the tables and plots from what is there. `quality` trains and judges the recipes against length, and keeps their
numbers in the file of --kept, from which alone `quality_report` writes its tables. What is finished is not made again.
`instructions` writes rows for step 3 with the reward function of that name to the work folder, and trains nothing;
`gsm8k` writes those of GSM8K, `gsm8k_figures FILE ...` the figures of answers to them, and `gsm8k_keep` keeps these
(gsm8k/answers.py). `gsm8k_runs --base FOLDER --recipes grpo ...` trains and asks the models of that report
(gsm8k/runs.py). `gsm8k_tools`, `gsm8k_tool_runs` and `gsm8k_tool_figures` are those of the report with a calculator
(gsm8k/tools.py).
Flags behind `--` go to all of this project's commands.
"""

import argparse
import sys
from collections.abc import Iterator
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from benchmarks.learning import models, policies, quality, quality_report, report, rows
from benchmarks.learning.gsm8k import answers, runs, tools
from benchmarks.learning.jobs import Jobs, Work
from benchmarks.speed.jobs import with_underscores
from pipeline.launching.machine import count_gpus

COMMANDS = (
    "all",
    "models",
    "best_of_n",
    "frontier",
    "ablations",
    "quality",
    "report",
    "quality_report",
    "instructions",
    "gsm8k",
    "gsm8k_figures",
    "gsm8k_keep",
    "gsm8k_runs",
    "gsm8k_tools",
    "gsm8k_tool_runs",
    "gsm8k_tool_figures",
)


def listed(kind: type) -> Any:
    return lambda text: [kind(part) for part in text.split(",")]


def make_parser() -> argparse.ArgumentParser:
    """Options of all commands."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.learning", description=__doc__)
    parser.add_argument("command", choices=COMMANDS)
    parser.add_argument("files", nargs="*", type=Path, help="of `rlhf sample` (commands gsm8k_figures, gsm8k_keep)")
    parser.add_argument("--work", type=Path, default=Path("output/learning"), help="folder of data, models and runs")
    parser.add_argument("--base", help="the checkpoint, a plain Hugging Face folder (commands all, models)")
    parser.add_argument("--data", type=Path, help="the folder of real data (commands all, models, instructions, gsm8k)")
    parser.add_argument("--reward_models", nargs="*", default=[], help="names of those to train; by default all")
    parser.add_argument("--depths", type=listed(int), default=[10, 20, 30], help="layers of the proxies (10,20,30)")
    parser.add_argument("--kl_coefs", type=listed(float), default=[0.01, 0.05, 0.2], help="(0.01,0.05,0.2)")
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--steps", type=int, default=300, help="of each run of the frontier (300)")
    parser.add_argument("--ablation_steps", type=int, default=150, help="of each run of the ablations (150)")
    parser.add_argument("--ablations", type=listed(str), default=[], help="names of rows; by default all")
    parser.add_argument("--quality_steps", type=int, default=120, help="of each run of the recipes (120)")
    parser.add_argument("--recipes", nargs="*", default=[], help="names of recipes; by default all")
    parser.add_argument(
        "--kept", type=Path, default=Path("output/learning/quality.jsonl.bz2"), help="numbers of quality, of gsm8k_keep"
    )
    parser.add_argument("--beside", default="", help="a recipe beside which quality_report shows what adds to it")
    parser.add_argument("--num_samples", type=int, default=64, help="answers to each prompt for best-of-n (64)")
    parser.add_argument("--gpus", type=int, default=None, help="GPUs to use; by default all")
    parser.add_argument("--parallel", type=int, default=1, help="processes at a time on each GPU (1)")
    parser.add_argument("--output", type=Path, default=Path("output/learning/report.md"), help="file of the report")
    parser.add_argument(
        "--plot", type=Path, help="picture of the curves in a file of gsm8k_keep (command gsm8k_figures)"
    )
    parser.add_argument("--title", default="What PPO learns from a reward model", help="of the report")
    return parser


def pairs_of(words: list[str]) -> dict[str, Any]:
    """Return the flags behind `--`, given as --name value, by their names with underscores."""
    return {
        with_underscores(name).removeprefix("--"): value for name, value in zip(words[::2], words[1::2], strict=True)
    }


def main() -> int:
    """Run one command; return 1 if one of its runs failed."""
    words = sys.argv[1:]
    at = words.index("--") if "--" in words else len(words)
    given, more = make_parser().parse_args([*map(with_underscores, words[:at])]), pairs_of(words[at + 1 :])
    work = given.work.resolve()
    jobs = Jobs(work, count_gpus() if given.gpus is None else given.gpus, given.parallel)
    if given.command == "instructions":
        rows.make_instructions(given.data, work / "data")
        return 0
    if given.command == "gsm8k":
        answers.make(given.data, work / "data")
        return 0
    if given.command == "gsm8k_figures":
        print(answers.report(answers.runs_of(given.files)))
        if given.plot:
            answers.plot(given.files[0], given.plot)
        return 0
    if given.command == "gsm8k_keep":
        quality.write_kept(given.kept, answers.kept_lines(given.files))
        return 0
    if given.command == "gsm8k_runs":
        return min(jobs.each(list(runs.works(jobs, given.base, given.recipes, given.seeds, more))), 1)
    if given.command == "gsm8k_tools":
        tools.make(given.data, work / "data")
        return 0
    if given.command == "gsm8k_tool_runs":
        if jobs.each(list(tools.starts(jobs, given.base))):
            return 1
        return min(jobs.each(list(tools.works(jobs, given.seeds, more))), 1)
    if given.command == "gsm8k_tool_figures":
        print(tools.report(work))
        return 0
    if given.command == "report":
        report.write(work, given.output, given.title)
        return 0
    if given.command == "quality_report":
        plot = given.output.with_suffix(".png") if find_spec("matplotlib") else None
        text = quality_report.written(quality.read_kept(given.kept), base=given.beside, plot=plot)
        given.output.write_text(text, encoding="utf-8")
        return 0
    if given.command in ("all", "models"):
        rows.make(given.data, work / "data")
        if models.make(jobs, given.base, given.depths, only=given.reward_models, more=more):
            return 1
    if given.command == "quality":
        return trained_recipes(given, jobs, more)
    return min(jobs.each(list(works_of(given, jobs, more))), 1)


def trained_recipes(given: argparse.Namespace, jobs: Jobs, more: dict[str, Any]) -> int:
    """Train and judge the recipes that have not been, and keep all numbers; return 1 if one failed."""
    failed = jobs.each(list(quality.baseline(jobs, given.depths)))
    wanted = {"seeds": given.seeds, "steps": given.quality_steps, "only": given.recipes, "more": more}
    failed += jobs.each(list(quality.works(jobs, given.depths, **wanted)))
    quality.write_kept(given.kept, quality.keep(jobs.folder, given.depths))
    return min(failed, 1)


def works_of(given: argparse.Namespace, jobs: Jobs, more: dict[str, Any]) -> Iterator[Work]:
    """Yield what the command wants besides the models; of the PPO runs the longest first."""
    depth, folder = max(given.depths), jobs.folder
    if given.command in ("all", "best_of_n"):
        yield from policies.best_of_n(jobs, given.depths, num_samples=given.num_samples)
    if given.command in ("all", "frontier"):
        wanted = policies.frontier(given.depths, given.kl_coefs, given.seeds)
        yield from policies.works(jobs, wanted, group="frontier", steps=given.steps, more=more)
    if given.command in ("all", "ablations"):
        text, fresh = folder / "data" / "text.jsonl", folder / "models" / "fresh"
        wanted = policies.ablations(depth, given.seeds, text, fresh, only=given.ablations)
        yield from policies.works(jobs, wanted, group="ablations", steps=given.ablation_steps, more=more)
