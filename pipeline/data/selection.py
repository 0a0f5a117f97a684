"""Choose the records of a data set: first the evaluation records, then its shares of the rest.

Every choice is a hash of (seed, prompt). So no prompt is in two shares, or in training and evaluation, whatever the
order of the files. `row_kinds.py` tokenises the chosen records.
"""

import bisect
import hashlib
import itertools
import math
from collections import Counter
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, fields
from typing import TYPE_CHECKING, Any, Literal, NamedTuple

from pipeline.data.counts import Counts, RowOutcome
from pipeline.data.formats import COLUMNS, read_records
from pipeline.data.row_kinds import ROW_KINDS, SEQUENCES, RowKind, TokenizationOptions
from pipeline.data.sources import parse_path, read_rows
from pipeline.data.spool import Spool
from pipeline.errors import InputError, nearest
from pipeline.heartbeat import RowProgress

if TYPE_CHECKING:
    import numpy as np

ShareSizes = tuple[float, float, float]
# Maximum passes over a source in one epoch. Weights that need more are probably mistyped. Chosen by hand.
MAX_REPEATS = 1000


@dataclass(frozen=True, slots=True, kw_only=True)
class DataOptions(TokenizationOptions):
    """All options that determine the tokenised rows of a data set, and its name in messages.

    rows: the kind of rows, a key of ROW_KINDS.
    shares: indices (0, 1, 2) of the shares of data_split whose prompts are used; (): all records.
    title: name of the data set in log and errors.
    data_path: paths, each with an optional ':weight'.
    eval_data_path: paths of the records to evaluate on.
    sft_only_data_path: more records for sequences, all of them.
    mixture: meaning of weights: share of a source's prompts to use, or ratios of the training rows.
    data_split: sizes 'a,b,c' of the three shares, or 'none' (every share is all records).
    eval_fraction: share of prompts to evaluate on, used if neither eval_data_path nor a source's own split is given.
    balance_lengths: drop training pairs until a pair's lengths do not predict which response is chosen.
    held_out_only: use no row for training: split: only held-out rows; all: every row is held out.
    seed: the seed of all choices.
    column_map: our name of a column -> the sources' name.
    template: the chat template, a name that `set_template` takes.
    cache_dir: None for the user's cache directory.
    """

    rows: str = SEQUENCES.name
    shares: tuple[int, ...] = ()
    title: str = "data"
    data_path: tuple[str, ...]
    eval_data_path: tuple[str, ...] = ()
    sft_only_data_path: tuple[str, ...] = ()
    mixture: Literal["share", "ratio"] = "share"
    data_split: str = "2,4,4"
    eval_fraction: float = 0.1
    balance_lengths: bool = False
    held_out_only: Literal[False, "split", "all"] = False
    seed: int = 1234
    column_map: Mapping[str, str] = field(default_factory=dict)
    template: str = "auto"
    cache_dir: str | None = None

    @property
    def kind(self) -> RowKind:
        """The kind of rows."""
        return ROW_KINDS[self.rows]


def options_of(flags: Any, **changes: object) -> DataOptions:
    """Return the options of the data flags, with `changes`; options that `flags` lacks have their default.

    Raises:
        InputError: --column-map names no columns.
    """
    values = {entry.name: getattr(flags, entry.name) for entry in fields(DataOptions) if hasattr(flags, entry.name)}
    values = {name: tuple(value) if isinstance(value, list) else value for name, value in values.items()}
    values |= {"seed": flags.data_seed, "cache_dir": getattr(flags, "data_output_path", "") or None}
    return DataOptions(**{**values, "column_map": parse_column_map(flags.column_map), **changes})


def evaluation_options(resolved: Any, **changes: object) -> DataOptions:
    """Return the options of rows that are evaluated and not trained on, by the resolved flags of an evaluation."""
    flags = resolved.config
    by_fraction = flags.eval_split == "auto" and resolved.is_given("eval_fraction")
    is_split = not flags.eval_data_path and (flags.eval_split == "held_out" or by_fraction)
    choice = {"data_path": tuple(flags.eval_data_path or flags.data_path), "eval_data_path": (), "data_split": "none"}
    return options_of(flags, **choice, held_out_only="split" if is_split else "all", **changes)


