"""Command line of stage 1: `python -m step1_sft.main --model-name-or-path facebook/opt-1.3b --data-path ...`."""

from pipeline.preparation.stage_entry import enter
from pipeline.run.entry import leave
from step1_sft.stage import STAGE


def main(argv: list[str] | None = None) -> int:
    """Run stage 1; returns the exit code."""
    return enter(STAGE, argv)


if __name__ == "__main__":
    leave(main())
