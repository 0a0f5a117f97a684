"""Write a checkpoint's models as plain folders without resuming its run: `rlhf export output/runs/sft --output DIR`.

With `--dtype int8` it writes a model's linear layers as int8 codes: a base for LoRA.
"""

import os
from pathlib import Path
from typing import Literal

from pipeline.configuration.flag_table import flag
from pipeline.configuration.groups import Group
from pipeline.errors import InputError, show
from pipeline.files import refused_by_disk, write_json
from pipeline.models.paths import read_adapter_config
from pipeline.run.entry import command, command_flags


class ExportConfig(Group):
    """Export a checkpoint as model folders: `rlhf export output/runs/sft --output output/sft-at-200`."""

    checkpoint: str = flag(
        ...,
        "Folder of a checkpoint, or of a run (its newest valid checkpoint); with --dtype int8 a model or hub id",
        kind="path",
        positional=True,
    )
    output: str = flag(..., "New folder for the model; in stage 3 the parent of actor/, critic/", kind="written path")
    dtype: Literal["auto", "bf16", "fp16", "fp32", "int8"] = flag(
        "auto", "Data type of the saved weights; auto: as the run saves them; fp32: unrounded; int8: a quantised base"
    )


def run(argv: list[str], prog: str) -> None:
    """Check the command line, read the checkpoint, and write its models."""
    config = command_flags(ExportConfig, argv, section="export", prog=prog).config
    os.environ.setdefault("DS_ACCELERATOR", "cpu")  # no GPU is used; else DeepSpeed logs that there is none
    import transformers

    from pipeline.checkpoints.offline import export_mark, open_checkpoint
    from rlhf.stages import STAGES

    transformers.logging.disable_progress_bar()
    transformers.logging.set_verbosity_error()  # it would report weights as missing that the checkpoint has
    if config.dtype == "int8":
        show(write_int8(config.checkpoint, Path(config.output).expanduser()))
        return
    checkpoint = open_checkpoint(Path(config.checkpoint).expanduser(), STAGES, output=config.output, dtype=config.dtype)
    mark = export_mark(config.output)
    with refused_by_disk(mark):
        mark.parent.mkdir(parents=True, exist_ok=True)
        write_json(mark, {"checkpoint": str(checkpoint.folder.resolve())})
    checkpoint.run.stage.export(checkpoint)
    mark.unlink()
    dtype = checkpoint.run.resolved.config.run.save_dtype
    show(f"{config.output}: step {checkpoint.saved['step']} of {checkpoint.run.stage.section} in {dtype}")


def write_int8(path: str, output: Path) -> str:
    """Write the model at `path` with linear layers as int8 codes and fp32 scales; return a line about it.

    Other weights are stored in 16 bits; fp32 weights are rounded to bf16 before they are quantised.
    Raises InputError for an adapter, a run, weights of fewer bits, and an output that exists.
    """
    from pipeline.checkpoints.model_card import settings_document
    from pipeline.checkpoints.model_folder import save_model
    from pipeline.checkpoints.shared_names import shareable
    from pipeline.inference.answers import load_chat_tokenizer
    from pipeline.models.lora import STORED_INT8_ENTRY
    from pipeline.models.source import ModelSource
    from rlhf.models.merge import load, sixteen_bits

    if output.exists():
        raise InputError(f"--output: {output} exists; name a new folder")
    folder = Path(path).expanduser()
    if (folder / "checkpoints").is_dir() or (folder / "state.json").is_file():
        raise InputError(f"--dtype int8: got {path}, a folder of a run, expected a model; export the run first")
    if read_adapter_config(folder) is not None:
        raise InputError(f"--checkpoint: {path} is an adapter; merge it with `rlhf merge` first")
    source = ModelSource(path)
    source.check("--checkpoint")
    if (stored := source.stored_quantization) not in ("none", "int8"):
        raise InputError(f"--checkpoint: {path} is stored as {stored}; name its 16-bit original")
    dtype, scores = sixteen_bits(source.config), "Classification" in "".join(source.config.architectures or ())
    model = load(source, dtype, scores=scores, quantization="int8")
    documents = {
        "README.md": f"# An int8 base\n\n`{shareable(path)}` with int8 codes and fp32 scales for its linear layers.\n",
    } | settings_document({"quantised_from": shareable(path)})
    changes = {"quantization_config": STORED_INT8_ENTRY}
    save_model(model, load_chat_tokenizer(source), output, dtype=dtype, documents=documents, config_changes=changes)
    size = sum(file.stat().st_size for file in output.glob("*.safetensors")) / 2**30
    return f"{output}: {path} in int8, {size:.2f} GiB; train it with --quantization int8 and --lora-dim"


main = command(run, "rlhf export")
