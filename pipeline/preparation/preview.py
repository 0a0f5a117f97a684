"""A preview of tokenised rows: their text, with the trained tokens in brackets.

It decodes the rows of the training batches, so that it shows exactly their tokens. A line break is shown as ↵.
"""

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from itertools import groupby
from operator import itemgetter
from typing import TYPE_CHECKING, Any, Literal, get_args

import numpy as np
from rich.cells import cell_len

from pipeline.configuration.stage import StageConfig
from pipeline.data.batching import pack_rows
from pipeline.data.cache import StageData
from pipeline.data.counts import RowOutcome
from pipeline.data.loader import sequence_lengths
from pipeline.data.selection import DataOptions
from pipeline.data.templates import end_token_ids
from pipeline.errors import printable

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

PartName = Literal["prompt", "response", "chosen", "rejected", "text"]
# Column of tokens -> the name of its part of a row, or of the part after the prompt.
PART_OF: dict[str, PartName] = {"prompt_ids": "prompt", "chosen_ids": "chosen", "rejected_ids": "rejected"}
LEGEND = "⟦...⟧ is trained, or a response of a pair; ↵ is a line break"
# Characters that the preview uses itself; in a text they are shown as escapes.
OPEN, CLOSE, LINE_BREAK = "⟦⟧↵"
MARKS = {ord(mark): f"\\u{ord(mark):04x}" for mark in (OPEN, CLOSE, LINE_BREAK)}
MARKS |= {ord("\n"): LINE_BREAK, ord("\t"): "\\x09"}
MAX_PARTS, MAX_LINES = 3, 9  # of a sample
LABEL = 10  # columns for the label in front of a part's text
MAX_GAP = 44  # columns for the note on omitted characters, and the brackets at its ends
GREEN, DIM, RESET = "\x1b[32m", "\x1b[2m", "\x1b[0m"
DataSets = Sequence[tuple[DataOptions, StageData]]  # a stage's rows, and in stage 3 the text of the ptx loss
Piece = tuple[str, bool | None]  # a shown character, and whether it is trained; None: it is not part of the text


@dataclass(frozen=True, slots=True)
class Span:
    """The text of consecutive tokens that are all trained (targets of the loss), or all not."""

    text: str
    is_trained: bool


@dataclass(frozen=True, slots=True)
class Part:
    """A part of a row. Its spans' texts, joined, are the text of its tokens."""

    name: PartName
    spans: list[Span]


@dataclass(frozen=True, slots=True)
class Sample:
    """A row of a batch as text: one sequence or pair, or several packed sequences."""

    title: str
    tokens: int
    parts: list[Part]