def check_held_out(number: int) -> None:
    """Raise InputError if no row is held out, but --keep-best needs one."""
    if not number:
        raise InputError(
            "--keep-best: no row is held out to choose by; give --eval-fraction above 0 or --eval-data-path"
        )


class Selected(NamedTuple):
    """Positions in a spool, ascending, of records to train on and records to evaluate on; no prompt is in both."""

    train: "np.ndarray"
    eval: "np.ndarray"


def parse_column_map(text: str) -> dict[str, str]:
    """Parse a --column-map: `prompt=question,chosen=best` -> {"prompt": "question", "chosen": "best"}."""
    pairs = [part.partition("=") for part in text.split(",") if part.strip()]
    if wrong := [name for name, equals, value in pairs if not (name.strip() and equals and value.strip())]:
        raise InputError(f"--column-map {text}: {wrong[0]!r} names no column, expected prompt=question,chosen=best")
    columns = {name.strip(): value.strip() for name, _, value in pairs}
    if unknown := [name for name in columns if name not in COLUMNS]:
        right = nearest(unknown[0], COLUMNS) or f"; {', '.join(COLUMNS)} are"
        raise InputError(f"--column-map {text}: no column {unknown[0]!r} is read{right}")
    return columns


def parse_shares(text: str) -> ShareSizes | None:
    """Parse the sizes of the three shares from text like '2,4,4', normalised to sum 1; None for 'none'.

    Raises InputError unless there are three numbers >= 0 with a finite positive sum.
    """
    if text.strip().lower() == "none":
        return None
    try:
        numbers = [float(part) for part in text.split(",")]
    except ValueError:
        numbers = []
    if len(numbers) != 3 or not all(n >= 0 for n in numbers) or not 0 < sum(numbers) < math.inf:
        raise InputError(f"--data-split: got {text!r}, expected three numbers >= 0 like 2,4,4, none or auto")
    first, second, third = (number / sum(numbers) for number in numbers)
    return first, second, third


def select_records(options: DataOptions, records: Spool, counts: Counts) -> Selected:
    """Read the sources into `records` on disk, and divide them in source order; their texts do not stay in memory.

    Evaluation records are those of eval_data_path, else a source's own test rows, else a share of its prompts by hash.
    They are the same for all shares. Raises InputError if no training record is left but some are needed.
    """
    import numpy as np

    sizes = parse_shares(options.data_split) if options.shares else None
    sources = [_divided(text, options, records, counts) for text in options.data_path]
    train = np.concatenate([np.arange(0), *(source.train for source in sources)])
    if sizes is not None:
        is_mine = _drawn(train, records, lambda name: share_of(name, options.seed, sizes) in options.shares)
        for path, part in records.by_source(train[~is_mine]):
            counts.settle("of other stages", path, len(part))
        train = train[is_mine]
    if options.kind is SEQUENCES:
        extra = [_divided(text, options, records, counts) for text in options.sft_only_data_path]
        train = np.concatenate([train, *(source.train for source in extra)])
        sources += extra
    evaluation = np.concatenate([np.arange(0), *(source.eval for source in sources)])
    for text in options.eval_data_path:
        chosen = _append_records(text, options, records, counts, mixture="share")
        is_own = records.is_test(chosen)
        if is_own.any():
            no_test = "no test row, beside test rows of the same evaluation data"
            _count(chosen[~is_own], "left out", no_test, records, counts)
            chosen = chosen[is_own]
        evaluation = np.concatenate([evaluation, chosen])
    if options.kind.one_per_prompt:
        evaluation = _distinct_prompts(evaluation, records, counts)
    if options.held_out_only:
        _count(train, "left out", "not held out", records, counts)
        return Selected(train[:0], evaluation)
    is_evaluated = np.isin(records.prompt_ids(train), records.prompt_ids(evaluation))
    _count(train[is_evaluated], "left out", "prompt is also an evaluation prompt", records, counts)
    train = train[~is_evaluated]
    if not len(train):
        cause, right = f"--data-split {options.data_split}", "give a larger share or more rows"
        if options.eval_data_path and is_evaluated.any():
            cause, right = "--eval-data-path holds the same prompts and", "give other rows there"
        elif sizes is None:
            cause, right = "--eval-fraction", "give a lower one or more rows"
        paths = f"{', '.join(options.data_path)} ({len(evaluation)} evaluation rows)"
        raise InputError(f"stage {options.title}: {cause} leaves no training row of {paths}; {right}")
    if options.balance_lengths:
        is_beyond = _unbalanced(train, records, options)
        why = "pair of a ratio of lengths that is more frequent than its inverse (--balance-lengths)"
        _count(train[is_beyond], "left out", why, records, counts)
        train = train[~is_beyond]
    if options.kind.one_per_prompt:
        train = _distinct_prompts(train, records, counts)
    else:  # repeated rows are used: data sets repeat rows to weigh them
        is_repeated = _repeated(records.responses(train), records.prompt_ids(train))
        _count(train[is_repeated], "kept", "row repeated", records, counts)
    return Selected(train, evaluation)


