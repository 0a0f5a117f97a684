"""The demo with tools: a model that plays `demo/guess.py` at random learns by GRPO to use the answers.

`python -m demo.tools` works in the current folder, writes below `output/tools`, and ends with 1 if a claim fails. SFT
teaches the form of the game, on games of random players. The share of numbers that are found is measured by the
evaluations of stage 3, on prompts that no stage trains on.
"""

import argparse
import json
import re
import sys
import time
from collections.abc import Mapping
from itertools import product
from pathlib import Path
from random import Random
from typing import Any

from demo.guess import GUESSES, HIGHEST, Guess
from demo.make import save_model, write_lines
from demo.rule import ANIMALS, COLOURS, PLACES
from demo.run import ROOT, call, say
from pipeline.inference.intervals import Interval, wilson
from pipeline.processes import let_threads_sleep

FOLDER = Path("output/tools")
NUMBERS = range(1, HIGHEST + 1)
BLIND = GUESSES / HIGHEST  # share that is found by whoever repeats no guess, and ignores the answers
NUM_GAMES, NUM_TRAIN, NUM_TEST = 1500, 2100, 900  # prompts; a multiple of HIGHEST is held out
MAX_TOKENS = 96  # of a prompt and all turns, which have at most 40
VOCABULARY = 1200
INIT_STD = 0.08  # with OPT's 0.02 the attention of so small a model learns too late to see earlier guesses
NUM_SHOWN = 3
CALL = '<tool_call>\n{{"name": "guess", "arguments": {{"number": {}}}}}\n</tool_call>'
RESULT = "<tool_response>\n{}\n</tool_response>"


def play(secret: int, random: Random) -> dict[int, str]:
    """Return the answer to each guess of a player that repeats none, and ignores the answers."""
    game, answers = Guess(), dict[int, str]()
    game.reset(secret)
    for number in random.sample(NUMBERS, GUESSES):
        if "right" not in answers.values():
            answers[number] = game.guess(number)
    return answers


def conversation(prompt: str, answers: Mapping[int, str]) -> list[dict[str, str]]:
    """Return a game as turns of SFT, in which the user's turns are the template's text of results."""
    turns = [("user", prompt)]
    for number, answer in answers.items():
        turns += [("assistant", CALL.format(number)), ("user", RESULT.format(answer))]
    turns.append(("assistant", "Found it." if "right" in answers.values() else "I give up."))
    return [{"role": role, "content": content} for role, content in turns]


def make(folder: Path, *, seed: int) -> None:
    """Write the games of SFT, the prompts of GRPO, which are others, and an untrained model with its tokenizer."""
    from transformers.utils import get_json_schema

    random = Random(seed)
    prompts = [
        f"The {colour} {animal} by the {location} thinks of a number from 1 to {HIGHEST}."
        for colour, animal, location in product(COLOURS, ANIMALS, PLACES)
    ]
    random.shuffle(prompts)
    rows: list[dict[str, Any]] = [{"prompt": prompt, "secret": 1 + n % HIGHEST} for n, prompt in enumerate(prompts)]
    tools = [get_json_schema(Guess().guess)]
    games = [conversation(row["prompt"], play(row["secret"], random)) for row in rows[:NUM_GAMES]]
    write_lines(folder / "games.jsonl", ({"messages": turns, "tools": tools} for turns in games))
    write_lines(folder / "train.jsonl", rows[NUM_GAMES:][:NUM_TRAIN])
    write_lines(folder / "test.jsonl", rows[-NUM_TEST:])
    texts = [turn["content"] for turns in games for turn in turns]
    save_model(folder / "untrained", make_tokenizer(texts, tools), seed=seed, max_tokens=MAX_TOKENS, init_std=INIT_STD)


