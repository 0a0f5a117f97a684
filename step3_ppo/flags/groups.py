"""The groups of flags that only stage 3 has: prompts, rollouts, coefficients of its methods."""

from collections.abc import Mapping
from typing import Literal, Self

from pydantic import model_validator

from pipeline.configuration.flag_table import flag
from pipeline.configuration.groups import DataConfig, Group
from pipeline.errors import InputError, counted
from pipeline.generation.options import MAX_SAMPLES, BackendChoice, StopTexts
from pipeline.rewards.functions import RewardFunction, function_of_file
from step3_ppo.flags.methods import METHODS, MethodName

POLICY_LOSSES = ("clipped", "cispo")  # the built-in ones


def refuse_unread(group: Group, reasons: Mapping[str, str]) -> None:
    """Raise ValueError for a flag that is not at its default, with the reason why nothing reads it."""
    for name, reason in reasons.items():
        if getattr(group, name) != type(group).model_fields[name].default:
            raise ValueError(f"{name}: {reason}; leave it out")


class PromptDataConfig(DataConfig):
    """Data"""

    max_prompt_seq_len: int = flag(256, "Tokens of a prompt", ge=1, other_tools="max_prompt_length")
    long_prompts: Literal["drop", "truncate_left"] = flag(
        "drop", "Prompts above max_prompt_seq_len: dropped, or cut on their left"
    )
    unsupervised_data_path: list[str] = flag(
        [],
        "Plain text for the ptx loss; empty: no ptx loss",
        kind="path",
        on_resume="data",
        aliases=("unsupervised_dataset_name",),
        refused={"unsupervised_dataset_config_name": "give --unsupervised-data-path a hub id or a file"},
    )
    unsup_coef: float = flag(27.8, "Weight of the ptx loss (InstructGPT, section 3.4)", ge=0)

    @model_validator(mode="after")
    def _weight_is_of_a_loss(self) -> Self:
        if not self.unsupervised_data_path:
            refuse_unread(self, {"unsup_coef": "only unsupervised_data_path has a ptx loss"})
        return self


class SamplingConfig(Group):
    """Rollout"""

    rollout_batch_size: int = flag(
        0,
        "Responses of a rollout over all GPUs (OpenRLHF's flag of this name counts prompts); 0: one optimizer step's",
        ge=0,
        on_resume="rounding",
        instead_of="generation_batches",
        refused={
            "per_device_mini_train_batch_size": "--per-device-train-batch-size is that of training here: use it, and "
            "--rollout-batch-size for rollouts"
        },
    )
    per_device_generation_batch_size: int = flag(
        16,
        "Prompts sampled at once on a device, up to a rollout's; given by hand without --rollout-batch-size, times "
        "--generation-batches the prompts of its rollout; auto: as many as have memory",
        ge=1,
        on_resume="rounding",
        auto=True,
        other_tools="generation_batch_size",
    )
    generation_batches: int = flag(
        0,
        "Batches of prompts sampled at once that make a device's rollout; 0: as --rollout-batch-size says",
        ge=0,
        on_resume="rounding",
        instead_of="rollout_batch_size",
        aliases=("generation_batch_numbers",),
    )
    num_samples_per_prompt: int = flag(
        1, "Responses sampled for each prompt", ge=1, le=MAX_SAMPLES, other_tools="num_generations rloo_k"
    )
    max_answer_seq_len: int = flag(
        256,
        "Tokens of a response, EOS included",
        ge=1,
        auto_is="256, or 512 where functions alone reward",
        before=256,
        other_tools="max_new_tokens response_length max_completion_length",
    )
    temperature: float = flag(1.0, "Divides the logits of sampling and of every log-probability", gt=0)
    top_p: float = flag(1.0, "Sample from the most likely tokens of this total probability", gt=0, le=1)
    top_k: int = flag(0, "Sample from this many most likely tokens; 0: all", ge=0)
    stop_strings: StopTexts = flag(
        [], "Texts that end a response as an EOS does, with the token that completes one", other_tools="stop"
    )
    generation_engine: BackendChoice = flag(
        "auto",
        "Generation backend; auto: the fastest that knows the model and the device",
        on_resume="rounding",
        ignored=dict.fromkeys(("enable_hybrid_engine", "unpin_actor_parameters"), "the hybrid engine is always on"),
    )
    merge_lora_for_generation: bool = flag(
        True, "Sample from a copy of the weights plus adapters; false: with adapters apart", on_resume="rounding"
    )
    release_inference_cache: bool = flag(
        False,
        "Give the memory of generation (cache, graph, copied weights) back after each rollout; false: only where an "
        "update lacks memory beside it; auto: where the plan says that it will",
        on_resume="free",
        auto=True,
    )
    rollout_weights: Literal["auto", "whole", "streamed"] = flag(
        "auto",
        "The actor under ZeRO-3 while it generates: whole on each GPU, or streamed: a few layers at a time; "
        "auto: whole where it fits",
        on_resume="rounding",
    )
    inference_tp_size: int = flag(1, "GPUs that share the actor's weights in a rollout", ge=1, on_resume="rounding")
    offload_optimizer_during_rollout: bool = flag(
        False, "Optimizer states are in host memory during a rollout; its cache is released after it", on_resume="free"
    )


