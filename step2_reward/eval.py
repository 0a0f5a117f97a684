"""Evaluate a reward model on pairs: `python -m step2_reward.eval output/reward --data-path ...`.

It reads the flags and answers `--help` before it imports torch.
"""

import json

from pipeline.console import quit_on_interrupt
from pipeline.errors import show

if __name__ == "__main__":
    quit_on_interrupt()  # importing the flags takes a moment, in which Ctrl-C must work

from pipeline.models.paths import check_reward_model
from pipeline.run.entry import command, command_flags
from step2_reward.config import RewardEvalConfig


def run(argv: list[str], prog: str) -> None:
    """Evaluate the reward model of a folder on pairs."""
    resolved = command_flags(RewardEvalConfig, argv, section="reward", prog=prog)
    options = resolved.config
    check_reward_model(options.model, "--model")
    from step2_reward.pair_scores import evaluate_folder, lines

    results = evaluate_folder(options.model, resolved)
    show(json.dumps(results) if options.json_output else "\n".join(lines(results)))


main = command(run, "python -m step2_reward.eval")
