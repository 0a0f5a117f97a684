"""The keys of a DeepSpeed JSON: DeepSpeed ignores most that it does not know, so we refuse those by name.

The installed DeepSpeed says which keys there are, and of which types their values. It is imported when a JSON is
checked: that takes seconds, which `--help` and runs without a JSON do not spend.
"""

import difflib
import json
import logging
from collections.abc import Iterator, Mapping
from functools import cache
from typing import Annotated, Any, Literal, get_args, get_origin

from pydantic import BaseModel, Field, TypeAdapter, ValidationError

from pipeline.errors import EnvironmentFault, nearest, raise_lines

# Blocks that DeepSpeed reads key by key, so that a wrong one has no effect and no message.
LOOSE_BLOCKS = (
    "flops_profiler", "activation_checkpointing", "aio", "checkpoint", "checkpoint.parallel_write", "checkpoint.writer",
    "data_types", "timers",
)  # fmt: skip

GONE = "DeepSpeed has removed it"
OWN_ADAM = "the optimizer is torch.optim.AdamW, also in host memory"
OWN_STEP = "this project cuts steps and reads gradients itself"
FEWER_BITS = "it changes the numbers of a step; zero_hpz_partition_size alone keeps them"
# Keys that DeepSpeed knows and that may only be switched off here -> why, and what is right.
REFUSED = {
    **dict.fromkeys(("compression_training", "curriculum_learning", "eigenvalue", "graph_harvesting"), GONE),
    **dict.fromkeys(("progressive_layer_drop", "quantize_training", "sparse_gradients"), GONE),
    "zero_optimization.zeropp_loco_param": GONE,
    "amp": f"{GONE}; use --dtype",
    "elasticity": f"{GONE}; a run resumes on any number of ranks",
    "nebula": f"{GONE}; use --save-steps, --save-in-background",
    "sparse_attention": f"{GONE}; use --attn-implementation",
    "zero_optimization.mics_shard_size": f"{GONE}; use zero_hpz_partition_size",
    "zero_optimization.mics_hierarchical_params_gather": f"{GONE}; use zero_hpz_partition_size",
    "zero_optimization.cpu_offload": 'its new name is offload_optimizer: {"device": "cpu"}',
    "zero_optimization.cpu_offload_param": 'its new name is offload_param: {"device": "cpu"}',
    "zero_optimization.cpu_offload_use_pin_memory": "its new name is pin_memory, in offload_optimizer or offload_param",
    "zero_optimization.zero_quantized_weights": FEWER_BITS,
    "zero_optimization.zero_quantized_nontrainable_weights": f"{FEWER_BITS}; frozen weights: --quantization",
    "zero_optimization.zero_quantized_gradients": FEWER_BITS,
    "zero_optimization.offload_optimizer.super_offload": OWN_ADAM,
    "zero_optimization.zenflow": "late updates change the numbers of a step",
    "data_efficiency": "rows are drawn by this project's own data loader",
    "datastates_ckpt": "checkpoints are this project's own; use --save-steps, --save-in-background",
    "expert_parallel": "mixtures of experts are not supported",
    "hybrid_engine": "generation is this project's own; use --inference-tp-size, --release-inference-cache",
    "compile": "models are not compiled",
    "pipeline": "there is no pipeline parallelism",
    "tensor_parallel": "there is no tensor parallelism in training; rollouts have --inference-tp-size",
    "torch_autocast": "use --dtype",
    "weight_quantization": "it is for inference; use --quantization with LoRA",
    "zero_force_ds_cpu_optimizer": OWN_ADAM,
    "fp16.fp16_master_weights_and_grads": OWN_ADAM,
}
# Keys with one right value.
ONLY = {
    "gradient_allreduce_op": ("mean", OWN_STEP),
    "managed_gradient_accumulation": (True, OWN_STEP),
    "zero_optimization.compute_grad_norm": (True, OWN_STEP),
    "zero_optimization.offload_optimizer.ratio": (1, OWN_ADAM),
}
# Keys without effect in this project -> why, or what has one.
IDLE = {
    "activation_checkpointing": "use --gradient-checkpointing",
    "checkpoint": "checkpoints have a format of their own",
    "checkpoint.use_node_local_storage": "ranks find out whether hosts share storage; else each keeps a copy",
    "zero_allow_untested_optimizer": "the optimizer is AdamW; for that of bitsandbytes use --optimizer-states 8bit",
    "dataloader_drop_last": "a last partial step is filled with padding rows",
    "zero_optimization.elastic_checkpoint": "any checkpoint fits any number of ranks",
    "zero_optimization.load_from_fp32_weights": "checkpoints hold fp32 weights",
    "zero_optimization.stage3_gather_16bit_weights_on_model_save": "models are always saved whole",
}
MONITORS = ("tensorboard", "csv_monitor", "wandb")  # blocks of DeepSpeed's own monitors
# Keys of zero_optimization that DeepSpeed reads at some ZeRO stages alone -> those stages.
READ_AT = {
    **dict.fromkeys(("reduce_bucket_size", "contiguous_gradients", "reduce_scatter", "overlap_comm"), {1, 2, 3}),
    **dict.fromkeys(("allgather_bucket_size", "round_robin_gradients", "ignore_unused_parameters"), {1, 2}),
    **dict.fromkeys(("use_multi_rank_bucket_allreduce", "parameter_alignment"), {1, 2}),
    **dict.fromkeys(("sub_group_size", "zero_hpz_partition_size", "memory_efficient_linear", "leaf_module"), {3}),
    **dict.fromkeys(("override_module_apply", "log_trace_cache_warnings", "enable_sanity_checks"), {3}),
    **dict.fromkeys(("stage3_prefetch_bucket_size", "stage3_param_persistence_threshold"), {3}),
    **dict.fromkeys(("stage3_model_persistence_threshold", "stage3_max_live_parameters"), {3}),
    **dict.fromkeys(("stage3_max_reuse_distance", "stage3_module_granularity_threshold"), {3}),
    **dict.fromkeys(("stage3_use_all_reduce_for_fetch_params", "stage3_allgather_sequential"), {3}),
}
NO_BLOCK = str | float | bool | list[Any] | None
DTYPES = Literal["fp32", "fp16", "bf16"]
COUNT = Annotated[int, Field(gt=0)]
# Keys that DeepSpeed has no type for, or a wider one: it divides by some numbers in the middle of a step.
TYPES: dict[str, Any] = {
    **dict.fromkeys(("optimizer", "scheduler", "autotuning"), Any),
    **dict.fromkeys(("train_batch_size", "train_micro_batch_size_per_gpu", "gradient_accumulation_steps"), int),
    "vocabulary_size": int,
    "zero_optimization.stage": Annotated[int, Field(ge=0, le=3)],
    "steps_per_print": COUNT,
    "gradient_predivide_factor": Annotated[float, Field(gt=0)],
    **dict.fromkeys(("fp16.loss_scale_window", "fp16.hysteresis", "fp16.min_loss_scale"), COUNT),
    **dict.fromkeys(("zero_optimization.reduce_bucket_size", "zero_optimization.allgather_bucket_size"), COUNT),
    **dict.fromkeys(("communication_data_type", "seq_parallel_communication_data_type"), DTYPES),
    **dict.fromkeys(("data_types.grad_accum_dtype", "data_types.param_dtype", "data_types.buffer_dtype"), DTYPES),
    "log_level": Literal["debug", "info", "warning", "error", "critical"],
}
NOT_NEGATIVE = ("zero_optimization.", "aio.", "fp16.")  # blocks whose numbers are 0 or more
# Type of a pydantic error -> what would be right.
WORDS = {
    "bool_type": "true or false",
    "int_type": "a whole number",
    "float_type": "a number",
    "string_type": "a text",
    "path_type": "a text",
    "list_type": "a list",
    "dict_type": "a block {...}",
    "greater_than": "more than 0",
    "greater_than_equal": "0 or more",
    "less_than_equal": "0, 1, 2 or 3",  # the ZeRO stage alone has an upper bound
}
# Names from other tools or versions -> the right one.
OTHER_NAMES = {
    "allgather_size": "zero_optimization.allgather_bucket_size",
    "batch_size": "train_micro_batch_size_per_gpu",
    "deepspeed_config_file": "--deepspeed-config",
    "gradient_accumulation_dtype": "data_types.grad_accum_dtype",
    "gradient_checkpointing": "--gradient-checkpointing",
    "learning_rate": "--learning-rate",
    "lr": "--learning-rate",
    "max_grad_norm": "gradient_clipping",
    "micro_batch_size": "train_micro_batch_size_per_gpu",
    "mixed_precision": "bf16.enabled or fp16.enabled",
    "offload_optimizer_device": "zero_optimization.offload_optimizer.device",
    "offload_optimizer_nvme_path": "zero_optimization.offload_optimizer.nvme_path",
    "offload_param_device": "zero_optimization.offload_param.device",
    "offload_param_nvme_path": "zero_optimization.offload_param.nvme_path",
    "per_device_train_batch_size": "train_micro_batch_size_per_gpu",
    "save_16bit_model": "zero_optimization.stage3_gather_16bit_weights_on_model_save",
    "thread_count": "aio.intra_op_parallelism",
    "weight_decay": "--weight-decay",
    "zero3_save_16bit_model": "zero_optimization.stage3_gather_16bit_weights_on_model_save",
    "zero_stage": "zero_optimization.stage",
}
MOST_HOMES = 3  # `enabled` is a key of many blocks


