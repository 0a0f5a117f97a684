"""Prompts of a comparison, its statistics by hand, and its Markdown."""

import json
import math
import re
from dataclasses import replace

import pytest
from markdown_it import MarkdownIt
from rich.console import Console
from support.messages import naming

from pipeline.errors import InputError
from pipeline.inference.answer_rows import Answer
from pipeline.inference.bootstrap import length_controlled
from pipeline.inference.comparison import (
    Contestant,
    by_judge,
    compare,
    figures,
    markdown,
    print_comparison,
    summarise,
    to_json,
)
from pipeline.inference.intervals import mean_interval, wilson
from pipeline.inference.prompt_lists import bundled_prompts, read_prompts, shown_prompt
from rlhf.compare import CompareConfig, estimate, write_files

# ---- prompts ----


FIRST_WORDS = {"English": "Explain to a ten-year-old why the sky", "Chinese": "请用小学生", "Japanese": "なぜ冬は"}


@pytest.mark.parametrize(("language", "count"), [("English", 108), ("Chinese", 32), ("Japanese", 32)])
def test_bundled_prompts_are_different_short_questions(language, count):
    """Their lengths in UTF-8 are those that fit models of few positions, whose tokens may be bytes."""
    texts = [shown_prompt(turns) for turns in bundled_prompts(language)]
    assert len(texts) == len({"".join(filter(str.isalnum, text)).lower() for text in texts}) == count
    assert texts[0].startswith(FIRST_WORDS[language])
    assert all(len(text) > 5 and len(text.encode()) <= 102 and text == text.strip() for text in texts)


@pytest.mark.parametrize(
    ("seconds", "models", "lines"),
    [
        ((1.0, 5.0), 2, []),  # 12 s in all
        ((1.0, 10.5), 2, []),  # 23 s in all, of which 3 have passed: 20 remain
        ((1.0, 10.6), 2, ["note: about 1 minute for 2 models"]),
        ((10.0, 140.0), 3, ["note: about 8 minutes for 3 models"]),  # 450 s
    ],
)
def test_the_estimate_counts_loading_and_answers_of_all_models(seconds, models, lines):
    assert estimate(*seconds, models, done_s=2.0) == lines


def test_prompt_files(tmp_path):
    lines = tmp_path / "a.txt"
    lines.write_text("\ufeffone\r\n\r\n two\u2028lines \n")
    assert [shown_prompt(turns) for turns in read_prompts(str(lines))] == ["one", "two\u2028lines"]
    rows = tmp_path / "a.jsonl"
    turns = [{"role": "system", "content": "s"}, {"role": "user", "content": "u"}]
    values = ["plain", "\n\nHuman: hi\n\nAssistant: yes\n\nHuman: and?\n\nAssistant:", turns, "half \ud800"]
    rows.write_text("".join(json.dumps({"prompt": value}) + "\n" for value in values))
    assert [[turn.content for turn in turns] for turns in read_prompts(str(rows))] == [
        ["plain"],
        ["hi", "yes", "and?"],
        ["s", "u"],
        ["half ?"],
    ]


@pytest.mark.parametrize(
    ("row", "message"),
    [
        ({"question": "x"}, "a.jsonl:1 ... `prompt` ... question"),
        ({"prompt": 3}, "a.jsonl:1 ... prompt ... list of messages"),
        ({"prompt": ""}, "a.jsonl:1: empty prompt"),
        ({"prompt": "\n\nHuman: a\n\nAssistant: b"}, "a.jsonl:1 ... ends with an answer"),
    ],
)
def test_bad_prompt_rows_are_named(row, message, tmp_path):
    file = tmp_path / "a.jsonl"
    file.write_text(json.dumps(row))
    with pytest.raises(InputError) as caught:
        read_prompts(str(file))
    assert str(caught.value) == naming(message)


# ---- statistics, by hand ----


def test_wilson_by_hand():
    # 4 of 8, z = 2: centre (0.5 + 4/16) / (1 + 4/8) = 0.5; half = 2 sqrt(0.25/8 + 4/256) / 1.5 = 0.288675.
    found = wilson(0.5, 8, z=2.0)
    assert (found.low, found.high) == pytest.approx((0.5 - 0.288675, 0.5 + 0.288675), abs=1e-6)
    # 10 of 10: centre (1 + 0.2) / 1.4, half = 2 sqrt(4/400) / 1.4: from 1 / 1.4 to 1.
    found = wilson(1.0, 10, z=2.0)
    assert (found.low, found.high) == pytest.approx((1 / 1.4, 1.0), abs=1e-12)


