"""A checkpoint read outside of its run: one process loads its weights into models without an engine.

`rlhf export` calls it. Any number of ranks and any ZeRO stage may have written the checkpoint; optimizer states are not
read.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from transformers import PreTrainedTokenizerBase

from pipeline.checkpoints.checkpoint_files import first_whole
from pipeline.checkpoints.model_folder import save_trained
from pipeline.configuration.flag_table import flag_table
from pipeline.configuration.groups import ModelConfig
from pipeline.configuration.origins import Kind, Origin
from pipeline.configuration.resolved import Resolved, validated
from pipeline.configuration.stage import Stage
from pipeline.dist import World
from pipeline.engine.build import Trained, add_adapters, start_language_model, start_value_model
from pipeline.engine.fragments import FragmentReader
from pipeline.engine.state import read_weights
from pipeline.errors import InputError
from pipeline.files import model_fingerprint, parse_json, read_object
from pipeline.models.loading import DTYPES
from pipeline.models.source import ModelSource, prepare_tokenizer
from pipeline.run.layout import candidates, environment_file
from pipeline.run.run import Run
from pipeline.run.stop_request import StopRequest


@dataclass(frozen=True, slots=True)
class OfflineCheckpoint:
    """The checkpoint `folder`, the content of its state.json, and a run of one rank with its settings.

    dtype: of the weights in memory: that of the run if they are saved in it, else fp32, so that rounding happens once.
    """

    run: Run
    folder: Path
    saved: Mapping[str, Any]
    dtype: torch.dtype

    @property
    def state(self) -> dict[str, Any]:
        """The counters of the stage."""
        return dict(self.saved["state"])

    @property
    def has_average(self) -> bool:
        """True if the actor's moving average is stored."""
        return any(self.folder.glob("average.rank-*.safetensors"))

    def tokenizer(self, model: ModelConfig) -> PreTrainedTokenizerBase:
        """Return the tokenizer of the run, which is that of the model that `model` starts from."""
        data = self.run.resolved.config.data
        return prepare_tokenizer(ModelSource(model.model_name_or_path), data.template, data.chat_template_kwargs)

    def language_model(self, name: str, model: ModelConfig, *, average: bool = False) -> Trained:
        """Return the language model of the engine `name`; with `average`, with its moving average as weights."""
        source = self._start(name, model)
        return self._filled(start_language_model(source, model, self.dtype), name, model, average=average)

    def value_model(self, name: str, model: ModelConfig, **settings: bool) -> Trained:
        """Return the model with a scalar head of the engine `name`; settings as for `start_value_model`."""
        source = self._start(name, model)
        return self._filled(start_value_model(source, model, self.dtype, **settings), name, model)

    def save_language_model(self, kind: str) -> None:
        """Write the model folder of a stage that trains one language model; see `save_trained` for `kind`."""
        model = self.run.resolved.config.model
        module = self.language_model("model", model)
        save_trained(self.run, module, self.tokenizer(model), kind=kind, step=self.saved["step"])

    def _filled(self, module: Trained, name: str, model: ModelConfig, *, average: bool = False) -> Trained:
        add_adapters(self.run, module, model)
        files = self.folder.glob(f"{'average' if average else name}.rank-*.safetensors")
        read_weights(module, FragmentReader(files), prefix="" if average else "weights/")
        return module

    def _start(self, name: str, model: ModelConfig) -> ModelSource:
        """Return the start model. Raises InputError if the checkpoint was trained from another one."""
        key, path = name if name == "model" else f"{name} model", model.model_name_or_path
        if (here := model_fingerprint(path)) != self.saved["fingerprints"].get(key):
            what = "no such folder here, which is" if here == path else "not"
            raise InputError(
                f"{path}: {what} the {key} that {self.folder} was trained from; configuration, tokenizer and frozen"
                " weights are read from it, so leave it as it was, and export in the folder where the run was started"
            )
        return ModelSource(path)


def open_checkpoint(path: Path, stages: Sequence[Stage], *, output: str, dtype: str) -> OfflineCheckpoint:
    """Open a checkpoint for models that are written to `output`.

    Args:
        path: a checkpoint, or a run's folder, whose newest whole checkpoint is meant.
        stages: stages whose runs can be read.
        dtype: of the saved weights; auto: as the run would have saved them.

    Raises:
        InputError: there is no checkpoint, or it is not within the folder of its run. CheckpointError: it is damaged.
    """
    is_run = (path / "checkpoints").is_dir()
    named = [path] if (path / "state.json").is_file() else []
    folder = first_whole(candidates(path / "checkpoints") if is_run else named)
    if folder is None:
        raise InputError(f"{path}: found no checkpoint; name one (runs/sft/checkpoints/step-200), or a run's folder")
    saved = read_json(folder / "state.json", step=int, state=dict, fingerprints=dict, inputs=dict, dtype=str)
    run_dir = path if is_run else folder.resolve().parent.parent
    section, valid = str(read_json(environment_file(run_dir)).get("stage")), {stage.section: stage for stage in stages}
    if section not in valid:
        raise InputError(f"{environment_file(run_dir)}: got stage {section!r}, expected one of {', '.join(valid)}")
    stage = valid[section]
    table, settings = flag_table(stage.config), run_dir / "config.json"
    entries = read_json(settings, **dict.fromkeys(read_json(settings).keys() & table.keys(), dict))
    values = {name: entries[name].get("value") for name in entries.keys() & table.keys()} | {"output_dir": output}
    trained_in = saved["dtype"]
    if dtype != "auto" or values.get("save_dtype", "auto") == "auto":
        values["save_dtype"] = trained_in if dtype == "auto" else dtype
    origins = {
        name: Origin.of_entry(entries[name]) if name in entries else Origin(Kind.FILE, str(settings)) for name in table
    }
    run = Run(
        World(0, 1, torch.device("cpu")),
        run_dir,
        stage,
        Resolved(validated(stage.config, values, origins), origins),
        StopRequest(interrupt),
        contents=saved["inputs"] | saved["fingerprints"],
    )
    taken = next((folder for folder in run.resolved.config.outputs if folder.exists()), None)
    if taken and read_object(export_mark(output)) != {"checkpoint": str(folder.resolve())}:
        raise InputError(f"--output: {taken} exists; name a new folder")
    in_memory = trained_in if values["save_dtype"] == trained_in else "fp32"
    return OfflineCheckpoint(run, folder, saved, DTYPES[in_memory])


def export_mark(output: str) -> Path:
    """Return the marker file beside `output`: it names the checkpoint until its export is complete, and can be
    resumed."""
    return Path(output).absolute().with_name(f".{Path(output).name}.exporting")


def interrupt() -> None:
    """End the export like any small command at its first signal."""
    raise KeyboardInterrupt


def read_json(file: Path, **kinds: type) -> dict[str, Any]:
    """Read a file of a run's folder. Raises InputError if it is missing, or lacks a field of one of `kinds`."""
    try:
        fields = dict(parse_json(file.read_text(encoding="utf-8")))
    except (OSError, ValueError, TypeError):
        raise InputError(f"{file}: missing or unreadable; a checkpoint is read within the folder of its run") from None
    if wrong := [name for name, kind in kinds.items() if type(fields.get(name)) is not kind]:
        raise InputError(f"{file}: {wrong[0]} is missing or of another type than runs write; restore the file")
    return fields
