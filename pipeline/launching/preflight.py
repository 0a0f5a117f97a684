"""Look at models, data and disks before a run: what would end a later stage is found before the first one starts.

`rlhf train` calls it for all of its stages in a process of its own, since tokenizers import torch; the dry run of a
stage calls it too. Which folders may be written is checked in `pipeline/run/output_checks.py`.
"""

import os
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from functools import partial
from math import prod
from pathlib import Path
from typing import Any, TypeVar

from pipeline.configuration.flag_table import flat_items
from pipeline.configuration.resume_rules import values_by_rule
from pipeline.data.counts import Counts
from pipeline.data.formats import read_records
from pipeline.data.selection import DataOptions, Stage, options_of
from pipeline.data.shards import TOKENISERS, kind_of
from pipeline.data.sources import is_local, parse_path, read_rows
from pipeline.errors import EnvironmentFault, InputError
from pipeline.files import GIB, existing, free_bytes
from pipeline.hub import is_reachable
from pipeline.run.layout import model_folders, run_folder

T = TypeVar("T")
REWARD_FLAG = "reward_model_name_or_path"
SAVED_BYTES = 2  # of a weight in a model folder, at least
STATE_BYTES = 12  # of a trained weight in a checkpoint: the weight and AdamW's moments in fp32


@dataclass(slots=True)
class Findings:
    """The problems of a run that has not started, and what was not looked at."""

    dry_run: bool
    errors: list[str] = field(default_factory=list)
    faults: list[str] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)

    def look(self, name: str, work: Callable[[], T]) -> T | None:
        """Return the result of `work`, or None after writing down its error under `name`, a flag."""
        try:
            return work()
        except InputError as error:
            self.errors += [line if line.startswith(name) else f"{name}: {line}" for line in str(error).splitlines()]
        except EnvironmentFault as error:
            self.faults += [f"{name}: {line}" for line in str(error).splitlines()]
        return None

    def is_out_of_reach(self, name: str, hub_id: str, *, rows: bool = False) -> bool:
        """Return True, with a note, for a hub id that a dry run does not look at."""
        if self.dry_run and (rows or not is_reachable()):
            reason = "a dry run downloads no rows" if is_reachable() else "no network"
            self.notes.append(f"{name} {hub_id}: not looked at: {reason}")
            return True
        return False


def look_before_start(stages: Mapping[str, Any], *, dry_run: bool, named_by_section: bool = False) -> list[str]:
    """Look at start models, one row of each source and free disk space; return lines on what was not looked at.

    Args:
        stages: section -> configuration of the stages to run, in order. A model that one of them makes is not looked
            at, and the model that it starts from stands for it.
        named_by_section: call flags `--sft.data_path`, as the user of `rlhf train` types them.

    Raises:
        InputError, EnvironmentFault: all problems, one per line.
    """
    findings, made = Findings(dry_run), dict[str, str]()
    needed: dict[int, tuple[Path, int]] = {}  # of each disk: a folder on it, and the bytes of outputs
    for section, config in stages.items():
        dashes = f"--{section}." if named_by_section else "--"
        start = look_at_models(findings, config, section, dashes, made)
        for name, value in flat_items(config):
            if value == "nf4":
                findings.look(f"{dashes}{name}", partial(quantization, value))
        tokenizer = look_at_tokenizer(findings, config, dashes, start)
        for stage, options in findings.look(f"{dashes}column_map", partial(data_of, config, section)) or ():
            look_at_rows(findings, stage, options, dashes, tokenizer)
        made |= {str(folder): start for folder in model_folders(config, section)[:1]}
        for folder, size in output_bytes(config, section, made):
            disk = os.stat(existing(folder)).st_dev
            needed[disk] = (folder, needed.get(disk, (folder, 0))[1] + size)
    for folder, size in needed.values():
        if size > (free := free_bytes(folder)):
            findings.faults.append(
                f"{folder}: the outputs need {size / GIB:.3g} GiB or more, {free / GIB:.3g} GiB are free; "
                "free some, name a folder on another disk, or give --keep_checkpoints 0"
            )
    if findings.errors:
        raise InputError("\n".join(dict.fromkeys(findings.errors + findings.faults)))
    if findings.faults:
        raise EnvironmentFault("\n".join(dict.fromkeys(findings.faults)))
    return list(dict.fromkeys(findings.notes))


