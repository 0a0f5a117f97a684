"""Command line of stage 3: `python -m step3_ppo.main --actor-model-name-or-path output/sft ...`."""

from pipeline.preparation.own_ranks import choose_for_run, dry_run_own_stage, report_own_run
from pipeline.run.entry import enter, leave
from step3_ppo.stage import STAGE


def main(argv: list[str] | None = None) -> int:
    """Run stage 3; returns the exit code."""
    return enter(STAGE, argv, dry_run=dry_run_own_stage, choose=choose_for_run, write_report=report_own_run)


if __name__ == "__main__":
    leave(main())
