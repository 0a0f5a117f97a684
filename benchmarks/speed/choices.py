"""Runs that choose for themselves what fits into a part of a GPU (--gpu_memory_gib): planned, then made.

`choices.py plan PLANNED [PART]` writes what `fastest` chooses and what its plan says, on any machine, of the runs whose
names contain PART; `measure PLANNED MEASURED GPUS [PART]` makes those, several beside each other where their limits
allow; `table PLANNED MEASURED` prints both as Markdown. Both files are compressed JSON lines (`.jsonl.bz2`), one for
each run. Limits of 80 GiB are for an H200. No command cuts an optimizer step: micro-batches, checkpointing, prompts at
once and the cache are the plan's. Nothing of a plan was fitted to any of these runs.
"""

import sys
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

from benchmarks.speed.free_memory import FreeMemory
from benchmarks.speed.jobs import BenchError
from benchmarks.speed.plan_runs import AT_ONCE, make_inputs, peaks_in, peaks_of, read_peaks, verdict, write_peaks
from benchmarks.speed.planned import PlannerWithoutLogits, planner_of
from benchmarks.speed.run_list import PlannedRun
from pipeline.configuration.origins import Kind, Origin
from pipeline.files import GIB, read_object
from pipeline.launching.target import with_limit
from pipeline.planning.fastest import choice_text, fastest

DEVICE, LARGE_DEVICE, LARGE = "1xH100-80GB", "1xH200-141GB", 80  # the latter for limits of so many GiB
SFT, REWARD, DPO = "sft", "reward", "dpo"
LONG_PAIRS = "--long_pairs truncate_left"


def chosen(gib: int, name: str, section: str, words: str, lengths: str) -> PlannedRun:
    """A run held to `gib` of its GPU; lengths: tokens of a row, or of prompt and response."""
    if section == "ppo":
        prompt, answer = lengths.split()
        words += f" --max_prompt_seq_len {prompt} --max_answer_seq_len {answer} --long_prompts truncate_left"
    else:
        words += f" --max_seq_len {lengths} " + ("--train_on_prompt true" if section == SFT else LONG_PAIRS)
    words = f"{words} --gpu_memory_gib {gib} --dtype bf16"
    return PlannedRun(f"{gib} GiB: {name}", section, words, held_out=True, planner="without logits", chooses=True)


def model(shape: str, rest: str = "") -> str:
    return f"--model_name_or_path {shape} {rest}"


def pair(actor: str, critic: str, rest: str = "") -> str:
    return f"--actor_model_name_or_path {actor} --critic_model_name_or_path {critic} {rest}"


def rewarded(method: str, actor: str, rest: str = "") -> str:
    """The words of a run; they have a reference each, as all had when these were measured."""
    return f"--method {method} --reward_function repetition --log_kl true --actor_model_name_or_path {actor} {rest}"


