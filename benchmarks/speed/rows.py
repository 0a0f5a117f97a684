"""The rows of the benchmark that are about PPO: each makes its runs, then its figures from what they found."""

import shutil
from collections.abc import Callable, Sequence
from typing import Any

from benchmarks.speed.figures import Figures, quotient
from benchmarks.speed.jobs import BenchError, Jobs, flags, output_words, ppo_words
from benchmarks.speed.random_models import SHAPES, config_of
from benchmarks.speed.roofline import Device, data_sheet
from benchmarks.speed.watched import WATCHED
from benchmarks.speed.work import Shape, generation_seconds, lora_weights, ppo_flops, shape_of, state_bytes, step_bounds

# (actor, batch) -> samples/s, their ratio to DeepSpeed-Chat's, their share of the limit.
STEP_TARGETS = {
    ("1.3b", 64): (">= 40", ">= 3", ""),
    ("1.3b", 128): (">= 45", ">= 2.2", ""),
    ("llama-3-8b", 64): ("", "", ">= 0.75"),
    ("qwen2.5-1.5b", 64): ("", "", ">= 0.6"),
    ("qwen2.5-1.5b", 128): ("", "", ">= 0.68"),
}
PHASES = tuple(dict.fromkeys(WATCHED.values()))


def shapes(jobs: Jobs) -> tuple[Shape, Shape]:
    """Return the shapes of the actor and the critic."""
    return shape_of(config_of(jobs.options.actor)), shape_of(config_of(jobs.options.critic))


def device_of(jobs: Jobs) -> Device | None:
    """The device as measured in this job; its limits by the data sheet stand in `data_sheet`."""
    found = jobs.runs.get("device") or jobs.device()
    return Device(found["name"], found["bandwidth"], found["flops"]) if "bandwidth" in found else None


def note_limits(jobs: Jobs, *, batch: int = 0, gpus: int = 1, frozen: bool = False) -> dict[str, float]:
    """Bounds of a step with responses of full length, by measured figures and by the data sheet; the former.

    frozen: of an actor under LoRA.
    """
    measured = device_of(jobs)
    if measured is None:
        return {}
    actor, critic = shapes(jobs)
    options = jobs.options
    lengths = [options.answer] * (batch or options.batch)
    for name, device in (("limit", measured), ("limit (data sheet)", data_sheet(measured))):
        jobs.runs[name] = step_bounds(
            actor, critic, device, prompt=options.prompt, lengths=lengths, gpus=gpus, frozen=frozen
        )
    return jobs.runs["limit"]


def add_mfu(jobs: Jobs, run: dict[str, Any], *, full: bool = True) -> float | None:
    """`train_mfu` and `score_mfu` of a run over full-length rows, against the data sheet; the former.

    full: all of the actor's weights are trained; else (LoRA) its backward pass makes no gradients of weights.
    """
    device = device_of(jobs)
    if device is None or "train_s" not in run:
        return None
    options = jobs.options
    lengths = [run.get("mean_length", options.answer)] * options.batch
    flops = ppo_flops(*shapes(jobs), prompt=options.prompt, lengths=lengths, frozen=not full)
    peak = data_sheet(device).flops
    run["score_mfu"] = flops["score"] / (run["score_s"] * peak)
    run["train_mfu"] = flops["train"] / (run["train_s"] * peak)
    for name, seconds in (("score_tokens_per_s", run["score_s"]), ("train_tokens_per_s", run["train_s"])):
        run[name] = sum(options.prompt + length for length in lengths) * run.get("gpus", 1) / seconds
    return run["train_mfu"]


def noted(jobs: Jobs, name: str, run: dict[str, Any], *, full: bool = True) -> dict[str, Any]:
    """`run` with its MFU, also where it is printed."""
    if run:  # neither failed nor left out
        add_mfu(jobs, run, full=full)
        jobs.runs[name] |= run
    return run


