"""GRPO with a calculator beside GRPO without, from models that SFT has taught the two forms of an answer.

    python -m benchmarks.learning gsm8k --data FOLDER
    python -m benchmarks.learning gsm8k_tools --data FOLDER
    python -m benchmarks.learning gsm8k_tool_runs --base FOLDER --seeds 3
    python -m benchmarks.learning gsm8k_tool_figures

GSM8K's solutions mark their computations as `<<48/2=24>>`: for SFT each mark becomes a call, or goes. Two tasks: GSM8K,
and `numbers`, questions of one to three computations with larger numbers, made here, of whose kind SFT sees none.
"""

import json
import re
from collections.abc import Iterator, Sequence
from functools import partial
from pathlib import Path
from random import Random
from statistics import fmean
from typing import Any

from benchmarks.learning.gsm8k.answers import NUM_TEST, splits
from benchmarks.learning.gsm8k.calculator import calculate
from benchmarks.learning.gsm8k.runs import RECIPES
from benchmarks.learning.jobs import Jobs, Work, flags
from benchmarks.learning.rows import read_lines, write
from pipeline.inference.intervals import wilson

CALL = '<tool_call>\n{{"name": "calculate", "arguments": {{"expression": {}}}}}\n</tool_call>'
RESULT = "<tool_response>\n{}\n</tool_response>"
MAX_CALLS = 7  # a conversation has eight turns
NUM_TRAIN = 4000  # questions of `numbers` to train on; NUM_TEST are shown
# Question, its computation, and the ranges of its numbers.
NUMBERS: tuple[tuple[str, str, dict[str, tuple[int, int]]], ...] = (
    ("{n} packs {a} crates with {b} bottles each. {c} bottles break. How many bottles are left?", "{a} * {b} - {c}",
     {"a": (12, 99), "b": (24, 480), "c": (11, 250)}),
    ("A mill makes {a} bags of flour a day. How many bags does it make in {b} days, if {c} bags are in stock already?",
     "{a} * {b} + {c}", {"a": (110, 980), "b": (13, 95), "c": (120, 4800)}),
    ("{n} saves ${a} a month for {b} months and then spends ${c}. How many dollars are left?", "{a} * {b} - {c}",
     {"a": (140, 890), "b": (14, 48), "c": (150, 1900)}),
    ("A school has {a} classes of {b} pupils. Each pupil gets {c} books. How many books are needed?", "{a} * {b} * {c}",
     {"a": (12, 48), "b": (17, 34), "c": (3, 19)}),
    ("A train carries {a} passengers. At the next station {b} get off and {c} get on. How many are on the train?",
     "{a} - {b} + {c}", {"a": (1200, 9800), "b": (310, 1190), "c": (140, 2400)}),
    ("{n} buys {a} stamps at {b} cents each and {c} cards at {d} cents each. How many cents does {n} pay?",
     "{a} * {b} + {c} * {d}", {"a": (12, 95), "b": (35, 180), "c": (3, 40), "d": (120, 480)}),
    ("A farm has {a} rows of {b} trees. Each tree gives {c} kilograms of apples. Birds eat {d} kilograms. How many "
     "kilograms are left?", "{a} * {b} * {c} - {d}", {"a": (12, 40), "b": (15, 60), "c": (12, 75), "d": (90, 990)}),
    ("{n} walks {a} steps on Monday and {b} steps more on Tuesday. How many steps does {n} walk on both days?",
     "{a} + {a} + {b}", {"a": (2300, 9900), "b": (150, 2900)}),
)  # fmt: skip
NAMES = (
    "Ada",
    "Bruno",
    "Chen",
    "Dora",
    "Emil",
    "Farah",
    "Goran",
    "Hana",
    "Ivo",
    "Jana",
    "Kofi",
    "Lena",
    "Mirko",
    "Noor",
)
STEPS = {"gsm8k": 80, "numbers": 40}
LENGTHS = {"ppo.max_prompt_seq_len": 512, "ppo.max_answer_seq_len": 512}
NUM_LAST = 10  # steps whose mean is shown
SHOWN = {
    "completions/mean_length": ("tokens", ".0f"), "tools/calls": ("calls", ".2f"),
    "tools/failed_calls": ("failed calls", ".3f"), "objective/entropy": ("entropy", ".2f"),
    "step_s": ("s a step", ".2f"),
}  # fmt: skip
TOOL = f"{Path(__file__).with_name('calculator.py')}:calculate"


def make(source: Path, folder: Path) -> None:
    """Write the rows of SFT of both forms, which come from the same questions, and those of `numbers`."""
    from transformers.utils import get_json_schema

    tools, rows = [get_json_schema(calculate)], splits(source)["train"]
    solved = [(row["prompt"], turns) for row in rows if (turns := solution(row["response"]))]
    write(folder / "sft_tool.jsonl", ({"messages": conversation(*one), "tools": tools} for one in solved))
    write(folder / "sft_text.jsonl", ({"prompt": prompt, "response": text(turns)} for prompt, turns in solved))
    questions = list(numbers(NUM_TEST + NUM_TRAIN))
    write(folder / "numbers_test.jsonl", questions[:NUM_TEST])
    write(folder / "numbers_train.jsonl", questions[NUM_TEST:])


