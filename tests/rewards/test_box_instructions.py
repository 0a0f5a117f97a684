"""Instructions that a program can check: each by texts that follow it and texts that do not, worked out by hand."""

import pytest
from support.messages import naming
from support.reward_functions import FORMS

from pipeline.errors import InputError
from pipeline.rewards.box.instructions import CHECKS, instructions
from pipeline.rewards.box.table import BOX

JSON = '{"a": [1, 2]}'
# name -> [(settings, texts that follow it, texts that do not)]
CASES = {
    "number_of_words": [
        ({"at_least": 2, "at_most": 3}, ["one two", " one\ntwo  three "], ["one", "one two three four", ""]),
        ({"at_least": 2}, ["one two", "a " * 99], ["one"]),
    ],
    "number_of_sentences": [
        (
            {"at_least": 2, "at_most": 2},
            ["A b. C d!", "Pi is 3.14. Yes?", "One\nTwo", "你好。再见。"],
            ["A b.", "A. B. C.", ""],
        ),
    ],
    "number_of_paragraphs": [
        ({"at_least": 2, "at_most": 2}, ["a\nb\n\nc", "a\n \n\nb\n\n"], ["a\nb", "a\n\nb\n\nc"]),
    ],
    "number_of_bullets": [
        (
            {"at_least": 2, "at_most": 2},
            ["* a\n* b", "See:\n- a\n  - b"],
            ["* a", "*a*\n**b**", "a - b\nc * d", "- a\n" * 3],
        ),
    ],
    "all_capitals": [({}, ["A B, 4!"], ["A b", "4", ""])],
    "all_lower_case": [({}, ["a b, 4!"], ["A b", "4", ""])],
    "title": [({}, ["<<A song>>\nLa", "x <<y>>"], ["<A>", "<< >>", "<<a\nb>>", "A"])],
    "json_output": [
        (
            {},
            [JSON, f"```json\n{JSON}\n```", f"```\n{JSON}```\n", "3"],
            [f"Here: {JSON}", "{'a': 1}", "", "[" * 100_000],
        ),
    ],
    "keywords": [({"words": ["sun", "new moon"]}, ["The Sun, a new moon"], ["sunny new moon", "sun"])],
    "forbidden_words": [({"words": ["sun", "c++"]}, ["sunny", ""], ["The SUN.", "in C++, too"])],
    "keyword_frequency": [
        ({"word": "sun", "at_least": 2, "at_most": 2}, ["Sun, sun, sunny"], ["sun", "sun sun sun"]),
    ],
    "end_phrase": [
        (
            {"phrase": "That is all."},
            ["x THAT IS ALL.", 'x. That is all." \n', "x “That is all.”", "x ‘That is all.’ ", "x 'That is all.'"],
            ["That is all. No.", ""],
        ),
    ],
}


@FORMS
@pytest.mark.parametrize("name", CHECKS)
def test_an_instruction_is_followed_or_not(name, form):
    for settings, followed, others in CASES[name]:
        texts = [form(text) for text in followed + others]
        expected = [1.0] * len(followed) + [0.0] * len(others)
        assert BOX[name](texts, **settings) == expected
        rows = [[{"name": name, **settings}]] * len(texts)
        assert instructions(texts, instructions=rows) == expected


@FORMS
def test_a_row_has_the_share_of_its_instructions(form):
    """A setting that is null, as in the rows of a Parquet file, is as if it were not there."""
    rows = [
        [{"name": "number_of_words", "at_most": 2}, {"name": "all_capitals"}, {"name": "title", "at_most": None}],
        [{"name": "all_capitals"}],
        [],
        None,
    ]
    texts = [form("ONE TWO"), form("one"), form("one"), form("one")]
    assert instructions(texts, instructions=rows) == [pytest.approx(2 / 3), 0.0, None, None]
    assert instructions(texts, column="rules", strict=True, rules=rows) == [0.0, 0.0, None, None]
    assert instructions([form("ONE")], strict=True, instructions=[rows[0][:2]]) == [1.0]


@pytest.mark.parametrize(
    ("instruction", "told"),
    [
        ({"name": "all_capital"}, 'instructions: {"name": "all_capital"} ... number_of_words'),
        ({"name": "all_capital"}, "all_capitals?"),
        ("title", 'instructions: "title" ... {"name": ...}'),
        ({"name": "title", "words": ["a"]}, "'words' ... (text: str) -> bool"),
        ({"name": "keywords", "words": 3}, "not iterable ... settings"),
    ],
)
def test_an_instruction_that_is_unknown_is_told(instruction, told):
    with pytest.raises(InputError) as raised:
        instructions(["a"], instructions=[[instruction]])
    assert str(raised.value) == naming(told)
