"""Plan of `rlhf train`: words, checked configuration and folders of each stage, before anything starts.

The caller passes the stages, since nothing in pipeline/ imports a stage.
"""

import os
import re
from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path

from pipeline.configuration.flags import SECTIONS, Resolved, check_dashes, load_yaml, parse, read_yaml, scan
from pipeline.configuration.groups import Group
from pipeline.configuration.names import Names, normalise
from pipeline.errors import InputError, nearest
from pipeline.launching.launcher import launch_file
from pipeline.launching.train_config import (
    TrainConfig,
    contradictions,
    known_model,
    short_help,
    split_common,
    split_overrides,
    with_reward_model,
)
from pipeline.run.earlier_runs import automatic_words
from pipeline.run.layout import run_folder


@dataclass(frozen=True, slots=True)
class StageKind:
    """The meaning of a number of --step; `section` is its name in YAML files, overrides and preset names.

    reached: the metrics of the evaluations that the last line of a stage tells.
    """

    section: str
    title: str
    config_class: type[Group]
    reached: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class Stage:
    """A planned stage: its configuration, its flags as words, and its folders."""

    number: int
    kind: StageKind
    resolved: Resolved
    argv: list[str]
    model_dir: Path
    run_dir: Path


@dataclass(frozen=True, slots=True)
class Plan:
    """All three stages, also those that are not to run: later ones read their output. given: own flags that were."""

    config: TrainConfig
    stages: dict[int, Stage]
    given: frozenset[str]

    @property
    def chosen(self) -> list[Stage]:
        """Return the stages to run, in order."""
        return [self.stages[number] for number in sorted(set(self.config.step))]


def make_plan(argv: list[str], kinds: Mapping[int, StageKind], *, prog: str) -> Plan:
    """Return the plan of `rlhf train ARGV`, which its user calls as `prog`. Exits with 0 after `--help`.

    Raises:
        InputError: every wrong flag, of `rlhf train` itself and of the stages, one per line.
    """
    check_dashes(argv)
    words, overrides = split_overrides(argv, [kind.section for kind in kinds.values()])
    own, common = split_common(words)
    config_file = "".join(dict(scan(own)).get("config", [])[-1:])
    config, given, errors = train_config(own, config_file, prog)
    chosen = {number: kinds[number] for number in sorted(set(config.step))}
    problems = [why_not_common(flag[0], kinds, chosen) for flag in common]
    errors += filter(None, problems)
    shared = [word for flag, problem in zip(common, problems, strict=True) if not problem for word in flag]
    for kind in chosen.values():
        # What is given for one stage is stronger.
        overrides[kind.section] = [*shared, *overrides[kind.section]]
    stages: dict[int, Stage] = {}
    for number, kind in kinds.items():
        try:
            file, override = config_file_of(number, config, config_file), overrides[kind.section]
            stages[number] = plan_stage(number, kind, config, config_file=file, override=override, before=stages)
        except InputError as error:
            errors += [as_override(line, kind.section) for line in str(error).splitlines() if line not in errors]
    if errors:
        raise InputError("\n".join(dict.fromkeys(errors)))
    return Plan(config, stages, given)


def is_common(name: str, stages: Collection[Names]) -> bool:
    """Return True if one value of the flag `name` serves all stages that run."""
    several = len(stages) > 1
    flags = [names.table.get(names.known.get(name, "")) for names in stages]
    ignored = [name in names.ignored for names in stages]
    return all(i or (flag and not (several and flag.per_stage)) for i, flag in zip(ignored, flags, strict=True))


def why_not_common(word: str, kinds: Mapping[int, StageKind], chosen: Mapping[int, StageKind]) -> str:
    """Return the reason why a flag without a section is not for all `chosen` stages, or ""."""
    given = word.partition("=")[0]
    name, stages = normalise(given[2:]), {kind.section: Names(kind.config_class) for kind in chosen.values()}
    if is_common(name, stages.values()):
        return ""
    if any(name in names.known for names in stages.values()):
        meanings = {s: names.other_tools.get(name) or [names.known.get(name, "")] for s, names in stages.items()}
        flags = [f"--{section}.{flag}" for section, found in meanings.items() for flag in found if flag]
        lacking = " and ".join(f"stage {number}" for number, kind in chosen.items() if meanings[kind.section] == [""])
        reason = f"not a flag of {lacking}" if lacking else "not one value for all stages that run"
        return f"{given}: {reason}; give {' and '.join(flags)}"
    if reasons := [names.refused[name] for names in stages.values() if name in names.refused]:
        return f"{given}: a flag of other programs without a counterpart here: {reasons[0]}"
    meant = {s: [names.table[flag] for flag in names.other_tools.get(name, [])] for s, names in stages.items()}
    right = [f"--{section}.{flag.name}" for section, flags in meant.items() for flag in flags]
    leaves = {flag.path[-1] for flags in meant.values() for flag in flags}
    right = [f"--{leaf}" for leaf in leaves if is_common(leaf, stages.values())] or right
    if right:
        return f"{given}: unknown flag; here it is {' or '.join(right)}"
    others = [(number, kind.section, Names(kind.config_class).known) for number, kind in kinds.items()]
    if right := [f"--{section}.{known[name]}, of stage {number}" for number, section, known in others if name in known]:
        return f"{given}: no flag of the stages that run; here it is {' or '.join(right)}"
    valid = [f"--{flag}" for names in (Names(TrainConfig), *stages.values()) for flag in names.known]
    return f"{given}: unknown flag{nearest('--' + name, valid)}"


