"""The page of `--show_data N`: counts and lengths of a stage's rows, and N of them as they are trained on.

All rows are tokenised, into the cache that a run reads; of a model only the tokenizer is loaded.
"""

import shutil
import sys
from collections.abc import Mapping
from typing import Any

import numpy as np

from pipeline.configuration.stage import Stage, StageConfig
from pipeline.console import WIDTH, wrapped
from pipeline.data.cache import StageData, load_or_build
from pipeline.data.loader import sequence_lengths
from pipeline.data.selection import DataOptions
from pipeline.errors import is_coloured
from pipeline.models.source import prepare_tokenizer
from pipeline.run.settled import data_of
from pipeline.training.inputs import row_lines, row_warnings, samples_of_all
from pipeline.training.preview import length_limit, preview_lines

PERCENTILES = (5, 25, 50, 75, 95, 99)


def show_data(stage: Stage, config: StageConfig, base_of_output: Mapping[str, str]) -> None:
    """Print the page of a stage.

    Args:
        base_of_output: folder of an earlier stage -> the model that stage starts from, whose tokenizer it will have.

    Raises:
        InputError, EnvironmentFault: a tokenizer or a source cannot be read.
    """
    source, flags = stage.start_models(config, base_of_output)[0].source, config.data
    tokenizer = prepare_tokenizer(source, flags.template, flags.chat_template_kwargs)
    seq2seq = source.is_encoder_decoder
    data = [(options, load_or_build(options, tokenizer)) for options in data_of(stage, config, seq2seq=seq2seq)]
    print(f"== stage {stage.number}: {stage.title}: what it trains on")
    for options, rows in data:
        for line in page_lines(options, rows):
            print(wrapped(line))
    is_terminal = sys.stdout.isatty()
    width = shutil.get_terminal_size().columns if is_terminal else WIDTH
    samples = samples_of_all(config, data, tokenizer, number=config.run.show_data, seq2seq=seq2seq)
    print(*preview_lines(samples, width, is_coloured=is_coloured(sys.stdout)), sep="\n")


def page_lines(options: DataOptions, rows: StageData) -> list[str]:
    """Return the lines about a data set: rows by fate, shares that are cut and dropped, percentiles of lengths."""
    counts, lengths = rows.counts.fates, sequence_lengths(rows.train).max(1)
    num_taken = counts["to train on"] + counts["held out"]
    shares = {
        "cut": counts["cut"] / max(num_taken, 1),
        "dropped": counts["dropped"] / max(num_taken + counts["dropped"], 1),
    }
    percentiles: Any = np.percentile(lengths, PERCENTILES, method="higher")
    by_share = ", ".join(f"{share} % {size}" for share, size in zip(PERCENTILES, percentiles, strict=True))
    return [
        *row_lines(options.title, rows.counts, options.data_split, num_sequences=len(rows.train)),
        *row_warnings(options.title, options.kind, rows.counts),
        f"{options.title} rows: {', '.join(f'{share:.1%} {name}' for name, share in shares.items())}",
        f"{options.title} tokens: {by_share}, longest {lengths.max()}, limit {length_limit(options)}",
    ]
