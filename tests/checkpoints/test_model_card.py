"""Model cards of each kind of model, read by the hub's own parser and as Markdown; nothing in them breaks out."""

import json
import math
from pathlib import Path
from typing import Any

import pytest
import torch
from huggingface_hub import ModelCard
from markdown_it import MarkdownIt
from support.model_card import rows_of, sections

from pipeline.checkpoints.model_card import model_documents
from pipeline.checkpoints.shared_names import data_name, shareable_flags
from pipeline.configuration.flags import parse
from pipeline.configuration.stage import Stage
from pipeline.dist import World
from pipeline.run.evaluations import row_values_line
from pipeline.run.run import Run
from pipeline.run.stop_request import StopRequest
from step1_sft.stage import STAGE as SFT
from step2_reward.stage import STAGE as REWARD
from step3_ppo.stage import STAGE as PPO

HASH = "ab" * 32
SECRET = "canary-4711"
BREAKOUT = "```\n---\n</div><script>alert(1)</script>\n# Not a heading\n````\n| a | b |\n\x1b[31m\u202e"
SAMPLES = [
    {"prompt": f"Who {number}? {BREAKOUT}", "response": BREAKOUT, "score": score, "kl": 0.5 * number, "tokens": 8}
    for number, score in enumerate((1.0, 2.0, 3.0, 6.0))
]


def make_run(folder: Path, stage: Stage, *words: object, contents: dict[str, Any] | None = None) -> Run:
    """A run that has been evaluated at its start and at step 20, and has a folder for its base."""
    resolved = parse(stage.config, [str(word) for word in words], section=stage.section)
    run = Run(World(0, 1, torch.device("cpu")), folder, stage, resolved, StopRequest())
    run.contents.update(contents or {})
    return run


def write_lines(folder: Path, name: str, rows: list[dict[str, Any]]) -> None:
    folder.mkdir(exist_ok=True)
    (folder / name).write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")


def write_rows(folder: Path, name: str, values: dict[int, list[float]]) -> None:
    """Write the values of held-out rows of the evaluation of each step."""
    lines = (row_values_line(step, {name: rows}, "data") for step, rows in values.items())
    (folder / "row_values.jsonl").write_text("".join(lines))


def card_of(run: Run, *, kind: str = "A model", step: int = 20, scores: bool = False) -> str:
    model = run.resolved.config.actor if run.stage is PPO else run.resolved.config.model
    return model_documents(run, model=model, kind=kind, step=step, scores=scores)["README.md"]


@pytest.fixture
def base(tmp_path: Path) -> Path:
    """A folder of a model that this project made of org/base, whose card names the licence."""
    folder = tmp_path / "base"
    folder.mkdir()
    (folder / "README.md").write_text("---\nlicense: apache-2.0\nbase_model: org/base\n---\n# Base\n")
    (folder / "training_config.json").write_text("{}")
    return folder


def test_the_card_of_an_sft_model(tmp_path: Path, base: Path) -> None:
    run = make_run(
        tmp_path / "run", SFT, "--model-name-or-path", base, "--data-path", tmp_path / "hh/train.jsonl", "org/set:0.5",
        "--learning-rate", "0.5", "--seed", "1234", "--output-dir", tmp_path / "out", "--max-steps", "20",
        contents={"model": HASH, "data_path": [f"{HASH}:1", "org/set:0.5"]},
    )  # fmt: skip
    lines = [{"step": 0, "eval_loss": 2.0, "eval_perplexity": 7.39, "eval_rows": 50}]
    lines += [{"step": step, "loss": float(step)} for step in range(1, 26)]
    lines += [{"step": step, "eval_loss": 1 / step, "eval_perplexity": None, "eval_rows": 50} for step in (20, 25)]
    write_lines(tmp_path / "run", "metrics.jsonl", lines)
    text = card_of(run)
    card, parts = ModelCard(text), sections(text)
    data = card.data.to_dict()
    assert (data["license"], data["base_model"], data["library_name"]) == ("apache-2.0", "org/base", "transformers")
    assert (data["datasets"], data["pipeline_tag"], data["tags"]) == (["org/set"], "text-generation", ["rlhf", "sft"])
    (result,) = card.data.eval_results or []  # null is no result, and what follows step 20 is not of this model
    assert (result.metric_type, result.metric_value) == ("loss", 0.05)
    assert result.dataset_name == "hh/train.jsonl, org/set:0.5"
    assert rows_of(parts["Evaluation"][1]) == [["`eval_loss`", "2", "0.05", ""]]
    curve = rows_of(parts["Training"][0])
    assert [row[:2] for row in curve] == [[f"{n} to {n + 1}", f"{n + 0.5:g}"] for n in range(1, 20, 2)]
    assert [len(row[2]) for row in curve] == [round(1 + 19 * n / 9) for n in range(10)]
    assert rows_of(parts["What it is made of"][1]) == [
        ["model", "`base`", f"SHA-256 `{HASH}`"],
        ["`--data-path`", "`hh/train.jsonl`", f"SHA-256 `{HASH}`"],
        ["`--data-path`", "`org/set:0.5`", ""],
        ["licence of the base", "`apache-2.0`", ""],
    ]
    assert rows_of(parts["Settings"][1]) == [
        ["`--learning-rate`", "`0.5`", "`command line`"], ["`--max-steps`", "`20`", "`command line`"]
    ]  # fmt: skip
    assert str(tmp_path) not in text


