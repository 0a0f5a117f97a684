"""`rlhf sample` from its command line: answers, log-probabilities, scores, and files that are gone on with."""

import json
import time
from pathlib import Path
from typing import Any

import pytest
import torch
from support.in_process import undone_afterwards
from support.messages import naming
from support.scripted_model import ending_model, save, tiny_config
from support.tiny_t5 import make_t5_folder
from transformers import AutoModelForCausalLM, AutoTokenizer, LlamaForCausalLM

from pipeline.data.counts import Counts
from pipeline.data.formats import read_records
from pipeline.data.row_kinds import PAIRS, SEQUENCES, TokenizationOptions
from pipeline.data.sources import read_rows
from pipeline.generation.eager import EagerSession
from pipeline.run.lock import lock_held
from rlhf.rewards.sample import main

CODE = """
import json, os, time
from pathlib import Path
HERE = Path(__file__).parent
def length(completions):
    return [len(text) for text in completions]
def named(completions, wanted):
    return [None if word is None else float(word in text) for text, word in zip(completions, wanted)]
def failing(completions, prompts):
    if "two" in prompts[0]:
        raise ValueError("not of two")
    return [1.0] * len(completions)
def same(completions):
    return [1.0] * len(completions)
def wrong(completions, prompts):
    return ["good" if "three" in prompts[0] else 1.0] * len(completions)
def spoken(prompts, completions):
    return [len(prompts[0]) + (completions[0][0]["role"] == "assistant")] * len(completions)
def told(prompts, completion_ids):
    with (HERE / "told.jsonl").open("a") as file:
        file.write(json.dumps([prompts[0], completion_ids]) + chr(10))
    return [0.0] * len(completion_ids)
def slow(completions):
    time.sleep(2)
    return [1.0] * len(completions)
def meet(completions):
    (HERE / f"met-{os.getpid()}").touch()
    end = time.monotonic() + 10
    while (met := len(list(HERE.glob("met-*")))) < 3 and time.monotonic() < end:
        time.sleep(0.01)
    return [met] * len(completions)
"""
QUESTIONS = ["one", "two", "three", "one", "four"]  # one of them twice


@pytest.fixture(scope="module")
def model(bpe_folder, tmp_path_factory) -> str:
    """A random model of which some answers end and others do not."""
    return ending_model(bpe_folder, tmp_path_factory.mktemp("model"))


@pytest.fixture
def folder(tmp_path, monkeypatch):
    """The folder of the command, with questions and reward functions."""
    monkeypatch.chdir(tmp_path)
    Path("f.py").write_text(CODE)
    write("q.jsonl", *({"prompt": text} for text in QUESTIONS))
    with undone_afterwards():
        yield tmp_path


def write(name: str, *rows: dict[str, Any]) -> None:
    Path(name).write_text("".join(json.dumps(row) + "\n" for row in rows))


def sampled(capsys: pytest.CaptureFixture, model: str, *words: object, data: str = "q.jsonl", code: int = 0) -> Any:
    """The rows that the command writes to standard output, or to the file that is named last, and its stderr."""
    flags = ["--data", data, "--max-new-tokens", "8", "--dtype", "fp32"]
    assert main([model, *flags, *map(str, words)]) == code, capsys.readouterr().err
    shown = capsys.readouterr()
    text = Path(str(words[-1])).read_text() if "--output" in words else shown.out
    return [json.loads(line) for line in text.splitlines()], shown.err


def plain(rows: list[dict[str, Any]]) -> list[Any]:
    """Rows without log-probabilities, whose last bits depend on what is computed beside them."""
    return [row | {"answers": [one | {"log_prob": 0} for one in row["answers"]]} for row in rows]


def log_probs(rows: list[dict[str, Any]]) -> list[float]:
    return [one["log_prob"] for row in rows for one in row["answers"]]


# ---- answers ----


