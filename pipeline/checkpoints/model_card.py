"""The documents beside saved weights: a model card (README.md) and training_config.json. They are meant to be shared.

So they name files and folders of this machine by their last component only; ids of a hub stay whole.
"""

import json
from pathlib import Path
from typing import Any

from huggingface_hub import ModelCardData

from pipeline.configuration.flag_table import flag_table
from pipeline.configuration.groups import ModelConfig
from pipeline.configuration.resume_rules import values_by_rule
from pipeline.data.sources import hub_id, is_local, parse_path
from pipeline.hub import commits_read, split_revision
from pipeline.marks import OURS
from pipeline.run.evaluations import evaluations
from pipeline.run.run import Run

# The lines of an example after its imports. {auto} is the class that loads the model.
LOAD = """
folder = "."  # this folder, or its id on a hub
tokenizer = AutoTokenizer.from_pretrained(folder)
model = {auto}.from_pretrained(folder{labels})
"""
ANSWER = """\
messages = [{"role": "user", "content": "Describe the sea."}]
inputs = tokenizer.apply_chat_template(messages, add_generation_prompt=True, return_tensors="pt", return_dict=True)
answer = model.generate(**inputs, max_new_tokens=32)[0, inputs["input_ids"].shape[1] :]
print(tokenizer.decode(answer, skip_special_tokens=True))
"""
SCORE = """\
messages = [{"role": "user", "content": "Describe the sea."}, {"role": "assistant", "content": "It is blue."}]
inputs = tokenizer.apply_chat_template(messages, return_tensors="pt", return_dict=True)
print(model(**inputs).logits)
"""


def model_documents(
    run: Run, *, model: ModelConfig, kind: str, step: int, scores: bool = False, seq2seq: bool = False
) -> dict[str, str]:
    """Return README.md (the model card) and training_config.json of a saved model.

    Args:
        model: the flags of the model that was trained.
        kind: the heading of the card.
        step: the optimizer step whose weights these are; later evaluations are not the model's.
        scores: True for a model with a score head, False for a language model.
        seq2seq: True for an encoder-decoder model.
    """
    config, base = run.resolved.config, model.model_name_or_path
    # Without a quantised base, a model with a score head is saved whole.
    adapter = model.quantization != "none" or (config.deepspeed.save_adapter_only and not scores)
    settings = {"stage": run.stage.section} | config.model_dump()
    for flag in flag_table(type(config)).values():
        if flag.kind in ("path", "written path"):
            group = settings[flag.path[0]] if len(flag.path) > 1 else settings
            group[flag.path[-1]] = shareable(group[flag.path[-1]])
    inputs = [path for paths in values_by_rule(config, "data").values() for path, _ in map(parse_path, paths)]
    inputs += values_by_rule(config, "model").values()
    settings["commits"] = {path: commits_read[path] for path in inputs if path in commits_read}
    sources = [with_commit(path) for path in config.data.data_path]
    data = ModelCardData(
        library_name="transformers",
        pipeline_tag="text-classification" if scores else "text2text-generation" if seq2seq else "text-generation",
        base_model=None if is_local(base) else split_revision(base)[0],
        datasets=[hub_id(path) for path, _ in map(parse_path, config.data.data_path) if not is_local(path)] or None,
        tags=["rlhf", run.stage.section],
    )
    parts = [
        f"---\n{data.to_yaml()}\n---\n\n# {kind}",
        f"Trained by `{run.stage.section}` of rlhf-pipeline from `{with_commit(base)}` on {', '.join(sources)}. "
        f"All settings are in `{OURS}`.",
        f"```python\n{example(scores=scores, adapter=adapter, seq2seq=seq2seq)}```",
        *measured_table(run, step),
    ]
    return {"README.md": "\n\n".join(parts) + "\n"} | settings_document(settings)


def settings_document(settings: dict[str, Any]) -> dict[str, str]:
    """Return what this project says of a model folder's origin as a document, name -> JSON text."""
    return {OURS: json.dumps(settings, indent=2) + "\n"}


def saved_settings(path: str) -> dict[str, str]:
    """Return the training settings in the model folder `path` as a document, name -> JSON text: {} without any."""
    file = Path(path).expanduser() / OURS
    return {OURS: file.read_text(encoding="utf-8") if file.is_file() else "{}\n"}


def example(*, scores: bool, adapter: bool, seq2seq: bool = False) -> str:
    """Return code that loads the model of the folder where it runs and prints an answer or a score."""
    kind = "Seq2SeqLM" if seq2seq else "CausalLM"
    auto = "AutoModelForSequenceClassification" if scores else f"AutoModelFor{kind}"
    imports = f"from transformers import {auto}, AutoTokenizer\n"
    if adapter:
        auto = auto.replace("Auto", "AutoPeft", 1)
        imports = f"from peft import {auto}\nfrom transformers import AutoTokenizer\n"
    labels = ", num_labels=1" if adapter and scores else ""
    # A decoder's answer follows its prompt; an encoder-decoder model writes the answer alone.
    answer = ANSWER.replace(', inputs["input_ids"].shape[1] :', "") if seq2seq else ANSWER
    return imports + LOAD.format(auto=auto, labels=labels) + (SCORE if scores else answer)


def measured_table(run: Run, step: int) -> list[str]:
    """Return the paragraphs of a card that tell the last evaluation of held-out rows up to `step`, if there was one."""
    logged = [line for line in evaluations(run.folder) if line["step"] <= step]
    if not logged:
        return []
    last = logged[-1]
    rows = [f"| {name} | {last[name]:.4g} |" for name in last if name.startswith("eval_") and last[name] is not None]
    return [f"Measured on held-out rows at step {last['step']}:", "\n".join(["| metric | value |", "|---|---|", *rows])]


def with_commit(text: str) -> str:
    """Return a path as `shareable` does, with the commit that was read of a hub's."""
    commit = commits_read.get(parse_path(text)[0])
    return f"{shareable(text)} (commit {commit})" if commit else shareable(text)


def shareable(value: Any) -> Any:
    """Return a path, or a list of them, with local ones cut to their last component."""
    if isinstance(value, list):
        return [shareable(item) for item in value]
    return Path(value).name if value and is_local(value) else value