def test_the_card_of_a_reward_model_has_the_error_of_its_accuracy(tmp_path: Path) -> None:
    run = make_run(tmp_path, REWARD, "--model-name-or-path", "org/base@v1", "--data-path", "a.jsonl")
    line = {"step": 20, "eval_accuracy": 0.64, "eval_margin": 1.5, "eval_rows": 100, "loss": 1.0, "accuracy": 0.5}
    write_lines(tmp_path, "metrics.jsonl", [line])
    write_rows(tmp_path, "eval_accuracy", {20: [1.0] * 64 + [0.0] * 36})
    text = card_of(run, scores=True)
    data = ModelCard(text).data
    assert (data.pipeline_tag, data.base_model, data.tags) == ("text-classification", "org/base", ["rlhf", "reward"])
    assert rows_of(sections(text)["Evaluation"][1]) == [
        ["`eval_accuracy`", "0.64", "0.64", "0.04824"], ["`eval_margin`", "1.5", "1.5", ""]
    ]  # fmt: skip
    assert "mean of `accuracy`" in sections(text)["Training"][0]


def test_the_card_says_what_the_rows_can_show_and_what_it_cost(tmp_path: Path) -> None:
    """At the step of its weights: what follows is of other ones."""
    run = make_run(tmp_path, REWARD, "--model-name-or-path", "org/base", "--data-path", "a.jsonl")
    values = ((0, 0.5), (20, 0.51), (30, 1.0))
    lines = [{"step": n, "eval_accuracy": x, "eval_rows": 100, "time": 3600.0, "num_tokens": 2e6} for n, x in values]
    write_lines(tmp_path, "metrics.jsonl", lines)
    write_rows(tmp_path, "eval_accuracy", {n: [1.0] * round(100 * x) + [0.0] * round(100 - 100 * x) for n, x in values})
    titles, metrics = {"eval_accuracy": "held-out accuracy"}, {"accuracy": {"better": 1}}
    (tmp_path / "meaning.json").write_text(json.dumps({"titles": titles, "metrics": metrics, "starts": [[-1, 2, 0.0]]}))
    for step, said in ((20, "no difference that 100 rows can show"), (30, "better than at the start")):
        text = card_of(run, step=step, scores=True)
        assert f"From step to step: {said}." in text and f"{step} optimizer steps, 2 GPU hours, 2M tokens." in text


def actor_run(folder: Path, base: Path, *words: object) -> Run:
    (folder / "mine").mkdir(exist_ok=True)
    (folder / "mine/rules.py").write_text("def short(completions): ...\n")
    write_lines(folder / "run", "samples.jsonl", [{"step": 20, "finished": True, **row} for row in SAMPLES])
    scores = {"eval_objective/scores": 3.0, "eval_objective/kl": 0.75, "eval_rows": 4}
    write_lines(folder / "run", "metrics.jsonl", [{"step": 20, **scores}])
    write_rows(folder / "run", "eval_objective/scores", {20: [float(one["score"]) for one in SAMPLES]})
    function = json.dumps(
        {"name": f"{folder}/mine/rules.py:short", "weight": 2, "args": {"most": 9, "api_key": SECRET}}
    )
    judge = json.dumps({"name": "judge:0.5", "args": {"url": f"http://{SECRET}/v1", "model": "m"}})
    return make_run(
        folder / "run", PPO, "--actor-model-name-or-path", base, "--method", "grpo",
        "--reward-function", function, judge,
        "--reward-model-name-or-path", folder / "scorer", "--more-reward-models", f"{folder}/other:0.5", *words,
        contents={"actor model": HASH, "reward_2 model": HASH, "file of reward function short": HASH},
    )  # fmt: skip


