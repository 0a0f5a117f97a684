"""Hub data sets that are known by name, with converters of their rows to the columns that `formats.py` reads.

To add a set, add a line to KNOWN_SETS, and a converter if its columns are not ours. The hub's cards name the columns.
"""

import itertools
import re
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from pipeline.data.readers import Row

Values = dict[str, Any]
Convert = Callable[[Iterable[Row]], Iterator[Row]]

# The revision with the hub's own parquet copy of a repository that ships a loading script, which datasets no longer
# runs.
PARQUET_COPY = "refs/convert/parquet"
# An OpenAssistant message that its tree lacks: a conversation with a turn without text is dropped and counted.
MISSING = {"role": "assistant", "text": None, "parent_id": None}


@dataclass(frozen=True, slots=True)
class KnownSet:
    """A hub set that is known by name, whose rows are converted to our columns.

    convert: yields our rows from the set's, in their order; each has the origin of one of the rows that it is made
    from.
    eval_split: split to evaluate on; None: a share of train by hash.
    train_split: split to train on; splits but these two are not read.
    revision: hub revision to read.
    repository: hub id if it differs from the name.
    folder: folder of the repository that holds the data.
    """

    convert: Convert
    eval_split: str | None
    train_split: str = "train"
    revision: str | None = None
    repository: str | None = None
    folder: str | None = None


def each(convert: Callable[[Mapping[str, Any]], Values]) -> Convert:
    """Return the converter of a set whose rows are records by themselves; `convert` is a pure function of a row."""
    return lambda rows: (replace(row, values=convert(row.values)) for row in rows)


def only(*names: str) -> Convert:
    """Return the converter of a set whose columns of these names are ours; its other columns are dropped."""
    return each(lambda row: {name: row[name] for name in names if name in row})


def renamed(**columns: str) -> Convert:
    """Return the converter of a set whose columns only have other names: renamed(prompt="INSTRUCTION")."""
    return each(lambda row: {ours: row[theirs] for ours, theirs in columns.items()})


def after_assistant(row: Mapping[str, Any]) -> Values:
    """Convert yitingxie: the last 'Assistant:' belongs to the prompt, but the responses begin with it."""
    prompt = f"{row['prompt'].rstrip()}\n\nAssistant:"
    responses = {name: row[name].rpartition("Assistant:")[2] for name in ("chosen", "rejected")}
    return {"prompt": prompt, **responses}


def webgpt(row: Mapping[str, Any]) -> Values:
    """Convert webgpt: the answer with the higher score is chosen, citations like [1] removed; no pair for a tie."""
    answers = [(row[f"score_{side}"], _without_citations(row[f"answer_{side}"])) for side in (0, 1)]
    return _best_and_worst(row["question"]["full_text"], answers)


def shp(row: Mapping[str, Any]) -> Values:
    """Convert SHP: `labels` 1 means that comment A was preferred."""
    best, other = ("A", "B") if row["labels"] == 1 else ("B", "A")
    return {"prompt": row["history"], "chosen": row[f"human_ref_{best}"], "rejected": row[f"human_ref_{other}"]}


def helpsteer2(rows: Iterable[Row]) -> Iterator[Row]:
    """Convert HelpSteer2: the rows of a prompt follow each other, and the more helpful of its responses is chosen."""
    for (_, prompt), group in itertools.groupby(rows, lambda row: (row.split, row.values["prompt"])):
        first, *others = group
        answers = [(row.values["helpfulness"], row.values["response"]) for row in (first, *others)]
        turns = _marked_turns(f"<extra_id_1>User\n{prompt}", r"<extra_id_1>(User|Assistant)\n")
        yield replace(first, values=_best_and_worst(turns, answers))


def message_trees(rows: Iterable[Row]) -> Iterator[Row]:
    """Convert OpenAssistant: each prompter's message with its best and its worst ranked reply (rank 0 is the best).

    The prompt is the thread up to the message. The rows of a tree follow each other.
    """
    for _, tree in itertools.groupby(rows, lambda row: (row.split, row.values["message_tree_id"])):
        messages = {row.values["message_id"]: row for row in tree}
        replies = defaultdict(list)
        for row in messages.values():
            replies[row.values["parent_id"]].append((row.values["rank"], row.values["text"]))
        for name, row in messages.items():
            if row.values["role"] != "prompter":
                continue
            thread = [row.values]
            while (parent := thread[0]["parent_id"]) is not None:
                thread.insert(0, messages[parent].values if parent in messages else MISSING)
            turns = [{"role": turn["role"], "content": turn["text"]} for turn in thread]
            ranked = [(-rank, text) for rank, text in replies[name] if rank is not None]
            unranked = [(0, text) for _, text in replies[name][:1]]
            yield replace(row, values=_best_and_worst(turns, ranked or unranked))


def sharegpt_vicuna(row: Mapping[str, Any]) -> Values:
    """Convert pvduy: the prompt is a transcript of USER and ASSISTANT, the response is called label."""
    return {"prompt": _marked_turns(row["prompt"], r"(?:</s>)?\s*\b(USER|ASSISTANT):"), "response": row["label"]}


