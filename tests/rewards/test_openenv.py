"""Environments of OpenEnv as tools of a run: stand-ins with its interface, and its own base classes."""

import importlib.util
import json
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
from support import forks
from support.command_run import run_command
from support.messages import naming
from support.ports import free_port
from support.tiny_run import read_metrics
from support.tool_run import CALL, CALLS, make_tool_folder, tool_words

from pipeline.data.tool_calls import ToolCall
from pipeline.errors import InputError
from pipeline.rewards.functions import function_of_file
from pipeline.rewards.pool import Failure
from pipeline.rewards.tools import ToolResult, Tools
from pipeline.rewards.workers import Workers

# As OpenEnv's own classes are: an environment in this process returns observations, which have the reward.
STAND_INS = """
from typing import Any
from pydantic import BaseModel, ConfigDict, Field

class Action(BaseModel):
    '''Base class for all environment actions.'''
    model_config = ConfigDict(extra="forbid")
    metadata: dict[str, Any] = Field(default_factory=dict)

class Observation(BaseModel):
    done: bool = False
    reward: float | None = None
    metadata: dict[str, Any] = Field(default_factory=dict)

class State(BaseModel):
    step_count: int = 0

class Environment:
    def close(self):
        pass
"""
REAL = """
from openenv.core.env_server.interfaces import Environment
from openenv.core.env_server.types import Action, Observation, State
from pydantic import BaseModel, Field
"""
GAME = r"""
from dataclasses import dataclass
from enum import Enum
from functools import partial
from typing import Literal
from pipeline.rewards.openenv import OpenEnv

class GuessAction(Action):
    '''Guess the hidden number.

    A wrong guess costs a tenth.
    '''

    number: int = Field(description="The guess.\nNote: 0 to 4.\n\nNo more.")
    mood: Literal["sure", "unsure"] = Field(default="sure", description="How sure.")

class GuessObservation(Observation):
    hint: str = ""

class GuessEnvironment(Environment):
    SUPPORTS_CONCURRENT_SESSIONS = True

    def reset(self, seed=None, episode_id=None, **more):
        self.seed, self.hidden, self.rewards = seed, (seed or 0) % 5, []
        return GuessObservation(hint="Guess from 0 to 4.", reward=50.0)  # no step has earned it

    def step(self, action, timeout_s=None, **more):
        self.rewards.append(1.0 if action.number == self.hidden else -0.1)
        is_right = action.number == self.hidden
        hint = f"right, {action.mood}" if is_right else "more" if action.number < self.hidden else "less"
        return GuessObservation(hint=hint, done=is_right, reward=self.rewards[-1])

    @property
    def state(self):
        return State(step_count=len(self.rewards))

    def close(self):
        with open(CLOSED, "a") as file:
            file.write(f"{self.seed} {sum(self.rewards)}\n")

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
        open(CLOSED, "w").close()

class Add(Action):
    by: int = 2

class Remote(OpenEnv):
    environment = partial(Client, base_url="http://here")
    action = Add

class Colour(Enum):
    RED = "red"

class Place(BaseModel):
    row: int = 1

class Seen(Observation):
    observation: Colour = Colour.RED
    places: list[Place] = [Place(), Place(row=2)]
    other: object = slice(1, 2)

class Look(OpenEnv):
    class environment(Environment):
        def reset(self):
            return Seen()

        def step(self, action):
            return Seen(reward=True)

        state = None

    class action(Action):
        pass
"""
# A server of OpenEnv with sessions for two clients, and an environment that is such a client.
SERVER = """
if __name__ == "__main__":
    import sys
    import uvicorn
    from openenv.core.env_server.http_server import HTTPEnvServer
    from fastapi import FastAPI

    app = FastAPI()
    HTTPEnvServer(GuessEnvironment, GuessAction, GuessObservation, max_concurrent_envs=2).register_routes(app)
    uvicorn.run(app, host="127.0.0.1", port=int(sys.argv[1]), log_level="error")
"""
FAR = """
from openenv.core import GenericEnvClient

class Far(OpenEnv):
    environment = partial(GenericEnvClient, base_url="http://127.0.0.1:PORT")
    action = GuessAction
"""
with_openenv = pytest.mark.skipif(
    importlib.util.find_spec("openenv") is None, reason="the package openenv is not installed"
)
HEADS = [STAND_INS, pytest.param(REAL, marks=with_openenv)]
of_heads = pytest.mark.parametrize("head", HEADS, ids=["stand-ins", "openenv"])


