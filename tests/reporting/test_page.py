"""The pages of a report: their numbers, what stands in them, and that texts of models and data are no markup."""

import html
import json
import re
import shutil
import threading
from html.parser import HTMLParser
from pathlib import Path

import pytest
from filelock import FileLock
from support.messages import naming
from support.recorded_runs import HOSTILE, METRICS, ROWS, die, make_model, record, record_road

from pipeline.console import code_span, fenced, visible
from pipeline.errors import InputError
from pipeline.reporting import page as page_module
from pipeline.reporting.page import write_report
from pipeline.reporting.records import runs_of
from pipeline.reporting.tables import answers_command, duration, number
from pipeline.run.evaluations import row_values_line
from pipeline.run.layout import row_values_file
from rlhf.main import main

SUMMARY = {"label": "A", "path": "output/sft", "mean_tokens": 9.5, "finished_share": 1.0, "mean_score": 0.5}
AGAINST = {"win_rate": {"value": 0.625, "low": 0.3, "high": 0.9}, "wins": 5, "ties": 0, "losses": 3}
ANSWER = {"text": HOSTILE, "num_tokens": 7, "finished": False, "score": 1.5}


def without_pictures(patches: pytest.MonkeyPatch) -> None:
    """Drawing takes most of the time of a report, and has tests of its own."""
    patches.setattr(page_module, "svg", lambda panel, salt: "<svg></svg>")
    patches.setattr(page_module, "write_png", lambda file, panels: file.touch())


@pytest.fixture
def no_pictures(monkeypatch: pytest.MonkeyPatch) -> None:
    without_pictures(monkeypatch)


class Tags(HTMLParser):
    """All tags of a page with their attributes."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.found: list[tuple[str, dict[str, str | None]]] = []
        self.feed(text)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.found.append((tag, dict(attrs)))


@pytest.fixture(scope="module")
def road(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A road whose texts are hostile, with rows and a comparison, and its report."""
    output = record_road(
        tmp_path_factory.mktemp("road") / "output", texts=[HOSTILE, "calm"], interval=2, column_map=HOSTILE
    )
    (output / "runs/ppo/rows.json").write_text(json.dumps(ROWS))
    with (output / "runs/ppo/log.txt").open("a") as file:
        file.write(f"2030-01-01 00:00:00,0 WARNING x {HOSTILE}\n")
    models = [SUMMARY, SUMMARY | {"label": "B", "path": "output/actor", "against": AGAINST}]
    prompts = [{"prompt": HOSTILE, "answers": {"A": [ANSWER], "B": [ANSWER]}}]
    (output / "prompt_eval.json").write_text(json.dumps({"settings": {}, "models": models, "prompts": prompts}))
    trial = {
        "title": f"64 prompts x 8 answers of {HOSTILE}",
        "rows": [["pass@1", "0.168 (0.12 to 0.22)"], ["flags", HOSTILE]],
    }
    (output / "task_trial.json").write_text(json.dumps(trial))
    first = {"answer length": {"mean": 3.25, "standard_error": 0.125, "count": 9}}
    other = {HOSTILE: {"mean": 0.5, "standard_error": None, "count": 12345}}
    other["answer length: change"] = {"mean": -1.5, "standard_error": 0.25, "count": 9}
    (output / "eval.json").write_text(json.dumps({"output/sft": first, HOSTILE: other}))
    with pytest.MonkeyPatch.context() as patches:
        without_pictures(patches)
        write_report([output], output)
    return output


@pytest.fixture(scope="module")
def page(road: Path) -> str:
    return (road / "report.html").read_text(encoding="utf-8")


def test_the_table_has_the_numbers_of_metrics_jsonl(road, page):
    found = [values for tag, values in Tags(page).found if "data-value" in values]
    cells = {(one["data-run"], one["data-metric"], one["data-at"]): float(one["data-value"] or "nan") for one in found}
    for stage, names in {
        "sft": ["eval_perplexity"],
        "reward": ["eval_accuracy"],
        "ppo": [f"eval_{name}" for name in ("objective/scores", "objective/kl", "completions/mean_length")],
    }.items():
        lines = [json.loads(line) for line in (road / "runs" / stage / "metrics.jsonl").read_text().splitlines()]
        lines = [line for line in lines if "eval_rows" in line]
        for name in names:
            assert cells[stage, name, "first"] == lines[0][name] and cells[stage, name, "last"] == lines[-1][name]
    assert len(cells) == 2 * (1 + 1 + 4)


