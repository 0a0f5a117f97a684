"""Run fingerprints: settings, data and start models that a resumed run must share with its checkpoint."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from datasets import Dataset

from pipeline import dist
from pipeline.configuration.resume_rules import batch_sizes, defaults_of, values_by_rule
from pipeline.configuration.stage import StageConfig
from pipeline.data.cache import data_fingerprint
from pipeline.data.row_kinds import EXTRA
from pipeline.files import model_fingerprint
from pipeline.run.earlier_runs import input_contents


@dataclass(frozen=True, slots=True)
class RunFingerprint:
    """The properties of a run that do not change while it lasts, and are compared when it is resumed.

    settings: flags that decide what is learnt.
    hashes: hashes of data and start models.
    sizes: rows of an optimizer step and the like, over all ranks.
    rounding: flags that change numbers by rounding only; other values are logged.
    defaults: values assumed for flags that the checkpoint's version did not have.
    inputs: contents of the flags that name data and start models, for the marker of a finished run.
    columns: hashes of what only rewards read, further columns of data and modules of functions; compared where a
    checkpoint has them.
    total_steps: optimizer steps of the run; a smaller number than before is logged.
    reads_columns: a reward of the run reads them: a checkpoint that has their hashes must have the same.
    """

    settings: Mapping[str, Any]
    hashes: Mapping[str, str]
    sizes: Mapping[str, int]
    rounding: Mapping[str, Any]
    defaults: Mapping[str, Any] = field(default_factory=dict)
    inputs: Mapping[str, Any] = field(default_factory=dict)
    columns: Mapping[str, str] = field(default_factory=dict)
    total_steps: int = 0
    reads_columns: bool = False


def run_fingerprint(
    config: StageConfig, *, models: Mapping[str, str], data: Mapping[str, Dataset], ranks: int
) -> RunFingerprint:
    """Return the fingerprint of a run: start models are folders or hub ids; the keys are names for error messages.

    A collective.
    """
    columns = {name: rows for name, rows in data.items() if EXTRA in rows.column_names}
    hashes = {name: model_fingerprint(name_or_path) for name, name_or_path in models.items()}
    return RunFingerprint(
        settings=values_by_rule(config, "same"),
        hashes=hashes | {name: data_fingerprint(rows) for name, rows in data.items()},
        sizes=batch_sizes(config, ranks),
        rounding=values_by_rule(config, "rounding"),
        defaults=defaults_of(config),
        inputs=dist.on_main(lambda: input_contents(config)),
        columns={f"other columns of {name}": data_fingerprint(rows, columns=True) for name, rows in columns.items()},
    )
