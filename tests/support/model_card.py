"""What a reader of a model card does: parse its metadata, run its example, look for paths of the author's machine."""

import re
from pathlib import Path
from typing import Any

from huggingface_hub import ModelCard


def read_card(folder: Path) -> tuple[dict[str, Any], dict[str, float]]:
    """Return the metadata of README.md by huggingface_hub, and the numbers of its last evaluation."""
    card = ModelCard.load(folder / "README.md")
    numbers = re.findall(r"^\| `(eval_\S+)` \| \S+ \| (\S+) \|", card.text, re.MULTILINE)
    return card.data.to_dict(), {name: float(value) for name, value in numbers}


def sections(text: str) -> dict[str, list[str]]:
    """Return the paragraphs below each `## ` heading of a card."""
    parts = re.split(r"^## (.*)$", text, flags=re.MULTILINE)
    return {name: content.strip().split("\n\n") for name, content in zip(parts[1::2], parts[2::2], strict=True)}


def rows_of(table: str) -> list[list[str]]:
    """Return the cells of a table below its heading."""
    return [re.split(r"(?<!\\) \| ", line[2:-2]) for line in table.splitlines()[2:]]


def run_example(folder: Path, monkeypatch: Any) -> None:
    """Run the card's code in the model's folder."""
    (code,) = re.findall(r"```python\n(.*?)```", (folder / "README.md").read_text(), re.DOTALL)
    monkeypatch.chdir(folder)
    exec(compile(code, "README.md", "exec"), {})


def files_that_name(machine: Path, folder: Path) -> list[str]:
    """Return the files of a model's folder that hold the path of a folder of this machine."""
    return [file.name for file in folder.rglob("*") if file.is_file() and str(machine).encode() in file.read_bytes()]