def test_wins_are_averaged_within_a_prompt_first():
    # Prompt 1: (1, 2) meets (2, 0): 2>1, 2=2, 0<1, 0<2 -> 1 win, 1 tie, 2 losses: (1 + 0.5) / 4 = 0.375.
    # Prompt 2: (0, 0) meets (5, 5): 4 wins: 1. Rate 0.6875 over n = 2. Differences: 1 - 1.5 = -0.5 and 5: mean 2.25.
    found = compare([[1, 2], [0, 0]], [[2, 0], [5, 5]])
    assert (found.wins, found.ties, found.losses, found.num_prompts) == (5, 1, 2, 2)
    assert found.win_rate == wilson(0.6875, 2)
    assert found.difference is not None and found.difference.value == 2.25
    # Standard deviation 5.5 / sqrt(2), so the error of the mean of two is 2.75.
    assert found.difference.high == pytest.approx(2.25 + 1.959964 * 2.75, abs=1e-5)


def test_one_prompt_has_no_interval_of_the_difference():
    assert mean_interval([1.0]) is None
    assert compare([[0.0]], [[1.0]]).difference is None


def answer(text: str, tokens: int, reason: str = "end", reward: float | None = None) -> Answer:
    return Answer(text, (5,) * tokens, reason, reward=reward)


def test_summaries():
    rows = ((answer("a", 2, reward=1.0),), (answer("b", 5, "limit", reward=3.0),))
    better = tuple((answer(row.text, 1, reward=row.reward + 1),) for (row,) in rows)
    first, second = summarise([Contestant("A", "a", rows), Contestant("B", "b", better)])
    assert (first.mean_tokens, first.finished_share, first.mean_score) == (3.5, 0.5, 2.0)
    assert first.against is None and second.against is not None
    assert (second.against.wins, second.against.win_rate.value, second.mean_score) == (2, 1.0, 3.0)
    assert math.isclose(second.against.win_rate.low, 2 / (2 + 1.959963984540054**2))


def test_prompts_with_an_answer_without_a_score_are_left_out():
    """The second prompt lacks a score of A, the third one of B's two; the first and the fourth remain."""
    both = [((0.0, 0.0), (1.0, 1.0)), ((None, 0.0), (1.0, 1.0)), ((0.0, 0.0), (None, 1.0)), ((5.0, 5.0), (1.0, 1.0))]
    sides = [tuple(tuple(answer("x", 1, reward=one) for one in pair[side]) for pair in both) for side in (0, 1)]
    first, second = summarise([Contestant(label, label, rows) for label, rows in zip("AB", sides, strict=True)])
    against = second.against
    assert (against.num_prompts, against.wins, against.losses, against.difference.value) == (2, 4, 4, -1.5)
    assert (first.mean_score, second.mean_score) == (5 / 3, 1.0)


def length_decides() -> list[Contestant]:
    """B's answers are scored by their length alone: 30 are longer than A's and win, 10 are shorter and lose."""
    lengths = [*range(11, 41), *range(1, 11)]
    baseline = tuple((answer("a", 10 if n > 10 else 11, reward=0.0),) for n in lengths)
    other = tuple((answer("b", n, reward=1.0 if n > 10 else -1.0),) for n in lengths)
    return [Contestant("A", "a", baseline), Contestant("B", "b", other)]


def test_the_win_rate_at_equal_length_is_beside_the_plain_one():
    contestants = length_decides()
    against = summarise(contestants)[1].against
    wins = [1.0] * 30 + [0.0] * 10
    longer = [*range(1, 31), *range(-10, 0)]  # B's tokens minus A's
    assert against.win_rate.value == 0.75 and against.length_controlled == length_controlled(wins, longer)
    content = markdown(["q"] * 40, contestants, "none")
    equal_length = against.length_controlled
    assert "| win rate | LC win rate | score difference |" in content
    cell = f"{equal_length.value:.2f} [{equal_length.low:.2f}, {equal_length.high:.2f}]"
    assert re.search(rf"\| B \|.*\| 0\.75 \[.*\] \| {re.escape(cell)} \|", content)


@pytest.mark.parametrize("width", [120, 80])
def test_intervals_are_below_their_values_where_the_table_is_wide(width, capsys):
    contestants = length_decides()
    print_comparison(Console(width=width, highlight=False), ["q"] * 40, contestants)
    lines = capsys.readouterr().out.splitlines()
    assert max(map(len, lines[lines.index("A = a") : -6])) <= width
    row = next(number for number, line in enumerate(lines) if line.startswith(" B   "))
    assert ("[" in lines[row]) is (width == 120)
    assert lines[row + (width == 80)].count("[") == 3


def test_a_fence_is_longer_than_the_backticks_in_the_text():
    content = markdown(["a ```` b"], [Contestant("A", "a", ((answer("\x1b[0m", 1),),))], "none")
    assert "\n\n`````text\na ```` b\n`````\n\n**A** (1 tokens)\n\n```text\n" in content
    assert "\\x1b[0m" in content and "\x1b" not in content