def make_tokenizer(texts: list[str], tools: list[dict[str, Any]]) -> Any:
    """Return a byte-level BPE tokenizer with the demo's template.

    Its tokens may hold several words, such as all of a call up to the number, so that games are short. Numbers, and
    what stands before a sampled token, are tokens of their own.
    """
    from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers, trainers
    from transformers import PreTrainedTokenizerFast

    tokenizer = Tokenizer(models.BPE())
    isolated = pre_tokenizers.Split(Regex(r"assistant\n|\d+"), behavior="isolated")
    pieces = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    tokenizer.pre_tokenizer, tokenizer.decoder = pre_tokenizers.Sequence([isolated, pieces]), decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=VOCABULARY,
        special_tokens=["<pad>", "<|im_start|>", "<|im_end|>"],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    headers = [f"system\n{json.dumps(tools)}", "user\n", "assistant\n"] * len(texts)
    tokenizer.train_from_iterator([*texts, *headers], trainer)
    special = {"bos_token": "<|im_start|>", "eos_token": "<|im_end|>", "pad_token": "<pad>"}
    loaded = PreTrainedTokenizerFast(tokenizer_object=tokenizer, **special)
    loaded.chat_template = (ROOT / "demo" / "guess.jinja").read_text(encoding="utf-8")
    return loaded


def measure(folder: Path) -> dict[str, Any]:
    """Return the numbers of the table, of the first and the last evaluation, and the games that it shows."""
    lines = (folder / "runs" / "ppo" / "samples.jsonl").read_text(encoding="utf-8").splitlines()
    rows = [json.loads(line) for line in lines]
    before, after = ([row for row in rows if row["step"] == step] for step in (0, rows[-1]["step"]))
    shares = {name: [row["score"] for row in part] for name, part in (("before", before), ("after", after))}
    return {
        **{name: wilson(sum(scores) / len(scores), len(scores)) for name, scores in shares.items()},
        "prompts": len(after),
        "games": [game(row["response"]) for row in after[:NUM_SHOWN]],
    }


def game(response: str) -> str:
    """Return a response as a line for people."""
    calls = re.sub(r'<tool_call>\n.*?"number": (.*?)}}\n</tool_call>', r"guess(\1)", response)
    answers = re.sub(r"<\|im_start\|>user\n<tool_response>\n(.*?)\n</tool_response>", r": \1, ", calls)
    return re.sub(r"<\|im_\w+\|>(assistant\n)?", "", answers).replace("\n", " ")


def failed_claims(results: Mapping[str, Any]) -> list[str]:
    """Return the claims that do not hold; [] if all hold."""
    before, after = results["before"], results["after"]
    claims = {
        "GRPO at least 20 points higher": after.low >= before.high + 0.2,
        "better than any play that ignores the answers": after.low > BLIND,
    }
    return [claim for claim, holds in claims.items() if not holds]


def table(results: Mapping[str, Any]) -> str:
    """Return the report for people, 80 columns wide."""
    rows = {
        "before GRPO": shown(results["before"]),
        "after GRPO": shown(results["after"]),
        "the best play without the answers": f"{BLIND:.3f}",
        "minutes": f"{results['minutes']:.1f}",
    }
    title = f"share of numbers found in {GUESSES} guesses, {results['prompts']} unseen prompts"
    lines = [title, *(f"  {name:<46}{value:>28}" for name, value in rows.items()), ""]
    return "\n".join([*lines, *(f"  {line[:110]}" for line in results["games"])])


def shown(interval: Interval) -> str:
    """Return a share with its 95 % interval."""
    return f"{interval.value:.3f} ({interval.low:.3f} to {interval.high:.3f})"


def run(*, seed: int) -> dict[str, Any]:
    """Run the demo and return its results."""
    started = time.monotonic()
    let_threads_sleep()
    import transformers  # imported here, with torch, so that `--help` is quick

    transformers.utils.logging.disable_progress_bar()
    say(f"games, prompts, tokenizer and an untrained model in {FOLDER}")
    make(FOLDER, seed=seed)
    train = [sys.executable, str(ROOT / "train.py"), "--config", str(ROOT / "demo" / "guess.yaml"), "--overwrite"]
    environment = ["--ppo.environment", f"{ROOT / 'demo' / 'guess.py'}:Guess"]
    seeds = ["--sft.seed", str(seed), "--ppo.seed", str(seed)]
    call([*train, "--deployment-type", "single_gpu", *environment, *seeds])
    return measure(FOLDER) | {"minutes": (time.monotonic() - started) / 60}


def main(argv: list[str] | None = None) -> int:
    """Run the demo; return 1 if a claim fails."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--seed", type=int, default=1234, help="seed of data, weights and training [1234]")
    results = run(seed=parser.parse_args(argv).seed)
    failed = ", ".join(failed_claims(results))
    print(table(results), f"FAILED: {failed}" if failed else "all claims hold", sep="\n\n")
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
