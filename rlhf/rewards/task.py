"""Try a task before training: answers of the model to train, scored by the run's reward functions, and a verdict."""

import logging
import time
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from random import Random
from typing import TYPE_CHECKING, Any

from pipeline.errors import InputError, counted, printable, say, show
from pipeline.files import has_config, read_object, refused_by_disk, write_json
from pipeline.inference.answer_settings import SampleSettings
from pipeline.inference.sample_rows import SampledAnswer
from pipeline.inference.task_trial import rows_of, task_trial
from pipeline.models.paths import check_language_model
from pipeline.rewards.failures import check_one_for_each, check_values, failure_notes
from pipeline.rewards.functions import FLAG, RewardFunction
from pipeline.rewards.pool import Value
from pipeline.rewards.worker_flags import reward_pool
from pipeline.run.layout import task_file
from pipeline.run.logs import StderrHandler
from rlhf.rewards.reward_config import RewardTrialConfig

if TYPE_CHECKING:
    from pipeline.inference.sampling import PromptData, SamplePrompt

NUM_PROMPTS = 64  # prompts that are answered unless -n says how many
ANSWERS_AT_ONCE = 128  # that are sampled at once
PROGRESS_S = 10.0
WIDTH = 20  # of a row's name; longer names of functions shift their row


def try_task(config: RewardTrialConfig, functions: Sequence[RewardFunction]) -> None:
    """Sample the model's answers to rows of the data, score them, and print whether the task can be learned."""
    from pipeline.inference.sampling import read_prompts
    from pipeline.models.source import ModelSource, num_positions

    check_language_model(config.model, "--model")
    folder = Path(config.output).expanduser() if config.output else None
    if folder:
        check_folder(folder)
    limit, k, source = config.max_answer_seq_len, config.num_samples_per_prompt, ModelSource(config.model)
    data = read_prompts([config.data], source, column_map=config.column_map, max_length=config.max_prompt_seq_len,
                        max_new_tokens=limit, limit_flag="--max-answer-seq-len")  # fmt: skip
    say(*(f"note: {line}" for line in data.notes))
    prompts = drawn([one for one in data.prompts if not one.copy], config.n or NUM_PROMPTS, config.seed)
    began, positions = time.monotonic(), num_positions(source.config)
    trial = task_trial(
        answers_to(replace(data, prompts=prompts), config, functions),
        {one.name: one.weight for one in functions},
        limit=limit,
        num_samples=k,
        most_tokens=positions and positions - max(len(one.tokens.ids) for one in prompts),
    )
    if trial is None:
        raise InputError(f"{FLAG}: no answer of {config.model} got a reward: functions failed or returned None")
    title = f"{counted(len(prompts), 'prompt')} x {k} answers of {printable(config.model)} at temperature 1"
    table = rows_of(trial)
    show(f"{title} in {time.monotonic() - began:.1f} s; in brackets 95 % intervals, by prompt")
    for name, text in table:
        show(f"{name:<{WIDTH}}{text}")
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


def answers_to(
    data: "PromptData", config: RewardTrialConfig, functions: Sequence[RewardFunction]
) -> list[list[SampledAnswer]]:
    """Return the model's answers to each prompt, scored.

    Raises:
        InputError: a function fails too often, or returns a value for each token.
        EnvironmentFault: its endpoint does not answer.
    """
    from pipeline.inference.answers import load_chat_model, resolve_dtype
    from pipeline.inference.sampling import sample

    k = config.num_samples_per_prompt
    settings = SampleSettings(max_new_tokens=config.max_answer_seq_len, temperature=1.0, n=k)
    run: Any = {"first": 0, "batch_size": max(1, ANSWERS_AT_ONCE // k), "seed": config.seed}
    groups, by_name = list[list[SampledAnswer]](), dict[str, list[Value]]({one.name: [] for one in functions})
    logging.basicConfig(level=logging.INFO, handlers=[StderrHandler()], force=True)  # functions print to stderr
    with reward_pool(config, functions, prints_traces=False) as pool:
        pool.check(data.columns)
        chat_model, last_time = load_chat_model(config.model, dtype=resolve_dtype("auto")), time.monotonic()
        for prompt, answers, values in sample(chat_model, data, pool, settings, **run):
            groups.append(answers)
            for name, results in values.items():
                by_name[name] += results
                check_values(name, by_name[name])
                check_one_for_each(name, results)
            if time.monotonic() - last_time > PROGRESS_S:
                last_time = time.monotonic()
                say(f"prompt {prompt.number} of {len(data.prompts)}")
    for name, results in by_name.items():
        say(*failure_notes(name, results))
    return groups
