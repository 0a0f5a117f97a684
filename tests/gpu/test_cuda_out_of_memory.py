"""A capped CUDA device: stage 3 runs out of memory in each phase of a step, halves its batch and goes on."""

import gc
import re
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from support.in_process import undone_afterwards
from support.tiny_run import make_folder, opt_config, read_metrics
from transformers import AutoTokenizer, OPTForCausalLM, OPTForSequenceClassification

from step3_ppo import training as ppo_training
from step3_ppo.main import main as ppo_main
from step3_ppo.state import State

pytestmark = pytest.mark.gpu

ROWS, PHASES = 128, ("generate", "score", "train")
# Large enough that the batch takes more than weights, workspaces and the graph of a decode step.
SHAPE = {
    "hidden_size": 512, "num_hidden_layers": 4, "num_attention_heads": 8, "ffn_dim": 4096, "word_embed_proj_dim": 512,
    "max_position_embeddings": 512, "init_std": 0.02,
}  # fmt: skip


class CappedPhases:
    """Gives phases of a step less memory than they took in the step before.

    Stands for functions of the loop, each with its phase. step: the capped step, from 0. limit: bytes that a phase took
    beside those that were held before it -> bytes that it gets, the first time. taken: those of the step before.
    capped: phases.
    """

    def __init__(self, step: int, phases: tuple[str, ...], limit: Callable[[int], int]) -> None:
        self.step, self.phases, self.limit = step, phases, limit
        self.taken: dict[str, int] = {}
        self.capped: set[str] = set()

    def stand_in(self, monkeypatch: Any) -> None:
        functions = {"sample": "generate", "score_others": "score", "step_objectives": "train"}
        for name, phase in functions.items():
            monkeypatch.setattr(ppo_training, name, partial(self.call, getattr(ppo_training, name), phase))

    def call(self, function: Any, phase: str, ppo: Any, *given: Any, **named: Any) -> Any:
        state: Any = named["state"] if "state" in named else next(arg for arg in given if isinstance(arg, State))
        gc.collect()
        torch.cuda.empty_cache()
        torch.cuda.reset_peak_memory_stats()
        held = torch.cuda.memory_reserved()
        if state.step == self.step and phase in self.phases and phase not in self.capped:
            self.capped.add(phase)
            limit = held + self.limit(self.taken[phase])
            torch.cuda.set_per_process_memory_fraction(limit / torch.cuda.mem_get_info()[1])
        try:
            result = function(ppo, *given, **named)
        finally:
            torch.cuda.set_per_process_memory_fraction(1.0)
        if state.step == self.step - 1:  # the evaluation before the first step scores fewer rows
            self.taken[phase] = max(torch.cuda.max_memory_reserved() - held, self.taken.get(phase, 0))
        return result


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = make_folder(tmp_path_factory.mktemp("capped"), num_train=ROWS)
    tokenizer = AutoTokenizer.from_pretrained(folder / "base")
    torch.manual_seed(3)
    OPTForCausalLM(opt_config(len(tokenizer), **SHAPE)).save_pretrained(folder / "base")
    OPTForSequenceClassification(opt_config(len(tokenizer), num_labels=1, **SHAPE)).save_pretrained(folder / "scorer")
    return folder


def steps_of(folder: Path, out: Path, **changes: Any) -> tuple[list[dict[str, Any]], str]:
    """The lines of three steps of stage 3, one for each rollout, and the log."""
    flags = {
        "actor_model_name_or_path": folder / "base", "critic_model_name_or_path": folder / "scorer",
        "data_path": folder / "train.jsonl", "eval_data_path": folder / "test.jsonl", "data_split": "none",
        "data_output_path": folder / "cache", "output_dir": out, "max_prompt_seq_len": 64, "max_answer_seq_len": 256,
        "max_steps": 3, "per_device_generation_batch_size": ROWS, "per_device_train_batch_size": ROWS, "dtype": "bf16",
        "keep_checkpoints": 0, "enable_tensorboard": "false",
        "actor_gradient_checkpointing": "false", "critic_gradient_checkpointing": "false", "old_log_probs": "trainer",
        "per_device_eval_batch_size": 16,
    } | changes  # fmt: skip
    with undone_afterwards():
        assert ppo_main([str(word) for name, value in flags.items() for word in (f"--{name}", value)]) == 0
    lines = [line for line in read_metrics(out / "runs/ppo") if "step_s" in line]
    assert [line["step"] for line in lines] == [1, 2, 3] and all(line["skipped_updates"] == 0 for line in lines)
    return lines, (out / "runs/ppo/log.txt").read_text()


def test_each_phase_runs_out_of_memory_and_goes_on(folder: Path, tmp_path: Path, monkeypatch):
    phases = CappedPhases(1, PHASES, lambda taken: taken // 3)
    phases.stand_in(monkeypatch)
    # ZeRO stages 1 and 2 make AdamW's states among the first update's activations: later phases find room between them.
    stages = {"actor_zero_stage": 0, "critic_zero_stage": 0}
    lines, log = steps_of(folder, tmp_path / "out", release_inference_cache="true", **stages)
    failed = re.findall(r"step 2, phase (\w+): out of memory: .*: done again with", log)
    assert phases.capped == set(failed) == set(PHASES), (phases.taken, log)
    assert lines[0]["micro_batch_size"] == ROWS and lines[1]["micro_batch_size"] < ROWS
    # The old log-probabilities were made again in the new cut: in another one they would differ in bf16.
    assert [line["policy/first_ratio_error"] for line in lines] == [0.0] * 3


def test_the_cache_is_given_back_before_an_update_is_halved(folder: Path, tmp_path: Path, monkeypatch):
    """The update of the third step lacks half of what the KV cache holds."""
    cache = ROWS * (64 + 256) * 2 * SHAPE["num_hidden_layers"] * SHAPE["hidden_size"] * 2  # bytes in bf16
    phases = CappedPhases(2, ("train",), lambda taken: taken - cache // 2)
    phases.stand_in(monkeypatch)
    lines, log = steps_of(folder, tmp_path / "out")
    again = re.findall(r"step (\d), phase (\w+): out of memory: .*: done again with (.*)", log)
    assert again == [("3", "train", "the KV cache freed after each rollout")], (phases.taken, log)
    assert [line["micro_batch_size"] for line in lines] == [ROWS] * 3