def test_the_card_of_an_actor_has_samples_rewards_and_errors(tmp_path: Path, base: Path) -> None:
    run = actor_run(tmp_path, base)
    text = card_of(run)
    assert ModelCard(text).data.tags == ["rlhf", "ppo", "grpo"]
    error = 2.160247 / 2  # deviation of 1, 2, 3, 6 over the root of 4
    assert rows_of(sections(text)["Evaluation"][1]) == [
        ["`eval_objective/scores`", "3", "3", f"{error:.4g}"],
        ["`eval_objective/kl`", "0.75", "0.75", f"{math.sqrt(1.25 / 3) / 2:.4g}"],
    ]
    made_of = [row for row in rows_of(sections(text)["What it is made of"][1]) if "data-path" not in row[0]]
    assert made_of[:4] == [
        ["actor model", "`base`", f"SHA-256 `{HASH}`"],
        ["reward model", "`scorer`", ""],
        ["reward_2 model", "`other`", f"SHA-256 `{HASH}`"],
        ["file of reward function short", "", f"SHA-256 `{HASH}`"],
    ]
    settings = {row[0].strip("`-"): row[1:] for row in rows_of(sections(text)["Settings"][1])}
    assert "rules.py:short" in settings["reward-function"][0]
    assert settings["kl-in-loss"] == ["`true`", "`method grpo`"], "the method's own defaults are told"
    documents = model_documents(run, model=run.resolved.config.actor, kind="A model", step=20)
    assert str(tmp_path) not in "".join(documents.values()) and SECRET not in "".join(documents.values())
    (short, judge) = map(json.loads, json.loads(documents["training_config.json"])["rewards"]["reward_function"])
    assert short["args"] == {"most": 9, "api_key": "***"} and judge == {"name": "judge:0.5"}


def test_samples_of_one_prompt_give_no_error(tmp_path: Path, base: Path) -> None:
    run = actor_run(tmp_path, base)
    write_lines(tmp_path / "run", "samples.jsonl", [{"step": 20, "finished": True, **SAMPLES[0]}] * 4)
    assert rows_of(sections(card_of(run))["Evaluation"][1])[1][3] == ""


def test_nothing_in_a_card_breaks_out(tmp_path: Path, base: Path) -> None:
    """Texts of models, names of files and values of flags are text for a reader of Markdown."""
    name = "a`|<b>x.jsonl"
    (tmp_path / name).write_text("")
    words = ("--data-path", tmp_path / name, "--stop-strings", "``|\n<i>")
    text = card_of(actor_run(tmp_path, base, *words))
    tokens = MarkdownIt().enable("table").parse(ModelCard(text).text)
    inline = [child for token in tokens for child in token.children or ()]
    assert not [token for token in [*tokens, *inline] if token.type.startswith("html")]
    headings = [tokens[at + 1].content for at, token in enumerate(tokens) if token.type == "heading_open"]
    assert headings == ["A model", "How to load it", "Evaluation", "Samples", "What it is made of", "Settings"]
    blocks = [token.content for token in tokens if token.type == "fence" and token.info == "text"]
    answer = BREAKOUT.replace("\x1b", "\\x1b").replace("\u202e", "\\u202e")
    assert blocks == [
        block for row in SAMPLES[:3] for block in (f"Who {SAMPLES.index(row)}? {answer}\n", f"{answer}\n")
    ]
    codes = [token.content for token in inline if token.type == "code_inline"]
    assert name in codes and '["``|\\n<i>"]' in codes


def test_a_long_text_is_cut(tmp_path: Path, base: Path) -> None:
    run = actor_run(tmp_path, base)
    write_lines(
        tmp_path / "run", "samples.jsonl", [{"step": 20, "finished": True, **SAMPLES[0], "response": "x" * 5000}]
    )
    assert "x" * 1500 + " \N{HORIZONTAL ELLIPSIS} (3,500 more characters)" in card_of(run)


