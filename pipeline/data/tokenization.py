"""Tokenise records into the rows of a stage: SFT sequences, preference pairs or prompts.

Pure functions of records and tokenizer; what is cut or left out is counted. Which tokens are trained is decided in
`templates.py`.
"""

from collections.abc import Iterable, Iterator
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Literal

from pipeline.data.counts import Counts
from pipeline.data.formats import Record
from pipeline.data.templates import (
    EncodedConversation,
    RefusedTurnsError,
    TrainTurns,
    broken_up,
    encode_conversation,
    encode_prompt,
    encode_text,
    end_token_ids,
    special_texts,
)
from pipeline.data.turns import Message, Turns, turns_to_json
from pipeline.errors import InputError

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

LongRows = Literal["drop", "truncate_left"]

# A pair whose response alone fills the limit keeps this share of the limit for the end of its prompt.
MIN_PROMPT_SHARE = 0.25
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


@dataclass(frozen=True, slots=True)
class _Encoder:
    """A tokenizer with its end tokens and special texts, and the counts that it adds to."""

    tokenizer: "PreTrainedTokenizerBase"
    ends: frozenset[int]
    special_tokens: tuple[str, ...]
    counts: Counts

    @classmethod
    def of(cls, tokenizer: "PreTrainedTokenizerBase", counts: Counts) -> "_Encoder":
        return cls(tokenizer, end_token_ids(tokenizer), special_texts(tokenizer), counts)

    def conversation(self, record: Record, turns: Turns, train_turns: TrainTurns) -> EncodedConversation | None:
        """Encode turns; None, and counted, if the template refuses them."""
        self._count_special(record, turns)
        try:
            encoded = encode_conversation(self.tokenizer, turns, train_turns, self.ends)
        except RefusedTurnsError:
            self.counts.add("turns refused by the chat template", record.origin)
            return None
        if encoded.num_boundaries:
            self.counts.add("tokens would merge across the prompt's end: pieces encoded apart", record.origin)
        return encoded

    def prompt(self, record: Record) -> list[int] | None:
        """Encode a record's prompt; None, and counted, if the template refuses it."""
        self._count_special(record, record.messages)
        try:
            return encode_prompt(self.tokenizer, record.messages)
        except RefusedTurnsError:
            self.counts.add("turns refused by the chat template", record.origin)
            return None

    def _count_special(self, record: Record, turns: Turns) -> None:
        if any(token in turn.content for turn in turns for token in self.special_tokens):
            self.counts.add(SPECIAL_BROKEN, record.origin)


def sft_rows(
    records: Iterable[Record], tokenizer: "PreTrainedTokenizerBase", options: TokenizationOptions, counts: Counts
) -> Iterator[SFTRow]:
    """Yield one row per conversation, then the plain text documents in blocks of max_seq_len.

    A conversation beyond max_seq_len loses its end, without an EOS in its place ('truncated'); it is dropped if no
    trained token is left.
    """
    encoder = _Encoder.of(tokenizer, counts)
    documents = []
    for record in records:
        if record.text is not None:
            documents.append(record)
        elif record.chosen is None:
            counts.add("no response to train on", record.origin)
        elif row := _sft_row(record, encoder, options):
            yield row
    if documents:
        yield from text_blocks(documents, tokenizer, options.max_seq_len, counts)


def pair_rows(
    records: Iterable[Record], tokenizer: "PreTrainedTokenizerBase", options: TokenizationOptions, counts: Counts
) -> Iterator[PairRow]:
    """Yield one row for each record with a chosen and a rejected response.

    A pair beyond max_seq_len is dropped, or with long_pairs='truncate_left' loses the start of its prompt (the BOS
    stays), the same for both sides; a response that does not fit even then loses its end. Both are counted.
    """
    encoder = _Encoder.of(tokenizer, counts)
    for record in records:
        if record.chosen is None or record.rejected is None:
            counts.add("no pair of responses", record.origin)
        elif (pair := _encoded_pair(record, encoder)) and (fitted := _fitted(pair, record, encoder, options)):
            yield fitted


def prompt_rows(
    records: Iterable[Record], tokenizer: "PreTrainedTokenizerBase", options: TokenizationOptions, counts: Counts
) -> Iterator[PromptRow]:
    """Yield one row per distinct prompt; one beyond max_prompt_seq_len is dropped, or loses its start (BOS stays)."""
    encoder = _Encoder.of(tokenizer, counts)
    seen: set[int] = set()
    for record in records:
        if not record.messages:
            counts.add("no prompt", record.origin)
        elif record.prompt_id in seen:
            # Random numbers are keyed by the prompt's id: a repetition would give the same rollouts again.
            counts.add("prompt repeated", record.origin)
        else:
            seen.add(record.prompt_id)
            ids = _fitted_prompt(record, encoder, options)
            if ids is not None:
                yield PromptRow(ids, record.prompt_id, turns_to_json(record.messages))


