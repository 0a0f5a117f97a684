"""Token, chat and keys of the page of `rlhf serve`, in Chromium with canned answers.

They need `pip install playwright` and the system's Chromium.
"""

from typing import Any

import pytest
from support.canned_server import ANSWERS, MARKUP, TOKEN, Canned, ask_both, say, text_of

expect = pytest.importorskip("playwright.sync_api", reason="no playwright: pip install playwright").expect

pytestmark = pytest.mark.slow


# --- token ------------------------------------------------------------------------------------------------------------


def test_the_token_is_not_in_the_address_bar(opened: Any):
    """It survives a reload and is stored for this tab alone."""
    page = opened.page
    assert page.url == opened.address
    page.reload()
    page.wait_for_selector("#chat:visible")
    say(page, "What is a heron?")
    assert TOKEN in page.evaluate("JSON.stringify(sessionStorage)")
    assert TOKEN not in page.evaluate("JSON.stringify(localStorage)") + page.content()


@pytest.mark.parametrize("pasted", [TOKEN, f"  http://127.0.0.1:8000/#token={TOKEN} "], ids=["token", "address"])
def test_a_wrong_token_asks_for_another(opened: Any, pasted: str):
    page = opened.page
    page.goto(f"{opened.address}#token=wrong")
    expect(page.locator("#gate-error")).to_contain_text("rejected")
    assert page.url == opened.address and page.locator("#chat").is_hidden()
    for wrong in ("also wrong", "ключ"):
        page.fill("#token", wrong)
        page.press("#token", "Enter")
        expect(page.locator("#gate-error")).to_contain_text("no token has")
    page.fill("#token", pasted)
    page.press("#token", "Enter")
    page.wait_for_selector("#chat:visible")
    assert page.locator("#model option").all_text_contents() == ["sft", "actor"]


def test_a_server_that_is_gone_is_reported(opened: Any, state: Canned):
    page = opened.page
    page.route("**/v1/**", lambda route: route.fulfill(status=500, body="no JSON"))
    page.reload()
    expect(page.locator("#failure-text")).to_have_text("The server gave no reason.")
    page.unroute("**/v1/**")
    page.keyboard.press("Enter")
    page.wait_for_selector("#chat:visible")


# --- chat -------------------------------------------------------------------------------------------------------------


def test_chat_streams_and_shows_tokens_and_score(page: Any, state: Canned):
    page.fill("#system", " Answer briefly. ")
    page.fill("#seed", "7")
    page.select_option("#model", "actor")
    say(page, "What is a heron?")
    expect(page.locator(".answer .facts")).to_contain_text("score 2.235")
    assert text_of(page) == "Answer number 2 to: What is a heron?"
    facts = page.locator(".answer .facts span").all_text_contents()
    assert facts[:2] == ["actor", "3 tokens"] and facts[2].endswith(" s") and facts[3:] == ["score 2.235"]
    system = {"role": "system", "content": "Answer briefly."}
    question = {"role": "user", "content": "What is a heron?"}
    assert state.asked == [
        {"model": "actor", "messages": [system, question], "max_tokens": 512, "temperature": 0.7, "top_p": 1, "seed": 7,
         "stream": True, "stream_options": {"include_usage": True}}
    ]  # fmt: skip
    reply = {"role": "assistant", "content": text_of(page)}
    assert state.scored == [{"model": "reward", "conversations": [[system, question, reply]]}]
    say(page, "And then?")
    assert [one["role"] for one in state.asked[1]["messages"]] == ["system", "user", "assistant", "user"]


def test_a_text_appears_while_the_answer_streams_and_stop_keeps_it(page: Any, state: Canned):
    page.fill("#message", "this is slow")
    page.press("#message", "Enter")
    page.wait_for_function("() => document.querySelector('.busy .text')?.textContent.includes('word5 ')")
    page.click("#stop")
    part = text_of(page)
    assert part.startswith("word0 word1 ") and part == page.evaluate("talk.messages.at(-1).content")
    expect(page.locator(".answer .facts")).to_contain_text("stopped")
    page.wait_for_timeout(300)
    assert text_of(page) == part and state.stopped == 1
    page.reload()
    page.wait_for_selector(".answer")
    assert text_of(page) == part and state.scored == []


