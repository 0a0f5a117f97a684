"""Median phase times, peak memory and finiteness of a step-3 run: `python -m benchmarks.speed.phases RUN_DIR`.

Prints a table for people and, as its last line, one JSON object for machines.
"""

import json
import sys
from pathlib import Path
from statistics import median
from typing import Any

WARM_UP_STEPS = 3
PPO_TIMES = {"generate_s": "time/generate_s", "score_s": "time/score_s", "train_s": "time/train_s"}
RATES = ("step_s", "samples_per_s", "tokens_per_s", "generate_tokens_per_s", "mfu", "completions/mean_length")
CHECKED = ("loss", "grad_norm", "loss/policy", "loss/value", "actor/grad_norm", "critic/grad_norm", "objective/kl")
PHASES = ("generate", "score", "train")
PEAKS = {f"{phase}_peak_gib": f"memory/{phase}_gib" for phase in PHASES}
ERRORS = {"first_ratio_error": "policy/first_ratio_error", "sampler_error": "policy/sampler_error"}


def training_lines(run_dir: str | Path) -> list[dict[str, Any]]:
    """The lines of `metrics.jsonl` that are of training steps."""
    text = Path(run_dir, "metrics.jsonl").read_text(encoding="utf-8")
    return [line for line in map(json.loads, text.splitlines()) if "step_s" in line]


def measure(run_dir: str | Path, *, warm_up: int = WARM_UP_STEPS) -> dict[str, Any]:
    """Medians over the steps after `warm_up`; a shorter run gives its last step. Tokens are those of a whole step.

    Of steps 1 and 2 too: what a run does not log is left out.
    """
    lines = training_lines(run_dir)
    measured = lines[warm_up:] or lines[-1:]
    names = PPO_TIMES | {name.rpartition("/")[2]: name for name in RATES}
    found: dict[str, Any] = {}
    for short, name in names.items():
        values = [line[name] for line in measured if line.get(name) is not None]
        if values:
            found[short] = median(values)
    found["tokens_per_step"] = median(line["tokens_per_s"] * line["step_s"] for line in measured)
    found["peak_gib"] = max(line.get("gpu_memory_gib", 0.0) for line in lines)
    found["steps"] = len(measured)
    for short, name in (ERRORS | PEAKS).items():
        values = [line[name] for line in lines if line.get(name) is not None]
        if values:
            found[short] = max(values)
    found["skipped"] = lines[-1]["skipped_updates"]
    found["finite"] = all(line[name] is not None for line in lines for name in CHECKED if name in line)
    return found


def start_seconds(run_dir: str | Path, began: float) -> float:
    """Seconds from a moment (of `time.time`) to the beginning of the run's first step."""
    first = training_lines(run_dir)[0]
    return first["time"] - began - first["step_s"]


def sizes_of(values: dict[str, Any], last: dict[str, Any]) -> str:
    """What a run's configuration and its last line say of batches and of recomputation, in a few words."""
    micro = values["per_device_train_batch_size"]
    parts = [f"{micro} x {values['gradient_accumulation_steps']}"]
    if last.get("micro_batch_size", micro) != micro:
        parts.append(f"halved to {last['micro_batch_size']}")
    if (at_once := values.get("per_device_generation_batch_size")) is not None:
        parts.append(f"sampling {at_once}")
    models = [flag for flag, value in values.items() if flag.endswith("gradient_checkpointing") and value is True]
    return ", ".join(parts + [flag.replace("_gradient_", " ").replace("gradient_", "") for flag in models])


def main() -> None:
    found = measure(sys.argv[1])
    for name, value in found.items():
        print(f"{name:<24}{value:>12.4g}" if not isinstance(value, bool) else f"{name:<24}{value!s:>12}")
    print(json.dumps(found))


if __name__ == "__main__":
    main()
