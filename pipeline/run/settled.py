"""Resolve what flags leave open: `--data-split auto`, LoRA's rates, old rollouts and defaults. It imports no torch.

Stages of one command that read a source in common share its prompts; a stage by itself takes all rows. A run that goes
on keeps the split that it has, and one on a source of another stage's run takes that run's.
"""

from collections.abc import Callable, Iterator, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any, NamedTuple

from pipeline.configuration.flag_table import flat_items
from pipeline.configuration.flags import Resolved, validated
from pipeline.configuration.global_batch import GENERATED, ROLLOUT, Choice, says_rollout, with_others
from pipeline.configuration.groups import DataConfig
from pipeline.configuration.origins import Kind, Origin
from pipeline.configuration.resume_rules import PROMPTS, defaults_of, values_before
from pipeline.configuration.stage import Stage, StageConfig
from pipeline.data.selection import DataOptions, options_of, parse_shares
from pipeline.data.sources import hub_id, parse_path
from pipeline.errors import InputError, dashed
from pipeline.files import read_object
from pipeline.run.earlier_runs import checkpoint_state, earlier_settings
from pipeline.run.evaluations import run_flags
from pipeline.run.layout import environment_file

Choose = Callable[[Stage, Resolved], Choice]
AUTO, ALL_ROWS = "auto", "none"
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
    data = [options_of(flags, **stage.row_options(config), **turns)]
    if text := getattr(flags, "unsupervised_data_path", None):
        given = {"mixture": flags.mixture, "data_output_path": flags.data_output_path}
        source = DataConfig(data_path=text, eval_fraction=0.0, **given)
        data.append(options_of(source, rows="blocks", shares=(), title="text", max_seq_len=length))
    return data


def place_of(text: str) -> Path:
    """Return the absolute path of a source, as if a hub id were a folder here. Raises InputError for a wrong weight."""
    return Path(hub_id(parse_path(text)[0])).expanduser().resolve()


def resolve_splits(stages: Mapping[Stage, Resolved]) -> dict[Stage, Resolved]:
    """Return the settings of the stages of one command, with what `auto` means for each, and notes about it.

    A run that goes on keeps the rollouts of an older version too.

    Raises:
        InputError: a data path with a wrong weight, or a split that is none.
    """
    readers = {stage: reader_of(stage, given) for stage, given in stages.items()}
    settled = [*(reader for reader in readers.values() if reader.split != AUTO), *other_readers(stages)]
    unset = [stage for stage, reader in readers.items() if reader.split == AUTO]
    joined = [one for one in unset if any(readers[one].meets(readers[other]) for other in unset if other != one)]
    notes = dict[Stage, str]()
    for group in [joined, *([stage] for stage in unset if stage not in joined)]:
        met = [reader for reader in settled if any(reader.meets(readers[stage]) for stage in group)]
        split = next(
            (reader.split for reader in met if all(has_share(one, stages[one], reader.split) for one in group)), ""
        )
        if met and not split:
            notes[group[0]] = NOTE.format(met[0].section, met[0].split)
        split = split or (split_among(group) if len(group) > 1 else ALL_ROWS)
        readers |= {stage: readers[stage]._replace(split=split) for stage in group}
    for stage, reader in readers.items():
        if reader.split != ALL_ROWS and not has_share(stage, stages[stage], reader.split):
            fault = f"got {reader.split}, which has no row for stage {stage.number}"
            raise InputError(f"--data-split: {fault}; give it a share above 0, or {ALL_ROWS} for all rows")
    with_splits = {
        stage: with_split(given, readers[stage].split, notes.get(stage, "")) for stage, given in stages.items()
    }
    return {stage: with_saved_values(stage, with_saved_rollout(stage, given)) for stage, given in with_splits.items()}


def reader_of(stage: Stage, given: Resolved) -> Reader:
    """Return what a stage of this command reads, by the split that is given, else by that of the run that goes on."""
    data, run = given.config.data, given.config.run
    split = data.data_split if stage.config.shares else ALL_ROWS
    if split == AUTO and (settings := earlier_settings(stage.run_folder(run), run.resumes_from)):
        split = str(settings.get("data_split", SHARED))
    return Reader(stage.section, data.data_path, split)


def other_readers(stages: Mapping[Stage, Resolved]) -> Iterator[Reader]:
    """Yield what runs in the output folder have read that are of no stage of this command, if they saved anything."""
    runs = {stage.usual_run_folder(given.config.run).parent for stage, given in stages.items()}
    for folder in sorted(folder for parent in runs for folder in parent.glob("*")):
        section = read_object(environment_file(folder)).get("stage")
        settings = earlier_settings(folder, AUTO)
        if settings and section not in {stage.section for stage in stages}:
            yield Reader(str(section), run_flags(folder).get("data_path", []), str(settings.get("data_split", SHARED)))


def has_share(stage: Stage, given: Resolved, split: str) -> bool:
    """Return True if a split has rows for a run that it does not have for other stages. Raises InputError."""
    sizes = parse_shares(split)
    return sizes is not None and any(sizes[index] for index in stage.row_options(given.config)["shares"])


