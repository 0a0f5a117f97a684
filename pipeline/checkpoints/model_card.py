"""The documents beside saved weights: a model card (README.md) and training_config.json. They are meant to be shared.

They name local files and folders by their last components only; hub ids stay whole.
"""

import json
import re
from collections.abc import Iterator, Mapping
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from huggingface_hub import ModelCardData

from pipeline.checkpoints.card_results import results
from pipeline.checkpoints.cards import card
from pipeline.checkpoints.shared_names import card_of, code, data_name, licence_of, shareable, shareable_flags
from pipeline.configuration.flag_table import flag_table
from pipeline.configuration.groups import ModelConfig
from pipeline.configuration.origins import DEFAULT, Kind
from pipeline.configuration.resume_rules import values_by_rule
from pipeline.configuration.stage import StageConfig
from pipeline.data.sources import hub_id, is_local, parse_path
from pipeline.errors import dashed
from pipeline.files import OURS, read_object
from pipeline.hub import commits_read, split_revision
from pipeline.run.layout import environment_file
from pipeline.run.run import Run

# Flags that a resumed run may change, but that tell how long the model was trained.
LENGTHS = ("num_train_epochs", "max_steps")


def model_documents(
    run: Run, *, model: ModelConfig, kind: str, step: int, scores: bool = False, seq2seq: bool = False
) -> dict[str, str]:
    """Return README.md (the model card) and training_config.json of a saved model.

    Args:
        model: the flags of the model that was trained.
        kind: the heading of the card.
        step: the optimizer step whose weights these are; later metrics and samples are not the model's.
        scores: True for a model with a score head, False for a language model.
        seq2seq: True for an encoder-decoder model.
    """
    config, base, shared = run.resolved.config, model.model_name_or_path, shareable_flags(run.resolved.config)
    # Without a quantised base, a model with a score head is saved whole.
    adapter = model.quantization != "none" or (config.deepspeed.save_adapter_only and not scores)
    task = "text-classification" if scores else "text2text-generation" if seq2seq else "text-generation"
    method, parent = shared.get("method", ""), card_of(base)
    is_known = not is_local(base) or (Path(base).expanduser() / OURS).is_file()
    data = ModelCardData(
        library_name="peft" if adapter else "transformers",
        pipeline_tag=task,
        base_model=(parent.get("base_model") if is_local(base) else split_revision(base)[0]) if is_known else None,
        datasets=[hub_id(path) for path, _ in map(parse_path, config.data.data_path) if not is_local(path)] or None,
        tags=["rlhf", run.stage.section, *filter(None, [method, "lora" if model.lora_dim else ""])],
        model_name=kind,
        eval_results=results(run, step, task),
        **licence_of(parent),
    )
    kinds = {"scores": scores, "adapter": adapter, "seq2seq": seq2seq}
    rows = {"origins": origin_rows(run, licence_of(parent)), "settings": setting_rows(run, shared)}
    text = card("model.md", run=run, step=step, data=data, method=method, now=datetime.now(UTC), **kinds, **rows)
    settings = {"stage": run.stage.section} | all_settings(config, shared)
    return {"README.md": text} | settings_document(settings)


def all_settings(config: StageConfig, shared: Mapping[str, Any]) -> dict[str, Any]:
    """Return the flags by their groups, as they may be shared, with the commits that were read of a hub's paths."""
    settings = config.model_dump()
    for flag in flag_table(type(config)).values():
        group = settings[flag.path[0]] if len(flag.path) > 1 else settings
        group[flag.path[-1]] = shared[flag.name]
    inputs = [path for paths in values_by_rule(config, "data").values() for path, _ in map(parse_path, paths)]
    inputs += values_by_rule(config, "model").values()
    return settings | {"commits": {path: commits_read[path] for path in inputs if path in commits_read}}


def origin_rows(run: Run, licence: Mapping[str, str]) -> Iterator[list[str]]:
    """Yield the inputs of a run: its models, data, reward functions and versions, each with an identifier."""
    config = run.resolved.config
    for name, path in config.start_paths.items():
        yield [name, code(str(shareable(path))), identity(path, run.contents.get(name, ""))]
    for flag, paths in values_by_rule(config, "data").items():
        for text, content in zip(paths, run.contents.get(flag) or [""] * len(paths), strict=False):
            yield [code(dashed(flag)), code(data_name(text)), identity(parse_path(text)[0], content.rpartition(":")[0])]
    yield from (
        [name, "", identity("", content)] for name, content in run.contents.items() if name.startswith("file of ")
    )
    if licence:
        yield ["licence of the base", code(", ".join(licence.values())), ""]
    environment = read_object(environment_file(run.folder))
    versions = {"python": environment.get("python"), **environment.get("versions", {})}
    commit = f"commit {code(environment['commit'])} of rlhf-pipeline" if environment.get("commit") else ""
    if environment:
        yield ["versions", code(", ".join(f"{name} {version}" for name, version in versions.items())), commit]


def identity(path: str, content: str) -> str:
    """Return the commit that was read of a hub's path, else the hash of what was read, as text; "" if both are unknown.

    content: the hash, or the path itself if the hub stores the content.
    """
    if commit := commits_read.get(path):
        return f"commit {code(commit)}"
    return f"SHA-256 {code(content)}" if re.fullmatch("[0-9a-f]{64}", content) else ""


def setting_rows(run: Run, shared: Mapping[str, Any]) -> Iterator[list[str]]:
    """Yield flag, value and origin of settings that bear on the result and that a user, file or preset changed."""
    origins, flags = run.resolved.origins, flag_table(type(run.resolved.config))
    values = run.resolved.values
    for name, flag in flags.items():
        origin = origins.get(name, DEFAULT)
        counts = flag.on_resume in ("same", "rounding", "output") or name in LENGTHS
        if counts and values[name] != flag.default and origin.kind not in (Kind.DEFAULT, Kind.PLAN):
            value = shared[name] if isinstance(shared[name], str) else json.dumps(shared[name])
            yield [code(dashed(name)), code(value), code(str(shareable(str(origin))))]


def settings_document(settings: dict[str, Any]) -> dict[str, str]:
    """Return this project's record of a model folder's origin as a document, name -> JSON text."""
    return {OURS: json.dumps(settings, indent=2) + "\n"}


def saved_settings(path: str) -> dict[str, str]:
    """Return the training settings in the model folder `path` as a document, name -> JSON text: {} without any."""
    file = Path(path).expanduser() / OURS
    return {OURS: file.read_text(encoding="utf-8") if file.is_file() else "{}\n"}
