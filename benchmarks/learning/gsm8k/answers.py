"""GSM8K: its rows with two forms of the prompt, and the figures of answers that `rlhf sample` has written.

    python -m benchmarks.learning gsm8k --data FOLDER
    rlhf sample MODEL --data output/learning/data/gsm8k_form_test.jsonl --temperature 0 --max-new-tokens 512 \\
        --reward-function right_number --output base.jsonl
    python -m benchmarks.learning gsm8k_figures base.jsonl trained.jsonl
    python -m benchmarks.learning gsm8k_keep base.jsonl trained.jsonl RUN --kept gsm8k.jsonl.bz2
    python -m benchmarks.learning gsm8k_figures gsm8k.jsonl.bz2 --plot curves.png

The first file of `gsm8k_figures` is the one that others are compared with, question by question. `gsm8k_keep` writes
the numbers of answers and of runs (folders with metrics.jsonl), and the texts of the first greedy ones.
"""

import hashlib
import re
import statistics
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from benchmarks.learning.quality import read_kept
from benchmarks.learning.rows import Rows, read, read_lines, write
from pipeline.inference.intervals import Interval, mean_interval
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
NUM_TEXTS = 20  # answers whose text is kept
# Columns of the metrics that are kept of a run.
EVALUATED = {
    "eval_pass_at_1/right_number": "pass@1",
    "eval_pass_at_k/right_number": "pass@k",
    "eval_objective/entropy": "entropy",
    "eval_completions/mean_length": "tokens",
    "eval_completions/truncated_fraction": "truncated",
    "eval_objective/kl": "kl",
}
TRAINED = {
    "objective/scores": "score",
    "objective/entropy": "entropy",
    "objective/kl": "kl",
    "completions/mean_length": "tokens",
    "completions/truncated_fraction": "truncated",
    "groups/equal": "equal groups",
}


@dataclass(frozen=True, slots=True)
class Answer:
    """The numbers of one answer: its reward, its tokens, whether it reached their limit, whether it has a number."""

    reward: float
    num_tokens: int
    is_truncated: bool
    has_number: bool


Answers = Mapping[str, Sequence[Answer]]  # of a question, by the first digits of its hash


def make(source: Path, folder: Path) -> None:
    """Write gsm8k_FORM_SPLIT.jsonl for both forms of the prompt and the splits train, choice and test.

    The column `answer` has the solution without its marks of computations.
    """
    folder.mkdir(parents=True, exist_ok=True)
    for split, rows in splits(source).items():
        for form, text in PROMPTS.items():
            questions = ((text.format(question=row["prompt"]), row["response"]) for row in rows)
            shown = ({"prompt": prompt, "answer": re.sub("<<.*?>>", "", answer)} for prompt, answer in questions)
            write(folder / f"gsm8k_{form}_{split}.jsonl", shown)


def splits(source: Path) -> dict[str, Rows]:
    """Return the rows of the source by split, sorted by a hash: a split does not depend on the order of the source."""
    rows = sorted(read(source / "instruct" / "gsm8k_train.jsonl.gz"), key=lambda row: digest(row["prompt"]))
    held_out = NUM_TEST + NUM_CHOICE
    return {"test": rows[:NUM_TEST], "choice": rows[NUM_TEST:held_out], "train": rows[held_out:]}


def digest(question: str) -> bytes:
    return hashlib.sha256(question.encode()).digest()


def question_of(prompt: str) -> str:
    """Return the question of a prompt of either form."""
    return prompt.removeprefix(FORM.partition("{question}")[0])


def key_of(prompt: str) -> str:
    """Return the key of a prompt's question, which is the same for both forms of the prompt."""
    return digest(question_of(prompt)).hex()[:12]


def answers_of(file: Path) -> dict[str, list[Answer]]:
    """Return the answers to each question, from a file of `rlhf sample`; one without a reward has 0."""
    return {
        key_of(row["prompt"]): [
            Answer(
                float(one["reward"] or 0),
                one["num_tokens"],
                one["finish_reason"] == "limit",
                final_number(one["text"]) is not None,
            )
            for one in row["answers"]
        ]
        for row in read_lines(file)
    }


def kept_lines(paths: Sequence[Path]) -> Iterator[dict[str, Any]]:
    """Yield the line of each file of answers, and of each folder with the metrics.jsonl of a run."""
    for path in paths:
        if path.is_dir():
            yield {"run": path.name, "metrics": list(kept_metrics(read_lines(path / "metrics.jsonl")))}
        else:
            answers = {
                key: [[one.reward, one.num_tokens, int(one.is_truncated), int(one.has_number)] for one in group]
                for key, group in answers_of(path).items()
            }
            yield {"run": path.stem, "answers": answers} | texts_of(path)


def texts_of(file: Path) -> dict[str, Any]:
    """Return the first prompts with their answers, where each has one."""
    rows = read_lines(file)[:NUM_TEXTS]
    if len(rows[0]["answers"]) > 1:
        return {}
    return {"texts": [{"prompt": row["prompt"], "text": row["answers"][0]["text"]} for row in rows]}


def kept_metrics(lines: Sequence[Mapping[str, Any]]) -> Iterator[dict[str, float]]:
    """Yield what is kept of each line of a run, with its seconds since the first line.

    A resumed run writes the steps behind its checkpoint again; the later lines count.
    """
    latest = {(line["step"], is_evaluation(line)): line for line in lines}
    for (step, evaluates), line in sorted(latest.items()):
        names = EVALUATED if evaluates else TRAINED
        values = {short: round(float(line[name]), 4) for name, short in names.items() if name in line}
        yield {"step": step, "seconds": round(line["time"] - lines[0]["time"], 1), "held out": evaluates, **values}


