"""The row typed: the commands of the README with default settings, in turn with the same work under tuned flags.

A case is a command `python train.py --step N ...` with a preset and without a flag that changes speed. Its models have
random weights, its data set is Dahoas/rm-static by name; both lie in a hub cache that the row makes. The tuned run of a
case is the stage by itself with the preset's training and the flags of the reports in benchmarks/reports. All rows have
the preset's full length; the data set's test split is small, so that what is evaluated at the start takes seconds.
DeepSpeed-Chat's loop takes its turn in the case of its own models.

The row measured: such a command in turn with the same one under `--auto measure`.
"""

import shutil
import sys
from collections.abc import Iterable
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from statistics import median
from typing import Any

from benchmarks.speed.figures import Figures, quotient
from benchmarks.speed.hub import full_rows, hub_variables, publish_model, publish_rows
from benchmarks.speed.jobs import NO_HELD_OUT, Jobs, flags
from benchmarks.speed.rows import Row, note_limits
from benchmarks.speed.supervised import note_mfu
from pipeline.configuration.flag_table import flat_items
from rlhf.train_plan import PlannedStage, make_plan

BASELINE = "DeepSpeed-Chat"
DATA_SET = "Dahoas/rm-static"
HELD_OUT = 8  # rows of its test split
WAYS = {"typed": "default settings", "tuned": "tuned", BASELINE: BASELINE}  # name of a run -> in figures
TARGET = ">= 0.95"
AUTO = {"planned": "plan", "measured": "measure"}  # name of a run -> its --auto
ADAPTER = "--save_adapter_only true"  # says what is written at the end


@dataclass(frozen=True, slots=True)
class Case:
    """A command and its models.

    step: stage. models: words of the command that name the models, and with them the preset.
    actor, critic: shapes of the models; of stages 1 and 2 the former is what they start from.
    micro_batch: rows of the tuned run's forward passes.
    training: words of the command about what is trained, which the tuned run has too.
    beside: DeepSpeed-Chat's loop takes its turn, unless --baseline is 0.
    by_hand: there is a tuned run.
    """

    step: int
    models: str
    actor: str
    critic: str
    micro_batch: int
    training: str = ""
    beside: bool = False
    by_hand: bool = True


# Micro-batches of the reports; for rows of 1,024 tokens in place of 512 half as many, of the same number of tokens.
CASES = {
    "ppo-1.3b": Case(3, "--actor-model 1.3b --reward-model 350m", "1.3b", "350m", 16, beside=True),
    "ppo-llama-7b-lora": Case(3, "--actor-model llama-2-7b-lora", "llama-7b", "llama-1b", 4, ADAPTER),
    "ppo-llama-3-8b-lora": Case(3, "--actor-model llama-3.1-8b --reward-model llama-3.2-1b", "llama-3-8b", "llama-3-1b",
                                8, f"--actor_lora_dim 64 {ADAPTER}"),
    "ppo-qwen2.5-1.5b": Case(3, "--actor-model qwen2.5-1.5b --reward-model qwen2.5-0.5b", "qwen2.5-1.5b",
                             "qwen2.5-0.5b", 16),
    "grpo-qwen2.5-1.5b": Case(3, "--actor-model qwen2.5-1.5b", "qwen2.5-1.5b", "qwen2.5-0.5b", 16,
                              "--method grpo --reward-function length", by_hand=False),
    "sft-1.3b": Case(1, "--actor-model 1.3b", "1.3b", "350m", 16),
    "sft-8b": Case(1, "--actor-model llama-3.1-8b", "llama-3-8b", "llama-3-1b", 8, f"--lora_dim 64 {ADAPTER}"),
    "reward-350m": Case(2, "--reward-model 350m", "350m", "350m", 16),
    "tiny": Case(3, "--actor-model tiny --reward-model tiny", "tiny", "tiny", 32, beside=True),
    # Tiny models under published names.
    "tiny-sft": Case(1, "--actor-model 1.3b", "tiny", "tiny", 32),
    "tiny-reward": Case(2, "--reward-model 350m", "tiny", "tiny", 32),
}  # fmt: skip
CASE_HELP = (
    "of the row typed: a command with a preset of launch/presets; Llama-7B's critic and reward model are 1B in place "
    "of 7B, Llama-3-8B (preset 8b) has LoRA 64, without which one GPU does not hold its training (ppo-1.3b)"
)


