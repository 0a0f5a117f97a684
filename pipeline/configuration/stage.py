"""A stage of the pipeline as one object: all that commands, plans, run folders and exports know of it.

The module imports no torch.
"""

from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass, field
from pathlib import Path, PurePath
from typing import TYPE_CHECKING, Any, ClassVar, Literal

from pipeline.configuration.ds_config import Json, Placement, training_json
from pipeline.configuration.flag_table import flag, flat_items
from pipeline.configuration.groups import DataConfig, DeepSpeedConfig, Group, ModelConfig, OptimizerConfig
from pipeline.configuration.origins import Kind, Origin
from pipeline.configuration.resolved import Resolved
from pipeline.configuration.rollout_size import RolloutSize
from pipeline.configuration.run_flags import RunConfig
from pipeline.errors import dashed


class StageConfig(Group):
    """The flags of a stage, and what follows from them before anything runs; each has these groups, and its models.

    usual: the flags on the first screen of the help; empty: all. examples: words behind the program, shown there.
    rows: the kind of its rows (`pipeline/data/row_kinds.py`).
    shares: the places of --data-split whose prompts it trains on.
    drops_share_of: number of another stage -> flag that `rlhf train` sets to false where that stage runs too or has run
        before, so that this one leaves the other's prompts out.
    auto_flags: flags of its own that may be `auto`; a run resolves them before it loads a model, and a resumed run
        takes the same values.
    probe_overrides: flags with which a short run that measures a batch size updates every model that the stage trains.
    makes_chat_model: the first output answers prompts.
    runs_by_section: its run's folder is named by the section, not by the output.
    """

    usual: ClassVar[tuple[str, ...]] = ()
    examples: ClassVar[tuple[str, ...]] = ()
    rows: ClassVar[str]
    shares: ClassVar[tuple[int, ...]]
    drops_share_of: ClassVar[Mapping[int, str]] = {}
    auto_flags: ClassVar[tuple[str, ...]] = ()
    probe_overrides: ClassVar[Mapping[str, object]] = {}
    makes_chat_model: ClassVar[bool] = True
    runs_by_section: ClassVar[bool] = False
    if TYPE_CHECKING:  # each stage defines them: the order of its flags is its own
        data: DataConfig
        optimizer: OptimizerConfig
        deepspeed: DeepSpeedConfig
        run: RunConfig

    @property
    def start_paths(self) -> dict[str, str]:
        """Folders and hub ids of the models that a run begins with, by the names that checkpoints have for them."""
        return {}

    @property
    def row_options(self) -> dict[str, Any]:
        """The kind of the run's rows, and the shares of --data-split that it trains on."""
        return {"rows": self.rows, "shares": self.shares}

    @property
    def outputs(self) -> list[Path]:
        """The model folders that it writes; later stages start from the first."""
        return [Path(self.run.output_dir)]

    @property
    def lora_factor(self) -> float:
        """LoRA's learning rate over that of all other weights, where it is unset; 0: the flag has a default."""
        return 0.0

    def rollout_size(self, ranks: int) -> RolloutSize | None:
        """Return the size of a rollout on so many ranks; None for a stage that samples nothing."""
        return None


class PairDataConfig(DataConfig):
    """Data"""

    max_seq_len: int = flag(
        512, "Tokens of prompt and response together", ge=8, other_tools="max_length max_seq_length cutoff_len"
    )
    long_pairs: Literal["drop", "truncate_left"] = flag(
        "drop", "Pairs above --max-seq-len: drop them, or truncate their prompt on the left"
    )
    balance_lengths: bool = flag(
        False,
        "Drop training pairs until the longer response is chosen as often as the shorter one at each ratio of their "
        "lengths, so that a model cannot tell the better one by length",
    )


class SupervisedConfig(StageConfig):
    """The flags of a stage that trains one model."""

    usual = (
        "model_name_or_path", "data_path", "output_dir", "max_seq_len", "num_train_epochs", "learning_rate",
        "per_device_train_batch_size", "lora_dim", "eval_interval", "dry_run",
    )  # fmt: skip
    examples = (
        "--model facebook/opt-125m --data-path my.jsonl",
        "--config my.yaml --show-data 3",
        "--config my.yaml --lora-dim 64 --dry-run",
    )
    if TYPE_CHECKING:
        model: ModelConfig

    @property
    def start_paths(self) -> dict[str, str]:
        """The folder or hub id of the model."""
        return {"model": self.model.model_name_or_path}

    def engine_jsons(self, origins: dict[str, Origin], placement: Placement) -> dict[str, Json]:
        """Return {"model": the DeepSpeed JSON of its engine}. Raises InputError for settings that contradict."""
        return {"model": training_json(Resolved(self, origins), self.model, placement)}


