"""The file that describes a run and its metrics, for reports, which know no stage."""

import os
import time
from collections.abc import Mapping
from dataclasses import asdict

from pipeline.configuration.flag_table import flat_items
from pipeline.files import read_object, tolerated, write_json
from pipeline.processes import read_process
from pipeline.run.layout import meaning_file
from pipeline.run.run import Run
from pipeline.training.metrics import Metric, title_of


def write_meaning(run: Run, metrics: Mapping[str, Metric], *, start_step: int, total_steps: int) -> None:
    """Write the description of this run and of its metrics, on rank 0.

    It includes the time at which the run began, since log.txt may hold lines of an earlier run. A resumed run
    (`start_step` of 0 or more) keeps that time.
    """
    stage, config, file = run.stage, run.resolved.config, meaning_file(run.folder)
    process, before = read_process(os.getpid()), read_object(file) if start_step >= 0 else {}
    began = process.started_s if process else time.time()
    starts = [start for start in before.get("starts", []) if start[0] < start_step]
    content = {
        "stage": stage.section,
        "number": stage.number,
        "title": stage.title_of(config),
        "rows": config.row_options["rows"],
        "compared": [*stage.reached, *stage.compared],
        "steps": total_steps,
        "began": before.get("began", began),
        # Step, ranks and time of each start, without those whose steps are gone.
        "starts": [*starts, [start_step, run.world.size, began]],
        "start": dict(flat_items(config))[stage.path_flag(stage.first_prefix)],
        "outputs": [str(folder) for folder in config.outputs],
        "answers": config.makes_chat_model,
        "metrics": {name: asdict(metric) for name, metric in metrics.items()},
        "titles": {name: title_of(name, metrics) for name in stage.reached},
    }
    with tolerated("what metrics mean"):
        write_json(file, content)
