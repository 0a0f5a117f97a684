"""LoRA by peft: quantise the base (int8, nf4), choose the layers, wrap the model, compute merged weights.

Saving adapters is in `checkpoints/model_folder.py`.
"""

import importlib.util
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any, TypeGuard

import torch
from peft import LoraConfig, PeftModel, get_peft_model
from peft.tuners.lora import LoraLayer
from peft.tuners.tuners_utils import BaseTunerLayer
from torch import nn
from transformers import BitsAndBytesConfig, PretrainedConfig, PreTrainedModel
from transformers.pytorch_utils import Conv1D
from transformers.quantizers import HfQuantizer
from transformers.quantizers.auto import register_quantization_config, register_quantizer
from transformers.utils.quantization_config import QuantizationConfigMixin

from pipeline import dist
from pipeline.errors import EnvironmentFault, InputError
from pipeline.hub import commits_read
from pipeline.kernels.int8_linear import Int8Linear, dequantise_rows
from pipeline.models.partitions import gathered, is_partitioned

# Method that config.json of a folder with stored int8 codes names, and what else it says there.
STORED_INT8 = "rlhf_int8"
STORED_INT8_ENTRY = {
    "quant_method": STORED_INT8,
    "bits": 8,
    "weight": "int8 (outputs, inputs)",
    "scale": "fp32 (outputs, 1)",
}
START = "start"  # name of the frozen adapter that training began with, where that was not a zero one


def linear_names(model: PreTrainedModel, pattern: str, *, flag: str = "--lora-module-name") -> list[str]:
    """Return the names of linear layers that contain `pattern` (all-linear: all of them), never the head.

    Raises:
        InputError: no layer matches.
    """
    head = model.get_output_embeddings() if hasattr(model, "get_output_embeddings") else None
    linear = {
        name: module
        for name, module in model.named_modules()
        if isinstance(module, nn.Linear | Conv1D) and module is not head and name.split(".")[-1] != "score"
    }
    chosen = [name for name in linear if pattern == "all-linear" or pattern in name]
    if not chosen:
        examples = ", ".join(list(linear)[:3])
        raise InputError(f"{flag} {pattern}: matches no linear layer; the model has {examples}, ...")
    return chosen


def target_names(model: nn.Module, chosen: list[str]) -> list[str]:
    """Return the last parts of the chosen layers' names if no other module has one of them, else the whole names.

    Programs that serve adapters (SGLang) look for names such as q_proj in adapter_config.json.
    """
    last = {name.rpartition(".")[2] for name in chosen}
    same = [name for name, _ in model.named_modules() if name.rpartition(".")[2] in last]
    return sorted(last) if len(same) == len(chosen) else chosen


def lora_settings(flags: Mapping[str, Any]) -> dict[str, Any]:
    """Return the adapter settings in a model's flags, name -> value, as keyword arguments of `add_lora`."""
    return {name: flags[f"lora_{name}"] for name in ("dim", "alpha", "dropout", "module_name")}


def add_lora(
    model: PreTrainedModel,
    *,
    dim: int,
    alpha: float,
    dropout: float,
    module_name: str,
    only_lora: bool,
    task: str,
    seed: int,
    base: str = "",
) -> Any:
    """Wrap `model` with LoRA layers whose B is zero, so that it starts as the base model.

    Args:
        only_lora: freeze all other weights but a reward head; False: train weights that LoRA does not cover as well.
        task: peft's task type: CAUSAL_LM, SEQ_2_SEQ_LM or SEQ_CLS (whose head `score` is trained and saved along).
        seed: seed of the initial values of A.
        base: path of the model; adapter_config.json names the commit that was read of one on a hub.
    """
    config = LoraConfig(
        r=dim,
        lora_alpha=alpha,  # type: ignore[arg-type]  # peft scales by any number
        lora_dropout=dropout,
        target_modules=target_names(model, linear_names(model, module_name)),
        fan_in_fan_out=any(isinstance(module, Conv1D) for module in model.modules()),  # GPT-2
        modules_to_save=["score"] if task == "SEQ_CLS" else None,
        task_type=task,
        revision=commits_read.get(base),
    )
    with torch.random.fork_rng(devices=[]):
        # peft draws A from the global generator, on the CPU.
        torch.manual_seed(seed)
        wrapped: Any = get_peft_model(model, config, autocast_adapter_dtype=False)
    # peft needs a list: the order of a set, in adapter_config.json, would differ between processes.
    config.target_modules = sorted(config.target_modules or ())
    if not only_lora:
        unfreeze(wrapped)
    return wrapped


