"""GRPO by TRL's trainer with vLLM in its process, to compare with. A worker: prints one JSON line.

`--settings` are those that the race searches, as JSON; sizes are the row's. `even` is the reward of both sides.
"""

import argparse
import json
import os
import time
from collections.abc import Callable
from itertools import pairwise
from statistics import median
from typing import Any

# The group of one process that TRL's side needs for vLLM in it.
ALONE = {
    "MASTER_ADDR": "127.0.0.1",
    "MASTER_PORT": "29617",
    "RANK": "0",
    "LOCAL_RANK": "0",
    "WORLD_SIZE": "1",
}
TARGETS = ["q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"]


def even(completions: list[str], **columns: Any) -> list[float]:
    """Return 1 for a response with an even number of characters: rewards that differ, without a cost."""
    return [float(len(text) % 2 == 0) for text in completions]


def timed(method: Callable[..., Any], seconds: list[float]) -> Callable[..., Any]:
    """The same method; each call's seconds, the device's work included, are added to a list."""
    import torch

    def call(*args: Any, **kwargs: Any) -> Any:
        started = time.perf_counter()
        result = method(*args, **kwargs)
        if torch.cuda.is_available():
            torch.cuda.synchronize()
        seconds.append(time.perf_counter() - started)
        return result

    return call


def trainer_of(options: argparse.Namespace, settings: dict[str, Any]) -> Any:
    """TRL's trainer for the row's sizes with the settings of a candidate."""
    import torch
    from trl import GRPOConfig, GRPOTrainer

    on_gpu, micro = torch.cuda.is_available(), settings["micro_batch"]
    vllm: dict[str, Any] = {"use_vllm": False}
    if on_gpu:
        vllm = {"use_vllm": True, "vllm_mode": "colocate", "vllm_max_model_length": options.prompt + options.answer}
        vllm |= {name: settings[name] for name in settings if name.startswith("vllm_")}
    config = GRPOConfig(
        output_dir=options.output,
        per_device_train_batch_size=micro,
        gradient_accumulation_steps=options.prompts * options.samples // micro,
        num_generations=options.samples,
        max_completion_length=options.answer,
        max_steps=options.warm_up + options.steps,
        learning_rate=1e-6,
        beta=0.0,
        temperature=1.0,
        gradient_checkpointing=settings["gradient_checkpointing"],
        use_liger_kernel=settings["use_liger_kernel"],
        bf16=on_gpu,
        use_cpu=not on_gpu,
        model_init_kwargs={"dtype": settings["weights"]},
        report_to=[],
        save_strategy="no",
        logging_strategy="no",
        disable_tqdm=True,
        seed=1,
        **vllm,
    )
    return GRPOTrainer(options.model, even, config, **data_and_adapters(options))


def data_and_adapters(options: argparse.Namespace) -> dict[str, Any]:
    """Return the rows and the LoRA configuration of a row of the race, as TRL's trainers take them."""
    from datasets import load_dataset
    from peft import LoraConfig

    lora = (
        LoraConfig(r=options.lora, lora_alpha=16, target_modules=TARGETS, task_type="CAUSAL_LM")
        if options.lora
        else None
    )
    return {"train_dataset": load_dataset("json", data_files=options.data, split="train"), "peft_config": lora}


def worker_parser(description: str | None) -> argparse.ArgumentParser:
    """Return the parser of a worker of TRL's side: its files, its settings and the sizes of the row."""
    parser = argparse.ArgumentParser(description=description)
    for name in ("model", "data", "output", "settings"):
        parser.add_argument(f"--{name}", required=True)
    for name in ("prompts", "samples", "prompt", "answer", "steps", "warm_up", "lora"):
        parser.add_argument(f"--{name}", type=int, required=True)
    return parser


def main() -> None:
    """Train so many steps and print the median seconds of a step and of its phases."""
    options = worker_parser(__doc__).parse_args()
    started = time.perf_counter()
    # Imported here: this project's reward workers load this file for `even` alone.
    from benchmarks.speed.vllm_rollouts import SETTINGS

    os.environ.update(SETTINGS | ALONE)
    import torch
    import trl

    from benchmarks.speed.trainers import clock

    trainer = trainer_of(options, json.loads(options.settings))
    sampled, rollouts, lengths = list[float](), list[float](), list[int]()
    score = trainer._calculate_rewards

    def seen(inputs: Any, prompts: Any, completions: Any, completion_ids: Any) -> Any:
        lengths.extend(map(len, completion_ids))
        return score(inputs, prompts, completions, completion_ids)

    trainer._calculate_rewards = seen
    trainer._generate = timed(trainer._generate, sampled)
    trainer._generate_and_score_completions = timed(trainer._generate_and_score_completions, rollouts)
    watch, began = clock(), time.perf_counter()
    trainer.add_callback(watch)
    trainer.train()
    ends = [began, *watch.times]
    steps = [after - before for before, after in pairwise(ends)][options.warm_up :]
    found = {
        "step_s": median(steps),
        "generate_s": median(sampled[options.warm_up :]),
        "score_s": median(rollouts[options.warm_up :]) - median(sampled[options.warm_up :]),
        "train_s": median(steps) - median(rollouts[options.warm_up :]),
        "start_s": began - started,
        "mean_length": sum(lengths) / len(lengths),
        "steps": len(steps),
        "torch_peak_gib": torch.cuda.max_memory_reserved() / 2**30 if torch.cuda.is_available() else 0.0,
        "versions": {"trl": trl.__version__, "torch": torch.__version__},
    }
    print(json.dumps(found), flush=True)
    os._exit(0)  # vLLM's threads may hold the process


if __name__ == "__main__":
    main()
