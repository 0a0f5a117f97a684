"""The demo with five seeds, one after the other, each in a folder of its own below output/seeds/.

Prints a line for each seed, and ends with 1 if a claim of the demo fails for any: `python -m demo.seeds`.
"""

import json
import os
import sys
from pathlib import Path
from typing import Any

from demo.report import failed_claims, verdict
from demo.run import run

SEEDS = (1, 2, 3, 4, 5)


def line(seed: int, results: dict[str, Any]) -> str:
    """Return the figures of one seed, and those of the demo's claims that do not hold."""
    return (
        "seed {seed}: perplexity {perplexity_before:.2f} -> {perplexity_after:.2f}, "
        "reward accuracy {reward_accuracy:.3f}, score {reward_start:.2f} -> {reward_end:.2f}, KL {kl_end:.2f}, "
        "good {sft_rate:.3f} -> {ppo_rate:.3f} (+- {ppo_error:.3f}), "
        "distinct {sft_distinct:.3f} -> {ppo_distinct:.3f}, {minutes:.1f} min: {end}"
    ).format(seed=seed, end=verdict(results), **results)


def main() -> int:
    """Run the demo with every seed; return the exit code."""
    home = Path.cwd()
    os.environ["PYTHONPATH"] = os.pathsep.join(filter(None, (str(home), os.environ.get("PYTHONPATH"))))
    lines, failed = [], 0
    for seed in SEEDS:
        folder = home / "output" / "seeds" / str(seed)
        folder.mkdir(parents=True, exist_ok=True)
        os.chdir(folder)
        results = run(seed=seed, overwrite=True)
        lines.append(line(seed, results))
        failed += bool(failed_claims(results))
        print(lines[-1], flush=True)
        (home / "output" / "seeds" / "results.jsonl").open("a").write(json.dumps({"seed": seed, **results}) + "\n")
    print("\n".join(lines))
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
