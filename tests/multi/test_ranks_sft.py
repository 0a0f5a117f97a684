"""Step 1 gives the same losses and gradients however a step is cut: micro-batches, ranks, ZeRO stages, offload."""

from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
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
from group import Found, running
from safetensors.torch import load_file
from support.marks import slow_but
from support.model_folders import assert_same_folder
from support.tiny_run import make_folder, take_lines

from pipeline.errors import EXIT_DONE
from rlhf.models import export

UNPARTITIONED = "z3 unpartitioned"
SHORT = {torch.bfloat16: "bf16", torch.float16: "fp16"}
WORKER = "worker_sft"


def test_inputs_exist(found: Found) -> None:
    assert found[1][0]["exact"]["rows"] == 8 and found[1][0]["exact partial"]["rows"] == 4


@pytest.mark.few(3)
@pytest.mark.parametrize(("size", "micro", "stage"), SHAPES_AND_STAGES)
def test_equals_transformers(found: Found, stage: int, size: int, micro: str) -> None:
    exact = found[1][0]["exact"]
    for rank in found[size]:
        assert_exact(rank[f"z{stage} {micro}"], exact)


@pytest.mark.parametrize(("size", "micro", "stage"), SHAPES_AND_STAGES)
def test_first_steps_are_equal(found: Found, stage: int, size: int, micro: str) -> None:
    reference = found[1][0]["z0 m8"]
    assert reference["losses"][0] - reference["losses"][2] > 0.1, "nothing was learned"
    for rank in found[size]:
        case = rank[f"z{stage} {micro}"]
        assert numbers_apart(case["losses"], reference["losses"]) < TOLERANCE
        assert numbers_apart(case["norms"], reference["norms"]) < TOLERANCE


@pytest.mark.parametrize("stage", slow_but([0, 3], range(4)))
def test_partial_last_step_is_the_exact_mean(found: Found, stage: int) -> None:
    exact = found[1][0]["exact partial"]
    for case in every_rank(found, f"z{stage} partial"):
        assert_exact(case, exact)


def test_an_evaluation_takes_so_many_batches_on_each_rank(found: Found) -> None:
    assert [found[size][0]["some held out"]["rows"] for size in (1, 2)] == [[2, 2, 8], [4, 4, 8]]
    assert all(rank["some held out"] == found[2][0]["some held out"] for rank in found[2])
    few, some, whole = found[1][0]["some held out"]["losses"]
    assert len(set(whole)) == 8
    for losses in (few, some, *found[2][0]["some held out"]["losses"]):  # each row's, in the order of the rows
        assert losses == pytest.approx(whole[: len(losses)], rel=1e-4)


KINDS = ["z1 offload", "z2 offload", "z3 offload", "z3 offload parameters", "z3 by layers", UNPARTITIONED]


@pytest.mark.few(1)
@pytest.mark.parametrize("case", slow_but({*KINDS} - {"z1 offload", "z3 offload", "z3 unpartitioned"}, KINDS))
def test_offload_and_partitioning_change_nothing(found: Found, case: str) -> None:
    reference = found[1][0]["z0 m2"]
    for mine in every_rank(found, case):
        assert_equal_steps(mine, reference)


@pytest.fixture(scope="module")
def four(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Found]:
    """The same of four ranks, on inputs of their own."""
    folder = tmp_path_factory.mktemp("sft-four")
    make_folder(folder)
    take_lines(folder / "train.jsonl", folder / "few.jsonl", 20)
    with running("worker_sft", (4,), folder, folder) as groups:
        yield groups


