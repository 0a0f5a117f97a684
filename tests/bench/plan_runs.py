"""Plan runs, make them on the GPUs of this machine, and compare: peaks of torch's allocator by phase.

`python tests/bench/plan_runs.py plan FILE` writes what the planner says of each run, on any machine; `measure FOLDER`
makes the runs, several at a time where their planned memory allows, and writes a file for each; `table FILE FOLDER`
prints both as Markdown. Runs marked held-out are of models and numbers of GPUs that no constant of the planner knows.
"""

import json
import shutil
import sys
import tempfile
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from bench import phases
from bench.jobs import NO_HELD_OUT, BenchError, environment, flags, launched, output_words, plain, run_logged
from bench.planned import planner_of
from bench.random_models import make_model, make_pairs, make_prompts
from demo.make import make_data, make_tokenizer
from pipeline.files import GIB, write_json

STAGES = {"sft": "step1_sft", "reward": "step2_reward", "ppo": "step3_ppo"}
STEPS, AT_ONCE = 3, 10
ROOM_GIB = 4.0  # of each process beside its planned tensors: context, libraries, the allocator's unused blocks
ADAPTERS = "--actor_lora_dim 64 --save_adapter_only true"
CHECKPOINTED = "--actor_gradient_checkpointing true --critic_gradient_checkpointing true"


@dataclass(frozen=True, slots=True)
class PlannedRun:
    """A run by its stage's command line: model flags name shapes of random_models.SHAPES."""

    name: str
    section: str
    words: str
    gpus: int = 1
    held_out: bool = False

    @property
    def key(self) -> str:
        return plain(self.name)


def sft(model: str, zero_stage: int, micro: int, rest: str = "") -> str:
    return f"--model_name_or_path {model} {supervised(zero_stage, micro)} --train_on_prompt true {rest}"


def reward(model: str, zero_stage: int, micro: int, rest: str = "") -> str:
    return f"--model_name_or_path {model} {supervised(zero_stage, micro)} --long_pairs truncate_left {rest}"


def supervised(zero_stage: int, micro: int) -> str:
    return f"--zero_stage {zero_stage} --per_device_train_batch_size {micro} --max_seq_len 512 --dtype bf16"


def ppo(actor: str, critic: str, zero_stage: int, micro: int, rest: str = "") -> str:
    return (
        f"--actor_model_name_or_path {actor} --critic_model_name_or_path {critic} --actor_zero_stage {zero_stage} "
        f"--critic_zero_stage {zero_stage} --per_device_generation_batch_size 32 --per_device_train_batch_size {micro} "
        "--gradient_accumulation_steps 2 --max_prompt_seq_len 256 --max_answer_seq_len 256 --dtype bf16 "
        f"--long_prompts truncate_left --release_inference_cache false {rest}"
    )


