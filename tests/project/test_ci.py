"""What `.ci/run` and GitHub's workflow run, with stand-ins for make and the environment's Python."""

import os
import re
import subprocess
import tomllib
from pathlib import Path

import pytest
import yaml
from support.launch_stub import write_program
from support.marks import slow
from support.source_tree import ROOT

MAKE = """#!/bin/bash
echo "$ATEN_CPU_CAPABILITY,$ONEDNN_MAX_CPU_ISA $*" >> {log}
"""
NUMERIC = "engine kernels mathematics step3_dpo step3_ppo training"


def words_of_make(folder: Path, capability: str, *steps: str) -> list[str]:
    """The variables and words of each `make` of these steps, on a processor of this capability."""
    write_program(folder / "bin" / "make", MAKE.format(log=folder / "log"))
    write_program(folder / "venv/bin/python", f"#!/bin/bash\necho {capability}\n")
    variables = {name: value for name, value in os.environ.items() if not name.endswith(("CAPABILITY", "CPU_ISA"))}
    variables |= {"PATH": f"{folder / 'bin'}:{os.environ['PATH']}", "CI_VENV": str(folder / "venv")}
    subprocess.run([ROOT / ".ci" / "run", *steps], env=variables, timeout=60, check=True)
    return (folder / "log").read_text().splitlines()


@pytest.mark.parametrize(("capability", "other"), [("AVX512", "avx2,AVX2"), slow(("AVX2", "default,"))])
def test_numbers_are_tested_under_other_kernels_than_the_processors_own(tmp_path, capability, other):
    folders = " ".join(f"tests/{name}" for name in NUMERIC.split())
    assert words_of_make(tmp_path, capability) == [
        ", check",
        ", test",
        f"{other} test FOLDERS={folders}",
        ", site",
        ", test-slow SHARDS=1/1",
        ", demo",
    ]
    assert all((ROOT / name).is_dir() for name in folders.split())


def test_one_step_runs_alone_and_another_word_is_refused_before_any(tmp_path):
    assert words_of_make(tmp_path, "AVX2", "site") == [", site"]
    with pytest.raises(subprocess.CalledProcessError):
        words_of_make(tmp_path, "AVX2", "check", "sight")
    assert (tmp_path / "log").read_text().splitlines() == [", site"]


def test_the_workflow_runs_every_step():
    """The two commands of README on each supported Python; no secret is read, and each action has a version."""
    jobs = yaml.safe_load((ROOT / ".github/workflows/ci.yml").read_text(encoding="utf-8"))["jobs"]
    steps = {name: [step["run"] for step in job["steps"] if "run" in step] for name, job in jobs.items()}
    assert steps["readme"] == [".ci/run demo", ".ci/run test"]
    named = [word for commands in steps.values() for line in commands if "ci/run" in line for word in line.split()[1:]]
    assert sorted(named) == ["check", "demo", "numbers", "site", "slow", "test"]
    versions = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]["classifiers"]
    assert [one.rpartition(" ")[2] for one in versions] == jobs["readme"]["strategy"]["matrix"]["python"]
    uses = [step["uses"] for job in jobs.values() for step in job["steps"] if "uses" in step]
    assert uses and all(re.fullmatch(r"actions/[\w-]+@v\d+\.\d+\.\d+", one) for one in uses)


def test_templates_are_forms():
    for file in (ROOT / ".github/ISSUE_TEMPLATE").glob("[!c]*.yml"):
        form = yaml.safe_load(file.read_text(encoding="utf-8"))
        assert form["name"] and form["description"]
        ids = [field["id"] for field in form["body"] if field["type"] != "markdown"]
        assert len(ids) == len({*ids}) > 0 and all(field["attributes"] for field in form["body"])
