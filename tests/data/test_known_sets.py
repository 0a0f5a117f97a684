"""Every known set becomes records worked out by hand from rows of the columns that its card states."""

from typing import Any

import datasets
import pytest
from support.messages import naming

from pipeline.data.counts import Counts
from pipeline.data.formats import read_records
from pipeline.data.known_sets import KNOWN_SETS, PARQUET_COPY
from pipeline.data.sources import read_rows
from pipeline.errors import InputError

HH = "\n\nHuman: hi\n\nAssistant:"


def turn(content: str, role: str = "user") -> dict[str, str]:
    return {"content": content, "role": role}


def message(name: str, parent: str | None, rank: int | None = None, *, tree: str = "r", lang: str = "en") -> dict:
    """A row of OpenAssistant with the text of its name; its threads alternate between prompter and assistant."""
    role = "assistant" if name.startswith("a") else "prompter"
    row = {"message_id": name, "parent_id": parent, "user_id": "u", "created_date": "2023-01-01", "text": name}
    row |= {"role": role, "lang": lang, "review_count": 3, "review_result": True, "deleted": False, "rank": rank}
    return row | {"synthetic": False, "model_name": None, "message_tree_id": tree, "labels": {"name": ["quality"]}}


def rated(prompt: str, response: str, helpfulness: int) -> dict:
    others = dict.fromkeys(("correctness", "coherence", "complexity", "verbosity"), 4 - helpfulness)
    return {"prompt": prompt, "response": response, "helpfulness": helpfulness, **others}


def passages(*texts: str) -> list[dict]:
    return [{"docid": "7#1", "text": text, "title": "Herons"} for text in texts]


def webgpt(first: float, second: float) -> dict:
    sides = {"answer_0": "zero [1]. [2, 3]", "answer_1": "one", "score_0": first, "score_1": second}
    return {"question": {"dataset": "eli5", "id": "x", "full_text": "q"}, "quotes_0": {"title": []}, **sides}


ULTRA = {
    "prompt": "q",
    "prompt_id": "5",
    "chosen": [turn("q"), turn("a", "assistant")],
    "rejected": [turn("q"), turn("b", "assistant")],
    "messages": [turn("q"), turn("a", "assistant")],
    "score_chosen": 8.0,
    "score_rejected": 5.0,
}
STEERED = "How?<extra_id_1>Assistant\nSo.\n<extra_id_1>User\nWhy?"
TREE = [
    message("p0", None),
    message("a00", "p0", 1),
    message("a01", "p0", 0),
    message("p010", "a01"),
    message("a0100", "p010"),
    message("a02", "p0", 2),
    message("p1", None, tree="s", lang="de"),
    message("a10", "p1", 0, tree="s"),
    message("p100", "lost", tree="s"),
]
MKQA = {
    "query": "who",
    "queries": {"en": "who", "ja": "誰", "zh_cn": "谁"},
    "answers": {"ja": [{"type": "entity", "entity": "Q1", "text": "鷺", "aliases": []}], "zh_cn": [{"text": "鹭"}]},
}
QG = {"answer": "鷺", "question": "何", "sentence": "鷺です。", "paragraph": "鳥。鷺です。", "paragraph_id": "1"}
SHP = {"post_id": "x", "history": "q", "human_ref_A": "a", "human_ref_B": "b", "score_A": 1, "score_ratio": 2.0}