def test_an_adapter_alone_is_of_peft(tmp_path: Path) -> None:
    words = ("--model-name-or-path", "org/base", "--data-path", "a.jsonl", "--lora-dim", 4, "--save-adapter-only")
    text = card_of(make_run(tmp_path, SFT, *words))
    data = ModelCard(text).data
    assert (data.library_name, data.base_model, data.tags) == ("peft", "org/base", ["rlhf", "sft", "lora"])
    assert "AutoPeftModelForCausalLM" in text and "Evaluation" not in text


def test_metadata_name_hub_ids_and_no_files(tmp_path: Path) -> None:
    (tmp_path / "mine.jsonl").write_text("")
    sources = ["Dahoas/rm-static:0.3", "org/other", f"{tmp_path}/mine.jsonl:0.5", "yours.jsonl:0.5", "mkqa-Japanese@v1"]
    text = card_of(make_run(tmp_path, SFT, "--model-name-or-path", "org/base", "--data-path", *sources))
    data = ModelCard(text).data
    assert data.datasets == ["Dahoas/rm-static", "org/other", "apple/mkqa"] and data.base_model == "org/base"
    assert str(tmp_path) not in text and "`mine.jsonl:0.5`" in text


@pytest.mark.parametrize(
    ("card", "licence", "expected"),
    [
        ("---\nlicense: mit\n---\n", "Apache License\n", "mit"),
        ("---\nlicense: [a, b]\n---\n", "", None),
        ("---\nlicense: {\n---\n", "MIT License\n", "mit"),
        (None, "                Apache License\n         Version 2.0", "apache-2.0"),
        (None, "All rights reserved.", None),
        ("# No metadata\n", "", None),
    ],
)
def test_the_licence_of_the_base(tmp_path: Path, card: str | None, licence: str, expected: str | None) -> None:
    base = tmp_path / "other"
    base.mkdir()
    if card is not None:
        (base / "README.md").write_text(card)
    (base / "LICENSE").write_text(licence)
    text = card_of(make_run(tmp_path, SFT, "--model-name-or-path", base, "--data-path", "a.jsonl"))
    data = ModelCard(text).data
    assert data.license == expected and data.base_model is None, "a folder of unknown origin is no id"
    assert ("licence of the base" in text) == (expected is not None)


def test_the_licence_of_a_hub_id_is_read_in_the_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    model = tmp_path / "models--org--tiny"
    (model / "snapshots/abc").mkdir(parents=True)
    (model / "refs").mkdir()
    (model / "refs/main").write_text("abc")
    (model / "snapshots/abc/README.md").write_text("---\nlicense: other\nlicense_name: otter\n---\n")
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_CACHE", str(tmp_path))
    text = card_of(make_run(tmp_path, SFT, "--model-name-or-path", "org/tiny", "--data-path", "a.jsonl"))
    assert (ModelCard(text).data.license, ModelCard(text).data.license_name) == ("other", "otter")


@pytest.mark.parametrize(
    ("source", "expected"),
    [
        ("org/set@v1:0.5", "org/set@v1:0.5"),
        ("{0}/helpful.jsonl:0.5", "helpful.jsonl:0.5"),
        ("{0}/train-00001.parquet", "hh/train-00001.parquet"),
        ("train.jsonl", "train.jsonl"),
        ("/home/somebody/train.jsonl", "train.jsonl"),
        ("{0}", "hh (helpful.jsonl, train-00001.parquet)"),
    ],
)
def test_names_of_data_tell_what_it_is(tmp_path: Path, source: str, expected: str) -> None:
    folder = tmp_path / "hh"
    folder.mkdir()
    for name in ("helpful.jsonl", "train-00001.parquet", "notes"):
        (folder / name).write_text("")
    assert data_name(source.format(folder)) == expected


def test_a_folder_of_many_files_is_told_by_the_first(tmp_path: Path) -> None:
    for number in range(9):
        (tmp_path / f"{number}.csv").write_text("")
    assert data_name(str(tmp_path)).endswith(" (0.csv, 1.csv, 2.csv, 3.csv, 4.csv, ...)")


def test_files_of_reward_functions_are_named_without_their_folders(tmp_path: Path, base: Path) -> None:
    shared = shareable_flags(actor_run(tmp_path, base).resolved.config)
    assert shared["more_reward_models"] == ["other:0.5"]
    assert json.loads(shared["reward_function"][0])["name"] == "rules.py:short"
