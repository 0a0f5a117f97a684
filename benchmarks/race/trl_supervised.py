"""DPO and SFT by TRL's trainers, to compare with. A worker: prints one JSON line.

`--settings` are those that the race searches, as JSON; sizes are the row's.
"""

import argparse
import json
import os
import time
from itertools import pairwise
from statistics import median
from typing import Any

from benchmarks.race.trl_grpo import ALONE, data_and_adapters, worker_parser
from benchmarks.speed.trainers import FIXED, Counted, clock


def trainer_of(options: argparse.Namespace, settings: dict[str, Any]) -> Any:
    """TRL's trainer for the row's sizes with the settings of a candidate."""
    import torch
    from trl import DPOConfig, DPOTrainer, SFTConfig, SFTTrainer

    on_gpu, micro = torch.cuda.is_available(), settings["micro_batch"]
    kind, trainer = (DPOConfig, DPOTrainer) if options.kind == "dpo" else (SFTConfig, SFTTrainer)
    further = {name: settings[name] for name in settings if name.startswith("precompute_")}
    config = kind(
        output_dir=options.output,
        per_device_train_batch_size=micro,
        gradient_accumulation_steps=options.prompts // micro,
        max_length=options.prompt + options.answer,
        max_steps=options.warm_up + options.steps,
        learning_rate=1e-6,
        gradient_checkpointing=settings["gradient_checkpointing"],
        use_liger_kernel=settings["use_liger_kernel"],
        optim="adamw_torch_fused",
        bf16=on_gpu,
        use_cpu=not on_gpu,
        model_init_kwargs={"dtype": settings["weights"]},
        seed=1,
        **FIXED | further,
    )
    return trainer(model=options.model, args=config, **data_and_adapters(options))


def main() -> None:
    """Train so many steps and print the median seconds of a step."""
    parser = worker_parser(__doc__)
    parser.add_argument("--kind", choices=("dpo", "sft"), required=True)
    options = parser.parse_args()
    started = time.perf_counter()
    os.environ.update(ALONE)
    import torch
    import trl

    settings = json.loads(options.settings)
    trainer = trainer_of(options, settings)
    trainer.data_collator = counted = Counted(trainer.data_collator)
    watch = clock()
    began = time.perf_counter()
    trainer.add_callback(watch)
    trainer.train()
    ends = [began, *watch.times]
    steps = [after - before for before, after in pairwise(ends)][options.warm_up :]
    micro_batches = options.prompts // settings["micro_batch"]
    tokens = counted.counts[-len(steps) * micro_batches :]
    found = {
        "step_s": median(steps),
        "tokens_per_step": sum(tokens) / len(steps),
        "start_s": began - started,
        "steps": len(steps),
        "torch_peak_gib": torch.cuda.max_memory_reserved() / 2**30 if torch.cuda.is_available() else 0.0,
        "versions": {"trl": trl.__version__, "torch": torch.__version__},
    }
    print(json.dumps(found), flush=True)


if __name__ == "__main__":
    main()
