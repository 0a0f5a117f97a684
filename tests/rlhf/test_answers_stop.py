"""Stop strings of `rlhf chat` and `rlhf compare`: by the sessions of rollouts, and by transformers' `generate`."""

import io
import json
import sys
from typing import Any

import pytest
import torch
from support.messages import naming
from support.scripted_model import scripted_model

from pipeline.inference.answer_settings import AnswerSettings, ReplySettings
from pipeline.inference.answers import generate_answers, load_chat_model, only_transformers
from pipeline.inference.chat_session import Conversation
from rlhf import chat, compare
from rlhf.chat import Shell

PROMPTS = [[9, 8, 7, 6, 5, 4], [30], [40, 41, 42]]
TRANSFORMERS: dict[str, dict[str, Any]] = {
    "penalty": {"repetition_penalty": 1.0001},
    "two answers": {"repetition_penalty": 1.0001, "temperature": 1.5, "num_return_sequences": 2},
}


def cut(ids: tuple[int, ...], stop: list[str], tokenizer: Any) -> tuple[tuple[int, ...], bool]:
    """The shortest beginning that contains a stop string, and whether there is one."""
    for number in range(1, len(ids) + 1):
        if any(one in tokenizer.decode(ids[:number]) for one in stop):
            return ids[:number], True
    return ids, False


@pytest.mark.parametrize("how", [{}, *TRANSFORMERS.values()], ids=["session", *TRANSFORMERS])
def test_answers_are_those_without_stop_strings_cut_by_a_loop(how: dict[str, Any], rambling: str) -> None:
    """Of a batch, some of whose answers go on; what a prompt ends with is no beginning of a stop string."""
    chat_model = load_chat_model(rambling, dtype=torch.float32)
    assert only_transformers(chat_model, AnswerSettings(**how)) is bool(how)
    whole = generate_answers(chat_model, PROMPTS, AnswerSettings(max_new_tokens=16, **how), seed=3)
    tokenizer = chat_model.tokenizer
    text = tokenizer.decode(whole[0][0].ids)
    both = tokenizer.decode(PROMPTS[1][-1:]) + tokenizer.decode(whole[1][0].ids[:1])
    stop = [text[len(text) // 2 :][:3], both]
    found = generate_answers(chat_model, PROMPTS, AnswerSettings(max_new_tokens=16, stop_strings=stop, **how), seed=3)
    ended = set()
    for mine, theirs in zip(sum(found, []), sum(whole, []), strict=True):
        ids, is_stopped = cut(theirs.ids, stop, tokenizer)
        assert (mine.ids, mine.finished) == (ids, is_stopped or theirs.finished)
        assert mine.text == tokenizer.decode(ids, skip_special_tokens=True).strip()
        ended.add(is_stopped)
    assert ended == {True, False}


def test_beams_end_with_a_stop_string(endless: str) -> None:
    chat_model = load_chat_model(endless, dtype=torch.float32)
    settings = AnswerSettings(max_new_tokens=9, num_beams=2, stop_strings=["ba"])
    [[answer]] = generate_answers(chat_model, [[70]], settings, seed=0)
    assert (answer.text, answer.finished) == ("aba", True)


@pytest.mark.parametrize("penalty", ["1", "1.0001"])
def test_a_reply_ends_with_the_string_which_is_a_part_of_it(
    penalty: str, endless: str, monkeypatch: pytest.MonkeyPatch, capsys: Any
) -> None:
    monkeypatch.setattr(sys, "stdin", io.StringIO("hello\n"))
    words = ["--temperature", "0", "--max-new-tokens", "9", "--repetition-penalty", penalty]
    assert chat.main([endless, *words, "--stop-strings", "x", "ba"]) == 0
    assert capsys.readouterr().out == "aba\n"


def test_a_conversation_says_that_the_reply_has_ended_and_a_setting_changes_it(endless: str, capsys: Any) -> None:
    settings = ReplySettings(max_new_tokens=9, stop_strings=["ba"])
    talk = Conversation(load_chat_model(endless, dtype=torch.float32), settings)
    reply = talk.say("hello", lambda piece: None)
    assert (reply.text, reply.ending, reply.num_tokens) == ("aba", "end", 3)
    shell = Shell(talk)
    shell.set("stop_strings b a")
    assert talk.settings.stop_strings == ["b a"] and "stop_strings ['b a']" in capsys.readouterr().err
    shell.set("stop_strings")
    assert talk.settings.stop_strings == [] and "stop_strings" not in capsys.readouterr().err
    assert talk.say("hello", lambda piece: None).ending == "limit"


def test_compared_answers_are_finished(endless: str, bpe_folder: Any, tmp_path: Any, capsys: Any) -> None:
    other = scripted_model(bpe_folder, tmp_path / "other", " no", ends=False)
    (tmp_path / "prompts.txt").write_text("one\n")
    words = ["--prompts", str(tmp_path / "prompts.txt"), "--max-new-tokens", "5", "--output", str(tmp_path / "out")]
    for stop in ([], ["ba"]):
        assert compare.main([endless, other, *words, *(["--stop-strings", *stop] if stop else [])]) == 0
        result = json.loads((tmp_path / "out.json").read_text())
        assert [one["finished_share"] for one in result["models"]] == [float(bool(stop)), 0.0]
        assert result["settings"].get("stop_strings", []) == stop
    assert result["prompts"][0]["answers"]["A"][0]["text"] == "aba"


@pytest.mark.parametrize("program", [chat, compare])
def test_an_empty_string_is_refused(program: Any, endless: str, capsys: Any) -> None:
    assert program.main([endless, endless, "--stop-strings", "a", ""][program is chat :]) == 2
    (line,) = [line for line in capsys.readouterr().err.splitlines() if line.startswith("error: ")]
    assert line == naming("--stop-strings ... '' (command line)")
