"""Generate answers of a language model with every sampling setting explicit, and score answers given as text.

For `rlhf chat` and `rlhf compare`, through transformers' `generate`; PPO's rollouts are sampled by
`pipeline.generation` and scored in `step3_ppo`. B prompts or rows, P positions of the longest prompt, T new positions,
S tokens of a scored row.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import torch
import transformers
from transformers import GenerationConfig, PreTrainedModel, PreTrainedTokenizerBase
from transformers.generation.streamers import BaseStreamer

from pipeline.data.templates import encode_conversation, encode_prompt, set_template
from pipeline.data.turns import Message, Turns
from pipeline.errors import InputError
from pipeline.inference.answer_settings import ReplySettings
from pipeline.models.loaded import on_devices
from pipeline.models.loading import DTYPES, default_device, default_dtype, load_language_model
from pipeline.models.partitions import whole_shape
from pipeline.models.reward_model import TokenValueModel, last_token_scores, load_reward_model
from pipeline.models.source import ModelSource, check_vocabulary, num_positions
from pipeline.models.tokenizers import choose_padding_token, eos_ids, load_tokenizer, num_token_ids
from pipeline.tensor_ops import lengths_to_mask, pad_rows


@dataclass(frozen=True, slots=True)
class ChatModel:
    """A language model that answers prompts.

    path: folder or hub id of the model.
    model: the model.
    tokenizer: its tokenizer.
    pad_id: id of the padding token.
    end_ids: ids that end an answer.
    """

    path: str
    model: PreTrainedModel
    tokenizer: PreTrainedTokenizerBase
    pad_id: int
    end_ids: frozenset[int]

    @property
    def num_positions(self) -> int | None:
        """The number of tokens that prompt and answer may have together; None if there is no limit (BLOOM)."""
        return num_positions(self.model.config)

    @property
    def num_embeddings(self) -> int:
        """The number of rows of the embedding, which a padded vocabulary makes larger than the tokenizer's."""
        embeddings: Any = self.model.get_input_embeddings()
        return whole_shape(embeddings.weight)[0]


@dataclass(frozen=True, slots=True)
class Answer:
    """An answer. ids: as sampled, with the end token if there is one; finished: True if the model ended it."""

    ids: tuple[int, ...]
    text: str
    finished: bool


def resolve_dtype(name: str) -> torch.dtype:
    return default_dtype(default_device()) if name == "auto" else DTYPES[name]


def load_chat_model(path: str, *, dtype: torch.dtype) -> ChatModel:
    """Load a model (hub id, folder or adapter folder) onto the devices that hold it, with its tokenizer.

    The chat template is the one that training saved with the tokenizer; a tokenizer without one gets Human/Assistant.
    """
    transformers.logging.set_verbosity_error()
    transformers.logging.disable_progress_bar()
    path = str(Path(path).expanduser()) if path.startswith("~") else path
    source = ModelSource(path)
    tokenizer = load_chat_tokenizer(source)
    model = on_devices(load_language_model(source, dtype=dtype), path)
    loaded = as_chat_model(path, model, tokenizer)
    # generate() takes settings that are not passed from here: published models set temperatures and top_k of their own.
    model.generation_config = GenerationConfig()
    return loaded


def as_chat_model(path: str, model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase) -> ChatModel:
    """Return a model that ends its answers at each id that its tokenizer, template or generation_config names."""
    end_ids = eos_ids(tokenizer, model.generation_config)
    return ChatModel(path, model, tokenizer, choose_padding_token(tokenizer).pad_id, end_ids)


def load_chat_tokenizer(source: ModelSource) -> PreTrainedTokenizerBase:
    """Load the tokenizer of a model with its template, and check that they fit. Reads no weight."""
    source.check()
    path, base = source.path, source.base
    # An adapter without a tokenizer uses its merged model's, else its base's.
    folders = (folder for folder in (Path(path), Path(path).parent) if (folder / "tokenizer_config.json").is_file())
    tokenizer = load_tokenizer(path if base is None else str(next(folders, base.path)))
    set_template(tokenizer, "auto", plain=source.is_encoder_decoder)
    check_vocabulary(source, tokenizer)
    return tokenizer


