"""GSM8K: its rows with two forms of the prompt, and the figures of answers that `rlhf sample` has written.

    python -m benchmarks.learning gsm8k --data FOLDER
    rlhf sample MODEL --data output/learning/data/gsm8k_form_test.jsonl --temperature 0 --max-new-tokens 512 \\
        --reward-function right_number --output base.jsonl
    python -m benchmarks.learning gsm8k_figures base.jsonl trained.jsonl

The first file of `gsm8k_figures` is the one that others are compared with, question by question.
"""

import hashlib
import re
import statistics
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from benchmarks.learning.rows import read, read_lines, write
from pipeline.inference.comparison import Interval, mean_interval
from pipeline.inference.task_trial import share_by_prompt
from pipeline.rewards.box.answers import final_number

# Questions that are shown, and that rates are chosen on; none of them is trained on.
NUM_TEST, NUM_CHOICE = 1000, 256
FORM = (
    "Think step by step and end with: The answer is N.\n\n"
    "Example: A box holds 12 eggs. How many eggs are left of 3 boxes after 6 are eaten?\n"
    "3 boxes hold 3 * 12 = 36 eggs. 36 - 6 = 30 are left. The answer is 30.\n\nQuestion: {question}"
)
PROMPTS = {"bare": "{question}", "form": FORM}


def make(source: Path, folder: Path) -> None:
    """Write gsm8k_FORM_SPLIT.jsonl for both forms of the prompt and the splits train, choice and test.

    Questions are sorted by a hash, so that a split does not depend on the order of the source. The column `answer` has
    the solution without its marks of computations.
    """
    folder.mkdir(parents=True, exist_ok=True)
    rows = sorted(read(source / "instruct" / "gsm8k_train.jsonl.gz"), key=lambda row: digest(row["prompt"]))
    ends = {"test": NUM_TEST, "choice": NUM_TEST + NUM_CHOICE, "train": len(rows)}
    first = 0
    for split, end in ends.items():
        for form, text in PROMPTS.items():
            questions = ((text.format(question=row["prompt"]), row["response"]) for row in rows[first:end])
            shown = ({"prompt": prompt, "answer": re.sub("<<.*?>>", "", answer)} for prompt, answer in questions)
            write(folder / f"gsm8k_{form}_{split}.jsonl", shown)
        first = end


def digest(question: str) -> bytes:
    return hashlib.sha256(question.encode()).digest()


def answers_of(file: Path) -> dict[str, list[dict[str, Any]]]:
    """Return prompt -> its answers, from a file of `rlhf sample`."""
    return {str(row["prompt"]): row["answers"] for row in read_lines(file)}


def rewards_of(answers: Mapping[str, Sequence[Mapping[str, Any]]]) -> dict[str, list[float]]:
    """Return prompt -> the rewards of its answers, 0 for one without."""
    return {prompt: [float(one["reward"] or 0) for one in group] for prompt, group in answers.items()}


def figures(answers: Mapping[str, Sequence[Mapping[str, Any]]]) -> dict[str, Interval]:
    """Return pass@1, pass@k, and the shares of answers that have a number, are right among these, and are truncated."""
    rewards, k = rewards_of(answers), len(next(iter(answers.values())))
    has_number = {prompt: [final_number(one["text"]) is not None for one in group] for prompt, group in answers.items()}
    right = [[reward == 1 for reward in group] for group in rewards.values()]
    parsed = [
        [reward == 1 for reward, has in zip(rewards[prompt], known, strict=True) if has]
        for prompt, known in has_number.items()
    ]
    lengths = [float(one["num_tokens"]) for group in answers.values() for one in group]
    mean = statistics.fmean(lengths)
    return {
        "pass@1": share_by_prompt(right),
        **({f"pass@{k}": share_by_prompt([[any(group)] for group in right])} if k > 1 else {}),
        "with a number": share_by_prompt(list(has_number.values())),
        "right among these": share_by_prompt([group for group in parsed if group]),
        "truncated": share_by_prompt(
            [[one["finish_reason"] == "limit" for one in group] for group in answers.values()]
        ),
        "tokens": mean_interval(lengths) or Interval(mean, mean, mean),
    }


def difference(
    before: Mapping[str, Sequence[Mapping[str, Any]]], after: Mapping[str, Sequence[Mapping[str, Any]]]
) -> Interval:
    """Return the paired difference of pass@1 with its interval, by question. Raises ValueError for other questions."""
    first, last = rewards_of(before), rewards_of(after)
    if first.keys() != last.keys():
        raise ValueError(f"{len(first.keys() ^ last.keys())} questions are in one of the files alone")
    interval = mean_interval([statistics.fmean(last[one]) - statistics.fmean(first[one]) for one in first])
    if interval is None:
        raise ValueError("one question has no interval")
    return interval


def report(files: Sequence[Path]) -> str:
    """Return the figures of files as a Markdown table, and the difference of each from the first one."""
    contents = [answers_of(file) for file in files]
    table = [figures(answers) for answers in contents]
    names = dict.fromkeys(name for one in table for name in one)
    lines = [f"| file | questions | {' | '.join(names)} | pass@1 beside the first |", f"|{'---|' * (len(names) + 3)}"]
    for number, (file, answers, one) in enumerate(zip(files, contents, table, strict=True)):
        cells = [shown(one[name]) if name in one else "" for name in names]
        beside = shown(difference(contents[0], answers), signed=True) if number else ""
        lines.append(f"| {file.stem} | {len(answers)} | {' | '.join(cells)} | {beside} |")
    return "\n".join(lines)


def shown(value: Interval, *, signed: bool = False) -> str:
    """Return a value with its interval."""
    number = f"{value.value:+.3f}" if signed else f"{value.value:.3f}" if value.high <= 1 else f"{value.value:.0f}"
    low, high = (f"{end:.3f}" if abs(value.value) <= 1 else f"{end:.0f}" for end in (value.low, value.high))
    return f"{number} ({low} to {high})"
