"""Command line of stage 2: `python -m step2_reward.main --model-name-or-path facebook/opt-350m --data-path ...`."""

from pipeline.preparation.stage_entry import enter
from pipeline.run.entry import leave
from step2_reward.stage import STAGE


def main(argv: list[str] | None = None) -> int:
    """Run stage 2; returns the exit code."""
    return enter(STAGE, argv)


if __name__ == "__main__":
    leave(main())
