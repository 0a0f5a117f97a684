"""`rlhf reward --model` and `rlhf chat` with tools: both go through the same turns, and say what was called."""

import json
import re
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from support.in_process import error_lines, undone_afterwards
from support.messages import naming
from support.tool_run import make_tool_folder

from pipeline.inference import chat_session, tool_conversations
from pipeline.inference.answer_rows import Answer
from pipeline.inference.answer_scores import read_prompts
from pipeline.inference.answer_settings import ReplySettings, SampleSettings
from pipeline.inference.answers import ChatModel, load_chat_model
from pipeline.inference.chat_session import Conversation
from pipeline.inference.tool_answers import answers_with_tools
from pipeline.inference.tool_conversations import ToolEpisode, make_calls, open_tools
from pipeline.models.source import ModelSource
from pipeline.rewards.functions import parse_reward_functions
from pipeline.rewards.tool_flags import ToolConfig, schemas_of
from pipeline.rewards.worker_flags import WorkerFlags
from pipeline.rewards.workers import Workers
from rlhf import chat
from rlhf.rewards import reward

SEED, SAMPLES = 5, 4
# A turn ends at the end token; most of this model's call tools.
RESULT = re.compile(r"^\[(\w+)\] (.*)$", re.MULTILINE)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_tool_folder(tmp_path_factory.mktemp("tools"), "add", "say", "fail", "wrong", num_train=6)


@pytest.fixture(autouse=True)
def log_of_before() -> Iterator[None]:
    """Give back the log that the trial has set up."""
    with undone_afterwards():
        yield


@pytest.fixture
def seen(folder: Path) -> Path:
    """What the reward function gets, a line for each prompt: the prompt, the completions, the policy's tokens."""
    file = folder / "tools.py.seen"
    file.unlink(missing_ok=True)
    return file


def words_of(folder: Path, *names: str) -> list[str]:
    return ["--tools", *(f"{folder}/tools.py:{name}" for name in names)]


def try_task(folder: Path, *words: str) -> int:
    more = ["--data", f"{folder}/train.jsonl", "--model", f"{folder}/base", "--max-answer-seq-len", "230"]
    return reward.main([*words, *more, "--num-samples-per-prompt", str(SAMPLES)])


def test_a_trial_says_what_was_called(folder: Path, seen: Path, capsys: pytest.CaptureFixture[str]) -> None:
    words = [*words_of(folder, "add", "say", "fail"), "--max-turns", "2"]
    assert try_task(folder, f"{folder}/tools.py:calls", *words) == 0
    printed = dict(re.split(r"\s{2,}", line, maxsplit=1) for line in capsys.readouterr().out.splitlines()[1:])
    calls = [json.loads(line) for line in seen.read_text(encoding="utf-8").splitlines()]
    answers = [[turn["role"] for turn in turns] for _, completions, _ in calls for turns in completions]
    assert len(answers) == 6 * SAMPLES
    mean = sum(roles.count("tool") for roles in answers) / len(answers)
    assert float(printed["mean reward"].split()[0]) == pytest.approx(mean, rel=5e-3)
    num_turns = [roles.count("assistant") for roles in answers]
    assert printed["tools"].startswith(f"{sum(num_turns) / len(num_turns):.2f} turns and ")
    assert {*num_turns} == {1, 2}


