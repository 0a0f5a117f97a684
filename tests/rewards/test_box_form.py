"""Rewards for the form of a completion: rows worked out by hand, and TRL's functions."""

import random
import sys

import pytest
from support.messages import naming
from support.reward_functions import FORMS, as_messages

from pipeline.errors import InputError
from pipeline.rewards.box.form import format_match, language, language_identifier, length, overlong, repetition, tags
from pipeline.rewards.box.texts import text_of

RIGHT = "<think>\nHm.\n</think>\n<answer>4</answer>"


@pytest.fixture
def trl_rewards():
    return pytest.importorskip("trl.rewards", reason="TRL is not installed")


def test_a_text_is_itself_or_the_last_message():
    assert text_of("a") == "a" == text_of([{"role": "assistant", "content": "b"}, *as_messages("a")])


@FORMS
def test_a_format_matches_the_whole_text(form):
    rows = {
        RIGHT: 1.0,
        f" {RIGHT}\n": 1.0,
        f"Well: {RIGHT}": 0.0,
        f"{RIGHT} So 4.": 0.0,
        "<think>a</think><answer>b": 0.0,
        "<think>a<think>b</think><answer>c</answer>": 0.0,
        "<think>a</think><answer>b</answer><answer>c</answer>": 0.0,
        "<think>a</think>b<answer>c</answer>": 0.0,
        "": 0.0,
    }
    assert format_match([form(text) for text in rows]) == list(rows.values())
    assert format_match([form("a\nb"), form("a b!")], pattern="a.b") == [1.0, 0.0]


def test_the_format_of_thoughts_is_trls(trl_rewards):
    """With its pattern, on texts of all orders of up to five parts."""
    draw = random.Random(0)
    parts = ["<think>", "</think>", "a", "\n", "<answer>", " "]
    texts = ["".join(draw.choices(parts, k=draw.randint(0, 5))) for _ in range(300)] + [RIGHT]
    expected = trl_rewards.think_format_reward([as_messages(text) for text in texts])
    assert format_match(texts, pattern="<think>(?!.*<think>)(.*?)</think>.*") == expected
    assert 5 < sum(expected) < 100


@FORMS
def test_tags_are_right_once_and_in_order(form):
    rows = {
        RIGHT: 1.0,
        "<answer>4</answer> <think>Hm.</think>": 0.5,  # the tags of answer are in front of the right ones
        "<think>a</think>": 0.5,
        "<think><think>a</think><answer>b</answer>": 0.75,
        "</think><think><answer></answer>": 0.75,
        "4": 0.0,
    }
    assert tags([form(text) for text in rows]) == list(rows.values())
    assert tags([form("<a></a>"), form("<a>")], names=["a"]) == [1.0, 0.5]


@FORMS
def test_lengths_outside_a_range_fall_linearly(form):
    ids = [[7] * number for number in (0, 5, 10, 20, 22, 25, 40)]
    texts = [form("word " * len(row)) for row in ids]
    expected = [0.0, 0.5, 1.0, 1.0, 0.8, 0.5, 0.0]
    assert length(texts, ids, low=10, high=20, margin=10) == pytest.approx(expected)
    assert length(texts, [[]] * 7, low=10, high=20, margin=10, unit="words") == pytest.approx(expected)
    assert length(texts, [[1] * 256, [1] * 266, *ids[2:]])[:2] == pytest.approx([1.0, 0.9]), "without settings"
    assert length(texts, ids, high=20)[:5] == pytest.approx([1.0, 1.0, 1.0, 1.0, 0.98])


def test_too_long_responses_cost_up_to_1(trl_rewards):
    ids = [[7] * number for number in range(130)]
    for most, margin in ((100, 20), (100, 100), (100, 0), (7, 3)):
        expected = trl_rewards.get_soft_overlong_punishment(most, margin)(ids)
        assert overlong(ids, max_length=most, margin=margin) == pytest.approx(expected)


