"""Plan runs, make them on the GPUs of this machine, and compare: peaks of torch's allocator by phase.

`plan_runs.py plan PLANNED` writes what the planner says of each run, on any machine; `measure PLANNED MEASURED GPUS`
makes the runs, several at a time where their planned memory allows; `table PLANNED MEASURED` prints both as
Markdown, and how near the phases are. Both files are compressed JSON lines (`.jsonl.bz2`), one for each run.
Runs marked held-out are of models and numbers of GPUs that no constant of the planner knows. Runs that have their GPUs
to themselves are compared in their times, too. `--list stored` or `--list shared` behind all words takes the runs that
store their logits, or those whose groups pass their prompts once.
"""

import os
import shutil
import sys
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

from benchmarks.learning.quality import read_kept, write_kept
from benchmarks.speed import phases
from benchmarks.speed.free_memory import FreeMemory
from benchmarks.speed.jobs import (
    NO_HELD_OUT,
    ROOT,
    BenchError,
    environment,
    flags,
    launched,
    output_words,
    plain,
    run_logged,
    showing,
)
from benchmarks.speed.planned import PLANNERS, Run, buckets_of_then, peak_summary, planner_of
from benchmarks.speed.random_models import make_full_tokenizer, make_model, make_pairs, make_prompts
from benchmarks.speed.run_list import LISTS, RUNS, TIMED_STEPS, PlannedRun
from demo.make import make_data
from pipeline.configuration.flag_table import flag_table
from pipeline.configuration.flags import parse
from pipeline.files import GIB
from pipeline.planning.fastest import auto_flags
from pipeline.planning.page import StagePlanner
from rlhf.stages import stage_of

PHASE_NAMES, TIMES = (*phases.PHASES, "evaluate"), tuple(phases.PPO_TIMES)
STAGES = {"sft": "step1_sft", "reward": "step2_reward", "ppo": "step3_ppo", "dpo": "step3_dpo"}
# run -> phase -> GiB; of timed runs also `<phase>_s` -> seconds. A phase whose plan was made again after it had been
# measured also has `<phase>_at_first`, the GiB of the plan before.
Peaks = dict[str, dict[str, float]]
MEASURED = ROOT / "benchmarks/raw/memory_measured_h200_202611.jsonl.bz2"
WARM_UP, AT_ONCE, LARGEST_ROLLOUT = 2, 10, 480
LONGEST_ROW = 2048  # tokens, of SFT; a word is one token or more
SCORING = ("--critic", "--reward_model")  # roles whose models have a head for scores
ROOM_GIB = 4.0  # of each process beside its planned tensors: context, libraries, the allocator's unused blocks


def shapes_of(run: PlannedRun) -> list[tuple[str, bool]]:
    """Return the run's models: their shapes, and whether they are made as reward models."""
    words = run.words.split()
    pairs = [(word, words[n + 1]) for n, word in enumerate(words) if word.endswith("model_name_or_path")]
    return [(shape, name.startswith(SCORING)) for name, shape in pairs]


def planner_for(run: PlannedRun) -> tuple[StagePlanner, Any]:
    """Return the planner of a run, on so many H200s, and its settings."""
    target = f"{run.gpus}xH200"
    return planner_of(run.section, run.words, target, PLANNERS[run.planner], large_buckets=not run.chooses)


def plan(file: Path, runs: Sequence[PlannedRun] = RUNS) -> None:
    """Write the planned GiB of each run's phases, and the seconds of those that are timed.

    A plan that the file has stays as it is: its run may have been made since.
    """
    planned = read_peaks(file)
    for run in (run for run in runs if run.name not in planned):
        planner, resolved = planner_for(run)
        memory = planner.memory(resolved)
        planned[run.name] = {phase: round(peak.total / GIB, 3) for phase, peak in memory.phases.items()}
        seconds = planner.seconds(resolved, memory) if run.alone else {}
        planned[run.name] |= {f"{phase}_s": round(value, 3) for phase, value in seconds.items()}
    write_peaks(file, planned)


def make_inputs(folder: Path, runs: Sequence[PlannedRun]) -> None:
    """Write the models of these runs, those that are not there yet, and rows that are longer than they may be."""
    if not (folder / "pairs.jsonl").exists():
        make_data(folder, seed=0)
        make_prompts(folder / "prompts.jsonl", TIMED_STEPS * LARGEST_ROLLOUT, words=500)
        make_pairs(folder / "sft.jsonl", 400, prompt_words=9, responses=(LONGEST_ROW, LONGEST_ROW))
        make_pairs(folder / "pairs.jsonl", 400, prompt_words=1000, responses=(60, 60))
    for run in runs:
        if words := response_words(run):
            make_pairs(folder / f"pairs-{words}.jsonl", 400, prompt_words=1000, responses=(words, words))
    tokenizer = make_full_tokenizer(folder, {shape for run in RUNS for shape, _ in shapes_of(run)})
    for shape, scores in sorted({model for run in runs for model in shapes_of(run)}):
        model = folder / folder_name(shape, scores)
        if not (model / "tokenizer.json").exists():
            make_model(model, shape, tokenizer, scores=scores)


