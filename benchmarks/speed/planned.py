"""Planned against measured: `python -m benchmarks.speed.planned` prints tables of the planner against reports.

Summaries of them are in benchmarks/reports/memory.md and times.md, the tables of November 2026 in
benchmarks/raw/plans_202611.jsonl.bz2. Measured are peaks of torch's allocator in GiB and seconds of phases, from the
reports in benchmarks/reports; the planner counts the same runs.
"""

import atexit
import json
import shutil
import tempfile
from collections import defaultdict
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import cache
from pathlib import Path
from typing import Any

from benchmarks.speed.random_models import config_of
from benchmarks.speed.run_list import PlannerName
from pipeline.configuration.flags import parse
from pipeline.configuration.rank_rules import with_ranks
from pipeline.files import GIB
from pipeline.launching.target import parse_target
from pipeline.models.forward import causal_lm, fused_layers
from pipeline.planning.memory import MemoryPlan
from pipeline.planning.page import StagePlanner
from pipeline.preparation.engine_jsons import engine_jsons
from rlhf.stages import stage_of

BUCKETS_OF_THEN = dict.fromkeys(("reduce_bucket_size", "allgather_bucket_size"), 500_000_000)
H200, TWO, FOUR = "1xH200", "2xH200", "4xH200"
OPT = "--actor_model_name_or_path 1.3b --critic_model_name_or_path 350m --old_log_probs sampler"
LLAMA = "--actor_model_name_or_path llama-7b --critic_model_name_or_path llama-1b"


@dataclass(frozen=True, slots=True)
class Run:
    """A run that was measured: its flags without folders, and the peak in GiB of its highest phase, or of one.

    measured: 0 of a run whose times alone are compared. seconds: of its phases, generate, score and train, or train
    alone.
    """

    name: str
    section: str
    target: str
    words: str
    measured: float
    source: str
    phase: str = ""
    seconds: tuple[float, ...] = ()


def ppo(models: str, micro: int, steps: int, zero_stage: int, rest: str = "") -> str:
    return (
        f"{models} --per_device_generation_batch_size 64 --per_device_train_batch_size {micro} {rest} "
        f"--gradient_accumulation_steps {steps} --actor_zero_stage {zero_stage} --critic_zero_stage {zero_stage}"
    )


def gpt2_xl(zero_stage: int, rest: str = "") -> str:
    return (
        f"--model_name_or_path gpt2-xl --zero_stage {zero_stage} --per_device_train_batch_size 8 "
        f"--gradient_accumulation_steps 1 --max_seq_len 512 {rest}"
    )