@dataclass(frozen=True, slots=True)
class Start:
    """The start of a trained model of a stage.

    follows: the model of `rlhf train` (--actor-model, --reward-model) whose preset, base and ZeRO stage it takes.
    section: the stage whose first output it is; empty: the base model itself.
    """

    follows: Literal["actor", "reward"]
    section: str = ""


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Stage:
    """A stage: names, configuration, data, folders, and the functions by which the others enter its package.

    number: its value of --step.
    methods: values of --method for which it is the stage of that number -> the methods' names for people; the first one
        is the default.
    section: its name in YAML files, overrides (`--sft.seed`), preset names and run folders.
    title: its name for people.
    package: its Python package, whose module `main` is what a rank runs.
    config: the class of its flags.
    starts: (values of flags that were given) returns {prefix of a trained model's flags: where that model starts}. The
        stage's preset is that of the first one.
    reached: metrics of the evaluations that the last line of a stage tells -> which way is better, as a `Metric` says.
    compared: further metrics of the evaluations that a report's table compares.
    loop: () imports and returns its loop, which is called with (run, configuration).
    start_models: (configuration, bases of folders to come) -> `StartModel`s with their checks.
    needs: (configuration, bases of folders to come, dtype, ranks) -> its `StageNeeds` for the planner.
    resolve_auto: (run) returns {flag: value} of the `auto_flags` of its configuration; called on rank 0.
    export: (offline checkpoint) writes the model folders of a checkpoint.
    preflight: (configuration, columns of its first rows) checks what else a run needs before anything starts. Raises.
    """

    number: int
    section: str
    title: str
    package: str
    config: type[StageConfig]
    starts: Callable[[Mapping[str, Any]], Mapping[str, Start]]
    loop: Callable[[], Callable[..., None]]
    start_models: Callable[..., Any]
    needs: Callable[..., Any]
    export: Callable[..., None]
    preflight: Callable[[Any, Collection[str]], None] | None = None
    resolve_auto: Callable[[Any], dict[str, Any]] = field(default=lambda _: {})
    methods: Mapping[str, str] = field(default_factory=dict)
    reached: Mapping[str, Literal[-1, 0, 1]] = field(default_factory=dict)
    compared: tuple[str, ...] = ()

    @property
    def first_prefix(self) -> str:
        """The prefix of the flags of its first trained model."""
        return next(iter(self.starts({})))

    def title_of(self, config: StageConfig) -> str:
        """Return the name for people of what a run does: that of its method, where the stage has several."""
        return self.methods.get(dict(flat_items(config)).get("method", ""), self.title)

    @staticmethod
    def path_flag(prefix: str) -> str:
        """Return the flag, without dashes, that names the start of the model whose flags have this prefix."""
        return f"{prefix}name_or_path" if prefix.endswith("model_") else f"{prefix}model_name_or_path"

    @property
    def program(self) -> str:
        """The command of one rank, as its user types it."""
        return f"python -m {self.package}.main"

    def lora_rates(self, config: StageConfig) -> dict[str, tuple[float, Origin]]:
        """Return {flag: (value, origin)} of the rates of LoRA, in a stage with a factor, that are unset."""
        values, factor = dict(flat_items(config)), config.lora_factor
        of = [name.removesuffix("lora_dim") for name in values if name.endswith("lora_dim") and values[name] and factor]
        full = {f"{prefix}lora_learning_rate": f"{prefix}learning_rate" for prefix in of}
        # Six digits: 1e-6 x 10 is 9.999999999999999e-06.
        rates = {name: float(f"{factor * values[rate]:.6g}") for name, rate in full.items()}
        return {
            name: (value, Origin(Kind.FOLLOWS, f"auto: {factor:g} x {dashed(full[name])}"))
            for name, value in rates.items()
        }

    def rate_flag(self, config: StageConfig) -> str:
        """Return the learning rate of its first trained model: with LoRA that of the adapter."""
        prefix = self.first_prefix
        return f"{prefix}{'lora_' if dict(flat_items(config))[f'{prefix}lora_dim'] else ''}learning_rate"

    @property
    def folder(self) -> str:
        """The name of its model folder below the output of `rlhf train`; "." for a stage that writes several."""
        return str(PurePath(self.config.model_fields["run"].default.output_dir).relative_to("output"))

    def run_folder(self, run: RunConfig) -> Path:
        """Return --run-dir, else <parent of output>/runs/<name of output>; <output>/runs/<section> beside several."""
        return Path(run.run_dir) if run.run_dir else self.usual_run_folder(run)

    def usual_run_folder(self, run: RunConfig) -> Path:
        """Return the folder of a run of this output that names none by --run-dir."""
        output = Path(run.output_dir)
        if self.folder == ".":
            return output / "runs" / self.section
        return output.parent / "runs" / (self.section if self.config.runs_by_section else output.name)
