"""Stage 4's loop."""

from dataclasses import replace
from typing import Any

import torch

from pipeline import dist
from pipeline.checkpoints.model_folder import save_trained
from pipeline.checkpoints.offline import OfflineCheckpoint
from pipeline.data.batching import SFTBatch, packed_sft_batch
from pipeline.data.loader import PrefetchedSteps, Step, to_device
from pipeline.engine.build import language_model_engine
from pipeline.preparation.start import start_supervised
from pipeline.run.run import Run
from pipeline.training.metrics import SUPERVISED
from pipeline.training.steps import Counters, step_together
from pipeline.training.supervised import Supervised, assemble
from step4_labelled.config import LabelledConfig

LEAST = 1e-6  # of the probability that a token is not the bad answer's


def train(run: Run, config: LabelledConfig) -> None:
    """Train on answers with a label, and leave the model in `--output-dir`."""
    parts = build(run, config)
    state, control = parts.resume(Counters, SUPERVISED, ("loss",))
    steps = PrefetchedSteps(parts.loader, end=parts.total_steps, device=run.world.device)
    with control.resumable(state, lambda: parts.content(state)), steps:
        while state.step < parts.total_steps:
            control.stop_if_requested()
            if control.save_is_due(state):
                control.save(state, parts.content(state), lambda: save_model(parts, state))
            control.begin("train")
            step = steps.step(state.step)
            loss = accumulate_gradients(parts, step)
            stepped = step_together([parts.engine], parts.rate(state.step), loss=loss)
            parts.end_step(step, state, control, stepped=stepped, loss=loss / step.num_trained)
    control.finish(state, parts.content(state), lambda: save_model(parts, state))


def build(run: Run, config: LabelledConfig) -> Supervised[LabelledConfig, SFTBatch]:
    """Make tokenizer, rows and model."""
    source, tokenizer, rows = start_supervised(run, config)

    def collate(units: list[Any]) -> SFTBatch:
        labels = [0.0 if unit is None else 1.0 if unit[0]["label"] else -1.0 for unit in units]
        return replace(packed_sft_batch(units, pad_id=tokenizer.pad_token_id), weights=torch.tensor(labels))

    engine = language_model_engine(run, source, config.model)
    return assemble(run, config, tokenizer=tokenizer, data=rows, engine=engine, collate=collate)


def accumulate_gradients(parts: Supervised[LabelledConfig, SFTBatch], step: Step[SFTBatch]) -> float:
    """Sum the gradients of a step; returns the loss, summed over the trained tokens of all ranks."""
    total = torch.zeros((), dtype=torch.float64)
    for index, cpu_batch in enumerate(step.micro_batches):
        batch = to_device(cpu_batch, parts.run.world.device)
        trained = batch.trained_mask[:, 1:]
        log_probs = parts.engine(
            batch.input_ids,
            attention_mask=batch.attention_mask,
            selected=trained,
            position_ids=batch.position_ids,
            right_padded=True,
        ).log_probs
        unlikely = torch.log((1 - log_probs.exp()).clamp_min(LEAST)) * parts.config.unlikelihood
        is_good = (batch.weights > 0)[:, None]
        loss = -(torch.where(is_good, log_probs, unlikely) * trained).sum()
        scale = parts.run.world.size / step.num_trained
        parts.engine.backward(loss * scale, last=index + 1 == len(step.micro_batches))
        total += loss.detach()
    return dist.sum_over_ranks(total).item()


def save_model(parts: Supervised[LabelledConfig, SFTBatch], state: Counters) -> None:
    """Write the model folder of the run."""
    save(parts.run, parts.engine.module, parts.tokenizer, step=state.step)


def save(run: Run, module: Any, tokenizer: Any, *, step: int) -> None:
    """Write the model folder. A collective."""
    save_trained(run, module, tokenizer, kind="Model of labelled answers", step=step)


def export(checkpoint: OfflineCheckpoint) -> None:
    """Write the model folder of a checkpoint."""
    config: LabelledConfig = checkpoint.run.resolved.config
    module = checkpoint.language_model("model", config.model)
    save(checkpoint.run, module, checkpoint.tokenizer(config.model), step=checkpoint.saved["step"])
