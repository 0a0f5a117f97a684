"""Plan of `rlhf train`: words, checked configuration and folders of each step, before anything starts.

The caller passes the steps, since nothing in pipeline/ imports a stage.
"""

import os
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path

from pipeline.configuration.flags import SECTIONS, Resolved, load_yaml, parse, read_yaml, scan
from pipeline.configuration.groups import Group
from pipeline.errors import InputError
from pipeline.launching.launcher import launch_file
from pipeline.launching.train_config import TrainConfig, contradictions, model_size, short_help, split_overrides
from pipeline.run.layout import run_folder


@dataclass(frozen=True, slots=True)
class StepKind:
    """The meaning of a step number; `section` is its name in YAML files, overrides and preset names."""

    section: str
    title: str
    config_class: type[Group]


@dataclass(frozen=True, slots=True)
class Stage:
    """A planned step: its configuration, its flags as words, and its folders."""

    step: int
    kind: StepKind
    resolved: Resolved
    argv: list[str]
    model_dir: Path
    run_dir: Path


@dataclass(frozen=True, slots=True)
class Plan:
    """All three steps, also those that are not to run: later ones read their output."""

    config: TrainConfig
    stages: dict[int, Stage]

    @property
    def chosen(self) -> list[Stage]:
        """Return the steps to run, in order."""
        return [self.stages[step] for step in sorted(set(self.config.step))]


def make_plan(argv: list[str], kinds: Mapping[int, StepKind], *, prog: str) -> Plan:
    """Return the plan of `rlhf train ARGV`, which its user calls as `prog`. Exits with 0 after `--help`.

    Raises:
        InputError: every wrong flag, of `rlhf train` itself and of the steps, one per line.
    """
    own, overrides = split_overrides(argv, [kind.section for kind in kinds.values()])
    config_file = "".join(dict(scan(own)).get("config", [])[-1:])
    config, errors = train_config(own, config_file, prog)
    stages: dict[int, Stage] = {}
    for step, kind in kinds.items():
        try:
            file = config_file_of(step, config, config_file)
            stages[step] = plan_stage(
                step, kind, config, config_file=file, override=overrides[kind.section], before=stages
            )
        except InputError as error:
            errors += [as_override(line, kind.section) for line in str(error).splitlines()]
    if errors:
        raise InputError("\n".join(dict.fromkeys(errors)))
    return Plan(config, stages)


def train_config(own: list[str], config_file: str, prog: str) -> tuple[TrainConfig, list[str]]:
    """Return (own configuration, error lines); the defaults if there are errors, so that the steps can be checked.

    Raises:
        InputError: the --config file is not usable, which each step would report again.
    """
    if config_file and not has_sections(config_file):
        own = without_flag(own, "config")
    errors = []
    if "preset" in dict(scan(own)):
        errors.append("--preset: presets follow --actor-model and --reward-model; give --config FILE")
        own = without_flag(own, "preset")
    config = TrainConfig()
    try:
        config = parse(TrainConfig, own, section="train", prog=prog, help_maker=short_help).config
        errors += contradictions(config)
    except InputError as error:
        errors += str(error).splitlines()
    return (TrainConfig() if errors else config), errors


def has_sections(config_file: str) -> bool:
    return any(key in SECTIONS for key in load_yaml(config_file))


def config_file_of(step: int, config: TrainConfig, config_file: str) -> str:
    """Return the --config file if it is for `step`: one without sections is for the only step that runs."""
    if not config_file or has_sections(config_file):
        return config_file
    if len(set(config.step)) > 1:
        raise InputError(f"{config_file}: found flags without sections; put them below sft:, reward: or ppo:")
    return config_file if step in config.step else ""


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
    step: int,
    kind: StepKind,
    config: TrainConfig,
    *,
    config_file: str,
    override: list[str],
    before: Mapping[int, Stage],
) -> Stage:
    """Return one planned step; `before` are the steps whose output it may read."""
    argv = ["--preset", file] if (file := preset_file(step, kind, config)) else []
    replaceable, fixed = chained_flags(step, config, before), inherited_flags(step, config)
    if config_file:
        argv += ["--config", config_file]
        from_file = read_yaml(config_file, kind.section)
        replaceable = {name: value for name, value in replaceable.items() if name not in from_file}
    for name, value in (replaceable | fixed).items():
        argv += [f"--{name}"] if value == "true" else [f"--{name}", value]
    argv += override
    resolved = parse(kind.config_class, argv, section=kind.section)
    run = resolved.config.run
    model_dir = Path(run.output_dir) / "actor" if step == 3 else Path(run.output_dir)
    return Stage(step, kind, resolved, argv, model_dir, run_folder(run, kind.section))


def preset_file(step: int, kind: StepKind, config: TrainConfig) -> str:
    """Return the path of a step's preset, by the reward model's size for step 2, else the actor's; "" if none."""
    size = model_size(config.reward_model if step == 2 else config.actor_model)
    file = launch_file(f"presets/{size}.{kind.section}.yaml")
    return path_from_here(file) if size and file.is_file() else ""


def path_from_here(path: Path) -> str:
    """Return `path` as a user in the working folder would type it."""
    relative = os.path.relpath(path)
    return str(path) if relative.startswith("..") else relative


def chained_flags(step: int, config: TrainConfig, before: Mapping[int, Stage]) -> dict[str, str]:
    """Return the folders that follow from the steps before; a --config file or an override may name others."""
    out = Path(config.output_dir)
    if step != 3:
        return {"output_dir": str(out / ("sft" if step == 1 else "reward"))}
    actor, critic = (before[n].model_dir if n in before else out for n in (1, 2))
    return {
        "actor_model_name_or_path": str(actor),
        "critic_model_name_or_path": str(critic),
        "output_dir": str(out),
    }


def inherited_flags(step: int, config: TrainConfig) -> dict[str, str]:
    """Return a step's flags that follow from those of `rlhf train`; only an override is stronger."""
    actor, reward = config.actor_zero_stage, config.reward_zero_stage
    flags: dict[str, str] = {}
    if step == 3:
        flags = {"actor_zero_stage": actor, "critic_zero_stage": reward}
    else:
        model = config.actor_model if step == 1 else config.reward_model
        flags = {"zero_stage": actor if step == 1 else reward}
        if model_size(model) is None:
            flags["model_name_or_path"] = model
    flags |= {"resume": config.resume, "overwrite": str(config.overwrite).lower(), "debug": str(config.debug).lower()}
    return {name: value for name, value in flags.items() if value not in ("auto", "false")}


def as_override(line: str, section: str) -> str:
    """Return a step's error line with its flags as the user of `rlhf train` types them."""
    if not line.startswith("--"):
        return f"{section}: {line}"
    return f"--{section}.{line[2:]}".replace("did you mean --", f"did you mean --{section}.")
