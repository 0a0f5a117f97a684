"""The flag groups that more than one stage uses, each flag defined once: type, default, meaning, checks and rules.

A stage's configuration (stepN/config.py) is a frozen model made of these groups; flags.py turns it into command-line
flags, YAML keys and the reference. Field names are flag names, behind a model's role (`actor_learning_rate`).
"""

from collections.abc import Mapping
from typing import Annotated, Any, ClassVar, Literal

from pydantic import BaseModel, BeforeValidator, ConfigDict

from pipeline.configuration.flag_table import Flag, Layers, OnResume, Removed, flag, zero3_size
from pipeline.model_types import MAX_LORA_ALPHA, MAX_LORA_RANK

Dtype = Literal["auto", "bf16", "fp16", "fp32"]
Offload = Literal["auto", "none", "cpu"]
OptimizerStates = Literal["fp32", "8bit"]
MAX_LEARNING_RATE = 10.0  # AdamW moves each weight by up to the rate in a step; weights are below 1
ZERO, PERSISTENCE = "zero_optimization", "stage3_param_persistence_threshold"
STAGE = "zero_stage"  # The field of ModelConfig that says what ZeRO partitions.
# DeepSpeed-Chat's flags of special tokens, and why they change nothing here.
TOKEN_FLAGS = {
    "add_eot_token": "the tokenizer's own end token is always trained",
    "num_padding_at_beginning": "lengths are known, padding is never counted",
}
Words = Annotated[list[str], BeforeValidator(lambda given: [] if given == ["none"] else given)]
SchedulerType = Literal["linear", "cosine", "cosine_with_restarts", "polynomial", "constant", "constant_with_warmup"]


# Flags that are keys of a DeepSpeed JSON alone now: name, keys, the default, whether runs that resume compare them, and
# the last commit that has the flag. What they compare has one key. Buckets of old checkpoints were chosen by a plan.
ONLY_IN_JSON: tuple[tuple[str, str, Any, OnResume, str], ...] = (
    ("communication_data_type", "communication_data_type", "auto", "rounding", "d0a9914c"),
    ("loss_scale", "fp16.loss_scale", 0.0, "same", "d0a9914c"),
    ("initial_scale_power", "fp16.initial_scale_power", 16, "same", "d0a9914c"),
    ("loss_scale_window", "fp16.loss_scale_window", 1000, "same", "d0a9914c"),
    ("hysteresis", "fp16.hysteresis", 2, "same", "d0a9914c"),
    ("min_loss_scale", "fp16.min_loss_scale", 1, "same", "d0a9914c"),
    ("deepspeed_monitor", "tensorboard.enabled csv_monitor.enabled wandb.enabled", [], "free", "d0a9914c"),
    ("wall_clock_breakdown", "wall_clock_breakdown", False, "free", "d0a9914c"),
    ("pin_memory", f"{ZERO}.offload_optimizer.pin_memory {ZERO}.offload_param.pin_memory", True, "free", "40c195d6"),
    ("reduce_bucket_size", f"{ZERO}.reduce_bucket_size", 500_000_000, "free", "40c195d6"),
    ("allgather_bucket_size", f"{ZERO}.allgather_bucket_size", 500_000_000, "free", "40c195d6"),
    ("overlap_comm", f"{ZERO}.overlap_comm", True, "rounding", "40c195d6"),
    ("stage3_param_persistence_threshold", f"{ZERO}.{PERSISTENCE}", 100_000, "rounding", "40c195d6"),
    ("stage3_max_reuse_distance", f"{ZERO}.stage3_max_reuse_distance", 1_000_000_000, "rounding", "40c195d6"),
)


class Group(BaseModel):
    """A frozen set of flags that refuses unknown names."""

    model_config = ConfigDict(extra="forbid", frozen=True, protected_namespaces=(), allow_inf_nan=False)

    @classmethod
    def with_method(cls, layers: Layers) -> Layers:
        """Return layers of given flags with their method's defaults."""
        return layers

    @property
    def models(self) -> Mapping[str, bool]:
        """The models that `needs` and `excludes` of flags name -> whether a run of these settings has them."""
        return {}

    def absent(self, flag: Flag) -> str:
        """Return the model that a run of these settings does not have and the flag is of ("a critic"), or ""."""
        return next((one for one in (f"a {flag.path[0]}", flag.needs) if not self.models.get(one, True)), "")

    def replace(self, **changes: Any) -> "Group":
        """Return a checked copy with `changes`."""
        return type(self).model_validate({**self.model_dump(), **changes})


