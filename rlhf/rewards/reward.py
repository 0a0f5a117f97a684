"""Try reward functions on rows of a data set before training: `rlhf reward rewards.py:length --data prompts.jsonl`.

With a model, also the task: `rlhf reward rewards.py:right_number --data questions.jsonl --model output/sft`; with
`--tools` or `--environment` as training has them, too.
"""

import json
import logging
import time
from collections import defaultdict
from collections.abc import Callable, Iterable, Sequence
from dataclasses import replace
from itertools import islice
from pathlib import Path
from random import Random
from typing import TYPE_CHECKING, Any, NamedTuple, Self

import yaml
from pydantic import model_validator

from pipeline.configuration.flag_table import flag
from pipeline.errors import InputError, counted, printable, say, show
from pipeline.files import has_config, read_object, refused_by_disk, write_json
from pipeline.inference.answer_rows import Answer
from pipeline.inference.answer_settings import SampleSettings
from pipeline.inference.task_trial import rows_of, task_trial
from pipeline.models.paths import check_language_model
from pipeline.rewards.box.table import BOX, settings_of
from pipeline.rewards.failures import (
    FailureWindow,
    check_one_for_each,
    check_values,
    counts_of,
    failure_notes,
    first_of_failures,
)
from pipeline.rewards.functions import FLAG, RewardFunction, parse_reward_functions
from pipeline.rewards.pool import Failure, Responses, Value
from pipeline.rewards.tool_flags import ToolConfig, check_rewarded, schemas_of
from pipeline.rewards.worker_flags import WorkerFlags, reward_pool
from pipeline.run.entry import command, command_flags
from pipeline.run.layout import task_file
from pipeline.run.logs import StderrHandler

if TYPE_CHECKING:
    from pipeline.inference.answer_scores import PromptData, SamplePrompt
    from pipeline.models.source import ModelSource

LLM_JUDGE = {"url": "http://127.0.0.1:8000/v1", "model": "NAME"}  # settings of the LLM judge in a printed example
WIDTH = 40  # printed characters of a completion
NUM_ROWS = 20  # rows that are read unless -n says how many
NUM_PROMPTS = 64  # prompts that --model answers unless -n says how many
ANSWERS_AT_ONCE = 128  # answers of --model that are sampled at once
NAME_WIDTH = 20  # of a row's name in the trial of a task; longer names of functions shift their row
MAX_GROUP = 256  # responses to one prompt in a trial


class RewardTrialConfig(WorkerFlags):
    """Try reward functions on rows of a data set: `rlhf reward rewards.py:length --data prompts.jsonl`."""

    reward_function: list[str] = flag(
        [], "FILE.py:NAME or a built-in NAME; a :WEIGHT after it multiplies its scores", positional=True, required=True
    )
    data: str = flag("", "Hub id, file or folder, read as for training", kind="path", required=True)
    n: int = flag(0, "Number of rows to read; also -n; 0: 20, with --model 64 from all of the data", ge=0)
    completion: str = flag(
        "", "A response to score for each row, in addition to its own", kind="text", excludes="--model"
    )
    num_samples_per_prompt: int = flag(
        8,
        "Responses per call, as in training: a row's repeated, or those of --model",
        ge=1,
        le=MAX_GROUP,
    )
    model: str = flag(
        "", "Folder or hub id of the model to train: it answers rows, and a verdict says if it can learn",
        kind="path", aliases=("actor_model", "model_name_or_path"),
    )  # fmt: skip
    max_answer_seq_len: int = flag(
        512,
        "Most tokens of an answer, its end token included",
        ge=1,
        read_if="--model",
        other_tools="max_completion_length max_new_tokens",
    )
    max_prompt_seq_len: int = flag(
        0,
        "Most tokens of a prompt, longer ones are dropped as in training; 0: what --max-answer-seq-len leaves",
        ge=0,
        read_if="--model",
    )
    output: str = flag(
        "",
        "The output folder of the run to come, whose report shows the trial; none: print",
        kind="path",
        read_if="--model",
    )
    seed: int = flag(1234, "Seed of the model's answers", ge=0, read_if="--model")
    column_map: str = flag("", "Column names in your data: prompt=question,chosen=best")
    tools: ToolConfig = ToolConfig()

    @model_validator(mode="after")
    def _answers_are_compared(self) -> Self:
        if self.model and self.num_samples_per_prompt < 2:
            raise ValueError("num_samples_per_prompt: got 1 with --model, which compares answers; expected 2 or more")
        if self.tools.by_title and not self.model:
            raise ValueError("tools: got some, or an environment, without --model, which calls them")
        return self


