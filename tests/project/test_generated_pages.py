"""What the pages that are made from the code have, and that the flags and metrics exist which pages name."""

import ast
import re
from collections.abc import Iterator
from functools import cache

import pytest
from support.source_tree import ROOT, tree_of

from pipeline import errors
from pipeline.configuration.flag_table import flag_table
from pipeline.configuration.origins import Kind
from pipeline.launching import request
from pipeline.training.metrics import SUPERVISED
from rlhf.main import FOLDERS, SUBCOMMANDS
from step1_sft.metrics import METRICS as SFT
from step2_reward.metrics import METRICS as REWARD
from step3_dpo.metrics import METRICS as DPO
from step3_ppo.metrics import METRICS as PPO
from step3_ppo.metrics import of_rewards
from website import errors as errors_page
from website import flags, pages
from website.fetched import fetched

CONFIGS = [*flags.STAGES.values(), *flags.COMMANDS.values()]
METRICS = {**SFT, **REWARD, **PPO, **of_rewards(["NAME"])}
OF_PAIRS = [name for name in DPO if name not in SUPERVISED]  # some have the names of stage 2's


MADE = {f"docs/{path}": page for path, page in pages.PAGES.items()}
WRITTEN = {path.relative_to(ROOT).as_posix() for path in (ROOT / "docs").rglob("*.md")} | {"README.md"}
# Pages that name other programs' flags in place of ours, and flags of pip, vLLM, llama.cpp and others.
FOREIGN_PAGES = ("docs/coming_from/trl.md", "docs/coming_from/openrlhf_verl.md", "docs/coming_from/deepspeed_chat.md",
           "docs/reference/flags.md")  # fmt: skip
FOREIGN = {
    "no-deps", "wheel-dir", "upgrade", "index-url", "version", "model-path", "outfile", "logdir",
    "enable-lora", "lora-modules", "max-lora-rank", "FLAG", "nproc_per_node", "module", "nodes", "autotuning",
    "gpus-per-node", "partition", "account", "time", "serve",
}  # fmt: skip


@cache
def text_of(page: str) -> str:
    """The text of README or of a page of the site, those that are made with it too."""
    return MADE[page]() if page in MADE else (ROOT / page).read_text(encoding="utf-8")


def test_every_flag_of_every_command_is_on_the_page_once() -> None:
    sections = re.split(r"^## ", text_of("docs/reference/flags.md"), flags=re.MULTILINE)
    rows = {part.partition("\n")[0]: re.findall(r"^\| `--([\w-]+)` \|", part, re.MULTILINE) for part in sections}
    shared = rows["All four stages"]
    for title, config in (flags.STAGES | flags.COMMANDS).items():
        known = rows[title] + (shared if title in flags.STAGES else [])
        assert sorted(known) == sorted(flag.shown[2:] for flag in flag_table(config).values()), title
    assert len(shared) > 50


@pytest.mark.parametrize("command", sorted(SUBCOMMANDS.keys() - {"init"}))  # which hands its words on
def test_the_flags_of_every_command_are_on_the_page(command: str) -> None:
    modules = {config.__module__.removesuffix("_config") for config in CONFIGS}
    assert f"rlhf.{FOLDERS.get(command, '')}{command}" in modules


def test_every_metric_of_a_stage_is_on_the_page_once() -> None:
    named = re.findall(r"^\| `([\w/]+)` \|", text_of("docs/reference/metrics.md"), re.MULTILINE)
    assert sorted(named) == sorted([*METRICS, *OF_PAIRS]) and len(named) > 70


# --- flags and metrics that pages name --------------------------------------------------------------------------------


def unknown_flags(text: str) -> list[str]:
    """Flags, with or without a section, that no command or launch script has; all have `--help` and `--help-all`."""
    tables = [flag_table(config) for config in CONFIGS]
    of_scripts = {name.lstrip("-").replace("-", "_") for names in request.FLAGS for name in names.split()}
    known = {"help", "help_all", "config", "preset", *of_scripts} | {
        name for table in tables for flag in table.values() for name in (flag.name, *flag.aliases)
    }
    named = re.findall(r"(?<![\w-])--(?:sft\.|reward\.|ppo\.|dpo\.)?([a-zA-Z][\w-]*)", text)
    return [name for name in dict.fromkeys(named) if name.replace("-", "_") not in known and name not in FOREIGN]


