"""Plan of `rlhf train`: words, checked configuration and folders of each stage, before anything starts."""

import os
from collections.abc import Collection, Iterator, Mapping
from dataclasses import dataclass, replace
from pathlib import Path

from pipeline.configuration.flags import TRAIN, check_dashes, parse, read_yaml, scan
from pipeline.configuration.names import FILE_FLAGS, Names, normalise, without_flag
from pipeline.configuration.rank_rules import with_ranks
from pipeline.configuration.resolved import Resolved
from pipeline.configuration.stage import Stage
from pipeline.errors import ContradictionError, InputError, dashed, nearest, raise_lines, say, show
from pipeline.launching.hosts import ranks_by_host
from pipeline.launching.request import LaunchRequest, parse_request
from pipeline.launching.scripts import launch_file
from pipeline.launching.target import Target, parse_target
from pipeline.run.data_split import leaves_share
from pipeline.run.earlier_runs import preset_of_run
from pipeline.run.resolve import with_command_rules
from rlhf.known_models import known_model
from rlhf.stages import METHODS, SECTIONS, STAGES, stages_of_method, word_of
from rlhf.train_config import (
    HOST_FLAGS,
    TrainConfig,
    as_override,
    chained_flags,
    config_file_of,
    contradictions,
    flags_of_absent_stages,
    has_sections,
    inherited_flags,
    launcher_argv,
    split_common,
    split_overrides,
    stages_alone,
    takes_method,
    train_help,
    with_reward_model,
)

HOSTFILE = "HOSTFILE"  # word in the commands for a target of several hosts whose names are not known


@dataclass(frozen=True, slots=True)
class PlannedStage:
    """A stage with its configuration, its flags as words, and its folders.

    stage: the stage.
    resolved: settings with the origin of each.
    argv: flags as words of a command line.
    model_dir: model folder that later stages start from.
    run_dir: folder of the run.
    config: flags of `rlhf train`, with the model whose preset the stage has.
    """

    stage: Stage
    resolved: Resolved
    argv: list[str]
    model_dir: Path
    run_dir: Path
    config: TrainConfig

    @property
    def base(self) -> str:
        """The model that its first trained model starts from."""
        return str(self.resolved.values[self.stage.path_flag(self.stage.first_prefix)])

    def start_of_later(self, typed: Collection[str]) -> str:
        """Return what a later stage starts from: the model folder.

        It is the base itself where that was named (`typed`: own flags), this is stage 1 and does not run, and neither
        a run of it nor its model, for which no other folder was named, is there.
        """
        is_named = "actor_model" in typed or self.config.actor_model != TrainConfig().actor_model
        usual = Path(self.config.output_dir) / self.stage.folder
        is_usual = self.stage.config.makes_chat_model and self.model_dir == usual
        is_there = self.stage.number in self.config.step or self.model_dir.exists() or self.run_dir.exists()
        return self.base if is_named and is_usual and not is_there else str(self.model_dir)


@dataclass(frozen=True, slots=True)
class Plan:
    """All stages, also those that are not to run: later ones read their output.

    stages: by number. given: flags of `rlhf train` itself that its user gave.
    """

    config: TrainConfig
    stages: dict[int, PlannedStage]
    given: frozenset[str]

    @property
    def chosen(self) -> list[PlannedStage]:
        """Return the stages to run, in order."""
        return [self.stages[number] for number in sorted(set(self.config.step))]