SUPERVISED = "--zero_stage 2 --per_device_train_batch_size 16 --gradient_accumulation_steps 4"
LLAMA_3 = "--actor_model_name_or_path llama-3-8b --critic_model_name_or_path llama-3-1b"
QWEN = "--actor_model_name_or_path qwen2.5-1.5b --critic_model_name_or_path qwen2.5-0.5b --old_log_probs trainer"
LORA_8B = ppo(LLAMA_3, 16, 4, 2, "--actor_lora_dim 64")
LORA_7B = ppo(LLAMA, 4, 16, 2, "--actor_lora_dim 64")
STRATEGIES, OF_TWO = "raw/strategies_h200_202611", "raw/strategies_h200x2_202611"
ALL_ON_HOST = "--offload true --offload_parameters true"
CHECKPOINTING = "--actor_gradient_checkpointing true --critic_gradient_checkpointing true"
# 64 rows of 256 + 1,024 tokens, a critic and a reward model of 1B: GiB that were measured of each phase.
LONG_7B = ppo(LLAMA, 8, 8, 2, "--actor_lora_dim 64 --max_answer_seq_len 1024")
LONG_7B_MEASURED = {"generate": 83.6, "score": 83.5, "train": 132.45}
# The last one was measured while a planner was wished for; its other settings are those of the benchmark's rows.
RUNS = (
    Run("SFT, OPT-1.3B", "sft", H200, f"--model_name_or_path 1.3b {SUPERVISED}", 29.4, "sft_h200_202611",
        seconds=(0.503,)),
    Run("reward, OPT-350M", "reward", H200, f"--model_name_or_path 350m {SUPERVISED}", 14.3, "reward_h200_202611",
        seconds=(0.283,)),
    Run("PPO, OPT-1.3B, micro-batch 16", "ppo", H200, ppo(OPT, 16, 4, 2), 43.4, "ppo_h200_202611"),
    Run("PPO, OPT-1.3B, micro-batch 32", "ppo", H200, ppo(OPT, 32, 2, 2), 52.637, "raw/ppo_h200_202611_lora",
        seconds=(0.686, 0.221, 0.618)),
    Run("PPO, OPT-1.3B, micro-batch 32, LoRA 64", "ppo", H200, ppo(OPT, 32, 2, 2, "--actor_lora_dim 64"), 36.056,
        "raw/ppo_h200_202611_lora", seconds=(0.699, 0.239, 0.599)),
    Run("PPO, OPT-1.3B, micro-batch 16, ZeRO-1", "ppo", FOUR, ppo(OPT, 16, 4, 1), 29.6, "raw/ppo_h200x4_202611_scaling",
        seconds=(0.687, 0.226, 0.645)),
    Run("PPO, OPT-1.3B, micro-batch 32, ZeRO-2", "ppo", FOUR, ppo(OPT, 32, 2, 2), 38.6, "raw/ppo_h200x4_202611_zero3"),
    Run("PPO, OPT-1.3B, micro-batch 32, ZeRO-3", "ppo", FOUR, ppo(OPT, 32, 2, 3), 39.3, "raw/ppo_h200x4_202611_zero3",
        seconds=(0.710, 0.241, 0.716)),
    Run("PPO, Llama-7B LoRA 64, critic 1B", "ppo", H200, LORA_7B, 59.624, "raw/ppo_h200_202611_memory", "generate"),
    Run("PPO, Llama-7B LoRA 64, critic 1B", "ppo", H200, LORA_7B, 59.749, "raw/ppo_h200_202611_memory", "score"),
    Run("PPO, Llama-7B LoRA 64, critic 1B", "ppo", H200, LORA_7B, 71.17, "raw/ppo_h200_202611_memory", "train",
        seconds=(2.286, 2.793, 4.416)),
    Run("PPO, Llama-3-8B LoRA 64, critic Llama-3-1B", "ppo", H200, LORA_8B, 54.380,
        "raw/ppo_h200_202611_llama_3_8b", "generate"),
    Run("PPO, Llama-3-8B LoRA 64, critic Llama-3-1B", "ppo", H200, LORA_8B, 54.506,
        "raw/ppo_h200_202611_llama_3_8b", "score"),
    Run("PPO, Llama-3-8B LoRA 64, critic Llama-3-1B", "ppo", H200, LORA_8B, 97.004,
        "raw/ppo_h200_202611_llama_3_8b", "train", seconds=(1.832, 2.181, 2.629)),
    Run("PPO, Qwen2.5-1.5B, critic 0.5B", "ppo", H200, ppo(QWEN, 32, 2, 2), 75.528,
        "raw/ppo_h200_202611_qwen2_5_1_5b", seconds=(0.601, 0.538, 0.882)),
    Run("SFT, GPT-2-XL, ZeRO-0", "sft", H200, gpt2_xl(0), 37.8, STRATEGIES, seconds=(0.187,)),
    Run("SFT, GPT-2-XL, ZeRO-1", "sft", H200, gpt2_xl(1), 37.3, STRATEGIES, seconds=(0.160,)),
    Run("SFT, GPT-2-XL, ZeRO-2", "sft", H200, gpt2_xl(2), 37.3, STRATEGIES, seconds=(0.152,)),
    Run("SFT, GPT-2-XL, ZeRO-3", "sft", H200, gpt2_xl(3), 41.2, STRATEGIES, seconds=(0.221,)),
    Run("SFT, GPT-2-XL, ZeRO-3, all on the host", "sft", H200, gpt2_xl(3, ALL_ON_HOST), 19.9, STRATEGIES),
    Run("SFT, GPT-2-XL, ZeRO-0", "sft", TWO, gpt2_xl(0), 37.8, OF_TWO, seconds=(0.195,)),
    Run("SFT, GPT-2-XL, ZeRO-1", "sft", TWO, gpt2_xl(1), 28.6, OF_TWO, seconds=(0.159,)),
    Run("SFT, GPT-2-XL, ZeRO-3", "sft", TWO, gpt2_xl(3), 32.5, OF_TWO, seconds=(0.236,)),
    Run("SFT, GPT-2-XL, ZeRO-3, all on the host", "sft", TWO, gpt2_xl(3, ALL_ON_HOST), 20.0, OF_TWO),
    *(Run("PPO, Llama-7B LoRA 64, critic 1B, 1,024 new tokens", "ppo", H200, LONG_7B, gib, "one run", phase)
      for phase, gib in LONG_7B_MEASURED.items()),
    Run("PPO, Llama-7B, critic 1B, ZeRO-3, checkpointing", "ppo", FOUR,
        ppo(LLAMA, 4, 16, 3, f"--old_log_probs sampler --max_answer_seq_len 1024 {CHECKPOINTING}"), 105.0, "one run"),
)  # fmt: skip

