"""Modules beside a reward function's file: which it imports, and what happens where one of them changes in a run."""

import hashlib
import logging

import pytest
from support.messages import naming
from support.reward_functions import functions_in, scored, to

from pipeline.errors import InputError
from pipeline.rewards.modules import modules_beside
from pipeline.rewards.pool import RewardPool

FILES = {
    "plain.py": "import json, deep.inner",
    "deep/__init__.py": "from . import near",
    "deep/near.py": "from ..over import x",
    "deep/inner.py": "import plain",
    "over.py": "",
    "named.py": "broken (",
    "pack/__init__.py": "",
    "pack/sub.py": "",
    "late.py": "",
    "star.py": "",
    "unused.py": "",
    "pipeline/rewards/box.py": "",
    "pack/other.py": "",
}
FORMS = """
import plain as p, not_there
from named import a, b
from pack import sub
from star import *
import pipeline.rewards.box
def f(completions):
    from late import x
"""


def test_import_statements_of_all_forms_are_followed(tmp_path):
    for name, text in FILES.items():
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text(text)
    (tmp_path / "f.py").write_text(FORMS)
    unused = {"unused.py", "pipeline/rewards/box.py", "pack/other.py"}
    assert modules_beside(tmp_path / "f.py") == {
        name: hashlib.sha256(text.encode()).hexdigest() for name, text in FILES.items() if name not in unused
    }


CODE = """
import os
from helper import SIGN
def f(completions, die, late):
    if late[0]:
        from later import OTHER
    die[0] and os._exit(1)
    return [SIGN for _ in completions]
"""


def test_a_module_that_changes_during_a_run_is_not_mixed_with_what_it_was(tmp_path):
    """Where a worker is replaced, and where a function imports it in a later call."""
    for name in ("helper", "later"):
        (tmp_path / f"{name}.py").write_text("SIGN, OTHER = 1.0, 0.0")
    functions = functions_in(tmp_path / "f.py", CODE, "f")
    live, dead, late = (to("a", columns={"die": n == 1, "late": n == 2}) for n in range(3))
    with RewardPool(functions, num_workers=1, timeout_s=20) as pool:
        pool.check(["die", "late"])
        assert scored(pool, live) == [{"f": [1.0]}]
        for name in ("helper", "later"):
            (tmp_path / f"{name}.py").write_text("SIGN, OTHER = -1.0, 0.0")
        assert scored(pool, live) == [{"f": [1.0]}], "the worker has loaded it"
        for responses, name in ((late, "later"), (dead, "helper")):
            with pytest.raises(InputError, match=naming(f"f.py:f ... prompt data.jsonl:7 ... {name}.py has changed")):
                scored(pool, responses)


def test_a_module_that_no_statement_names_is_told_once(tmp_path, caplog):
    code = "import importlib\ndef f(completions): return [importlib.import_module('hidden').SIGN] * len(completions)"
    (tmp_path / "hidden.py").write_text("SIGN = 1.0")
    functions = functions_in(tmp_path / "f.py", code, "f")
    with RewardPool(functions, num_workers=2, timeout_s=20) as pool:
        pool.check(())
        assert scored(pool, *[to("a")] * 6) == [{"f": [1.0]}] * 6
    (line,) = [record.getMessage() for record in caplog.records if record.levelno == logging.WARNING]
    assert line == naming(f"--reward-function {functions[0].target} ... hidden.py")
