"""The one way from prompts to scored answers, of `rlhf chat`, `compare`, `sample`, `reward` and evaluations.

    prompts            encoded by `data.templates`; those of a data set are read by `read_prompts`
    -> requests        one for each answer, with the settings and a random key (`answers.py:answers_as_they_end`)
    -> responses       of a session of PPO's rollouts (`pipeline.generation.session`), or of transformers' `generate`
    -> answers         text, ids and why it ended (`answers.py:ChatModel.answer`)
    -> scores          of reward functions in their workers (`pipeline.rewards.pool`), and of reward models
    -> scored answers  with the weighted sum of the scores (`answer_rows.py:Answer`)
    -> rows            of JSON lines (`answer_rows.py`) in a file that a later call completes (`rlhf sample`)

`scored_answers` goes the whole way for the prompts of a data set in one session: sample and reward call it. Chat,
compare and the evaluation of stage 1 answer a batch of prompts by `answers.py:generate_answers`, and compare scores the
answers by `score_answers`. Rollouts and evaluations of stage 3 use the same sessions, functions and scores on all ranks
(`step3_ppo/rollout.py`, `step3_ppo/scoring.py`).
"""

import hashlib
import json
import math
import sys
import time
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, field, replace
from itertools import chain
from typing import Any

import torch
from transformers import PreTrainedTokenizerBase

from pipeline.data.cache import load_or_build
from pipeline.data.counts import Counts
from pipeline.data.formats import read_records
from pipeline.data.readers import Split
from pipeline.data.row_kinds import RowMaker, TokenizationOptions
from pipeline.data.selection import evaluation_options, parse_column_map
from pipeline.data.sources import is_conversational, parse_path, read_rows
from pipeline.data.turns import Turns, prompt_hash
from pipeline.errors import InputError, say
from pipeline.generation.rollouts import Prompt, RandomKey
from pipeline.generation.session import Capacity
from pipeline.inference.answer_rows import Answer
from pipeline.inference.answer_settings import SampleSettings
from pipeline.inference.answers import ChatModel, answers_as_they_end, load_chat_tokenizer
from pipeline.models.loaded import on_devices
from pipeline.models.loading import default_device
from pipeline.models.paths import last_part
from pipeline.models.reward_model import TokenValueModel, load_reward_model, score_constants
from pipeline.models.source import ModelSource, has_key_value_cache, num_positions
from pipeline.rewards.pool import Responses, RewardPool, Value
from pipeline.rewards.reward_model import score_ids, scored_ids

PROGRESS_S = 10.0


@dataclass(frozen=True, slots=True)
class AnswerScorer:
    """A reward model with its tokenizer.

    path: folder or hub id of the model.
    model: the model, with raw scores.
    tokenizer: its own, with a chat template.
    weight: factor of its scores in the sum of several rewards.
    """

    path: str
    model: TokenValueModel
    tokenizer: PreTrainedTokenizerBase
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
    return AnswerScorer(path, on_devices(load_reward_model(source, dtype=dtype), path), tokenizer, weight)


@torch.inference_mode()
def score_answers(scorer: AnswerScorer, answers: Sequence[tuple[Turns, str, bool]], *, batch_size: int) -> list[float]:
    """Return the raw scores of answers: each a prompt, a text, and whether the model ended it.

    Rows of like lengths are scored together.

    Raises:
        InputError: a score is not finite.
    """
    model, tokenizer, positions = scorer.model, scorer.tokenizer, num_positions(scorer.model.config)
    rows = [scored_ids(tokenizer, *answer, num_positions=positions) for answer in answers]
    order, scores = sorted(range(len(rows)), key=lambda n: len(rows[n])), list[float]()
    for start in range(0, len(rows), batch_size):
        batch = [rows[n] for n in order[start : start + batch_size]]
        scores += score_ids(model, batch, tokenizer, default_device()).tolist()
    if not all(map(math.isfinite, scores)):
        raise InputError(f"--reward-model: {scorer.path} gives scores that are not finite")
    return [score for _, score in sorted(zip(order, scores, strict=True))]


@dataclass(frozen=True, slots=True)
class SamplePrompt:
    """A prompt of the data.

    number: number of the prompt, from 1.
    row: file and row number, in the form that logs and errors show.
    messages: its turns.
    tokens: its tokens; their hash keys its random numbers.
    copy: number of earlier prompts with the same tokens: each copy gets its own random numbers.
    columns: the row's other columns, as JSON.
    split: 'train' or 'test' if the source has splits.
    """

    number: int
    row: str
    messages: Turns
    tokens: Prompt
    copy: int
    columns: str
    split: Split | None = None


