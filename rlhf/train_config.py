"""The flags of `rlhf train` itself: definitions, the stage flags that they set, help, and contradictions."""

import re
import textwrap
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import nullcontext, suppress
from pathlib import Path
from typing import Annotated, ClassVar, Literal

from pydantic import AfterValidator, Field

from pipeline.configuration.flag_table import flag, flag_table
from pipeline.configuration.flags import TRAIN, load_yaml, parse, scan
from pipeline.configuration.groups import Group
from pipeline.configuration.help import first_screen, flag_lines, full_help, purpose, topic_help, topic_of
from pipeline.configuration.names import FILE_FLAGS, Names, normalise
from pipeline.configuration.stage import Stage, Start
from pipeline.console import HELP_ALL, WIDTH
from pipeline.errors import InputError, dashed
from pipeline.models.paths import check_model_path
from pipeline.run.entry import command
from rlhf.known_models import known_model
from rlhf.stages import METHODS, NUMBERS, SECTIONS, STAGES

# Pattern of host names: without characters that a shell or ssh would act on, because launchers put the names into
# command lines of other machines.
HOSTS = re.compile(r"([A-Za-z0-9\[][\w.:@,;\[\]-]*)?", re.ASCII)


def check_hosts(value: str) -> str:
    if not HOSTS.fullmatch(value):
        raise ValueError("expected host names of letters, digits and . - _ : @ ,")
    return value


HostNames = Annotated[str, AfterValidator(check_hosts)]
StageNumber = Annotated[int, Field(ge=NUMBERS[0], le=NUMBERS[-1])]
ZeroStage = Literal["auto", "0", "1", "2", "3"]


class TrainConfig(Group):
    """Make a chat model: SFT (1), a reward model (2), PPO, GRPO, DPO and others (3)."""

    examples: ClassVar[tuple[str, ...]] = (
        "--actor-model tiny --dry-run",
        "--actor-model 1.3b --data-path my.jsonl --show-data 3",
        "--step 3 --method grpo --reward-function exact_match",
    )
    step: list[StageNumber] = flag([1, 2, 3], f"Stages to run: any of {' '.join(map(str, NUMBERS))}", min_length=1)
    method: Literal[METHODS] = flag(METHODS[0], f"Method of stage 3: {', '.join(METHODS)}")  # type: ignore[valid-type]
    deployment_type: Literal["auto", "single_gpu", "single_node", "multi_node"] = flag(
        "auto", "auto: all free GPUs of this host; single_gpu, single_node: one or all; multi_node: several hosts"
    )
    actor_model: str = flag("1.3b", "Model to train: 66b, qwen3-8b, ..., hub id, folder", aliases=("model",))
    reward_model: str = flag("auto", "Base of the reward model, auto: 350m, or one of the actor's family", kind="path")
    actor_zero_stage: ZeroStage = flag("auto", "ZeRO stage of the actor; auto: the plan chooses")
    reward_zero_stage: ZeroStage = flag("auto", "ZeRO stage of reward model and critic; auto: the plan chooses")
    output_dir: str = flag("output", "Parent folder of sft/, reward/, actor/", kind="written path")
    num_gpus: int = flag(0, "GPUs of each machine; 0: all", ge=0)
    hostfile: str = flag("", "Host file of multi_node, a line `name slots=8` per host", kind="path")
    include: HostNames = flag("", "Hosts and GPUs to use: name:0,1@name", kind="path")
    exclude: HostNames = flag("", "Hosts and GPUs to leave out, in the same form", kind="path")
    launcher: Literal["ssh", "srun", "none"] = flag(
        "ssh", "Program that starts ranks on other hosts; none: you run this command on each host, with its --node-rank"
    )
    node_rank: int = flag(0, "With --launcher none: index of this host in the host file, from 0", ge=0)
    master_addr: HostNames = flag("", "Address of the first host; empty: looked up by its name")
    master_port: int = flag(0, "Port of rank 0; 0: a free one, with --launcher none 29500", ge=0, le=65535)
    resume: str = flag("auto", "auto, never, or a checkpoint folder; auto: the newest checkpoint", kind="path")
    overwrite: bool = flag(False, "Run finished stages again")
    max_restarts: int = flag(0, "Times that a stage resumes after its processes died or hung", ge=0)
    dry_run: bool = flag(False, "Check all, print the plan, start nothing")
    check: bool = flag(False, "Check hosts, measure the GPU, start no stage")
    debug: bool = flag(False, "Show tracebacks of expected errors")