@pytest.mark.slow
@pytest.mark.parametrize("lora", ["", " lora"])
@pytest.mark.parametrize("gather", ["once", "layers"])
@pytest.mark.parametrize("size", [2, 4])
def test_a_second_partition_of_the_weights_changes_nothing(
    found: Found, request: pytest.FixtureRequest, size: int, gather: str, lora: str
) -> None:
    """ZeRO++'s hpZ, from the user's JSON, in one or two groups of two ranks: weights have a second partition over a
    group, and are gathered from it; also where others than the optimizer write them."""
    reference = found[1][0][f"z0{lora or ' m2'}"]
    for rank in found[2] if size == 2 else request.getfixturevalue("four")[4]:
        mine = rank[f"z3 hpz {gather}{lora}"]
        assert mine["parts"] == ([2] if gather == "layers" else [0, 2])  # 0: whole since they were gathered
        assert mine["groups"] == ([2] if size == 2 else [2, 4])
        assert numbers_apart(mine["losses"], reference["losses"]) < TOLERANCE
        assert mine["resume"]["resumed"] == mine["resume"]["uninterrupted"]


@pytest.mark.slow
@pytest.mark.parametrize("case", ["z0 recomputed", "z3 recomputed"])
def test_gradient_checkpointing_changes_nothing(found: Found, case: str) -> None:
    for mine in every_rank(found, case):
        assert_equal_steps(mine, found[1][0]["z0 m2"])


LORA = ["z0 lora", "z3 lora", "z0 recomputed lora", "z3 recomputed lora"]


@pytest.mark.few(1)
@pytest.mark.parametrize("case", slow_but(["z3 lora", "z0 recomputed lora"], LORA))
def test_lora_is_equal(found: Found, case: str) -> None:
    reference = found[1][0]["z0 lora"]
    assert all("lora_" in name for name in reference["gradients"])
    for mine in every_rank(found, case):
        assert_equal_steps(mine, reference)


@pytest.mark.few(1)
@pytest.mark.parametrize("case", ["z0 packed", "z3 packed"])
def test_packing_is_equal(found: Found, case: str) -> None:
    for mine in every_rank(found, case):
        assert_equal_steps(mine, found[1][0]["z0 packed"])


@pytest.mark.slow
@pytest.mark.parametrize("stage", range(4))
def test_bf16_stays_near_fp32(found: Found, stage: int) -> None:
    """Stage 0 has an optimizer of its own in DeepSpeed: it once took a step with zero gradients at its start."""
    for mine in every_rank(found, f"z{stage} bf16"):
        assert mine["skipped"] == 0
        assert numbers_apart(mine["losses"], found[1][0]["z0 m2"]["losses"]) < BF16_TOLERANCE


BAD = [*(f"z{stage} bad" for stage in range(4)), *(f"z{n} offload bad" for n in (1, 2, 3))]


@pytest.mark.few(1)
@pytest.mark.parametrize("case", slow_but(["z2 bad", "z3 bad", "z1 offload bad"], BAD))
def test_bad_gradient_of_one_rank_changes_nothing(found: Found, case: str) -> None:
    clean = found[1][0]["z0 m2"]
    weights = every_rank(found, case)[0]["weights"]
    for mine in every_rank(found, case):
        assert mine["moved"] == 0.0
        assert mine["counts"] == [1, 1, 1, 0, 2]
        assert numbers_apart(mine["losses"], clean["losses"][:1]) < TOLERANCE
        assert numbers_apart(mine["norms"], clean["norms"][:1]) < TOLERANCE
        assert apart(mine["gradients"], clean["gradients"]) < TOLERANCE
        assert apart(mine["weights"], weights) < TOLERANCE


@pytest.mark.parametrize("stage", slow_but([0], range(4)))
def test_bad_gradient_in_bf16(found: Found, stage: int) -> None:
    for mine in every_rank(found, f"z{stage} bad bf16"):
        assert mine["moved"] == 0.0
        assert mine["counts"] == [1, 1, 1, 0, 2]
        assert numbers_apart(mine["losses"], found[1][0][f"z{stage} bf16"]["losses"][:1]) < TOLERANCE


