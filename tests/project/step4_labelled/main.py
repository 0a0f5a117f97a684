"""Command line of stage 4: `python -m step4_labelled.main --model-name-or-path output/sft ...`."""

from pipeline.preparation.stage_entry import enter
from pipeline.run.entry import leave
from step4_labelled.stage import STAGE


def main(argv: list[str] | None = None) -> int:
    """Run stage 4; returns the exit code."""
    return enter(STAGE, argv)


if __name__ == "__main__":
    leave(main())
