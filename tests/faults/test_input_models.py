"""Broken model folders, wrong paths, and tokenizers that are not the model's: one line, before rows are tokenised."""

import errno
import importlib.util
import json
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from broken_models import BROKEN, MISSING, WEIGHTS, Broken, config, make, tokenizer
from input_calls import Ending, call, stage_words, stopped_at_the_models
from safetensors.torch import load_file, save_file
from support.messages import naming

from pipeline.errors import dashed
from pipeline.models.loading import load_causal_lm
from pipeline.models.reward_model import load_reward_model
from pipeline.models.source import ModelSource

FOLDER_SIZES = {"num_train": 12, "num_test": 2}
FLAG = {"sft": "model_name_or_path", "reward": "model_name_or_path", "chat": "path", "prompt_eval": "models"}


def value_for(command: str, path: object, folder: Path) -> object:
    return [folder / "base", path] if command == "prompt_eval" else path


def refusal(ending: Ending) -> str:
    assert ending.code == 2 and len(ending.errors) == 1, ending.stderr
    return ending.errors[0]


# Only step 1's loader is asked where the weights alone show it: a reward model may go on from a reward model.
PAIRS = [
    pytest.param(name, command, marks=[] if command == "sft" else pytest.mark.faults)
    for name in BROKEN
    for command in FLAG
    if command != "reward" or not BROKEN[name].at_load
]