class DataConfig(Group):
    """Data"""

    data_path: list[str] = flag(
        ["Dahoas/rm-static"],
        "Hub ids (org/name or org/name@revision), files or folders, each with an optional :weight in (0, 1]",
        min_length=1,
        kind="path",
        on_resume="data",
        other_tools="dataset dataset_name",
        refused=dict.fromkeys(
            ("revision", "model_revision", "dataset_revision"),
            "write it behind the hub id: org/name@revision, of models and data alike",
        ),
    )
    mixture: Literal["share", "ratio"] = flag(
        "share",
        "Meaning of the weights; share: fraction of each source's prompts to use; ratio: fraction of the training "
        "rows that each source gives, small ones repeated",
        other_tools="mix_strategy",
    )
    data_split: str = flag("auto", "Prompt shares of stages 1, 2, 3; none: all rows; auto: 2,4,4 if several share data")
    data_seed: int = flag(1234, "Seed of the split; stages with the same seed share no prompt", ge=0)
    eval_data_path: list[str] = flag(
        [],
        "Evaluation data; empty: the source's test split, else --eval-fraction of its rows",
        kind="path",
        on_resume="data",
        other_tools="eval_dataset",
    )
    eval_fraction: float = flag(
        0.1, "Fraction held out for evaluation if a source has no test split", ge=0, lt=1, other_tools="val_size"
    )
    column_map: str = flag("", "Column names in your data: prompt=question,chosen=best", other_tools="columns")
    template: Literal["auto", "tokenizer", "human_assistant"] = flag(
        "auto",
        "Chat template; auto: the tokenizer's if it has one, else Human/Assistant (encoder-decoder models: plain text)",
        ignored=TOKEN_FLAGS,
        refused={"eot_token": "the tokenizer's own end token is trained: leave it out"},
    )
    chat_template_kwargs: Words = flag(
        [],
        "Variables of the chat template as NAME=VALUE, VALUE as JSON or text (enable_thinking=false); the saved "
        "template has them as defaults; none: the template's own defaults",
    )
    data_output_path: str = flag(
        "",
        "Folder that caches tokenised rows; empty: the user's cache folder",
        kind="written path",
        on_resume="free",
        other_tools="cache_dir",
        ignored={"preprocessing_num_workers": "the data cache is built once on each machine"},
    )


class ModelConfig(Group):
    """Model"""

    has_role: ClassVar[bool] = True
    model_name_or_path: str = flag(
        "",
        "Hub id (org/name or org/name@revision) or folder of the model to start from",
        kind="path",
        required=True,
        on_resume="model",
        aliases=("model",),
    )
    gradient_checkpointing: bool = flag(
        False, "Recompute activations to save memory; auto: if the plan needs it", on_resume="rounding", auto=True
    )
    attn_implementation: Literal["auto", "sdpa", "eager", "flash_attention_2"] = flag(
        "auto", "Attention kernel; auto: transformers' choice", on_resume="rounding", other_tools="flash_attn"
    )
    zero_stage: int = flag(
        0,
        "ZeRO stage: 1 partitions optimizer states, 2 also gradients, 3 also weights; auto: 2 if it fits, else 3 "
        "(on one GPU 0 before 3)",
        ge=0,
        le=3,
        on_resume="rounding",
        deepspeed="zero_optimization.stage",
        per_stage=True,
        auto=True,
    )
    offload_optimizer: Offload = flag(
        "auto",
        "Offload this model's optimizer states to cpu, or none: they stay on the device; auto: as --offload says",
        on_resume="rounding",
        deepspeed="zero_optimization.offload_optimizer.device",
    )
    offload_weights: Offload = flag(
        "auto",
        "Offload this model's weights to cpu (ZeRO stage 3), or none; auto: as --offload-parameters says",
        on_resume="rounding",
        deepspeed="zero_optimization.offload_param.device",
    )
    quantization: Literal["none", "nf4", "int8"] = flag(
        "none",
        "Store LoRA's frozen base weights in 4 bits (nf4, bitsandbytes) or 8 (int8 per output channel)",
        other_tools="load_in_4bit load_in_8bit bnb_4bit_quant_type",
    )
    learning_rate: float = flag(
        1e-5, "Peak learning rate of all but LoRA weights", gt=0, le=MAX_LEARNING_RATE, per_stage=True, other_tools="lr"
    )
    weight_decay: float = flag(0.0, "AdamW weight decay; norms, biases and embeddings are exempt", ge=0)
    dropout: float = flag(
        0.0,
        "Dropout in the model's own layers; must be 0, so that equal rows give equal numbers",
        ge=0,
        le=0,
        ignored={f"disable_{model}dropout": "dropout is always 0" for model in ("", "actor_", "critic_")},
    )
    lora_dim: int = flag(
        0,
        "LoRA rank; 0: full fine-tuning. Use 32 in stage 3, 64 or more for large data, about 32 rows per step",
        ge=0,
        le=MAX_LORA_RANK,
        other_tools="lora_r lora_rank use_peft",
        refused={"enable_mixed_precision_lora": "use --actor-lora-dim with --actor-zero-stage 3"},
    )
    lora_alpha: float = flag(
        16.0, "LoRA updates are scaled by lora_alpha / lora_dim", gt=0, le=MAX_LORA_ALPHA, needs="--lora-dim"
    )
    lora_dropout: float = flag(0.0, "Dropout on the input of LoRA layers", ge=0, lt=1, needs="--lora-dim")
    lora_module_name: str = flag(
        "all-linear",
        "Linear layers that get LoRA, by a part of their names; all-linear: all except the head",
        needs="--lora-dim",
        other_tools="lora_target_modules",
    )
    lora_learning_rate: float = flag(
        2e-4,
        "Peak learning rate of LoRA weights",
        gt=0,
        le=MAX_LEARNING_RATE,
        needs="--lora-dim",
        per_stage=True,
        auto_is="2e-4 in stages 1 and 2, in stage 3 a multiple of the learning rate of all other weights",
    )

    @property
    def partitioned(self) -> Literal["nothing", "states", "weights"]:
        """Return what ZeRO partitions: optimizer states (and gradients), or weights as well."""
        return ("nothing", "states", "states", "weights")[self.zero_stage]