def test_a_shown_number_is_that_of_the_metric(page):
    shown = re.findall(r'data-value="([^"]+)">([^<]+)<', page)
    assert len(shown) == 12 and all(
        float(text.replace(",", "")) == pytest.approx(float(value), rel=1e-3) for value, text in shown
    )


def test_a_section_for_each_stage_with_curves_time_memory_and_warnings(page):
    sections = re.findall(r'<section class="step" id="(\w+)">(.*?)</section>', page, re.S)
    assert [name for name, _ in sections] == list(METRICS)
    for _, text in sections:
        assert text.count("<svg") >= 4 and "Where the time went" in text and "Peak memory" in text
        assert "health: KL is high" in text and "There is no plan" in text
    assert page.count("<svg") == page.count("</svg>") >= 20


def test_texts_of_models_and_data_are_no_markup(page):
    tags = Tags(page).found
    assert {tag for tag, _ in tags} & {"script", "iframe", "img", "link", "red"} == set()
    assert not any(name.startswith("on") for _, values in tags for name in values)
    assert "\x1b" not in page and "\u202e" not in page
    shown = html.escape("[red]x[/red] <script>alert(1)</script> \\x1b[31m ``` | \\u202e end", quote=False)
    assert page.count(shown) >= 11, "a trial's title and flags, samples of four evaluations, data, two answers, " \
        "their prompt, a flag and a warning"  # fmt: skip


def test_nothing_is_fetched(page):
    for tag, values in Tags(page).found:
        assert not {"src", "srcset", "data", "action"} & set(values), tag
        assert all(value is None or not value.startswith(("http", "//")) for value in values.values()), values
        assert all(values[name].startswith("#") for name in ("href", "xlink:href") if name in values), values
    assert "url(" not in re.sub(r"url\(#\w+\)", "", page) and "@import" not in page
    assert "default-src 'none'" in page


def test_samples_data_answers_flags_and_command_stand_there(page):
    for text in (
        "step 0</h4>",
        "step 6</h4>",
        "<b>64</b> to train on",
        "<mark>[learned]</mark>",
        "0.625",
        "[0.3, 0.9]",
        "<td>pass@1</td><td>0.168 (0.12 to 0.22)</td>",
    ):
        assert text in page, text
    assert "step1_sft/main.py --seed &#39;1 2&#39;" in page and "<td>--column-map</td>" in page


def test_figures_of_an_evaluation_have_a_column_for_each_model(road, page):
    section = page.partition('<section id="evaluation">')[2].partition("</section>")[0]
    table = [re.findall(r"<t[hd][^>]*>(.*?)</t[hd]>", row) for row in section.split("<tr>")[1:]]
    cells = [[re.sub(r"<[^>]*>", "", cell) for cell in row] for row in table]
    hostile = html.escape(visible(HOSTILE), quote=False)
    assert [row[0] for row in cells] == ["", "answer length", "answer length: change", hostile]
    assert cells[0][1] == "output/sft"
    assert [row[1:] for row in cells[1:]] == [["3.25 ± 0.125", "–"], ["–", "-1.5 ± 0.25"], ["–", "0.5"]]
    text = (road / "report.md").read_text(encoding="utf-8")
    assert "| `output/sft` | `answer length` | 3.25 | 0.125 | 9 |" in text and " | 0.5 | – | 12,345 |" in text


@pytest.mark.parametrize(
    ("more", "words"),
    [
        ({"num_prompts": 5, "disagreement": None}, "scored above the first model's; ... over 5 rated prompts."),
        (
            {"num_prompts": 1, "disagreement": 0.5},
            "preferred by the LLM judge in both orders to ... over 1 rated prompt.",
        ),
    ],
)
def test_the_win_rate_has_the_words_of_what_decides_and_the_number_of_rated_prompts(more, words, tmp_path, no_pictures):
    output = record_road(tmp_path / "output", texts=["calm"], interval=2)
    models = [SUMMARY, SUMMARY | {"label": "B", "against": AGAINST | more}]
    prompts = [{"prompt": "one", "answers": {"A": [ANSWER], "B": [ANSWER]}}] * 6
    (output / "prompt_eval.json").write_text(json.dumps({"settings": {}, "models": models, "prompts": prompts}))
    write_report([output], output)
    (note,) = re.findall("Win rate: how often an answer is .*", (output / "report.html").read_text())
    assert note == naming(words)


