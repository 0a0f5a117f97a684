"""The notebook of the first run: its kept outputs hold on a run of its cells in order, and name nobody."""

import getpass
import json
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from support import forks
from support.notebook import sources
from support.source_tree import ROOT

FILE = ROOT / "docs" / "notebooks" / "first_run.ipynb"
TEXT = FILE.read_text(encoding="utf-8")
NOTEBOOK = json.loads(TEXT)
CODE = [cell for cell in NOTEBOOK["cells"] if cell["cell_type"] == "code"]
# Another processor rounds otherwise, and sampled rewards amplify that: what is kept must hold within this much. The
# demo itself allows 10 nats of KL. The policy must learn the rule and keep its variety on each processor: with AVX2, or
# another seed, 0.78 to 0.92 of the answers are good and 0.89 to 0.99 distinct.
TOLERANCE = {
    "perplexity": {"rel": 0.1}, "accuracy": {"abs": 0.1}, "mean score": {"rel": 0.5, "abs": 1.0},
    "KL": {"abs": 10.0}, "true rule": {"abs": 0.25}, "distinct": {"abs": 0.2},
}  # fmt: skip


def printed(outputs: list[dict[str, Any]]) -> str:
    return "".join(line for output in outputs for line in output.get("text", []))


def rows(text: str) -> dict[str, list[float]]:
    """The two numbers of each line of the table, without standard errors, by a part of its name."""
    lines = re.sub(r" \+- [\d.]+", "", text).splitlines()[1:]
    return {
        next(part for part in TOLERANCE if part in line): [float(word) for word in line.split()[-2:]] for line in lines
    }


def prompts(text: str) -> list[str]:
    """The prompts above an answer before and one after PPO. Answers are sampled: their words are any processor's own.

    An answer may have several lines, or none.
    """
    return re.findall(r"^(\w.*)\n  before: [^\0]*?\n  after:  ", text, re.MULTILINE)


def test_prompts_are_found_whatever_is_sampled() -> None:
    pairs = "Name one.\n  before: It sang\n It ran.\n  after:  It\n\nName two.\n  before: \n  after:  \n"
    assert prompts(pairs) == ["Name one.", "Name two."] and prompts(pairs.replace("  after:  It", "")) != prompts(pairs)


def test_the_notebook_is_small_was_run_and_names_no_person_or_folder() -> None:
    assert len(NOTEBOOK["cells"]) <= 12 and FILE.stat().st_size < 200_000
    assert [cell["execution_count"] for cell in CODE] == [*range(1, len(CODE) + 1)]
    assert any("image/png" in output.get("data", {}) for cell in CODE for output in cell["outputs"])
    kept = json.dumps([[output.get("text") for output in cell["outputs"]] for cell in CODE])
    assert not re.search(r"/(home|root|tmp|work|Users)\b", kept) and getpass.getuser() not in kept


def test_the_page_from_python_links_to_it() -> None:
    page = ROOT / "docs" / "guides" / "from_python.md"
    assert "](../notebooks/first_run.ipynb)" in page.read_text(encoding="utf-8")


@pytest.mark.slow
def test_the_cells_run_in_order_and_give_what_is_kept(tmp_path: Path) -> None:
    """Exit codes, data and prompts exactly; the table within TOLERANCE; of sampled answers that they are there."""
    environment = forks.environment() | {"PYTHONPATH": f"{ROOT}:{ROOT / 'tests'}", "TMPDIR": str(tmp_path)}
    words = [sys.executable, "-m", "support.notebook", str(FILE), "outputs.json"]
    done = subprocess.run(words, cwd=tmp_path, env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr[-3000:]
    found = json.loads((tmp_path / "outputs.json").read_text(encoding="utf-8"))
    kept = [cell["outputs"] for cell in CODE]
    assert len(sources(NOTEBOOK)) == len(found) == len(kept)
    for texts, before, after in zip(sources(NOTEBOOK), kept, found, strict=True):
        if "table(found)" in texts:
            assert (new := rows(printed(after))).keys() == (old := rows(printed(before))).keys() == TOLERANCE.keys()
            for name, values in old.items():
                assert new[name] == pytest.approx(values, **TOLERANCE[name]), name
            assert new["true rule"][1] > new["true rule"][0] + 0.2, "PPO learned the rule"
            assert new["distinct"][1] > 0.8, "and not one answer to all prompts"
        elif "answers" in texts:
            assert prompts(printed(after)) == prompts(printed(before)) and len(prompts(printed(after))) == 2
        else:
            assert printed(after) == printed(before)
            assert [output.get("data", {}).keys() for output in after] == [o.get("data", {}).keys() for o in before]
