"""The way from prompts to answers: sessions of PPO's sampler, and transformers' `generate` for what that cannot do.

`rlhf chat`, `rlhf compare` and the evaluation of stage 1 call `generate_answers` for a batch of prompts; `rlhf sample`
and `rlhf reward` call `answers_as_they_end` for those of a data set (`answer_scores.py`). Every sampling setting is
explicit. B prompts, P positions of the longest prompt, T new positions.
"""

import sys
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import cache
from itertools import takewhile
from pathlib import Path
from typing import Any, Literal

import torch
import transformers
from transformers import GenerationConfig, PreTrainedModel, PreTrainedTokenizerBase
from transformers.generation.stopping_criteria import StoppingCriteria, StoppingCriteriaList
from transformers.generation.streamers import BaseStreamer

from pipeline.data.templates import encode_prompt, set_template
from pipeline.data.turns import Turns
from pipeline.errors import InputError
from pipeline.generation.eager import EagerGenerator
from pipeline.generation.rollouts import Prompt, RandomKey, Sampling, Vocabulary
from pipeline.generation.session import Capacity, Finished, Reason, SessionSource, stopped_length
from pipeline.generation.sources import session_source
from pipeline.inference.answer_rows import Answer
from pipeline.inference.answer_settings import DrawSettings, ReplySettings
from pipeline.models.loaded import on_devices, sharing_weights
from pipeline.models.loading import DTYPES, base_model, default_device, default_dtype, load_language_model
from pipeline.models.partitions import whole_shape
from pipeline.models.source import ModelSource, check_vocabulary, has_key_value_cache, num_positions
from pipeline.models.tokenizers import load_tokenizer
from pipeline.tensor_ops import pad_rows, round_up

# Granularity of the positions for a prompt and its answers. Chosen by hand.
ROOM_MULTIPLE = 1024


@dataclass(frozen=True, slots=True)
class ChatModel:
    """A language model that answers prompts.

    path: folder or hub id of the model.
    model: the model.
    tokenizer: its tokenizer.
    vocabulary: ids that end an answer or pad it, and ids that can be drawn.
    sessions: returns the source of its generation sessions, the same one each time.
    """

    path: str
    model: PreTrainedModel
    tokenizer: PreTrainedTokenizerBase
    vocabulary: Vocabulary
    sessions: Callable[[], SessionSource]

    @property
    def num_positions(self) -> int | None:
        """The number of tokens that prompt and answer may have together; None if there is no limit (BLOOM)."""
        return num_positions(self.model.config)

    @property
    def num_embeddings(self) -> int:
        """The number of rows of the embedding; in a padded vocabulary more than the tokenizer has ids."""
        embeddings: Any = self.model.get_input_embeddings()
        return whole_shape(embeddings.weight)[0]

    def answer(self, ids: Sequence[int], reason: Reason, log_prob: float | None = None) -> Answer:
        """Return the answer with these new ids, which has ended for this reason; its text is without an end token."""
        shown = ids[:-1] if ids[-1] in self.vocabulary.eos_ids else ids
        return Answer(decode(self.tokenizer, shown).strip(), tuple(ids), reason, log_prob)


def resolve_dtype(name: str) -> torch.dtype:
    return default_dtype(default_device()) if name == "auto" else DTYPES[name]


def load_chat_model(path: str, *, dtype: torch.dtype, base: PreTrainedModel | None = None) -> ChatModel:
    """Load a model (hub id, folder or adapter folder) onto the devices that it fits on, with its tokenizer.

    The chat template is the one that training saved with the tokenizer; a tokenizer without one gets Human/Assistant.

    Args:
        base: the model that it is, or the base of its adapter, whose weights it shares.
    """
    transformers.logging.set_verbosity_error()
    transformers.logging.disable_progress_bar()
    path = str(Path(path).expanduser()) if path.startswith("~") else path
    source = ModelSource(path)
    tokenizer = load_chat_tokenizer(source)
    model = sharing_weights(base, source) if base else on_devices(load_language_model(source, dtype=dtype), path)
    loaded = as_chat_model(path, model, tokenizer)
    # Published models set their own temperature and top_k, which `generate` would use for settings that are not passed.
    base_model(model).generation_config = GenerationConfig()
    return loaded


