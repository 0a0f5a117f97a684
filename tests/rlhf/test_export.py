"""`rlhf export --dtype int8`: what is stored is what quantising while loading gives, and is trained on so."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from support.command_run import run_command
from support.messages import naming
from support.tiny_models import NAMES, save_tiny
from support.tiny_run import make_folder
from support.tiny_t5 import make_t5_folder

from pipeline.configuration.groups import ModelConfig
from pipeline.engine.start_models import check_settings
from pipeline.errors import EXIT_DONE, EXIT_INPUT, InputError
from pipeline.files import OURS
from pipeline.kernels import int8_linear
from pipeline.models.loading import load_causal_lm, load_language_model
from pipeline.models.lora import STORED_INT8_ENTRY, add_lora, is_lora, quantization_of
from pipeline.models.reward_model import load_reward_model
from pipeline.models.source import ModelSource
from rlhf.models import merge
from rlhf.models.export import main

INT8: Any = {"dtype": torch.bfloat16, "quantization": "int8"}


def exported(source: str, output: Path) -> str:
    assert main([source, "--output", str(output), "--dtype", "int8"]) == EXIT_DONE
    return str(output)


def assert_same_weights(mine: torch.nn.Module, theirs: torch.nn.Module) -> None:
    found, expected = mine.state_dict(), theirs.state_dict()
    assert found.keys() == expected.keys()
    assert [name for name in found if found[name].dtype != expected[name].dtype] == []
    assert [name for name in found if not found[name].equal(expected[name])] == []


@pytest.fixture
def only_on_meta(monkeypatch: pytest.MonkeyPatch) -> None:
    """No weight is quantised: there is no 16-bit one."""
    inner = int8_linear.quantise_rows

    def quantise(weight: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        assert weight.is_meta
        return inner(weight)

    monkeypatch.setattr(int8_linear, "quantise_rows", quantise)


@pytest.mark.parametrize("name", [*NAMES, "opt-reward", "t5"])
def test_stored_codes_are_those_of_quantising_while_loading(
    name: str, tiny_folders: dict[str, str], tmp_path: Path, request: pytest.FixtureRequest
) -> None:
    source = str(make_t5_folder(tmp_path / "made") / "t5") if name == "t5" else tiny_folders[name]
    scores = name.endswith("reward")
    load: Any = load_reward_model if scores else load_language_model
    folder, expected = exported(source, tmp_path / "int8"), load(ModelSource(source), **INT8)
    request.getfixturevalue("only_on_meta")
    found = load(ModelSource(folder), **INT8)
    assert_same_weights(found, expected)
    frozen = [weight for name, weight in found.named_parameters() if name.endswith(".scale")]
    assert frozen and not any(weight.requires_grad for weight in frozen)
    stored = load_file(f"{folder}/model.safetensors")
    assert len(frozen) == sum(weight.dtype == torch.int8 for weight in stored.values())
    entry = json.loads(Path(folder, "config.json").read_text())["quantization_config"]
    assert entry == STORED_INT8_ENTRY and Path(folder, OURS).is_file()
    if not scores:
        assert quantization_of(load_language_model(ModelSource(folder), dtype=torch.bfloat16)) == "int8", (
            "chat loads it as it is stored"
        )


@pytest.mark.slow
def test_training_on_stored_codes_is_training_on_quantised_weights(tmp_path: Path) -> None:
    folder = make_folder(tmp_path, num_train=8)
    exported(str(folder / "base"), folder / "int8")
    for base in ("base", "int8"):
        flags = {"model_name_or_path": base, "quantization": "int8", "lora_dim": 4, "dtype": "bf16", "max_steps": 2,
                 "lora_learning_rate": 0.05, "data_path": "train.jsonl", "data_split": "none", "max_seq_len": 96,
                 "output_dir": f"out-{base}"}  # fmt: skip
        ended = run_command(
            "step1_sft", [w for name, value in flags.items() for w in (f"--{name}", value)], folder=folder
        )
        assert ended.code == 0, ended.stderr
    first, second = (load_file(folder / f"out-{base}" / "adapter_model.safetensors") for base in ("base", "int8"))
    assert max(weight.abs().max() for name, weight in first.items() if "lora_B" in name) > 0
    assert all(first[name].equal(second[name]) for name in first)


@pytest.fixture(scope="module")
def made(bpe_folder: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A model `base`, its codes `int8`, an `adapter` on them, and the folder of a `run`."""
    folder = tmp_path_factory.mktemp("export")
    int8 = exported(save_tiny("llama", bpe_folder, folder / "base"), folder / "int8")
    settings: Any = {"dim": 2, "alpha": 4, "dropout": 0.0, "module_name": "all-linear", "only_lora": True, "seed": 0}
    model = add_lora(load_causal_lm(int8, **INT8), task="CAUSAL_LM", **settings)
    model.peft_config["default"].base_model_name_or_path = int8
    model.save_pretrained(folder / "adapter")
    (folder / "run/checkpoints").mkdir(parents=True)
    return folder


def test_an_adapter_on_stored_codes_stays_apart(made: Path) -> None:
    model = load_causal_lm(str(made / "adapter"), dtype=torch.bfloat16)
    assert is_lora(model) and quantization_of(model) == "int8"


def test_codes_are_no_16_bit_weights(made: Path) -> None:
    with pytest.raises(InputError, match=naming("int8 ... stored as int8 ... --quantization int8, with LoRA")):
        load_causal_lm(str(made / "int8"), dtype=torch.bfloat16, quantization="none")
    for base in ("int8", "adapter"):
        with pytest.raises(
            InputError, match=naming("int8 ... stored as int8 ... --actor-quantization int8, with LoRA")
        ):
            check_settings(ModelSource(str(made / base)), ModelConfig(), "actor_")


@pytest.mark.parametrize(
    ("command", "words", "message"),
    [
        (main, ["{made}/base", "--output", "{made}/int8"], "--output ... {made}/int8 ... new folder"),
        (
            main,
            ["{made}/adapter", "--output", "{made}/new"],
            "--checkpoint ... {made}/adapter ... `rlhf merge`",
        ),
        (main, ["{made}/none", "--output", "{made}/new"], "--checkpoint: {made}/none: no such folder"),
        (
            main,
            ["{made}/run", "--output", "{made}/new"],
            "--dtype int8 ... {made}/run, a folder of a run",
        ),
        (
            merge.main,
            ["{made}/adapter", "{made}/new", "--quantization", "none"],
            "{made}/int8 ... int8 ... --quantization int8",
        ),
    ],
)
def test_what_cannot_be_is_one_line(
    command: Any, words: list[str], message: str, made: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    words += ["--dtype", "int8"] if command is main else []
    assert command([word.format(made=made) for word in words]) == EXIT_INPUT
    error = capsys.readouterr().err.strip()
    assert error == naming(message.format(made=made)) and "\n" not in error
