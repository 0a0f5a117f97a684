"""Command line of stage 2: `python -m step2_reward.main --model_name_or_path facebook/opt-350m --data_path ...`."""

from pipeline.launching.dry_run import dry_run_own_stage
from pipeline.run.entry import enter, leave
from step2_reward.config import RewardConfig


def main(argv: list[str] | None = None) -> int:
    """Run stage 2; returns the exit code."""
    return enter(RewardConfig, "reward", "step2_reward.training", argv, dry_run=dry_run_own_stage)


if __name__ == "__main__":
    leave(main())
