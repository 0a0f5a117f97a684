"""Step 3 gives the same rollouts, scores, losses and gradients for 1 and 2 ranks, all micro-batches and ZeRO stages."""

import json
import math
from pathlib import Path
from typing import Any

import pytest
import torch
from compare import TOLERANCE, apart, every_rank, numbers_apart
from group import Found
from support.marks import slow_but
from support.tiny_run import take_lines, write_lines

# Of one rank: 2 rows of the 4 of an update. Two ranks have 1 row each then, or 2.
SHAPES = [
    (1, 0, "m4"),
    (1, 0, "m1"),
    (2, 0, "m1"),
    (2, 0, "m2"),
    (1, 3, "m4"),
    (1, 3, "m1"),
    (2, 3, "m1"),
    (2, 3, "m2"),
]
STAGES_1_AND_2 = [(1, 1, "m2"), (1, 2, "m2"), (2, 1, "m1"), (2, 2, "m1"), (1, 3, "m2")]
QUICK_SHAPES = [(1, 0, "m4"), (2, 0, "m1"), (2, 3, "m1"), (2, 2, "m1")]
BOTH_STAGES = [f"z{stage} {name}" for stage in (0, 3) for name in ("lora", "small batches", "partial", "sampler")]
VARIANTS = [
    *BOTH_STAGES, *(f"z{stage} ptx" for stage in range(4)), "z0 recomputed", "z0 two samples", "z0 kl in loss",
    "z0 exact kl", "z3 exact kl",
]  # fmt: skip
SLOW_VARIANTS = [*(name for name in BOTH_STAGES if name.startswith("z3")), "z1 ptx", "z2 ptx", "z3 ptx"]
BAD = [f"z{stage} bad {engine}" for stage in range(4) for engine in ("actor", "critic")]
SAVED = [*(f"z{stage} saved" for stage in range(4)), "z3 unpartitioned saved"]

# What it does besides, and for which prompts, is in a file.
FUNCTION = """
import json
import os
def some(prompts, completions, completion_ids):
    with open(os.path.dirname(__file__) + "/does.json") as file:
        does, chosen = json.load(file)
    if prompts[0] not in chosen:
        return [float(len(text)) for text in completions]
    if does == "raise":
        raise RuntimeError("no luck with " + prompts[0])
    if does == "nonsense":
        return ["of " + prompts[0]] * len(completions)
    return [[0.1 * n for n in range(len(ids))] for ids in completion_ids]
"""

WORKER = "worker_ppo"


@pytest.fixture(scope="module")
def folder(folder: Path) -> Path:
    """The inputs with a function, and with rows that have a column for it."""
    rows = map(json.loads, (folder / "train.jsonl").read_text().splitlines()[:20])
    write_lines(folder / "guesses.jsonl", [{**row, "guess": 0.5 + n / 8} for n, row in enumerate(rows)])
    take_lines(folder / "test.jsonl", folder / "seven.jsonl", 7)
    (folder / "rewards.py").write_text(FUNCTION)
    held_out = map(json.loads, (folder / "test.jsonl").read_text().splitlines())
    write_lines(folder / "test.jsonl", [{**row, "guess": 1.0} for row in list(held_out)])
    return folder


def assert_equal_rollouts(mine: dict[str, Any], reference: dict[str, Any]) -> None:
    for ours, theirs in zip(mine["rollouts"], reference["rollouts"], strict=True):
        assert ours["responses"]["sequences"].equal(theirs["responses"]["sequences"])
        for part in ("responses", "scores", "experience"):
            assert apart(ours[part], theirs[part]) < TOLERANCE, part


def assert_equal_updates(mine: dict[str, Any], reference: dict[str, Any]) -> None:
    assert apart(mine["actor"], reference["actor"]) < TOLERANCE
    assert apart(mine["critic"], reference["critic"]) < TOLERANCE
    for name, values in mine["metrics"].items():
        assert numbers_apart(values, reference["metrics"][name]) < TOLERANCE, name
    assert numbers_apart(mine["state"], reference["state"]) < TOLERANCE


