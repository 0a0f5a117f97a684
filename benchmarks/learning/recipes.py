"""The recipes that are compared: PPO against length, other methods with as many samples, settings of PPO.

Length is taken out of a reward in two ways: by pairs in which the longer answer is chosen as often as the shorter one,
and by the built-in function `length`, whose slope is the score's own on answers of SFT to one prompt.
"""

from dataclasses import dataclass, field
from typing import Any

from benchmarks.learning.models import balanced_depths
from benchmarks.learning.policies import AS_IT_IS

SAMPLED = "sampled"  # pairs that are the best and the worst of the answers of SFT, by the first proxy
ANSWERS = 8  # to a prompt, where they are compared
COMPARING = "grpo", "rloo"  # methods that compare the answers to a prompt


@dataclass(frozen=True, slots=True)
class Recipe:
    """A way to train.

    proxies: reward models of equal weight; none: it learns from pairs alone.
    length_out: how often their slope is taken off.
    method: of step 3.
    pairs: what a method without rewards learns from: SAMPLED, or a file of pairs by its name.
    steps: how many, over those of the others.
    changes: flags in which it differs.
    sampler_bits: of each weight that the sampler reads; 0: as trained.
    """

    proxies: tuple[str, ...] = ()
    length_out: float = 0.0
    method: str = "ppo"
    pairs: str = ""
    steps: float = 1.0
    changes: dict[str, Any] = field(default_factory=dict)
    sampler_bits: int = 0


KEEPS_LENGTH = "missing EOS 2.0"  # the setting that does with balanced pairs and the middle depth
ADAPTER = {"actor_lora_dim": 64, "actor_lora_learning_rate": 1e-4, "only_optimize_lora": "true"}
TIS = {"off_policy_weights": "token_truncate"}
NO_WEIGHTS = {"off_policy_weights": "none"}
FOUR_SAMPLES = {"num_samples_per_prompt": 4, "per_device_generation_batch_size": 16}  # as many responses
# What may be added to PPO at SFT's length: flags, and bits of the sampler.
PIECES: dict[str, tuple[dict[str, Any], int]] = {
    "LoRA": (ADAPTER | NO_WEIGHTS, 0),
    "LoRA, TIS": (ADAPTER | TIS, 0),
    "sampler of 8 bits": (NO_WEIGHTS | {"old_log_probs": "trainer"}, 8),
    "sampler of 8 bits, TIS": (TIS | {"old_log_probs": "trainer"}, 8),
    "4 samples": (FOUR_SAMPLES, 0),
    "4 samples, per-prompt baseline": (FOUR_SAMPLES | {"group_baseline": "true"}, 0),
    "critic first": ({"critic_warmup_steps": 20}, 0),
    "returns lambda 1": ({"returns_lambda": 1.0}, 0),
    "entropy bonus": ({"entropy_coef": 0.01}, 0),
    "two epochs": ({"ppo_epochs": 2}, 0),
    "two epochs, clip above": ({"ppo_epochs": 2, "policy_clip_high": 0.28}, 0),
}


def recipes(depths: list[int]) -> dict[str, Recipe]:
    """Return the recipes by name; of the proxies those of the least and of the middle depth are used."""
    middle, shallow = balanced_depths(depths)
    proxy, balanced = f"proxy-{middle}", f"balanced-{middle}"
    settings = {f"missing EOS {k}": {"missing_eos_penalty": k} for k in (0.0, 0.5, 2.0)}
    settings |= {f"KL target {kl}": {"kl_target": kl} for kl in (1.0, 2.0, 6.0)}
    return {
        AS_IT_IS: Recipe((proxy,)),
        "length out": Recipe((proxy,), 1.0),
        "length out 1.5 times": Recipe((proxy,), 1.5),
        "balanced pairs": Recipe((balanced,)),
        "balanced pairs, half of the length out": Recipe((balanced,), 0.5),
        "balanced pairs, length out": Recipe((balanced,), 1.0),
        "two proxies, length out": Recipe((proxy, f"proxy-{shallow}"), 1.0),
        # Methods, by the reward model of balanced pairs: as many samples each, but for pairs that people have chosen.
        **{f"{name}, balanced pairs": Recipe((balanced,), method=name) for name in COMPARING},
        "dpo, sampled pairs": Recipe((balanced,), method="dpo", pairs=SAMPLED),
        "dpo, balanced pairs": Recipe(method="dpo", pairs="proxy", changes={"balance_lengths": "true"}),
        "dpo, all pairs": Recipe(method="dpo", pairs="proxy"),
        # Settings of PPO, with two proxies.
        f"balanced pairs, {shallow} layers": Recipe((f"balanced-{shallow}",)),
        **{
            f"{name}, {setting}": Recipe((reward_model,), changes=changes)
            for name, reward_model in {
                "balanced pairs": balanced,
                f"balanced pairs, {shallow} layers": f"balanced-{shallow}",
            }.items()
            for setting, changes in settings.items()
        },
        f"balanced pairs, {KEEPS_LENGTH}, twice the steps": Recipe(
            (balanced,), steps=2.0, changes=settings[KEEPS_LENGTH]
        ),
        **{
            f"balanced pairs, {KEEPS_LENGTH}, {piece}": Recipe(
                (balanced,), changes=settings[KEEPS_LENGTH] | changes, sampler_bits=bits
            )
            for piece, (changes, bits) in PIECES.items()
        },
    }
