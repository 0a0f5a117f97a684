"""Merge a LoRA adapter into the 16-bit weights of its base: `rlhf merge output/sft output/sft-merged`.

After training on a quantised base, the 16-bit weights differ from it: the difference of the logits is printed.
A base that is stored as codes is dequantised first.
"""

import json
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from pipeline.configuration.flag_table import flag
from pipeline.configuration.groups import Dtype, Group
from pipeline.errors import InputError, show
from pipeline.models.paths import read_adapter_config
from pipeline.run.entry import command, command_flags

if TYPE_CHECKING:
    import torch
    from transformers import PretrainedConfig, PreTrainedModel, PreTrainedTokenizerBase

    from pipeline.models.source import ModelSource

SENTENCES = [
    "The heron stood still in the shallow water until the fish came near.",
    "Question: What is the capital of France? Answer: The capital of France is Paris.",
    "def add(a, b):\n    return a + b",
]


class MergeConfig(Group):
    """Merge a LoRA adapter into its base: `rlhf merge output/sft output/sft-merged`."""

    folders: list[str] = flag(
        [],
        "Folder of the adapter, and a new folder for the merged model",
        kind="path",
        positional=True,
        required=True,
        other_tools="adapter model output output_dir",
    )
    dtype: Dtype = flag("auto", "Data type of the merged weights; auto: the base's if it has 16 bits, else bf16")
    quantization: Literal["auto", "none", "nf4", "int8"] = flag(
        "auto", "How the base was quantised in training; auto: as stored, else by the adapter's training_config.json"
    )
    sentences: list[str] = flag([], "Texts whose logits are compared; none: three bundled ones", kind="text")


def run(argv: list[str], prog: str) -> None:
    """Check the command line, merge, and print the difference of the merged model from the trained one."""
    config = command_flags(MergeConfig, argv, section="merge", prog=prog).config
    if len(config.folders) != 2:
        raise InputError(f"--folders: got {len(config.folders)}, expected two: {prog} ADAPTER OUTPUT")
    path, output = config.folders
    adapter = read_adapter_config(Path(path).expanduser())
    if adapter is None:
        raise InputError(f"--folders: {path} holds no adapter (no adapter_config.json)")
    if Path(output).expanduser().exists():
        raise InputError(f"--folders: {output} exists; name a new folder for the merged model")
    scores = adapter.get("task_type") == "SEQ_CLS"
    import transformers

    from pipeline.inference.answers import load_chat_tokenizer
    from pipeline.models.loading import DTYPES
    from pipeline.models.lora import check_quantization
    from pipeline.models.source import ModelSource, check_positions

    transformers.logging.disable_progress_bar()
    source = ModelSource(path)
    source.check("--folders")
    base, stored, quantization = source.whole.path, source.stored_quantization, config.quantization
    if quantization == "auto":
        quantization = trained_quantization(path, scores=scores) if stored == "none" else stored
    check_quantization(quantization, "--quantization")
    dtype = DTYPES.get(config.dtype) or sixteen_bits(source.config)
    tokenizer = load_chat_tokenizer(source)
    sentences = config.sentences or SENTENCES
    check_positions(source, max(len(tokenizer(text)["input_ids"]) for text in sentences), "tokens of --sentences")
    trained = logits_of(
        load(source, dtype, quantization=quantization, merged=False, scores=scores), tokenizer, sentences
    )
    if not all(logits.isfinite().all() for logits in trained):
        raise InputError(f"{path}: with its base it gives NaN or infinity; train it again, or give another --dtype")
    write_merged(source, output, tokenizer, dtype=dtype, scores=scores)
    merged = logits_of(
        load(ModelSource(output), dtype, quantization="none", merged=True, scores=scores), tokenizer, sentences
    )
    codes = "" if stored == "none" else f"the {stored} codes of "
    show(f"{output}: {path} merged into {codes}{base} in {str(dtype).removeprefix('torch.')}")
    kind = "base" if quantization == "none" else f"{quantization} base"
    show(f"{'scores' if scores else 'logits'} of the {kind} with its adapter, and of the merged model:")
    show(*difference_lines(trained, merged, sentences))