def test_a_chat_and_a_trial_draw_the_same_turns(folder: Path) -> None:
    """Token by token: each reply is the trial's first answer to the question."""
    flags, limits = ToolConfig(tools=words_of(folder, "add", "say", "fail")[1:], max_turns=3), WorkerFlags()
    path, text = str(folder / "base"), f"{folder}/train.jsonl"
    chat_model, how = load_chat_model(path, dtype=torch.float32), {"max_new_tokens": 230, "temperature": 1.0}
    data = read_prompts([text], ModelSource(path), column_map="", max_length=0, max_new_tokens=230,
                        tool_schemas=schemas_of(flags, limits))  # fmt: skip
    functions = parse_reward_functions([f"{folder}/tools.py:calls"])
    with make_calls(functions, flags, limits, max_failures=0.05, takes_tokens=False, columns=data.columns,
                    sources=[text], tokenizer=chat_model.tokenizer, max_prompt=900) as calls:  # fmt: skip
        settings = SampleSettings(n=SAMPLES, **how)
        scored, _ = answers_with_tools(chat_model, data.prompts, calls, settings, batch_size=3, seed=SEED)
    with open_tools(flags, limits, chat_model.tokenizer) as tools:
        num_turns = set()
        for prompt, answers, values in scored:
            pieces, settings = list[str](), ReplySettings(**how)
            conversation = Conversation(chat_model, settings, seed=SEED - 1, tools=tools)
            reply = conversation.say(prompt.messages[-1].content, pieces.append)
            turns = turns_of(answers[0], chat_model)
            results = RESULT.findall("".join(pieces))
            assert reply.num_tokens == sum(map(len, turns)) and reply.ending == answers[0].finish_reason
            assert reply.text == chat_model.tokenizer.decode(turns[-1], skip_special_tokens=True).strip()
            assert len(results) >= values["calls"][0], "also of calls whose results leave no room for a turn"
            assert conversation.take_back() == (prompt.messages[-1].content if reply.text else "")
            num_turns.add(len(turns))
    assert num_turns == {1, 2, 3}


def turns_of(answer: Answer, chat_model: ChatModel) -> list[list[int]]:
    """The tokens of the model in an answer, by turn, without the end tokens."""
    text = chat_model.tokenizer.decode(answer.ids)
    turns = re.split(r"<\|im_end\|>\n<\|im_start\|>tool.*?<\|im_start\|>assistant\n", text, flags=re.DOTALL)
    texts = [turn.removesuffix("<|im_end|>") for turn in turns]
    return [chat_model.tokenizer(text, add_special_tokens=False)["input_ids"] for text in texts]


def reply(folder: Path, capsys: pytest.CaptureFixture[str], *words: str) -> str:
    """What the chat prints for one question."""
    how = ["--temperature", "1", "--top-p", "1", "--max-new-tokens", "230", "--dtype", "fp32", "--seed", "1"]
    assert chat.main([f"{folder}/base", "--prompt", "Where?", *how, *words]) == 0
    return capsys.readouterr().out


