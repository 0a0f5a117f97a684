"""Every layout of columns becomes the record that was worked out by hand; bad rows are counted by kind."""

import gzip
import itertools
import json
import shlex

import pytest
from support.messages import naming
from support.row_options import read
from transformers.utils.chat_template_utils import render_jinja_template

from pipeline.data.counts import Counts, Origin
from pipeline.data.formats import read_records
from pipeline.data.selection import parse_column_map
from pipeline.data.sources import read_rows
from pipeline.data.turns import Message, is_transcript, parse_transcript, prompt_hash, turns_to_json
from pipeline.errors import InputError

GOOD = {"prompt": "fine?", "chosen": "yes", "rejected": "no", "messages": None}


def user(text: str) -> Message:
    return Message("user", text)


def assistant(text: str) -> Message:
    return Message("assistant", text)


def one(values: dict, **options):
    records, _ = read(values, **options)
    assert len(records) == 1
    return records[0]


TRANSCRIPT = "\n\nHuman: Hi \n\nAssistant: Hello.\n\nHuman: Why? \n\nAssistant:"
TURNS = (user("Hi"), assistant("Hello."), user("Why?"))


@pytest.mark.parametrize(
    ("values", "messages", "chosen", "rejected"),
    [
        ({"prompt": " q ", "chosen": " a", "rejected": "b "}, (user("q"),), "a", "b"),
        ({"prompt": TRANSCRIPT, "chosen": " a", "rejected": "b"}, TURNS, "a", "b"),
        ({"chosen": TRANSCRIPT + " a", "rejected": TRANSCRIPT + " b"}, TURNS, "a", "b"),
        (
            {
                "prompt": "ignored",
                "messages": [{"role": "system", "content": "s"}, {"role": "user", "content": "q"}],
                "chosen": "a",
                "rejected": "b",
            },
            (Message("system", "s"), user("q")),
            "a",
            "b",
        ),
        (
            {
                "conversations": [{"from": "human", "value": "q"}],
                "chosen": {"from": "gpt", "value": "a"},
                "rejected": {"from": "gpt", "value": "b"},
            },
            (user("q"),),
            "a",
            "b",
        ),
        (
            {
                "prompt": "q",
                "chosen": [{"role": "user", "content": "q"}, {"role": "assistant", "content": "a"}],
                "rejected": [{"role": "user", "content": "q"}, {"role": "assistant", "content": "b"}],
                "messages": [{"role": "user", "content": "q"}, {"role": "assistant", "content": "a"}],
            },
            (user("q"),),
            "a",
            "b",
        ),
        (
            {
                "messages": [{"role": "user", "content": "q"}, {"role": "assistant", "content": "a"}],
                "chosen": "a",
                "rejected": "b",
            },
            (user("q"),),
            "a",
            "b",
        ),
        ({"prompt": "q", "response": "a"}, (user("q"),), "a", None),
        ({"prompt": "q", "completion": "a"}, (user("q"),), "a", None),
        ({"prompt": "q", "output": "a", "text": "q a"}, (user("q"),), "a", None),
        ({"instruction": "do", "input": "this", "output": "a"}, (user("do\n\nthis"),), "a", None),
        ({"instruction": "do", "input": "", "response": "a"}, (user("do"),), "a", None),
        ({"instruction": "do", "input": None, "output": "a"}, (user("do"),), "a", None),
        (
            {"messages": [{"role": "user", "content": "q"}, {"role": "assistant", "content": "a"}], "prompt": "q"},
            (user("q"),),
            "a",
            None,
        ),
        ({"conversations": [{"from": "human", "value": "q"}, {"from": "gpt", "value": "a"}]}, (user("q"),), "a", None),
        ({"text": TRANSCRIPT + " a"}, TURNS, "a", None),
        ({"question": "q", "answer": " a"}, (user("q"),), "a", None),
        ({"prompt": TRANSCRIPT}, TURNS, None, None),
        ({"prompt": "q", "id": 7}, (user("q"),), None, None),
    ],
)
def test_formats(values, messages, chosen, rejected):
    record = one(values)
    assert (record.messages, record.chosen, record.rejected, record.text) == (messages, chosen, rejected, None)
    assert record.all_turns == (messages if chosen is None else (*messages, assistant(chosen)))
    assert record.origin == Origin("f", 1)


PARTS_TEMPLATE = (
    "{% for turn in messages %}<{{ turn.role }}>{% if turn.content is string %}{{ turn.content }}"
    "{% else %}{% for part in turn.content %}{{ part.text }}{% endfor %}{% endif %}{% endfor %}"
)


