"""The documentation against the project: files, links, names, commands. And that every flag is read by some code."""

import ast
import re
import shlex
from collections.abc import Iterator
from dataclasses import fields
from pathlib import Path

import pytest
from support.pages import blocks, commands_in
from support.source_tree import PACKAGES, ROOT, source_files, tree_of
from support.worked_examples import copied_project, examples

from pipeline.configuration.flag_table import flag_table
from pipeline.configuration.flags import load_yaml, parse
from pipeline.configuration.rollout_size import RolloutSize
from rlhf import chat, compare, init, report, train, train_config
from rlhf.models import convert, export, merge
from rlhf.rewards import eval as evaluation
from rlhf.rewards import reward, sample
from rlhf.train_config import TrainConfig
from rlhf.train_plan import make_plan
from step1_sft.config import SFTConfig
from step2_reward.config import RewardConfig, RewardEvalConfig
from step3_ppo.config import PPOConfig
from website import pages as made

README = (ROOT / "README.md").read_text(encoding="utf-8")
PAGES = [
    *sorted(ROOT.glob("*.md")),
    *sorted((ROOT / "docs").rglob("*.md")),
    *sorted((ROOT / "benchmarks").rglob("*.md")),
]
STAGES = {"step1_sft": SFTConfig, "step2_reward": RewardConfig, "step3_ppo": PPOConfig}
NUMBERS = dict(zip("123", STAGES.values(), strict=True))
PROGRAMS = {"chat.py": chat.ChatConfig, "prompt_eval.py": compare.CompareConfig}
SUBCOMMANDS = {"train": "train.py", "chat": "chat.py", "compare": "prompt_eval.py"}
OTHER_COMMANDS = {
    "convert": convert.ConvertConfig, "eval": evaluation.EvalConfig, "export": export.ExportConfig,
    "merge": merge.MergeConfig, "report": report.ReportConfig, "reward": reward.RewardTrialConfig,
    "sample": sample.SampleConfig,
}  # fmt: skip
MOST_WORDS = {f"docs/guides/{page.name}": 300 for page in (ROOT / "docs" / "guides").glob("*.md")}
MOST_WORDS |= {"README.md": 900, "CONTRIBUTING.md": 800, "CHANGELOG.md": 300, "docs/guides/data_layouts.md": 600}
MOST_WORDS |= {"docs/why/speed.md": 600, "docs/why/quality.md": 600, "docs/why/reliability.md": 700}
# What a reader's own shell or another project answers for.
OTHERS = ("git", "cd", "source", "pip", "echo", "tensorboard")


def page_id(page: Path) -> str:
    return page.relative_to(ROOT).as_posix()


# --- the README, and the list of files ------------------------------------------------------------------------------


@pytest.mark.parametrize("page", MOST_WORDS)
def test_pages_are_short(page):
    """Count the words that are read: links without their targets, no commands and rules of tables."""
    text = re.sub(r"^```.*?^```$", "", (ROOT / page).read_text(encoding="utf-8"), flags=re.MULTILINE | re.DOTALL)
    assert len(re.sub(r"\]\([^)]*\)|[|#*`]|\B-+\B", " ", text).split()) <= MOST_WORDS[page]


def test_the_readme_names_the_programs_that_the_tests_may_use():
    """Continuous integration runs them with a PATH that holds these alone."""
    script = (ROOT / ".ci" / "named_programs").read_text(encoding="utf-8")
    (linked,) = re.findall(r'^programs="(.*)"$', script, re.MULTILINE)
    (named,) = re.findall(r"\bLinux with (.*), and Python", " ".join(README.split()))
    assert set(re.split(", | and ", named)) == {*linked.split(), "coreutils"}


def links(text: str) -> set[str]:
    return {target.partition("#")[0] for target in re.findall(r"\]\(([^)\s:]+)\)", text)} - {""}


def nav_pages(nav: object) -> Iterator[str]:
    """Pages that the navigation of mkdocs.yml names, below docs/."""
    if isinstance(nav, str):
        yield nav
    elif isinstance(nav, list | dict):
        for part in nav.values() if isinstance(nav, dict) else nav:
            yield from nav_pages(part)