def test_answers_depend_on_the_seed_and_not_on_the_batch(folder, model, capsys):
    rows, shown = sampled(capsys, model, "-n", 4)
    assert [(row["number"], row["prompt"]) for row in rows] == [*enumerate(QUESTIONS, start=1)]
    assert shown.splitlines()[-1] == naming("5 rows of 5 prompts")
    for size in (1, 2, 3):
        others, _ = sampled(capsys, model, "-n", 4, "--batch-size", size)
        assert plain(others) == plain(rows) and log_probs(others) == pytest.approx(log_probs(rows), abs=1e-4)
    texts = [[one["text"] for one in row["answers"]] for row in rows]
    assert len({*texts[0], *texts[3]}) == 8, "a prompt that is there twice has other answers"
    assert {one["finish_reason"] for row in rows for one in row["answers"]} == {"end", "limit"}
    assert plain(sampled(capsys, model, "-n", 4, "--seed", 5)[0]) != plain(rows)
    few, _ = sampled(capsys, model, "-n", 2)
    assert plain(few) == plain([row | {"answers": row["answers"][:2]} for row in rows])


@pytest.mark.parametrize("how", [(0.7, 0.8, 0), (1.5, 1.0, 20), (0.0, 1.0, 0)])
def test_log_probabilities_are_those_of_a_forward_pass_of_transformers(folder, model, capsys, how):
    temperature, top_p, top_k = how
    count = 3 if temperature else 1
    words = ("--n", count, "--temperature", temperature, "--top-p", top_p, "--top-k", top_k, "--reward", "f.py:told")
    rows, _ = sampled(capsys, model, *words, "--reward-workers", 1)
    told = dict(map(json.loads, Path("told.jsonl").read_text().splitlines()))
    judge, tokenizer = AutoModelForCausalLM.from_pretrained(model).eval(), AutoTokenizer.from_pretrained(model)
    assert len(told) == 4
    for row in (row for row in rows if row["prompt"] != "one"):
        turns = [{"role": "user", "content": row["prompt"]}]
        text = tokenizer.apply_chat_template(turns, add_generation_prompt=True, tokenize=False)
        prompt = tokenizer(text, add_special_tokens=False)["input_ids"]
        for one, ids in zip(row["answers"], told[row["prompt"]], strict=True):
            with torch.no_grad():
                logits = judge(torch.tensor([prompt + ids])).logits[0, len(prompt) - 1 : -1]
            expected = (logits.double() / (temperature or 1.0)).log_softmax(-1)
            assert one["log_prob"] == pytest.approx(
                sum(expected[n, token].item() for n, token in enumerate(ids)), abs=1e-4
            )
            assert (one["num_tokens"], one["finish_reason"]) == (len(ids), "end" if ids[-1] == 2 else "limit")
            assert one["text"] == tokenizer.decode(ids, skip_special_tokens=True).strip()
            if not temperature:
                assert ids == logits.argmax(-1).tolist()


# ---- reward functions ----


def test_scores_and_their_weighted_sum(folder, model, capsys):
    write("q.jsonl", {"prompt": "one", "wanted": "e"}, {"prompt": "two", "wanted": None}, {"prompt": "three"})
    rows, _ = sampled(capsys, model, "-n", 3, "--reward", "f.py:length:-0.5", "f.py:named:10")
    for row in rows:
        for one in row["answers"]:
            length, named = float(len(one["text"])), float("e" in one["text"]) if row["number"] == 1 else None
            assert one["scores"] == {"length": length, "named": named}
            assert one["reward"] == pytest.approx(-0.5 * length + 10 * (named or 0))
    unscored, _ = sampled(capsys, model, "-n", 3)
    assert {json.dumps(one["scores"]) + str(one["reward"]) for row in unscored for one in row["answers"]} == {"{}None"}
    assert log_probs(unscored) == pytest.approx(log_probs(rows))


def test_functions_of_a_conversation_get_messages(folder, model, capsys):
    turns = [{"role": role, "content": f"{n}"} for n, role in enumerate(("system", "user", "assistant", "user"))]
    write("q.jsonl", {"messages": turns}, {"prompt": "one"})
    rows, _ = sampled(capsys, model, "--reward", "f.py:spoken")
    assert [row["answers"][0]["scores"] for row in rows] == [{"spoken": 5.0}, {"spoken": 2.0}]
    assert [row["prompt"] for row in rows] == [turns, [{"role": "user", "content": "one"}]]


