"""The page of `--show-data N`: counts and lengths of a stage's rows, and N of them as they are trained on.

All rows are tokenised, into the cache that a run reads; of a model only the tokenizer is loaded.
"""

import shutil
import sys
from collections.abc import Iterator, Mapping

import numpy as np

from pipeline.configuration.stage import Stage, StageConfig
from pipeline.console import WIDTH, wrapped
from pipeline.data.cache import StageData, load_or_build
from pipeline.data.loader import sequence_lengths
from pipeline.data.selection import DataOptions
from pipeline.errors import is_coloured, show
from pipeline.models.source import prepare_tokenizer
from pipeline.preparation.inputs import lines_about, most_tokens
from pipeline.preparation.preview import length_limit, preview_lines, samples_of
from pipeline.run.data_split import data_of

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
    show(f"== stage {stage.number}: {stage.title_of(config)}: what it trains on")
    for one in data:
        lines = [line for _, line in lines_about(*one, most_tokens(source, config))]
        show(*map(wrapped, [*lines, *shares_and_lengths(*one)]))
    width = shutil.get_terminal_size().columns if sys.stdout.isatty() else WIDTH
    samples = samples_of(config, data, tokenizer, number=config.run.show_data, seq2seq=seq2seq)
    print(*preview_lines(samples, width, is_coloured=is_coloured(sys.stdout)), sep="\n")


def shares_and_lengths(options: DataOptions, rows: StageData) -> Iterator[str]:
    """Yield the shares of rows that are cut and dropped, and percentiles of the lengths of those to train on."""
    outcomes, lengths = rows.counts.outcomes, sequence_lengths(rows.train).max(1)
    num_rows = outcomes["to train on"] + outcomes["held out"]
    truncated_share = outcomes["cut"] / max(num_rows, 1)
    dropped_share = outcomes["dropped"] / max(num_rows + outcomes["dropped"], 1)
    yield f"{options.title} rows: {truncated_share:.1%} cut, {dropped_share:.1%} dropped"
    sizes = np.percentile(lengths, PERCENTILES, method="higher")
    shares = ", ".join(f"{share} % {size}" for share, size in zip(PERCENTILES, sizes, strict=True))
    yield f"{options.title} tokens: {shares}, longest {lengths.max()}, limit {length_limit(options)}"
