"""The entry of the benchmark: a row's runs in one job, a table for people, one JSON line for machines (the last one).

`python -m benchmarks.speed step3 --batch 64`; `python -m benchmarks.speed report FILE...` turns saved lines into
markdown. Flags behind `--` are handed on to this project's commands.
"""

import argparse
import json
import os
import sys
from pathlib import Path
from typing import Any

from benchmarks.speed.curves import curves
from benchmarks.speed.figures import Figures
from benchmarks.speed.jobs import ROOT, BenchError, Jobs, with_underscores
from benchmarks.speed.preparation import data
from benchmarks.speed.report import environment, for_people, print_reports
from benchmarks.speed.rows import PPO_ROWS, SHAPE_NAMES, Row
from benchmarks.speed.strategies import DEFAULTS, OFFLOADS, STRATEGIES, STRATEGY_ROWS
from benchmarks.speed.supervised import SUPERVISED_ROWS
from benchmarks.speed.typed import CASE_HELP, CASES, TYPED_ROWS, defaults_of

ROWS: dict[str, Row] = PPO_ROWS | SUPERVISED_ROWS | STRATEGY_ROWS | TYPED_ROWS | {"curves": curves, "data": data}
HIDDEN = ("row", "work", "json", "vllm", "data", "tokenizer")  # paths of one machine
REFERENCE = "H200"  # the device that the targets are for, with the default sizes
ACTOR, CRITIC, PROMPT, ANSWER = "1.3b", "350m", 256, 256
SIZES = {
    "batch": (64, "sequences of a step on each GPU"),
    "micro_batch": (16, "sequences of a forward pass in this project's update, and in SFT and reward training"),
    "baseline": (1, "0: DeepSpeed-Chat's loop is left out"),
    "baseline_micro_batch": (0, "sequences of a forward pass in DeepSpeed-Chat's loop; 0: the batch, at most 64"),
    "baseline_steps": (0, "measured steps of DeepSpeed-Chat's loop; 0: as --steps, one of one warm-up at stage 3"),
    "prompt": (PROMPT, "tokens of a prompt"),
    "answer": (ANSWER, "tokens of a response"),
    "seq_len": (512, "tokens of a row of SFT and reward training"),
    "zero_stage": (2, "ZeRO stage of all that is trained"),
    "warm_up": (3, "steps that are not measured"),
    "steps": (8, "steps whose median is taken"),
    "repeats": (5, "runs whose median is taken: of generation measured alone, of each library in the row data, typed"),
    "lora_dim": (64, "rank in the row lora"),
    "seeds": (5, "of the row curves"),
    "parallel": (1, "runs at a time in the row curves, of which nothing is timed"),
    "actor_lora_dim": (0, "rank in the row memory; 0: all weights are trained"),
    "copy_mib": (0, "MiB copied to measure bandwidth; 0: by the device"),
    "matrix": (0, "rows of the matrices that measure throughput; 0: by the device"),
    "rows": (20_000, "rows for each core in the row data"),
    "trainer_deepspeed": (1, "0: transformers' Trainer and TRL without DeepSpeed"),
}


def numbers(text: str) -> list[int]:
    return [int(part) for part in text.split(",")]


def make_parser() -> argparse.ArgumentParser:
    """Options of all rows."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.speed", description=__doc__)
    parser.add_argument("row", choices=ROWS)
    parser.add_argument("--actor", default=ACTOR, choices=SHAPE_NAMES)
    parser.add_argument("--critic", default=CRITIC, choices=SHAPE_NAMES)
    parser.add_argument("--dtype", default="bf16", choices=("bf16", "fp32"))
    for name, (value, meaning) in SIZES.items():
        parser.add_argument(f"--{name}", type=int, default=value, help=f"{meaning} ({value})")
    parser.add_argument("--gpus", type=numbers, default=[1], help="GPUs; by commas in the row scaling (1)")
    parser.add_argument("--batches", type=numbers, default=[64, 128, 256], help="of the row generation (64,128,256)")
    parser.add_argument("--mean_length", type=float, default=110.0, help="mean response of the row early (110)")
    parser.add_argument("--cap_gib", type=float, default=0.0, help="memory that the row memory may use; 0: all")
    parser.add_argument("--cores", type=numbers, default=[], help="of the row data; by default 1 and all")
    parser.add_argument("--data", default="", help="a file of pairs for the row data; by default it is made")
    parser.add_argument("--tokenizer", default="", help="a folder, for the row data; by default the demo's tokenizer")
    parser.add_argument("--vllm", default="", help="folder of vLLM's packages, for the row vllm")
    parser.add_argument("--work", default="output/bench", help="folder of models, data and logs (output/bench)")
    parser.add_argument("--json", default="", help="file that the JSON line is added to")
    parser.add_argument("--case", default="ppo-1.3b", choices=CASES, help=CASE_HELP)
    chosen = {"choices": sorted(STRATEGIES | OFFLOADS), "help": "of the rows strategies and offload (all)"}
    parser.add_argument("--strategies", nargs="+", default=[], **chosen)
    return parser


def run_row(options: argparse.Namespace, extra: list[str]) -> dict[str, Any]:
    """All runs of a row, and its figures. The file of `--json` gets a line that holds each run as soon as it ended."""
    jobs, figures, surroundings = Jobs(options, extra), Figures(checked=False), environment(ROOT)
    jobs.folder.mkdir(parents=True, exist_ok=True)
    file = Path(options.json or os.devnull)
    before = file.read_text(encoding="utf-8") if file.is_file() else ""
    settings = {name: value for name, value in vars(options).items() if name not in HIDDEN}

    def keep() -> dict[str, Any]:
        result = {
            "row": options.row,
            "settings": settings | {"extra": extra},
            "environment": surroundings,
            "runs": jobs.runs,
            "figures": figures.as_json(),
            "failed": jobs.failed,
            "config": jobs.config,
        }
        file.write_text(f"{before}{json.dumps(result)}\n", encoding="utf-8")
        return result

    jobs.after_each = keep
    device = jobs.device()
    sizes = (options.actor, options.critic, options.prompt, options.answer)
    reference = REFERENCE in device.get("name", "")
    figures.checked = reference and (sizes == (ACTOR, CRITIC, PROMPT, ANSWER) or options.cap_gib > 0)
    try:
        ROWS[options.row](jobs, figures)
    except BenchError as error:  # of the models, without which there is no run
        jobs.runs["models"] = {"error": str(error)}
    return keep()


def main(argv: list[str] | None = None) -> int:
    """Run a row or print a report; 1 where a run failed."""
    words = list(sys.argv[1:] if argv is None else argv)
    if words[:1] == ["report"]:
        print_reports(words[1:])
        return 0
    cut = words.index("--") if "--" in words else len(words)
    parser = make_parser()
    own = [with_underscores(word) for word in words[:cut]]
    given = parser.parse_args(own)
    parser.set_defaults(**(defaults_of(given.case) if given.row in TYPED_ROWS else DEFAULTS.get(given.row, {})))
    options = parser.parse_args(own)
    result = run_row(options, words[cut + 1 :])
    print(for_people(result), end="\n\n")
    print(json.dumps(result), flush=True)
    return 1 if result["failed"] else 0
