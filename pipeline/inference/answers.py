"""Answers of a causal language model: prompts' token ids in, token ids and text out, every sampling setting explicit.

For `rlhf chat` and `rlhf compare`, through transformers' own `generate`; rollouts of step 3 have a sampling loop of
their own. B prompts, P positions of the longest one, T new positions.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import transformers
from transformers import GenerationConfig, PreTrainedModel, PreTrainedTokenizerBase
from transformers.generation.streamers import BaseStreamer

from pipeline.data.templates import encode_prompt, set_template
from pipeline.data.turns import Turns
from pipeline.errors import InputError
from pipeline.inference.answer_settings import AnswerSettings, ReplySettings
from pipeline.models.loading import (
    DTYPES,
    adapter_base,
    check_model,
    check_vocabulary,
    default_device,
    default_dtype,
    load_causal_lm,
    load_config,
    num_positions,
)
from pipeline.models.tokenizers import choose_padding_token, eos_ids, load_tokenizer
from pipeline.tensor_ops import pad_rows


@dataclass(frozen=True, slots=True)
class ChatModel:
    """A model that answers, with its own tokenizer, padding id and the ids that end an answer."""

    path: str
    model: PreTrainedModel
    tokenizer: PreTrainedTokenizerBase
    pad_id: int
    end_ids: frozenset[int]

    @property
    def num_positions(self) -> int | None:
        """How many tokens prompt and answer may have together; None where the architecture has no limit (BLOOM)."""
        return num_positions(self.model.config)

    @property
    def num_embeddings(self) -> int:
        """Rows of the vocabulary in the model; with padding there are more of them than the tokenizer has tokens."""
        embeddings: Any = self.model.get_input_embeddings()
        return int(embeddings.weight.shape[0])


@dataclass(frozen=True, slots=True)
class Answer:
    """One answer. ids: as sampled, with the end token if there is one; finished: the model ended it itself."""

    ids: tuple[int, ...]
    text: str
    finished: bool


def resolve_dtype(name: str) -> torch.dtype:
    return default_dtype(default_device()) if name == "auto" else DTYPES[name]


def load_chat_model(path: str, *, dtype: torch.dtype) -> ChatModel:
    """Load a model (hub id, folder or adapter folder) onto the default device, with its tokenizer.

    The chat template is the tokenizer's, which our training saved there; a tokenizer without one gets Human/Assistant.
    """
    transformers.logging.set_verbosity_error()
    transformers.logging.disable_progress_bar()
    path = str(Path(path).expanduser()) if path.startswith("~") else path
    tokenizer = load_chat_tokenizer(path)
    model = load_causal_lm(path, dtype=dtype).to(default_device()).eval()  # type: ignore[arg-type]
    end_ids = eos_ids(tokenizer, model.generation_config)
    # generate() fills every setting that is not given from here: models come with temperatures and top_k of their own.
    model.generation_config = GenerationConfig()
    return ChatModel(path, model, tokenizer, choose_padding_token(tokenizer).pad_id, end_ids)


def load_chat_tokenizer(path: str) -> PreTrainedTokenizerBase:
    """The tokenizer of the model at `path` with its template, both found to fit together. No weight is read."""
    check_model(path)
    tokenizer = load_tokenizer(tokenizer_path(path))
    check_vocabulary(path, tokenizer)
    set_template(tokenizer, "auto")
    return tokenizer


def check_prompts(path: str, prompts: Sequence[Turns], max_new_tokens: int) -> None:
    """Raise InputError where the model at `path` cannot be given one of the prompts. No weight is read."""
    tokenizer = load_chat_tokenizer(path)
    config = load_config(path)
    for turns in prompts:
        ids = encode_prompt(tokenizer, turns)
        check_ids(path, ids, max_new_tokens, num_positions=num_positions(config), num_embeddings=None)


def tokenizer_path(path: str) -> str:
    """Where a model's tokenizer is: an adapter without one lies in its merged model's folder, or takes its base's."""
    base = adapter_base(path)
    if base is None:
        return path
    folders = (Path(path), Path(path).parent)
    return next((str(folder) for folder in folders if (folder / "tokenizer_config.json").is_file()), base)


@torch.inference_mode()
def generate_answers(
    chat_model: ChatModel,
    prompts: Sequence[Sequence[int]],
    settings: ReplySettings,
    *,
    seed: int,
    streamer: "AnswerStreamer | None" = None,
) -> list[list[Answer]]:
    """Answers to each prompt, num_return_sequences of them (1 for ReplySettings).

    The global generators are left as they were. Sampled answers are a function of the seed and the prompts of this
    call together; greedy ones, up to rounding, of their prompt alone.

    Args:
        streamer: gets the tokens of a single prompt's single answer while they are made.

    Raises:
        InputError: a prompt with ids that the model does not have, or too long for its positions.
    """
    for prompt in prompts:
        check_prompt(chat_model, prompt, settings.max_new_tokens)
    device = chat_model.model.device
    rows = [torch.tensor(prompt, dtype=torch.int64) for prompt in prompts]
    input_ids = pad_rows(rows, chat_model.pad_id, side="left").to(device)  # (B, P)
    mask = pad_rows([torch.ones_like(row) for row in rows], 0, side="left").to(device)  # (B, P)
    with torch.random.fork_rng([device] if device.type == "cuda" else []):
        torch.manual_seed(seed)
        sequences = chat_model.model.generate(  # type: ignore[operator]
            input_ids, attention_mask=mask, generation_config=generation_config(chat_model, settings), streamer=streamer
        )
    responses = [finished_answer(chat_model, ids) for ids in sequences[:, input_ids.shape[1] :].tolist()]  # (B * N, T)
    each = len(responses) // len(prompts)
    return [responses[start : start + each] for start in range(0, len(responses), each)]


