"""`/score` and `--reward-model` of `rlhf chat`, and the rows that `/save` writes."""

import io
import os
import sys
from pathlib import Path

import pytest
import torch
from support.messages import naming
from support.scripted_model import SHOWN, scripted_model

from pipeline.data.counts import Counts
from pipeline.data.formats import read_records
from pipeline.data.row_kinds import RowMaker, TokenizationOptions
from pipeline.data.sources import read_rows
from pipeline.data.turns import Message
from pipeline.errors import InputError
from pipeline.inference.answer_scores import AnswerScorer, load_scorer, score_answers
from pipeline.inference.answer_settings import ReplySettings
from pipeline.inference.answers import load_chat_model
from pipeline.inference.chat_session import Conversation
from rlhf import chat


def conversation(path: str, **settings) -> Conversation:
    return Conversation(load_chat_model(path, dtype=torch.float32), ReplySettings(**settings))


def nothing(_: str) -> None:
    pass


@pytest.fixture(autouse=True)
def wide_terminal(monkeypatch) -> None:
    monkeypatch.setenv("COLUMNS", "500")


@pytest.fixture(scope="module")
def scorer(judge) -> AnswerScorer:
    return load_scorer(judge, dtype=torch.float32)


# ---- /save ----


def test_saved_conversations_are_rows_that_stage_1_trains_on(endless, tmp_path, monkeypatch, capsys):
    """Each is appended to the rows that are there, also if their last line has no end."""
    monkeypatch.setenv("HOME", str(tmp_path))
    file = tmp_path / "a talk.jsonl"
    file.write_text('{"prompt": "one", "response": "two"}')
    shell = chat.Shell(conversation(endless, max_new_tokens=3))
    for line in ("hello", "/save ~/a talk.jsonl", "/system Bé brief.", "one\ntwo", "three", "/save ~/a talk.jsonl"):
        shell.execute(line)
    assert f"5 messages appended to {file} as one row" in capsys.readouterr().err
    first = [("user", "hello"), ("assistant", "aba")]
    second = [("system", "Bé brief."), ("user", "one\ntwo"), first[1], ("user", "three"), first[1]]
    records = list(read_records(read_rows(str(file)), counts := Counts()))
    assert [[(turn.role, turn.content) for turn in record.all_turns] for record in records[1:]] == [first, second]
    tokenizer = shell.conversation.chat_model.tokenizer
    maker = RowMaker(tokenizer, TokenizationOptions(max_seq_len=200), counts)
    rows = list(maker.rows(records, RowMaker.sequence))
    trained = [
        tokenizer.decode([token for token, is_trained in zip(row.ids, row.trained, strict=True) if is_trained])
        for row in rows
    ]
    assert counts.lines() == [] and trained == [" two</s>", " aba</s>", " aba</s> aba</s>"]
    assert file.read_text(encoding="utf-8").count("\n") == 3


@pytest.mark.parametrize("name", ["", "talk", "talk.txt", "talk.jsonl.gz", ".jsonl", "folder.jsonl", "pipe.jsonl"])
def test_what_is_no_file_of_rows_is_refused(speaking, tmp_path, monkeypatch, name):
    monkeypatch.chdir(tmp_path)
    Path("talk.txt").write_text("mine")
    Path("folder.jsonl").mkdir()
    os.mkfifo("pipe.jsonl")  # to open it would wait for a reader
    before = sorted(tmp_path.iterdir())
    shell = chat.Shell(conversation(speaking))
    shell.execute("hello")
    with pytest.raises(InputError, match=naming(f"/save ... got {name!r} ... .jsonl")):
        shell.execute(f"/save {name}")
    assert sorted(tmp_path.iterdir()) == before and Path("talk.txt").read_text() == "mine"


def test_a_disk_that_refuses_ends_no_session(speaking, tmp_path, monkeypatch, capsys):
    lines = iter(["hello", f"/save {tmp_path}/gone/talk.jsonl", "/set top_k 7", "/exit"])
    monkeypatch.setattr("builtins.input", lambda prompt: next(lines))
    chat.Shell(conversation(speaking)).run()
    assert capsys.readouterr().err == naming(f"error: {tmp_path}/gone/talk.jsonl: cannot be written")


