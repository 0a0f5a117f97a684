"""Choose the records of a stage: evaluation records first, then the stage's share of what is left.

Every choice is a hash of (seed, prompt), so that no prompt is in two stages or in training and evaluation, whatever
the order of the files. Tokenising the chosen records is in `tokenization.py`.
"""

import bisect
import hashlib
import itertools
import math
from collections import Counter
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, fields
from typing import Any, Literal, NamedTuple

from pipeline.data.counts import Counts
from pipeline.data.formats import COLUMNS, Record, read_records
from pipeline.data.sources import parse_path, read_rows
from pipeline.data.tokenization import TokenizationOptions
from pipeline.errors import InputError, nearest
from pipeline.heartbeat import RowProgress

Stage = Literal["sft", "reward", "ppo", "text"]
# Index of the share of data_split that a stage takes; 'text' (the ptx loss of PPO) takes all records of its own files.
SHARE_INDEX: dict[Stage, int] = {"sft": 0, "reward": 1, "ppo": 2}
Shares = tuple[float, float, float]


@dataclass(frozen=True, slots=True, kw_only=True)
class DataOptions(TokenizationOptions):
    """Everything that decides which tokenised rows a stage sees.

    data_path: paths, each with an optional ':weight'. mixture: what weights are, shares of the prompts of a source that
    are kept, or ratios of the training rows. sft_only_data_path: more records for stage 'sft', all of them. data_split:
    'a,b,c' shares of the stages, or 'none' (every stage sees all records). eval_fraction: share of prompts to evaluate
    on, used if neither eval_data_path nor a source's own split says so. held_out_only: no row to
    train on. cache_dir: None for the user's cache directory.
    """

    data_path: tuple[str, ...]
    eval_data_path: tuple[str, ...] = ()
    sft_only_data_path: tuple[str, ...] = ()
    mixture: Literal["share", "ratio"] = "share"
    data_split: str = "2,4,4"
    eval_fraction: float = 0.1
    held_out_only: bool = False
    seed: int = 1234
    column_map: Mapping[str, str] = field(default_factory=dict)
    template: str = "auto"
    cache_dir: str | None = None


def options_of(flags: Any, **changes: Any) -> DataOptions:
    """Return the options that a stage's data flags ask for; flags of this name that a stage lacks have no effect on it.

    Raises:
        InputError: a --column_map that names no columns.
    """
    values = {entry.name: getattr(flags, entry.name) for entry in fields(DataOptions) if hasattr(flags, entry.name)}
    values = {name: tuple(value) if isinstance(value, list) else value for name, value in values.items()}
    values |= {"seed": flags.data_seed, "cache_dir": flags.data_output_path or None}
    return DataOptions(**{**values, "column_map": parse_column_map(flags.column_map), **changes})


class Selected(NamedTuple):
    """Records to train on and records to evaluate on; no prompt is in both."""

    train: list[Record]
    eval: list[Record]


def parse_column_map(text: str) -> dict[str, str]:
    """Parse a --column_map: `prompt=question,chosen=best` -> {"prompt": "question", "chosen": "best"}."""
    pairs = [part.partition("=") for part in text.split(",") if part.strip()]
    if wrong := [name for name, equals, value in pairs if not (name.strip() and equals and value.strip())]:
        raise InputError(f"--column_map {text}: {wrong[0]!r} has no column; write prompt=question,chosen=best")
    columns = {name.strip(): value.strip() for name, _, value in pairs}
    if unknown := [name for name in columns if name not in COLUMNS]:
        right = nearest(unknown[0], COLUMNS) or f"; {', '.join(COLUMNS)} are"
        raise InputError(f"--column_map {text}: no column {unknown[0]!r} is read{right}")
    return columns


def parse_shares(text: str) -> Shares | None:
    """Parse the shares of sft, reward and ppo from text like '2,4,4', normalised to sum 1; None for 'none'.

    Raises InputError unless there are three finite numbers >= 0 with a positive sum.
    """
    if text.strip().lower() == "none":
        return None
    try:
        numbers = [float(part) for part in text.split(",")]
    except ValueError:
        numbers = []
    if len(numbers) != 3 or not all(math.isfinite(n) and n >= 0 for n in numbers) or sum(numbers) <= 0:
        raise InputError(f"data_split {text!r}: three numbers >= 0 like 2,4,4 (stages 1, 2, 3), or none, are right")
    first, second, third = (number / sum(numbers) for number in numbers)
    return first, second, third


