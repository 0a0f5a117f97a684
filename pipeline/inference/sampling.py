"""Answers to the prompts of files: read, sampled in one session, and scored while others are sampled."""

import hashlib
import json
import math
from collections import Counter, deque
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, field, replace

from transformers import PreTrainedTokenizerBase

from pipeline.data.counts import Counts
from pipeline.data.formats import read_records
from pipeline.data.row_kinds import RowMaker, TokenizationOptions
from pipeline.data.selection import parse_column_map
from pipeline.data.sources import read_rows
from pipeline.data.turns import Turns
from pipeline.errors import InputError
from pipeline.generation.rollouts import Prompt, RandomKey, Sampling
from pipeline.generation.session import Finished, Room
from pipeline.inference.answers import ChatModel, finished_answer
from pipeline.inference.sample_rows import SampledAnswer, scores_of
from pipeline.rewards.pool import Responses, RewardPool, Value


@dataclass(frozen=True, slots=True)
class SamplePrompt:
    """A prompt of the data.

    number: which of the prompts it is, from 1.
    row: its place, as messages name it.
    messages: its turns.
    tokens: its tokens, which key its random numbers.
    copy: number of prompts before it that have the same tokens: each gets random numbers of its own.
    columns: the row's other columns, as JSON.
    """

    number: int
    row: str
    messages: Turns
    tokens: Prompt
    copy: int
    columns: str


@dataclass(slots=True)
class Begun:
    """A prompt that was submitted: the tokens of its answers, and the answers, by sample; then their scores."""

    prompt: SamplePrompt
    ids: dict[int, list[int]] = field(default_factory=dict)
    answers: dict[int, SampledAnswer] = field(default_factory=dict)
    handle: Future[dict[str, list[Value]]] | None = None


def read_sample_prompts(
    paths: Sequence[str], tokenizer: PreTrainedTokenizerBase, counts: Counts, column_map: str, limit: int
) -> list[SamplePrompt]:
    """Read the prompts of all rows, of whatever layout; `counts` gets those that are left out.

    Args:
        column_map: as `--column_map`.
        limit: tokens of a prompt.

    Raises:
        InputError: no row has a prompt, or a source cannot be read.
    """
    maker, columns = (
        RowMaker(tokenizer, TokenizationOptions(max_prompt_seq_len=limit), counts),
        parse_column_map(column_map),
    )
    prompts, copies = list[SamplePrompt](), Counter[int]()
    for path in paths:
        for record in read_records(read_rows(path), counts, column_map=columns, passes_columns=True):
            for row in maker.rows([record], RowMaker.prompt):
                tokens, own = Prompt.of(row.prompt_ids), (str(record.origin), record.messages)
                prompts.append(SamplePrompt(len(prompts) + 1, *own, tokens, copies[tokens.prompt_id], record.extra))
                copies[tokens.prompt_id] += 1
    if not prompts:
        raise InputError(f"--data: no prompt in {', '.join(paths)}: {'; '.join(counts.lines())}")
    return prompts


def prompts_digest(prompts: Sequence[SamplePrompt]) -> str:
    """Return a hash of all that is read of the prompts."""
    total = hashlib.sha256()
    for one in prompts:
        total.update(repr((one.tokens.ids, one.messages, one.columns)).encode())
    return total.hexdigest()


def sample(
    chat_model: ChatModel,
    prompts: Sequence[SamplePrompt],
    pool: RewardPool,
    sampling: Sampling,
    *,
    first: int,
    num_samples: int,
    num_slots: int,
    seed: int,
    is_conversation: bool,
) -> Iterator[tuple[SamplePrompt, list[SampledAnswer], dict[str, list[Value]]]]:
    """Yield in order each of `prompts[first:]` with its answers, and the values of each function for them.

    An answer depends on the seed, its prompt and its number alone, up to rounding.

    Args:
        num_slots: answers that are sampled at once.
        is_conversation: functions get lists of messages, not texts.

    Raises:
        InputError: a function returned what is no value, or logits are not finite.
    """
    longest = max(len(one.tokens.ids) for one in prompts) + sampling.max_new_tokens
    session = chat_model.sessions().session(Room(num_slots, sampling.max_new_tokens, longest))
    rest, begun, of_ticket = deque(prompts[first:]), deque[Begun](), dict[int, Begun]()
    while rest or begun:
        while rest and len(session.waiting) < num_slots:
            begun.append(one := Begun(rest.popleft()))
            key = RandomKey(seed, "answer", epoch=one.prompt.copy)
            for n in range(num_samples):
                of_ticket[session.submit(one.prompt.tokens, sampling, key, sample=n).number] = one
        for event in [] if session.is_idle else session.advance():
            if isinstance(event, Finished):
                take(chat_model, one := of_ticket.pop(event.ticket.number), event)
                if len(one.ids) == num_samples:
                    one.handle = pool.submit(responses_of(one, is_conversation))
        is_all = session.is_idle and not rest
        while begun and (handle := begun[0].handle) is not None and (is_all or handle.done()):
            (values,), one = pool.gather([handle]), begun.popleft()
            yield one.prompt, scored(one, values, pool), values


def take(chat_model: ChatModel, one: Begun, event: Finished) -> None:
    """Put an answer that has ended to its prompt. Raises InputError: its log-probabilities are not finite."""
    log_prob = event.log_probs.double().sum().item()
    if not math.isfinite(log_prob):
        raise InputError(f"{chat_model.path}: its logits are no finite numbers; give another --temperature or --dtype")
    answer, n = finished_answer(chat_model, event.ids.tolist()), event.ticket.sample
    one.ids[n], one.answers[n] = [*answer.ids], SampledAnswer(answer.text, len(answer.ids), log_prob, event.reason)


def responses_of(one: Begun, is_conversation: bool) -> Responses:
    """Return the answers to a prompt as reward functions take them."""
    order, prompt = sorted(one.ids), one.prompt
    texts, ids = [one.answers[n].text for n in order], [one.ids[n] for n in order]
    columns = json.loads(prompt.columns)
    return Responses(prompt.row, prompt.messages, is_conversation, texts=texts, ids=ids, columns=columns)


def scored(one: Begun, values: Mapping[str, Sequence[Value]], pool: RewardPool) -> list[SampledAnswer]:
    """Return the answers to a prompt, in order, with their scores."""
    found = [scores_of({name: row[n] for name, row in values.items()}, pool.functions) for n in sorted(one.answers)]
    return [replace(one.answers[n], scores=scores, reward=reward) for n, (scores, reward) in enumerate(found)]
