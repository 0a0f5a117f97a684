"""`rlhf sample` with reward models: their raw scores are those of transformers, beside functions, on any batch."""

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from support.in_process import undone_afterwards
from support.messages import naming
from support.scripted_model import ending_model, save, tiny_config
from transformers import AutoModelForSequenceClassification, AutoTokenizer
from transformers import LlamaForSequenceClassification as Classifier

from pipeline.errors import InputError
from pipeline.inference import answer_scores, answers
from pipeline.inference.answer_scores import prompt_limit
from pipeline.models.source import ModelSource, num_positions
from rlhf.rewards.sample import main

FUNCTIONS = """
def length(completions):
    return [len(text) for text in completions]

def odd(completions):  # does not apply to even lengths
    return [1e9 + len(text) if len(text) % 2 else None for text in completions]
"""
QUESTIONS = ["one", "two and three", "four", "five"]


def tiny_judge(bpe_folder: Path, folder: Path, seed: int) -> str:
    """A random reward model, whose scores have constants that its raw scores must not be changed by."""
    torch.manual_seed(seed)
    config = tiny_config()
    config.num_labels, config.score_mean, config.score_std = 1, 5.0, 7.0
    model = Classifier(config)
    torch.nn.init.normal_(model.score.weight, std=1.0)
    return save(model, bpe_folder, folder)


@pytest.fixture
def model(bpe_folder, tmp_path, monkeypatch) -> str:
    """A random model of which some answers end and others do not, beside `first/`, `second/`, `q.jsonl` and `f.py`."""
    monkeypatch.chdir(tmp_path)
    Path("q.jsonl").write_text("".join(json.dumps({"prompt": text}) + "\n" for text in QUESTIONS))
    Path("f.py").write_text(FUNCTIONS)
    tiny_judge(bpe_folder, tmp_path / "first", 1)
    tiny_judge(bpe_folder, tmp_path / "second", 2)
    with undone_afterwards():
        yield ending_model(bpe_folder, tmp_path / "model")


def sampled(capsys: pytest.CaptureFixture, model: str, *words: object, code: int = 0) -> Any:
    """The rows of standard output and stderr."""
    flags = ["--data", "q.jsonl", "--max-new-tokens", "8", "--dtype", "fp32", "-n", "4"]
    assert main([model, *flags, *map(str, words)]) == code, capsys.readouterr().err
    shown = capsys.readouterr()
    return [json.loads(line) for line in shown.out.splitlines()], shown.err


def raw_score(folder: str, prompt: str, answer: dict[str, Any]) -> float:
    """The score of an answer by transformers' own class on the text as the chat template writes it."""
    tokenizer, judge = AutoTokenizer.from_pretrained(folder), AutoModelForSequenceClassification.from_pretrained(folder)
    turns = [{"role": "user", "content": prompt}, {"role": "assistant", "content": answer["text"]}]
    ids = tokenizer(tokenizer.apply_chat_template(turns, tokenize=False), add_special_tokens=False)["input_ids"]
    assert ids[-1] == 2
    with torch.no_grad():
        return judge(torch.tensor([ids if answer["finish_reason"] == "end" else ids[:-1]])).logits.item()


@pytest.mark.few(1)
@pytest.mark.parametrize("batch_size", [1, 3])
def test_raw_scores_of_transformers_are_added_to_those_of_functions(model, capsys, batch_size):
    rewards = ("--reward-model", "first", "second:-0.5", "--reward-function", "f.py:length:2")
    rows, _ = sampled(capsys, model, *rewards, "--batch-size", batch_size)
    answers = [(row["prompt"], one) for row in rows for one in row["answers"]]
    assert [row["prompt"] for row in rows] == QUESTIONS and len(answers) == 16
    assert {one["finish_reason"] for _, one in answers} == {"end", "limit"}
    for prompt, one in answers:
        expected = {folder: raw_score(folder, prompt, one) for folder in ("first", "second")}
        expected["length"] = len(one["text"])
        assert one["scores"] == pytest.approx(expected, abs=1e-5)
        assert one["reward"] == pytest.approx(expected["first"] - expected["second"] / 2 + 2 * expected["length"])


