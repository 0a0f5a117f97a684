"""Stages that start from an adapter folder: with LoRA its adapter goes on, else it is merged; nothing of it is lost."""

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from peft import (
    IA3Config,
    LoHaConfig,
    LoraConfig,
    PeftConfig,
    PeftModel,
    PromptTuningConfig,
    VeraConfig,
    get_peft_model,
)
from safetensors.torch import load_file, save_file
from support.command_run import run_command
from support.messages import naming
from support.tiny_models import random_rows
from support.tiny_run import make_folder, read_metrics
from transformers import AutoModelForCausalLM, AutoModelForSequenceClassification

from pipeline.configuration.groups import ModelConfig
from pipeline.engine.start_models import check_settings
from pipeline.errors import EXIT_INPUT, InputError
from pipeline.models.loading import load_causal_lm
from pipeline.models.lora import keep_start_adapter, start_model
from pipeline.models.reward_model import load_reward_model
from pipeline.models.source import ModelSource
from pipeline.models.weight_files import check_model_files
from rlhf.models import merge

ROW = random_rows(0, (12,))[0].unsqueeze(0)
SHARED = {
    "data_path": "train.jsonl", "data_split": "none", "data_output_path": "cache", "max_steps": 1, "dtype": "fp32",
    "eval_fraction": 0, "keep_checkpoints": 0, "enable_tensorboard": "false",
}  # fmt: skip
RANKS = {0: 1, 3: 2}  # of a ZeRO stage
UNCHANGED = 1e-12  # a learning rate
LORA = {"lora_dim": 2, "save_adapter_only": "true"}


def run(folder: Path, stage: str, *, ranks: int = 1, **flags: Any) -> None:
    words = [word for name, value in (SHARED | flags).items() for word in (f"--{name}", value)]
    ended = run_command(stage, words, folder=folder, ranks=ranks)
    assert ended.code == 0, ended.stderr


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with data, the models `base` and `scorer`, and `adapter`, trained on the base."""
    folder = make_folder(tmp_path_factory.mktemp("starts"), num_train=8, num_test=2)
    start = {"model_name_or_path": "base", "output_dir": "adapter", "max_seq_len": 96}
    run(folder, "step1_sft", **start, **LORA, lora_learning_rate=0.05)
    return folder


KINDS: dict[str, PeftConfig] = {
    "lora_magnitude_vector": LoraConfig(use_dora=True, target_modules=["q_proj"], task_type="CAUSAL_LM"),
    "embed_tokens": LoraConfig(target_modules=["q_proj", "embed_tokens"], task_type="CAUSAL_LM"),
    "ia3_l": IA3Config(target_modules=["k_proj"], feedforward_modules=[], task_type="CAUSAL_LM"),
}


@pytest.mark.parametrize("name", KINDS)
def test_an_adapter_that_is_not_plain_lora_is_merged_first(name: str, folder: Path, tmp_path: Path) -> None:
    """DoRA's magnitudes, for one, have no place in W + BA."""
    model: Any = AutoModelForCausalLM.from_pretrained(folder / "base")
    get_peft_model(model, KINDS[name]).save_pretrained(tmp_path)
    check_settings(ModelSource(str(tmp_path)), ModelConfig(model_name_or_path=str(tmp_path)))
    with pytest.raises(InputError, match=naming(f"{name} ... rlhf merge {tmp_path} FOLDER")):
        check_settings(ModelSource(str(tmp_path)), ModelConfig(model_name_or_path=str(tmp_path), lora_dim=2))