def check_prompts(path: str, prompts: Sequence[Turns], max_new_tokens: int) -> None:
    """Raise InputError if one of the prompts does not fit into the model at `path`. Reads no weight."""
    source = ModelSource(path)
    tokenizer, positions = load_chat_tokenizer(source), num_positions(source.config)
    for turns in prompts:
        ids = encode_prompt(tokenizer, turns)
        check_ids(path, ids, max_new_tokens, num_positions=positions, num_embeddings=None)


@torch.no_grad()  # not inference mode: its tensors could not be trained on afterwards
def generate_answers(
    chat_model: ChatModel,
    prompts: Sequence[Sequence[int]],
    settings: ReplySettings,
    *,
    seed: int,
    streamer: "AnswerStreamer | None" = None,
    lockstep: bool = False,
) -> list[list[Answer]]:
    """Return num_return_sequences answers (1 for ReplySettings) to each prompt.

    The global random generators are left unchanged. Sampled answers are a function of the seed and all prompts of this
    call; greedy ones, up to rounding, only of their prompt.

    Args:
        streamer: receives the tokens of a single prompt's single answer as they are generated.
        lockstep: ranks go on until the last of them has finished, because ZeRO-3 gathers weights in each pass.

    Raises:
        InputError: a prompt has ids that the model does not have, or is too long for its positions.
    """
    sizes = {"num_positions": chat_model.num_positions, "num_embeddings": chat_model.num_embeddings}
    for prompt in prompts:
        check_ids(chat_model.path, prompt, settings.max_new_tokens, **sizes)
    device = chat_model.model.device
    rows = [torch.tensor(prompt, dtype=torch.int64) for prompt in prompts]
    seq2seq = chat_model.model.config.is_encoder_decoder
    side: Literal["left", "right"] = "right" if seq2seq else "left"
    input_ids = pad_rows(rows, chat_model.pad_id, side=side).to(device)  # (B, P)
    mask = pad_rows([torch.ones_like(row) for row in rows], 0, side=side).to(device)  # (B, P)
    with torch.random.fork_rng([device] if device.type == "cuda" else []):
        torch.manual_seed(seed)
        sequences = chat_model.model.generate(  # type: ignore[operator]
            input_ids,
            attention_mask=mask,
            generation_config=generation_config(chat_model, settings),
            streamer=streamer,
            synced_gpus=lockstep,
        )
    num_known = 1 if seq2seq else input_ids.shape[1]  # a decoder of its own begins with its start token
    responses = [finished_answer(chat_model, ids) for ids in sequences[:, num_known:].tolist()]  # (B * N, T)
    each = len(responses) // len(prompts)
    return [responses[start : start + each] for start in range(0, len(responses), each)]


def check_ids(
    path: str, prompt: Sequence[int], max_new_tokens: int, *, num_positions: int | None, num_embeddings: int | None
) -> None:
    """Raise InputError for prompt ids that do not fit into a model of these sizes (None: unknown, or no limit)."""
    if not prompt:
        raise InputError(f"{path}: its template turns this prompt into no token at all")
    if num_embeddings is not None and max(prompt) >= num_embeddings:
        raise InputError(
            f"{path}: its tokenizer gives id {max(prompt)}, but the model's vocabulary has "
            f"{num_embeddings} entries: tokenizer and model do not belong together"
        )
    if num_positions is not None and len(prompt) + max_new_tokens > num_positions:
        raise InputError(
            f"{path}: a prompt of {len(prompt)} tokens and --max_new_tokens {max_new_tokens} do not fit into "
            f"the model's {num_positions} positions; at most {max(num_positions - len(prompt), 0)} new tokens are left"
        )


