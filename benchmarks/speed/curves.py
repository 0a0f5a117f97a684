"""The row curves: PPO of the demo by the fused and the eager backend, seed by seed, from the same two models."""

import json
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from statistics import fmean, stdev
from typing import Any

from benchmarks.speed.figures import Figures
from benchmarks.speed.jobs import ROOT, BenchError, Jobs, flags, launched

PRESETS = ROOT / "launch" / "presets"
BACKENDS = ("fused", "eager")
LAST = 10  # steps whose mean is compared
SHOWN = {"score": "objective/scores", "kl": "objective/kl"}


def curves(jobs: Jobs, figures: Figures) -> None:
    """Learning curves do not depend on the backend that samples; differences beside the spread over seeds."""
    from demo.make import make_data, make_model

    made = jobs.folder / "demo"
    make_data(made, seed=0)
    make_model(made, seed=0)
    base: dict[str, Any] = {"data_output_path": made / "cache", "dtype": "fp32", "enable_tensorboard": "false"}
    rows = base | {"data_path": made / "data"}
    models = [
        ("base", "step1_sft", ROOT / "demo" / "base.yaml", "untrained", base | {"data_path": made / "text.jsonl"}),
        ("sft", "step1_sft", PRESETS / "tiny.yaml", "base", rows),
        ("reward", "step2_reward", PRESETS / "tiny.yaml", "base", rows),
    ]
    for name, stage, preset, start, given in models:
        given = given | {"model_name_or_path": made / start, "output_dir": made / name, "run_dir": made / f"run-{name}"}
        jobs.run(name, launched(f"{stage}.main", ["--preset", preset, "--overwrite", *flags(given)], gpus=1))
    given = rows | {"actor_model_name_or_path": made / "sft", "critic_model_name_or_path": made / "reward"}
    cases = [(backend, seed) for seed in range(1, jobs.options.seeds + 1) for backend in BACKENDS]

    def sample(case: tuple[str, int]) -> None:
        backend, seed = case
        name = f"{backend}, seed {seed}"
        output = jobs.fresh(name)
        words = flags(given | {"generation_engine": backend, "seed": seed, "output_dir": output})
        try:
            jobs.run(name, launched("step3_ppo.main", ["--preset", PRESETS / "tiny.yaml", *words], gpus=1))
            jobs.runs[name] = learned(output / "runs" / "ppo")
        except BenchError as error:
            jobs.runs[name] = {"error": str(error)}

    with ThreadPoolExecutor(jobs.options.parallel) as pool:
        list(pool.map(sample, cases))
    compare(jobs.runs, figures)


def learned(run_dir: Path) -> dict[str, Any]:
    """Return the curve of each shown metric, and its mean over the last steps."""
    lines = [json.loads(line) for line in (run_dir / "metrics.jsonl").read_text(encoding="utf-8").splitlines()]
    found = {name: [line[key] for line in lines if key in line] for name, key in SHOWN.items()}
    return {name: fmean(curve[-LAST:]) for name, curve in found.items()} | {"curves": found}


def compare(runs: dict[str, dict[str, Any]], figures: Figures) -> None:
    """Add the means of both backends over the seeds, their difference and the spread over seeds."""
    for name in SHOWN:
        found = {
            backend: [run[name] for key, run in sorted(runs.items()) if key.startswith(backend) and name in run]
            for backend in BACKENDS
        }
        if min(map(len, found.values())) < 2:
            continue
        for backend, values in found.items():
            figures.add(f"{name}, last {LAST} steps, {backend}", fmean(values))
        figures.add(f"{name}: difference of the means", abs(fmean(found["fused"]) - fmean(found["eager"])))
        figures.add(f"{name}: standard deviation over seeds", stdev(found["eager"]))
    both = [
        seed for seed in range(1, len(runs)) if all("curves" in runs.get(f"{b}, seed {seed}", {}) for b in BACKENDS)
    ]
    agree = [steps_that_agree(*(runs[f"{b}, seed {seed}"]["curves"]["score"] for b in BACKENDS)) for seed in both]
    figures.add("first steps whose scores agree to 1e-4, fewest of all seeds", min(agree, default=None))


def steps_that_agree(mine: Sequence[float], theirs: Sequence[float]) -> int:
    """Return the number of first steps in which both curves have the same values."""
    differ = (step for step, (a, b) in enumerate(zip(mine, theirs, strict=True)) if abs(a - b) > 1e-4)
    return next(differ, len(mine))
