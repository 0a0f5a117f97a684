"""Score pairs with a reward model, and report accuracy, margins and calibration."""

import math
from collections.abc import Callable, Iterable
from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING, Any

import torch
import transformers

from pipeline import dist
from pipeline.configuration.resolved import Resolved
from pipeline.data.batching import PairBatch, pair_batch
from pipeline.data.cache import load_or_build
from pipeline.data.counts import Counts
from pipeline.data.loader import evaluation_batches, to_device
from pipeline.data.selection import evaluation_options
from pipeline.errors import InputError, counted, say
from pipeline.models.forward.shared_prompts import settings_of_pairs
from pipeline.models.loaded import on_devices
from pipeline.models.loading import default_device
from pipeline.models.reward_model import last_token_scores, load_reward_model, measured_constants
from pipeline.models.source import ModelSource, num_positions
from pipeline.models.tokenizers import choose_padding_token, load_tokenizer
from step2_reward.loss import bradley_terry_loss, per_token_loss
from step2_reward.statistics import accuracy, accuracy_by_length, calibration, mean_margin, trivial_rules, verdict

if TYPE_CHECKING:  # this imports DeepSpeed, which takes seconds and warns on a machine without a GPU
    from pipeline.engine.engine import TrainingEngine


@dataclass(frozen=True, slots=True)
class PairScores:
    """The scores of N held-out pairs, in order.

    chosen: (N,) fp32, raw scores of the preferred responses.
    rejected: (N,) fp32, raw scores of the others.
    chosen_lengths: (N,), tokens of the preferred responses.
    rejected_lengths: (N,), tokens of the others.
    loss: mean loss of the pairs.
    """

    chosen: torch.Tensor
    rejected: torch.Tensor
    chosen_lengths: torch.Tensor
    rejected_lengths: torch.Tensor
    loss: float


def batch_loss(values: torch.Tensor, batch: PairBatch, *, per_token: bool, centering_coef: float) -> torch.Tensor:
    """Sum the loss over the batch's pairs: (2B, S) fp32 values, chosen rows first -> scalar."""
    chosen_lengths, rejected_lengths = batch.lengths.chunk(2)
    if per_token:
        chosen_values, rejected_values = values.chunk(2)
        chosen_ids, rejected_ids = batch.input_ids.chunk(2)
        return per_token_loss(
            chosen_values, rejected_values, chosen_ids, rejected_ids, chosen_lengths, rejected_lengths, batch.weights
        )
    chosen, rejected = last_token_scores(values, batch.lengths).chunk(2)
    return bradley_terry_loss(chosen, rejected, batch.weights, margins=batch.margins, centering_coef=centering_coef)


@torch.no_grad()
def score_pairs(
    model: "TrainingEngine | torch.nn.Module",
    batches: Iterable[Callable[[], PairBatch]],
    device: torch.device,
    *,
    per_token: bool = False,
    centering_coef: float = 0.0,
) -> PairScores:
    """Score every pair once; the result is the same on every rank. A collective."""
    columns: list[torch.Tensor] = []
    loss_sum = torch.zeros((), dtype=torch.float64, device=device)
    for make in batches:
        batch = to_device(make(), device)
        values = model(batch.input_ids, batch.attention_mask, **settings_of_pairs(batch.shared))
        loss_sum += batch_loss(values, batch, per_token=per_token, centering_coef=centering_coef).double()
        scores = last_token_scores(values, batch.lengths).chunk(2)
        lengths = (batch.lengths - batch.prompt_lengths.repeat(2)).float().chunk(2)
        columns.append(torch.stack([*scores, *lengths, batch.weights], dim=1))  # (B, 5)
    if not columns:
        empty = torch.zeros(0)
        return PairScores(empty, empty, empty, empty, float("nan"))
    table = dist.in_row_order(columns)
    loss = dist.sum_over_ranks(loss_sum).item() / max(1, len(table))
    return PairScores(table[:, 0], table[:, 1], table[:, 2], table[:, 3], loss)


def of_pairs(scores: PairScores) -> dict[str, torch.Tensor]:
    """Return the values of each pair, (N,) fp32, whose means are metrics of an evaluation."""
    difference = scores.chosen - scores.rejected
    wins = (difference > 0).float() + 0.5 * (difference == 0).float()
    return {"eval_accuracy": wins, "eval_margin": difference}


def summary(scores: PairScores) -> dict[str, float]:
    """Return the metrics of an evaluation; {} if nothing is held out."""
    if not len(scores.chosen):
        return {}
    return {
        "eval_loss": scores.loss,
        **{name: values.mean().item() for name, values in of_pairs(scores).items()},
        "eval_mean_chosen_score": scores.chosen.mean().item(),
        "eval_mean_rejected_score": scores.rejected.mean().item(),
        "eval_rows": float(len(scores.chosen)),
    }


def score_statistics(scores: PairScores) -> tuple[float, float]:
    """Return (mean, population standard deviation) of all evaluated scores."""
    return measured_constants(torch.cat([scores.chosen, scores.rejected]))


