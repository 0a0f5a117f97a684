"""Evaluation on held-out rows: perplexity, and BLEU or ROUGE-L of generated answers."""

import math
from collections.abc import Callable, Iterable, Sequence
from functools import partial
from statistics import fmean
from typing import TYPE_CHECKING, Literal

import torch
from transformers import GenerationConfig, PreTrainedTokenizerBase

from pipeline import dist
from pipeline.data.batching import IGNORED, Seq2SeqBatch, SFTBatch, packed_sft_batch
from pipeline.data.cache import data_fingerprint, load_or_build
from pipeline.data.loader import evaluation_batches, to_device
from pipeline.data.selection import DataOptions
from pipeline.errors import say
from pipeline.inference.answer_settings import ReplySettings
from pipeline.inference.answers import ChatModel, as_chat_model, decode, generate_answers
from pipeline.models.forward.causal_lm import CausalLM
from pipeline.models.forward.packed_attention import packed_mask
from pipeline.models.loading import base_model, default_device
from pipeline.run.evaluations import WEIGHT, Rows

if TYPE_CHECKING:  # this imports DeepSpeed, which takes seconds and warns on a machine without a GPU
    from pipeline.engine.engine import TrainingEngine

    Model = TrainingEngine | CausalLM

Batch = SFTBatch | Seq2SeqBatch


def forward_log_probs(model: "Model", batch: Batch, *, packed: bool) -> tuple[torch.Tensor, torch.Tensor]:
    """Return log-probabilities (B, S - 1) fp32 of tokens and the mask of trained ones; (B, T) for encoder-decoders."""
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
    model: "Model", batches: Iterable[Callable[[], Batch]], device: torch.device
) -> tuple[dict[str, float], dict[str, list[float]]]:
    """Return the metrics of the held-out rows, and the values of each row for `row_values_line`; ({}, {}) without rows.

    The metrics are `eval_loss` (nats per trained token over all ranks), `eval_perplexity` and `eval_rows`.
    """
    parts = []
    for make in batches:
        batch = to_device(make(), device)
        log_probs, trained = forward_log_probs(model, batch, packed=False)
        losses = -torch.where(trained, log_probs, 0.0).double().sum(1)
        parts.append(torch.stack([losses, trained.sum(1).double(), batch.weights.double()], dim=1))
    losses, counts, _ = dist.in_row_order(parts).unbind(1) if parts else torch.zeros(3, 0)
    if not counts.sum():
        return {}, {}
    loss = (losses.sum() / counts.sum()).item()
    metrics = {"eval_loss": loss, "eval_perplexity": math.exp(min(loss, 700.0)), "eval_rows": float((counts > 0).sum())}
    return metrics, {WEIGHT: counts.tolist(), "eval_loss": (losses / counts).tolist()}


def perplexity_by_row(model: ChatModel, options: DataOptions, *, batch_size: int) -> Rows:
    """Return values whose mean, weighted by tokens, is the perplexity of a finished model; {} if no row has an answer.

    They are the perplexity's first-order expansion in the loss of each row, so that standard errors of their mean, and
    of a difference of two, are those of the delta method. Rows of another tokenizer or template have other keys.
    """
    data = load_or_build(options, model.tokenizer)
    say(*(f"  rows: {line}" for line in data.counts.lines()))
    collate = partial(packed_sft_batch, pad_id=model.vocabulary.pad_id)
    batches = evaluation_batches(data.eval, collate, batch_size=batch_size)
    metrics, values = evaluate(CausalLM(model.model), batches, default_device())
    if not metrics:
        return {}
    perplexity, source = metrics["eval_perplexity"], data_fingerprint(data.eval)
    scaled = [perplexity * (1 + loss - metrics["eval_loss"]) for loss in values["eval_loss"]]
    return {(source, n): pair for n, pair in enumerate(zip(scaled, values[WEIGHT], strict=True))}


def evaluate_answers(
    engine: "TrainingEngine",
    tokenizer: PreTrainedTokenizerBase,
    batches: Iterable[Callable[[], Batch]],
    *,
    metric: Literal["bleu", "rouge"],
    max_new_tokens: int,
) -> dict[str, float]:
    """Generate greedy answers to the held-out prompts of all ranks, and return their score against the responses.

    Returns {} if nothing is held out. A collective: every rank has the same number of batches.
    """
    model = base_model(engine.module.model)
    chat_model = as_chat_model("", model, tokenizer, copies_weights=False)
    by_layer = engine.weights is not None and not engine.weights.once
    own_config, model.generation_config = model.generation_config, GenerationConfig()  # else its settings would apply
    pairs = []
    try:
        with engine.generation(gather=not by_layer):
            for make in batches:
                rows = prompts_and_responses(make())
                answers = generate_answers(
                    chat_model,
                    [prompt for prompt, _ in rows],
                    ReplySettings(max_new_tokens=max_new_tokens),
                    seed=0,
                    lockstep=by_layer,
                )
                pairs += [
                    (answer.text, decode(tokenizer, response).strip())
                    for (answer,), (_, response) in zip(answers, rows, strict=True)
                    if response  # padding rows have none
                ]
    finally:
        model.generation_config = own_config
    pairs = [pair for share in dist.gather_objects(pairs) for pair in share]
    return compare_texts(metric, *zip(*pairs, strict=True)) if pairs else {}


def prompts_and_responses(batch: Batch) -> list[tuple[list[int], list[int]]]:
    """Return for each row the ids before its first trained token, and the trained ids from there to the first gap."""
    if isinstance(batch, Seq2SeqBatch):
        sources = [ids[mask] for ids, mask in zip(batch.input_ids, batch.attention_mask, strict=True)]
        return [(s.tolist(), ids[ids != IGNORED].tolist()) for s, ids in zip(sources, batch.labels, strict=True)]
    rows = []
    for ids, trained in zip(batch.input_ids.tolist(), batch.trained_mask.tolist(), strict=True):
        start = trained.index(True) if True in trained else 1
        end = trained.index(False, start) if False in trained[start:] else len(ids)
        rows.append((ids[:start], ids[start:end]))
    return rows


def compare_texts(metric: str, answers: Sequence[str], references: Sequence[str]) -> dict[str, float]:
    """Return `eval_bleu` (0 to 100, of the corpus) or `eval_rougeL` (0 to 1, the mean of the rows)."""
    if metric == "bleu":
        from sacrebleu import corpus_bleu

        return {"eval_bleu": corpus_bleu(list(answers), [list(references)]).score}
    from rouge_score.rouge_scorer import RougeScorer
    from rouge_score.tokenizers import DefaultTokenizer

    scorer = RougeScorer(["rougeL"], tokenizer=DefaultTokenizer(use_stemmer=False))  # the default logs a line each time
    scores = (scorer.score(reference, answer) for answer, reference in zip(answers, references, strict=True))
    return {"eval_rougeL": fmean(score["rougeL"].fmeasure for score in scores)}
