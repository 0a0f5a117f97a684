"""Tokenise records into the rows of a stage: SFT sequences, preference pairs or prompts.

Pure functions of records and tokenizer; what is cut or left out is counted. Which tokens are trained is decided in
`templates.py`.
"""

from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from functools import cached_property
from typing import TYPE_CHECKING, Literal, TypeVar

from pipeline.data.counts import Counts
from pipeline.data.formats import Record
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
from pipeline.data.turns import BadRowError, Message, Turns, broken_up, special_texts, spells_special, turns_to_json
from pipeline.errors import InputError

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

R = TypeVar("R")
LongRows = Literal["drop", "truncate_left"]

# A pair whose response alone fills the limit keeps this share of the limit for the end of its prompt.
MIN_PROMPT_SHARE = 0.25
MAX_REASON = 100  # characters of a template's message: it may quote the row
SPECIAL_BROKEN = "text that spells a special token (broken up)"


@dataclass(frozen=True, slots=True, kw_only=True)
class TokenizationOptions:
    """Options of tokenisation: limits in tokens, what happens to rows beyond them, and which tokens are trained."""

    max_seq_len: int = 512
    max_prompt_seq_len: int = 256
    train_on_prompt: bool = False
    train_turns: TrainTurns = "all"
    long_pairs: LongRows = "drop"
    long_prompts: LongRows = "drop"


@dataclass(frozen=True, slots=True)
class SFTRow:
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
    """A tokenised prompt up to and with the generation prompt; `messages` are its turns as JSON.

    A reward model with a tokenizer of its own renders them with its own template.
    """

    prompt_ids: list[int]
    prompt_id: int
    messages: str


class TooLongError(BadRowError):
    """A row that is left out because of its `num_tokens`."""

    def __init__(self, kind: str, num_tokens: int) -> None:
        super().__init__(kind)
        self.num_tokens = num_tokens


@dataclass(frozen=True, slots=True)
class DocumentRow:
    """A tokenised plain text with an EOS at its end, of any length: documents are joined and cut into rows later."""

    ids: list[int]


class _RowMaker:
    """A maker of rows from records: it counts what it repairs or cuts, and raises BadRowError for what it refuses."""

    def __init__(self, tokenizer: "PreTrainedTokenizerBase", options: TokenizationOptions, counts: Counts) -> None:
        self.tokenizer, self.options, self.counts = tokenizer, options, counts
        self.special, self.renders_tools = special_tokens(tokenizer), "tools" in str(tokenizer.chat_template)

    def rows(self, records: Iterable[Record], make: Callable[[Record], R]) -> Iterator[R]:
        """Yield what `make` returns for each record; a record that it refuses is counted instead."""
        for record in records:
            try:
                row = make(record)
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
                self.counts.add("dropped", str(error), record.origin, num_tokens=num_tokens, found=error.found)
            else:
                if record.messages[:1] and record.messages[0].role == "tools" and not self.renders_tools:
                    self.counts.add("kept", "tools that the chat template does not render", record.origin)
                yield row

    @cached_property
    def renders_an_exchange(self) -> bool:
        """False for a template that renders no answer behind its prompt, as DeepSeek-R1's: then no row can be used."""
        exchange = (Message("user", "a"), Message("assistant", "b"))
        try:
            encode_conversation(self.tokenizer, exchange, "last", self.special)
        except RewrittenTurnsError:
            return False
        return True

    def sequence(self, record: Record) -> SFTRow:
        if record.chosen is None:
            is_bad = record.rejected is not None
            raise BadRowError("response is labelled false" if is_bad else "no response to train on")
        encoded = self._conversation(record, record.all_turns, self.options.train_turns)
        ids, limit = encoded.ids, self.options.max_seq_len
        # Nothing predicts the first token, so it is no target.
        trained = [True] * len(ids) if self.options.train_on_prompt else encoded.trained
        row = SFTRow(ids[:limit], [False, *trained[1:limit]])
        if not any(row.trained):
            raise TooLongError("no trained token left after truncation", len(ids))
        if len(ids) > limit:
            self.counts.add("cut", "response beyond max_seq_len", record.origin)
        return row

    def pair(self, record: Record) -> PairRow:
        if record.chosen is None or record.rejected is None:
            kind = "no pair: columns chosen and rejected are needed, with prompt or messages"
            raise BadRowError(kind, ", ".join(map(repr, record.columns)))
        turns = [(*record.messages, Message("assistant", text)) for text in (record.chosen, record.rejected)]
        sides = [self._conversation(record, side, "last") for side in turns]
        chosen, rejected = sides[0].ids, sides[1].ids
        prompt_length = sides[0].prompt_length
        limit, longest = self.options.max_seq_len, max(len(chosen), len(rejected))
        if longest > limit:
            if self.options.long_pairs == "drop":
                raise TooLongError("pair longer than max_seq_len", longest)
            longest_response = longest - prompt_length
            num_kept = min(prompt_length, max(limit - longest_response, int(limit * MIN_PROMPT_SHARE), 1))
            is_whole = longest_response <= limit - num_kept
            self.counts.add("cut", "start of the prompt" if is_whole else "prompt and end of a response", record.origin)
            prompt = self._without_start(chosen[:prompt_length], num_kept)
            chosen, rejected = ((prompt + ids[prompt_length:])[:limit] for ids in (chosen, rejected))
            prompt_length = num_kept
        if chosen == rejected:
            raise BadRowError("chosen and rejected have the same tokens")
        return PairRow(chosen, rejected, prompt_length, record.margin or 0.0)

    def prompt(self, record: Record) -> PromptRow:
        if not record.messages:
            raise BadRowError("no prompt")
        self._count_special(record, record.messages)
        ids, limit = encode_prompt(self.tokenizer, record.messages, self.special), self.options.max_prompt_seq_len
        if len(ids) > limit:
            if self.options.long_prompts == "drop":
                raise TooLongError("prompt longer than max_prompt_seq_len", len(ids))
            self.counts.add("cut", "start of the prompt", record.origin)
            ids = self._without_start(ids, limit)
        return PromptRow(ids, record.prompt_id, turns_to_json(record.messages))

    def _conversation(self, record: Record, turns: Turns, train_turns: TrainTurns) -> EncodedConversation:
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

    def _count_special(self, record: Record, turns: Turns) -> None:
        if any(spells_special(turn.content, self.special.texts) for turn in turns):
            self.counts.add("kept", SPECIAL_BROKEN, record.origin)

    def _without_start(self, ids: list[int], num_kept: int) -> list[int]:
        """Return the last `num_kept` ids; a BOS at the head is kept."""
        if ids[0] == self.tokenizer.bos_token_id and 1 < num_kept < len(ids):
            return [ids[0], *ids[len(ids) - num_kept + 1 :]]
        return ids[len(ids) - num_kept :]


