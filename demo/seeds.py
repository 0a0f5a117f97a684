"""The demo with five seeds, one after the other, each in a folder of its own below output/seeds/.

Prints one line a seed, and whether each of the demo's claims holds: `python -m demo.seeds`.
"""

import json
import os
from pathlib import Path
from typing import Any

from demo.run import run

SEEDS = (1, 2, 3, 4, 5)


def claims(found: dict[str, Any]) -> dict[str, bool]:
    """Return what the demo must show in every seed."""
    return {
        "SFT rate in 0.3 .. 0.6": 0.3 <= found["sft_rate"] <= 0.6,
        "PPO at least 20 points higher": found["ppo_rate"] >= found["sft_rate"] + 0.2,
        "KL under 10 nats": found["kl_end"] < 10.0,
        "distinct answers at least 0.8 of SFT's": found["ppo_distinct"] >= 0.8 * found["sft_distinct"],
    }


def line(seed: int, found: dict[str, Any]) -> str:
    failed = [claim for claim, holds in claims(found).items() if not holds]
    return (
        f"seed {seed}: perplexity {found['perplexity_before']:.2f} -> {found['perplexity_after']:.2f}, "
        f"reward accuracy {found['reward_accuracy']:.3f}, "
        f"score {found['reward_start']:.2f} -> {found['reward_end']:.2f}, KL {found['kl_end']:.2f}, "
        f"good {found['sft_rate']:.3f} -> {found['ppo_rate']:.3f} (+- {found['ppo_error']:.3f}), "
        f"distinct {found['sft_distinct']:.3f} -> {found['ppo_distinct']:.3f}, {found['minutes']:.1f} min: "
        + (f"FAILED: {', '.join(failed)}" if failed else "all claims hold")
    )


def main() -> None:
    home = Path.cwd()
    os.environ["PYTHONPATH"] = os.pathsep.join(filter(None, (str(home), os.environ.get("PYTHONPATH"))))
    lines = []
    for seed in SEEDS:
        folder = home / "output" / "seeds" / str(seed)
        folder.mkdir(parents=True, exist_ok=True)
        os.chdir(folder)
        found = run(seed=seed, overwrite=True)
        lines.append(line(seed, found))
        print(lines[-1], flush=True)
        (home / "output" / "seeds" / "results.jsonl").open("a").write(json.dumps({"seed": seed, **found}) + "\n")
    print("\n".join(lines))


if __name__ == "__main__":
    main()
