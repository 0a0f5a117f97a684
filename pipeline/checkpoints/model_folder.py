"""Finished models: plain Hugging Face folders in safetensors, written to a temporary folder that is then renamed.

Under ZeRO-3 the weights are gathered one parameter at a time, so no GPU ever has the whole model; rank 0 stores them in
host memory until transformers writes the shards.
"""

import json
import logging
import re
import shutil
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any

import torch
from peft.tuners.lora import LoraLayer
from torch import nn
from transformers import GenerationConfig, PreTrainedModel, PreTrainedTokenizerBase
from transformers.tokenization_utils_base import TOKENIZER_CONFIG_FILE
from transformers.utils import CONFIG_NAME, GENERATION_CONFIG_NAME

from pipeline import dist
from pipeline.checkpoints.model_card import model_documents
from pipeline.configuration.groups import ModelConfig
from pipeline.engine.build import weights_dtype
from pipeline.errors import DivergedError
from pipeline.files import has_config, with_new_folder, write_json
from pipeline.models.forward.seq2seq_lm import Seq2SeqLM
from pipeline.models.loading import DTYPES, base_model
from pipeline.models.lora import START, is_lora, merged_weight, quantization_of, scale_names
from pipeline.models.partitions import gathered, is_partitioned
from pipeline.models.tokenizers import eos_ids
from pipeline.models.weight_files import SENTENCEPIECE_FILES
from pipeline.run.host_storage import share
from pipeline.run.run import Run

log = logging.getLogger(__name__)

SHARD_SIZE = "5GB"
# Prefixes of peft's wrappers in the names of weights; transformers' names lack them.
PEFT_WRAPPERS = re.compile(r"base_layer\.|modules_to_save\.default\.")


def state_dict(model: nn.Module, *, dtype: torch.dtype) -> dict[str, torch.Tensor]:
    """Return the whole weights of the transformers model in `model`, LoRA merged: on rank 0's CPU, {} elsewhere.

    Buffers that transformers saves are included; tied weights occur once; the scales of int8 codes stay fp32. A
    collective.

    Raises:
        DivergedError: on every rank, a weight is not finite.
    """
    inner = base_model(model)
    tied = set(getattr(inner, "all_tied_weights_keys", {}) or {})
    named = ((PEFT_WRAPPERS.sub("", name), value) for name, value in whole_tensors(inner))
    return on_host(((name, value) for name, value in named if name not in tied), dtype, unchanged=scale_names(inner))


def on_host(
    named: Iterable[tuple[str, torch.Tensor | None]], dtype: torch.dtype, *, unchanged: Collection[str] = ()
) -> dict[str, torch.Tensor]:
    """Return the tensors that rank 0 has, in `dtype` or `unchanged`, on the CPU. A collective; raises as `state_dict`.

    Integers are unchanged, too.
    """
    weights, bad = {}, []
    for name, value in named:
        if value is not None:
            rounds = value.is_floating_point() and name not in unchanged
            saved = value.detach().to(dtype if rounds else value.dtype)
            if not saved.isfinite().all():
                bad.append(name)
            weights[name] = saved.cpu()

    def refuse() -> None:
        if bad:
            raise DivergedError(
                f"nothing is saved: {len(bad)} of {len(weights)} tensors hold NaN or infinity in "
                f"{str(dtype).removeprefix('torch.')}, the first is {bad[0]}; resume a checkpoint with a lower rate"
            )

    dist.on_main(refuse)
    return weights


def whole_tensors(model: nn.Module) -> Iterator[tuple[str, torch.Tensor | None]]:
    """Yield (name, whole value on rank 0 or None) of parameters and saved buffers, gathering one module at a time."""
    main = dist.is_main()
    lora: dict[str, Any] = {name: module for name, module in model.named_modules() if isinstance(module, LoraLayer)}
    for layer_name, layer in lora.items():
        with gathered(layer.parameters()):
            yield f"{layer_name}.weight", merged_weight(layer) if main else None
    merged = {f"{name}.base_layer.weight" for name in lora}
    for name, parameter in model.named_parameters():
        if name in merged or "lora_" in name or ".original_module." in name:
            continue
        with gathered([parameter]):
            yield name, stable_values(parameter) if main else None
    saved = model.state_dict().keys()
    for name, buffer in model.named_buffers():
        if name in saved:
            yield name, buffer if main else None


def stable_values(parameter: Any) -> torch.Tensor:
    """Return the values of a gathered parameter; copied if they would be released, or share memory with others."""
    values: torch.Tensor = parameter.data
    shares = values.untyped_storage().nbytes() > values.nbytes
    return values.clone() if shares or is_partitioned(parameter) else values