def as_chat_model(
    path: str,
    model: PreTrainedModel,
    tokenizer: PreTrainedTokenizerBase,
    copies_weights: bool = True,
) -> ChatModel:
    """Return a model that ends its answers at each id that its tokenizer, template or generation_config names.

    copies_weights: False: answers need no copy of the weights beside the model's own.
    """
    vocabulary = Vocabulary.of(tokenizer, model.generation_config)
    make_source = session_source if copies_weights else EagerGenerator
    return ChatModel(path, model, tokenizer, vocabulary, cache(lambda: make_source(model, vocabulary)))


def load_chat_tokenizer(source: ModelSource) -> PreTrainedTokenizerBase:
    """Load the tokenizer of a model with its template, and check that they fit the model. It reads no weight."""
    source.check()
    path, base = source.path, source.base
    # An adapter without a tokenizer uses its merged model's, else its base's.
    folders = (folder for folder in (Path(path), Path(path).parent) if (folder / "tokenizer_config.json").is_file())
    tokenizer = load_tokenizer(path if base is None else str(next(folders, base.path)))
    set_template(tokenizer, "auto", plain=source.is_encoder_decoder)
    check_vocabulary(source, tokenizer)
    return tokenizer


def check_prompts(path: str, prompts: Sequence[Turns], max_new_tokens: int, *, may_shorten: bool) -> int:
    """Return the number of new tokens that fit behind each prompt in the positions of the model. It reads no weight.

    This is `max_new_tokens`, or less with `may_shorten`. Raises InputError if they or a prompt do not fit.
    """
    source = ModelSource(path)
    tokenizer, positions = load_chat_tokenizer(source), num_positions(source.config)
    encoded = [encode_prompt(tokenizer, turns) for turns in prompts]
    if may_shorten and positions is not None:
        max_new_tokens = max(1, min(max_new_tokens, positions - max(map(len, encoded))))
    for ids in encoded:
        check_ids(path, ids, max_new_tokens, num_positions=positions, num_embeddings=None)
    return max_new_tokens


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

    Sampled answers depend only on the seed and their prompt, up to rounding; greedy ones only on the prompt. Sampled
    answers of transformers' `generate` (`only_transformers`) depend on all prompts of the call. The global random
    generators are unchanged.

    Args:
        streamer: receives the tokens as they are generated, for one answer to one prompt.
        lockstep: ranks continue until the last one has finished, because ZeRO-3 gathers weights in each pass.

    Raises:
        InputError: a prompt has ids that the model does not have, or is too long for its positions.
    """
    sizes = {"num_positions": chat_model.num_positions, "num_embeddings": chat_model.num_embeddings}
    for prompt in prompts:
        check_ids(chat_model.path, prompt, settings.max_new_tokens, **sizes)
    if lockstep or only_transformers(chat_model, settings):
        return answers_by_transformers(chat_model, prompts, settings, seed=seed, streamer=streamer, lockstep=lockstep)
    num_samples, num_new = getattr(settings, "num_return_sequences", 1), settings.max_new_tokens
    # Lengths are rounded up, so that a growing conversation mostly reuses its buffers.
    roomy = round_up(max(map(len, prompts)) + num_new, ROOM_MULTIPLE)
    capacity = Capacity(len(prompts) * num_samples, num_new, min(roomy, chat_model.num_positions or sys.maxsize))
    requests = [(Prompt.of(ids), RandomKey(seed, "answer")) for ids in prompts]
    parts = answers_as_they_end(chat_model, requests, settings, num_samples, capacity, streamer=streamer)
    answers = {index: each for part in parts for index, each in part.items()}
    if streamer is not None:
        streamer.end()
    if not all(answer.is_finite for each in answers.values() for answer in each):
        raise InputError(f"{chat_model.path}: its logits are not finite; give another --temperature or --dtype")
    return [answers[index] for index in range(len(prompts))]


def sampling_of(settings: DrawSettings) -> Sampling:
    """Return the settings as those of requests."""
    how = (settings.temperature, settings.top_p, settings.top_k)
    return Sampling(settings.max_new_tokens, *how, tuple(settings.stop_strings))


def answers_as_they_end(
    chat_model: ChatModel,
    requests: Iterable[tuple[Prompt, RandomKey]],
    settings: DrawSettings,
    num_samples: int,
    capacity: Capacity,
    *,
    streamer: "AnswerStreamer | None" = None,
) -> Iterator[dict[int, list[Answer]]]:
    """Yield, after each step of a session, the answers to the requests whose last answer has ended in it, by index.

    An answer depends only on its prompt, key and number, up to rounding.

    Args:
        requests: prompts with the keys of their random numbers, which are submitted as slots become free.
        num_samples: answers to each prompt.
        capacity: limits of the session, which the longest prompt fits.
        streamer: receives the tokens of a single answer as they are generated.
    """
    sampling = sampling_of(settings)
    session, rest = chat_model.sessions().session(capacity), iter(requests)
    answers = defaultdict[int, dict[int, Answer]](dict)
    while True:
        while len(session.waiting) < capacity.num_slots and (request := next(rest, None)):
            for n in range(num_samples):
                session.submit(request[0], sampling, request[1], sample=n, streams=streamer is not None)
        if session.is_idle:
            return
        ended = dict[int, list[Answer]]()
        for event in session.advance():
            if isinstance(event, Finished):
                index, log_prob = event.request.number // num_samples, event.log_probs.double().sum().item()
                answers[index][event.request.sample] = chat_model.answer(event.ids.tolist(), event.reason, log_prob)
                if len(answers[index]) == num_samples:
                    ended[index] = [answer for _, answer in sorted(answers.pop(index).items())]
            elif streamer is not None:
                streamer.take(event.ids)
        yield ended


def only_transformers(chat_model: ChatModel, settings: ReplySettings) -> bool:
    """Return True if only transformers' `generate` supports these settings or this model.

    It alone has beam search and repetition penalty, and supports encoder-decoder models and decoders without a cache of
    keys and values.
    """
    config, num_beams = chat_model.model.config, getattr(settings, "num_beams", 1)
    other = num_beams > 1 or settings.repetition_penalty != 1.0
    return other or config.is_encoder_decoder or not has_key_value_cache(config)


@torch.no_grad()  # not inference mode: its tensors could not be trained on afterwards
def answers_by_transformers(
    chat_model: ChatModel,
    prompts: Sequence[Sequence[int]],
    settings: ReplySettings,
    *,
    seed: int,
    streamer: "AnswerStreamer | None",
    lockstep: bool,
) -> list[list[Answer]]:
    """Return the answers to each prompt; see `generate_answers`."""
    device = chat_model.model.device
    rows = [torch.tensor(prompt, dtype=torch.int64) for prompt in prompts]
    seq2seq = chat_model.model.config.is_encoder_decoder
    side: Literal["left", "right"] = "right" if seq2seq else "left"
    input_ids = pad_rows(rows, chat_model.vocabulary.pad_id, side=side).to(device)  # (B, P)
    mask = pad_rows([torch.ones_like(row) for row in rows], 0, side=side).to(device)  # (B, P)
    num_known = 1 if seq2seq else input_ids.shape[1]  # the decoder begins with its start token
    stop = [StopStrings(settings.stop_strings, chat_model.vocabulary, num_known)] if settings.stop_strings else []
    try:
        with torch.random.fork_rng([device] if device.type == "cuda" else []):
            torch.manual_seed(seed)
            sequences = chat_model.model.generate(  # type: ignore[operator]
                input_ids,
                attention_mask=mask,
                generation_config=generation_config(chat_model, settings),
                stopping_criteria=StoppingCriteriaList(stop),
                streamer=streamer,
                synced_gpus=lockstep,
            )
    except RuntimeError as error:
        if "probability tensor" not in str(error):
            raise
        how = f"--temperature {settings.temperature:g} and --repetition-penalty {settings.repetition_penalty:g}"
        raise InputError(f"{chat_model.path}: its logits are not finite at {how}; give others") from error
    answers = [ended_answer(chat_model, ids, settings.stop_strings) for ids in sequences[:, num_known:].tolist()]
    num_each = len(answers) // len(prompts)
    return [answers[start : start + num_each] for start in range(0, len(answers), num_each)]


def ended_answer(chat_model: ChatModel, ids: Sequence[int], stop: Sequence[str]) -> Answer:
    """Return the answer in a row of new ids (T,): truncated at its first end token or stop string, without padding."""
    end = next((number for number, token in enumerate(ids, 1) if token in chat_model.vocabulary.eos_ids), None)
    stopped = stopped_length(stop, ids[: end and end - 1], chat_model.vocabulary)
    return chat_model.answer(ids[: stopped or end], "stop" if stopped else "end" if end else "limit")


def generation_config(chat_model: ChatModel, settings: ReplySettings) -> GenerationConfig:
    """Build the settings of `generate`, all explicit; temperature 0 is greedy decoding."""
    passed = settings.model_dump(include={"max_new_tokens", "repetition_penalty", "num_beams", "num_return_sequences"})
    if settings.temperature > 0:
        passed |= settings.model_dump(include={"temperature", "top_p", "top_k"})
    # Rows that only pad the vocabulary belong to no token; their logits are arbitrary.
    unused = list(range(chat_model.vocabulary.num_tokens or 0, chat_model.num_embeddings))
    return GenerationConfig(
        do_sample=settings.temperature > 0,
        pad_token_id=chat_model.vocabulary.pad_id,
        eos_token_id=sorted(chat_model.vocabulary.eos_ids),
        suppress_tokens=unused or None,
        decoder_start_token_id=getattr(chat_model.model.config, "decoder_start_token_id", None),
        **passed,
    )


class StopStrings(StoppingCriteria):
    """The end of rows whose new tokens contain a stop string; transformers' own criterion searches the prompt too.

    stop: the strings.
    vocabulary: how ids become text.
    num_known: tokens of a row before its first new one.
    """

    def __init__(self, stop: list[str], vocabulary: Vocabulary, num_known: int) -> None:
        self.stop, self.vocabulary, self.num_known = stop, vocabulary, num_known

    def __call__(self, input_ids: Any, scores: Any, **kwargs: Any) -> Any:
        """Return (B,) bool, True = the last token of the row's (B, S) ids completes a stop string."""
        new = input_ids[:, self.num_known :].tolist()
        lengths = [stopped_length(self.stop, ids, self.vocabulary, seen=len(ids) - 1) for ids in new]
        return torch.tensor([length is not None for length in lengths], device=input_ids.device)


