"""Score answers, given as text, by a reward model, whichever model generated them.

Each answer is encoded with the reward model's own tokenizer and template, as in its training. B rows, S tokens. Scoring
of PPO's responses, which are token ids, is in `step3_ppo`.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from transformers import PreTrainedTokenizerBase

from pipeline.data.templates import encode_conversation, set_template
from pipeline.data.turns import Message, Turns
from pipeline.models.loading import check_model, check_vocabulary, default_device, num_positions
from pipeline.models.reward_model import TokenValueModel, last_token_scores, load_reward_model
from pipeline.models.tokenizers import choose_padding_token, load_tokenizer
from pipeline.tensor_ops import lengths_to_mask, pad_rows


@dataclass(frozen=True, slots=True)
class Judge:
    """A reward model with its tokenizer."""

    model: TokenValueModel
    tokenizer: PreTrainedTokenizerBase
    pad_id: int

    @property
    def num_positions(self) -> int | None:
        return num_positions(self.model.config)


def load_judge(path: str, *, dtype: torch.dtype) -> Judge:
    """Load a reward model onto the default device. Raises InputError if `path` contains none."""
    check_model(path, "--reward_model")
    tokenizer = load_tokenizer(path)
    check_vocabulary(path, tokenizer)
    set_template(tokenizer, "auto")
    model = load_reward_model(path, dtype=dtype).to(default_device()).eval()
    return Judge(model, tokenizer, choose_padding_token(tokenizer).pad_id)


def encode_answer(judge: Judge, prompt: Turns, text: str, *, finished: bool) -> list[int]:
    """Encode prompt and answer for the reward model, with an end token only for a finished answer.

    Ids beyond the model's positions are cut off on the left, as in training: the answer's end is scored.
    """
    ids = encode_conversation(judge.tokenizer, [*prompt, Message("assistant", text)], "last").ids
    ids = ids if finished else ids[:-1]
    return ids[-judge.num_positions :] if judge.num_positions is not None else ids


@torch.inference_mode()
def score_rows(judge: Judge, rows: Sequence[Sequence[int]], *, batch_size: int) -> list[float]:
    """Return the raw score of each row of ids, read at its last token."""
    device = default_device()
    scores: list[float] = []
    for start in range(0, len(rows), batch_size):
        batch = [torch.tensor(row, dtype=torch.int64) for row in rows[start : start + batch_size]]
        lengths = torch.tensor([len(row) for row in batch]).to(device)  # (B,)
        input_ids = pad_rows(batch, judge.pad_id).to(device)  # (B, S)
        values = judge.model(input_ids, lengths_to_mask(lengths, input_ids.shape[1]))  # (B, S)
        scores += last_token_scores(values, lengths).tolist()
    return scores