def save_model(
    model: nn.Module,
    tokenizer: PreTrainedTokenizerBase,
    folder: Path,
    *,
    dtype: torch.dtype,
    documents: Mapping[str, str],
    config_changes: Mapping[str, Any] | None = None,
    merged: bool = True,
) -> None:
    """Write `model` as a folder that `from_pretrained` reads, atomically; a collective.

    Args:
        dtype: data type of the saved weights.
        documents: further files, name -> text (README.md, training_config.json).
        config_changes: fields of config.json that differ from the source model's.
        merged: with LoRA, write the merged model, and the adapter to `adapter/`; else only the adapter, as for every
            quantised base.
    """
    merged = not is_lora(model) or (merged and quantization_of(model) == "none")
    weights = state_dict(model, dtype=dtype) if merged else {}
    lora_weights = adapter_weights(model, dtype) if is_lora(model) else None

    def fill(fresh: Path) -> None:
        inner = base_model(model)
        if merged:
            save_weights(inner, weights, fresh)
            if inner.can_generate():
                write_json(fresh / GENERATION_CONFIG_NAME, generation_settings(inner.generation_config, tokenizer))
        if merged or config_changes:  # an adapter's configuration is its base's, but for that of a new head
            # The source model's configuration, with its dropouts and names.
            config = inner.source_config
            config.architectures, config.dtype = [type(inner).__name__], dtype
            for name, value in (config_changes or {}).items():
                setattr(config, name, value)
            config.save_pretrained(fresh)
            rewrite_json(fresh / CONFIG_NAME, with_former_fields)
        if is_lora(model):
            adapter = fresh / "adapter" if merged else fresh
            settings = model.peft_config["default"]
            if (base := settings.base_model_name_or_path) and (path := Path(base).expanduser()).is_dir():
                settings.base_model_name_or_path = str(path.resolve())  # elsewhere it would look like a hub id
            model.save_pretrained(str(adapter), state_dict=lora_weights, selected_adapters=["default"])
            (adapter / "README.md").unlink(missing_ok=True)  # peft's card: a form, with the base's absolute path
        save_tokenizer(tokenizer, fresh)
        for name, text in documents.items():
            (fresh / name).write_text(text, encoding="utf-8")

    dist.on_main(lambda: with_new_folder(folder, fill))
    share(folder)


def save_trained(
    run: Run,
    module: nn.Module,
    tokenizer: PreTrainedTokenizerBase,
    folder: Path | None = None,
    *,
    model: ModelConfig | None = None,
    kind: str,
    step: int,
    score_fields: Mapping[str, Any] | None = None,
) -> None:
    """Write a model that a run has trained, with its model card; a collective. Raises as `save_model`.

    Args:
        module: an engine's module, with the transformers model as `model`.
        folder: None: --output-dir.
        model: the flags of the model; None: those of the stage's only one.
        kind: the heading of the card.
        step: the optimizer step whose weights these are.
        score_fields: fields of config.json of a model with a score head, whose adapter is never saved alone.
    """
    config, scores, seq2seq = run.resolved.config, score_fields is not None, isinstance(module, Seq2SeqLM)
    folder, model = folder or Path(config.run.output_dir), model or config.model
    dtype, start = saved_dtype(run), base_model(module.get_submodule("model")).source_config.dtype
    if config.run.save_dtype == "auto" and start and start.itemsize < dtype.itemsize:
        note = "%s: saved in %s, as it was trained; its start is in %s, which takes less room: see --save-dtype"
        log.info(note, folder, *(str(one).removeprefix("torch.") for one in (dtype, start)))
    save_model(
        module.get_submodule("model"),
        tokenizer,
        folder,
        dtype=dtype,
        # Read from the run's files, which rank 0 has written.
        documents=dist.on_main(
            lambda: model_documents(run, model=model, kind=kind, step=step, scores=scores, seq2seq=seq2seq)
        ),
        config_changes=score_fields,
        merged=scores or not config.deepspeed.save_adapter_only,
    )


def save_weights(model: PreTrainedModel, weights: dict[str, torch.Tensor], folder: Path) -> None:
    """Write the weights as safetensors, by transformers' names, with an index if they are sharded."""
    sampling = model.generation_config if model.can_generate() else None
    try:
        # transformers refuses to write published configurations with a temperature but no do_sample.
        if sampling is not None:
            model.generation_config = GenerationConfig()
        model.save_pretrained(folder, state_dict=weights, max_shard_size=SHARD_SIZE)
    finally:
        if sampling is not None:
            model.generation_config = sampling


