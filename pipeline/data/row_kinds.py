"""Kinds of rows (sequences, pairs, prompts, blocks of text), and how records are tokenised into the rows of each.

Rows are pure functions of records and tokenizer; truncated and dropped rows are counted. `templates.py` decides which
tokens are trained.
"""

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, fields
from functools import cached_property
from typing import TYPE_CHECKING, Annotated, Any, Literal, get_type_hints

from pipeline.data.counts import Counts
from pipeline.data.formats import Record
from pipeline.data.readers import NO_COLUMNS
from pipeline.data.templates import (
    EncodedConversation,
    RefusedTurnsError,
    RewrittenTurnsError,
    TrainTurns,
    encode_conversation,
    encode_prompt,
    encode_text,
    special_tokens,
)
from pipeline.data.turns import BadRowError, Message, Turns, broken_up, parse_tools, spells_special, turns_to_json
from pipeline.errors import InputError

if TYPE_CHECKING:
    import pyarrow as pa
    from transformers import PreTrainedTokenizerBase

LongRows = Literal["drop", "truncate_left"]

# Share of the limit that remains for the end of the prompt if a pair's response alone would fill the limit.
MIN_PROMPT_SHARE = 0.25
MAX_REASON = 100  # characters of a template's message: it may quote the row
SAME_TOKENS = "chosen and rejected have the same tokens"  # reason to drop a pair
EXTRA = "extra"  # the field of a row for further columns of its record, as JSON
SPECIAL_BROKEN = "text that spells a special token (now with a space in it)"
WideInt = Annotated[int, "64 bits"]  # the annotation of a column that 32 bits do not hold


@dataclass(frozen=True, slots=True, kw_only=True)
class TokenizationOptions:
    """Options of tokenisation, by the flags of the same names.

    max_seq_len: maximum number of tokens of a sequence.
    max_prompt_seq_len: maximum number of tokens of a prompt.
    train_on_prompt: train on prompts as on responses.
    train_turns: which assistant turns are trained on.
    long_pairs: what happens to pairs beyond max_seq_len.
    long_prompts: what happens to prompts beyond max_prompt_seq_len.
    tool_schemas: JSON schemas of the tools that each prompt offers, as a JSON list; "" without tools.
    """

    max_seq_len: int = 512
    max_prompt_seq_len: int = 256
    train_on_prompt: bool = False
    train_turns: TrainTurns = "all"
    long_pairs: LongRows = "drop"
    long_prompts: LongRows = "drop"
    tool_schemas: str = ""


@dataclass(frozen=True, slots=True)
class SequenceRow:
    """A tokenised sequence: S <= max_seq_len ids, and S flags, True = a target of the loss (never the first token)."""

    ids: list[int]
    trained: list[bool]


@dataclass(frozen=True, slots=True)
class PairRow:
    """A tokenised pair: two conversations of at most max_seq_len ids whose first `prompt_length` ids are the same."""

    chosen_ids: list[int]
    rejected_ids: list[int]
    prompt_length: int
    margin: float


@dataclass(frozen=True, slots=True)
class PromptRow:
    """A tokenised prompt including the generation prompt; `messages` are its turns as JSON, for rewards.

    A reward model with another tokenizer renders them by its own template. `extra`: the row's other columns.
    """

    prompt_ids: list[int]
    prompt_id: WideInt
    messages: str
    extra: str = NO_COLUMNS


@dataclass(frozen=True, slots=True)
class DocumentRow:
    """A tokenised plain text with an EOS at its end, of any length; documents are joined and split into blocks."""

    ids: list[int]


class TooLongError(BadRowError):
    """A row that is dropped because of its `num_tokens`."""

    def __init__(self, kind: str, num_tokens: int) -> None:
        super().__init__(kind)
        self.num_tokens = num_tokens


