"""What is imported is listed, and what is listed has a tested version with hashes."""

import ast
import re
import subprocess
import sys
from importlib.metadata import packages_distributions
from pathlib import Path

import pytest
from support.source_tree import ROOT, source_files, tree_of

# torch's GPU builds bring triton, pydantic its core, and who logs to a tracker, serves, or evaluates by BLEU or ROUGE
# installs those.
OPTIONAL = {
    "bitsandbytes", "httpx", "math-verify", "mlflow", "mlflow-skinny", "py3langid", "pydantic-core", "reasoning-gym",
    "rouge-score", "sacrebleu", "starlette", "swanlab", "trackio", "triton", "uvicorn", "wandb",
}  # fmt: skip
# Needed by others: the chat templates and tokenizers of transformers, torch.utils.tensorboard.
NOT_IMPORTED = {"sentencepiece", "tensorboard"}
WITHOUT_HASHES = re.compile(r"torch|triton|nvidia-|cuda-")


def normalised(name: str) -> str:
    return name.lower().replace("_", "-")


def listed(file: str) -> set[str]:
    lines = (ROOT / file).read_text(encoding="utf-8").splitlines()
    return {normalised(re.split(r"[<>=]", line)[0]) for line in lines if line and not line.startswith("#")}


def imported() -> set[str]:
    """Distributions of all modules that the product and the demo import, at the top or in functions."""
    nodes = [node for path in [*source_files(), *source_files("demo")] for node in ast.walk(tree_of(path))]
    names = {alias.name for node in nodes if isinstance(node, ast.Import) for alias in node.names}
    names |= {node.module for node in nodes if isinstance(node, ast.ImportFrom) and node.module and not node.level}
    own = {path.name for path in ROOT.iterdir()}
    tops = {name.partition(".")[0] for name in names} - set(sys.stdlib_module_names) - own
    known = packages_distributions()
    return {normalised(known.get(top, [top])[0]) for top in tops}


def test_what_is_imported_is_listed_and_what_is_listed_is_needed() -> None:
    assert imported() - OPTIONAL == listed("requirements.txt") - NOT_IMPORTED


def lock(file: str) -> dict[str, int]:
    """Distribution -> number of its hashes."""
    parts = re.split(r"^(?=[a-z0-9])", (ROOT / file).read_text(encoding="utf-8"), flags=re.MULTILINE)[1:]
    return {part.partition("==")[0]: part.count("--hash=sha256:") for part in parts}


ADDED = sorted(path.stem for path in (ROOT / "requirements").glob("*.txt"))


@pytest.mark.parametrize("name", ADDED)
def test_every_requirement_has_a_tested_version(name: str) -> None:
    locked = lock("constraints.txt") | lock(f"requirements/{name}.lock")
    assert listed(f"requirements/{name}.txt") - locked.keys() == set()


def test_the_lock_of_users_holds_what_they_need_alone() -> None:
    assert ADDED == ["dev", "site", "trackers", "trl"]
    found = lock("constraints.txt")
    assert listed("requirements.txt") - found.keys() == set()
    assert {"pytest", "ruff", "mypy", "trl", "wandb", "mkdocs"} & found.keys() == set()


def entries(file: str) -> set[str]:
    """Return the versions of a lock with their markers: `six==1.17.0`, `colorama==0.4.6 ; sys_platform == 'win32'`."""
    lines = (ROOT / file).read_text(encoding="utf-8").splitlines()
    return {line.removesuffix(" \\") for line in lines if line[:1].isalnum()}


@pytest.mark.parametrize("name", ADDED)
def test_a_lock_does_not_repeat_versions_of_users(name: str) -> None:
    users = entries("constraints.txt")
    assert [entry for entry in entries(f"requirements/{name}.lock") if {entry, entry.split()[0]} & users] == []


def test_a_package_that_users_need_on_some_platforms_is_locked_for_all_where_an_addition_needs_it() -> None:
    """Pip refuses a package without a version as soon as one has a hash."""
    assert "colorama==0.4.6 ; sys_platform == 'win32'" in entries("constraints.txt")
    assert "colorama==0.4.6" in entries("requirements/dev.lock") & entries("requirements/site.lock")


def test_all_but_the_builds_of_torch_have_hashes() -> None:
    found = lock("constraints.txt")
    assert len(found) > 80 and {"torch", "triton"} <= found.keys()
    assert {name for name, hashes in found.items() if not hashes} == set(filter(WITHOUT_HASHES.match, found))
    for name in ADDED:
        assert all(lock(f"requirements/{name}.lock").values())


@pytest.mark.parametrize("goal", ["demo", "test"])
@pytest.mark.parametrize(
    ("device", "index"),
    [("", "https://download.pytorch.org/whl/cpu"), ("nvidia0", ""), ("nvidiactl", ""), ("dxg", "")],
)
def test_a_machine_without_a_gpu_takes_the_cpu_build_of_torch(
    tmp_path: Path, goal: str, device: str, index: str
) -> None:
    (tmp_path / "null").touch()
    if device:
        (tmp_path / device).touch()
    text = (ROOT / "Makefile").read_text(encoding="utf-8").replace("/dev/nvidia", f"{tmp_path}/nvidia")
    text = text.replace(" /dev/dxg", f" {tmp_path}/dxg")
    (tmp_path / "Makefile").write_text(text, encoding="utf-8")

    def torch_line(*given: str) -> str:
        command = ["make", "-n", "-f", str(tmp_path / "Makefile"), f"VENV={tmp_path}/venv", goal, *given]
        printed = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=True).stdout
        (line,) = [part for part in printed.splitlines() if "/torch.txt" in part and "install" in part]
        return line

    assert re.findall(r"--extra-index-url (\S+)", torch_line()) == ([index] if index else [])
    assert "index" not in torch_line("TORCH_INDEX="), "the CUDA build, if asked for"
    assert "--extra-index-url https://own.example/whl" in torch_line("TORCH_INDEX=https://own.example/whl")
