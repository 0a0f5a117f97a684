"""Choose the records of one stage: evaluation rows first, then the stage's share of what is left."""

import hashlib
import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Literal

from pipeline.data.counts import Counts
from pipeline.data.formats import Record, read_records
from pipeline.data.sources import parse_path, read_rows
from pipeline.data.templates import TrainTurns
from pipeline.data.tokenization import LongRows
from pipeline.errors import InputError

Stage = Literal["sft", "reward", "ppo", "text"]
# The share of data_split that a stage takes; 'text' (the ptx loss of step 3) takes all rows of its own files.
STEPS: dict[Stage, int] = {"sft": 0, "reward": 1, "ppo": 2, "text": 2}
Shares = tuple[float, float, float]


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


def parse_shares(text: str) -> Shares | None:
    """Shares of steps 1, 2, 3 from text like '2,4,4', normalised to sum 1. 'none' gives None: every step sees all rows.

    Raises InputError unless there are three finite numbers >= 0 with a positive sum.
    """
    if text.strip().lower() == "none":
        return None
    try:
        numbers = [float(part) for part in text.split(",")]
    except ValueError:
        numbers = []
    if len(numbers) != 3 or not all(math.isfinite(n) and n >= 0 for n in numbers) or sum(numbers) <= 0:
        raise InputError(f"data_split {text!r}: three numbers >= 0 like 2,4,4 (steps 1, 2, 3), or none, are right")
    first, second, third = (number / sum(numbers) for number in numbers)
    return first, second, third


def step_of(prompt_id: int, seed: int, shares: Shares) -> int:
    """The one step, 0, 1 or 2, that trains on this prompt. A step of share 0 is never returned."""
    position = _uniform("step", seed, prompt_id)
    last = max(step for step, share in enumerate(shares) if share > 0)
    for step in range(last):
        if position < sum(shares[: step + 1]):
            return step
    # The last share takes what rounding leaves of the interval.
    return last


def is_eval(prompt_id: int, seed: int, fraction: float) -> bool:
    """True if the prompt is an evaluation row; about `fraction` of all prompts are."""
    return _uniform("eval", seed, prompt_id) < fraction


def is_kept(prompt_id: int, seed: int, weight: float) -> bool:
    """True if a source of this weight keeps the prompt; weight 1 keeps all."""
    return _uniform("weight", seed, prompt_id) < weight


def _uniform(purpose: str, seed: int, prompt_id: int) -> float:
    """A float64 in [0, 1) with 53 random bits, from a hash of its arguments."""
    digest = hashlib.blake2b(f"{purpose}:{seed}:{prompt_id}".encode(), digest_size=8).digest()
    return (int.from_bytes(digest, "big") >> 11) / 2**53
