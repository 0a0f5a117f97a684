"""README's quick starts as they stand, for four steps, with a tiny model and rows in place of those that they name."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
from support import forks
from support.pages import blocks, commands_in
from support.source_tree import ROOT
from support.tiny_run import make_folder, write_lines

README = (ROOT / "README.md").read_text(encoding="utf-8")
STARTS = README.partition("## Quick starts")[2].partition("\n## ")[0]
COMMANDS = [list(commands_in(content)) for _, content in blocks(STARTS, "bash")]
METHODS = ("ppo", "grpo", "dpo")  # of these blocks; the last one is DeepSpeed-Chat's, whose commands train OPT
IN_PLACE = {
    "qwen2.5-0.5b": "base", "Qwen/Qwen2.5-0.5B-Instruct": "base", "trl-lib/ultrafeedback_binarized": "train.jsonl",
}  # fmt: skip
SHORT = {
    "ppo": "--data-split none --reward.balance-lengths false --sft.max-seq-len 64 --reward.max-seq-len 64 "
    "--ppo.max-prompt-seq-len 40 --ppo.max-answer-seq-len 8 --sft.train-batch-size 8 --reward.train-batch-size 8 "
    "--ppo.train-batch-size 8 --max-steps 4",
    "grpo": "--ppo.max-prompt-seq-len 40 --ppo.max-answer-seq-len 8 --ppo.train-batch-size 8 --ppo.max-steps 4",
    "dpo": "--dpo.max-seq-len 64 --dpo.train-batch-size 8 --dpo.max-steps 4",
}
OF_REST = {"compare": ["--max-new-tokens", "8"], "chat": ["--max-new-tokens", "8"]}


def test_the_blocks_are_those_of_the_methods() -> None:
    assert len(COMMANDS) == len(METHODS) + 1
    trained = [next(words for words in block if words[:2] == ["rlhf", "train"]) for block in COMMANDS[:-1]]
    assert [words[words.index("--method") + 1] if "--method" in words else "ppo" for words in trained] == [*METHODS]


@pytest.mark.slow
@pytest.mark.parametrize("method", METHODS)
def test_a_quick_start_trains_and_talks(method: str, tmp_path: Path) -> None:
    make_folder(tmp_path)
    ((name, functions),) = blocks(STARTS, "python")
    ((questions, shown),) = blocks(STARTS, "text")
    (tmp_path / name).write_text(functions, encoding="utf-8")
    rows = [{"prompt": f"What is {n} + 30?", "answer": str(n + 30)} for n in range(48)]
    assert json.loads(shown) in rows, "rows like that of README"
    write_lines(tmp_path / questions, rows)
    environment = forks.environment() | {"PYTHONPATH": str(ROOT)}
    for _, command, *words in COMMANDS[METHODS.index(method)]:
        given = [IN_PLACE.get(word, word) for word in words]
        more = SHORT[method].split() if command == "train" else OF_REST.get(command, [])
        done = subprocess.run(
            [sys.executable, "-m", "rlhf", command, *given, *more], cwd=tmp_path, env=environment,
            input="Hello?\n", capture_output=True, text=True, timeout=500, check=False,
        )  # fmt: skip
        assert done.returncode == 0, f"{command}: {done.stdout[-1500:]}{done.stderr[-1500:]}"
    folder = {"ppo": "output"}.get(method, method)
    lines = (
        (tmp_path / folder / "runs" / ("dpo" if method == "dpo" else "ppo") / "metrics.jsonl").read_text().splitlines()
    )
    assert max(json.loads(line)["step"] for line in lines) == 4
    assert (tmp_path / folder / "actor" / "config.json").is_file() and os.listdir(tmp_path / folder / "actor")
