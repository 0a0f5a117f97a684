"""Own flags of `rlhf train`: definition, what they set in stages, help on a screen, sets that contradict each other."""

import re
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from functools import cache
from math import prod
from pathlib import Path
from typing import Annotated, Any, ClassVar, Literal

from pydantic import AfterValidator, Field

from pipeline.configuration.flag_table import flag, flag_table
from pipeline.configuration.flags import TRAIN, load_yaml, parse, scan
from pipeline.configuration.groups import Group
from pipeline.configuration.help import first_screen, flag_lines, full_help, purpose, topic_help, topic_of
from pipeline.configuration.names import FILE_FLAGS, Names, normalise
from pipeline.configuration.stage import Stage, Start
from pipeline.console import HELP_ALL
from pipeline.errors import InputError, dashed, nearest
from pipeline.launching.scripts import launch_file
from pipeline.models.paths import check_model_path
from pipeline.run.entry import command
from rlhf.stages import METHODS, NUMBERS, SECTIONS, STAGES

SIZES = ("tiny", "125m", "350m", "1.3b", "2.7b", "6.7b", "13b", "30b", "66b", "1.3b-lora", "6.7b-lora")
OPT = "facebook/opt-"
# Most weights of a model folder -> the preset of its size; bounds between the sizes of families, chosen by hand.
PRESETS_BY_SIZE = {50e6: "", 0.8e9: "small", 2.4e9: "1b", 5e9: "3b", 10e9: "8b"}
# Launchers put names of hosts into command lines of other machines: nothing that a shell or ssh would act on.
HOSTS = re.compile(r"([A-Za-z0-9\[][\w.:@,;\[\]-]*)?", re.ASCII)


def check_hosts(value: str) -> str:
    if not HOSTS.fullmatch(value):
        raise ValueError("expected names of hosts, of letters, digits and . - _ : @ ,")
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
    step: list[StageNumber] = flag([1, 2, 3], f"which of {' '.join(map(str, NUMBERS))} to run", min_length=1)
    method: Literal[METHODS] = flag(METHODS[0], f"of stage 3: {', '.join(METHODS)}")  # type: ignore[valid-type]
    deployment_type: Literal["auto", "single_gpu", "single_node", "multi_node"] = flag(
        "auto", "auto: all free GPUs here; single_gpu, single_node, multi_node"
    )
    actor_model: str = flag("1.3b", "66b, qwen3-8b, ..., hub id, folder", aliases=("model",))
    reward_model: str = flag("auto", "auto: 350m, or of the actor's family", kind="path")
    actor_zero_stage: ZeroStage = flag("auto", "0 to 3; auto: as the plan finds")
    reward_zero_stage: ZeroStage = flag("auto", "0 to 3; auto: as the plan finds")
    output_dir: str = flag("output", "parent of sft/, reward/, actor/", kind="written path")
    num_gpus: int = flag(0, "GPUs of each machine; 0: all", ge=0)
    hostfile: str = flag("", "multi_node: lines `name slots=8`", kind="path")
    include: HostNames = flag("", "hosts and GPUs to use: name:0,1@name", kind="path")
    exclude: HostNames = flag("", "hosts and GPUs to leave out", kind="path")
    launcher: Literal["ssh", "pdsh", "srun", "none"] = flag(
        "ssh", "multi_node: how the hosts are reached; none: this command runs on each, with its --node-rank"
    )
    node_rank: int = flag(0, "launcher none: place of this host in the host file, from 0", ge=0)
    master_addr: HostNames = flag("", "address of the first host")
    master_port: int = flag(0, "0: a free one is picked; launcher none: 29500", ge=0, le=65535)
    resume: str = flag("auto", "auto, never, or a checkpoint folder", kind="path")
    overwrite: bool = flag(False, "run finished stages again")
    max_restarts: int = flag(0, "resume a stage after a fault, killed or hung", ge=0)
    dry_run: bool = flag(False, "check all, print the plan, start nothing")
    check: bool = flag(False, "check hosts, measure the GPU, start no stage")
    debug: bool = flag(False, "show tracebacks")


HOST_FLAGS = ("hostfile", "include", "exclude", "launcher", "node_rank", "master_addr", "master_port")
LAUNCHER_FLAGS = ("hostfile", "num_gpus", "include", "exclude", "master_addr", "master_port")
USUAL = (
    "actor_model", "reward_model", "data_path", "step", "deployment_type", "num_gpus", "output_dir", "method", "resume",
    "dry_run",
)  # fmt: skip


