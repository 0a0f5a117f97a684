"""The two remedies of a plan: each change is planned with those before it, and the last one makes the plan fit."""

import re
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from support.messages import naming

from benchmarks.speed.planned import LLAMA, planner_of, ppo, shape_folder
from pipeline.configuration.flag_table import flat_items
from pipeline.configuration.flags import parse
from pipeline.configuration.rank_rules import with_ranks
from pipeline.configuration.resolved import Resolved
from pipeline.configuration.resume_rules import batch_sizes
from pipeline.files import GIB
from pipeline.launching.target import Target, parse_target
from pipeline.planning.changes import (
    OTHER,
    MemoryOption,
    adapters,
    optimizer_offload,
    shared_rollout,
    smaller_micro_batch,
)
from pipeline.planning.page import StagePlan, StagePlanner, fits, lacking, verdict_lines
from pipeline.planning.remedies import Change, Remedies, Remedy, helps, remedy
from pipeline.planning.summary import NOT_ENOUGH, proposals
from step1_sft.config import SFTConfig

WORDS = "--model-name-or-path 125m --per-device-train-batch-size 8 --dtype bf16"
FITS = "    then it takes "
CHANGE = re.compile(r"(--.*): frees ([\d.]+) [GM]iB \(peak then ([\d.]+) GiB\)")


def planned(
    memory_gib: float, folder: Path, gpus: int = 1, host_gib: float = 64, more: str = ""
) -> tuple[StagePlanner, Resolved]:
    """SFT of OPT-125M on GPUs of so much memory."""
    file = folder / "target.yaml"
    text = f"gpus: {gpus}\nmemory_gib: {memory_gib}\nhost_memory_gib: {host_gib}"
    file.write_text(text, encoding="utf-8")
    return planner_of("sft", f"{WORDS} {more}", str(file))


def remedies_of(memory_gib: float, folder: Path, **target: Any) -> Remedies:
    planner, resolved = planned(memory_gib, folder, **target)
    return Remedies.of(planner, resolved)


def flags_of(remedy: Remedy) -> list[str]:
    """The first flag of each change."""
    return [str(change).split()[0] for change in remedy.changes]


def page(planner: StagePlanner, resolved: Resolved) -> list[str]:
    """What a dry run says of a stage that does not fit, or is tight."""
    plan = StagePlan.of(planner, resolved, 0)
    return list(proposals("sft", plan, Remedies.of(planner, resolved), show_all=True))


def replanned(lines: list[str], memory_gib: float, folder: Path, **target: int) -> tuple[bool, float]:
    """Whether the plan with the flags of these lines on the command line fits, and its expected GiB."""
    planner, _ = planned(memory_gib, folder, **target)
    path = shape_folder("125m")
    words = [*WORDS.replace("125m", path).split(), "--target", str(folder / "target.yaml")]
    for line in lines:
        words += CHANGE.match(line)[1].split()
    plan = planner.memory(parse(SFTConfig, words, section="sft"))
    return fits(plan, planner.target), plan.reserved()[0] / GIB


@pytest.mark.slow
@pytest.mark.parametrize("memory_gib, gpus", [(2.6, 1), (2.4, 1), (3.2, 2)])
def test_the_last_change_makes_it_fit_and_none_before(tmp_path, memory_gib, gpus):
    same = remedies_of(memory_gib, tmp_path, gpus=gpus).same
    lines = [str(change) for change in same.changes]
    assert same.is_enough and lines
    for count in range(1, len(lines) + 1):
        does_fit, expected = replanned(lines[:count], memory_gib, tmp_path, gpus=gpus)
        assert does_fit == (count == len(lines))
        assert expected == pytest.approx(float(CHANGE.match(lines[count - 1])[3]), abs=0.051)


def test_cheap_changes_come_first_and_go_on_where_a_dearer_one_has_moved_the_peak(tmp_path):
    """At first the step's copies of gradients are the peak, with states over four ranks it is the activations."""
    same = remedies_of(2.26, tmp_path, gpus=4).same
    assert flags_of(same) == ["--per-device-train-batch-size", "--zero-stage"] and same.is_enough
    assert same.flags == {"per_device_train_batch_size": 1, "gradient_accumulation_steps": 8, "zero_stage": 1}


