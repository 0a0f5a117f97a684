"""Look at models, data and disks before a run: what would end a later stage is found before the first one starts.

`rlhf train` calls it for all of its stages in a process of its own, since tokenizers import torch; the dry run of a
stage calls it too. Which folders may be written is checked in `pipeline/run/output_checks.py`.
"""

import os
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import nullcontext
from dataclasses import dataclass, field
from functools import partial
from itertools import islice
from pathlib import Path
from types import MappingProxyType
from typing import TYPE_CHECKING, Any, TypeVar

from pipeline.configuration.flag_table import flag_table
from pipeline.configuration.names import normalise
from pipeline.configuration.stage import Stage, StageConfig
from pipeline.data.cache import load_or_build
from pipeline.data.counts import Counts
from pipeline.data.formats import read_records
from pipeline.data.selection import DataOptions, check_held_out, parse_shares
from pipeline.data.sources import is_cached, is_local, parse_path, read_rows
from pipeline.errors import EnvironmentFault, InputError, RunError, dashed, raise_lines
from pipeline.files import GIB, existing, free_bytes
from pipeline.hub import check_push, is_reachable, offline
from pipeline.launching.target import this_machine, with_constants, with_limit
from pipeline.run.data_split import data_of
from pipeline.run.earlier_runs import check_resume

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

    from pipeline.engine.start_models import StartModel
    from pipeline.models.source import ModelSource

T = TypeVar("T")
NO_OUTPUTS: Mapping[str, str] = MappingProxyType({})
# Records of each source that are tokenised for the lengths in a plan, and counted for its steps.
SAMPLED_RECORDS, COUNTED_RECORDS = 1_000, 200_000


@dataclass(slots=True)
class Findings:
    """The problems of a run that has not started, and what was not looked at.

    dry_run: hub ids that are not on this machine are noted, not downloaded.
    dashes: prefix of a flag of the current stage as the user types it (`--sft.`).
    flags: names of the current stage's flags.
    errors: lines that end the run as wrong input.
    faults: lines that end the run as faults of the environment.
    out_of_reach: reason -> hub ids that a dry run does not look at.
    """

    dry_run: bool
    dashes: str = "--"
    flags: frozenset[str] = frozenset()
    errors: list[str] = field(default_factory=list)
    faults: list[str] = field(default_factory=list)
    out_of_reach: dict[str, list[str]] = field(default_factory=dict)

    def look(self, flag: str, work: Callable[[], T]) -> T | None:
        """Return the result of `work`, or None after writing down its error under `flag`."""
        try:
            return work()
        except InputError as error:
            self.errors += [self.as_typed(flag, line) for line in str(error).splitlines()]
        except EnvironmentFault as error:
            self.faults += [self.as_typed(flag, line) for line in str(error).splitlines()]
        return None

    def as_typed(self, flag: str, line: str) -> str:
        """Return an error line that begins with a flag, with the stage's flags as the user types them."""
        line = line if line.startswith("--") else f"{flag}: {line}"
        return re.sub(r"--([\w-]+)", lambda m: self.dashes + m[1] if normalise(m[1]) in self.flags else m[0], line)

    def is_out_of_reach(self, hub_id: str, *, rows: bool = False) -> bool:
        """Return True, with a note, for a hub id that a dry run does not look at; rows: it is a data set."""
        if self.dry_run and not (is_cached(hub_id) if rows else is_reachable()):
            reason = "a dry run downloads no rows" if is_reachable() else "no network"
            self.out_of_reach.setdefault(reason, []).append(hub_id)
            return True
        return False

    def notes(self) -> list[str]:
        """Return a line of the hub ids that were not looked at, for each reason."""
        return [f"not looked at ({why}): {', '.join(dict.fromkeys(ids))}" for why, ids in self.out_of_reach.items()]