@pytest.mark.slow
def test_rollout_is_worth_comparing(found: Found) -> None:
    reference = found[1][0]["z0 m2"]
    responses = reference["rollouts"][0]["responses"]
    lengths = responses["response_lengths"]
    assert responses["finished"].any() and not responses["finished"].all()
    halves = lengths[:4].sum(), lengths[4:].sum()
    assert halves[0] != halves[1], "ranks must have different numbers of tokens"
    metrics = reference["metrics"]
    assert len(metrics["loss/policy"]) == 8
    assert max(metrics["policy/clipfrac"]) > 0.1 and max(metrics["value/clipfrac"]) > 0.1
    assert reference["state"][2] != 0.1, "the KL coefficient must adapt"


def test_scores_equal_transformers(found: Found) -> None:
    for size in found:
        for rank in found[size]:
            reference = found[1][0]["z0 m2"]["rollouts"][0]["scores"]
            exact = {name: reference[name] for name in rank["plain"]["scores"]}
            assert apart(rank["plain"]["scores"], exact) < TOLERANCE


def test_first_policy_gradient_equals_transformers(found: Found) -> None:
    assert apart(found[1][0]["plain"]["gradients"], found[1][0]["z0 m2"]["actor"]) < TOLERANCE


@pytest.mark.few(2)
@pytest.mark.parametrize(("size", "stage", "micro"), slow_but(QUICK_SHAPES, [*SHAPES, *STAGES_1_AND_2]))
def test_rollouts_are_equal(found: Found, size: int, stage: int, micro: str) -> None:
    for rank in found[size]:
        assert_equal_rollouts(rank[f"z{stage} {micro}"], found[1][0]["z0 m2"])


@pytest.mark.parametrize(("size", "stage", "micro"), slow_but(QUICK_SHAPES, [*SHAPES, *STAGES_1_AND_2]))
def test_updates_are_equal(found: Found, size: int, stage: int, micro: str) -> None:
    for rank in found[size]:
        assert_equal_updates(rank[f"z{stage} {micro}"], found[1][0]["z0 m2"])


@pytest.mark.few(1)
@pytest.mark.parametrize("case", slow_but({*VARIANTS} - {*SLOW_VARIANTS}, VARIANTS))
def test_variants_are_equal(found: Found, case: str) -> None:
    for mine in every_rank(found, case):
        assert_equal_rollouts(mine, found[1][0][f"z0{case[2:]}"])
        assert_equal_updates(mine, found[1][0][f"z0{case[2:]}"])


def test_layers_that_are_gathered_one_by_one_give_the_same_divergence(found: Found) -> None:
    for mine in every_rank(found, "z3 exact kl by layers"):
        assert_equal_rollouts(mine, found[1][0]["z0 exact kl"])
        assert_equal_updates(mine, found[1][0]["z0 exact kl"])


@pytest.mark.parametrize("variant", ["recomputed", "small batches"])
def test_these_variants_change_nothing(found: Found, variant: str) -> None:
    assert_equal_rollouts(found[1][0][f"z0 {variant}"], found[1][0]["z0 m2"])
    assert_equal_updates(found[1][0][f"z0 {variant}"], found[1][0]["z0 m2"])


@pytest.mark.parametrize("variant", ["lora", "kl in loss", "exact kl", "ptx"])
def test_these_variants_change_something(found: Found, variant: str) -> None:
    mine, reference = found[1][0][f"z0 {variant}"]["metrics"], found[1][0]["z0 m2"]["metrics"]
    assert numbers_apart(mine["actor/grad_norm"], reference["actor/grad_norm"]) > 100 * TOLERANCE


@pytest.mark.parametrize("stage", slow_but([0], [0, 3]))
def test_with_the_samplers_log_probs_trainer_and_sampler_are_compared(found: Found, stage: int) -> None:
    for mine in every_rank(found, f"z{stage} sampler"):
        assert len(mine["first_ratio_error"]) == 2 and max(mine["first_ratio_error"]) < 1e-4


@pytest.mark.slow
@pytest.mark.parametrize("stage", [0, 3])
def test_a_reward_model_and_a_function_judge_the_same_on_any_number_of_ranks(found: Found, stage: int) -> None:
    reference = found[1][0]["z0 two rewards"]
    for mine in every_rank(found, f"z{stage} two rewards"):
        assert_equal_rollouts(mine, reference)
        assert numbers_apart(list(mine["eval"].values()), list(reference["eval"].values())) < TOLERANCE
        for rollout in mine["rollouts"]:
            responses, judged = rollout["responses"], rollout["scores"]["judged"]
            lengths = responses["prompt_lengths"] + responses["response_lengths"]
            assert judged.shape == (8, 2) and len(set(rollout["guesses"])) == 8
            torch.testing.assert_close(judged[:, 1], torch.tensor(rollout["guesses"]) * lengths)


