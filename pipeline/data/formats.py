"""Recognise the format of rows by their columns and parse them into records.

Bad rows are counted, not raised. `sources.py` and `readers.py` read files and hub sets.
"""

import dataclasses
import difflib
import math
import shlex
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from functools import lru_cache, partial
from typing import Any, NamedTuple

from pipeline.data.counts import Counts, Origin
from pipeline.data.readers import NO_COLUMNS, Row, Split, header_origin, to_json
from pipeline.data.sources import split_of
from pipeline.data.turns import (
    BadRowError,
    Message,
    Turns,
    check_texts,
    check_turns,
    is_transcript,
    parse_tools,
    parse_transcript,
    parse_turns,
    prompt_hash,
)
from pipeline.errors import InputError, nearest

Values = Mapping[str, Any]
RESPONSE_COLUMNS = ("response", "completion", "output")
ANSWER_COLUMNS = {*RESPONSE_COLUMNS, "answer"}  # prompts do not contain them; rewards compare responses with them
# Margins are on the scale of scores; the sum of a step's losses must be finite in fp32.
MAX_MARGIN = 1e6
PROMPT_COLUMNS = ("messages", "conversations", "prompt")
LABELS = {"true": True, "false": False}
MAX_SHOWN = 40  # characters of an invalid label that a message shows


@dataclasses.dataclass(frozen=True, slots=True)
class Content:
    """The content of a row of any format.

    messages: the prompt's turns, ending in a user turn, with its tools in front; empty for a plain text document.
    chosen: preferred response; None if the row has none.
    rejected: other response; also a single one that the row labels false.
    text: plain text document.
    margin: how much better chosen is, if the row has it.
    label: the row's label of its only response: True or False; an invalid label as text; None without one.
    """

    messages: Turns = ()
    chosen: str | None = None
    rejected: str | None = None
    text: str | None = None
    margin: float | None = None
    label: bool | str | None = None


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Record(Content):
    """A usable row: checked content and its origin.

    prompt_id: 63-bit hash of the prompt (of the text for a document).
    origin: where the row is.
    split: 'train' or 'test' if the source has splits.
    columns: the source's columns that are not null in this row.
    extra: columns that no prompt is read from, as a JSON object, if they are passed on.
    """

    prompt_id: int
    origin: Origin
    split: Split | None
    columns: tuple[str, ...] = ()
    extra: str = NO_COLUMNS

    @property
    def all_turns(self) -> Turns:
        """The whole conversation, for SFT: the prompt's turns and the chosen response, if any."""
        return self.messages if self.chosen is None else (*self.messages, Message("assistant", self.chosen))


class Format(NamedTuple):
    """A set of columns that rows can have: all of `needed`, and one of `any_of` if that is not empty.

    `optional` columns are read if a row has them.
    """

    name: str
    needed: tuple[str, ...]
    any_of: tuple[str, ...]
    parse: Callable[[Values], Content]
    optional: tuple[str, ...] = ()

    def fits(self, columns: Iterable[str]) -> bool:
        """Return True if rows of these columns can be read in this format."""
        present = set(columns)
        return present.issuperset(self.needed) and (not self.any_of or not present.isdisjoint(self.any_of))


def read_records(
    rows: Iterable[Row], counts: Counts, *, column_map: Mapping[str, str] | None = None, passes_columns: bool = False
) -> Iterator[Record]:
    """Yield the usable records of one source; the others are counted in `counts` by kind with the first example.

    column_map: our column name -> the source's ({"prompt": "question"}). passes_columns: records keep columns that no
    layout reads, and a single response's. Raises InputError if the first row's columns fit no format, a mapped column
    is missing there, or no usable record is left at the end.
    """
    num_records = num_dropped = 0
    for row in rows:
        try:
            record = _record(row, column_map or {}, counts, passes_columns=passes_columns)
        except (BadRowError, UnknownColumnsError) as error:
            # A file whose first row has unknown columns is refused; a later row with unknown columns is one more bad
            # row.
            if not isinstance(error, BadRowError):
                if not num_records + num_dropped:
                    raise InputError(str(error)) from error
                error = BadRowError("columns fit no format", _names(_present(row.values)))
            counts.add("dropped", str(error), row.origin, detail=error.detail)
            num_dropped += 1
        else:
            num_records += 1
            yield record
    if not num_records:
        kinds = "; ".join(counts.lines()) or "it has no rows"
        raise InputError(f"{row.origin.file if num_dropped else 'data'}: no usable row: {kinds}")


class UnknownColumnsError(ValueError):
    """Columns that fit no format; the message names them and what would be right."""


