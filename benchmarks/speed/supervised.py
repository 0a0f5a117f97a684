"""The rows of the benchmark about SFT and reward models: this project against transformers' Trainer and TRL."""

import argparse
import importlib.util
from typing import Any

from benchmarks.speed.figures import Figures, quotient
from benchmarks.speed.jobs import NO_HELD_OUT, Jobs
from benchmarks.speed.random_models import config_of, make_pairs
from benchmarks.speed.roofline import data_sheet
from benchmarks.speed.rows import Row, device_of
from benchmarks.speed.work import shape_of

LIBRARIES = ("transformers", "trl")


def make_rows(jobs: Jobs, kind: str, *, mixed: bool) -> Any:
    """A file of pairs: all of them longer than a row and cut to it, or of mixed lengths below it."""
    options = jobs.options
    # An epoch ends behind the last step: its last step may have fewer rows.
    count = (options.warm_up + options.steps + 1) * options.batch * max(options.gpus) * (4 if mixed else 1)
    file = jobs.models / f"{kind}-{'mixed' if mixed else 'full'}-{count}-{options.seq_len}.jsonl"
    longest = int(options.seq_len / 2)  # words; a word is one or two tokens
    if mixed:
        make_pairs(file, count, prompt_words=9, responses=(longest // 8, longest))
    elif kind == "sft":
        make_pairs(file, count, prompt_words=9, responses=(2 * options.seq_len, 2 * options.seq_len))
    else:
        # What is cut there is the prompt.
        make_pairs(file, count, prompt_words=2 * options.seq_len, responses=(longest // 4, longest // 4))
    return file


def own_run(
    jobs: Jobs, kind: str, name: str, file: Any, *words: object, gpus: int = 1, **changes: object
) -> dict[str, Any]:
    """This project's step 1 (kinds sft, seq2seq) or 2 (reward) on a file of pairs. changes: of the row's options."""
    options = argparse.Namespace(**vars(jobs.options) | changes)
    model = jobs.models / ("critic" if kind == "reward" else "actor")
    stage = "step2_reward" if kind == "reward" else "step1_sft"
    own = {"sft": ("--train_on_prompt", "true"), "reward": ("--long_pairs", "truncate_left")}.get(kind, ())
    flags = [
        *("--model_name_or_path", model, "--data_path", file, "--data_output_path", jobs.models / "cache"),
        *("--max_seq_len", options.seq_len, "--zero_stage", options.zero_stage, "--dtype", options.dtype),
        *("--per_device_train_batch_size", options.micro_batch, "--learning_rate", "1e-6", "--weight_decay", "0"),
        *("--gradient_accumulation_steps", options.batch // options.micro_batch),
        *("--max_steps", options.warm_up + options.steps, *NO_HELD_OUT, *own, *words),
    ]
    return jobs.project(name, stage, flags, gpus=gpus)


def other_run(
    jobs: Jobs, kind: str, library: str, name: str, file: Any, *more: object, gpus: int = 1, **changes: object
) -> dict[str, Any]:
    """The same rows with another library's trainer. changes: of the row's options."""
    options = argparse.Namespace(**vars(jobs.options) | changes)
    names = ("seq_len", "batch", "micro_batch", "zero_stage", "dtype", "warm_up", "steps")
    words = [part for flag in names for part in (f"--{flag}", getattr(options, flag))]
    model = jobs.models / ("actor" if kind == "sft" else "critic")
    words += ["--kind", kind, "--library", library, "--model", model, "--data", file]
    words += ["--deepspeed", options.trainer_deepspeed, "--output", jobs.folder / "runs" / name, *more]
    return jobs.worker(name, "benchmarks.speed.trainers", words, gpus=gpus)


def note_mfu(jobs: Jobs, kind: str, name: str, run: dict[str, Any], num_rows: int) -> None:
    """`train_mfu` of a step over `num_rows` rows of equal length."""
    device = device_of(jobs)
    if device is None or not run:
        return
    shape = shape_of(config_of(jobs.options.actor if kind == "sft" else jobs.options.critic))
    tokens = run["tokens_per_step"]
    flops = shape.forward_flops([tokens / num_rows] * num_rows, head_tokens=tokens if kind == "sft" else 0)
    jobs.runs[name]["train_mfu"] = run["train_mfu"] = 3 * flops / (run["step_s"] * data_sheet(device).flops)


def compare(jobs: Jobs, figures: Figures, kind: str, *, mixed: bool) -> None:
    """Tokens/s on rows of full length, or on mixed lengths (packed here in step 1), against the best other."""
    label = "mixed lengths" if mixed else "full rows"
    libraries = [library for library in LIBRARIES if importlib.util.find_spec(library) is not None]
    file = make_rows(jobs, kind, mixed=mixed)
    packed = mixed and kind == "sft"
    name = f"project, {label}"
    own = own_run(jobs, kind, name, file, *(("--packing", "true") if packed else ()))
    num_rows = jobs.options.batch * (1 if kind == "sft" else 2)
    runs = {library: other_run(jobs, kind, library, f"{library}, {label}", file) for library in libraries}
    if not mixed:
        for run_name, run in {name: own, **{f"{key}, {label}": run for key, run in runs.items()}}.items():
            note_mfu(jobs, kind, run_name, run, num_rows)
        figures.add(f"training MFU, {label}", own.get("train_mfu"))
    best = max((run["tokens_per_s"] for run in runs.values() if run), default=None)
    figures.add(f"real tokens/s, {label}", own.get("tokens_per_s"), "1/s")
    target = "" if mixed and not packed else ">= 1.5" if mixed else ">= 1.0"
    figures.add(f"real tokens/s over the best other, {label}", quotient(own.get("tokens_per_s"), best), "x", target)


def sft(jobs: Jobs, figures: Figures) -> None:
    """Step 1, on all tokens of a row as the others do: full rows, and mixed lengths with packing."""
    jobs.make_models()
    for mixed in (False, True):
        compare(jobs, figures, "sft", mixed=mixed)


def reward(jobs: Jobs, figures: Figures) -> None:
    """Step 2 with the loss on the last token: full rows, and mixed lengths."""
    jobs.make_models()
    for mixed in (False, True):
        compare(jobs, figures, "reward", mixed=mixed)


SUPERVISED_ROWS: dict[str, Row] = {"sft": sft, "reward": reward}