@cache
def planned(case: Case) -> PlannedStage:
    """The stage as train.py resolves the command."""
    words = f"--step {case.step} {case.models} --data-path {DATA_SET} {case.training}"
    return make_plan(words.split(), prog="python train.py").chosen[0]


def settings_of(case: Case) -> dict[str, Any]:
    return dict(flat_items(planned(case).resolved.config))


def defaults_of(name: str) -> dict[str, Any]:
    """Options of a case: its shapes, and the batch and the lengths of its preset."""
    case, values = CASES[name], settings_of(CASES[name])
    batch = values["train_batch_size"] or values["per_device_train_batch_size"] * values["gradient_accumulation_steps"]
    lengths = {"prompt": "max_prompt_seq_len", "answer": "max_answer_seq_len", "seq_len": "max_seq_len"}
    sizes = {option: values[flag] for option, flag in lengths.items() if flag in values}
    shapes = {"actor": case.actor, "critic": case.critic, "actor_lora_dim": values.get("actor_lora_dim", 0)}
    return shapes | sizes | {"batch": batch, "micro_batch": case.micro_batch, "repeats": 3}


def make_hub(jobs: Jobs, case: Case) -> Path:
    """The hub cache of a case, made anew: links to models that were made once, and rows of full length."""
    from transformers import AutoTokenizer

    options, stage = jobs.options, planned(case)
    hub, section = jobs.folder / "hub" / options.case, stage.stage.section
    shutil.rmtree(hub, ignore_errors=True)
    tokenizer = AutoTokenizer.from_pretrained(jobs.models / "actor")
    count, tokens = (options.warm_up + options.steps + 1) * options.batch, options.seq_len
    if section == "reward":
        count *= 2  # presets leave out pairs until lengths are balanced (--balance_lengths)
    if section == "ppo":
        tokens = options.prompt
    else:
        publish_model(hub, stage.base, jobs.models / "actor")
    counts = {"train": count, "test": HELD_OUT}
    rows = {
        split: full_rows(tokenizer, section, number, tokens=tokens, seed=seed)
        for seed, (split, number) in enumerate(counts.items())
    }
    publish_rows(hub, DATA_SET, rows)
    return hub


def with_default_settings(jobs: Jobs, case: Case, name: str, *more: str) -> None:
    """Run the command itself, with nothing added but where to write, when to stop, and `more`."""
    output, section = jobs.fresh(name), planned(case).stage.section
    if section == "ppo":  # where stages 1 and 2 would have left their models
        for folder, model in (("sft", "actor"), ("reward", "critic")):
            (output / folder).symlink_to(jobs.models / model)
    words = f"--step {case.step} --deployment-type single_gpu {case.models} --data-path {DATA_SET} {case.training}"
    steps = jobs.options.warm_up + jobs.options.steps
    ends = ["--output-dir", output, "--max_steps", steps, "--keep_checkpoints", 0]
    typed = ["train.py", *words.split(), *map(str, ends), *more]
    jobs.measured(name, [sys.executable, *typed], output / "runs" / section, ["python", *typed])
    for model in output.iterdir():
        if model.is_dir() and not model.is_symlink() and model.name != "runs":
            shutil.rmtree(model)


def tuned(jobs: Jobs, case: Case, name: str) -> None:
    """Run the stage with the preset's training, and with speed chosen by hand as in the reports."""
    options, stage = jobs.options, planned(case)
    by_model = {"zero_stage": options.zero_stage, "gradient_checkpointing": "false"}
    micro = min(options.micro_batch, options.batch)
    speed: dict[str, Any] = {"per_device_train_batch_size": micro}
    speed["gradient_accumulation_steps"] = options.batch // micro
    models = {"": "actor"}
    if stage.stage.section == "ppo":
        models = {"actor_": "actor", "critic_": "critic"}
        speed |= {"per_device_generation_batch_size": options.batch, "offload_reference_model": "false"}
    for prefix, model in models.items():
        speed[f"{prefix}model_name_or_path"] = jobs.models / model
        speed |= {f"{prefix}{flag}": value for flag, value in by_model.items()}
    preset, steps = Path(stage.resolved.preset).resolve(), options.warm_up + options.steps
    words = ["--preset", preset, *case.training.split(), *flags(speed), *NO_HELD_OUT]
    words += ["--data_path", DATA_SET, "--max_steps", steps]
    jobs.project(name, stage.stage.package, words)