@pytest.mark.parametrize(
    "micro, accumulated, meant, ranks, smaller",
    [
        (8, 1, 0, 1, "4 x 2"), (3, 1, 0, 1, "1 x 3"), (6, 1, 0, 2, "3 x 2"), (3, 2, 0, 2, "2 x 3"),
        (7, 3, 0, 1, "3 x 7"), (1, 5, 0, 1, ""), (6, 1, 48, 8, "3 x 2"), (6, 1, 48, 16, "3 x 1"),
        (5, 1, 64, 9, "1 x 5 for 45"),
    ],
)  # fmt: skip
def test_a_micro_batch_is_lowered_to_a_divisor_of_the_rows_of_a_step(micro, accumulated, meant, ranks, smaller):
    """Where --train-batch-size is given, 6 x 16 = 96 rows become the 48 that it means; 9 ranks cannot have its 64."""
    names = ("per_device_train_batch_size", "gradient_accumulation_steps", "train_batch_size")
    found = smaller_micro_batch(
        dict(zip(names, (micro, accumulated, meant), strict=True)), Target("GPU", GIB, (ranks,))
    )
    more = f" for {found[names[2]]}" if names[2] in found else ""
    assert (f"{found[names[0]]} x {found[names[1]]}{more}" if found else "") == smaller


@pytest.mark.parametrize("micro, meant, gpus, rows", [(3, 0, 1, 3), (6, 48, 16, 48), (5, 64, 9, 45)])
def test_an_odd_micro_batch_is_lowered_before_anything_else(tmp_path, micro, meant, gpus, rows):
    """A run with the flags of the line has as many rows an optimizer step as the remedy says."""
    planner, resolved = planned(2.2, tmp_path, gpus=gpus, more=f"--max-seq-len 1024 --train-batch-size {meant}")
    given = with_ranks(resolved.changed({"per_device_train_batch_size": micro}), gpus)
    line = str(Remedies.of(planner, given).same.changes[0])
    assert line.startswith("--per-device-train-batch-size 1")
    words = CHANGE.match(line)[1].split()
    given = [*WORDS.split(), "--train-batch-size", str(meant), *words]
    config = with_ranks(parse(SFTConfig, given, section="sft"), gpus).config
    assert batch_sizes(config, gpus)["rows of an optimizer step"] == rows