HOST_FLAGS = ("hostfile", "include", "exclude", "launcher", "node_rank", "master_addr", "master_port")
LAUNCHER_FLAGS = ("hostfile", "num_gpus", "include", "exclude", "master_addr", "master_port")
USUAL = (
    "actor_model", "reward_model", "data_path", "step", "deployment_type", "num_gpus", "output_dir", "method", "resume",
    "dry_run",
)  # fmt: skip


def metric_help(name: str) -> str:
    """Return unit and meaning of a metric of `metrics.jsonl`, with the stages that log it; "" for another name."""
    # Imported here: nothing else in this module reads them.
    from step1_sft.metrics import METRICS as SFT
    from step2_reward.metrics import METRICS as REWARD
    from step3_dpo.metrics import METRICS as DPO
    from step3_ppo.metrics import METRICS as PPO

    sections: dict[tuple[str, str], list[str]] = {}
    for section, table in {"sft": SFT, "reward": REWARD, "ppo": PPO, "dpo": DPO}.items():
        if one := table.get(name) or table.get(name.removeprefix("eval_")):
            sections.setdefault((one.unit, one.meaning), []).append(section)
    lines = (f"{name} of {', '.join(of)}, {unit}: {meaning}" for (unit, meaning), of in sections.items())
    return "\n".join(textwrap.fill(line, WIDTH, subsequent_indent="  ") for line in lines)


def train_help(config_class: type[Group], prog: str, argv: Sequence[str] = ()) -> str:
    """Return the help that a command line requests: on a topic, on all flags, or one screen of 25 lines of 80 columns.

    Raises:
        InputError: see `topic_help`.
    """
    if topic := topic_of(argv):
        metric, readers = metric_help(topic), {prog: config_class} | {stage.section: stage.config for stage in STAGES}
        with suppress(InputError) if metric else nullcontext():
            return "\n\n".join(filter(None, [metric, topic_help(topic, readers)]))
        return metric
    if not set(HELP_ALL).isdisjoint(argv):
        parts = [full_help(config_class, prog)]
        for stage in STAGES:
            heading = f"{purpose(stage.config)}\n  Give --{stage.section}.FLAG VALUE, or --FLAG VALUE for all stages."
            parts += [heading, "", *flag_lines(stage.config)]
        return "\n".join(parts)
    table = {**flag_table(STAGES[0].config), **flag_table(config_class)}
    more = [
        "  --show-data, --target, --explain, --auto: for all stages",
        "--config FILE: YAML with sections train, sft, reward, ppo, dpo (`rlhf init`)",
        "--FLAG VALUE is for all stages; --sft.FLAG, --reward.FLAG, --ppo.FLAG for one",
    ]
    return first_screen(config_class, prog, [table[name] for name in USUAL], more)


# Prints only help, so that help does not wait for the other imports of `rlhf train`.
main = command(lambda argv, prog: print(train_help(TrainConfig, prog, argv)), "rlhf train")


def split_overrides(argv: Iterable[str], sections: Iterable[str]) -> tuple[list[str], dict[str, list[str]]]:
    """Split a command line into arguments of `rlhf train` and of each section: `--sft.seed 1` is `--seed 1` of sft."""
    train_argv: list[str] = []
    overrides: dict[str, list[str]] = {section: [] for section in sections}
    target = train_argv
    for word in argv:
        if word.startswith("--"):
            match = re.match(rf"--({'|'.join(overrides)})\.", word)
            target = overrides[match[1]] if match else train_argv
            word = f"--{word[match.end() :]}" if match else word
        target.append(word)
    return train_argv, overrides