def test_last_rollout_of_an_epoch_masks_its_fillers(found: Found) -> None:
    first = found[1][0]["z0 partial"]["rollouts"][0]
    assert first["responses"]["valid"].tolist() == [True] * 4 + [False] * 4
    assert not first["experience"]["response_mask"][4:].any()


PARTITIONED = ["z3 by layers", "z3 unpartitioned", "z3 actor z0 critic"]


OFFLOADED = ["z1 offload", "z2 offload", "z3 offload"]


@pytest.mark.few(1)
@pytest.mark.parametrize("case", slow_but(["z2 offload", "z3 actor z0 critic"], [*OFFLOADED, *PARTITIONED]))
def test_offload_and_partitioning_change_nothing(found: Found, case: str) -> None:
    for mine in every_rank(found, case):
        assert_equal_rollouts(mine, found[1][0]["z0 m2"])
        assert_equal_updates(mine, found[1][0]["z0 m2"])


@pytest.mark.few(1)
@pytest.mark.parametrize("stage", slow_but([0, 2], range(4)))
def test_bf16_is_finite_and_drifts_nowhere(found: Found, stage: int) -> None:
    for size in found:
        for rank in found[size]:
            mine = rank[f"z{stage} bf16"]
            assert mine["state"][-1] == 0
            assert all(math.isfinite(value) for values in mine["metrics"].values() for value in values)
            # The old log-probabilities have the very shapes of the update's forward passes.
            assert mine["first_ratio_error"][0] == 0.0
            # In 16 bits a rollout depends on the shape of its batches, but on nothing else.
            first, reference = mine["rollouts"][0], found[size][0]["z0 bf16"]["rollouts"][0]
            assert first["responses"]["sequences"].equal(reference["responses"]["sequences"])


@pytest.mark.few(1)
@pytest.mark.parametrize(
    "case", slow_but(["z0 bad actor", "z2 bad critic", "z3 bad actor"], [*BAD, "z3 offload bad actor"])
)
def test_bad_gradient_of_one_rank_and_one_model_stops_both_models(found: Found, case: str) -> None:
    clean = found[1][0]["z0 m2"]
    weights = found[1][0]["z0 bad actor"]
    for mine in every_rank(found, case):
        assert mine["moved"] == 0.0 and mine["drifted"] == 0.0
        assert mine["stepped"] == [False, True]
        assert mine["counts"] == [2, 1, 0]
        assert apart(mine["actor"], clean["actor"]) < TOLERANCE
        assert apart(mine["critic"], clean["critic"]) < TOLERANCE
        for name, values in mine["metrics"].items():
            assert numbers_apart(values, clean["metrics"][name][:1]) < TOLERANCE, name
        for name in ("actor_weights", "critic_weights"):
            assert apart(mine[name], weights[name]) < TOLERANCE


def assert_equal_folders(mine: dict[str, Any], reference: dict[str, Any]) -> None:
    assert mine["moved"] == 0.0, "writing the average must leave the actor as it is"
    for name in ("actor", "actor_ema", "critic"):
        assert mine[f"{name} problems"] == []
        assert apart(mine[name], reference[name]) < TOLERANCE, name
    assert apart(mine["swapped"], reference["swapped"]) < TOLERANCE
    assert apart(mine["actor"], mine["actor_ema"]) > 1e-5


@pytest.mark.few(1)
@pytest.mark.parametrize("case", slow_but(["z0 saved", "z3 saved"], SAVED))
def test_saved_models_and_averages_are_equal(found: Found, case: str) -> None:
    for mine in every_rank(found, case):
        assert_equal_folders(mine, found[1][0]["z0 saved"])


@pytest.mark.slow
@pytest.mark.parametrize("case", ["z0 saved lora", "z3 saved lora"])
def test_saved_lora_models_are_equal(found: Found, case: str) -> None:
    for mine in every_rank(found, case):
        assert_equal_folders(mine, found[1][0]["z0 saved lora"])