def look_before_start(
    stages: Mapping[Stage, Any],
    *,
    dry_run: bool,
    named_by_section: bool = False,
    base_of_output: Mapping[str, str] = NO_OUTPUTS,
) -> list[str]:
    """Look at start models, one row of each source and free disk space; return lines on what was not looked at.

    Args:
        stages: stage -> configuration of the stages to run, in order. A model that one of them makes is not looked
            at; settings are checked against the model that it starts from.
        named_by_section: call flags `--sft.data-path`, as the user of `rlhf train` types them.
        base_of_output: folder of an earlier stage, which is not among `stages`, -> the model that stage starts from.

    Raises:
        InputError, EnvironmentFault: all problems, one per line.
    """
    findings = Findings(dry_run)
    bases = {folder: model_in_reach(findings, start) for folder, start in base_of_output.items()}
    elsewhere = any(config.run.target for config in stages.values())  # on a machine of unknown disks and packages
    needed: dict[int, tuple[Path, int]] = {}  # disk -> a folder on it, and the bytes of outputs
    for stage, config in stages.items():
        findings.dashes = f"--{stage.section}." if named_by_section else "--"
        findings.flags = frozenset(flag_table(type(config)))
        errors = len(findings.errors)
        models = stage.start_models(config, bases)
        start = look_at_models(findings, models, bases, elsewhere=elsewhere)
        is_usable = len(findings.errors) == errors
        tokenizer = look_at_tokenizer(findings, config, models[0].source) if start else None
        if not elsewhere:
            findings.look("--resume", partial(check_resume, config.run.resume))
            findings.look("--push-to-hub", partial(check_push, config.run.push_to_hub))
        if (gib := config.run.gpu_memory_gib) and not dry_run:  # whose plan looks at it
            findings.look("--gpu-memory-gib", partial(with_limit, with_constants(this_machine(1)), gib))
        seq2seq = bool(start) and models[0].source.is_encoder_decoder
        data = findings.look("--column-map", partial(data_of, stage, config, seq2seq=seq2seq)) or ()
        for options in data:
            look_at_rows(findings, options, tokenizer)
        if stage.preflight is not None and len(findings.errors) == errors:
            findings.look(stage.section, partial(stage.preflight, config, columns_of(data)))
        if len(findings.errors) == errors:
            look_at_all_rows(findings, stage, config, data, tokenizer)
        bases |= {str(folder): start for folder in config.outputs[:1]}
        for folder, size in output_bytes(stage, config, bases) if is_usable else ():
            disk = os.stat(existing(folder)).st_dev
            needed[disk] = (folder, needed.get(disk, (folder, 0))[1] + size)
    for folder, size in () if elsewhere else needed.values():
        if size > (free := free_bytes(folder)):
            findings.faults.append(
                f"{folder}: the outputs need {size / GIB:.3g} GiB or more, {free / GIB:.3g} GiB are free; "
                "free some, name a folder on another disk, or give --keep-checkpoints 0"
            )
    if findings.errors:
        raise InputError("\n".join(dict.fromkeys(findings.errors + findings.faults)))
    raise_lines(dict.fromkeys(findings.faults), EnvironmentFault)
    return findings.notes()


def look_at_models(
    findings: Findings, models: "Sequence[StartModel]", base_of_output: Mapping[str, str], *, elsewhere: bool
) -> str:
    """Make the checks of a stage's `StartModel`s; return the path whose tokenizer reads its data, "" if unusable.

    elsewhere: the run is on another machine, with packages of its own.
    """
    usable: list[str] = []  # paths of models whose configuration can be read, "" for the others
    for model in models:
        for check in () if elsewhere else model.packages:
            findings.look(model.flag, check)
        usable.append(findings.look(model.flag, partial(model_path, findings, model, base_of_output)) or "")
        for check in model.fits if all(usable) else ():
            findings.look(model.flag, check)
    if all(usable) and not findings.errors:
        for model in models:
            if model.path not in base_of_output:
                model.warn_of_limits()
    return usable[0]


def model_in_reach(findings: Findings, path: str) -> str:
    """Return a path, or "" with a note for a hub id that a dry run does not reach."""
    return path if Path(path).expanduser().is_dir() or not findings.is_out_of_reach(path) else ""