@dataclass(frozen=True, slots=True)
class PromptData:
    """The prompts of files.

    prompts: the usable prompts, in order.
    columns: names of the columns for reward functions.
    is_conversation: functions get lists of messages, because a source has some.
    """

    prompts: list[SamplePrompt]
    columns: set[str]
    is_conversation: bool

    @property
    def digest(self) -> str:
        """A hash of everything that is read from the prompts."""
        total = hashlib.sha256()
        for one in self.prompts:
            total.update(repr((one.tokens.ids, one.messages, one.columns)).encode())
        return total.hexdigest()


def read_prompts(
    paths: Sequence[str],
    source: ModelSource,
    *,
    column_map: str,
    max_length: int,
    max_new_tokens: int,
    limit_flag: str = "--max-new-tokens",
    tool_schemas: str = "",
) -> PromptData:
    """Read the prompts of all rows, of any layout, encode them for the model, and note which rows are dropped.

    No weight is read.

    Args:
        column_map: `--column-map`, as given.
        max_length: tokens of a prompt; 0 = as many as fit the model's positions.
        limit_flag: name of the flag of `max_new_tokens`.
        tool_schemas: see `TokenizationOptions`.

    Raises:
        InputError: a source is unreadable or has no prompt, or the model cannot be sampled from.
    """
    names = parse_column_map(column_map)
    counts, limit = Counts(), prompt_limit(source, max_length, max_new_tokens, limit_flag)
    options = TokenizationOptions(max_prompt_seq_len=limit, tool_schemas=tool_schemas)
    maker = RowMaker(load_chat_tokenizer(source), options, counts)
    prompts, copies = list[SamplePrompt](), Counter[int]()
    for path in paths:
        for record in read_records(read_rows(path), counts, column_map=names, passes_columns=True):
            for row in maker.rows([record], RowMaker.prompt):
                tokens, origin = Prompt.of(row.prompt_ids), str(record.origin)
                copy, number = copies[tokens.prompt_id], len(prompts) + 1
                prompts.append(SamplePrompt(number, origin, record.messages, tokens, copy, record.extra, record.split))
                copies[tokens.prompt_id] += 1
    if not prompts:
        raise InputError(f"--data: found no prompt in {', '.join(paths)}: {'; '.join(counts.lines())}")
    columns = {name for passed in counts.passed.values() for name in passed}
    say(*(f"note: {line}" for line in counts.lines()))
    return PromptData(prompts, columns, any(map(is_conversational, paths)))


def evaluation_prompts(resolved: Any, source: ModelSource) -> PromptData:
    """Return the distinct prompts that the resolved flags of an evaluation choose. Raises as `read_prompts`."""
    options, flags = evaluation_options(resolved, rows="prompts", title="evaluation"), resolved.config
    paths = [parse_path(text)[0] for text in options.data_path]
    lengths = {"max_length": 0, "max_new_tokens": flags.sampling.max_new_tokens}
    data = read_prompts(paths, source, column_map=flags.column_map, **lengths)
    chosen = set(load_or_build(options, source.tokenizer).eval["prompt_id"])
    prompts = [one for one in data.prompts if not one.copy and prompt_hash(one.messages) in chosen]
    if not prompts:
        raise InputError(f"{', '.join(paths)}: no prompt is held out; --eval-split all takes all rows")
    return replace(data, prompts=prompts)


def prompt_limit(
    source: ModelSource, max_length: int, max_new_tokens: int, limit_flag: str = "--max-new-tokens"
) -> int:
    """Return the tokens that a prompt may have. Raises InputError: see `read_prompts`."""
    if source.is_encoder_decoder or not has_key_value_cache(source.config):
        kind = source.config.model_type
        raise InputError(f"--model: {source.path} ({kind}) is no decoder with a cache of keys and values; name one")
    positions = num_positions(source.config)
    room = sys.maxsize if positions is None else positions - max_new_tokens
    if room < 1:
        what = f"{limit_flag}: {max_new_tokens} leave none of the model's {positions} positions to a prompt"
        raise InputError(f"{what}; expected less than {positions}")
    if (limit := max_length or room) > room:
        words = f"{max_length} tokens of a prompt and {limit_flag} {max_new_tokens}"
        raise InputError(f"--max-prompt-seq-len: {words} do not fit into the model's {positions} positions")
    return limit


