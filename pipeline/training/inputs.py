"""The tokenizer and the tokenised rows of a run, made from its configuration."""

import logging
from typing import Any

from pipeline import dist
from pipeline.configuration.groups import DataConfig
from pipeline.data.cache import StageData, load_or_build
from pipeline.data.row_report import row_lines, row_warnings
from pipeline.data.selection import DataOptions, Stage, parse_column_map
from pipeline.data.templates import set_template
from pipeline.models.loading import check_model, check_vocabulary
from pipeline.models.tokenizers import choose_padding_token, load_tokenizer

log = logging.getLogger(__name__)


def prepare_tokenizer(path: str, template: str) -> Any:
    """Load the tokenizer, with the run's chat template and a padding token that exists (the vocabulary never grows).

    The model's files are checked first, and that tokenizer and model belong together: rows are tokenised for minutes
    before weights are read. Raises InputError, EnvironmentFault.
    """
    check_model(path)
    tokenizer = load_tokenizer(path)
    check_vocabulary(path, tokenizer)
    set_template(tokenizer, template)
    padding = choose_padding_token(tokenizer)
    if padding.source != "tokenizer":
        log.info("padding with %s (%s); masks never come from token ids", padding.token, padding.source)
        tokenizer.pad_token = padding.token
    return tokenizer


def prepare_data(stage: Stage, data: DataConfig, *, tokenizer: Any, **limits: Any) -> StageData:
    """Tokenise the rows of a stage, or read them from the cache; drops and repairs are reported once, by rank 0.

    Args:
        limits: further fields of DataOptions (lengths and what happens to longer rows).
    """
    options = DataOptions(
        data_path=tuple(data.data_path),
        eval_data_path=tuple(data.eval_data_path),
        data_split=data.data_split,
        eval_fraction=data.eval_fraction,
        seed=data.data_seed,
        column_map=parse_column_map(data.column_map),
        template=data.template,
        cache_dir=data.data_output_path or None,
        **limits,
    )
    # Machines may share the cache or not: the first rank of each builds it, or finds it built.
    dist.on_each_machine(lambda: load_or_build(stage, options, tokenizer) and None)
    built = load_or_build(stage, options, tokenizer)
    if dist.is_main():
        for line in row_lines(stage, built.counts, data.data_split, num_sequences=len(built.train)):
            log.info("%s", line)
        for line in row_warnings(stage, built.counts):
            log.warning("%s", line)
    return built
