"""The rows that rewards read: text and tokens of each response, by hand."""

import json
from contextlib import contextmanager

import torch
from transformers import PreTrainedTokenizerFast

from pipeline.data.templates import set_template
from pipeline.data.turns import Message
from pipeline.rewards.reward_model import RewardModel, scored_ids
from pipeline.rewards.rows import Scale, ScoredRows

PROMPTS = ("How?", "Where is it?")
RESPONSES = (" The fox", " Paris is here.")


def test_rows_have_the_text_and_the_tokens_of_their_response(tiny_folders):
    tokenizer = PreTrainedTokenizerFast.from_pretrained(tiny_folders["opt"])
    eos = tokenizer.eos_token_id
    starts = [tokenizer(text, add_special_tokens=False)["input_ids"] for text in PROMPTS]
    ends = [tokenizer(text, add_special_tokens=False)["input_ids"] for text in RESPONSES]
    ends[1] = [*ends[1], eos]
    width = max(len(start) + len(end) for start, end in zip(starts, ends, strict=True)) + 3
    sequences = torch.full((2, width), tokenizer.pad_token_id)
    for n, (start, end) in enumerate(zip(starts, ends, strict=True)):
        sequences[n, : len(start) + len(end)] = torch.tensor([*start, *end])
    looked_up: list[int] = []

    def row_of(n: int) -> dict[str, str]:
        looked_up.append(n)
        row = {"messages": json.dumps([{"role": "user", "content": PROMPTS[n]}])}
        return row | ({"extra": '{"answer": 4}'} if n else {})

    rows = ScoredRows(
        sequences, torch.tensor([len(row) for row in starts]), torch.tensor([len(row) for row in ends]),
        finished=torch.tensor([False, True]), settings={}, row_of=row_of, tokenizer=tokenizer,
    )  # fmt: skip
    assert rows.mask.sum(1).tolist() == [len(starts[n]) + len(ends[n]) for n in range(2)]
    assert looked_up == [], "nothing is looked up before a reward reads it"
    first, second = rows
    assert looked_up == [0, 1]
    assert [row.response for row in (first, second)] == list(RESPONSES), "special tokens are no text"
    assert first.messages == [Message("user", PROMPTS[0])] and [first.finished, second.finished] == [False, True]
    assert second.ids.tolist() == [*starts[1], *ends[1]]
    assert [first.extra, second.extra] == [{}, {"answer": 4}]


def test_a_reward_model_of_other_tokens_packs_its_own_tokens(bpe_tokenizer, tiny_folders):
    """Not as many as the policy's sequences have."""
    sequences, ones = torch.full((2, 7), 5), torch.ones(2, dtype=torch.int64)
    rows = ScoredRows(
        sequences, ones, torch.tensor([3, 6]), torch.tensor([False, True]), settings={"num_tokens": 11},
        row_of=lambda n: {"messages": json.dumps([{"role": "user", "content": PROMPTS[n]}])}, tokenizer=bpe_tokenizer,
    )  # fmt: skip
    tokenizer = PreTrainedTokenizerFast.from_pretrained(tiny_folders["opt"])
    set_template(tokenizer, "auto")
    seen: list[tuple[list[list[int]], int]] = []

    @contextmanager
    def opened():
        def model(ids, mask, *, num_tokens, right_padded):
            assert right_padded
            seen.append(([row[real].tolist() for row, real in zip(ids, mask, strict=True)], num_tokens))
            return ids.float()

        yield model

    scores = RewardModel("reward model", 1.0, Scale(0.0, 1.0), opened, tokenizer).score(rows)
    expected = [
        scored_ids(tokenizer, row.messages, row.response.strip(), row.finished, num_positions=None) for row in rows
    ]
    assert seen == [(expected, sum(map(len, expected)))] and len(expected[0]) != len(expected[1])
    assert scores.tolist() == [float(ids[-1]) for ids in expected]