def test_retry_replaces_the_answer(page: Any, state: Canned):
    say(page, "one")
    say(page, "two")
    page.select_option("#model", "actor")
    page.get_by_role("button", name="Retry").click()
    expect(page.locator(".answer .text").last).to_have_text("Answer number 2 to: two")
    assert page.locator("article").count() == 4
    assert state.asked[2]["messages"] == state.asked[1]["messages"]


def test_edit_cuts_the_conversation_there(page: Any, state: Canned):
    say(page, "one")
    say(page, "two")
    page.get_by_role("button", name="Edit the question one").click()
    field = page.get_by_label("Edit your question")
    assert field.input_value() == "one"
    field.press("Escape")
    assert page.locator(".question .text").all_text_contents() == ["one", "two"]
    page.get_by_role("button", name="Edit the question one").click()
    field.fill("three")
    field.press("Enter")
    expect(page.locator(".answer .text")).to_have_text(["Answer number 1 to: three"])
    assert state.asked[2]["messages"] == [{"role": "user", "content": "three"}]


@pytest.mark.parametrize(
    ("word", "expected"),
    [("cut", "cut off at the limit"), ("empty", "The answer is empty."), ("broken", "The GPU has no memory left."),
     ("busy", "The server is busy: Four requests are running.")],
)  # fmt: skip
def test_endings_of_an_answer_are_named(page: Any, word: str, expected: str):
    say(page, f"this is {word}")
    shown = page.locator("#thread").inner_text() + page.evaluate(
        "document.querySelector('.text:empty')?.dataset.empty ?? ''"
    )
    assert expected in shown
    assert page.get_by_role("button", name="Retry").count() == 1


def test_markup_in_texts_stays_text(page: Any):
    """Nor does an element appear for a moment, while the answer streams."""
    page.evaluate(
        """new MutationObserver((records) => {
            const added = records.flatMap((record) => [...record.addedNodes]);
            if (added.some((node) => ["IMG", "SCRIPT"].includes(node.nodeName))) window.isBroken = 2;
        }).observe(document.body, { subtree: true, childList: true })"""
    )
    say(page, f"{MARKUP} markup")
    assert text_of(page) == MARKUP and text_of(page, ".question .text") == f"{MARKUP} markup"
    ask_both(page, f"{MARKUP} markup")
    assert text_of(page, ".side .text") == MARKUP
    assert page.locator("main img, main b:not(.gate b, #too-few b), main script").count() == 0
    assert page.evaluate("window.isBroken") is None


@pytest.mark.parametrize("width", [360, 1300])
@pytest.mark.parametrize("word", ["wide", "rtl", "long"])
def test_no_text_makes_the_page_scroll_sideways(page: Any, word: str, width: int):
    page.set_viewport_size({"width": width, "height": 740})
    say(page, f"{ANSWERS['wide']} {word}")
    assert text_of(page) == ANSWERS[word]
    wider = """() => [...document.querySelectorAll("html, body, main, #thread, #compare, .card, header")]
        .filter((node) => node.scrollWidth > node.clientWidth + 1 && node.clientWidth)
        .map((node) => node.id || node.tagName)"""
    assert page.evaluate(wider) == []
    ask_both(page, f"{ANSWERS['wide']} {word}")
    assert page.evaluate(wider) == []
    page.set_viewport_size({"width": width, "height": 400})
    assert page.evaluate(wider) == []


def test_conversations_are_kept_and_deleted(page: Any):
    say(page, "one")
    page.get_by_role("button", name="New conversation").click()
    say(page, "two")
    page.reload()
    page.wait_for_selector(".answer")
    assert page.locator("#talk-list .open").all_text_contents() == ["two", "one"]
    assert page.locator(".question .text").all_text_contents() == ["two"]
    page.get_by_role("button", name="one", exact=True).click()
    assert page.locator(".question .text").all_text_contents() == ["one"]
    page.get_by_role("button", name="Delete the conversation two").click()
    page.click("#confirm-no")
    assert page.locator("#talk-list .open").count() == 2
    page.get_by_role("button", name="Delete the conversation two").click()
    page.click("#confirm-yes")
    expect(page.locator("#talk-list .open")).to_have_text(["one"])
    page.get_by_role("button", name="Delete all conversations").click()
    page.click("#confirm-yes")
    expect(page.locator("#talk-list .open")).to_have_count(0)
    assert page.evaluate("Object.keys(localStorage).filter((key) => key.includes('conversation'))") == []