def model_path(findings: Findings, model: "StartModel", base_of_output: Mapping[str, str]) -> str:
    """Return the path of a start model, or of what it will be made from; "" for one that is of no use or out of reach.

    Raises:
        InputError, EnvironmentFault: its files are no model of the right kind.
    """
    path = base_of_output.get(model.path)
    if path is None:
        model.check_kind(model.path, model.flag)
        path = model_in_reach(findings, model.path)
    if path:
        model.source.check(model.flag)
    return path


def look_at_tokenizer(
    findings: Findings, config: StageConfig, source: "ModelSource"
) -> "PreTrainedTokenizerBase | None":
    """Return the tokenizer of a stage with its chat template; None where it cannot be used."""
    from pipeline.models.source import prepare_tokenizer

    data = config.data
    return findings.look("--template", partial(prepare_tokenizer, source, data.template, data.chat_template_kwargs))


def look_at_rows(findings: Findings, options: DataOptions, tokenizer: "PreTrainedTokenizerBase | None") -> None:
    """Render and tokenise one row of each source; without a tokenizer only read it."""
    data_flag = "unsupervised_data_path" if options.rows == "blocks" else "data_path"
    for name, texts in (
        (data_flag, options.data_path),
        ("eval_data_path", options.eval_data_path),
        ("sft_only_data_path", options.sft_only_data_path),
    ):
        flag = dashed(name)
        for text in texts:
            path, _ = findings.look(flag, partial(parse_path, text)) or ("", 1.0)
            if path and (is_local(path) or not findings.is_out_of_reach(path, rows=True)):
                with offline() if findings.dry_run else nullcontext():
                    findings.look(flag, partial(first_row, path, options, tokenizer))


def columns_of(data: Sequence[DataOptions]) -> set[str]:
    """Return the columns of the first record of each source that is on this machine."""
    columns = set[str]()
    for options in data:
        paths = [parse_path(text)[0] for text in (*options.data_path, *options.eval_data_path)]
        for records in (
            read_records(read_rows(path), Counts(), column_map=options.column_map) for path in paths if is_local(path)
        ):
            columns |= set(next(records).columns)
    return columns


def look_at_all_rows(
    findings: Findings,
    stage: Stage,
    config: StageConfig,
    data: Sequence[DataOptions],
    tokenizer: "PreTrainedTokenizerBase | None",
) -> None:
    """Make those checks of `prepare_stage` that need all rows, where all sources are in reach.

    Rows are read where flags alone hold none out, and prepared in the cache where sources are not the checkpoint's.
    """
    from pipeline.preparation.inputs import check_rows

    names = ("data_path", "eval_data_path", "sft_only_data_path")
    paths = [parse_path(text)[0] for options in data for name in names for text in getattr(options, name)]
    if any(not is_local(path) and findings.is_out_of_reach(path, rows=True) for path in paths):
        return
    with offline() if findings.dry_run else nullcontext():
        if getattr(config, "keep_best", False) and not (data[0].eval_fraction or data[0].eval_data_path):
            sources = (read_records(read_rows(path), Counts(), column_map=data[0].column_map) for path in paths)
            tests = (record for records in sources for record in records if record.split == "test")
            findings.look("--keep-best", lambda: check_held_out(any(True for _ in tests)))
        if tokenizer and not config.run.target:
            prepared = (load_or_build(options, tokenizer).train for options in data)
            findings.look(stage.section, partial(check_rows, stage.run_folder(config.run), config, prepared))


def first_row(path: str, options: DataOptions, tokenizer: "PreTrainedTokenizerBase | None") -> None:
    """Tokenise records of a source until one gives a row; without a tokenizer only read one.

    Raises:
        InputError: the source cannot be read, or has no row that the stage can use.
    """
    counts = Counts()
    for record in read_records(read_rows(path), counts, column_map=options.column_map):
        kind = options.kind.of_record(is_text=record.text is not None)
        if tokenizer is None or any(True for _ in kind.rows([record], tokenizer, options, counts)):
            return
    raise InputError(f"{path}: no row that stage {options.title} can use: {'; '.join(counts.lines())}")