def test_no_path_and_no_setting_is_markup(tmp_path):
    """An escape and two kinds of backticks, which would end the code, stand in front of HTML, a link and a heading."""
    odd = "a\x1b`b``<img src=x>[c](http://d)**e**|\n# f"
    contestants = [Contestant(label, f"{odd}{label}", ((answer("x", 1),),)) for label in "AB"]
    write_files(tmp_path / "prompt_eval", CompareConfig(prompts=odd, reward_model=[odd]), ["q"], contestants)
    tokens = MarkdownIt().enable("table").parse((tmp_path / "prompt_eval.md").read_text())
    inline = [child for token in tokens for child in token.children or ()]
    assert {token.type for token in inline} <= {"text", "softbreak", "code_inline", "strong_open", "strong_close"}
    headings = [tokens[at + 1].content for at, token in enumerate(tokens) if token.type == "heading_open"]
    assert headings == ["Comparison", "Prompt 1"]
    codes = [token.content for token in inline if token.type == "code_inline"]
    shown = "a\\x1b'b''<img src=x>[c](http://d)**e**\\| # f"
    assert [code for code in codes if "img" in code] == [f"{shown}A", f"{shown}B", shown, shown]


# ---- an LLM judge of pairs ----


def test_preferences_of_one_mind_give_the_figures_of_the_scores():
    """The signs of the scores as the judge's preferences in both orders, also the rate at equal length."""
    contestants = length_decides()
    expected = summarise(contestants)[1].against
    signs = [int(answers[0].reward) for answers in contestants[1].answers]
    judged = replace(contestants[1], preferences=tuple(((sign, sign),) for sign in signs))
    against = by_judge(contestants[0], judged)
    assert against == replace(expected, difference=None, disagreement=0.0, num_unjudged=0)
    assert against.length_controlled is not None


def test_orders_that_differ_are_ties_and_pairs_without_a_rating_are_left_out():
    # Prompt 1: a win, a win in one order alone, none: (1 + 0.5) / 2. Prompt 2: none. Prompt 3: a loss, an agreed tie,
    # a tie in one order alone: (0 + 0.5 + 0.5) / 3. Of 5 pairs with both ratings 2 differ.
    preferences = (((1, 1), (1, -1), None), (None, None, None), ((-1, -1), (0, 0), (0, 1)))
    one = Contestant("A", "a", ((answer("a", 2),),) * 3)
    other = Contestant("B", "b", ((answer("b", 2),) * 3,) * 3, preferences)
    against = by_judge(one, other)
    assert (against.wins, against.ties, against.losses, against.num_prompts) == (1, 3, 1, 2)
    assert against.win_rate.value == pytest.approx((0.75 + 1 / 3) / 2) and against.disagreement == 0.4
    assert against.num_unjudged == 4 and against.length_controlled is None
    against = by_judge(one, replace(other, preferences=((None,) * 3,) * 3))
    assert (against.win_rate, against.disagreement, against.num_prompts, against.num_unjudged) == (None, None, 0, 9)


def judged_pairs(*preferences: tuple[int, int] | None, score: float | None = None) -> list[Contestant]:
    """Two models with an answer to each prompt, of which a judge has these preferences."""
    rows = ((replace(answer("a", 2, reward=score), scores={} if score is None else {"length": score}),),)
    rows *= len(preferences)
    return [Contestant("A", "a", rows), Contestant("B", "b", rows, tuple((one,) for one in preferences))]


def test_pairs_left_out_are_counted_if_all_are():
    contestants = judged_pairs(None, None, None)
    content = to_json(["q"] * 3, contestants, {})
    assert content["models"][1]["against"]["num_unjudged"] == 3 and content["models"][1]["against"]["win_rate"] is None
    table, lines = figures(contestants)
    assert "pairs without a rating in one of the orders, left out: B 3." in lines
    assert "wins/ties/losses against A: B 0/0/0." in lines and not any("interval" in line for line in lines)
    assert table[2][-3:] == ["-", "-", "-"] and "B 3." in markdown(["q"] * 3, contestants, "none")


@pytest.mark.parametrize(
    ("preferences", "score", "expected"),
    [
        ([(1, 1), None], None, "preferred to A's in both orders ... Wilson's formula, n = 1 prompt."),
        ([(0, 0)] * 24, None, "preferred to A's in both orders ... Wilson's formula, n = 24 prompts."),
        ([(1, 1), (0, 0)] * 12, None, "preferred to A's in both orders ... a bootstrap over the prompts, n = 24"),
        (
            [(1, 1), (0, 0), None] * 12,
            1.0,
            "scored above A's or preferred to A's in both orders ... "
            "Wilson's formula or a bootstrap over the prompts, n = 24 or 36 prompts.",
        ),
    ],
)
def test_the_legend_names_what_decides_the_interval_and_the_rated_prompts(preferences, score, expected):
    (line,) = (line for line in figures(judged_pairs(*preferences, score=score))[1] if line.startswith("win rate: "))
    assert line == naming(expected) and ("scored" in line) is (score is not None)