def train_help(config_class: type[Group], prog: str, argv: Sequence[str] = ()) -> str:
    """Return the help that a command line asks for: on one screen of 25 lines of 80 columns; with all stages' flags.

    Raises:
        InputError: see `topic_help`.
    """
    if topic := topic_of(argv):
        return topic_help(topic, {prog: config_class} | {stage.section: stage.config for stage in STAGES})
    if not set(HELP_ALL).isdisjoint(argv):
        parts = [full_help(config_class, prog)]
        for stage in STAGES:
            heading = f"{purpose(stage.config)}\n  Give --{stage.section}.FLAG VALUE, or --FLAG VALUE to all stages."
            parts += [heading, "", *flag_lines(stage.config)]
        return "\n".join(parts)
    table = {**flag_table(STAGES[0].config), **flag_table(config_class)}
    more = [
        "  --show-data, --target, --explain, --auto-fit, --auto-batch: of all stages",
        "--config FILE: YAML with sections train, sft, reward, ppo, dpo (`rlhf init`)",
        "--FLAG VALUE: of all stages; of one: --sft.FLAG, --reward.FLAG, --ppo.FLAG",
    ]
    return first_screen(config_class, prog, [table[name] for name in USUAL], more)


# Prints help alone: what else `rlhf train` imports takes longer.
main = command(lambda argv, prog: print(train_help(TrainConfig, prog, argv)), "rlhf train")


def split_overrides(argv: Iterable[str], sections: Iterable[str]) -> tuple[list[str], dict[str, list[str]]]:
    """Split a command line into own words and section -> words of that stage: `--sft.seed 1` is `--seed 1` of sft."""
    own: list[str] = []
    overrides: dict[str, list[str]] = {section: [] for section in sections}
    target = own
    for word in argv:
        if word.startswith("--"):
            match = re.match(rf"--({'|'.join(overrides)})\.", word)
            target = overrides[match[1]] if match else own
            word = f"--{word[match.end() :]}" if match else word
        target.append(word)
    return own, overrides


def stages_alone(own: Iterable[str]) -> TrainConfig:
    """Return the defaults with --step and --method of these words, where those are right."""
    kept = [word for name, given in scan(own) if name in ("step", "method") for word in (f"--{name}", *given)]
    with suppress(InputError):
        return parse(TrainConfig, kept, section=TRAIN).config
    return TrainConfig()


def idle_flags(
    overrides: Mapping[str, Iterable[str]], chosen: Collection[str], given: Collection[str]
) -> Iterator[str]:
    """Yield a line for each flag of a stage, section -> words, that is not `chosen`.

    Later stages read its folder, and start as stage 1 would.

    given: flags of `rlhf train` itself.
    """
    of_reward_models = "reward_zero_stage"
    if of_reward_models in given and not {"reward", "ppo"} & set(chosen):
        yield f"{dashed(of_reward_models)} changes nothing: no stage that runs has a reward model or a critic"
    for section in (section for section in overrides if section not in chosen):
        read = ("output_dir", "model_name_or_path" if section == STAGES[0].section else "")
        for name in dict.fromkeys(name for name, _ in scan(overrides[section]) if name not in read):
            yield f"{dashed(f'{section}.{name}')} changes nothing: {section} is not among the stages that run"


def split_common(words: Iterable[str]) -> tuple[list[str], list[list[str]]]:
    """Split the words without a section into those of `rlhf train` itself and the flags, with values, of its stages."""
    names = Names(TrainConfig)
    own: list[str] = []
    common: list[list[str]] = []
    target = own
    for word in words:
        if word.startswith("--"):
            target = own
            if normalise(word[2:].partition("=")[0]) not in {*names.known, *FILE_FLAGS, "help", "help_all"}:
                common.append([])
                target = common[-1]
        target.append(word)
    return own, common


@dataclass(frozen=True, slots=True)
class KnownModel:
    """A base model with recipes: the name of its presets, its hub id, and the base of its reward model by default.

    hub_id: empty where each of its presets names the model.
    flags: what a stage gets that trains it, unless a --config file or an override says otherwise.
    """

    preset: str
    hub_id: str
    reward_model: str
    flags: Mapping[str, str] = field(default_factory=dict)


@cache
def model_families() -> list[dict[str, list[Any]]]:
    """Return the families of launch/models.yaml, name -> [hub id, preset] each, and flags where there are any."""
    return list(load_yaml(str(launch_file("models.yaml"))).values())


def known_model(model: str, flag: str = "") -> KnownModel | None:
    """Return what is known of a base model by its name or hub id, of a folder by its number of weights; None: nothing.

    flag: what messages begin with.

    Raises:
        InputError: it looks like the name of a known model, or is near one; or it is a preset of stage 1 alone.
    """
    size = model.removeprefix(OPT)
    if size in SIZES:
        return KnownModel(size, "", "tiny" if size == "tiny" else "350m")
    names: list[str] = []
    for family in model_families():
        names += family
        for name, (hub_id, preset, *flags) in family.items():
            if model in (name, hub_id, f"{hub_id}-Instruct"):
                return KnownModel(preset, hub_id if model == name else model, next(iter(family)), *flags)
    if "/" in model or Path(model).exists():
        return KnownModel(preset, model, model) if (preset := preset_of_size(Path(model))) else None
    preset_file = launch_file(f"presets/{model}.yaml")
    if preset_file.is_file() and list(load_yaml(str(preset_file))) == [STAGES[0].section]:
        raise InputError(
            f"{flag}got {model!r}, a preset of stage 1 alone; give: bash launch/single_node.sh 1 --preset "
            f"launch/presets/{model}.yaml"
        )
    hint = nearest(model, [*SIZES, *names])
    if hint or re.fullmatch(r"\d+(\.\d+)?[mbMB](-lora)?|[a-z]+[\d.]*-[\d.]+[bm](-lora)?", model):
        raise InputError(
            f"{flag}got {model!r}, expected {', '.join(SIZES)}, a name of launch/models.yaml, a hub id or "
            f"a folder{hint}"
        )
    return None


