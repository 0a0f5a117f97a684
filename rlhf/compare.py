"""Compare two or more models on the same prompts; with reward models or functions also by scores and win rates."""

import json
import time
from collections.abc import Iterable, Sequence
from dataclasses import replace
from itertools import product
from pathlib import Path
from typing import Any, Literal

from rich.console import Console

from pipeline.configuration.flag_table import flag, flat_items
from pipeline.configuration.groups import TOKEN_FLAGS, Dtype
from pipeline.console import code_span
from pipeline.data.turns import Turns
from pipeline.errors import EnvironmentFault, InputError, RunError, counted, printable, say
from pipeline.files import OURS, read_object, refused_by_disk, write_text
from pipeline.inference.answer_rows import Answer
from pipeline.inference.answer_settings import AnswerSettings
from pipeline.inference.comparison import LABELS, Contestant, figures, markdown, print_comparison, to_json
from pipeline.inference.prompt_lists import bundled_prompts, other_columns, read_prompts, shown_prompt
from pipeline.models.paths import check_language_model, check_reward_model, last_part
from pipeline.redact import masked
from pipeline.rewards.functions import RewardFunction, parse_reward_functions
from pipeline.rewards.pool import Responses, RewardPool
from pipeline.rewards.worker_flags import WorkerFlags, reward_pool
from pipeline.run.entry import command, command_flags

OTHER = "other_response"  # column in which the judge of pairs gets the response that it is shown first
MIN_RATINGS = 8  # answers of the judge before the comparison may end because none has a rating; chosen by hand
MIN_ESTIMATE_S = 20.0  # remaining seconds above which the command prints how long it will take; chosen by hand


