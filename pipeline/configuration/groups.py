"""The flag groups that more than one stage uses. Each field is defined here once: type, default, unit, meaning, check.

A stage's configuration (stepN/config.py) is a frozen model made of these groups; flags.py turns it into command-line
flags, YAML keys and the reference in docs/configuration.md. Field names are flag names; a group that is
used twice carries a prefix (`actor_zero_stage`, `critic_zero_stage`).
"""

from typing import Any, Literal

from pydantic import BaseModel, ConfigDict, Field, model_validator

Dtype = Literal["auto", "bf16", "fp16", "fp32"]
SchedulerType = Literal[
    "linear", "cosine", "cosine_with_restarts", "polynomial", "constant", "constant_with_warmup"
]  # fmt: skip


class Group(BaseModel):
    """A set of flags. Frozen; unknown names are refused."""

    model_config = ConfigDict(extra="forbid", frozen=True, protected_namespaces=(), allow_inf_nan=False)

    def replace(self, **changes: Any) -> "Group":
        """A checked copy with `changes`; nothing is mutated."""
        return type(self).model_validate({**self.model_dump(), **changes})


class RunConfig(Group):
    """Run"""

    output_dir: str = Field("output", description="Folder of the finished model (step 3: parent of actor/, critic/)")
    run_dir: str = Field("", description="Folder of metrics, logs and checkpoints; empty: <parent>/runs/<stage>")
    seed: int = Field(1234, ge=0, description="Every random number of the run is a function of it")
    num_train_epochs: float = Field(1.0, gt=0, description="Passes over the training rows; may be fractional")
    max_steps: int = Field(0, ge=0, description="Stop after this many optimizer steps; 0: whole epochs")
    save_steps: int = Field(0, ge=0, description="Steps between resume checkpoints; 0: only at the end or on a signal")
    keep_checkpoints: int = Field(2, ge=0, description="Resume checkpoints kept; older ones are deleted; 0: none")
    save_in_background: bool = Field(
        False, description="Train on while a checkpoint is written; takes host memory for a copy of what it holds"
    )
    resume: str = Field(
        "auto", description="auto: newest valid checkpoint; never: start afresh; or a checkpoint folder"
    )
    force_resume: bool = Field(False, description="Resume although settings, data or start models are other ones")
    deterministic: bool = Field(False, description="Bitwise repeatable GPU kernels, slower; CPU runs always are")
    overwrite: bool = Field(False, description="Start over although the output holds a finished run")
    save_dtype: Literal["auto", "bf16", "fp16", "fp32"] = Field(
        "auto", description="Data type of the saved weights; auto: that of training"
    )
    print_steps: int = Field(1, ge=1, description="Steps between progress lines")
    eval_interval: int = Field(0, ge=0, description="Steps between evaluations; 0: only before and after training")
    eval_iters: int = Field(0, ge=0, description="Batches (step 3: prompts) per evaluation; 0: all rows")
    enable_tensorboard: bool = Field(True, description="Write TensorBoard curves to <run_dir>/tensorboard")
    enable_csv: bool = Field(False, description="Write <run_dir>/metrics.csv")
    enable_wandb: bool = Field(False, description="Log to Weights & Biases (needs the wandb package)")
    process_group_timeout_s: int = Field(1800, ge=1, description="Seconds before a stuck collective fails")
    rank_timeout_s: int = Field(
        1800, ge=0, description="Seconds without a sign of life before a rank counts as hung and the run ends; 0: never"
    )
    debug: bool = Field(False, description="Show tracebacks of expected errors")
    local_rank: int = Field(-1, description="Set by launchers; the environment's LOCAL_RANK wins")

    @model_validator(mode="after")
    def _start_over_or_resume(self) -> "RunConfig":
        if self.overwrite and self.resume not in ("auto", "never"):
            raise ValueError(f"overwrite: starts over, and resume names {self.resume}; give one of them")
        return self


class DataConfig(Group):
    """Data"""

    data_path: list[str] = Field(
        ["Dahoas/rm-static"],
        min_length=1,
        description="Hub ids, files or folders, each with an optional :weight in (0, 1]",
    )
    data_split: str = Field("2,4,4", description="Shares of the rows for steps 1, 2, 3; none: every step uses all rows")
    data_seed: int = Field(1234, ge=0, description="Seed of the split; the same in all steps keeps prompts apart")
    eval_data_path: list[str] = Field(
        [], description="Evaluation rows; empty: the source's test split or a share of it"
    )
    eval_fraction: float = Field(0.1, ge=0, lt=1, description="Share held out where a source has no test split")
    column_map: str = Field("", description="Columns of other names: prompt=question,chosen=best")
    template: Literal["auto", "tokenizer", "human_assistant"] = Field(
        "auto", description="Chat template; auto: the tokenizer's if it has one, else Human/Assistant"
    )
    data_output_path: str = Field("", description="Cache of tokenised rows; empty: the user's cache folder")


