"""`rlhf sample --output` never writes over what the command reads: its data, its models."""

import json
from pathlib import Path

import pytest
from support.messages import naming
from support.scripted_model import tiny_config

from rlhf.rewards.sample import main

ROW = json.dumps({"prompt": "one"}) + "\n"


@pytest.mark.parametrize("more", [[], ["--overwrite"]], ids=["", "overwrite"])
@pytest.mark.parametrize(
    ("data", "output", "over"),
    [
        ("q.jsonl", "q.jsonl", "q.jsonl (--data)"),
        ("q.jsonl", "./rows/../q.jsonl", "q.jsonl (--data)"),
        ("q.jsonl", "link.jsonl", "q.jsonl (--data)"),
        ("rows", "rows/a.jsonl", "rows/a.jsonl (--data)"),
        ("b.jsonl.settings.json", "b.jsonl", "b.jsonl.settings.json (--data)"),
        ("q.jsonl", "model/config.json", "model/config.json (--model)"),
        ("q.jsonl", "judge/config.json", "judge/config.json (--reward-model)"),
    ],
)
def test_what_the_command_reads_stays_as_it_is(tmp_path, monkeypatch, capsys, data, output, over, more):
    monkeypatch.chdir(tmp_path)
    Path("rows").mkdir()
    for name in ("q.jsonl", "rows/a.jsonl", "b.jsonl.settings.json"):
        Path(name).write_text(ROW)
    Path("link.jsonl").symlink_to("q.jsonl")
    for name, kind in (("model", "LlamaForCausalLM"), ("judge", "LlamaForSequenceClassification")):
        config = tiny_config()
        config.architectures, config.id2label = [kind], {0: "score"}
        config.save_pretrained(name)
        (Path(name) / "model.safetensors").touch()
    before = {path: path.read_bytes() for path in Path().rglob("*") if path.is_file()}
    assert main(["model", "--data", data, "--reward-model", "judge", "--output", output, *more]) == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert line == naming(f"error: --output ... {over} ... another folder")
    assert {path: path.read_bytes() for path in Path().rglob("*") if path.is_file()} == before
