"""The comparison of planned with measured peaks: what it calls near, how runs share GPUs, and the page's table."""

import threading

import pytest
from support.marks import slow_but
from support.source_tree import ROOT

from benchmarks.speed.free_memory import FreeMemory
from benchmarks.speed.long_rows import points_in
from benchmarks.speed.long_rows import table as long_rows_table
from benchmarks.speed.plan_runs import (
    main,
    peaks_in,
    planner_for,
    read_peaks,
    run_words,
    shapes_of,
    steps_of_a_rollout,
    table,
    time_table,
    write_peaks,
)
from benchmarks.speed.planned import RUNS as COMPARED
from benchmarks.speed.planned import TIMES, cells_of, peak_summary
from benchmarks.speed.random_models import SHAPES
from benchmarks.speed.run_list import METHODS, NEXT, PREFERENCES, RUNS, PlannedRun
from pipeline.configuration.flags import parse
from pipeline.files import GIB
from pipeline.planning.fastest import auto_flags
from rlhf.stages import stage_of

RAW = ROOT / "benchmarks/raw"
PLANNED, MEASURED = (read_peaks(RAW / f"memory_{kind}_h200_202611.jsonl.bz2") for kind in ("plans", "measured"))
STILL_FAR = ("PPO, OPT-13B and 350M, ZeRO-3, checkpointing, optimizers on the host", "score")
# Planned before they were made, and missed; the planner has a rule more for each since (benchmarks/reports/memory.md).
MISSED = {
    STILL_FAR,
    ("SFT, OLMo-2-1B, ZeRO-3, checkpointing, 20 rows of 640", "train"),
    ("reward, Mistral-7B int8 LoRA 16, ZeRO-0, 2 pairs of 704", "train"),
}
# What is planned now is nearer: plans took weights that LoRA copies for larger than they are, norms of queries and keys
# for too small for the kernel of norms, and did not know two rules.
BY_NEW_RULES = "PPO, Mistral-7B LoRA 32 and Pythia-410M, ZeRO-2, 96 rows of 192 + 832"  # by these rules, then made
WITH_LORA = {
    run.name for run in RUNS if "actor_lora_dim" in run.words and run.planner == "of then" and run.name in MEASURED
}
MENDED = (WITH_LORA - {BY_NEW_RULES}) | {
    "SFT, Qwen3-0.6B, ZeRO-2, 12 rows of 384",
    "SFT, OLMo-2-1B, ZeRO-3, checkpointing, 20 rows of 640",
    "reward, Mistral-7B int8 LoRA 16, ZeRO-0, 2 pairs of 704",
}
PLANNED_AT_ONCE = (
    "reward, OPT-125M, ZeRO-3",
    "SFT, OPT-1.3B, ZeRO-2, optimizer on the host",
    "PPO, OPT-350M and 125M, ZeRO-0",
)


def test_runs_have_names_of_their_own_and_known_models():
    assert len({run.name for run in RUNS}) == len(RUNS) >= 24 and sum(run.held_out for run in RUNS) >= 8
    assert all(shape in SHAPES for run in RUNS for shape, _ in shapes_of(run))
    known = {shape for run in RUNS if not run.held_out for shape, _ in shapes_of(run)}
    for run in (run for run in RUNS if run.held_out):
        assert run.gpus > 1 or not known.issuperset(shape for shape, _ in shapes_of(run)), run.name


def values(words: str, *flags: str) -> dict[str, set[str]]:
    """The values of these flags on a command line."""
    given = words.split()
    return {flag: {given[n + 1] for n, word in enumerate(given) if word == f"--{flag}"} for flag in flags}


def test_the_next_runs_are_of_families_lengths_batches_and_sizes_that_no_run_had():
    flags = ("max_seq_len", "max_prompt_seq_len", "max_answer_seq_len", "per_device_generation_batch_size",
             "per_device_train_batch_size", "model_name_or_path", "actor_model_name_or_path")  # fmt: skip
    runs = [run for run in RUNS if run not in (*NEXT, *METHODS, *PREFERENCES)]
    earlier = [run.words for run in (*runs, *COMPARED, *TIMES)]
    before = {flag: {"256", "32"}.union(*(values(words, *flags)[flag] for words in earlier)) for flag in flags}
    assert len(NEXT) == 12 and all(run.held_out and run.gpus == 1 for run in NEXT)
    for run in NEXT:
        known = {flag: found & before[flag] for flag, found in values(run.words, *flags).items()}
        assert set().union(*known.values()) == set(), run.name
    families = {shape.partition("-")[0] for run in runs for shape, _ in shapes_of(run)}
    assert families.isdisjoint(shape.partition("-")[0] for run in NEXT for shape, _ in shapes_of(run))


