"""Choice of the rows that a stage reads: its data options, and what `--data-split auto` means. It imports no torch.

Stages of one command that read a source in common share its prompts; a stage by itself takes all rows. A run that goes
on keeps the split that it has, and one on a source of another stage's run takes that run's.
"""

from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, NamedTuple

from pipeline.configuration.flag_table import AUTO
from pipeline.configuration.groups import DataConfig
from pipeline.configuration.resolved import Resolved
from pipeline.configuration.stage import Stage, StageConfig
from pipeline.data.selection import DataOptions, options_of, parse_shares
from pipeline.data.sources import hub_id, parse_path
from pipeline.errors import InputError
from pipeline.files import read_object
from pipeline.run.earlier_runs import earlier_settings
from pipeline.run.evaluations import run_flags
from pipeline.run.layout import environment_file

ALL_ROWS = "none"
SHARED = "2,4,4"  # for stages 1, 2, 3; also what a run has whose record does not say it
NOTE = "{} reads the same source with --data-split {}, so some rows train both; --data-split 2,4,4 in both parts them"


class Reader(NamedTuple):
    """The section of a stage, its data paths, and the split that it reads them by; AUTO where that is not settled."""

    section: str
    paths: list[str]
    split: str

    def meets(self, other: "Reader") -> bool:
        """Return True if both read one source, or one a folder and the other what is in it. Raises InputError."""
        pairs = [(place_of(one), place_of(two)) for one in self.paths for two in other.paths]
        return any(one == two or one in two.parents or two in one.parents for one, two in pairs)


def data_of(stage: Stage, config: StageConfig, *, seq2seq: bool = False) -> list[DataOptions]:
    """Return the options of the data of a stage: of its own rows, and in stage 3 of the text of the ptx loss.

    Args:
        seq2seq: the model has an encoder, whose input are the turns before the last one.

    Raises:
        InputError: a --column-map that names no columns.
    """
    flags, length = config.data, getattr(config, "max_sequence_length", None)
    turns = {"train_turns": "last"} if seq2seq and hasattr(flags, "train_turns") else {}
    tools = {"tool_schemas": schemas} if (schemas := getattr(config, "tool_schemas", "")) else {}
    data = [options_of(flags, title=stage.section, **config.row_options, **turns, **tools)]
    if text := getattr(flags, "unsupervised_data_path", None):
        given = {"mixture": flags.mixture, "data_output_path": flags.data_output_path}
        source = DataConfig(data_path=text, eval_fraction=0.0, **given)
        data.append(options_of(source, rows="blocks", shares=(), title="text", max_seq_len=length))
    return data


def place_of(text: str) -> Path:
    """Return the absolute path of a source, as if a hub id were a folder here. Raises InputError for a wrong weight."""
    return Path(hub_id(parse_path(text)[0])).expanduser().resolve()


def data_splits(
    stages: Mapping[Stage, Resolved], earlier: Mapping[Stage, Mapping[str, Any]]
) -> dict[Stage, tuple[str, str]]:
    """Return for each stage of one command its split, what `auto` means for it, and a note on it or "".

    Args:
        earlier: settings of the run that each stage resumes or has finished; {} for a new run.

    Raises:
        InputError: a data path with a wrong weight, or a split that is none.
    """
    readers = {stage: reader_of(stage, given, earlier[stage]) for stage, given in stages.items()}
    decided = [*(reader for reader in readers.values() if reader.split != AUTO), *other_readers(stages)]
    unset = [stage for stage, reader in readers.items() if reader.split == AUTO]
    joined = [one for one in unset if any(readers[one].meets(readers[other]) for other in unset if other != one)]
    notes = dict.fromkeys(stages, "")
    for group in [joined, *([stage] for stage in unset if stage not in joined)]:
        met = [reader for reader in decided if any(reader.meets(readers[stage]) for stage in group)]
        split = next((reader.split for reader in met if all(has_share(stages[one], reader.split) for one in group)), "")
        if met and not split:
            notes[group[0]] = NOTE.format(met[0].section, met[0].split)
        split = split or (split_among(group) if len(group) > 1 else ALL_ROWS)
        readers |= {stage: readers[stage]._replace(split=split) for stage in group}
    for stage, reader in readers.items():
        if reader.split != ALL_ROWS and not has_share(stages[stage], reader.split):
            fault = f"got {reader.split}, which has no row for stage {stage.number}"
            raise InputError(f"--data-split: {fault}; give it a share above 0, or {ALL_ROWS} for all rows")
    return {stage: (reader.split, notes[stage]) for stage, reader in readers.items()}


def reader_of(stage: Stage, given: Resolved, earlier: Mapping[str, Any]) -> Reader:
    """Return what a stage of this command reads, by the split that is given, else by that of the resumed run."""
    split = given.config.data.data_split if stage.config.shares else ALL_ROWS
    if split == AUTO and earlier:
        split = str(earlier.get("data_split", SHARED))
    return Reader(stage.section, given.config.data.data_path, split)


def other_readers(stages: Mapping[Stage, Resolved]) -> Iterator[Reader]:
    """Yield what runs in the output folder have read that are of no stage of this command, if they saved anything."""
    runs = {stage.usual_run_folder(given.config.run).parent for stage, given in stages.items()}
    for folder in sorted(folder for parent in runs for folder in parent.glob("*")):
        section = read_object(environment_file(folder)).get("stage")
        settings = earlier_settings(folder, AUTO)
        if settings and section not in {stage.section for stage in stages}:
            yield Reader(str(section), run_flags(folder).get("data_path", []), str(settings.get("data_split", SHARED)))


def has_share(given: Resolved, split: str) -> bool:
    """Return True if a split has rows for a run that it does not have for other stages. Raises InputError."""
    sizes = parse_shares(split)
    return sizes is not None and any(sizes[index] for index in given.config.row_options["shares"])


def leaves_share(stage: Stage, config: StageConfig, flag: str, other: Path | None, *, runs_too: bool) -> bool:
    """Return True if a stage leaves another one its share of the prompts: that runs too, or has read the same source.

    A resumed run does as before.

    Args:
        flag: false where the share is left.
        other: folder of the other stage's run.
    """
    saved = earlier_settings(stage.run_folder(config.run), config.run.resumes_from)
    if flag in saved:
        return not saved[flag]
    paths = run_flags(other).get("data_path", []) if other and earlier_settings(other, AUTO) else []
    return runs_too or Reader("", paths, "").meets(Reader("", config.data.data_path, ""))


def split_among(stages: list[Stage]) -> str:
    """Return 2,4,4 without the shares that none of the stages takes: they fall to the others in proportion."""
    taken = {index for stage in stages for index in stage.config.shares}
    return ",".join(size if index in taken else "0" for index, size in enumerate(SHARED.split(",")))