def train_config(own: list[str], config_file: str, prog: str) -> tuple[TrainConfig, frozenset[str], list[str]]:
    """Return (own configuration, flags that were given, error lines).

    The defaults if there are errors, so that the stages can be checked.

    Raises:
        InputError: the --config file is not usable, which each stage would report again.
    """
    if config_file and not has_sections(config_file):
        own = without_flag(own, "config")
    errors = []
    if "preset" in dict(scan(own)):
        errors.append("--preset: presets follow --actor-model and --reward-model; give --config FILE")
        own = without_flag(own, "preset")
    config, given = TrainConfig(), frozenset[str]()
    try:
        resolved = parse(TrainConfig, own, section="train", prog=prog, help_maker=short_help)
        config, given = resolved.config, frozenset(n for n, origin in resolved.origins.items() if origin != "default")
        errors += contradictions(config)
    except InputError as error:
        errors += str(error).splitlines()
    return with_reward_model(TrainConfig() if errors else config), given, errors


def has_sections(config_file: str) -> bool:
    """Tell whether a YAML file holds sections, also unknown ones: no flag takes a mapping."""
    return any(key in SECTIONS or isinstance(value, dict) for key, value in load_yaml(config_file).items())


def config_file_of(number: int, config: TrainConfig, config_file: str) -> str:
    """Return the --config file if it is for stage `number`: one without sections is for the only stage that runs."""
    if not config_file or has_sections(config_file):
        return config_file
    if len(set(config.step)) > 1:
        raise InputError(f"{config_file}: found flags without sections; put them below sft:, reward: or ppo:")
    return config_file if number in config.step else ""


def without_flag(argv: Iterable[str], name: str) -> list[str]:
    """Return `argv` without the flag `name` and its values."""
    kept, skipping = [], False
    for word in argv:
        if word.startswith("--"):
            skipping = word[2:].partition("=")[0].replace("-", "_") == name
        if not skipping:
            kept.append(word)
    return kept


def plan_stage(
    number: int,
    kind: StageKind,
    config: TrainConfig,
    *,
    config_file: str,
    override: list[str],
    before: Mapping[int, Stage],
) -> Stage:
    """Return one planned stage; `before` are the stages whose output it may read."""
    # The preset is the reward model's for stage 2, else the actor's.
    known = known_model(config.reward_model if number == 2 else config.actor_model)
    argv = []
    if known and (preset := launch_file(f"presets/{known.preset}.{kind.section}.yaml")).is_file():
        argv = ["--preset", path_from_here(preset)]
    replaceable, fixed = chained_flags(number, config, before), inherited_flags(number, config)
    if config_file:
        argv += ["--config", config_file]
        names = Names(kind.config_class).known
        from_file = {names.get(name) for name in read_yaml(config_file, kind.section)[0]}
        replaceable = {name: value for name, value in replaceable.items() if name not in from_file}
    for name, value in (replaceable | fixed).items():
        argv += [f"--{name}"] if value == "true" else [f"--{name}", value]
    argv += override
    resolved = parse(kind.config_class, argv, section=kind.section)
    run = resolved.config.run
    if chosen := automatic_words(resolved, run_folder(run, kind.section)):
        argv += chosen
        resolved = parse(kind.config_class, argv, section=kind.section)
    model_dir = Path(run.output_dir) / "actor" if number == 3 else Path(run.output_dir)
    return Stage(number, kind, resolved, argv, model_dir, run_folder(run, kind.section))


def path_from_here(path: Path) -> str:
    """Return `path` as a user in the working folder would type it."""
    relative = os.path.relpath(path)
    return str(path) if relative.startswith("..") else relative


def chained_flags(number: int, config: TrainConfig, before: Mapping[int, Stage]) -> dict[str, str]:
    """Return the folders that follow from the stages before; a --config file or an override may name others."""
    out = Path(config.output_dir)
    if number != 3:
        return {"output_dir": str(out / ("sft" if number == 1 else "reward"))}
    actor, critic = (before[n].model_dir if n in before else out for n in (1, 2))
    return {
        "actor_model_name_or_path": str(actor),
        "critic_model_name_or_path": str(critic),
        "output_dir": str(out),
    }


def inherited_flags(number: int, config: TrainConfig) -> dict[str, str]:
    """Return a stage's flags that follow from those of `rlhf train`; only an override is stronger."""
    actor, reward = config.actor_zero_stage, config.reward_zero_stage
    flags: dict[str, str] = {}
    if number == 3:
        flags = {"actor_zero_stage": actor, "critic_zero_stage": reward}
    else:
        model = config.actor_model if number == 1 else config.reward_model
        flags = {"zero_stage": actor if number == 1 else reward}
        known = known_model(model)
        flags["model_name_or_path"] = model if known is None else known.hub_id
    flags |= {"resume": config.resume, "overwrite": str(config.overwrite).lower(), "debug": str(config.debug).lower()}
    return {name: value for name, value in flags.items() if value not in ("", "auto", "false")}


def as_override(line: str, section: str) -> str:
    """Return a stage's error line with its flags as the user of `rlhf train` types them."""
    if not line.startswith("--"):
        return f"{section}: {line}"
    return re.sub(r"(did you mean|here it is|or) --", rf"\1 --{section}.", f"--{section}.{line[2:]}")
