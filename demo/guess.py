"""The game of the demo with tools: find a number from 1 to 3 in two guesses, each answered by higher, lower or right.

Whoever halves the range with each answer always finds it. Whoever ignores the answers finds 2 of 3 at best.
"""

HIGHEST, GUESSES = 3, 2


class Guess:
    """The game: `--environment demo/guess.py:Guess`, for rows with a column `secret`."""

    def reset(self, secret: int) -> None:
        self.secret, self.guesses = secret, list[int]()

    def guess(self, number: int) -> str:
        """Guess it.

        Args:
            number: From 1.
        """
        if len(self.guesses) == GUESSES:  # a turn may hold several calls, so --max-turns does not limit guesses
            return "over"
        self.guesses.append(number)
        return "right" if number == self.secret else "higher" if number < self.secret else "lower"

    def get_reward(self) -> float:
        """Return 1 if the number was found, else 0."""
        return float(self.secret in self.guesses)
