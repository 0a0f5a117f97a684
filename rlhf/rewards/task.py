"""Try a task before training: answers of the model to train, scored by the run's reward functions, and a verdict."""

import logging
import time
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from pipeline.errors import InputError, printable, say, show
from pipeline.files import read_object, refused_by_disk, write_json
from pipeline.inference.answer_settings import SampleSettings
from pipeline.inference.sample_rows import SampledAnswer
from pipeline.inference.task_trial import rows_of, task_trial
from pipeline.models.paths import check_language_model
from pipeline.rewards.failures import check_any_value, failure_notes
from pipeline.rewards.functions import FLAG, RewardFunction
from pipeline.rewards.pool import Value
from pipeline.rewards.worker_flags import reward_pool
from pipeline.run.layout import task_file
from pipeline.run.logs import StderrHandler
from rlhf.rewards.reward_config import RewardTrialConfig

NUM_PROMPTS = 64  # prompts that are answered unless -n says how many
PROMPTS_AT_ONCE = 16  # whose answers are sampled at once


def try_task(config: RewardTrialConfig, functions: Sequence[RewardFunction]) -> None:
    """Sample the model's answers to rows of the data, score them, and print whether the task can be learned."""
    from pipeline.inference.answers import load_chat_model, resolve_dtype
    from pipeline.inference.sampling import read_prompts, sample
    from pipeline.models.source import ModelSource

    if config.completion:
        raise InputError("--completion: got it with --model, whose answers are scored; give one of both")
    if config.num_samples_per_prompt < 2:
        raise InputError("--num-samples-per-prompt: got 1 with --model, which compares answers; expected 2 or more")
    check_language_model(config.model, "--model")
    folder = Path(config.output).expanduser() if config.output else None
    if folder and task_file(folder).exists() and "rows" not in read_object(task_file(folder)):
        raise InputError(f"--output: {task_file(folder)}: found one that no trial wrote; name another folder")
    limit, k = config.max_answer_seq_len, config.num_samples_per_prompt
    data = read_prompts([config.data], ModelSource(config.model), column_map=config.column_map, max_length=0,
                        max_new_tokens=limit)  # fmt: skip
    say(*(f"note: {line}" for line in data.notes))
    count = min(config.n or NUM_PROMPTS, len(data.prompts))
    chosen = [replace(data.prompts[at * len(data.prompts) // count], number=at + 1) for at in range(count)]
    settings = SampleSettings(max_new_tokens=limit, temperature=1.0, n=k)
    logging.basicConfig(level=logging.INFO, handlers=[StderrHandler()], force=True)  # functions print to stderr
    with reward_pool(config, functions, prints_traces=False) as pool:
        pool.check(data.columns)
        chat_model = load_chat_model(config.model, dtype=resolve_dtype("auto"))
        began, groups = time.monotonic(), list[list[SampledAnswer]]()
        by_name: dict[str, list[Value]] = {one.name: [] for one in functions}
        run: Any = {"first": 0, "batch_size": PROMPTS_AT_ONCE, "seed": config.seed}
        for _, answers, values in sample(chat_model, replace(data, prompts=chosen), pool, settings, **run):
            groups.append(answers)
            for name, results in values.items():
                by_name[name] += results
    for name, results in by_name.items():
        say(*failure_notes(name, results))
        check_any_value(name, results)
    weights = {one.name: one.weight for one in functions}
    trial = task_trial(groups, weights, limit=limit, num_samples=k)
    if trial is None:
        raise InputError(f"{FLAG}: no answer of {config.model} got a reward; each function returned None")
    title = f"{count} prompts x {k} answers of {printable(config.model)} at temperature 1"
    table = rows_of(trial)
    show(f"{title} in {time.monotonic() - began:.1f} s; in brackets 95 % intervals, by prompt")
    for name, text in table:
        show(f"{name:<20}{text}")
    if folder:
        with refused_by_disk(folder):
            folder.mkdir(parents=True, exist_ok=True)
            write_json(task_file(folder), {"title": title, "rows": table})