def test_the_scores_are_summed_up(model, capsys):
    """Mean, deviation over all answers, and the slope of a regression with a level of its own for each prompt."""
    rows, shown = sampled(capsys, model, "--reward-model", "first", "--reward-function", "f.py:length", "f.py:odd")
    answers = [(n, one) for n, row in enumerate(rows) for one in row["answers"]]
    for name in ("first", "length", "odd"):
        known = [(n, one) for n, one in answers if one["scores"][name] is not None]
        scores = np.array([one["scores"][name] for _, one in known])
        levels = np.eye(len(rows))[[n for n, _ in known]]
        design = np.column_stack([[one["num_tokens"] for _, one in known], levels])
        slope = np.linalg.lstsq(design, scores, rcond=None)[0][0]
        expected = f"{name}: mean {scores.mean():.4g}, standard deviation {scores.std():.3g} over {len(known)} answers"
        worth = f", {slope * 8 / 7:+.2g} of stage 2's deviations in 8 tokens" if name == "first" else ""
        assert shown == naming(f"{expected} ... {slope:+.2g} a token ... prompt{worth}")
    assert 0 < sum(one["scores"]["odd"] is None for _, one in answers) < len(answers)
    assert "mean" not in sampled(capsys, model)[1]


def test_pairs_are_the_best_and_the_worst_by_the_model(model, capsys):
    rows, _ = sampled(capsys, model, "--reward-model", "first")
    pairs, shown = sampled(capsys, model, "--reward-model", "first", "--as", "pairs")
    assert len(pairs) >= 2 and f"{len(pairs)} rows of 4 prompts" in shown
    answers = {row["number"]: row["answers"] for row in rows}
    for pair in pairs:
        usable = [one for one in answers[pair["number"]] if one["text"]]
        best = max((one for one in usable if one["finish_reason"] == "end"), key=lambda one: one["reward"])
        assert (pair["chosen"], pair["rejected"]) == (best["text"], min(usable, key=lambda one: one["reward"])["text"])


def test_a_file_is_gone_on_with_by_the_same_reward_models_alone(model, capsys, bpe_folder):
    words = ("--reward-model", "first", "--output", "a.jsonl")
    sampled(capsys, model, *words)
    whole = Path("a.jsonl").read_text()
    Path("a.jsonl").write_text("".join(whole.splitlines(keepends=True)[:2]))
    assert "resuming after prompt 2 of 4" in sampled(capsys, model, *words)[1]
    again = [json.loads(line) for line in Path("a.jsonl").read_text().splitlines()]
    for row, other in zip(again, map(json.loads, whole.splitlines()), strict=True):
        for one, twin in zip(row["answers"], other["answers"], strict=True):
            assert one["text"] == twin["text"] and one["scores"] == pytest.approx(twin["scores"], abs=1e-4)
    for changed in (("first:2",), ("second",), ()):
        others = ("--reward-model", *changed) if changed else ()
        assert "started with reward_model " in sampled(capsys, model, *others, *words[2:], code=2)[1]
    tiny_judge(bpe_folder, Path("first"), 3)
    assert "started with reward_model " in sampled(capsys, model, *words, code=2)[1], "other weights in the same folder"


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (("--reward-model", "first:much"), "--reward-model ... first:much ... 'much' ... finite number"),
        (("--reward-model", "model"), "--reward-model ... model has no reward head (LlamaForCausalLM)"),
        (("--reward-model", "./frist"), "--reward-model: ./frist: no such folder"),
        (("--reward-model", "first", "--reward", "f.py:first"), "--reward-model: first names two rewards"),
        (("--reward-model", "first", "first:2"), "--reward-model: first names two rewards"),
        (
            ("--as", "sft"),
            "--write-as sft ... --reward-function or --reward-model ... 4 answers",
        ),
        (("--as", "pairs"), "--write-as pairs ... --n of at least 2 ... --reward-function or --reward-model"),
    ],
)
def test_wrong_reward_models_are_one_line_and_exit_2(model, capsys, words, message):
    _, shown = sampled(capsys, model, *words, code=2)
    (line,) = [line for line in shown.splitlines() if not line.startswith("note: ")]
    assert line.startswith("error: ") and line == naming(message)