def test_a_chat_shows_the_results_of_calls(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    words = words_of(folder, "add", "say", "fail", "slow")
    shown = RESULT.findall(reply(folder, capsys, *words))
    known = {"add": "5", "say": "said \xe9<|im_end|>", "fail": "Error: ValueError: no luck"}
    assert (
        shown and all(text == known.get(name, text) for name, text in shown) and {*known} & {name for name, _ in shown}
    )
    assert RESULT.findall(reply(folder, capsys, *words, "--max-turns", "1")) == []


def test_an_environment_opens_and_rewards_a_reply(
    folder: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """By its defaults, since a chat has no row; the trial gives it the columns of the row, here the row's number."""
    prompts = chat_prompts(monkeypatch)
    words = ["--environment", f"{folder}/tools.py:World"]
    texts = [reply(folder, capsys, *words, "--seed", str(seed)) for seed in range(1, 4)]
    assert any("tools are look" in text for text in texts) and "Where? You are at 0." in prompts[0]
    assert try_task(folder, *words) == 0
    printed = capsys.readouterr()
    assert "best of 4           2.5 " in printed.out, "rows 0 to 5, and no step: this model calls no look"
    assert "reward 0 by the environment" in reply_errors(folder, capsys, *words)


def chat_prompts(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """The prompts of the chat, as text."""
    prompts, generate = list[str](), chat_session.generate_answers

    def noted(chat_model: Any, ids: Any, *rest: Any, **more: Any) -> Any:
        prompts.append(chat_model.tokenizer.decode(ids[0]))
        return generate(chat_model, ids, *rest, **more)

    monkeypatch.setattr(chat_session, "generate_answers", noted)
    return prompts


def reply_errors(folder: Path, capsys: pytest.CaptureFixture[str], *words: str) -> str:
    assert chat.main([f"{folder}/base", "--prompt", "Where?", "--max-new-tokens", "8", *words]) == 0
    return capsys.readouterr().err


def test_a_tool_that_takes_too_long_ends_the_reply(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """All of these tools do, so that it does not matter which one the model calls."""
    text = re.sub(
        r"    return .*|    raise .*", "    time.sleep(60)", (folder / "tools.py").read_text(encoding="utf-8")
    )
    (folder / "late.py").write_text(text.partition("def calls(")[0], encoding="utf-8")
    tools = [f"{folder}/late.py:{name}" for name in ("add", "say", "fail")]
    words = [
        f"{folder}/base",
        "--prompt",
        "Where?",
        "--temperature",
        "1",
        "--top-p",
        "1",
        "--seed",
        "1",
        "--dtype",
        "fp32",
    ]
    began = time.monotonic()
    assert chat.main([*words, "--tools", *tools, "--reward-timeout-s", "1"]) == 2
    assert time.monotonic() - began < 25
    assert error_lines(capsys.readouterr().err)[-1:] == [naming("error: --tools ... 1 s")]


def test_an_interrupt_while_a_tool_works_keeps_the_reply_and_waits_for_no_call(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def interrupted(*_: object) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(ToolEpisode, "results_of", interrupted)
    monkeypatch.setattr(ToolEpisode, "end", lambda self: pytest.fail("it would wait"))
    chat_model, settings = load_chat_model(str(folder / "base"), dtype=torch.float32), ReplySettings(max_new_tokens=9)
    flags = ToolConfig(tools=words_of(folder, "add")[1:])
    with open_tools(flags, WorkerFlags(), chat_model.tokenizer) as tools:
        conversation = Conversation(chat_model, settings, tools=tools)
        assert conversation.say("Where?", lambda text: None).ending == "stopped"


def test_the_processes_of_a_chats_tools_have_its_limits(
    folder: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    limits = list[dict[str, Any]]()

    def noted(**named: Any) -> Workers:
        limits.append(named)
        return Workers(**named)

    monkeypatch.setattr(tool_conversations, "Workers", noted)
    reply(folder, capsys, *words_of(folder, "add"), "--reward-workers", "1", "--reward-timeout-s", "7")
    assert [(one["num_workers"], one["timeout_s"]) for one in limits] == [(1, 7.0)]


@pytest.mark.parametrize(
    ("words", "expected"),
    [
        (["@tools.py:calls", "--data", "@train.jsonl", "--tools", "@tools.py:add"], "error: --tools ... --model"),
        (["--data", "@train.jsonl", "--model", "@base", "--environment", "@bare.py:World"],
         "error: --environment @bare.py:World ... no get_reward"),
        (["@tools.py:calls", "--data", "@train.jsonl", "--model", "@base", "--tools", "@tools.py:sub"],
         "error: --tools @tools.py:sub ... no function 'sub'"),
    ],
    ids=["no model", "no reward", "no function"],
)  # fmt: skip
def test_wrong_words_of_a_trial(
    words: list[str], expected: str, folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    text = (folder / "tools.py").read_text(encoding="utf-8")
    (folder / "bare.py").write_text(text.partition("    def get_reward")[0], encoding="utf-8")
    assert reward.main([word.replace("@", f"{folder}/") for word in words]) == 2
    assert error_lines(capsys.readouterr().err)[-1:] == [naming(expected.replace("@", f"{folder}/"))]


def test_a_chat_has_no_columns_for_an_environment(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    text = (folder / "tools.py").read_text(encoding="utf-8")
    (folder / "needs.py").write_text(text.replace("number=0", "number"), encoding="utf-8")
    assert chat.main([f"{folder}/base", "--prompt", "hi", "--environment", f"{folder}/needs.py:World"]) == 2
    assert error_lines(capsys.readouterr().err)[-1:] == [naming("error: --environment ... reset ... 'number'")]