def response_words(run: PlannedRun) -> int:
    """Return the words of each response of a run whose pairs are nearly all response, since its logits are stored.

    A word has 1.1 tokens; 0: the run reads other rows.
    """
    words = run.words.split()
    is_preferred = run.planner == "without sharing" and run.section == "dpo"
    return int(0.85 * int(words[words.index("--max_seq_len") + 1]) / 1.1) if is_preferred else 0


def folder_name(shape: str, scores: bool) -> str:
    return f"{shape}-scores" if scores else shape


def run_words(run: PlannedRun, inputs: Path) -> list[object]:
    """Return the command line's flags, models as folders below `inputs`."""
    words: list[object] = list(run.words.split())
    for n, word in enumerate(words[:-1]):
        if str(word).endswith("model_name_or_path"):
            words[n + 1] = inputs / folder_name(str(words[n + 1]), scores=str(word).startswith(SCORING))
    responses = response_words(run)
    rows = f"pairs-{responses}" if responses else {"sft": "sft", "ppo": "prompts"}.get(run.section, "pairs")
    shared = {"data_path": inputs / f"{rows}.jsonl", "data_output_path": inputs / "cache", "max_steps": run.steps}
    words += [*flags(shared), *NO_HELD_OUT]
    return [*words, *([] if run.chooses else assumed(run, words))]


def assumed(run: PlannedRun, words: Sequence[object]) -> list[object]:
    """Return the defaults of the flags that the run would choose on GPUs and that its plan takes, and its buckets."""
    resolved = parse(stage_of(run.section).config, list(map(str, words)), section=run.section)
    table = flag_table(type(resolved.config))
    left = {name: table[name].default for name in auto_flags(resolved)}
    return flags({name: str(value).lower() for name, value in left.items()} | {"deepspeed_config": buckets_of_then()})


def measure(file: Path, planned: Peaks, num_gpus: int, only: str = "", *, runs: Sequence[PlannedRun] = RUNS) -> None:
    """Make the runs whose names contain `only`, and add the highest GiB of their phases to `file`.

    A run that ran out of memory beside others and halved its micro-batch is another run: it is not written.
    """
    import torch

    inputs, measured = file.parent / "plan-inputs", read_peaks(file)
    waiting = [run for run in runs if run.gpus <= num_gpus and only in run.name and run.name not in measured]
    make_inputs(inputs, waiting)
    torch.cuda.empty_cache()
    whole = torch.cuda.get_device_properties(0).total_memory / GIB
    memory = FreeMemory([whole] * num_gpus)
    # Not the last byte: sums of floats.
    all_of_it = 0.99 * whole

    def highest(run: PlannedRun) -> float:
        return max(peaks_in(planned[run.name]).values())

    def made(run: PlannedRun) -> None:
        with memory.take(run.gpus, all_of_it if run.alone else highest(run) * 1.1 + ROOM_GIB) as gpus:
            try:
                peaks = peaks_of(run, inputs, gpus)
            except BenchError as error:
                print(f"[plan_runs] failed: {error}", file=sys.stderr, flush=True)
                return
            with memory.changed:
                measured[run.name] = peaks
                write_peaks(file, measured)

    with ThreadPoolExecutor(AT_ONCE) as pool:
        list(pool.map(made, sorted(waiting, key=lambda run: (run.alone, -highest(run)))))