class OptimizerConfig(Group):
    """Optimizer"""

    per_device_train_batch_size: int = flag(
        16,
        "Rows per micro-batch on each device; auto: the plan's fastest, with unchanged rows per optimizer step",
        ge=1,
        on_resume="rounding",
        auto=True,
        deepspeed="train_micro_batch_size_per_gpu",
        aliases=("per_device_training_batch_size",),
        other_tools="batch_size per_device_batch_size",
    )
    per_device_eval_batch_size: int = flag(
        16,
        "Rows per evaluation batch on each device; auto: the plan's, and --eval-iters counts batches of 16",
        ge=1,
        on_resume="rounding",
        auto=True,
    )
    train_batch_size: int = flag(
        0, "Rows per optimizer step over all ranks; 0: set by --gradient-accumulation-steps", ge=0,
        on_resume="rounding",
    )  # fmt: skip
    gradient_accumulation_steps: int = flag(
        1,
        "Micro-batches per optimizer step",
        ge=1,
        on_resume="rounding",
        deepspeed="gradient_accumulation_steps",
        instead_of="train_batch_size",
    )
    lr_scheduler_type: SchedulerType = flag("cosine", "Learning rate schedule after the warm-up")
    num_warmup_steps: int = flag(0, "Optimizer steps of linear warm-up", ge=0, other_tools="warmup_steps")
    min_learning_rate_ratio: float = flag(0.0, "Lowest learning rate as a fraction of its peak", ge=0, le=1)
    adam_beta1: float = flag(0.9, "AdamW beta 1", ge=0, lt=1)
    adam_beta2: float = flag(0.95, "AdamW beta 2", ge=0, lt=1)
    adam_eps: float = flag(1e-8, "AdamW epsilon", gt=0)
    optimizer_states: OptimizerStates = flag(
        "fp32", "Precision of AdamW's moments; 8bit excludes offload and ZeRO-3", on_resume="rounding"
    )
    max_grad_norm: float = flag(
        1.0, "Gradient norm above which gradients are scaled down; 0: never", ge=0, deepspeed="gradient_clipping"
    )
    max_bad_steps: int = flag(
        5,
        "Consecutive non-finite steps that end the run; those that adapt the fp16 loss scale do not count",
        ge=1,
        on_resume="free",
        ignored={"align_overflow": "actor and critic always step together"},
    )


class DeepSpeedConfig(Group):
    """DeepSpeed"""

    dtype: Dtype = flag(
        "auto",
        "Compute type; auto: bf16 where supported, else fp32",
        deepspeed=("fp16.enabled", "bf16.enabled"),
        other_tools="bf16 fp16 torch_dtype",
        ignored={"compute_fp32_loss": "losses, log-probabilities and scores are always fp32"},
    )
    offload: bool = flag(
        False,
        "Keep the optimizer states of all trained models in host memory",
        on_resume="rounding",
        deepspeed="zero_optimization.offload_optimizer.device",
    )
    offload_parameters: bool = flag(
        False,
        "Keep the weights of all trained models in host memory too (ZeRO stage 3)",
        on_resume="rounding",
        deepspeed="zero_optimization.offload_param.device",
    )
    only_optimize_lora: bool = flag(True, "With LoRA: freeze all other weights; false: train them too")
    save_adapter_only: bool = flag(False, "With LoRA: save the adapter without a merged model", on_resume="output")
    deepspeed: bool = flag(
        False, "Accepted because launchers pass it; DeepSpeed is always used", on_resume="free", aliases=("deepscale",)
    )
    deepspeed_config: str = flag(
        "",
        "JSON file with DeepSpeed settings; auto values are filled in",
        kind="path",
        aliases=("deepscale_config",),
        other_tools="deepspeed",
        removed={
            name: Removed(default, last, f"write {' or '.join(keys.split())} into the JSON file of --deepspeed-config")
            for name, keys, default, _, last in ONLY_IN_JSON
        },
    )
    stage3_max_live_parameters: int = zero3_size(
        "stage3_max_live_parameters", "Most elements of gathered weights at a time, prefetched ones included"
    )
    sub_group_size: int = zero3_size("sub_group_size", "Elements that the optimizer updates at a time")
    zero3_gather: Literal["auto", "once", "layers"] = flag(
        "auto",
        "How often ZeRO-3 gathers weights: once per phase, or layer by layer; auto: once if they take at most an "
        "eighth of the device's memory",
        on_resume="rounding",
        needs="--zero-stage 3",
        ignored={"tp_gather_partition_size": "weights are gathered a layer at a time"},
    )