class Questions(dict[str, Any]):
    """A block of a JSON that notes what DeepSpeed looks for in it.

    defaults: key -> the default that DeepSpeed gives it, or None.
    """

    def __init__(self, **values: Any) -> None:
        super().__init__(values)
        self.defaults: dict[str, Any] = {}

    def __contains__(self, key: object) -> bool:
        self.defaults.setdefault(str(key), None)
        return super().__contains__(key)

    def get(self, key: str, default: Any = None) -> Any:
        self.defaults[key] = default
        return super().get(key, default)

    def keys(self) -> Any:
        return self  # `key in block.keys()` is a question too


@cache
def blocks() -> dict[str, dict[str, Any]]:
    """Return {dotted path of a block: {key: type of its value}} of the installed DeepSpeed; "" is the whole JSON.

    Blocks that are not checked are missing: optimizer parameters, autotuning, and what may only be switched off.
    """
    logging.disable(logging.WARNING)  # that there is no GPU
    try:
        from deepspeed.runtime.config import DeepSpeedConfig
    except ValueError as error:  # DS_ACCELERATOR is none that it knows
        raise EnvironmentFault(f"DeepSpeed: {error}") from None
    finally:
        logging.disable(logging.NOTSET)
    by_key = {"": Questions(train_micro_batch_size_per_gpu=1, comms_logger={})}
    for path in LOOSE_BLOCKS:
        outer, _, name = path.rpartition(".")
        by_key[path] = by_key[outer][name] = Questions()
    config = DeepSpeedConfig(by_key[""])
    models = {
        "zero_optimization": config.zero_config,
        "fp16": config.float16_config,
        "bf16": config.bfloat16_config,
        "": config.monitor_config,
        "comms_logger": config.comms_config.comms_logger,
        "timers.throughput": config.timers_config,
    }
    result = {path: types for block, model in models.items() for path, types in model_blocks(type(model), block)}
    for path, block in by_key.items():
        defaults = block.defaults.items()
        result[path] = {key: type(value) if isinstance(value, int | float) else NO_BLOCK for key, value in defaults}
    return result | {"bfloat16": result["bf16"]}