RUNS = (
    PlannedRun("SFT, OPT-350M, ZeRO-0", "sft", sft("350m", 0, 16)),
    PlannedRun("SFT, OPT-1.3B, ZeRO-2, checkpointing", "sft", sft("1.3b", 2, 16, "--gradient_checkpointing true")),
    PlannedRun("SFT, Llama-1B, ZeRO-1, LoRA 64", "sft", sft("llama-1b", 1, 8, "--lora_dim 64")),
    PlannedRun("SFT, Llama-1B, ZeRO-3", "sft", sft("llama-1b", 3, 8)),
    PlannedRun("SFT, OPT-1.3B, ZeRO-2, optimizer on the host", "sft", sft("1.3b", 2, 8, "--offload true")),
    PlannedRun("reward, OPT-350M, ZeRO-0", "reward", reward("350m", 0, 16)),
    PlannedRun("reward, OPT-125M, ZeRO-3", "reward", reward("125m", 3, 16)),
    PlannedRun("reward, Llama-1B, ZeRO-2, checkpointing", "reward",
               reward("llama-1b", 2, 8, "--gradient_checkpointing true")),
    PlannedRun("PPO, OPT-350M and 125M, ZeRO-0", "ppo", ppo("350m", "125m", 0, 16)),
    PlannedRun("PPO, OPT-1.3B and 350M, ZeRO-2", "ppo", ppo("1.3b", "350m", 2, 16)),
    PlannedRun("PPO, OPT-1.3B and 350M, ZeRO-3", "ppo", ppo("1.3b", "350m", 3, 16)),
    PlannedRun("PPO, OPT-1.3B and 350M, ZeRO-2, LoRA 64", "ppo", ppo("1.3b", "350m", 2, 16, "--actor_lora_dim 64")),
    PlannedRun("PPO, OPT-1.3B and 350M, ZeRO-2, checkpointing", "ppo", ppo("1.3b", "350m", 2, 16, CHECKPOINTED)),
    PlannedRun("PPO, OPT-1.3B and 350M, ZeRO-2, optimizers on the host", "ppo",
               ppo("1.3b", "350m", 2, 8, "--actor_offload_optimizer cpu --critic_offload_optimizer cpu")),
    PlannedRun("PPO, Llama-1B and OPT-350M, ZeRO-1", "ppo", ppo("llama-1b", "350m", 1, 8)),
    PlannedRun("PPO, Llama-7B LoRA 64 and Llama-1B, ZeRO-2", "ppo",
               ppo("llama-7b", "llama-1b", 2, 4, ADAPTERS)),
    PlannedRun("PPO, Llama-7B int8 LoRA 64 and OPT-350M, ZeRO-0", "ppo",
               ppo("llama-7b", "350m", 0, 4, f"{ADAPTERS} --actor_quantization int8")),
    PlannedRun("SFT, Qwen2.5-0.5B, ZeRO-2", "sft", sft("qwen2.5-0.5b", 2, 8), held_out=True),
    PlannedRun("SFT, Qwen2.5-1.5B, ZeRO-0, LoRA 64", "sft", sft("qwen2.5-1.5b", 0, 8, "--lora_dim 64"), held_out=True),
    PlannedRun("reward, Qwen2.5-0.5B, ZeRO-1", "reward", reward("qwen2.5-0.5b", 1, 8), held_out=True),
    PlannedRun("PPO, Qwen2.5-1.5B and 0.5B, ZeRO-2", "ppo", ppo("qwen2.5-1.5b", "qwen2.5-0.5b", 2, 8), held_out=True),
    PlannedRun("PPO, Qwen2.5-1.5B and 0.5B, ZeRO-2, LoRA 64", "ppo",
               ppo("qwen2.5-1.5b", "qwen2.5-0.5b", 2, 8, "--actor_lora_dim 64"), held_out=True),
    PlannedRun("PPO, Llama-3-8B LoRA 64 and Llama-3-1B, ZeRO-2", "ppo",
               ppo("llama-3-8b", "llama-3-1b", 2, 4, ADAPTERS), held_out=True),
    PlannedRun("SFT, OPT-1.3B, ZeRO-2", "sft", sft("1.3b", 2, 8), gpus=2, held_out=True),
    PlannedRun("SFT, Qwen2.5-1.5B, ZeRO-3", "sft", sft("qwen2.5-1.5b", 3, 8), gpus=2, held_out=True),
    PlannedRun("reward, Llama-1B, ZeRO-2", "reward", reward("llama-1b", 2, 8), gpus=2, held_out=True),
    PlannedRun("PPO, OPT-1.3B and 350M, ZeRO-1", "ppo", ppo("1.3b", "350m", 1, 16), gpus=2, held_out=True),
    PlannedRun("PPO, Qwen2.5-1.5B and 0.5B, ZeRO-3", "ppo", ppo("qwen2.5-1.5b", "qwen2.5-0.5b", 3, 8), gpus=2,
               held_out=True),
)  # fmt: skip


def shapes_of(run: PlannedRun) -> list[tuple[str, bool]]:
    """Return the run's models: their shapes, and whether they are made as reward models."""
    words = run.words.split()
    pairs = [(word, words[n + 1]) for n, word in enumerate(words) if word.endswith("model_name_or_path")]
    return [(shape, name.startswith("--critic")) for name, shape in pairs]


def plan(file: Path) -> None:
    """Write the planned GiB of each run's phases, as JSON."""
    planned = {}
    with tempfile.TemporaryDirectory() as folder:
        for run in RUNS:
            planner, resolved = planner_of(run.section, run.words, f"{run.gpus}xH200", Path(folder))
            peaks = planner.memory(resolved).phases
            planned[run.name] = {phase: round(peak.total / GIB, 3) for phase, peak in peaks.items()}
    write_json(file, planned)


@dataclass
class Room:
    """Memory of the GPUs that is not taken by runs; a run waits until there is enough for it."""

    free: list[float]
    changed: threading.Condition = field(default_factory=threading.Condition)

    @contextmanager
    def take(self, gpus: int, gib: float) -> Iterator[list[int]]:
        """Yield the GPUs of a run that takes `gib` of each of them."""
        with self.changed:
            self.changed.wait_for(lambda: sum(value >= gib for value in self.free) >= gpus)
            chosen = sorted(sorted(range(len(self.free)), key=lambda gpu: -self.free[gpu])[:gpus])
            self._add(chosen, -gib)
        try:
            yield chosen
        finally:
            with self.changed:
                self._add(chosen, gib)
                self.changed.notify_all()

    def _add(self, gpus: list[int], gib: float) -> None:
        for gpu in gpus:
            self.free[gpu] += gib