class RowMaker:
    """A maker of rows from records. It counts truncated rows and rows whose text had to be encoded in another way."""

    def __init__(self, tokenizer: "PreTrainedTokenizerBase", options: TokenizationOptions, counts: Counts) -> None:
        self.tokenizer, self.options, self.counts = tokenizer, options, counts
        self.special, self.renders_tools = special_tokens(tokenizer), "tools" in str(tokenizer.chat_template)

    def rows(self, records: Iterable[Record], make: "Callable[[RowMaker, Record], Any]") -> Iterator[Any]:
        """Yield the row or the list of rows that `make` returns for each record; refused records are counted."""
        for record in records:
            try:
                row = make(self, record)
            except RefusedTurnsError as error:
                reason = " ".join(str(error.__cause__).split())[:MAX_REASON]
                self.counts.add("dropped", f"turns refused by the chat template: {reason}", record.origin)
            except RewrittenTurnsError:
                if not self.renders_an_exchange:
                    raise
                kind = "answer that the chat template renders elsewhere than behind its prompt"
                self.counts.add("dropped", kind, record.origin)
            except BadRowError as error:
                num_tokens = error.num_tokens if isinstance(error, TooLongError) else 0
                self.counts.add("dropped", str(error), record.origin, num_tokens=num_tokens, detail=error.detail)
            else:
                if record.messages[:1] and record.messages[0].role == "tools" and not self.renders_tools:
                    self.counts.add("kept", "rows whose tools the chat template does not render", record.origin)
                yield from row if isinstance(row, list) else [row]

    @cached_property
    def renders_an_exchange(self) -> bool:
        """False for a template that renders no answer after its prompt, as DeepSeek-R1's: then no row is usable."""
        exchange = (Message("user", "a"), Message("assistant", "b"))
        try:
            encode_conversation(self.tokenizer, exchange, "last", self.special)
        except RewrittenTurnsError:
            return False
        return True

    def sequence(self, record: Record) -> SequenceRow:
        """Return the row of a conversation; beyond max_seq_len its end is truncated, without an EOS.

        It is refused if no trained token is left.
        """
        if record.chosen is None:
            is_bad = record.rejected is not None
            raise BadRowError("response is labelled false" if is_bad else "no response to train on")
        encoded = self.conversation(record, record.all_turns, self.options.train_turns)
        ids, limit = encoded.ids, self.options.max_seq_len
        # Nothing predicts the first token, so it is not a target.
        trained = [True] * len(ids) if self.options.train_on_prompt else encoded.trained
        row = SequenceRow(ids[:limit], [False, *trained[1:limit]])
        if not any(row.trained):
            raise TooLongError("no trained token within max_seq_len", len(ids))
        if len(ids) > limit:
            self.counts.add("cut", "response beyond max_seq_len", record.origin)
        return row

    def pair(self, record: Record) -> PairRow:
        """Return the two sides of a record with a chosen and a rejected response, by `sides`."""
        if record.chosen is None or record.rejected is None:
            kind = "no pair: columns chosen and rejected are needed, with prompt or messages"
            raise BadRowError(kind, ", ".join(map(repr, record.columns)))
        (chosen, rejected), prompt_length = self.sides(record, (record.chosen, record.rejected), "pair")
        return PairRow(chosen, rejected, prompt_length, record.margin or 0.0)

    def sides(self, record: Record, texts: Sequence[str], what: str) -> tuple[list[list[int]], int]:
        """Return the tokens of the prompt with each of one or two responses, and the length of the prompt.

        A row beyond max_seq_len is refused. With long_pairs='truncate_left' its prompt loses its start (not the BOS),
        the same tokens on both sides; a response that still does not fit loses its end. Both are counted.

        Args:
            what: name of the row in messages.
        """
        turns = [(*record.messages, Message("assistant", text)) for text in texts]
        encoded = [self.conversation(record, side, "last") for side in turns]
        sides, prompt_length = [side.ids for side in encoded], encoded[0].prompt_length
        limit, longest = self.options.max_seq_len, max(map(len, sides))
        if longest > limit:
            if self.options.long_pairs == "drop":
                raise TooLongError(f"{what} longer than max_seq_len", longest)
            longest_response = longest - prompt_length
            num_kept = min(prompt_length, max(limit - longest_response, int(limit * MIN_PROMPT_SHARE), 1))
            is_whole = longest_response <= limit - num_kept
            self.counts.add("cut", "start of the prompt" if is_whole else "prompt and end of a response", record.origin)
            prompt = self._without_start(sides[0][:prompt_length], num_kept)
            sides, prompt_length = [(prompt + ids[prompt_length:])[:limit] for ids in sides], num_kept
        if len(sides) > 1 and sides[0] == sides[1]:
            raise BadRowError(SAME_TOKENS)
        return sides, prompt_length

    def prompt(self, record: Record) -> PromptRow:
        """Return the row of a prompt; beyond max_prompt_seq_len it is refused, or loses its start (not the BOS)."""
        if not record.messages:
            raise BadRowError("no prompt")
        self._count_special(record, record.messages)
        turns, limit = self._with_tools(record.messages), self.options.max_prompt_seq_len
        ids = encode_prompt(self.tokenizer, turns, self.special)
        if len(ids) > limit:
            if self.options.long_prompts == "drop":
                raise TooLongError("prompt longer than max_prompt_seq_len", len(ids))
            self.counts.add("cut", "start of the prompt", record.origin)
            ids = self._without_start(ids, limit)
        return PromptRow(ids, record.prompt_id, turns_to_json(record.messages), record.extra)

    def _with_tools(self, turns: Turns) -> Turns:
        """Return a prompt with the tools of the run. Raises BadRowError for one with tools of its own."""
        if not self.options.tool_schemas:
            return turns
        if turns[0].role == "tools":
            raise BadRowError("prompt with tools of its own, beside those of --tools")
        return (*parse_tools(self.options.tool_schemas), *turns)

    def document(self, record: Record) -> DocumentRow:
        """Return a plain text. Raises InputError if the tokenizer has no EOS."""
        if self.tokenizer.eos_token_id is None:
            raise InputError(f"{self.tokenizer.name_or_path}: plain text needs a tokenizer with an EOS token")
        if record.text is None:
            raise BadRowError("no plain text")
        self._count_special(record, [Message("text", record.text)])
        ids = encode_text(self.tokenizer, broken_up(record.text, self.special.texts))
        return DocumentRow([*ids, self.tokenizer.eos_token_id])

    def conversation(self, record: Record, turns: Turns, train_turns: TrainTurns) -> EncodedConversation:
        """Return the tokens of turns that end in an answer; counts rows that had to be encoded in another way."""
        self._count_special(record, turns)
        try:
            encoded = encode_conversation(self.tokenizer, turns, train_turns, self.special)
        except RewrittenTurnsError:
            if train_turns == "last":
                raise
            encoded = encode_conversation(self.tokenizer, turns, "last", self.special)
            self.counts.add(
                "kept", "earlier turns rewritten by the chat template: only the last is trained", record.origin
            )
        if encoded.num_boundaries:
            self.counts.add("kept", "tokens would merge across the prompt's end: pieces encoded apart", record.origin)
        return encoded

    def _count_special(self, record: Record, turns: Iterable[Message]) -> None:
        if any(spells_special(turn.content, self.special.texts) for turn in turns):
            self.counts.add("kept", SPECIAL_BROKEN, record.origin)

    def _without_start(self, ids: list[int], num_kept: int) -> list[int]:
        """Return the last `num_kept` ids; a BOS at the start stays."""
        if ids[0] == self.tokenizer.bos_token_id and 1 < num_kept < len(ids):
            return [ids[0], *ids[len(ids) - num_kept + 1 :]]
        return ids[len(ids) - num_kept :]