def step3(jobs: Jobs, figures: Figures) -> None:
    """A whole step: this project, DeepSpeed-Chat's loop, and the limit of the device."""
    options, gpus = jobs.options, jobs.options.gpus[-1]
    rank, batch = options.actor_lora_dim, options.batch
    jobs.make_models()
    limit = note_limits(jobs, gpus=gpus, frozen=bool(rank))
    words = ("--actor_lora_dim", rank) if rank else ()
    own = noted(jobs, "project", jobs.step3("project", *words, gpus=gpus), full=not rank)
    base = noted(jobs, "DeepSpeed-Chat", jobs.baseline("DeepSpeed-Chat", gpus=gpus))
    target, speedup_target, share = STEP_TARGETS.get((options.actor, batch), ("", "", "")) if gpus == 1 else ("",) * 3
    figures.add("samples/s", own.get("samples_per_s"), "1/s", target)
    figures.add("samples/s, DeepSpeed-Chat", base.get("samples_per_s"), "1/s")
    speedup = quotient(own.get("samples_per_s"), base.get("samples_per_s"))
    figures.add("samples/s over DeepSpeed-Chat's", speedup, "x", speedup_target)
    for name, phase in (("generation", "generate_s"), ("scoring", "score_s"), ("training", "train_s")):
        figures.add(f"{name}, DeepSpeed-Chat's time over this", quotient(base.get(phase), own.get(phase)), "x")
    figures.add("samples/s over the limit", quotient(own.get("samples_per_s"), limit.get("samples_per_s")), "", share)
    figures.add("training MFU", own.get("train_mfu"))
    figures.add("peak memory", own.get("peak_gib"), "GiB", "<= 48" if (options.actor, batch) == ("1.3b", 64) else "")


def generate_alone(
    jobs: Jobs, name: str, batches: Sequence[int], *, actor: str = "actor", fill: int = 1
) -> dict[str, Any]:
    """HybridEngine on full prompts at each batch size: batch -> seconds, tokens/s, lengths.

    fill: responses of a rollout for each that is generated at once; above 1, the ends of some make room for others.
    """
    options = jobs.options
    words = [*ppo_words(options, jobs.prompts(), actor=actor), *output_words(jobs.fresh(name))]
    sizes = ["--batches", ",".join(map(str, batches)), "--repeats", options.repeats, "--fill", fill, "--"]
    found = jobs.worker(name, "benchmarks.speed.generation", [*sizes, *words, *jobs.extra])
    for batch in (str(size) for size in batches if str(size) in found):
        # A line of its own in the table; lengths are for the bounds.
        shown = {k: v for k, v in found[batch].items() if k not in ("lengths", "seconds")}
        jobs.runs[f"{name}, batch {batch}"] = shown | {"flags": jobs.runs[name]["flags"]}
    if found:
        del jobs.runs[name]
    return found


def generation(jobs: Jobs, figures: Figures) -> None:
    """Sampling by itself at several batch sizes, against the bandwidth of the device."""
    jobs.make_models()
    found, measured = generate_alone(jobs, "generation", jobs.options.batches), device_of(jobs)
    targets = {"64": ">= 25000", "128": ">= 34000", "256": ">= 42000"}
    for batch, run in found.items():
        # The targets are those of decode steps; prompts are work of another kind.
        figures.add(f"decode tokens/s, batch {batch}", run["decode_tokens_per_s"], "1/s", targets.get(batch, ""))
        figures.add(f"tokens/s with prompts, batch {batch}", run["generate_tokens_per_s"], "1/s")
        for device, by in ((measured, "measured"), (measured and data_sheet(measured), "data sheet")):
            if device is not None:
                share = share_of_bound(jobs, run, device)
                figures.add(f"share of the bound ({by} bandwidth), batch {batch}", share)


def vllm(jobs: Jobs, figures: Figures) -> None:
    """Sampling beside vLLM's of the same weights: prompts included, full responses, temperature 1."""
    options = jobs.options
    if not options.vllm:
        raise BenchError("--vllm: wanted the folder of vLLM's packages, made by pip install --target")
    jobs.make_models()
    sizes = {"prompt": options.prompt, "answer": options.answer, "repeats": options.repeats, "warm_up": options.warm_up}
    for batch, mine in generate_alone(jobs, "generation", options.batches).items():
        words = flags({"model": jobs.models / "actor", "batch": batch} | sizes)
        theirs = jobs.worker(f"vLLM, batch {batch}", "benchmarks.speed.vllm_rollouts", words, site=options.vllm)
        rate = mine["generate_tokens_per_s"]
        figures.add(f"this project, batch {batch}", rate, "tokens/s")
        for name, key in (("", "generate_tokens_per_s"), (" with log-probabilities", "with_log_probs_tokens_per_s")):
            figures.add(f"vLLM{name}, batch {batch}", theirs.get(key), "tokens/s")
            figures.add(f"this project over vLLM{name}, batch {batch}", quotient(rate, theirs.get(key)), "x")