@dataclass(frozen=True, slots=True)
class Sample:
    """The rows of a source that its first records give.

    line: rows, their lengths, what is dropped, and the stage's share, in words; empty for a hub data set that was not
        downloaded before.
    rows: estimated rows to train on in one epoch; None where they were not counted.
    """

    line: str
    rows: float | None


def sample_sources(stage: Stage, config: StageConfig, start: str) -> Iterator[Sample]:
    """Yield a sample of each source of a stage, which was looked at before. Rows that are packed are not counted.

    Args:
        start: the path of the model whose tokenizer reads the data.
    """
    from pipeline.models.source import ModelSource

    tokenizer = look_at_tokenizer(Findings(dry_run=True), config, ModelSource(start)) if start else None
    for options in data_of(stage, config):
        sizes = parse_shares(options.data_split) if options.shares else None
        share = sum(sizes[index] for index in options.shares) if sizes else 1.0
        note = f"; {share:.0%} of the prompts are for this stage" if sizes else ""
        for text in options.data_path:
            path, weight = parse_path(text)
            if tokenizer is None or not (is_local(path) or is_cached(path)):
                yield Sample("", None)
                continue
            with offline():
                line, rows = sample_of(path, options, tokenizer)
            if options.rows == "blocks":
                rows = 0.0
            elif options.mixture == "ratio" or options.sft_only_data_path or getattr(config.data, "packing", False):
                rows = None
            yield Sample(f"{path}: {line}{note}", None if rows is None else rows * share * weight)


def sample_of(path: str, options: DataOptions, tokenizer: "PreTrainedTokenizerBase") -> tuple[str, float | None]:
    """Describe the first records of a source: number of rows, their tokens, and the most frequent reason for a drop.

    Returns this text, and the estimated rows to train on in the whole source; None for very many records.
    """
    counts, lengths, read, tests = Counts(), list[int](), 0, 0
    records = read_records(read_rows(path), counts, column_map=options.column_map)
    for record in islice(records, SAMPLED_RECORDS):
        read, tests = read + 1, tests + (record.split == "test")
        kind = options.kind.of_record(is_text=record.text is not None)
        for row in kind.rows([record], tokenizer, options, counts):
            lengths.append(max(len(getattr(row, name)) for name in row.__slots__ if name.endswith("ids")))
    lengths.sort()
    tokens = f" of {lengths[0]} to {lengths[-1]} tokens, half up to {lengths[len(lengths) // 2]}" if lengths else ""
    fates = "".join(f"; {line}" for line in counts.lines()[:1])
    held_out = tests / max(read, 1) or (0.0 if options.eval_data_path else options.eval_fraction)
    number = read + sum(1 for _ in islice(records, COUNTED_RECORDS))
    rows, is_whole = len(lengths) * (1 - held_out) * number / max(read, 1), next(records, None) is None
    sampled = f"all {read:,}" if number == read else f"the first {read:,} of {'' if is_whole else 'over '}{number:,}"
    dropped = f", {counts.outcomes['dropped']:,} dropped"
    return f"{len(lengths):,} rows{tokens} from {sampled} records{dropped}{fates}", rows if is_whole else None


def output_bytes(stage: Stage, config: StageConfig, base_of_output: Mapping[str, str]) -> Iterator[tuple[Path, int]]:
    """Yield (folder, bytes) for the smallest outputs of a stage, as its plan counts them: its models, and a checkpoint.

    It yields nothing if a model cannot be planned because its configuration is not here.
    """
    from pipeline.planning.disk import outputs

    dtype = config.deepspeed.dtype if config.deepspeed.dtype != "auto" else this_machine(1).dtype
    try:
        models = stage.needs(config, base_of_output, dtype, 1).models
        taken = outputs(models, dtype, config.run, saves_adapters=config.deepspeed.save_adapter_only)
    except RunError:
        return  # the check of the model reports it
    yield from zip(config.outputs, taken.models, strict=True)
    if taken.num_checkpoints:
        yield stage.run_folder(config.run), taken.checkpoint
