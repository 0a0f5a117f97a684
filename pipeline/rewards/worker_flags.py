"""Flags of the processes that call reward functions, which training, `rlhf sample` and `rlhf reward` have."""

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, Self

from pydantic import model_validator

from pipeline.configuration.flag_table import flag
from pipeline.configuration.groups import Group
from pipeline.files import GIB
from pipeline.processes import memory_of_machine
from pipeline.rendezvous import local_size
from pipeline.rewards.functions import RewardFunction

if TYPE_CHECKING:
    from pipeline.rewards.pool import RewardPool


class WorkerFlags(Group):
    """Processes of reward functions"""

    reward_timeout_s: float = flag(30.0, "Time limit of one reward function call in seconds", gt=0, on_resume="free")
    reward_workers: int = flag(2, "Processes per rank that call reward functions", ge=1, on_resume="free")
    reward_env: list[str] = flag(
        [], "Environment variables that reward functions may read although they look like secrets", on_resume="free"
    )

    reward_worker_gib: float = flag(
        0.0, "Memory of each reward process in GiB; 0: half of the machine's, shared by all", ge=0, on_resume="free"
    )

    @model_validator(mode="after")
    def _variables_are_names(self) -> Self:
        if any("=" in name for name in self.reward_env):  # whose value is not shown
            raise ValueError("reward_env: got NAME=VALUE, expected NAME; the value stays in the environment")
        return self


def worker_limits(flags: WorkerFlags) -> dict[str, Any]:
    """Return the arguments of `Workers` for the workers of this rank."""
    share = memory_of_machine() // (2 * flags.reward_workers * local_size())
    return {
        "num_workers": flags.reward_workers,
        "timeout_s": flags.reward_timeout_s,
        "passes": flags.reward_env,
        "memory_bytes": int(flags.reward_worker_gib * GIB) or max(share, GIB),
    }


def reward_pool(flags: WorkerFlags, functions: Sequence[RewardFunction], *, prints_traces: bool = True) -> "RewardPool":
    """Return a pool with processes of its own, none of which is started yet; `prints_traces` as in `RewardPool`."""
    from pipeline.rewards.pool import RewardPool

    return RewardPool(functions, prints_traces=prints_traces, **worker_limits(flags))