def look_at_models(findings: Findings, config: Any, section: str, dashes: str, made: Mapping[str, str]) -> str:
    """Check the files of a stage's start models; return the path whose tokenizer reads its data, "" if unusable."""
    tokenizer_path = ""
    for number, (name, path) in enumerate(values_by_rule(config, "model").items()):
        usable = made.get(path, "")
        # Without its flag, the reward model is the folder that the critic starts from.
        if path not in made and (path or name != REWARD_FLAG):
            is_policy = number == 0 and section != "reward"
            flag = f"{dashes}{name}"
            usable = findings.look(flag, partial(model, findings, flag, path, is_policy)) or ""
        if usable and section != "sft":
            findings.look(f"{dashes}{name}", partial(decoder, usable, f"{dashes}{name}"))
        tokenizer_path = usable if number == 0 else tokenizer_path
    return tokenizer_path


def model(findings: Findings, flag: str, path: str, is_policy: bool) -> str:
    """Return `path` if its files are a model, "" for a hub id out of reach. Raises InputError, EnvironmentFault."""
    from pipeline.models.paths import check_language_model, check_model_path

    check = check_language_model if is_policy else check_model_path
    check(path, flag)
    if not Path(path).expanduser().is_dir() and findings.is_out_of_reach(flag, path):
        return ""
    from pipeline.models.loading import check_model

    check_model(path, flag)
    return path


def decoder(path: str, flag: str) -> None:
    """Raise InputError for an encoder-decoder model: stages 2 and 3 have none."""
    from pipeline.models.loading import check_decoder

    check_decoder(path, flag)


def quantization(kind: str) -> None:
    """Raise EnvironmentFault for a quantisation whose package is not installed."""
    from pipeline.models.lora import check_quantization

    check_quantization(kind)


def look_at_tokenizer(findings: Findings, config: Any, dashes: str, path: str) -> Any:
    """Return the tokenizer of a stage with its chat template; None where there is no usable model."""
    if not path:
        return None
    from pipeline.models.tokenizers import prepare_tokenizer

    return findings.look(f"{dashes}template", partial(prepare_tokenizer, path, config.data.template))


def data_of(config: Any, section: str) -> list[tuple[Stage, DataOptions]]:
    """Return (kind of rows, options) of the data of a stage: its own, and in stage 3 the text of the ptx loss."""
    own: Any = section
    data: list[tuple[Stage, DataOptions]] = [(own, options_of(config.data))]
    if text := getattr(config.data, "unsupervised_data_path", None):
        data.append(("text", options_of(config.data, data_path=tuple(text), eval_data_path=())))
    return data


def look_at_rows(findings: Findings, stage: Stage, options: DataOptions, dashes: str, tokenizer: Any) -> None:
    """Render and tokenise one row of each source; without a tokenizer only read it."""
    data_flag = "unsupervised_data_path" if stage == "text" else "data_path"
    for name, texts in (
        (data_flag, options.data_path),
        ("eval_data_path", options.eval_data_path),
        ("sft_only_data_path", options.sft_only_data_path),
    ):
        flag = f"{dashes}{name}"
        for text in texts:
            path, _ = findings.look(flag, partial(parse_path, text)) or ("", 1.0)
            if path and (is_local(path) or not findings.is_out_of_reach(flag, path, rows=True)):
                findings.look(flag, partial(first_row, stage, path, options, tokenizer))


def first_row(stage: Stage, path: str, options: DataOptions, tokenizer: Any) -> None:
    """Tokenise records of a source until one gives a row of `stage`; without a tokenizer only read one.

    Raises:
        InputError: the source cannot be read, or has no row that the stage can use.
    """
    counts = Counts()
    for record in read_records(read_rows(path), counts, column_map=options.column_map):
        rows_of = TOKENISERS[kind_of(stage, record)]
        if tokenizer is None or any(True for _ in rows_of([record], tokenizer, options, counts)):
            return
    raise InputError(f"{path}: no row that stage {stage} can use: {'; '.join(counts.lines())}")


def output_bytes(config: Any, section: str, made: Mapping[str, str]) -> Iterator[tuple[Path, int]]:
    """Yield (folder, bytes) of a stage's outputs at least: its models, and a checkpoint of what is trained in full.

    Models whose size is not known, because they are on the hub, count nothing.
    """
    parts = [config.model] if section != "ppo" else [config.actor, config.critic]
    for folder, part in zip(model_folders(config, section), parts, strict=False):
        path = made.get(part.model_name_or_path, part.model_name_or_path)
        count = num_weights(path)
        yield folder, count * SAVED_BYTES
        if config.run.keep_checkpoints and not part.lora_dim:
            yield run_folder(config.run, section), count * STATE_BYTES


def num_weights(path: str) -> int:
    """Return the number of weights in the safetensors files of a model folder; 0 where there are none to read."""
    from pipeline.models.weight_files import read_shapes, weight_files

    try:
        shapes = [shape for file in weight_files(Path(path).expanduser()) for shape in read_shapes(file).values()]
    except InputError:
        return 0  # told by the check of the model
    return sum(prod(shape) for shape in shapes)
