"""The rows of the experiment, cut from files of real preferences and instructions.

Pairs are halved by their prompts: the proxy reward models see one half, the gold model the other.
"""

import gzip
import hashlib
import json
from collections.abc import Iterable, Iterator
from pathlib import Path
from random import Random
from typing import Any

PAIRS = ("alpacaeval_gpt4", "hh_harmless", "oasst_en_100", "dpo_en_demo")
ANSWERS = ("alpaca_en_demo", "gpteacher_roleplay")
NUM_PROMPTS = 256  # held-out prompts that policies are measured on
# Of the rows with instructions: rows of each prompt by its split, how many are kept, characters of the longest prompt.
COPIES, KEPT, LONGEST = {"train": 4, "test": 2}, {"train": 3800, "test": 195}, 400
TOGETHER = 1, 1, 2  # instructions of a row, drawn
OPPOSED = {"all_capitals", "all_lower_case"}, {"number_of_sentences", "number_of_bullets"}
WORDS = "example", "important", "however", "today", "because", "simple"
PHRASES = "Is there anything else?", "I hope this helps.", "That is all."

Rows = list[dict[str, Any]]


def read(file: Path) -> Iterator[dict[str, Any]]:
    """Yield the rows of a compressed file of JSON lines."""
    with gzip.open(file, "rt", encoding="utf-8") as lines:
        yield from map(json.loads, lines)


def read_lines(file: Path) -> Rows:
    """Return the rows of a file of JSON lines. Only a line feed ends one: texts may hold other separators."""
    with file.open(encoding="utf-8") as lines:
        return [json.loads(line) for line in lines]


def half(prompt: str) -> str:
    """Return which of the two halves a prompt belongs to, whatever the order of rows."""
    return ("proxy", "gold")[hashlib.sha256(prompt.encode()).digest()[0] % 2]


def write(file: Path, rows: Iterable[dict[str, Any]]) -> None:
    with file.open("w", encoding="utf-8") as out:
        out.writelines(json.dumps(row, ensure_ascii=False) + "\n" for row in rows)


def make(source: Path, folder: Path) -> None:
    """Write the files of all stages below `folder`: sft, proxy, gold, pairs_test, text, prompts, prompts_test and
    prompts_held_out."""
    folder.mkdir(parents=True, exist_ok=True)
    pairs = [row for name in PAIRS for row in read(source / "preference" / f"{name}.jsonl.gz")]
    answers = [row for name in ANSWERS for row in read(source / "instruct" / f"{name}.jsonl.gz")]
    columns = ("prompt", "chosen", "rejected")
    kept = [{name: row[name] for name in columns} | {"split": row["split"]} for row in pairs]
    train = [{name: row[name] for name in columns} for row in kept if row["split"] == "train"]
    for part in ("proxy", "gold"):
        write(folder / f"{part}.jsonl", (row for row in train if half(row["prompt"]) == part))
    write(folder / "pairs_test.jsonl", ({n: row[n] for n in columns} for row in kept if row["split"] == "test"))
    write(
        folder / "sft.jsonl",
        ({n: row[n] for n in ("prompt", "response")} for row in answers if row["split"] == "train"),
    )
    write(folder / "text.jsonl", read(source / "text" / "c4_demo_en.jsonl.gz"))
    # Transcripts are for the reward models; the policy is asked single questions.
    plain = [*answers, *(row for row in pairs if row["prompt_style"] == "plain")]
    for split, name in (("train", "prompts"), ("test", "prompts_test")):
        prompts = sorted({row["prompt"] for row in plain if row["split"] == split})
        Random(0).shuffle(prompts)
        if split == "test":
            write(folder / "prompts_held_out.jsonl", ({"prompt": prompt} for prompt in prompts))
        prompts = prompts[:NUM_PROMPTS] if split == "test" else prompts
        write(folder / f"{name}.jsonl", ({"prompt": prompt} for prompt in prompts))


def make_instructions(source: Path, folder: Path) -> None:
    """Write `instructions_train` and `instructions_test`: prompts that end with instructions which a program checks."""
    folder.mkdir(parents=True, exist_ok=True)
    random, rows = Random(7), dict[str, Rows](train=[], test=[])
    for row in read(source / "instruct" / f"{ANSWERS[0]}.jsonl.gz"):
        prompt = row["prompt"].strip()
        for _ in range(COPIES[row["split"]] if len(prompt) <= LONGEST else 0):
            words, checks = zip(*drawn_instructions(random), strict=True)
            rows[row["split"]].append({"prompt": f"{prompt}\n\n{' '.join(words)}", "instructions": list(checks)})
    random.shuffle(rows["train"])
    for split, found in rows.items():
        write(folder / f"instructions_{split}.jsonl", found[: KEPT[split]])


def drawn_instructions(random: Random) -> list[tuple[str, dict[str, Any]]]:
    """Return one or two instructions that can be followed together, in words and for the built-in function."""
    while True:
        found = random.sample(instructions_of(random), random.choice(TOGETHER))
        names = {check["name"] for _, check in found}
        if not any(pair <= names for pair in OPPOSED) and not ("json_output" in names and len(names) > 1):
            return found


def instructions_of(random: Random) -> list[tuple[str, dict[str, Any]]]:
    """Return an instruction of each kind."""
    words, sentences, bullets = random.choice([20, 30, 40, 60]), random.choice([1, 2, 3]), random.choice([2, 3, 4])
    word, phrase = random.choice(WORDS), random.choice(PHRASES)
    bulleted = f"Write exactly {bullets} bullet points, each in a line that begins with '- '."
    return [
        (f"Use at most {words} words.", {"name": "number_of_words", "at_most": words}),
        (f"Use at most {sentences} sentence{'s' if sentences > 1 else ''}.",
         {"name": "number_of_sentences", "at_least": 1, "at_most": sentences}),
        (bulleted, {"name": "number_of_bullets", "at_least": bullets, "at_most": bullets}),
        ("Write in capital letters only.", {"name": "all_capitals"}),
        ("Write in lower case only, without a capital letter.", {"name": "all_lower_case"}),
        ("Give your answer a title in double angle brackets, as <<title>>.", {"name": "title"}),
        (f'Use the word "{word}".', {"name": "keywords", "words": [word]}),
        ('Do not use the word "the".', {"name": "forbidden_words", "words": ["the"]}),
        (f"End with exactly this sentence: {phrase}", {"name": "end_phrase", "phrase": phrase}),
        ("Answer in JSON and nothing else.", {"name": "json_output"}),
    ]  # fmt: skip