@pytest.mark.slow
@pytest.mark.parametrize("stage", range(4))
def test_a_new_engine_goes_on_from_a_checkpoint(found: Found, stage: int) -> None:
    for mine in every_rank(found, f"z{stage} resume"):
        assert mine["resumed"] == mine["uninterrupted"]
        assert mine["norms"][0] == mine["norms"][1]


EXPORTED = [(size, stage) for size in (1, 2) for stage in range(4)]


@pytest.mark.parametrize(("size", "stage"), slow_but([(1, 1), (2, 3)], EXPORTED))
def test_an_exported_checkpoint_is_the_saved_model(found: Found, size: int, stage: int, tmp_path: Path) -> None:
    case = found[size][0][f"z{stage} resume"]
    (checkpoint,) = (Path(case["run"]) / "checkpoints").glob("step-*")
    assert export.main([str(checkpoint), "--output", f"{tmp_path}/fp32"]) == EXIT_DONE
    assert_same_folder(tmp_path / "fp32", Path(case["model"]))
    whole = load_file(tmp_path / "fp32" / "model.safetensors")
    for dtype in (torch.bfloat16, torch.float16):
        assert export.main([case["run"], "--output", f"{tmp_path}/{dtype}", "--dtype", SHORT[dtype]]) == EXIT_DONE
        rounded = load_file(tmp_path / str(dtype) / "model.safetensors")
        assert rounded.keys() == whole.keys()
        assert all(torch.equal(rounded[name], whole[name].to(dtype)) for name in whole)


@pytest.mark.slow
@pytest.mark.parametrize("dtype", ["fp32", "bf16"])
@pytest.mark.parametrize(("size", "stage"), [(1, 0), (2, 0), (2, 3)])
def test_an_exported_adapter_is_merged_as_the_saved_one(
    found: Found, size: int, stage: int, dtype: str, tmp_path: Path
) -> None:
    case = found[size][0][f"z{stage} resume lora {dtype}"]
    assert export.main([case["run"], "--output", f"{tmp_path}/out"]) == EXIT_DONE
    assert (tmp_path / "out" / "adapter" / "adapter_model.safetensors").is_file()
    assert_same_folder(tmp_path / "out", Path(case["model"]))


@pytest.mark.slow
@pytest.mark.parametrize(("size", "stage"), EXPORTED)
def test_a_checkpoint_of_a_bf16_run_holds_more_digits_than_its_model(
    found: Found, size: int, stage: int, tmp_path: Path
) -> None:
    case = found[size][0][f"z{stage} resume bf16"]
    assert export.main([case["run"], "--output", f"{tmp_path}/same"]) == EXIT_DONE
    assert_same_folder(tmp_path / "same", Path(case["model"]))
    assert export.main([case["run"], "--output", f"{tmp_path}/fp32", "--dtype", "fp32"]) == EXIT_DONE
    whole, own = (load_file(path / "model.safetensors") for path in (tmp_path / "fp32", Path(case["model"])))
    assert all(torch.equal(whole[name].bfloat16(), own[name]) for name in own)
    assert any(not torch.equal(whole[name], own[name].float()) for name in own)


SAVED = [(setting, kind) for setting in ("z0", "z3", UNPARTITIONED) for kind in ("saved", "saved lora")]


@pytest.mark.few(1)
@pytest.mark.parametrize(("setting", "kind"), slow_but([("z0", "saved"), ("z3", "saved"), ("z3", "saved lora")], SAVED))
def test_saved_models_are_equal(found: Found, setting: str, kind: str) -> None:
    reference = found[1][0][f"z0 {kind}"]
    assert bool(reference["adapter"]) == (kind == "saved lora")
    for mine in every_rank(found, f"{setting} {kind}"):
        assert mine["problems"] == []
        assert apart(mine["weights"], reference["weights"]) < TOLERANCE
        assert not mine["adapter"] or apart(mine["adapter"], reference["adapter"]) < TOLERANCE
        assert (mine["logits"] - mine["trained_logits"]).abs().max() < TOLERANCE
