"""Tools and environments in files, and episodes that call them."""

from collections.abc import Hashable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from pipeline.data.tool_calls import ToolCall
from pipeline.rewards.functions import function_of_file
from pipeline.rewards.tools import ENVIRONMENT, TOOLS, Tools
from pipeline.rewards.workers import Workers


@contextmanager
def tools_in(file: Path, code: str, names: str = "", environment: str = "", **limits: Any) -> Iterator[Tools]:
    """Write a file of tools, and yield those of these names with the environment of this name in their workers."""
    file.write_text(code, encoding="utf-8")
    functions = [function_of_file(f"{file}:{name}", TOOLS) for name in names.split()]
    of_environment = function_of_file(f"{file}:{environment}", ENVIRONMENT) if environment else None
    with Workers(**{"num_workers": 1, "timeout_s": 20.0} | limits) as workers:
        tools = Tools(functions, of_environment, workers)
        tools.check()
        yield tools


@contextmanager
def episodes(tools: Tools, *names: Hashable, **row: Any) -> Iterator[None]:
    """Begin episodes of one row, and end them."""
    for name in names:
        tools.begin(name, row)
    try:
        yield
    finally:
        for name in names:
            tools.end(name)


def turn(tools: Tools, episode: Hashable, *calls: str | ToolCall, **arguments: Any) -> Any:
    """Texts of the results of one turn's calls with these arguments, or the failure of the episode."""
    asked = [ToolCall(call, arguments) if isinstance(call, str) else call for call in calls]
    results = tools.call(episode, asked).result(30)
    return [one.text for one in results] if isinstance(results, list) else results


def class_of(name: str, reset: str = "return None", more: str = "", before: str = "") -> str:
    """The source of an environment with a tool."""
    return f"class {name}:\n{before}    def reset(self): {reset}\n    def look(self):\n        '''Look.'''\n{more}\n"