def check_prompt(chat_model: ChatModel, prompt: Sequence[int], max_new_tokens: int) -> None:
    """Raise InputError for a prompt that this model cannot be given."""
    rooms = {"num_positions": chat_model.num_positions, "num_embeddings": chat_model.num_embeddings}
    check_ids(chat_model.path, prompt, max_new_tokens, **rooms)


def check_ids(
    path: str, prompt: Sequence[int], max_new_tokens: int, *, num_positions: int | None, num_embeddings: int | None
) -> None:
    """Raise InputError for prompt ids that a model of these sizes (None: not known, or no limit) cannot be given."""
    if not prompt:
        raise InputError(f"{path}: its template turns this prompt into no token at all")
    if num_embeddings is not None and max(prompt) >= num_embeddings:
        raise InputError(
            f"{path}: its tokenizer gives id {max(prompt)}, but the model's vocabulary has "
            f"{num_embeddings} entries: tokenizer and model do not belong together"
        )
    room = num_positions
    if room is not None and len(prompt) + max_new_tokens > room:
        raise InputError(
            f"{path}: a prompt of {len(prompt)} tokens and --max_new_tokens {max_new_tokens} do not fit into "
            f"the model's {room} positions; at most {max(room - len(prompt), 0)} new tokens are left for it"
        )


def generation_config(chat_model: ChatModel, settings: ReplySettings) -> GenerationConfig:
    """Every setting that changes what is generated; at temperature 0 the most likely token each time."""
    is_sampled = settings.temperature > 0
    how = {"temperature": settings.temperature, "top_p": settings.top_p, "top_k": settings.top_k} if is_sampled else {}
    many = {}
    if isinstance(settings, AnswerSettings):
        many = {"num_beams": settings.num_beams, "num_return_sequences": settings.num_return_sequences}
    # Rows of a padded vocabulary stand for no token; their logits are whatever the padding left there.
    unused = list(range(max(chat_model.tokenizer.get_vocab().values()) + 1, chat_model.num_embeddings))
    return GenerationConfig(
        do_sample=is_sampled,
        max_new_tokens=settings.max_new_tokens,
        repetition_penalty=settings.repetition_penalty,
        pad_token_id=chat_model.pad_id,
        eos_token_id=sorted(chat_model.end_ids),
        suppress_tokens=unused or None,
        **how,
        **many,
    )


def finished_answer(chat_model: ChatModel, ids: Sequence[int]) -> Answer:
    """The answer in a row of new ids (T,): up to its first end token, without the padding behind it."""
    end = next((position for position, token in enumerate(ids) if token in chat_model.end_ids), None)
    kept = tuple(ids if end is None else ids[: end + 1])
    return Answer(kept, decode(chat_model.tokenizer, ids[:end]).strip(), finished=end is not None)


def decode(tokenizer: PreTrainedTokenizerBase, ids: Sequence[int]) -> str:
    return str(tokenizer.decode(list(ids), skip_special_tokens=True, clean_up_tokenization_spaces=False))


class AnswerStreamer(BaseStreamer):
    """Hands on the text of one answer piece by piece, each as soon as its characters are complete.

    A token may hold a part of a character only, and a decoder may treat the first token apart: so what is decoded
    is a short window of tokens, and what is handed on is its growth.
    """

    def __init__(self, chat_model: ChatModel, emit: Callable[[str], None]) -> None:
        self.ids: list[int] = []  # without the end token
        self.finished = False
        self._chat_model = chat_model
        self._emit = emit
        self._window = 0  # where the decoded window starts
        self._shown = 0  # tokens whose text was handed on
        self._has_prompt = False

    def put(self, value: torch.Tensor) -> None:
        """Take the next token (1,). The first call of `generate` brings the prompt instead."""
        if not self._has_prompt:
            self._has_prompt = True
            return
        token = int(value.item())
        self.finished = self.finished or token in self._chat_model.end_ids
        if not self.finished:
            self.ids.append(token)
            self._hand_on(may_wait=True)

    def end(self) -> None:
        """Hand on what still waited for the rest of a character."""
        self._hand_on(may_wait=False)

    def _hand_on(self, *, may_wait: bool) -> None:
        before = decode(self._chat_model.tokenizer, self.ids[self._window : self._shown])
        text = decode(self._chat_model.tokenizer, self.ids[self._window :])
        if len(text) <= len(before) or (may_wait and text.endswith("\ufffd")):
            return
        self._emit(text[len(before) :])
        self._window, self._shown = self._shown, len(self.ids)