@dataclass(frozen=True, slots=True)
class Pending:
    """A prompt whose answers have ended.

    prompt: the prompt.
    answers: its answers, without scores.
    handle: the values of reward functions for them.
    model_scores: name of a reward model -> its scores of them.
    """

    prompt: SamplePrompt
    answers: Sequence[Answer]
    handle: Future[dict[str, list[Value]]]
    model_scores: dict[str, list[Value]] = field(default_factory=dict)


def scored_answers(
    chat_model: ChatModel,
    data: PromptData,
    pool: RewardPool,
    settings: SampleSettings,
    *,
    scorers: Sequence[AnswerScorer] = (),
    first: int = 0,
    batch_size: int,
    seed: int,
    progress: str = "",
) -> Iterator[tuple[SamplePrompt, list[Answer], dict[str, list[Value]]]]:
    """Yield in order each prompt with a number above `first`, its answers, and each function's values for them.

    Functions score the answers to a prompt while others are sampled.

    Args:
        scorers: reward models, whose raw scores are rewards too.
        batch_size: prompts whose answers are sampled at once.
        progress: words after the number of a prompt in a line that says now and then how far it is.

    Raises:
        InputError: a function returned an invalid value, or logits or scores are not finite.
    """
    weights = {one.name: one.weight for one in pool.functions} | {one.name: one.weight for one in scorers}
    num_slots, num_new = settings.n * batch_size, settings.max_new_tokens
    prompts, pending, num_done = [one for one in data.prompts if one.number > first], dict[int, Pending](), 0
    last_time = time.monotonic()
    capacity = Capacity(num_slots, num_new, max(len(one.tokens.ids) for one in data.prompts) + num_new)
    requests = ((one.tokens, RandomKey(seed, "answer", epoch=one.copy)) for one in prompts)
    for ended in chain(answers_as_they_end(chat_model, requests, settings, settings.n, capacity), [None]):
        for index, answers in (ended or {}).items():
            if not all(answer.is_finite for answer in answers):
                remedy = "look at its weights, and at dtype and temperature"
                raise InputError(f"{chat_model.path}: its logits are not finite; {remedy}")
            handle = pool.submit(responses_of(prompts[index], answers, is_conversation=data.is_conversation))
            pending[index] = Pending(prompts[index], answers, handle)
        while num_done in pending and (ended is None or pending[num_done].handle.done()):
            if scorers:
                score_pending(pending.values(), scorers, batch_size=num_slots)
            one = pending.pop(num_done)
            (values,), num_done = pool.gather([one.handle]), num_done + 1
            yield one.prompt, with_scores(one.answers, values | one.model_scores, weights), values
            if time.monotonic() - last_time > PROGRESS_S:
                last_time = time.monotonic()
                say(f"prompt {one.prompt.number}{progress}")


def with_scores(
    answers: Sequence[Answer], values: Mapping[str, Sequence[Value]], weights: Mapping[str, float]
) -> list[Answer]:
    """Return the answers to a prompt with their scores and rewards.

    Args:
        values: name of a function or model -> its value of each answer.
        weights: name of a function or model -> its weight.
    """
    by_answer = [{name: column[n] for name, column in values.items()} for n in range(len(answers))]
    return [answer.scored(of_answer, weights) for answer, of_answer in zip(answers, by_answer, strict=True)]


def responses_of(prompt: SamplePrompt, answers: Sequence[Answer], *, is_conversation: bool) -> Responses:
    """Return the answers to a prompt as reward functions take them."""
    texts, ids = [one.text for one in answers], [[*one.ids] for one in answers]
    columns = json.loads(prompt.columns)
    return Responses(prompt.row, prompt.messages, is_conversation, texts=texts, ids=ids, columns=columns)


def score_pending(pending: Iterable[Pending], scorers: Sequence[AnswerScorer], *, batch_size: int) -> None:
    """Score, by reward models, all answers that have no scores yet."""
    unscored = [one for one in pending if not one.model_scores]
    answers = [(one.prompt.messages, answer.text, answer.finished) for one in unscored for answer in one.answers]
    for scorer in scorers if answers else ():
        scores = iter(score_answers(scorer, answers, batch_size=batch_size))
        for one in unscored:
            one.model_scores[scorer.name] = [next(scores) for _ in one.answers]