def _divided(text: str, options: DataOptions, records: Spool, counts: Counts) -> Selected:
    """Divide one source's records into training and evaluation."""
    chosen = _append_records(text, options, records, counts, mixture=options.mixture)
    is_held_out = records.is_test(chosen)
    if options.eval_data_path:
        _count(chosen[is_held_out], "left out", "test row (eval_data_path is given)", records, counts)
        return Selected(chosen[~is_held_out], chosen[:0])
    if options.held_out_only == "all":
        return Selected(chosen[:0], chosen)
    if not is_held_out.any():
        is_held_out = _drawn(chosen, records, lambda name: uniform("eval", options.seed, name) < options.eval_fraction)
    return Selected(chosen[~is_held_out], chosen[is_held_out])


def _append_records(text: str, options: DataOptions, records: Spool, counts: Counts, *, mixture: str) -> "np.ndarray":
    """Append the records of a data path, in the share of its weight, and return their positions."""
    import numpy as np

    path, weight = parse_path(text)
    rows = RowProgress(f"reading {path}").counted(read_rows(path))
    counts.sources.setdefault(path, Counter())  # in the order of the paths
    first = len(records)
    passes = options.kind.passes_columns
    for record in read_records(rows, counts, column_map=options.column_map, passes_columns=passes):
        if mixture == "ratio" or weight == 1.0 or uniform("weight", options.seed, record.prompt_id) < weight:
            records.append(record)
        else:
            counts.add("left out", "prompt beyond the weight of its data path", record.origin)
    return np.arange(first, len(records))


def _drawn(positions: "np.ndarray", records: Spool, is_chosen: Callable[[int], bool]) -> "np.ndarray":
    """Return `is_chosen` of each record's prompt: (N,) positions -> (N,) bool."""
    import numpy as np

    return np.fromiter((is_chosen(int(name)) for name in records.prompt_ids(positions)), bool, len(positions))


def _count(positions: "np.ndarray", outcome: RowOutcome, kind: str, records: Spool, counts: Counts) -> None:
    for _, part in records.by_source(positions):
        counts.add(outcome, kind, records.origin(part[0]), number=len(part))


def _distinct_prompts(positions: "np.ndarray", records: Spool, counts: Counts) -> "np.ndarray":
    """Return the first record of each prompt. A repeated prompt would get the same random numbers."""
    is_repeated = _repeated(records.prompt_ids(positions)) & ~records.is_text(positions)
    _count(positions[is_repeated], "dropped", "prompt repeated", records, counts)
    return positions[~is_repeated]


