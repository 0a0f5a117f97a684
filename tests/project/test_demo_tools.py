"""The demo with tools: its game, its rows of SFT token by token against rollouts, and its claims on a real run."""

import json
import subprocess
import sys
from pathlib import Path
from random import Random
from typing import Any

import pytest
from support import forks

from demo import tools
from demo.guess import GUESSES, HIGHEST, Guess
from pipeline.data.templates import encode_conversation, encode_prompt
from pipeline.data.tool_calls import ToolCall
from pipeline.data.tool_turns import ToolTurns
from pipeline.data.turns import parse_tools, parse_turns
from pipeline.inference.intervals import wilson
from pipeline.models.tokenizers import load_tokenizer


def test_the_game() -> None:
    game = Guess()
    game.reset(2)
    assert game.guess(3) == "lower" and game.get_reward() == 0.0
    assert game.guess(2) == "right" and game.get_reward() == 1.0
    game.reset(2)
    assert game.guess(1) == "higher" and game.get_reward() == 0.0


def test_a_guess_too_many_finds_nothing() -> None:
    game = Guess()
    game.reset(HIGHEST)
    for _ in range(GUESSES):
        assert game.guess(1) == "higher"
    assert game.guess(HIGHEST) == "over" and game.get_reward() == 0.0


def test_a_player_that_ignores_the_answers_finds_two_of_three() -> None:
    games = [tools.play(secret, Random(seed)) for secret in tools.NUMBERS for seed in range(400)]
    assert sum("right" in game.values() for game in games) / len(games) == pytest.approx(tools.BLIND, abs=0.05)
    assert {len(game) for game in games} == {1, 2} and tools.BLIND == GUESSES / HIGHEST


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("guess")
    tools.make(folder, seed=1)
    return folder


def lines(folder: Path, name: str) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (folder / f"{name}.jsonl").read_text(encoding="utf-8").splitlines()]


def test_no_prompt_is_in_two_files(folder: Path) -> None:
    games = [row["messages"][0]["content"] for row in lines(folder, "games")]
    prompts = [games, *([row["prompt"] for row in lines(folder, name)] for name in ("train", "test"))]
    assert [len(part) for part in prompts] == [tools.NUM_GAMES, tools.NUM_TRAIN, tools.NUM_TEST]
    assert len({prompt for part in prompts for prompt in part}) == tools.NUM_GAMES + tools.NUM_TRAIN + tools.NUM_TEST
    secrets = [row["secret"] for row in lines(folder, "test")]
    assert [secrets.count(number) for number in tools.NUMBERS] == [tools.NUM_TEST // HIGHEST] * HIGHEST


def test_rows_of_sft_have_the_tokens_of_rollouts(folder: Path) -> None:
    """The prompt, each call, each result and the last turn are encoded apart in a rollout, and as one row in SFT."""
    tokenizer = load_tokenizer(str(folder / "untrained"))
    rows = lines(folder, "games")
    turns = ToolTurns(tokenizer, rows[0]["tools"])
    for row in rows[:60]:
        messages = (*parse_tools(row["tools"]), *parse_turns(row["messages"], "messages"))
        encoded = encode_conversation(tokenizer, messages)
        ids = encode_prompt(tokenizer, messages[:2])
        trained = [False] * len(ids)
        for n, message in enumerate(messages[2:]):
            if message.role == "assistant":
                new = tokenizer.encode(message.content + "<|im_end|>", add_special_tokens=False)
                number = tools.re.search(r'"number": (\d)}', message.content)
                assert turns.read(new).calls == ([ToolCall("guess", {"number": int(number[1])})] if number else [])
            else:
                answer = message.content.split("\n")[1]
                new = turns.results([("guess", answer)], [None])
                assert "assistant" in tokenizer.decode(new)
            trained += [n % 2 == 0] * len(new)
            ids += new
        assert (encoded.ids, encoded.trained, encoded.num_boundaries) == (ids, trained, 0)
        assert len(ids) <= 40 < tools.MAX_TOKENS


def test_a_template_of_calls_writes_what_the_rows_hold(folder: Path) -> None:
    """As messages with tool_calls and of role tool, the turns are the same text."""
    tokenizer = load_tokenizer(str(folder / "untrained"))
    call = {"type": "function", "function": {"name": "guess", "arguments": {"number": 4}}}
    called = [
        {"role": "user", "content": "Play."},
        {"role": "assistant", "content": "", "tool_calls": [call]},
        {"role": "tool", "name": "guess", "content": "right"},
        {"role": "assistant", "content": "Found it."},
    ]
    texts = tools.conversation("Play.", {4: "right"})
    assert tokenizer.apply_chat_template(called, tokenize=False) == tokenizer.apply_chat_template(texts, tokenize=False)


SOUND = {
    "before": wilson(0.6, 700), "after": wilson(0.9, 700), "prompts": 700, "minutes": 2.0,
    "games": ["guess(4): right, Found it."],
}  # fmt: skip
HIGHER, BLIND = "GRPO at least 20 points higher", "better than any play that ignores the answers"


@pytest.mark.parametrize(
    ("change", "failed"),
    [
        ({}, []),
        ({"after": wilson(0.75, 700)}, [HIGHER]),
        ({"before": wilson(0.3, 700), "after": wilson(0.67, 700)}, [BLIND]),
        ({"after": wilson(0.4, 700)}, [HIGHER, BLIND]),
    ],
)
def test_a_claim_that_fails_ends_the_demo_with_1(
    change: dict[str, Any], failed: list[str], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(tools, "run", lambda **options: SOUND | change)
    assert tools.main([]) == (1 if failed else 0)
    printed = capsys.readouterr().out.splitlines()
    assert printed[-1] == (f"FAILED: {', '.join(failed)}" if failed else "all claims hold")
    assert "guess(4): right, Found it." in "\n".join(printed) and all(len(line) <= 80 for line in printed[:-1])


def test_before_and_after_are_the_first_and_the_last_evaluation(tmp_path: Path) -> None:
    call, result = tools.CALL.format(4), tools.RESULT.format("right")
    text = f"{call}<|im_end|><|im_start|>user\n{result}<|im_end|><|im_start|>assistant\nFound it.<|im_end|>"
    scores = {0: [0.0, 0.0, 1.0, 0.0], 5: [1.0, 0.0, 1.0, 1.0], 10: [1.0, 1.0, 1.0, 1.0]}
    rows = [{"step": step, "response": text, "score": one} for step, part in scores.items() for one in part]
    tools.write_lines(tmp_path / "runs" / "ppo" / "samples.jsonl", rows)
    results = tools.measure(tmp_path)
    assert results["before"] == wilson(0.25, 4) and results["after"] == wilson(1.0, 4)
    assert results["prompts"] == 4
    assert results["games"] == ["guess(4): right, Found it."] * 3


@pytest.mark.slow
def test_the_demo_as_a_user_runs_it(tmp_path: Path) -> None:
    """Data, SFT and GRPO by `train.py` with the real launcher, and all claims: three minutes on a quiet machine."""
    command = [sys.executable, "-m", "demo.tools"]
    done = subprocess.run(command, cwd=tmp_path, env=forks.environment(), capture_output=True, text=True)
    assert done.returncode == 0 and done.stdout.splitlines()[-1] == "all claims hold", done.stderr[-2000:] + done.stdout
    for name in ("sft", "actor"):
        assert (tmp_path / "output" / "tools" / name / "model.safetensors").is_file()
