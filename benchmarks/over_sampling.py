"""Decode steps of rollouts with --over-sample, by recorded lengths: `python -m benchmarks.over_sampling`.

It plays the rule of step3_ppo/over_sampling.py with the answers to GSM8K that the raw file has, in tokens.
"""

import random
import statistics
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from benchmarks.learning.quality import read_kept

RAW = Path(__file__).parent / "raw" / "gsm8k_qwen_h200_202611.jsonl.bz2"
PROMPTS, STRIDE, ROLLOUTS, FIRST = 32, 16, 200, 10  # the first rollouts carry nothing on, or little
SHARES = (0.0, 0.25, 0.5, 1.0)


def decode_steps(groups: Sequence[Sequence[int]], share: float, *, prompts: int = PROMPTS, seed: int = 0) -> float:
    """Return the mean decode steps of a rollout that ends when `prompts` groups of responses have ended.

    groups: lengths of the responses to a prompt, in tokens; prompts are drawn from them.
    """
    drawn, going = random.Random(seed), list[list[int]]()
    steps = list[int]()
    for _ in range(ROLLOUTS):
        while len(going) < prompts + round(prompts * share):
            going.append(list(drawn.choice(groups)))
        length = STRIDE
        while sum(max(group) <= length for group in going) < prompts:
            length += STRIDE
        steps.append(length)
        going.sort(key=max)
        going = [[max(0, left - length) for left in group] for group in going[prompts:]]
    return statistics.mean(steps[FIRST:])


def recorded(raw: Path = RAW) -> Iterator[tuple[str, list[list[int]]]]:
    """Yield each run that has several answers to a question, with their lengths by question."""
    kept: list[dict[str, Any]] = read_kept(raw)
    for line in kept:
        if line["run"].endswith(".t1"):
            yield line["run"].removesuffix(".t1"), [[row[1] for row in rows] for rows in line["answers"].values()]


def main() -> None:
    """Print a table in Markdown."""
    print("| model that answered |", " | ".join(f"{share:g}" for share in SHARES), "|")
    for run, groups in recorded():
        print(f"| {run} |", " | ".join(f"{decode_steps(groups, share):.0f}" for share in SHARES), "|")


if __name__ == "__main__":
    main()
