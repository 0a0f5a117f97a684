"""The page of a comparison: figures, whole answers, no markup in texts, nothing that is fetched; and in a browser."""

import html
import json
import re
from pathlib import Path

import matplotlib.image
import pytest
from support.browser import document, picture
from support.recorded_runs import HOSTILE

from pipeline.inference.answer_rows import Answer
from pipeline.inference.comparison import Contestant, figure_rows, figures, summarise
from rlhf.compare import CompareConfig, write_files

LONG = "word " * 1000 + HOSTILE


def contestants() -> list[Contestant]:
    """Two models with two answers to each of 21 prompts, with hostile texts, names and paths."""
    texts = [HOSTILE, LONG, "calm", "", "x" * 400, "\"'&amp;</p></article>{{ 1 / 0 }}{% raw %}"]

    def answers(number: int) -> tuple[Answer, ...]:
        rewards = (number % 3 + 0.5, number % 2 - 0.25)
        return tuple(
            Answer(
                texts[(number + n) % len(texts)], (1,) * (number % 5 + n), "limit", scores={HOSTILE: one}, reward=one
            )
            for n, one in enumerate(rewards, start=1)
        )

    preferences = ((1, 1), (1, -1), None, (0, 0))
    rows = [tuple(answers(number + model) for number in range(21)) for model in range(2)]
    return [
        Contestant("A", f"output/{HOSTILE}", rows[0]),
        Contestant("B", "deep/" * 60, rows[1], (preferences,) * 21),
    ]


@pytest.fixture(scope="module")
def page(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("comparison")
    prompts = [HOSTILE, "</title><script>alert(2)</script>", *(f"question {n}" for n in range(19))]
    config = CompareConfig(prompts=HOSTILE, reward_model=[HOSTILE, "https://example.org"], judge_pairs=True)
    write_files(folder / "run-0.5", config, prompts, contestants())
    return folder / "run-0.5.html"


def escaped(text: str) -> str:
    """A text as the page has it."""
    return html.escape(text.replace("\x1b", "\\x1b").replace("\u202e", "\\u202e"), quote=False).strip()


def test_figures_and_their_legend_are_those_of_the_terminal(page):
    text = page.read_text(encoding="utf-8")
    content = json.loads(page.with_suffix(".json").read_text())
    assert content.keys() == {"settings", "models", "by_scorer", "prompts"}
    rate = content["models"][1]["against"]["win_rate"]
    assert f"{rate['value']:.2f} [{rate['low']:.2f}, {rate['high']:.2f}]</td>" in text
    summaries = {HOSTILE: summarise(contestants())}
    for cell in figure_rows(summaries)[2]:
        assert f'">{cell}</td>' in text or f"<td>{cell}</td>" in text
    assert escaped(figures(contestants())[1][1][1:]) in text.replace("&#39;", "'")
    assert '<th class="n">orders differ</th>' in text and ">33%</td>" in text and "left out: B 21." in text


@pytest.mark.parametrize(("number", "words"), [(1, "2 models, 1 prompt</h1>"), (2, "2 models, 2 prompts</h1>")])
def test_the_heading_counts_prompts(number, words, tmp_path):
    rows = ((Answer("calm", (1,), "end"),),) * number
    models = [Contestant(label, label, rows) for label in "AB"]
    write_files(tmp_path / "page", CompareConfig(), ["question"] * number, models)
    assert words in (tmp_path / "page.html").read_text()


def test_every_answer_is_whole_and_no_text_is_markup(page):
    text = page.read_text(encoding="utf-8")
    answers = [row.text for one in contestants() for rows in one.answers for row in rows]
    assert text.count('<p class="text">') == len(answers) == 84
    assert text.count(escaped(LONG)) == answers.count(LONG) >= 7
    assert text.count(escaped(HOSTILE)) > answers.count(HOSTILE) + answers.count(LONG) + 4, "prompt, path, flags, names"
    known = "html head meta title style body header section article footer div p b span code h1 h2 h4"
    known += " table thead tbody tr th td"
    assert set(re.findall(r"</?([a-z0-9]+)", text)) == set(known.split())
    assert "\x1b" not in text and "\u202e" not in text and not re.search(r"<[^>]* on\w+=", text)


def test_blank_lines_of_texts_are_shown(tmp_path):
    rows = ((Answer("first\n\nsecond", (1,), "end"),),)
    write_files(tmp_path / "page", CompareConfig(), ["one\n\ntwo\n\n\nthree"], [Contestant("A", "a", rows)])
    text = (tmp_path / "page.html").read_text()
    assert '<p class="prompt">one\n\ntwo\n\n\nthree</p>' in text and '<p class="text">first\n\nsecond</p>' in text
    for name in ("prompt", "text"):
        assert re.search(rf"^\.{name} {{[^}}]*white-space: pre-wrap;", text, re.MULTILINE)


def test_nothing_is_fetched(page):
    text = page.read_text(encoding="utf-8")
    assert "default-src 'none'" in text and "url(" not in text and "@import" not in text
    assert not re.search(r"<[^>]*(?:src|href|action)=", text)


@pytest.mark.slow
@pytest.mark.parametrize(("is_dark", "ground"), [(False, (0xF6, 0xF7, 0xF9)), (True, (0x0F, 0x12, 0x17))])
def test_the_page_is_light_or_dark_as_its_reader_asks(page, tmp_path, is_dark, ground):
    file = picture(page, tmp_path / "page.png", width=1300, height=1400, is_dark=is_dark)
    pixels = (matplotlib.image.imread(file)[..., :3] * 255).round()
    assert tuple(pixels[5, 5]) == ground
    assert (abs(pixels - ground).max(-1) > 100).mean() > 0.01, "something is written on it"


@pytest.mark.slow
@pytest.mark.parametrize("width", [500, 1300])
def test_nothing_stands_out_to_the_side_and_the_console_is_empty(page, tmp_path, width):
    """The page's policy allows no script: a copy without it asks for the sizes. Windows have 500 pixels or more."""
    shown, console = document(page)
    assert console == [] and shown.count("<article") == 21 and "<title>Comparison run-0.5</title>" in shown
    text = re.sub(r'<meta http-equiv="Content-Security-Policy"[^>]*>', "", page.read_text(encoding="utf-8"))
    ask = "<script>console.log(`wide by ${document.documentElement.scrollWidth - innerWidth}.`)</script></body>"
    (tmp_path / "asked.html").write_text(text.replace("</body>", ask), encoding="utf-8")
    _, console = document(tmp_path / "asked.html", width=width)
    assert any("wide by 0." in line for line in console), console