def stages_alone(argv: Iterable[str]) -> TrainConfig:
    """Return a configuration of defaults, except for --step and --method if these arguments have valid ones."""
    chosen = [word for name, given in scan(argv) if name in ("step", "method") for word in (f"--{name}", *given)]
    with suppress(InputError):
        return parse(TrainConfig, chosen, section=TRAIN).config
    return TrainConfig()


def flags_of_absent_stages(
    overrides: Mapping[str, Iterable[str]], chosen: Collection[str], given: Collection[str]
) -> Iterator[str]:
    """Yield a note for each flag of a stage that does not run and that no other stage reads.

    Later stages read --output-dir of any stage and the start model of stage 1.

    Args:
        overrides: section -> arguments of that stage.
        chosen: sections of the stages that run.
        given: given flags of `rlhf train` itself.
    """
    of_reward_models = "reward_zero_stage"
    if of_reward_models in given and not {"reward", "ppo"} & set(chosen):
        yield f"{dashed(of_reward_models)} changes nothing: no stage that runs has a reward model or a critic"
    for section in (section for section in overrides if section not in chosen):
        read = ("output_dir", "model_name_or_path" if section == STAGES[0].section else "")
        for name in dict.fromkeys(name for name, _ in scan(overrides[section]) if name not in read):
            yield f"{dashed(f'{section}.{name}')} changes nothing: {section} is not among the stages that run"


def split_common(argv: Iterable[str]) -> tuple[list[str], list[list[str]]]:
    """Split arguments without a section: those of `rlhf train` itself, and each flag of its stages with its values."""
    names = Names(TrainConfig)
    train_argv: list[str] = []
    common: list[list[str]] = []
    target = train_argv
    for word in argv:
        if word.startswith("--"):
            target = train_argv
            if normalise(word[2:].partition("=")[0]) not in {*names.flag_of, *FILE_FLAGS, "help", "help_all"}:
                common.append([])
                target = common[-1]
        target.append(word)
    return train_argv, common


def chained_flags(
    stage: Stage, starts: Mapping[str, Start], out: Path, outputs: Mapping[str, object], given: Mapping[str, object]
) -> dict[str, str]:
    """Return the flags of a stage that name folders: its output and the outputs of earlier stages that it starts from.

    A model that starts from the same stage as the first model takes the folder that `given` has for the first model.

    Args:
        starts: prefix of a model's flags -> its start.
        out: --output-dir of `rlhf train`.
        outputs: section -> output folder of that stage.
        given: flags of a --config file or overrides.
    """
    first = next(iter(starts))
    by_hand = given.get(Stage.path_flag(first))
    folders = {
        Stage.path_flag(prefix): str(by_hand if by_hand and start == starts[first] else outputs.get(start.section, out))
        for prefix, start in starts.items()
        if start.section
    }
    return folders | {"output_dir": str(out / stage.folder)}


def has_sections(config_file: str) -> bool:
    """Return True if a YAML file has sections, known or not: any mapping is a section, because no flag takes one."""
    return any(key in SECTIONS or isinstance(value, dict) for key, value in load_yaml(config_file).items())


def config_file_of(number: int, config: TrainConfig, config_file: str) -> str:
    """Return the --config file if it applies to stage `number`, else "".

    A file without sections applies to the only stage that runs. Raises InputError if several run.
    """
    if not config_file or has_sections(config_file):
        return config_file
    if len(set(config.step)) > 1:
        below = " or ".join((", ".join(f"{name}:" for name in SECTIONS[1:-1]), f"{SECTIONS[-1]}:"))
        raise InputError(f"{config_file}: got flags without sections; put them below {below}")
    return config_file if number in config.step else ""


