"""Each `train` command of a page is dry-run as it stands: on described GPUs, with tiny folders in place of hub names.

What other programs answer for is listed here, and the page of each says when it was run, or that it was not.
"""

import shlex
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from support.families import family_config
from support.in_process import look_in_process, undone_afterwards
from support.pages import blocks, commands_in
from support.source_tree import ROOT
from support.tiny_models import randomise
from support.tiny_run import make_folder, write_lines
from transformers import AutoModelForCausalLM, AutoTokenizer

from pipeline.launching.request import parse_request
from pipeline.preparation.stage_job import run_job
from rlhf import train
from rlhf.stages import SECTIONS, stage_of_step
from step1_sft.main import main as sft_main

PAGES = [*ROOT.glob("*.md"), *sorted((ROOT / "docs").rglob("*.md")), *sorted((ROOT / "benchmarks").rglob("*.md"))]
TARGET = ["--target", "8xH100-80GB"]  # of commands that name none
NEEDS_NO_TARGET = ("--target", "--show-data", "--hostfile")
# Models of commands by family; each gets a tiny folder of its hub id, in a folder that commands take for the hub.
MODELS = {
    "facebook/opt-1.3b": "opt", "facebook/opt-350m": "opt", "gpt2": "gpt2",
    "Qwen/Qwen2.5-0.5B": "qwen2", "Qwen/Qwen2.5-0.5B-Instruct": "qwen2", "Qwen/Qwen2.5-1.5B": "qwen2",
    "Qwen/Qwen2.5-7B": "qwen2", "Qwen/Qwen2.5-7B-Instruct": "qwen2",
    "Qwen/Qwen3-0.6B": "qwen3", "Qwen/Qwen3-8B": "qwen3",
    "HuggingFaceTB/SmolLM2-135M": "llama-2", "HuggingFaceTB/SmolLM2-135M-Instruct": "llama-2",
}  # fmt: skip
# Of two pairs one has the longer answer chosen: neither is left out to balance lengths.
ANSWERS = ("It is a number.", "No.")
PAIRS = [{"prompt": f"What is {n}?", "chosen": ANSWERS[n % 2], "rejected": ANSWERS[1 - n % 2]} for n in range(128)]
LABELS = [{"prompt": row["prompt"], "completion": row["chosen"], "label": n % 2 == 0} for n, row in enumerate(PAIRS)]
CHATS = [
    {"messages": [{"role": "user", "content": one["prompt"]}, {"role": "assistant", "content": one["chosen"]}]}
    for one in PAIRS
]
DATA: dict[str, list[dict[str, Any]]] = {
    "trl-lib/ultrafeedback_binarized": PAIRS, "HuggingFaceH4/ultrafeedback_binarized": PAIRS,
    "Dahoas/rm-static": PAIRS, "Dahoas/full-hh-rlhf": PAIRS, "Dahoas/synthetic-instruct-gptj-pairwise": PAIRS,
    "yitingxie/rlhf-reward-datasets": PAIRS, "HuggingFaceH4/ultrachat_200k": CHATS, "trl-lib/kto-mix-14k": LABELS,
}  # fmt: skip
FILES: dict[str, list[dict[str, Any]]] = {
    "questions.jsonl": [{"question": f"What is {n} + 30?", "answer": str(n + 30)} for n in range(48)],
    "rows.jsonl": [{"prompt": row["prompt"], "response": row["chosen"]} for row in PAIRS],
    "pairs.jsonl": PAIRS,
}
# Reads the setting of Qwen3's templates, as its presets give it.
TEMPLATE = (
    "{% for turn in messages %}{{ turn.role }}: {{ turn.content }}{{ eos_token }}{% endfor %}"
    "{% if add_generation_prompt %}assistant: {% endif %}{% if enable_thinking %}{% endif %}"
)
# DeepSpeed's tuner, which runs trials on the GPUs that are there. The words are parsed by another test.
NOT_DRY_RUN = {"--autotuning"}
# Programs that nothing here can run, by the first word of a line, and the page that says when they were run.
ELSEWHERE = {
    "sbatch": "docs/guides/slurm.md",
    "vllm": "docs/guides/chat_and_serve.md",
    "llama-cli": "docs/guides/chat_and_serve.md",
    "transformers": "docs/guides/chat_and_serve.md",
    "ollama": "docs/guides/chat_and_serve.md",
}
TITLES = {
    "sbatch": "SLURM", "vllm": "vLLM", "llama-cli": "llama.cpp", "transformers": "transformers serve",
    "ollama": "Ollama",
}  # fmt: skip


