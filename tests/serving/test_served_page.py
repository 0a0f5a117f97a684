"""The file of the page of `rlhf serve`: nothing foreign in it, labels, contrasts."""

import asyncio
import re
from html.parser import HTMLParser
from importlib.resources import files
from pathlib import Path

import httpx
import pytest
from support.canned_server import PAGE

from pipeline.inference.serving import app
from pipeline.inference.serving.votes import Votes
from pipeline.inference.serving.worker import Worker

VOID = set("area base br col embed hr img input link meta source track wbr".split())
FIELDS = ("input", "select", "textarea")


class Tags(HTMLParser):
    """Every tag with its attributes and the fields inside a label; `faults` has tags that are not closed in order."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.tags: list[tuple[str, dict[str, str | None]]] = []
        self.labelled: list[dict[str, str | None]] = []
        self.faults: list[str] = []
        self.open: list[str] = []
        self.feed(text)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append((tag, dict(attrs)))
        if tag in FIELDS and "label" in self.open:
            self.labelled.append(dict(attrs))
        if tag not in VOID:
            self.open.append(tag)

    def handle_endtag(self, tag: str) -> None:
        if not self.open or self.open.pop() != tag:
            self.faults.append(f"{tag} at {self.getpos()}")


@pytest.fixture(scope="module")
def text() -> str:
    return PAGE.read_text(encoding="utf-8")


@pytest.fixture(scope="module")
def page_tags(text: str) -> Tags:
    return Tags(text)


def test_the_page_fetches_nothing_from_elsewhere(text: str, page_tags: Tags):
    """No address of another host stands in it at all, and what a tag fetches is inside the page."""
    assert re.findall(r"(?:https?:|wss?:|ftp:|[\"'(]//)[^\s\"')]*|@import|\burl\(", text) == []
    fetched = [value for _, attrs in page_tags.tags for key, value in attrs.items() if key in ("src", "href", "action")]
    assert fetched == ["data:,"]
    assert set(re.findall(r"(?:fetched|request)\(\"([^\"]+)\"", text)) == {
        "v1/models", "v1/chat/completions", "v1/score", "v1/votes",
    }  # fmt: skip
    assert len(re.findall(r"\bfetch\(", text)) == 1


def test_the_page_is_read_once(monkeypatch: pytest.MonkeyPatch):
    reads = list[str]()
    monkeypatch.setattr(app, "files", lambda package: reads.append(package) or files(package))
    app.page_response.cache_clear()
    server = app.Server(Worker([]), {}, Votes(Path("votes.jsonl")), 1).app(hosts=(), token="token")

    async def fetched() -> list[httpx.Response]:
        async with httpx.AsyncClient(transport=httpx.ASGITransport(server), base_url="http://server") as client:
            return [await client.get("/") for _ in range(3)]

    first, *others = asyncio.run(fetched())
    assert first.status_code == 200 and first.text == PAGE.read_text(encoding="utf-8")
    assert "script-src 'sha256-" in first.headers["content-security-policy"]
    assert [(one.text, one.headers) for one in others] == [(first.text, first.headers)] * 2
    assert reads == ["pipeline.inference.serving"]


def test_the_page_fits_a_policy_of_two_hashes(text: str, page_tags: Tags):
    names = [tag for tag, _ in page_tags.tags]
    assert (names.count("script"), names.count("style")) == (1, 1)
    assert ("script", {}) in page_tags.tags and ("style", {}) in page_tags.tags
    assert [
        (tag, key) for tag, attrs in page_tags.tags for key in attrs if key.startswith("on") or key == "style"
    ] == []


def test_texts_are_never_read_as_markup(text: str):
    assert re.findall(r"\w*(?:inner|outer)HTML|insertAdjacentHTML|document\.write|\beval\(|new Function", text) == []


def test_the_tags_of_the_page_are_closed_and_its_ids_unique(page_tags: Tags):
    ids = [attrs["id"] for _, attrs in page_tags.tags if "id" in attrs]
    assert page_tags.faults == [] and page_tags.open == []
    assert len(ids) == len(set(ids))


def test_every_field_has_a_label_and_every_reference_a_target(page_tags: Tags):
    ids = {attrs["id"] for _, attrs in page_tags.tags if "id" in attrs}
    labels = {attrs.get("for") for tag, attrs in page_tags.tags if tag == "label"}
    fields = [attrs for tag, attrs in page_tags.tags if tag in FIELDS]
    assert len(fields) > 10
    assert [one for one in fields if one["id"] not in labels and one not in page_tags.labelled] == []
    assert labels - ids <= {None}
    pointers = ("aria-labelledby", "aria-describedby", "aria-controls")
    assert {word for _, attrs in page_tags.tags for key in pointers for word in (attrs.get(key) or "").split()} <= ids


def colours(block: str) -> dict[str, str]:
    short = dict(re.findall(r"--([\w-]+): (#[0-9a-f]{3,6});", block))
    return {
        name: value if len(value) == 7 else "#" + "".join(2 * one for one in value[1:]) for name, value in short.items()
    }


def contrast(one: str, other: str) -> float:
    """Return the contrast of two colours by WCAG 2."""

    def luminance(colour: str) -> float:
        parts = [int(colour[at : at + 2], 16) / 255 for at in (1, 3, 5)]
        linear = [part / 12.92 if part <= 0.04045 else ((part + 0.055) / 1.055) ** 2.4 for part in parts]
        return sum(weight * part for weight, part in zip((0.2126, 0.7152, 0.0722), linear, strict=True))

    low, high = sorted((luminance(one), luminance(other)))
    return (high + 0.05) / (low + 0.05)


@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_texts_have_enough_contrast(text: str, scheme: str):
    """4.5 for texts on each ground that they stand on, 3 for the edges of fields."""
    blocks = re.findall(r":root \{(.*?)\}", text, re.DOTALL)
    assert len(blocks) == 2
    used = colours(blocks[scheme == "dark"])
    pairs = [(name, ground) for name in ("ink", "soft", "link", "open") for ground in ("ground", "card", "wash")]
    pairs += [("bad", "card"), ("bad", "bad-wash"), ("ink", "bad-wash"), ("good", "card"), ("on-link", "link")]
    low = {pair: round(contrast(used[pair[0]], used[pair[1]]), 2) for pair in pairs}
    assert {pair: value for pair, value in low.items() if value < 4.5} == {}
    assert min(contrast(used["line"], used[ground]) for ground in ("ground", "card")) >= 3
