"""Measure models without allocating them: they are built and run on the meta device, where tensors have only shapes.

The modules are those of training, so that sizes and live bytes of a pass are counted, not estimated. Stand-ins take the
places of kernels (stand_ins.py).
"""

import warnings
from contextlib import nullcontext
from dataclasses import dataclass, replace
from functools import cache, lru_cache
from pathlib import Path
from types import NoneType
from typing import Any, Self

import torch
from torch import nn
from transformers import (
    AutoConfig,
    AutoModelForCausalLM,
    AutoModelForSeq2SeqLM,
    AutoModelForSequenceClassification,
    PretrainedConfig,
    PreTrainedModel,
)
from transformers.quantizers.quantizers_utils import should_convert_module

from pipeline.configuration.flags import load_yaml
from pipeline.configuration.groups import ModelConfig
from pipeline.errors import InputError
from pipeline.launching.scripts import launch_file
from pipeline.models.forward.causal_lm import CausalLM, Comparison
from pipeline.models.forward.fused_layers import class_in_place
from pipeline.models.forward.seq2seq_lm import Seq2SeqLM
from pipeline.models.loading import DTYPES, base_model, use_gradient_checkpointing, without_dropout
from pipeline.models.lora import add_lora, keep_norms_in_fp32, linear_names, lora_settings, quantise_to_int8
from pipeline.models.partitions import mark_partitioned
from pipeline.models.reward_model import FloatLinear, TokenValueModel, check_score_class
from pipeline.models.source import ModelSource
from pipeline.planning.counting import PassCount, PassCounter, with_layers
from pipeline.planning.needs import ModelUse, Pass
from pipeline.planning.stand_ins import (
    COUNTED_ATTENTION,
    CountedLM,
    CountedMLP,
    CountedNorm,
    CountedSeq2SeqLM,
    counted_rotary,
)

# Bytes of a 4-bit weight. Each block of 64 weights has a scale: in fp32, or itself quantised (QLoRA, section 3).
NF4_BYTES, DOUBLE_NF4_BYTES = 0.5 + 4 / 64, 0.5 + 0.127 / 8
BUFFERED_ROTARY = frozenset({"dynamic", "longrope"})
FEW_LAYERS = (2, 3)  # numbers of layers that are run to measure a model whose layers are alike