def share_of_bound(jobs: Jobs, run: dict[str, Any], device: Device) -> float:
    """The bound of the rollouts that were made, by their own lengths, over the time they took."""
    actor, _ = shapes(jobs)
    bounds = [generation_seconds(actor, device, prompt=jobs.options.prompt, lengths=rows) for rows in run["lengths"]]
    return sum(bounds) / sum(run["seconds"])


def training(jobs: Jobs, figures: Figures) -> None:
    """MFU of the update phase with and without recomputation of activations."""
    jobs.make_models()
    checkpointing = ("--actor_gradient_checkpointing", "true", "--critic_gradient_checkpointing", "true")
    runs = {"plain": ((), ">= 0.6"), "checkpointing": (checkpointing, ">= 0.5")}
    for name, (words, target) in runs.items():
        run = noted(jobs, name, jobs.step3(name, *words))
        figures.add(f"training MFU, {name}", run.get("train_mfu"), "", target)
        figures.add(f"training time, {name}", run.get("train_s"), "s")
        figures.add(f"peak memory, {name}", run.get("peak_gib"), "GiB")


def scaling(jobs: Jobs, figures: Figures) -> None:
    """The same work on each of more and more GPUs."""
    jobs.make_models()
    single: float | None = None
    for gpus in jobs.options.gpus:
        run = noted(jobs, f"{gpus} GPU", jobs.step3(f"{gpus} GPU", gpus=gpus))
        rate = run.get("samples_per_s")
        single = single or quotient(rate, gpus)
        figures.add(f"samples/s, {gpus} GPU", rate, "1/s")
        if gpus > jobs.options.gpus[0]:
            efficiency = quotient(quotient(rate, gpus), single)
            figures.add(f"weak scaling to {gpus} GPU", efficiency, "", ">= 0.95" if gpus <= 4 else "")


def zero3(jobs: Jobs, figures: Figures) -> None:
    """Partitioned weights against partitioned gradients, here and in DeepSpeed-Chat's loop."""
    gpus = jobs.options.gpus[-1]
    jobs.make_models()
    found = {}
    for stage in (2, 3):
        words = ("--actor_zero_stage", stage, "--critic_zero_stage", stage)
        found[stage] = noted(jobs, f"ZeRO-{stage}", jobs.step3(f"ZeRO-{stage}", *words, gpus=gpus))
        name = f"DeepSpeed-Chat ZeRO-{stage}"
        found[stage, "base"] = noted(jobs, name, jobs.baseline(name, gpus=gpus, zero_stage=stage))
    for field, what, target in (("step_s", "step time", "<= 1.3"), ("generate_s", "generation time", "")):
        figures.add(f"{what}, ZeRO-3 over ZeRO-2", quotient(found[3].get(field), found[2].get(field)), "x", target)
        base = quotient(found[3, "base"].get(field), found[2, "base"].get(field))
        figures.add(f"{what}, ZeRO-3 over ZeRO-2, DeepSpeed-Chat", base, "x")


def early(jobs: Jobs, figures: Figures) -> None:
    """Responses that end by themselves: the work has to shrink with the real lengths."""
    options = jobs.options
    jobs.make_models(early=True)
    measured = device_of(jobs)
    short = generate_alone(jobs, "generation, early", [options.batch], actor="actor-early").get(str(options.batch))
    if short:
        lengths = [length for rollout in short["lengths"] for length in rollout]
        figures.add("mean response", sum(lengths) / len(lengths), "tokens")
        if measured is not None:
            for device, by in ((measured, "measured"), (data_sheet(measured), "data sheet")):
                target = "<= 1.3" if by == "data sheet" else ""
                figures.add(f"generation over its bound ({by})", 1 / share_of_bound(jobs, short, device), "x", target)
    refilled = {
        name: generate_alone(jobs, f"generation of 8 batches, {name}", [options.batch], actor=actor, fill=8)
        for name, actor in (("full", "actor"), ("early", "actor-early"))
    }
    rates = [refilled[name].get(str(options.batch), {}).get("generate_tokens_per_s") for name in ("full", "early")]
    figures.add("generation per token over that of full length, refilled", quotient(*rates), "x", "<= 1.25")
    rates = [refilled[name].get(str(options.batch), {}).get("decode_tokens_per_s") for name in ("full", "early")]
    figures.add("the same without the prompts", quotient(*rates), "x")
    own = {name: noted(jobs, f"step, {name}", jobs.step3(f"step, {name}", actor=actor))
           for name, actor in (("full", "actor"), ("early", "actor-early"))}  # fmt: skip
    rates = {name: run.get("train_tokens_per_s") for name, run in own.items()}
    per_token = quotient(rates["full"], rates["early"])
    figures.add("training time per real token, early over full", per_token, "x", "<= 1.1")
    figures.add("step time, early over full", quotient(own["early"].get("step_s"), own["full"].get("step_s")), "x")
    base = noted(jobs, "DeepSpeed-Chat, early", jobs.baseline("DeepSpeed-Chat, early", actor="actor-early"))
    speedup = quotient(own["early"].get("samples_per_s"), base.get("samples_per_s"))
    figures.add("samples/s over DeepSpeed-Chat's, early", speedup, "x")