def samples_of(
    config: StageConfig, data: DataSets, tokenizer: "PreTrainedTokenizerBase", *, number: int, seq2seq: bool = False
) -> list[Sample]:
    """Return up to `number` samples, evenly spaced, of a stage's rows, and one sample of each further data set.

    Args:
        seq2seq: rows are split before their first trained token; the encoder reads the part before it.
    """
    samples = list[Sample]()
    for options, rows in data:
        is_packed = not samples and getattr(config.data, "packing", False)
        units = [[row] for row in range(len(rows.train))]
        units = pack_rows(rows.train["num_tokens"][:], options.max_seq_len) if is_packed else units
        for index in sorted({len(units) * step // number for step in range(number)}):
            chosen = rows.train.select(units[index])
            sizes = sequence_lengths(chosen).max(1).tolist()
            pairs = zip(chosen, sizes, strict=True)
            marks = [" (truncated)" * is_truncated(row, size, options, rows, tokenizer) for row, size in pairs]
            names = [f"{row + 1}{mark}" for row, mark in zip(units[index], marks, strict=True)]
            title = f"{options.title} row{'s' * (len(chosen) > 1)} {', '.join(names)}"
            parts = [part for row in chosen for part in parts_of(row, tokenizer, seq2seq=seq2seq)]
            samples.append(Sample(title, sum(sizes), parts))
        number = 1
    return samples


def is_truncated(
    row: Mapping[str, Any], size: int, options: DataOptions, data: StageData, tokenizer: "PreTrainedTokenizerBase"
) -> bool:
    """Return True if a row of `size` tokens was truncated: it is as long as the limit, and lacks its end token.

    Rows of a kind that is truncated at the beginning count as truncated if they are exactly as long as the limit.
    """
    if not data.counts.outcomes["cut"] or size < length_limit(options):
        return False
    return "trained" not in row or end_token_ids(tokenizer).isdisjoint(row["ids"][-2:])


def length_limit(options: DataOptions) -> int:
    return int(getattr(options, options.kind.length_flag))


def parts_of(row: Mapping[str, Any], tokenizer: "PreTrainedTokenizerBase", *, seq2seq: bool) -> list[Part]:
    """Return the parts of a row of any kind, by its columns of tokens."""
    tokens = {name: ids for name, ids in row.items() if name.endswith("ids")}
    if "trained" in row:
        ids, trained = row["ids"], row["trained"]
        if not seq2seq:
            return [Part("text", spans_of(tokenizer, ids, trained))]
        start = trained.index(True) if True in trained else len(ids)
        source, labels = spans_of(tokenizer, ids[:start]), spans_of(tokenizer, ids[start:], trained[start:])
        return [Part("prompt", source), Part("response", labels)]
    if "prompt_length" not in row:
        return [Part(PART_OF.get(name, "text"), spans_of(tokenizer, ids)) for name, ids in tokens.items()]
    length, parts = row["prompt_length"], list[Part]()
    other: PartName = "response" if "label" not in row else "chosen" if row["label"] else "rejected"
    for name, ids in tokens.items():
        spans = spans_of(tokenizer, ids, [index >= length for index in range(len(ids))])
        num_first = min(length, 1)  # the prompt is one span
        parts += [Part("prompt", spans[:num_first])] if not parts else []
        parts.append(Part(PART_OF.get(name, other), spans[num_first:]))
    return parts


def spans_of(tokenizer: "PreTrainedTokenizerBase", ids: list[int], trained: Sequence[bool] | None = None) -> list[Span]:
    """Return the text of tokens as spans of trained and other tokens. trained: None if no token is trained.

    Each span is decoded together with the one before it, since some tokenizers drop the space before the first word.
    """

    def decode(some: list[int]) -> str:
        return str(tokenizer.decode(some, skip_special_tokens=False, clean_up_tokenization_spaces=False))

    spans, before = [], list[int]()
    for is_trained, group in groupby(zip(ids, trained or [False] * len(ids), strict=True), key=itemgetter(1)):
        tokens = [token for token, _ in group]
        start, both = decode(before), decode([*before, *tokens])
        spans.append(Span(both[len(start) :] if both.startswith(start) else decode(tokens), bool(is_trained)))
        before = tokens
    return spans


def preview_lines(samples: Sequence[Sample], width: int, is_coloured: bool) -> list[str]:
    """Return samples as lines of at most `width` columns, up to 11 lines each. Colour changes only the colour codes.

    Trained text is green and in brackets, other text is dim. A text that does not fit is shortened in the middle.
    """
    lines = [LEGEND[:width]] if samples else []
    for sample in samples:
        lines.append(f"{sample.title}: {sample.tokens:,} tokens"[:width])
        shown = sample.parts[:MAX_PARTS]
        for part in shown:
            room = max(width - LABEL - 2, 10)
            pieces = bracketed(shortened(part.spans, room * (MAX_LINES // len(shown))))
            for number, line in enumerate(wrap_pieces(pieces, room)):
                label = "" if number else part.name
                lines.append(f"  {label:<{LABEL}}{styled(line, is_coloured=is_coloured)}")
        if left := len(sample.parts) - len(shown):
            lines.append(f"  {'':<{LABEL}}… and {left} more"[:width])
    return lines


def shortened(spans: Sequence[Span], room: int) -> list[Piece]:
    """Return the characters of spans. If they need more than `room` columns, omit the middle and note how many.

    The brackets of a trained span take two columns.
    """
    pieces: list[Piece] = [(printable(char).translate(MARKS), span.is_trained) for span in spans for char in span.text]
    widths, brackets = [cell_len(text) for text, _ in pieces], 2 * sum(span.is_trained for span in spans)
    if sum(widths) + brackets <= room:
        return pieces
    half = max((room - MAX_GAP - brackets) // 2, 1)
    head, tail = (int(np.searchsorted(np.cumsum(some), half, "right")) for some in (widths, widths[::-1]))
    gap = f" … {len(pieces) - head - tail:,} characters left out … "
    return [*pieces[:head], *((char, None) for char in gap), *pieces[len(pieces) - tail :]]


def bracketed(pieces: Sequence[Piece]) -> Iterator[Piece]:
    """Yield the pieces with brackets around those that are trained."""
    for is_trained, group in groupby(pieces, key=itemgetter(1)):
        yield from [(OPEN, True)] if is_trained else ()
        yield from group
        yield from [(CLOSE, True)] if is_trained else ()


def wrap_pieces(pieces: Iterable[Piece], width: int) -> list[list[Piece]]:
    """Return the pieces in lines of at most `width` columns; at least one line."""
    lines: list[list[Piece]] = [[]]
    used = 0
    for piece in pieces:
        if used + (size := cell_len(piece[0])) > width and lines[-1]:
            lines.append([])
            used = 0
        lines[-1].append(piece)
        used += size
    return lines


def styled(pieces: Iterable[Piece], *, is_coloured: bool) -> str:
    """Return the text of pieces, with colour codes if `is_coloured`."""
    groups = ((is_trained, "".join(map(itemgetter(0), group))) for is_trained, group in groupby(pieces, itemgetter(1)))
    return "".join(
        f"{GREEN if is_trained else DIM}{text}{RESET}" if is_coloured else text for is_trained, text in groups
    )


def rows_document(data: DataSets, lines: Sequence[str], samples: Sequence[Sample]) -> dict[str, Any]:
    """Return the content of rows.json: counts and lengths of a stage's rows, their log lines, and samples."""
    options, rows = data[0]
    lengths = sequence_lengths(rows.train).max(1)
    median, p95 = map(int, np.percentile(lengths, [50, 95], method="higher"))
    return {
        "title": options.title,
        "rows": {name: number for name in get_args(RowOutcome) if (number := rows.counts.outcomes[name])},
        "lines": list(lines),
        "tokens": {"median": median, "p95": p95, "longest": int(lengths.max()), "limit": length_limit(options)},
        "samples": [asdict(sample) for sample in samples],
    }