def make_plan(argv: list[str], *, prog: str) -> Plan:
    """Return the plan of `rlhf train ARGV`, which its user calls as `prog`. Exits with 0 after `--help`.

    Raises:
        InputError: every wrong flag, of `rlhf train` itself and of the stages, one per line.
    """
    check_dashes(argv)
    words, overrides = split_overrides(argv, SECTIONS[1:])
    train_words, common = split_common(words)
    config_file = "".join(dict(scan(train_words)).get("config", [])[-1:])
    config, given, errors = train_config(train_words, config_file, prog)
    kinds = stages_of_method(config.method)
    chosen = {number: kinds[number] for number in sorted(set(config.step))}
    problems = [why_not_common(flag[0], chosen) for flag in common]
    errors += filter(None, problems)
    shared = [word for flag, problem in zip(common, problems, strict=True) if not problem for word in flag]
    method = ["--method", config.method] if "method" in dict(scan(train_words)) else []
    for kind in chosen.values():
        # What is given for one stage is stronger.
        weaker = [*shared, *(method if takes_method(kind, config.method) else [])]
        overrides[kind.section] = overridden(kind, weaker, overrides[kind.section])
    stages: dict[int, PlannedStage] = {}
    for number, kind in sorted(kinds.items()):
        try:
            file, override = config_file_of(number, config, config_file), overrides[kind.section]
            stages[number] = plan_stage(kind, config, typed={*given}, file=file, flags=override, before=stages)
            config = stages[number].config
        except InputError as error:
            if isinstance(error, ContradictionError) and number > max(chosen):
                continue  # it does not run, and no stage that runs reads what it would write
            errors += [as_override(line, kind.section) for line in str(error).splitlines() if line not in errors]
    raise_lines(dict.fromkeys(errors))
    sections = {kind.section for kind in chosen.values()}
    show(*(f"note: {line}" for line in flags_of_absent_stages(overrides, sections, given)))
    resolved = with_command_rules({stages[number].stage: stages[number].resolved for number in chosen})
    stages |= {stage.number: with_settings(stages[stage.number], settings) for stage, settings in resolved.items()}
    return Plan(with_reward_model(config), stages, given)


def with_settings(planned: PlannedStage, resolved: Resolved) -> PlannedStage:
    """Return a stage with the settings that `with_command_rules` found for all stages together; print notes on them."""
    notes = planned.resolved.notes
    show(*(f"note: {planned.stage.section}: {note}" for note in resolved.notes[len(notes) :]))
    argv = [*without_flag(planned.argv, "data_split"), "--data-split", resolved.config.data.data_split]
    argv = planned.argv if resolved is planned.resolved else argv
    return replace(planned, resolved=replace(resolved, notes=notes), argv=argv)


def is_common(name: str, stages: Collection[Names]) -> bool:
    """Return True if one value of the flag `name` serves all stages that run."""
    several = len(stages) > 1
    flags = [names.table.get(names.flag_of.get(name, "")) for names in stages]
    ignored = [name in names.ignored for names in stages]
    return all(i or (flag and not (several and flag.per_stage)) for i, flag in zip(ignored, flags, strict=True))


def why_not_common(word: str, chosen: Mapping[int, Stage]) -> str:
    """Return the reason why a flag without a section is not for all `chosen` stages, or ""."""
    given = dashed(word.partition("=")[0][2:])
    name, stages = normalise(given[2:]), {kind.section: Names(kind.config) for kind in chosen.values()}
    if is_common(name, stages.values()):
        return ""
    if any(name in names.flag_of for names in stages.values()):
        meanings = {s: names.other_tools.get(name) or [names.flag_of.get(name, "")] for s, names in stages.items()}
        flags = [dashed(f"{section}.{flag}") for section, flag_names in meanings.items() for flag in flag_names if flag]
        lacking = " and ".join(f"stage {number}" for number, kind in chosen.items() if meanings[kind.section] == [""])
        reason = f"not a flag of {lacking}" if lacking else "not one value for all stages that run"
        return f"{given}: {reason}; give {' and '.join(flags)}"
    meant = {s: [names.table[flag] for flag in names.other_tools.get(name, [])] for s, names in stages.items()}
    right = [dashed(f"{section}.{flag.name}") for section, flags in meant.items() for flag in flags]
    leaves = {flag.path[-1] for flags in meant.values() for flag in flags}
    right = [dashed(leaf) for leaf in leaves if is_common(leaf, stages.values())] or right
    if right:
        return f"{given}: unknown flag; here it is {' or '.join(right)}"
    if removed := [names.removed[name] for names in stages.values() if name in names.removed]:
        return f"{given}: {removed[0]}"
    if reasons := [names.refused[name] for names in stages.values() if name in names.refused]:
        return f"{given}: a flag of other programs without a counterpart here: {reasons[0]}"
    others = [(kind.number, f"{kind.section}.", Names(kind.config).flag_of) for kind in STAGES]
    if right := [
        f"{dashed(of + flag_names[name])}, of stage {number}" for number, of, flag_names in others if name in flag_names
    ]:
        return f"{given}: no flag of the stages that run; here it is {' or '.join(right)}"
    valid = [flag for names in (Names(TrainConfig), *stages.values()) for flag in names.flag_of]
    return f"{given}: unknown flag{nearest(name, valid, dashed)}"


