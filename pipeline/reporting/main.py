"""The report's process, `python -m pipeline.reporting.main FOLDER`, which a run starts; people type `rlhf report`."""

import os
import sys
from pathlib import Path

from pipeline.reporting.page import write_report
from pipeline.run.entry import run_command

NICENESS = 15  # a run has the processors first


def main(folder: str) -> None:
    """Write the report of a folder."""
    os.nice(NICENESS)
    write_report([Path(folder)], Path(folder))


if __name__ == "__main__":
    sys.exit(run_command(lambda: main(sys.argv[1])))
