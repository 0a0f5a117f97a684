"""Write a model's answers to the prompts of files as JSON lines: `rlhf sample output/sft --data prompts.jsonl -n 8`."""

import os
from collections import Counter
from collections.abc import Iterable, Sequence
from contextlib import nullcontext
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, Self

from pydantic import model_validator

from pipeline.configuration.flag_table import flag
from pipeline.configuration.groups import Dtype
from pipeline.errors import InputError, counted, dashed, say
from pipeline.files import model_fingerprint
from pipeline.inference.answer_rows import RowLayout, ScoreSummary, prompt_columns, row_of
from pipeline.inference.answer_settings import SampleSettings
from pipeline.models.paths import check_language_model, check_reward_model, last_part
from pipeline.redact import masked
from pipeline.rendezvous import num_ranks
from pipeline.rewards.failures import RESPONSES, FailureWindow, counts_of, num_failed
from pipeline.rewards.functions import RewardFunction, folder_and_weight, parse_reward_functions
from pipeline.rewards.pool import Failure, RewardPool
from pipeline.rewards.worker_flags import WorkerFlags, reward_pool
from pipeline.run.entry import command, command_flags
from rlhf.rewards.sample_file import (
    SampleFile,
    check_output,
    is_joined,
    join_parts,
    open_samples,
    output_held,
    part_of,
)

if TYPE_CHECKING:
    from pipeline.inference.answer_scores import PromptData


class SampleConfig(WorkerFlags):
    """Sample answers of a model: `rlhf sample output/sft --data prompts.jsonl -n 8 --output answers.jsonl`."""

    model: str = flag(
        "", "Folder (a merged model or a LoRA adapter) or hub id", kind="path", positional=True, required=True,
        aliases=("model_name_or_path",),
    )  # fmt: skip
    data: list[str] = flag(
        [],
        "Files, folders or hub ids with prompts, read as for training",
        kind="path",
        required=True,
        aliases=("data_path",),
    )
    column_map: str = flag("", "Column names in your data: prompt=question,chosen=best")
    max_prompt_seq_len: int = flag(
        0, "Most tokens of a prompt, longer ones are dropped; 0: what --max-new-tokens leaves", ge=0
    )
    output: str = flag(
        "",
        "File of JSON lines, which the same command resumes and all ranks of torchrun write to; none: standard output",
        kind="path",
    )
    overwrite: bool = flag(False, "Replace --output instead of resuming it")
    write_as: RowLayout = flag(
        "answers",
        "Content of a row; answers: all to a prompt; sft: the best one, for stage 1; pairs: the best and the worst, "
        "for stage 2 or DPO",
        aliases=("as",),
    )
    reward_function: list[str] = flag(
        [],
        "Functions that score answers, FILE.py:NAME or a built-in NAME; a :WEIGHT after it multiplies its scores",
        aliases=("reward",),
    )
    reward_model: list[str] = flag(
        [],
        "Reward models that score answers, folders or hub ids; a :WEIGHT after one multiplies its raw scores",
        aliases=("reward_model_name_or_path",),
    )
    batch_size: int = flag(16, "Prompts whose answers are sampled at once", ge=1)
    seed: int = flag(1234, "Seed of the answers; an answer does not depend on its batch", ge=0)
    dtype: Dtype = flag("auto", "Data type of the weights; auto: bf16 if the device supports it, else fp32")
    sampling: SampleSettings = SampleSettings(temperature=1.0)

    @model_validator(mode="after")
    def _answers_are_told_apart(self) -> Self:
        n, is_scored = self.sampling.n, bool(self.reward_function or self.reward_model)
        if self.write_as == "pairs" and (n == 1 or not is_scored):
            raise ValueError("--write-as pairs: needs --n of at least 2, and --reward-function or --reward-model")
        if self.write_as == "sft" and n > 1 and not is_scored:
            which = f"that tells the best of {n} answers"
            raise ValueError(f"--write-as sft: needs a --reward-function or --reward-model {which}")
        self.reward_models()
        return self

    def reward_models(self) -> list[tuple[str, float]]:
        """Return folder or hub id and weight of each reward model. Raises ValueError: see `folder_and_weight`."""
        return [folder_and_weight(entry, "--reward-model") for entry in self.reward_model]