@pytest.fixture(scope="module")
def workers() -> Iterator[Workers]:
    with Workers(num_workers=2, timeout_s=60.0, passes=[], memory_bytes=8 << 30) as found:
        yield found


def write_game(file: Path, head: str, more: str = "") -> None:
    """Write the environments; each folder has its own text, as a worker loads a text once, from wherever it stands."""
    file.write_text(f"CLOSED = {str(file.with_name('closed'))!r}\n{head}{GAME}{more}", encoding="utf-8")


def opened(folder: Path, name: str, workers: Workers, head: str = STAND_INS, more: str = "") -> Tools:
    write_game(folder / "game.py", head, more)
    tools = Tools([], function_of_file(f"{folder}/game.py:{name}", "--environment"), workers)
    tools.check()
    return tools


def results(tools: Tools, episode: int, *arguments: dict[str, Any]) -> list[tuple[str, bool]]:
    found = tools.call(episode, [ToolCall("step", one) for one in arguments]).result()
    assert isinstance(found, list) and all(isinstance(one, ToolResult) for one in found)
    return [(one.text, one.failed) for one in found]


def seeds_and_rewards(folder: Path) -> list[tuple[int, float]]:
    """Those of the environments that had a seed and have been closed, in order."""
    lines = (folder / "closed").read_text(encoding="utf-8").splitlines()
    return [(int(seed), float(reward)) for seed, reward in map(str.split, lines) if seed != "None"]