# ---- /score ----


def expected(talk: Conversation, scorer: AnswerScorer, *, is_ended: bool) -> float:
    *prompt, reply = (Message(**message) for message in talk.messages)
    [score] = score_answers(scorer, [(tuple(prompt), reply.content, is_ended)], batch_size=1)
    return score


def test_a_reply_is_scored_behind_the_whole_conversation_and_as_it_ended(speaking, endless, scorer):
    """The same turns have another score without an end token, and without the turns before them."""
    talk = conversation(speaking)
    talk.start_afresh("Be brief.")
    scores = []
    for question in ("one", "two"):
        talk.say(question, nothing)
        scores.append(talk.score(scorer))
        assert scores[-1] == expected(talk, scorer, is_ended=True) != expected(talk, scorer, is_ended=False)
    assert talk.take_back() == "two" and talk.score(scorer) == scores[0] != scores[1]
    talk = conversation(endless, max_new_tokens=3)
    talk.say("one", nothing)
    assert talk.score(scorer) == expected(talk, scorer, is_ended=False) != expected(talk, scorer, is_ended=True)


def test_a_reply_that_is_not_kept_changes_no_score(speaking, endless, scorer, bpe_folder, tmp_path):
    talk = conversation(speaking)
    talk.say("one", nothing)
    score = talk.score(scorer)
    talk.chat_model = load_chat_model(scripted_model(bpe_folder, tmp_path, "\n", ends=False), dtype=torch.float32)
    assert talk.say("two", nothing).text == "" and talk.score(scorer) == score


def test_turns_that_were_left_out_are_not_scored(scorer, bpe_folder, tmp_path):
    """Replies that the model ended follow one that it did not; only the former are left."""
    path = scripted_model(bpe_folder, tmp_path, " okay", num_positions=64)
    talk = conversation(path, max_new_tokens=1)
    talk.say("question", nothing)
    talk.settings = ReplySettings(max_new_tokens=16)
    assert [talk.say("question", nothing).num_forgotten for _ in range(3)][-1] > 0
    assert talk.score(scorer) == expected(talk, scorer, is_ended=True)


def test_one_question_has_its_score_on_stderr(speaking, judge, scorer, capsys):
    argv = ["--path", speaking, "--temperature", "0", "--prompt", "hi"]
    assert chat.main([*argv, "--reward-model-name-or-path", judge]) == 0
    shown = capsys.readouterr()
    talk = conversation(speaking)
    talk.say("hi", nothing)
    assert (shown.out, shown.err) == (SHOWN + "\n", f"score {talk.score(scorer):.4g}\n")
    assert chat.main(argv) == 0
    assert capsys.readouterr().err == ""


def test_an_empty_reply_has_no_score(judge, scorer, bpe_folder, tmp_path, capsys):
    path = scripted_model(bpe_folder, tmp_path, "\n")
    assert chat.main(["--path", path, "--prompt", "hi", "--reward-model", judge]) == 0
    assert "score" not in capsys.readouterr().err
    shell = chat.Shell(conversation(path), scorer)
    shell.execute("hi")
    shown = capsys.readouterr().err
    assert "an empty reply" in shown and "score" not in shown
    with pytest.raises(InputError, match=naming("/score ... no reply yet")):
        shell.execute("/score")


def test_another_model_than_one_of_rewards_is_refused_before_the_chat_model_is_loaded(speaking, monkeypatch, capsys):
    monkeypatch.setattr("pipeline.inference.answers.load_chat_model", None)
    assert chat.main(["--path", speaking, "--prompt", "hi", "--reward-model", speaking]) == 2
    assert capsys.readouterr().err == naming(f"error: --reward-model: {speaking} has no reward head")


# ---- prompt_toolkit ----


def test_a_pipe_needs_no_prompt_toolkit(speaking, monkeypatch, capsys):
    monkeypatch.setitem(sys.modules, "prompt_toolkit", None)  # its import fails
    monkeypatch.setattr(sys, "stdin", io.StringIO("hi"))
    assert chat.main([speaking, "--temperature", "0"]) == 0
    assert capsys.readouterr().out == SHOWN + "\n"
