"""The methods of stage 3: which models each trains, and its defaults of flags.

Sources: Schulman et al. 2017 (PPO), arXiv 1707.06347; Shao et al. 2024 (GRPO), 2402.03300; Ahmadian et al. 2024 (RLOO),
2402.14740; Hu et al. 2025 (REINFORCE++), 2501.03262; Agarwal et al. 2024 (on-policy distillation), 2306.13649.
"""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any, Literal

from pipeline.configuration.flag_table import AUTO, Layers
from pipeline.configuration.origins import Kind, Origin

MethodName = Literal["ppo", "grpo", "rloo", "reinforce_pp", "distill"]
# Factors of LoRA's default learning rate over that of full training: for PPO, and for the methods without a critic.
# GRPO of all weights learns as much as LoRA of rank 32 at 10 to 50 times its rate with SmolLM2-135M, and at 67 times
# with Qwen2.5-Coder-0.5B, where 20 lag and 167 fall back (benchmarks/reports/gsm8k_lora_qwen_h200_202611.md). PPO of
# SmolLM2-135M learns as much at 50 times, and less at 10 (benchmarks/reports/lora_rates_smollm2_h200_202611.md).
PPO_LORA_FACTOR = 50.0
LORA_FACTOR = 50.0
# Defaults if no reward model scores responses. 256 tokens truncate 57 % of Qwen2.5-0.5B-Instruct's answers to GSM8K.
OF_FUNCTIONS: Mapping[str, Any] = {"missing_eos_penalty": 0.0, "max_answer_seq_len": 512}


@dataclass(frozen=True, slots=True)
class Method:
    """A way to turn rewards into advantages.

    title: its name in logs and model cards.
    has_critic: True = a value model learns beside the policy.
    compares: True = an advantage compares several responses to one prompt.
    has_teacher: True = the policy learns from a teacher's log-probabilities, with or without rewards.
    settings: flag -> its default under this method; other flags have their usual default.
    """

    title: str
    has_critic: bool = False
    compares: bool = False
    has_teacher: bool = False
    settings: Mapping[str, Any] = field(default_factory=dict)


METHODS: Mapping[str, Method] = {
    "ppo": Method("PPO", has_critic=True),
    "grpo": Method(
        "GRPO",
        compares=True,
        settings={
            "num_samples_per_prompt": 8,
            "kl_coef": 0.0,
            "kl_in_loss": True,
            "kl_estimator": "k3",
            "whiten_advantages": False,
        },
    ),
    "rloo": Method(
        "RLOO",
        compares=True,
        settings={"num_samples_per_prompt": 4, "kl_coef": 0.05, "whiten_advantages": False},
    ),
    "reinforce_pp": Method("REINFORCE++", settings={"num_samples_per_prompt": 1, "whiten_advantages": True}),
    "distill": Method(
        "distillation",
        has_teacher=True,
        settings={
            "kl_coef": 1.0,
            "kl_in_loss": True,
            "kl_estimator": "reverse_kl",
            "gamma": 0.0,
            "whiten_advantages": False,
        },
    ),
}
# Flags with a default of some method. A preset gives their values for PPO.
SET_BY_METHODS = frozenset(name for method in METHODS.values() for name in method.settings)


def named_method(layers: Iterable[tuple[Origin, Mapping[str, Any]]]) -> str:
    """Return the method that the layers of given flags name, the strongest layer last; "ppo" by default."""
    given = [str(values["method"]) for _, values in layers if "method" in values]
    return given[-1] if given else "ppo"


def with_defaults(layers: Layers) -> Layers:
    """Add the defaults of the named method as the weakest layers.

    A preset holds values for PPO and its critic, which other methods ignore. `auto` as the strongest value of one of
    OF_FUNCTIONS means that the flag is unset.
    """
    given = {flag: value for _, values in layers for flag, value in values.items()}
    unset = {flag for flag in OF_FUNCTIONS if given.get(flag) == AUTO}
    layers = [
        (origin, {flag: value for flag, value in values.items() if flag not in unset}) for origin, values in layers
    ]
    name = named_method(layers)
    method = METHODS.get(name, METHODS["ppo"])
    below: Layers = [(Origin(Kind.METHOD, name), dict(method.settings))]
    functions = given.get("reward_function") or given.get("environment")
    if (functions or method.has_teacher) and not given.get("reward_model_name_or_path"):
        why = "where functions alone reward" if functions else "without rewards"
        below.append((Origin(Kind.METHOD, f"{name}, {why}"), dict(OF_FUNCTIONS)))
    if not method.has_critic:
        layers = [
            (origin, for_all_methods(values) if origin.kind is Kind.PRESET else values) for origin, values in layers
        ]
    return below + layers


def for_all_methods(preset: Mapping[str, Any]) -> dict[str, Any]:
    """Return a preset's values that hold for every method: of no flag of a critic's, and of none that a method sets."""
    of_critic = ("value_clip", "gae_lambda", "returns_lambda")
    return {
        flag: value
        for flag, value in preset.items()
        if flag not in SET_BY_METHODS and not flag.startswith("critic_") and flag not in of_critic
    }
