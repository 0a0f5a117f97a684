"""Workers that score answers: those of a PPO run's evaluations, or many of SFT for best-of-n.

`python -m benchmarks.learning.judge --run_dir FOLDER ...` adds the scores of reward models to the lines of
samples.jsonl; `--num_samples N` samples that many answers of `--policy` instead, and with `--reference` says how much
more likely it makes each than that model does.
"""

import argparse
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch

from benchmarks.learning import rows
from pipeline.data.templates import encode_prompt
from pipeline.data.turns import Message, Turns, prompt_hash
from pipeline.generation.episodes import generate
from pipeline.generation.rollouts import Prompt, RandomKey, Rollout, Sampling
from pipeline.inference.answer_scores import load_scorer, score_answers
from pipeline.inference.answers import load_chat_model, resolve_dtype
from pipeline.tensor_ops import gather_log_probs, pad_rows

BATCH_SIZE = 64  # several judges share a GPU
REFERENCE_ROWS = 8  # whose logits of all tokens are held in fp32
AT_ONCE = 512  # rows of a batch of best-of-n: more would not find memory beside PPO runs on the same GPU


def prompts_of(file: Path) -> list[Turns]:
    """Return the prompts of a file, each a single user turn."""
    return [(Message("user", line["prompt"].strip()),) for line in rows.read_lines(file)]


def judged(folder: str, answers: Sequence[tuple[Turns, str, bool]]) -> list[float]:
    """Return the scores of a reward model for (prompt, answer, finished)."""
    return score_answers(load_scorer(folder, dtype=resolve_dtype("auto")), answers, batch_size=BATCH_SIZE)


def score_run(run_dir: Path, policy: str, prompts: Sequence[Turns], judges: dict[str, str]) -> None:
    """Write `judged.jsonl` beside a run's samples.jsonl: its lines with a score of each judge."""
    tokenizer = load_chat_model(policy, dtype=torch.float32).tokenizer
    shown = {tokenizer.decode(encode_prompt(tokenizer, turns), skip_special_tokens=True): turns for turns in prompts}
    lines = rows.read_lines(run_dir / "samples.jsonl")
    answers = [(shown[line["prompt"]], line["response"], line["finished"]) for line in lines]
    write_judged(run_dir / "judged.jsonl", lines, answers, judges)


def sample_many(given: argparse.Namespace, prompts: Sequence[Turns], judges: dict[str, str]) -> None:
    """Write a line for each answer of `--num_samples` to each prompt, with the scores of all judges."""
    rollout, texts = sampled_texts(given, prompts)
    lines: list[dict[str, Any]] = [
        {"prompt": n // given.num_samples, "response": text, "finished": finished, "tokens": len(ids)}
        for n, (text, finished, ids) in enumerate(zip(texts, rollout.finished.tolist(), rollout.responses, strict=True))
    ]
    if given.reference:
        for line, ratio in zip(lines, log_ratios(rollout, given.reference), strict=True):
            line["log_ratio"] = ratio
    answers = [(prompts[line["prompt"]], line["response"], line["finished"]) for line in lines]
    write_judged(given.output, lines, answers, judges)


def sampled_texts(given: argparse.Namespace, prompts: Sequence[Turns]) -> tuple[Rollout, list[str]]:
    """Sample and decode the answers; the model and its KV cache are freed, as several judges share a GPU."""
    model = load_chat_model(given.policy, dtype=resolve_dtype("auto"))
    encoded = [Prompt(encode_prompt(model.tokenizer, turns), prompt_hash(turns)) for turns in prompts]
    rollout = generate(
        model.sessions(), encoded, num_samples=given.num_samples,
        num_slots=AT_ONCE, sampling=Sampling(given.max_answer), key=RandomKey(0, "best of n"),
    )  # fmt: skip
    return rollout, model.tokenizer.batch_decode(rollout.responses, skip_special_tokens=True)


@torch.inference_mode()
def log_ratios(rollout: Rollout, reference: str) -> list[float]:
    """Return log p(answer) - log p_reference(answer) in nats; their mean estimates the KL."""
    model, ratios = load_chat_model(reference, dtype=resolve_dtype("auto")).model, list[float]()
    rows = [torch.cat(pair) for pair in zip(rollout.prompts, rollout.responses, strict=True)]
    for start in range(0, len(rows), REFERENCE_ROWS):
        ids = pad_rows(rows[start : start + REFERENCE_ROWS], 0).to(model.device)  # (B, S)
        expected = gather_log_probs(model(input_ids=ids).logits[:, :-1].float(), ids[:, 1:])  # (B, S - 1)
        for n, row in enumerate(expected.double(), start):
            first, last = len(rollout.prompts[n]) - 1, len(rows[n]) - 1
            ratios.append(float(rollout.log_probs[n].sum()) - float(row[first:last].sum()))
    return ratios


def write_judged(
    file: Path, lines: Sequence[dict[str, Any]], answers: Sequence[tuple[Turns, str, bool]], judges: dict[str, str]
) -> None:
    """Write the lines with the score that each judge gives to their answers."""
    for name, folder in judges.items():
        for line, score in zip(lines, judged(folder, answers), strict=True):
            line[name] = score
    rows.write(file, lines)


def main() -> None:
    """Score a run's samples, or sample and score many answers."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--policy", required=True)
    parser.add_argument("--prompts", type=Path, required=True)
    parser.add_argument("--judges", nargs="+", required=True, help="name=folder")
    parser.add_argument("--reference")
    parser.add_argument("--run_dir", type=Path)
    parser.add_argument("--output", type=Path)
    parser.add_argument("--num_samples", type=int, default=0)
    parser.add_argument("--max_answer", type=int, default=128)
    given = parser.parse_args()
    judges = dict(word.split("=", 1) for word in given.judges)
    prompts = prompts_of(given.prompts)
    if given.num_samples:
        sample_many(given, prompts, judges)
    else:
        score_run(given.run_dir, given.policy, prompts, judges)


if __name__ == "__main__":
    main()
