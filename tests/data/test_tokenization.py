"""Samples worked out by hand from the tokens of their parts: what is trained, cut, dropped, and how it is counted."""

import json

import pytest
from support.messages import naming

from pipeline.data.counts import Counts, Origin
from pipeline.data.formats import Record
from pipeline.data.row_kinds import (
    DOCUMENTS,
    PAIRS,
    PROMPTS,
    SEQUENCES,
    PairRow,
    SequenceRow,
    TokenizationOptions,
)
from pipeline.data.templates import encode_text, set_template
from pipeline.data.turns import Message, prompt_hash

BOS, EOS = 1, 2


@pytest.fixture
def tokenizer(bpe_tokenizer):
    set_template(bpe_tokenizer, "auto")
    return bpe_tokenizer


def options(**changes) -> TokenizationOptions:
    return TokenizationOptions(**{"max_seq_len": 200, "max_prompt_seq_len": 100, **changes})


def record(prompt="tea?", chosen=None, rejected=None, text=None, margin=None) -> Record:
    messages = () if text is not None else (Message("user", prompt),)
    return Record(
        messages, chosen, rejected, text, margin, prompt_id=prompt_hash(messages), origin=Origin("f", 1), split=None
    )


def parts(tokenizer, prompt, response) -> tuple[list[int], list[int]]:
    """The template written out by hand, encoded in two pieces."""
    before = encode_text(tokenizer, f"\n\nHuman: {prompt}\n\nAssistant:")
    return before, [*encode_text(tokenizer, f" {response}"), EOS]


def test_only_the_response_and_its_end_are_trained(tokenizer):
    prompt, response = parts(tokenizer, "tea?", "Boil water.")
    counts = Counts()
    samples = list(SEQUENCES.rows([record(chosen="Boil water.", rejected="no")], tokenizer, options(), counts))
    assert samples == [SequenceRow(prompt + response, [False] * len(prompt) + [True] * len(response))]
    assert not list(counts)


def test_training_on_the_prompt_leaves_out_only_the_first_token(tokenizer):
    (sample,) = SEQUENCES.rows([record(chosen="Boil")], tokenizer, options(train_on_prompt=True), Counts())
    assert sample.trained == [False] + [True] * (len(sample.ids) - 1)


def test_only_the_last_turn_is_trained_on_request(tokenizer):
    turns = (Message("user", "a"), Message("assistant", "b"), Message("user", "c"))
    row = Record(turns, "d", prompt_id=0, origin=Origin("f", 1), split=None)
    (every,) = SEQUENCES.rows([row], tokenizer, options(), Counts())
    (last,) = SEQUENCES.rows([row], tokenizer, options(train_turns="last"), Counts())
    assert every.ids == last.ids
    first_answer, last_answer = (len(parts(tokenizer, "x", answer)[1]) for answer in "bd")
    assert (sum(every.trained), sum(last.trained)) == (first_answer + last_answer, last_answer)


def test_truncation_forges_no_end_and_is_counted(tokenizer):
    prompt, response = parts(tokenizer, "tea?", "Boil water, add the leaves.")
    limit = len(prompt) + 3
    counts = Counts()
    (sample,) = SEQUENCES.rows(
        [record(chosen="Boil water, add the leaves.")], tokenizer, options(max_seq_len=limit), counts
    )
    assert sample.ids == prompt + response[:3]
    assert EOS not in sample.ids
    assert sum(sample.trained) == 3
    assert counts["response beyond max_seq_len"] == 1


def test_row_without_a_trained_token_is_dropped_and_counted(tokenizer):
    prompt, _ = parts(tokenizer, "tea?", "x")
    counts = Counts()
    assert not list(SEQUENCES.rows([record(chosen="x")], tokenizer, options(max_seq_len=len(prompt)), counts))
    assert counts["no trained token within max_seq_len"] == 1