def test_the_page_in_markdown_keeps_texts_in_code(road):
    text = (road / "report.md").read_text(encoding="utf-8")
    outside = re.sub(r"^(`{3,})text$.*?^\1$", "", text, flags=re.S | re.M)
    outside = re.sub(r"`[^`\n]*`", "", outside)
    assert "alert" not in outside and "alert" in text and "\x1b" not in text
    assert "| Stage 3: PPO | score |" in text and "| Stage 3: PPO | response length (tokens) |" in text
    for name in re.findall(r"\]\((curves/[^)]+)\)", text):
        assert (road / name).is_file()


def test_control_characters_are_shown_and_other_languages_left():
    assert visible("a\x00\x1b[2J\u202e\ud800\nb\tc") == "a\\x00\\x1b[2J\\u202e\\ud800\nb\tc"
    assert visible("日本語 émoji 🙂\u3000x") == "日本語 émoji 🙂\u3000x"
    assert visible("x" * 5000).startswith("x" * 1500) and visible("x" * 5000).endswith("(3,500 more characters)")
    assert fenced("a ```` b").splitlines()[0] == "`````text" and code_span("a|b`c\nd") == "`a\\|b'c d`"


@pytest.mark.parametrize(
    ("value", "text"),
    [(0.0, "0"), (-2e-8, "0"), (1e-5, "1e-05"), (0.123456, "0.1235"), (12345.6, "12,346"), (None, "–"), ("x", "–")],
)
def test_numbers_have_four_digits(value, text):
    assert number(value) == text


def test_durations_have_a_unit():
    assert [duration(seconds) for seconds in (0.65, 41, 90, 5400)] == ["0.65 s", "41 s", "1.5 min", "1.5 h"]


def verdict_of(output: Path) -> tuple[str, str, list[str]]:
    text = write_report([output], output).read_text(encoding="utf-8")
    found = re.search(r'<div class="verdict (\w+)"><h1>(.*?)</h1>(.*?)</div>', text, re.S)
    assert found
    return found[1], found[2], [html.unescape(one) for one in re.findall(r"<span>(.*?)</span>", found[3], re.S)]


@pytest.mark.usefixtures("no_pictures")
def test_the_verdict_is_better_worse_or_how_a_run_broke_off(tmp_path):
    folder = record(tmp_path, "reward")
    better = [naming("reward: held-out accuracy ... 0.5 -> 0.6935 (600 pairs): better")]
    assert verdict_of(folder) == ("good", "Better than at the start", better)
    lines, rows = (folder / "metrics.jsonl").read_text(), row_values_file(folder).read_text()

    def end_at(accuracy: float) -> None:
        last = {"step": 7, "eval_accuracy": accuracy, "eval_rows": 600}
        (folder / "metrics.jsonl").write_text(lines + json.dumps(last) + "\n")
        values = [accuracy + n / 10 for n in range(-5, 6)]
        row_values_file(folder).write_text(rows + row_values_line(7, {"eval_accuracy": values}, "data"))

    end_at(0.5)
    same = [naming("reward: held-out accuracy ... 0.5 -> 0.5 (600 pairs): no difference ... 600 rows")]
    assert verdict_of(folder) == ("open", "No difference that the held-out rows can show", same)
    end_at(0.25)
    kind, headline, (words,) = verdict_of(folder)
    assert (kind, headline) == ("bad", "Worse than at the start") and words.startswith("reward: held-out accuracy on")
    die(folder)
    kind, _, (words,) = verdict_of(folder)
    assert kind == "bad" and words == naming("reward: died ... step 7 of 6 ... without an error")


@pytest.mark.usefixtures("no_pictures")
def test_a_run_that_goes_on_or_has_no_metrics_has_a_report(tmp_path):
    running = record(tmp_path / "a", "sft", code=None, total=50)
    assert verdict_of(running) == ("open", "Not finished", [naming("sft: running ... step 6 of 50")])
    (tmp_path / "b").mkdir()
    (tmp_path / "b" / "log.txt").write_text("")
    assert verdict_of(tmp_path / "b") == ("open", "Not finished", [naming("b: unknown end ... step 0")])


