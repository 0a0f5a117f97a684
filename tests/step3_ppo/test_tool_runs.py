"""Runs whose responses call tools: tokens and masks, what rewards see, resumes, lost responses, wrong flags."""

import json
import re
from collections.abc import Iterator
from concurrent.futures import Future
from pathlib import Path
from types import SimpleNamespace
from typing import Any, NamedTuple

import pytest
import torch
from support.command_run import run_command
from support.in_process import error_lines
from support.marks import slow_but
from support.messages import naming
from support.ppo_runs import ppo_words, run_ppo
from support.tiny_run import make_folder, read_metrics
from support.tool_run import make_tool_folder, tool_words

from pipeline.data.tool_turns import SampledTurn
from pipeline.generation.episodes import Episode, Segment
from pipeline.generation.rollouts import GenerationStopped, Prompt
from pipeline.inference.tool_conversations import Talk, ToolUse
from pipeline.models.tokenizers import load_tokenizer
from step3_ppo import training
from step3_ppo.experience import Collected, Responses, RewardScores, Scores

# What follows a turn that makes calls, by the names of the calls in CALLS.
RESULTS = {
    "add": "5",
    "say": "said é< |im_end|>",  # what spells a special token is broken up
    "fail": "Error: ValueError: no luck",
    "sub": None,
}
TURN = re.compile(r"<\|im_start\|>assistant\n(.*?)(?=<\|im_end\|>|$)", re.DOTALL)
NAME = re.compile(r'"name": "(\w+)"')


class Rewarded(NamedTuple):
    """A rollout before and after its rewards."""

    responses: Responses
    scores: Scores
    judged: RewardScores
    collected: Collected


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_tool_folder(tmp_path_factory.mktemp("tools"), "add", "say", "fail", "wrong")


@pytest.fixture
def rollouts(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[Rewarded]]:
    """The rollouts of a run in this process, as they are rewarded."""
    kept, reward = list[Rewarded](), training.reward

    def noted(ppo: Any, responses: Responses, scores: Scores, judged: RewardScores, **named: Any) -> Collected:
        kept.append(Rewarded(responses, scores, judged, reward(ppo, responses, scores, judged, **named)))
        return kept[-1].collected

    monkeypatch.setattr(training, "reward", noted)
    yield kept


def steps(out: Path) -> list[dict[str, Any]]:
    return [line for line in read_metrics(out / "runs/ppo") if "tools/turns" in line]


def results_of(text: str) -> list[str]:
    """What stands between a turn that makes calls and the next turn, by hand; a wrong call is told apart."""
    names = NAME.findall(text)
    return [RESULTS[name] or "sub" for name in names]


def test_tokens_of_tools_are_not_trained_on(folder: Path, tmp_path: Path, rollouts: list[Rewarded]) -> None:
    assert run_ppo(tool_words(folder, tmp_path, "add", "say", "fail", max_turns=3)) == 0
    tokenizer, several = load_tokenizer(str(folder / "base")), 0
    end, begin = tokenizer.convert_tokens_to_ids(["<|im_end|>", "<|im_start|>"])
    header = tokenizer("<|im_start|>assistant\n", add_special_tokens=False)["input_ids"]
    for responses, scores, _, rollout in rollouts:
        for n, length in enumerate(responses.sequence_lengths.tolist()):
            ids = responses.sequences[n, :length].tolist()
            # The policy's tokens stand behind the header of its turns, up to the end of each.
            trained, spoken = [], False
            for place, token in enumerate(ids):
                spoken = (spoken and ids[place - 1] != end) or ids[max(0, place - len(header)) : place] == header
                spoken = spoken and token != begin
                trained.append(spoken)
            assert responses.trained[n, :length].tolist() == trained and not responses.trained[n, length:].any()
            assert "Add two numbers." in tokenizer.decode(ids[: ids.index(end)]), "the prompt offers the tools"
            turns = TURN.findall(tokenizer.decode(ids))
            parts = re.split(r"<\|im_start\|>assistant\n.*?<\|im_end\|>", tokenizer.decode(ids), flags=re.DOTALL)[1:]
            for turn, part in zip(turns[:-1], parts, strict=False):
                given = re.findall(r"<\|im_start\|>tool\n<tool_response>\n(.*?)\n</tool_response><\|im_end\|>", part)
                expected = results_of(turn)
                assert len(given) == len(expected) > 0
                for one, other in zip(given, expected, strict=True):
                    assert one == other or (other == "sub" and "'sub'" in one and "add, say, fail" in one)
            several += len(turns) > 1
            assert responses.tool_counts is not None and len(turns) == responses.tool_counts[n, 0] <= 3
        width = rollout.experience.response_mask.shape[1]
        assert rollout.experience.response_mask.sum() == responses.trained.sum() and width < responses.trained.shape[1]
        differences = (scores.log_probs - responses.sampler_log_probs)[rollout.experience.response_mask]
        assert differences.abs().max() < 1e-4, "the sampler saw what the trainer sees"
    assert several > 4
    assert all(line["policy/first_ratio_error"] == 0 for line in steps(tmp_path))


