"""Reasons why a run cannot have tools that the policy calls while it answers."""

from collections.abc import Sequence

from pipeline.rewards.functions import RewardFunction
from pipeline.rewards.tool_flags import ToolConfig
from step3_ppo.flags.groups import PromptDataConfig, SamplingConfig

METHODS_WITH_TOOLS = ("ppo", "grpo", "rloo")


def reason_against(
    tools: ToolConfig, method: str, sampling: SamplingConfig, data: PromptDataConfig, rewards: Sequence[RewardFunction]
) -> str:
    """Return why a run with these settings cannot have tools, beginning with the flag, or an empty text."""
    if method not in METHODS_WITH_TOOLS:
        return f"method: got {method}, which takes no --tools; {', '.join(METHODS_WITH_TOOLS)} do"
    if sampling.inference_tp_size > 1:
        return "inference_tp_size: with --tools each rank samples by itself, expected 1"
    if data.long_prompts == "truncate_left":
        return "long_prompts: truncate_left would cut the --tools, which stand first; expected drop"
    if tools.environment.rpartition(":")[2] in [one.name for one in rewards]:
        return "environment: a reward function has the same name; rename one"
    return ""
