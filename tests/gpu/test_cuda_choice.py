"""Flags that are `auto` on a CUDA device: the plan chooses them, a resumed run keeps them, all ranks have the same."""

import json
import re
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from support.cuda_stage import log_of, note_settings, run_folder, run_stage
from support.tiny_run import make_folder, opt_config
from transformers import AutoTokenizer, OPTForCausalLM

from pipeline.device import store_constants
from pipeline.run.measure_device import measure, used_bytes

pytestmark = pytest.mark.gpu

ROWS, LIMITED_ROWS, LIMIT_GIB = 32, 64, 2.5
# Planned without recomputation for LIMITED_ROWS rows of 512 tokens at once: 3.5 to 4.3 GiB, with CUDA's own.
SHAPE = {
    "hidden_size": 512, "num_hidden_layers": 4, "num_attention_heads": 8, "ffn_dim": 4096, "word_embed_proj_dim": 512,
    "max_position_embeddings": 512, "init_std": 0.02,
}  # fmt: skip
# Nothing of how a step is cut; `None` leaves out what `run_stage` gives.
UNCUT: dict[str, Any] = {"dtype": "bf16", "per_device_train_batch_size": None}
CHOSEN = {
    "sft": {"per_device_train_batch_size": ROWS, "gradient_accumulation_steps": 1, "gradient_checkpointing": False},
    "ppo": {
        "per_device_train_batch_size": ROWS, "gradient_accumulation_steps": 1,
        "per_device_generation_batch_size": ROWS, "actor_gradient_checkpointing": False,
        "critic_gradient_checkpointing": False,
    },
}  # fmt: skip


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = make_folder(tmp_path_factory.mktemp("choice"), num_train=4 * ROWS)
    tokenizer = AutoTokenizer.from_pretrained(folder / "base")
    torch.manual_seed(3)
    OPTForCausalLM(opt_config(len(tokenizer), **SHAPE)).save_pretrained(folder / "large")
    tokenizer.save_pretrained(folder / "large")
    return folder


@pytest.fixture(autouse=True)
def unmeasured(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Plans take the data sheet's figures, whatever was measured on this machine."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "user"))


def uncut(stage: str, rows: int) -> dict[str, Any]:
    """Flags of a run whose optimizer step has so many rows, and that says nothing else of its cut."""
    ppo = {"per_device_generation_batch_size": None, "ppo_epochs": None} if stage == "ppo" else {}
    return UNCUT | ppo | {"train_batch_size": rows}


def settings_of(stage: str, folder: Path, output: str) -> dict[str, dict[str, Any]]:
    """Value and origin of each flag."""
    found: dict[str, dict[str, Any]] = json.loads((run_folder(stage, folder, output) / "config.json").read_text())
    return found


def chosen_in(settings: dict[str, dict[str, Any]]) -> dict[str, Any]:
    """The values that the plan chose, all of them for the same GPUs."""
    chosen = {name: entry for name, entry in settings.items() if entry["from"].startswith("chosen for ")}
    assert len({entry["from"] for entry in chosen.values()}) == 1, chosen
    return {name: entry["value"] for name, entry in chosen.items()}


@pytest.mark.parametrize("stage", ["sft", "ppo"])
def test_a_run_without_flags_of_its_cut_has_those_of_the_plan_and_keeps_them(folder, stage):
    """Without a choice a step of 32 rows has two micro-batches of 16, and 16 prompts are sampled at once."""
    flags = uncut(stage, ROWS) | {"keep_checkpoints": 1}
    lines = run_stage(stage, folder, "chosen", **flags)
    settings = settings_of(stage, folder, "chosen")
    here = rf"chosen for 1 x {re.escape(torch.cuda.get_device_name(0))}, [\d.]+ GiB each"
    assert re.fullmatch(here, settings["per_device_train_batch_size"]["from"])
    first = chosen_in(settings)
    assert first.items() >= CHOSEN[stage].items() and "per_device_eval_batch_size" in first
    assert [line["micro_batch_size"] for line in lines] == [ROWS] * 2
    (said,) = re.findall(r"chosen by the plan: (.*)", log_of(stage, folder, "chosen"))
    assert f"--per-device-train-batch-size {ROWS} " in said and said.endswith(" GiB by the plan)")
    if stage == "sft":  # as `rlhf train --check` does in between, by which its memory is known better
        store_constants(measure(torch.device("cuda"), used_bytes()))
    run_stage(stage, folder, "chosen", **flags, max_steps=3)
    resumed = settings_of(stage, folder, "chosen")
    assert chosen_in(resumed) == first
    again = re.findall(r"chosen by the plan: (.*)", log_of(stage, folder, "chosen"))[1:]
    assert len(again) == 1 and again[0].endswith(" (as the run began)"), again
    if stage == "ppo":  # one step a rollout, in 16 bits, by the fused backend
        assert settings["old_log_probs"] == resumed["old_log_probs"]
        assert settings["old_log_probs"]["value"] == "sampler"


def test_the_choice_is_within_the_limit(folder):
    flags = uncut("sft", LIMITED_ROWS) | {"model_name_or_path": "large", "max_seq_len": 512}
    lines = run_stage("sft", folder, "limited", **flags, gpu_memory_gib=LIMIT_GIB)
    chosen, log = chosen_in(settings_of("sft", folder, "limited")), log_of("sft", folder, "limited")
    cut = chosen["per_device_train_batch_size"], chosen["gradient_accumulation_steps"]
    assert cut[0] * cut[1] == LIMITED_ROWS and (cut[0], chosen["gradient_checkpointing"]) != (LIMITED_ROWS, False)
    (high,) = re.findall(r"chosen by the plan: .* to ([\d.]+) GiB by the plan\)", log)
    assert float(high) <= LIMIT_GIB
    assert [line["micro_batch_size"] for line in lines] == [cut[0]] * 2 and "out of memory" not in log
    assert all(line["gpu_reserved_gib"] <= LIMIT_GIB for line in lines)


@pytest.mark.two_gpus
@pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two CUDA devices")
@pytest.mark.parametrize("stage", ["sft", "ppo"])
def test_two_ranks_have_the_same_settings(folder, tmp_path, stage):
    first = partial(note_settings, tmp_path)
    run_stage(stage, folder, "two", ranks=2, first=first, **uncut(stage, 2 * ROWS))
    ranks = [json.loads((tmp_path / f"settings-{rank}.json").read_text()) for rank in range(2)]
    assert ranks[0] == ranks[1] and len(ranks[0]) > 50
    assert chosen_in(ranks[0]).items() >= CHOSEN[stage].items()
    assert chosen_in(ranks[0]) == chosen_in(settings_of(stage, folder, "two"))
    assert ranks[0]["per_device_train_batch_size"]["from"].startswith("chosen for 2 x ")
