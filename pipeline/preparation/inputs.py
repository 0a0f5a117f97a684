"""Load the tokenised rows of a run by its configuration, check that a resume has the same, and log lines about them."""

import logging
import math
import sys
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from datasets import Dataset
from transformers import PreTrainedTokenizerBase

from pipeline import dist
from pipeline.configuration.flag_table import flat_items
from pipeline.configuration.resume_rules import check_resumed, differences
from pipeline.configuration.stage import StageConfig
from pipeline.console import WIDTH, terminal_width
from pipeline.data.cache import StageData, data_fingerprint, load_or_build
from pipeline.data.counts import Counts, outcomes_line
from pipeline.data.row_kinds import BLOCKS, SAME_TOKENS, RowKind
from pipeline.data.selection import DataOptions, check_held_out
from pipeline.errors import dashed, is_coloured
from pipeline.files import model_fingerprint
from pipeline.models.source import ModelSource, num_positions
from pipeline.preparation.preview import Sample, preview_lines, rows_document, samples_of
from pipeline.run.data_split import data_of
from pipeline.run.earlier_runs import checkpoint_state, input_contents
from pipeline.run.logs import file_log
from pipeline.run.run import Run

log = logging.getLogger(__name__)

NUM_SHOWN = 3  # rows of the preview at the start of a run
MOST_DROPPED = 0.1  # share of a data set's rows above which dropped rows give a warning
MOST_EQUAL = 0.05  # share of pairs with equal sides above which truncation or data need a check; chosen by hand
KEPT_SHARE = 0.95  # share of the rows, without those dropped for other reasons, that fit into a proposed length


def prepare_stage(
    run: Run, config: StageConfig, tokenizer: PreTrainedTokenizerBase, *, seq2seq: bool = False
) -> list[StageData]:
    """Return the rows of a stage, and in stage 3 the text of the ptx loss; before weights are read. A collective.

    Args:
        seq2seq: see `data_of`.

    Raises:
        InputError: see `prepare_data`; or --keep-best is given and no row is held out; or rows or start models differ
            from those of the checkpoint.
    """
    data = data_of(run.stage, config, seq2seq=seq2seq)
    most = most_tokens(run.stage.start_models(config, {})[0].source, config)
    built = [prepare_data(options, tokenizer, most) for options in data]
    if getattr(config, "keep_best", False):
        check_held_out(len(built[0].eval))

    def check_and_show() -> None:
        check_models(run.folder, config)
        check_rows(run.folder, config, (rows.train for rows in built))
        shown = list(zip(data, built, strict=True))
        samples = samples_of(config, shown, tokenizer, number=NUM_SHOWN, seq2seq=seq2seq)
        show_rows(samples)
        run.rows.update(rows_document(shown, [line for one in shown for _, line in lines_about(*one, most)], samples))

    dist.on_main(check_and_show)
    return built


def check_rows(run_folder: Path, config: StageConfig, prepared: Iterable[Dataset]) -> None:
    """Raise InputError if neither sources nor training rows are those of the checkpoint to resume from.

    With --force-resume, or if the checkpoint does not name its sources, the differences are logged when it is loaded.

    Args:
        prepared: the rows to train on; read only if a source has changed.
    """
    folder, saved = checkpoint_state(run_folder, config.run.resumes_from)
    if config.run.force_resume or "inputs" not in saved:
        return
    now, hashes = {"inputs": input_contents(config, models=False)}, saved["fingerprints"].values()
    if any(differences(saved, now, config)) and any(data_fingerprint(rows) not in hashes for rows in prepared):
        check_resumed(folder, saved, now, config)


def check_models(run_folder: Path, config: StageConfig) -> None:
    """Raise InputError if start models are not those of the checkpoint to resume from; not with --force-resume.

    As in `check_rows`, some differences are logged only when the checkpoint is loaded.
    """
    folder, saved = checkpoint_state(run_folder, config.run.resumes_from)
    if config.run.force_resume or "inputs" not in saved:
        return
    now = {name: model_fingerprint(path) for name, path in config.start_paths.items()}
    if any(saved["fingerprints"].get(name, content) != content for name, content in now.items()):
        check_resumed(folder, saved, {"inputs": input_contents(config)}, config)


def show_rows(samples: Sequence[Sample]) -> None:
    """Print samples of rows to stderr, coloured on a terminal, and to the log files."""
    for line in preview_lines(samples, WIDTH, is_coloured=False):
        file_log.info("%s", line)
    print(
        *preview_lines(samples, terminal_width(), is_coloured=is_coloured(sys.stderr)),
        sep="\n",
        file=sys.stderr,
        flush=True,
    )


def most_tokens(source: ModelSource, config: StageConfig) -> int | None:
    """Return the most tokens of a row (in stage 3: of a prompt) by the model's positions; None without a limit."""
    positions = num_positions(source.config)
    return positions and positions - dict(flat_items(config)).get("max_answer_seq_len", 0)


