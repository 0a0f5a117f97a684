"""Evaluate models on held-out rows in one table: `rlhf eval gpt2 output/sft output/actor --data-path held_out.jsonl`.

Of a language model it has the perplexity of the rows' answers and figures of sampled answers, of a reward model its
accuracy on pairs. Standard errors are over rows, and over prompts for sampled answers, since answers to one prompt
depend on each other.
"""

import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict
from itertools import pairwise
from pathlib import Path
from statistics import fmean
from typing import TYPE_CHECKING, Any

from rich.console import Console
from rich.table import Column, Table
from rich.text import Text

from pipeline.configuration.flag_table import flag
from pipeline.configuration.groups import Dtype
from pipeline.configuration.resolved import Resolved
from pipeline.errors import InputError, printable, show
from pipeline.files import refused_by_disk, write_text
from pipeline.inference.answer_rows import Answer
from pipeline.inference.answer_settings import SampleSettings
from pipeline.inference.comparison import LABELS, LOOKS
from pipeline.models.paths import check_reward_model, gives_scores
from pipeline.rewards.worker_flags import WorkerFlags, reward_pool
from pipeline.run.entry import command, command_flags
from pipeline.run.evaluations import Rows, difference_of
from rlhf.rewards.reward import checked_groups
from rlhf.rewards.sample import scorers
from step2_reward.config import RewardEvalConfig
from step2_reward.statistics import WORD, Estimate

if TYPE_CHECKING:
    from pipeline.models.source import ModelSource

# Keys of the accuracies by length in an evaluation of pairs -> their names in the table.
BY_LENGTH = {"shorter_wins": "accuracy, shorter preferred", "longer_wins": "accuracy, longer preferred"}
CHANGE = ": change"  # ends the name of a difference from the first language model
LEGEND = """
held-out perplexity: of the rows' answers, per token. NAME: mean score of sampled answers, pass@1 if scores are 0 or 1.
NAME, best of k: mean best score of the answers to a prompt, then pass@k. distinct-2: share of distinct pairs of words
in the answers to a prompt. answer length: in tokens. change: from the first language model on the same rows or prompts.
+-: standard error over rows or prompts, 0 if all have the same value."""


class EvalConfig(WorkerFlags, RewardEvalConfig):
    """Evaluate models on held-out rows: `rlhf eval gpt2 output/sft output/actor --data-path held_out.jsonl`."""

    model: list[str] = flag(  # type: ignore[assignment]  # several, where the evaluation of a reward model has one
        ...,
        "Language models, the first is the baseline, and reward models",
        min_length=1,
        max_length=len(LABELS),
        kind="path",
        positional=True,
    )
    reward_function: list[str] = flag([], "Functions that score sampled answers: FILE.py:NAME or a built-in NAME")
    reward_model: list[str] = flag([], "Reward models that score sampled answers, folders or hub ids", kind="path")
    output: str = flag("", "Folder of runs, whose report and models' cards show the figures", kind="path")
    seed: int = flag(1234, "Seed of the answers, the same for every model", ge=0)
    dtype: Dtype = flag("auto", "Data type of the weights (pairs: fp32); auto: bf16 if the device supports it, or fp32")
    sampling: SampleSettings = SampleSettings(temperature=1.0)


def run(argv: list[str], prog: str) -> None:
    """Check the command line, then evaluate, write and print."""
    resolved = command_flags(EvalConfig, argv, section="eval", prog=prog)
    folder = Path(resolved.config.output).expanduser()
    if not folder.is_dir():
        raise InputError(f"--output: {folder}: no such folder; name the output folder of a run")
    from pipeline.models.source import ModelSource
    from step2_reward.pair_scores import evaluate_folder

    sources = {path: ModelSource(path) for path in resolved.config.model}
    for source in sources.values():
        source.check("--model")
    judges = [path for path, source in sources.items() if gives_scores(source.config.architectures or [])]
    for path in judges:
        check_reward_model(path, "--model")
    figures = language_figures(resolved, {path: sources[path] for path in sources if path not in judges})
    figures |= {path: pair_figures(evaluate_folder(path, resolved)) for path in judges}
    content = json.dumps({path: {name: asdict(one) for name, one in figures[path].items()} for path in sources})
    if resolved.config.output:
        with refused_by_disk(folder):
            write_text(folder / "eval.json", content + "\n")
        for path in sources:
            if Path(path).expanduser().resolve().is_relative_to(folder.resolve()):
                write_to_card(path, figures[path], resolved.config)
    if resolved.config.json_output:
        show(content)
        return
    names = list(dict.fromkeys(name for path in sources for name in figures[path]))
    labels = dict(zip(LABELS, sources, strict=False))
    show(*(f"{label} = {printable(path)}" for label, path in labels.items()))
    table = Table("", *(Column(label, justify="right", overflow="fold") for label in labels), **LOOKS)
    for name in sorted(names, key=lambda name: names.index(name.removesuffix(CHANGE))):
        title = Text("  change" if name.endswith(CHANGE) else printable(name))
        table.add_row(title, *(shown(figures[path].get(name)) for path in sources))
    Console(highlight=False).print(table)
    show(LEGEND)