OFFLOAD = "raw/offload_h200_202611"
OLD_LOG_PROBS = OPT.replace("sampler", "trainer")
BATCH_128 = ("generation_batch_size 64", "generation_batch_size 128")

# Runs whose times are compared beside those of RUNS. Those of OFFLOAD, and ZeRO-2 on two GPUs, were made while other
# runs were at work on the machine.
TIMES = (
    Run("PPO, OPT-1.3B, micro-batch 64", "ppo", H200, ppo(OPT, 64, 1, 2), 0, "raw/ppo_h200_202611_training",
        seconds=(0.689, 0.221, 0.600)),
    Run("PPO, OPT-1.3B, micro-batch 64, checkpointing", "ppo", H200, ppo(OPT, 64, 1, 2, CHECKPOINTING), 0,
        "raw/ppo_h200_202611_training", seconds=(0.686, 0.221, 0.744)),
    Run("PPO, OPT-1.3B, micro-batch 16", "ppo", H200, ppo(OPT, 16, 4, 2), 0, "raw/ppo_h200_202611_step3",
        seconds=(0.686, 0.220, 0.634)),
    Run("PPO, OPT-1.3B, batch 128, micro-batch 32", "ppo", H200, ppo(OPT, 32, 4, 2).replace(*BATCH_128), 0,
        "raw/ppo_h200_202611_step3_batch_128", seconds=(1.056, 0.442, 1.200)),
    Run("PPO, Qwen2.5-1.5B, critic 0.5B, batch 128", "ppo", H200, ppo(QWEN, 32, 4, 2).replace(*BATCH_128), 0,
        "raw/ppo_h200_202611_qwen2_5_1_5b_batch_128", seconds=(0.749, 1.073, 1.708)),
    Run("PPO, OPT-1.3B, micro-batch 32, ZeRO-2", "ppo", FOUR, ppo(OPT, 32, 2, 2), 0, "raw/ppo_h200x4_202611_zero3",
        seconds=(0.689, 0.226, 0.646)),
    Run("SFT, GPT-2-XL, ZeRO-2", "sft", TWO, gpt2_xl(2), 0, OF_TWO, seconds=(0.219,)),
    Run("SFT, OPT-1.3B, another machine", "sft", H200, f"--model_name_or_path 1.3b {SUPERVISED}", 0, OFFLOAD,
        seconds=(0.544,)),
    Run("SFT, OPT-1.3B, ZeRO-3", "sft", H200, f"--model_name_or_path 1.3b {SUPERVISED}".replace("stage 2", "stage 3"),
        0, OFFLOAD, seconds=(0.630,)),
    Run("PPO, OPT-1.3B, micro-batch 16, old log-probabilities", "ppo", H200, ppo(OLD_LOG_PROBS, 16, 4, 2), 0, OFFLOAD,
        seconds=(0.700, 0.368, 0.734)),
    Run("PPO, OPT-1.3B, micro-batch 16, old log-probabilities, ZeRO-3", "ppo", H200, ppo(OLD_LOG_PROBS, 16, 4, 3), 0,
        OFFLOAD, seconds=(0.709, 0.381, 1.120)),
)  # fmt: skip


@contextmanager
def kernels_of_then() -> Iterator[None]:
    """Count gates and rotary positions as torch's functions, as in the runs: a gate kept its activation."""
    now = fused_layers.GATED_MLPS, fused_layers.ROTARY_ATTENTIONS
    fused_layers.GATED_MLPS = fused_layers.ROTARY_ATTENTIONS = frozenset()
    try:
        yield
    finally:
        fused_layers.GATED_MLPS, fused_layers.ROTARY_ATTENTIONS = now


@contextmanager
def pieces_of_then() -> Iterator[None]:
    """Cut a head into pieces by rows, as it is now under ZeRO-3 alone."""
    now = causal_lm.is_partitioned
    causal_lm.is_partitioned = lambda parameter: True
    try:
        yield
    finally:
        causal_lm.is_partitioned = now