ADAPTER = "--actor_lora_dim 32 --save_adapter_only true"
CHOICES = (
    chosen(24, "SFT, OPT-350M, 64 rows of 512", SFT, model("350m", "--train_batch_size 64"), "512"),
    chosen(24, "SFT, Qwen2.5-0.5B, 48 rows of 1,024", SFT, model("qwen2.5-0.5b", "--train_batch_size 48"), "1024"),
    chosen(24, "SFT, Llama-3-1B LoRA 32, 40 rows of 768", SFT,
           model("llama-3-1b", "--lora_dim 32 --train_batch_size 40"), "768"),
    chosen(24, "SFT, Mistral-7B LoRA 16, 24 rows of 640", SFT,
           model("mistral-7b", "--lora_dim 16 --train_batch_size 24"), "640"),
    chosen(24, "reward, Pythia-410M, 72 pairs of 384", REWARD, model("pythia-410m", "--train_batch_size 72"), "384"),
    chosen(24, "reward, Qwen3-0.6B, ZeRO-3, 36 pairs of 896", REWARD,
           model("qwen3-0.6b", "--zero_stage 3 --train_batch_size 36"), "896"),
    chosen(24, "DPO, Qwen2.5-0.5B, 32 pairs of 512", DPO, model("qwen2.5-0.5b", "--train_batch_size 32"), "512"),
    chosen(24, "PPO, OPT-125M and 125M, 96 rows of 192 + 320", "ppo", pair("125m", "125m", "--rollout_batch_size 96 "
           "--train_batch_size 96"), "192 320"),
    chosen(24, "PPO, OPT-350M and 125M, 64 rows of 256 + 256", "ppo", pair("350m", "125m", "--train_batch_size 64"),
           "256 256"),
    chosen(24, "PPO, Qwen2.5-0.5B LoRA 32 and Pythia-410M, 80 rows of 320 + 448", "ppo",
           pair("qwen2.5-0.5b", "pythia-410m", f"{ADAPTER} --train_batch_size 80"), "320 448"),
    chosen(24, "GRPO, Qwen3-0.6B LoRA 32, 128 rows of 128 + 512", "ppo",
           rewarded("grpo", "qwen3-0.6b", f"{ADAPTER} --train_batch_size 128"), "128 512"),
    chosen(24, "RLOO, Llama-3-1B LoRA 32, 48 rows of 384 + 640", "ppo",
           rewarded("rloo", "llama-3-1b", f"{ADAPTER} --train_batch_size 48"), "384 640"),
    chosen(40, "SFT, OPT-1.3B, 64 rows of 512", SFT, model("1.3b", "--train_batch_size 64"), "512"),
    chosen(40, "SFT, OLMo-2-1B, ZeRO-3, 56 rows of 704", SFT,
           model("olmo2-1b", "--zero_stage 3 --train_batch_size 56"), "704"),
    chosen(40, "SFT, Llama-3-8B LoRA 16, 32 rows of 1,024", SFT,
           model("llama-3-8b", "--lora_dim 16 --train_batch_size 32"), "1024"),
    chosen(40, "reward, Llama-3-1B, 60 pairs of 448", REWARD, model("llama-3-1b", "--train_batch_size 60"), "448"),
    chosen(40, "reward, Qwen3-1.7B LoRA 32, 80 pairs of 576", REWARD,
           model("qwen3-1.7b", "--lora_dim 32 --train_batch_size 80"), "576"),
    chosen(40, "DPO, Pythia-1.4B, 36 pairs of 320", DPO, model("pythia-1.4b", "--train_batch_size 36"), "320"),
    chosen(40, "DPO, Qwen3-1.7B LoRA 64, 64 pairs of 1,024", DPO,
           model("qwen3-1.7b", "--lora_dim 64 --train_batch_size 64"), "1024"),
    chosen(40, "PPO, OPT-1.3B LoRA 32 and 350M, 112 rows of 256 + 384", "ppo",
           pair("1.3b", "350m", f"{ADAPTER} --train_batch_size 112"), "256 384"),
    chosen(40, "PPO, Qwen2.5-1.5B LoRA 32 and 0.5B, 64 rows of 512 + 512", "ppo",
           pair("qwen2.5-1.5b", "qwen2.5-0.5b", f"{ADAPTER} --train_batch_size 64"), "512 512"),
    chosen(40, "PPO, Qwen3-0.6B and Pythia-410M, two steps of 48 rows, 192 + 832", "ppo",
           pair("qwen3-0.6b", "pythia-410m", "--rollout_batch_size 96 --train_batch_size 48"), "192 832"),
    chosen(40, "GRPO, Qwen2.5-1.5B, 144 rows of 256 + 768", "ppo",
           rewarded("grpo", "qwen2.5-1.5b", "--train_batch_size 144"), "256 768"),
    chosen(40, "REINFORCE++, Llama-3-8B LoRA 32, 72 rows of 320 + 320", "ppo",
           rewarded("reinforce_pp", "llama-3-8b", f"{ADAPTER} --train_batch_size 72"), "320 320"),
    chosen(72, "SFT, Qwen2.5-1.5B, 128 rows of 1,024", SFT, model("qwen2.5-1.5b", "--train_batch_size 128"), "1024"),
    chosen(72, "reward, OLMo-2-1B, 120 pairs of 512", REWARD, model("olmo2-1b", "--train_batch_size 120"), "512"),
    chosen(72, "PPO, OPT-1.3B and 350M, 160 rows of 256 + 256", "ppo", pair("1.3b", "350m", "--train_batch_size 160"),
           "256 256"),
    chosen(72, "PPO, Qwen2.5-1.5B and Pythia-410M, ZeRO-3, 96 rows of 384 + 384", "ppo",
           pair("qwen2.5-1.5b", "pythia-410m", "--actor_zero_stage 3 --critic_zero_stage 3 --train_batch_size 96"),
           "384 384"),
    chosen(72, "PPO, Mistral-7B LoRA 32 and Qwen3-0.6B, 80 rows of 320 + 576", "ppo",
           pair("mistral-7b", "qwen3-0.6b", f"{ADAPTER} --train_batch_size 80"), "320 576"),
    chosen(72, "GRPO, Llama-3-8B LoRA 32, 64 rows of 512 + 1,024", "ppo",
           rewarded("grpo", "llama-3-8b", f"{ADAPTER} --train_batch_size 64"), "512 1024"),
    chosen(LARGE, "SFT, Qwen3-1.7B, 96 rows of 2,048", SFT, model("qwen3-1.7b", "--train_batch_size 96"), "2048"),
    chosen(LARGE, "reward, Llama-3-8B LoRA 16, 40 pairs of 768", REWARD,
           model("llama-3-8b", "--lora_dim 16 --train_batch_size 40"), "768"),
    chosen(LARGE, "DPO, Llama-3-1B, 72 pairs of 1,024", DPO, model("llama-3-1b", "--train_batch_size 72"), "1024"),
    chosen(LARGE, "PPO, OPT-1.3B and 1.3B, 128 rows of 384 + 384", "ppo",
           pair("1.3b", "1.3b", "--train_batch_size 128"), "384 384"),
    chosen(LARGE, "PPO, Mistral-7B LoRA 16 and Llama-3-1B, 96 rows of 256 + 768", "ppo",
           pair("mistral-7b", "llama-3-1b", "--actor_lora_dim 16 --save_adapter_only true --train_batch_size 96"),
           "256 768"),
    chosen(LARGE, "RLOO, Qwen2.5-1.5B, 192 rows of 512 + 1,536", "ppo",
           rewarded("rloo", "qwen2.5-1.5b", "--train_batch_size 192"), "512 1536"),
)  # fmt: skip


