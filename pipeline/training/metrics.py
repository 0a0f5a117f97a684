"""Metrics: their names and units, and where they go: JSONL always, TensorBoard, CSV and W&B by flag, progress lines."""

import csv
import json
import logging
import math
import os
import time
import uuid
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from pipeline.files import tolerated, write_text

log = logging.getLogger(__name__)

# name -> meaning, reduction and unit. `eval_` in front of a name: the same on held-out rows.
DEFINITIONS = {
    "loss": "training loss of the step: the mean over all trained tokens (stage 2: pairs) of all ranks",
    "grad_norm": "L2 norm of the whole gradient before clipping",
    "learning_rate": "rate of the first parameter group in this step",
    "epoch": "passes over the training rows so far",
    "num_tokens": "real tokens that went through training so far, all ranks",
    "tokens_per_s": "real tokens of the step (stage 3: prompts, responses and ptx text) per second, all ranks",
    "samples_per_s": "rows of the step per second, all ranks; stage 3: responses, without padding rows",
    "mfu": "matrix work of the step's forward and backward passes on real tokens (stage 3: of the update's), without "
    "gradients of frozen weights, over what the devices could do; absent where unknown",
    "gpu_memory_gib": "peak memory allocated on rank 0's device since the last line",
    "gpu_reserved_gib": "peak memory that torch's allocator held there, in whole blocks, GiB; GPU only",
    "host_memory_gib": "peak resident memory of rank 0's process since it was started",
    "memory/generate_gib": "the same while the rollout was sampled, GiB; GPU only",
    "memory/score_gib": "the same while it was scored, GiB; GPU only",
    "memory/train_gib": "the same during the update, GiB; GPU only",
    "micro_batch_size": "rows (stage 2: pairs) of a micro-batch on each rank in force at this step: that of the flags "
    "unless an out-of-memory error has halved it",
    "step_s": "seconds of the step",
    "skipped_updates": "steps so far whose gradients or losses were not finite and that changed nothing",
    "eval_loss": "mean loss over all held-out tokens (stage 2: pairs)",
    "eval_perplexity": "exp of eval_loss",
    "eval_bleu": "corpus BLEU of greedy answers to all held-out prompts by sacrebleu's defaults, 0 to 100; references "
    "are the tokenised responses, decoded",
    "eval_rougeL": "mean ROUGE-L F-measure of such answers by rouge-score, 0 to 1",
    "accuracy": "share of pairs whose chosen response scores higher; ties count half",
    "margin": "mean of chosen minus rejected score",
    "mean_chosen_score": "mean raw score of chosen responses",
    "mean_rejected_score": "mean raw score of rejected responses",
    "objective/kl": "mean over sequences of the sum over tokens of log pi - log pi_ref (k1), nats",
    "objective/kl_k3": "the same by the k3 estimator, nats",
    "objective/entropy": "mean entropy of the policy per response token, nats",
    "objective/scores": "mean raw score of the reward model",
    "objective/score_clipfrac": "share of responses whose normalised score reward_clip cut",
    "objective/rlhf_reward": "mean over sequences of the shaped reward minus kl_coef times the KL",
    "objective/kl_coef": "weight of the KL penalty in this rollout",
    "policy/ratio_mean": "mean over response tokens of new over old probability",
    "policy/ratio_max": "largest of these ratios",
    "policy/first_ratio_error": "largest |log ratio| before the first update of the rollout; 0 when nothing drifted; "
    "null where that update trained no policy (critic warm-up, no finite reward); with old_log_probs sampler: "
    "policy/sampler_error, as the ratio itself is 1 by construction",
    "policy/sampler_error": "largest |trainer's - sampler's log-probability| of a sampled token",
    "policy/clipfrac": "share of response tokens whose ratio was clipped",
    "policy/approx_kl": "estimate of KL(old || new) per token, nats",
    "loss/policy": "policy loss per response token",
    "loss/value": "value loss per response token",
    "loss/ptx": "language-model loss per token of the ptx text",
    "value/clipfrac": "share of response tokens where the clipped value loss was the larger one",
    "value/explained_variance": "1 - Var(returns - values) / Var(returns) over response tokens",
    "advantages/mean": "mean of the advantages before whitening",
    "advantages/std": "standard deviation of the advantages before whitening",
    "completions/mean_length": "mean response tokens, EOS included",
    "completions/truncated_fraction": "share of responses cut at max_answer_seq_len",
    "completions/eos_fraction": "share of responses that ended with an EOS",
    "completions/empty_fraction": "share of responses that are an EOS alone",
    "actor/grad_norm": "as grad_norm, of the actor",
    "critic/grad_norm": "as grad_norm, of the critic",
    "actor/learning_rate": "as learning_rate, of the actor",
    "critic/learning_rate": "as learning_rate, of the critic",
    "rows_masked": "responses left out because their reward or values were not finite",
    "time/generate_s": "seconds of sampling",
    "time/score_s": "seconds of reference, reward, value and old log-probability passes",
    "time/train_s": "seconds of the updates",
    "generate_tokens_per_s": "response tokens sampled per second, all ranks",
}


def check_name(name: str) -> None:
    if name.removeprefix("eval_") not in DEFINITIONS and name not in DEFINITIONS:
        raise KeyError(f"metric {name!r} is not defined in pipeline/training/metrics.py")