def train_config(words: list[str], config_file: str, prog: str) -> tuple[TrainConfig, frozenset[str], list[str]]:
    """Return (own configuration, flags that were given, error lines).

    The defaults with --step and --method if there are errors, so that the stages can be checked.

    Raises:
        InputError: the --config file is not usable, which each stage would report again.
    """
    errors, lines = list[str](), list[str]()
    if config_file and has_sections(config_file):
        lines += misplaced(read_yaml(config_file, TRAIN, SECTIONS)[0], config_file)
    elif config_file:
        words = without_flag(words, "config")
    if "preset" in dict(scan(words)):
        errors.append("--preset: presets follow --actor-model and --reward-model; give --config FILE")
        words = without_flag(words, "preset")
    config, given = TrainConfig(), frozenset[str]()
    if lines:
        return stages_alone(words), given, [*errors, *lines]
    try:
        resolved = parse(TrainConfig, words, section=TRAIN, sections=SECTIONS, prog=prog, help_maker=train_help)
        say(*(f"note: {line}" for line in resolved.notes))
        config, given = resolved.config, frozenset(n for n, origin in resolved.origins.items() if not origin.is_default)
        errors += contradictions(config)
    except InputError as error:
        errors += str(error).splitlines()
    return stages_alone(words) if errors else config, given, errors


def misplaced(given: Collection[str], config_file: str) -> Iterator[str]:
    """Yield an error line for each flag of stages among those that the file gives to `rlhf train` itself."""
    train_names = Names(TrainConfig).flag_of
    for name in (name for name in given if name not in train_names):
        stages = {kind.section: Names(kind.config) for kind in STAGES}
        if sections := [s for s, names in stages.items() if name in names.flag_of or name in names.other_tools]:
            yield f"{config_file}: {TRAIN}: {name}: a flag of stages; put it under {' or '.join(sections)}"


def plan_stage(
    stage: Stage, config: TrainConfig, *, typed: set[str], file: str, flags: list[str], before: dict[int, PlannedStage]
) -> PlannedStage:
    """Return one planned stage.

    A model that its flags alone name brings its preset, to later stages too.

    Args:
        typed: own flags that were given.
        file: the --config file.
        flags: those of the stage, as words.
        before: stages whose output it may read.
    """
    names = Names(stage.config).flag_of
    in_file = read_yaml(file, stage.section, SECTIONS)[0] if file else {}
    method = {"method": config.method} if takes_method(stage, config.method) else {}
    given = method | {names.get(name, name): value for name, value in in_file.items()}
    given |= {names.get(name, name): words[-1] if words else "" for name, words in scan(flags)}
    starts = stage.starts(given)
    first, start = next(iter(starts.items()))
    flag, role = stage.path_flag(first), f"{start.follows}_model"
    if given.get(flag) and role not in typed:
        known_model(str(given[flag]), f"{dashed(flag)}: ")
        config = config.model_copy(update={role: str(given[flag])})
    named = with_reward_model(config)
    model = str(getattr(named, role))
    family = known_model(model)
    argv = ["--config", file] if file else []
    outputs = {planned.stage.section: planned.start_of_later(typed) for planned in before.values()}
    of_method = {} if method == {"method": METHODS[0]} else method
    following = chained_flags(stage, starts, Path(config.output_dir), outputs, given) | of_method
    following |= family.flags if family else {}
    replaceable = {name: value for name, value in following.items() if name not in map(names.get, in_file)}
    for name, value in (replaceable | inherited_flags(starts, named)).items():
        argv += [dashed(name)] if value == "true" else [dashed(name), value]

    def with_preset(name: str) -> tuple[list[str], Resolved]:
        preset = launch_file(f"presets/{name}.yaml")
        words = ["--preset", path_from_here(preset)] if name and preset.is_file() else []
        words = overridden(stage, [*words, *argv], flags)
        return words, parse(stage.config, words, section=stage.section, sections=SECTIONS)

    preset = family.preset if family else ""
    words, resolved = with_preset(preset)
    run_dir = stage.run_folder(resolved.config.run)
    # A run has the preset that it began with: in later versions, or after a download, more models have one.
    is_found = Path(model).is_dir() or model == given.get(flag) or not family or family.is_known_by_size
    if is_found and (began := preset_of_run(stage, resolved, preset)) != preset:
        for name in family.flags if family else ():
            argv = without_flag(argv, name)
        words, resolved = with_preset(began)
    unshared = list[str]()
    for number, share in stage.config.drops_share_of.items():
        other = before[number].run_dir if number in before else None
        if share not in given and leaves_share(stage, resolved.config, share, other, runs_too=number in config.step):
            unshared += [dashed(share), "false"]
    if unshared:
        words = overridden(stage, words, unshared)
        resolved = parse(stage.config, words, section=stage.section, sections=SECTIONS)
    with_ranks(resolved, None)  # what no number of ranks can have is refused here, by the stage's own name of a flag
    return PlannedStage(stage, resolved, words, resolved.config.outputs[0], run_dir, config)


