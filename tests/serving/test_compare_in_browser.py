"""The comparison of the page of `rlhf serve`, in Chromium with canned answers.

They need `pip install playwright` and the system's Chromium.
"""

import re
from typing import Any

import pytest
from support.canned_server import Canned, ask_both

expect = pytest.importorskip("playwright.sync_api", reason="no playwright: pip install playwright").expect

pytestmark = pytest.mark.slow

PAIR = {"models": ["sft", "actor"], "wins": 3, "ties": 1, "losses": 2, "win_rate": 0.58, "low": 0.25, "high": 0.85}


def test_blind_names_and_scores_are_hidden_until_the_vote(page: Any, state: Canned):
    state.tallies = [{**PAIR, "more": 25}]
    page.reload()
    page.click("#compare-tab")
    assert "actor against sft" in page.locator("#votes").inner_text()
    ask_both(page, "What is a heron?")
    hidden = page.locator("#round").inner_text() + page.locator("#votes").inner_text()
    assert "Answer number" in hidden and re.findall(r"sft|actor|token|score| s\b", hidden) == []
    assert page.evaluate("/sft|actor|score/.test(document.querySelector('#round').outerHTML)") is False
    assert state.scored == []
    page.keyboard.press("3")
    expect(page.locator("#outcome")).to_contain_text("You voted for B")
    order = [one["model"] for one in state.votes[0]["answers"]]
    assert sorted(order) == ["actor", "sft"]
    assert [text.strip() for text in page.locator(".side h3 span:last-child").all_text_contents()] == order
    expect(page.locator(".side .score")).to_have_count(2)
    assert page.locator("#votes-body tr").inner_text().split("\n")[0] == "actor against sft"
    assert "about 25 more votes would settle it" in page.locator("#votes-body").inner_text()


def test_the_order_of_a_blind_pair_is_random(page: Any, state: Canned):
    orders = set()
    for _ in range(24):
        ask_both(page, "again")
        page.keyboard.press("2")
        page.wait_for_selector("#onward:visible")
        orders.add(tuple(one["model"] for one in state.votes[-1]["answers"]))
    assert orders == {("sft", "actor"), ("actor", "sft")}


@pytest.mark.parametrize(("key", "choice"), [("1", 0), ("2", None), ("3", 1), ("ArrowLeft", 0), ("ArrowRight", 1)])
def test_a_vote_posts_what_the_interface_says(page: Any, state: Canned, key: str, choice: int | None):
    """Two answers with the same settings; a model that is not hidden stands where the user chose it."""
    page.click("#compare-tab")
    page.uncheck("#blind")
    page.fill("#system", "Be kind.")
    ask_both(page, "What is a heron?")
    expect(page.locator(".side .score")).to_have_count(2)
    page.keyboard.press(key)
    page.wait_for_selector("#onward:visible")
    assert state.votes == [{
        "prompt": [{"role": "system", "content": "Be kind."}, {"role": "user", "content": "What is a heron?"}],
        "answers": [{"model": name, "text": f"Answer number {number} to: What is a heron?"}
                    for number, name in ((1, "sft"), (2, "actor"))],
        "choice": choice,
        "blind": False,
    }]  # fmt: skip
    first, second = sorted(state.asked, key=lambda one: one["model"], reverse=True)
    assert first == {**second, "model": "sft"} and second["model"] == "actor"


@pytest.mark.parametrize("word", ["same", "empty"])
def test_the_same_answers_are_a_tie(page: Any, state: Canned, word: str):
    ask_both(page, f"this is {word}")
    assert page.locator("#vote button:enabled").all_text_contents() == ["Tie 2"]
    assert ("the same" if word == "same" else "empty") in page.locator("#vote-hint").inner_text()
    page.keyboard.press("1")
    page.keyboard.press("2")
    page.wait_for_selector("#onward:visible")
    assert [one["choice"] for one in state.votes] == [None]


def test_only_two_complete_answers_can_be_voted_on(page: Any, state: Canned):
    page.click("#compare-tab")
    page.evaluate("document.activeElement.blur()")
    page.keyboard.press("1")
    page.fill("#prompt", "this is slow")
    page.press("#prompt", "Enter")
    page.wait_for_function("() => document.querySelector('.side .text')?.textContent.includes('word3')")
    page.keyboard.press("1")
    page.keyboard.press("Escape")
    page.wait_for_selector("#onward:visible")
    assert page.locator("#vote").is_hidden() and page.locator("#onward").inner_text() == "Ask again"
    page.wait_for_timeout(200)
    assert state.votes == [] and state.stopped == 2


def test_a_vote_that_is_not_stored_can_be_repeated(page: Any, state: Canned):
    state.refuses_votes = True
    ask_both(page, "What is a heron?")
    page.keyboard.press("1")
    expect(page.locator("#vote-error")).to_have_text("The vote is not stored: The disk is full.")
    assert page.locator(".side h3").all_text_contents() == ["AAnswer A", "BAnswer B"]
    state.refuses_votes = False
    page.keyboard.press("1")
    page.wait_for_selector("#onward:visible")
    assert len(state.votes) == 1


@pytest.mark.parametrize(
    ("change", "verdict"),
    [({"more": 25}, "about 25 more votes would settle it"), ({"more": 1}, "about 1 more vote would settle it"),
     ({"more": None}, "even so far"), ({"more": 0, "low": 0.51}, "settled: actor is better"),
     ({"more": 0, "high": 0.49}, "settled: sft is better")],
)  # fmt: skip
def test_the_table_of_votes(page: Any, state: Canned, change: dict[str, Any], verdict: str):
    state.tallies = [{**PAIR, **change}]
    page.reload()
    page.click("#compare-tab")
    cells = page.locator("#votes-body tr > *").all_inner_texts()
    low, high = (round(100 * {**PAIR, **change}[bound]) for bound in ("low", "high"))
    assert cells[0].split("\n") == ["actor against sft", "3 wins, 1 tie, 2 losses"]
    assert " ".join(cells[1].split()) == f"58 % [{low}, {high}]" and cells[2] == verdict