class PlannerWithoutSharing(StagePlanner):
    """Plans a stage as the runs were whose rows each passed their own prompt, all before 15:00 on November 30, 2026."""

    def needs(self, resolved: Any) -> Any:
        """As `StagePlanner.needs`."""
        needs = StagePlanner.needs(self, resolved)
        alone = {name: [replace(one, shared=0, copied=0) for one in passes] for name, passes in needs.phases.items()}
        return replace(needs, phases=alone)

    def counted(self, resolved: Any, *, stores_logits: bool) -> Any:
        """As `StagePlanner.counted`."""
        with pieces_of_then():
            return StagePlanner.counted(self, resolved, stores_logits=stores_logits)

    def seconds(self, resolved: Any, plan: Any) -> Any:
        """As `StagePlanner.seconds`."""
        with pieces_of_then():
            return StagePlanner.seconds(self, resolved, plan)


class PlannerWithoutLogits(PlannerWithoutSharing):
    """Plans a stage as the runs were that computed the logits of several pieces again, all before November 30, 2026."""

    def memory(self, resolved: Any) -> Any:
        """As `StagePlanner.memory`."""
        return self.counted(resolved, stores_logits=False)


class PlannerOfThen(PlannerWithoutLogits):
    """Plans a stage with the kernels of the first runs that plans are compared with."""

    def needs(self, resolved: Any) -> Any:
        """As `StagePlanner.needs`."""
        with kernels_of_then():
            return PlannerWithoutSharing.needs(self, resolved)

    def memory(self, resolved: Any) -> Any:
        """As `StagePlanner.memory`."""
        with kernels_of_then():
            return PlannerWithoutLogits.memory(self, resolved)

    def seconds(self, resolved: Any, plan: Any) -> Any:
        """As `StagePlanner.seconds`."""
        with kernels_of_then():
            return PlannerWithoutSharing.seconds(self, resolved, plan)


PLANNERS: dict[PlannerName, type[StagePlanner]] = {
    "of then": PlannerOfThen, "without logits": PlannerWithoutLogits, "without sharing": PlannerWithoutSharing,
    "now": StagePlanner,
}  # fmt: skip


@cache
def shape_folder(shape: str, planner: type[StagePlanner] = PlannerOfThen) -> str:
    """The folder of a shape's configuration, the same for all plans of a process by planners of one type.

    Plans remember passes by folder, whatever the kernels were.
    """
    folder = Path(tempfile.mkdtemp(prefix="shapes-"), shape)
    atexit.register(shutil.rmtree, folder.parent, ignore_errors=True)
    config_of(shape).save_pretrained(folder)
    return str(folder)


@cache
def buckets_of_then() -> str:
    """A DeepSpeed JSON with the buckets of runs that were made before they became smaller."""
    file = Path(tempfile.mkdtemp(prefix="buckets-"), "ds.json")
    atexit.register(shutil.rmtree, file.parent, ignore_errors=True)
    file.write_text(json.dumps({"zero_optimization": BUCKETS_OF_THEN}), encoding="utf-8")
    return str(file)


def planner_of(
    section: str, words: str, target: str, planner: type[StagePlanner] = PlannerOfThen, *, large_buckets: bool = False
) -> tuple[StagePlanner, object]:
    """The planner of a stage whose models are shapes of random_models.SHAPES, and its settings.

    large_buckets: those that were the default when most runs were made.
    """
    given = words.split() + (["--deepspeed-config", buckets_of_then()] if large_buckets else [])
    for place, word in enumerate(given):
        if place and given[place - 1].replace("-", "_").endswith("model_name_or_path"):
            given[place] = shape_folder(word, planner)
    stage = stage_of(section)
    hardware = parse_target(target)
    resolved = with_ranks(parse(stage.config, [*given, "--target", target], section=section), hardware.num_gpus)

    def jsons_of(settings: object) -> dict[str, dict[str, object]]:
        return engine_jsons(stage, settings, ranks=hardware.num_gpus)

    return planner(stage.needs, jsons_of, {}, hardware), resolved


def planned(run: Run) -> float:
    """The planned peak of a run, in GiB of tensors: of its phase, else of the highest."""
    planner, resolved = planner_of(run.section, run.words, run.target, large_buckets=True)
    plan: MemoryPlan = planner.memory(resolved)
    return plan.phases[run.phase or plan.worst].total / GIB


