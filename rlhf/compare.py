"""Compare two or more models on the same prompts; with a reward model also by scores and win rates."""

import json
import sys
import time
from dataclasses import replace
from pathlib import Path
from typing import Literal

from rich.console import Console

from pipeline.configuration.flag_table import flag, flat_items
from pipeline.configuration.groups import TOKEN_FLAGS, Dtype, Group
from pipeline.console import code_span
from pipeline.data.turns import Turns
from pipeline.errors import InputError, counted, printable, say
from pipeline.files import refused_by_disk, write_text
from pipeline.inference.answer_rows import Answer
from pipeline.inference.answer_settings import AnswerSettings
from pipeline.inference.comparison import Contestant, markdown, print_comparison, to_json
from pipeline.inference.prompt_lists import bundled_prompts, read_prompts, shown_prompt
from pipeline.models.paths import check_language_model, check_reward_model
from pipeline.run.entry import command, command_flags

LABELS = "ABCDEFGHIJKLMNOPQRSTUVWXYZ"
MIN_ESTIMATE_S = 20.0  # remaining seconds above which the command prints how long it will take; chosen by hand


class CompareConfig(Group):
    """Compare models: `rlhf compare output/sft output/actor --reward-model output/reward`."""

    model: list[str] = flag(
        [],
        "Folders or hub ids; the first is the baseline",
        max_length=len(LABELS),
        kind="path",
        aliases=("models",),
        positional=True,
        required=True,
        ignored=dict.fromkeys(("num_beam_groups", "penalty_alpha"), "it had no effect there either") | TOKEN_FLAGS,
    )
    model_name_or_path_baseline: str = flag("", "DeepSpeed-Chat's name for the first of two models")
    model_name_or_path_finetune: str = flag("", "DeepSpeed-Chat's name for the second of two models")
    reward_model: str = flag(
        "",
        "Folder of a reward model that scores all answers; none: no scores",
        kind="path",
        aliases=("reward_model_name_or_path",),
    )
    prompts: str = flag(
        "", "File of prompts: .txt, one per line; .json or .jsonl with `prompt`; none: bundled", kind="path"
    )
    language: Literal["English", "Chinese", "Japanese"] = flag(
        "English", "Which bundled prompts to use: 108 English, 32 Chinese or 32 Japanese ones"
    )
    output: str = flag(
        "", "Write <output>.json and <output>.md (in a folder prompt_eval.*); none: print only", kind="path"
    )
    batch_size: int = flag(8, "Number of prompts answered, or answers scored, at once", ge=1)
    seed: int = flag(1234, "Seed of sampled answers, the same for every model", ge=0)
    dtype: Dtype = flag("auto", "Data type of the weights; auto: bf16 if the device supports it, else fp32")
    sampling: AnswerSettings = AnswerSettings(max_new_tokens=100)


def run(argv: list[str], prog: str) -> None:
    """Check the command line, then answer, score, print and write."""
    resolved = command_flags(CompareConfig, argv, section="compare", prog=prog)
    config: CompareConfig = resolved.config
    paths = model_paths(config)
    for path in paths:
        check_language_model(path, "--model")
    if config.reward_model:
        check_reward_model(config.reward_model, "--reward-model")
    prompts = read_prompts(config.prompts) if config.prompts else bundled_prompts(config.language)
    prefix = output_prefix(config.output)

    # These checks read no weights; without them the comparison would fail after minutes.
    from pipeline.inference.answers import check_prompts
    from pipeline.models.source import ModelSource

    limit = config.sampling.max_new_tokens
    for path in paths:
        limit = check_prompts(path, prompts, limit, may_shorten=not resolved.is_given("max_new_tokens"))
    if limit < config.sampling.max_new_tokens:
        say(f"note: --max-new-tokens {limit}: the longest prompt leaves no more positions")
        config = config.model_copy(update={"sampling": config.sampling.model_copy(update={"max_new_tokens": limit})})
    if config.reward_model:
        ModelSource(config.reward_model).check("--reward-model")

    contestants = [
        answered(config, label, path, prompts, num_models=0 if index else len(paths))
        for index, (label, path) in enumerate(zip(LABELS, paths, strict=False))
    ]
    if config.reward_model:
        contestants = scored(config, contestants, prompts)

    texts = [shown_prompt(turns) for turns in prompts]
    print_comparison(Console(highlight=False), texts, contestants)
    if prefix is not None:
        write_files(prefix, config, texts, contestants)