def takes_method(stage: Stage, method: str) -> bool:
    """Return True if a stage has this method and a flag --method; a stage with a single method may have no flag."""
    return method in stage.methods and "method" in Names(stage.config).flag_of


def inherited_flags(starts: Mapping[str, Start], config: TrainConfig) -> dict[str, str]:
    """Return the flags that `rlhf train` sets in a stage with these starts; only an override is stronger."""
    models = {"actor": config.actor_model, "reward": config.reward_model}
    zero_stages = {"actor": config.actor_zero_stage, "reward": config.reward_zero_stage}
    flags: dict[str, str] = {}
    for prefix, start in starts.items():
        flags[f"{prefix}zero_stage"] = zero_stages[start.follows]
        if not start.section:
            model = models[start.follows]
            base_model = known_model(model)
            flags[Stage.path_flag(prefix)] = model if base_model is None else base_model.hub_id
    flags |= {"resume": config.resume, "overwrite": str(config.overwrite).lower(), "debug": str(config.debug).lower()}
    return {name: value for name, value in flags.items() if value not in ("", "auto", "false")}


def as_override(line: str, section: str) -> str:
    """Return a stage's error line with the section before its flags, as `rlhf train` takes them."""
    if not line.startswith("--"):
        return f"{section}: {line}"
    return re.sub(
        r"(mean|is|are|or|give|raise|leave|without|nearest:) --", rf"\1 --{section}.", f"--{section}.{line[2:]}"
    )


def launcher_argv(config: TrainConfig) -> list[str]:
    """Return the arguments of the launch script, with --launcher or --no-ssh if other hosts are not reached by ssh."""
    values = [(name, getattr(config, name)) for name in LAUNCHER_FLAGS]
    argv = [word for name, value in values if value for word in (dashed(name), str(value))]
    argv += ["--check"] if config.check else []
    if config.launcher == "none":
        return ["--no-ssh", "--node-rank", str(config.node_rank), *argv]
    return argv if config.launcher == "ssh" else ["--launcher", config.launcher, *argv]


def with_reward_model(config: TrainConfig) -> TrainConfig:
    """Return a configuration with `auto` of --reward-model resolved to a small model that reads the actor's tokens."""
    if config.reward_model != "auto":
        return config
    base = known_model(config.actor_model)
    return config.model_copy(update={"reward_model": base.reward_model if base else config.actor_model})


def contradictions(config: TrainConfig) -> list[str]:
    """Return an error line for each contradiction between flags of `rlhf train` itself."""
    errors = []
    if config.deployment_type == "single_gpu" and config.num_gpus > 1:
        errors.append(f"--num-gpus: got {config.num_gpus} with single_gpu; give --deployment-type single_node")
    for name in ("hostfile", "launcher", "node_rank") if config.deployment_type != "multi_node" else ():
        if (value := getattr(config, name)) != getattr(TrainConfig(), name):
            word = dashed(name)
            errors.append(f"{word}: got {value} with {config.deployment_type}; give --deployment-type multi_node")
    if config.node_rank and config.launcher != "none":
        errors.append(f"--node-rank: got {config.node_rank} with --launcher {config.launcher}; give --launcher none")
    if config.check and config.launcher == "none":
        errors.append("--check: got --launcher none; give --launcher ssh or srun")
    if config.include and config.exclude:
        errors.append("--include and --exclude: give one of them")
    if config.num_gpus and (config.include or config.exclude):
        errors.append("--num-gpus: give this or --include / --exclude, not both")
    if config.resume not in ("auto", "never") and len(set(config.step)) > 1:
        errors.append(f"--resume: {config.resume}: a checkpoint is one stage's; give one --step, or --SECTION.resume")
    for name, model in (("--actor-model", config.actor_model), ("--reward-model", config.reward_model)):
        try:
            if model != "auto" and known_model(model) is None:
                check_model_path(model)
        except InputError as error:
            errors.append(f"{name}: {error}")
    return errors