def trained_quantization(path: str, *, scores: bool) -> str:
    """Return the quantisation of an adapter's base in training, from its run's settings; none if there are none."""
    from pipeline.checkpoints.model_card import saved_settings

    (settings,) = map(json.loads, saved_settings(path).values())
    group = settings.get("model") or settings.get("critic" if scores else "actor") or {}
    return str(group.get("quantization", "none"))


def sixteen_bits(config: "PretrainedConfig") -> "torch.dtype":
    """Return the data type of a configuration if it has 16 bits, else bf16."""
    import torch

    return config.dtype if config.dtype in (torch.bfloat16, torch.float16) else torch.bfloat16


def load(source: "ModelSource", dtype: "torch.dtype", *, scores: bool, **settings: Any) -> Any:
    """Load a language model, decoder or encoder-decoder, or a reward model, without its wrapper, for inference.

    Raises InputError for a weight that is not finite.
    """
    from pipeline.models.loaded import check_finite
    from pipeline.models.loading import load_language_model
    from pipeline.models.reward_model import load_reward_model

    if scores:
        model = load_reward_model(source, dtype=dtype, **settings).model
    else:
        model = load_language_model(source, dtype=dtype, **settings)
    check_finite(model, source.path)
    return model.eval()


def logits_of(
    model: "PreTrainedModel", tokenizer: "PreTrainedTokenizerBase", sentences: Sequence[str]
) -> "list[torch.Tensor]":
    """Return fp32 logits of each sentence on the CPU, (S, V); (1, 1), the score, from a reward model.

    An encoder-decoder model gets the sentence as input and as labels.
    """
    import torch

    from pipeline.models.loading import default_device

    device = default_device()
    model.to(device)  # type: ignore[arg-type]  # its decorator hides the signature
    with torch.inference_mode():
        encoded = [tokenizer(text, return_tensors="pt")["input_ids"].to(device) for text in sentences]
        names = ("input_ids", "labels") if model.config.is_encoder_decoder else ("input_ids",)
        return [model(**dict.fromkeys(names, ids)).logits.float().cpu().flatten(0, -2) for ids in encoded]


def write_merged(
    source: "ModelSource", output: str, tokenizer: "PreTrainedTokenizerBase", *, dtype: "torch.dtype", scores: bool
) -> None:
    """Write the model folder: base weights plus adapter, added in fp32 and rounded once; the adapter beside them.

    A base that is stored as codes is dequantised first.
    """
    from pipeline.checkpoints.cards import card
    from pipeline.checkpoints.model_card import saved_settings
    from pipeline.checkpoints.model_folder import save_model
    from pipeline.checkpoints.shared_names import shareable
    from pipeline.models.lora import dequantise

    documents, stored = saved_settings(source.path), source.stored_quantization
    model = load(source, dtype, quantization=stored, merged=False, scores=scores)
    if stored != "none":
        dequantise(model, dtype)
    names = {"adapter_name": shareable(source.path), "base": shareable(source.whole.path)}
    kinds = {"scores": scores, "adapter": False, "seq2seq": model.config.is_encoder_decoder}
    documents["README.md"] = card("merged.md", **names, dtype=str(dtype).removeprefix("torch."), **kinds)
    save_model(model, tokenizer, Path(output).expanduser(), dtype=dtype, documents=documents)


def difference_lines(
    trained: "Sequence[torch.Tensor]", merged: "Sequence[torch.Tensor]", sentences: Sequence[str]
) -> list[str]:
    """Return a line for each sentence: largest and mean difference, and the share of equal most likely tokens."""
    lines = []
    for first, second, text in zip(trained, merged, sentences, strict=True):
        difference = (first - second).abs()
        same = (first.argmax(-1) == second.argmax(-1)).float().mean().item()
        figures = f"largest difference {difference.max():.4g}, mean {difference.mean():.4g}"
        if first.shape[-1] > 1:
            figures += f", same most likely token at {same:.0%} of {len(first)}"
        lines.append(f"  {figures}: {text[:40]!r}")
    return lines


main = command(run, "rlhf merge")