def _record(row: Row, column_map: Mapping[str, str], counts: Counts, *, passes_columns: bool) -> Record:
    values = _renamed(row, column_map, counts)
    form = _format_of(values, row.origin)
    content = form.parse(values)
    read = {*form.needed, *form.any_of, *form.optional, *column_map.values(), "split"}
    read -= ANSWER_COLUMNS if passes_columns else set()
    if content.rejected is None and (label := values.get("label")) is not None:
        content = dataclasses.replace(content, label=LABELS.get(str(label).lower(), repr(label)[:MAX_SHOWN]))
        if isinstance(content.label, bool):
            read.add("label")
        if content.label is False:  # of the KTO layout: the prompt is usable, the response must not be learnt
            content = dataclasses.replace(content, chosen=None, rejected=content.chosen)
    if content.messages and "tools" in values:
        read.add("tools")
        content = dataclasses.replace(content, messages=(*parse_tools(values["tools"]), *content.messages))
    others = {name: values[name] for name in values.keys() - read if values[name] is not None}
    extra, unread = to_json(others) if passes_columns else (NO_COLUMNS, set(others))
    counts.note_columns(row.origin.path, passed=others.keys() - unread, unread=unread)
    turns = (turn.content for turn in content.messages)
    check_texts([*turns, content.chosen, content.rejected, content.text])
    if content.text is None:
        check_turns(content.messages)
        if content.messages[-1].role != "user":
            raise BadRowError("prompt does not end in a user turn")
    if content.chosen is not None and content.chosen == content.rejected:
        raise BadRowError("chosen equals rejected")
    hashed = content.messages or (Message("text", content.text or ""),)
    own_split = split_of(values["split"]) if isinstance(values.get("split"), str) else None
    fields = {field.name: getattr(content, field.name) for field in dataclasses.fields(Content)}
    split, columns = row.split or own_split, _present(row.values)
    return Record(**fields, prompt_id=prompt_hash(hashed), origin=row.origin, split=split, columns=columns, extra=extra)


def _present(values: Values) -> tuple[str, ...]:
    """Return the columns that are not null: `datasets` fills those that a row lacks with None."""
    return tuple(name for name in values if values[name] is not None)


def _names(columns: Iterable[str]) -> str:
    return ", ".join(map(repr, columns))


def _renamed(row: Row, column_map: Mapping[str, str], counts: Counts) -> Values:
    present = {ours: row.values[theirs] for ours, theirs in column_map.items() if theirs in row.values}
    for ours, theirs in column_map.items():
        # If the source already has our column, the map is not needed: one map may serve several sources.
        if theirs not in row.values and ours not in row.values:
            others = _names(row.values) + nearest(theirs, row.values)
            where = f"{header_origin(row.origin)}: no column {theirs!r} (column_map {ours}={theirs})"
            raise UnknownColumnsError(f"{where}, only {others}")
        if theirs not in row.values:
            counts.add("kept", f"no column {theirs!r} (column_map {ours}={theirs}): {ours} is read", row.origin)
    return {**row.values, **present}


def _format_of(values: Values, origin: Origin) -> Format:
    # datasets fills columns that a row lacks with None, so null columns count only if no format fits without them.
    if form := _first_fitting(_present(values)) or _first_fitting(tuple(values)):
        return form
    raise UnknownColumnsError(f"{header_origin(origin)}: {_unknown_columns(list(values))}")


@lru_cache(maxsize=1024)
def _first_fitting(columns: tuple[str, ...]) -> Format | None:
    return next((form for form in FORMATS if form.fits(columns)), None)


def _unknown_columns(columns: list[str]) -> str:
    our_names = sorted({name for form in FORMATS for name in (*form.needed, *form.any_of)})
    matches = ((name, difflib.get_close_matches(name.lower(), our_names, n=1, cutoff=0.7)) for name in columns)
    # A map cannot name a column with a comma, or with white space at its ends.
    near = [(close[0], name) for name, close in matches if close and "," not in name and name == name.strip()]
    pairs = ",".join(f"{ours}={theirs}" for ours, theirs in near if ours != theirs)
    formats = "; ".join(form.name for form in FORMATS)
    hint = f"; nearest: --column-map {shlex.quote(pairs)}" if pairs else "; name them with --column-map prompt=..."
    return f"columns {_names(columns) or '(none)'} fit no known format ({formats}){hint}"


def _text_of(values: Values, column: str) -> str:
    value = values[column]
    if value is None:
        raise BadRowError(f"{column} is null")
    if not isinstance(value, str):
        raise BadRowError(f"{column} is no text but {type(value).__name__}")
    return value


def _response(values: Values, *columns: str) -> str:
    """Return the text, or the single turn's text, of the first of these columns that is not null; one must exist."""
    present = [column for column in columns if column in values]
    column = next((column for column in present if values[column] is not None), present[0])
    if isinstance(values[column], list | Mapping):
        turns = parse_turns(values[column], column)
        if [turn.role for turn in turns] != ["assistant"]:
            raise BadRowError(f"{column} is no single assistant turn")
        values = {column: turns[0].content}
    text = _text_of(values, column).strip()
    if not text:
        raise BadRowError(f"{column} is empty")
    return text


