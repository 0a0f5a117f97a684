"""Command line of stage 3: `python -m step3_ppo.main --actor-model-name-or-path output/sft ...`."""

from pipeline.preparation.stage_entry import enter
from pipeline.run.entry import leave
from step3_ppo.stage import STAGE


def main(argv: list[str] | None = None) -> int:
    """Run stage 3; returns the exit code."""
    return enter(STAGE, argv)


if __name__ == "__main__":
    leave(main())
