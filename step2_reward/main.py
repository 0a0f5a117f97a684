"""Command line of stage 2: `python -m step2_reward.main --model-name-or-path facebook/opt-350m --data-path ...`."""

from pipeline.preparation.own_ranks import choose_for_run, dry_run_own_stage, report_own_run
from pipeline.run.entry import enter, leave
from step2_reward.stage import STAGE


def main(argv: list[str] | None = None) -> int:
    """Run stage 2; returns the exit code."""
    return enter(STAGE, argv, dry_run=dry_run_own_stage, choose=choose_for_run, write_report=report_own_run)


if __name__ == "__main__":
    leave(main())
