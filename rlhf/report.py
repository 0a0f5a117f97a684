"""Write the report of a run, or of several to compare: `rlhf report output`."""

from pathlib import Path

from pipeline.configuration.flag_table import flag
from pipeline.configuration.groups import Group
from pipeline.errors import InputError, show
from pipeline.run.entry import command, command_flags


class ReportConfig(Group):
    """Write the report of runs: `rlhf report output`."""

    folder: list[str] = flag(
        [],
        "Output folders, or folders of runs (output/runs/ppo); several are compared",
        kind="path",
        positional=True,
        required=True,
    )
    output: str = flag("", "Folder to write to; none: the given folder, or ./report for several", kind="written path")


def run(argv: list[str], prog: str) -> None:
    """Check the command line, write the report and print its path. Raises InputError, EnvironmentFault."""
    config: ReportConfig = command_flags(ReportConfig, argv, section="report", prog=prog).config
    folders = [Path(folder) for folder in dict.fromkeys(config.folder)]
    if not folders:
        raise InputError("--folder: got none, expected an output folder or folders of runs, like output")
    if missing := [folder for folder in folders if not folder.is_dir()]:
        raise InputError(f"{missing[0]}: no such folder; give an output folder or the folder of a run")
    # It imports matplotlib, which takes a second.
    from pipeline.reporting.page import write_report

    page = write_report(folders, Path(config.output or (folders[0] if len(folders) == 1 else "report")))
    show(f"report: {page}")


main = command(run, "rlhf report")