def run(argv: list[str], prog: str) -> None:
    """Check the command line, then read, score and print."""
    config = command_flags(RewardTrialConfig, argv, section="reward_trial", prog=prog, not_empty=("model",)).config
    if not (config.reward_function or config.tools.environment):
        raise InputError(f"{FLAG}: missing; name a function, for example: {prog} rewards.py:length --data FILE")
    if not config.data:
        raise InputError("--data: missing; name a file with prompts, a folder or a hub id")
    functions = parse_reward_functions(config.reward_function)
    if config.model:
        try_task(config, functions)
        return
    rows = responses_of(config)
    logging.basicConfig(level=logging.INFO, handlers=[StderrHandler()], force=True)  # functions print to stderr
    show_settings([function for function in functions if function.target in BOX and not function.args])
    with reward_pool(config, functions, prints_traces=False) as pool:
        pool.check(sorted({name for row in rows for name in row.columns}))
        values = pool.gather([pool.submit(repeated(row, config.num_samples_per_prompt)) for row in rows])
    pairs = list(zip(rows, values, strict=True))
    by_name = {one.name: [value for row, by_function in pairs for value in by_function[one.name][: len(row.texts)]]
               for one in functions}  # fmt: skip
    print_table(functions, [row.alone(number) for row in rows for number in range(len(row.texts))], by_name)
    for name, results in by_name.items():
        if first := first_of_failures(results):
            FailureWindow().check(name, [counts_of(results)], first)


def responses_of(config: RewardTrialConfig) -> list[Responses]:
    """Return the first rows of the data, each with a response. Raises InputError if a row has none."""
    from pipeline.data.counts import Counts
    from pipeline.data.formats import read_records
    from pipeline.data.selection import parse_column_map
    from pipeline.data.sources import is_conversational, read_rows

    column_map, counts, rows = parse_column_map(config.column_map), Counts(), list[Responses]()
    is_conversation = is_conversational(config.data)  # then all prompts are messages, as in training
    raw = islice(read_rows(config.data), config.n or NUM_ROWS)
    for record in read_records(raw, counts, column_map=column_map, passes_columns=True):
        texts = list(filter(None, [record.chosen or record.rejected, config.completion]))
        if not record.messages or not texts:
            what = "a response; give one by --completion TEXT" if record.messages else "a prompt"
            raise InputError(f"{record.origin}: got columns {', '.join(record.columns)}, none is {what}")
        # This command has no tokenizer; each byte counts as a token.
        content = (str(record.origin), record.messages, is_conversation, texts, [[*text.encode()] for text in texts])
        rows.append(Responses(*content, columns=json.loads(record.extra)))
    say(*(f"note: {line}" for line in counts.lines()))
    return rows


def repeated(row: Responses, number: int) -> Responses:
    """Repeat a row's responses until there are `number`, or as many as it has if these are more."""
    indices = [index % len(row.texts) for index in range(max(number, len(row.texts)))]
    return replace(row, texts=[row.texts[index] for index in indices], ids=[row.ids[index] for index in indices])


def show_settings(functions: Sequence[RewardFunction]) -> None:
    """Print a YAML file with the default settings of all built-in functions that have settings."""
    shown_args = [(one, settings_of(BOX[one.target]) | (LLM_JUDGE if one.name == "judge" else {})) for one in functions]
    if entries := [{"name": one.name, "weight": one.weight, "args": args} for one, args in shown_args if args]:
        say("note: give settings in a YAML file (--config FILE); this one has the defaults:")
        say(*yaml.safe_dump({"reward_function": entries}, sort_keys=False).splitlines())


