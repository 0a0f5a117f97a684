"""A reward for the answers to reasoning_gym's tasks, and rows of prompts for them."""

import functools
import json
from collections.abc import Callable, Iterator, Sequence
from typing import Any

from pipeline.errors import InputError
from pipeline.rewards.box.texts import Messages, Scores, column_of, missing_package, text_of

INSTRUCTION = "Think step by step, then give your answer between <answer> and </answer>."
# Their `score_answer` runs the answer, a text of the model's, as Python: by eval, or by sympy's parse_expr.
RUN_ANSWERS = frozenset(
    "binary_matrix countdown intermediate_integration n_queens polynomial_multiplication puzzle24 simple_integration "
    "spiral_matrix string_insertion".split()
)


def reasoning_gym(
    completions: Sequence[str | Messages], *, column: str = "entry", run_answers: bool = False, **columns: Any
) -> Scores:
    """Return the score of reasoning_gym, 0 to 1, for the answer in the last `<answer>...</answer>`; 0 without one.

    It needs the extra `reasoning-gym`. The score is None for a row without an entry.

    Args:
        column: holds an entry of a task, with its `question`, `answer` and `metadata`, whose `source_dataset` names the
            task; as an object or as the text of its JSON, as `prompt_lines` writes it. The text is safer in Parquet,
            where objects of a column have the same fields.
        run_answers: also score the tasks whose scores run the model's answer as Python (`RUN_ANSWERS`), which it may
            use for anything that the process can do.
    """

    def score(text: str, entry: Any) -> float | None:
        if entry is None:
            return None
        entry = json.loads(entry) if isinstance(entry, str) else entry
        task = str(entry["metadata"]["source_dataset"])
        if task in RUN_ANSWERS and not run_answers:
            raise InputError(f"reward function reasoning_gym: {task} runs answers as Python; allow it by run_answers")
        answer = _package().utils.extract_answer(text)
        return 0.0 if answer is None else _score(_scorer(task), answer, entry)

    _package()
    entries = column_of("reasoning_gym", columns, column, completions)
    return [score(text_of(text), entry) for text, entry in zip(completions, entries, strict=True)]


def prompt_lines(task: str, number: int, *, seed: int = 0, **settings: Any) -> Iterator[str]:
    """Yield JSON lines of prompts with their entries, for stage 3's `--data-path`; settings are the task's.

    For example 1000 prompts of one task:

        from pathlib import Path
        from pipeline.rewards.box.reasoning import prompt_lines
        Path("legs.jsonl").write_text("\\n".join(prompt_lines("leg_counting", 1000, max_animals=5)))

    Raises InputError for a task that is unknown, or whose entries are others once they are JSON (arc_agi, rearc).
    """
    score = _scorer(task)
    for entry in _package().create_dataset(task, size=number, seed=seed, **settings):
        text = json.dumps(entry)
        if score(entry["answer"], json.loads(text)) != score(entry["answer"], entry):
            raise InputError(f"reasoning_gym's {task}: its answers are wrong once an entry is JSON; take another task")
        yield json.dumps({"prompt": f"{entry['question'].strip()}\n\n{INSTRUCTION}", "entry": text})


def _package() -> Any:
    try:
        import reasoning_gym
        import reasoning_gym.utils
    except ImportError as error:
        raise missing_package("reasoning_gym", "reasoning-gym", error) from error
    return reasoning_gym


@functools.cache
def _scorer(task: str) -> Callable[[str | None, Any], float]:
    try:
        return _package().get_score_answer_fn(task)
    except (ValueError, AssertionError) as error:
        raise InputError(f"reward function reasoning_gym: task {task}: {error}") from error


def _score(scorer: Callable[[str | None, Any], float], answer: str, entry: Any) -> float:
    """Return the score of an answer, 0 for one on which the task's function fails."""
    try:
        return float(scorer(answer, entry))
    except Exception:
        scorer(entry["answer"], entry)  # fails too where the entry is wrong, not the answer
        return 0.0