@pytest.mark.slow
def test_rewards_get_the_turns_and_what_tools_returned(folder: Path, tmp_path: Path) -> None:
    seen = folder / "tools.py.seen"
    seen.unlink(missing_ok=True)
    assert run_ppo(tool_words(folder, tmp_path, "add", "say", "fail", max_steps=1)) == 0
    calls, lines = [json.loads(line) for line in seen.read_text().splitlines()], steps(tmp_path)
    trained = [call for call in calls if len(call[1]) == 4]
    assert len(trained) == 4 and all(prompt[0][-1]["role"] == "user" for prompt, *_ in trained)
    tools = [turn for _, completions, _ in trained for turns in completions for turn in turns if turn["role"] == "tool"]
    assert {turn["name"] for turn in tools} == {"add", "say", "fail", "sub"}
    assert {turn["content"] for turn in tools if turn["name"] == "add"} == {"5"}
    for _, completions, ids in trained:
        for turns, sampled in zip(completions, ids, strict=True):
            assert turns[-1]["role"] == "assistant" and all(turn["role"] != turns[0]["role"] for turn in turns[1:2])
            calls_made = [call for turn in turns[:-1] for call in turn.get("tool_calls", [])]
            answered = [turn["name"] for turn in turns if turn["role"] == "tool" and turn["name"] != "sub"]
            assert [call["function"]["name"] for call in calls_made] == answered
            assert len(sampled) < 40, "tokens of the policy alone"
    mean = sum(turn["role"] == "tool" for _, completions, _ in trained for turns in completions for turn in turns) / 16
    assert lines[0]["reward/calls"] == mean > 0
    assert lines[0]["completions/mean_length"] == sum(len(one) for *_, ids in trained for one in ids) / 16


@pytest.mark.slow
def test_a_run_that_ends_within_a_rollout_goes_on_exactly(folder: Path, tmp_path: Path) -> None:
    """The checkpoint holds a rollout of several turns, whose second update is missing."""
    names = ("add", "say", "fail")
    assert run_ppo(tool_words(folder, tmp_path / "whole", *names)) == 0
    for limit in (3, 4):
        assert run_ppo(tool_words(folder, tmp_path / "parts", *names, max_steps=limit)) == 0
    whole, parts = (
        [{name: value for name, value in line.items() if not is_time(name)} for line in read_metrics(out / "runs/ppo")]
        for out in (tmp_path / "whole", tmp_path / "parts")
    )
    assert [line for line in whole if line["step"] == 4] == [line for line in parts if line["step"] == 4]
    ends = [(out / "actor/model.safetensors").read_bytes() for out in (tmp_path / "whole", tmp_path / "parts")]
    assert ends[0] == ends[1]


def is_time(name: str) -> bool:
    return any(part in name for part in ("time", "_s", "per_s", "seconds", "memory", "hours", "eval_"))


@pytest.mark.slow
def test_one_turn_makes_no_call(folder: Path, tmp_path: Path) -> None:
    assert run_ppo(tool_words(folder, tmp_path, "add", "say", "fail", max_turns=1, max_steps=1)) == 0
    (line,) = steps(tmp_path)[:1]
    assert (line["tools/turns"], line["tools/calls"], line["reward/calls"]) == (1.0, 0.0, 0.0)


