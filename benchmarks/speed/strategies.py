"""The rows strategies, t5 and offload: ways to spread a training run, by step 1 and by transformers' Trainer.

`python -m benchmarks.speed.strategies FILE... [--plot PICTURE.png]` prints the table of saved results, and draws them.
"""

import argparse
import json
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from benchmarks.speed.figures import Figures, quotient
from benchmarks.speed.jobs import Jobs
from benchmarks.speed.report import table
from benchmarks.speed.rows import Row
from benchmarks.speed.supervised import make_rows, other_run, own_run

SIZES = {"critic": "tiny", "batch": 8, "micro_batch": 8, "warm_up": 2, "steps": 6}
FEW_STEPS = {"warm_up": 1, "steps": 4}
DEFAULTS = {
    "strategies": SIZES | {"actor": "gpt2-xl"},
    "t5": SIZES | FEW_STEPS | {"actor": "t5-3b"},
    "offload": FEW_STEPS,
}
ON_HOST = ("--offload", "true", "--offload_parameters", "true")
# Buffers for the layers of OPT-1.3B; its embeddings have 103,000,000 weights.
ON_DISK = {"device": "nvme", "buffer_count": 16, "buffer_size": 110_000_000, "max_in_cpu": 0}
# ZeRO's stage, then where optimizer states and weights are.
OFFLOADS: dict[str, tuple[int, dict[str, Any], dict[str, Any]]] = {
    "zero-2": (2, {}, {}),
    "zero-2-optimizer-on-host": (2, {"device": "cpu"}, {}),
    "zero-3": (3, {}, {}),
    "zero-3-all-on-host": (3, {"device": "cpu"}, {"device": "cpu"}),
    "zero-3-optimizer-on-nvme": (3, {"device": "nvme"}, {}),
    "zero-3-all-on-nvme": (3, {"device": "nvme"}, ON_DISK),
}
COLUMNS = {"samples_per_s": "samples/s", "peak_gib": "peak GPU GiB", "host_gib": "peak host GiB"}
MADE_BY = ("step 1", "Trainer")


@dataclass(frozen=True, slots=True)
class Strategy:
    """A way to spread a training run.

    own, trainer: its flags for step 1 and the options of `benchmarks.speed.trainers`, None where there is no such run.
    gpus: the only number that it is run on, 0: any.
    """

    zero_stage: int
    own: tuple[object, ...] | None = ()
    trainer: tuple[object, ...] | None = ()
    gpus: int = 0
    dtype: str = ""


STRATEGIES = {
    "plain": Strategy(0, trainer=("--deepspeed", 0, "--data_parallel", 0), gpus=1),
    # Step 1 has one engine for both: on one GPU this would be the run before.
    "ddp": Strategy(0, trainer=("--deepspeed", 0)),
    "zero-1": Strategy(1),
    "zero-2": Strategy(2),
    "zero-3": Strategy(3),
    "zero-3-offload": Strategy(3, own=ON_HOST, trainer=("--offload", "torch")),
    "zero-3-offload-cpu-adam": Strategy(3, own=None, trainer=("--offload", "deepspeed")),
    "zero-2-fp16": Strategy(2, dtype="fp16"),
}


def scale_file(jobs: Jobs) -> Path:
    """Write a DeepSpeed JSON whose scale of fp16 starts where none of these runs overflows."""
    file = jobs.folder / "scale.json"
    file.write_text(json.dumps({"fp16": {"initial_scale_power": 12}}), encoding="utf-8")
    return file


def strategies(jobs: Jobs, figures: Figures) -> None:
    """Each strategy on `--gpus`, by step 1 and by the Trainer: equal micro-batches, lengths, rows and AdamW."""
    options, gpus = jobs.options, jobs.options.gpus[-1]
    jobs.make_models()
    file = make_rows(jobs, "sft", mixed=False)
    for name in options.strategies or STRATEGIES:
        strategy = STRATEGIES[name]
        if strategy.gpus not in (0, gpus):
            continue
        changes = {"zero_stage": strategy.zero_stage, "dtype": strategy.dtype or options.dtype}
        scale = ("--deepspeed_config", scale_file(jobs)) if changes["dtype"] == "fp16" else ()
        own = other = {}
        if strategy.own is not None and not (name == "ddp" and gpus == 1):
            words = (*strategy.own, *scale)
            own = own_run(jobs, "sft", f"{name}, step 1, {gpus} GPU", file, *words, gpus=gpus, **changes)
        if strategy.trainer is not None:
            title = f"{name}, Trainer, {gpus} GPU"
            other = other_run(jobs, "sft", "transformers", title, file, *strategy.trainer, gpus=gpus, **changes)
        ratio = quotient(own.get("samples_per_s"), other.get("samples_per_s"))
        figures.add(f"samples/s, step 1 over Trainer, {name}, {gpus} GPU", ratio, "x")


def t5(jobs: Jobs, figures: Figures) -> None:
    """Step 1 of an encoder-decoder model on `--gpus`, weights, gradients and optimizer states on the host."""
    from benchmarks.speed.planned import planner_of

    options, gpus = jobs.options, jobs.options.gpus[-1]
    jobs.make_models()
    words = f"--model_name_or_path {options.actor} --max_seq_len {options.seq_len} --zero_stage 3 {' '.join(ON_HOST)}"
    planner, resolved = planner_of("sft", words, f"{gpus}xH200")
    for name, planned in zip(("expected", "high"), planner.memory(resolved).on_host, strict=True):
        figures.add(f"host memory, planned, {name}", planned / 2**30, "GiB")
    file = make_rows(jobs, "sft", mixed=True)
    run = own_run(jobs, "seq2seq", f"zero-3-offload, step 1, {gpus} GPU", file, *ON_HOST, gpus=gpus, zero_stage=3)
    figures.add("samples/s", run.get("samples_per_s"), "1/s")