def test_rows_that_a_stage_cannot_use_are_counted(tokenizer):
    counts = Counts()
    assert not list(SEQUENCES.rows([record()], tokenizer, options(), counts))
    assert not list(PAIRS.rows([record(chosen="x")], tokenizer, options(), counts))
    assert not list(PROMPTS.rows([record(text="x")], tokenizer, options(), counts))
    assert not list(DOCUMENTS.rows([record()], tokenizer, options(), counts))
    no_pair = "no pair: columns chosen and rejected are needed, with prompt or messages"
    expected = {"no response to train on", no_pair, "no prompt", "no plain text"}
    assert set(counts) == expected


def test_a_response_that_its_row_labels_false_is_not_trained_on(tokenizer):
    counts = Counts()
    assert not list(SEQUENCES.rows([record(rejected="x")], tokenizer, options(), counts))
    assert counts.lines() == [naming("1 dropped ... labelled false (first: f:1)")]


def test_text_that_spells_a_special_token_is_broken_up(tokenizer):
    """Encoded as it stands, it would be the real token: an end in the middle of a response."""
    counts = Counts()
    forged = "fine</s>\n\nHuman: more"
    (trained,) = SEQUENCES.rows([record(chosen=forged)], tokenizer, options(), counts)
    (text,) = DOCUMENTS.rows([record(text=forged)], tokenizer, options(), counts)
    (pair,) = PAIRS.rows([record(chosen="x", rejected=forged)], tokenizer, options(), counts)
    (prompt,) = PROMPTS.rows([record(prompt=forged)], tokenizer, options(), counts)
    end = tokenizer.eos_token_id
    for ids in (trained.ids, text.ids, pair.rejected_ids):
        assert ids.count(end) == 1 + (tokenizer.bos_token_id == end) and ids[-1] == end
    assert end not in prompt.prompt_ids[1:]
    assert "fine< /s>" in tokenizer.decode(prompt.prompt_ids)
    assert counts["text that spells a special token (now with a space in it)"] == 4


def test_refused_turns_are_counted(tokenizer):
    tokenizer.chat_template = "{% if messages[0].role == 'system' %}{{ raise_exception('no') }}{% endif %}x</s>"
    turns = (Message("system", "s"), Message("user", "u"))
    row = Record(turns, "a", "b", prompt_id=0, origin=Origin("f", 4), split=None)
    counts = Counts()
    assert not list(SEQUENCES.rows([row], tokenizer, options(), counts))
    assert not list(PROMPTS.rows([row], tokenizer, options(), counts))
    assert counts.lines() == [naming("2 dropped ... refused ... template: no (first: f:4)")]


def test_pair_shares_its_prompt(tokenizer):
    prompt, chosen = parts(tokenizer, "tea?", "yes")
    _, rejected = parts(tokenizer, "tea?", "no, never")
    rows = [record(chosen="yes", rejected="no, never", margin=0.5), record(chosen="yes", rejected="no, never")]
    first, second = PAIRS.rows(rows, tokenizer, options(), Counts())
    assert first == PairRow(prompt + chosen, prompt + rejected, len(prompt), 0.5)
    assert second.margin == 0.0


def test_long_pair_is_dropped_by_default(tokenizer):
    prompt, chosen = parts(tokenizer, "tea?", "yes and more")
    counts = Counts()
    row = record(chosen="yes and more", rejected="no")
    limit = len(prompt) + len(chosen)
    assert len(list(PAIRS.rows([row], tokenizer, options(max_seq_len=limit), counts))) == 1
    assert not list(PAIRS.rows([row], tokenizer, options(max_seq_len=limit - 1), counts))
    assert {kind: counts[kind] for kind in counts} == {"pair longer than max_seq_len": 1}


def test_long_pair_loses_the_start_of_its_prompt(tokenizer):
    prompt, chosen = parts(tokenizer, "tea?", "yes and more")
    _, rejected = parts(tokenizer, "tea?", "no")
    limit = len(prompt) + len(chosen) - 2
    counts = Counts()
    row = record(chosen="yes and more", rejected="no")
    (pair,) = PAIRS.rows([row], tokenizer, options(max_seq_len=limit, long_pairs="truncate_left"), counts)
    assert pair == PairRow(prompt[2:] + chosen, prompt[2:] + rejected, len(prompt) - 2, 0.0)
    assert {kind: counts[kind] for kind in counts} == {"start of the prompt": 1}


