"""`--gpu-memory-gib` on a CUDA device: what is free, what torch's allocator gives out, and runs that keep to it."""

import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from support.command_run import run_command
from support.messages import naming
from support.tiny_run import make_folder, opt_config, read_metrics
from transformers import AutoTokenizer, OPTForCausalLM, OPTForSequenceClassification

from pipeline import cache_memory
from pipeline.cache_memory import limit_memory, memory_of
from pipeline.device import bytes_of_cuda, stored_constants
from pipeline.files import GIB
from pipeline.out_of_memory import memory_line

pytestmark = pytest.mark.gpu
ROWS = 128
# Large enough that the batch takes more than weights, workspaces and the graph of a decode step.
SHAPE = {
    "hidden_size": 512, "num_hidden_layers": 4, "num_attention_heads": 8, "ffn_dim": 4096, "word_embed_proj_dim": 512,
    "max_position_embeddings": 512, "init_std": 0.02,
}  # fmt: skip


@pytest.fixture
def device() -> Iterator[torch.device]:
    """The first GPU, with nothing reserved but what other tests still hold; its limit is taken back."""
    torch.cuda.empty_cache()
    yield torch.device("cuda", 0)
    torch.cuda.set_per_process_memory_fraction(1.0, 0)
    cache_memory._limit = None
    torch.cuda.empty_cache()


def test_free_memory_goes_down_with_what_this_process_holds_and_comes_back(device):
    held = torch.cuda.memory_allocated(device)
    limit_memory(4 + held / GIB, device, outside=GIB)
    before, total = memory_of(device)
    assert before == pytest.approx(3 * GIB, abs=2**20) and total == int((4 + held / GIB) * GIB)
    ballast = torch.empty(2 * GIB, dtype=torch.uint8, device=device)
    assert memory_of(device)[0] == pytest.approx(GIB, abs=2**22)
    del ballast
    assert memory_of(device)[0] == pytest.approx(before, abs=2**22), "torch keeps the block, which is free for us"


def test_more_than_the_limit_is_an_out_of_memory_error_that_names_the_flag(device):
    limit_memory(2 + torch.cuda.memory_reserved(device) / GIB, device, outside=GIB // 2)
    torch.empty(GIB, dtype=torch.uint8, device=device)
    torch.cuda.empty_cache()
    with pytest.raises(torch.OutOfMemoryError) as error:
        torch.empty(2 * GIB, dtype=torch.uint8, device=device)
    taken = "2.00 GiB ... taken of ... allowed (--gpu-memory-gib) ... free of"
    assert memory_line(error.value) == naming("out of memory", taken)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = make_folder(tmp_path_factory.mktemp("limited"), num_train=ROWS)
    tokenizer = AutoTokenizer.from_pretrained(folder / "base")
    torch.manual_seed(3)
    OPTForCausalLM(opt_config(len(tokenizer), **SHAPE)).save_pretrained(folder / "base")
    OPTForSequenceClassification(opt_config(len(tokenizer), num_labels=1, **SHAPE)).save_pretrained(folder / "scorer")
    return folder


def steps_of(folder: Path, out: Path, gib: float, **changes: Any) -> tuple[list[dict[str, Any]], str]:
    """The lines of three steps of stage 3 within a limit, and the log."""
    flags = {
        "actor_model_name_or_path": folder / "base", "critic_model_name_or_path": folder / "scorer",
        "data_path": folder / "train.jsonl", "eval_data_path": folder / "test.jsonl", "data_split": "none",
        "data_output_path": folder / "cache", "output_dir": out, "max_prompt_seq_len": 64, "max_answer_seq_len": 256,
        "max_steps": 3, "per_device_generation_batch_size": ROWS, "per_device_train_batch_size": ROWS, "dtype": "bf16",
        "keep_checkpoints": 0, "enable_tensorboard": "false", "gpu_memory_gib": gib,
        "actor_gradient_checkpointing": "false", "critic_gradient_checkpointing": "false", "old_log_probs": "trainer",
        "per_device_eval_batch_size": 16,
    } | changes  # fmt: skip
    words = [str(word) for name, value in flags.items() for word in (f"--{name}", value)]
    ended = run_command("step3_ppo", words, folder=folder)
    assert ended.code == 0, ended.stderr[-2000:]
    lines = [line for line in read_metrics(out / "runs/ppo") if "step_s" in line]
    assert [line["step"] for line in lines] == [1, 2, 3] and all(line["skipped_updates"] == 0 for line in lines)
    return lines, (out / "runs/ppo/log.txt").read_text()


def test_a_run_stays_within_its_limit_and_halves_its_batch_for_it(folder: Path, tmp_path: Path):
    """Beside CUDA's own it gets six tenths of the tensors that an update of the whole batch holds at once."""
    whole, _ = steps_of(folder, tmp_path / "whole", 0, release_inference_cache="true")
    allowed = 0.6 * max(line["memory/train_gib"] for line in whole)
    limit = round(allowed + bytes_of_cuda(stored_constants(), 1)[0] / GIB, 3)
    lines, log = steps_of(folder, tmp_path / "limited", limit, release_inference_cache="true")
    print(allowed, [line["gpu_reserved_gib"] for line in whole + lines], log)
    assert [line["micro_batch_size"] for line in whole] == [ROWS] * 3
    assert all(line["gpu_reserved_gib"] <= allowed + 0.01 for line in lines)
    assert all(line["micro_batch_size"] < ROWS for line in lines)
    assert re.search(r"phase train: out of memory: .* allowed \(--gpu-memory-gib\), .*: done again with", log)
    free = [float(gib) for gib in re.findall(r"generation: ([\d.]+) GiB are free, for a KV cache", log)]
    assert free and max(free) <= allowed and "has no effect" not in log


def test_a_limit_above_the_device_ends_with_3_before_rows_are_read(folder: Path, tmp_path: Path):
    total, name = torch.cuda.mem_get_info(0)[1] / GIB, torch.cuda.get_device_name(0)
    given = f"{total + 1:.2f}"
    words = ["--model-name-or-path", "base", "--data-path", "train.jsonl", "--output-dir", str(tmp_path / "out")]
    ended = run_command("step1_sft", [*words, "--gpu-memory-gib", given], folder=folder)
    asked = re.escape(f"--gpu-memory-gib {float(given):g}: {name} has ")
    found = re.search(rf"error: {asked}([\d.]+) GiB; give less, or 0 for all of it\n", ended.stderr)
    assert ended.code == 3 and found and 0.9 * total < float(found[1]) <= total + 0.01, ended.stderr
    assert "rows:" not in ended.stderr
