"""The flag groups that more than one stage uses, each flag defined once: type, default, meaning, checks and rules.

A stage's configuration (stepN/config.py) is a frozen model made of these groups; flags.py turns it into command-line
flags, YAML keys and the reference in docs/configuration.md. Field names are flag names; the flags of a group that is
used twice carry a prefix (`actor_learning_rate`, `critic_learning_rate`).
"""

from typing import Any, Literal

from pydantic import BaseModel, ConfigDict, model_validator

from pipeline.configuration.flag_table import flag

Dtype = Literal["auto", "bf16", "fp16", "fp32"]
SchedulerType = Literal[
    "linear", "cosine", "cosine_with_restarts", "polynomial", "constant", "constant_with_warmup"
]  # fmt: skip


class Group(BaseModel):
    """A frozen set of flags that refuses unknown names."""

    model_config = ConfigDict(extra="forbid", frozen=True, protected_namespaces=(), allow_inf_nan=False)

    def replace(self, **changes: Any) -> "Group":
        """Return a checked copy with `changes`."""
        return type(self).model_validate({**self.model_dump(), **changes})


class RunConfig(Group):
    """Run"""

    output_dir: str = flag(
        "output", "Folder of the finished model (stage 3: of actor/, critic/)", kind="written path", on_resume="free"
    )
    run_dir: str = flag(
        "", "Folder of metrics, logs, checkpoints; empty: <parent>/runs/<stage>", kind="written path", on_resume="free"
    )
    seed: int = flag(1234, "Every random number of the run is a function of it", ge=0)
    num_train_epochs: float = flag(1.0, "Passes over the training rows; may be fractional", gt=0, on_resume="free")
    max_steps: int = flag(0, "Stop after this many optimizer steps; 0: whole epochs", ge=0, on_resume="free")
    save_steps: int = flag(0, "Steps between checkpoints; 0: only at the end or on a signal", ge=0, on_resume="free")
    keep_checkpoints: int = flag(2, "Resume checkpoints kept; older ones are deleted; 0: none", ge=0, on_resume="free")
    save_in_background: bool = flag(
        False, "Train on while a checkpoint is written; takes host memory for a copy of what it holds", on_resume="free"
    )
    resume: str = flag(
        "auto", "auto: newest valid checkpoint; never: afresh; or a checkpoint folder", kind="path", on_resume="free"
    )
    force_resume: bool = flag(False, "Resume although settings, data or start models are other ones", on_resume="free")
    deterministic: bool = flag(False, "Bitwise repeatable on GPUs, slower; CPU runs always are", on_resume="rounding")
    overwrite: bool = flag(False, "Start over although the output holds a finished run", on_resume="free")
    save_dtype: Dtype = flag("auto", "Data type of the saved weights; auto: that of training", on_resume="free")
    print_steps: int = flag(1, "Steps between progress lines", ge=1, on_resume="free")
    eval_interval: int = flag(0, "Steps between evaluations; 0: only before and after training", ge=0, on_resume="free")
    eval_iters: int = flag(
        0, "Batches of per_device_eval_batch_size per evaluation, on each rank; 0: all rows", ge=0, on_resume="free"
    )
    enable_tensorboard: bool = flag(True, "Write TensorBoard curves to <run_dir>/tensorboard", on_resume="free")
    enable_csv: bool = flag(False, "Write <run_dir>/metrics.csv", on_resume="free")
    enable_wandb: bool = flag(False, "Log to Weights & Biases (needs the wandb package)", on_resume="free")
    process_group_timeout_s: int = flag(1800, "Seconds before a stuck collective fails", ge=1, on_resume="free")
    rank_timeout_s: int = flag(
        1800, "Seconds without a sign of life before a rank is hung and the run ends; 0: never", ge=0, on_resume="free"
    )
    dry_run: bool = flag(False, "Check and print flags and DeepSpeed's JSON, start nothing", on_resume="free")
    debug: bool = flag(False, "Show tracebacks of expected errors", on_resume="free")
    local_rank: int = flag(-1, "Set by launchers; the environment's LOCAL_RANK wins", on_resume="free")

    @model_validator(mode="after")
    def _start_over_or_resume(self) -> "RunConfig":
        if self.overwrite and self.resume not in ("auto", "never"):
            raise ValueError(f"overwrite: starts over, and resume names {self.resume}; give one of them")
        return self