@dataclass(frozen=True, slots=True)
class Choice:
    """What the plan chose.

    line: as the run prints it. flags: all that were chosen. phases: planned GiB of tensors. high: GiB by the high
    estimate.
    """

    line: str
    flags: Mapping[str, Any]
    phases: Mapping[str, float]
    high: float

    @classmethod
    def of(cls, run: PlannedRun) -> "Choice":
        """Choose for a run on its device, as its stage did before it started, when no logits were stored."""
        device = LARGE_DEVICE if limit_of(run) == LARGE else DEVICE
        planner, resolved = planner_of(run.section, run.words, device, PlannerWithoutLogits)
        target = with_limit(planner.target, resolved.config.run.gpu_memory_gib)  # type: ignore[attr-defined]
        best = fastest(replace(planner, target=target), resolved)  # type: ignore[arg-type]
        if best is None or best.lacks:
            raise SystemExit(f"{run.name}: nothing fits")
        phases = {name: round(peak.total / GIB, 3) for name, peak in best.plan.phases.items()}
        return cls(choice_text(best.resolved), best.flags, phases, round(best.plan.reserved()[1] / GIB, 3))


def limit_of(run: PlannedRun) -> int:
    return int(run.name.split()[0])


def plan(file: Path, part: str) -> None:
    """Write what is chosen for the runs whose names contain `part`; a choice that the file has stays as it is."""
    planned = read_peaks(file)
    for run in (run for run in CHOICES if part in run.name and run.name not in planned):
        choice = Choice.of(run)
        planned[run.name] = asdict(choice)
        write_peaks(file, planned)
        print(f"{run.name}: {choice.line} ({choice.high:.1f} GiB)", file=sys.stderr, flush=True)