def report(scores: PairScores, texts: tuple[list[str], list[str]], counts: Counts) -> dict[str, Any]:
    """Return everything that the command prints as JSON values; `counts` are those of the rows that were read."""
    chosen, rejected = scores.chosen.tolist(), scores.rejected.tolist()
    lengths = scores.chosen_lengths.int().tolist(), scores.rejected_lengths.int().tolist()
    mean, std = score_statistics(scores)
    return {
        "pairs": len(chosen),
        "pairs_given": len(chosen) + counts.outcomes["left out"] + counts.outcomes["dropped"],
        "not_scored": [line for line in counts.lines() if line.split()[1] not in ("cut:", "kept:")],
        "accuracy": asdict(accuracy(chosen, rejected)),
        "margin": asdict(mean_margin(chosen, rejected)),
        "score_mean": mean,
        "score_std": std,
        "accuracy_by_length": {
            name: asdict(value) for name, value in accuracy_by_length(chosen, rejected, *lengths).items()
        },
        "trivial_rules": {name: asdict(value) for name, value in trivial_rules(*texts).items()},
        "verdict": asdict(verdict(chosen, rejected, *texts)),
        "calibration": asdict(calibration(chosen, rejected)),
    }


def estimate_line(name: str, value: dict[str, Any]) -> str:
    error = "" if value["standard_error"] is None else f" +- {value['standard_error']:.3f}"
    return f"  {name:<34}{value['mean']:>8.3f}{error}  ({value['count']} pairs)"


def is_below_chance(value: dict[str, Any] | None) -> bool:
    """Return True for an accuracy more than two standard errors below 0.5, as tossed coins have them."""
    return value is not None and value["mean"] < 0.5 - 1 / math.sqrt(value["count"])


def lines(results: dict[str, Any]) -> list[str]:
    """Return the lines of the report for people."""
    shown = [
        estimate_line("accuracy", results["accuracy"]),
        estimate_line("margin (chosen - rejected)", results["margin"]),
        f"  {'scores: mean, std':<34}{results['score_mean']:>8.3f} , {results['score_std']:.3f}",
        "accuracy where people preferred the",
    ]
    names = {"shorter_wins": "shorter response", "similar": "one of similar length", "longer_wins": "longer response"}
    shown += [estimate_line(names[name], value) for name, value in results["accuracy_by_length"].items()]
    if is_below_chance(results["accuracy_by_length"].get("shorter_wins")):
        shown.append("  it prefers longer responses: train it with --balance-lengths true")
    shown += ["rules without a model, same pairs"]
    shown += [estimate_line(name, value) for name, value in results["trivial_rules"].items()]
    shown += [
        f"calibration (expected error {results['calibration']['expected_error']:.3f}; each pair in both orders)",
        "  predicted   observed   n",
    ]
    for row in results["calibration"]["bins"]:
        if row["count"]:
            shown.append(f"  {row['predicted']:>9.2f}  {row['observed']:>9.2f}   {row['count']}")
    outcome, gain = results["verdict"], results["verdict"]["gain"]
    error = "" if gain["standard_error"] is None else f" +- {gain['standard_error']:.3f}"
    phrase = "better" if outcome["is_better"] else "NOT shown to be better"
    shown.append(f"verdict: {phrase} than '{outcome['rule']}': accuracy {gain['mean']:+.3f}{error} on the same pairs")
    given, why = results["pairs_given"], results["not_scored"]
    return [*shown, "; ".join([f"scored {results['pairs']} of {counted(given, 'pair')}", *why])]


def evaluate_folder(path: str, resolved: Resolved) -> dict[str, Any]:
    """Score the pairs that the flags choose with the model of a folder on this machine's device."""
    transformers.logging.disable_progress_bar()
    tokenizer, source, flags = load_tokenizer(path), ModelSource(path), resolved.config
    if tokenizer.chat_template is None:
        missing = "its tokenizer has no chat template, as stage 2 saves it; put it there as chat_template.jinja"
        raise InputError(f"--model: {path}: {missing}")
    max_seq_len = min(flags.max_seq_len, num_positions(source.config) or flags.max_seq_len)
    kind: Any = {"rows": "pairs", "shares": (1,), "title": "reward", "long_pairs": "truncate_left"}
    options = evaluation_options(resolved, **kind, template="tokenizer", max_seq_len=max_seq_len)
    data = load_or_build(options, tokenizer)
    if not len(rows := data.eval):
        kinds = [*data.counts.lines(), *["--eval-split all takes all"] * (options.held_out_only == "split")]
        raise InputError(f"{' '.join(options.data_path)}: no pair to score: {'; '.join(kinds)}")
    if max_seq_len < flags.max_seq_len:
        say(f"note: --max-seq-len {max_seq_len}: {path} has no more positions")
    say(*(f"  rows: {line}" for line in data.counts.lines()))
    device = default_device()
    model = on_devices(load_reward_model(source, dtype=torch.float32), path)
    pad_id = choose_padding_token(tokenizer).pad_id
    batches = evaluation_batches(rows, pair_collator(pad_id), batch_size=flags.batch_size)
    scores = score_pairs(model, batches, device)
    if not (scores.chosen.isfinite() & scores.rejected.isfinite()).all():
        raise InputError(f"--model: {path} gives scores that are no finite numbers")
    return report(scores, response_texts(rows, tokenizer), data.counts)


def pair_collator(pad_id: int) -> Callable[[list[Any]], PairBatch]:
    """Return a function that collates lists of one row (or None) each into a PairBatch."""
    return lambda units: pair_batch([None if unit is None else unit[0] for unit in units], pad_id=pad_id)


def response_texts(rows: Any, tokenizer: transformers.PreTrainedTokenizerBase) -> tuple[list[str], list[str]]:
    """Return the chosen and the rejected responses as text."""
    sides = []
    for name in ("chosen_ids", "rejected_ids"):
        responses = [row[name][row["prompt_length"] :] for row in rows]
        sides.append(tokenizer.batch_decode(responses, skip_special_tokens=True))
    return sides[0], sides[1]
