"""Logits that are stored for the backward pass: where the plan finds room for them, and that a run does as it says."""

from dataclasses import replace
from typing import Any

import pytest
from support.in_process import undone_afterwards
from support.run_words import run_words, start_flags
from support.tiny_run import read_metrics

import step1_sft.main
from benchmarks.speed.planned import planner_of
from pipeline.configuration.rank_rules import Choice
from pipeline.files import GIB
from pipeline.models.forward import causal_lm
from pipeline.planning.fastest import Candidate
from pipeline.planning.page import StagePlanner
from pipeline.preparation import stage_entry
from pipeline.preparation.plans import expected

VOCABULARY, ROWS = 151_936, 24  # of Qwen2.5
SFT = f"--model-name-or-path qwen2.5-0.5b --max-seq-len 512 --per-device-train-batch-size {ROWS} --zero-stage 2"
PPO = (
    "--actor-model-name-or-path qwen2.5-0.5b --critic-model-name-or-path qwen2.5-0.5b --actor-zero-stage 2 "
    "--critic-zero-stage 2 --max-prompt-seq-len 256 --max-answer-seq-len 768 --per-device-train-batch-size 32 "
    "--per-device-generation-batch-size 256 --gradient-accumulation-steps 8"
)


class WithoutStoring(StagePlanner):
    """Plans a stage that computes the logits of several pieces again, whatever room there is."""

    def memory(self, resolved: Any) -> Any:
        return self.counted(resolved, stores_logits=False)


def plans(section: str, words: str, target: str = "1xH100-80GB") -> tuple[Any, Any]:
    """The plan, and one that computes logits again."""
    found = []
    for kind in (StagePlanner, WithoutStoring):
        planner, resolved = planner_of(section, words, target, kind)
        found.append(planner.memory(resolved))
    return found[0], found[1]


def test_with_room_the_logits_of_nearly_all_pieces_are_added():
    """One is there at a time without them, and another tensor of its size in the backward pass."""
    plan, before = plans("sft", SFT)
    assert plan.stores_logits and not before.stores_logits
    added = plan.phases["train"].total - before.phases["train"].total
    logits = ROWS * 511 * VOCABULARY * 2
    pieces = -(-logits // causal_lm.PIECE_BYTES)
    assert pieces == 7 and pieces - 3 < added / (logits / pieces) < pieces


def test_they_save_a_matrix_product_of_the_head():
    seconds = []
    for kind in (StagePlanner, WithoutStoring):
        planner, resolved = planner_of("sft", SFT, "1xH100-80GB", kind)
        seconds.append(planner.seconds(resolved, planner.memory(resolved))["train"])
    product = 2 * ROWS * 511 * VOCABULARY * 896 / 989e12
    assert product < seconds[1] - seconds[0] < 3 * product  # it also writes and reads the logits


def at(gib: float, section: str, words: str) -> Any:
    """The plan on a GPU with so much memory."""
    planner, resolved = planner_of(section, words, "1xH100-80GB", StagePlanner)
    return replace(planner, target=replace(planner.target, memory=int(gib * GIB))).memory(resolved)


@pytest.mark.parametrize("words", ["", "--gradient-checkpointing true"])
def test_without_room_by_the_high_estimate_they_are_computed_again(words):
    stored, before = plans("sft", f"{SFT} {words}")
    most = stored.reserved()[1] / GIB
    assert at(most + 0.01, "sft", f"{SFT} {words}").stores_logits
    tight = at(most - 0.01, "sft", f"{SFT} {words}")
    assert not tight.stores_logits and tight.phases == before.phases


def test_they_do_not_take_the_room_of_a_kv_cache_that_would_stay():
    """The largest GPU on which the cache stays without them alone."""
    stored, before = plans("ppo", PPO)
    assert stored.stores_logits and stored.keeps_buffers and before.keeps_buffers
    least = int(before.reserved()[0] / GIB)
    sizes = [at(gib, "ppo", PPO) for gib in range(least, 79, (79 - least) // 3)]
    assert [plan.stores_logits for plan in sizes] == sorted(plan.stores_logits for plan in sizes)
    assert all(plan.keeps_buffers for plan in sizes if plan.stores_logits)


def test_on_a_cpu_and_where_memory_is_not_known_they_are_computed_again():
    planner, resolved = planner_of("sft", SFT, "1xH100-80GB", StagePlanner)
    for target in (replace(planner.target, memory=0), replace(planner.target, name="CPU")):
        assert not replace(planner, target=target).memory(resolved).stores_logits


def test_a_run_gets_the_decision_of_its_plan_and_of_one_that_it_continues():
    planner, resolved = planner_of("sft", SFT, "1xH100-80GB", StagePlanner)
    for memory, stores in ((79, True), (20, False)):
        target = replace(planner.target, memory=memory * GIB)
        candidate = Candidate.of(replace(planner, target=target), resolved, {})
        assert expected(candidate, target)["stores_logits"] == stores


def test_a_run_does_as_its_plan_says_with_equal_numbers(folder, tmp_path, monkeypatch):
    """A piece a row; where logits are stored, none is computed again."""
    recomputed, numbers, original = list[Any](), list[list[float]](), causal_lm.checkpoint
    monkeypatch.setattr(causal_lm, "PIECE_BYTES", 1)
    monkeypatch.setattr(causal_lm, "checkpoint", lambda *given, **how: recomputed.append(1) or original(*given, **how))
    for stores in (False, True):
        recomputed.clear()
        choice = Choice({}, line="chosen", plan={"stores_logits": stores, "step_s": 1.0, "memory_gib": {}})
        monkeypatch.setattr(stage_entry, "choose_for_run", lambda *_, choice=choice: choice)
        out = tmp_path / str(stores) / "sft"
        flags = start_flags("sft", folder) | {"per_device_train_batch_size": 4, "max_steps": 3, "output_dir": out}
        with undone_afterwards():
            assert step1_sft.main.main(run_words(folder, **flags)) == 0
        lines = [line for line in read_metrics(out.parent / "runs" / "sft") if "grad_norm" in line]
        numbers.append([line[name] for line in lines for name in ("loss", "grad_norm")])
        assert bool(recomputed) != stores
    assert len(numbers[0]) == 6 and numbers[0] == numbers[1]