def test_the_navigation_has_every_page_and_no_other():
    nav = list(nav_pages(load_yaml(str(ROOT / "mkdocs.yml"))["nav"]))
    written = {page.relative_to(ROOT / "docs").as_posix() for page in PAGES if page.is_relative_to(ROOT / "docs")}
    assert sorted(nav) == sorted(written | made.PAGES.keys())


def test_every_page_is_within_two_clicks_of_the_readme():
    first = {(ROOT / target).resolve() for target in links(README)}
    second = {
        (page.parent / target).resolve() for page in first & {*PAGES} for target in links(page.read_text("utf-8"))
    }
    assert [page_id(page) for page in PAGES if page not in first | second | {ROOT / "README.md"}] == []


def test_what_it_costs_is_what_the_page_of_presets_says():
    page = (ROOT / "benchmarks" / "reports" / "presets.md").read_text(encoding="utf-8")
    planned = [re.findall(r"([\d.]+); ([\d.]+) s", line) for line in page.splitlines()]
    rows = re.findall(r"^\| .* \|$", README.partition("## What it costs")[2].partition("## ")[0], re.MULTILINE)[1:]
    shown = [re.findall(r"([\d.]+) GiB, ([\d.]+) s", row) for row in rows]
    assert len(shown) == 4 and [row for row in shown if row not in planned] == []


# --- links and names ------------------------------------------------------------------------------------------------


