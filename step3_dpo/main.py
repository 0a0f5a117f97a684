"""Command line of stage 3 by DPO: `python -m step3_dpo.main --model-name-or-path output/sft --data-path ...`."""

from pipeline.preparation.own_ranks import choose_for_run, dry_run_own_stage, report_own_run
from pipeline.run.entry import enter, leave
from step3_dpo.stage import STAGE


def main(argv: list[str] | None = None) -> int:
    """Run stage 3 by DPO; returns the exit code."""
    return enter(STAGE, argv, dry_run=dry_run_own_stage, choose=choose_for_run, write_report=report_own_run)


if __name__ == "__main__":
    leave(main())
