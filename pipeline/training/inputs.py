"""The tokenised rows of a run, made from its configuration. The tokenizer is made in `models/tokenizers.py`."""

import logging
from typing import Any

from pipeline import dist
from pipeline.configuration.groups import DataConfig
from pipeline.data.cache import StageData, load_or_build
from pipeline.data.counts import row_lines, row_warnings
from pipeline.data.selection import Stage, options_of

log = logging.getLogger(__name__)


def prepare_data(stage: Stage, data: DataConfig, *, tokenizer: Any, **limits: Any) -> StageData:
    """Tokenise the rows of a stage, or read them from the cache; drops and repairs are reported once, by rank 0.

    Args:
        limits: fields of DataOptions that are not the flags of `data`.
    """
    options = options_of(data, **limits)
    # Machines may share the cache or not: the first rank of each builds it, or finds it built.
    dist.on_each_machine(lambda: load_or_build(stage, options, tokenizer) and None)
    built = load_or_build(stage, options, tokenizer)
    if dist.is_main():
        for line in row_lines(stage, built.counts, data.data_split, num_sequences=len(built.train)):
            log.info("%s", line)
        for line in row_warnings(stage, built.counts):
            log.warning("%s", line)
    return built