def print_table(functions: Sequence[RewardFunction], rows: Sequence[Responses], values: dict[str, list[Value]]) -> None:
    """Print a line for each row, then mean, None and failures of each function, and each distinct failure."""
    names = [function.name for function in functions]
    wide = max(12, *map(len, names)) + 2
    show("".join((f"{'row':<6} {'completion':<{WIDTH}}", *(f"{name:>{wide}}" for name in names))))
    for number, row in enumerate(rows):
        text = printable(" ".join(row.texts[0].split()))[:WIDTH]
        cells = (f"{shown(values[name][number]):>{wide}}" for name in names)
        show("".join((f"{row.row.rpartition(':')[2]:<6} {text:<{WIDTH}}", *cells)))
    for title, summary in SUMMARIES.items():
        show("".join((f"{'':<6} {title:<{WIDTH}}", *(f"{summary(values[name]):>{wide}}" for name in names))))
    for name in names:
        given = {str(value) for value in values[name] if isinstance(value, float | list)}
        if len(given) == 1 < len(values[name]):
            say(f"note: {name}: {shown(values[name][0])} for each response, so it trains nothing")
        say(*failure_notes(name, values[name]))


def shown(value: Value) -> str:
    """Return a table cell: a value, the sum of values per token, or the kind of a failure."""
    if isinstance(value, Failure):
        return value.kind
    return "None" if value is None else f"sum {sum(value):.4g}" if isinstance(value, list) else f"{value:.4g}"


def mean(values: Sequence[Value]) -> str:
    """Return the mean of a column's values; values per token are summed first."""
    numbers = [sum(value) if isinstance(value, list) else value for value in values if isinstance(value, float | list)]
    return f"{sum(numbers) / len(numbers):.4g}" if numbers else "-"


SUMMARIES: dict[str, Callable[[Sequence[Value]], object]] = {
    "mean": mean,
    "None": lambda values: sum(value is None for value in values),
    "failures": lambda values: sum(isinstance(value, Failure) for value in values),
}

# --- the trial of a task by --model --------------------------------------------------------------------------------


def try_task(config: RewardTrialConfig, functions: Sequence[RewardFunction]) -> None:
    """Sample the model's answers to rows of the data, score them, and print whether the task can be learned."""
    from pipeline.inference.answer_scores import read_prompts
    from pipeline.models.source import ModelSource, num_positions

    check_language_model(config.model, "--model")
    check_rewarded(config.tools, config, others=bool(functions))
    folder = Path(config.output).expanduser() if config.output else None
    if folder:
        check_folder(folder)
    limit, k, source = config.max_answer_seq_len, config.num_samples_per_prompt, ModelSource(config.model)
    data = read_prompts([config.data], source, column_map=config.column_map, max_length=config.max_prompt_seq_len,
                        max_new_tokens=limit, limit_flag="--max-answer-seq-len",
                        tool_schemas=schemas_of(config.tools, config))  # fmt: skip
    prompts = drawn([one for one in data.prompts if not one.copy], config.n or NUM_PROMPTS, config.seed)
    began, positions = time.monotonic(), num_positions(source.config)
    answered = answers_to(source, replace(data, prompts=prompts), config, functions)
    trial = task_trial(
        answered.groups,
        {one.name: one.weight for one in answered.functions},
        limit=limit,
        num_samples=k,
        most_tokens=positions and positions - max(len(one.tokens.ids) for one in prompts),
    )
    if trial is None:
        raise InputError(f"{FLAG}: no answer of {config.model} got a reward: functions failed or returned None")
    title = f"{counted(len(prompts), 'prompt')} x {k} answers of {printable(config.model)} at temperature 1"
    table = rows_of(trial) + ([("tools", answered.tool_use)] if answered.tool_use else [])
    show(f"{title} in {time.monotonic() - began:.1f} s; in brackets 95 % intervals, by prompt")
    for name, text in table:
        show(f"{name:<{NAME_WIDTH}}{text}")
    if folder:
        with refused_by_disk(folder):
            write_json(task_file(folder), {"title": title, "rows": table})