def check_ids(
    path: str, prompt: Sequence[int], max_new_tokens: int, *, num_positions: int | None, num_embeddings: int | None
) -> None:
    """Raise InputError for prompt ids that do not fit a model of these sizes (None: unknown, or no limit)."""
    if not prompt:
        raise InputError(f"{path}: its template renders this prompt as no token")
    if num_embeddings is not None and max(prompt) >= num_embeddings:
        raise InputError(
            f"{path}: its tokenizer gives id {max(prompt)}, but the model's vocabulary has "
            f"{num_embeddings} entries: tokenizer and model do not belong together"
        )
    if num_positions is not None and len(prompt) + max_new_tokens > num_positions:
        raise InputError(
            f"{path}: a prompt of {len(prompt)} tokens and --max-new-tokens {max_new_tokens} do not fit into "
            f"the model's {num_positions} positions; at most {max(num_positions - len(prompt), 0)} new tokens are left"
        )


def decode(tokenizer: PreTrainedTokenizerBase, ids: Sequence[int]) -> str:
    return str(tokenizer.decode(list(ids), skip_special_tokens=True, clean_up_tokenization_spaces=False))


class AnswerStreamer(BaseStreamer):
    """A streamer that emits the text of one answer, without leading white space, as soon as characters are complete.

    A token may be a part of a character, and decoders may treat a first token specially. So a short window of tokens is
    decoded, and what its text gained is emitted.

    Args:
        context: the last tokens of a text that the answer continues, with the white space that it begins with.
    """

    def __init__(self, chat_model: ChatModel, emit: Callable[[str], None], context: Sequence[int] = ()) -> None:
        self.ids: list[int] = [*context]  # and those of the answer, without the end token
        self.finished = False
        self._has_text = bool(context)  # whether a piece was emitted
        self._chat_model = chat_model
        self._emit = emit
        self._window = 0  # first token of the decoded window
        self._emitted = len(context)  # tokens whose text was emitted
        self._has_prompt = False

    def put(self, value: torch.Tensor) -> None:
        """Read the next token (1,), or the prompt in the first call by `generate`."""
        if not self._has_prompt:
            self._has_prompt = True
            return
        self.take([int(value.item())])

    def take(self, ids: Sequence[int]) -> None:
        """Read the next tokens, and emit their text as one piece."""
        ends = self._chat_model.vocabulary.eos_ids
        before_end = [*takewhile(lambda token: token not in ends, () if self.finished else ids)]
        self.finished = self.finished or len(before_end) < len(ids)
        self.ids += before_end
        self._emit_growth(may_wait=True)

    def end(self) -> None:
        """Emit the tokens that still waited for the rest of a character."""
        self._emit_growth(may_wait=False)

    def _emit_growth(self, *, may_wait: bool) -> None:
        before = decode(self._chat_model.tokenizer, self.ids[self._window : self._emitted])
        text = decode(self._chat_model.tokenizer, self.ids[self._window :])
        if len(text) <= len(before) or (may_wait and text.endswith("\ufffd")):
            return
        piece = text[len(before) :]
        if piece := piece if self._has_text else piece.lstrip():
            self._has_text = True
            self._emit(piece)
        self._window, self._emitted = self._emitted, len(self.ids)