@pytest.mark.usefixtures("no_pictures")
def test_a_report_waits_for_another_process_that_writes_it(tmp_path):
    """A supervisor's and a rank's reports may be due together."""
    folder = record(tmp_path / "run", "sft")
    (tmp_path / "out").mkdir()
    with FileLock(tmp_path / "out" / page_module.LOCK):
        second = threading.Thread(target=write_report, args=([folder], tmp_path / "out"))
        second.start()
        second.join(0.5)
        assert second.is_alive() and not (tmp_path / "out" / "report.md").exists()
    second.join()
    assert (tmp_path / "out" / "report.html").exists()


@pytest.mark.usefixtures("no_pictures")
def test_a_run_that_was_resumed_and_one_on_two_ranks_say_so(tmp_path):
    folder = record(tmp_path, "sft")
    (folder / "env.json").write_text(json.dumps({"stage": "sft", "num_ranks": 2}))
    with (folder / "log.txt").open("a") as file:
        file.write("2030-01-01 00:00:00,0 INFO x resuming from a/checkpoints/step-3 (--overwrite starts over)\n")
    text = write_report([folder], folder).read_text(encoding="utf-8")
    assert re.search(r"Finished after 6 steps · resumed from step 3 · on 2 ranks · [\d.e-]+ GPU hours", text)
    assert re.search(r"on 2 ranks; [\d.e-]+ GPU hours", (folder / "report.md").read_text(encoding="utf-8"))


@pytest.mark.usefixtures("no_pictures")
def test_several_folders_stand_side_by_side(tmp_path):
    one = record_road(tmp_path / "one", seed=1)
    shutil.copytree(one / "runs/sft", one / "runs/base")
    two = record(tmp_path / "two", "sft", seed=2, steps=8).parent.parent
    text = write_report([one, two], tmp_path / "both").read_text(encoding="utf-8")
    assert 'data-run="one" data-metric="eval_perplexity"' in text and 'data-run="two"' in text
    assert re.search(r"<td>--seed</td><td>1</td><td>1</td><td>2</td>", text)
    assert "Stage 1: supervised fine-tuning · two" in text and (tmp_path / "both/curves/sft-objective.png").is_file()
    assert 'class="dot s2"' in text
    assert "<span>one, sft: held-out perplexity" in text and "<span>two, sft: held-out perplexity" in text
    assert "<span>one (base), sft: held-out" in text and ">Stage 1: supervised fine-tuning · one (base) <" in text


@pytest.mark.usefixtures("no_pictures")
def test_the_command_that_compares_names_the_models_that_are_there(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    record_road(Path("output"))
    assert answers_command(runs_of(Path("output")), Path("output")) == ""
    for name in ("sft", "reward", "actor"):
        make_model(Path("output") / name)
    command = "python -m rlhf compare output/base output/sft output/actor --reward-model output/reward --output output/"
    assert answers_command(runs_of(Path("output")), Path("output")) == command
    write_report([Path("output")], Path("output"))
    assert command in Path("output/report.html").read_text() and command in Path("output/report.md").read_text()


def printed(capsys: pytest.CaptureFixture[str], *words: object) -> tuple[int, str, str]:
    code = main(["report", *map(str, words)])
    out, err = capsys.readouterr()
    return code, out, err


@pytest.mark.usefixtures("no_pictures")
def test_the_command_writes_where_it_is_told_and_says_where(tmp_path, capsys, monkeypatch):
    folder = record(tmp_path / "a", "sft", steps=1)
    assert printed(capsys, folder) == (0, f"report: {folder}/report.html\n", "")
    code, out, _ = printed(capsys, folder, "--output", tmp_path / "there")
    assert (code, out) == (0, f"report: {tmp_path}/there/report.html\n") and (tmp_path / "there/report.md").is_file()
    monkeypatch.chdir(tmp_path)
    assert printed(capsys, folder, record(tmp_path / "b", "sft", steps=1))[1] == "report: report/report.html\n"


@pytest.mark.parametrize(
    ("words", "line"),
    [
        ([], "error: --folder ... output"),
        (["nowhere"], "error: nowhere ... no such folder ... an output folder ... a run"),
        (["empty"], "error: empty ... no run ... runs/"),
    ],
)
def test_what_is_no_run_is_refused_in_a_line(tmp_path, capsys, monkeypatch, words, line):
    monkeypatch.chdir(tmp_path)
    Path("empty").mkdir()
    code, out, err = printed(capsys, *words)
    assert (code, out, err.splitlines()) == (2, "", [naming(line)]) and not (tmp_path / "report").exists()


def test_a_folder_without_runs_has_none():
    with pytest.raises(InputError, match="found no run"):
        write_report([Path(__file__).parent], Path(__file__).parent)