def unfreeze(wrapped: Any) -> None:
    """Train all of a peft model but the base weights of LoRA layers and the originals of saved modules."""
    frozen = {id(module.get_base_layer().weight) for module in wrapped.modules() if isinstance(module, LoraLayer)}
    for name, parameter in wrapped.named_parameters():
        if id(parameter) not in frozen and "original_module" not in name:
            parameter.requires_grad_(True)


def is_lora(model: nn.Module) -> TypeGuard[PeftModel]:
    return hasattr(model, "peft_config")


def keep_start_adapter(model: PeftModel) -> None:
    """Add a frozen copy of the adapter, and of a head saved with it, as it is when training continues from it."""
    model.add_adapter(START, model.peft_config["default"])
    named = dict(model.named_parameters())
    for name, copy in named.items():
        if f".{START}." in name:
            copy.data = named[name.replace(f".{START}.", ".default.")].data.clone()
            copy.requires_grad_(False)


@contextmanager
def start_model(model: PeftModel) -> Iterator[None]:
    """Turn a peft model into the one that training began with while the context lasts."""
    if START not in model.peft_config:
        with model.disable_adapter():
            yield
        return
    model.set_adapter(START)
    try:
        yield
    finally:
        model.set_adapter("default")


def merge_adapter(wrapped: Any) -> Any:
    """Merge a peft model's adapter into its base and return the base, to be trained as a whole.

    Under ZeRO-3 a collective, which gathers one layer at a time.
    """
    if any(map(is_partitioned, wrapped.parameters())):
        for layer in [module for module in wrapped.modules() if isinstance(module, BaseTunerLayer)]:
            base: Any = layer.get_base_layer()
            with gathered(base.parameters(), writer=True):
                layer.merge()
        merged = wrapped.unload()
    else:
        merged = wrapped.merge_and_unload()
    return merged.requires_grad_(True)  # peft froze it for its adapter


@torch.no_grad()
def merged_weight(layer: Any) -> torch.Tensor:
    """Return W + scale * B A, computed in fp32, in W's dtype. `layer` is not changed; its weights must be gathered."""
    weight, scale = layer.get_base_layer().weight, layer.scaling["default"]
    a, b = layer.lora_A["default"].weight, layer.lora_B["default"].weight
    if weight.is_cuda and weight.dtype == a.dtype and not layer.fan_in_fan_out:
        return torch.addmm(weight, b, a, alpha=scale)  # one kernel that accumulates in fp32 and rounds once
    # peft's get_delta_weight multiplies in the weights' dtype, which rounds a second time.
    delta = scale * b.float() @ a.float()
    return (weight.float() + (delta.T if layer.fan_in_fan_out else delta)).to(weight.dtype)


def quantise_to_int8(model: PreTrainedModel) -> None:
    """Replace all linear layers of a transformers model but its heads by int8 ones, one at a time."""
    for name in linear_names(model, "all-linear"):
        layer: Any = model.get_submodule(name)
        if not isinstance(layer, Int8Linear):
            model.set_submodule(name, Int8Linear(layer))


@register_quantization_config(STORED_INT8)
class StoredInt8Config(QuantizationConfigMixin):
    """The entry `quantization_config` in config.json of a folder whose linear layers are stored as int8 codes."""

    def __init__(self, quant_method: str = STORED_INT8, **about: Any) -> None:
        self.quant_method: Any = quant_method
        self.about = about


@register_quantizer(STORED_INT8)
class StoredInt8Quantizer(HfQuantizer):
    """The part of `from_pretrained` that loads stored codes and scales into int8 layers, without 16-bit weights."""

    requires_calibration = True  # stored codes only
    is_trainable = True

    def is_serializable(self) -> bool:
        return True

    def _process_model_before_weight_loading(self, model: PreTrainedModel, **kwargs: Any) -> None:
        quantise_to_int8(model)  # on the meta device

    def _process_model_after_weight_loading(self, model: PreTrainedModel, **kwargs: Any) -> None:
        self.remove_quantization_config(model)  # the model is one of this project's, not of transformers' kinds
        for module in model.modules():
            if isinstance(module, Int8Linear):
                module.scale.requires_grad_(False)


@torch.no_grad()
def dequantise(model: PeftModel, dtype: torch.dtype) -> None:
    """Replace the quantised layers of a peft model by linear ones in `dtype`, into which adapters can be merged."""
    inner: Any = model.get_base_model()
    with torch.device("meta"):
        plain = type(inner)(inner.config)
    for name, layer in list(inner.named_modules()):
        if (weight := dequantised_weight(layer)) is None:
            continue
        path = name.removesuffix(".base_layer")
        linear: Any = plain.get_submodule(path)
        if isinstance(linear, Conv1D):  # GPT-2's, which is transposed, and its adapter was not
            inner.get_submodule(path).fan_in_fan_out = name != path
            weight = weight.T
        linear.weight, linear.bias = nn.Parameter(weight.to(dtype).contiguous()), layer.bias
        inner.set_submodule(name, linear)
    if (quantizer := getattr(inner, "hf_quantizer", None)) is not None:  # bitsandbytes', by which it would be saved
        quantizer.remove_quantization_config(inner)
        inner._weight_conversions = None


