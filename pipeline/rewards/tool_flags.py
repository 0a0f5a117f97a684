"""The flags of tools that a policy calls while it answers, which training, `rlhf reward` and `rlhf chat` have."""

import json
from functools import cache
from typing import Any

from pipeline.configuration.flag_table import flag
from pipeline.configuration.groups import Group
from pipeline.errors import InputError
from pipeline.rewards.functions import RewardFunction, function_of_file
from pipeline.rewards.worker_flags import WorkerFlags, worker_limits

FLAG = "--tools"


class ToolConfig(Group):
    """Tools"""

    tools: list[str] = flag(
        [],
        "Functions that the policy may call while it answers, FILE.py:NAME, with type hints and a docstring; what "
        "they return is not trained on. A call's limits are those of reward functions (--reward-timeout-s)",
    )
    environment: str = flag(
        "",
        "A class, FILE.py:CLASS, of which each response has an instance. The policy may call its public methods; "
        "reset() begins a response, get_reward() rewards it",
        other_tools="environment_factory",
    )
    max_turns: int = flag(
        8,
        "Most turns of a response; the calls of the last one are not made. The limit of a response's tokens holds for "
        "all turns and what tools return together",
        ge=1,
        needs="--tools or --environment",
        other_tools="max_tool_calling_iterations",
    )

    @property
    def functions(self) -> list[RewardFunction]:
        """The tools. Raises InputError: an entry names no function of a file."""
        return [function_of_file(entry, FLAG) for entry in self.tools]

    @property
    def environment_class(self) -> RewardFunction | None:
        """The environment; None without one. Raises InputError: no class of a file."""
        return function_of_file(self.environment, "--environment") if self.environment else None

    @property
    def by_title(self) -> dict[str, RewardFunction]:
        """All code of the user's among them, as messages name it."""
        environment = self.environment_class
        named = {f"tool {one.name}": one for one in self.functions}
        return named | ({} if environment is None else {f"environment {environment.name}": environment})


def schemas_of(config: ToolConfig, limits: WorkerFlags) -> str:
    """Return the JSON schemas of the tools, as a JSON list; "" without tools. Raises InputError: `Tools.check`."""
    described = descriptions(config, limits) if config.by_title else []
    return json.dumps([schema for one in described for schema in one["schemas"]]) if described else ""


def descriptions(config: ToolConfig, limits: WorkerFlags) -> list[dict[str, Any]]:
    """Return the `Tools.descriptions` of the tools, which a process of their own makes once. Raises InputError."""
    contents = tuple(one.digest for one in config.by_title.values())
    return _described(config.model_dump_json(), json.dumps(worker_limits(limits)), contents)


@cache
def _described(config: str, limits: str, contents: tuple[str, ...]) -> list[dict[str, Any]]:
    """Return `descriptions` by the JSON of flags, that of the arguments of `Workers`, and the digests of the files."""
    from pipeline.rewards.tools import Tools
    from pipeline.rewards.workers import Workers

    flags = ToolConfig.model_validate_json(config)
    with Workers(**json.loads(limits)) as workers:
        tools = Tools(flags.functions, flags.environment_class, workers)
        tools.check()
        return tools.descriptions


def check_rewarded(config: ToolConfig, limits: WorkerFlags, *, others: bool) -> None:
    """Raise InputError if nothing rewards responses: `others` is False, and the environment has no `get_reward`."""
    if not (others or any(one["has_reward"] for one in descriptions(config, limits))):
        raise InputError(f"--environment {config.environment}: no get_reward, and nothing else gives rewards")
