"""The model card's metadata of sources and start models that are on a hub, with and without weights."""

from pathlib import Path
from types import SimpleNamespace
from typing import Any

from huggingface_hub import ModelCard

from pipeline.checkpoints.model_card import model_documents
from step1_sft.config import SFTConfig
from step1_sft.stage import STAGE


def test_metadata_name_hub_ids_without_weights_and_no_files(tmp_path: Path) -> None:
    (tmp_path / "rows.jsonl").write_text("")
    sources = ["Dahoas/rm-static:0.3", "org/other", f"{tmp_path}/rows.jsonl:0.5", "mine.jsonl:0.5", "mkqa-Japanese@v1"]
    config = SFTConfig.model_validate({"model": {"model_name_or_path": "org/base"}, "data": {"data_path": sources}})
    run: Any = SimpleNamespace(resolved=SimpleNamespace(config=config), stage=STAGE, folder=tmp_path)
    documents = model_documents(run, model=config.model, kind="A model", step=1)
    metadata = ModelCard(documents["README.md"]).data.to_dict()
    assert (
        metadata["datasets"] == ["Dahoas/rm-static", "org/other", "apple/mkqa"] and metadata["base_model"] == "org/base"
    )
    assert str(tmp_path) not in "".join(documents.values()) and "rows.jsonl:0.5" in documents["README.md"]