@pytest.mark.parametrize(
    "gained, on_host, said",
    [
        (3 * GIB, 0, "3.0 GiB (peak then 5.5 GiB)"),
        (GIB // 32, 0, "32 MiB (peak then 5.5 GiB)"),
        (GIB, 2 * GIB, "1.0 GiB (peak then 5.5 GiB) ... 2.0 GiB of the host"),
        (-GIB, GIB // 2, "0.5 GiB of the host"),
    ],
)
def test_a_line_says_what_a_change_gives_back_of_a_gpu_and_of_the_host(gained, on_host, said):
    plan = SimpleNamespace(reserved=lambda: (5.5 * GIB, 6 * GIB))
    change = Change(OTHER[1], {"lora_dim": 16}, None, plan, (gained, on_host))
    assert str(change) == naming(f"--lora-dim 16 ... {said}; ... adapters")


def test_a_change_that_gives_back_less_than_a_hundredth_of_what_is_missing_is_left_out():
    assert helps(GIB // 50, GIB) and helps(2, 1)
    assert not helps(GIB // 200, GIB) and not helps(GIB, 0) and not helps(GIB, -GIB)


@pytest.mark.slow
def test_changes_that_are_not_enough_end_with_what_else_helps(tmp_path):
    planner, resolved = planned(0.9, tmp_path, gpus=4)
    first, end = page(planner, resolved)
    assert first.startswith("sft does not fit: ") and end == f"  {NOT_ENOUGH}"


def test_another_training_is_an_answer_of_its_own_without_what_it_makes_needless(tmp_path, monkeypatch):
    """Adapters alone suffice, where the same training halves its micro-batch twice and offloads, with large buckets."""
    monkeypatch.setattr("pipeline.planning.changes.find_spec", lambda name: None)  # bitsandbytes, which is optional
    (tmp_path / "ds.json").write_text('{"zero_optimization": {"reduce_bucket_size": 5e8}}', encoding="utf-8")
    found = remedies_of(2.4, tmp_path, more=f"--deepspeed-config {tmp_path / 'ds.json'}")
    assert flags_of(found.same) == ["--per-device-train-batch-size", "--offload"]
    assert found.same.flags["per_device_train_batch_size"] == 2, "by two steps, told as one"
    assert found.same.is_enough
    assert found.another.flags == {"lora_dim": 16} and found.another.is_enough
    assert found.same.plan.host > found.another.plan.host == 0


def test_of_two_changes_one_of_which_is_needless_the_dearer_is_left_out():
    """10 GiB are lacking: of 4, 4 and 6 the last and either of the first suffice, the first two do not."""
    names = {"min_learning_rate_ratio": 4, "weight_decay": 4, "learning_rate": 6}

    def memory(resolved: Resolved) -> SimpleNamespace:
        values = dict(flat_items(resolved.config))
        taken = (20 - sum(gained for name, gained in names.items() if values[name] == 0.5)) * GIB
        return SimpleNamespace(reserved=lambda: (taken, taken), host=0, on_host=(0, 0))

    planner = SimpleNamespace(target=Target("GPU", 10 * GIB), memory=memory)
    options = [MemoryOption(lambda values, target, name=name: {name: 0.5}, "") for name in names]
    found = remedy(planner, parse(SFTConfig, WORDS.split(), section="sft"), options)
    assert found.is_enough and list(found.flags) == ["min_learning_rate_ratio", "learning_rate"]


@pytest.mark.slow
def test_a_plan_that_fits_by_keeping_the_training_has_no_other_answer(tmp_path):
    """Two GPUs share the optimizer states; with more memory a plan is tight, and is proposed what fits easily."""
    assert remedies_of(3.2, tmp_path, gpus=2).another is None
    planner, resolved = planned(4.0, tmp_path)
    assert fits(planner.memory(resolved), planner.target)
    first, _, change, end = page(planner, resolved)
    assert first.startswith("sft is tight: ") and change.startswith("    --per-device-train-batch-size 4")
    assert end.startswith(FITS) and not any(
        lacking(Remedies.of(planner, resolved).same.plan, planner.target, high=True)
    )


@pytest.mark.slow
def test_moments_in_8_bits_are_another_training_where_bitsandbytes_is(tmp_path, monkeypatch):
    for is_installed in (True, False):
        monkeypatch.setattr("pipeline.planning.changes.find_spec", lambda name, found=is_installed: found or None)
        another = remedies_of(2.8, tmp_path, more="--per-device-train-batch-size 2").another
        assert another.flags == ({"optimizer_states": "8bit"} if is_installed else {"lora_dim": 16})


def test_an_offload_has_moments_in_32_bits():
    """Its AdamW is torch's."""
    values = {"offload": False, "zero_stage": 2, "optimizer_states": "8bit"}
    assert optimizer_offload(values, Target("GPU", GIB)) == {"offload": True, "optimizer_states": "fp32"}


@pytest.mark.parametrize(
    ("size", "slots", "shared"),
    [(1, (8,), 2), (2, (8,), 4), (1, (6, 3), 3), (8, (8, 8), 0), (1, (5,), 5), (1, (1,), 0)],
)
def test_a_rollout_is_shared_by_more_gpus_of_one_machine(size, slots, shared):
    values = {"rollout_weights": "auto", "inference_tp_size": size}
    expected = {"inference_tp_size": shared} if shared else {}
    assert shared_rollout(values, Target("GPU", GIB, slots)) == expected
    assert shared_rollout(values | {"rollout_weights": "streamed"}, Target("GPU", GIB, slots)) == {}


def test_the_page_says_where_the_memory_of_the_host_is_not_known(tmp_path):
    planner, resolved = planned(80, tmp_path, more="--zero-stage 2 --offload true")
    needs, plan = planner.needs(resolved), planner.memory(resolved)
    (known, _), (unknown, _) = (
        verdict_lines(needs, plan, target) for target in (planner.target, parse_target("1xH100"))
    )
    parts = "2.18 offloaded, 1 process ... 2.00 to 4.50"
    assert known == naming(f"host ... 4.18 to 6.68 GiB ... 64.00 ... {parts}")
    assert unknown == naming(f"host ... 4.18 to 6.68 GiB ... {parts} ... unknown ... host_memory_gib")


@pytest.mark.slow
def test_an_answer_names_the_host_memory_that_it_takes_and_whether_the_host_has_it(tmp_path):
    """Offload takes 18 bytes of each of 125 million weights in blocks of powers of two, also where none is known."""
    file = tmp_path / "target.yaml"
    for known in (64, 0):
        planner, resolved = planned(2.6, tmp_path)
        if not known:
            file.write_text("memory_gib: 2.6", encoding="utf-8")
            planner, resolved = planner_of("sft", WORDS, str(file))
        lines = page(planner, resolved)
        assert any(line.startswith("    --offload true") for line in lines)
        host = "of its 64.0" if known else "whose memory is not known"
        ends = [line for line in lines if line.startswith(FITS)]
        assert ends[0] == naming(f"4.2 to 6.7 of the host, {host}") and ends[1] == naming(
            f"2.0 to 4.5 of the host, {host}"
        )


@pytest.mark.slow
def test_offload_is_no_help_where_the_host_lacks_the_memory(tmp_path):
    """16 bytes for each of 125 million weights are 1.9 GiB."""
    planner, resolved = planned(2.6, tmp_path, host_gib=3)
    found = Remedies.of(planner, resolved)
    assert not found.same.is_enough and found.another.is_enough
    assert found.another.flags == {"lora_dim": 16}
    assert found.instead == naming("other flags ... --lora-dim 16")
    line = page(planner, resolved)[1]
    assert line == naming("no change of flags ... 4.2 to 6.7 of the host, of its 3.0")


@pytest.mark.slow
def test_states_that_the_host_lacks_memory_for_can_be_on_disk(tmp_path):
    """20 bytes for each of 85 million weights of adapters are in no memory, but for four buffers of a sub-group."""
    more = "--zero-stage 3 --offload true --lora-dim 512 --sub-group-size 10000000"
    *_, head, takes, line = page(*planned(8, tmp_path, host_gib=3.2, more=more))
    assert head == naming("fits with these changes")
    assert takes.endswith(" of the host, of its 3.2")
    assert line == naming('"offload_optimizer": {"device": "nvme" ... 1.6 GiB of the host')


@pytest.mark.slow
def test_a_rollout_that_lacks_memory_moves_optimizer_states_away_first(tmp_path):
    """A rollout copies 12.6 GiB of Llama-7B's weights beside the states of both models."""
    file = tmp_path / "target.yaml"
    checkpointing = "--actor-gradient-checkpointing true --critic-gradient-checkpointing true"
    file.write_text("gpus: 4\nmemory_gib: 52\nhost_memory_gib: 400", encoding="utf-8")
    planner, resolved = planner_of("ppo", ppo(LLAMA, 1, 4, 3, checkpointing), str(file))
    assert planner.memory(resolved).worst == "generate"
    same = Remedies.of(planner, resolved).same
    assert [str(change.flags) for change in same.changes] == ["{'offload_optimizer_during_rollout': True}"]
    assert same.is_enough


@pytest.mark.parametrize(("given", "other"), [("actor", "critic"), ("critic", "actor")])
def test_a_model_is_quantised_beside_another_one_that_is_by_hand(given, other):
    """Adapters on int8 of one model are no reason to leave the base of the other one in 16 bits."""
    words = f"--actor-lora-dim 16 --critic-lora-dim 16 --{given}-quantization int8 --{other}-quantization none"
    _, resolved = planner_of("ppo", f"{words} --actor-model-name-or-path 125m --critic-model-name-or-path 125m", "24GB")
    change = adapters(0 if other == "actor" else 1, "int8")
    changed = change(dict(flat_items(resolved.config)), parse_target("24GB"))
    assert changed[f"{other}_quantization"] == "int8" and f"{given}_quantization" not in changed
    again = change(dict(flat_items(resolved.config)) | changed, parse_target("24GB"))
    assert f"{other}_quantization" not in again