@pytest.mark.parametrize(
    "settings",
    [
        IA3Config(target_modules=["k_proj"], feedforward_modules=[], task_type="CAUSAL_LM", init_ia3_weights=False),
        VeraConfig(target_modules=["q_proj"], task_type="CAUSAL_LM", init_weights=False),
        LoHaConfig(target_modules=["q_proj"], task_type="CAUSAL_LM", init_weights=False),
    ],
    ids=lambda settings: settings.peft_type.value,
)
def test_adapters_of_other_kinds_are_merged_as_peft_does(settings: PeftConfig, folder: Path, tmp_path: Path) -> None:
    """Some have no fields of LoRA's configuration that hold regular expressions."""
    model: Any = get_peft_model(AutoModelForCausalLM.from_pretrained(folder / "base"), settings)
    model.save_pretrained(tmp_path)
    with torch.no_grad():
        expected, found = (
            one.eval()(ROW).logits for one in (model, load_causal_lm(str(tmp_path), dtype=torch.float32))
        )
    torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-5)
    assert not torch.allclose(found, AutoModelForCausalLM.from_pretrained(folder / "base").eval()(ROW).logits)


def test_an_adapter_that_learns_a_prompt_is_refused(folder: Path, tmp_path: Path) -> None:
    settings = PromptTuningConfig(num_virtual_tokens=3, task_type="CAUSAL_LM")
    get_peft_model(AutoModelForCausalLM.from_pretrained(folder / "base"), settings).save_pretrained(tmp_path)
    with pytest.raises(InputError, match=naming("PROMPT_TUNING ... a prompt ... LoRA")):
        load_causal_lm(str(tmp_path), dtype=torch.float32)


def test_a_reward_model_starts_from_an_adapter_that_reaches_the_head_of_the_language_model(
    folder: Path, tmp_path: Path
) -> None:
    """The head is replaced, and its adapter goes with it."""
    model: Any = AutoModelForCausalLM.from_pretrained(folder / "base")
    settings = LoraConfig(target_modules=["q_proj", "lm_head"], task_type="CAUSAL_LM")
    get_peft_model(model, settings).save_pretrained(tmp_path)
    load_causal_lm(str(tmp_path), dtype=torch.float32)
    load_reward_model(ModelSource(str(tmp_path)), dtype=torch.float32, quantization="none", new_head=True)