def text_blocks(
    records: Iterable[Record], tokenizer: "PreTrainedTokenizerBase", block_len: int, counts: Counts
) -> Iterator[SFTRow]:
    """Yield documents, joined with an EOS after each, in blocks of block_len ids; the last block may be shorter.

    All tokens but each block's first are trained. Raises InputError if the tokenizer has no EOS.
    """
    if tokenizer.eos_token_id is None:
        raise InputError(f"{tokenizer.name_or_path}: plain text needs a tokenizer with an EOS token")
    special = special_texts(tokenizer)
    rest: list[int] = []
    for record in records:
        if record.text is None:
            counts.add("no plain text", record.origin)
        else:
            if any(token in record.text for token in special):
                counts.add(SPECIAL_BROKEN, record.origin)
            rest += [*encode_text(tokenizer, broken_up(record.text, special)), tokenizer.eos_token_id]
        num_full = len(rest) // block_len * block_len
        yield from (_all_trained(rest[start : start + block_len]) for start in range(0, num_full, block_len))
        rest = rest[num_full:]
    if len(rest) > 1:
        yield _all_trained(rest)


def _all_trained(ids: list[int]) -> SFTRow:
    return SFTRow(ids, [False] + [True] * (len(ids) - 1))


def _sft_row(record: Record, encoder: _Encoder, options: TokenizationOptions) -> SFTRow | None:
    encoded = encoder.conversation(record, record.all_turns, options.train_turns)
    if encoded is None:
        return None
    ids, limit = encoded.ids, options.max_seq_len
    if len(ids) > limit:
        encoder.counts.add("truncated", record.origin)
    # Nothing predicts the first token, so it is no target.
    trained = [True] * len(ids) if options.train_on_prompt else encoded.trained
    row = SFTRow(ids[:limit], [False, *trained[1:limit]])
    if any(row.trained):
        return row
    encoder.counts.add("no trained token left after truncation", record.origin)
    return None


def _encoded_pair(record: Record, encoder: _Encoder) -> PairRow | None:
    sides = []
    for response in (record.chosen, record.rejected):
        turns = (*record.messages, Message("assistant", response or ""))
        encoded = encoder.conversation(record, turns, "last")
        if encoded is None:
            return None
        sides.append(encoded)
    # With only the last turn trained, the tokens before the first trained one are exactly the prompt's.
    prompt_length = sides[0].trained.index(True)
    return PairRow(sides[0].ids, sides[1].ids, prompt_length, record.margin or 0.0)


def _fitted(pair: PairRow, record: Record, encoder: _Encoder, options: TokenizationOptions) -> PairRow | None:
    """Fit a pair into max_seq_len; None, and counted, if it is dropped."""
    counts, limit = encoder.counts, options.max_seq_len
    if max(len(pair.chosen_ids), len(pair.rejected_ids)) > limit:
        if options.long_pairs == "drop":
            counts.add("pair longer than max_seq_len", record.origin)
            return None
        counts.add("pair truncated", record.origin)
        pair, is_response_cut = _truncated_pair(pair, limit, encoder.tokenizer.bos_token_id)
        if is_response_cut:
            counts.add("response truncated", record.origin)
    if pair.chosen_ids == pair.rejected_ids:
        counts.add("chosen and rejected have the same tokens", record.origin)
        return None
    return pair


def _truncated_pair(pair: PairRow, limit: int, bos_id: int | None) -> tuple[PairRow, bool]:
    """Shorten the prompt, then the responses, to `limit` tokens per side; also returns True if a response was cut."""
    old = pair.prompt_length
    longest_response = max(len(pair.chosen_ids), len(pair.rejected_ids)) - old
    new = min(old, max(limit - longest_response, int(limit * MIN_PROMPT_SHARE), 1))
    prompt = _without_start(pair.chosen_ids[:old], new, bos_id)
    chosen, rejected = ((prompt + ids[old:])[:limit] for ids in (pair.chosen_ids, pair.rejected_ids))
    shorter = replace(pair, chosen_ids=chosen, rejected_ids=rejected, prompt_length=new)
    return shorter, longest_response > limit - new


def _fitted_prompt(record: Record, encoder: _Encoder, options: TokenizationOptions) -> list[int] | None:
    ids, limit = encoder.prompt(record), options.max_prompt_seq_len
    if ids is None or len(ids) <= limit:
        return ids
    if options.long_prompts == "drop":
        encoder.counts.add("prompt longer than max_prompt_seq_len", record.origin)
        return None
    encoder.counts.add("prompt truncated", record.origin)
    return _without_start(ids, limit, encoder.tokenizer.bos_token_id)


def _without_start(ids: list[int], num_kept: int, bos_id: int | None) -> list[int]:
    """Return the last `num_kept` ids; a BOS at the head is kept."""
    if ids[0] == bos_id and 1 < num_kept < len(ids):
        return [ids[0], *ids[len(ids) - num_kept + 1 :]]
    return ids[len(ids) - num_kept :]