def measure(file: Path, num_gpus: int, part: str) -> None:
    """Make the runs whose names contain `part`, and add their phases and choices to `file`."""
    import torch

    inputs, measured = file.parent / "plan-inputs", read_peaks(file)
    waiting = [run for run in CHOICES if part in run.name and run.name not in measured]
    make_inputs(inputs, waiting)
    torch.cuda.empty_cache()
    memory = FreeMemory([torch.cuda.get_device_properties(0).total_memory / GIB] * num_gpus)

    def made(run: PlannedRun) -> None:
        with memory.take(1, limit_of(run) + 0.5) as gpus:
            found = dict[str, Any]()
            try:
                phases = peaks_of(run, inputs, gpus, read=lambda run_dir: found.update(flags=chosen_flags(run_dir)))
                found["phases"] = phases
            except BenchError as error:
                print(f"[choices] failed: {error}", file=sys.stderr, flush=True)
                found["error"] = str(error).splitlines()[-1]
            with memory.changed:
                measured[run.name] = found
                write_peaks(file, measured)

    with ThreadPoolExecutor(AT_ONCE) as pool:
        list(pool.map(made, sorted(waiting, key=lambda run: -limit_of(run))))


def chosen_flags(run_dir: Path) -> dict[str, Any]:
    """Return the values that a run chose, by flag."""
    settings = read_object(run_dir / "config.json")
    return {name: one["value"] for name, one in settings.items() if Origin.of_entry(one).kind is Kind.PLAN}


def table(planned: Mapping[str, Any], measured: Mapping[str, Any]) -> list[str]:
    """Return the lines of the table in Markdown: the highest phase of each run, and what of the limit was left."""
    lines = ["| run | chosen | phase | planned | measured | difference | within | left unused |",
             "|---|---|---|---|---|---|---|---|"]  # fmt: skip
    for run in (run for run in CHOICES if run.name in planned):
        choice, found = planned[run.name], measured.get(run.name)
        if not found or "error" in found:
            cells = [f"`{choice['line']}`", found["error"] if found else "not run", *[""] * 5]
        else:
            phases = peaks_in(found["phases"])
            worst = max(phases, key=lambda name: phases[name])
            expected, value = choice["phases"][worst], phases[worst]
            same = "" if choice["flags"].items() <= found["flags"].items() else "; another choice was made"
            near = "yes" if all(verdict(choice["phases"][name], gib) == "yes" or gib < choice["phases"][name]
                                for name, gib in phases.items()) else "NO"  # fmt: skip
            unused = limit_of(run) - found["phases"]["reserved"]
            cells = [f"`{choice['line']}`{same}", worst, f"{expected:.1f}", f"{value:.1f}",
                     f"{expected - value:+.1f}", near, f"{unused:.1f}"]  # fmt: skip
        lines.append(f"| {' | '.join([run.name, *cells])} |")
    return lines


def main(words: Sequence[str]) -> None:
    """Plan, measure, or print the table; a command with too few words is answered with all three."""
    if len(words) < {"plan": 2, "measure": 4, "table": 3}.get(" ".join(words[:1]), sys.maxsize):
        sys.exit(__doc__)
    command, file = words[0], Path(words[1])
    if command == "plan":
        plan(file, " ".join(words[2:]))
        return
    if command == "measure":
        measure(Path(words[2]), int(words[3]), " ".join(words[4:]))
    print(*table(read_peaks(file), read_peaks(Path(words[2]))), sep="\n")


if __name__ == "__main__":
    main(sys.argv[1:])
