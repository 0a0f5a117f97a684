"""Command line of stage 3 by DPO: `python -m step3_dpo.main --model-name-or-path output/sft --data-path ...`."""

from pipeline.preparation.stage_entry import enter
from pipeline.run.entry import leave
from step3_dpo.stage import STAGE


def main(argv: list[str] | None = None) -> int:
    """Run stage 3 by DPO; returns the exit code."""
    return enter(STAGE, argv)


if __name__ == "__main__":
    leave(main())