def offload(jobs: Jobs, figures: Figures) -> None:
    """Steps 1 and 3 with states and weights on the GPU, on the host and on a disk: what each costs in time."""
    options = jobs.options
    jobs.make_models()
    file = make_rows(jobs, "sft", mixed=False)
    for name in options.strategies or OFFLOADS:
        config = jobs.folder / f"{name}.json"
        config.write_text(json.dumps({"zero_optimization": offload_json(name, jobs.folder)}), encoding="utf-8")
        options.zero_stage, words = OFFLOADS[name][0], ("--deepspeed_config", config)
        runs = own_run(jobs, "sft", f"{name}, SFT", file, *words), jobs.step3(f"{name}, PPO", *words)
        for kind, run in zip(("SFT", "PPO"), runs, strict=True):
            figures.add(f"seconds of a step, {name}, {kind}", run.get("step_s"), "s")


def offload_json(name: str, folder: Path) -> dict[str, Any]:
    """Return DeepSpeed's `zero_optimization` of one of OFFLOADS, with files below `folder`."""
    stage, optimizer, weights = OFFLOADS[name]
    places = {"offload_optimizer": optimizer, "offload_param": weights}
    on_disk = {"nvme_path": str(folder / "nvme")}
    zero = {key: place | (on_disk if place["device"] == "nvme" else {}) for key, place in places.items() if place}
    smaller = {"sub_group_size": 100_000_000, "stage3_max_reuse_distance": 0} if stage == 3 else {}
    return {"stage": stage} | smaller | zero


def rows_of(files: Sequence[str]) -> dict[tuple[str, str], dict[str, dict[str, Any]]]:
    """The runs of saved results by (GPUs, strategy) and then by who made them; of equal ones the last."""
    rows: dict[tuple[str, str], dict[str, dict[str, Any]]] = {}
    for line in (line for file in files for line in Path(file).read_text(encoding="utf-8").splitlines()):
        for name, run in json.loads(line)["runs"].items():
            strategy, _, rest = name.partition(", ")
            if strategy in STRATEGIES:
                by, _, gpus = rest.partition(", ")
                rows.setdefault((gpus, strategy), {})[by] = run
    return dict(sorted(rows.items(), key=lambda row: (row[0][0], list(STRATEGIES).index(row[0][1]))))


def table_of(rows: dict[tuple[str, str], dict[str, dict[str, Any]]]) -> str:
    """A line for each strategy and number of GPUs; a run that failed says so."""

    def cell(run: dict[str, Any], field: str) -> str:
        return "failed" if "error" in run else f"{run[field]:.1f}" if field in run else "-"

    lines = [
        [gpus, strategy, *(cell(runs.get(by, {}), field) for field in COLUMNS for by in MADE_BY)]
        for (gpus, strategy), runs in rows.items()
    ]
    return table(["GPUs", "strategy", *(f"{by}: {title}" for title in COLUMNS.values() for by in MADE_BY)], lines)


def plot(rows: dict[tuple[str, str], dict[str, dict[str, Any]]], picture: Path) -> None:
    """Draw the columns of the table that have values as bars, a panel each."""
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    runs_of_all = [run for runs in rows.values() for run in runs.values()]
    drawn = {field: title for field, title in COLUMNS.items() if any(field in run for run in runs_of_all)}
    size = (5 * len(drawn), 1 + 0.45 * len(rows))
    figure, grid = plt.subplots(1, len(drawn), figsize=size, dpi=110, sharey=True, squeeze=False)
    panels = grid[0]
    for panel, (field, title) in zip(panels, drawn.items(), strict=True):
        for number, by in enumerate(MADE_BY):
            values = [runs.get(by, {}).get(field) or 0.0 for runs in rows.values()]
            bars = panel.barh([place + 0.4 * number for place in range(len(rows))], values, height=0.4, label=by)
            panel.bar_label(bars, [f"{value:.1f}" if value else "" for value in values], fontsize="x-small")
        panel.margins(x=0.12)  # room for the numbers behind the bars
        panel.set_title(title)
    panels[0].set_yticks([place + 0.2 for place in range(len(rows))], [", ".join(row[::-1]) for row in rows])
    panels[0].invert_yaxis()
    panels[0].legend(fontsize="small")
    figure.tight_layout()
    figure.savefig(picture)


def main() -> None:
    """Print the table, and draw it where it is asked for and matplotlib is installed."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("files", nargs="+", help="results of the row, as --json writes them")
    parser.add_argument("--plot", default="", help="a picture to draw")
    options = parser.parse_args()
    rows = rows_of(options.files)
    print(table_of(rows))
    if options.plot and find_spec("matplotlib") is None:
        print("[bench] no plot: pip install matplotlib", file=sys.stderr)
    elif options.plot:
        plot(rows, Path(options.plot))


STRATEGY_ROWS: dict[str, Row] = {"strategies": strategies, "t5": t5, "offload": offload}

if __name__ == "__main__":
    main()
