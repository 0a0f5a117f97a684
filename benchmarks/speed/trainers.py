"""SFT and reward training by transformers' Trainer or TRL's trainers, to compare with. A worker: prints one JSON line.

`python -m benchmarks.speed.trainers --kind sft --library trl --model FOLDER --data PAIRS.jsonl ...`. The same rows,
micro-batches, AdamW and DeepSpeed settings as the run it is compared with; attention and losses are the library's own.
"""

import argparse
import json
import os
import time
from statistics import median
from typing import Any

import torch

from benchmarks.speed.jobs import free_port

DTYPES = {"bf16": torch.bfloat16, "fp16": torch.float16, "fp32": torch.float32}
SCALE_POWER = 12  # of fp16: with DeepSpeed's 16 the first steps are skipped
FIXED = {"report_to": [], "save_strategy": "no", "logging_strategy": "no", "disable_tqdm": True}


def read_rows(options: argparse.Namespace, tokenizer: Any) -> list[dict[str, list[int]]]:
    """Token ids: `input_ids` cut on the right for SFT; `chosen_ids`, `rejected_ids` with the prompt's left cut off."""
    longest, rows = options.seq_len, []
    with open(options.data, encoding="utf-8") as lines:
        for line in map(json.loads, lines):
            prompt = tokenizer(f"\n\nHuman: {line['prompt']}\n\nAssistant: ").input_ids
            chosen, rejected = (
                [*tokenizer(line[name], add_special_tokens=False).input_ids, tokenizer.eos_token_id]
                for name in ("chosen", "rejected")
            )
            if options.kind == "sft":
                rows.append({"input_ids": (prompt + chosen)[:longest]})
                continue
            kept = prompt[-max(longest - max(len(chosen), len(rejected)), 1) :]
            rows.append({"chosen_ids": (kept + chosen)[:longest], "rejected_ids": (kept + rejected)[:longest]})
    return rows


def padded(rows: list[list[int]], pad_id: int) -> dict[str, torch.Tensor]:
    """Ids (n, S) filled up on the right, and their mask."""
    width = max(map(len, rows))
    ids = torch.tensor([row + [pad_id] * (width - len(row)) for row in rows])
    mask = torch.tensor([[1] * len(row) + [0] * (width - len(row)) for row in rows])
    return {"input_ids": ids, "attention_mask": mask}


def sft_collator(pad_id: int) -> Any:
    """Rows to (ids, mask, labels): labels are the ids, -100 where there is padding."""

    def collate(rows: list[dict[str, list[int]]]) -> dict[str, torch.Tensor]:
        batch = padded([row["input_ids"] for row in rows], pad_id)
        return batch | {"labels": batch["input_ids"].masked_fill(batch["attention_mask"] == 0, -100)}

    return collate


def pair_collator(pad_id: int) -> Any:
    """Pairs to (ids, mask) of twice as many rows: all chosen ones, then all rejected ones."""

    def collate(rows: list[dict[str, list[int]]]) -> dict[str, torch.Tensor]:
        return padded([row[name] for name in ("chosen_ids", "rejected_ids") for row in rows], pad_id)

    return collate


class Counted:
    """A collator that notes the real tokens of each micro-batch."""

    def __init__(self, collator: Any) -> None:
        self.collator = collator
        self.counts: list[int] = []

    def __call__(self, rows: Any) -> Any:
        batch = self.collator(rows)
        mask = batch.get("attention_mask")
        self.counts.append(int(batch["input_ids"].numel() if mask is None else mask.sum()))
        return batch


def clock() -> Any:
    """A callback with the times at which optimizer steps ended, the device's work included; peaks are of steps."""
    from transformers import TrainerCallback

    class Clock(TrainerCallback):
        def __init__(self) -> None:
            self.times: list[float] = []

        def on_train_begin(self, *args: Any, **kwargs: Any) -> None:
            if torch.cuda.is_available():
                torch.cuda.reset_peak_memory_stats()

        def on_step_end(self, *args: Any, **kwargs: Any) -> None:
            if torch.cuda.is_available():
                torch.cuda.synchronize()
            self.times.append(time.perf_counter())

    return Clock()


def deepspeed_config(options: argparse.Namespace) -> dict[str, Any]:
    """The ZeRO stage, type and offload of the run that is compared with."""
    zero: dict[str, Any] = {"stage": options.zero_stage, "overlap_comm": True}
    if options.offload:
        on_host = {"device": "cpu", "pin_memory": torch.cuda.is_available()}
        zero |= {"offload_optimizer": on_host, "offload_param": on_host}
    config = {
        "train_micro_batch_size_per_gpu": options.micro_batch,
        "gradient_accumulation_steps": options.batch // options.micro_batch,
        "zero_optimization": zero,
        "bf16": {"enabled": options.dtype == "bf16"},
        "fp16": {"enabled": options.dtype == "fp16", "initial_scale_power": SCALE_POWER},
        "gradient_clipping": 1.0,
        "zero_force_ds_cpu_optimizer": options.offload == "deepspeed",
    }
    if options.offload == "deepspeed":
        config["optimizer"] = {"type": "AdamW", "params": {"lr": "auto", "betas": "auto", "weight_decay": "auto"}}
    return config