def test_a_function_that_fails_gives_null_and_is_counted(folder, model, capsys):
    rows, shown = sampled(capsys, model, "-n", 2, "--reward", "f.py:failing", "f.py:length")
    for row in rows:
        is_two = row["prompt"] == "two"
        assert [one["scores"]["failing"] for one in row["answers"]] == [None if is_two else 1.0] * 2
        assert [one["reward"] is None for one in row["answers"]] == [is_two] * 2
        assert all(one["scores"]["length"] == len(one["text"]) for one in row["answers"])
    assert shown == naming("note: failing ... 2 answers ... (raised) ... not of two (f.py:11)")


def test_a_wrong_value_ends_with_2_and_the_rows_before_it_stay(folder, model, capsys):
    rows, shown = sampled(capsys, model, "--reward", "f.py:wrong", "--output", "a.jsonl", code=2)
    assert [row["number"] for row in rows] == [1, 2]
    (line,) = shown.splitlines()
    assert line == naming(f"error: --reward-function {folder}/f.py:wrong ... prompt q.jsonl:3 ... response 0")


@pytest.mark.slow
def test_a_call_that_takes_too_long_gives_no_value(folder, model, capsys):
    rows, shown = sampled(capsys, model, "--reward", "f.py:slow", "--reward-timeout-s", 0.5, code=2)
    assert {one["reward"] for row in rows for one in row["answers"]} == {None}
    assert naming("slow ... 5 answers ... (timed out)") in shown.splitlines()
    assert naming("error: --reward-function ... slow ... 5 of the last 5 ... (5 timed out)") in shown.splitlines()


def test_as_many_workers_as_the_flag_says(folder, model, capsys):
    """Three processes that wait for each other."""
    write("q.jsonl", *({"prompt": text} for text in QUESTIONS[:3]))
    rows, _ = sampled(capsys, model, "--reward", "f.py:meet", "--reward-workers", 3)
    assert [one["reward"] for row in rows for one in row["answers"]] == [3.0] * 3


@pytest.mark.slow
def test_answers_are_scored_and_written_while_others_are_sampled(folder, model, capsys, monkeypatch):
    """A sampler that is slow sees the file grow."""
    advance, sizes = EagerSession.advance, []

    def slow(session: EagerSession, **given: Any) -> Any:
        sizes.append(Path("a.jsonl").read_bytes().count(b"\n"))
        time.sleep(0.02)
        return advance(session, **given)

    monkeypatch.setattr(EagerSession, "advance", slow)
    write("q.jsonl", *({"prompt": f"{n}"} for n in range(60)))
    rows, _ = sampled(capsys, model, "--reward", "f.py:length", "--batch-size", 1, "--output", "a.jsonl")
    assert len(rows) == 60 and sizes[0] == 0 < sizes[-1]


# ---- files that are gone on with ----


@pytest.mark.slow
@pytest.mark.parametrize("layout", ["answers", "pairs"])
def test_a_file_that_is_cut_anywhere_is_gone_on_with(folder, model, capsys, layout):
    flags = ("-n", 3, "--reward", "f.py:length", "--as", layout, "--batch-size", 2, "--output", "a.jsonl")
    rows, _ = sampled(capsys, model, *flags)
    whole = Path("a.jsonl").read_bytes()
    ends = [n + 1 for n, byte in enumerate(whole) if byte == ord("\n")]
    assert len(ends) == len(rows) >= 3
    for cut in (
        0,
        1,
        ends[0] - 1,
        ends[0],
        ends[0] + 1,
        ends[1] - 2,
        (ends[1] + ends[2]) // 2,
        len(whole) - 1,
        len(whole),
    ):
        Path("a.jsonl").write_bytes(whole[:cut])
        again, shown = sampled(capsys, model, *flags)
        num_kept = sum(end <= cut for end in ends)
        told = f"resuming after prompt {rows[num_kept - 1]['number']} of 5"
        assert ("resuming" in shown, told in shown) == (num_kept > 0, num_kept > 0), cut
        if layout == "answers":
            assert plain(again) == plain(rows) and log_probs(again) == pytest.approx(log_probs(rows), abs=1e-4)
        else:
            assert again == rows
        length = ends[num_kept - 1] if num_kept else 0
        assert Path("a.jsonl").read_bytes()[:length] == whole[:length], "rows that are whole are not written again"