def generation_config(chat_model: ChatModel, settings: ReplySettings) -> GenerationConfig:
    """Build the settings of `generate`, all explicit; temperature 0 is greedy decoding."""
    passed = settings.model_dump(include={"max_new_tokens", "repetition_penalty", "num_beams", "num_return_sequences"})
    if settings.temperature > 0:
        passed |= settings.model_dump(include={"temperature", "top_p", "top_k"})
    # Rows that pad a vocabulary belong to no token, and their logits are arbitrary.
    unused = list(range(num_token_ids(chat_model.tokenizer), chat_model.num_embeddings))
    return GenerationConfig(
        do_sample=settings.temperature > 0,
        pad_token_id=chat_model.pad_id,
        eos_token_id=sorted(chat_model.end_ids),
        suppress_tokens=unused or None,
        decoder_start_token_id=getattr(chat_model.model.config, "decoder_start_token_id", None),
        **passed,
    )


def finished_answer(chat_model: ChatModel, ids: Sequence[int]) -> Answer:
    """Cut an answer out of a row of new ids (T,): up to its first end token, without padding."""
    end = next((position for position, token in enumerate(ids) if token in chat_model.end_ids), None)
    kept = tuple(ids if end is None else ids[: end + 1])
    return Answer(kept, decode(chat_model.tokenizer, ids[:end]).strip(), finished=end is not None)


def decode(tokenizer: PreTrainedTokenizerBase, ids: Sequence[int]) -> str:
    return str(tokenizer.decode(list(ids), skip_special_tokens=True, clean_up_tokenization_spaces=False))


class AnswerStreamer(BaseStreamer):
    """A streamer that emits the text of one answer piece by piece, each as soon as its characters are complete.

    A token may be only a part of a character, and decoders may treat a first token specially. So a short window of
    tokens is decoded, and the growth of its text is emitted.
    """

    def __init__(self, chat_model: ChatModel, emit: Callable[[str], None]) -> None:
        self.ids: list[int] = []  # without the end token
        self.finished = False
        self._chat_model = chat_model
        self._emit = emit
        self._window = 0  # first token of the decoded window
        self._emitted = 0  # tokens whose text was emitted
        self._has_prompt = False

    def put(self, value: torch.Tensor) -> None:
        """Take the next token (1,), or the prompt in the first call by `generate`."""
        if not self._has_prompt:
            self._has_prompt = True
            return
        token = int(value.item())
        self.finished = self.finished or token in self._chat_model.end_ids
        if not self.finished:
            self.ids.append(token)
            self._emit_growth(may_wait=True)

    def end(self) -> None:
        """Emit the tokens that still waited for the rest of a character."""
        self._emit_growth(may_wait=False)

    def _emit_growth(self, *, may_wait: bool) -> None:
        before = decode(self._chat_model.tokenizer, self.ids[self._window : self._emitted])
        text = decode(self._chat_model.tokenizer, self.ids[self._window :])
        if len(text) <= len(before) or (may_wait and text.endswith("\ufffd")):
            return
        self._emit(text[len(before) :])
        self._window, self._emitted = self._emitted, len(self.ids)


@dataclass(frozen=True, slots=True)
class Judge:
    """A reward model with its tokenizer."""

    model: TokenValueModel
    tokenizer: PreTrainedTokenizerBase
    pad_id: int


def load_judge(path: str, *, dtype: torch.dtype) -> Judge:
    """Load a reward model onto the devices that hold it. Raises InputError if `path` contains none."""
    source = ModelSource(path)
    source.check("--reward_model")
    tokenizer = load_chat_tokenizer(source)
    model = on_devices(load_reward_model(source, dtype=dtype), path)
    return Judge(model, tokenizer, choose_padding_token(tokenizer).pad_id)


def encode_answer(judge: Judge, prompt: Turns, text: str, *, finished: bool) -> list[int]:
    """Encode prompt and answer for the reward model, with an end token only for a finished answer.

    Ids beyond the model's positions are cut off on the left, as in training: the answer's end is scored.
    """
    ids = encode_conversation(judge.tokenizer, [*prompt, Message("assistant", text)], "last").ids
    ids = ids if finished else ids[:-1]
    return ids[-(num_positions(judge.model.config) or len(ids)) :]


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