def anchors(page: Path) -> set[str]:
    """The anchors of a page's headings, as GitHub makes them."""
    headings = re.findall(r"^#+ (.*)$", page.read_text(encoding="utf-8"), re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-") for heading in headings}


def is_made(page: Path) -> bool:
    """Whether the site's build makes the page."""
    return page.is_relative_to(ROOT / "docs") and page.relative_to(ROOT / "docs").as_posix() in made.PAGES


def broken_links(page: Path, text: str) -> list[str]:
    """Relative links of `text`, a page's, to files or headings that do not exist."""
    broken = []
    for target in re.findall(r"\]\(([^)\s]+)\)", text):
        if re.match(r"[a-z]+:", target):
            continue
        file, _, anchor = target.partition("#")
        place = (page.parent / file).resolve() if file else page
        if is_made(place) and not anchor:
            continue
        if not place.exists() or (anchor and anchor not in anchors(place)):
            broken.append(target)
    return broken


@pytest.mark.parametrize("page", PAGES, ids=page_id)
def test_links_lead_somewhere(page):
    assert broken_links(page, page.read_text(encoding="utf-8")) == []


def test_a_broken_link_is_found():
    text = "[a](nowhere.md) [b](SECURITY.md#no-such-heading) [c](#links) [d](https://example.org/x)"
    text += " [e](docs/reference/flags.md)"
    assert broken_links(ROOT / "README.md", text) == ["nowhere.md", "SECURITY.md#no-such-heading", "#links"]


def names_in(path: Path) -> set[str]:
    """Names at the top level of a Python file, and `Class.name` for what classes define."""
    found: set[str] = set()
    for node in tree_of(path).body:
        found |= defined(node)
        if isinstance(node, ast.ClassDef):
            found |= {f"{node.name}.{name}" for child in node.body for name in defined(child)}
    return found


def defined(node: ast.stmt) -> set[str]:
    if isinstance(node, ast.FunctionDef | ast.ClassDef):
        return {node.name}
    targets = node.targets if isinstance(node, ast.Assign) else [node.target] if isinstance(node, ast.AnnAssign) else []
    return {target.id for target in targets if isinstance(target, ast.Name)}


def unknown_names(text: str) -> list[str]:
    """References like `pipeline/engine/engine.py:step_together` to files or names that do not exist."""
    references = re.findall(r"`([\w./]+\.py):([\w.]+)`", text)
    missing = [f"{file}:{name}" for file, name in references if not (ROOT / file).is_file()]
    return missing + [f"{f}:{n}" for f, n in references if (ROOT / f).is_file() and n not in names_in(ROOT / f)]


@pytest.mark.parametrize("page", PAGES, ids=page_id)
def test_names_in_the_documentation_exist(page):
    assert unknown_names(page.read_text(encoding="utf-8")) == []


def test_an_unknown_name_is_found():
    text = "`rlhf/train.py:run` `rlhf/train.py:walk` `nowhere.py:run` `pipeline/engine/engine.py:TrainingEngine.step`"
    assert unknown_names(text) == ["nowhere.py:run", "rlhf/train.py:walk"]


@pytest.mark.parametrize("page", PAGES, ids=page_id)
def test_paths_in_the_documentation_exist(page):
    """Paths of the project in backticks: those that begin with one of its folders and have a suffix or end in /."""
    folders = "|".join(path.name for path in ROOT.iterdir() if path.is_dir() and path.name[0] not in "._")
    text = page.read_text(encoding="utf-8")
    paths = re.findall(rf"`((?:{folders})/[\w./-]*(?:\.(?:py|sh|md|yaml|json)|/))`", text)
    named = [path for path in paths if not path.startswith("output/") and "NAME" not in path]
    assert [path for path in named if not (ROOT / path).exists()] == []


MADE_UP = {"test_readme.py", "test_stale.py"}  # files that name pages which are not there


def test_pages_that_the_code_names_exist():
    """In messages, help, comments, tests, presets and workflows."""
    named = re.compile(r"(?<![\w./-])(?:docs|benchmarks|website)/[\w./-]*\.(?:md|py|yaml)\b")
    folders = [ROOT / name for name in (*PACKAGES, "demo", "tests", "benchmarks", "website", ".ci")]
    suffixes = {".py", ".yaml", ".sh", ".sbatch", ".j2", ""}
    files = [path for folder in folders for path in folder.rglob("*") if path.is_file() and path.suffix in suffixes]
    files += [*ROOT.glob("*.py"), *ROOT.glob("*.toml"), ROOT / "Makefile"]
    texts = {path: path.read_text("utf-8") for path in files}
    missing = {
        (page_id(path), name) for path, text in texts.items() for name in named.findall(text)
        if not (ROOT / name).exists() and not is_made(ROOT / name) and path.name not in MADE_UP
    }  # fmt: skip
    assert missing == set()


# --- commands -------------------------------------------------------------------------------------------------------


COMMANDS = [
    pytest.param(page, words, id=shlex.join(words)[:70])
    for page in PAGES
    for _, content in blocks(page.read_text(encoding="utf-8"), "bash")
    for words in commands_in(content)
]


def module_config(words: list[str]) -> tuple[type, list[str]]:
    """(configuration class, its words) of `-m step1_sft.main`, `--module step1_sft.main` or `step1_sft/main.py`."""
    at = next(n for n, word in enumerate(words) if word in ("-m", "--module") or word.endswith("main.py"))
    if (ROOT / words[at]).is_file():
        return STAGES[words[at].partition("/")[0]], words[at + 1 :]
    name, rest = words[at + 1], words[at + 2 :]
    if name == "step2_reward.eval":
        return RewardEvalConfig, rest
    package, _, module = name.partition(".")
    assert module == "main", name
    return STAGES[package], rest


def script_config(words: list[str]) -> tuple[type, list[str]]:
    """The same for `bash launch/....sh [launcher flags] STAGE ...`."""
    assert (ROOT / words[0]).is_file() and words[0].startswith("launch/"), words
    at = 1
    while words[at].startswith("--"):
        at += 1 if "=" in words[at] else 2
    return NUMBERS[words[at]], words[at + 1 :]


def check_command(words: list[str]) -> None:
    """Parse one command as the program would. Raises InputError, or AssertionError for what is no command of ours."""
    program, *rest = words
    if program == "make":
        targets = re.findall(r"^([\w-]+):", (ROOT / "Makefile").read_text(encoding="utf-8"), re.MULTILINE)
        assert set(rest) <= set(targets), rest
    elif program == "python" and rest[0] == "train.py":
        train.check_stages(make_plan(rest[1:], prog="python train.py"))
    elif program == "python" and rest[:2] == ["-m", "rlhf"]:
        check_command(rest[1:])
    elif program == "rlhf" and rest == ["--version"]:
        pass
    elif program == "rlhf" and rest[0] == "init":
        assert init.main(rest[1:]) == 0
    elif program == "rlhf" and rest[0] in OTHER_COMMANDS:
        parse(OTHER_COMMANDS[rest[0]], rest[1:], section="none")
    elif program == "rlhf":
        check_command(["python", SUBCOMMANDS[rest[0]], *rest[1:]])
    elif program == "python" and rest[0] in PROGRAMS:
        parse(PROGRAMS[rest[0]], rest[1:], section="none")
    elif program == "python" and rest[0].endswith(".py"):
        assert (ROOT / rest[0]).is_file(), rest
    elif program == "python" and rest[:2] == ["-m", "venv"]:
        pass
    elif program in ("python", "torchrun", "deepspeed", "bash"):
        config_class, flags = script_config(rest) if program == "bash" else module_config(rest)
        parse(config_class, flags, section="none")
    else:
        assert program in OTHERS, words


@pytest.mark.parametrize(("page", "words"), COMMANDS)
def test_commands_are_right(page, words, tmp_path, monkeypatch):
    """Commands run in a folder that holds the files which their page shows with a title, and the presets."""
    (tmp_path / "launch").symlink_to(ROOT / "launch")
    text = page.read_text(encoding="utf-8")
    for title, content in [block for language in ("yaml", "text", "python") for block in blocks(text, language)]:
        if title:
            (tmp_path / title).write_text(content, encoding="utf-8")
    monkeypatch.chdir(tmp_path)
    try:
        check_command(words)
    except SystemExit as end:
        assert end.code == 0, "only --help ends here"


@pytest.mark.parametrize(
    "line",
    [
        "python train.py --steps 1",
        "python train.py --ppo.kl-coeff 0.1",
        "python train.py --deployment-type multi_node --hostfile nowhere",
        "python chat.py --temprature 1",
        "bash launch/single_gpu.sh 4 --seed 1",
        "bash launch/single_gpu.sh 1 --kl-coef 1",
        "python -m step2_reward.eval --paths output/reward",
        "rlhf trian",
        "make coffee",
        "rm everything",
    ],
)
def test_a_wrong_command_is_found(line):
    with pytest.raises(Exception):  # noqa: B017 - InputError, AssertionError or KeyError, by command
        check_command(shlex.split(line))


def test_there_are_commands_for_every_program():
    programs = {" ".join(param.values[1][:2]) for param in COMMANDS}
    assert programs >= {"python train.py", "python chat.py", "python prompt_eval.py", "make demo", "make test"}


# --- flags that nothing reads ---------------------------------------------------------------------------------------

CONFIGS = (TrainConfig, *STAGES.values(), RewardEvalConfig, *PROGRAMS.values(), sample.SampleConfig)
# Accepted for the sake of launchers and old scripts, and read by nobody on purpose.
NOT_READ = {"local_rank", "deepspeed", "dropout"}
# Things of other kinds whose attributes are called like flags.
NO_CONFIGS = {"self", "torch", "dist", "world", "run.world", "deepspeed", "transformers", "datasets"}


def attributes_read() -> set[str]:
    """Names read as `something.name`, by `model_dump(include={"name"})`, or by name as the fields of a `RolloutSize`.

    A field's definition is no such access.
    """
    nodes = [node for path in source_files() for node in ast.walk(tree_of(path))]
    reads = [node for node in nodes if isinstance(node, ast.Attribute) and isinstance(node.ctx, ast.Load)]
    included = [node.value for node in nodes if isinstance(node, ast.keyword) and node.arg == "include"]
    names = {node.attr for node in reads if ast.unparse(node.value) not in NO_CONFIGS}
    names |= {field.name for field in fields(RolloutSize)}
    return names | {node.value for value in included for node in ast.walk(value) if isinstance(node, ast.Constant)}


def dead_flags(leaves: set[str]) -> list[str]:
    # train.py hands these to the launcher by getattr.
    return sorted(leaves - attributes_read() - set(train_config.LAUNCHER_FLAGS) - NOT_READ)


def test_every_flag_is_read():
    leaves = {flag.path[-1] for config_class in CONFIGS for flag in flag_table(config_class).values()}
    assert dead_flags(leaves) == []


def test_a_flag_that_nothing_reads_is_found():
    assert dead_flags({"kl_coef", "kl_koeffizient"}) == ["kl_koeffizient"]


def test_the_worked_examples_apply_one_after_the_other(tmp_path: Path) -> None:
    """What they then do is run by the slow tests of tests/training/test_worked_examples.py."""
    assert {"flag", "metric", "loss", "reward", "family"} <= {*examples()}, "those of the page"
    copied_project(tmp_path, *examples())