def test_a_file_that_is_whole_loads_no_model_and_one_that_another_process_writes_is_left(
    folder, model, capsys, monkeypatch
):
    sampled(capsys, model, "--output", "a.jsonl")
    monkeypatch.setattr("pipeline.inference.answers.load_chat_model", None)
    rows, _ = sampled(capsys, model, "--batch-size", 1, "--output", "a.jsonl")
    assert len(rows) == 5
    with lock_held(Path("a.jsonl"), Path(".a.jsonl.lock"), "--output"):
        assert main([model, "--data", "q.jsonl", "--output", "a.jsonl"]) == 3
    assert capsys.readouterr().err == naming("wait ... stop ... --output")


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (
            ("--seed", 5),
            "seed 1234, now 5 ... --output ... --overwrite",
        ),
        (("-n", 2, "--temperature", 0.5), "temperature 1.0, now 0.5 and n 1, now 2"),
        (("--as", "sft"), "write_as answers, now sft"),
        (("--reward", "f.py:length"), "reward_function [], now [['length'"),
        (("--data", "more.jsonl"), "started with prompts "),
    ],
)
def test_other_settings_are_refused(folder, model, capsys, change, message):
    write("more.jsonl", {"prompt": "five"})
    before, _ = sampled(capsys, model, "--output", "a.jsonl")
    rows, shown = sampled(capsys, model, *change, "--output", "a.jsonl", code=2)
    assert rows == before
    (line,) = [line for line in shown.splitlines() if not line.startswith("note: ")]
    assert line == naming("error: --output ... a.jsonl") and line == naming(message)
    rows, _ = sampled(capsys, model, *change, "--overwrite", "--output", "a.jsonl")
    assert rows != before


def test_another_model_is_refused_and_a_reward_file_that_has_changed(folder, model, bpe_folder, capsys):
    flags = ("--reward", "f.py:length", "--output", "a.jsonl")
    sampled(capsys, model, *flags)
    other = save(LlamaForCausalLM(tiny_config()), bpe_folder, folder / "other")
    assert "started with model " in sampled(capsys, other, *flags, code=2)[1]
    Path("f.py").write_text(CODE + "\n")
    assert "started with reward_function " in sampled(capsys, model, *flags, code=2)[1]


def test_rows_of_steps_1_and_2_are_read_by_their_readers(folder, model, capsys):
    write("q.jsonl", *({"prompt": f"{n}"} for n in range(12)))
    flags = ("-n", 4, "--reward", "f.py:length")
    answers, _ = sampled(capsys, model, *flags)
    expected = {}
    for row in answers:
        usable = [one for one in row["answers"] if one["text"]]
        ended = [one for one in usable if one["finish_reason"] == "end"]
        best = max(ended, key=lambda one: one["reward"], default=None)
        worst = min(usable, key=lambda one: one["reward"], default=None)
        expected[row["prompt"]] = (best, worst if best and worst["reward"] < best["reward"] else None)
    tokenizer = AutoTokenizer.from_pretrained(model)
    for layout, kind in (("sft", SEQUENCES), ("pairs", PAIRS)):
        name = f"{layout}.jsonl"
        _, shown = sampled(capsys, model, *flags, "--as", layout, "--output", name)
        records = list(read_records(read_rows(name), Counts()))
        wanted = {prompt: pair for prompt, pair in expected.items() if pair[0] and (layout == "sft" or pair[1])}
        assert len(wanted) >= 3 and [one.messages[0].content for one in records] == [*wanted]
        for one, (best, worst) in zip(records, wanted.values(), strict=True):
            assert one.chosen == best["text"] and (layout == "sft" or one.rejected == worst["text"])
        assert shown == naming(f"{len(wanted)} rows of 12 prompts")
        lost = [int(line.split()[1]) for line in shown.splitlines() if " without a row: " in line]
        assert sum(lost) == 12 - len(wanted)
        assert len(list(kind.rows(records, tokenizer, TokenizationOptions(), Counts()))) == len(wanted)


