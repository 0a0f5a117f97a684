"""Step 2 gives the same losses, gradients and scores however a step is cut: micro-batches, ranks, ZeRO stages."""

import pytest
from compare import (
    BF16_TOLERANCE,
    SHAPES_AND_STAGES,
    TOLERANCE,
    apart,
    assert_equal_steps,
    assert_exact,
    every_rank,
    numbers_apart,
)
from group import Found
from support.marks import slow_but

VARIANTS = ["lora", "recomputed", "per token", "centred"]
WORKER = "worker_reward"


@pytest.mark.few(3)
@pytest.mark.parametrize(("size", "micro", "stage"), SHAPES_AND_STAGES)
def test_equals_transformers(found: Found, stage: int, size: int, micro: str) -> None:
    exact = found[1][0]["exact"]
    assert exact["rows"] == 8
    for rank in found[size]:
        assert_exact(rank[f"z{stage} {micro}"], exact)


@pytest.mark.parametrize(("size", "micro", "stage"), SHAPES_AND_STAGES)
def test_first_steps_are_equal(found: Found, stage: int, size: int, micro: str) -> None:
    reference = found[1][0]["z0 m8"]
    assert abs(reference["losses"][0] - reference["losses"][2]) > 1e-3
    for rank in found[size]:
        assert_equal_steps(rank[f"z{stage} {micro}"], reference)


@pytest.mark.few(1)
@pytest.mark.parametrize("stage", slow_but([0, 3], range(4)))
def test_partial_last_step_is_the_exact_mean(found: Found, stage: int) -> None:
    exact = found[1][0]["exact partial"]
    assert exact["rows"] == 4
    for case in every_rank(found, f"z{stage} partial"):
        assert_exact(case, exact)


@pytest.mark.parametrize("stage", slow_but([2, 3], range(4)))
def test_fresh_head_and_held_out_scores_are_the_same_at_every_stage(found: Found, stage: int) -> None:
    reference = found[1][0]["z0 m2"]
    assert reference["head"].abs().min() > 0
    assert len(reference["scores"]["chosen"]) == 8, "3 rows a batch: the last one is padded"
    for mine in every_rank(found, f"z{stage} m2"):
        assert mine["head"].equal(reference["head"])
        assert apart(mine["scores"], reference["scores"]) < TOLERANCE
        assert numbers_apart(list(mine["summary"].values()), list(reference["summary"].values())) < TOLERANCE


def test_an_evaluation_takes_so_many_batches_on_each_rank(found: Found) -> None:
    assert [found[size][0]["some held out"]["rows"] for size in (1, 2)] == [[3, 3], [6, 6]]
    assert all(rank["some held out"] == found[2][0]["some held out"] for rank in found[2])


def test_the_last_pairs_to_train_on_are_shared_among_the_ranks(found: Found) -> None:
    reference = found[1][0]["last pairs"]
    assert len(set(reference["chosen"])) == 5, "of two ranks, one has a pair less"
    for mine in every_rank(found, "last pairs"):
        for side in ("chosen", "rejected"):
            assert mine[side] == pytest.approx(reference[side], abs=1e-5)


@pytest.mark.few(1)
@pytest.mark.parametrize(
    ("stage", "variant"),
    slow_but([(3, "lora"), (0, "per token"), (3, "centred")], [(stage, name) for stage in (0, 3) for name in VARIANTS]),
)
def test_variants_are_equal(found: Found, stage: int, variant: str) -> None:
    for mine in every_rank(found, f"z{stage} {variant}"):
        assert_equal_steps(mine, found[1][0][f"z0 {variant}"])


def test_lora_trains_adapters_and_head(found: Found) -> None:
    names = found[1][0]["z0 lora"]["gradients"]
    assert any("score" in name for name in names)
    assert all("lora_" in name or "modules_to_save" in name for name in names)


def test_gradient_checkpointing_changes_nothing(found: Found) -> None:
    assert_equal_steps(found[1][0]["z0 recomputed"], found[1][0]["z0 m2"])


KINDS = ["z1 offload", "z2 offload", "z3 offload", "z3 unpartitioned"]


@pytest.mark.few(1)
@pytest.mark.parametrize("case", slow_but(["z1 offload", "z3 unpartitioned"], KINDS))
def test_offload_and_partitioning_change_nothing(found: Found, case: str) -> None:
    for mine in every_rank(found, case):
        assert_equal_steps(mine, found[1][0]["z0 m2"])


@pytest.mark.slow
@pytest.mark.parametrize("stage", range(4))
def test_bf16_stays_near_fp32(found: Found, stage: int) -> None:
    for mine in every_rank(found, f"z{stage} bf16"):
        assert numbers_apart(mine["losses"], found[1][0]["z0 m2"]["losses"]) < BF16_TOLERANCE


SAVED = ["z0 saved", "z3 saved", "z0 saved lora", "z3 saved lora", "z3 unpartitioned saved lora"]


@pytest.mark.parametrize("case", slow_but(["z0 saved"], SAVED))
def test_saved_models_are_equal(found: Found, case: str) -> None:
    reference = found[1][0]["z0 saved lora" if case.endswith("lora") else "z0 saved"]
    assert bool(reference["adapter"]) == case.endswith("lora")
    for mine in every_rank(found, case):
        assert mine["problems"] == []
        assert apart(mine["weights"], reference["weights"]) < TOLERANCE
        assert not mine["adapter"] or apart(mine["adapter"], reference["adapter"]) < TOLERANCE
        assert numbers_apart(mine["statistics"], reference["statistics"]) < TOLERANCE
