"""What `.ci/run` runs, with stand-ins for make and the environment's Python: numbers under two sets of kernels."""

import os
import subprocess
from pathlib import Path

import pytest
from support.launch_stub import write_program
from support.marks import slow
from support.source_tree import ROOT

MAKE = """#!/bin/bash
echo "$ATEN_CPU_CAPABILITY,$ONEDNN_MAX_CPU_ISA $*" >> {log}
"""
NUMERIC = "engine kernels mathematics step3_dpo step3_ppo training"


def words_of_make(folder: Path, capability: str) -> list[str]:
    """The variables and words of each `make`, on a processor of this capability."""
    write_program(folder / "bin" / "make", MAKE.format(log=folder / "log"))
    write_program(folder / "venv/bin/python", f"#!/bin/bash\necho {capability}\n")
    variables = {name: value for name, value in os.environ.items() if not name.endswith(("CAPABILITY", "CPU_ISA"))}
    variables |= {"PATH": f"{folder / 'bin'}:{os.environ['PATH']}", "CI_VENV": str(folder / "venv")}
    subprocess.run([ROOT / ".ci" / "run"], env=variables, timeout=60, check=True)
    return (folder / "log").read_text().splitlines()


@pytest.mark.parametrize(("capability", "other"), [("AVX512", "avx2,AVX2"), slow(("AVX2", "default,"))])
def test_numbers_are_tested_under_other_kernels_than_the_processors_own(tmp_path, capability, other):
    folders = " ".join(f"tests/{name}" for name in NUMERIC.split())
    assert words_of_make(tmp_path, capability) == [
        ", check",
        ", test",
        f"{other} test FOLDERS={folders}",
        ", test-slow SHARDS=1/1",
    ]
    assert all((ROOT / name).is_dir() for name in folders.split())