def middle(jobs: Jobs, way: str, field: str) -> float | None:
    """The median of a field over the runs of a way that did not fail."""
    runs: Iterable[dict[str, Any]] = (jobs.runs.get(f"{way} {turn + 1}", {}) for turn in range(jobs.options.repeats))
    values = [run[field] for run in runs if field in run]
    return median(values) if values else None


def compare(jobs: Jobs, figures: Figures, limit: float | None) -> None:
    """All figures anew, of the runs that have ended. limit: samples/s of the device; None: not known."""
    figures.found.clear()
    rates = {way: middle(jobs, way, "samples_per_s") for way in WAYS}
    for way, name in WAYS.items():
        figures.add(f"samples/s, {name}", rates[way], "1/s")
        figures.add(f"samples/s over the limit, {name}", quotient(rates[way], limit))
        figures.add(f"training MFU, {name}", middle(jobs, way, "train_mfu"))
        figures.add(f"seconds from the command to the first step, {name}", middle(jobs, way, "start_s"), "s")
        figures.add(f"peak memory, {name}", middle(jobs, way, "peak_gib"), "GiB")
    figures.add("samples/s with default settings over tuned", quotient(rates["typed"], rates["tuned"]), "x", TARGET)
    figures.add(f"samples/s with default settings over {BASELINE}", quotient(rates["typed"], rates[BASELINE]), "x")


def prepared(jobs: Jobs, figures: Figures) -> Case:
    """Make the models and the hub cache of the case; targets are of GPUs and of models that are not tiny."""
    options, case = jobs.options, CASES[jobs.options.case]
    figures.checked = jobs.runs["device"].get("name", "cpu") != "cpu" and not options.case.startswith("tiny")
    jobs.make_models()
    jobs.variables = hub_variables(make_hub(jobs, case))
    return case


def typed(jobs: Jobs, figures: Figures) -> None:
    """The command and the tuned run in turn; the file of --json has the figures so far after each run."""
    options, case = jobs.options, prepared(jobs, figures)
    kind, keep = planned(case).stage.section, jobs.after_each
    has_mfu = case.step != 3 and not settings_of(case)["lora_dim"]
    limit = note_limits(jobs, frozen=bool(options.actor_lora_dim)).get("samples_per_s") if case.step == 3 else None

    def add_figures() -> None:
        name, run = next(reversed(jobs.runs.items()))
        if has_mfu and "error" not in run:
            note_mfu(jobs, kind, name, run, options.batch * (2 if kind == "reward" else 1))
        compare(jobs, figures, limit)
        keep()

    jobs.after_each = add_figures
    for turn in range(options.repeats):
        with_default_settings(jobs, case, f"typed {turn + 1}")
        if case.by_hand:
            tuned(jobs, case, f"tuned {turn + 1}")
        if case.beside:
            jobs.baseline(f"{BASELINE} {turn + 1}")


def measured(jobs: Jobs, figures: Figures) -> None:
    """The command with the settings that the plan chooses, in turn with those that --auto measure chooses."""
    case, keep = prepared(jobs, figures), jobs.after_each

    def add_figures() -> None:
        figures.found.clear()
        rates = {way: middle(jobs, way, "samples_per_s") for way in AUTO}
        for way, auto in AUTO.items():
            figures.add(f"samples/s, --auto {auto}", rates[way], "1/s")
        figures.add("samples/s of --auto measure over plan", quotient(rates["measured"], rates["planned"]), "x", TARGET)
        keep()

    jobs.after_each = add_figures
    for turn in range(jobs.options.repeats):
        for way, auto in AUTO.items():
            with_default_settings(jobs, case, f"{way} {turn + 1}", "--auto", auto)


TYPED_ROWS: dict[str, Row] = {"typed": typed, "measured": measured}