@pytest.mark.parametrize(("name", "command"), PAIRS)
def test_a_broken_model_folder(
    name: str, command: str, folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    broken, path = BROKEN[name], make(name, folder, tmp_path)
    words = stage_words(command, folder, tmp_path / "out", **{FLAG[command]: value_for(command, path, folder)})
    if broken.at_load:
        ending = call(command, words)
    else:
        with stopped_at_the_models(monkeypatch):
            ending = call(command, words)
    line = refusal(ending)
    assert str(path) in line and broken.says.format(path=path) in line


def test_layers_beyond_those_of_the_configuration_are_told_of(
    folder: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """An odd folder, and right: the first layers of a model are a start that people take."""
    transformers.logging.set_verbosity_error()  # as runs have it
    path = shutil.copytree(folder / "base", tmp_path / "short")
    config(num_hidden_layers=1)(path)
    assert load_causal_lm(str(path), dtype=torch.float32).config.num_hidden_layers == 1
    (line,) = caplog.messages
    says = naming(f"{path} ... 16 weights ... config.json ... model.decoder.layers.1")
    assert line == says
    caplog.clear()
    load_causal_lm(str(folder / "base"), dtype=torch.float32)
    load_reward_model(ModelSource(str(folder / "base")), dtype=torch.float32, new_head=True)
    assert not caplog.messages


def test_weights_that_may_not_be_read_are_not_called_cut_short(
    folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = shutil.copytree(folder / "base", tmp_path / "closed")
    opened = Path.open

    def refuse(file: Path, *mode: str, **words: Any) -> Any:  # root may read all
        if file == path / WEIGHTS:
            raise PermissionError(errno.EACCES, "Permission denied")
        return opened(file, *mode, **words)

    monkeypatch.setattr(Path, "open", refuse)
    with stopped_at_the_models(monkeypatch):
        ending = call("sft", stage_words("sft", folder, tmp_path / "out", model_name_or_path=path))
    assert refusal(ending) == naming(f"error: {path / WEIGHTS} ... Permission denied")


def test_a_link_that_leads_out_of_a_models_folder_is_named(
    folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """`tokenizer.model` is copied into the saved model."""
    path = shutil.copytree(folder / "base", tmp_path / "linked")
    (tmp_path / "secret").write_text("key")
    (path / "tokenizer.model").symlink_to(tmp_path / "secret")
    with stopped_at_the_models(monkeypatch):
        ending = call("sft", stage_words("sft", folder, tmp_path / "out", model_name_or_path=path))
    assert ending.stderr == naming(f"{path}/tokenizer.model: a link ... {tmp_path}/secret")


# Fault 24: what is looked for, where, and the nearest one that exists.
PATHS = {
    "{folder}/bse": "no such folder ... {folder}/base?",
    "{folder}/Base": "no such folder ... {folder}/base?",
    "{folder}/deep/er/model": "no such folder ... {folder}",
    "./bse": "no such folder ... base?",
    "../nowhere/base": "no such folder",
    "output/sft": "no such folder",
    "~/no/such/model": "no such folder",
    "{folder}/train.jsonl": "a file ... a model's folder",
    "{folder}": "no model (no config.json) ... {folder}/",
    "": "--model-name-or-path ... no model ... a hub id",
}


@pytest.mark.parametrize("text", PATHS)
def test_a_wrong_path(text: str, folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Never asks the hub for what looks local: sockets are not even there in `stopped_at_the_models`."""
    monkeypatch.chdir(folder)
    path = text.format(folder=folder)
    with stopped_at_the_models(monkeypatch):
        line = refusal(call("sft", stage_words("sft", folder, tmp_path, model_name_or_path=path)))
    assert line == naming(PATHS[text].format(folder=folder))


# Fault 23: (what is done to the actor's folder, what the line says or a warning, None: nothing).
VOCABULARIES: dict[str, tuple[Broken, str, bool]] = {
    "rows for every token": (Broken(lambda folder: None, ""), "", True),
    "pad is EOS": (Broken(tokenizer(pad_token="</s>"), ""), "padding with", True),
    "no pad": (Broken(tokenizer(pad_token=None), ""), "", True),
    "pad beyond the vocabulary": (Broken(tokenizer(pad_token="<new>"), ""), "do not belong together", False),
    "BOS beyond the vocabulary": (Broken(tokenizer(bos_token="<new>"), ""), "do not belong together", False),
    "EOS of the model is another": (Broken(config(eos_token_id=3), ""), "id [3], the tokenizer with 2", True),
    "EOS of the model is a list": (Broken(config(eos_token_id=[2, 3]), ""), "", True),
    "EOS of the tokenizer is another": (Broken(tokenizer(eos_token="<unk>"), ""), "the tokenizer with 3 (<unk>)", True),
}  # fmt: skip


@pytest.mark.parametrize("name", VOCABULARIES)
def test_a_tokenizer_and_its_model(name: str, folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    broken, says, fits = VOCABULARIES[name]
    path = shutil.copytree(folder / "base", tmp_path / "model")
    broken.change(path)
    with stopped_at_the_models(monkeypatch):
        ending = call("sft", stage_words("sft", folder, tmp_path / "out", model_name_or_path=path))
    if not fits:
        assert says in refusal(ending)
        return
    assert ending.loaded, ending.stderr
    assert says in ending.stderr and (says or "the tokenizer with" not in ending.stderr)


def other_tokens(path: Path) -> None:
    """Two entries of the vocabulary change their places: same size, other meaning."""
    file = path / "tokenizer.json"
    content = json.loads(file.read_text(encoding="utf-8"))
    vocabulary = content["model"]["vocab"]
    first, second = (token for token, number in vocabulary.items() if number in (300, 301))
    vocabulary[first], vocabulary[second] = vocabulary[second], vocabulary[first]
    file.write_text(json.dumps(content), encoding="utf-8")


@pytest.mark.parametrize(
    ("flag", "says"),
    [("critic_model_name_or_path", "its tokenizer is not"), ("reward_model_name_or_path", "")],
)
def test_step_3_and_a_scorer_with_another_tokenizer(
    flag: str, says: str, folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A critic reads the actor's ids; a reward model is given text."""
    path = shutil.copytree(folder / "scorer", tmp_path / "scorer")
    other_tokens(path)
    with stopped_at_the_models(monkeypatch):
        ending = call("ppo", stage_words("ppo", folder, tmp_path / "out", **{flag: path}))
    if says:
        assert says in refusal(ending)
    else:
        assert ending.loaded and "reads responses from text" in ending.stderr


def test_prompt_eval_takes_models_of_other_vocabularies(folder: Path, tmp_path: Path) -> None:
    """DeepSpeed-Chat's prompt_eval decodes both models' answers with one tokenizer (its issue 280)."""
    path = shutil.copytree(folder / "base", tmp_path / "other")
    other_tokens(path)
    ending = call("prompt_eval", stage_words("prompt_eval", folder, tmp_path, model=[folder / "base", path]))
    assert ending.code == 0, ending.stderr


@pytest.mark.parametrize("path", ["{folder}/base", "{folder}/none", "{folder}"])
def test_prompt_eval_looks_at_the_reward_model_before_it_answers(
    path: str, folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    words = stage_words("prompt_eval", folder, tmp_path, reward_model=path.format(folder=folder))
    with stopped_at_the_models(monkeypatch):
        assert "--reward-model: " in refusal(call("prompt_eval", words))


SCORERS = {
    "two labels": (config(id2label=MISSING, label2id=MISSING), "2 labels ... a reward model has 1"),
    "three labels": (config(id2label={"0": "a", "1": "b", "2": "c"}), "its head has 3 labels"),
    "std 0": (config(score_std=0), "config.json: score_std 0 ... stage 2"),
    "std of nearly 0": (config(score_std=1e-300), "config.json: score_std 1e-300"),
    "mean beyond fp32": (config(score_mean=-1e300), "config.json: score_mean -1e+300"),
    "std NaN": (config(score_std=float("nan")), "config.json: score_std nan cannot"),
    "std as a word": (config(score_std="1"), "config.json: score_std 1 cannot"),
    "mean inf": (config(score_mean=float("inf")), "config.json: score_mean inf cannot"),
}


@pytest.mark.parametrize("command", ["critic", "reward", "prompt_eval", "reward_eval"])
@pytest.mark.parametrize("name", SCORERS)
def test_a_reward_model_without_one_score_that_can_be_normalised(
    name: str, command: str, folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Before rows are read, and before transformers prints a table of weights that do not fit."""
    change, says = SCORERS[name]
    path = shutil.copytree(folder / "judge", tmp_path / "judge")
    change(path)
    flags = {"critic": "critic_model_name_or_path", "reward": "reward_model_name_or_path", "reward_eval": "model"}
    command_name = "ppo" if command in ("critic", "reward") else command
    words = stage_words(command_name, folder, tmp_path / "out", **{flags.get(command, "reward_model"): path})
    with stopped_at_the_models(monkeypatch):
        ending = call(command_name, words)
    assert refusal(ending) == naming(f"{dashed(flags.get(command, 'reward_model'))}: {path}: ... {says}")
    assert ending.counts == [] and "LOAD REPORT" not in ending.stderr


def test_a_classifier_of_two_labels_is_no_start_of_a_reward_model(folder: Path, tmp_path: Path) -> None:
    path = shutil.copytree(folder / "scorer", tmp_path / "classifier")
    config(id2label=MISSING, label2id=MISSING)(path)
    ending = call("reward", stage_words("reward", folder, tmp_path / "out", model_name_or_path=path))
    assert "its head has 2 labels" in refusal(ending)


# Command, the flag that names the model, the tensor that is spoiled.
NOT_FINITE = [
    ("sft", "model_name_or_path", "model.decoder.layers.1.fc1.weight"),
    ("reward", "model_name_or_path", "model.decoder.embed_tokens.weight"),
    ("dpo", "model_name_or_path", "model.decoder.layers.0.fc2.weight"),
    ("ppo", "actor_model_name_or_path", "model.decoder.final_layer_norm.bias"),
    ("ppo", "critic_model_name_or_path", "score.weight"),
    ("ppo", "reward_model_name_or_path", "score.weight"),
    ("chat", "path", "model.decoder.layers.0.self_attn.q_proj.bias"),
    ("prompt_eval", "models", "model.decoder.layers.1.fc2.weight"),
    ("prompt_eval", "reward_model", "score.weight"),
    ("reward_eval", "path", "score.weight"),
]


@pytest.mark.parametrize(("command", "flag", "tensor"), NOT_FINITE)
def test_a_model_whose_weights_are_not_finite(
    command: str, flag: str, tensor: str, folder: Path, tmp_path: Path
) -> None:
    path, number = tmp_path / "spoiled", float("inf" if "bias" in tensor else "nan")
    shutil.copytree(folder / ("judge" if tensor == "score.weight" else "base"), path)
    weights = load_file(path / WEIGHTS)
    weights[tensor].view(-1)[-1] = number
    save_file(weights, path / WEIGHTS, metadata={"format": "pt"})
    words = stage_words(
        command, folder, tmp_path / "out", **{flag: [folder / "base", path] if flag == "models" else path}
    )
    assert refusal(call(command, words)) == naming(f"error: {path / WEIGHTS} ... {tensor} ... NaN or infinity")
    assert not list((tmp_path / "out").rglob("*.safetensors"))


@pytest.mark.parametrize("method", ["gptq", "fp8"])
@pytest.mark.parametrize("command", ["sft", "reward", "ppo", "dpo"])
def test_a_start_model_that_another_program_quantised(
    command: str, method: str, folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """transformers asks for a package, or loads weights without gradients, after all rows are tokenised."""
    path, prefix = tmp_path / "base", "actor_" if command == "ppo" else ""
    shutil.copytree(folder / "base", path)
    config(quantization_config={"quant_method": method, "bits": 4})(path)
    with stopped_at_the_models(monkeypatch):
        ending = call(command, stage_words(command, folder, tmp_path, **{f"{prefix}model_name_or_path": path}))
    says = naming(f"{path} ... stored as {method} ... quantization_config")
    assert refusal(ending) == says and f"{dashed(prefix)}quantization int8 or nf4" in refusal(ending)


FLASH = {
    "sft": ["attn_implementation"],
    "reward": ["attn_implementation"],
    "dpo": ["attn_implementation"],
    "ppo": ["actor_attn_implementation", "critic_attn_implementation"],
}


@pytest.mark.parametrize(("command", "flag"), [(command, flag) for command in FLASH for flag in FLASH[command]])
def test_a_flash_kernel_that_is_not_installed(
    command: str, flag: str, folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert importlib.util.find_spec("flash_attn") is None
    with stopped_at_the_models(monkeypatch):
        ending = call(command, stage_words(command, folder, tmp_path, **{flag: "flash_attention_2"}))
    assert ending.code == 3 and ending.counts == []
    assert ending.errors == [naming(f"error: {dashed(flag)} flash_attention_2 ... flash_attn ... {dashed(flag)} sdpa")]


@pytest.mark.parametrize("path", ["{folder}/base", "{folder}/none"])
def test_reward_evaluation_needs_a_reward_model(path: str, folder: Path, tmp_path: Path) -> None:
    words = stage_words("reward_eval", folder, tmp_path, model=path.format(folder=folder))
    assert path.format(folder=folder) in refusal(call("reward_eval", words))