def test_equal_scores_give_no_pair(folder, model, capsys):
    rows, shown = sampled(capsys, model, "-n", 4, "--reward", "f.py:same", "--as", "pairs", "--output", "a.jsonl")
    assert rows == [] and shown == naming("0 rows of 5 prompts") and shown == naming("without a row ... equal")


# ---- errors ----


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["--data", "text.txt"], "--data ... text.txt ... 1 dropped: no prompt (first: text.txt:1)"),
        (["--column-map", "promt=a"], "--column-map promt=a ... 'promt'"),
        (["-n", "2", "--temperature", "0"], "--n: 2 ... --temperature above 0"),
        (["--as", "pair"], "--write-as: got 'pair' (command line)"),
        (["--reward", "f.py:named"], "named ... 'wanted'"),
        (
            ["--max-prompt-seq-len", "400"],
            "400 tokens ... --max-new-tokens 256",
        ),
        (
            ["--max-new-tokens", "512"],
            "--max-new-tokens: 512 ... 512 positions ... less than 512",
        ),
        (
            ["--reward", '{"name": "f.py:length", "wieght": 2}'],
            "f.py:length ... 'wieght' ... weight?",
        ),
        (["--reward", "{f.py:length"], "--reward-function {f.py:length ... cannot be read"),
    ],
)
def test_input_errors_are_one_line_and_exit_2(folder, model, capsys, words, message):
    Path("text.txt").write_text("A document.\n")
    assert main([model, "--data", "q.jsonl", "--output", "a.jsonl", *words]) == 2
    (line,) = [line for line in capsys.readouterr().err.splitlines() if not line.startswith("note: --data")]
    assert line.startswith("error: ") and line == naming(message)
    assert not Path("a.jsonl").exists()


@pytest.mark.parametrize(
    ("words", "message"),
    [
        ([], "--model: missing ... rlhf sample output/sft --data FILE"),
        (["MODEL"], "--data: missing ... rlhf sample output/sft --data FILE"),
        (["/no/model", "--data", "q.jsonl"], "--model: /no/model: no such folder"),
    ],
)
def test_a_model_and_data_are_needed(words, message, capsys):
    assert main(words) == 2
    assert capsys.readouterr().err == naming(f"error: {message}")


def test_a_model_without_a_cache_of_a_decoder_and_ranks_are_refused(folder, model, capsys, monkeypatch):
    make_t5_folder(folder, num_train=2, num_test=1)
    assert main([str(folder / "t5"), "--data", "q.jsonl"]) == 2
    assert capsys.readouterr().err == naming(f"--model: {folder}/t5 (t5) ... cache")
    for name, value in {"RANK": "1", "WORLD_SIZE": "2"}.items():
        monkeypatch.setenv(name, value)
    assert main([model, "--data", "q.jsonl"]) == 2
    assert capsys.readouterr().err == naming("--output: missing ... 2 ranks")


def test_logits_that_are_not_finite_end_with_2(folder, model, bpe_folder, capsys):
    made = LlamaForCausalLM(tiny_config())
    torch.nn.init.constant_(made.lm_head.weight, 1e38)
    broken = save(made, bpe_folder, folder / "broken")
    assert main([broken, "--data", "q.jsonl", "--max-new-tokens", "2"]) == 2
    assert "its logits are not finite" in capsys.readouterr().err


def test_long_prompts_are_left_out_and_counted(folder, model, capsys):
    write("q.jsonl", {"prompt": "one"}, {"prompt": "one two three four"}, {"prompt": ""})
    rows, shown = sampled(capsys, model, "--max-prompt-seq-len", 16)
    assert [(row["number"], row["prompt"]) for row in rows] == [(1, "one")]
    assert shown == naming("1 dropped ... max_prompt_seq_len (first: q.jsonl:2)")
    assert shown == naming("1 dropped ... empty prompt (first: q.jsonl:3)")