@pytest.mark.slow
@pytest.mark.parametrize("stage", range(4))
def test_new_engines_go_on_from_a_checkpoint(found: Found, stage: int) -> None:
    for mine in every_rank(found, f"z{stage} resume"):
        assert len(mine["resumed"]) == 4 and mine["resumed"] == mine["uninterrupted"]
        assert mine["states"][0] == mine["states"][1]
        assert apart(*mine["averages"]) == 0.0
        assert apart(*mine["weights"]) == 0.0


@pytest.mark.slow
@pytest.mark.parametrize("stage", [0, 3])
def test_ranks_may_decode_different_numbers_of_tokens(found: Found, stage: int) -> None:
    reference = found[1][0]["z0 uneven"]
    assert [rank[f"z{stage} uneven"]["longest"] for rank in found[2]] == [12, 3]
    for mine in every_rank(found, f"z{stage} uneven"):
        assert mine["first"].equal(reference["first"])
        assert numbers_apart(mine["losses"], reference["losses"]) < TOLERANCE


@pytest.mark.parametrize("stage", slow_but([0], [0, 3]))
def test_evaluation_counts_each_prompt_once(found: Found, stage: int) -> None:
    for mine in every_rank(found, f"z{stage} eval"):
        assert numbers_apart(list(mine.values()), list(found[1][0]["z0 eval"].values())) < TOLERANCE


@pytest.mark.slow
def test_an_evaluation_takes_so_many_batches_on_each_rank(found: Found) -> None:
    """The means of two ranks' one batch are those of one rank's two, of the same six prompts."""
    one, two = (found[size][0]["some held out"] for size in (1, 2))
    assert [values["eval_rows"] for values in (*one.values(), *two.values())] == [3, 6, 8, 6, 8, 8]
    assert all(rank["some held out"] == two for rank in found[2])
    assert two["1"] == pytest.approx(one["2"], rel=1e-4, abs=1e-5)
    assert two["1"]["eval_objective/scores"] != pytest.approx(one["1"]["eval_objective/scores"], rel=1e-2)


@pytest.mark.slow
def test_functions_of_two_ranks_end_a_run_as_those_of_one_do(found: Found) -> None:
    """The first failed or wrong response is named, whichever rank scored it, also where one rank alone has any."""
    for mine in every_rank(found, "functions"):
        for which, first in (("last", -3), ("all", 0)):
            assert f"no luck with {mine['texts'][first]}" in mine[f"raise {which}"]
            assert f"prompt {mine['order'][first] + 1} of those of the run" in mine[f"nonsense {which}"]


@pytest.mark.slow
def test_values_of_tokens_that_the_last_rank_alone_has_count_on_all(found: Found) -> None:
    reference = found[1][0]["functions"]
    for mine in every_rank(found, "functions"):
        for case in ("tokens last", "tokens all"):
            assert apart(mine[case], reference[case]) < TOLERANCE
    assert apart(reference["tokens last"], reference["tokens all"]) > 0.1


@pytest.mark.slow
def test_an_evaluation_that_does_not_divide_among_ranks_counts_no_padding(found: Found) -> None:
    """Seven prompts, of which the last three fail."""
    reference = found[1][0]["functions"]
    for mine in every_rank(found, "functions"):
        values = mine["eval"]
        assert values["eval_reward_failures/some"] == pytest.approx(3 / 7)
        assert (values["eval_rows"], values["eval_rows_masked"], len(mine["samples"])) == (7, 3, 7)
        assert values == pytest.approx(reference["eval"], rel=1e-4, abs=1e-5)
        assert mine["rows"]["weight"] == [1.0] * 4 + [0.0] * 3
        assert mine["rows"]["eval_objective/scores"][:4] == reference["rows"]["eval_objective/scores"][:4]


def test_ranks_agree_bit_for_bit(found: Found) -> None:
    first, second = (rank["z3 m1"] for rank in found[2])
    assert first["metrics"] == second["metrics"] and first["state"] == second["state"]
    for name, value in first["rollouts"][1]["experience"].items():
        assert torch.equal(value, second["rollouts"][1]["experience"][name])