@dataclass(frozen=True, slots=True, kw_only=True)
class RowKind:
    """A kind of rows; a record makes one row or several. A stage's package adds its own: `ROW_KINDS[KIND.name] = KIND`.

    name: its key in ROW_KINDS, and part of the names of cached files.
    make: returns the row of a record, or a list; a record for which it raises BadRowError counts as dropped.
    row: the dataclass of a row; its fields are columns, those of tokens have names that end in "ids".
    documents: which records are joined and split into blocks, which come as rows after all other rows.
    one_per_prompt: True drops a record whose prompt an earlier one has, since random numbers are keyed by prompts.
    length_flag: the flag that limits the tokens of a row.
    least_length: the smallest valid value of this flag.
    """

    name: str
    make: Callable[[RowMaker, Record], Any]
    row: type[Any]
    documents: Literal["none", "plain texts", "all"] = "none"
    one_per_prompt: bool = False
    length_flag: str = "max_seq_len"
    least_length: int = 8

    @property
    def passes_columns(self) -> bool:
        """True if rows have the field EXTRA, as in `PromptRow`: columns of records that have no meaning here."""
        return any(field.name == EXTRA for field in fields(self.row))

    def of_record(self, *, is_text: bool) -> "RowKind":
        """Return the kind of rows that a record is tokenised to; is_text: the record is a plain document."""
        is_document = self.documents == "all" or (self.documents == "plain texts" and is_text)
        return DOCUMENTS if is_document else self

    def rows(
        self,
        records: Iterable[Record],
        tokenizer: "PreTrainedTokenizerBase",
        options: TokenizationOptions,
        counts: Counts,
    ) -> Iterator[Any]:
        """Yield the rows of each usable record; the other records are counted."""
        return RowMaker(tokenizer, options, counts).rows(records, self.make)

    def schema(self) -> "pa.Schema":
        """Return the Arrow schema of the rows: the columns of their fields, and their numbers of tokens."""
        import pyarrow as pa

        number = pa.int32()  # large enough for every vocabulary
        types = {
            list[int]: pa.list_(number),
            list[bool]: pa.list_(pa.bool_()),
            int: number,
            WideInt: pa.int64(),
            bool: pa.bool_(),
            float: pa.float32(),
            str: pa.large_string(),
        }
        columns = {name: types[hint] for name, hint in get_type_hints(self.row, include_extras=True).items()}
        counted = ("num_trained", "num_tokens") if "trained" in columns else ("num_tokens",)
        return pa.schema([*columns.items(), *((name, number) for name in counted)])


def columns(row: Any) -> dict[str, Any]:
    """Return the columns of a row: its fields, and their numbers of tokens."""
    values = {field.name: getattr(row, field.name) for field in fields(row)}
    num_tokens = sum(len(ids) for name, ids in values.items() if name.endswith("ids"))
    return {**values, "num_tokens": num_tokens, "num_trained": sum(values.get("trained", ()))}


DOCUMENTS = RowKind(name="documents", make=RowMaker.document, row=DocumentRow)
SEQUENCES = RowKind(name="sequences", make=RowMaker.sequence, row=SequenceRow, documents="plain texts")
PAIRS = RowKind(name="pairs", make=RowMaker.pair, row=PairRow)
PROMPTS = RowKind(
    name="prompts",
    make=RowMaker.prompt,
    row=PromptRow,
    one_per_prompt=True,
    length_flag="max_prompt_seq_len",
    least_length=1,
)
BLOCKS = RowKind(name="blocks", make=RowMaker.document, row=SequenceRow, documents="all")
ROW_KINDS = {kind.name: kind for kind in (SEQUENCES, PAIRS, PROMPTS, BLOCKS)}