def sft_rows(
    records: Iterable[Record], tokenizer: "PreTrainedTokenizerBase", options: TokenizationOptions, counts: Counts
) -> Iterator[SFTRow]:
    """Yield one row per conversation.

    A conversation beyond max_seq_len loses its end, without an EOS in its place ('truncated'); it is dropped if no
    trained token is left.
    """
    maker = _RowMaker(tokenizer, options, counts)
    return maker.rows(records, maker.sequence)


def pair_rows(
    records: Iterable[Record], tokenizer: "PreTrainedTokenizerBase", options: TokenizationOptions, counts: Counts
) -> Iterator[PairRow]:
    """Yield one row for each record with a chosen and a rejected response.

    A pair beyond max_seq_len is dropped, or with long_pairs='truncate_left' loses the start of its prompt (the BOS
    stays), the same for both sides; a response that does not fit even then loses its end. Both are counted.
    """
    maker = _RowMaker(tokenizer, options, counts)
    return maker.rows(records, maker.pair)


def prompt_rows(
    records: Iterable[Record], tokenizer: "PreTrainedTokenizerBase", options: TokenizationOptions, counts: Counts
) -> Iterator[PromptRow]:
    """Yield one row per prompt; one beyond max_prompt_seq_len is dropped, or loses its start (BOS stays)."""
    maker = _RowMaker(tokenizer, options, counts)
    return maker.rows(records, maker.prompt)


def documents(
    records: Iterable[Record], tokenizer: "PreTrainedTokenizerBase", options: TokenizationOptions, counts: Counts
) -> Iterator[DocumentRow]:
    """Yield one row per plain text. Raises InputError if the tokenizer has no EOS."""
    if tokenizer.eos_token_id is None:
        raise InputError(f"{tokenizer.name_or_path}: plain text needs a tokenizer with an EOS token")
    special = special_texts(tokenizer)
    for record in records:
        if record.text is None:
            counts.add("dropped", "no plain text", record.origin)
            continue
        if spells_special(record.text, special):
            counts.add("kept", SPECIAL_BROKEN, record.origin)
        yield DocumentRow([*encode_text(tokenizer, broken_up(record.text, special)), tokenizer.eos_token_id])
