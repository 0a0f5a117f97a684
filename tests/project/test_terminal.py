"""Every line to a terminal passes `printable`: one function a stream prints (pipeline/errors.py)."""

import ast
import json
from pathlib import Path

import pytest
from support.in_process import undone_afterwards
from support.source_tree import relative, source_files, tree_of

from pipeline.errors import InputError, print_error, say, show
from rlhf import init
from rlhf.main import main as rlhf_main
from rlhf.rewards import reward
from step3_ppo.main import main as ppo_main

STEERS = "a\x1b[2J\x9b\u202e"
SHOWN = "a\\x1b[2J\\x9b\\u202e"
# Who prints by itself, and what.
OTHERS = {
    "pipeline/errors.py": "the one place",
    "pipeline/launching/host_agent.py": "JSON to a supervisor",
    "rlhf/rewards/sample_file.py": "rows, as ASCII on a terminal",
    "pipeline/preparation/data_page.py": "coloured lines, whose texts are escaped before",
    "pipeline/preparation/inputs.py": "coloured lines, whose texts are escaped before",
    "pipeline/configuration/flags.py": "help",
    "rlhf/train_config.py": "help",
    "rlhf/main.py": "help",
    "rlhf/chat.py": "the end of a line",
}


def prints(tree: ast.Module) -> bool:
    """Whether a module calls print or writes to a stream of the process."""
    calls = [ast.unparse(node.func) for node in ast.walk(tree) if isinstance(node, ast.Call)]
    return not {"print", "sys.stdout.write", "sys.stderr.write"}.isdisjoint(calls)


def test_no_other_module_prints():
    files = [path for path in source_files() if relative(path) not in OTHERS]
    assert [relative(path) for path in files if prints(tree_of(path))] == []
    assert all(prints(tree_of(path)) for path in source_files() if relative(path) in OTHERS)


def test_lines_of_either_stream_and_errors_are_escaped(capsys):
    say(f"note: {STEERS}", "b\tc")
    show(STEERS, "d")
    assert print_error(InputError(f"{STEERS}\n{STEERS}")) == 2
    shown = capsys.readouterr()
    assert shown.err == f"note: {SHOWN}\nb\tc\n" + 2 * f"error: {SHOWN}\n" and shown.out == f"{SHOWN}\nd\n"


def escaped(capsys: pytest.CaptureFixture[str]) -> str:
    """What was printed, none of which steers a terminal."""
    shown = "".join(capsys.readouterr())
    assert not {"\x1b", "\x9b", "\u202e"} & {*shown}, shown
    assert SHOWN in shown
    return shown


def test_init_escapes_the_names_of_files(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    assert init.main([f"{STEERS}.txt"]) == 2
    escaped(capsys)
    Path(f"{STEERS}.yaml").touch()
    assert init.main([f"{STEERS}.yaml"]) == 2
    assert "exists and is not overwritten" in escaped(capsys)
    Path(f"{STEERS}.yaml").unlink()
    assert init.main([f"{STEERS}.yaml", "--actor-model", "x/y", "--data-path", "r.jsonl", "--step", "1"]) == 0
    assert "written: a" in escaped(capsys)


def test_reward_escapes_what_a_function_raises_and_columns(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    Path("f.py").write_text(f"def failing(completions):\n    raise ValueError({STEERS!r})\n")
    Path("d.jsonl").write_text(json.dumps({"prompt": "a", "response": "b"}) + "\n")
    with undone_afterwards():
        assert reward.main(["f.py:failing", "--data", "d.jsonl"]) == 2
    assert "raise" in escaped(capsys)
    Path("e.jsonl").write_text(json.dumps({STEERS: "b"}) + "\n")
    assert reward.main(["f.py:failing", "--data", "e.jsonl"]) == 2
    escaped(capsys)


def test_a_path_of_more_reward_models_is_escaped(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    words = "--actor-model-name-or-path x --critic-model-name-or-path y --data-path z --more-reward-models".split()
    assert ppo_main([*words, f"./{STEERS}:none"]) == 2
    escaped(capsys)


def test_an_unknown_subcommand_is_escaped(capsys):
    assert rlhf_main([STEERS]) == 2
    escaped(capsys)