@dataclass(frozen=True, slots=True)
class ModelSize:
    """Numbers of weights of a model, and their bytes when loaded. Tied weights count once.

    weights: all weights.
    trained: weights that are trained.
    embeddings: weights of embedding tables and of the head.
    linear: weights of linear layers without the heads.
    largest: weights of the largest parameter.
    layer: weights of the largest decoder layer.
    num_bytes: bytes of all weights and buffers.
    element: bytes of one trained weight.
    tied: weights of the head if it is tied to the embedding, else 0.
    """

    weights: int
    trained: int
    embeddings: int
    linear: int
    largest: int
    layer: int
    num_bytes: int
    element: int
    tied: int = 0

    @property
    def num_layers(self) -> int:
        """The number of decoder layers; 1 if the model does not name their class."""
        return max(1, (self.weights - self.embeddings) // self.layer) if self.layer else 1

    @classmethod
    def of(cls, model: PreTrainedModel, *, quantization: str) -> Self:
        """Count a transformers or peft model on the meta device."""
        parameters = list(model.parameters())
        embeddings = {module.weight for module in model.modules() if isinstance(module, nn.Embedding)}
        head = model.get_output_embeddings() if hasattr(model, "get_output_embeddings") else None
        tied = head.weight.numel() if head is not None and head.weight in embeddings else 0
        embeddings |= set() if head is None else {head.weight}
        base = base_model(model)
        linear = sum(base.get_submodule(name).weight.numel() for name in linear_names(base, "all-linear"))
        names = set(getattr(base, "_no_split_modules", None) or ())
        layers = [module for module in model.modules() if type(module).__name__ in names]
        element, tensors = base.dtype.itemsize, [*parameters, *model.buffers()]
        num_bytes = sum(tensor.nbytes for tensor in tensors)
        if quantization == "nf4":
            num_bytes -= saved_by_nf4(base)
        return cls(
            weights=sum(parameter.numel() for parameter in parameters),
            trained=sum(parameter.numel() for parameter in parameters if parameter.requires_grad),
            embeddings=sum(weight.numel() for weight in embeddings),
            linear=linear,
            largest=max(parameter.numel() for parameter in parameters),
            layer=max((sum(p.numel() for p in layer.parameters()) for layer in layers), default=0),
            num_bytes=num_bytes,
            element=element,
            tied=tied,
        )


def saved_by_nf4(model: PreTrainedModel) -> int:
    """Return the bytes that 4-bit linear layers save. If config.json says that they are stored so, use its entry."""
    entry = getattr(model.config, "quantization_config", None) or {"bnb_4bit_use_double_quant": True}
    skipped = entry.get("llm_int8_skip_modules")
    names = [name for name in linear_names(model, "all-linear") if should_convert_module(name, skipped)]
    layers: list[Any] = [model.get_submodule(name) for name in names]
    packed = DOUBLE_NF4_BYTES if entry.get("bnb_4bit_use_double_quant") else NF4_BYTES
    return int(sum(layer.weight.numel() for layer in layers) * (model.dtype.itemsize - packed))


@cache
def shapes() -> dict[str, dict[str, Any]]:
    """Return launch/shapes.yaml: hub id -> the fields of the model's configuration that fix its shape."""
    return load_yaml(str(launch_file("shapes.yaml")))


@lru_cache(maxsize=64)
def planned_config(path: str) -> PretrainedConfig:
    """Return the configuration of a model; ids of launch/shapes.yaml need no hub. Raises as `ModelSource.config`."""
    shape = shapes().get(path.removesuffix("-Instruct"))
    if shape is None or Path(path).exists():
        return ModelSource(path).config
    config: PretrainedConfig = AutoConfig.for_model(**shape)
    return config


def shape_of(use: ModelUse) -> ModelUse:
    """Return the use without settings that affect neither weights nor passes; it is the key of the caches below."""
    flags = use.settings.model_dump(include={
        "attn_implementation", "gradient_checkpointing", "lora_alpha", "lora_dim", "lora_module_name", "quantization",
    }) | {"zero_stage": 3 if use.settings.partitioned == "weights" else 0}  # fmt: skip
    return replace(use, role="", averaged=False, settings=ModelConfig().model_copy(update=flags))


def build(use: ModelUse, dtype: str) -> Any:
    """Build a model of a stage on the meta device, wrapped as in training: `CausalLM` or `TokenValueModel`.

    Raises InputError, EnvironmentFault: its config.json cannot be read, it is no decoder, or has no class for scores.
    """
    return build_shape(shape_of(use), dtype)


@lru_cache(maxsize=64)
def build_shape(use: ModelUse, dtype: str) -> Any:
    """Build the model of a use that `shape_of` returned."""
    config, settings = without_dropout(planned_config(use.path)), use.settings
    auto_class: Any = AutoModelForSeq2SeqLM if config.is_encoder_decoder else AutoModelForCausalLM
    if use.has_values:
        check_score_class(config, use.path)
        auto_class, config.num_labels = AutoModelForSequenceClassification, 1
    with torch.device("meta"), warnings.catch_warnings():
        warnings.simplefilter("ignore", FutureWarning)
        model = auto_class.from_config(config, dtype=DTYPES[dtype])
        if settings.attn_implementation != "eager" and model.config._attn_implementation != "eager":
            for part in filter(lambda part: isinstance(part, PreTrainedModel), model.modules()):
                part.set_attn_implementation(COUNTED_ATTENTION)  # transformers 5.17 leaves out T5's encoder and decoder
        if settings.quantization == "int8":
            quantise_to_int8(model)
        if use.trained and settings.lora_dim:
            model = with_lora(model, use).to(DTYPES[dtype])  # peft leaves adapters in fp32 on the meta device
        if use.trained and settings.gradient_checkpointing:
            use_gradient_checkpointing(base_model(model))
    for module in model.modules():
        if not use.on_cpu and (other := class_in_place(module, CountedNorm, CountedMLP, counted_rotary)) is not None:
            module.__class__ = other
    keep_norms_in_fp32(model, settings.quantization)
    if not use.trained:
        model.requires_grad_(False)
    if use.has_values:
        head = base_model(model).score
        head.__class__ = FloatLinear if type(head) is nn.Linear else type(head)
        return TokenValueModel(model).train(use.trained)
    kinds = (Seq2SeqLM, CausalLM) if use.on_cpu else (CountedSeq2SeqLM, CountedLM)
    wrapped = kinds[0 if config.is_encoder_decoder else 1](model).train(use.trained)
    if isinstance(wrapped, CausalLM):
        wrapped.stores_logits = use.stores_logits
        if settings.partitioned == "weights":  # the head's pieces depend on it
            mark_partitioned(base_model(model).get_output_embeddings().weight)
    return wrapped


def with_lora(model: PreTrainedModel, use: ModelUse) -> Any:
    """Wrap a model with the adapters that training gives it."""
    task = "SEQ_CLS" if use.has_values else "SEQ_2_SEQ_LM" if model.config.is_encoder_decoder else "CAUSAL_LM"
    adapters = lora_settings(dict(use.settings)) | {"dropout": 0.0}
    return add_lora(model, **adapters, only_lora=use.only_lora, task=task, seed=0)


def model_size(use: ModelUse, dtype: str) -> ModelSize:
    """Return the size of a model of a stage. Raises as `build` does."""
    return size_of_shape(shape_of(use), dtype)


@lru_cache(maxsize=64)
def size_of_shape(use: ModelUse, dtype: str) -> ModelSize:
    """Return the size of the model of a use that `shape_of` returned."""
    return ModelSize.of(build(use, dtype).model, quantization=use.settings.quantization)


def peak_bytes(use: ModelUse, dtype: str, work: Pass) -> int:
    """Return the peak of live bytes in a pass; see `count_pass`."""
    return count_pass(use, dtype, work).peak


def count_pass(use: ModelUse, dtype: str, work: Pass) -> PassCount:
    """Count the kernels of a pass, and the bytes that it holds besides weights and gradients. Logits are included.

    If no earlier gradients exist, the gradients of this pass are included.

    Raises:
        InputError: the forward pass depends on values, as in some mixtures of experts.
    """
    shape = shape_of(use)
    if not work.trains:  # without a backward pass there is nothing to recompute
        shape = replace(shape, settings=shape.settings.model_copy(update={"gradient_checkpointing": False}))
    return count_pass_of_shape(shape, dtype, replace(work, role="", times=1, without_adapters=False))


@lru_cache(maxsize=256)
def count_pass_of_shape(use: ModelUse, dtype: str, work: Pass) -> PassCount:
    """Count a pass of the model of a use that `shape_of` returned.

    Rows that share tokens are counted as rows that are shorter by their share; what attention computes more between
    prompts and responses is left out.
    """
    if use.on_cpu:
        work = replace(work, shared=0, copied=0)
    try:
        count = run_counted(use, dtype, work)
        return replace(count, peak=count.peak + work.copied)
    except (RuntimeError, NotImplementedError) as error:
        reason = str(error).partition("\n")[0]
        raise InputError(f"{use.path}: its passes cannot be planned since they depend on values: {reason}") from error


def run_counted(use: ModelUse, dtype: str, work: Pass) -> PassCount:
    """Run a pass on the meta device and return its count.

    A model whose decoder layers are alike is run with two and with three layers. The difference is the cost of a layer.
    """
    wrapped, stack, makes_buffers = counted_model(use, dtype)
    if stack is None:
        whole = run_pass(wrapped, use, work)
        return PassCount(whole.peak, whole.kernels)
    owner, name = stack
    layers, counters = getattr(owner, name), list[PassCounter]()
    for number in (FEW_LAYERS[0],) * makes_buffers + FEW_LAYERS:
        setattr(owner, name, layers[:number])
        try:
            counters.append(run_pass(wrapped, use, work, lowest=layers[0]))
        finally:
            setattr(owner, name, layers)
    return with_layers(*counters[-2:], more=len(layers) - FEW_LAYERS[1])


@lru_cache(maxsize=64)
def counted_model(use: ModelUse, dtype: str) -> tuple[Any, tuple[nn.Module, str] | None, bool]:
    """Return a model, the module and name of its list of layers if they are alike, and whether a pass adds buffers."""
    wrapped = build(use, dtype)
    if (stack := alike_layers(base_model(wrapped.model))) is None:
        return wrapped, None, False
    # Long rotary positions allocate buffers in the first pass.
    makes_buffers = any(getattr(module, "rope_type", "") in BUFFERED_ROTARY for module in wrapped.modules())
    return wrapped, stack, makes_buffers


def alike_layers(model: PreTrainedModel) -> tuple[nn.Module, str] | None:
    """Return the module that has the list of a model's decoder layers, and the list's name there.

    None if the layers differ, if there are so few that all are run, or if the model has an encoder and a decoder.
    """
    names = set(getattr(model, "_no_split_modules", None) or ())
    lists = [
        (owner, name, child)
        for owner in model.modules()
        for name, child in owner.named_children()
        if isinstance(child, nn.ModuleList) and {type(layer).__name__ for layer in child} & names
    ]
    if len(lists) != 1 or len(lists[0][2]) <= sum(FEW_LAYERS):
        return None
    owner, name, layers = lists[0]
    return (owner, name) if len({parts_of(layer) for layer in layers}) == 1 else None


def parts_of(layer: nn.Module) -> tuple[Any, ...]:
    """Return the classes and plain attributes of a layer's modules, and shapes and kinds of its parameters."""
    tensors = ((name, p.shape, p.dtype, p.requires_grad) for name, p in layer.named_parameters())
    plain = (
        (name, type(module), key, value)
        for name, module in layer.named_modules()
        for key, value in {"": None, **vars(module)}.items()
        if isinstance(value, (bool, int, float, str, NoneType)) and key != "layer_idx"
    )
    return (*plain, *tensors)


def run_pass(wrapped: Any, use: ModelUse, work: Pass, *, lowest: nn.Module | None = None) -> PassCounter:
    """Run a pass on the meta device; count what follows the backward pass of the `lowest` layer separately."""
    of_two = isinstance(wrapped, Seq2SeqLM)
    device, rows, length = torch.device("meta"), work.rows, work.length // 2 if of_two else work.length
    length -= work.shared // rows
    trained = [parameter for parameter in wrapped.parameters() if parameter.requires_grad]
    for parameter in trained:
        parameter.grad = torch.empty_like(parameter) if work.accumulates else None
    ids = torch.zeros(rows, length, dtype=torch.int64, device=device)
    # transformers reads the values of any mask but a dense one, and here are none; BLOOM builds its own dense mask.
    makes_mask = base_model(wrapped.model).config.model_type == "bloom"
    shape = (rows, length) if makes_mask else (1, 1, length, length)
    mask = torch.ones(shape, dtype=torch.bool, device=device)
    positions = torch.arange(length, device=device).unsqueeze(0)
    selected = torch.ones(rows, length - 1, dtype=torch.bool, device=device)
    before_pass = [*wrapped.parameters(), *wrapped.buffers(), *(p.grad for p in trained if p.grad is not None)]
    counter = PassCounter([*before_pass, ids, mask, positions, selected])

    def watch(layer: nn.Module, inputs: Any, output: Any) -> None:
        hidden = output if isinstance(output, torch.Tensor) else output[0]
        if hidden.requires_grad:
            hidden.register_hook(lambda gradient: counter.divide())

    watched = lowest.register_forward_hook(watch) if lowest is not None else nullcontext()
    with watched, counter, torch.set_grad_enabled(work.trains):
        if use.has_values:
            out = wrapped(ids, mask, positions, right_padded=True)
        elif of_two:
            out = wrapped(ids, attention_mask=mask, labels=ids)
        else:
            statistics = wrapped(
                ids,
                attention_mask=mask,
                selected=selected,
                num_selected=work.num_head_tokens,
                position_ids=positions,
                right_padded=True,
                comparison=compared_with(wrapped, work),
            )
            out = statistics.log_probs
            if statistics.divergence is not None:
                out = out + statistics.divergence
        if work.trains:
            out.sum().backward()
    for parameter in trained:
        parameter.grad = None
    return counter


def compared_with(wrapped: CausalLM, work: Pass) -> Comparison | None:
    """Return the other model that a pass is compared with: one of the same shape, whose pass came before."""
    if work.divergence is None:
        return None
    width = base_model(wrapped.model).get_output_embeddings().in_features
    hidden = torch.empty(work.num_head_tokens, width, dtype=wrapped.model.dtype, device="meta")
    return Comparison(work.divergence, hidden, wrapped, work.num_head_tokens // work.rows)
