"""Who may import whom (docs/contribute/design.md, section 2), and what no file does."""

import ast
import subprocess
import sys
from collections.abc import Iterable

import pytest
from support.source_tree import ROOT, STAGES, imports_at_once, imports_in, relative, source_files, tree_of

TREES = {relative(path): tree_of(path) for path in source_files()}
TENSOR_MATH = (
    "step1_sft/loss.py",
    "step2_reward/loss.py",
    "step3_dpo/loss.py",
    "step3_ppo/mathematics/estimators.py",
    "step3_ppo/mathematics/losses.py",
    "step3_ppo/mathematics/off_policy.py",
    "pipeline/tensor_ops.py",
)
# Configuration, flags and DeepSpeed's JSON, and the programs that a user waits for.
LIGHT = (
    "pipeline.errors", "pipeline.models.paths", "train", "chat", "prompt_eval",
    "rlhf.main", "rlhf.train", "rlhf.chat", "rlhf.compare", "rlhf.models.convert", "rlhf.models.export", "rlhf.report",
    "rlhf.rewards.reward", "rlhf.rewards.sample", "pipeline.reporting.page", "pipeline.run.reporter",
    *(f"pipeline.{package}.{path.stem}" for package in ("configuration", "launching")
      for path in source_files(f"pipeline/{package}") if path.stem != "__init__"),
    "pipeline.preparation.dry_run", "pipeline.preparation.stage_job", "rlhf.preflight", "rlhf.stages",
    "rlhf.launch", "rlhf.train_config", "rlhf.train_plan",
    *(f"{stage}.{name}" for stage in STAGES for name in ("config", "main", "metrics", "stage")),
)  # fmt: skip
FORBIDDEN_NAMES = ("eval", "exec", "compile", "__import__")
FORBIDDEN_MODULES = ("pickle", "cPickle", "dill", "marshal", "shelve")


def top(names: Iterable[str]) -> set[str]:
    return {name.partition(".")[0] for name in names}


# Each package imports only those above it: the leaf modules of pipeline/, its packages in this order, then the stages,
# then the command line. Packages on one line do not import each other.
ORDER = (
    ("pipeline",),
    ("pipeline.configuration", "pipeline.kernels", "pipeline.data"),
    ("pipeline.models", "pipeline.run"),
    ("pipeline.launching", "pipeline.engine", "pipeline.generation", "pipeline.rewards", "pipeline.reporting"),
    ("pipeline.checkpoints", "pipeline.planning", "pipeline.inference"),
    ("pipeline.training", "pipeline.preparation"),
    STAGES,
    ("rlhf",),
)  # fmt: skip


def package_of(module: str) -> str:
    """`pipeline.data` for pipeline/data/loader.py, `pipeline` for its leaf modules, else the first folder."""
    parts = module.split(".")
    inside = ".".join(parts[:2])
    return inside if (ROOT / inside.replace(".", "/")).is_dir() else parts[0]


def test_packages_import_only_what_is_above_them():
    level = {package: number for number, packages in enumerate(ORDER) for package in packages}
    wrong = [
        f"{file} imports {name}"
        for file, tree in TREES.items()
        if (own := package_of(file.removesuffix(".py").replace("/", "."))) in level
        for name in imports_in(tree)
        if (other := package_of(name)) in level and own != other and level[other] >= level[own]
    ]
    assert wrong == []


def test_deepspeed_is_imported_in_one_package_and_lazily_in_two_files_more():
    anywhere = {file for file, tree in TREES.items() if "deepspeed" in top(imports_in(tree))}
    at_once = {file for file, tree in TREES.items() if "deepspeed" in top(imports_at_once(tree))}
    outside = {file for file in anywhere if not file.startswith("pipeline/engine/")}
    assert outside == {"pipeline/models/partitions.py", "pipeline/configuration/ds_keys.py"}
    assert outside & at_once == set()