def unknown_metrics(text: str) -> list[str]:
    """Names in backticks that look like a metric's, and are none."""
    named = re.findall(
        r"`((?:eval_)?(?:objective|policy|value|completions|groups|advantages|loss)/\w+|eval_\w+)`", text
    )
    return [name for name in named if not {name, name.removeprefix("eval_")} & {*METRICS, *DPO}]


def test_each_kind_of_origin_is_on_the_page_from_the_strongest() -> None:
    text = text_of("docs/reference/which_value.md")
    printed = re.findall(r"^\| .* \| `(.+)` \|$", text, re.MULTILINE)
    beginnings = (
        "command line",
        "run",
        "launch/presets/",
        "ds.json",
        "in place of",
        "chosen for",
        "--",
        "method",
        "default",
    )
    assert len(printed) == len(beginnings) == len(Kind)
    assert all(text.startswith(start) for text, start in zip(printed, beginnings, strict=True))


@pytest.mark.parametrize("page", sorted((WRITTEN | MADE.keys()) - {*FOREIGN_PAGES}))
def test_flags_and_metrics_that_a_page_names_exist(page: str) -> None:
    assert unknown_flags(text_of(page)) == []
    assert unknown_metrics(text_of(page)) == []


def test_a_flag_and_a_metric_that_do_not_exist_are_found() -> None:
    text = "`--ppo.kl-coef`, `--kl-coeff 2` and `--num-gpus`; `eval_objective/scores`, `policy/clip_frac`, `eval_lost`"
    assert unknown_flags(text) == ["kl-coeff"]
    assert unknown_metrics(text) == ["policy/clip_frac", "eval_lost"]


# --- errors by message ------------------------------------------------------------------------------------------------


def raised(file: str, words: str) -> Iterator[int]:
    """The exit codes of the errors that a file raises with these words, where a message is made at its `raise`."""
    for node in ast.walk(tree_of(ROOT / file)):
        if isinstance(node, ast.Raise) and isinstance(node.exc, ast.Call):
            texts = [part.value for part in ast.walk(node.exc) if isinstance(part, ast.Constant)]
            error = getattr(errors, ast.unparse(node.exc.func).split(".")[-1], None)
            if error and any(isinstance(text, str) and words in text for text in texts):
                yield error.code


def test_every_message_is_in_the_code() -> None:
    messages = errors_page.read_messages()
    assert errors_page.missing(messages) == []
    assert sum(map(len, messages.values())) >= 30
    codes = {value for name, value in vars(errors).items() if name.startswith("EXIT_")}
    assert codes - {errors.EXIT_INTERRUPTED} == messages.keys(), "each code has lines"


def test_messages_stand_under_the_code_that_they_end_with() -> None:
    messages = errors_page.read_messages()
    found = {(line["words"], code) for lines in messages.values() for line in lines
             for code in raised(line["file"], line["words"])}  # fmt: skip
    listed = {(line["words"], code) for code, lines in messages.items() for line in lines}
    assert len(found) > 20 and found - listed == set()


def test_the_form_of_a_message_has_its_words() -> None:
    lines = [line for lines in errors_page.read_messages().values() for line in lines if "shown" in line]
    assert len(lines) > 5
    assert [line["shown"] for line in lines if line["words"].strip(" :;,(") not in line["shown"]] == []


def test_words_that_the_code_does_not_say_are_found() -> None:
    entry = {"file": "pipeline/errors.py", "words": "Exit codes of a run"}  # of its docstring alone
    assert errors_page.missing({2: [entry]}) == ["pipeline/errors.py: Exit codes of a run"]


def test_what_a_page_of_the_site_fetches_is_found():
    """The site is read without a network: its build refuses a page with one of these (website/hooks.py)."""
    foreign = ["https://cdn.example/a.js", "//cdn.example/b.css", "http://cdn.example/c.png"]
    page = f"""<link rel="canonical" href="https://here.example/"><link rel="stylesheet" href="assets/own.css">
        <script src="{foreign[0]}"></script><link rel="stylesheet" href="{foreign[1]}"><img alt="" src="{foreign[2]}">
        <a href="https://elsewhere.example/">a link</a><script>var here = "https://elsewhere.example/"</script>"""
    assert fetched(page) == foreign
    assert fetched('<a href="https://elsewhere.example/">a link</a><script src="own.js"></script>') == []
