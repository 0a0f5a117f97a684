"""Models that DeepSpeed-Chat saved, read and written as model folders of this project.

Only this module reads pickles itself, with `weights_only=True`. Nothing is written in DeepSpeed-Chat's format. The
command is in `rlhf/models/convert.py`.
"""

import re
from functools import reduce
from pathlib import Path
from typing import Any

import torch
import transformers

from pipeline.checkpoints.cards import card
from pipeline.checkpoints.model_card import settings_document
from pipeline.checkpoints.model_folder import save_model
from pipeline.data.templates import set_template
from pipeline.errors import InputError
from pipeline.models.paths import read_config, reading_error
from pipeline.models.reward_model import check_score_class, score_head_fields
from pipeline.models.source import ModelSource, check_vocabulary
from pipeline.models.tokenizers import choose_padding_token, load_tokenizer
from pipeline.models.weight_files import PICKLED, TOKENIZER_FILES, check_code, check_types

# The backbone of a reward model, with its name before October 2023.
BACKBONE = re.compile(r"^(rwtransformer|rwtranrsformer)\.")
HEAD = "v_head.weight"
LORA_RIGHT, LORA_LEFT = "lora_right_weight", "lora_left_weight"  # (inputs, rank) and (rank, outputs)
# DeepSpeed-Chat saves only vocabulary files of a tokenizer. Model types for which they suffice -> special tokens.
FROM_VOCABULARY: dict[str, dict[str, Any]] = {
    "gpt2": {}, "gpt_neo": {}, "gptj": {}, "llama": {"add_bos_token": True},
    "opt": {"bos_token": "</s>", "eos_token": "</s>", "unk_token": "</s>", "pad_token": "<pad>", "add_bos_token": True},
}  # fmt: skip
Weights = dict[str, torch.Tensor]


def convert(source: Path, output: Path, *, tokenizer_path: str) -> str:
    """Write the model of a DeepSpeed-Chat folder to `output`; returns one line about it.

    Args:
        tokenizer_path: folder or hub id of the tokenizer; "": the vocabulary files of `source`.

    Raises:
        InputError: files, tensors or tokenizer are missing, unknown, or do not belong together.
        EnvironmentFault: `output` cannot be written, or the hub cannot be reached.
    """
    transformers.logging.set_verbosity_error()
    transformers.logging.disable_progress_bar()
    file = source / PICKLED
    if not read_config(source) or not file.is_file():
        raise InputError(f"{source}: found no config.json and {PICKLED}, which DeepSpeed-Chat writes into each model")
    check_code(source, read_config(source))
    tokenizer = complete_tokenizer(source, tokenizer_path)
    weights = read_weights(file)
    num_merged = merge_lora(weights, file)
    is_reward = any(BACKBONE.match(name) for name in weights)
    model = build_model(weights, source, is_reward=is_reward)
    padding = choose_padding_token(tokenizer)
    tokenizer.pad_token = padding.token
    # DeepSpeed-Chat names the EOS, whose embedding would then get no gradient in further training.
    changes: dict[str, Any] = {"pad_token_id": padding.pad_id}
    if is_reward:
        changes = score_head_fields(tokenizer, label="reward")
    kind = "reward model" if is_reward else "language model"
    name, kinds = source.resolve().name, {"scores": is_reward, "adapter": False, "seq2seq": False}
    documents = {"README.md": card("converted.md", kind=kind, source=name, **kinds)}
    documents |= settings_document({"converted_from": name})
    save_model(model, tokenizer, output, dtype=model.dtype, documents=documents, config_changes=changes)
    spare = model.config.vocab_size - len(tokenizer)
    return (
        f"{output}: a {kind} in {str(model.dtype).removeprefix('torch.')}, {num_merged} LoRA layers merged, "
        f"{spare} rows of the vocabulary without a token"
    )


def read_weights(file: Path) -> Weights:
    """Read the tensors of a state dict on the CPU.

    Raises:
        InputError: any other content, NaN or infinity, or weights that are no floating-point numbers.
    """
    try:
        weights = torch.load(file, map_location="cpu", weights_only=True)
    except Exception as error:
        raise reading_error(str(file), "cannot be read as saved tensors", error) from error
    items = weights.items() if isinstance(weights, dict) else [(None, None)]
    if not weights or not all(isinstance(name, str) and isinstance(value, torch.Tensor) for name, value in items):
        raise InputError(f"{file}: got a {type(weights).__name__} that is no state dict of names and tensors")
    if bad := [name for name, value in weights.items() if not (is_plain(value) and value.isfinite().all())]:
        what = "hold NaN or infinity" if is_plain(weights[bad[0]]) else "are no dense real numbers of 16 bits or more"
        raise InputError(f"{file}: {len(bad)} of {len(weights)} tensors {what}, the first is {bad[0]}")
    check_types(file, {name: (value.dim(), str(value.dtype).removeprefix("torch.")) for name, value in weights.items()})
    return weights