def model_blocks(model: type[BaseModel], path: str) -> Iterator[tuple[str, dict[str, Any]]]:
    """Yield (path, types) of a block that is a pydantic model, by both names of its fields, and of the blocks in it."""
    types = dict[str, Any]()
    for name, field in model.model_fields.items():
        one = NO_BLOCK if get_origin(field.annotation) is list else field.annotation  # a text stands for a list of one
        types |= dict.fromkeys((name, field.alias or name), one)
        inner = f"{path}.{name}".lstrip(".")
        for part in (field.annotation, *get_args(field.annotation)):
            if isinstance(part, type) and issubclass(part, BaseModel) and inner not in REFUSED:
                yield from model_blocks(part, inner)
    yield path, types


def check_keys(user_json: Mapping[str, Any], source: str = "DeepSpeed JSON") -> None:
    """Refuse keys that DeepSpeed does not read or this project cannot follow, and values of the wrong kind.

    Raises:
        InputError: one line for each of them, with its path and what would be right.
    """
    raise_lines(f"{source}: {error}" for error in wrong_keys(user_json, ""))


def wrong_keys(block: Mapping[str, Any], path: str) -> Iterator[str]:
    """Yield a line for each wrong key or value of `block` and of the blocks in it. `path` is dotted; "": the JSON."""
    valid = blocks()[path]
    for key, value in block.items():
        inner = f"{path}.{key}" if path else key
        if inner in REFUSED:
            if is_on(value):
                yield f"{inner}: got {shown(value)}: {REFUSED[inner]}; remove it"
        elif key not in valid:
            yield f"{inner}: {right_key(key, path)}"
        elif value == "auto" or (value is None and path in ("zero_optimization", "data_types")):
            continue  # ours; a null offload block switches offload off, a null type is DeepSpeed's choice
        elif isinstance(value, Mapping) and inner in blocks():
            yield from wrong_keys(value, inner)
        elif right := expected(value, type_of(inner, valid[key])):
            yield f"{inner}: got {shown(value)}, expected {right}"
        elif inner in ONLY and value != ONLY[inner][0]:
            only, reason = ONLY[inner]
            yield f"{inner}: got {value!r}, expected {only!r}: {reason}"


