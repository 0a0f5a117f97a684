"""The demo with five seeds, one after the other, each in a folder of its own below output/seeds/.

Prints one line a seed, and whether each of the demo's claims holds: `python -m demo.seeds`.
"""

import json
import os
from pathlib import Path
from typing import Any

from demo.run import run

SEEDS = (1, 2, 3, 4, 5)


def line(seed: int, results: dict[str, Any]) -> str:
    """Return the figures of one seed, and those of the demo's claims that do not hold."""
    claims = {
        "SFT rate in 0.3 .. 0.6": 0.3 <= results["sft_rate"] <= 0.6,
        "PPO at least 20 points higher": results["ppo_rate"] >= results["sft_rate"] + 0.2,
        "KL under 10 nats": results["kl_end"] < 10.0,
        "distinct answers at least 0.8 of SFT's": results["ppo_distinct"] >= 0.8 * results["sft_distinct"],
    }
    failed = ", ".join(claim for claim, holds in claims.items() if not holds)
    return (
        "seed {seed}: perplexity {perplexity_before:.2f} -> {perplexity_after:.2f}, "
        "reward accuracy {reward_accuracy:.3f}, score {reward_start:.2f} -> {reward_end:.2f}, KL {kl_end:.2f}, "
        "good {sft_rate:.3f} -> {ppo_rate:.3f} (+- {ppo_error:.3f}), "
        "distinct {sft_distinct:.3f} -> {ppo_distinct:.3f}, {minutes:.1f} min: {end}"
    ).format(seed=seed, end=f"FAILED: {failed}" if failed else "all claims hold", **results)


def main() -> None:
    home = Path.cwd()
    os.environ["PYTHONPATH"] = os.pathsep.join(filter(None, (str(home), os.environ.get("PYTHONPATH"))))
    lines = []
    for seed in SEEDS:
        folder = home / "output" / "seeds" / str(seed)
        folder.mkdir(parents=True, exist_ok=True)
        os.chdir(folder)
        results = run(seed=seed, overwrite=True)
        lines.append(line(seed, results))
        print(lines[-1], flush=True)
        (home / "output" / "seeds" / "results.jsonl").open("a").write(json.dumps({"seed": seed, **results}) + "\n")
    print("\n".join(lines))


if __name__ == "__main__":
    main()