@pytest.mark.parametrize("kind", ["text", "input_text", "output_text"])
def test_content_in_parts_is_the_text_that_a_chat_template_makes_of_it(kind):
    """Today's exports, and rows of `datasets`, which fills the fields that a part lacks with None."""

    def turn(role: str, *texts: str) -> dict:
        return {"role": role, "content": [{"type": kind, "text": text, "image_url": None} for text in texts]}

    turns = [turn("system", "s"), turn("user", "Who", " is it?\n", "Say."), turn("assistant", "A ", "heron.")]
    rendered = render_jinja_template([turns], chat_template=PARTS_TEMPLATE)[0][0]
    record = one({"messages": turns})
    assert "".join(f"<{turn.role}>{turn.content}" for turn in record.all_turns) == rendered
    pair = one({"chosen": turns, "rejected": [*turns[:2], turn("assistant", "No idea.")]})
    assert (pair.messages, pair.chosen, pair.rejected) == (record.messages, "A heron.", "No idea.")
    assert one({"prompt": turns[:2], "response": "x"}).prompt_id == record.prompt_id


def test_plain_text_keeps_its_white_space():
    record = one({"text": "  a document\n"})
    assert record.text == "  a document\n"
    assert record.messages == () and record.chosen is None


def test_null_columns_of_a_mixed_table_do_not_decide_the_format():
    """datasets fills the columns that a row lacks with None; a prompt whose responses are null is a prompt alone."""
    record = one({"prompt": "q", "chosen": None, "rejected": None, "response": "a"})
    assert (record.messages, record.chosen) == ((user("q"),), "a")
    assert one({"prompt": "q", "chosen": None, "rejected": "b"}).chosen is None


@pytest.mark.parametrize(
    ("values", "unread"),
    [
        ({**GOOD, "margin": 1, "split": "test", "id": 7}, {"id"}),
        ({"prompt": "q", "response": "a", "label": True, "kind": "", "source": None}, {"kind"}),
        ({"prompt": "q", "response": "a", "label": 2}, {"label"}),
        ({"instruction": "q", "input": "", "output": "a", "system": "s"}, {"system"}),
        ({"text": "words", "prompt": "q"}, {"prompt"}),
    ],
)
def test_columns_that_are_not_read_are_named(values, unread):
    _, counts = read(values)
    assert counts.unread == {"f": unread}


def test_a_mapped_column_is_read():
    _, counts = read({"q": "q", "a": "a"}, column_map={"prompt": "q", "response": "a"})
    assert counts.unread == {}


def test_real_answers_labelled_false_are_not_chosen(real_data):
    path = real_data / "raw" / "llamafactory_kto_en_demo.first50.json"
    shipped = json.loads(path.read_text(encoding="utf-8"))
    records, counts = read(*shipped)
    good = [row["label"] for row in shipped]
    assert len(records) == len(shipped) and 0 < sum(good) < len(good) and counts.unread == {}
    assert [record.chosen is not None for record in records] == good


def test_margin_is_read_from_numbers_and_from_csv_text():
    pair = {"prompt": "q", "chosen": "a", "rejected": "b"}
    assert one(pair).margin is None
    assert one({**pair, "margin": 2}).margin == 2.0
    assert one({**pair, "margin": "0.5"}).margin == 0.5
    assert one({**pair, "margin": ""}).margin is None


def test_column_map_renames_and_leaves_sources_alone_that_need_no_map():
    column_map = {"prompt": "question", "response": "answer"}
    assert one({"question": "q", "answer": "a"}, column_map=column_map).chosen == "a"
    _, counts = read(*2 * [{"prompt": "q", "response": "a"}], column_map=column_map)
    assert counts.outcomes["kept"] == 4 and counts.lines() == [
        naming("2 kept ... 'answer' (column_map response=answer) ... response ... (first: f:1)"),
        naming("2 kept ... 'question' (column_map prompt=question) ... prompt ... (first: f:1)"),
    ]
    with pytest.raises(InputError, match=naming("f:1 ... 'question' ... 'qestion', 'answer' ... qestion?")):
        read({"qestion": "q", "answer": "a"}, column_map=column_map)


def test_unknown_columns_are_named_with_proposals():
    with pytest.raises(InputError) as error:
        read({"promt": "q", "respons": "a"})
    message = str(error.value)
    assert message == naming("'promt', 'respons' ... no known format")
    assert "prompt/chosen/rejected" in message
    assert message.endswith("; nearest: --column-map prompt=promt,response=respons")