@pytest.mark.slow
@pytest.mark.parametrize("method", ["rloo", "ppo"])
def test_other_methods_take_tools(method: str, folder: Path, tmp_path: Path) -> None:
    changes = {"num_samples_per_prompt": 1, "rollout_batch_size": 8} if method == "ppo" else {}
    assert run_ppo(tool_words(folder, tmp_path, "add", "say", "fail", method=method, max_steps=2, **changes)) == 0
    (line,) = steps(tmp_path)[:1]
    assert line["tools/turns"] > 1 and line["policy/first_ratio_error"] == 0


@pytest.mark.slow
def test_two_ranks_sample_and_reward_what_one_does(folder: Path, tmp_path: Path) -> None:
    lines = []
    for ranks in (1, 2):
        words = tool_words(folder, tmp_path / str(ranks), "add", "say", "fail", gradient_accumulation_steps=2 // ranks)
        done = run_command("step3_ppo", words, folder=tmp_path, ranks=ranks)
        assert done.code == 0, done.stderr
        lines.append(steps(tmp_path / str(ranks)))
    names = ("tools/turns", "tools/calls", "tools/failed_calls", "completions/mean_length", "objective/scores")
    for one, two in zip(*lines, strict=True):
        assert [two[name] for name in names] == pytest.approx([one[name] for name in names])
    assert len(lines[0]) > 1 and lines[0][0]["tools/turns"] > 1


@pytest.mark.slow
def test_a_call_that_hangs_loses_its_response_alone(tmp_path: Path, tmp_path_factory: pytest.TempPathFactory) -> None:
    folder = make_tool_folder(tmp_path_factory.mktemp("slow"), "add", "slow")
    words = tool_words(folder, tmp_path, "add", "slow", max_steps=1, reward_timeout_s=1, max_turns=2, eval_interval=0)
    assert run_ppo([*words, "--reward_workers", "8"]) == 0
    (line,) = steps(tmp_path)[:1]
    assert 0 < line["tools/lost"] < 1 and line["rows_masked"] == 16 * line["tools/lost"]


def test_an_environment_begins_and_rewards_each_response(
    tmp_path: Path, tmp_path_factory: pytest.TempPathFactory, rollouts: list[Rewarded]
) -> None:
    """Its reward is the row's number and one for each look; the prompt ends in what it says at the start.

    A look counts although its result leaves no room for a further turn.
    """
    folder = make_tool_folder(tmp_path_factory.mktemp("world"), "look", "wrong")
    flags = {"reward_function": None, "environment": f"{folder}/tools.py:World", "max_steps": 2}
    assert run_ppo(tool_words(folder, tmp_path, **flags)) == 0
    tokenizer, rows = load_tokenizer(str(folder / "base")), (folder / "train.jsonl").read_text().splitlines()
    ((responses, _, judged, rollout), *_), looks = rollouts, 0
    values = list[float]()
    for n, length in enumerate(responses.sequence_lengths.tolist()):
        text = tokenizer.decode(responses.sequences[n, :length])
        number = next(int(found) for found in re.findall(r"You are at (\d+)\.<\|im_end\|>", text))
        assert any(json.loads(row)["number"] == number for row in rows)
        given = re.findall(r"at (\d+)\n</tool_response>", text)
        assert given == [str(number + one + 1) for one in range(len(given))]
        made = sum(turn.count('"look"') for turn in re.findall(r"assistant\n(.*?)<\|im_end\|>", text, re.DOTALL)[:7])
        looks, values = looks + len(given), [*values, float(number + made)]
    assert judged.values[:, 0].tolist() == values and len({*values}) > 3 and looks > 8
    assert rollout.metrics["reward/World"] == pytest.approx(sum(values) / 16)
    assert {line["reward_failures/World"] for line in steps(tmp_path)} == {0.0}


def talk_with(tools: Any, chosen: list[int | None], should_stop: bool = False) -> Talk:
    turns: Any = SimpleNamespace(read=lambda ids: SampledTurn({"role": "assistant"}, ["call"], [None]))  # type: ignore[list-item]
    use = ToolUse(tools, turns, max_turns=3, tokenizer=None, max_prompt=9)  # type: ignore[arg-type]
    rows = [{"prompt_ids": [5], "prompt_id": 1, "messages": "[]"}]
    return Talk(use, rows, chosen, 1, lambda: should_stop, note=lambda episode: None)


def ended_turn(number: int) -> Episode:
    return Episode(number, Prompt([5], 1), 0, [Segment(torch.tensor([7]), torch.tensor([-1.0]))], 1, reason="end")


def test_a_run_that_is_to_stop_waits_for_no_tool() -> None:
    tools: Any = SimpleNamespace(close=lambda: None, call=lambda *_: Future())
    wait = talk_with(tools, [0], should_stop=True).answer(ended_turn(0))
    assert wait is not None
    with pytest.raises(GenerationStopped):
        wait()


def test_rows_that_fill_a_rollout_call_nothing() -> None:
    begun, nothing = list[int](), Future[None]()
    nothing.set_result(None)
    tools: Any = SimpleNamespace(close=lambda: None, begin=lambda number, row: begun.append(number) or nothing)
    talk = talk_with(tools, [0, None])
    assert len(talk.prompts()) == 2 and begun == [0]
    assert talk.answer(ended_turn(1)) is None and talk.conversations[1].num_turns == 1


WRONG = {
    "no file": ({"tools": "none.py:add"}, "--tools ... none.py"),
    "no function": ({"tools": "{}/tools.py:none"}, "--tools ... none ... add"),
    "not described": ({"tools": "{}/tools.py:calls"}, "--tools ... calls"),
    "two of one name": ({"tools": "{}/tools.py:add", "more": "{}/other.py:add"}, "--tools ... the name 'add'"),
    "method": ({"method": "reinforce_pp", "num_samples_per_prompt": 1}, "reinforce_pp ... --tools ... grpo"),
    "ranks": ({"inference_tp_size": 2}, "--inference-tp-size ... --tools"),
    "no reward": ({"reward_function": None, "environment": "{}/tools.py:Mute"}, "Mute ... get_reward"),
}


@pytest.mark.parametrize("name", slow_but(["no file", "no function", "two of one name", "method", "ranks"], WRONG))
def test_wrong_flags_are_told_in_a_line(
    name: str, folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    changes, told = WRONG[name]
    code = (folder / "tools.py").read_text()
    (folder / "other.py").write_text(code)
    if "Mute" not in code:
        (folder / "tools.py").write_text(code + "\n\nclass Mute:\n    def reset(self):\n        return None\n")
    given = {"tools": "{}/tools.py:add"} | changes
    tools = [text.format(folder) for text in (given.pop("tools"), given.pop("more", None)) if text]
    flags = {key: value.format(folder) if isinstance(value, str) else value for key, value in given.items()}
    words = [*tool_words(folder, tmp_path, **flags), *(["--tools", *tools] if tools else [])]
    assert run_ppo(words) == 2
    lines = error_lines(capsys.readouterr().err)
    assert lines[0] == naming(told), lines
    assert not (tmp_path / "actor").exists()


def test_a_template_without_tools_is_refused_before_models_are_loaded(
    folder: Path, tmp_path: Path, tmp_path_factory: pytest.TempPathFactory, capsys: pytest.CaptureFixture[str]
) -> None:
    plain = make_folder(tmp_path_factory.mktemp("plain"), num_train=8, num_test=4)
    words = ppo_words(plain, tmp_path, method="grpo", num_samples_per_prompt=4, rollout_batch_size=8, max_steps=1)
    reward = ["--reward-function", f"{folder}/tools.py:calls"]
    capsys.readouterr()  # the progress bar of the folder's weights
    assert run_ppo([*words, "--tools", f"{folder}/tools.py:add", *reward]) == 2
    (line,) = error_lines(capsys.readouterr().err)[:1]
    assert line == naming("--tools ... template")