def write_to_card(path: str, figures: Mapping[str, Estimate], config: EvalConfig) -> None:
    """Write the figures of a model into its card, which may be shared."""
    from pipeline.checkpoints.cards import add_evaluation
    from pipeline.checkpoints.shared_names import code, data_name, shareable

    data = ", ".join(code(data_name(one)) for one in config.data_path)
    about = f"By `rlhf eval` on {data}; changes are from {code(str(shareable(config.model[0])))}, with standard errors."
    names = [name for name in figures if not name.endswith(CHANGE)]
    rows = ([code(name), shown(figures[name]), shown(figures.get(name + CHANGE))] for name in names)
    add_evaluation(Path(path).expanduser(), about, ("figure", "mean", "change"), rows)


def language_figures(resolved: Resolved, sources: Mapping[str, "ModelSource"]) -> dict[str, dict[str, Estimate]]:
    """Return the figures of each language model, and how they change from the first one's."""
    config: EvalConfig = resolved.config
    functions = scorers(config.reward_function, config.reward_model)
    from pipeline.data.selection import evaluation_options
    from pipeline.inference.answer_scores import evaluation_prompts, load_scorer, scored_answers
    from pipeline.inference.answers import load_chat_model, resolve_dtype
    from step1_sft.eval import perplexity_by_row

    dtype, rows = resolve_dtype(config.dtype), dict[str, dict[str, Rows]]()
    data = {path: evaluation_prompts(resolved, source) for path, source in sources.items()}
    with reward_pool(config, functions) as pool:
        pool.check({name for prompts in data.values() for name in prompts.columns})
        settings: Any = {"batch_size": config.batch_size, "seed": config.seed}
        for path, prompts in data.items():
            model = load_chat_model(path, dtype=dtype)
            if not rows:  # now that the first model has switched the progress bars of transformers off
                settings["scorers"] = [load_scorer(one, dtype=dtype) for one in config.reward_model]
            length = min(config.max_seq_len, model.num_positions or config.max_seq_len)
            options = evaluation_options(resolved, title="evaluation", max_seq_len=length)
            rows[path] = {"held-out perplexity": perplexity_by_row(model, options, batch_size=config.batch_size)}
            answers = scored_answers(model, prompts, pool, config.sampling, progress=f" of {path}", **settings)
            rows[path] |= answer_rows([one.row for one in prompts.prompts], checked_groups(answers))
            del model  # before the next one is loaded
    return {path: with_changes(each, rows[next(iter(sources))]) for path, each in rows.items()}


def answer_rows(prompts: Sequence[str], groups: Sequence[Sequence[Answer]]) -> dict[str, Rows]:
    """Return each figure of a model's answers by prompt, for the prompts where it has a value.

    The names of figures have a space or a hyphen, which the name of a reward function cannot have.

    Args:
        prompts: name of each prompt.
        groups: the answers to each prompt.
    """
    columns: dict[str, tuple[Callable[[Sequence[float]], float], Sequence[Sequence[float]]]] = {}
    for name in groups[0][0].scores:
        scores = [[score for one in group if (score := one.scores[name]) is not None] for group in groups]
        columns[name] = (fmean, scores)
        if len(groups[0]) > 1:
            columns[f"{name}, best of {len(groups[0])}"] = (max, scores)
    columns["distinct-2"] = (fmean, list(map(distinct_pairs, groups)))
    columns["answer length"] = (fmean, [[one.num_tokens for one in group] for group in groups])
    columns["truncated answers"] = (fmean, [[not one.finished for one in group] for group in groups])
    return {
        name: {(prompt, 0): (value_of(x), 1.0) for prompt, x in zip(prompts, lists, strict=True) if x}
        for name, (value_of, lists) in columns.items()
    }


def distinct_pairs(answers: Sequence[Answer]) -> list[float]:
    """Return the share of distinct pairs of neighbouring words in the answers to a prompt; [] if there is no pair."""
    pairs = [pair for one in answers for pair in pairwise(WORD.findall(one.text.lower()))]
    return [len(set(pairs)) / len(pairs)] if pairs else []


def with_changes(rows: Mapping[str, Rows], first: Mapping[str, Rows]) -> dict[str, Estimate]:
    """Return the mean of each figure over rows, and its change from that of `first` if some rows are the same."""
    figures = dict[str, Estimate]()
    for name, values in rows.items():
        if values:
            figures[name] = estimated({}, values)
        if rows is not first and values.keys() & first.get(name, {}).keys():
            figures[name + CHANGE] = estimated(first[name], values)
    return figures


def estimated(before: Rows, after: Rows) -> Estimate:
    """Return the difference of two means over rows, which may share some; the mean itself without rows before."""
    difference, error = difference_of(before, after)
    return Estimate(difference, None if error != error else error, len(after))


def pair_figures(report: Mapping[str, Any]) -> dict[str, Estimate]:
    """Return the figures of a reward model from the report of `evaluate_folder`."""
    named = {"accuracy": report["accuracy"]}
    named |= {BY_LENGTH[name]: one for name, one in report["accuracy_by_length"].items() if name in BY_LENGTH}
    calibration = Estimate(report["calibration"]["expected_error"], None, report["pairs"])
    return {name: Estimate(**one) for name, one in named.items()} | {"calibration error": calibration}


def shown(figure: Estimate | None) -> str:
    """Return a figure with its standard error as text."""
    error = f" +- {figure.standard_error:.2g}" if figure and figure.standard_error is not None else ""
    return f"{figure.mean:.3g}{error}" if figure else "-"


main = command(run, "rlhf eval")