def solution(marked: str) -> list[tuple[str, str, str]] | None:
    """Return a solution as (text, expression, result) for each computation, and (text, "", "") at the end.

    None for one whose computations are not those of the calculator, or are none or too many.
    """
    body, _, answer = marked.partition("####")
    parts = re.split(r"\s*=?\s*\$?<<(.*?)=(.*?)>>", body.strip())
    calls = list(zip(parts[0::3], parts[1::3], parts[2::3], strict=False))
    if not 0 < len(calls) <= MAX_CALLS:
        return None
    try:
        if any(float(calculate(expression)) != float(result) for _, expression, result in calls):
            return None
    except (ValueError, SyntaxError, ZeroDivisionError):
        return None
    return [*calls, (f"{parts[-1].strip()}\nThe answer is {answer.strip()}.", "", "")]


def conversation(prompt: str, turns: Sequence[tuple[str, str, str]]) -> list[dict[str, str]]:
    """Return turns of SFT with calls, in which the user's turns are the template's text of results."""
    messages = [("user", prompt)]
    for said, expression, _ in turns[:-1]:
        call = CALL.format(json.dumps(expression))
        messages += [("assistant", f"{said.strip()}\n{call}".strip()), ("user", RESULT.format(calculate(expression)))]
    messages.append(("assistant", turns[-1][0]))
    return [{"role": role, "content": content} for role, content in messages]


def text(turns: Sequence[tuple[str, str, str]]) -> str:
    """Return a solution without calls."""
    return "".join(f"{said} = " for said, _, _ in turns[:-1]) + turns[-1][0]


def numbers(count: int) -> Iterator[dict[str, str]]:
    """Yield questions, each of them once."""
    random, seen = Random(1), set[str]()
    while len(seen) < count:
        question, expression, ranges = random.choice(NUMBERS)
        drawn = {name: random.randint(*ends) for name, ends in ranges.items()}
        prompt = question.format(n=random.choice(NAMES), **drawn)
        if prompt not in seen:
            seen.add(prompt)
            yield {"prompt": prompt, "answer": calculate(expression.format(**drawn))}


def works(jobs: Jobs, seeds: int, more: dict[str, Any]) -> Iterator[Work]:
    """Yield the runs: for each seed both tasks with and without the tool, from the models of `start`."""
    for task in STEPS:
        for seed in range(1, seeds + 1):
            for arm in ("tool", "text"):
                yield partial(run, jobs, task, arm, seed, more)


def starts(jobs: Jobs, base: str) -> Iterator[Work]:
    """Yield SFT of both forms."""
    for arm in ("tool", "text"):
        yield partial(start, jobs, base, arm)


def start(jobs: Jobs, base: str, arm: str, gpu: int | None) -> None:
    """Teach the base the form of one arm."""
    given = RECIPES["imitate"] | {
        "actor_model": base, "data_path": jobs.folder / "data" / f"sft_{arm}.jsonl", "sft.max_seq_len": 1024,
        "sft.num_train_epochs": 1, "sft.max_steps": 0, "output_dir": jobs.folder / "gsm8k" / f"start_{arm}",
    }  # fmt: skip
    jobs.run(f"start_{arm}", "rlhf", ["train", *flags(given)], gpu=gpu)


def run(jobs: Jobs, task: str, arm: str, seed: int, more: dict[str, Any], gpu: int | None) -> None:
    """Train one arm on one task by one seed; its evaluations are of the questions that are shown."""
    data, key = jobs.folder / "data", f"{task}_{arm}_s{seed}"
    rows = {"gsm8k": "gsm8k_bare"}.get(task, task)
    given = RECIPES["grpo"] | LENGTHS | {
        "actor_model": jobs.folder / "gsm8k" / f"start_{arm}" / "sft", "seed": seed,
        "data_seed": seed, "output_dir": jobs.folder / "gsm8k" / key, "data_path": data / f"{rows}_train.jsonl",
        "ppo.eval_data_path": data / f"{rows}_test.jsonl", "ppo.eval_samples_per_prompt": 1,
        "ppo.max_steps": STEPS[task], "ppo.eval_interval": STEPS[task], "ppo.keep_checkpoints": 0,
    } | ({"ppo.tools": TOOL} if arm == "tool" else {}) | more  # fmt: skip
    jobs.run(key, "rlhf", ["train", *flags(given)], gpu=gpu)


def report(folder: Path) -> str:
    """Return a row for each run: right answers before and after, with 95 % intervals, and means of its last steps."""
    titles = ("run", "before", "after", *(title for title, _ in SHOWN.values()))
    lines = [f"| {' | '.join(titles)} |", f"|{'---|' * len(titles)}"]
    for output in sorted((folder / "gsm8k").glob("*_s[0-9]")):
        rows, metrics = (read_lines(output / "runs" / "ppo" / f"{name}.jsonl") for name in ("samples", "metrics"))
        before, after = (
            wilson(fmean(row["score"] or 0 for row in rows if row["step"] == step), NUM_TEST)
            for step in (rows[0]["step"], rows[-1]["step"])
        )
        last = [line for line in metrics if "step_s" in line][-NUM_LAST:]
        means = [format(fmean(line.get(name) or 0 for line in last), form) for name, (_, form) in SHOWN.items()]
        shares = [f"{one.value:.3f} ({one.low:.3f} to {one.high:.3f})" for one in (before, after)]
        lines.append(f"| {' | '.join([output.name, *shares, *means])} |")
    return "\n".join(lines)