def dequantised_weight(layer: Any) -> torch.Tensor | None:
    """Return the values (outputs, inputs) of a layer's int8 or nf4 codes, None for a layer without codes."""
    if isinstance(layer, Int8Linear):
        return dequantise_rows(layer.weight, layer.scale, torch.float32)
    state = getattr(getattr(layer, "weight", None), "quant_state", None)
    if state is None or isinstance(layer, LoraLayer):  # a wrapper shows its layer's weight
        return None
    from bitsandbytes.functional import dequantize_4bit

    values: torch.Tensor = dequantize_4bit(layer.weight.data, state)
    return values


def nf4_options(config: PretrainedConfig, dtype: torch.dtype) -> dict[str, Any]:
    """Return the arguments of `from_pretrained` for 4-bit weights that compute in `dtype`, on this rank's device.

    Weights that are stored in 4 bits follow the entry in `config`, where dtype and score head are set in place.
    """
    options = {"device_map": {"": torch.cuda.current_device() if dist.has_gpu() else "cpu"}}
    if entry := getattr(config, "quantization_config", None):
        entry["bnb_4bit_compute_dtype"] = str(dtype).removeprefix("torch.")
        if (skipped := entry.get("llm_int8_skip_modules")) is not None:  # None: transformers finds the heads
            entry["llm_int8_skip_modules"] = [*skipped, "score"]
        return options
    return options | {
        "quantization_config": BitsAndBytesConfig(
            load_in_4bit=True, bnb_4bit_quant_type="nf4", bnb_4bit_use_double_quant=True, bnb_4bit_compute_dtype=dtype
        )
    }


def settle_nf4(model: nn.Module, dtype: torch.dtype) -> None:
    """Store 4-bit codes as bytes and all other parameters in `dtype`: transformers leaves both in their stored types.

    It also stops bitsandbytes from repacking the codes in an evaluation on a CPU, which would round their scales.
    """
    for weight in model.parameters():
        if hasattr(weight, "quant_state"):
            weight.data = weight.data.flatten().view(torch.uint8).unsqueeze(1)
        else:
            weight.data = weight.data.to(dtype)
    layers: list[Any] = [module for module in model.modules() if hasattr(module, "support_avx512bf16_for_cpu")]
    for layer in layers:
        layer.support_avx512bf16_for_cpu = False


def check_quantization(quantization: str, flag: str) -> None:
    """Raise EnvironmentFault for a quantisation, the value of `flag`, whose package is not installed."""
    if quantization == "nf4" and importlib.util.find_spec("bitsandbytes") is None:
        raise EnvironmentFault(
            f"{flag} nf4: pip install bitsandbytes, which is not installed here, or take int8 of 16-bit weights"
        )


def stored_quantization(config: PretrainedConfig) -> str:
    """Return how the linear layers are stored: none, int8 by `rlhf export`, nf4 by bitsandbytes.

    Other methods of other programs by their names: fp4, bitsandbytes (8 bits), gptq, fp8.
    """
    entry = getattr(config, "quantization_config", None) or {}
    if entry.get("load_in_4bit"):
        return str(entry.get("bnb_4bit_quant_type", "fp4"))
    method = str(entry.get("quant_method") or "none")
    return "int8" if method == STORED_INT8 else method


def quantization_of(model: nn.Module) -> str:
    """Return the quantisation of a model's linear layers: none, int8 or nf4."""
    if any(isinstance(module, Int8Linear) for module in model.modules()):
        return "int8"
    return "nf4" if any(hasattr(parameter, "quant_state") for parameter in model.parameters()) else "none"


def scale_names(model: nn.Module) -> set[str]:
    """Return the names of the fp32 scales of a model's int8 codes."""
    return {f"{name}.scale" for name, module in model.named_modules() if isinstance(module, Int8Linear)}


def keep_norms_in_fp32(model: nn.Module, quantization: str) -> None:
    """Let the norms of a quantised model compute in fp32, with outputs in the dtype of their inputs; else do nothing.

    To be called under its engine, which casts all weights.
    """
    norms = [module for module in model.modules() if "norm" in type(module).__name__.lower()]
    for norm in norms if quantization != "none" else ():
        norm.float()
        inner = norm.forward
        norm.forward = lambda x, *rest, inner=inner: inner(x.float(), *rest).to(x.dtype)