def test_a_proposed_column_map_can_be_pasted():
    row = {"Prompt": "q", "the chosen": "a", "Rejected": "b", "margin ": 1}
    with pytest.raises(InputError) as error:
        read(row)
    (word,) = shlex.split(str(error.value).partition("nearest: --column-map ")[2])
    record = one(row, column_map=parse_column_map(word))
    assert (record.messages, record.chosen, record.rejected) == ((user("q"),), "a", "b")


@pytest.mark.parametrize(
    ("text", "hint"),
    [
        ("promt=prompt", "'promt' ... prompt?"),
        ("prompt=a,rejcted=Rejected", "'rejcted' ... rejected?"),
        ("x=y", "'x' ... answer, chosen, completion, conversations"),
    ],
)
def test_a_column_map_to_a_column_that_no_layout_has_is_refused(text, hint):
    with pytest.raises(InputError) as error:
        parse_column_map(text)
    assert str(error.value) == naming(f"--column-map {text} ... {hint}")


def test_the_first_example_of_a_kind_shows_what_was_found():
    """Kinds stay few whatever the rows hold."""
    odd = [{"messages": [{"role": role, "content": "x"}]} for role in ("usr", "bott")]
    _, counts = read(GOOD, *odd, {"prompt ": "q", "chosen": "a", "rejected": "b", "id": None})
    assert counts.lines() == [
        naming("2 dropped ... system, user or assistant ... (first: f:2, got 'usr')"),
        naming("1 dropped", "no prompt", "chosen", "(first: f:4, got 'prompt ', 'chosen', 'rejected')"),
    ]


def test_own_split_column():
    for value, expected in (("train", "train"), ("validation", "test"), ("odd", None), (3, None)):
        assert one({"prompt": "q", "split": value}).split == expected


@pytest.mark.parametrize(
    ("values", "kind"),
    [
        ({**GOOD, "prompt": "  "}, "empty prompt"),
        ({**GOOD, "prompt": None}, "prompt is null"),
        ({"chosen": "a", "rejected": "b"}, "no prompt ... chosen"),
        ({"text": None}, "text is null"),
        ({**GOOD, "prompt": 3}, "prompt ... text but int"),
        ({**GOOD, "chosen": " "}, "chosen is empty"),
        ({**GOOD, "rejected": ["x"]}, "rejected ... list of messages"),
        ({**GOOD, "chosen": "no"}, "chosen equals rejected"),
        ({**GOOD, "margin": "wide"}, "margin ... -1e+06 to 1e+06"),
        ({**GOOD, "margin": float("nan")}, "margin ... -1e+06 to 1e+06"),
        ({**GOOD, "margin": 1e308}, "margin ... -1e+06 to 1e+06"),
        ({**GOOD, "margin": "-1000001"}, "margin ... -1e+06 to 1e+06"),
        ({**GOOD, "prompt": TRANSCRIPT + " x"}, "prompt ... end in a user turn"),
        (
            {"chosen": TRANSCRIPT + " a", "rejected": "\n\nHuman: Other\n\nAssistant: b"},
            "chosen and rejected ... different prompts",
        ),
        ({"chosen": TRANSCRIPT, "rejected": TRANSCRIPT + " b"}, "chosen ... end in an assistant turn"),
        ({"prompt": "\n\nHuman: a\n\nHuman: b\n\nAssistant:"}, "turns ... alternate user, assistant"),
        ({"prompt": "\n\nHuman: a\n\nAssistant:\n\nHuman: b"}, "empty turn"),
        ({"messages": []}, "messages ... list of messages"),
        (
            {"messages": [{"role": "tool", "content": "x"}]},
            "messages ... system, user or assistant",
        ),
        ({"messages": [{"role": "user", "content": []}]}, "messages ... without text"),
        ({"messages": [{"role": "user", "content": [1]}]}, "messages ... 'int' ... text"),
        (
            {"messages": [{"role": "user", "content": [{"type": "text", "text": "a"}, {"type": "image_url"}]}]},
            "messages ... 'image_url' ... text",
        ),
        (
            {"messages": [{"role": "user", "content": [{"type": "text", "text": None}]}]},
            "messages ... 'text' ... text",
        ),
        (
            {"messages": [{"role": "user", "content": "q"}, {"role": "assistant", "content": ""}]},
            "last assistant turn is empty",
        ),
        ({"messages": [{"role": "assistant", "content": "x"}]}, "turns ... alternate user, assistant"),
        ({"text": " \n"}, "text is empty"),
        ({"odd": 1}, "columns fit no format"),
        ({**GOOD, "chosen": "\ud800"}, "text is no valid Unicode"),
        ({"text": "\udfff"}, "text is no valid Unicode"),
    ],
)
def test_bad_rows_are_counted_with_their_place(values, kind):
    records, counts = read(GOOD, values, values)
    assert len(records) == 1
    (line,) = counts.lines()
    assert line == naming(f"2 dropped: {kind} ... (first: f:2")


