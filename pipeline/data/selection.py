"""Choose the records of one stage: evaluation rows first, then the stage's share of what is left."""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Literal

from pipeline.data.counts import Counts
from pipeline.data.formats import Record, read_records
from pipeline.data.samples import LongRows
from pipeline.data.sources import parse_path, read_rows
from pipeline.data.splits import Shares, is_eval, is_kept, parse_shares, step_of
from pipeline.data.templates import TrainTurns
from pipeline.errors import InputError

Stage = Literal["sft", "reward", "ppo", "text"]
# The share of data_split that a stage takes; 'text' (the ptx loss of step 3) takes all rows of its own files.
STEPS: dict[Stage, int] = {"sft": 0, "reward": 1, "ppo": 2, "text": 2}


@dataclass(frozen=True, slots=True, kw_only=True)
class DataOptions:
    """Everything that decides which samples a stage sees.

    data_path: paths, each with an optional ':weight'. sft_only_data_path: more rows for stage 'sft', whole instead of
    shared out. data_split: 'a,b,c' shares of the steps, or 'none' (every step sees all rows). eval_fraction: share of
    prompts to evaluate on, used where neither eval_data_path nor a source's own split says so. Lengths are in tokens.
    cache_dir: None for the user's cache directory.
    """

    data_path: tuple[str, ...]
    eval_data_path: tuple[str, ...] = ()
    sft_only_data_path: tuple[str, ...] = ()
    data_split: str = "2,4,4"
    eval_fraction: float = 0.1
    seed: int = 1234
    column_map: Mapping[str, str] = field(default_factory=dict)
    template: str = "auto"
    max_seq_len: int = 512
    max_prompt_seq_len: int = 256
    train_on_prompt: bool = False
    train_turns: TrainTurns = "all"
    long_pairs: LongRows = "drop"
    long_prompts: LongRows = "drop"
    cache_dir: str | None = None


@dataclass(frozen=True, slots=True)
class Selected:
    """The records to train on and those to evaluate on; no prompt is in both."""

    train: list[Record]
    eval: list[Record]


def parse_column_map(text: str) -> dict[str, str]:
    """`prompt=question,chosen=best` -> {"prompt": "question", "chosen": "best"}."""
    pairs = [part.partition("=") for part in text.split(",") if part.strip()]
    if wrong := [name for name, equals, value in pairs if not (name.strip() and equals and value.strip())]:
        raise InputError(f"--column_map {text}: {wrong[0]!r} has no column; wanted prompt=question,chosen=best")
    return {name.strip(): value.strip() for name, _, value in pairs}


def select_records(stage: Stage, options: DataOptions, counts: Counts) -> Selected:
    """Read the stage's sources and divide their records; order is that of the sources.

    Evaluation rows are those of eval_data_path, else a source's own test rows, else a share of its prompts by hash; all
    stages have the same ones. Raises InputError if no training row is left.
    """
    shares = None if stage == "text" else parse_shares(options.data_split)
    selected = Selected([], [])
    for text in options.data_path:
        _add(selected, _divided(text, options, counts), shares, stage, options.seed)
    for text in options.sft_only_data_path if stage == "sft" else ():
        _add(selected, _divided(text, options, counts), None, stage, options.seed)
    for text in options.eval_data_path:
        selected.eval.extend(_evaluation_records(_kept_records(text, options, counts)))
    train = _without_prompts_of(selected.eval, selected.train, counts)
    if not train:
        raise InputError(
            f"step {STEPS[stage] + 1} ({stage}): data_split {options.data_split} leaves no training row "
            f"of {', '.join(options.data_path)} ({len(selected.eval)} evaluation rows); a larger share or more rows "
            "are right"
        )
    if stage != "ppo":  # there every prompt is taken once, and its repetitions are counted
        _count_repeated(train, counts)
    return Selected(train, selected.eval)


def _count_repeated(records: Iterable[Record], counts: Counts) -> None:
    """Count rows that say the same as an earlier one. They are kept: sets weigh rows by repeating them."""
    seen: set[tuple[int, str | None, str | None]] = set()
    for record in records:
        content = (record.prompt_id, record.chosen, record.rejected)
        if content in seen:
            counts.add("row repeated (kept)", record.origin)
        seen.add(content)


def _add(selected: Selected, new: Selected, shares: Shares | None, stage: Stage, seed: int) -> None:
    selected.eval.extend(new.eval)
    step = STEPS[stage]
    selected.train.extend(r for r in new.train if shares is None or step_of(r.prompt_id, seed, shares) == step)


def _divided(text: str, options: DataOptions, counts: Counts) -> Selected:
    """One source's records, divided into training and evaluation."""
    records = _kept_records(text, options, counts)
    if options.eval_data_path:
        for record in records:
            if record.split == "test":
                counts.add("test row left out (eval_data_path is given)", record.origin)
        return Selected([record for record in records if record.split != "test"], [])
    if any(record.split == "test" for record in records):
        evaluated = [record.split == "test" for record in records]
    else:
        evaluated = [is_eval(record.prompt_id, options.seed, options.eval_fraction) for record in records]
    marked = list(zip(records, evaluated, strict=True))
    return Selected([r for r, is_marked in marked if not is_marked], [r for r, is_marked in marked if is_marked])


def _kept_records(text: str, options: DataOptions, counts: Counts) -> list[Record]:
    source = parse_path(text)
    records = read_records(read_rows(source.path), counts, column_map=options.column_map)
    return [record for record in records if is_kept(record.prompt_id, options.seed, source.weight)]


def _evaluation_records(records: list[Record]) -> list[Record]:
    """The test rows if the source has any, else all of it."""
    return [record for record in records if record.split == "test"] or records


def _without_prompts_of(evaluation: Iterable[Record], train: Iterable[Record], counts: Counts) -> list[Record]:
    evaluated = {record.prompt_id for record in evaluation}
    kept = []
    for record in train:
        if record.prompt_id in evaluated:
            counts.add("prompt is also an evaluation prompt", record.origin)
        else:
            kept.append(record)
    return kept
