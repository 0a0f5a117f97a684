"""The rules that give values to unset flags, in their order. The module imports no torch.

Defaults, files and the command line are merged first (`flags.resolve_layers`): of two values the one of the greater
`Kind` of origin wins, and a DeepSpeed JSON that contradicts another value is refused. The rules come after that, each
at the moment when what it needs is known: a command is read, the number of ranks is known, rank 0 has planned for its
GPU, the models are known. They set what is unset. `RANK_RULES` and the plan of `--auto fit` may also replace what
was given; a note or the origin says so.
"""

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, NamedTuple

from pipeline.configuration.flag_table import AUTO
from pipeline.configuration.origins import Kind, Origin
from pipeline.configuration.rank_rules import (
    GENERATED,
    RANK_RULES,
    ROLLOUT,
    Choice,
    in_place,
    says_rollout,
)
from pipeline.configuration.resolved import Resolved, Rule, applied
from pipeline.configuration.resume_rules import PROMPTS
from pipeline.configuration.stage import Stage
from pipeline.errors import dashed
from pipeline.run.data_split import data_splits
from pipeline.run.earlier_runs import checkpoint_state, earlier_settings
from pipeline.run.evaluations import Settings

Choose = Callable[[Stage, Resolved], Choice]


class Command(NamedTuple):
    """A stage of a command, its value of --data-split with a note or "", its folder, and settings of the earlier run.

    earlier: those of the run that is finished there or resumed; {} for a new run.
    """

    stage: Stage
    split: str
    note: str
    folder: Path
    earlier: Mapping[str, Any]


class Planned(NamedTuple):
    """The choice of a plan, and the number of ranks."""

    choice: Choice
    ranks: int


def with_command_rules(stages: Mapping[Stage, Resolved]) -> dict[Stage, Resolved]:
    """Return the settings of the stages of one command after `COMMAND_RULES`.

    Raises:
        InputError: see `data_splits`.
    """
    runs = {stage: given.config.run for stage, given in stages.items()}
    folders = {stage: stage.run_folder(run) for stage, run in runs.items()}
    earlier = {stage: earlier_settings(folders[stage], run.resumes_from) for stage, run in runs.items()}
    splits = data_splits(stages, earlier)
    return {
        stage: applied(COMMAND_RULES, given, Command(stage, *splits[stage], folders[stage], earlier[stage]))
        for stage, given in stages.items()
    }


def with_choice(stage: Stage, resolved: Resolved, choose: Choose, ranks: int) -> tuple[Resolved, Choice]:
    """Return the settings as rank 0 has them, with the plan's choice; and that choice. A collective.

    Hosts without a common storage may see other earlier runs: what is unset is as rank 0 has it.

    Args:
        choose: (stage, settings) returns on rank 0 the values of the flags that the plan chooses.
    """
    from pipeline import dist  # it imports torch

    resolved = where_unset(resolved, dist.on_main(lambda: not_given(resolved)))
    choice = dist.on_main(lambda: choose(stage, resolved))
    return applied(PLAN_RULES, resolved, Planned(choice, ranks)), choice


# --- the rules ---


def with_data_split(resolved: Resolved, command: Command) -> Resolved:
    """Return the settings with a split in place of `auto`, and with a note."""
    if resolved.config.data.data_split == command.split:
        return resolved
    origin = Origin(Kind.FOLLOWS, f"--data-split {AUTO}")
    return resolved.changed({"data_split": command.split}, {"data_split": origin}, filter(None, [command.note]))


def with_earlier_rollout(resolved: Resolved, command: Command) -> Resolved:
    """Return the settings with the rollouts of the checkpoint that a run resumes from, where no flag says their size.

    Prompts that are sampled at once, given by hand, say it in a new run alone.
    """
    if ROLLOUT not in resolved.origins or says_rollout(resolved) or not resolved.origins[GENERATED].is_by_hand:
        return resolved
    folder, saved = checkpoint_state(command.folder, resolved.config.run.resumes_from)
    responses = saved.get("sizes", {}).get(PROMPTS, 0) * resolved.config.sampling.num_samples_per_prompt
    if responses == resolved.values[ROLLOUT]:
        return resolved
    return in_place(resolved, {ROLLOUT: responses}, f"as {folder} has it", Kind.EARLIER_RUN)


def with_lora_rates(resolved: Resolved, command: Command) -> Resolved:
    """Return the settings with LoRA's learning rates as multiples of those of all weights, in stages that have them."""
    return where_unset(resolved, command.stage.lora_rates(resolved.config))


def with_earlier_decisions(resolved: Resolved, command: Command) -> Resolved:
    """Return the settings with what the run that resumes has decided where a flag of the stage says `auto`."""
    earlier = command.earlier
    return with_decided(resolved, {name: earlier[name] for name in resolved.config.auto_flags if name in earlier})


def with_plan(resolved: Resolved, planned: Planned) -> Resolved:
    """Return the settings with the plan's choice, and with what follows from it on so many ranks."""
    return planned.choice.of(resolved, planned.ranks)


def with_decided(resolved: Resolved, decided: dict[str, Any]) -> Resolved:
    """Return the settings with what flags are that say `auto`."""
    before = resolved.values
    unset = {name: value for name, value in decided.items() if before[name] == AUTO}
    return resolved.changed(unset, {name: Origin(Kind.FOLLOWS, f"{dashed(name)} {AUTO}") for name in unset})


COMMAND_RULES: tuple[Rule[Command], ...] = (
    Rule(
        with_data_split,
        "`--data-split auto` becomes the split of the run that resumes, of another stage's run on the same data, 2,4,4 "
        "where several stages of the command share data, or none.",
    ),
    Rule(
        with_earlier_rollout,
        "A run that resumes has the rollouts of its checkpoint where only a `--per-device-generation-batch-size` of "
        "yours says their size.",
    ),
    Rule(with_lora_rates, "In stage 3 LoRA's learning rates become multiples of those of all weights."),
    Rule(with_earlier_decisions, "A run that resumes has what it decided for `auto` in flags of stage 3."),
)
PLAN_RULES: tuple[Rule[Planned], ...] = (
    Rule(
        with_plan,
        "Flags that are `auto` on a GPU get the plan's choice, or in a run that resumes what it chose. The rules for a "
        "number of ranks are applied again.",
    ),
)
RUN_RULES: tuple[Rule[dict[str, Any]], ...] = (
    Rule(with_decided, "Flags of stage 3 that are `auto` still get what their models allow."),
)
# Moment -> the rules that are applied then.
RULES: dict[str, tuple[Rule[Any], ...]] = {
    "the command is read": COMMAND_RULES,
    "the number of ranks is known": RANK_RULES,
    "rank 0 has planned for its GPU": PLAN_RULES,
    "the run knows its models": RUN_RULES,
}


# --- what the rules are made of ---


def not_given(resolved: Resolved) -> Settings:
    """Return value and origin of each unset flag."""
    origins = resolved.origins
    return {name: (value, origins[name]) for name, value in resolved.values.items() if not resolved.is_given(name)}


def where_unset(resolved: Resolved, settings: Settings) -> Resolved:
    """Return the settings with these values and origins of flags that are unset and have another value."""
    before = resolved.values
    names = [name for name, (value, _) in settings.items() if not resolved.is_given(name) and before[name] != value]
    return resolved.changed({name: settings[name][0] for name in names}, {name: settings[name][1] for name in names})