@of_heads
def test_the_fields_of_an_action_are_the_arguments_of_a_tool(head: str, tmp_path: Path, workers: Workers) -> None:
    """Two episodes with seeds of their own at the same time; the rewards of each are summed."""
    tools = opened(tmp_path, "Game", workers, head)
    (schema,) = tools.schemas
    properties = {
        "number": {"type": "integer", "description": "The guess. Note: 0 to 4. No more."},
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
    assert seeds_and_rewards(tmp_path) == [(3, pytest.approx(0.9)), (6, pytest.approx(0.9))]


@of_heads
def test_an_observation_of_several_fields_is_json(head: str, tmp_path: Path, workers: Workers) -> None:
    """As a server would send it; an action without fields or a docstring has its name and no arguments."""
    tools = opened(tmp_path, "Look", workers, head)
    (schema,) = tools.schemas
    assert schema["function"]["description"] == "action" and schema["function"]["parameters"]["properties"] == {}
    seen = '{"observation": "red", "places": [{"row": 1}, {"row": 2}], "other": "slice(1, 2, None)"}'
    assert tools.begin(0, {}).result() == seen and results(tools, 0, {}) == [(seen, False)]
    assert tools.end(0).result() == 1.0


def test_an_episode_that_is_lost_is_closed(tmp_path: Path, workers: Workers) -> None:
    """Another tool, or a reward function, may have failed; a server has few sessions, and its process lives."""
    tools = opened(tmp_path, "Game", workers)
    for number in range(3):
        assert tools.begin(number, {"seed": number}).result() == "Guess from 0 to 4."
    tools._episodes[1].failure = failure = Failure("timed out", "elsewhere")
    assert tools.end(1).result() == failure and seeds_and_rewards(tmp_path) == [(1, 0.0)]
    tools.close()
    limit = time.monotonic() + 20
    while len(seeds_and_rewards(tmp_path)) < 3 and time.monotonic() < limit:
        time.sleep(0.02)
    assert sorted(seeds_and_rewards(tmp_path)) == [(0, 0.0), (1, 0.0), (2, 0.0)]


WRONG = {
    "no environment": ("action = Add", "Wrong ... needs `environment`"),
    "no action": ("environment = GuessEnvironment", "Wrong ... `action`"),
    "no model": ("environment = GuessEnvironment; action = dict", "Wrong ... `action`, its pydantic model"),
    "no type": ("environment = GuessEnvironment; action = Nested", "step ... Place ... type hint"),
}


@pytest.mark.parametrize(("body", "message"), WRONG.values(), ids=WRONG)
def test_a_class_that_is_no_environment_is_refused_at_the_start(
    body: str, message: str, tmp_path: Path, workers: Workers
) -> None:
    more = f"class Nested(Action):\n    place: Place\n\nclass Wrong(OpenEnv):\n    {body}\n"
    with pytest.raises(InputError) as caught:
        opened(tmp_path, "Wrong", workers, more=more)
    assert str(caught.value) == naming(
        f"--environment {tmp_path}/game.py:Wrong: ... {message.replace('Game', 'Wrong')}"
    )


@contextmanager
def server_of(folder: Path) -> Iterator[int]:
    """The port of a server of OpenEnv, in a process of its own."""
    write_game(folder / "server.py", REAL, SERVER)
    command = [sys.executable, "server.py", str(port := free_port())]
    process = subprocess.Popen(command, cwd=folder, env=forks.environment())
    try:
        yield port
    finally:
        process.kill()
        process.wait()


def begun(tools: Tools, episode: int, seed: int) -> str:
    """The first observation of an episode, for which a server may first have to start, or to end another session."""
    limit = time.monotonic() + 60
    while isinstance(text := tools.begin(episode, {"seed": seed}).result(), Failure) and time.monotonic() < limit:
        tools.end(episode).result()
        time.sleep(0.1)
    assert isinstance(text, str), text
    return text


@with_openenv
@pytest.mark.slow
def test_a_client_plays_on_a_server(tmp_path: Path, workers: Workers) -> None:
    """The server has two sessions, and each episode that ends or is lost leaves its own to the next."""
    with server_of(tmp_path) as port:
        tools = opened(tmp_path, "Far", workers, REAL, FAR.replace("PORT", str(port)))
        for number in range(0, 6, 2):
            one, other = number, number + 1
            assert [begun(tools, one, 3), begun(tools, other, 4)] == ["Guess from 0 to 4."] * 2
            assert results(tools, other, {"number": 1}, {"number": 4}) == [("more", False), ("right, sure", False)]
            assert results(tools, one, {"number": 4, "mood": "unsure"}) == [("less", False)]
            ((text, failed),) = results(tools, other, {"number": 4})
            assert failed and text.startswith("Error: ValueError: the episode has ended")
            assert tools.end(other).result() == pytest.approx(0.9)
            tools._episodes[one].failure = failure = Failure("timed out", "elsewhere")
            assert tools.end(one).result() == failure


@of_heads
@pytest.mark.slow
def test_a_run_is_rewarded_by_the_steps_of_each_response(
    head: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its rows have a seed, but for those of the evaluation; an environment writes it and its rewards when closed."""
    monkeypatch.setitem(CALLS, "step", CALL.format("step", '{"number": 1}'))
    folder = make_tool_folder(tmp_path, "step", "wrong")
    rows = [json.loads(line) for line in (folder / "train.jsonl").read_text(encoding="utf-8").splitlines()]
    lines = [json.dumps({"messages": row["messages"], "seed": row["number"] % 3}) for row in rows]
    (folder / "train.jsonl").write_text("\n".join(lines), encoding="utf-8")
    write_game(folder / "game.py", head)
    flags = {"reward_function": None, "environment": f"{folder}/game.py:Game", "max_steps": 1, "eval_interval": 0}
    done = run_command("step3_ppo", tool_words(folder, tmp_path / "out", **flags), folder=tmp_path)
    assert done.code == 0, done.stderr
    line = next(line for line in read_metrics(tmp_path / "out/runs/ppo") if "tools/turns" in line)
    closed = seeds_and_rewards(folder)
    assert len(closed) == 16 and {seed for seed, _ in closed} <= {0, 1, 2} and len({*closed}) > 3
    assert all(reward in (0.0, 1.0) if seed == 1 else reward <= 0 for seed, reward in closed), "1 is right, and ends it"
    assert line["reward/Game"] == pytest.approx(sum(reward for _, reward in closed) / 16)
    assert line["tools/calls"] > line["tools/failed_calls"] > 0


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
    assert not (tmp_path / "closed").exists()
    assert tools.end(0).result() == 9.0 and (tmp_path / "closed").exists()
