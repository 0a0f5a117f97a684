"""Run fingerprints: settings, data and start models that a resumed run must share with its checkpoint."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from datasets import Dataset

from pipeline import dist
from pipeline.configuration.resume_rules import record_of, values_by_rule
from pipeline.configuration.stage import StageConfig
from pipeline.data.cache import data_fingerprint
from pipeline.data.row_kinds import EXTRA
from pipeline.files import model_fingerprint
from pipeline.run.earlier_runs import input_contents


@dataclass(frozen=True, slots=True)
class RunFingerprint:
    """The properties of a run that do not change while it lasts; state.json of each checkpoint has them by these names.

    settings: flags that decide what is learnt.
    fingerprints: hashes of data, start models and files of functions.
    sizes: rows of an optimizer step and the like, over all ranks.
    layout: flags that change numbers by rounding only; other values are logged.
    inputs: contents of the flags that name data and start models, for the marker of a finished run.
    columns: hashes of what only rewards read, further columns of data and modules of functions.
    total_steps: optimizer steps of the run; a smaller number than before is logged.
    """

    settings: Mapping[str, Any]
    fingerprints: Mapping[str, str]
    sizes: Mapping[str, int]
    layout: Mapping[str, Any]
    inputs: Mapping[str, Any] = field(default_factory=dict)
    columns: Mapping[str, str] = field(default_factory=dict)
    total_steps: int = 0


def run_fingerprint(
    config: StageConfig, data: Mapping[str, Dataset], *, ranks: int, total_steps: int
) -> RunFingerprint:
    """Return the fingerprint of a run; the keys of its rows are names for error messages. A collective."""
    columns = {name: rows for name, rows in data.items() if EXTRA in rows.column_names}
    hashes = {name: model_fingerprint(name_or_path) for name, name_or_path in config.start_paths.items()}
    return RunFingerprint(
        **record_of(config, ranks, "same"),
        fingerprints=hashes | {name: data_fingerprint(rows) for name, rows in data.items()},
        layout=values_by_rule(config, "rounding"),
        inputs=dist.on_main(lambda: input_contents(config)),
        columns={f"other columns of {name}": data_fingerprint(rows, columns=True) for name, rows in columns.items()},
        total_steps=total_steps,
    )