def peaks_of(
    run: PlannedRun, inputs: Path, gpus: list[int], *, read: Callable[[Path], object] = lambda run_dir: None
) -> dict[str, float]:
    """Make a run on these GPUs; return the GiB of its phases, or its highest, and `reserved`, and of a run that is
    timed the seconds of its phases. read: is given the run's folder before it is deleted. Raises BenchError."""
    output = inputs / "runs" / plain(run.name)
    output.mkdir(parents=True, exist_ok=True)
    command = launched(f"{STAGES[run.section]}.main", [*run_words(run, inputs), *output_words(output)], gpus=run.gpus)
    threads = max((os.cpu_count() or 1) // run.gpus, 1) if run.alone else 1  # of optimizers on the host
    variables = environment() | showing(gpus) | {"OMP_NUM_THREADS": str(threads)}
    run_logged(f"[plan_runs] {run.name}", command, inputs / f"{plain(run.name)}.log", variables)
    lines = phases.training_lines(output / "run")
    if len({line["micro_batch_size"] for line in lines}) > 1:
        raise BenchError(f"{run.name}: the micro-batch was halved, there was no memory beside other runs")
    found = phases.measure(output / "run", warm_up=WARM_UP if run.alone else 0)
    read(output / "run")
    shutil.rmtree(output, ignore_errors=True)
    by_phase = {phase: found[f"{phase}_peak_gib"] for phase in phases.PHASES if f"{phase}_peak_gib" in found}
    # Stages 1 and 2 have one figure, that of training: nothing is evaluated.
    by_phase = by_phase or {"train": found["peak_gib"]}
    if run.alone:
        times = {name: found[name] for name in TIMES if name in found}
        if "train_s" in times:  # a line of metrics is a step, a plan's time that of a rollout with all its steps
            times["train_s"] *= steps_of_a_rollout(lines)
        by_phase |= times or {"train_s": found["step_s"]}
    by_phase["reserved"] = max(line.get("gpu_reserved_gib", 0.0) for line in lines)  # no phase: what the allocator held
    return {name: round(value, 3) for name, value in by_phase.items()}


def steps_of_a_rollout(lines: Sequence[dict[str, Any]]) -> int:
    """Return how many lines of metrics there are from one rollout to the next."""
    first, second = [number for number, line in enumerate(lines) if "time/generate_s" in line][:2]
    return second - first


def read_peaks(file: Path) -> dict[str, Any]:
    """Return what a file has of each run, by its name; {} if there is no file."""
    return {line.pop("run"): line for line in read_kept(file)} if file.exists() else {}


def write_peaks(file: Path, figures: Mapping[str, Mapping[str, Any]]) -> None:
    """Write a line for each run."""
    write_kept(file, ({"run": name, **found} for name, found in figures.items()))


def peaks_in(figures: dict[str, float]) -> dict[str, float]:
    """Return the GiB of phases, without seconds and what the allocator held."""
    return {name: value for name, value in figures.items() if name in PHASE_NAMES}


def verdict(expected: float, value: float) -> str:
    """Return whether a planned peak is within the larger of 5 % and 1 GiB of the measured one."""
    return "yes" if abs(expected - value) <= max(1.0, 0.05 * value) else "NO"


def table(planned: Peaks, measured: Peaks, runs: Sequence[PlannedRun] = RUNS) -> list[str]:
    """Return the lines of the table in Markdown: each measured phase of each run, held-out runs marked.

    A phase that was planned again after it was measured is no evidence: it says what its first plan was.
    """
    lines = ["| run | GPUs | phase | planned | measured | difference | within |", "|---|---|---|---|---|---|---|"]
    for run in runs:
        name = f"{run.name} (held out)" if run.held_out else run.name
        if run.name not in measured:
            worst, gib = max(peaks_in(planned[run.name]).items(), key=lambda peak: peak[1])
            lines.append(f"| {name} | {run.gpus} | {worst} | {gib:.1f} | not run | | |")
        for phase, value in peaks_in(measured.get(run.name, {})).items():
            expected = planned[run.name][phase]
            near = verdict(expected, value)
            if (first := planned[run.name].get(f"{phase}_at_first")) is not None:
                near = f"planned again; at first {first:.1f}: {verdict(first, value)}"
            cells = (name, run.gpus, phase, f"{expected:.1f}", f"{value:.1f}", f"{expected - value:+.1f}", near)
            lines.append(f"| {' | '.join(map(str, cells))} |")
    return lines


def time_table(planned: Peaks, measured: Peaks, runs: Sequence[PlannedRun] = RUNS) -> list[str]:
    """Return the lines of the table of times in Markdown: each phase of the runs that were alone on their GPUs."""
    lines = ["| run | GPUs | phase | planned | measured | difference |", "|---|---|---|---|---|---|"]
    for run in filter(lambda run: run.alone, runs):
        for name in TIMES:
            if (value := measured.get(run.name, {}).get(name)) is not None:
                expected = planned[run.name][name]
                cells = (run.name, run.gpus, name.removesuffix("_s"), f"{expected:.2f} s", f"{value:.2f} s")
                lines.append(f"| {' | '.join(map(str, cells))} | {expected / value - 1:+.0%} |")
    return lines


def alone_runs(measured: Peaks) -> list[Run]:
    """Return the runs whose times were measured, as planned.py compares them."""
    return [
        Run(run.name, run.section, f"{run.gpus}xH200", run.words, 0, f"raw/{MEASURED.name.partition('.')[0]}",
            seconds=tuple(measured[run.name][name] for name in TIMES if name in measured[run.name]))
        for run in RUNS
        if run.name in measured
    ]  # fmt: skip


def main() -> None:
    """Plan, measure, or print the tables; a command with too few words is answered with all three."""
    words, runs = sys.argv[1:], RUNS
    if words[-2:-1] == ["--list"]:
        *words, _, name = words
        runs = LISTS[name]
    if len(words) < {"plan": 2, "measure": 4, "table": 3}.get(" ".join(words[:1]), sys.maxsize):
        sys.exit(__doc__)
    command, file = words[0], Path(words[1])
    if command == "plan":
        plan(file, runs)
        return
    planned, measured = read_peaks(file), Path(words[2])
    if command == "measure":
        measure(measured, planned, int(words[3]), *words[4:], runs=runs)
    found = read_peaks(measured)
    lines = table(planned, found, runs)
    print(*lines, "", *peak_summary(lines), "", *time_table(planned, found, runs), sep="\n")


if __name__ == "__main__":
    main()
