"""Environments of OpenEnv as tools of a run: stand-ins with its interface, and its own base classes."""

import importlib.util
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from pipeline.data.tool_calls import ToolCall
from pipeline.rewards.functions import function_of_file
from pipeline.rewards.tools import ToolResult, Tools
from pipeline.rewards.workers import Workers

# As OpenEnv's own classes are: an environment in this process returns observations, which have the reward.
STAND_INS = """
from typing import Any
from pydantic import BaseModel, Field

class Action(BaseModel):
    metadata: dict[str, Any] = Field(default_factory=dict)

class Observation(BaseModel):
    done: bool = False
    reward: float | None = None
    metadata: dict[str, Any] = Field(default_factory=dict)

class Environment:
    pass
"""
REAL = """
from openenv.core.env_server.interfaces import Environment
from openenv.core.env_server.types import Action, Observation
from pydantic import Field
"""
GAME = """
from dataclasses import dataclass
from functools import partial
from typing import Literal
from pipeline.rewards.openenv import OpenEnv

class GuessAction(Action):
    '''Guess the hidden number.

    A wrong guess costs a tenth.
    '''

    number: int = Field(description="The guess.")
    mood: Literal["sure", "unsure"] = Field(default="sure", description="How sure.")

class GuessObservation(Observation):
    hint: str = ""

class GuessEnvironment(Environment):
    def reset(self, seed=None, episode_id=None, **more):
        self.hidden = (seed or 0) % 5
        return GuessObservation(hint="Guess from 0 to 4.")

    def step(self, action, timeout_s=None, **more):
        is_right = action.number == self.hidden
        hint = f"right, {action.mood}" if is_right else "more" if action.number < self.hidden else "less"
        return GuessObservation(hint=hint, done=is_right, reward=1.0 if is_right else -0.1)

    @property
    def state(self):
        return self.hidden

class Game(OpenEnv):
    environment = GuessEnvironment
    action = GuessAction

@dataclass
class StepResult:
    observation: dict
    reward: float | None
    done: bool

class Client:
    '''As a client of OpenEnv: its calls are asynchronous, those of `sync()` are not.'''
    def __init__(self, base_url):
        self.base_url, self.count = base_url, 0

    def sync(self):
        return SyncClient(self)

class SyncClient:
    def __init__(self, client):
        self.client = client

    def reset(self):
        return StepResult({"at": self.client.base_url, "count": 0}, None, False)

    def step(self, action):
        self.client.count += action.by
        return StepResult({"at": self.client.base_url, "count": self.client.count}, self.client.count, False)

    def close(self):
        open(__file__ + ".closed", "w").close()

class Add(Action):
    by: int = 2

class Remote(OpenEnv):
    environment = partial(Client, base_url="http://here")
    action = Add
"""
HEADS = ["stand-ins", pytest.param("openenv", marks=pytest.mark.skipif(
    importlib.util.find_spec("openenv") is None, reason="the package openenv-core is not installed"))]  # fmt: skip


@pytest.fixture(scope="module")
def workers() -> Iterator[Workers]:
    with Workers(num_workers=2, timeout_s=60.0, passes=[], memory_bytes=8 << 30) as found:
        yield found


def opened(folder: Path, name: str, workers: Workers, head: str = STAND_INS) -> Tools:
    (folder / "game.py").write_text(head + GAME, encoding="utf-8")
    tools = Tools([], function_of_file(f"{folder}/game.py:{name}", "--environment"), workers)
    tools.check()
    return tools


def results(tools: Tools, episode: int, *arguments: dict[str, Any]) -> list[tuple[str, bool]]:
    found = tools.call(episode, [ToolCall("step", one) for one in arguments]).result()
    assert isinstance(found, list) and all(isinstance(one, ToolResult) for one in found)
    return [(one.text, one.failed) for one in found]


@pytest.mark.parametrize("head", HEADS)
def test_the_fields_of_an_action_are_the_arguments_of_a_tool(head: str, tmp_path: Path, workers: Workers) -> None:
    """Two episodes with seeds of their own at the same time; the rewards of each are summed."""
    tools = opened(tmp_path, "Game", workers, REAL if head == "openenv" else STAND_INS)
    (schema,) = tools.schemas
    properties = {
        "number": {"type": "integer", "description": "The guess."},
        "mood": {"type": "string", "enum": ["sure", "unsure"], "description": "How sure."},
    }
    assert schema["function"]["name"] == "step" and schema["function"]["description"] == "Guess the hidden number."
    assert schema["function"]["parameters"] == {"type": "object", "properties": properties, "required": ["number"]}
    assert [tools.begin(n, {"seed": seed, "other": 1}).result() for n, seed in enumerate((3, 6))] == [
        "Guess from 0 to 4."
    ] * 2
    assert results(tools, 0, {"number": 1}, {"number": 3, "mood": "unsure"}) == [
        ("more", False),
        ("right, unsure", False),
    ]
    assert results(tools, 1, {"number": 4}, {"number": "four"})[0] == ("less", False)
    ((text, failed),) = results(tools, 0, {"number": 3})
    assert failed and text.startswith("Error: ValueError: the episode has ended")
    assert results(tools, 1, {"number": 1}) == [("right, sure", False)]
    assert [tools.end(n).result() for n in range(2)] == [pytest.approx(0.9)] * 2


def test_an_action_of_a_wrong_type_is_the_result_of_the_call(tmp_path: Path, workers: Workers) -> None:
    tools = opened(tmp_path, "Game", workers)
    assert tools.begin(0, {}).result() == "Guess from 0 to 4."
    ((text, failed),) = results(tools, 0, {"number": "four"})
    assert failed and "number" in text and results(tools, 0, {"number": 0}) == [("right, sure", False)]
    assert tools.end(0).result() == 1.0


def test_a_client_is_used_by_its_synchronous_form_and_closed(tmp_path: Path, workers: Workers) -> None:
    """Its results have the reward beside an observation, here of several fields."""
    tools = opened(tmp_path, "Remote", workers)
    assert tools.begin(0, {"prompt": "x"}).result() == '{"at": "http://here", "count": 0}'
    assert results(tools, 0, {}, {"by": 5}) == [
        ('{"at": "http://here", "count": 2}', False), ('{"at": "http://here", "count": 7}', False),
    ]  # fmt: skip
    assert not (tmp_path / "game.py.closed").exists()
    assert tools.end(0).result() == 9.0 and (tmp_path / "game.py.closed").exists()