def type_of(key: str, by_deepspeed: Any) -> Any:
    """Return the type of the values of a dotted key, by the type that DeepSpeed has for them."""
    if key in blocks():
        return dict
    if by_deepspeed in (int, float) and key.startswith(NOT_NEGATIVE) and key not in TYPES:
        return Annotated[by_deepspeed, Field(ge=0)]
    return TYPES.get(key, by_deepspeed)


@cache
def strict(right: Any) -> TypeAdapter[Any]:
    """Return what checks that a JSON value is of a type, without converting it."""
    return TypeAdapter(right, config={"strict": True, "allow_inf_nan": False})


def expected(value: Any, right: Any) -> str:
    """Return in words what a JSON value should be that is not of the type `right`; an empty text if it is.

    A whole number may be written as 5e8. Elsewhere nothing is converted: DeepSpeed would take "false" for true.
    """
    whole = int(value) if isinstance(value, float) and value.is_integer() else value
    try:
        strict(right).validate_json(json.dumps(whole))
    except ValidationError as error:
        problem = error.errors()[0]
        return WORDS.get(problem["type"]) or problem["msg"].removeprefix("Input should be ").replace("'", "")
    return ""


def right_key(key: str, path: str) -> str:
    """Return what is wrong with `key` in the block `path`, and the key that was meant."""
    parts = key.lower().replace("-", "_").split(".")
    name = parts[-1]
    homes = homes_of(name)
    if name in OTHER_NAMES:
        return f"DeepSpeed has no such key; write {OTHER_NAMES[name]}"
    if 0 < len(homes) <= MOST_HOMES and (len(parts) > 1 or name not in blocks()[path]):
        if len(parts) == 1:
            return f"DeepSpeed reads it in another block; write {' or '.join(homes)}"
        return (
            f"DeepSpeed opens no block at a dot; write {homes[0].replace('.', ': {')}: ...{'}' * homes[0].count('.')}"
        )
    hint = nearest(name, blocks()[path])
    if not hint and (close := difflib.get_close_matches(name, set[str]().union(*blocks().values()))):
        hint = f"; did you mean {' or '.join(homes_of(close[0])[:MOST_HOMES])}?"
    return f"DeepSpeed has no such key and would ignore it{hint}"


def homes_of(name: str) -> list[str]:
    """Return the dotted keys that end in `name`."""
    return [f"{path}.{name}".lstrip(".") for path, names in blocks().items() if name in names and path != "bfloat16"]


def is_on(value: Any) -> bool:
    """Return True if a key's value switches something on: its `enabled` if it has one, else any value in it."""
    if isinstance(value, Mapping):
        return is_on(value["enabled"]) if "enabled" in value else any(map(is_on, value.values()))
    return value not in (False, None, 0, "", "none", "auto")


def shown(value: Any) -> str:
    return "a block" if isinstance(value, Mapping) else repr(value)