def model_paths(config: CompareConfig) -> list[str]:
    """Return the models in order. Raises InputError unless there are two or more, named in one of the two ways."""
    pair = [config.model_name_or_path_baseline, config.model_name_or_path_finetune]
    if config.model and any(pair):
        raise InputError("--model: give this, or --model-name-or-path-baseline and --model-name-or-path-finetune")
    paths = config.model or [path for path in pair if path]
    if len(paths) < 2:
        raise InputError(f"--model: got {len(paths)}, expected two or more, like --model output/sft output/actor")
    return paths


def output_prefix(output: str) -> Path | None:
    """Create the folder of the files to write and return their prefix; None to write none."""
    if not output:
        return None
    prefix = Path(output).expanduser()
    prefix = prefix / "prompt_eval" if output.endswith("/") or prefix.is_dir() else prefix
    try:
        prefix.parent.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise InputError(f"--output: {output}: cannot create the folder {prefix.parent}: {error.strerror}") from None
    return prefix


def answered(config: CompareConfig, label: str, path: str, prompts: list[Turns], *, num_models: int = 0) -> Contestant:
    """Load a model, answer all prompts with it in order, and free it.

    Args:
        num_models: models that the estimate after the first batch counts; 0: print no estimate.
    """
    from pipeline.data.templates import encode_prompt
    from pipeline.inference.answers import generate_answers, load_chat_model, resolve_dtype

    began = time.perf_counter()
    chat_model = load_chat_model(path, dtype=resolve_dtype(config.dtype))
    encoded = [encode_prompt(chat_model.tokenizer, turns) for turns in prompts]
    loaded, rows = time.perf_counter(), list[tuple[Answer, ...]]()
    for start in range(0, len(encoded), config.batch_size):
        batch = encoded[start : start + config.batch_size]
        rows += map(tuple, generate_answers(chat_model, batch, config.sampling, seed=config.seed))
        if start == 0 and num_models:
            batch_s, share = time.perf_counter() - loaded, len(encoded) / len(batch)
            say(*estimate(loaded - began, batch_s * share, num_models, done_s=batch_s))
    count = sum(map(len, rows))
    say(f"{label} = {path}: {count} answers in {time.perf_counter() - began:.1f} s")
    return Contestant(label, path, tuple(rows))


def estimate(load_s: float, answer_s: float, num_models: int, *, done_s: float) -> list[str]:
    """Return the line that says how long all models take; none if less than MIN_ESTIMATE_S remain.

    Args:
        load_s: seconds that a model takes to load.
        answer_s: seconds that a model takes to answer all prompts.
        done_s: seconds of the first model's answers that have passed.
    """
    total_s = num_models * (load_s + answer_s)
    if total_s - load_s - done_s <= MIN_ESTIMATE_S:
        return []
    return [f"note: about {counted(max(1, round(total_s / 60)), 'minute')} for {num_models} models"]


def scored(config: CompareConfig, contestants: list[Contestant], prompts: list[Turns]) -> list[Contestant]:
    """Score all answers with the reward model; return the contestants with their scores."""
    from pipeline.inference.answer_scores import load_scorer, score_answers
    from pipeline.inference.answers import resolve_dtype

    scorer = load_scorer(config.reward_model, dtype=resolve_dtype(config.dtype))
    result = []
    for contestant in contestants:
        pairs = [(turns, row) for turns, rows in zip(prompts, contestant.answers, strict=True) for row in rows]
        texts = [(turns, row.text, row.finished) for turns, row in pairs]
        scores = iter(score_answers(scorer, texts, batch_size=config.batch_size))
        answers = tuple(tuple(replace(row, reward=next(scores)) for row in rows) for rows in contestant.answers)
        result.append(replace(contestant, answers=answers))
    return result


def write_files(prefix: Path, config: CompareConfig, texts: list[str], contestants: list[Contestant]) -> None:
    """Write the comparison as `<prefix>.json` and `<prefix>.md`."""
    settings = {
        name: value for name, value in flat_items(config) if value not in ("", []) and name not in ("model", "output")
    }
    content = to_json(texts, contestants, settings)
    listed = ", ".join(f"{name} {code_span(printable(str(value)))}" for name, value in settings.items())
    # with_name, not with_suffix: a prefix such as run-0.5 contains a dot.
    json_file, markdown_file = (prefix.with_name(prefix.name + suffix) for suffix in (".json", ".md"))
    with refused_by_disk(prefix):
        write_text(json_file, json.dumps(content, ensure_ascii=False, indent=1, allow_nan=False) + "\n")
        write_text(markdown_file, markdown(texts, contestants, f"Settings: {listed}."))
    say(f"written: {json_file} and {markdown_file}")


main = command(run, "rlhf compare")

if __name__ == "__main__":
    sys.exit(main(prog="python -m rlhf.compare"))