class CompareConfig(WorkerFlags):
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
    reward_model: list[str] = flag(
        [],
        "Folders of reward models that score all answers; the first decides the wins, each has rows of its own",
        kind="path",
        aliases=("reward_model_name_or_path",),
    )
    reward_function: list[str] = flag(
        [],
        "Functions whose weighted sum decides the wins: FILE.py:NAME or a built-in NAME, a :WEIGHT after it",
        aliases=("reward",),
    )
    judge_pairs: bool = flag(False, "Show the judge of --reward-function two answers at once, in both orders")
    prompts: str = flag(
        "", "File of prompts: .txt, one per line; .json or .jsonl with `prompt`; none: bundled", kind="path"
    )
    language: Literal["English", "Chinese", "Japanese"] = flag(
        "English", "Which bundled prompts to use: 108 English, 32 Chinese or 32 Japanese ones"
    )
    output: str = flag(
        "", "Write <output>.html, .md and .json (in a folder prompt_eval.*); none: print only", kind="path"
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
    functions, judges = functions_and_judges(config)
    scorer_names = reward_names(config.reward_model)
    if (sum_name := " + ".join(one.name for one in functions)) in scorer_names:
        raise InputError(f"--reward-function: {sum_name!r} is a reward model's name too; rename the function or folder")
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
    for path in config.reward_model:
        ModelSource(path).check("--reward-model")
    if len(config.reward_model) == 1 and not config.reward_function:
        say(*unseen_note(paths, config.reward_model[0]))

    with reward_pool(config, functions) as pool, reward_pool(config, judges) as judge_pool:
        names = sorted({name for row in other_columns(config.prompts) for name in row})
        if judges and OTHER in names:
            raise InputError(f"--judge-pairs: --prompts has the column {OTHER!r}, which it fills; rename yours")
        pool.check(names)
        judge_pool.check([*names, OTHER])
        contestants = [
            answered(config, label, path, prompts, num_models=0 if index else len(paths))
            for index, (label, path) in enumerate(zip(LABELS, paths, strict=False))
        ]
        scores = {sum_name: function_scores(config, pool, contestants, prompts)} if functions else {}
        failure: RunError | None = None
        try:
            for index in range(1, len(paths) if judges else 0):
                contestants[index] = with_preferences(config, judge_pool, contestants[0], contestants[index], prompts)
        except (InputError, EnvironmentFault) as error:  # the comparison ends with it once the answers are written
            failure, contestants = error, [replace(one, preferences=()) for one in contestants]
    for name, path in scorer_names.items():
        scores[name] = model_scores(config, path, contestants, prompts)
    contestants = with_scores(contestants, scores)

    texts = [shown_prompt(turns) for turns in prompts]
    print_comparison(Console(highlight=False), texts, contestants)
    if prefix is not None:
        write_files(prefix, config, texts, contestants)
    if failure:
        raise failure


def model_paths(config: CompareConfig) -> list[str]:
    """Return the models in order. Raises InputError unless there are two or more, named in one of the two ways."""
    pair = [config.model_name_or_path_baseline, config.model_name_or_path_finetune]
    if config.model and any(pair):
        raise InputError("--model: give this, or --model-name-or-path-baseline and --model-name-or-path-finetune")
    paths = config.model or [path for path in pair if path]
    if len(paths) < 2:
        raise InputError(f"--model: got {len(paths)}, expected two or more, like --model output/sft output/actor")
    return paths


def reward_names(paths: list[str]) -> dict[str, str]:
    """Return the reward models by short names, which are their whole paths if two have the same last part.

    Raises InputError for a model that is given twice or cannot be a reward model.
    """
    for path in paths:
        check_reward_model(path, "--reward-model")
        if paths.count(path) > 1:
            raise InputError(f"--reward-model: {path} is given twice; name each model once")
    names = {last_part(path): path for path in paths}
    return names if len(names) == len(paths) else {path: path for path in paths}


def unseen_note(paths: list[str], reward_model: str) -> list[str]:
    """Return the note for a model that was trained with the only reward model; its folder has only its last part."""
    for path in paths:
        settings = read_object(Path(path).expanduser() / OURS)
        critic, rewards = (
            settings[name] if isinstance(settings.get(name), dict) else {} for name in ("critic", "rewards")
        )
        used = settings.get("reward_model_name_or_path")
        used = used or (not rewards.get("reward_function") and critic.get("model_name_or_path"))
        if used and last_part(str(used)) == last_part(reward_model):
            why = f"{path} was trained with {last_part(reward_model)} and may exploit it"
            return [f"note: {why}; add a --reward-model that training did not see"]
    return []


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


def functions_and_judges(config: CompareConfig) -> tuple[list[RewardFunction], list[RewardFunction]]:
    """Return the functions that score single answers, and with --judge-pairs the LLM judge. Raises InputError."""
    functions = parse_reward_functions(config.reward_function)
    if not config.judge_pairs:
        return functions, []
    judges = [replace(one, args={**one.args, "compared_with": OTHER}) for one in functions if one.target == "judge"]
    if not judges:
        raise InputError("--judge-pairs: --reward-function has no judge; add it with url and model of its endpoint")
    if judges[0].weight != 1:
        raise InputError("--judge-pairs: the judge takes no weight, as its preferences are in no sum; leave it out")
    return [one for one in functions if one.target != "judge"], judges


def responses(
    config: CompareConfig, prompts: list[Turns], groups: Iterable[tuple[int, Sequence[Answer], dict[str, str]]]
) -> list[Responses]:
    """Return what reward functions get for groups of answers.

    groups: index of a prompt, answers to it, and columns beside those of the prompt's row.
    """
    from pipeline.data.sources import is_conversational

    columns = other_columns(config.prompts)
    is_conversation = bool(columns) and is_conversational(config.prompts)
    columns = columns or [{}] * len(prompts)
    return [
        Responses(f"prompt {index + 1}", prompts[index], is_conversation, texts, ids, columns[index] | more)
        for index, rows, more in groups
        for texts, ids in [([row.text for row in rows], [[*row.ids] for row in rows])]
    ]


def function_scores(
    config: CompareConfig, pool: RewardPool, contestants: list[Contestant], prompts: list[Turns]
) -> list[float | None]:
    """Return the weighted sum of the reward functions for each answer of each model; None where there is none."""
    from pipeline.rewards.failures import check_values, failure_notes

    none = dict[str, str]()
    groups = [(index, rows, none) for contestant in contestants for index, rows in enumerate(contestant.answers)]
    parts = pool.gather([*map(pool.submit, responses(config, prompts, groups))])
    for function in pool.functions:
        values = [value for part in parts for value in part[function.name]]
        say(*failure_notes(function.name, values))
        check_values(function.name, values)
    weights = {one.name: one.weight for one in pool.functions}
    return [
        row.scored({name: values[index] for name, values in part.items()}, weights).reward
        for part, (_, rows, _) in zip(parts, groups, strict=True)
        for index, row in enumerate(rows)
    ]


def with_preferences(
    config: CompareConfig, pool: RewardPool, first: Contestant, other: Contestant, prompts: list[Turns]
) -> Contestant:
    """Return a model with the LLM judge's preferences between its answers and the baseline's, shown in both orders.

    Answers with equal texts tie without a question.
    """
    from pipeline.rewards.failures import check_values, failure_notes

    meetings = [list(product(*answers)) for answers in zip(first.answers, other.answers, strict=True)]
    orders = [
        (index, [second], {OTHER: shown_first.text})
        for index, pairs in enumerate(meetings)
        for pair in pairs
        if pair[0].text != pair[1].text  # both orders of equal texts are one question, whose ratings may differ
        for shown_first, second in (pair, pair[::-1])
    ]
    (judge,), questions, values = pool.functions, responses(config, prompts, orders), list[Any]()
    for start in range(0, len(questions), config.batch_size):  # each of a batch is asked at once
        handles = map(pool.submit, questions[start : start + config.batch_size])
        values += [value for part in pool.gather([*handles]) for value in part[judge.name]]
        if len(values) >= MIN_RATINGS:
            check_values(judge.name, values)
    check_values(judge.name, values)
    say(*failure_notes(judge.name, values))
    signs = [(value > 0.5) - (value < 0.5) if isinstance(value, float) else None for value in values]
    both = zip(signs[::2], signs[1::2], strict=True)
    judged = iter([None if there is None or back is None else (there, -back) for there, back in both])
    rows = [[(0, 0) if a.text == b.text else next(judged) for a, b in pairs] for pairs in meetings]
    return replace(other, preferences=tuple(map(tuple, rows)))


def model_scores(
    config: CompareConfig, path: str, contestants: list[Contestant], prompts: list[Turns]
) -> list[float | None]:
    """Return the raw scores of a reward model for each answer of each model."""
    from pipeline.inference.answer_scores import load_scorer, score_answers
    from pipeline.inference.answers import resolve_dtype

    scorer, scores = load_scorer(path, dtype=resolve_dtype(config.dtype)), list[float | None]()
    for contestant in contestants:  # one by one: equal answers of two models are in equal batches, and so tie
        pairs = [(turns, row) for turns, rows in zip(prompts, contestant.answers, strict=True) for row in rows]
        answers = [(turns, row.text, row.finished) for turns, row in pairs]
        scores += score_answers(scorer, answers, batch_size=config.batch_size)
    return scores


def with_scores(contestants: list[Contestant], scores: dict[str, list[float | None]]) -> list[Contestant]:
    """Return the contestants with the scores of their answers, of which the first decides.

    Args:
        scores: name of a scorer -> its scores of all answers, in order.
    """
    by_answer = (dict(zip(scores, each, strict=True)) for each in zip(*scores.values(), strict=True))

    def scored(row: Answer) -> Answer:
        by_name = next(by_answer)
        return replace(row, scores=by_name, reward=next(iter(by_name.values())))

    return [
        replace(one, answers=tuple(tuple(map(scored, rows)) for rows in one.answers)) if scores else one
        for one in contestants
    ]


def write_files(prefix: Path, config: CompareConfig, texts: list[str], contestants: list[Contestant]) -> None:
    """Write the comparison as `<prefix>.json`, `<prefix>.md` and `<prefix>.html`."""
    from pipeline.reporting.page import templates  # with matplotlib

    left_out = {"model", "output"} | ({} if config.reward_function else WorkerFlags.model_fields).keys()
    settings = {
        name: masked(value) for name, value in flat_items(config) if value not in ("", []) and name not in left_out
    }
    content = to_json(texts, contestants, settings)
    words = {name: ", ".join(value) if isinstance(value, list) else str(value) for name, value in settings.items()}
    listed = ", ".join(f"{name} {code_span(printable(text))}" for name, text in words.items())
    written, page = time.strftime("%Y-%m-%d %H:%M"), templates().get_template("comparison.html.j2")
    html = page.render(content, name=prefix.name, written=written, words=words, figures=figures(contestants))
    # with_name, not with_suffix: a prefix such as run-0.5 contains a dot.
    files = [prefix.with_name(f"{prefix.name}.{suffix}") for suffix in ("json", "md", "html")]
    with refused_by_disk(prefix):
        write_text(files[0], json.dumps(content, ensure_ascii=False, indent=1, allow_nan=False) + "\n")
        write_text(files[1], markdown(texts, contestants, f"Settings: {listed}."))
        write_text(files[2], html)
    say(f"written: {', '.join(map(str, files))}")


main = command(run, "rlhf compare")