def overridden(stage: Stage, words: list[str], stronger: list[str]) -> list[str]:
    """Return the words of a stage with those of `stronger` behind them, and without the flags that these give."""
    names = Names(stage.config)
    # A switch changes one word of a list, and goes with others.
    flag_names = {name: name if name in names.switches else flag for name, flag in names.flag_of.items()}
    given = {flag_names.get(name, name) for name, _ in scan(stronger)}
    for name in (*flag_names, *FILE_FLAGS):
        if flag_names.get(name, name) in given:
            words = without_flag(words, name)
    return [*words, *stronger]


def path_from_here(path: Path) -> str:
    """Return `path` as a user in the working folder would type it."""
    relative = os.path.relpath(path)
    return str(path) if relative.startswith("..") else relative


# --- how a plan is launched ---


def command_of(planned: PlannedStage, config: TrainConfig) -> list[str]:
    """Return the words of `bash launch/<deployment>.sh [launcher flags] STEP [stage flags]`."""
    launcher = launcher_argv(config)
    script = path_from_here(launch_file(f"{config.deployment_type}.sh"))
    return ["bash", script, *launcher, word_of(planned.stage), *planned.argv]


def request_of(config: TrainConfig) -> LaunchRequest:
    """Return what the launch script makes of the launcher's flags. Raises InputError."""
    return parse_request(config.deployment_type, launcher_argv(config))


def ranks_of(plan: Plan) -> int:
    """Return the number of ranks: the GPUs that `--target` describes, else those of this machine and its flags.

    Raises:
        InputError, EnvironmentFault: see `hosts.ranks_by_host`.
    """
    target = target_of(plan)
    return target.num_gpus if target else sum(slots_of(plan) or [])


def slots_of(plan: Plan) -> list[int] | None:
    """Return the ranks of each machine, as `ranks_of`; None where `--target` describes others."""
    return None if target_of(plan) else ranks_by_host(request_of(plan.config))


def target_of(plan: Plan) -> Target | None:
    """Return the hardware of `--target`, the same for all stages; None for this machine. Raises InputError."""
    described = plan.chosen[0].resolved.config.run.target
    return parse_target(described) if described else None


def on_target(plan: Plan) -> Plan:
    """Return the plan with the launcher's flags for the hardware of `--target`, if it is given; name those it replaces.

    Raises:
        InputError: see `parse_target`.
    """
    if (target := target_of(plan)) is None:
        return plan
    several, described = target.hosts > 1, plan.chosen[0].resolved.config.run.target
    kind = "multi_node" if several else "single_node" if target.gpus > 1 else "single_gpu"
    changes = {name: getattr(TrainConfig(), name) for name in (("include", "exclude") if several else HOST_FLAGS)}
    changes |= {"deployment_type": kind, "num_gpus": target.gpus if target.num_gpus > 1 else 0}
    for name in sorted(plan.given & changes.keys()):
        resolved_value, planned = getattr(plan.config, name), changes[name]
        if resolved_value != planned:
            how = f"planned with {planned}" if planned else "planned without it"
            show(f"note: {dashed(name)} {resolved_value} does not go with --target {described}: {how}")
    if several and not plan.config.hostfile:
        changes["hostfile"] = HOSTFILE
        show(f"note: {HOSTFILE} stands for a file of {target.hosts} lines `name slots={target.gpus}`")
    return replace(plan, config=plan.config.model_copy(update=changes))