def make_inputs(folder: Path) -> None:
    """Write the models of all runs and rows that are longer than they may be."""
    make_data(folder, seed=0)
    tokenizer = make_tokenizer(folder)
    for shape, scores in sorted({model for run in RUNS for model in shapes_of(run)}):
        make_model(folder / folder_name(shape, scores), shape, tokenizer, scores=scores)
    make_prompts(folder / "prompts.jsonl", 2 * STEPS * 32, words=500)
    make_pairs(folder / "sft.jsonl", 400, prompt_words=9, responses=(1000, 1000))
    make_pairs(folder / "pairs.jsonl", 400, prompt_words=1000, responses=(60, 60))


def folder_name(shape: str, scores: bool) -> str:
    return f"{shape}-scores" if scores else shape


def run_words(run: PlannedRun, inputs: Path) -> list[object]:
    """Return the command line's flags, models as folders below `inputs`."""
    words: list[object] = list(run.words.split())
    for n, word in enumerate(words[:-1]):
        if str(word).endswith("model_name_or_path"):
            words[n + 1] = inputs / folder_name(str(words[n + 1]), scores=str(word).startswith("--critic"))
    rows = {"sft": "sft", "reward": "pairs", "ppo": "prompts"}[run.section]
    shared = {"data_path": inputs / f"{rows}.jsonl", "data_output_path": inputs / "cache", "max_steps": STEPS}
    return [*words, *flags(shared), *NO_HELD_OUT]


def measure(folder: Path, planned: dict[str, dict[str, float]], num_gpus: int, only: str = "") -> None:
    """Make the runs whose names contain `only`, and write each one's highest GiB of each phase to `folder`."""
    import torch

    inputs = folder.parent / "plan-inputs"
    if not (inputs / "pairs.jsonl").exists():
        make_inputs(inputs)
    torch.cuda.empty_cache()
    folder.mkdir(parents=True, exist_ok=True)
    gib = torch.cuda.get_device_properties(0).total_memory / GIB
    room = Room([gib] * num_gpus)

    def made(run: PlannedRun) -> None:
        with room.take(run.gpus, max(planned[run.name].values()) * 1.1 + ROOM_GIB) as gpus:
            output = inputs / "runs" / run.key
            command = launched(
                f"{STAGES[run.section]}.main", [*run_words(run, inputs), *output_words(output)], gpus=run.gpus
            )
            variables = environment() | {"CUDA_VISIBLE_DEVICES": ",".join(map(str, gpus)), "OMP_NUM_THREADS": "1"}
            output.mkdir(parents=True, exist_ok=True)
            try:
                run_logged(f"[plan_runs] {run.name}", command, folder / f"{run.key}.log", variables)
                found = phases.measure(output / "run", warm_up=0)
            except BenchError as error:
                print(f"[plan_runs] failed: {error}", file=sys.stderr, flush=True)
                return
            peaks = {name: found[f"{name}_peak_gib"] for name in planned[run.name] if f"{name}_peak_gib" in found}
            write_json(folder / f"{run.key}.json", {"highest": found["peak_gib"]} | peaks)
            shutil.rmtree(output, ignore_errors=True)

    with ThreadPoolExecutor(AT_ONCE) as pool:
        waiting = [r for r in RUNS if r.gpus <= num_gpus and only in r.name and not (folder / f"{r.key}.json").exists()]
        list(pool.map(made, sorted(waiting, key=lambda run: -max(planned[run.name].values()))))


def table(planned: dict[str, dict[str, float]], folder: Path) -> list[str]:
    """Return the lines of the table in Markdown: each measured phase of each run, held-out runs marked."""
    lines = ["| run | GPUs | phase | planned | measured | difference | within |", "|---|---|---|---|---|---|---|"]
    for run in RUNS:
        file = folder / f"{run.key}.json"
        name = f"{run.name} (held out)" if run.held_out else run.name
        if not file.exists():
            lines.append(f"| {name} | {run.gpus} | | {max(planned[run.name].values()):.1f} | not run | | |")
            continue
        measured = json.loads(file.read_text(encoding="utf-8"))
        by_phase = {phase: value for phase, value in measured.items() if phase != "highest"}
        for phase, value in (by_phase or measured).items():
            expected = planned[run.name][phase] if by_phase else max(planned[run.name].values())
            near = "yes" if abs(expected - value) <= max(1.0, 0.05 * value) else "NO"
            lines.append(
                f"| {name} | {run.gpus} | {phase} | {expected:.1f} | {value:.1f} | {expected - value:+.1f} | {near} |"
            )
    return lines


def main() -> None:
    """Plan, measure, or print the table."""
    command, file = sys.argv[1], Path(sys.argv[2])
    if command == "plan":
        plan(file)
        return
    planned = json.loads(file.read_text(encoding="utf-8"))
    folder = Path(sys.argv[3])
    if command == "measure":
        measure(folder, planned, int(sys.argv[4]), *sys.argv[5:])
    print(*table(planned, folder), sep="\n")


if __name__ == "__main__":
    main()
