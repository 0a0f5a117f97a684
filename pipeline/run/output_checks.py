"""Refuse a run whose outputs are inputs, belong to another run, or hold other files. It imports no torch.

The check runs before anything is written, because saving replaces a whole model folder.
"""

from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any

from pipeline.configuration.flag_table import flag_table, flat_items
from pipeline.configuration.stage import Stage, StageConfig
from pipeline.data.sources import parse_path
from pipeline.errors import InputError, dashed, raise_lines
from pipeline.files import OURS, PROJECT, RUN_LOCK, check_replaceable, has_config, read_object
from pipeline.run.earlier_runs import RUN_FILES
from pipeline.run.layout import START_NAMES, environment_file
from pipeline.run.outcome import supervisor_name

Named = tuple[str, Path]  # a flag, and a file or folder that follows from it


def check_outputs(stages: Mapping[Stage, Any], *, named_by_section: bool = False) -> None:
    """Raise InputError, a line each, for outputs that are inputs, belong to another run or hold other files.

    Args:
        stages: stage -> configuration of the stages of this run, in order. A stage may read outputs of earlier ones.
        named_by_section: call flags `--sft.output-dir`, as the user of `rlhf train` types them.
    """
    lines: list[str] = []
    read: list[Named] = []
    taken: list[Named] = []  # model and run folders of earlier stages
    replaced: list[Named] = []  # their model folders, which saving replaces as a whole
    for stage, config in stages.items():
        dashes = f"--{stage.section}." if named_by_section else "--"
        models = [(f"{dashes}output-dir", folder) for folder in config.outputs]
        run_dir = (f"{dashes}run-dir", stage.run_folder(config.run))
        cache = config.data.data_output_path
        folders = [run_dir, *([(f"{dashes}data-output-path", Path(cache))] if cache else [])]
        read += inputs(config, dashes)
        lines += clashes([*models, *((run_dir[0], run_dir[1] / name) for name in RUN_FILES)], read)
        overlaps = [*clashes(models, [*folders, *taken]), *clashes(folders, [*read, *taken], inside=False)]
        lines += overlaps or clashes(replaced, [*models, *folders])
        lines += foreign(config, stage, dashes)
        taken += [*models, run_dir]
        replaced += models
    raise_lines(dict.fromkeys(lines))


def inputs(config: StageConfig, dashes: str) -> Iterator[Named]:
    """Yield the data sources, start models and DeepSpeed JSON of a stage. Hub ids among them do no harm."""
    table = flag_table(type(config))
    for name, value in flat_items(config):
        if table[name].kind == "path" and table[name].on_resume != "free":
            for text in value if isinstance(value, list) else [value]:
                path = parse_path(text)[0] if table[name].on_resume == "data" else text
                if path:
                    yield dashes + dashed(name)[2:], Path(path)


def clashes(outputs: Iterable[Named], others: Iterable[Named], *, inside: bool = True) -> Iterator[str]:
    """Yield a line for each path of `others` that is one of the `outputs`, or `inside` one of them."""
    resolved = [(flag, path, path.expanduser().resolve()) for flag, path in others]
    for flag, output in outputs:
        folder = output.expanduser().resolve()
        for other, path, target in resolved:
            if target == folder or (inside and folder in target.parents):
                yield f"{flag}: this run would write over {path} ({other}); name another folder"


def foreign(config: StageConfig, stage: Stage, dashes: str) -> Iterator[str]:
    """Yield a line for each folder of a stage that holds another run, another run's model, or foreign files."""
    run_dir = stage.run_folder(config.run)
    if odd := [path for path in run_dir.rglob("*") if path.exists() and not (path.is_file() or path.is_dir())]:
        yield f"{dashes}run-dir: {min(odd)}: found neither a file nor a folder, at which a run would wait; remove it"
        return
    environment = read_object(environment_file(run_dir))
    owner, versions = environment.get("stage"), environment.get("versions")
    # An env.json of another program may name a "stage" too. All runs of this project name its version, also those of
    # stages that this program lacks.
    started = isinstance(owner, str) and isinstance(versions, dict) and (owner == stage.section or PROJECT in versions)
    if started and owner != stage.section:
        yield f"{dashes}run-dir: {run_dir} holds a run of {owner}, this is {stage.section}; name another folder"
    # Hidden files belong to ranks that are starting now. A supervisor has checked the folder before its ranks.
    names = {path.name for path in run_dir.glob("[!.]*")}
    # A start that was killed before it wrote env.json leaves these names alone; the same command starts again there.
    was_killed = {RUN_LOCK, "heartbeat"} & names and names <= START_NAMES
    if names and not started and not was_killed and supervisor_name() is None:
        others = f"other files ({min(names - START_NAMES or names)}) and no env.json of a run"
        content = "an env.json without stage and versions of a run" if "env.json" in names else others
        yield f"{dashes}run-dir: {run_dir} holds {content}; name a new or empty folder"
    for folder in config.outputs:
        try:
            check_replaceable(folder)
        except InputError as error:
            yield str(error).replace("--", dashes, 1)
            continue
        maker = read_object(folder / OURS).get("stage", stage.section)
        if has_config(folder) and maker != stage.section and not config.run.overwrite:
            yield (
                f"{dashes}output-dir: {folder} holds a model of {maker}, this is {stage.section}; "
                "give another --output-dir, or --overwrite to replace it"
            )
        elif has_config(folder) and not started and not config.run.overwrite:
            yield (
                f"{dashes}output-dir: {folder} holds the model of another run than that of {run_dir}; "
                "give another --output-dir, or --overwrite to replace it"
            )