class DataConfig(Group):
    """Data"""

    data_path: list[str] = flag(
        ["Dahoas/rm-static"],
        "Hub ids, files or folders, each with an optional :weight in (0, 1]",
        min_length=1,
        kind="path",
        on_resume="content",
    )
    data_split: str = flag("2,4,4", "Shares of the rows for stages 1, 2, 3; none: every stage uses all rows")
    data_seed: int = flag(1234, "Seed of the split; the same in all steps keeps prompts apart", ge=0)
    eval_data_path: list[str] = flag(
        [], "Evaluation rows; empty: the source's test split or a share of it", kind="path", on_resume="content"
    )
    eval_fraction: float = flag(0.1, "Share held out where a source has no test split", ge=0, lt=1)
    column_map: str = flag("", "Columns of other names: prompt=question,chosen=best")
    template: Literal["auto", "tokenizer", "human_assistant"] = flag(
        "auto", "Chat template; auto: the tokenizer's if it has one, else Human/Assistant"
    )
    data_output_path: str = flag(
        "", "Cache of tokenised rows; empty: the user's cache folder", kind="written path", on_resume="free"
    )


class ModelConfig(Group):
    """Model"""

    model_name_or_path: str = flag("", "Hub id or folder of the model to start from", kind="path", on_resume="content")
    gradient_checkpointing: bool = flag(False, "Recompute activations to save memory", on_resume="rounding")
    attn_implementation: Literal["auto", "sdpa", "eager", "flash_attention_2"] = flag(
        "auto", "Attention kernel; auto: transformers' choice", on_resume="rounding"
    )
    zero_stage: int = flag(
        0,
        "What ZeRO partitions: 1 optimizer, 2 + gradients, 3 + weights",
        ge=0,
        le=3,
        on_resume="rounding",
        deepspeed="zero_optimization.stage",
    )
    learning_rate: float = flag(1e-5, "Peak learning rate of all but LoRA weights", gt=0)
    weight_decay: float = flag(0.0, "AdamW decay; norms, biases and embeddings are exempt", ge=0)
    lora_dim: int = flag(0, "LoRA rank; 0: full fine-tuning", ge=0)
    lora_alpha: float = flag(16.0, "LoRA updates are scaled by lora_alpha / lora_dim", gt=0, needs="LoRA")
    lora_dropout: float = flag(0.0, "Dropout on the input of LoRA layers", ge=0, lt=1, needs="LoRA")
    lora_module_name: str = flag(
        "all-linear", "Linear layers that get LoRA: a part of their name; all-linear: all but the head", needs="LoRA"
    )
    lora_learning_rate: float = flag(5e-4, "Peak learning rate of LoRA weights", gt=0, needs="LoRA")


class OptimizerConfig(Group):
    """Optimizer"""

    per_device_train_batch_size: int = flag(
        16, "Rows of a micro-batch on a device", ge=1, on_resume="rounding", deepspeed="train_micro_batch_size_per_gpu"
    )
    per_device_eval_batch_size: int = flag(16, "Rows of an evaluation batch on a device", ge=1, on_resume="rounding")
    gradient_accumulation_steps: int = flag(
        1, "Micro-batches per optimizer step", ge=1, on_resume="rounding", deepspeed="gradient_accumulation_steps"
    )
    lr_scheduler_type: SchedulerType = flag("cosine", "Shape of the learning rate after the warm-up")
    num_warmup_steps: int = flag(0, "Optimizer steps of linear warm-up", ge=0)
    min_learning_rate_ratio: float = flag(0.0, "Floor of the rate as a share of its peak", ge=0, le=1)
    adam_beta1: float = flag(0.9, "AdamW beta 1", ge=0, lt=1)
    adam_beta2: float = flag(0.95, "AdamW beta 2", ge=0, lt=1)
    adam_eps: float = flag(1e-8, "AdamW epsilon", gt=0)
    max_grad_norm: float = flag(
        1.0, "Gradient norm above which gradients are scaled down; 0: never", ge=0, deepspeed="gradient_clipping"
    )
    max_bad_steps: int = flag(
        5, "Non-finite steps in a row that end the run; not while an fp16 loss scale settles", ge=1, on_resume="free"
    )