def arguments(options: argparse.Namespace) -> dict[str, Any]:
    """Training arguments that both libraries share."""
    shared = {
        "output_dir": options.output,
        "per_device_train_batch_size": options.micro_batch,
        "gradient_accumulation_steps": options.batch // options.micro_batch,
        "max_steps": options.warm_up + options.steps,
        "learning_rate": 1e-6,
        "adam_beta2": 0.95,
        "optim": "adamw_torch_fused",
        "bf16": options.dtype == "bf16",
        "fp16": options.dtype == "fp16",
        "gradient_checkpointing": options.gradient_checkpointing,
        "use_cpu": not torch.cuda.is_available(),
        "deepspeed": deepspeed_config(options) if options.deepspeed else None,
        "remove_unused_columns": False,
    }
    return FIXED | shared


def make_trainer(options: argparse.Namespace) -> Any:
    """Trainer, SFTTrainer or RewardTrainer over the rows."""
    import transformers
    from datasets import Dataset

    tokenizer = transformers.AutoTokenizer.from_pretrained(options.model)
    rows = Dataset.from_list(read_rows(options, tokenizer))
    is_sft = options.kind == "sft"
    # Arguments before the model: with ZeRO stage 3 they decide how it is loaded.
    if options.library == "transformers":
        made = transformers.TrainingArguments(**arguments(options))
    else:
        import trl

        wanted = trl.SFTConfig if is_sft else trl.RewardConfig
        made = wanted(**arguments(options), max_length=options.seq_len)
    auto_class = transformers.AutoModelForCausalLM if is_sft else transformers.AutoModelForSequenceClassification
    # Masters in fp32 are DeepSpeed's; without it the weights themselves are, under autocast.
    dtype = DTYPES[options.dtype if options.deepspeed else "fp32"]
    model = auto_class.from_pretrained(options.model, dtype=dtype, **({} if is_sft else {"num_labels": 1}))
    if options.library == "transformers":
        collator = (sft_collator if is_sft else pair_collator)(tokenizer.pad_token_id)
        trainer_class = transformers.Trainer if is_sft else pair_trainer()
        return trainer_class(model=model, args=made, train_dataset=rows, data_collator=collator)
    trainer_class = trl.SFTTrainer if is_sft else trl.RewardTrainer
    return trainer_class(model=model, args=made, train_dataset=rows, processing_class=tokenizer)


def pair_trainer() -> Any:
    """transformers' Trainer with the Bradley-Terry loss on the scores of the last tokens."""
    from transformers import Trainer

    class PairTrainer(Trainer):
        def compute_loss(self, model: Any, inputs: Any, *args: Any, **kwargs: Any) -> torch.Tensor:
            chosen, rejected = model(**inputs).logits.squeeze(-1).chunk(2)
            return -torch.nn.functional.logsigmoid((chosen - rejected).float()).mean()

    return PairTrainer


def summary(times: list[float], counts: list[int], options: argparse.Namespace) -> dict[str, Any]:
    """Medians of the steps after those of warm-up; `counts` are the tokens of micro-batches, in their order."""
    accumulation = options.batch // options.micro_batch
    steps = list(range(max(options.warm_up, 1), len(times)))
    seconds = [times[step] - times[step - 1] for step in steps]
    tokens = [sum(counts[step * accumulation : (step + 1) * accumulation]) for step in steps]
    ranks = int(os.environ.get("WORLD_SIZE", "1"))  # of full rows, all ranks have as many tokens
    rates = [ranks * count / passed for count, passed in zip(tokens, seconds, strict=True)]
    peak = torch.cuda.max_memory_allocated() / 2**30 if torch.cuda.is_available() else 0.0
    found = {"step_s": median(seconds), "tokens_per_s": median(rates), "tokens_per_step": ranks * median(tokens)}
    found |= {"samples_per_s": ranks * options.batch / median(seconds), "gpus": ranks}
    return found | {"peak_gib": peak, "steps": len(steps)}


def main() -> None:
    """Train, and print medians of the steps."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--kind", choices=("sft", "reward"), required=True)
    parser.add_argument("--library", choices=("transformers", "trl"), required=True)
    for name in ("model", "data", "output"):
        parser.add_argument(f"--{name}", required=True)
    parser.add_argument("--dtype", default="bf16", choices=("bf16", "fp16", "fp32"))
    parser.add_argument("--deepspeed", type=int, default=1, help="0: without DeepSpeed, 16 bits by autocast")
    parser.add_argument("--data_parallel", type=int, default=1, help="0: one process on one GPU, without torch's DDP")
    parser.add_argument("--offload", default="", choices=("", "torch", "deepspeed"), help="AdamW of offloaded states")
    parser.add_argument("--gradient_checkpointing", action="store_true")
    for name, value in {
        "seq_len": 512,
        "batch": 64,
        "micro_batch": 16,
        "zero_stage": 2,
        "warm_up": 3,
        "steps": 8,
    }.items():
        parser.add_argument(f"--{name}", type=int, default=value)
    options = parser.parse_args()
    if not options.data_parallel:
        os.environ["CUDA_VISIBLE_DEVICES"] = os.environ.get("CUDA_VISIBLE_DEVICES", "0").split(",")[0]
    elif "RANK" not in os.environ:
        alone = {"RANK": 0, "WORLD_SIZE": 1, "LOCAL_RANK": 0, "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": free_port()}
        os.environ.update({name: str(value) for name, value in alone.items()})
    if not torch.cuda.is_available():
        import deepspeed

        deepspeed.ops.__compatible_ops__["deepspeed_shm_comm"] = False  # building it takes a compiler and 50 s
    trainer, times = make_trainer(options), clock()
    trainer.data_collator = counted = Counted(trainer.data_collator)
    trainer.add_callback(times)
    trainer.train()
    if os.environ.get("RANK", "0") == "0":
        print(json.dumps(summary(times.times, counted.counts, options)), flush=True)
    os._exit(0)


if __name__ == "__main__":
    main()