def _unbalanced(positions: "np.ndarray", records: Spool, options: DataOptions) -> "np.ndarray":
    """Return True for surplus pairs: those of a ratio of lengths that has more pairs than the inverse ratio.

    (N,) positions -> (N,) bool; hashes choose, whatever the order of rows. Sources mixed by ratios are balanced
    separately.
    """
    import numpy as np

    is_beyond, first = np.zeros(len(positions), bool), 0
    parts = [part for _, part in records.by_source(positions)] if options.mixture == "ratio" else [positions]
    for part in parts:
        ratios = records.length_ratios(part)
        draws = np.fromiter((uniform("lengths", options.seed, int(n)) for n in records.prompt_ids(part)), float)
        for ratio in np.unique(ratios):
            pairs = np.flatnonzero(ratios == ratio)
            order = np.lexsort((records.responses(part[pairs]), draws[pairs]))
            is_beyond[first + pairs[order[np.count_nonzero(ratios == -ratio) :]]] = True
        first += len(part)
    return is_beyond


def _repeated(*keys: "np.ndarray") -> "np.ndarray":
    """Return True for each element that has an earlier one with the same keys: arrays of (N,) -> (N,) bool."""
    import numpy as np

    order = np.lexsort(keys)  # stable: of equal elements the earliest comes first
    is_repeated = np.zeros(len(order), bool)
    is_repeated[order[1:]] = np.all([(key := column[order])[1:] == key[:-1] for column in keys], axis=0)
    return is_repeated


def ratios_of(options: DataOptions) -> dict[str, float]:
    """Return the weight of each training source, summed over its entries."""
    ratios: dict[str, float] = {}
    for path, weight in map(parse_path, (*options.data_path, *options.sft_only_data_path)):
        ratios[path] = ratios.get(path, 0.0) + weight
    return ratios


def mixed_sizes(sizes: Mapping[str, int], ratios: Mapping[str, float]) -> dict[str, int]:
    """Return the number of training rows that each source gives to a mixture in these ratios; no row is dropped.

    The source with the most rows for its ratio is used once, all others are repeated.

    Raises:
        InputError: a source without a training row, or one whose rows would be repeated more than MAX_REPEATS times.
    """
    if empty := [path for path, size in sizes.items() if not size]:
        raise InputError(f"--mixture ratio: {empty[0]} has no training row; leave it out")
    rarest = max(sizes, key=lambda path: sizes[path] / ratios[path])
    rows_of_one = sizes[rarest] / ratios[rarest]
    most = max(sizes, key=lambda path: ratios[path] / sizes[path])
    if (repeats := rows_of_one * ratios[most] / sizes[most]) > MAX_REPEATS:
        raise InputError(
            f"--mixture ratio: {most}:{ratios[most]:g} would repeat its {sizes[most]} training rows {repeats:,.0f} "
            f"times an epoch, for each of the {sizes[rarest]} of {rarest}:{ratios[rarest]:g} once; give weights for at "
            f"most {MAX_REPEATS:,} times, or one source less"
        )
    return {path: round(rows_of_one * ratios[path]) for path in sizes}


def share_of(prompt_id: int, seed: int, sizes: ShareSizes) -> int:
    """Return the index (0, 1 or 2) of the one share that this prompt belongs to, never one of size 0."""
    position = uniform("step", seed, prompt_id)  # "step" is part of the hash: a changed word would move every prompt
    last = max(index for index, size in enumerate(sizes) if size > 0)
    # Rounding may leave a rest of the interval; the last share takes it.
    return min(bisect.bisect_right(list(itertools.accumulate(sizes)), position), last)


def uniform(purpose: str, seed: int, prompt_id: int) -> float:
    """Return a float64 in [0, 1) with 53 random bits, from a hash of the arguments."""
    digest = hashlib.blake2b(f"{purpose}:{seed}:{prompt_id}".encode(), digest_size=8).digest()
    return (int.from_bytes(digest, "big") >> 11) / 2**53
