"""A hub cache without a network: models and a data set under published names, as the hub's client leaves them."""

import json
import shutil
from collections.abc import Iterable, Iterator
from pathlib import Path
from random import Random
from typing import Any

from benchmarks.speed.random_models import text_of

COMMIT = "0" * 40
TEMPLATE = "\n\nHuman: \n\nAssistant: "
MARGIN = 3  # tokens: the end of a turn, and words that are cut another way behind a mark


def hub_variables(hub: Path) -> dict[str, str]:
    """The environment in which commands read and fill the caches below `hub` and no other."""
    return {"HF_HUB_CACHE": str(hub), "HF_DATASETS_CACHE": str(hub / "datasets"), "XDG_CACHE_HOME": str(hub / "cache")}


def publish_model(hub: Path, name: str, folder: Path) -> None:
    """Let the hub id `name` be the model in `folder`, of which no copy is made."""
    model = hub / f"models--{name.replace('/', '--')}"
    (model / "refs").mkdir(parents=True)
    (model / "refs/main").write_text(COMMIT, encoding="utf-8")
    (model / "snapshots").mkdir()
    (model / "snapshots" / COMMIT).symlink_to(folder)


def publish_rows(hub: Path, name: str, splits: dict[str, Iterable[dict[str, Any]]]) -> None:
    """Let the hub id `name` be the data set of these rows, as datasets keeps what it has fetched."""
    import datasets

    datasets.disable_progress_bars()

    raw = hub / "raw"
    raw.mkdir(parents=True)
    for split, rows in splits.items():
        text = "".join(json.dumps(row) + "\n" for row in rows)
        (raw / f"{split}.jsonl").write_text(text, encoding="utf-8")
    files = {split: str(raw / f"{split}.jsonl") for split in splits}
    builder = datasets.load_dataset_builder("json", data_files=files, cache_dir=str(raw / "built"))
    builder.download_and_prepare()
    short = name.rpartition("/")[2]
    folder = hub / "datasets" / name.replace("/", "___") / "default/0.0.0" / COMMIT
    shutil.copytree(builder.cache_dir, folder)
    for split in splits:
        (folder / f"json-{split}.arrow").rename(folder / f"{short}-{split}.arrow")
    info = json.loads((folder / "dataset_info.json").read_text(encoding="utf-8"))
    info |= {"dataset_name": short, "config_name": "default"}
    for split in info["splits"].values():
        split["dataset_name"] = short
    (folder / "dataset_info.json").write_text(json.dumps(info), encoding="utf-8")
    shutil.rmtree(raw)


def cut(tokenizer: Any, text: str, tokens: int) -> str:
    """The longest beginning of whole words that has at most so many tokens."""
    ends = tokenizer(text, add_special_tokens=False, return_offsets_mapping=True)["offset_mapping"]
    return text if len(ends) <= tokens else text[: ends[tokens][0]].rpartition(" ")[0]


def full_rows(tokenizer: Any, section: str, count: int, *, tokens: int, seed: int) -> Iterator[dict[str, str]]:
    """Pairs whose row in a stage is as long as it may be, `tokens`, and not longer: a longer one may be dropped.

    Of SFT the response is longer and is cut there; of PPO the prompt has `tokens`.
    """
    random, marks = Random(seed), len(tokenizer(TEMPLATE)["input_ids"]) + MARGIN
    for number in range(count):
        words = 2 * tokens if section == "sft" else tokens // 8
        row = {name: text_of(random, words) for name in ("chosen", "rejected")}
        prompt = f"Number {number}. {text_of(random, 9 if section == 'sft' else 2 * tokens)}"
        if section != "sft":
            longest = max(len(tokenizer(text)["input_ids"]) for text in row.values()) if section == "reward" else 0
            prompt = cut(tokenizer, prompt, tokens - marks - longest)
        yield {"prompt": prompt} | row
