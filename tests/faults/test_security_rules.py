"""What no file of the project does, read from their syntax trees; more of these in tests/project/test_imports.py."""

import ast
import re
from collections.abc import Iterable

import pytest
from support.source_tree import ROOT, relative, source_files, tree_of

FILES = [*source_files(), *source_files("demo"), *sorted((ROOT / "docs").glob("*.py"))]
TREES = {relative(path): tree_of(path) for path in FILES}
SHELLS = ("os.system", "os.popen", "subprocess.getoutput", "subprocess.getstatusoutput", "pty.spawn", "commands")
PICKLES = ("pickle", "cPickle", "dill", "joblib", "marshal", "shelve", "cloudpickle")
EVERYWHERE = ("0.0.0.0", "::", "*")
# transformers loads code from a folder unless it is told not to, and asks the terminal when it is told nothing.
LOADERS = re.compile(r"(AutoConfig|AutoTokenizer|AutoModel\w*|auto_class)\.from_pretrained$")


def findings(tree: ast.AST) -> Iterable[str]:
    """What must not be in a file."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Call):
            yield from in_call(node)
        elif isinstance(node, ast.Constant) and node.value in EVERYWHERE[:2]:
            yield f"listens on {node.value}"
        elif isinstance(node, ast.Import | ast.ImportFrom):
            names = [alias.name for alias in node.names] + [getattr(node, "module", None) or ""]
            yield from (
                f"import {name}" for name in names if name.partition(".")[0] in ("pickle", "dill", "joblib", "marshal")
            )


def in_call(node: ast.Call) -> Iterable[str]:
    """What one call must not say."""
    name = ast.unparse(node.func)
    words = {word.arg: ast.unparse(word.value) for word in node.keywords}
    first = ast.unparse(node.args[0]) if node.args else ""
    if name in (*SHELLS, "eval", "exec", "__import__") or words.get("shell", "False") != "False":
        yield f"{name} runs text"
    if re.search(r"['/](ba|da|z)?sh', '-\w*c'", ast.unparse(node)):
        yield f"{name} runs text by a shell"
    if name.endswith(("pickle.load", "pickle.loads", "numpy.load", "np.load")) and words.get("allow_pickle") == "True":
        yield f"{name} reads a pickle"
    if name == "torch.load" and words.get("weights_only") != "True":
        yield f"{name} without weights_only"
    if name in ("yaml.load", "yaml.load_all") and "Loader" not in words and len(node.args) < 2:
        yield f"{name} without a loader"
    if words.get("trust_remote_code", "False") != "False":
        yield f"{name} trusts remote code"
    if LOADERS.search(name) and "trust_remote_code" not in words:
        yield f"{name} says nothing of remote code"
    # A socket called probe is bound to see whether a port is free, and never listens.
    if name.endswith((".bind", "HTTPServer", "launch")) and name != "probe.bind" and re.search("''|0.0.0.0", first):
        yield f"{name} listens beyond this machine"
    if name == "tempfile.mktemp" or (name.endswith(("open", "Path")) and first.startswith(("'/tmp", '"/tmp'))):
        yield f"{name} uses a name in /tmp that others can foresee"


@pytest.mark.parametrize("file", TREES)
def test_no_file_does_it(file: str) -> None:
    assert list(findings(TREES[file])) == []


def test_one_command_alone_reads_a_pickle() -> None:
    """`rlhf convert`, whose only module with a loader is imported by nothing else."""
    words = re.compile(r"\btorch\.load\b|\bfrom torch import .*\bload\b|torch\.serialization|Unpickler")
    found = [name for name in TREES if words.search((ROOT / name).read_text(encoding="utf-8"))]
    assert found == ["pipeline/checkpoints/deepspeed_chat.py"]
    importers = [name for name in TREES if "deepspeed_chat import" in (ROOT / name).read_text(encoding="utf-8")]
    assert importers == ["rlhf/models/convert.py"]


@pytest.mark.parametrize(
    "code",
    [
        "os.popen('ls')", "subprocess.run('ls', shell=True)", "subprocess.run(['bash', '-c', text])", "eval(text)",
        "import pickle", "from joblib import load", "torch.load(f, weights_only=False)", "yaml.load(f)",
        "AutoConfig.from_pretrained(path)", "AutoTokenizer.from_pretrained(path, trust_remote_code=True)",
        "auto_class.from_pretrained(p, trust_remote_code=f)", "s.bind(('', 80))", "s.bind(('0.0.0.0', 80))",
        "tempfile.mktemp()", "Path('/tmp/data_files')", "np.load(f, allow_pickle=True)",
    ],
)  # fmt: skip
def test_the_search_finds_it(code: str) -> None:
    assert list(findings(ast.parse(code)))


@pytest.mark.parametrize(
    "code",
    [
        "torch.load(f, weights_only=True)",
        "AutoConfig.from_pretrained(p, trust_remote_code=False)",
        "run(['bash', script])",
    ],
)
def test_the_search_leaves_the_rest(code: str) -> None:
    assert not list(findings(ast.parse(code)))


def test_launch_scripts_evaluate_no_text() -> None:
    for script in sorted((ROOT / "launch").glob("*.sh")):
        lines = [line for line in script.read_text(encoding="utf-8").splitlines() if not line.lstrip().startswith("#")]
        assert not [line for line in lines if re.search(r"\beval\b|\bsource <\(|bash -c|sh -c", line)], script


def test_nothing_reports_to_anybody() -> None:
    """No telemetry: no client of one, and no address but those of the documentation."""
    words = re.compile(r"posthog|sentry_sdk|segment\.io|mixpanel|google-analytics|telemetry", re.IGNORECASE)
    assert [relative(path) for path in FILES if words.search(path.read_text(encoding="utf-8"))] == []