def leaves_share(stage: Stage, config: StageConfig, flag: str, other: Path | None, *, runs_too: bool) -> bool:
    """Return True if a stage leaves another one its share of the prompts: that runs too, or has read the same source.

    A run that goes on does as before.

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


def with_split(resolved: Resolved, split: str, note: str = "") -> Resolved:
    """Return the settings with a split in place of `auto`, and with a note."""
    shared = with_values(resolved, {"data_split": (split, Origin(Kind.FOLLOWS, f"--data-split {AUTO}"))})
    return shared if shared is resolved else replace(shared, notes=(*shared.notes, *filter(None, [note])))


def with_saved_rollout(stage: Stage, resolved: Resolved) -> Resolved:
    """Return the settings with the rollouts of the checkpoint that a run goes on from, where no flag says their size.

    Prompts that are sampled at once, given by hand, say it in a new run alone. A checkpoint of a version without
    --rollout-batch-size has those that its other flags, or their defaults, made.
    """
    if ROLLOUT not in resolved.origins or says_rollout(resolved):
        return resolved
    folder, saved = checkpoint_state(stage.run_folder(resolved.config.run), resolved.config.run.resumes_from)
    is_older = ROLLOUT not in saved.get("layout", {})
    prompts = saved.get("sizes", {}).get(PROMPTS, 0) if is_older or resolved.origins[GENERATED].is_by_hand else 0
    responses = prompts * resolved.config.sampling.num_samples_per_prompt
    return with_rollout(resolved, responses, f"as {folder} has it{', of a version without this flag' * is_older}")


def with_saved_values(stage: Stage, resolved: Resolved) -> Resolved:
    """Return the settings with LoRA's rates, and with what the run that resumes has of flags that nobody gives.

    That is what it has decided where a flag of the stage says `auto`, and flags whose default was another one before.
    """
    resolved = where_unset(resolved, stage.lora_rates(resolved.config))
    folder, config = stage.run_folder(resolved.config.run), resolved.config
    if not (saved := earlier_settings(folder, config.run.resumes_from)):
        return resolved
    earlier = defaults_of(config) | saved
    resolved = with_decided(resolved, {name: earlier[name] for name in config.auto_flags if name in earlier})
    origin = Origin(Kind.EARLIER_RUN, f"auto: as {folder} has it")
    return where_unset(resolved, {name: (earlier[name], origin) for name in values_before(config)})


def with_decided(resolved: Resolved, decided: Mapping[str, Any]) -> Resolved:
    """Return the settings with what flags are that say `auto`."""
    values = dict(flat_items(resolved.config))
    unset = {name: value for name, value in decided.items() if values[name] == AUTO}
    return with_values(
        resolved, {name: (value, Origin(Kind.FOLLOWS, f"{dashed(name)} {AUTO}")) for name, value in unset.items()}
    )


def where_unset(resolved: Resolved, flags: Mapping[str, tuple[Any, Origin]]) -> Resolved:
    """Return the settings with other values of those of these flags that nobody gave, each with its origin."""
    return with_values(resolved, {name: new for name, new in flags.items() if not resolved.is_given(name)})


def with_values(resolved: Resolved, flags: Mapping[str, tuple[Any, Origin]]) -> Resolved:
    """Return the settings with other values of flags, each with its origin; the same object where none changes."""
    before, origins = dict(flat_items(resolved.config)), dict(resolved.origins)
    values = dict(before)
    for name, (value, origin) in flags.items():
        if value != values[name]:
            values[name], origins[name] = value, origin
    if values == before:
        return resolved
    return replace(resolved, config=validated(type(resolved.config), values, origins), origins=origins)


def rollout_asked(config: StageConfig) -> int:
    """Return --rollout-batch-size; 0 for a stage without it."""
    return int(dict(flat_items(config)).get(ROLLOUT, 0))


def with_rollout(resolved: Resolved, responses: int, why: str) -> Resolved:
    """Return the settings with another --rollout-batch-size, and a note that says `why`."""
    if rollout_asked(resolved.config) == responses:
        return resolved
    return with_others(resolved, {ROLLOUT: responses}, why, Kind.EARLIER_RUN)


def broadcast_settings(stage: Stage, resolved: Resolved, choose: Choose, ranks: int) -> tuple[Resolved, Choice]:
    """Return the settings with what rank 0 says of split, rollouts and flags that are `auto`; and the choice of these.

    Hosts without a common storage may see other runs. A collective.

    Args:
        choose: (stage, settings) returns on rank 0 what flags are that the plan chooses.
    """
    from pipeline import dist  # it imports torch

    config = resolved.config
    resolved = with_split(resolved, dist.on_main(lambda: config.data.data_split))
    resolved = with_rollout(resolved, dist.on_main(lambda: rollout_asked(config)), "as rank 0 has it")
    values = dist.on_main(lambda: {name: dict(flat_items(config))[name] for name in values_before(config)})
    as_rank_0 = Origin(Kind.EARLIER_RUN, "auto: as rank 0 has it")
    resolved = where_unset(resolved, {name: (value, as_rank_0) for name, value in values.items()})
    choice = dist.on_main(lambda: choose(stage, resolved))
    return choice.of(resolved, ranks), choice