def train_commands() -> Iterator[Any]:
    """Return the commands that start stages, each once, with the page that has it first."""
    known = set()
    for page in PAGES:
        for _, content in blocks(page.read_text(encoding="utf-8"), "bash"):
            for words in commands_in(content):
                starts = words[:2] in (["rlhf", "train"], ["python", "train.py"]) or words[0] in (
                    "torchrun",
                    "deepspeed",
                )
                starts = starts or (words[0] == "bash" and words[1].startswith("launch/"))
                if starts and (line := shlex.join(words)) not in known and not NOT_DRY_RUN & {*words}:
                    known.add(line)
                    yield pytest.param(page, words, id=line[:70])


COMMANDS = [*train_commands()]


@pytest.fixture(scope="module")
def hub(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with a tiny model and rows for each name that commands have, as the hub has them."""
    folder = make_folder(tmp_path_factory.mktemp("hub"), num_train=8, num_test=4, num_documents=16)
    tokenizer = AutoTokenizer.from_pretrained(folder / "base")
    for name, family in MODELS.items():
        sizes = {"n_positions": 4096} if family == "gpt2" else {"max_position_embeddings": 4096}
        model = AutoModelForCausalLM.from_config(family_config(family, len(tokenizer), **sizes))
        randomise(model, 0)
        model.save_pretrained(folder / name)
        tokenizer.chat_template = TEMPLATE if family == "qwen3" else None
        tokenizer.save_pretrained(folder / name)
    for name, rows in DATA.items():
        (folder / name).mkdir(parents=True)
        write_lines(folder / name / "train.jsonl", rows)
    (folder / "launch").symlink_to(ROOT / "launch")
    return folder


def run(words: list[str]) -> int:
    """Run a command's dry run in this process; return its exit code."""
    more = [] if {*NEEDS_NO_TARGET} & {*words} else TARGET
    if words[0] in ("rlhf", "python"):
        return train.main([*words[2:], *more, "--dry-run"])
    if words[0] == "bash":  # launch/NAME.sh, launcher's flags, stage, its flags
        deployment = Path(words[1]).stem
        request = parse_request(deployment, [*words[2:], *more, "--dry-run"])
        return run_job(stage_of_step(request.step), request, None, sections=SECTIONS)
    at = words.index("step1_sft.main")
    return sft_main([*words[at + 1 :], *more, "--dry-run"])


def folders(hub: Path) -> set[Path]:
    """Return the folders under ``hub``; Python may keep the compiled code of a reward file beside it."""
    return {path for path in hub.rglob("*") if path.is_dir() and path.name != "__pycache__"}


@pytest.mark.slow
@pytest.mark.parametrize(("page", "words"), COMMANDS)
def test_a_command_of_a_page_is_planned(page: Path, words: list[str], hub: Path, monkeypatch, capsys) -> None:
    text = page.read_text(encoding="utf-8")
    for name, rows in FILES.items():
        write_lines(hub / name, rows)
    shown = [block for language in ("yaml", "text", "python") for block in blocks(text, language)]
    for name, content in shown:
        if name and "/" not in name and name not in FILES:  # of rows a page shows too few for a run
            (hub / name).write_text(content, encoding="utf-8")
    monkeypatch.chdir(hub)
    monkeypatch.setattr("pipeline.preparation.preflight.is_reachable", lambda: False)
    look_in_process(monkeypatch)
    before = folders(hub)
    with undone_afterwards():
        code = run(words)
    printed = capsys.readouterr()
    assert code == 0, printed.out[-1500:] + printed.err[-1500:]
    assert "not looked at" not in printed.out, "a name that no folder answers"
    assert folders(hub) == before, "it starts nothing"


def test_pages_say_when_other_programs_were_run() -> None:
    """Also a command of such a program on another page would be found here."""
    lines = {
        (page.relative_to(ROOT).as_posix(), line.split()[0])
        for page in PAGES
        for language in ("bash", "text")
        for _, content in blocks(page.read_text(encoding="utf-8"), language)
        for line in content.splitlines()
        if line.split()[:1] and line.split()[0] in ELSEWHERE
    }
    assert lines == {(page, program) for program, page in ELSEWHERE.items()}
    for program, name in ELSEWHERE.items():
        section = (ROOT / name).read_text(encoding="utf-8").partition("## What was run")[2].partition("\n## ")[0]
        title = TITLES[program]
        assert f"**{title}" in section, f"{name}: when {title} was run last, or that it was not"


def test_there_are_commands_of_each_kind() -> None:
    assert {"rlhf", "python", "torchrun", "deepspeed", "bash"} == {param.values[1][0] for param in COMMANDS}
