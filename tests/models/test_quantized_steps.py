"""Quantised bases with LoRA through the three steps, by the real commands: outputs, resume, and what is refused."""

import importlib.util
import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from support.command_run import Ended, run_command
from support.stored_nf4 import store_nf4
from support.tiny_run import make_folder, read_metrics
from transformers import AutoConfig, AutoModelForCausalLM, AutoModelForSequenceClassification, AutoTokenizer

LLAMA: dict[str, Any] = {
    "hidden_size": 64, "num_hidden_layers": 2, "num_attention_heads": 2, "num_key_value_heads": 1,
    "intermediate_size": 64, "max_position_embeddings": 128, "bos_token_id": 2, "eos_token_id": 2, "pad_token_id": 1,
    "initializer_range": 0.2,
}  # fmt: skip
SHARED = {"data_path": "train.jsonl", "eval_data_path": "test.jsonl", "data_split": "none", "dtype": "fp32",
          "data_output_path": "cache", "max_steps": 2}  # fmt: skip
HAS_BITSANDBYTES = importlib.util.find_spec("bitsandbytes") is not None
MARKS = [pytest.mark.slow, pytest.mark.skipif(not HAS_BITSANDBYTES, reason="bitsandbytes is not installed")]
NF4 = pytest.param("nf4", marks=MARKS)
STORED = pytest.param("stored", marks=MARKS)  # nf4, by transformers' own save_pretrained


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Data, and a tiny Llama as `base/`, as the reward model `scorer/`, and in 4 bits as `stored/`."""
    folder = make_folder(tmp_path_factory.mktemp("quantized"), num_train=8)
    config = AutoConfig.for_model("llama", vocab_size=len(AutoTokenizer.from_pretrained(folder / "base")), **LLAMA)
    torch.manual_seed(0)
    AutoModelForCausalLM.from_config(config).save_pretrained(folder / "base")
    if HAS_BITSANDBYTES:
        store_nf4(folder / "base", folder / "stored", bnb_4bit_use_double_quant=False)
        AutoTokenizer.from_pretrained(folder / "base").save_pretrained(folder / "stored")
    config.num_labels, config.score_mean, config.score_std = 1, 0.25, 1.5
    AutoModelForSequenceClassification.from_config(config).save_pretrained(folder / "scorer")
    return folder


def run(stage: str, folder: Path, ranks: int = 1, **flags: Any) -> Ended:
    words = [word for name, value in (SHARED | flags).items() for word in (f"--{name}", value)]
    return run_command(stage, words, folder=folder, ranks=ranks)


def base_of(kind: str) -> str:
    return "stored" if kind == "stored" else "base"


def sft(folder: Path, output: str, kind: str, *, stage: str = "step1_sft", **flags: Any) -> Ended:
    start = {"model_name_or_path": base_of(kind), "max_seq_len": 96, "output_dir": output, "lora_dim": 4}
    return run(stage, folder, **(start | {"quantization": "nf4" if kind == "stored" else kind} | flags))


def reward(folder: Path, output: str, kind: str) -> Ended:
    return sft(folder, output, kind, stage="step2_reward")


def ppo(folder: Path, output: str, kind: str, **flags: Any) -> Ended:
    kind = "nf4" if kind == "stored" else kind
    start = {
        "actor_model_name_or_path": "base", "critic_model_name_or_path": "scorer", "output_dir": output,
        "actor_quantization": kind, "critic_quantization": kind, "actor_lora_dim": 4, "critic_lora_dim": 4,
        "max_prompt_seq_len": 48, "max_answer_seq_len": 8,
    }  # fmt: skip
    return run("step3_ppo", folder, **(start | flags))


def is_adapter_alone(folder: Path) -> bool:
    return (folder / "adapter_model.safetensors").is_file() and not list(folder.glob("model*.safetensors"))


@pytest.mark.parametrize("kind", ["int8", NF4])
def test_step_1_leaves_an_adapter_alone_that_is_resumed_exactly(kind: str, folder: Path, tmp_path: Path) -> None:
    common = {"gradient_checkpointing": "true", "zero_stage": 1, "max_steps": 4, "lora_learning_rate": 0.05}
    common["lr_scheduler_type"] = "constant"
    ended = sft(folder, f"{tmp_path}/sft", kind, **common)
    assert ended.code == 0, ended.stderr
    stopped = sft(folder, f"{tmp_path}/again/sft", kind, **common | {"max_steps": 2})
    resumed = sft(folder, f"{tmp_path}/again/sft", kind, **common)
    assert (stopped.code, resumed.code) == (0, 0), resumed.stderr
    assert is_adapter_alone(tmp_path / "sft") and not (tmp_path / "sft" / "adapter").exists()
    weights, again = (load_file(tmp_path / name / "adapter_model.safetensors") for name in ("sft", "again/sft"))
    assert max(weight.abs().max() for name, weight in weights.items() if "lora_B" in name) > 0
    assert weights.keys() == again.keys() and all(weights[name].equal(again[name]) for name in weights)


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["int8", NF4])
def test_two_ranks_at_zero_stage_2_train_what_one_does(kind: str, folder: Path, tmp_path: Path) -> None:
    for ranks, batch in ((1, 8), (2, 4)):
        ended = sft(folder, f"{tmp_path}/{ranks}/sft", kind, ranks=ranks, zero_stage=ranks,
                    per_device_train_batch_size=batch)  # fmt: skip
        assert ended.code == 0, ended.stderr
    first, second = (load_file(tmp_path / name / "sft" / "adapter_model.safetensors") for name in ("1", "2"))
    assert max(weight.abs().max() for name, weight in first.items() if "lora_B" in name) > 0
    torch.testing.assert_close(first, second, rtol=1e-3, atol=1e-5)


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["int8", NF4, STORED])
def test_step_3_goes_on_with_adapters_on_shared_bases(kind: str, folder: Path, tmp_path: Path) -> None:
    """Actor and reference are one model, critic and reward model another; the sampler's log-probabilities are the
    trainer's. The adapters that steps 1 and 2 left go on, and what is saved belongs to the first base."""
    for ended in (sft(folder, f"{tmp_path}/sft", kind), reward(folder, f"{tmp_path}/reward", kind)):
        assert ended.code == 0, ended.stderr
    assert is_adapter_alone(tmp_path / "reward")
    starts = {"actor_model_name_or_path": f"{tmp_path}/sft", "critic_model_name_or_path": f"{tmp_path}/reward"}
    starts |= {"critic_zero_stage": 1, "lr_scheduler_type": "constant", "actor_lora_learning_rate": 0.01}
    runs = (f"{tmp_path}", 2), (f"{tmp_path}/resumed", 1), (f"{tmp_path}/resumed", 2)
    for output, steps in runs:
        ended = ppo(folder, output, kind, **starts, max_steps=steps)
        assert ended.code == 0, ended.stderr
    first, second = (line for line in read_metrics(tmp_path / "runs" / "ppo") if "policy/sampler_error" in line)
    assert first["policy/sampler_error"] < 1e-5 and second["policy/sampler_error"] < 1e-5
    assert first["policy/first_ratio_error"] == 0 and first["objective/kl"] == pytest.approx(0, abs=1e-6)
    for name, start in (("actor", "sft"), ("critic", "reward")):
        assert is_adapter_alone(tmp_path / name)
        adapter = json.loads((tmp_path / name / "adapter_config.json").read_text())
        assert adapter["base_model_name_or_path"] == str((folder / base_of(kind)).resolve())
        before, after = (load_file(tmp_path / folder / "adapter_model.safetensors") for folder in (start, name))
        assert before.keys() == after.keys() and any(not before[key].equal(after[key]) for key in before)
        resumed = load_file(tmp_path / "resumed" / name / "adapter_model.safetensors")
        assert all(after[key].equal(resumed[key]) for key in after)
    assert second["objective/kl"] != 0
