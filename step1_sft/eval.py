"""Perplexity on held-out rows."""

import math
from collections.abc import Callable, Iterable
from typing import Any

import torch

from pipeline import dist
from pipeline.data.batching import IGNORED, Seq2SeqBatch, SFTBatch
from pipeline.data.loader import to_device
from pipeline.models.packed_attention import packed_mask
from step1_sft.loss import token_sum_loss


def forward_log_probs(model: Any, batch: SFTBatch | Seq2SeqBatch, *, packed: bool) -> tuple[torch.Tensor, torch.Tensor]:
    """Return log-probabilities (B, S - 1) fp32 of trained tokens and their mask; of an encoder-decoder model (B, T)."""
    if isinstance(batch, Seq2SeqBatch):
        log_probs = model(batch.input_ids, attention_mask=batch.attention_mask, labels=batch.labels)
        return log_probs, batch.labels != IGNORED
    trained = batch.trained_mask[:, 1:]
    mask = packed_mask(model.config, batch) if packed else batch.attention_mask
    statistics = model(
        batch.input_ids, attention_mask=mask, selected=trained, position_ids=batch.position_ids, right_padded=True
    )
    return statistics.log_probs, trained


@torch.no_grad()
def evaluate(
    model: Any, batches: Iterable[Callable[[], SFTBatch | Seq2SeqBatch]], device: torch.device
) -> dict[str, float]:
    """`eval_loss` (nats per trained token over all ranks) and `eval_perplexity`; {} where nothing is held out."""
    total = torch.zeros(2, dtype=torch.float64, device=device)
    for make in batches:
        batch = to_device(make(), device)
        log_probs, trained = forward_log_probs(model, batch, packed=False)
        total += torch.stack([token_sum_loss(log_probs, trained).double(), trained.sum().double()])
    loss_sum, count = dist.sum_over_ranks(total).tolist()
    if not count:
        return {}
    loss = loss_sum / count
    return {"eval_loss": loss, "eval_perplexity": math.exp(min(loss, 700.0))}
