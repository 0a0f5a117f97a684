"""Reward by a model with a scalar head: its score at a response's last token, before mean and std are applied.

The model scores the sequences' token ids. If its tokens or its chat template are not the actor's, it scores text, which
its own tokenizer encodes.
"""

import logging
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from transformers import PreTrainedTokenizerBase

from pipeline.data.templates import encode_conversation, set_template
from pipeline.data.turns import Message
from pipeline.models.reward_model import last_token_scores
from pipeline.models.source import ModelSource
from pipeline.models.tokenizers import same_tokens, set_template_values, template_values
from pipeline.rewards.rows import Scale, ScoredRows
from pipeline.tensor_ops import lengths_to_mask, pad_rows

log = logging.getLogger(__name__)


@dataclass(slots=True)
class RewardModel:
    """A reward by a model with a scalar head.

    name: what metrics and messages call it.
    weight: factor of its normalised score in the sum.
    scale: constants that normalise its scores.
    open: opens a context with the engine: a frozen one, or the critic's, which then computes raw scores as before its
        training: LoRA's adapter is switched off, or replaced by a copy of the adapter that training began with.
    tokenizer: the model's own tokenizer, if it scores text; None: it scores the token ids of the sequences.
    num_positions: maximum number of tokens of an encoded text, of which the last ones are scored; None: no maximum.
    reads_columns: False: scores do not depend on the data set's other columns (`ScoredRow.extra`).
    """

    name: str
    weight: float
    scale: Scale
    open: Callable[[], AbstractContextManager[Any]]
    tokenizer: PreTrainedTokenizerBase | None
    num_positions: int | None = None
    reads_columns = False

    def score(self, rows: ScoredRows) -> Tensor:
        """Return (n,) fp32 raw scores at each row's last real token; with `tokenizer`, rows are encoded from text."""
        with self.open() as model:
            if self.tokenizer is None:
                return last_token_scores(model(rows.sequences, rows.mask, **rows.settings), rows.mask.sum(1))
            texts = [(row.messages, row.response.strip(), row.finished) for row in rows]
            ids = [scored_ids(self.tokenizer, *text, num_positions=self.num_positions) for text in texts]
            return score_ids(model, ids, self.tokenizer, rows.sequences.device)


def score_ids(
    model: Callable[..., Tensor],
    rows: Sequence[Sequence[int]],
    tokenizer: PreTrainedTokenizerBase,
    device: torch.device,
) -> Tensor:
    """Return (n,) fp32 scores of n rows of ids, read at their last tokens."""
    sequences = pad_rows([torch.tensor(row, device=device) for row in rows], tokenizer.pad_token_id or 0)  # (n, S)
    lengths = torch.tensor([len(row) for row in rows], device=device)
    mask = lengths_to_mask(lengths, sequences.shape[1])
    return last_token_scores(model(sequences, mask, num_tokens=sum(map(len, rows)), right_padded=True), lengths)


def scored_ids(
    tokenizer: PreTrainedTokenizerBase,
    prompt: Sequence[Message],
    response: str,
    finished: bool,
    *,
    num_positions: int | None,
) -> list[int]:
    """Encode prompt and response for a reward model, with an end token only for a finished response.

    A response that a stop string has ended counts as finished and gets one too. Ids beyond the model's positions are
    truncated on the left, as in training, because the end of the response is scored.
    """
    ids = encode_conversation(tokenizer, [*prompt, Message("assistant", response)], "last").ids
    ids = ids if finished else ids[:-1]
    return ids[-(num_positions or len(ids)) :]


def separate_tokenizer(
    reward: ModelSource, tokenizer: PreTrainedTokenizerBase, template: str, kwargs: Sequence[str] = ()
) -> PreTrainedTokenizerBase | None:
    """Return the reward model's tokenizer if its tokens or chat template differ from those of the actor's, else None.

    The call first changes `reward.tokenizer`, as the arguments say.

    Args:
        tokenizer: the actor's tokenizer, with its chat template set.
        template: --template, which sets the chat template of a reward model that has none.
        kwargs: --chat-template-kwargs, set as defaults in the reward model's template; names that it does not read are
            ignored.
    """
    reward_tokenizer = reward.tokenizer
    if reward_tokenizer.chat_template is None:
        set_template(reward_tokenizer, template)
    set_template_values(reward_tokenizer, template_values(kwargs), all_of=False)
    same = same_tokens(tokenizer, reward_tokenizer) and tokenizer.chat_template == reward_tokenizer.chat_template
    if not same:
        log.info("the reward model reads responses from text: its tokenizer or its template is not the actor's")
    return None if same else reward_tokenizer
