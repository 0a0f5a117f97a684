"""Which rows a run sees: pure functions of (seed, prompt id), equal on every machine whatever the order of the rows.

Three independent draws are made for a prompt, each from its own hash: whether a weighted source keeps it, whether it is
an evaluation row, and which of the three steps trains on it. All rows of one prompt therefore stay together.
"""

import hashlib
import math

from pipeline.errors import InputError

Shares = tuple[float, float, float]


def parse_shares(text: str) -> Shares | None:
    """Shares of steps 1, 2, 3 from text like '2,4,4', normalised to sum 1. 'none' gives None: every step sees all rows.

    Raises InputError unless there are three finite numbers >= 0 with a positive sum.
    """
    if text.strip().lower() == "none":
        return None
    try:
        numbers = [float(part) for part in text.split(",")]
    except ValueError:
        numbers = []
    if len(numbers) != 3 or not all(math.isfinite(n) and n >= 0 for n in numbers) or sum(numbers) <= 0:
        raise InputError(f"data_split {text!r}: three numbers >= 0 like 2,4,4 (steps 1, 2, 3), or none, are right")
    first, second, third = (number / sum(numbers) for number in numbers)
    return first, second, third


def step_of(prompt_id: int, seed: int, shares: Shares) -> int:
    """The one step, 0, 1 or 2, that trains on this prompt. A step of share 0 is never returned."""
    position = _uniform("step", seed, prompt_id)
    last = max(step for step, share in enumerate(shares) if share > 0)
    for step in range(last):
        if position < sum(shares[: step + 1]):
            return step
    # The last share takes what rounding leaves of the interval.
    return last


def is_eval(prompt_id: int, seed: int, fraction: float) -> bool:
    """True if the prompt is an evaluation row; about `fraction` of all prompts are."""
    return _uniform("eval", seed, prompt_id) < fraction


def is_kept(prompt_id: int, seed: int, weight: float) -> bool:
    """True if a source of this weight keeps the prompt; weight 1 keeps all."""
    return _uniform("weight", seed, prompt_id) < weight


def _uniform(purpose: str, seed: int, prompt_id: int) -> float:
    """A float64 in [0, 1) with 53 random bits, from a hash of its arguments."""
    digest = hashlib.blake2b(f"{purpose}:{seed}:{prompt_id}".encode(), digest_size=8).digest()
    return (int.from_bytes(digest, "big") >> 11) / 2**53
