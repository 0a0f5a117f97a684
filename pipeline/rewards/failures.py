"""The number of responses that a reward function may fail to score before the run ends."""

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from pipeline.errors import EnvironmentFault, InputError
from pipeline.rewards.functions import FLAG
from pipeline.rewards.pool import Failure, Value

RESPONSES = "responses"  # key of a count; the others are kinds of failures
Counts = Mapping[str, int]


def counts_of(values: Sequence[Value]) -> dict[str, int]:
    """Return the number of responses in a function's values, and of failures by kind."""
    return {RESPONSES: len(values)} | Counter(value.kind for value in values if isinstance(value, Failure))


def num_failed(counts: Counts) -> int:
    """Return how many responses failed."""
    return sum(counts.values()) - counts[RESPONSES]


def first_of_failures(values: Sequence[Value]) -> Failure | None:
    """Return the first failure if all values are failures, else None."""
    return values[0] if values and all(isinstance(value, Failure) for value in values) else None  # type: ignore[return-value]


@dataclass(frozen=True, slots=True)
class FailureWindow:
    """The last rollouts of a function that have `num_responses` together, and what share of these may be failures."""

    max_share: float = 0.05
    num_responses: int = 1000
    min_failures: int = 20

    def after(self, rollouts: Sequence[Counts], new: Counts) -> list[Counts]:
        """Return the counts of the window's rollouts, which a checkpoint keeps, after those of one more."""
        window, rest = [new], self.num_responses - new[RESPONSES]
        for counts in reversed(rollouts):
            if rest <= 0:
                break
            window.insert(0, counts)
            rest -= counts[RESPONSES]
        return window

    def is_surely_passed(self, failed: int, expected: int) -> bool:
        """Return True if so many failures end the run, however the rest of a rollout's `expected` responses score."""
        return failed >= self.min_failures and failed > self.max_share * (self.num_responses + expected)

    def check(self, name: str, rollouts: Sequence[Counts], first: Failure | None) -> None:
        """Raise where the function `name` has failed too often in these rollouts, or in all of the last one.

        Args:
            name: of a reward function, or a flag with what it names.
            first: the first failure of the last rollout, if any.

        Raises:
            EnvironmentFault: its endpoint does not answer. InputError: any other failure.
        """
        kinds = sum(map(Counter, rollouts), Counter[str]())
        total, last = kinds.pop(RESPONSES, 0), rollouts[-1]
        failed, is_all = kinds.total(), 0 < last[RESPONSES] == num_failed(last)
        if first is None or not (is_all or (failed >= self.min_failures and failed > self.max_share * total)):
            return
        words = ", ".join(f"{number} {kind}" for kind, number in kinds.items())
        error = EnvironmentFault if first.kind == "no connection" else InputError
        title = name if name.startswith("--") else f"{FLAG}: {name}"
        raise error(f"{title} gave no value for {failed} of the last {total} responses ({words}): {first.message}")


def failure_notes(name: str, values: Sequence[Value]) -> list[str]:
    """Return a note on each distinct failure of a function."""
    kinds = Counter(value for value in values if isinstance(value, Failure))
    return [
        f"note: {name}: {one.kind}: {one.message}; {count} of {len(values)} responses" for one, count in kinds.items()
    ]


def check_values(name: str, values: Sequence[Value]) -> None:
    """Raise what `FailureWindow.check` raises if a function has failed too often for these responses, or for all."""
    first = next((value for value in values if isinstance(value, Failure)), None)
    FailureWindow().check(name, [counts_of(values)], first)


def check_one_for_each(name: str, values: Sequence[Value]) -> None:
    """Raise InputError if a function gave a value for each token, which methods that compare responses do not take."""
    if any(isinstance(value, list) for value in values):
        what = "got a value for each token, which --method ppo and reinforce_pp take"
        raise InputError(f"{FLAG}: {name}: {what}; a method that compares responses expects one for each")