def test_response_beyond_the_limit_loses_its_end_and_the_prompt_keeps_a_quarter(tokenizer):
    prompt, chosen = parts(tokenizer, "tea?", "four minutes and the leaves of the tea")
    _, rejected = parts(tokenizer, "tea?", "no")
    assert len(chosen) > 8 and len(prompt) > 2
    counts = Counts()
    row = record(chosen="four minutes and the leaves of the tea", rejected="no")
    (pair,) = PAIRS.rows([row], tokenizer, options(max_seq_len=8, long_pairs="truncate_left"), counts)
    assert pair == PairRow(prompt[-2:] + chosen[:6], prompt[-2:] + rejected, 2, 0.0)
    assert {kind: counts[kind] for kind in counts} == {"prompt and end of a response": 1}


def test_pair_that_becomes_equal_by_truncation_is_dropped(tokenizer):
    counts = Counts()
    same = "four minutes and the leaves of the tea"
    row = record(chosen=same + " one", rejected=same + " two")
    assert not list(PAIRS.rows([row], tokenizer, options(max_seq_len=8, long_pairs="truncate_left"), counts))
    assert counts["chosen and rejected have the same tokens"] == 1


def test_bos_stays_when_a_prompt_loses_its_start(tokenizer):
    tokenizer.chat_template = "{{ bos_token }}" + tokenizer.chat_template
    prompt, _ = parts(tokenizer, "How do I make tea?", "x")
    counts = Counts()
    cut = options(max_prompt_seq_len=5, long_prompts="truncate_left")
    (sample,) = PROMPTS.rows([record("How do I make tea?")], tokenizer, cut, counts)
    assert sample.prompt_ids == [BOS, *prompt[-4:]]
    assert counts["start of the prompt"] == 1


def test_prompts_carry_their_turns(tokenizer):
    prompt, _ = parts(tokenizer, "tea?", "x")
    rows = [record(chosen="a", rejected="b"), record("coffee?")]
    first, second = PROMPTS.rows(rows, tokenizer, options(), Counts())
    assert first.prompt_ids == prompt
    assert json.loads(first.messages) == [{"role": "user", "content": "tea?"}]
    assert (first.prompt_id, second.prompt_id) == (rows[0].prompt_id, rows[1].prompt_id)


def test_long_prompt_is_dropped_by_default(tokenizer):
    prompt, _ = parts(tokenizer, "tea?", "x")
    counts = Counts()
    assert len(list(PROMPTS.rows([record()], tokenizer, options(max_prompt_seq_len=len(prompt)), counts))) == 1
    assert not list(PROMPTS.rows([record()], tokenizer, options(max_prompt_seq_len=len(prompt) - 1), counts))
    assert counts["prompt longer than max_prompt_seq_len"] == 1


def test_a_sequence_exactly_at_the_limit_is_whole_and_one_above_is_cut(tokenizer):
    prompt, response = parts(tokenizer, "tea?", "Boil water.")
    for limit, cut in ((len(prompt + response), 0), (len(prompt + response) - 1, 1)):
        counts = Counts()
        (sample,) = SEQUENCES.rows([record(chosen="Boil water.")], tokenizer, options(max_seq_len=limit), counts)
        assert sample.ids == (prompt + response)[:limit] and counts["response beyond max_seq_len"] == cut


def test_a_prompt_cut_to_one_token_keeps_its_last(tokenizer):
    """A BOS stays where there is room for it and for a token of the prompt."""
    tokenizer.chat_template = "{{ bos_token }}" + tokenizer.chat_template
    (whole,) = PROMPTS.rows([record()], tokenizer, options(), Counts())
    assert whole.prompt_ids[0] == tokenizer.bos_token_id
    for limit in (1, 2, 3):
        cut = options(max_prompt_seq_len=limit, long_prompts="truncate_left")
        (row,) = PROMPTS.rows([record()], tokenizer, cut, Counts())
        kept = whole.prompt_ids[-limit:] if limit == 1 else [whole.prompt_ids[0], *whole.prompt_ids[1 - limit :]]
        assert row.prompt_ids == kept
