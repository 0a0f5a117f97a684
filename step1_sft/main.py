"""Command line of stage 1: `python -m step1_sft.main --model-name-or-path facebook/opt-1.3b --data-path ...`."""

from pipeline.preparation.own_ranks import choose_for_run, dry_run_own_stage, report_own_run
from pipeline.run.entry import enter, leave
from step1_sft.stage import STAGE


def main(argv: list[str] | None = None) -> int:
    """Run stage 1; returns the exit code."""
    return enter(STAGE, argv, dry_run=dry_run_own_stage, choose=choose_for_run, write_report=report_own_run)


if __name__ == "__main__":
    leave(main())
