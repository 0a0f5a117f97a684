"""Try reward functions on rows of a data set before training: `rlhf reward rewards.py:length --data prompts.jsonl`.

With a model, also the task: `rlhf reward rewards.py:right_number --data questions.jsonl --model output/sft`.
"""

import json
import logging
import sys
from collections.abc import Callable, Sequence
from dataclasses import replace
from itertools import islice

import yaml

from pipeline.errors import InputError, printable, say, show
from pipeline.rewards.box.table import BOX, settings_of
from pipeline.rewards.failures import FailureWindow, counts_of, failure_notes, first_of_failures
from pipeline.rewards.functions import FLAG, RewardFunction, parse_reward_functions
from pipeline.rewards.pool import Failure, Responses, Value
from pipeline.rewards.worker_flags import reward_pool
from pipeline.run.entry import command, command_flags
from pipeline.run.logs import StderrHandler
from rlhf.rewards.reward_config import RewardTrialConfig
from rlhf.rewards.task import try_task

LLM_JUDGE = {"url": "http://127.0.0.1:8000/v1", "model": "NAME"}  # settings of the LLM judge in a printed example
WIDTH = 40  # printed characters of a completion
NUM_ROWS = 20  # rows that are read unless -n says how many


def run(argv: list[str], prog: str) -> None:
    """Check the command line, then read, score and print."""
    config = command_flags(RewardTrialConfig, argv, section="reward_trial", prog=prog, not_empty=("model",)).config
    if not config.reward_function:
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

main = command(run, "rlhf reward")

if __name__ == "__main__":
    sys.exit(main(prog="python -m rlhf.rewards.reward"))