def lora(jobs: Jobs, figures: Figures) -> None:
    """Low-rank adapters on the actor against training all of its weights."""
    options, rank = jobs.options, jobs.options.lora_dim
    jobs.make_models()
    full = noted(jobs, "full", jobs.step3("full"))
    name = f"LoRA r={rank}"
    found = noted(jobs, name, jobs.step3(name, "--actor_lora_dim", rank), full=False)
    for name, target in (("generate", "<= 1.03"), ("train", "<= 1.0"), ("step", "")):
        ratio = quotient(found.get(f"{name}_s"), full.get(f"{name}_s"))
        figures.add(f"{name} time, LoRA over full", ratio, "x", target)
    shape, trainable = shapes(jobs)[0], lora_weights(config_of(options.actor), rank)
    weights = shape.layer_weights + shape.head_weights
    states = state_bytes(weights + trainable, trainable) / state_bytes(weights, weights)
    figures.add("actor's model states, LoRA over full (counted)", states, "", "<= 0.3")
    for name, run in (("full", full), ("LoRA", found)):
        figures.add(f"peak memory, {name}", run.get("peak_gib"), "GiB")


def watch(jobs: Jobs, name: str, *words: object) -> dict[str, Any]:
    """Step 3 with its phases watched, under the cap of memory where there is one."""
    output = jobs.fresh(name)
    every = [*ppo_words(jobs.options, jobs.prompts()), *words, *output_words(output), *jobs.extra]
    found = jobs.worker(name, "benchmarks.speed.watched", ["--cap-gib", jobs.options.cap_gib, "--", *every])
    if found:
        # Times, and what the run itself says of memory, which is the same where both say it.
        jobs.runs[name] = jobs.read(output / "run") | jobs.runs[name]
    shutil.rmtree(output, ignore_errors=True)
    return found


def memory(jobs: Jobs, figures: Figures) -> None:
    """Peak memory of each phase, under a cap where one is given."""
    options = jobs.options
    jobs.make_models()
    words = []
    if options.actor_lora_dim:
        words += ["--actor_lora_dim", options.actor_lora_dim, "--save_adapter_only", "true"]
    found = watch(jobs, "memory", *words)
    for phase in PHASES:
        figures.add(f"peak memory, {phase}", found.get(f"{phase}_peak_gib"), "GiB")
    target = f"<= {options.cap_gib or 48:g}"
    figures.add("peak memory", found.get("peak_gib"), "GiB", target)
    figures.add("peak memory held by the allocator", found.get("reserved_gib"), "GiB")


def start(jobs: Jobs, figures: Figures) -> None:
    """Measure the time from the end of the imports to the first step, data prepared and files in the page cache."""
    jobs.make_models()
    watch(jobs, "first", "--max_steps", 1)
    again = watch(jobs, "again", "--max_steps", 1)
    figures.add("imports", again.get("imports_s"), "s")
    figures.add("start to first step after the imports", again.get("first_step_s"), "s", "<= 20")


Row = Callable[[Jobs, Figures], None]
PPO_ROWS: dict[str, Row] = {
    "step3": step3,
    "generation": generation,
    "vllm": vllm,
    "training": training,
    "scaling": scaling,
    "zero3": zero3,
    "early": early,
    "lora": lora,
    "memory": memory,
    "start": start,
}
SHAPE_NAMES = tuple(SHAPES)
