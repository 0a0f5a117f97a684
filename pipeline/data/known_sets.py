"""Hub data sets that are known by name, with converters of their columns to prompt/chosen/rejected.

To add a set, write a line in KNOWN_SETS, and a converter if its columns are not ours.
"""

import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

Values = dict[str, Any]


@dataclass(frozen=True, slots=True)
class KnownSet:
    """A hub set that is known by name; `convert` is a pure function of a row to prompt/chosen/rejected.

    `eval_split` is the split to evaluate on (None: a share of train by hash); `revision` is the hub revision to read.
    """

    convert: Callable[[Mapping[str, Any]], Values]
    eval_split: str | None
    revision: str | None = None


def as_shipped(row: Mapping[str, Any]) -> Values:
    """Keep prompt/chosen/rejected (or whole transcripts in chosen/rejected) as they are; drop other columns."""
    return {name: row[name] for name in ("prompt", "chosen", "rejected") if name in row}


def after_assistant(row: Mapping[str, Any]) -> Values:
    """Convert yitingxie: the last 'Assistant:' belongs to the prompt, but the responses begin with it."""
    prompt = f"{row['prompt'].rstrip()}\n\nAssistant:"
    responses = {name: row[name].rpartition("Assistant:")[2] for name in ("chosen", "rejected")}
    return {"prompt": prompt, **responses}


def webgpt(row: Mapping[str, Any]) -> Values:
    """Convert webgpt: the answer with the higher score is chosen, citations like [1] are cut; a tie gives no pair."""
    prompt = row["question"]["full_text"]
    if row["score_0"] == row["score_1"]:
        return {"prompt": prompt, "chosen": None, "rejected": None}
    best = 0 if row["score_0"] > row["score_1"] else 1
    return {
        "prompt": prompt,
        "chosen": _without_citations(row[f"answer_{best}"]),
        "rejected": _without_citations(row[f"answer_{1 - best}"]),
    }


def shp(row: Mapping[str, Any]) -> Values:
    """Convert SHP: `labels` 1 says that comment A was preferred."""
    best, other = ("A", "B") if row["labels"] == 1 else ("B", "A")
    return {"prompt": row["history"], "chosen": row[f"human_ref_{best}"], "rejected": row[f"human_ref_{other}"]}


def _without_citations(text: str) -> str:
    return re.sub(r" ?\[\d+(?:, ?\d+)*\]", "", text)


KNOWN_SETS: dict[str, KnownSet] = {
    "Dahoas/rm-static": KnownSet(as_shipped, "test"),
    "Dahoas/full-hh-rlhf": KnownSet(as_shipped, "test"),
    "Dahoas/synthetic-instruct-gptj-pairwise": KnownSet(as_shipped, None),
    "yitingxie/rlhf-reward-datasets": KnownSet(after_assistant, "test"),
    # The repository ships a loading script, which datasets no longer runs; the hub's own parquet copy is read.
    "openai/webgpt_comparisons": KnownSet(webgpt, None, revision="refs/convert/parquet"),
    "stanfordnlp/SHP": KnownSet(shp, "validation"),
    "Anthropic/hh-rlhf": KnownSet(as_shipped, "test"),
}
