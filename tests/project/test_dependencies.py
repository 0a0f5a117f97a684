"""What is imported is listed, and what is listed has a tested version with hashes."""

import ast
import re
import sys
from importlib.metadata import packages_distributions

import pytest
from support.source_tree import ROOT, source_files, tree_of

# torch's GPU builds bring triton, pydantic its core, and who logs to W&B or evaluates by BLEU or ROUGE installs those.
OPTIONAL = {
    "bitsandbytes", "httpx", "math-verify", "py3langid", "pydantic-core", "reasoning-gym", "rouge-score", "sacrebleu",
    "triton", "wandb",
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


def constraints() -> dict[str, int]:
    """Distribution -> number of its hashes."""
    parts = re.split(r"^(?=[a-z0-9])", (ROOT / "constraints.txt").read_text(encoding="utf-8"), flags=re.MULTILINE)[1:]
    return {part.partition("==")[0]: part.count("--hash=sha256:") for part in parts}


@pytest.mark.parametrize("file", ["requirements.txt", "requirements-dev.txt"])
def test_every_requirement_has_a_tested_version(file: str) -> None:
    assert listed(file) - constraints().keys() == set()


def test_all_but_the_builds_of_torch_have_hashes() -> None:
    found = constraints()
    assert len(found) > 80 and {"torch", "triton"} <= found.keys()
    assert {name for name, hashes in found.items() if not hashes} == set(filter(WITHOUT_HASHES.match, found))
