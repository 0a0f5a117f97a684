"""Memory on a CUDA device: peaks of the phases, and optimizer states that leave the device during a rollout."""

from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from support.command_run import run_command
from support.decode_models import EOS, PAD, assert_same, llama, random_prompts
from support.in_process import group_of_one
from support.messages import naming
from support.ppo_updates import engine_of
from support.tiny_run import make_folder, read_metrics
from torch import nn

from pipeline.cache_memory import memory_of
from pipeline.engine.memory import optimizer_tensors
from pipeline.engine.optimizer_offload import optimizer_states_on_host
from pipeline.generation.options import GenerationOptions
from pipeline.generation.rollouts import RandomKey, Rollout, Sampling, Vocabulary
from pipeline.models.forward.causal_lm import CausalLM
from pipeline.out_of_memory import memory_line
from step3_ppo.models.hybrid_engine import HybridEngine

pytestmark = pytest.mark.gpu


class Plain:
    """What optimizer_states_on_host needs of an engine: a module, AdamW with fp32 copies as its parameters, stage 0."""

    partitions_weights = partitions_optimizer = False

    def __init__(self) -> None:
        self.module = nn.Linear(1024, 1024, device="cuda", dtype=torch.bfloat16)
        groups = [list(self.module.parameters())]
        copies = [[parameter.detach().float() for parameter in group] for group in groups]
        adam = torch.optim.AdamW(copies[0], fused=True)
        self.optimizer = type("Optimizer", (), {"fp32_groups": copies, "fp16_groups": groups, "optimizer": adam})()
        self.host_buffers: list[torch.Tensor] = []
        self.states_on_host: list[tuple[torch.UntypedStorage, torch.Tensor]] = []
        for copy in copies[0]:
            copy.grad = torch.randn_like(copy)
        adam.step()
        for copy in copies[0]:
            copy.grad = None


def test_memory_is_free_while_the_states_are_away():
    engine = Plain()
    before = [tensor.clone() for tensor in optimizer_tensors(engine)]
    held = torch.cuda.memory_allocated()
    states = sum(tensor.nbytes for tensor in before)
    with optimizer_states_on_host([engine]):
        assert torch.cuda.memory_allocated() <= held - states
        assert all(buffer.is_pinned() for buffer in engine.host_buffers)
        torch.full((states,), 7, dtype=torch.uint8, device="cuda")  # something else uses the room
    assert all(torch.equal(mine, kept) for mine, kept in zip(optimizer_tensors(engine), before, strict=True))


@pytest.mark.parametrize("stage", [0, 1, 3])
def test_a_run_goes_the_same_way_with_and_without(tmp_path: Path, stage: int):
    folder = make_folder(tmp_path)
    found = []
    for flag in ("false", "true"):
        given = {
            "actor_model_name_or_path": "base", "critic_model_name_or_path": "scorer", "data_path": "train.jsonl",
            "data_split": "none", "max_prompt_seq_len": 48, "max_answer_seq_len": 8, "max_steps": 3, "dtype": "bf16",
            "per_device_generation_batch_size": 4, "per_device_train_batch_size": 4, "actor_zero_stage": stage,
            "critic_zero_stage": stage, "actor_learning_rate": 1e-3, "keep_checkpoints": 0, "deterministic": "true",
            "offload_optimizer_during_rollout": flag, "output_dir": f"out-{flag}", "old_log_probs": "trainer",
            "actor_gradient_checkpointing": "false", "critic_gradient_checkpointing": "false",
        }  # fmt: skip
        words = [str(word) for name, value in given.items() for word in (f"--{name}", value)]
        ended = run_command("step3_ppo", words, folder=folder)
        assert ended.code == 0, ended.stderr[-2000:]
        run = folder / f"out-{flag}" / "runs" / "ppo"
        lines = [line for line in read_metrics(run) if "step_s" in line]
        names = [f"memory/{phase}_gib" for phase in ("generate", "score", "train")]
        assert all(0 < line[name] <= line["gpu_memory_gib"] for line in lines for name in names)
        assert all(line["gpu_memory_gib"] <= line["gpu_reserved_gib"] for line in lines)
        log = (run / "log.txt").read_text()
        assert log.count("memory of this rank") == 1 and "peak of generate" in log
        assert all(f"\n  {name} " in log for name in ("actor", "critic", "reference", "reward"))
        found.append(load_file(folder / f"out-{flag}" / "actor" / "model.safetensors"))
    assert all(torch.equal(found[0][name], found[1][name]) for name in found[0])


def test_the_cache_goes_back_where_less_than_a_third_of_the_device_is_free():
    with group_of_one():
        engine = engine_of(CausalLM(llama(hidden_size=1024, num_attention_heads=8, num_hidden_layers=4)))
        hybrid = HybridEngine(engine, Vocabulary(frozenset({EOS}), PAD), options=GenerationOptions(backend="fused"))

        def rollout() -> Rollout:
            with hybrid.generation():
                settings = {"num_samples": 1, "sampling": Sampling(3), "key": RandomKey(3, "rollout")}
                return hybrid.generate(random_prompts((3, 1)), **settings)

        first = rollout()
        free, whole = memory_of(torch.device("cuda"))
        assert hybrid._generator is not None and free > whole / 2
        with_cache = torch.cuda.memory_allocated()
        ballast = torch.empty(int(0.7 * torch.cuda.mem_get_info()[1]), dtype=torch.uint8, device="cuda")
        assert_same(rollout(), first)
        assert hybrid._generator is None and torch.cuda.memory_allocated() - ballast.nbytes < with_cache
        del ballast
        torch.cuda.empty_cache()
        assert_same(rollout(), first)
        assert hybrid._generator is not None


def test_the_cache_stays_where_updates_were_seen_to_have_memory_beside_it():
    with group_of_one():
        engine = engine_of(CausalLM(llama(hidden_size=1024, num_attention_heads=8, num_hidden_layers=4)))
        hybrid = HybridEngine(engine, Vocabulary(frozenset({EOS}), PAD), options=GenerationOptions(backend="fused"))

        free = torch.cuda.mem_get_info()[0]  # other processes may be at work beside this one

        def holds_after_a_rollout(ballast: float) -> bool:
            with hybrid.generation():
                hybrid.generate(
                    random_prompts((3, 1)), num_samples=1, sampling=Sampling(3), key=RandomKey(3, "rollout")
                )
                held = torch.empty(int(ballast * free), dtype=torch.uint8, device="cuda")
            del held
            return hybrid.holds_buffers

        assert holds_after_a_rollout(0.1) and not holds_after_a_rollout(0.7)
        assert holds_after_a_rollout(0.0)
        torch.cuda.reset_peak_memory_stats()
        update = torch.empty(int(0.2 * free), dtype=torch.uint8, device="cuda")
        del update
        hybrid.note_update()
        torch.cuda.empty_cache()
        assert holds_after_a_rollout(0.7) and not holds_after_a_rollout(0.85)


def test_want_of_device_memory_is_read_from_torchs_own_words():
    with pytest.raises(torch.OutOfMemoryError) as error:
        torch.empty(2**41, dtype=torch.uint8, device="cuda")
    assert memory_line(error.value) == naming("out of memory ... 2048.00 GiB ... free of")
