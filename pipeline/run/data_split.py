"""Resolve `--data_split auto`: which rows of its sources each stage of a command trains on. Imports no torch.

Stages of one command that read a source in common share its prompts; a stage by itself takes all rows. A run that goes
on keeps the split that it has, and one on a source of another stage's run takes that run's.
"""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import NamedTuple

from pipeline.configuration.flags import Resolved
from pipeline.configuration.stage import Stage
from pipeline.data.selection import parse_shares
from pipeline.data.sources import is_local, parse_path
from pipeline.files import read_object
from pipeline.hub import split_revision
from pipeline.run.earlier_runs import earlier_settings
from pipeline.run.evaluations import run_flags
from pipeline.run.layout import environment_file

SHARED = "2,4,4"  # for stages 1, 2, 3; also what a run has whose record does not say it
NOTE = (
    "--data_split {}: the run in {} was trained on rows of the same source (--data_split {}); --data_split {} in both "
    "keeps them apart"
)


class Split(NamedTuple):
    """A split that is settled, the sources that it is of, and the folder of a run that has trained with it."""

    text: str
    sources: Sequence[str]
    folder: Path | None = None

    def serves(self, stage: Stage) -> bool:
        """Return True if the stage has a share of it. Raises InputError for a text that is no split."""
        sizes = parse_shares(self.text)
        return sizes is not None and any(sizes[place] for place in stage.shares)


def resolve_splits(stages: Mapping[Stage, Resolved]) -> dict[Stage, Resolved]:
    """Return the settings of the stages of one command, with what `auto` means for each, and notes about it.

    Raises:
        InputError: a data path with a wrong weight, or a split that is none.
    """
    settled = {stage: split for stage, given in stages.items() if (split := settled_split(stage, given))}
    paths = {stage: given.config.data.data_path for stage, given in stages.items() if stage not in settled}
    known = [*settled.values(), *(splits_of_others(stages) if paths else ())]
    sharing = [stage for stage in paths if any(have_common_source(paths[stage], paths[o]) for o in paths if o != stage)]
    resolved = {stage: with_split(stages[stage], split.text) for stage, split in settled.items()}
    for group in [sharing, *([stage] for stage in paths if stage not in sharing)]:
        read = [path for stage in group for path in paths[stage]]
        text, note = split_of_group(group, [split for split in known if have_common_source(split.sources, read)])
        resolved |= {stage: with_split(stages[stage], text, note if stage is group[0] else "") for stage in group}
    return {stage: resolved[stage] for stage in stages}


def settled_split(stage: Stage, given: Resolved) -> Split | None:
    """Return the split that is given, or that of the run that goes on; None where it is open."""
    data, run = given.config.data, given.config.run
    text = data.data_split if stage.shares else "none"
    if text != "auto":
        return Split(text, data.data_path)
    folder = stage.run_folder(run)
    settings = earlier_settings(folder, run.resumes_from)
    return Split(str(settings.get("data_split", SHARED)), data.data_path, folder) if settings else None


def splits_of_others(stages: Mapping[Stage, Resolved]) -> Iterator[Split]:
    """Yield the splits of runs in the output folder that are of no stage of this command, if they saved anything."""
    sections = {stage.section for stage in stages}
    runs = {stage.usual_run_folder(given.config.run).parent for stage, given in stages.items()}
    for folder in sorted(folder for parent in runs for folder in parent.glob("*")):
        settings = earlier_settings(folder, "auto")
        if settings and read_object(environment_file(folder)).get("stage") not in sections:
            yield Split(str(settings.get("data_split", SHARED)), run_flags(folder).get("data_path", []), folder)


def have_common_source(first: Sequence[str], second: Sequence[str]) -> bool:
    """Return True if two lists of data paths name one source, or a folder and what is in it. Raises InputError."""
    ours, theirs = ([place_of(path) for path in paths] for paths in (first, second))
    return any(one == other or one in other.parents or other in one.parents for one in ours for other in theirs)


def place_of(text: str) -> Path:
    """Return the absolute path of a local source, the relative one `org/name` of a hub id. Raises InputError."""
    path, _ = parse_path(text)
    return Path(path).expanduser().resolve() if is_local(path) else Path(split_revision(path)[0])


def split_of_group(group: Sequence[Stage], related: Sequence[Split]) -> tuple[str, str]:
    """Return the split of stages that share sources, and the note about it or "".

    related: settled splits of other runs on these sources.
    """
    if taken := next((split for split in related if all(map(split.serves, group))), None):
        return taken.text, ""
    places = {place for stage in group for place in stage.shares}
    sizes = [size if place in places else "0" for place, size in enumerate(SHARED.split(","))]
    text, used = ",".join(sizes) if len(group) > 1 else "none", [split for split in related if split.folder]
    return text, NOTE.format(text, used[0].folder, used[0].text, SHARED) if used else ""


def with_split(resolved: Resolved, text: str, note: str = "") -> Resolved:
    """Return the settings with a split in place of `auto`, and with a note."""
    if resolved.config.data.data_split == text:
        return resolved
    config = resolved.config.replace(data=resolved.config.data.replace(data_split=text).model_dump())
    origins = resolved.origins | {"data_split": "--data_split auto"}
    return replace(resolved, config=config, origins=origins, notes=(*resolved.notes, *filter(None, [note])))