def run(argv: list[str], prog: str) -> None:
    """Check the command line, the prompts and the reward functions, then sample, score and write."""
    config = command_flags(SampleConfig, argv, section="sample", prog=prog).config
    if not config.model or not config.data:
        name = "data" if config.model else "model"
        raise InputError(f"{dashed(name)}: missing; for example: {prog} output/sft --data FILE")
    if (size := num_ranks()) > 1 and not config.output:
        raise InputError(f"--output: missing, and {size} ranks cannot share standard output; name a file")
    check_language_model(config.model, "--model")
    reward_models = [path for path, _ in config.reward_models()]
    functions = scorers(config.reward_function, reward_models)
    file = Path(config.output).expanduser() if config.output else None
    if file:
        read = {"--data": config.data, "--model": [config.model], "--reward-model": reward_models}
        check_output(file, read)
    from pipeline.dist import pick_device
    from pipeline.inference.answer_scores import read_prompts
    from pipeline.models.source import ModelSource

    for path in reward_models:
        ModelSource(path).check("--reward-model")
    rank, local_rank = (int(os.environ.get(name, "0")) for name in ("RANK", "LOCAL_RANK"))
    if size > 1:
        pick_device(local_rank)

    lengths = {"max_length": config.max_prompt_seq_len, "max_new_tokens": config.sampling.max_new_tokens}
    data = read_prompts(config.data, ModelSource(config.model), column_map=config.column_map, **lengths)
    num_prompts, settings = len(data.prompts), settings_of(config, functions, data)
    if file and size > 1:
        settings |= {"ranks": size}
        if config.overwrite:
            file.unlink(missing_ok=True)
        elif is_joined(file, settings):
            return
        data = replace(data, prompts=data.prompts[rank::size])
    whole, file = file, part_of(file, rank, size) if file and size > 1 else file
    lock = output_held(file) if file else nullcontext()
    pool = reward_pool(config, functions)
    with pool, lock:
        pool.check(data.columns)
        samples = open_samples(file, settings, overwrite=config.overwrite)
        if samples.last:
            say(f"{file}: resuming after prompt {samples.last} of {num_prompts}")
        if data.prompts and samples.last < data.prompts[-1].number:
            write_rows(config, data, pool, samples)
    if whole and size > 1 and (count := join_parts(whole, settings, rank=rank, size=size)):
        say(f"{whole}: {counted(count, 'row')} of {size} ranks")


def scorers(functions_given: Sequence[str], paths: Sequence[str]) -> list[RewardFunction]:
    """Return the reward functions. Raises InputError for an invalid function or reward model, or a repeated name."""
    functions = parse_reward_functions(functions_given)
    for path in paths:
        check_reward_model(path, "--reward-model")
    names = Counter([*(one.name for one in functions), *map(last_part, paths)])
    if twice := [name for name, count in names.items() if count > 1]:
        raise InputError(
            f"--reward-model: {twice[0]} names two rewards, expected a name for each; rename a folder or function"
        )
    return functions


def settings_of(config: SampleConfig, functions: Sequence[RewardFunction], data: "PromptData") -> dict[str, Any]:
    """Return the settings that rows depend on; a file with other settings is not resumed."""
    from pipeline.inference.answers import resolve_dtype

    return {
        "model": model_fingerprint(config.model),
        "prompts": data.digest,
        **config.sampling.model_dump(exclude={"stop_strings"} if not config.sampling.stop_strings else None),
        **{name: getattr(config, name) for name in ("seed", "write_as")},
        "dtype": str(resolve_dtype(config.dtype)).removeprefix("torch."),
        "reward_function": [
            [one.name, one.digest, one.weight, masked(one.args), *one.modules.items()] for one in functions
        ],
        "reward_model": [[model_fingerprint(path), weight] for path, weight in config.reward_models()] or None,
    }


def write_rows(config: SampleConfig, data: "PromptData", pool: RewardPool, samples: SampleFile) -> None:
    """Sample the missing answers of the file, and write a row for each prompt that yields one."""
    from pipeline.inference.answer_scores import load_scorer, scored_answers
    from pipeline.inference.answers import load_chat_model, resolve_dtype

    first, num_before = samples.last, samples.num_rows
    reasons, causes = Counter[str](), dict[str, Failure]()
    counts = {function.name: Counter[str]() for function in pool.functions}
    dtype = resolve_dtype(config.dtype)
    chat_model = load_chat_model(config.model, dtype=dtype)
    reward_models = [load_scorer(path, dtype=dtype, weight=weight) for path, weight in config.reward_models()]
    deviations = {model.name: model.deviation for model in reward_models if model.deviation}
    summary = ScoreSummary(deviations, max_tokens=config.sampling.max_new_tokens)
    settings: Any = {"first": first, "batch_size": config.batch_size, "seed": config.seed, "scorers": reward_models}
    progress = f", up to {data.prompts[-1].number}"
    rows = scored_answers(chat_model, data, pool, config.sampling, progress=progress, **settings)
    for prompt, answers, values in rows:
        summary.add(answers)
        columns = prompt_columns(prompt.messages, is_conversation=data.is_conversation)
        row = row_of(config.write_as, columns, answers)
        if isinstance(row, str):
            reasons[row] += 1
        else:
            samples.write(prompt.number, row)
        for name, results in values.items():
            counts[name].update(counts_of(results))
            if failures := [one for one in results if isinstance(one, Failure)]:
                causes.setdefault(name, failures[0])
    say(*summary.lines())
    num_new, num_prompts = samples.num_rows - num_before, sum(one.number > first for one in data.prompts)
    say(f"{counted(num_new, 'row')} of {counted(num_prompts, 'prompt')} written")
    print_notes(f"{counted(count, 'prompt')} without a row: {reason}" for reason, count in reasons.items())
    print_notes(
        f"{name} gave no value for {counted(num_failed(counts[name]), 'answer')}, at first ({one.kind}): {one.message}"
        for name, one in causes.items()
    )
    for name, one in causes.items():
        if num_failed(counts[name]) == counts[name][RESPONSES]:
            FailureWindow().check(name, [counts[name]], one)


def print_notes(lines: Iterable[str]) -> None:
    say(*(f"note: {line}" for line in lines))


main = command(run, "rlhf sample")