def check_folder(folder: Path) -> None:
    """Make the folder of --output. Raises InputError for a model's folder or a file of somebody else's."""
    if has_config(folder):
        raise InputError(f"--output: {folder}: got a model; name the output folder that holds sft/ and actor/")
    if task_file(folder).exists() and "rows" not in read_object(task_file(folder)):
        raise InputError(f"--output: {task_file(folder)}: got a file that no trial wrote; name another folder")
    with refused_by_disk(folder):
        folder.mkdir(parents=True, exist_ok=True)


def drawn(prompts: "Sequence[SamplePrompt]", count: int, seed: int) -> "list[SamplePrompt]":
    """Return `count` random prompts in their order, numbered from 1; held-out ones only if there are no others."""
    prompts = [one for one in prompts if one.split != "test"] or prompts
    indices = sorted(Random(seed).sample(range(len(prompts)), min(count, len(prompts))))
    return [replace(prompts[index], number=number) for number, index in enumerate(indices, 1)]


class Answered(NamedTuple):
    """The model's answers.

    groups: those to each prompt, scored.
    functions: what scored them.
    tool_use: what they called, in words; "" without tools.
    """

    groups: list[list[Answer]]
    functions: Sequence[RewardFunction]
    tool_use: str = ""


def answers_to(
    source: "ModelSource", data: "PromptData", config: RewardTrialConfig, functions: Sequence[RewardFunction]
) -> Answered:
    """Return the model's answers to each prompt, scored.

    Raises:
        InputError: a function fails too often, or returns a value for each token; or see `make_calls`.
        EnvironmentFault: its endpoint does not answer.
    """
    from pipeline.inference.answer_scores import prompt_limit, scored_answers
    from pipeline.inference.answers import load_chat_model, load_chat_tokenizer, resolve_dtype
    from pipeline.inference.tool_answers import answers_with_tools
    from pipeline.inference.tool_conversations import make_calls

    k, limit = config.num_samples_per_prompt, config.max_answer_seq_len
    settings = SampleSettings(max_new_tokens=limit, temperature=1.0, n=k)
    how: Any = {"batch_size": max(1, ANSWERS_AT_ONCE // k), "seed": config.seed}
    logging.basicConfig(level=logging.INFO, handlers=[StderrHandler()], force=True)  # functions print to stderr
    if not config.tools.by_title:
        with reward_pool(config, functions, prints_traces=False) as pool:
            pool.check(data.columns)
            chat_model = load_chat_model(config.model, dtype=resolve_dtype("auto"))
            scored = scored_answers(chat_model, data, pool, settings, progress=f" of {len(data.prompts)}", **how)
            return Answered(checked_groups(scored), functions)
    with make_calls(
        functions,
        config.tools,
        config,
        max_failures=FailureWindow().max_share,
        takes_tokens=False,
        columns=data.columns,
        sources=[config.data],
        tokenizer=load_chat_tokenizer(source),
        max_prompt=prompt_limit(source, config.max_prompt_seq_len, limit, "--max-answer-seq-len"),
    ) as calls:
        chat_model = load_chat_model(config.model, dtype=resolve_dtype("auto"))
        with_tools, tool_use = answers_with_tools(chat_model, data.prompts, calls, settings, **how)
        return Answered(checked_groups(with_tools), calls.rewards.functions, tool_use)


def checked_groups(scored: "Iterable[tuple[Any, list[Answer], dict[str, list[Value]]]]") -> list[list[Answer]]:
    """Return the answers to each prompt, and note failures of functions. Raises as `answers_to`.

    scored: what `scored_answers` yields, or `answers_with_tools` returns.
    """
    groups, by_name = list[list[Answer]](), defaultdict[str, list[Value]](list)
    for _, answers, values in scored:
        groups.append(answers)
        for name, results in values.items():
            by_name[name] += results
            check_values(name, by_name[name])
            check_one_for_each(name, results)
    for name, results in by_name.items():
        say(*failure_notes(name, results))
    return groups


main = command(run, "rlhf reward")