def save_tokenizer(tokenizer: PreTrainedTokenizerBase, folder: Path) -> None:
    """Write the tokenizer's files, and the start model's SentencePiece model, for converters to other formats.

    Those read two entries of tokenizer_config.json that transformers 5 omits: the added tokens, and whether a text
    begins with BOS. Without the second one llama.cpp puts BOS before every prompt.
    """
    tokenizer.save_pretrained(folder)
    file = Path(getattr(tokenizer, "vocab_file", None) or "")
    entries: dict[str, Any] = {}
    if file.name in SENTENCEPIECE_FILES and file.is_file():
        shutil.copyfile(file, folder / file.name)
        added = {str(number): token.__getstate__() for number, token in tokenizer.added_tokens_decoder.items()}
        begins_with_bos = tokenizer("a")["input_ids"][:1] == [tokenizer.bos_token_id]
        entries = {"added_tokens_decoder": added, "add_bos_token": begins_with_bos}
    rewrite_json(folder / TOKENIZER_CONFIG_FILE, lambda config: with_former_names(config) | entries)


def generation_settings(config: GenerationConfig, tokenizer: PreTrainedTokenizerBase) -> dict[str, Any]:
    """Return the start model's settings for sampling, with the padding and all ids that end a text, its own first."""
    first = config.eos_token_id if isinstance(config.eos_token_id, list) else [config.eos_token_id]
    ends = [token for token in first if token is not None]
    ends += sorted(eos_ids(tokenizer, config) - set(ends))
    settings = config.to_diff_dict() | {"pad_token_id": tokenizer.pad_token_id}
    settings |= {"eos_token_id": ends[0] if len(ends) == 1 else ends}
    settings.pop("_from_model_config", None)
    return settings


def rewrite_json(file: Path, change: Callable[[dict[str, Any]], dict[str, Any]]) -> None:
    write_json(file, change(json.loads(file.read_text(encoding="utf-8"))))


def with_former_fields(config: dict[str, Any]) -> dict[str, Any]:
    """Return config.json with the fields that transformers 4, vLLM, SGLang, TGI and llama.cpp of its time read.

    Without them these programs refuse some models, and load others with another data type or, silently, other rotary
    positions.
    """
    rope = config.get("rope_parameters") or {}
    local = rope.get("sliding_attention")  # of Gemma 3, whose kinds of layers have positions of their own
    rope = rope.get("full_attention", rope)
    former = {"rope_theta": "rope_theta", "partial_rotary_factor": "partial_rotary_factor"}
    if config["model_type"] == "gpt_neox":
        former = {"rope_theta": "rotary_emb_base", "partial_rotary_factor": "rotary_pct"}
    fields = {former[name]: rope[name] for name in former if name in rope}
    if local:
        fields["rope_local_base_freq"] = local["rope_theta"]
    if fields and rope.get("rope_type", "default") != "default":
        fields["rope_scaling"] = rope
    if config["model_type"] == "phi3" and "rope_scaling" in fields:  # the rest is beside it, and refused within
        others = {*former, "rope_type", "type", "original_max_position_embeddings"}
        factors = {name: value for name, value in rope.items() if name not in others}
        fields["rope_scaling"] = {"type": rope["rope_type"]} | factors
    if "num_local_experts" in config:
        fields["num_experts"] = config["num_local_experts"]  # Qwen3-MoE's name for it
    return config | fields | {"torch_dtype": config["dtype"]}


def with_former_names(config: dict[str, Any]) -> dict[str, Any]:
    """Return tokenizer_config.json with the names that both transformers 4 and 5 know; 4 fails on those of 5."""
    config.pop("local_files_only", None)  # of this process, not of the tokenizer
    if config.get("tokenizer_class") == "TokenizersBackend":
        config["tokenizer_class"] = "PreTrainedTokenizerFast"
    if isinstance(config.get("extra_special_tokens"), list):
        config["additional_special_tokens"] = config.pop("extra_special_tokens")
    return config


def is_saved(folder: str) -> bool:
    """Return whether `folder` holds a model, as rank 0 sees it. A collective."""
    return dist.on_main(lambda: has_config(Path(folder)))


def adapter_weights(model: nn.Module, dtype: torch.dtype) -> dict[str, torch.Tensor]:
    """Return the adapter's tensors by peft's names on rank 0, {} elsewhere. A collective; raises as `state_dict`."""

    def named() -> Iterator[tuple[str, torch.Tensor | None]]:
        for name, parameter in model.named_parameters():
            if ("lora_" in name or ".modules_to_save." in name) and f".{START}." not in name:
                with gathered([parameter]):
                    yield name, parameter.data.clone() if dist.is_main() else None

    return on_host(named(), dtype)


def saved_dtype(run: Run) -> torch.dtype:
    """Return the data type of saved weights: `--save-dtype`, or that of training."""
    name = run.resolved.config.run.save_dtype
    return weights_dtype(run) if name == "auto" else DTYPES[name]
