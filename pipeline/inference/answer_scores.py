"""Score answers given as text with a reward model, for `rlhf chat`, `compare` and `sample`. B rows, S tokens."""

import math
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from transformers import PreTrainedTokenizerBase

from pipeline.data.turns import Turns
from pipeline.errors import InputError
from pipeline.inference.answers import load_chat_tokenizer
from pipeline.models.loaded import on_devices
from pipeline.models.loading import default_device
from pipeline.models.paths import last_part
from pipeline.models.reward_model import TokenValueModel, last_token_scores, load_reward_model, score_constants
from pipeline.models.source import ModelSource, num_positions
from pipeline.models.tokenizers import choose_padding_token
from pipeline.rewards.reward_model import scored_ids
from pipeline.tensor_ops import lengths_to_mask, pad_rows


@dataclass(frozen=True, slots=True)
class AnswerScorer:
    """A reward model with its tokenizer.

    path: folder or hub id of the model.
    model: the model, with raw scores.
    tokenizer: its own, with a chat template.
    pad_id: the id that pads its rows.
    weight: factor of its scores in the sum of several rewards.
    """

    path: str
    model: TokenValueModel
    tokenizer: PreTrainedTokenizerBase
    pad_id: int
    weight: float = 1.0

    @property
    def name(self) -> str:
        """The name of its scores."""
        return last_part(self.path)

    @property
    def deviation(self) -> float | None:
        """The standard deviation of its scores that stage 2 has measured."""
        constants = score_constants(self.model.config)
        return constants and constants[1]


def load_scorer(path: str, *, dtype: torch.dtype, weight: float = 1.0) -> AnswerScorer:
    """Load a reward model onto the devices that it fits on. Raises InputError if `path` contains none."""
    source = ModelSource(path)
    source.check("--reward-model")
    tokenizer = load_chat_tokenizer(source)
    model = on_devices(load_reward_model(source, dtype=dtype), path)
    return AnswerScorer(path, model, tokenizer, choose_padding_token(tokenizer).pad_id, weight)


def score_answers(scorer: AnswerScorer, answers: Sequence[tuple[Turns, str, bool]], *, batch_size: int) -> list[float]:
    """Return the raw scores of answers: each a prompt, a text, and whether the model ended it.

    Rows of like lengths are scored together.

    Raises:
        InputError: a score is not finite.
    """
    rows = [encode_answer(scorer, prompt, text, finished=finished) for prompt, text, finished in answers]
    order = sorted(range(len(rows)), key=lambda n: len(rows[n]))
    scores = score_rows(scorer, [rows[n] for n in order], batch_size=batch_size)
    if not all(map(math.isfinite, scores)):
        raise InputError(f"--reward-model: {scorer.path} gives scores that are not finite")
    return [score for _, score in sorted(zip(order, scores, strict=True))]


def encode_answer(scorer: AnswerScorer, prompt: Turns, text: str, *, finished: bool) -> list[int]:
    """Encode prompt and answer for the reward model, in the same way as responses of a rollout."""
    return scored_ids(scorer.tokenizer, prompt, text, finished, num_positions=num_positions(scorer.model.config))


@torch.inference_mode()
def score_rows(scorer: AnswerScorer, rows: Sequence[Sequence[int]], *, batch_size: int) -> list[float]:
    """Return the raw score of each row of ids, read at its last token."""
    device = default_device()
    scores: list[float] = []
    for start in range(0, len(rows), batch_size):
        batch = [torch.tensor(row, dtype=torch.int64) for row in rows[start : start + batch_size]]
        lengths = torch.tensor([len(row) for row in batch]).to(device)  # (B,)
        input_ids = pad_rows(batch, scorer.pad_id).to(device)  # (B, S)
        values = scorer.model(input_ids, lengths_to_mask(lengths, input_ids.shape[1]))  # (B, S)
        scores += last_token_scores(values, lengths).tolist()
    return scores