class MetricsWriter:
    """Appends metrics of one stage to its sinks; created on rank 0 only. A failing sink never ends the run."""

    def __init__(self, run_dir: Path, *, stage: str, tensorboard: bool, csv_file: bool, wandb: bool, start_step: int):
        self.stage = stage
        self.path = run_dir / "metrics.jsonl"
        cut_to_step(self.path, start_step, lambda line: json.loads(line)["step"])
        cut_to_step(run_dir / "samples.jsonl", start_step, lambda line: json.loads(line)["step"])
        cut_to_step(run_dir / "metrics.csv", start_step, lambda line: int(line.partition(",")[0]))
        self._jsonl = self.path.open("a", encoding="utf-8")
        self._csv = (run_dir / "metrics.csv").open("a", encoding="utf-8", newline="") if csv_file else None
        self._sinks: list[Any] = []
        if tensorboard:
            self._add_sink("tensorboard", lambda: tensorboard_sink(run_dir / "tensorboard", start_step))
        if wandb:
            self._add_sink("wandb", lambda: WandbSink(stage, run_dir, start_step))

    def _add_sink(self, name: str, make: Any) -> None:
        try:
            self._sinks.append(make())
        except Exception as error:
            log.warning("%s: not available, training goes on without it: %s", name, error)

    def write(self, step: int, values: Mapping[str, float]) -> None:
        """One line for `step`; names must be defined, numbers that are not finite become null."""
        for name in values:
            check_name(name)
        clean = {name: finite(value) for name, value in values.items()}
        line = {"stage": self.stage, "step": step, "time": round(time.time(), 3), **clean}
        with tolerated("metrics"):
            self._jsonl.write(json.dumps(line) + "\n")
            self._jsonl.flush()
        with tolerated("metrics"):
            self._write_csv(step, clean)
        for sink in list(self._sinks):
            try:
                sink(step, {name: value for name, value in clean.items() if value is not None})
            except Exception as error:
                self._sinks.remove(sink)
                log.warning("a metrics sink failed and is left out from here on: %s", error)

    def sync(self) -> None:
        """Everything written so far is on the disk, before a checkpoint says so."""
        with tolerated("metrics"):
            for file in filter(None, (self._jsonl, self._csv)):
                os.fsync(file.fileno())

    def close(self, exit_code: int) -> None:
        """End the sinks that need it; `exit_code` says how the run ended."""
        for sink in self._sinks:
            if isinstance(sink, WandbSink):
                try:
                    sink.close(exit_code)
                except Exception as error:
                    log.warning("wandb: the end of the run was not logged: %s", error)

    def _write_csv(self, step: int, values: Mapping[str, float | None]) -> None:
        # Long form: steps carry different metrics, and a header cannot grow.
        if self._csv is not None:
            csv.writer(self._csv).writerows([step, name, value] for name, value in values.items())
            self._csv.flush()


def finite(value: float) -> float | None:
    return float(value) if math.isfinite(value) else None


def cut_to_step(path: Path, step: int, step_of: Callable[[str], int]) -> None:
    """Drop the lines after `step` (-1: all of them), and one that was cut short: the run writes them again."""
    if not path.exists():
        return
    # Not splitlines: a sample may hold other characters that end a line to it.
    lines = [f"{line}\n" for line in path.read_bytes().decode(errors="replace").split("\n")]
    kept = [line for line in lines[:-1] if step >= 0 and is_up_to(line, step, step_of)]
    if len(kept) < len(lines):
        write_text(path, "".join(kept))


def is_up_to(line: str, step: int, step_of: Callable[[str], int]) -> bool:
    try:
        return step_of(line) <= step
    except (ValueError, KeyError, TypeError):
        return False


def tensorboard_sink(folder: Path, start_step: int) -> Any:
    """Writes to TensorBoard, from behind `start_step` on."""
    from torch.utils.tensorboard import SummaryWriter

    # purge_step hides what an interrupted run wrote past the checkpoint, so that a curve never goes back.
    writer = SummaryWriter(str(folder), purge_step=start_step + 1)

    def sink(step: int, values: Mapping[str, float]) -> None:
        for name, value in values.items():
            writer.add_scalar(name, value, step)
        writer.flush()

    return sink


class WandbSink:
    """Logs to Weights & Biases: one run for each run folder, which a resumed run continues, in the output's group."""

    def __init__(self, stage: str, run_dir: Path, start_step: int) -> None:
        import wandb

        id_file, output = run_dir / "wandb_id", run_dir.resolve().parent.parent.name
        if start_step < 0 or not id_file.is_file():
            write_text(id_file, uuid.uuid4().hex[:12])
        settings = json.loads((run_dir / "config.json").read_text(encoding="utf-8"))
        self._run = wandb.init(
            project=os.environ.get("WANDB_PROJECT", "rlhf-pipeline"),
            group=output,
            name=f"{output}-{stage}",
            config={name: setting["value"] for name, setting in settings.items()},
            id=id_file.read_text(encoding="utf-8"),
            resume="allow",
            dir=str(run_dir),
            settings=wandb.Settings(console="off"),  # the run folder has the log
        )

    def __call__(self, step: int, values: Mapping[str, float]) -> None:
        self._run.log(dict(values), step=step)

    def close(self, exit_code: int) -> None:
        """Write all that was logged: its own process does so late, and ranks end without exit handlers."""
        self._run.finish(exit_code=exit_code)