def lines_about(options: DataOptions, rows: StageData, most: int | None) -> Iterator[tuple[int, str]]:
    """Yield the level and the text of each log line about a data set's rows. most: see `most_tokens`."""
    for line in row_lines(options.title, rows.counts, options.data_split, num_sequences=len(rows.train)):
        yield logging.INFO, line
    warnings = row_warnings(options.title, options.kind, rows.counts, most)
    for line in [*warnings, *label_warnings(options.title, rows.train)]:
        yield logging.WARNING, line


def prepare_data(options: DataOptions, tokenizer: PreTrainedTokenizerBase, most: int | None = None) -> StageData:
    """Tokenise the rows of a data set, or read them from the cache. Rank 0 logs how many were dropped or repaired.

    Args:
        most: see `most_tokens`.

    Raises:
        InputError: a source cannot be read.
    """
    # Machines may share the cache or not: the first rank of each machine builds it unless it exists.
    dist.on_each_machine(lambda: load_or_build(options, tokenizer) and None)
    built = load_or_build(options, tokenizer)
    if dist.is_main():
        for level, line in lines_about(options, built, most):
            log.log(level, "%s", line)
    return built


def row_lines(title: str, counts: Counts, data_split: str, *, num_sequences: int) -> list[str]:
    """Return the lines about a data set's rows: all, each kind, each source of a mixture, columns for rewards.

    num_sequences: number of sequences to train on; it differs from that of rows if texts fill blocks.
    """
    total = counts.outcomes
    packed = "" if total["to train on"] == num_sequences else f" (sequences: {num_sequences})"
    lines = [f"{title} rows: {outcomes_line(total, data_split, packed)}"]
    lines += [f"  rows: {line}" for line in counts.lines()]
    if len(counts.sources) > 1:
        for path, outcomes in counts.sources.items():
            repeated = f" ({counts.factors[path]:.2f} times each)" if path in counts.factors else ""
            lines.append(f"  rows: of {path}: {outcomes_line(outcomes, data_split, repeated)}")
    for path, columns in counts.passed.items():
        lines.append(f"  rows: of {path}: columns that are passed to rewards: {', '.join(sorted(columns))}")
    return lines


def row_warnings(title: str, kind: RowKind, counts: Counts, most: int | None = None) -> list[str]:
    """Return the warnings about a data set's rows: none held out, many dropped, columns that are not read.

    most: see `most_tokens`; it bounds the length that a warning proposes.
    """
    outcomes = counts.outcomes
    warnings = []
    if not outcomes["held out"] and kind is not BLOCKS:
        warnings.append(f"{title} rows: 0 held out: no evaluation; give --eval-fraction or --eval-data-path")
    num_kept = outcomes["to train on"] + outcomes["held out"]
    share = outcomes["dropped"] / max(1, num_kept + outcomes["dropped"])
    if share > MOST_DROPPED:
        warnings.append(f"{title} rows: {share:.0%} dropped{_length_hint(kind, num_kept, counts.lengths, most)}")
    equal = counts[SAME_TOKENS] / max(1, num_kept + counts[SAME_TOKENS])
    if equal > MOST_EQUAL:
        warnings.append(
            f"health: {equal:.0%} of the pairs have the same tokens as chosen and as rejected, maybe after "
            "truncation: they are dropped; look at the data, and at --max-seq-len"
        )
    for path, columns in counts.unread.items():
        warnings.append(f"  rows: of {path}: columns that are not read: {', '.join(sorted(columns))}")
    return warnings


def label_warnings(title: str, rows: Any) -> Iterator[str]:
    """Yield warnings about labels: all are the same, or pairs contradict each other. rows: a `datasets.Dataset`."""
    table = rows.with_format("arrow")[:]
    if "label" in table.column_names and len(labels := Counter(table["label"].to_pylist())) == 1:
        ((label, count),) = labels.items()
        yield f"{title} rows: all {count} labels are {str(label).lower()}: KTO learns from good and bad responses"
    if "chosen_ids" in table.column_names:
        pairs = set(zip(*(map(hash, row_bytes(table[name])) for name in ("chosen_ids", "rejected_ids")), strict=True))
        if count := sum((rejected, chosen) in pairs for chosen, rejected in pairs) // 2:
            yield f"{title} rows: {count} pairs are there in both orders, which contradict each other; keep one of each"


def row_bytes(column: Any) -> Iterator[bytes]:
    """Yield the ids of each row of a column of lists, a pyarrow.ChunkedArray, as bytes."""
    for chunk in column.chunks:
        ends = np.cumsum(chunk.value_lengths().to_numpy())
        yield from (part.tobytes() for part in np.split(chunk.flatten().to_numpy(), ends[:-1]))


def _length_hint(kind: RowKind, num_kept: int, lengths: Counter[int], most: int | None) -> str:
    """Return a hint with the length limit that KEPT_SHARE of the rows fit; "" if that many fit already."""
    num_more = math.ceil(KEPT_SHARE * (num_kept + lengths.total())) - num_kept
    if num_more <= 0:
        return ""
    length = min(max(kind.least_length, sorted(lengths.elements())[num_more - 1]), most or math.inf)
    if not (helped := sum(number for size, number in lengths.items() if size <= length)):
        return f"; the model has no positions for the {lengths.total()} that are too long"
    return f"; {dashed(kind.length_flag)} {length} would keep {helped} of the {lengths.total()} that are too long"
