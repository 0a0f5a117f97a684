"""The page of a report in a browser: an empty console, no scrolling to the side on a phone, light and dark."""

import re
from pathlib import Path

import matplotlib.image
import pytest
from support.browser import document, picture
from support.recorded_runs import HOSTILE, METRICS, record_road

from pipeline.reporting.page import write_report

pytestmark = pytest.mark.slow

PHONE, DESK = 390, 1200
# The policy of the page allows no script: the sizes are asked for in a copy without it.
ASK = """<script>
const wide = [...document.querySelectorAll("body *")].filter(one => !one.closest(".scroll, svg"))
  .filter(one => one.getBoundingClientRect().right > innerWidth + 1).map(one => one.className || one.tagName);
console.log("asked"); document.title = JSON.stringify([innerWidth, document.documentElement.scrollWidth, wide]);
</script></body>"""


@pytest.fixture(scope="module")
def page(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("browser") / "output"
    texts = [HOSTILE, "x" * 400, "calm"]
    return write_report([record_road(folder, texts=texts, a_flag_with_a_very_long_name="y" * 300)], folder)


def framed(page: Path, width: int) -> Path:
    """A page that holds another one in a frame of this width: windows are never narrower than 500 pixels."""
    asked = re.sub(r'<meta http-equiv="Content-Security-Policy"[^>]*>', "", page.read_text(encoding="utf-8"))
    (page.parent / "asked.html").write_text(asked.replace("</body>", ASK), encoding="utf-8")
    frame = page.parent / f"frame-{width}.html"
    frame.write_text(
        f'<body style="margin:0"><iframe src="asked.html" style="border:0;width:{width}px;height:9000px" '
        'onload="document.body.append(this.contentDocument.title)"></iframe>'
    )
    return frame


def test_all_files_are_there_and_the_page_is_small(page):
    for stage, group in {"sft": "objective", "reward": "objective", "ppo": "samples"}.items():
        assert (page.parent / "curves" / f"{stage}-{group}.png").read_bytes()[:4] == b"\x89PNG"
    assert page.stat().st_size < 2e6 and (page.parent / "report.md").is_file()
    assert not list(page.parent.rglob(".*.writing"))


def test_a_browser_finds_nothing_to_say_and_three_stages(page):
    text, console = document(page)
    assert console == []
    assert re.findall(r'<section class="step" id="(\w+)"', text) == list(METRICS)
    assert text.count("<svg") == page.read_text(encoding="utf-8").count("<svg") > 15
    assert "<script" not in text and "&lt;script&gt;alert(1)" in text


def test_the_console_is_looked_at(page):
    _, console = document(framed(page, DESK))
    assert any("asked" in line for line in console)


@pytest.mark.parametrize("width", [PHONE, 768])
def test_nothing_stands_out_to_the_side(page, width):
    """Files may not read each other's documents: the frame's title is its own, read by the console."""
    asked = framed(page, width).read_text().replace("this.contentDocument.title", "''")
    text = (page.parent / "asked.html").read_text(encoding="utf-8").replace("document.title =", "console.log('size ' +")
    text = text.replace("wide]);\n</script>", "wide]));\n</script>")
    (page.parent / "asked.html").write_text(text, encoding="utf-8")
    frame = page.parent / "sized.html"
    frame.write_text(asked)
    _, console = document(frame)
    (found,) = [line for line in console if "size " in line]
    assert f"size [{width},{width},[]]" in found, found


@pytest.mark.parametrize(("is_dark", "ground"), [(False, (0xF6, 0xF7, 0xF9)), (True, (0x0F, 0x12, 0x17))])
def test_the_page_is_light_or_dark_as_its_reader_asks(page, tmp_path, is_dark, ground):
    file = picture(page, tmp_path / "page.png", width=DESK, height=1400, is_dark=is_dark)
    pixels = (matplotlib.image.imread(file)[..., :3] * 255).round()
    assert tuple(pixels[5, 5]) == ground
    assert (abs(pixels - ground).max(-1) > 100).mean() > 0.01, "something is written on it"