def _prompt_turns(values: Values) -> Turns:
    """Read the prompt from the first that exists of `messages`, `conversations` and `prompt`."""
    for column in PROMPT_COLUMNS[:-1]:
        if values.get(column):
            turns = parse_turns(values[column], column)
            # Some sets keep the whole chosen conversation here.
            return turns[:-1] if turns[-1].role == "assistant" else turns
    if "prompt" not in values:
        kind = "no prompt: chosen is neither a transcript nor a list of messages"
        raise BadRowError(kind, _names(_present(values)))
    return _turns_of_prompt(values, "prompt")


def _turns_of_prompt(values: Values, column: str) -> Turns:
    if isinstance(values[column], list):
        return parse_turns(values[column], column)
    text = _text_of(values, column)
    return parse_transcript(text) if is_transcript(text) else (Message("user", text.strip()),)


def _parse_pair(values: Values) -> Content:
    chosen, rejected = _side(values, "chosen"), _side(values, "rejected")
    if chosen[:-1] != rejected[:-1]:
        raise BadRowError("chosen and rejected have different prompts")
    messages = chosen[:-1] or _prompt_turns(values)
    return Content(messages, chosen[-1].content, rejected[-1].content, margin=_margin(values))


def _side(values: Values, column: str) -> Turns:
    """Read one side of a pair as turns that end in an assistant turn: only the response, or the whole conversation."""
    if isinstance(values[column], list | Mapping):
        turns = parse_turns(values[column], column)
    elif isinstance(values[column], str) and is_transcript(values[column]):
        turns = parse_transcript(values[column])
    else:
        return (Message("assistant", _response(values, column)),)
    if not turns or turns[-1].role != "assistant":
        raise BadRowError(f"{column} does not end in an assistant turn")
    if not turns[-1].content:
        raise BadRowError(f"{column} is empty")
    return turns


def _margin(values: Values) -> float | None:
    if values.get("margin") in (None, ""):
        return None
    try:
        margin = float(values["margin"])
    except (TypeError, ValueError, OverflowError):
        margin = math.nan
    if not abs(margin) <= MAX_MARGIN:
        raise BadRowError(f"margin is no number from {-MAX_MARGIN:g} to {MAX_MARGIN:g}")
    return margin


def _parse_exchange(prompt: str, responses: Sequence[str], values: Values) -> Content:
    return Content(_turns_of_prompt(values, prompt), _response(values, *responses))


def _parse_messages(column: str, values: Values) -> Content:
    return _conversation(parse_turns(values[column], column))


def _conversation(turns: Turns) -> Content:
    if len(turns) > 1 and turns[-1].role == "assistant":
        if not turns[-1].content:
            raise BadRowError("last assistant turn is empty")
        return Content(turns[:-1], turns[-1].content)
    return Content(turns)


def _parse_alpaca(values: Values) -> Content:
    instruction = _text_of(values, "instruction").strip()
    extra = _text_of(values, "input").strip() if values.get("input") else ""
    prompt = f"{instruction}\n\n{extra}" if extra else instruction
    return Content((Message("user", prompt),), _response(values, *RESPONSE_COLUMNS))


def _parse_text(values: Values) -> Content:
    text = _text_of(values, "text")
    if is_transcript(text):
        return _conversation(parse_transcript(text))
    if not text.strip():
        raise BadRowError("text is empty")
    return Content(text=text)


# Formats in order of preference: if several fit, the first is taken.
FORMATS: tuple[Format, ...] = (
    Format("prompt/chosen/rejected", ("chosen", "rejected"), (), _parse_pair, (*PROMPT_COLUMNS, "margin")),
    Format("instruction/input/output", ("instruction",), RESPONSE_COLUMNS, _parse_alpaca, ("input",)),
    Format("prompt/response", ("prompt",), RESPONSE_COLUMNS, partial(_parse_exchange, "prompt", RESPONSE_COLUMNS)),
    Format("question/answer", ("question", "answer"), (), partial(_parse_exchange, "question", ("answer",))),
    Format("messages", ("messages",), (), partial(_parse_messages, "messages")),
    Format("conversations", ("conversations",), (), partial(_parse_messages, "conversations")),
    Format("text", ("text",), (), _parse_text),
    Format("prompt", ("prompt",), (), lambda values: Content(_turns_of_prompt(values, "prompt"))),
)
# The columns that a --column-map can name.
COLUMNS = sorted(
    {name for form in FORMATS for name in (*form.needed, *form.any_of, *form.optional)} | {"label", "split", "tools"}
)