def miracl(row: Mapping[str, Any]) -> Values:
    """Convert MIRACL: the first passage that answers the query, and the first that does not, where there is one."""
    chosen, rejected = (_first(row[f"{kind}_passages"], "text") for kind in ("positive", "negative"))
    answers = {"response": chosen} if rejected is None else {"chosen": chosen, "rejected": rejected}
    return {"prompt": row["query"], **answers}


def mkqa(language: str) -> Convert:
    """Return the converter of MKQA to its questions in a language, each with its first answer."""
    return each(lambda row: {"prompt": row["queries"][language], "response": _first(row["answers"][language], "text")})


def hc3(row: Mapping[str, Any]) -> Values:
    """Convert HC3: the first answer of a human; ChatGPT's are not used."""
    return {"prompt": row["question"], "response": _first(row["human_answers"])}


def qag_jaquad(row: Mapping[str, Any]) -> Values:
    """Convert qag_jaquad: a paragraph, and the first of the questions that it answers."""
    return {"prompt": _first(row["questions"]), "response": row["paragraph"]}


def _best_and_worst(prompt: Any, answers: Sequence[tuple[float, str]]) -> Values:
    """Return the columns of a prompt with scored answers: the best and the worst are its pair, unless they tie."""
    ordered = sorted(answers, key=lambda answer: -answer[0])
    if len(ordered) == 1:
        return {"prompt": prompt, "response": ordered[0][1]}
    if not ordered or ordered[0][0] == ordered[-1][0]:
        return {"prompt": prompt}
    return {"prompt": prompt, "chosen": ordered[0][1], "rejected": ordered[-1][1]}


def _marked_turns(text: str, marker: str) -> list[Values]:
    """Return the turns of a transcript; `marker` is a pattern that begins a turn, with its role as group 1."""
    before, *parts = re.split(marker, text)
    turns = [("system", before), *zip(parts[::2], parts[1::2], strict=True)]
    return [{"role": role.lower(), "content": content} for role, content in turns if content.strip()]


def _first(values: Sequence[Any], key: str | None = None) -> Any:
    """Return the first value, or its `key`; None of no values."""
    return next((value if key is None else value[key] for value in values), None)


def _without_citations(text: str) -> str:
    return re.sub(r" ?\[\d+(?:, ?\d+)*\]", "", text)


PAIRS = only("prompt", "chosen", "rejected")  # columns as shipped, also whole transcripts in chosen and rejected
KNOWN_SETS: dict[str, KnownSet] = {
    "Dahoas/rm-static": KnownSet(PAIRS, "test"),
    "Dahoas/full-hh-rlhf": KnownSet(PAIRS, "test"),
    "Dahoas/synthetic-instruct-gptj-pairwise": KnownSet(PAIRS, None),
    "yitingxie/rlhf-reward-datasets": KnownSet(each(after_assistant), "test"),
    # The other configuration, `socratic`, has the same questions.
    "openai/gsm8k": KnownSet(only("question", "answer"), "test", folder="main"),
    "openai/webgpt_comparisons": KnownSet(each(webgpt), None, revision=PARQUET_COPY),
    "stanfordnlp/SHP": KnownSet(each(shp), "validation"),
    "Anthropic/hh-rlhf": KnownSet(PAIRS, "test"),
    # Its train_sft and train_gen repeat the prompts of train_prefs.
    "HuggingFaceH4/ultrafeedback_binarized": KnownSet(PAIRS, "test_prefs", "train_prefs"),
    "nvidia/HelpSteer2": KnownSet(helpsteer2, "validation"),
    "OpenAssistant/oasst1": KnownSet(message_trees, "validation"),
    "OpenAssistant/oasst2": KnownSet(message_trees, "validation"),
    "allenai/tulu-3-sft-mixture": KnownSet(only("messages"), None),
    "allenai/llama-3.1-tulu-3-8b-preference-mixture": KnownSet(PAIRS, None),
    "pvduy/sharegpt_alpaca_oa_vicuna_format": KnownSet(each(sharegpt_vicuna), "test"),
    "wangrui6/Zhihu-KOL": KnownSet(renamed(prompt="INSTRUCTION", response="RESPONSE"), None),
    "Cohere/miracl-zh-queries-22-12": KnownSet(each(miracl), "dev"),
    "Cohere/miracl-ja-queries-22-12": KnownSet(each(miracl), "dev"),
    # The other folders have parts of all.
    "Hello-SimpleAI/HC3-Chinese": KnownSet(each(hc3), None, revision=PARQUET_COPY, folder="all"),
    "mkqa-Chinese": KnownSet(mkqa("zh_cn"), None, revision=PARQUET_COPY, repository="apple/mkqa"),
    "mkqa-Japanese": KnownSet(mkqa("ja"), None, revision=PARQUET_COPY, repository="apple/mkqa"),
    "lmqg/qg_jaquad": KnownSet(renamed(prompt="question", response="sentence"), "validation", revision=PARQUET_COPY),
    "lmqg/qag_jaquad": KnownSet(each(qag_jaquad), "validation", revision=PARQUET_COPY),
}