def test_scores_that_are_no_numbers_end_with_2(model, capsys, bpe_folder):
    broken = Classifier.from_pretrained("first")
    torch.nn.init.constant_(broken.score.weight, 1e38)
    save(broken, bpe_folder, Path("broken"))
    assert (
        "--reward-model: broken gives scores that are not finite"
        in sampled(capsys, model, "--reward-model", "broken", code=2)[1]
    )


def test_one_score_that_is_no_number_ends_with_2(model, capsys, monkeypatch):
    """It is the last one of a batch."""
    whole = answer_scores.score_ids

    def one_broken(*given: Any) -> torch.Tensor:
        scores = whole(*given)
        scores[-1] = float("nan")
        return scores

    monkeypatch.setattr(answer_scores, "score_ids", one_broken)
    words = ("--reward-model", "first", "--batch-size", 4)
    assert "--reward-model: first gives scores that are not finite" in sampled(capsys, model, *words, code=2)[1]


def test_logits_of_one_answer_that_are_not_finite_end_with_2(model, capsys, monkeypatch):
    """They come after a token that one of four answers to a prompt has."""
    rows, _ = sampled(capsys, model)
    Path("q.jsonl").write_text(json.dumps({"prompt": rows[0]["prompt"]}) + "\n")
    tokenizer, load = AutoTokenizer.from_pretrained(model), answers.on_devices
    first, *others = ({*tokenizer(each["text"])["input_ids"][:-1]} for each in rows[0]["answers"])

    def broken(*given: Any) -> Any:
        made = load(*given)
        made.get_input_embeddings().weight.data[[*(first - set.union(*others))]] = float("nan")
        return made

    monkeypatch.setattr(answers, "on_devices", broken)
    assert "its logits are not finite" in sampled(capsys, model, code=2)[1]


def test_an_answer_that_a_stop_string_ended_is_scored_with_an_end_token(model, capsys):
    rows, _ = sampled(capsys, model, "--reward-model", "first", "--stop-strings", *"aeiou")
    answers = [(row["prompt"], one) for row in rows for one in row["answers"]]
    assert "stop" in {one["finish_reason"] for _, one in answers}
    for prompt, one in answers:
        ended = {**one, "finish_reason": "limit" if one["finish_reason"] == "limit" else "end"}
        assert one["scores"]["first"] == pytest.approx(raw_score("first", prompt, ended), abs=1e-5)


def test_a_file_is_not_gone_on_with_where_a_column_that_rewards_read_has_changed(model, capsys):
    def write(answer: str) -> None:
        Path("q.jsonl").write_text(
            "".join(json.dumps({"prompt": text, "answer": answer}) + "\n" for text in ("one", "two"))
        )

    words = ("--reward-function", "exact_match", "--output", "o.jsonl")
    write("4")
    sampled(capsys, model, *words)
    sampled(capsys, model, *words)  # the same file again: nothing is left to do
    write("5")
    _, shown = sampled(capsys, model, *words, code=2)
    assert "o.jsonl" in shown and "prompts" in shown


def test_a_file_is_not_gone_on_with_by_another_weight_of_a_function(model, capsys):
    sampled(capsys, model, "--reward-function", "f.py:length:2", "--output", "o.jsonl")
    _, shown = sampled(capsys, model, "--reward-function", "f.py:length:3", "--output", "o.jsonl", code=2)
    assert "o.jsonl" in shown and "reward_function" in shown


def test_a_prompt_may_take_all_positions_that_new_tokens_leave(model):
    source = ModelSource(model)
    positions = num_positions(source.config)
    assert prompt_limit(source, 0, 8) == positions - 8 == prompt_limit(source, positions - 8, 8)
    assert prompt_limit(source, 0, positions - 1) == 1
    for length, new in ((positions - 7, 8), (0, positions)):
        with pytest.raises(InputError, match="positions"):
            prompt_limit(source, length, new)