class PPOCoefficients(Group):
    """PPO"""

    method: MethodName = flag(
        "ppo",
        "How rewards become advantages: ppo learns values beside the policy; grpo and rloo compare the responses to a "
        "prompt, reinforce_pp those of a batch",
    )
    ppo_epochs: int = flag(1, "Passes over the rollouts of one update phase", ge=1, other_tools="num_ppo_epochs")
    policy_loss: str = flag(
        "clipped",
        "PPO's clipped loss; cispo: each token keeps a gradient, its ratio is capped; or FILE.py:NAME, a function of "
        "log-probabilities and advantages",
        kind="path",
    )
    policy_ratio: Literal["token", "sequence"] = flag(
        "token",
        "The probability ratio: of a token, or the geometric mean of its response's (GSPO, published with "
        "loss_aggregation sequence_mean and a policy_clip of about 3e-4)",
    )
    policy_clip: float = flag(0.2, "Clip range of the probability ratio", gt=0, other_tools="cliprange epsilon")
    policy_clip_high: float = flag(0.0, "Clip range above 1 (DAPO: 0.28); 0: as policy_clip", ge=0)
    dual_clip: float = flag(
        0.0, "Ratio above which a token of negative advantage has no gradient, above 1 (3); 0: none", ge=0
    )
    ratio_cap: float = flag(5.0, "cispo: the largest probability ratio", ge=1)
    loss_aggregation: Literal["token_mean", "sequence_mean", "constant"] = flag(
        "token_mean",
        "Mean of the policy loss and its further terms: over all tokens, over responses of the mean of each, or "
        "constant: sums of responses over max_answer_seq_len (Dr. GRPO)",
    )
    off_policy_weights: Literal[
        "auto", "none", "token_truncate", "token_mask", "sequence_truncate", "sequence_mask", "geometric_mask"
    ] = flag(
        "auto",
        "Weigh the policy loss, not its further terms, by the trainer's over the sampler's probability of a token, a "
        "response or its mean token, cut at a cap or 0 beyond limits; auto: token_truncate for adapters that are "
        "merged in 16 bits, else none",
        before="none",
    )
    off_policy_cap: float = flag(2.0, "Largest of these weights", gt=0)
    off_policy_low: float = flag(0.5, "Smallest weight that is no 0, of the kinds with a mask", ge=0)
    off_policy_veto: float = flag(
        0.0, "Leave responses out that have a token whose weight is below this (1e-4); 0: none", ge=0
    )
    value_clip: float = flag(
        0.2,
        "Clip range of the new value around the old one; 0: no clip",
        ge=0,
        needs="a critic",
        other_tools="cliprange_value",
    )
    gamma: float = flag(1.0, "Discount per token", ge=0, le=1)
    gae_lambda: float = flag(
        0.95, "Lambda of generalised advantage estimation", ge=0, le=1, needs="a critic", other_tools="lam"
    )
    returns_lambda: float = flag(
        -1.0, "Lambda of the returns that the critic learns (VC-PPO: 1); -1: gae_lambda", ge=-1, le=1, needs="a critic"
    )
    lambda_alpha: float = flag(
        0.0,
        "Advantages with lambda 1 - 1 / (lambda_alpha x length) for each response, not below 0 (VAPO: 0.05, for long "
        "ones: 256 tokens get 0.92, 64 get 0.69, 20 get 0); 0: gae_lambda",
        ge=0,
        needs="a critic",
    )
    whiten_advantages: bool = flag(
        True, "Advantages get mean 0 and variance 1 over all ranks", other_tools="whiten_rewards"
    )
    scale_by_group: bool = flag(
        True, "grpo: divide by the deviation of the rewards to the same prompt; false: not (Dr. GRPO)"
    )
    replace_equal_groups: bool = flag(
        False,
        "grpo, rloo: prompts whose responses all have the same reward are replaced by the next ones, 3 times, and left "
        "out after that (DAPO)",
        other_tools="dynamic_sampling",
    )
    group_baseline: bool = flag(False, "ppo, reinforce_pp: take the mean reward to the same prompt off first")
    entropy_coef: float = flag(
        0.0,
        "Weight of the entropy of the policy's distributions, which the loss gets less; 0: none",
        ge=0,
        other_tools="entropy_loss_coef entropy_coeff",
    )
    positive_nll_coef: float = flag(
        0.0,
        "Weight of the negative log-likelihood of right responses in the policy's loss (VAPO: 0.1); 0: none",
        ge=0,
    )
    positive_score: float = flag(
        1.0, "positive_nll_coef: a response is right where its reward functions give it this much, weighted and summed"
    )
    kl_coef: float = flag(
        0.1, "Weight of the KL penalty; the start value where it is adaptive", ge=0, other_tools="init_kl_coef beta"
    )
    log_kl: bool = flag(False, "Log objective/kl at kl_coef 0 too, for which the reference is loaded", before=True)
    kl_estimator: Literal["k1", "k2", "k3"] = flag("k1", "Estimator of the KL per token")
    kl_in_loss: bool = flag(False, "Put the KL into the policy loss (k2 or k3) instead of the reward")
    kl_target: float = flag(0.0, "Nats per sequence that an adaptive kl_coef aims at; 0: fixed", ge=0)
    kl_horizon: int = flag(10_000, "Sequences in which the adaptive kl_coef moves by at most a fifth", ge=1)
    old_log_probs: Literal["auto", "trainer", "sampler"] = flag(
        "auto",
        "Whose log-probabilities the KL takes; sampler: no extra pass, one step per rollout; auto: the sampler's "
        "where that is so and its kernels sample as the trainer computes (learning report: within noise)",
    )
    approx_kl_stop: float = flag(0.0, "Skip the rest of an update phase above this KL; 0: never", ge=0)
    reward_clip: float = flag(
        5.0, "A reward model's normalised scores are cut to plus and minus this", gt=0, needs="a reward model"
    )
    missing_eos_penalty: float = flag(
        1.0,
        "Subtracted from the reward of a response that did not end, in deviations of a reward model's scores",
        ge=0,
        auto_is="1, or 0 where functions alone reward",
    )
    normalise_scores: bool = flag(
        True,
        "Use the mean and std of scores that stage 2 stored, else the first rollout's",
        needs="a reward model",
    )
    critic_warmup_steps: int = flag(
        0,
        "First steps in which only the critic learns; rollouts that begin in them have Monte-Carlo returns, with "
        "lambda 1 (VC-PPO)",
        ge=0,
        needs="a critic",
    )
    enable_ema: bool = flag(False, "Keep an exponential moving average of the actor (actor_ema/)")
    ema_decay: float = flag(0.992, "Decay of that average per optimizer step", ge=0, lt=1)

    @property
    def has_reference(self) -> bool:
        """True where the KL to the reference weighs something, or is logged."""
        return bool(self.kl_coef or self.log_kl)

    @property
    def loss_file(self) -> RewardFunction | None:
        """The user's policy loss, not imported; None: a built-in one. Raises InputError for a text that names none."""
        if self.policy_loss in POLICY_LOSSES:
            return None
        return function_of_file(self.policy_loss, "--policy-loss", POLICY_LOSSES)

    @property
    def weighs_off_policy(self) -> bool:
        """True where the loss is weighted; what `auto` is, a run decides before it starts."""
        return self.off_policy_weights not in ("none", "auto")

    def check_steps(self, total: int) -> None:
        """Raise InputError if the critic's warm-up lasts as long as a run of so many steps."""
        if self.critic_warmup_steps >= total:
            raise InputError(
                f"--critic-warmup-steps: got {self.critic_warmup_steps}, and the run has {counted(total, 'step')}: "
                "none would train the policy; give less, or more steps (--max-steps, --num-train-epochs)"
            )

    @model_validator(mode="after")
    def _fits_the_method(self) -> Self:
        if self.group_baseline and METHODS[self.method].compares:
            raise ValueError(f"group_baseline: with method {self.method}: it compares by itself; leave it out")
        if self.policy_loss == "cispo" and (self.policy_clip_high or self.dual_clip):
            name = "policy_clip_high" if self.policy_clip_high else "dual_clip"
            raise ValueError(f"{name}: with policy_loss cispo: it caps ratios at ratio_cap; leave it out")
        if self.kl_target and not self.kl_coef:
            raise ValueError("kl_target: kl_coef, which it moves by factors, is 0; give that too, or leave it out")
        if 0 < self.dual_clip <= 1:
            raise ValueError(f"dual_clip: got {self.dual_clip:g}: a ratio above 1 is right, as 3; 0: none")
        if -1 < self.returns_lambda < 0:
            raise ValueError(f"returns_lambda: got {self.returns_lambda:g}: 0 to 1 is right; -1: gae_lambda")
        if self.off_policy_weights.endswith("_mask") and self.off_policy_low > self.off_policy_cap:
            found = f"got {self.off_policy_low:g}, above off_policy_cap {self.off_policy_cap:g}"
            raise ValueError(f"off_policy_low: {found}: each weight would be 0; give less")
        if self.replace_equal_groups and not METHODS[self.method].compares:
            raise ValueError(f"replace_equal_groups: with method {self.method}: grpo and rloo have it; leave it out")
        if not self.scale_by_group and self.method != "grpo":
            raise ValueError(f"scale_by_group: with method {self.method}: only grpo scales so; leave it out")
        return self

    @model_validator(mode="after")
    def _each_is_read(self) -> Self:
        weights, reasons = self.off_policy_weights, dict[str, str]()
        if METHODS[self.method].compares:
            reasons["gamma"] = f"with method {self.method} all tokens of a response have one advantage"
        if self.policy_loss == "cispo":
            reasons["policy_clip"] = "policy_loss cispo caps ratios at ratio_cap"
        elif self.loss_file is None:
            reasons["ratio_cap"] = "only policy_loss cispo caps ratios"
        if self.lambda_alpha and self.returns_lambda >= 0:
            reasons["gae_lambda"] = "lambda_alpha is the policy's and returns_lambda the critic's"
        if not self.kl_target:
            reasons["kl_horizon"] = "only kl_target has one"
        if not self.enable_ema:
            reasons["ema_decay"] = "only enable_ema has an average"
        if weights == "none":
            reasons |= dict.fromkeys(("off_policy_cap", "off_policy_veto"), "off_policy_weights is none")
        if not weights.endswith("_mask"):
            reasons["off_policy_low"] = "only off_policy_weights with a mask have a lower limit"
        refuse_unread(self, reasons)
        return self

    @model_validator(mode="after")
    def _k1_has_no_gradient(self) -> Self:
        if self.kl_in_loss and self.kl_estimator == "k1":
            why = "which has no useful gradient as a loss (kl_in_loss, which method grpo sets)"
            raise ValueError(f"kl_estimator: got k1, {why}; use k2 or k3, or --kl-in-loss false")
        return self