def select_records(stage: Stage, options: DataOptions, counts: Counts) -> Selected:
    """Read the stage's sources and divide their records, in source order.

    Evaluation records are those of eval_data_path, else a source's own test rows, else a share of its prompts by hash;
    they are the same for all stages. Raises InputError if no training record is left where there should be some.
    """
    shares = None if stage == "text" else parse_shares(options.data_split)
    sources = [_divided(text, options, counts) for text in options.data_path]
    train = [record for source in sources for record in source.train]
    if shares is not None:
        is_mine = [share_of(record.prompt_id, options.seed, shares) == SHARE_INDEX[stage] for record in train]
        counts.settle("of other stages", (r.origin for r, mine in zip(train, is_mine, strict=True) if not mine))
        train = list(itertools.compress(train, is_mine))
    if stage == "sft":
        extra = [_divided(text, options, counts) for text in options.sft_only_data_path]
        train += [record for source in extra for record in source.train]
        sources += extra
    evaluation = [record for source in sources for record in source.eval]
    for text in options.eval_data_path:
        records = _kept_records(text, options, counts, mixture="share")
        own = [record for record in records if record.split == "test"]
        for record in records if own else ():
            if record.split != "test":
                counts.add("left out", "no test row, beside test rows of the same evaluation data", record.origin)
        evaluation += own or records
    if stage == "ppo":
        evaluation = _distinct_prompts(evaluation, counts)
    if options.held_out_only:
        return Selected([], evaluation)
    evaluated = {record.prompt_id for record in evaluation}
    for record in train:
        if record.prompt_id in evaluated:
            counts.add("left out", "prompt is also an evaluation prompt", record.origin)
    train = [record for record in train if record.prompt_id not in evaluated]
    if not train:
        raise InputError(
            f"stage {stage}: data_split {options.data_split} leaves no training row of {', '.join(options.data_path)} "
            f"({len(evaluation)} evaluation rows); a larger share or more rows are right"
        )
    if stage == "ppo":
        train = _distinct_prompts(train, counts)
    else:
        _count_repeated(train, counts)
    return Selected(train, evaluation)


def _divided(text: str, options: DataOptions, counts: Counts) -> Selected:
    """Divide one source's records into training and evaluation."""
    records = _kept_records(text, options, counts, mixture=options.mixture)
    if options.eval_data_path:
        for record in records:
            if record.split == "test":
                counts.add("left out", "test row (eval_data_path is given)", record.origin)
        return Selected([record for record in records if record.split != "test"], [])
    has_split = any(record.split == "test" for record in records)
    divided = Selected([], [])
    for record in records:
        by_hash = uniform("eval", options.seed, record.prompt_id) < options.eval_fraction
        (divided.eval if (record.split == "test" if has_split else by_hash) else divided.train).append(record)
    return divided


def _kept_records(text: str, options: DataOptions, counts: Counts, *, mixture: str) -> list[Record]:
    path, weight = parse_path(text)
    kept = []
    rows = RowProgress(f"reading {path}").counted(read_rows(path))
    counts.sources.setdefault(path, Counter())  # in the order of the paths, whatever happens to their rows
    for record in read_records(rows, counts, column_map=options.column_map):
        if mixture == "ratio" or uniform("weight", options.seed, record.prompt_id) < weight:
            kept.append(record)
        else:
            counts.add("left out", "prompt beyond the weight of its data path", record.origin)
    return kept


def _distinct_prompts(records: Iterable[Record], counts: Counts) -> list[Record]:
    """Return the first record of each prompt. Random numbers are keyed by prompts: another gives the same rollouts."""
    seen: set[int] = set()
    kept = []
    for record in records:
        if record.messages and record.prompt_id in seen:
            counts.add("dropped", "prompt repeated", record.origin)
        else:
            kept.append(record)
        seen.add(record.prompt_id)
    return kept


def _count_repeated(records: Iterable[Record], counts: Counts) -> None:
    """Count records with the content of an earlier one. They are kept: data sets repeat rows to weigh them."""
    seen: set[tuple[int, str | None, str | None]] = set()
    for record in records:
        content = (record.prompt_id, record.chosen, record.rejected)
        if content in seen:
            counts.add("kept", "row repeated", record.origin)
        seen.add(content)


def ratios_of(options: DataOptions) -> dict[str, float]:
    """Return the weight of each training source, summed over its entries."""
    ratios: dict[str, float] = {}
    for path, weight in map(parse_path, (*options.data_path, *options.sft_only_data_path)):
        ratios[path] = ratios.get(path, 0.0) + weight
    return ratios


def mixed_sizes(sizes: Mapping[str, int], ratios: Mapping[str, float]) -> dict[str, int]:
    """Return the number of training rows that each source gives to a mixture in these ratios; no row is left out.

    The source with the most rows for its ratio gives each of them once, all others repeat theirs.

    Raises:
        InputError: a source without a training row.
    """
    if empty := [path for path, size in sizes.items() if not size]:
        raise InputError(f"--mixture ratio: {empty[0]} has no training row, so that no ratio is reached; leave it out")
    rows_of_one = max(size / ratios[path] for path, size in sizes.items())
    return {path: round(rows_of_one * ratios[path]) for path in sizes}


def share_of(prompt_id: int, seed: int, shares: Shares) -> int:
    """Return the index (0, 1 or 2) of the one share that this prompt belongs to, never one of size 0."""
    position = uniform("step", seed, prompt_id)  # "step" is part of the hash: another word would move every prompt
    last = max(index for index, share in enumerate(shares) if share > 0)
    # The last share takes what rounding leaves of the interval.
    return min(bisect.bisect_right(list(itertools.accumulate(shares)), position), last)


def uniform(purpose: str, seed: int, prompt_id: int) -> float:
    """Return a float64 in [0, 1) with 53 random bits, from a hash of the arguments."""
    digest = hashlib.blake2b(f"{purpose}:{seed}:{prompt_id}".encode(), digest_size=8).digest()
    return (int.from_bytes(digest, "big") >> 11) / 2**53
