"""Tell in words where the rows of a stage went: the lines that a run logs once, and its warnings."""

import math
from collections import Counter

from pipeline.data.counts import Counts
from pipeline.data.selection import Stage

MOST_DROPPED = 0.1  # share of a stage's rows above which dropping them is warned of
KEPT_SHARE = 0.95  # of a stage's rows that are not too long, for the length that a warning proposes


def row_lines(stage: Stage, counts: Counts, data_split: str, *, num_sequences: int) -> list[str]:
    """Return the lines about a stage's rows: all of them, then each kind, then each source of a mixture.

    num_sequences: number of sequences to train on, which is another than that of rows where texts fill blocks.
    """
    total = counts.fates
    packed = "" if total["to train on"] == num_sequences else f" (sequences: {num_sequences})"
    lines = [f"{stage} rows: {_fates_line(total, data_split, packed)}"]
    lines += [f"  rows: {line}" for line in counts.lines()]
    if len(counts.sources) > 1:
        for path, fates in counts.sources.items():
            repeated = f" ({counts.factors[path]:.2f} times each)" if path in counts.factors else ""
            lines.append(f"  rows: of {path}: {_fates_line(fates, data_split, repeated)}")
    return lines


def row_warnings(stage: Stage, counts: Counts) -> list[str]:
    """Return the warnings about a stage's rows: none held out, many dropped, columns that are not read."""
    fates = counts.fates
    warnings = []
    if not fates["held out"] and stage != "text":
        warnings.append(f"{stage} rows: 0 held out: no evaluation; give --eval_fraction or --eval_data_path")
    num_kept = fates["to train on"] + fates["held out"]
    share = fates["dropped"] / max(1, num_kept + fates["dropped"])
    if share > MOST_DROPPED:
        warnings.append(f"{stage} rows: {share:.0%} dropped{_length_hint(stage, num_kept, counts.lengths)}")
    for path, columns in counts.unread.items():
        warnings.append(f"  rows: of {path}: columns that are not read: {', '.join(sorted(columns))}")
    return warnings


def _fates_line(fates: Counter[str], data_split: str, trained: str = "") -> str:
    """Return '64 to train on, 8 held out, 3 dropped, of 75 given; 12 cut'."""
    parts = [f"{fates['to train on']} to train on{trained}", f"{fates['held out']} held out"]
    if fates["of other stages"]:
        parts.append(f"{fates['of other stages']} of other stages (--data_split {data_split})")
    parts += [f"{fates[fate]} {fate}" for fate in ("left out", "dropped") if fates[fate]]
    num_given = fates.total() - fates["cut"] - fates["kept"]
    return f"{', '.join(parts)}, of {num_given} given" + (f"; {fates['cut']} cut" if fates["cut"] else "")


def _length_hint(stage: Stage, num_kept: int, lengths: Counter[int]) -> str:
    """Name the limit that KEPT_SHARE of the rows would fit; nothing where they fit already."""
    num_more = math.ceil(KEPT_SHARE * (num_kept + lengths.total())) - num_kept
    if num_more <= 0:
        return ""
    flag, least = ("max_prompt_seq_len", 1) if stage == "ppo" else ("max_seq_len", 8)  # values that the flag takes
    return f"; --{flag} {max(least, sorted(lengths.elements())[num_more - 1])} would keep {KEPT_SHARE:.0%}"