def test_the_weights_of_an_adapter_are_set_once(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """peft's own loading does not tell what it lacked, which was found by a second one."""
    load, times = PeftModel.load_state_dict, []
    monkeypatch.setattr(PeftModel, "load_state_dict", lambda *args, **words: times.append(1) or load(*args, **words))
    found = load_causal_lm(str(folder / "adapter"), dtype=torch.float32)
    assert len(times) == 1
    with torch.no_grad():
        logits = found(ROW).logits
    monkeypatch.undo()
    assert_still_there(folder, logits)


def test_an_adapter_of_a_reward_model_that_holds_another_head_is_refused(folder: Path, tmp_path: Path) -> None:
    model: Any = AutoModelForSequenceClassification.from_pretrained(folder / "scorer")
    settings = LoraConfig(target_modules=["q_proj"], modules_to_save=["score"], task_type="SEQ_CLS")
    get_peft_model(model, settings).save_pretrained(tmp_path)
    shutil.copy(folder / "scorer" / "config.json", tmp_path)
    load_reward_model(ModelSource(str(tmp_path)), dtype=torch.float32, quantization="none", new_head=False)
    file = tmp_path / "adapter_model.safetensors"
    save_file(load_file(file) | {"base_model.model.classifier.weight": torch.ones(1, 32)}, file)
    with pytest.raises(InputError, match=naming("1 weights ... base_model.model.classifier.weight")):
        load_reward_model(ModelSource(str(tmp_path)), dtype=torch.float32, quantization="none", new_head=False)


def test_the_base_of_an_adapter_is_found_from_any_folder(
    folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A relative path would be looked for below the working directory, and then on the hub."""
    monkeypatch.chdir(tmp_path)
    with torch.no_grad():
        assert_still_there(folder, load_causal_lm(str(folder / "adapter"), dtype=torch.float32)(ROW).logits)


def test_a_base_that_is_gone_is_told_with_the_file_that_names_it(
    folder: Path, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    adapter = Path(shutil.copytree(folder / "adapter", tmp_path / "moved"))
    config = json.loads((adapter / "adapter_config.json").read_text())
    (adapter / "adapter_config.json").write_text(json.dumps(config | {"base_model_name_or_path": f"{tmp_path}/gone"}))
    where = f"{adapter}/adapter_config.json ... base_model_name_or_path ... {tmp_path}/gone ... no such folder"
    with pytest.raises(InputError, match=naming(where)):
        check_model_files(str(adapter))
    assert merge.main([str(adapter), f"{tmp_path}/merged"]) == EXIT_INPUT
    assert capfd.readouterr().err == naming(f"--folders: {where}")


@torch.no_grad()
def by_peft(base: Path, adapter: Path | None = None) -> torch.Tensor:
    """Logits of a model, or of an adapter on its base, by transformers and peft alone."""
    model: Any = AutoModelForCausalLM.from_pretrained(base)
    return (PeftModel.from_pretrained(model, adapter) if adapter else model).eval()(ROW).logits


def assert_still_there(folder: Path, found: torch.Tensor) -> None:
    expected = by_peft(folder / "base", folder / "adapter")
    torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-5)
    assert (expected - by_peft(folder / "base")).abs().max() > 1e-2


@pytest.mark.parametrize("zero", [0, pytest.param(3, marks=pytest.mark.slow)])
def test_an_adapter_that_is_saved_alone_holds_the_one_before_it(zero: int, folder: Path) -> None:
    start = {"model_name_or_path": "adapter", "output_dir": f"second-{zero}", "max_seq_len": 96}
    run(folder, "step1_sft", **start, **LORA, lora_learning_rate=UNCHANGED, zero_stage=zero, ranks=RANKS[zero])
    assert_still_there(folder, by_peft(folder / "base", folder / f"second-{zero}"))


@pytest.mark.slow
@pytest.mark.parametrize("zero", [0, 3])
def test_without_lora_the_adapter_is_trained_as_a_part_of_the_weights(zero: int, folder: Path) -> None:
    start = {"model_name_or_path": "adapter", "output_dir": f"whole-{zero}", "max_seq_len": 96}
    run(folder, "step1_sft", **start, learning_rate=UNCHANGED, zero_stage=zero, ranks=RANKS[zero])
    assert_still_there(folder, by_peft(folder / f"whole-{zero}"))


@pytest.mark.slow
@pytest.mark.parametrize("zero", [0, 3])
def test_ppo_goes_on_with_an_adapter_whose_start_is_the_reference(zero: int, folder: Path) -> None:
    """Under ZeRO stage 3 the reference is a model of its own, whose partitioned weights get the adapter."""
    starts = {"actor_model_name_or_path": "adapter", "critic_model_name_or_path": "scorer", "actor_lora_dim": 2}
    stages = {"actor_zero_stage": zero, "critic_zero_stage": zero, "max_prompt_seq_len": 48, "max_answer_seq_len": 4}
    run(folder, "step3_ppo", **starts, **stages, output_dir=f"ppo-{zero}", save_adapter_only="true",
        actor_lora_learning_rate=UNCHANGED, ranks=RANKS[zero])  # fmt: skip
    assert_still_there(folder, by_peft(folder / "base", folder / f"ppo-{zero}" / "actor"))
    (line,) = (line for line in read_metrics(folder / f"ppo-{zero}" / "runs" / "ppo") if "objective/kl" in line)
    assert line["objective/kl"] == pytest.approx(0, abs=1e-5)


@torch.no_grad()
def test_the_adapter_that_training_began_with_stays_as_it_was(tiny_folders):
    """AdamW changes weights in place."""
    config = LoraConfig(r=2, target_modules=["q_proj", "v_proj"], task_type="CAUSAL_LM", init_lora_weights=False)
    model = get_peft_model(AutoModelForCausalLM.from_pretrained(tiny_folders["opt"]).eval(), config)
    ids = random_rows(0, (9,))[0].unsqueeze(0)
    before = model(ids).logits
    keep_start_adapter(model)
    for parameter in model.parameters():
        if parameter.requires_grad:
            parameter.add_(0.5)
    with start_model(model):
        torch.testing.assert_close(model(ids).logits, before)
    assert (model(ids).logits - before).abs().max() > 1e-3