def is_plain(value: torch.Tensor) -> bool:
    """Return whether a tensor is dense, has its values, and these are integers or real numbers of 16 bits or more."""
    is_dense = value.layout == torch.strided and not (value.is_nested or value.is_meta or value.is_quantized)
    return is_dense and not value.is_complex() and (value.itemsize > 1 or not value.is_floating_point())


def merge_lora(weights: Weights, file: Path) -> int:
    """Add the LoRA parts, which were not fused, to the weights of their layers; returns the number of layers."""
    layers = [name.removesuffix(LORA_RIGHT) for name in weights if name.endswith(LORA_RIGHT)]
    for layer in layers:
        right, left, weight = (weights.get(layer + name) for name in (LORA_RIGHT, LORA_LEFT, "weight"))
        if right is None or left is None or weight is None:
            raise InputError(f"{file}: {layer}: got {LORA_RIGHT} without {LORA_LEFT} or without the layer's weight")
        if (right.ndim, left.ndim) != (2, 2) or right.shape[1] != left.shape[0]:
            raise InputError(f"{file}: {layer}: LoRA parts of {[*right.shape]} and {[*left.shape]} have no common rank")
        delta = (right.float() @ left.float()).T / len(left)  # DeepSpeed-Chat's alpha is 1
        if delta.shape != weight.shape:
            raise InputError(f"{file}: {layer}: LoRA of {[*delta.shape]} for a weight of {[*weight.shape]}")
        weights[layer + "weight"] = (weight.float() + delta).to(weight.dtype)
        del weights[layer + LORA_RIGHT], weights[layer + LORA_LEFT]
    return len(layers)


def build_model(weights: Weights, source: Path, *, is_reward: bool) -> Any:
    """Return the transformers model with these weights, in their data type. Raises InputError unless all fit."""
    config = ModelSource(str(source)).config
    auto: Any = transformers.AutoModelForCausalLM
    if is_reward:
        check_score_class(config, str(source))
        config.num_labels, auto = 1, transformers.AutoModelForSequenceClassification
    dtypes = [value.dtype for value in weights.values() if value.is_floating_point()] or [torch.float32]
    try:
        with torch.device("meta"):
            model_class = type(auto.from_config(config, trust_remote_code=False))
        if is_reward:
            names = {name: BACKBONE.sub(f"{model_class.base_model_prefix}.", name) for name in weights}
            names[HEAD] = "score.weight"
            weights = {names[name]: value for name, value in weights.items()}
        model, info = model_class.from_pretrained(
            None,
            config=config,
            state_dict=weights,
            dtype=reduce(torch.promote_types, dtypes),
            output_loading_info=True,
            ignore_mismatched_sizes=True,
            trust_remote_code=False,
        )
    except Exception as error:
        raise reading_error(str(source), "cannot be loaded as this model", error) from error
    for problem in ("missing", "unexpected", "mismatched"):
        if misfits := sorted(map(str, info[f"{problem}_keys"])):
            raise InputError(f"{source / PICKLED}: {len(misfits)} {problem} weights, the first is {misfits[0]}")
    model.source_config = config
    return model


def complete_tokenizer(source: Path, path: str) -> Any:
    """Return the tokenizer at `path`; if that is "", the one whose files are in `source`, with a chat template.

    Raises:
        InputError: no tokenizer, or vocabulary files that are not the whole tokenizer.
    """
    config = read_config(source)
    name, kind = config.get("_name_or_path"), str(config.get("model_type"))
    advice = f"give --tokenizer PATH, the folder or hub id of the original model{f' ({name!r})' if name else ''}"
    if path or (source / "tokenizer_config.json").is_file():
        tokenizer = load_tokenizer(path or str(source))
    elif not any((source / name).is_file() for name in TOKENIZER_FILES):
        raise InputError(f"{source}: found no vocabulary files; {advice}")
    elif kind not in FROM_VOCABULARY:
        raise InputError(f"{source}: vocabulary files are not the whole tokenizer of a {kind} model; {advice}")
    else:
        tokenizer_class: Any = transformers.LlamaTokenizer if kind == "llama" else transformers.GPT2Tokenizer
        try:
            tokenizer = tokenizer_class.from_pretrained(str(source), **FROM_VOCABULARY[kind])
        except Exception as error:
            raise reading_error(str(source), f"its vocabulary files cannot be read; {advice}", error) from error
    set_template(tokenizer, "auto")
    check_vocabulary(ModelSource(str(source)), tokenizer)
    return tokenizer
