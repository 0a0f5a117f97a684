"""Private names of torch and DeepSpeed: all that are used are listed, and a missing one ends a run at its start."""

import ast
import re
from pathlib import Path

import deepspeed
import pytest
import torch
from support.in_process import error_lines, undone_afterwards
from support.source_tree import functions, imports_in, relative, source_files, tree_of
from support.tiny_run import make_folder
from torch import nn

from pipeline.engine import private_names
from pipeline.engine.private_names import DEEPSPEED, TORCH, TORCH_OF_PLANS, check_private_names, deepspeed_has
from pipeline.errors import EnvironmentFault
from pipeline.tensor_ops import linear_relu, tensor_norms
from step1_sft.main import main

TREES = {relative(path): tree_of(path) for path in source_files()}
AROUND_DEEPSPEED = {
    file: tree
    for file, tree in TREES.items()
    if file == "pipeline/models/partitions.py"
    or (file.startswith("pipeline/engine/") and file != "pipeline/engine/private_names.py")
}
LISTED = {name for names in DEEPSPEED.values() for name in names.split()}
# DeepSpeed's documented functions and JSON keys; names of torch and of this project that it has too.
PUBLIC = set(
    "backward eval initialize set_gradient_accumulation_boundary step train offload_optimizer offload_param "
    "zero_optimization linear param_groups state rank config input training verbose".split()
)
STAGE_3 = deepspeed.runtime.zero.stage3.DeepSpeedZeroOptimizer_Stage3


def names_used(tree: ast.Module) -> set[str]:
    """Attributes that a file reads or sets, and strings that may name one."""
    nodes = list(ast.walk(tree))
    names = {node.attr for node in nodes if isinstance(node, ast.Attribute)}
    texts = {node.value for node in nodes if isinstance(node, ast.Constant) and isinstance(node.value, str)}
    return names | {text for text in texts if re.fullmatch(r"\w+", text)}


def names_defined(tree: ast.Module) -> set[str]:
    """Functions, classes, fields and attributes of `self` that a file defines."""
    nodes = list(ast.walk(tree))
    own = {node.name for node in [*functions(tree), *(node for node in nodes if isinstance(node, ast.ClassDef))]}
    own |= {ast.unparse(node.target).split(".")[-1] for node in nodes if isinstance(node, ast.AnnAssign)}
    stores = [node for node in nodes if isinstance(node, ast.Attribute) and isinstance(node.ctx, ast.Store)]
    return own | {node.attr for node in stores if ast.unparse(node.value) == "self"}


def test_every_private_name_of_deepspeed_is_listed_and_no_other():
    used = set().union(*(names_used(tree) for tree in AROUND_DEEPSPEED.values()))
    own = set().union(*(names_defined(tree) for tree in AROUND_DEEPSPEED.values()))
    known = own | PUBLIC | set().union(*(dir(place) for place in (torch, torch.Tensor, nn.Module, str, dict, list)))
    private = {name for name in used - known if any(deepspeed_has(owner, name) for owner in DEEPSPEED)}
    assert private - LISTED == set(), "not in pipeline/engine/private_names.py"
    assert LISTED - used == set(), "no longer used"


def test_other_packages_read_partitioned_parameters_through_partitions():
    of_parameters = set(DEEPSPEED["runtime.zero.partition_parameters.Init"].split()) - set(dir(str)) - {"all_gather"}
    elsewhere = {file: names_used(tree) & of_parameters for file, tree in TREES.items() if "engine/" not in file}
    assert {file for file, names in elsewhere.items() if names} == {"pipeline/models/partitions.py"}


def test_every_private_name_of_torch_is_listed_and_no_other():
    nodes = [node for tree in TREES.values() for node in ast.walk(tree)]
    names = [ast.unparse(node) for node in nodes if isinstance(node, ast.Attribute)]
    private = {name for name in names if re.search(r"\._[a-z]\w*$", name)}
    used = {
        name.removeprefix("torch.")
        for name in private
        if re.match(r"torch(\.\w+)+$", name) or hasattr(torch.Tensor, name.rpartition(".")[2])
    }
    imported = [name for tree in TREES.values() for name in imports_in(tree)]
    used |= {name.removeprefix("torch.") for name in imported if name.startswith("torch.") and "._" in name}
    assert used == {*TORCH, *TORCH_OF_PLANS}


def test_what_is_installed_has_all_names():
    check_private_names()


def remove_method(monkeypatch: pytest.MonkeyPatch) -> str:
    monkeypatch.delattr(STAGE_3, "_get_norm_groups")
    return "deepspeed.runtime.zero.stage3.DeepSpeedZeroOptimizer_Stage3._get_norm_groups: "


def remove_attribute(monkeypatch: pytest.MonkeyPatch) -> str:
    monkeypatch.setattr(STAGE_3, "__init__", lambda self: None)
    return "deepspeed.runtime.zero.stage3.DeepSpeedZeroOptimizer_Stage3.fp32_partitioned_groups_flat"


def remove_module(monkeypatch: pytest.MonkeyPatch) -> str:
    monkeypatch.delattr(deepspeed.utils, "nvtx")
    return "deepspeed.utils.nvtx.enable_nvtx: "


@pytest.mark.parametrize("remove", [remove_method, remove_attribute, remove_module])
def test_a_missing_name_is_told_with_the_tested_versions(remove, monkeypatch):
    expected = remove(monkeypatch)
    with pytest.raises(EnvironmentFault) as caught:
        check_private_names()
    (line,) = str(caught.value).splitlines()
    assert expected in line and line.endswith(f"; tested is {private_names.TESTED}")


def test_a_run_ends_with_one_line_and_exit_3(tmp_path: Path, monkeypatch, capfd):
    monkeypatch.chdir(make_folder(tmp_path, num_train=8, num_test=2, num_documents=8))
    missing = remove_method(monkeypatch)
    with undone_afterwards():
        words = "--data-path train.jsonl --model-name-or-path base --output-dir out --dtype fp32 --max-seq-len 96"
        assert main(words.split()) == 3
    (line,) = [line for line in error_lines(capfd.readouterr().err) if line.startswith("error: ")]
    assert line.startswith(f"error: {missing}missing in torch {torch.__version__} with deepspeed ")


@pytest.mark.parametrize("name", ["_addmm_activation", "_foreach_norm"])
def test_without_a_private_name_of_torch_public_functions_give_the_same(name, monkeypatch, caplog):
    tensors = [torch.randn(shape, generator=torch.Generator().manual_seed(3)) for shape in ((5, 4), (3, 4), (3,))]
    expected = tensor_norms(tensors), linear_relu(*tensors)
    monkeypatch.delattr(torch, name)
    with caplog.at_level("INFO"):
        check_private_names()
    assert caplog.messages[0].startswith(f"torch.{name}: missing in ")
    for actual, before in zip((tensor_norms(tensors), linear_relu(*tensors)), expected, strict=True):
        torch.testing.assert_close(actual, before)