def test_nothing_left_is_an_error_that_says_why():
    with pytest.raises(InputError, match=naming("f ... no usable row ... 2 dropped ... empty prompt (first: f:1)")):
        read({"prompt": ""}, {"prompt": " "})


def test_transcripts_are_told_from_prompts_that_mention_humans():
    assert is_transcript("\n\nHuman: hi")
    assert is_transcript("Human: hi\n\nAssistant: there")
    assert not is_transcript("Human: hi")
    assert not is_transcript("What does '\n\nHuman: x\n\nAssistant: y' mean?")
    assert parse_transcript("\n\nHuman: a\n\nb\n\nAssistant: c") == (user("a\n\nb"), assistant("c"))


def test_prompt_id_is_a_content_hash():
    plain = one({"prompt": "caf\u00e9  au\nlait"}).prompt_id
    assert 0 <= plain < 2**63
    assert one({"prompt": " cafe\u0301 au lait "}).prompt_id == plain
    assert one({"prompt": "\n\nHuman: caf\u00e9 au lait\n\nAssistant:"}).prompt_id == plain
    assert one({"prompt": "caf\u00e9 au lait", "response": "x"}).prompt_id == plain
    assert one({"prompt": "cafe au lait"}).prompt_id != plain
    # Run state, splits and random numbers are keyed by it. From: `printf '[["user", "q"]]' | b2sum -l 64`, halved.
    assert prompt_hash((user("q"),)) == 7933804521237884034


def test_turns_survive_json():
    turns = (Message("system", "s"), user("日本\n"))
    assert tuple(Message(**turn) for turn in json.loads(turns_to_json(turns))) == turns


def test_real_preference_rows_agree_with_their_own_messages(real_data):
    """The sets carry their prompt twice: as text (plain or transcript) and as turns."""
    for file in sorted((real_data / "preference").glob("*.jsonl.gz")):
        for row in itertools.islice(read_rows(str(file)), 60):
            without = {name: value for name, value in row.values.items() if name != "messages"}
            from_turns, from_text = one(row.values), one(without)
            spoken = tuple(turn for turn in from_turns.messages if turn.role != "system")
            # Only the place is shown on failure: some of these rows are not fit to print.
            is_same = spoken == from_text.messages
            assert is_same, row.origin


def test_real_transcript_pairs_split_at_the_last_assistant_turn(real_data):
    path = real_data / "raw" / "hh_harmless_test.first50.jsonl.gz"
    records, counts = read(*(row.values for row in read_rows(str(path))))
    num_records = len(records)
    assert num_records + sum(counts[kind] for kind in counts) == 50
    assert num_records >= 45
    shipped = [json.loads(line)["chosen"] for line in gzip.decompress(path.read_bytes()).splitlines()]
    for record in records:
        source = shipped[record.origin.row - 1]
        is_last_turn = source.rpartition("\n\nAssistant:")[2].strip() == record.chosen
        num_questions = sum(turn.role == "user" for turn in record.messages)
        assert is_last_turn and source.count("\n\nHuman:") == num_questions, record.origin


@pytest.mark.parametrize(
    ("name", "column_map"),
    [
        ("gsm8k_train.first50.jsonl", None),
        ("gsm8k_train.first50.jsonl", {"prompt": "question", "response": "answer"}),
        ("gpteacher_roleplay.first50.json", None),
        ("llamafactory_alpaca_en_demo.first50.json", None),
        ("llamafactory_alpaca_zh_demo.first50.json", None),
        ("llamafactory_c4_demo.first50.jsonl", None),
        ("llamafactory_dpo_en_demo.first50.json", None),
        ("llamafactory_dpo_zh_demo.first50.json", None),
        ("llamafactory_kto_en_demo.first50.json", None),
        ("alpacaeval_alpaca-7b_gpt4_annotations.first50.json", {"prompt": "instruction", "response": "output_1"}),
    ],
)
def test_raw_layouts_are_read_as_shipped(real_data, name, column_map):
    rows = [row.values for row in read_rows(str(real_data / "raw" / name))]
    records, counts = read(*rows, column_map=column_map)
    assert len(records) >= 0.95 * len(rows), counts.lines()


@pytest.mark.parametrize("name", ["instruction_ja.first50.jsonl", "qa_feedback_dev_feedback.first20.json"])
def test_raw_layouts_that_are_not_ours_are_refused_by_name(real_data, name):
    with pytest.raises(InputError, match=f"{name}:1: columns .* fit no known format"):
        list(read_records(read_rows(str(real_data / "raw" / name)), Counts()))