# --- keyboard ---------------------------------------------------------------------------------------------------------


def test_a_list_is_voted_through_by_keyboard_alone(page: Any, state: Canned):
    """From the start of the page to three votes, with no pointer."""
    page.evaluate("document.activeElement.blur()")

    def tab_to(name: str) -> None:
        for _ in range(30):
            if page.evaluate("document.activeElement.id") == name:
                return
            page.keyboard.press("Tab")
        raise AssertionError(f"{name} is not reached by Tab")

    tab_to("chat-tab")
    page.keyboard.press("ArrowRight")
    assert page.evaluate("document.activeElement.id") == "compare-tab"
    tab_to("prompt")
    page.keyboard.type("one")
    tab_to("many")
    page.keyboard.press("Space")
    page.keyboard.press("Shift+Tab")
    page.keyboard.press("Shift+Tab")
    page.keyboard.press("Shift+Tab")
    assert page.evaluate("document.activeElement.id") == "prompt"
    page.keyboard.press("End")
    page.keyboard.type("\ntwo\n\nthree")
    page.keyboard.press("Control+Enter")
    for number, key in enumerate("132", start=1):
        page.wait_for_selector("#vote button:enabled")
        assert page.locator("#asked").inner_text() == ["one", "two", "three"][number - 1]
        page.keyboard.press(key)
        page.wait_for_selector("#onward:visible")
        if number < 3:
            page.keyboard.press("Enter")
    assert [one["choice"] for one in state.votes] == [0, 1, None]
    assert page.locator("#onward").inner_text() == "First prompt again"


def test_chat_works_by_keyboard_alone(page: Any, state: Canned):
    assert page.evaluate("document.activeElement.id") == "message"
    page.keyboard.type("this is")
    page.keyboard.press("Shift+Enter")
    page.keyboard.type("slow")
    page.keyboard.press("Enter")
    page.wait_for_function("() => document.querySelector('.busy .text')?.textContent.includes('word3')")
    page.keyboard.press("Escape")
    expect(page.locator(".answer .facts")).to_contain_text("stopped")
    assert state.asked[0]["messages"][0]["content"] == "this is\nslow"
    for _ in range(10):
        page.keyboard.press("Shift+Tab")
        if page.evaluate("document.activeElement.textContent") == "Edit":
            break
    outline = page.evaluate("getComputedStyle(document.activeElement).outlineStyle")
    assert outline == "solid"
    page.keyboard.press("Enter")
    page.keyboard.type("other")
    page.keyboard.press("Enter")
    expect(page.locator(".question .text")).to_have_count(1)
    assert page.evaluate("document.activeElement.id") == "message"


def test_the_drawers_of_a_narrow_page_open_and_close_by_keyboard(page: Any):
    page.set_viewport_size({"width": 360, "height": 740})
    for name in ("settings", "talks"):
        assert page.locator(f"#{name}").is_hidden()
        page.locator(f"#{name}-button").focus()
        page.keyboard.press("Enter")
        assert page.locator(f"#{name}").is_visible() and page.evaluate(f"$('{name}').contains(document.activeElement)")
        page.keyboard.press("Escape")
        assert page.locator(f"#{name}").is_hidden() and page.evaluate("document.activeElement.id") == f"{name}-button"


def test_a_wrong_setting_is_shown_and_nothing_is_sent(page: Any, state: Canned):
    page.set_viewport_size({"width": 360, "height": 740})
    page.evaluate("$('top_p').value = '2'")
    page.fill("#message", "one")
    page.press("#message", "Enter")
    assert page.evaluate("document.activeElement.id") == "top_p" and state.asked == []


def test_sentences_are_announced_politely(page: Any):
    say(page, "this is long")
    said = page.locator("#live p").all_text_contents()
    assert page.locator("#live").get_attribute("aria-live") == "polite"
    assert "The answer is complete." in said and any(one.count("heron") >= 1 for one in said)
    assert len(said) <= 12