def preset_of_size(folder: Path) -> str:
    """Return the preset for models of as many weights as those in a folder; "" for none, or for no model."""
    from pipeline.models.weight_files import read_header  # with what reads tensors

    files, count = folder.expanduser().glob("model*.safetensors"), 0
    with suppress(InputError):  # the check of the model reports it
        count = sum(prod(shape) for file in files for shape in read_header(file)[0].values())
    return next((preset for most, preset in PRESETS_BY_SIZE.items() if count <= most), "")


def chained_flags(
    stage: Stage, starts: Mapping[str, Start], out: Path, outputs: Mapping[str, object], given: Mapping[str, object]
) -> dict[str, str]:
    """Return the folders that follow from the stages before; a --config file or an override (`given`) may name others.

    A model that starts as the stage's first one does, a critic as its actor, follows what is given for that one.
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
    """Tell whether a YAML file holds sections, also unknown ones: no flag takes a mapping."""
    return any(key in SECTIONS or isinstance(value, dict) for key, value in load_yaml(config_file).items())


def config_file_of(number: int, config: TrainConfig, config_file: str) -> str:
    """Return the --config file if it is for stage `number`: one without sections is for the only stage that runs."""
    if not config_file or has_sections(config_file):
        return config_file
    if len(set(config.step)) > 1:
        below = " or ".join((", ".join(f"{name}:" for name in SECTIONS[1:-1]), f"{SECTIONS[-1]}:"))
        raise InputError(f"{config_file}: found flags without sections; put them below {below}")
    return config_file if number in config.step else ""


def takes_method(stage: Stage, method: str) -> bool:
    """Return True if a stage has a flag for this value of --method; one with a single method need not."""
    return method in stage.methods and "method" in Names(stage.config).known


def inherited_flags(starts: Mapping[str, Start], config: TrainConfig) -> dict[str, str]:
    """Return the flags of a stage with these starts that `rlhf train` sets; only an override is stronger."""
    models = {"actor": config.actor_model, "reward": config.reward_model}
    zero_stages = {"actor": config.actor_zero_stage, "reward": config.reward_zero_stage}
    flags: dict[str, str] = {}
    for prefix, start in starts.items():
        flags[f"{prefix}zero_stage"] = zero_stages[start.follows]
        if not start.section:
            model = models[start.follows]
            known = known_model(model)
            flags[Stage.path_flag(prefix)] = model if known is None else known.hub_id
    flags |= {"resume": config.resume, "overwrite": str(config.overwrite).lower(), "debug": str(config.debug).lower()}
    return {name: value for name, value in flags.items() if value not in ("", "auto", "false")}


def as_override(line: str, section: str) -> str:
    """Return a stage's error line with its flags as the user of `rlhf train` types them."""
    if not line.startswith("--"):
        return f"{section}: {line}"
    return re.sub(
        r"(mean|is|are|or|give|raise|leave|without|nearest:) --", rf"\1 --{section}.", f"--{section}.{line[2:]}"
    )


def launcher_words(config: TrainConfig) -> list[str]:
    """Return the flags of the launcher as words; of several hosts also how they are reached."""
    values = [(name, getattr(config, name)) for name in LAUNCHER_FLAGS]
    words = [word for name, value in values if value for word in (dashed(name), str(value))]
    words += ["--check"] if config.check else []
    if config.launcher == "none":
        return ["--no-ssh", "--node-rank", str(config.node_rank), *words]
    return words if config.launcher == "ssh" else ["--launcher", config.launcher, *words]


def with_reward_model(config: TrainConfig) -> TrainConfig:
    """Return a configuration whose reward model is named: `auto` is small and reads the actor's tokens."""
    if config.reward_model != "auto":
        return config
    known = known_model(config.actor_model)
    return config.model_copy(update={"reward_model": config.actor_model if known is None else known.reward_model})


def contradictions(config: TrainConfig) -> list[str]:
    """Return a line for each set of own flags that contradict each other."""
    errors = []
    if config.deployment_type == "single_gpu" and config.num_gpus > 1:
        errors.append(f"--num-gpus: got {config.num_gpus} with single_gpu; give --deployment-type single_node")
    for name in ("hostfile", "launcher", "node_rank") if config.deployment_type != "multi_node" else ():
        if (value := getattr(config, name)) != getattr(TrainConfig(), name):
            word = dashed(name)
            errors.append(f"{word}: got {value} with {config.deployment_type}; give --deployment-type multi_node")
    if config.node_rank and config.launcher != "none":
        errors.append(f"--node-rank: got {config.node_rank} with --launcher {config.launcher}; give --launcher none")
    if config.check and config.launcher in ("pdsh", "none"):
        errors.append(f"--check: found --launcher {config.launcher}; give --launcher ssh or srun")
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
