"""Revisions of data sets and models, read without a network from a cache as the hub's client and datasets leave it."""

import json
import shutil
from pathlib import Path

import datasets
import pytest
import torch
from huggingface_hub import ModelCard
from support.in_process import undone_afterwards
from support.messages import naming
from support.tiny_run import make_folder, save_base
from transformers import AutoTokenizer

from pipeline.data.sources import is_local, parse_path, read_rows
from pipeline.errors import EnvironmentFault, InputError
from pipeline.hub import commits_read, split_revision
from pipeline.models.loading import load_causal_lm
from pipeline.models.paths import check_model_path
from pipeline.models.tokenizers import load_tokenizer, sentencepiece_file
from step1_sft.main import main

OLD_TEMPLATE = "{% for m in messages %}{{ m.content }}</s>{% endfor %}"
MAIN, OLD, ROWS = "a" * 40, "b" * 40, "c" * 40
PIECES = b"a SentencePiece model, which nothing here reads"


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A hub cache with two commits of the model org/tiny, and datasets' cache with one of the data set org/prefs."""
    folder = tmp_path_factory.mktemp("hub")
    make_folder(folder)
    model = folder / "hub/models--org--tiny"
    shutil.copytree(folder / "base", model / "snapshots" / MAIN)
    tokenizer = AutoTokenizer.from_pretrained(folder / "base")
    tokenizer.chat_template = OLD_TEMPLATE
    save_base(model / "snapshots" / OLD, tokenizer, seed=3)
    (model / "snapshots" / OLD / "tokenizer.model").write_bytes(PIECES)
    (model / "refs").mkdir()
    (model / "refs/main").write_text(MAIN)
    (model / "refs/v1").write_text(OLD)
    builder = datasets.load_dataset_builder(
        "json", data_files={"train": str(folder / "train.jsonl")}, cache_dir=str(folder / "built")
    )
    builder.download_and_prepare()
    rows = folder / "datasets/org___prefs/default/0.0.0" / ROWS
    shutil.copytree(builder.cache_dir, rows)
    next(rows.glob("*.arrow")).rename(rows / "prefs-train.arrow")
    info = json.loads((rows / "dataset_info.json").read_text())
    info |= {"builder_name": "json", "dataset_name": "prefs", "config_name": "default"}
    info["splits"]["train"]["dataset_name"] = "prefs"
    (rows / "dataset_info.json").write_text(json.dumps(info))
    return folder


@pytest.fixture
def offline(made: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_CACHE", str(made / "hub"))
    monkeypatch.setattr("datasets.config.HF_HUB_OFFLINE", True)
    monkeypatch.setattr("datasets.config.HF_DATASETS_CACHE", made / "datasets")
    commits_read.clear()
    return made


def test_a_revision_stands_behind_a_hub_id_of_data_and_models_alike(tmp_path, monkeypatch):
    assert split_revision("org/name@refs/convert/parquet") == ("org/name", "refs/convert/parquet")
    assert split_revision("gpt2@v1") == ("gpt2", "v1")
    assert parse_path("org/name@v1:0.5") == ("org/name@v1", 0.5)
    assert not is_local("org/name@refs/pr/1")
    check_model_path("org/name@refs/pr/1")
    monkeypatch.chdir(tmp_path)
    (tmp_path / "runs@home").mkdir()
    for path in ("org/name", "org/name@", "./org/name@v1", "/data/a@b", "runs@home", "~/a@b", "a/b/c@v1"):
        assert split_revision(path) == (path, None)
    (tmp_path / "data").mkdir()
    for path in ("data/set@v1", "rows@2.jsonl"):
        assert is_local(path)
        with pytest.raises(InputError, match="no such file or folder"):
            list(read_rows(path))


def test_a_model_and_its_tokenizer_are_read_at_their_revision(offline):
    weights = {}
    for path, commit in (("org/tiny", MAIN), ("org/tiny@v1", OLD), (f"org/tiny@{OLD}", OLD), ("org/tiny@main", MAIN)):
        model = load_causal_lm(path, dtype=torch.float32)
        weights[path] = model.get_input_embeddings().weight
        assert commits_read[path] == commit
        assert load_tokenizer(path).chat_template == (OLD_TEMPLATE if commit == OLD else None)
    assert torch.equal(weights["org/tiny@v1"], weights[f"org/tiny@{OLD}"])
    assert torch.equal(weights["org/tiny"], weights["org/tiny@main"])
    assert not torch.equal(weights["org/tiny"], weights["org/tiny@v1"])
    with pytest.raises(EnvironmentFault, match=r"hf download org/tiny --revision v2`"):
        load_tokenizer("org/tiny@v2")


def test_a_sentencepiece_model_is_found_at_its_revision(offline):
    """Some of transformers' classes of tokenizers read none, and so do not name it."""
    assert Path(sentencepiece_file("org/tiny", "v1") or "").read_bytes() == PIECES
    assert sentencepiece_file("org/tiny", None) is None


def test_rows_of_another_commit_are_not_taken_for_those_that_were_asked_for(offline):
    """Without a network datasets reads what was fetched last, whatever revision is named."""
    for path in ("org/prefs", f"org/prefs@{ROWS}", f"org/prefs@{ROWS[:8]}"):
        assert len(list(read_rows(path))) == 64 and commits_read[path] == ROWS
    with pytest.raises(EnvironmentFault, match=naming(f"'org/prefs@v1' ... only commit {ROWS}")):
        list(read_rows("org/prefs@v1"))


def test_the_commits_of_a_run_are_in_its_documents_and_its_adapter(offline, tmp_path):
    """Of data and model; the adapter names the commit of its base, which is read again where the adapter is used."""
    flags = {
        "model_name_or_path": "org/tiny@v1", "data_path": f"org/prefs@{ROWS}:0.9", "data_split": "none",
        "data_output_path": tmp_path / "cache", "max_seq_len": 96, "max_steps": 1, "per_device_train_batch_size": 8,
        "dtype": "fp32", "lora_dim": 2, "save_adapter_only": "true", "output_dir": tmp_path / "out",
    }  # fmt: skip
    with undone_afterwards():
        main([str(word) for name, value in flags.items() for word in (f"--{name}", value)])
    output = tmp_path / "out"
    assert (output / "tokenizer.model").read_bytes() == PIECES
    settings = json.loads((output / "training_config.json").read_text())
    assert settings["commits"] == {"org/tiny@v1": OLD, f"org/prefs@{ROWS}": ROWS}
    card = (output / "README.md").read_text()
    assert f"| model | `org/tiny@v1` | commit `{OLD}` |" in card
    assert f"| `--data-path` | `org/prefs@{ROWS}:0.9` | commit `{ROWS}` |" in card
    metadata = ModelCard(card).data.to_dict()
    assert (metadata["base_model"], metadata["datasets"]) == ("org/tiny", ["org/prefs"])
    adapter = json.loads((output / "adapter_config.json").read_text())
    assert (adapter["base_model_name_or_path"], adapter["revision"]) == ("org/tiny", OLD)
    commits_read.clear()
    load_causal_lm(str(output), dtype=torch.float32)
    assert commits_read == {f"org/tiny@{OLD}": OLD}


def test_the_flag_of_other_tools_is_answered_with_the_suffix(capsys):
    with undone_afterwards():
        assert main(["--model-name-or-path", "org/tiny", "--revision", "v1"]) == 2
    assert "--revision" in (said := capsys.readouterr().err) and "org/name@revision" in said