class DeepSpeedConfig(Group):
    """DeepSpeed"""

    dtype: Dtype = flag(
        "auto", "Compute type; auto: bf16 where supported, else fp32", deepspeed=("fp16.enabled", "bf16.enabled")
    )
    offload: bool = flag(
        False,
        "Keep optimizer states in host memory",
        on_resume="rounding",
        deepspeed="zero_optimization.offload_optimizer.device",
    )
    offload_parameters: bool = flag(
        False,
        "Keep weights in host memory too (ZeRO stage 3)",
        on_resume="rounding",
        deepspeed="zero_optimization.offload_param.device",
    )
    only_optimize_lora: bool = flag(True, "With LoRA: freeze all other weights; false: train the rest too")
    save_adapter_only: bool = flag(False, "With LoRA: save the adapter without a merged model", on_resume="free")
    deepspeed: bool = flag(False, "Accepted for the launcher's sake; DeepSpeed is always used", on_resume="free")
    deepspeed_config: str = flag("", "JSON file with DeepSpeed settings; auto values are filled in", kind="path")
    communication_data_type: Literal["auto", "fp32", "fp16", "bf16"] = flag(
        "auto",
        "Type in which gradients are reduced; auto: DeepSpeed's choice",
        on_resume="rounding",
        deepspeed="communication_data_type",
    )
    reduce_bucket_size: int = flag(
        500_000_000,
        "Elements per gradient reduction",
        ge=1,
        on_resume="rounding",
        deepspeed="zero_optimization.reduce_bucket_size",
    )
    allgather_bucket_size: int = flag(
        500_000_000,
        "Elements per parameter gather (ZeRO stages 1, 2)",
        ge=1,
        on_resume="rounding",
        needs="ZeRO stage 1 or 2",
        deepspeed="zero_optimization.allgather_bucket_size",
    )
    overlap_comm: bool = flag(
        True, "Reduce gradients in the backward pass", on_resume="rounding", deepspeed="zero_optimization.overlap_comm"
    )
    stage3_param_persistence_threshold: int = flag(
        100_000,
        "Weights with fewer elements are never partitioned (ZeRO stage 3)",
        ge=0,
        on_resume="rounding",
        needs="ZeRO stage 3",
        deepspeed="zero_optimization.stage3_param_persistence_threshold",
    )
    zero3_gather: Literal["auto", "once", "layers"] = flag(
        "auto",
        "When ZeRO-3 gathers weights to compute with: once a phase, or layer by layer; auto: once where "
        "they take at most an eighth of the device",
        on_resume="rounding",
        needs="ZeRO stage 3",
    )
    loss_scale: float = flag(0.0, "fp16 loss scale; 0: dynamic", ge=0, needs="fp16", deepspeed="fp16.loss_scale")
    initial_scale_power: int = flag(
        16, "fp16: a dynamic scale starts at 2 to this power", ge=0, needs="fp16", deepspeed="fp16.initial_scale_power"
    )
    loss_scale_window: int = flag(
        1000, "fp16: good steps before the scale is doubled", ge=1, needs="fp16", deepspeed="fp16.loss_scale_window"
    )
    hysteresis: int = flag(2, "fp16: overflows until the scale halves", ge=1, needs="fp16", deepspeed="fp16.hysteresis")
    min_loss_scale: int = flag(1, "fp16: lower bound of the scale", ge=1, needs="fp16", deepspeed="fp16.min_loss_scale")
    deepspeed_monitor: list[Literal["tensorboard", "csv_monitor", "wandb"]] = flag(
        [],
        "DeepSpeed's own monitors, besides the metrics of the run",
        on_resume="free",
        deepspeed=("tensorboard.enabled", "csv_monitor.enabled", "wandb.enabled"),
    )
    wall_clock_breakdown: bool = flag(
        False, "Let DeepSpeed print its timers", on_resume="free", deepspeed="wall_clock_breakdown"
    )
