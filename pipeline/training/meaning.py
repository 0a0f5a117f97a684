"""The file that says what a run is and what its numbers mean, for readers that know no stage: reports."""

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
    """Write what this run is and what its metrics mean; called on rank 0.

    With its begin, which a resumed run (`start_step` 0 or more) keeps: log.txt may hold lines of an earlier one.
    """
    stage, config, file = run.stage, run.resolved.config, meaning_file(run.folder)
    process, before = read_process(os.getpid()), read_object(file) if start_step >= 0 else {}
    began = process.started_s if process else time.time()
    starts = [start for start in before.get("starts", []) if start[0] < start_step]
    content = {
        "stage": stage.section,
        "number": stage.number,
        "title": stage.title_of(config),
        "rows": stage.row_options(config)["rows"],
        "compared": [*stage.reached, *stage.compared],
        "steps": total_steps,
        "began": before.get("began", began),
        "starts": [*starts, [start_step, run.world.size, began]],  # step, ranks and time, of those whose steps stay
        "start": dict(flat_items(config))[stage.path_flag(next(iter(stage.starts)))],
        "outputs": [str(folder) for folder in stage.outputs(config)],
        "answers": stage.makes_chat_model,
        "metrics": {name: asdict(metric) for name, metric in metrics.items()},
        "titles": {name: title_of(name, metrics) for name in stage.reached},
    }
    with tolerated("what metrics mean"):
        write_json(file, content)