@pytest.mark.parametrize("section", ["sft", "reward", "ppo"])
def test_a_run_chooses_nothing_that_its_plan_takes_as_it_is(section, tmp_path):
    for run in (run for run in RUNS if run.section == section):
        resolved = parse(stage_of(section).config, list(map(str, run_words(run, tmp_path))), section=section)
        assert auto_flags(resolved) == [], run.name
        assert section != "ppo" or resolved.config.ppo.old_log_probs == "trainer", run.name


def test_the_larger_of_a_gib_and_a_twentieth_is_near():
    run = next(run for run in RUNS if run.section == "ppo")
    planned = {other.name: {"train": 3.25} for other in RUNS}
    planned[run.name] = {"generate": 10.0, "score": 10.0, "train": 105.0}
    measured = {run.name: {"generate": 10.9, "score": 8.9, "train": 100.1}}
    lines = [line for line in table(planned, measured) if run.name in line]
    assert [line.split(" | ")[2:] for line in lines] == [
        ["generate", "10.0", "10.9", "-0.9", "yes |"],
        ["score", "10.0", "8.9", "+1.1", "NO |"],
        ["train", "105.0", "100.1", "+4.9", "yes |"],
    ]
    assert sum("| train | 3.2 | not run |" in line for line in table(planned, measured)) == len(RUNS) - 1


def test_a_phase_that_was_planned_again_says_what_its_first_plan_was():
    run = RUNS[0]
    planned = {other.name: {"train": 1.0} for other in RUNS}
    planned[run.name] = {"train": 25.0, "train_at_first": 27.1}
    assert table(planned, {run.name: {"train": 25.0}})[2].endswith(
        "| train | 25.0 | 25.0 | +0.0 | planned again; at first 27.1: NO |"
    )
    at_first = [name for figures in PLANNED.values() for name in figures if name.endswith("_at_first")]
    assert sorted(at_first) == ["score_at_first", *["train_at_first"] * 3]


def test_figures_are_written_as_they_are_read(tmp_path):
    file = tmp_path / "figures.jsonl.bz2"
    assert read_peaks(file) == {}
    write_peaks(file, MEASURED)
    assert read_peaks(file) == MEASURED and list(read_peaks(file)) == list(MEASURED)
    assert file.read_bytes() == (RAW / "memory_measured_h200_202611.jsonl.bz2").read_bytes()


def test_the_times_of_long_rows_are_those_of_the_files():
    """Planned and measured seconds and GiB of the page's points, in the order of the measured ones."""
    planned = points_in(RAW / "long_rows_again_h200_202611_planned.jsonl.bz2")
    measured = points_in(RAW / "long_rows_again_h200_202611.jsonl.bz2")
    rows = [cells for cells in cells_of(list(long_rows_table(planned, measured))) if cells[5]]
    page = (ROOT / "benchmarks/reports/long_rows_h200_202611.md").read_text(encoding="utf-8").splitlines()
    shown = [line.strip("| ").split(" | ") for line in page if " at once" in line]
    assert len(planned) == 19 and len(rows) == len(shown) == 16
    for cells, line in zip(rows, shown, strict=True):
        seconds = [cell.removesuffix(" s") for cell in (line[1], line[2], line[4])]
        assert [cells[n].removesuffix(" s") for n in (1, 2, 4)] == seconds and ", ".join(cells[6:]) == line[5]


def test_a_run_waits_for_memory_of_its_gpus():
    memory, order = FreeMemory([100.0, 100.0]), []
    with memory.take(1, 60) as first, memory.take(1, 60) as second:
        assert sorted(first + second) == [0, 1]

        def both() -> None:
            with memory.take(2, 50) as gpus:
                order.append(gpus)

        waiting = threading.Thread(target=both)
        waiting.start()
        waiting.join(0.2)
        assert not order
    waiting.join(5)
    assert order == [[0, 1]] and memory.free == [100.0, 100.0]


