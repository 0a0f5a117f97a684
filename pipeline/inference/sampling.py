"""Sample answers to the prompts of files in one session, and score finished ones meanwhile. `rlhf sample` calls it."""

import hashlib
import json
import math
import sys
from collections import Counter, deque
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, field, replace

from pipeline.data.counts import Counts
from pipeline.data.formats import read_records
from pipeline.data.readers import Split
from pipeline.data.row_kinds import RowMaker, TokenizationOptions
from pipeline.data.selection import parse_column_map
from pipeline.data.sources import is_conversational, read_rows
from pipeline.data.turns import Turns
from pipeline.errors import InputError
from pipeline.generation.rollouts import Prompt, RandomKey, Sampling
from pipeline.generation.session import Capacity, Finished
from pipeline.inference.answer_scores import AnswerScorer, score_answers
from pipeline.inference.answer_settings import SampleSettings
from pipeline.inference.answers import ChatModel, finished_answer, load_chat_tokenizer
from pipeline.inference.sample_rows import SampledAnswer, scores_of
from pipeline.models.source import ModelSource, has_key_value_cache, num_positions
from pipeline.rewards.pool import Responses, RewardPool, Value


@dataclass(frozen=True, slots=True)
class SamplePrompt:
    """A prompt of the data.

    number: number of the prompt, from 1.
    row: file and row number, as messages name it.
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


@dataclass(slots=True)
class Pending:
    """A submitted prompt: the tokens of its finished answers, the answers by sample, and their scores.

    prompt: the prompt.
    ids: tokens of the answers that have ended, by sample.
    answers: these answers, by sample.
    handle: the values of reward functions, submitted once all answers have ended.
    model_scores: name of a reward model -> its scores, by sample.
    """

    prompt: SamplePrompt
    ids: dict[int, list[int]] = field(default_factory=dict)
    answers: dict[int, SampledAnswer] = field(default_factory=dict)
    handle: Future[dict[str, list[Value]]] | None = None
    model_scores: dict[str, list[Value]] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class PromptData:
    """The prompts of files.

    prompts: the usable prompts, in order.
    columns: names of the columns for reward functions.
    is_conversation: functions get lists of messages, because a source has some.
    notes: a line for each kind of dropped rows.
    """

    prompts: list[SamplePrompt]
    columns: set[str]
    is_conversation: bool
    notes: list[str]

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
) -> PromptData:
    """Read the prompts of all rows, of any layout, and encode them for the model. It reads no weight.

    Args:
        column_map: `--column-map`, as given.
        max_length: tokens of a prompt; 0 = as many as fit the model's positions.
        limit_flag: name of the flag of `max_new_tokens`.

    Raises:
        InputError: a source is unreadable or has no prompt, or the model cannot be sampled from.
    """
    names = parse_column_map(column_map)
    counts, limit = Counts(), prompt_limit(source, max_length, max_new_tokens, limit_flag)
    maker = RowMaker(load_chat_tokenizer(source), TokenizationOptions(max_prompt_seq_len=limit), counts)
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
    return PromptData(prompts, columns, any(map(is_conversational, paths)), counts.lines())


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


def sample(
    chat_model: ChatModel,
    data: PromptData,
    pool: RewardPool,
    settings: SampleSettings,
    *,
    scorers: Sequence[AnswerScorer] = (),
    first: int,
    batch_size: int,
    seed: int,
) -> Iterator[tuple[SamplePrompt, list[SampledAnswer], dict[str, list[Value]]]]:
    """Yield in order each prompt with a number above `first`, its answers, and each reward's values for them.

    An answer depends only on the seed, its prompt and its number, up to rounding.

    Args:
        scorers: reward models, whose raw scores are rewards too.
        batch_size: prompts whose answers are sampled at once.

    Raises:
        InputError: a function returned an invalid value, or logits or scores are not finite.
    """
    weights = {one.name: one.weight for one in pool.functions} | {one.name: one.weight for one in scorers}
    num_slots, num_new = settings.n * batch_size, settings.max_new_tokens
    sampling = Sampling(num_new, settings.temperature, settings.top_p, settings.top_k, tuple(settings.stop_strings))
    longest = max(len(one.tokens.ids) for one in data.prompts)
    session = chat_model.sessions().session(Capacity(num_slots, num_new, longest + num_new))
    rest = deque(one for one in data.prompts if one.number > first)
    pending, of_ticket = deque[Pending](), dict[int, Pending]()
    while rest or pending:
        while rest and len(session.waiting) < num_slots:
            pending.append(one := Pending(rest.popleft()))
            key = RandomKey(seed, "answer", epoch=one.prompt.copy)
            for n in range(settings.n):
                of_ticket[session.submit(one.prompt.tokens, sampling, key, sample=n).number] = one
        for event in [] if session.is_idle else session.advance():
            if isinstance(event, Finished):
                take(chat_model, one := of_ticket.pop(event.request.number), event)
                if len(one.ids) == settings.n:
                    one.handle = pool.submit(responses_of(one, data.is_conversation))
        is_all = session.is_idle and not rest
        while pending and (handle := pending[0].handle) is not None and (is_all or handle.done()):
            score_ended(pending, scorers, batch_size=num_slots)
            (values,), one = pool.gather([handle]), pending.popleft()
            yield one.prompt, scored(one, values | one.model_scores, weights), values


def take(chat_model: ChatModel, one: Pending, event: Finished) -> None:
    """Add a finished answer to its prompt. Raises InputError: its log-probabilities are not finite."""
    log_prob = event.log_probs.double().sum().item()
    if not math.isfinite(log_prob):
        raise InputError(
            f"{chat_model.path}: its logits are not finite; look at its weights, and at dtype and temperature"
        )
    answer, n = finished_answer(chat_model, event.ids.tolist()), event.request.sample
    one.ids[n], one.answers[n] = [*answer.ids], SampledAnswer(answer.text, len(answer.ids), log_prob, event.reason)


def responses_of(one: Pending, is_conversation: bool) -> Responses:
    """Return the answers to a prompt as reward functions take them."""
    order, prompt = sorted(one.ids), one.prompt
    texts, ids = [one.answers[n].text for n in order], [one.ids[n] for n in order]
    columns = json.loads(prompt.columns)
    return Responses(prompt.row, prompt.messages, is_conversation, texts=texts, ids=ids, columns=columns)


def score_ended(pending: Sequence[Pending], scorers: Sequence[AnswerScorer], *, batch_size: int) -> None:
    """Score, by reward models, all prompts whose answers have ended and have no scores yet."""
    if not scorers or not (ended := [one for one in pending if one.handle is not None and not one.model_scores]):
        return
    answers = [(one.prompt.messages, one.answers[n]) for one in ended for n in sorted(one.answers)]
    given = [(turns, answer.text, answer.finish_reason != "limit") for turns, answer in answers]
    for scorer in scorers:
        scores = iter(score_answers(scorer, given, batch_size=batch_size))
        for one in ended:
            one.model_scores[scorer.name] = [next(scores) for _ in one.answers]


def scored(one: Pending, values: Mapping[str, Sequence[Value]], weights: Mapping[str, float]) -> list[SampledAnswer]:
    """Return the answers to a prompt, in order, with their scores."""
    rewards = [scores_of({name: row[n] for name, row in values.items()}, weights) for n in sorted(one.answers)]
    return [replace(one.answers[n], scores=scores, reward=reward) for n, (scores, reward) in enumerate(rewards)]