class ModelConfig(Group):
    """Model"""

    model_name_or_path: str = Field("", description="Hub id or folder of the model to start from")
    gradient_checkpointing: bool = Field(False, description="Recompute activations in the backward pass to save memory")
    attn_implementation: Literal["auto", "sdpa", "eager", "flash_attention_2"] = Field(
        "auto", description="Attention kernel; auto: transformers' choice"
    )
    zero_stage: int = Field(0, ge=0, le=3, description="What ZeRO partitions: 1 optimizer, 2 + gradients, 3 + weights")
    learning_rate: float = Field(1e-5, gt=0, description="Peak learning rate of all but LoRA weights")
    weight_decay: float = Field(0.0, ge=0, description="AdamW decay; norms, biases and embeddings are exempt")
    lora_dim: int = Field(0, ge=0, description="LoRA rank; 0: full fine-tuning")
    lora_alpha: float = Field(16.0, gt=0, description="LoRA updates are scaled by lora_alpha / lora_dim")
    lora_dropout: float = Field(0.0, ge=0, lt=1, description="Dropout on the input of LoRA layers")
    lora_module_name: str = Field(
        "all-linear", description="Linear layers that get LoRA: a part of their name; all-linear: all but the head"
    )
    lora_learning_rate: float = Field(5e-4, gt=0, description="Peak learning rate of LoRA weights")


class OptimizerConfig(Group):
    """Optimizer"""

    per_device_train_batch_size: int = Field(16, ge=1, description="Rows of one micro-batch on one device")
    per_device_eval_batch_size: int = Field(16, ge=1, description="Rows of one evaluation batch on one device")
    gradient_accumulation_steps: int = Field(1, ge=1, description="Micro-batches per optimizer step")
    lr_scheduler_type: SchedulerType = Field("cosine", description="Shape of the learning rate after the warm-up")
    num_warmup_steps: int = Field(0, ge=0, description="Optimizer steps of linear warm-up")
    min_learning_rate_ratio: float = Field(0.0, ge=0, le=1, description="Floor of the rate as a share of its peak")
    adam_beta1: float = Field(0.9, ge=0, lt=1, description="AdamW beta 1")
    adam_beta2: float = Field(0.95, ge=0, lt=1, description="AdamW beta 2")
    adam_eps: float = Field(1e-8, gt=0, description="AdamW epsilon")
    max_grad_norm: float = Field(1.0, ge=0, description="Gradient norm above which gradients are scaled down; 0: never")
    max_bad_steps: int = Field(
        5,
        ge=1,
        description="Skipped non-finite steps in a row that end the run; not while an fp16 loss scale settles",
    )


class DeepSpeedConfig(Group):
    """DeepSpeed"""

    dtype: Dtype = Field("auto", description="Compute type; auto: bf16 where the device has it, else fp32")
    offload: bool = Field(False, description="Keep optimizer states in host memory")
    offload_parameters: bool = Field(False, description="Keep weights in host memory too (ZeRO stage 3)")
    only_optimize_lora: bool = Field(True, description="With LoRA: freeze all other weights; false: train the rest too")
    save_adapter_only: bool = Field(False, description="With LoRA: save the adapter without a merged model")
    deepspeed: bool = Field(False, description="Accepted for the launcher's sake; DeepSpeed is always used")
    deepspeed_config: str = Field("", description="JSON file with DeepSpeed settings; auto values are filled in")
    communication_data_type: Literal["auto", "fp32", "fp16", "bf16"] = Field(
        "auto", description="Type in which gradients are reduced; auto: DeepSpeed's choice"
    )
    reduce_bucket_size: int = Field(500_000_000, ge=1, description="Elements per gradient reduction")
    allgather_bucket_size: int = Field(500_000_000, ge=1, description="Elements per parameter gather (stages 1 and 2)")
    overlap_comm: bool = Field(True, description="Reduce gradients while the backward pass runs")
    stage3_param_persistence_threshold: int = Field(
        100_000, ge=0, description="Weights with fewer elements are never partitioned (stage 3)"
    )
    zero3_gather: Literal["auto", "once", "layers"] = Field(
        "auto",
        description="When ZeRO-3 gathers weights to compute with: once a phase, or layer by layer; auto: once where "
        "they take at most an eighth of the device",
    )
    loss_scale: float = Field(0.0, ge=0, description="fp16 loss scale; 0: dynamic")
    initial_scale_power: int = Field(16, ge=0, description="fp16: the dynamic scale starts at 2 to this power")
    loss_scale_window: int = Field(1000, ge=1, description="fp16: good steps before the scale is doubled")
    hysteresis: int = Field(2, ge=1, description="fp16: overflows before the scale is halved")
    min_loss_scale: int = Field(1, ge=1, description="fp16: lower bound of the scale")
    deepspeed_monitor: list[Literal["tensorboard", "csv_monitor", "wandb"]] = Field(
        [], description="DeepSpeed's own monitors, besides the metrics of the run"
    )
    wall_clock_breakdown: bool = Field(False, description="Let DeepSpeed print its timers")