def table() -> list[str]:
    """The lines of the table in Markdown."""
    lines = ["| run | GPUs | phase | planned | measured | difference | from |", "|---|---|---|---|---|---|---|"]
    for run in RUNS:
        value = planned(run)
        cells = (run.name, run.target[0], run.phase or "highest", f"{value:.1f}", f"{run.measured:.1f}",
                 f"{value - run.measured:+.1f}", run.source)  # fmt: skip
        lines.append(f"| {' | '.join(cells)} |")
    return lines


def planned_seconds(run: Run) -> list[float]:
    """The planned seconds of a run's phases, in the order of `Run.seconds`."""
    planner, resolved = planner_of(run.section, run.words, run.target, large_buckets=True)
    seconds = planner.seconds(resolved, planner.memory(resolved))
    return list(seconds.values())


def timed_runs() -> list[Run]:
    """All runs whose times were measured, those of plan_runs.py too, which were planned before."""
    from benchmarks.speed.plan_runs import MEASURED, alone_runs, read_peaks  # which imports this module

    return [run for run in (*RUNS, *TIMES, *alone_runs(read_peaks(MEASURED))) if run.seconds]


def time_row(run: Run, seconds: Sequence[float]) -> str:
    """The line of the page for a run with these planned seconds of its phases; misses of over 20 % are bold."""
    misses = [value / measured - 1 for value, measured in zip(seconds, run.seconds, strict=True)]
    shown = [f"**{miss:+.0%}**" if abs(miss) > 0.2 else f"{miss:+.0%}" for miss in misses]
    triples = zip(seconds, run.seconds, shown, strict=True)
    cells = [f"{value:.2f} / {measured:.2f} ({miss})" for value, measured, miss in triples]
    return f"| {run.name} | {run.target[0]} | {' | '.join([''] * (3 - len(cells)) + cells)} |"


def time_table() -> list[str]:
    """The lines of the table of times in Markdown: planned / measured seconds of each phase."""
    lines = ["| run | GPUs | generate | score | train |", "|---|---|---|---|---|"]
    return lines + [time_row(run, planned_seconds(run)) for run in timed_runs()]


def cells_of(lines: Sequence[str]) -> list[list[str]]:
    """The cells of the rows of a table in Markdown, without its head."""
    return [[cell.strip() for cell in line.strip("|").split("|")] for line in lines[2:]]


def peak_summary(lines: Sequence[str]) -> list[str]:
    """The lines of a table of how near the peaks of each phase in a table are, as `table` makes it.

    Near means within the larger of 5 % and 1 GiB. Rows of runs that were not made do not count.
    """
    found = defaultdict[str, list[tuple[float, list[str]]]](list)
    for cells in cells_of(lines):
        if cells[5]:
            found[cells[2]].append((float(cells[5]), cells))
    rows = ["| phase | compared | within 5 % or 1 GiB | farthest below | farthest above |", "|---|---|---|---|---|"]
    for phase, differences in found.items():
        near = [abs(gib) <= max(1.0, float(cells[4]) / 20) for gib, cells in differences]
        ends = [f"{gib:+.1f}: {cells[3]} for {cells[4]}" for gib, cells in (min(differences), max(differences))]
        rows.append(f"| {phase} | {len(near)} | {sum(near)} | {' | '.join(ends)} |")
    return rows


def time_summary(lines: Sequence[str]) -> list[str]:
    """The lines of a table of how near the seconds of each phase in a table are, as `time_table` makes it."""
    head = "| phase | compared | within 10 % | within 20 % | farthest below | farthest above |"
    rows = [head, "|---|---|---|---|---|---|"]
    for number, phase in enumerate(("generate", "score", "train"), start=2):
        cells = [row[number] for row in cells_of(lines) if row[number]]
        misses = [(int(cell.partition("(")[2].strip("*%)")), cell.partition(" (")[0]) for cell in cells]
        near = [sum(abs(percent) <= limit for percent, _ in misses) for limit in (10, 20)]
        ends = [f"{percent:+d} %: {seconds}" for percent, seconds in (min(misses), max(misses))]
        rows.append(f"| {phase} | {len(cells)} | {' | '.join(map(str, near))} | {' | '.join(ends)} |")
    return rows


if __name__ == "__main__":
    peaks, times = table(), time_table()
    print(*peaks, "", *peak_summary(peaks), "", *times, "", *time_summary(times), "", sep="\n")
