"""Median phase times, peak memory and finiteness of a step-3 run: `python tests/bench/phases.py RUN_DIR`.

Prints a table for people and, as its last line, one JSON object for machines.
"""

import json
import sys
from pathlib import Path
from statistics import median

WARM_UP_STEPS = 3
TIMES = ("time/generate_s", "time/score_s", "time/train_s", "step_s")
CHECKED = ("loss/policy", "loss/value", "actor/grad_norm", "critic/grad_norm", "objective/kl")


def main() -> None:
    lines = [json.loads(line) for line in Path(sys.argv[1], "metrics.jsonl").read_text(encoding="utf-8").splitlines()]
    steps = [line for line in lines if "time/train_s" in line]
    measured = steps[WARM_UP_STEPS:] or steps
    found = {name: median(line[name] for line in measured if name in line) for name in TIMES}
    found["samples_per_s"] = median(line["samples_per_s"] for line in measured)
    found["generate_tokens_per_s"] = median(line["generate_tokens_per_s"] for line in measured)
    found["peak_gib"] = max(line.get("gpu_memory_gib", 0.0) for line in steps)
    found["steps"] = len(steps)
    found["first_ratio_error"] = max(line["policy/first_ratio_error"] for line in steps)
    found["sampler_error"] = max(line["policy/sampler_error"] for line in steps if "policy/sampler_error" in line)
    found["skipped"] = steps[-1]["skipped_updates"]
    found["finite"] = all(line[name] is not None for line in steps for name in CHECKED if name in line)
    for name, value in found.items():
        print(f"{name:<24}{value:>12.4g}" if not isinstance(value, bool) else f"{name:<24}{value!s:>12}")
    print(json.dumps(found))


if __name__ == "__main__":
    main()