def test_the_cost_of_length_by_hand():
    ids = [[7] * number for number in (80, 81, 90, 100, 101)]
    assert overlong(ids, max_length=100, margin=20) == pytest.approx([0, -0.05, -0.5, -1, -1])


def slow_repetition(parts, size):
    seen, again, total = [], 0, 0
    for start in range(len(parts) - size + 1):
        gram = list(parts[start : start + size])
        again, total = again + (gram in seen), total + 1
        seen.append(gram)
    return -again / total if total else 0.0


@FORMS
def test_repeated_n_grams_cost_their_share(form):
    draw = random.Random(0)
    ids = [[draw.randint(0, 2) for _ in range(draw.randint(0, 20))] for _ in range(50)]
    texts = [form(" ".join(map(str, row))) for row in ids]
    for size in (1, 2, 3):
        expected = [slow_repetition(row, size) for row in ids]
        assert repetition(texts, ids, size=size) == pytest.approx(expected) and min(expected) < -0.3
        assert repetition(texts, [[]] * 50, size=size, unit="words") == pytest.approx(expected)
    assert repetition([form("")], [[5, 5, 5, 5, 5]], size=2) == [-0.75]


def test_repetitions_cost_what_they_do_in_trl(trl_rewards):
    ids = [[1, 2, 3, 4], [5] * 9, [1, 2] * 6, [], [1]]
    assert repetition([""] * 5, ids) == pytest.approx(trl_rewards.get_repetition_penalty_reward()(ids))


@FORMS
def test_a_language_is_recognised_offline(form, monkeypatch):
    pytest.importorskip("py3langid", reason="needs the extra language")
    monkeypatch.setattr("socket.socket", None)
    rows = {
        "The capital of France is Paris.": "en",
        "Die Hauptstadt von Frankreich heißt Paris.": "de",
        "法国的首都是巴黎。": "zh",
        "フランスの首都はパリです。": "ja",
    }
    for code in ("en", "de", "zh"):
        expected = [float(right == code) for right in rows.values()]
        assert language([form(text) for text in rows], code=code) == expected
        assert language([form(text) for text in rows], code=code, among=["en", "de", "zh", "ja"]) == expected
    assert language([form("6 * 7 = 42"), form("")]) == [None, None]
    wu = [form("此系列数字为偶数序列。")]  # as py3langid finds where it may
    assert language(wu, code="zh") == [0.0] and language(wu, code="zh", among=["en", "zh"]) == [1.0]
    for setting in ({"code": "english"}, {"code": "fr", "among": ["en", "de"]}):
        with pytest.raises(InputError, match=f"code '{setting['code']}' is none of "):
            language([], **setting)


def test_a_library_of_languages_that_is_not_installed_is_named(monkeypatch):
    monkeypatch.setitem(sys.modules, "py3langid.langid", None)
    language_identifier.cache_clear()
    with pytest.raises(
        InputError,
        match=naming("language ... pip install '.[language]'"),
    ):
        language(["a"])


@pytest.mark.parametrize(
    ("reward", "settings", "told"),
    [
        (length, {"high": 0}, "0 <= low <= high, margin > 0 ... 0, 0, 100"),
        (length, {"high": 5, "low": 6}, "has 6, 5, 100"),
        (length, {"high": 5, "margin": 0}, "has 0, 5, 0"),
        (length, {"high": 5, "unit": "letters"}, "'letters' ... tokens nor words"),
        (repetition, {"size": 0}, "size 0: at least 1"),
        (repetition, {"unit": "lines"}, "'lines' ... tokens nor words"),
    ],
)
def test_settings_that_cannot_be_right_are_refused(reward, settings, told):
    with pytest.raises(InputError) as raised:
        reward([], [], **settings)
    assert str(raised.value) == naming(told)


@pytest.mark.parametrize("settings", [{}, {"max_length": 10, "margin": 11}, {"max_length": 10, "margin": -1}])
def test_a_margin_lies_within_the_length(settings):
    with pytest.raises(InputError, match=naming("overlong ... max_length ... margin")):
        overlong([], **settings)