# Set -> rows as shipped, and of each record: the contents of its prompt's turns, chosen, rejected.
LAYOUTS: dict[str, tuple[list[dict], list[tuple]]] = {
    "Dahoas/rm-static": (
        [{"prompt": HH, "response": " a", "chosen": " a", "rejected": " b"}],
        [(["hi"], "a", "b")],
    ),
    "Dahoas/full-hh-rlhf": ([{"prompt": HH, "response": " a", "chosen": " a", "rejected": " b"}], [(["hi"], "a", "b")]),
    "Dahoas/synthetic-instruct-gptj-pairwise": (
        [{"prompt": "q", "chosen": "a", "rejected": "b"}],
        [(["q"], "a", "b")],
    ),
    "yitingxie/rlhf-reward-datasets": (
        [{"prompt": "\n\nHuman: hi \n\n", "chosen": "Assistant: a", "rejected": "x Assistant: b"}],
        [(["hi"], "a", "b")],
    ),
    "openai/gsm8k": (
        [{"question": "6 x 7?", "answer": "It is 42. #### 42"}],
        [(["6 x 7?"], "It is 42. #### 42", None)],
    ),
    "openai/webgpt_comparisons": (
        [webgpt(-0.5, 0.5), webgpt(1.0, 0.5), webgpt(0.5, 0.5)],
        [(["q"], "one", "zero."), (["q"], "zero.", "one"), (["q"], None, None)],
    ),
    "stanfordnlp/SHP": ([{**SHP, "labels": 0}, {**SHP, "labels": 1}], [(["q"], "b", "a"), (["q"], "a", "b")]),
    "Anthropic/hh-rlhf": ([{"chosen": HH + " a", "rejected": HH + " b"}], [(["hi"], "a", "b")]),
    "HuggingFaceH4/ultrafeedback_binarized": ([ULTRA], [(["q"], "a", "b")]),
    "nvidia/HelpSteer2": (
        [rated("q", "a", 2), rated("q", "b", 4), rated(STEERED, "c", 3), rated("t", "d", 1), rated("t", "e", 1)],
        [(["q"], "b", "a"), (["How?", "So.", "Why?"], "c", None), (["t"], None, None)],
    ),
    "OpenAssistant/oasst1": (
        TREE,
        [(["p0"], "a01", "a02"), (["p0", "a01", "p010"], "a0100", None), (["p1"], "a10", None)],
    ),
    "allenai/tulu-3-sft-mixture": (
        [{"id": "x", "messages": [turn("s", "system"), turn("q"), turn("a", "assistant")], "source": "ai2/flan"}],
        [(["s", "q"], "a", None)],
    ),
    "allenai/llama-3.1-tulu-3-8b-preference-mixture": (
        [{**{name: ULTRA[name] for name in ("prompt", "chosen", "rejected")}, "id": "x", "source": "ai2/if"}],
        [(["q"], "a", "b")],
    ),
    "pvduy/sharegpt_alpaca_oa_vicuna_format": (
        [
            {"prompt": "USER: q ASSISTANT: a</s>USER: r\nASSISTANT:", "label": " b"},
            {"prompt": "S USER: q", "label": "b"},
        ],
        [(["q", "a", "r"], "b", None), (["S", "q"], "b", None)],
    ),
    "wangrui6/Zhihu-KOL": (
        [{"INSTRUCTION": "q", "RESPONSE": "a", "SOURCE": "Zhihu", "METADATA": "{}"}],
        [(["q"], "a", None)],
    ),
    "Cohere/miracl-zh-queries-22-12": (
        [
            {
                "query_id": "1",
                "query": "q",
                "positive_passages": passages("a", "x"),
                "negative_passages": passages("b"),
            },
            {"query_id": "2", "query": "r", "positive_passages": passages("a"), "negative_passages": []},
        ],
        [(["q"], "a", "b"), (["r"], "a", None)],
    ),
    "Hello-SimpleAI/HC3-Chinese": (
        [{"id": "0", "question": "q", "human_answers": ["a", "x"], "chatgpt_answers": ["b"], "source": "baike"}],
        [(["q"], "a", None)],
    ),
    "mkqa-Chinese": ([MKQA], [(["谁"], "鹭", None)]),
    "mkqa-Japanese": ([MKQA], [(["誰"], "鷺", None)]),
    "lmqg/qg_jaquad": ([QG], [(["何"], "鷺です。", None)]),
    "lmqg/qag_jaquad": (
        [
            {
                "answers": ["鷺"],
                "questions": ["何", "x"],
                "paragraph": "鳥。",
                "paragraph_id": "1",
                "questions_answers": "y",
            }
        ],
        [(["何"], "鳥。", None)],
    ),
}
LAYOUTS |= {
    name: LAYOUTS[twin]
    for name, twin in (
        ("OpenAssistant/oasst2", "OpenAssistant/oasst1"),
        ("Cohere/miracl-ja-queries-22-12", "Cohere/miracl-zh-queries-22-12"),
    )
}


def serve(monkeypatch, splits: dict[str, list[dict]]) -> list[Any]:
    """Let the hub serve these rows; the calls of `load_dataset` are returned."""
    calls = []

    def load(path, **options):
        calls.append((path, options))
        return {name: datasets.Dataset.from_list(rows) for name, rows in splits.items()}

    monkeypatch.setattr(datasets, "load_dataset", load)
    return calls