def is_evaluation(line: Mapping[str, Any]) -> bool:
    return any(name in line for name in EVALUATED)


def runs_of(paths: Sequence[Path]) -> dict[str, Answers]:
    """Return name -> answers, of files of `rlhf sample` and of files that `gsm8k_keep` wrote."""
    runs, stems = dict[str, Answers](), [path.stem for path in paths]
    for path in paths:
        if path.suffix == ".bz2":
            for line in read_kept(path):
                if "answers" in line:
                    runs[line["run"]] = {key: [Answer(*one) for one in group] for key, group in line["answers"].items()}
        else:
            name = path.stem if stems.count(path.stem) == 1 else f"{path.parent.name}/{path.stem}"
            runs[name] = answers_of(path)
    return runs


def figures(answers: Answers) -> dict[str, Interval]:
    """Return pass@1, pass@k, and the shares of answers that have a number, are right among these, and are truncated."""
    groups = list(answers.values())
    k = len(groups[0])
    right = [[one.reward == 1 for one in group] for group in groups]
    parsed = [[one.reward == 1 for one in group if one.has_number] for group in groups]
    lengths = [float(one.num_tokens) for group in groups for one in group]
    mean = statistics.fmean(lengths)
    return {
        "pass@1": share_by_prompt(right),
        **({f"pass@{k}": share_by_prompt([[any(group)] for group in right])} if k > 1 else {}),
        "with a number": share_by_prompt([[one.has_number for one in group] for group in groups]),
        "right among these": share_by_prompt([group for group in parsed if group]),
        "truncated": share_by_prompt([[one.is_truncated for one in group] for group in groups]),
        "tokens": mean_interval(lengths) or Interval(mean, mean, mean),
    }


def difference(before: Answers, after: Answers) -> Interval:
    """Return the paired difference of pass@1 with its interval, by question. Raises ValueError for other questions."""
    if before.keys() != after.keys():
        raise ValueError(f"{len(before.keys() ^ after.keys())} questions are in one of the files alone")
    first, last = (
        {key: statistics.fmean(one.reward for one in group) for key, group in part.items()} for part in (before, after)
    )
    interval = mean_interval([last[key] - first[key] for key in first])
    if interval is None:
        raise ValueError("one question has no interval")
    return interval


def report(runs: Mapping[str, Answers]) -> str:
    """Return the figures of runs as Markdown, a table for each number of answers, each beside the table's first run."""
    return "\n\n".join(map(table_of, by_number_of_answers(runs)))


def by_number_of_answers(runs: Mapping[str, Answers]) -> list[dict[str, Answers]]:
    """Return the runs apart by how many answers each question has."""
    parts = dict[int, dict[str, Answers]]()
    for name, answers in runs.items():
        parts.setdefault(len(next(iter(answers.values()))), {})[name] = answers
    return list(parts.values())


def table_of(runs: Mapping[str, Answers]) -> str:
    """Return the table of runs that have as many answers to a question."""
    table = {name: figures(answers) for name, answers in runs.items()}
    columns = list(next(iter(table.values())))
    base = next(iter(runs))
    lines = [
        f"| run | questions | {' | '.join(columns)} | pass@1 beside the first |",
        f"|{'---|' * (len(columns) + 3)}",
    ]
    for name, row in table.items():
        beside = "" if name == base else shown(difference(runs[base], runs[name]), signed=True)
        cells = " | ".join(shown(row[column]) for column in columns)
        lines.append(f"| {name} | {len(runs[name])} | {cells} | {beside} |")
    return "\n".join(lines)


def shown(value: Interval, *, signed: bool = False) -> str:
    """Return a value with its interval."""
    number = f"{value.value:+.3f}" if signed else f"{value.value:.3f}" if value.high <= 1 else f"{value.value:.0f}"
    low, high = (f"{end:.3f}" if abs(value.value) <= 1 else f"{end:.0f}" for end in (value.low, value.high))
    return f"{number} ({low} to {high})"


def curves(lines: Sequence[Mapping[str, Any]]) -> dict[str, tuple[list[float], list[float]]]:
    """Return label -> minutes and pass@1 of the evaluations, of the runs whose answers are kept as well."""
    answered = {line["run"].partition(".")[0] for line in lines if "answers" in line}
    found = dict[str, tuple[list[float], list[float]]]()
    for line in lines:
        points = [one for one in line.get("metrics", []) if one["held out"]]
        if points and line["run"] in answered:
            label = line["run"].replace("_s", ", seed ").replace("_", ", ")
            found[label] = [one["seconds"] / 60 for one in points], [one["pass@1"] for one in points]
    return found


def plot(kept: Path, file: Path) -> None:
    """Draw pass@1 on the questions for choosing by minutes of training, from a file of `gsm8k_keep`."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(8, 4.2), layout="constrained")
    axes = figure.add_subplot()
    for label, (minutes, shares) in curves(read_kept(kept)).items():
        axes.plot(minutes, shares, marker="o", markersize=4, label=label)
    axes.set(xlabel="minutes on one GPU", ylabel="right answers (pass@1, temperature 1)", ylim=(0, None))
    axes.grid(alpha=0.3)
    axes.legend()
    figure.savefig(file, dpi=110)