def test_times_are_compared_of_runs_that_were_alone():
    alone = next(run for run in RUNS if run.alone and run.section == "ppo")
    other = next(run for run in RUNS if not run.alone and run.section == "ppo")
    seconds = {"generate_s": 1.5, "score_s": 0.5, "train_s": 2.0}
    found = {run.name: {"train": 9.0, "generate_s": 2.0, "score_s": 0.5, "train_s": 1.0} for run in (alone, other)}
    assert [line.split(" | ")[2:] for line in time_table({alone.name: seconds, other.name: seconds}, found)[2:]] == [
        ["generate", "1.50 s", "2.00 s", "-25% |"],
        ["score", "0.50 s", "0.50 s", "+0% |"],
        ["train", "2.00 s", "1.00 s", "+100% |"],
    ]


@pytest.mark.parametrize("run", MEASURED)
def test_every_measured_phase_is_within_a_gib_or_a_twentieth_of_its_plan(run):
    phases = peaks_in(MEASURED[run])
    far = {phase: (PLANNED[run][phase], gib) for phase, gib in phases.items()
           if abs(PLANNED[run][phase] - gib) > max(1.0, gib / 20)}  # fmt: skip
    assert phases and far.keys() == {phase for name, phase in MISSED if name == run}, "(planned, measured)"


SPELT = {3: "three", 4: "four"}


def test_the_figures_of_the_page_are_those_of_the_files():
    """Numbers of runs and phases, how near each phase is, and the figures of what was missed or planned again."""
    page = (ROOT / "benchmarks/reports/memory.md").read_text(encoding="utf-8")
    lines, text = table(PLANNED, MEASURED), " ".join(page.split())
    misses = text.partition("## The misses")[2].replace(" GiB", "")
    assert MEASURED.keys() <= {run.name for run in RUNS} == PLANNED.keys()
    assert "\n".join(peak_summary(lines)) in page
    held_out = sum(run.held_out for run in RUNS if run.name in MEASURED)
    assert f"plans {len(RUNS)} runs, and {len(MEASURED)} were made, {held_out} of them held out" in text
    phases, again = sum(len(peaks_in(found)) for found in MEASURED.values()), 0
    for name, found in MEASURED.items():
        for phase, gib in peaks_in(found).items():
            if f"{phase}_at_first" in PLANNED[name]:
                again += 1
                assert f"{PLANNED[name][f'{phase}_at_first']:.1f} for {gib:.1f}" in misses
            if (name, phase) in MISSED:
                assert f"{PLANNED[name][phase]:.1f} for {gib:.1f}" in misses
    assert f"has {phases} phases: {SPELT[again]} were planned again" in text
    assert f"Of {phases - again} phases," in text and f"all but {SPELT[len(MISSED)]} are within" in text


CASES = slow_but([run for run in RUNS if run.name in PLANNED_AT_ONCE], RUNS)


@pytest.mark.few(2)
@pytest.mark.parametrize("run", CASES, ids=lambda run: run.name)
def test_the_planner_still_says_what_was_planned(run: PlannedRun):
    planner, resolved = planner_for(run)
    found = {phase: peak.total / GIB for phase, peak in planner.memory(resolved).phases.items()}
    if run.name in MENDED:
        measured = peaks_in(MEASURED[run.name])
        first = next(iter(measured))  # of PPO the rollout, of other stages training
        assert abs(found[first] - measured[first]) < abs(PLANNED[run.name][first] - measured[first])
        near = {phase: pytest.approx(gib, abs=max(1.0, gib / 20)) for phase, gib in measured.items()}
        assert {phase: found[phase] for phase in measured} == near
        return
    planned = {phase: gib for phase, gib in peaks_in(PLANNED[run.name]).items() if (run.name, phase) != STILL_FAR}
    assert {phase: found[phase] for phase in planned} == pytest.approx(planned, abs=0.001)


def test_the_time_of_an_update_is_that_of_all_steps_of_its_rollout():
    assert steps_of_a_rollout([{"time/generate_s": 2.0}, {}, {}, {"time/generate_s": 2.0}, {}]) == 3


@pytest.mark.parametrize(
    "words", [(), ("plan",), ("measure", "planned.json", "measured.json"), ("help", "x", "y", "z")]
)
def test_too_few_words_are_answered_with_the_commands(monkeypatch, words):
    monkeypatch.setattr("sys.argv", ["plan_runs.py", *words])
    with pytest.raises(SystemExit, match="`plan_runs.py plan PLANNED` writes"):
        main()