@pytest.mark.parametrize("name", KNOWN_SETS)
def test_rows_of_a_known_set_become_its_records(monkeypatch, name):
    """Every column of the card is either read or dropped knowingly: none is told of as not read."""
    shipped, expected = LAYOUTS[name]
    known = KNOWN_SETS[name]
    split_names = [split for split in (known.train_split, known.eval_split) if split]
    calls = serve(monkeypatch, dict.fromkeys(split_names, shipped))
    counts = Counts()
    records = list(read_records(read_rows(name), counts))
    found = [([turn.content for turn in r.messages], r.chosen, r.rejected) for r in records]
    assert found == expected * len(split_names)
    assert [record.split for record in records] == ["train"] * len(expected) + ["test"] * (
        len(expected) if known.eval_split else 0
    )
    assert counts.unread == {}
    assert calls == [(known.repository or name, {"revision": known.revision, "data_dir": known.folder})]


def test_records_of_several_rows_keep_order_places_and_counts(monkeypatch):
    """A record's place is that of its prompt; a message whose parent is lost is dropped by name."""
    serve(monkeypatch, {"train": TREE, "validation": TREE[:3]})
    counts = Counts()
    records = list(read_records(read_rows("OpenAssistant/oasst2"), counts))
    places = [(record.origin.file.rpartition("/")[2], record.origin.row) for record in records]
    assert places == [("oasst2[train]", 1), ("oasst2[train]", 4), ("oasst2[train]", 7), ("oasst2[validation]", 1)]
    assert counts.lines() == [naming("1 dropped ... without text (first: OpenAssistant/oasst2[train]:9)")]
    # The last prompt of train is the first of validation: they are two records.
    row = rated("q", "a", 2)
    serve(monkeypatch, {"train": [row], "validation": [row, rated("q", "b", 1)]})
    pairs = [(r.split, r.chosen, r.rejected) for r in read_records(read_rows("nvidia/HelpSteer2"), Counts())]
    assert pairs == [("train", "a", None), ("test", "a", "b")]


def test_only_the_declared_splits_of_a_known_set_are_read(monkeypatch):
    splits = ("train_sft", "test_sft", "train_prefs", "test_prefs", "train_gen", "test_gen")
    serve(monkeypatch, {name: [ULTRA] for name in splits})
    rows = list(read_rows("HuggingFaceH4/ultrafeedback_binarized"))
    assert [(row.origin.file.rpartition("[")[2], row.split) for row in rows] == [
        ("train_prefs]", "train"),
        ("test_prefs]", "test"),
    ]


def test_a_known_set_is_known_at_any_revision(monkeypatch):
    calls = serve(monkeypatch, {"train": LAYOUTS["lmqg/qg_jaquad"][0], "validation": LAYOUTS["lmqg/qg_jaquad"][0]})
    rows = list(read_rows("lmqg/qg_jaquad@refs/pr/2"))
    assert [row.values for row in rows] == [{"prompt": "何", "response": "鷺です。"}] * 2
    assert calls == [("lmqg/qg_jaquad", {"revision": "refs/pr/2", "data_dir": None})]


def test_a_set_that_changed_is_named(monkeypatch):
    serve(monkeypatch, {"train": [{"prompt": "p", "chosen": "c"}]})
    with pytest.raises(InputError, match=naming("openai/webgpt_comparisons[train]:1 ... columns ... prompt, chosen")):
        list(read_rows("openai/webgpt_comparisons"))
    with pytest.raises(InputError, match=naming("'stanfordnlp/SHP' ... 'validation' ... train ... known_sets.py")):
        list(read_rows("stanfordnlp/SHP"))


def test_the_parquet_copy_of_a_script_is_read_by_the_library_as_it_lies_there(tmp_path):
    """The hub's copy holds <configuration>/<split>/0000.parquet; parts of `all` in the other folders stay unread."""
    for folder, answer in (("all", "a"), ("baike", "b")):
        (tmp_path / folder / "train").mkdir(parents=True)
        row = {"question": "q", "human_answers": [answer], "chatgpt_answers": []}
        datasets.Dataset.from_list([row]).to_parquet(tmp_path / folder / "train/0000.parquet")
    known = KNOWN_SETS["Hello-SimpleAI/HC3-Chinese"]
    loaded = datasets.load_dataset(str(tmp_path), data_dir=known.folder, cache_dir=str(tmp_path / "cache"))
    assert {name: split["human_answers"] for name, split in loaded.items()} == {"train": [["a"]]}
    assert known.revision == PARQUET_COPY