def test_torch_distributed_is_imported_in_one_file():
    found = {f for f, tree in TREES.items() if any(name.startswith("torch.distributed") for name in imports_in(tree))}
    assert found == {"pipeline/dist.py"}
    used = {
        file for file, tree in TREES.items()
        for node in ast.walk(tree)
        if isinstance(node, ast.Attribute) and ast.unparse(node).startswith("torch.distributed")
    }  # fmt: skip
    assert used <= {"pipeline/dist.py"}


@pytest.mark.parametrize("file", TENSOR_MATH)
def test_losses_and_mathematics_are_pure(file):
    for name in imports_in(TREES[file]):
        ours = name.startswith(("pipeline.tensor_ops", "step3_ppo.mathematics.estimators"))
        allowed = name.split(".")[0] in {"torch", *sys.stdlib_module_names} or ours
        assert allowed and not name.startswith("torch.distributed"), name


@pytest.mark.parametrize("module", LIGHT)
def test_light_modules_name_neither_torch_nor_deepspeed(module):
    file = module.replace(".", "/") + ".py"
    assert top(imports_at_once(TREES[file])) & {"torch", "deepspeed", "transformers", "datasets"} == set()


def test_light_modules_load_neither_torch_nor_deepspeed():
    """In a fresh interpreter: what they import imports neither, nor what a session of chat alone needs."""
    heavy = ["torch", "deepspeed", "transformers", "datasets", "peft", "prompt_toolkit"]
    code = f"import importlib, sys\nfor name in {LIGHT!r}: importlib.import_module(name)\n"
    code += f"print(*(name for name in {heavy!r} if name in sys.modules))"
    done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, check=True)
    assert done.stdout.split() == []


def test_no_file_is_a_drawer():
    names = {path.stem for path in source_files()}
    assert names & {"utils", "util", "common", "helpers", "misc", "base"} == set()


def findings(tree: ast.Module) -> Iterable[str]:
    """What must not stand in a file: shells, code from strings, pickles, YAML that builds objects, remote code."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Call):
            name = ast.unparse(node.func)
            settings = {word.arg: ast.unparse(word.value) for word in node.keywords}
            if name in FORBIDDEN_NAMES or name in ("os.system", "os.popen", "subprocess.getoutput"):
                yield name
            if settings.get("shell", "False") != "False":
                yield "shell"
            if settings.get("trust_remote_code", "False") != "False":
                yield "trust_remote_code"
            loader = settings.get("Loader", "".join(map(ast.unparse, node.args[1:2])))
            if name == "yaml.load" and loader in ("", "yaml.Loader", "yaml.FullLoader", "yaml.UnsafeLoader"):
                yield name
            if name in ("yaml.unsafe_load", "yaml.full_load"):
                yield name
            if name == "torch.load" and settings.get("weights_only") != "True":
                yield name
    yield from top(imports_in(tree)) & set(FORBIDDEN_MODULES)


@pytest.mark.parametrize(
    "code",
    [
        "eval('1')", "exec(text)", "os.system('ls')", "run('ls', shell=True)", "import pickle",
        "from pickle import load", "yaml.load(text, yaml.Loader)",
        "yaml.load(text)", "yaml.load(text, Loader=yaml.Loader)", "load(path, trust_remote_code=True)",
        "load(path, trust_remote_code=flag)", "torch.load(path)",
    ],
)  # fmt: skip
def test_the_search_finds_what_must_not_be(code):
    assert list(findings(ast.parse(code)))


@pytest.mark.parametrize(
    "code", ["model.eval()", "re.compile('a')", "run(x, shell=False)", "yaml.load(t, Loader=FlagLoader)"]
)
def test_the_search_leaves_what_may_be(code):
    assert not list(findings(ast.parse(code)))


@pytest.mark.parametrize("file", TREES)
def test_no_file_runs_text_or_reads_pickles(file):
    assert list(findings(TREES[file])) == []
