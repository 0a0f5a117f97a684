"""What the reference's file is of: its key, and the columns that are added to rows."""

from collections.abc import Callable, Mapping
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from datasets import Dataset

from pipeline.configuration.flags import parse
from step3_dpo.batches import pair_responses, response_mask, single_responses
from step3_dpo.config import DPOConfig
from step3_dpo.reference import key_of, with_columns

PAIRS = {"chosen_ids": [[5, 6, 7, 8], [5, 6]], "rejected_ids": [[5, 6, 9], [5, 7, 8, 9, 4]], "prompt_length": [2, 1]}
RESPONSES = {"ids": [[5, 6, 7, 8], [5, 6]], "prompt_length": [3, 1], "label": [True, False], "num_tokens": [4, 2]}


@pytest.mark.parametrize(("rows", "collate"), [(PAIRS, pair_responses), (RESPONSES, single_responses)])
def test_each_row_has_its_reference_and_the_tokens_of_its_responses(rows: dict[str, Any], collate: Callable[..., Any]):
    """Of each response, with the prompt that both sides of a pair have counted for none of them."""
    sides = 2 if "chosen_ids" in rows else 1
    table = -np.arange(1.0, 1.0 + 2 * sides).reshape(2, sides)
    added = with_columns(Dataset.from_dict(rows), table)
    for number, row in enumerate(added):
        batch = collate([[row]], pad_id=0)
        assert batch.reference.tolist() == table[number].tolist()
        assert row["num_trained"] == int(response_mask(batch).sum())


@pytest.fixture
def facts(tmp_path: Path) -> dict[str, Any]:
    """All that log-probabilities may depend on: flags, rows in files, a model's folder and further numbers."""
    model = tmp_path / "model"
    model.mkdir()
    (model / "config.json").write_text("{}")
    for name in ("model-1.safetensors", "model-2.safetensors"):
        (model / name).write_bytes(bytes(64))
    rows = {"train": [1, 2], "eval": [3]}
    return {"model": model, "rows": rows, "words": (), "more": {"limit": 96}, "device": "cpu", "folder": tmp_path}


def key(facts: Mapping[str, Any]) -> str:
    words = ["--model-name-or-path", str(facts["model"]), "--data-path", "a.jsonl", *facts["words"]]
    resolved = parse(DPOConfig, words, section="dpo")
    run = SimpleNamespace(resolved=resolved, world=SimpleNamespace(device=torch.device(facts["device"])))
    data = {}
    for name, values in facts["rows"].items():
        Dataset.from_dict({"x": values}).save_to_disk(facts["folder"] / f"{name}-{values}")
        data[name] = Dataset.load_from_disk(facts["folder"] / f"{name}-{values}")
    return key_of(run, resolved.config, data, **facts["more"])


def with_other_end(model: Path) -> None:
    (model / "model-2.safetensors").write_bytes(bytes(63) + b"x")


def with_other_first_file(model: Path) -> None:
    (model / "model-1.safetensors").write_bytes(b"x" + bytes(63))


def with_adapter(model: Path) -> None:
    (model / "adapter_config.json").write_text("{}")


CHANGES: dict[str, dict[str, Any]] = {
    "quantisation": {"words": ("--quantization", "nf4")},
    "dtype": {"words": ("--dtype", "bf16")},
    "training rows": {"rows": {"train": [1, 4], "eval": [3]}},
    "held-out rows": {"rows": {"train": [1, 2], "eval": [4]}},
    "a further number": {"more": {"limit": 95}},
    "a number that is not there": {"more": {}},
}


@pytest.mark.parametrize("name", CHANGES)
def test_the_key_names_all_that_log_probabilities_depend_on(facts: dict[str, Any], name: str) -> None:
    assert key(facts) == key(facts) != key(facts | CHANGES[name])


@pytest.mark.parametrize("change", [with_other_first_file, with_other_end, with_adapter])
def test_the_key_names_the_start_model(
    facts: dict[str, Any], change: Callable[[Path], None], monkeypatch: pytest.MonkeyPatch
) -> None:
    """By its configuration, and head and tail of each file of weights."""
    monkeypatch.setattr("pipeline.files.EDGE_BYTES", 8)
    before = key(facts)
    change(facts["model"])
    assert key(facts) != before


def test_the_key_does_not_name_what_changes_no_log_probability(facts: dict[str, Any]) -> None:
    assert key(facts) == key(facts | {"words": ("--learning-rate", "1e-3", "--beta", "0.3")})
